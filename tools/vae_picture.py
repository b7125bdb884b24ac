"""A photograph decoded whole and in bands, and their difference: docs/bands.png.

    python tools/vae_picture.py [SIZE] [--budget MIB] [--write FILE]

The decoder is the class of Stable Diffusion and SDXL with their channel counts and random weights, so nothing is
downloaded. Only its last convolution is fitted, by least squares on some of the pixels. So it decodes the photograph
(US Navy, public domain, shipped with matplotlib) from a latent that holds it at an eighth of the size. The figures in
the picture are measured while it is made, as by ``tools/vae_cost.py``: most memory at once on the device, a CPU
standing in for it. Takes about ten minutes at 1024.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from vae_cost import decoded, made

PIXELS = 30_000  # to which the last convolution is fitted
AMPLIFIED = 100_000
WIDTH = 320  # of each panel


def photograph(size: int) -> Tensor:
    """The face of Grace Hopper, [1, 3, size, size], between -1 and 1."""
    import numpy as np
    from matplotlib.cbook import get_sample_data
    from PIL import Image

    with get_sample_data("grace_hopper.jpg") as file:
        picture = Image.open(file).convert("RGB").crop((64, 16, 448, 400)).resize((size, size))
    return rearrange(torch.from_numpy(np.asarray(picture) / 127.5 - 1), "h w c -> 1 c h w").float()


def fit(vae: Any, latent: Tensor, photo: Tensor) -> None:
    """Make what each block adds a tenth, as in a trained decoder more of the picture passes by the blocks than is added
    by them; set the last convolution to the one that comes nearest to ``photo``."""
    for name, weight in vae.decoder.named_parameters():
        if name.endswith(("conv2.weight", "to_out.0.weight")):
            weight.mul_(0.1)
    last: nn.Conv2d = vae.decoder.conv_out
    found: list[Tensor] = []
    hook = last.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    vae.decode(latent)
    hook.remove()
    height, width = photo.shape[-2:]
    rows, columns = torch.randint(1, height - 1, (PIXELS,)), torch.randint(1, width - 1, (PIXELS,))
    near = [found[0][0, :, rows + down, columns + right] for down in (-1, 0, 1) for right in (-1, 0, 1)]
    features = torch.cat([*near, torch.ones(1, PIXELS)]).T.double()
    solved = torch.linalg.lstsq(features, photo[0, :, rows, columns].T.double()).solution.float()
    last.weight.copy_(rearrange(solved[:-1], "(kh kw i) o -> o i kh kw", kh=3, kw=3))
    last.bias.copy_(solved[-1])


def draw(panels: list[tuple[str, Tensor]], path: Path) -> None:
    """Panels beside each other, each [1, 3, H, W] between -1 and 1 below its title."""
    from PIL import Image, ImageDraw, ImageFont

    sheet = Image.new("RGB", (len(panels) * (WIDTH + 8) - 8, WIDTH + 36), "#1b2733")
    font = ImageFont.load_default(22)
    for number, (title, values) in enumerate(panels):
        small = F.interpolate(values, (WIDTH, WIDTH), mode="area").clamp(-1, 1)
        pixels = rearrange((small + 1) * 127.5, "1 c h w -> h w c").round().byte().numpy()
        sheet.paste(Image.fromarray(pixels), (number * (WIDTH + 8), 36))
        ImageDraw.Draw(sheet).text((number * (WIDTH + 8) + 6, 4), title, "white", font)
    sheet.quantize(192).save(path, optimize=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", nargs="?", type=int, default=1024)
    parser.add_argument("--budget", type=float, default=80.0)
    parser.add_argument("--write", type=Path, default=Path(__file__).parents[1] / "docs" / "bands.png")
    options = parser.parse_args()
    torch.manual_seed(0)
    vae, _ = made("sd", options.size)
    photo = photograph(options.size)
    small = F.interpolate(photo, scale_factor=1 / 8, mode="area")
    latent = 2 * torch.cat([small, small.mean(1, keepdim=True)], dim=1)  # it and its brightness
    fit(vae, latent, photo)
    found = decoded(vae, latent, options.budget)
    difference = found.bands - found.whole
    titles = [
        f"whole: {found.whole_mib:,.0f} MiB",
        f"in bands: {found.bands_mib:,.0f} MiB",
        f"difference x {AMPLIFIED:,}",
    ]
    draw(list(zip(titles, (found.whole, found.bands, AMPLIFIED * difference), strict=True)), options.write)
    print("; ".join(titles), f"largest {float(difference.abs().max()):.1e} of {float(found.whole.abs().max()):.2f}")


if __name__ == "__main__":
    main()
