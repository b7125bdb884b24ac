"""The share of the tensor cores' peak that the machine code of our kernels can sustain, by ``tools.models.tensor``.

python -m tools.models.tensor_table                                # print the table: some minutes
python -m tools.models.tensor_table --write docs/fused-kernel.md   # put it between the marks in the document
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from pascal_attn_core.fused.code.source import Variant, all_variants, digest_of
from tools.fused import compiled
from tools.int8_table import command

from .tensor import MACHINES, paths, simulate

BEGIN, END = "<!-- shares of the peak: tools.models.tensor_table -->", "<!-- end of shares of the peak -->"
_LANES = 32


class Row(NamedTuple):
    """A row of the table: of one kind of kernel, or of the gradients' two together. ``queue``: of the machine."""

    label: str
    machine: str
    kinds: tuple[str, ...]
    mask: str = "none"
    queue: int = 192

    def variants(self, head_dim: int) -> list[Variant]:
        return [v for v in _VARIANTS if (v.kind, v.head_dim, v.mask) in ((k, head_dim, self.mask) for k in self.kinds)]


_VARIANTS = [v for v in all_variants() if v.on_tensor_cores and not v.padded]
_HEAD_DIMS = (32, 40, 48, 64, 80, 96, 128, 256)
ROWS = [
    Row("T4", "T4", ("tensor",)),
    Row("T4, even distribution", "T4", ("tensor_even",)),
    Row("T4, a bool mask that cuts no tile, or every tile", "T4", ("tensor",), "bool"),
    Row("T4, a quarter of the queue before shared memory", "T4", ("tensor",), queue=48),
    Row("GeForce RTX 20xx, at half the tensor rate", "RTX 2080 Ti", ("tensor",)),
    Row("V100", "V100", ("volta",)),
    Row("V100, even distribution", "V100", ("volta_even",)),
]
for _card, _name in (("T4", "tensor"), ("V100", "volta")):
    _both = f"{_name}_grad_query", f"{_name}_grad_key_value"
    ROWS += [Row(f"{_card}, dQ", _card, _both[:1]), Row(f"{_card}, dK and dV", _card, _both[1:])]
    ROWS += [Row(f"{_card}, both gradients, 7 products", _card, _both)]


def cell(row: Row, head_dim: int) -> str:
    """``"86 %"``, with a mask ``"86, 80 %"``; "" where there is no such kernel."""
    found = row.variants(head_dim)
    machine = replace(MACHINES[row.machine], queue=row.queue)
    shares = []
    for masked in (False, True)[: 1 + (row.mask != "none")] if found else ():
        times = 0.0
        for products, variant in zip((3, 4), found):
            ((_, path),) = paths(compiled(variant, machine.arch).cubin, masked=masked)
            share = simulate(path, machine, variant.threads // _LANES, variant.geometry.blocks)
            times += products / share
        shares.append(sum((3, 4)[: len(found)]) / times)
    return ", ".join(f"{100 * share:.0f}" for share in shares) + " %" * bool(found)


def table() -> str:
    """The table, and which kernels it was made from."""
    lines = [["head_dim", *map(str, _HEAD_DIMS)]]
    lines += [[row.label, *(cell(row, head_dim) for head_dim in _HEAD_DIMS)] for row in ROWS]
    head, *body = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *body, made_from()])


def cells() -> Iterator[tuple[Row, int]]:
    """Yield those that the table fills."""
    return ((row, head_dim) for row in ROWS for head_dim in _HEAD_DIMS if row.variants(head_dim))


def made_from() -> str:
    """The line behind the table that names its kernels' source."""
    return f"<!-- of kernels {digest_of(tuple(dict.fromkeys(v for at in cells() for v in at[0].variants(at[1]))))} -->"


if __name__ == "__main__":
    command(__doc__, (BEGIN, END), table)
