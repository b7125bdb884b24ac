"""Executes the launches of the fused route from machine code for sm_50 to sm_75: each instruction of a cubin, all warps
that are at the same place at once.

Registers and shared memory begin as NaN. An error is: shared memory that nothing wrote; an address outside of the
launch's tensors or of the block's shared memory, or not aligned; lanes that wait for ever, or never end; and an
instruction, or an option of one, that is not known here. Scheduling (stall counts and scoreboards, which say when a
result may be read) is not looked at.
"""

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.launch import Launch

from ..fused.memory import Memory
from . import floats, integers, tensor, transfers  # noqa: F401  they fill the table of operations
from .code import MachineKernel, kernels
from .steering import Flow, Watch

_WARPS = 256  # that are executed together


def execute(
    launches: Iterable[Launch],
    code_of: Callable[[Compilation], bytes],
    change: Callable[[MachineKernel], MachineKernel] = lambda kernel: kernel,
    **how: Any,
) -> int:
    """Run launches one after the other; returns how many instructions that were.

    Args:
        code_of: gives the cubin of a variant.
        change: given each kernel, returns what is executed in its place.
        how: of :func:`run`.
    """
    return sum(run(launch, change(kernels(code_of(launch.variant))[launch.function]), **how) for launch in launches)


def run(launch: Launch, kernel: MachineKernel, *, scatter: int | None = None, watch: Watch | None = None) -> int:
    """One launch; returns how many instructions were executed, those of all warps at a place as one.

    Args:
        scatter: a seed: from the start and from each barrier on some warps of a block run ahead of the others.
        watch: is given each instruction before it is executed.
    """
    memory, rng, steps = Memory(launch.keep), random.Random(scatter or 0), 0
    blocks = list(itertools.product(*map(range, launch.grid)))
    at_once = max(1, _WARPS // -(-launch.threads // 32))
    for first in range(0, len(blocks), at_once):
        flow = Flow(kernel, launch, blocks[first : first + at_once], memory, rng, scatter is not None, watch)
        flow.run()
        steps += flow.steps
    return steps
