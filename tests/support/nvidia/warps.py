"""The warps of some blocks of a launch, which execute an instruction together: their registers, and what an instruction
reads and writes of them."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pascal_attn_core.fused.launch import Launch

from ..fused.memory import Memory
from .code import MachineKernel, Operand

I8, U8, U16, I32, U32, I64, U64 = np.int8, np.uint8, np.uint16, np.int32, np.uint32, np.int64, np.uint64
F16, F32, F64 = np.float16, np.float32, np.float64
POISON = U32(0x7FFFDEAD)  # a NaN
LOW = U64(0xFFFFFFFF)
LANES = np.arange(32, dtype=U32)
BITS = U32(1) << LANES
Array = Any  # [warps, 32], [warps, 1], or a number that all lanes share
Stack = tuple[tuple[str, int], ...]
_LOCAL_WORDS = 1024  # of a lane


def bits_of(lanes: Array) -> Array:
    """uint32 ``[warps]`` of lanes ``[warps, 32]``."""
    return np.packbits(lanes, axis=-1, bitorder="little").view(U32).reshape(lanes.shape[:-1])


def lanes_of(bits: Array) -> Array:
    return (bits[..., None] & BITS) != 0


@dataclass(slots=True)
class Cohort:
    """Warps at the same place.

    Attributes:
        index: which warps; mask: which lanes of each, None = all; stack: where they will wait for others (up to sm_61).
        rows: the index in its cheapest form; members: the same as a mask.
    """

    place: int
    index: Array
    mask: Array | None = None
    stack: Stack = ()
    rows: Any = field(init=False)
    members: int = field(init=False)

    def __post_init__(self) -> None:
        first, count = int(self.index[0]), len(self.index)
        self.rows = slice(first, first + count) if int(self.index[-1]) == first + count - 1 else self.index
        self.members = sum(1 << int(n) for n in self.index)

    def lanes(self) -> Array:
        return np.ones((len(self.index), 32), bool) if self.mask is None else self.mask


class Warps:
    """
    Args:
        blocks: places in the grid.

    Attributes:
        cohort, rows, mask: the warps, and the lanes of each (None = all), in which an instruction is executed.
        files: kind of registers -> registers ``[number, warps, 32]``, of uniform ones ``[number, warps, 1]``.
        shared, written: words of the shared memory of all blocks, and whether something wrote them.
    """

    def __init__(self, kernel: MachineKernel, launch: Launch, blocks: list[tuple[int, ...]], memory: Memory):
        self.kernel, self.memory = kernel, memory
        self.per_block = -(-launch.threads // 32)
        count = self.count = len(blocks) * self.per_block
        self.files: dict[str, Array] = {
            "R": np.full((255, count, 32), POISON), "UR": np.full((63, count, 1), POISON),
            "P": np.zeros((7, count, 32), bool), "UP": np.zeros((7, count, 1), bool),
        }  # fmt: skip
        self.carry, self.is_zero = np.zeros((count, 32), U32), np.zeros((count, 32), bool)
        self.block_of = np.repeat(np.arange(len(blocks)), self.per_block)
        thread = (np.arange(count, dtype=U32) % U32(self.per_block))[:, None] * U32(32) + LANES
        self.live = bits_of(thread < launch.threads)
        self.special: dict[str, Array] = {
            "SR_TID.X": thread, "SR_LANEID": np.broadcast_to(LANES, thread.shape), "SRZ": np.zeros((count, 1), U32),
            "SR_LTMASK": np.broadcast_to(BITS - U32(1), thread.shape),
        }  # fmt: skip
        for axis, numbers in zip("XYZ", zip(*blocks)):
            self.special[f"SR_CTAID.{axis}"] = np.repeat(np.array(numbers, U32), self.per_block)[:, None]
        self.shared_bytes = kernel.shared_bytes + launch.shared_bytes
        stride = -(-self.shared_bytes // 16) * 16
        self.shared = np.full(len(blocks) * stride // 4, POISON)
        self.written = np.zeros(len(self.shared), bool)
        self.shared_base = (self.block_of * stride)[:, None]
        has_local = any(i.name in ("LDL", "STL") for i in kernel.instructions)
        self.local = np.full((count, 32, _LOCAL_WORDS if has_local else 0), POISON)
        self.banks = {0: _parameters(kernel, launch)}
        for number, content in kernel.constants.items():
            self.banks[number] = np.frombuffer(content + bytes(-len(content) % 4), U32)
        self.cohort = Cohort(0, np.arange(count))
        self.rows: Any = self.cohort.rows
        self.mask: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.cohort.index), 32

    def active(self) -> Array:
        """Lanes ``[warps, 32]`` in which the instruction is executed; of a uniform one those that are there."""
        return self.cohort.lanes() if self.mask is None else np.broadcast_to(self.mask, self.shape)

    def raw(self, o: Operand) -> Array:
        """An operand's bits without its sign."""
        if o.kind == "i":
            return U32(o.number)
        if o.kind == "c":
            return self.constant(o)
        return U32(0) if o.is_zero else self.files[o.kind][o.number][self.rows]

    def constant(self, o: Operand, word: int = 0) -> Array:
        at: Array = o.offset // 4 + word
        for register in (o.base, o.uniform):
            if register is not None:
                at = at + (self.raw(register).view(I32) >> 2)
        if self.mask is not None and np.ndim(at):
            at = np.where(self.mask, at, 0)
        assert np.min(at) >= 0
        return self.banks[o.number][at]

    def wide(self, o: Operand) -> Array:
        """64 bits, of two registers or words; of a number those that it has."""
        high: Array = U32(0)
        if o.kind == "c":
            high = self.constant(o, 1)
        elif o.kind != "i":
            high = self.raw(o.after())
        return self.raw(o).astype(U64) | high.astype(U64) << U64(32)

    def unsigned(self, o: Operand) -> Array:
        """An operand as uint32, with its part and its sign."""
        value = self.part(o)
        if o.absolute:
            value = np.abs(value.view(I32)).view(U32)
        if o.negative:
            value = U32(0) - value
        return ~value if o.inverted else value

    def signed(self, o: Operand) -> Array:
        return self.unsigned(o).view(I32)

    def single(self, o: Operand) -> Array:
        value = self.part(o).view(F32)
        value = np.abs(value) if o.absolute else value
        return -value if o.negative else value

    def part(self, o: Operand, default: str = "") -> Array:
        """The part of an operand's bits that it names, as a number without a sign."""
        value = self.raw(o)
        part = o.parts[0] if o.parts else default
        if part in ("", "CC", "ROW", "COL"):
            return value
        if part in ("B0", "B1", "B2", "B3"):
            return value >> U32(8 * int(part[1])) & U32(0xFF)
        return {"H0": value & U32(0xFFFF), "H1": value >> U32(16)}[part.split("_")[0]]

    def truth(self, o: Operand) -> Array:
        """A predicate."""
        value = np.bool_(True) if o.is_zero else self.files[o.kind][o.number][self.rows]
        return ~value if o.inverted else value

    def put(self, o: Operand, value: Array) -> None:
        """Numbers of 32 bits, or a predicate, into a register; with "CC" behind it, whether they are 0 is noted."""
        if not o.is_zero:
            self._put(self.files[o.kind][o.number], value if value.dtype == bool else value.view(U32))
        if "CC" in o.parts:
            self._put(self.is_zero, value.view(U32) == 0)

    def _put(self, register: Array, value: Array) -> None:
        register[self.rows] = value if self.mask is None else np.where(self.mask, value, register[self.rows])

    def put_wide(self, o: Operand, value: Array) -> None:
        self.put(o, (value & LOW).astype(U32))
        self.put(o.after(), (value >> U64(32)).astype(U32))

    def put_sum(self, o: Operand, total: Array) -> Array:
        """A sum that may have more than 32 bits; returns the others, which are noted with "CC" behind the register."""
        carry = (total >> U64(32)).astype(U32)
        self.put(o, (total & LOW).astype(U32))
        if "CC" in o.parts:
            self._put(self.carry, carry)
        return carry


def _parameters(kernel: MachineKernel, launch: Launch) -> Array:
    """Bank 0: the sizes of a block and of the grid, where a lane's local memory ends, and the parameters."""
    params = bytes(launch.params)
    assert len(params) == kernel.params_bytes, f"{len(params)} bytes of parameters, not {kernel.params_bytes}"
    bank = bytearray(kernel.params_at + -(-len(params) // 4) * 4 + 16)
    sizes_at, local_at = (8, 0x20) if kernel.arch < 70 else (0, 0x28)
    struct.pack_into("<6I", bank, sizes_at, launch.threads, 1, 1, *launch.grid)
    struct.pack_into("<I", bank, local_at, 4 * _LOCAL_WORDS)
    bank[kernel.params_at : kernel.params_at + len(params)] = params
    return np.frombuffer(bytes(bank), U32)
