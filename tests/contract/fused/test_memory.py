"""The emulated kernels with forbidden memory around every tensor: that of the address sanitizer, or of pages."""

import itertools
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from attn_support import fresh
from attn_support.fused.emulation import GXX
from attn_support.randomness import is_random, seeds, some

from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.code.source import all_variants, amd_variants, gguf_variants, linear_variants

_HEAD = """
import sys, types
support = types.ModuleType("attn_support"); support.__path__ = [{support!r}]; sys.modules["attn_support"] = support
import torch
from attn_support.fused.cases import at_once, backward, forward
from attn_support.fused.emulation import ADDRESS_SANITIZER
how = {{"flags": ADDRESS_SANITIZER}}
EVERY = {every}  # how many of the cases
def numbers(heads, tokens, dim): return torch.randn(1, heads, tokens, dim)
"""
_RUN = """
for dim, mask, options in ((64, None, {"is_causal": True}), (40, torch.rand(1, 1, 131, 75) > 0.5, {}),
                           (36, torch.randn(131, 75), {"window": (9, 4)}))[::EVERY]:
    inputs = [numbers(2, 131, dim), numbers(1, 75, dim), numbers(1, 75, dim), mask]
    result = forward(inputs, {"enable_gqa": True, **options}, **how)
    backward(result, torch.randn_like(result.out), **how)
    backward(at_once(result), torch.randn_like(result.out), **how)
query, key = numbers(4, 3, 64), numbers(2, 331, 64)
forward([query, key, key, None], {"enable_gqa": True}, parts=True, **how)
from attn_support.fused.cases import check_call
from attn_support.fused.emulation import emulate
from pascal_attn_core.fused.launch.int8 import int8_launches
from pascal_attn_core.fused.launch.plan import plan_call
for dim, mask, options in ((64, None, {"is_causal": True}), (40, None, {}),
                           (128, torch.rand(1, 1, 131, 75) > 0.5, {}))[::EVERY]:
    call = check_call(numbers(2, 131, dim), *(numbers(1, 75, dim) for _ in range(2)), mask, enable_gqa=True, **options)
    out, lse = torch.empty(call.out_shape), torch.empty(call.out_shape[:-1])
    emulate(int8_launches(call, plan_call(call, 1, int8=True), out, lse), **how)
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.launch.plan import Plan
for kind, arch, mask in (("wmma", "gfx1102", "none"), ("tensor", "", "none"), ("wmma", "gfx1200", "bool"),
                         ("volta", "", "none"))[::EVERY]:
    query, key = numbers(2, 131, 64).half(), numbers(1, 75, 64).half()
    allowed = torch.rand(131, 75) > 0.5 if mask == "bool" else None
    plan = Plan(Variant(kind, 64, "float16", mask, arch=arch))
    forward([query, key, key, allowed], {"enable_gqa": True}, plan=plan, **how)
print("clean")
"""
_ONE_KEY_TOO_MANY = """
from attn_support.fused.cases import check_call, forward_launches, whole
from attn_support.fused.emulation import emulate
query, key = numbers(1, 131, 64), numbers(1, 75, 64)
call = check_call(query, key, key)
(launch,) = forward_launches(call, whole(call), torch.empty_like(query))
launch.params.lk += 1
emulate([launch], **how)
"""
_ONE_QUERY_TOO_MANY = """
from pascal_attn_core.fused.code.source import source
right = "r % AT_ONCE < queries"
assert right in source("grad_all")
mutated = {"grad_all": source("grad_all").replace(right, right + " + 1")}
query, key = numbers(1, 131, 64), numbers(1, 75, 64)
result = at_once(forward([query, key, key, None], {}, **how))
backward(result, torch.randn_like(result.out), mutated=mutated, **how)
"""
_LINEAR = """
from attn_support.fused.emulation import emulate
from pascal_attn_core.fused.launch.linear import LinearCall, linear_launches
from pascal_attn_core.fused.code.kinds import TILES
from pascal_attn_core.reference.int8_rows import Int8Matrix
for product, tile in TILES.items():
    # Codes that are read four at a time and one by one, outputs that are written so.
    for columns, cols, activation in ((64, tile.cols + 4, "none"), (36, tile.cols - 1, "geglu"), (4, 3, "silu")):
        rows, of_weight = tile.rows + 1, cols * (2 if activation == "geglu" else 1)
        weight = Int8Matrix(torch.ones(of_weight, columns, dtype=torch.int8), torch.ones(of_weight), 4)
        for dtype in (torch.float32, torch.bfloat16)[::EVERY]:
            x, bias = torch.randn(rows, columns + 1).to(dtype)[:, :columns], torch.ones(of_weight, dtype=dtype)
            call = LinearCall(x, weight, bias, activation, torch.empty(rows, cols, dtype=dtype))
            launches = linear_launches(call, 28, product)
            emulate(launches, **how)
print("clean")
"""
_GGUF = """
from attn_support.fused.emulation import emulate
from pascal_attn_core.fused.code.kinds import FEW
from pascal_attn_core.fused.launch.gguf import GgufLinearCall, gguf_linear_launches
from pascal_attn_core.fused.trust.verify_linear import sane_blocks
for columns in (32, 96):
    for function, cols in (*((function, tile.cols + 1) for function, tile in FEW.items()), ("pa_gguf_linear", 65)):
        blocks = sane_blocks("Q5_0", cols, columns, torch.Generator())
        x = torch.randn(3 if function in FEW else 129, columns + 1).half()[:, :columns]
        call = GgufLinearCall(x, blocks, "Q5_0", torch.randn(cols), torch.empty(len(x), cols, dtype=torch.float16))
        launches = gguf_linear_launches(call, 8, function)
        emulate(launches, **how)
print("clean")
"""
_ONE_BLOCK_TOO_MANY = _GGUF.replace("        emulate(", "        launches[1].params.blocks += 1\n        emulate(")
_ONE_COLUMN_TOO_MANY = _LINEAR.replace(
    "            emulate(",
    "            launches[1].params.cols += 1; launches[1].params.in_fours = 0\n            emulate(",
)


def _run(code: str) -> fresh.Done:
    found = subprocess.run([GXX or "g++", "-print-file-name=libasan.so"], capture_output=True, text=True)
    library = Path(found.stdout.strip())
    if not library.is_absolute():
        pytest.skip("g++ has no address sanitizer")
    head = _HEAD.format(support=str(fresh.ROOT / "tests" / "support"), every=1 if is_random() else 3)
    return fresh.execute(head + code, env={}, preload=library)


@pytest.mark.parametrize("code", [_RUN, _LINEAR, _GGUF], ids=["attention", "linear layers", "GGUF"])
def test_no_kernel_touches_memory_outside_of_its_tensors(code: str) -> None:
    done = _run(code)
    assert done.stdout.strip() == "clean", done.stderr[-3000:]


@pytest.mark.parametrize(
    "code", some([_ONE_QUERY_TOO_MANY, _ONE_COLUMN_TOO_MANY, _ONE_BLOCK_TOO_MANY, _ONE_KEY_TOO_MANY], 2)
)
def test_one_behind_the_last_is_noticed(code: str) -> None:
    """The query is the one of a kernel that adds nothing to it."""
    assert "heap-buffer-overflow" in _run(code).stderr


# The check of a kernel's first answers, with lse as well, on tensors before and behind a page that may not be touched.
_BESIDE_A_PAGE = """
import functools
from pascal_attn_core.fused.code.compilation import *
from pascal_attn_core.fused.code.source import Variant, source
from pascal_attn_core.fused.trust import verify
from attn_support.fused import fenced
from attn_support.fused.memory import lse_too
def check(variant, changed=None):
    for behind in (False, True):
        run = functools.partial(fenced.run, behind=behind, mutated=changed)
        with lse_too():
            assert verify.largest_error(variant, torch.device("cpu"), run) <= verify.tolerance(variant)
"""
_KINDS_BESIDE_A_PAGE = """
for variant in [{variants}]:
    print(variant.name, "is not", flush=True)
    check(variant)
print("clean")
"""
# 96 columns are 12 pieces of 16 bytes, of which eight are loaded in a round.
_A_ROUND_TOO_LONG = """
right = " && (CHUNKS % n == 0 || first + (int)chunk < CHUNKS)"
assert right in source("{kind}")
check(Variant("{kind}", 96, "float16", arch="{arch}"), {{"{kind}": source("{kind}").replace(right, "")}})
"""


def _beside_a_page() -> Iterator[tuple[str, list[Compilation]]]:
    """(kind, variants): one of each head_dim, padded or not, of some dtype and mask."""
    of_amd = (v for arch in ("gfx906", "gfx1102", "gfx1200") for v in amd_variants(arch))
    found: dict[tuple[object, ...], list[Compilation]] = {}
    for v in (*all_variants(), *linear_variants(), *gguf_variants(), *of_amd):
        if v.arch in ("", "gfx906") or v.on_tensor_cores:
            key = v.kind, v.arch, getattr(v, "head_dim", v.name), getattr(v, "padded", False)
            found.setdefault(key, []).append(v)
    drawn = [alike[(zlib.crc32(repr(key).encode()) + seeds(1)[0]) % len(alike)] for key, alike in found.items()]
    for kind, variants in itertools.groupby(some(drawn, 150), lambda v: f"{v.kind}{v.arch and f'-{v.arch}'}"):
        yield kind, list(variants)


def _run_beside_a_page(code: str) -> fresh.Done:
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux, whose pages are forbidden by mprotect")
    return fresh.execute(_HEAD.format(support=str(fresh.ROOT / "tests" / "support"), every=1) + _BESIDE_A_PAGE + code)


@pytest.mark.parametrize("variants", [pytest.param(of, id=kind) for kind, of in _beside_a_page()])
def test_no_kernel_touches_a_page_beside_its_tensors(variants: list[Compilation]) -> None:
    done = _run_beside_a_page(_KINDS_BESIDE_A_PAGE.format(variants=", ".join(map(repr, variants))))
    assert done.stdout.split()[-1:] == ["clean"], [*done.stdout.splitlines()[-1:], done.stderr[-3000:]]


@pytest.mark.parametrize("kind", some(("tensor", "tensor_grad_key_value", "volta_small", "wmma-gfx1102"), 4))
def test_a_piece_behind_the_last_is_noticed(kind: str) -> None:
    kind, _, arch = kind.partition("-")
    done = _run_beside_a_page(_A_ROUND_TOO_LONG.format(kind=kind, arch=arch))
    assert done.returncode == -signal.SIGSEGV, done.stderr[-3000:]
