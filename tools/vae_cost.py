"""Costs and savings of decoding in bands: real channel counts, random weights, one thread.

python tools/vae_cost.py [sd SIZE | wan HEIGHT WIDTH FRAMES] [--budget MIB] [--exact] [--plan]

Prints the most memory on the device at once, the CPU time of whole and banded calls in turns (medians), and the largest
difference. Memory is counted tensor by tensor, without the weights and without what lies between the layers in host
memory. ``--exact`` decodes in float64 too: how far torch's own float32 is from that.
``--plan`` computes nothing, so that any size goes: the memory of a whole call from shapes alone, that in bands as
calculated before each layer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from pascal_attn_core import patch_vae
from pascal_attn_core.contest.timing_table import median_times
from pascal_attn_core.observe.memory import PeakMemory
from pascal_attn_core.vae.banded import Banded
from pascal_attn_core.vae.run import BandedRun
from tools.families import sections
from tools.families.table import TABLE

MIB = 1 << 20


LATENTS: dict[str, Callable[..., tuple[int, ...]]] = {
    "sd": lambda size=512: (1, 4, size // 8, size // 8),
    "wan": lambda height=96, width=128, frames=9: (1, 16, 1 + (frames - 1) // 4, height // 8, width // 8),
}


def made(name: str, *sizes: int) -> tuple[Any, Tensor]:
    """The autoencoder of SD and SDXL, or of Wan 2.1, and the latent of a picture or video of this size in pixels."""
    (family,) = (each for each in sections(TABLE.with_name("published.txt"))["autoencoders"] if each.variant == name)
    return family.as_given().eval().requires_grad_(False), torch.randn(LATENTS[name](*sizes))


@torch.no_grad()
def plan(vae: Any, z: Tensor, budget: float) -> None:
    """Print what a call would take."""
    run = BandedRun(z.device, int(budget * MIB), keep="host", is_rehearsal=True)
    out = vae.decode(Banded(run.known(z), run, z.device)).sample
    run.evaluate(out.node, on_device=True)
    result = out.numel() * out.element_size()
    shapes_only, latent = vae.to("meta"), z.to("meta")
    with PeakMemory("meta") as whole:
        shapes_only.decode(latent)
    figures = run.figures
    print(f"{list(z.shape)}, budget {budget:g} MiB: whole {whole.peak_mib:.0f} MiB; in bands "
          f"{figures.expected_bytes / MIB:.0f} MiB, of which the result {result / MIB:.0f}; in host memory "
          f"{figures.host_bytes / MIB:.0f}; {figures.bands} bands")  # fmt: skip


class Decoded(NamedTuple):
    """A picture or video decoded whole and in bands: most bytes at once of each, and the figures of the bands."""

    whole: Tensor
    bands: Tensor
    whole_mib: float
    bands_mib: float
    figures: Any


def decoded(vae: Any, z: Tensor, budget: float) -> Decoded:
    """Decode a latent both ways, with this many MiB for the bands."""
    with PeakMemory() as whole_peak:
        whole = vae.decode(z).sample
    with patch_vae(vae, keep="host", budget_mib=budget) as patch:
        vae.decode(z[..., :8, :8])  # the check against the whole call is made once, before
        with PeakMemory() as peak:
            bands = vae.decode(z).sample
    return Decoded(whole, bands, whole_peak.peak_mib, peak.peak_mib, patch.report().calls[-1].figures)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="sd", choices=LATENTS)
    parser.add_argument("sizes", nargs="*", type=int)
    parser.add_argument("--budget", type=float, default=64.0)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--plan", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    vae, z = made(options.model, *options.sizes)
    if options.plan:
        plan(vae, z, options.budget)
        return
    found = decoded(vae, z, options.budget)

    def in_bands() -> None:
        with patch_vae(vae, keep="host", budget_mib=options.budget, verify=False):
            vae.decode(z)

    whole_ms, bands_ms = median_times([lambda: vae.decode(z), in_bands], z.device)
    print(f"{options.model} {options.sizes or ''}, torch {torch.__version__}, one thread")
    print(f"whole: {found.whole_mib:.0f} MiB; in bands (budget {options.budget:g}): {found.bands_mib:.0f} MiB, "
          f"of which the result {found.bands.nbytes / MIB:.0f}; in host memory {found.figures.host_bytes / MIB:.0f}; "
          f"{found.figures.bands} bands")  # fmt: skip
    times = f"whole {whole_ms / 1e3:.1f} s, in bands {bands_ms / 1e3:.1f} s: {bands_ms / whole_ms:.2f} of it"
    print(f"CPU time: {times}")
    difference = float((found.bands - found.whole).abs().max())
    print(f"largest difference {difference:.1e} of {float(found.whole.abs().max()):.2f}")
    if options.exact:
        exact = vae.double().decode(z.double()).sample
        print(f"torch's own float32 and float64 differ by {float((found.whole - exact).abs().max()):.1e}, "
              f"bands and float64 by {float((found.bands - exact).abs().max()):.1e}")  # fmt: skip


if __name__ == "__main__":
    main()
