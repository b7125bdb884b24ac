"""Executes the launches of the fused route from machine code for gfx9, gfx10 and gfx11: each instruction of a code
object, wave by wave.

A block's shared memory and all registers begin as NaN; what is read arrives when the wave waits for it, and is NaN
before; an address outside of the launch's tensors, parameters and shared memory is an error, and so is an instruction
that is not known here.
"""

import itertools
import struct
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.launch import Launch

from ..fused.memory import Memory
from .code import Instruction, MachineKernel, kernels
from .scalar import SCALAR, Operation
from .together import rows_of_products
from .transfers import TRANSFERS
from .vector import VECTOR
from .wave import POISON, U32, Wave

Watch = Callable[[Wave, Instruction], None]
OPERATIONS = SCALAR | VECTOR | TRANSFERS


def execute(launches: Iterable[Launch], code_of: Callable[[Variant], bytes], watch: Watch | None = None) -> int:
    """Run launches one after the other; returns how many block barriers were passed.

    Args:
        code_of: gives the code object of a variant; watch: as of :func:`run`.
    """
    barriers = 0
    for launch in launches:
        kernel = kernels(code_of(launch.variant))[launch.function]
        barriers += run(launch, kernel, watch)
    return barriers


def run(launch: Launch, kernel: MachineKernel, watch: Watch | None = None) -> int:
    """One launch; returns how many block barriers were passed.

    Args:
        watch: is given every wave and its instruction before it is executed.
    """
    unknown = {part.name for i in kernel.instructions for part in (i, *i.both)} - OPERATIONS.keys()
    if unknown:
        raise NotImplementedError(f"{kernel.name}: {', '.join(sorted(unknown))}")
    memory = Memory(launch.keep)
    arguments = memory.put(bytes(launch.params))
    # The queue's packet with the sizes of blocks and grid (HSA Platform System Architecture Specification).
    threads = (launch.threads * launch.grid[0], *launch.grid[1:])
    packet = memory.put(struct.pack("<HHHHHHIII", 0, 3, launch.threads, 1, 1, 0, *threads) + bytes(40))
    operations = [OPERATIONS[i.name] for i in kernel.instructions]
    if watch is None:
        operations = rows_of_products(kernel.instructions, operations)
    else:
        operations = [_watched(operation, watch) for operation in operations]
    barriers = 0
    with np.errstate(all="ignore"):
        for block in itertools.product(*map(range, launch.grid)):
            known = dict(zip("xyz", block)) | {"arguments": arguments, "packet": packet}
            scalars = [word for what, count in kernel.user_registers for word in _words(known.get(what), count)]
            lds = np.full(-(-(kernel.lds_bytes + launch.shared_bytes) // 4), POISON, U32)
            waves = [
                Wave(index, memory, lds, scalars, kernel.lanes) for index in range(-(-launch.threads // kernel.lanes))
            ]
            barriers += _run_block(waves, kernel, operations)
    return barriers


def _watched(operation: Operation, watch: Watch) -> Operation:
    def run(wave: Wave, i: Instruction) -> None:
        watch(wave, i)
        operation(wave, i)

    return run


def _words(number: int | None, count: int) -> list[int]:
    if number is None:
        return [POISON] * count
    return [number >> 32 * word & 0xFFFFFFFF for word in range(count)]


def _run_block(waves: list[Wave], kernel: MachineKernel, operations: list[Operation]) -> int:
    """From barrier to barrier, the waves in turn; every other time the last one is first."""
    for passed in itertools.count():
        waiting = Counter(
            _run_wave(wave, kernel, operations) for wave in waves[:: -1 if passed % 2 else 1] if not wave.done
        )
        if not waiting["s_barrier"]:
            return passed
        alive = sum(not wave.done for wave in waves)
        assert waiting["s_barrier"] == alive, f"{kernel.name}: a barrier that not all waves reach"
    raise AssertionError


def _run_wave(wave: Wave, kernel: MachineKernel, operations: list[Operation]) -> str:
    """Up to a barrier or the end: the name of the instruction."""
    instructions = kernel.instructions
    while True:
        place = wave.place
        wave.place += 1
        instruction = instructions[place]
        try:
            operations[place](wave, instruction)
        except (AssertionError, ValueError, IndexError) as error:
            raise AssertionError(f"{kernel.name}, instruction {place}: {instruction.text}") from error
        if instruction.name in ("s_barrier", "s_endpgm"):
            return instruction.name
