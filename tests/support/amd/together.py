"""Products that follow one another, executed at once: most of what a kernel does is rows of them, and numpy takes as
long for one instruction as for dozens.

Only where the order cannot matter: no instruction of such a row reads or writes what an earlier one writes. A branch
into a row executes the rest of it one by one.
"""

from collections.abc import Callable

import numpy as np

from .code import Instruction
from .scalar import Operation
from .vector import PRODUCTS, Product
from .wave import U32, Wave

MOST = 64


def rows_of_products(instructions: list[Instruction], operations: list[Operation]) -> list[Operation]:
    """The operations, with that of the first product of each row in place of all of them."""
    found, place = list(operations), 0
    while place < len(instructions):
        count = _row_at(instructions, place)
        if count > 2:
            row = instructions[place : place + count]
            found[place] = _together([part for i in row for part in i.both or (i,)], count)
        place += max(1, count)
    return found


def _row_at(instructions: list[Instruction], place: int) -> int:
    """How many instructions from here on are products that can be executed at once."""
    name, written, count = (instructions[place].both or instructions[place:])[0].name, set(), 0
    if name not in PRODUCTS:
        return 0
    for i in instructions[place : place + MOST]:
        parts = i.both or (i,)
        operands = [o for part in parts for o in part.operands]
        plain = all(o.kind == "v" and not o.negative and not o.absolute for o in operands)
        is_other = any(part.name != name or part.options for part in parts)
        if is_other or not plain or written & {o.number for o in operands}:
            break
        written |= {part.operands[0].number for part in parts}
        count += 1
    return count


def _together(row: list[Instruction], count: int) -> Operation:
    """``row``: the products of ``count`` instructions."""
    product: Product = PRODUCTS[row[0].name]
    numbers = [np.array([operand.number for operand in place]) for place in zip(*(i.operands for i in row))]
    destination, x, y, summand = (*numbers, numbers[0])[:4]  # without one of its own it is the destination
    # Registers are looked up once where several products share them.
    of_x, of_y = _shared(x), _shared(y)

    def run(wave: Wave, _: Instruction) -> None:
        found = product(of_x(wave.vectors), of_y(wave.vectors), wave.floats[summand]).view(U32)
        if wave.all_lanes:
            wave.vectors[destination] = found
        else:
            wave.vectors[destination] = np.where(wave.lanes, found, wave.vectors[destination])
        wave.place += count - 1

    return run


def _shared(registers: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    first = int(registers[0])
    if (registers == first).all():
        return lambda vectors: vectors[first : first + 1]
    return lambda vectors: vectors[registers]
