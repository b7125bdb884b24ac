"""Several cards of one machine: whether one reads the other's memory, and their PCIe links."""

from __future__ import annotations

import contextlib
import itertools
from typing import NamedTuple

import torch

QUERY = "pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
# Of one lane in each direction, after line coding, by generation: PCI Express base specifications.
_LANE_BYTES = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9}
REACHED = 0.76  # of that by copies from and to pinned memory


class Link(NamedTuple):
    """A card's PCIe link: the highest generation that card and slot have in common (a card at rest uses a lower one),
    the lanes that it uses, and the lanes that it could use."""

    generation: int
    width: int
    widest: int

    @property
    def bytes_per_second(self) -> float:
        """The rate that copies from and to pinned memory may reach each way; 0 where the generation is not known."""
        return REACHED * self.width * _LANE_BYTES.get(self.generation, 0.0)

    @property
    def text(self) -> str:
        """``"PCIe 3.0 x8 of x16, about 6.0 GB/s each way"``."""
        of = f" of x{self.widest}" if self.widest != self.width else ""
        rate = f", about {self.bytes_per_second / 1e9:.1f} GB/s each way" if self.bytes_per_second else ""
        return f"PCIe {self.generation}.0 x{self.width}{of}{rate}"


def parse_link(text: str) -> Link | None:
    """The link in a line of nvidia-smi's CSV; None where it has another form, as on cards that do not say."""
    parts = [part.strip() for part in text.partition("\n")[0].split(",")]
    if len(parts) != 3 or not all(part.isdigit() for part in parts):
        return None
    return Link(*map(int, parts))


def direct_pairs(count: int) -> tuple[tuple[int, int], ...]:
    """Pairs of CUDA devices of which the first can read the second's memory."""
    pairs = []
    for first, second in itertools.permutations(range(count), 2):
        with contextlib.suppress(RuntimeError):  # a card that cannot be started
            pairs += [(first, second)] if torch.cuda.can_device_access_peer(first, second) else []
    return tuple(pairs)
