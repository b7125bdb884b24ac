"""``python -m tools.gpu.rates``: how fast a card multiplies by dp4a, from registers and with the loads from shared
memory that the main loop of 8-bit attention has, in units of its FFMA."""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from pascal_attn_core.contest.timing_table import milliseconds
from pascal_attn_core.fused.code.kinds import LEAST_CAPABILITY
from pascal_attn_core.fused.code.params import Pack
from pascal_attn_core.fused.code.source import INT8_HEAD_DIMS, Variant, source
from pascal_attn_core.fused.gpu.cuda import CudaRuntime
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.machine.runtime import runtime_of
from pascal_attn_core.machine.storage import write_object

from .sweep import giving

WHAT = ("FFMA", "dp4a", "dp4a and loads")
_TURNS = 5


@dataclass(frozen=True)
class Rate(Variant):
    """The kernel of ``rates.cu`` in the tiles of 8-bit attention."""

    what: str = field(kw_only=True)

    @functools.cached_property
    def name(self) -> str:
        return f"rate-{self.head_dim} {self.what}"

    @property
    def functions(self) -> tuple[str, ...]:
        return ("pa_pack_rate",)

    def macros(self) -> dict[str, object]:
        return {**super().macros(), "PA_RATE": WHAT.index(self.what)}


@functools.cache
def text() -> str:
    """The CUDA source of a :class:`Rate`."""
    without_kernels = re.sub(r'(?ms)^extern "C" __global__.*?^}\n', "", source("int8"))
    return without_kernels + Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


def measure(kernels: Kernels, head_dim: int, chunks: int) -> dict[str, float]:
    """Multiplications in the time in which FFMA makes one: the median of some turns."""
    gpu, arch = kernels.gpu, int(kernels.arch.removeprefix("sm_"))
    assert isinstance(gpu, CudaRuntime)
    launches, times = [], []
    for what in WHAT:
        rate = Rate("int8", head_dim, "float32", what=what)
        blocks = kernels.info.num_sms * rate.geometry.blocks
        out = torch.empty(blocks * rate.threads, dtype=torch.int32, device=kernels.device)
        params = Pack(words=out.data_ptr(), rows=chunks)
        launches.append(Launch(rate, rate.functions[0], (blocks, 1, 1), rate.threads, params, (out,)))
        with giving(kernels, rate, gpu.find_compiler(arch).compile(text(), arch, rate.macros()).cubin):
            kernels.run(launches[-1:])
    for _ in range(_TURNS):
        times.append([milliseconds(lambda one=one: kernels.run([one]), kernels.device) / 1e3 for one in launches])
    of_float, *others = (statistics.median(turns) for turns in zip(*times, strict=True))
    return {what: of_float / other for what, other in zip(WHAT[1:], others, strict=True)}


def main(arguments: Sequence[str] | None = None) -> int:
    """2: 8-bit attention is not for this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--chunks", type=int, default=4000, help="of 512 multiplications of a thread")
    options = parser.parse_args(arguments)
    kernels = runtime_of(torch.device(options.device)).part(Kernels)
    reasons = list(kernels.machine_reasons)
    if not reasons and (kernels.info.capability or (0, 0)) < LEAST_CAPABILITY:
        reasons = ["dp4a needs compute capability 6.1"]
    elif not reasons and kernels.gpu.compiler(kernels.arch) is None:
        reasons = [kernels.gpu.no_compiler(kernels.arch)]
    if reasons:
        print("; ".join(reasons))
        return 2
    found = {f"head_dim {dim}": measure(kernels, dim, options.chunks) for dim in INT8_HEAD_DIMS}
    write_object(options.json, found)
    rates = (f"{tiles}: {what} {rate:.2f}" for tiles, each in found.items() for what, rate in each.items())
    print("in units of FFMA, " + ", ".join(rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
