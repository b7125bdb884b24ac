"""Cycles of a kernel on a simulated TITAN X Pascal (sm_61): ``python tools/simulate.py GPGPU-SIM-FOLDER``.

Runs the package's own launches, as PTX by the NVRTC of the test extra, on one multiprocessor of GPGPU-Sim, and compares
the results with float64; what packs for 8-bit attention runs in the emulation of the tests. Printed are the cycles for
two numbers of keys (of queries, where the tiles that stay are keys). From their difference follows the share of the
float32 peak in the steady state; for 8-bit attention also how many times the float32 kernel's that is. PTX runs as it
is written, by the simulator's own allocation of registers: what ptxas would reorder is not seen. Designs can be
compared, a card's speed is not foretold. Some minutes per run.

The folder holds a built checkout of github.com/gpgpu-sim/gpgpu-sim_distribution (4.0, commit 90ec3399) with its
``build`` folder. It builds with g++ 12, flex, bison and makedepend, and needs no GPU and no nvcc. The headers are those
of CUDA 11: the wheel nvidia-cuda-runtime-cu11, crt/ of the wheel nvidia-cuda-nvcc-cu11, and cudaProfiler.h of any CUDA.
``CUDA_INSTALL_PATH`` is a folder with ``include`` and a ``bin/nvcc`` that prints
``Cuda compilation tools, release 11.0, V11.0.1``.
For a bison newer than 3.0, the rule of ``ptx_parser_decode.def`` in ``src/cuda-sim/Makefile`` must leave out the lines
with ``YY`` and the comments.
For ``int8`` apply ``tools/simulator/dp4a.patch`` before: the simulator has no dp4a, and its prmt is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fused as tool  # noqa: E402
from attn_support.fused.emulation import emulate  # noqa: E402

from pascal_attn_core.call import check_call  # noqa: E402
from pascal_attn_core.fused.code.source import DTYPES, HEAD_DIMS, Variant, source  # noqa: E402
from pascal_attn_core.fused.launch import Launch  # noqa: E402
from pascal_attn_core.fused.launch.backward import backward_launches  # noqa: E402
from pascal_attn_core.fused.launch.forward import forward_launches  # noqa: E402
from pascal_attn_core.fused.launch.int8 import int8_launches  # noqa: E402
from pascal_attn_core.fused.launch.plan import Plan, plan_call, variant_of  # noqa: E402
from pascal_attn_core.fused.launch.repeat import addresses  # noqa: E402
from pascal_attn_core.fused.trust.verify import all_gradients  # noqa: E402
from pascal_attn_core.reference import reference_sdpa  # noqa: E402
from tools.models.shares import KERNELS  # noqa: E402

DRIVER = Path(__file__).parent / "simulator" / "driver.cc"
CARD = Path("configs") / "tested-cfgs" / "SM6_TITANX"
KINDS = ("forward", "grad_query", "grad_key_value", "grad_all", "int8")
RULES: dict[str, Any] = {}  # --causal: the last query sees the last key
LANES = 128  # multiply-adds per cycle of a multiprocessor
# One multiprocessor, with a network that needs no file for it, and shuffles that take a plausible time (as they are,
# 32 cycles, the simulator runs out of its pipeline).
_SETTINGS = {
    "gpgpu_n_clusters": "1",
    "network_mode": "2",
    "ptx_opcode_latency_int": "4,13,4,5,145,12",
    "enable_ptx_file_line_stats": "0",
}


def objects(folder: Path) -> Path:
    """Where the simulator's object files are."""
    found = sorted(folder.glob("build/gcc-*/cuda-*/release"))
    if not (folder / CARD).is_dir() or not found or not list(found[0].glob("libcuda/*.o")):
        sys.exit(
            f"{folder} is no built checkout of GPGPU-Sim: it has no {CARD} or no build/gcc-*/cuda-*/release\n{__doc__}"
        )
    return found[0]


def build_driver(folder: Path, library: Path) -> None:
    """The simulator as one library."""
    built = objects(folder)
    version = built.parent.name.removeprefix("cuda-")
    headers = os.environ.get("CUDA_INSTALL_PATH", "")
    if not (Path(headers) / "include" / "cuda.h").exists():
        sys.exit("CUDA_INSTALL_PATH must be the folder that the simulator was built against (include/cuda.h in it)")
    folders = [Path(headers) / "include", built, built / "cuda-sim", folder / "src", folder / "libcuda"]
    parts = ("libcuda", "cuda-sim", "cuda-sim/decuda_pred_table", "gpgpu-sim", "gpuwattch", "gpuwattch/cacti",
             "intersim2", ".")  # fmt: skip
    command = ["g++", "-O1", "-std=c++11", "-fPIC", "-shared", "-w", f"-DCUDART_VERSION={version}", "-DTRACING_ON=1",
               "-iquote", str(folder), *(f"-I{path}" for path in folders), str(DRIVER),
               *(str(path) for part in parts for path in sorted((built / part).glob("*.o"))),
               "-lm", "-lz", "-lpthread", "-Wl,-Bsymbolic", "-o", str(library)]  # fmt: skip
    subprocess.run(command, check=True)


def write_settings(folder: Path, into: Path) -> None:
    for path in (folder / CARD).iterdir():
        shutil.copy(path, into)
    config = into / "gpgpusim.config"
    text = config.read_text()
    for name, value in _SETTINGS.items():
        text = re.sub(rf"(?m)^-{name} .*", f"-{name} {value}", text)
    config.write_text(text)


def compile_ptx(text: str, macros: dict[str, object]) -> str:
    library = ctypes.CDLL(tool.nvrtc(61).path)
    options = ["--std=c++14", "-w", "--gpu-architecture=compute_61", *(f"-D{k}={v}" for k, v in macros.items())]
    passed = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    for failed in (
        library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"pascal_attn.cu", 0, None, None),
        library.nvrtcCompileProgram(program, len(options), passed),
        library.nvrtcGetPTXSize(program, ctypes.byref(size)),
    ):
        if failed:
            raise RuntimeError(f"NVRTC error {failed}")
    ptx = ctypes.create_string_buffer(size.value)
    library.nvrtcGetPTX(program, ptx)
    return ptx.value.decode()


def for_simulator(ptx: str) -> str:
    """The PTX in the words that the simulator knows: an older version's, shuffles without a predicate (which it gets
    wrong without a word), parameters by their name instead of through a register."""
    ptx = re.sub(r"\.version \d+\.\d+", ".version 7.7", ptx)
    ptx = re.sub(r"(shfl\.sync\.\w+\.b32\s+%r\d+)\|%p\d+", r"\1", ptx)
    places: dict[str, tuple[str, int]] = {}  # register -> parameter, offset
    lines = []
    for line in ptx.splitlines():
        if line.strip().startswith((".file", ".loc", "//")):
            continue
        moved = re.match(r"\s*mov\.[bu]64\s+(%rd\d+),\s+(\w+_param_\d+|%rd\d+);", line)
        added = re.match(r"\s*add\.s64\s+(%rd\d+),\s+(%rd\d+),\s+(\d+);", line)
        if moved and "_param_" in moved[2]:
            places[moved[1]] = moved[2], 0
        elif moved and moved[2] in places:
            places[moved[1]] = places[moved[2]]
        elif added and added[2] in places:
            name, offset = places[added[2]]
            places[added[1]] = name, offset + int(added[3])
        else:
            lines.append(re.sub(r"(ld\.param[^;]*\[)(%rd\d+)(?:\+(-?\d+))?\]", lambda m: _by_name(m, places), line))
    return "\n".join(lines) + "\n"


_WRITES = re.compile(r"(?m)^\s*(?:@!?%p\d+\s+)?(?!st\.|bar\.|bra\b)[a-z][\w.]*\s+(\{[^}]*\}|%\w+)")
_MOVE = re.compile(r"(?m)^\s*mov\.[bufs]32\s+(%[rf]\d+), (%[rf]\d+);\n")


def without_moves(ptx: str) -> str:
    """The PTX without moves that ptxas makes no instructions of, such as of a float's bits to an integer; as loads from
    ordinary memory."""
    return "".join(map(_without_moves, re.split(r"(?m)^(?=\.visible \.entry)", ptx.replace(".global.nc", ".global"))))


def _without_moves(function: str) -> str:
    """A kernel without the moves between registers that are written once each."""
    times = Counter(register for write in _WRITES.finditer(function) for register in re.findall(r"%\w+", write[1]))
    same = {to: of for to, of in _MOVE.findall(function) if times[to] == times[of] == 1}

    def first(register: re.Match[str]) -> str:
        name = register[0]
        while name in same:
            name = same[name]
        return name

    return re.sub(r"%[rf]\d+\b", first, _MOVE.sub(lambda move: "" if move[1] in same else move[0], function))


def _by_name(load: re.Match[str], places: dict[str, tuple[str, int]]) -> str:
    name, offset = places[load[2]]
    return f"{load[1]}{name}+{offset + int(load[3] or 0)}]"


class Work(NamedTuple):
    """A launch, the tensors that its parameters point to, what it writes, and that in float64."""

    launch: Launch
    tensors: list[Tensor]
    written: list[Tensor]
    expected: list[Tensor]


def forward_work(variant: Variant, keys: int) -> Work:
    """As many tiles of query rows as one multiprocessor is to hold, over these keys."""
    tokens = variant.geometry.rows * variant.geometry.blocks
    query, key, value = _numbers(variant, tokens, keys, keys)
    call = check_call(query, key, value, **RULES)
    is_int8 = variant.kind == "int8"
    assert is_int8 or variant_of(call, "forward") == variant
    out = torch.zeros_like(query)
    if is_int8:
        *packing, launch = int8_launches(call, plan_call(call, 1, int8=True), out)
        emulate(packing)
    else:
        (launch,) = forward_launches(call, Plan(variant), out)
    exact = reference_sdpa(query.double(), key.double(), value.double(), **RULES)[0]
    return Work(launch, [*launch.keep, query, key, value, out], [out], [exact])


def gradient_work(variant: Variant, moving: int) -> Work:
    """As many tiles that stay as one multiprocessor is to hold, of queries over these keys or of keys over these
    queries."""
    staying = variant.geometry.rows * variant.geometry.blocks
    queries, keys = (staying, moving) if variant.kind == "grad_query" else (moving, staying)
    query, key, value, grad_out = _numbers(variant, queries, keys, keys, queries)
    leaves = [t.double().requires_grad_() for t in (query, key, value)]
    exact, lse = reference_sdpa(*leaves, **RULES)
    expected = torch.autograd.grad(exact, leaves, grad_out.double())
    out, lse = exact.detach().to(query.dtype), lse.detach().float()
    grads = [torch.zeros_like(t) for t in (query, key, value)]
    call, plan = check_call(query, key, value, **RULES), Plan(variant, 0, all_gradients(variant))
    launches = backward_launches(call, plan, grad_out, out, lse, None, None, (grads[0], grads[1], grads[2]))
    (launch,) = (each for each in launches if each.function == KERNELS[variant.kind].function)
    # What pa_delta computes, in its place.
    delta, shift, *_ = launch.keep[0][:, : lse.numel()]
    delta.copy_((out.double() * grad_out.double()).sum(-1).flatten())
    shift.copy_(lse.flatten() / math.log(2))
    launch.keep[0][2:] = 0
    tensors = [query, key, value, grad_out, out, lse, *grads, launch.keep[0]]
    return Work(launch, tensors, grads[variant.gradients], list(expected[variant.gradients]))


def _numbers(variant: Variant, *tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 1, n, variant.head_dim).to(getattr(torch, variant.dtype)) for n in tokens]


def simulate(library: Path, variant: Variant, moving: int, moves: bool = True) -> tuple[int, float]:
    """(cycles, relative error) of as many tiles that stay as one multiprocessor is to hold, over this many rows of
    those that move. Only once in a process. moves: False: :func:`without_moves`."""
    work = (gradient_work if variant.is_gradient else forward_work)(variant, moving)
    simulator = ctypes.CDLL(str(library))
    simulator.sim_malloc.restype = ctypes.c_ulonglong
    simulator.sim_launch.restype = ctypes.c_longlong
    file = Path(f"{variant.name}.ptx")
    ptx = for_simulator(compile_ptx(source(variant.kind), variant.macros()))
    file.write_text(ptx if moves else without_moves(ptx))
    if not simulator.sim_load(str(file).encode()):
        sys.exit("the simulator refuses the PTX")
    places: dict[int, int] = {}  # of a tensor's storage -> in the simulated memory
    for tensor in work.tensors:
        at = simulator.sim_malloc(ctypes.c_ulonglong(tensor.nbytes + 256))
        simulator.sim_to_gpu(
            ctypes.c_ulonglong(at), ctypes.c_void_p(tensor.data_ptr()), ctypes.c_ulonglong(tensor.nbytes)
        )
        places |= {tensor.data_ptr() + i: at + i for i in range(0, tensor.nbytes, 4)}
    launch = work.launch
    params = type(launch.params).from_buffer_copy(launch.params)
    for name, address in addresses(params):
        setattr(params, name, places[address])
    functions, shared = tool.read_cell(tool.read_table()[variant.name][61])
    registers = max(registers for registers, _ in functions)  # those beside it need few
    grid = (ctypes.c_uint * 3)(*launch.grid)
    params_size = ctypes.sizeof(params)
    cycles = simulator.sim_launch(
        launch.function.encode(), registers, shared, grid, launch.threads, ctypes.byref(params), params_size
    )
    errors = []
    for written, expected in zip(work.written, work.expected, strict=True):
        place = ctypes.c_ulonglong(places[written.data_ptr()])
        simulator.sim_from_gpu(ctypes.c_void_p(written.data_ptr()), place, ctypes.c_ulonglong(written.nbytes))
        errors.append(((written.double() - expected).norm() / expected.norm()).item())
    return cycles, max(errors)


def run_in_child(library: Path, variant: Variant, moving: int, folder: Path, moves: bool) -> tuple[int, float]:
    """:func:`simulate` in a process of its own, at addresses that are the same every time."""
    answer = folder / "answer.json"
    command = [sys.executable, __file__, str(library), "--child", str(answer)]
    command += ["--kind", variant.kind, "--head-dim", str(variant.head_dim), "--dtype", variant.dtype]
    command += ["--keys", str(moving), *(["--without-moves"] if not moves else [])]
    command += ["--causal"] if RULES else []
    still = shutil.which("setarch")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        done = subprocess.run(
            [*([still, "-R"] if still else []), *command], cwd=folder, env=environment, stdout=log, stderr=log
        )
    if done.returncode or not answer.exists():
        sys.exit(f"the simulation ended with {done.returncode}:\n{(folder / 'log').read_text()[-2000:]}")
    cycles, error = json.loads(answer.read_text())
    return cycles, error


def steady_share(library: Path, variant: Variant, moving: list[int], folder: Path, moves: bool) -> float:
    """The share of the float32 peak, from the cycles of two numbers of rows that move."""
    cycles = []
    for rows in moving:
        found, error = run_in_child(library, variant, rows, folder, moves)
        what = "queries" if variant.gradients.stop == 3 else "keys"
        print(f"{variant.name} {rows} {what}: {found:,} cycles, relative error {error:.1e}", flush=True)
        cycles.append(found)
    scores = variant.geometry.blocks * variant.geometry.rows * abs(moving[1] - moving[0])
    ideal = KERNELS[variant.kind].products * scores * variant.head_dim / LANES
    share = ideal / abs(cycles[1] - cycles[0])
    print(f"steady state: {share:.1%} of the float32 peak", flush=True)
    return share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("simulator", type=Path, help="a built checkout of GPGPU-Sim")
    parser.add_argument("--kind", default="forward", choices=KINDS)
    parser.add_argument("--head-dim", type=int, default=64, choices=HEAD_DIMS)
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--keys", type=int, nargs="+", default=[512, 1024], help="or queries: two, one flush apart")
    parser.add_argument("--without-moves", action="store_true", help="that ptxas leaves out; int8: always")
    parser.add_argument("--causal", action="store_true", help="these rows end at the diagonal")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    variant = Variant(arguments.kind, arguments.head_dim, arguments.dtype)
    if arguments.causal:
        RULES.update(is_causal=True, alignment="lower_right")
    if not variant.exists or variant.name not in tool.read_table():
        parser.error(f"there is no kernel {variant.name}")
    if arguments.child:
        found = simulate(arguments.simulator, variant, *arguments.keys, not arguments.without_moves)
        arguments.child.write_text(json.dumps(found))
        os._exit(0)  # the simulator's threads and exit functions are of no use any more
    if len(arguments.keys) != 2:
        parser.error("--keys takes two numbers")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libdriver.so"
        build_driver(arguments.simulator.resolve(), library)
        write_settings(arguments.simulator, Path(folder))
        is_int8, given = variant.kind == "int8", (arguments.keys, Path(folder))
        share = steady_share(library, variant, *given, moves=not (is_int8 or arguments.without_moves))
        if is_int8:
            of_float = steady_share(library, replace(variant, kind="forward"), *given, moves=False)
            print(f"{share / of_float:.2f} times as fast as {variant.dtype}")


if __name__ == "__main__":
    main()
