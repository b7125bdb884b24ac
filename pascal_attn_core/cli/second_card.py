"""``pascal-attn second-card``: what a second card would gain, per model and pair of cards, from the cards' float32 peak
and the rate of the link between them. Nothing is measured."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from ..machine.device import MIB, DeviceInfo
from ..machine.facts import Machine, device_names, look_around
from ..machine.together import REACHED, Link
from ..routes.several import WORTH, Speed, divided
from . import CommandError

PEAK_SHARE = 0.55  # of a card's float32 peak that attention reaches


class Model(NamedTuple):
    """The self-attention of a model at one size: batch 1, float32."""

    name: str
    heads: int
    tokens: int
    head_dim: int

    def gain(self, home: DeviceInfo, away: DeviceInfo, link: float) -> float:
        """Speed of the attention on two cards relative to the first alone, with a link of ``link`` bytes per second;
        1.0 where it would not be shared."""
        flops = 4.0 * self.head_dim * MIB / PEAK_SHARE
        speed = Speed(1e3 * flops / home.fp32_flops, 1e3 * flops / away.fp32_flops, 1e3 * MIB / link)
        crossing = 4 * self.tokens * self.head_dim * 4
        _, ratio = divided(self.heads, self.tokens**2 / MIB, crossing / MIB, (speed,))
        return 1 / ratio if ratio <= WORTH else 1.0


MODELS = (
    Model("SDXL 1024", 10, 4096, 64),
    Model("Z-Image, Flux 1024", 24, 4608, 128),
    Model("Flux 2048", 24, 16896, 128),
    Model("Wan 1.3B 480p, 81 frames", 12, 32760, 128),
    Model("Wan 14B 480p, 81 frames", 40, 32760, 128),
    Model("Wan 14B 720p, 81 frames", 40, 75600, 128),
)


def _card(name: str, capability: tuple[int, int], num_sms: int, mhz: int) -> DeviceInfo:
    return DeviceInfo("cuda", name, capability=capability, num_sms=num_sms, clock_hz=mhz * 1_000_000)


# Multiprocessors and boost clock as their maker gives them.
CARDS = {
    card.name: card
    for card in (
        _card("GTX 1060 6GB", (6, 1), 10, 1708),
        _card("GTX 1070", (6, 1), 15, 1683),
        _card("GTX 1070 Ti", (6, 1), 19, 1683),
        _card("GTX 1080", (6, 1), 20, 1733),
        _card("GTX 1080 Ti", (6, 1), 28, 1582),
        _card("P40", (6, 1), 30, 1531),
        _card("P100", (6, 0), 56, 1303),
        _card("V100", (7, 0), 80, 1380),
        _card("T4", (7, 5), 40, 1590),
        _card("RTX 2080", (7, 5), 46, 1710),
        _card("RTX 2080 Ti", (7, 5), 68, 1545),
    )
}
X8, X1 = Link(3, 8, 16), Link(3, 1, 16)
PAIRS = (
    ("GTX 1080 Ti", "GTX 1080 Ti", X8),
    ("P40", "P40", X8),
    ("P100", "P100", X8),
    ("GTX 1080 Ti", "GTX 1060 6GB", X8),
    ("GTX 1080 Ti", "GTX 1080 Ti", X1),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``second-card``."""
    parser.add_argument(
        "--pair", metavar="FIRST,SECOND", help=f"two cards of {', '.join(CARDS)}; without it a choice of pairs"
    )
    parser.add_argument("--lanes", type=int, help="PCIe 3.0 lanes of the slower slot, for --pair (8)")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    pairs = list(PAIRS)
    if options.pair:
        known = {name.casefold(): name for name in CARDS}
        names = [known.get(name.strip().casefold(), "") for name in options.pair.split(",")]
        if not all(names) or len(names) != 2:
            raise CommandError(f"--pair must be two of {', '.join(CARDS)}, got {options.pair!r}")
        lanes = 8 if options.lanes is None else options.lanes
        if lanes not in (1, 2, 4, 8, 16):
            raise CommandError(f"--lanes must be 1, 2, 4, 8 or 16, got {lanes}")
        pairs = [(names[0], names[1], Link(3, lanes, 16))]
    elif options.lanes is not None:
        raise CommandError("--lanes needs --pair FIRST,SECOND")
    print(table(pairs))
    if not options.pair and len(device_names()) > 1:
        for name, gains in own_gains(look_around()):
            print(f"\nthis machine, {name} (calculated): " + ", ".join(f"{model} {gain:.2f}" for model, gain in gains))
    return 0


def table(pairs: Any = PAIRS) -> str:
    """In Markdown: how many times as fast attention is as on the first card alone."""
    heads = [f"{second} beside {first}, PCIe {link.generation}.0 x{link.width}" for first, second, link in pairs]
    lines = ["| attention of (model) | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads)]
    for model in MODELS:
        gains = [model.gain(CARDS[first], CARDS[second], link.bytes_per_second) for first, second, link in pairs]
        lines.append(f"| {model.name} | " + " | ".join(f"{gain:.2f}" for gain in gains) + " |")
    lines += ["", assumptions()]
    return "\n".join(lines)


def assumptions() -> str:
    """The assumptions behind the figures, as a sentence."""
    return (
        f"Calculated, not measured: float32 attention at {PEAK_SHARE:.0%} of the cards' float32 peak, copies at "
        f"{REACHED:.0%} of the link's rate ({X8.bytes_per_second / 1e9:.1f} GB/s for PCIe 3.0 x8)."
    )


def own_gains(machine: Machine) -> list[tuple[str, list[tuple[str, float]]]]:
    """For each other card of this machine beside the first, where both are known: (the pair, the gain per model)."""
    found = []
    for number, card in enumerate(machine.devices[1:], start=1):
        home, links = machine.devices[0], (*machine.links[:1], *machine.links[number : number + 1])
        rates = [link.bytes_per_second for link in links if link is not None and link.bytes_per_second]
        if home.fp32_flops and card.fp32_flops:
            gains = [(model.name, model.gain(home, card, min(rates, default=X8.bytes_per_second))) for model in MODELS]
            found.append((f"{card.name} (cuda:{number}) beside {home.name} (cuda:0)", gains))
    return found
