"""``pascal-attn second-card``: what a second card would gain, per model and pair of cards, from the cards' float32 peak
and the rate of the link between them. Nothing is measured."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from ..machine.device import MIB, DeviceInfo
from ..machine.facts import REACHED, Link
from ..routes.several import WORTH, Speed, divided

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
# Multiprocessors and boost clock as their maker gives them.
GTX_1060 = DeviceInfo("cuda", "GTX 1060 6GB", (6, 1), num_sms=10, clock_hz=1_708_000_000)
GTX_1080_TI = DeviceInfo("cuda", "GTX 1080 Ti", (6, 1), num_sms=28, clock_hz=1_582_000_000)
P40 = DeviceInfo("cuda", "P40", (6, 1), num_sms=30, clock_hz=1_531_000_000)
P100 = DeviceInfo("cuda", "P100", (6, 0), num_sms=56, clock_hz=1_303_000_000)
X8, X1 = Link(3, 8, 16), Link(3, 1, 16)
PAIRS = (
    (GTX_1080_TI, GTX_1080_TI, X8),
    (P40, P40, X8),
    (P100, P100, X8),
    (GTX_1080_TI, GTX_1060, X8),
    (GTX_1080_TI, GTX_1080_TI, X1),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command has no options."""


def run(options: argparse.Namespace) -> int:
    """Print in Markdown how many times as fast attention is as on the first card alone."""
    heads = [f"{away.name} beside {home.name}, PCIe {link.generation}.0 x{link.width}" for home, away, link in PAIRS]
    print("| attention of (model) | " + " | ".join(heads) + " |", "|---|" + "---|" * len(heads), sep="\n")
    for model in MODELS:
        gains = [f"{model.gain(home, away, link.bytes_per_second):.2f}" for home, away, link in PAIRS]
        print(f"| {' | '.join([model.name, *gains])} |")
    print(
        f"\nCalculated, not measured: float32 attention at {PEAK_SHARE:.0%} of the cards' float32 peak, copies at "
        f"{REACHED:.0%} of the link's rate ({X8.bytes_per_second / 1e9:.1f} GB/s for PCIe 3.0 x8)."
    )
    return 0
