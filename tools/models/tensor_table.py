"""The share of the tensor cores' peak that the machine code of our kernels can sustain, by ``tools.models.tensor``.

python -m tools.models.tensor_table                                # print the table: some minutes
python -m tools.models.tensor_table --write docs/fused-kernel.md   # put it between the marks in the document
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pascal_attn_core.fused.code.source import Variant, all_variants, digest_of
from tools.fused import compiled
from tools.int8_table import command

from .tensor import MACHINES, paths, simulate

BEGIN, END = "<!-- shares of the peak: tools.models.tensor_table -->", "<!-- end of shares of the peak -->"
_LANES = 32


class Row(NamedTuple):
    """A row of the table: of one kind of kernel on a machine."""

    label: str
    machine: str
    kind: str
    mask: str = "none"

    def variant(self, head_dim: int) -> Variant | None:
        """The kernel of the row, where there is one."""
        return _VARIANTS.get((self.kind, head_dim, self.mask))


_VARIANTS = {(v.kind, v.head_dim, v.mask): v for v in all_variants() if v.on_tensor_cores and not v.padded}
_HEAD_DIMS = (32, 40, 48, 64, 80, 96, 128, 256)
ROWS = [
    Row("T4", "T4", "tensor"),
    Row("T4, even distribution", "T4", "tensor_even"),
    Row("T4, a bool mask that cuts no tile, or every tile", "T4", "tensor", "bool"),
    Row("GeForce RTX 20xx, at half the tensor rate", "RTX 2080 Ti", "tensor"),
    Row("V100", "V100", "volta"),
    Row("V100, even distribution", "V100", "volta_even"),
    Row("T4, dQ", "T4", "tensor_grad_query"),
    Row("T4, dK and dV", "T4", "tensor_grad_key_value"),
    Row("V100, dQ", "V100", "volta_grad_query"),
    Row("V100, dK and dV", "V100", "volta_grad_key_value"),
]


def cell(row: Row, head_dim: int) -> str:
    """``"86 %"``, with a mask ``"86, 80 %"``; "" where there is no such kernel."""
    variant, machine = row.variant(head_dim), MACHINES[row.machine]
    if variant is None:
        return ""
    shares = []
    for masked in (False, True)[: 1 + (row.mask != "none")]:
        ((_, path),) = paths(compiled(variant, machine.arch).cubin, masked=masked)
        shares.append(simulate(path, machine, variant.threads // _LANES, variant.geometry.blocks))
    return ", ".join(f"{100 * share:.0f}" for share in shares) + " %"


def table() -> str:
    """The table, and which kernels it was made from."""
    lines = [["head_dim", *map(str, _HEAD_DIMS)]]
    lines += [[row.label, *(cell(row, head_dim) for head_dim in _HEAD_DIMS)] for row in ROWS]
    head, *body = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([head, "|---" * len(lines[0]) + "|", *body, made_from()])


def cells() -> Iterator[tuple[Row, int]]:
    """Yield those that the table fills."""
    return ((row, head_dim) for row in ROWS for head_dim in _HEAD_DIMS if row.variant(head_dim))


def made_from() -> str:
    """The line behind the table that names its kernels' source."""
    variants = dict.fromkeys(variant for row, head_dim in cells() if (variant := row.variant(head_dim)))
    return f"<!-- of kernels {digest_of(tuple(variants))} -->"


if __name__ == "__main__":
    command(__doc__, (BEGIN, END), table)
