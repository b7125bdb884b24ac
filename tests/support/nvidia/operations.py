"""The table of the instructions that are known, which the modules of their kinds fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .code import Instruction, Operand
from .warps import F32, U32, Array, Warps

Run = Callable[[Any, Instruction], Any]


class Operation(NamedTuple):
    """It describes what an instruction does. options: that may stand behind its name; steers: it returns which warps go
    on, and where, in place of those behind it."""

    run: Run
    options: frozenset[str]
    steers: bool


OPERATIONS: dict[str, Operation] = {}


def operation(*names: str, options: str = "", steers: bool = False) -> Callable[[Run], Run]:
    """names: of instructions, whole or without the options."""

    def note(run: Run) -> Run:
        OPERATIONS.update(dict.fromkeys(names, Operation(run, frozenset(options.split()), steers)))
        return run

    return note


def operation_of(i: Instruction) -> Operation:
    """
    Raises:
        NotImplementedError: it is not known, or one of its options is not.
    """
    found = OPERATIONS.get(".".join((i.name, *i.options)), OPERATIONS.get(i.name))
    is_whole = ".".join((i.name, *i.options)) in OPERATIONS
    if found is None or not (is_whole or found.options.issuperset(i.options)):
        raise NotImplementedError(i.text)
    return found


def flushed(x: Array) -> Array:
    """float32 without denormal numbers."""
    return np.where(np.abs(x) < F32(2.0**-126), np.copysign(F32(0), x), x)


def single(m: Warps, i: Instruction, o: Operand) -> Array:
    value = m.single(o)
    return flushed(value) if "FTZ" in i.options else value


_READ: dict[str, Callable[[Warps, Instruction, Operand], Array]] = {
    "u": lambda m, _, o: m.unsigned(o),
    "i": lambda m, _, o: m.signed(o),
    "s": lambda m, i, o: m.unsigned(o) if "U32" in i.options else m.signed(o),
    "f": single,
    "p": lambda m, _, o: m.truth(o),
}  # fmt: skip


def put(m: Warps, i: Instruction, value: Array) -> None:
    """The result of an instruction into its first operand."""
    if "FTZ" in i.options and value.dtype == F32:
        value = flushed(value)
    if "SAT" in i.options:
        value = np.nan_to_num(np.clip(value, F32(0), F32(1)), nan=0.0)
    m.put(i.operands[0], value)


def define(names: str, kinds: str, f: Callable[..., Array], options: str = "") -> None:
    """Instructions whose result is a function of their sources alone. kinds: of each source, a key of ``_READ``."""
    readers = [_READ[kind] for kind in kinds]

    def run(m: Warps, i: Instruction) -> None:
        sources = i.operands[1:]
        assert len(sources) == len(readers)
        put(m, i, f(*[read(m, i, o) for read, o in zip(readers, sources)]))

    operation(*names.split(), options=options)(run)


_COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal,
}  # fmt: skip
_JOINS = {"AND": np.bitwise_and, "OR": np.bitwise_or, "XOR": np.bitwise_xor}
COMPARISONS, JOINS = " ".join(_COMPARISONS), " ".join(_JOINS)


def compared(i: Instruction, a: Array, b: Array) -> Array:
    """The comparison that the first option names; of floats those without a U are false where there is a NaN."""
    how = i.options[0]
    if np.asarray(a).dtype != F32:
        return _COMPARISONS[how](a, b)
    is_nan = np.isnan(a) | np.isnan(b)
    if how in ("NAN", "NUM"):
        return is_nan if how == "NAN" else ~is_nan
    is_unordered = len(how) == 3
    found = _COMPARISONS[how.removesuffix("U") if is_unordered else how](a, b)
    return found | is_nan if is_unordered else found & ~is_nan


def joined(how: str, a: Array, b: Array) -> Array:
    return _JOINS[how](a, b)


def put_truths(m: Warps, i: Instruction, found: Array) -> None:
    """An answer and its opposite into the first two operands, both joined with the fifth."""
    how = next(option for option in i.options if option in _JOINS)
    for o, answer in zip(i.operands, (found, ~found)):
        m.put(o, joined(how, answer, m.truth(i.operands[4])))


def everywhere(found: Array) -> Array:
    """All bits where it is true."""
    return np.where(found, U32(0xFFFFFFFF), U32(0))
