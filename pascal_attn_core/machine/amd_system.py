"""AMD's cards as the system knows them, whatever the environment makes the runtime take them for.

``HSA_OVERRIDE_GFX_VERSION=10.3.0`` makes ROCm take every card for a gfx1030, which is how most RX 5000 cards run
torch's wheels. They lack some of that architecture's instructions, and one of those ends the process. The kernel driver
knows better: ``gfx_target_version`` in the topology that it shows (Linux kernel, ``amdkfd/kfd_topology.c``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

UNKNOWN = "unknown"
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"  # for all cards, and with _0, _1 ... behind it for one
_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
Place = tuple[int | None, ...]  # PCI domain, bus and device; None where torch does not say


class Node(NamedTuple):
    """One GPU of the topology: its architecture, and its place: PCI domain, bus and device."""

    arch: str
    place: tuple[int, int, int]


def nodes(folder: Path = _NODES) -> list[Node]:
    """The GPUs that the kernel driver lists; [] where there is no such list."""
    found: list[Node | None] = []
    for file in sorted(folder.glob("*/properties"), key=lambda file: (len(file.parent.name), file.parent.name)):
        with contextlib.suppress(OSError):  # a container may read the files of its own cards only
            found.append(_node(file.read_text(encoding="utf-8")))
    return [node for node in found if node is not None]


def _node(text: str) -> Node | None:
    """A node by its lines of a name and a number each; None: it is no GPU."""
    lines = (line.split() for line in text.splitlines())
    facts = {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdigit()}
    version, location = facts.get("gfx_target_version", 0), facts.get("location_id", 0)
    if not version:
        return None
    # 100300 is gfx1030, 90010 is gfx90a
    arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    return Node(arch, (facts.get("domain", 0), location >> 8 & 0xFF, location >> 3 & 0x1F))


def true_arch(place: Place, overrides: Collection[str], folder: Path = _NODES) -> str:
    """The architecture of a card, ``"gfx1010"``, where the environment makes it another one, or :data:`UNKNOWN`; ""
    where it is left as it is.

    Args:
        place: of the card.
        overrides: the variables in the environment whose names begin with :data:`OVERRIDE`.
        folder: of the kernel driver's topology.
    """
    if not overrides:
        return ""
    found = nodes(folder)
    archs = {node.arch for node in found}
    if len(archs) == 1:  # all cards are alike, so it does not matter which one this is
        return archs.pop()
    here = [node.arch for node in found if node.place == place]
    return here[0] if len(here) == 1 else UNKNOWN
