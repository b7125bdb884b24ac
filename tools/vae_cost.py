"""Costs and savings of decoding in bands: real channel counts, random weights, one thread.

python tools/vae_cost.py [sd SIZE | wan HEIGHT WIDTH FRAMES] [--budget MIB] [--rounds N] [--exact] [--plan]

Prints the most memory on the device at once, counted tensor by tensor (what lies between the layers in host memory is
not on the device; the weights are in neither figure), the CPU time of whole and banded calls in turns (medians), and
the largest difference. ``--exact`` decodes in float64 too: how far torch's own float32 is from that.
``--plan`` computes nothing, so that any size goes: the memory of a whole call from shapes alone, that in bands as
calculated before each layer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from pascal_attn_core import patch_vae
from pascal_attn_core.observe.memory import PeakMemory
from pascal_attn_core.vae.banded import Banded
from pascal_attn_core.vae.run import Run

MIB = 1 << 20


def stable_diffusion(size: int) -> tuple[nn.Module, Tensor]:
    """AutoencoderKL of SD and SDXL, and the latent of a picture of ``size`` x ``size`` pixels."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[128, 256, 512, 512],
        layers_per_block=2,
        latent_channels=4,
    )
    return vae, torch.randn(1, 4, size // 8, size // 8)


def wan(height: int, width: int, frames: int) -> tuple[nn.Module, Tensor]:
    """AutoencoderKLWan of Wan 2.1, and the latent of a video."""
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(), torch.randn(1, 16, 1 + (frames - 1) // 4, height // 8, width // 8)


@torch.no_grad()
def plan(vae: nn.Module, z: Tensor, budget: float) -> None:
    """Print what a call would take."""
    run = Run(z.device, int(budget * MIB), keep="host", is_rehearsal=True)
    out = vae.decode(Banded(run.known(z), run, z.device)).sample  # type: ignore[operator]
    run.evaluate(out.node, at_home=True)
    result = out.numel() * out.element_size()
    shapes_only, latent = vae.to("meta"), z.to("meta")
    with PeakMemory("meta") as whole:
        shapes_only.decode(latent)  # type: ignore[operator]
    figures = run.figures
    print(f"{list(z.shape)}, budget {budget:g} MiB: whole {whole.peak_mib:.0f} MiB; in bands "
          f"{figures.expected_bytes / MIB:.0f} MiB, of which the result {result / MIB:.0f}; in host memory "
          f"{figures.host_bytes / MIB:.0f}; {figures.bands} bands")  # fmt: skip


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    out = function()
    return time.process_time() - start, out


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="sd", choices=("sd", "wan"))
    parser.add_argument("sizes", nargs="*", type=int)
    parser.add_argument("--budget", type=float, default=64.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--plan", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, sizes = (
        (stable_diffusion, options.sizes or [512]) if options.model == "sd" else (wan, options.sizes or [96, 128, 9])
    )
    vae, z = make(*sizes)  # type: ignore[operator]
    vae.eval().requires_grad_(False)

    if options.plan:
        plan(vae, z, options.budget)
        return
    with torch.no_grad():
        with PeakMemory() as whole_peak:
            wanted = vae.decode(z).sample  # type: ignore[operator]
        with patch_vae(vae, keep="host", budget_mib=options.budget) as patch:
            vae.decode(z[..., :8, :8])  # type: ignore[operator]  # the proof is made once, before
            with PeakMemory() as peak:
                got = vae.decode(z).sample  # type: ignore[operator]
        figures = patch.report().calls[-1].figures
        assert figures is not None
        whole_times, times = [], []
        for _ in range(options.rounds):
            whole_times.append(timed(lambda: vae.decode(z))[0])  # type: ignore[operator]
            with patch_vae(vae, keep="host", budget_mib=options.budget, verify=False):
                times.append(timed(lambda: vae.decode(z))[0])  # type: ignore[operator]
        print(f"{options.model} {sizes}, torch {torch.__version__}, one thread")
        print(f"whole: {whole_peak.peak_mib:.0f} MiB; in bands (budget {options.budget:g}): {peak.peak_mib:.0f} MiB, "
              f"of which the result {got.nbytes / MIB:.0f}; in host memory {figures.host_bytes / MIB:.0f}; "
              f"{figures.bands} bands")  # fmt: skip
        if options.rounds:
            ratio = statistics.median(one / other for one, other in zip(times, whole_times))
            print(f"CPU time: whole {statistics.median(whole_times):.1f} s, in bands {statistics.median(times):.1f} s: "
                  f"{ratio:.2f} of it")  # fmt: skip
        print(f"largest difference {float((got - wanted).abs().max()):.1e} of {float(wanted.abs().max()):.2f}")
        if options.exact:
            exact = vae.double().decode(z.double()).sample  # type: ignore[operator]
            print(f"torch's own float32 and float64 differ by {float((wanted - exact).abs().max()):.1e}, "
                  f"bands and float64 by {float((got - exact).abs().max()):.1e}")  # fmt: skip


if __name__ == "__main__":
    main()
