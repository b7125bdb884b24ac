"""A wave of 64 or of 32 lanes: its registers, and the transfers that it has not waited for."""

import functools
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..fused.memory import Memory
from .code import EXEC, NULL, Operand

POISON = 0xFFFFFFFF  # NaN as float32 and as two of float16
ALL = (1 << 64) - 1
U32, U64, I32, I64 = np.uint32, np.uint64, np.int32, np.int64
F32, F64 = np.float32, np.float64


def bits(number: int) -> np.ndarray:
    """The lanes of a mask of 64."""
    return np.unpackbits(np.array([number], "<u8").view(np.uint8), bitorder="little").astype(bool)


def number_of(lanes: np.ndarray) -> int:
    """The mask of lanes."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


@functools.lru_cache(maxsize=4096)
def everywhere(number: int, lanes: int = 64) -> np.ndarray:
    """A register with these 32 bits in every lane."""
    found = np.full(lanes, number & 0xFFFFFFFF, U32)
    found.flags.writeable = False
    return found


class Pending(NamedTuple):
    """A transfer under way. deliver: puts what was read into the registers; in_order: transfers of its kind end in the
    order of their beginnings; writes_lds: other waves may wait for it."""

    deliver: Callable[[], None]
    in_order: bool = True
    writes_lds: bool = False


class Wave:
    """
    Args:
        index: which one of the block; memory, lds: what the block can reach, lds as words.
        scalars: what the first scalar registers hold.
        size: lanes: 64 (gfx9), or 32 (gfx10), where masks of lanes are one scalar register and not two, and stores
            are counted apart from loads.
    """

    def __init__(self, index: int, memory: Memory, lds: np.ndarray, scalars: list[int], size: int = 64):
        self.index, self.memory, self.lds, self.size = index, memory, lds, size
        self.numbers = np.arange(size)
        self.place, self.done, self.scc = 0, False, 0
        self.vectors = np.full((256 + 3, size), POISON, U32)  # the last ones are for parts of words
        self.vectors[0] = self.numbers + size * index
        self.floats = self.vectors.view(F32)
        self.scalars = scalars + [POISON] * (128 - len(scalars))
        self.scalars[NULL] = 0
        self.transfers: dict[str, deque[Pending]] = {"vmcnt": deque(), "lgkmcnt": deque(), "vscnt": deque()}
        self.store_counter = "vmcnt" if size == 64 else "vscnt"
        self.write_lanes(EXEC, ALL)

    def scalar(self, operand: Operand) -> int:
        return (self.scalars[operand.number] if operand.kind == "s" else operand.number) & 0xFFFFFFFF

    def signed(self, operand: Operand) -> int:
        number = self.scalar(operand)
        return number - ((number & 0x80000000) << 1)

    def scalar64(self, operand: Operand) -> int:
        if operand.kind != "s":
            return operand.number & ALL
        return self.scalars[operand.number] | self.scalars[operand.number + 1] << 32

    def write_scalar(self, register: int, number: int) -> None:
        if register != NULL:
            self.scalars[register] = number & 0xFFFFFFFF
        if register in (EXEC, EXEC + 1):
            self.lanes = bits(self.lanes_of(EXEC))[: self.size]
            self.active = np.flatnonzero(self.lanes)
            self.all_lanes = len(self.active) == self.size

    def write_scalar64(self, register: int, number: int) -> None:
        self.write_scalar(register, number)
        self.write_scalar(register + 1, number >> 32)

    def lanes_of(self, register: int) -> int:
        """A mask of lanes: of 32, one register; of 64, two."""
        return self.scalars[register] | (self.scalars[register + 1] << 32 if self.size == 64 else 0)

    def write_lanes(self, register: int, mask: int) -> None:
        if self.size == 64:
            self.write_scalar64(register, mask)
        else:
            self.write_scalar(register, mask)

    def raw(self, operand: Operand) -> np.ndarray:
        """The bits that a sign belongs to."""
        return self.vectors[operand.number] if operand.kind == "v" else everywhere(self.scalar(operand), self.size)

    def unsigned(self, operand: Operand) -> np.ndarray:
        assert not operand.negative
        assert not operand.absolute
        return self.raw(operand)

    def integer(self, operand: Operand) -> np.ndarray:
        return self.unsigned(operand).view(I32)

    def single(self, operand: Operand) -> np.ndarray:
        return with_signs(self.raw(operand).view(F32), operand)

    def unsigned64(self, operand: Operand) -> np.ndarray:
        if operand.kind == "v":
            low, high = self.vectors[operand.number], self.vectors[operand.number + 1]
            return low.astype(U64) | high.astype(U64) << U64(32)
        return np.full(self.size, self.scalar64(operand), U64)

    def integer64(self, operand: Operand) -> np.ndarray:
        return self.unsigned64(operand).view(I64)

    def mask(self, operand: Operand) -> np.ndarray:
        """Scalars as lanes."""
        return bits(self.lanes_of(operand.number) if operand.kind == "s" else operand.number & ALL)[: self.size]

    def write(self, register: int, words: np.ndarray) -> None:
        """``words``: any 32-bit dtype; in the active lanes."""
        if self.all_lanes:
            self.vectors[register] = words.view(U32)
        else:
            np.copyto(self.vectors[register], words.view(U32), where=self.lanes)

    def write64(self, register: int, numbers: np.ndarray) -> None:
        self.write(register, (numbers & U64(0xFFFFFFFF)).astype(U32))
        self.write(register + 1, (numbers >> U64(32)).astype(U32))

    def write_mask(self, register: int, lanes: np.ndarray) -> None:
        """A comparison's answer: 0 in the lanes that are not active."""
        self.write_lanes(register, number_of(lanes & self.lanes))

    def receive(
        self, counter: str, register: int, lanes: np.ndarray, words: np.ndarray, *, in_order: bool = True
    ) -> None:
        """``words`` ``[len(lanes), registers]`` arrive when the wave waits; until then the registers are poisoned."""
        count = words.shape[1]

        def deliver() -> None:
            self.vectors[register : register + count, lanes] = words.T

        self.vectors[register : register + count, lanes] = POISON
        self.transfers[counter].append(Pending(deliver, in_order))

    def receive_scalars(self, register: int, words: list[int]) -> None:
        def deliver() -> None:
            for i, word in enumerate(words):
                self.write_scalar(register + i, word)

        self.scalars[register : register + len(words)] = [POISON] * len(words)
        self.transfers["lgkmcnt"].append(Pending(deliver, in_order=False))

    def send(self, counter: str, *, in_order: bool = True, writes_lds: bool = False) -> None:
        """Something is written, which is counted as well."""
        self.transfers[counter].append(Pending(lambda: None, in_order, writes_lds))

    def wait(self, counter: str, most: int) -> None:
        """Until at most so many are under way. Which ones those may be is taken at its worst: the newest of a kind, and
        any that keep no order."""
        queue = self.transfers[counter]
        if most == 0:
            while queue:
                queue.popleft().deliver()
        ordered = [transfer for transfer in queue if transfer.in_order]
        for transfer in ordered[: max(0, len(ordered) - most)]:
            transfer.deliver()
            queue.remove(transfer)


def with_signs(numbers: np.ndarray, operand: Operand) -> np.ndarray:
    """Floats with an operand's signs."""
    if operand.absolute:
        numbers = np.abs(numbers)
    return -numbers if operand.negative else numbers
