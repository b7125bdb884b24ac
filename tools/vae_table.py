"""Which autoencoders of diffusers decode and encode in bands exactly: writes docs/vae-families.md, which says how."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))
from pascal_attn_core import patch_vae
from pascal_attn_core.vae.banded import Banded, finish
from pascal_attn_core.vae.run import BandedRun
from tools.families import WITHOUT_ATTENTION, Family, NotInThisVersion, sections

PAGE = Path(__file__).parents[1] / "docs" / "vae-families.md"


class Row(NamedTuple):
    """One method of one autoencoder. Differences are relative to the largest value of the whole call."""

    method: str
    state: str
    why: str
    difference: float
    own: float


def families() -> list[Family]:
    """All of the table but one that decodes no latent."""
    found = (*sections()["autoencoders"], *sections()[WITHOUT_ATTENTION])
    return [family for family in found if not family.model.endswith("LTX2VideoDiffusionDecoderModel")]


def called(vae: nn.Module, method: str, given: Tensor, options: dict[str, Any]) -> Any:
    """A call; some draw random numbers."""
    torch.manual_seed(0)
    return getattr(vae, method)(given, **options)


def numbers(found: Any) -> Tensor:
    """The tensors of a result, one after the other, float64."""
    leaves: list[Tensor] = []
    for leaf in tree_leaves(found if isinstance(found, (Tensor, tuple, dict)) else vars(found)):
        held = [leaf] if isinstance(leaf, Tensor) else list(getattr(leaf, "__dict__", {}).values())
        leaves += [each for each in held if isinstance(each, Tensor) and each.is_floating_point()]
    return torch.cat([leaf.detach().double().flatten() for leaf in leaves])


def calls(family: Family, vae: nn.Module) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """(method, its input, its other arguments)."""
    inputs = family.arguments()
    picture = next(iter(inputs.values()))
    encoded = vae.encode(picture)
    latent = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded[0]
    latent = torch.randn(latent.shape, generator=torch.Generator().manual_seed(0))
    yield "decode", latent, {"num_frames": inputs["num_frames"]} if "num_frames" in inputs else {}
    yield "encode", picture, {}


def rows(family: Family) -> Iterator[Row]:
    """One row for each method of a family."""
    vae = family.build().eval().requires_grad_(False)
    exact = copy.deepcopy(vae).double()
    for method, given, options in calls(family, vae):
        wanted = numbers(called(vae, method, given, options))
        scale = float(wanted.abs().max())
        try:
            own = float((numbers(called(exact, method, given.double(), options)) - wanted).abs().max()) / scale
        except RuntimeError:  # it casts to float32 itself
            own = float("nan")
        with patch_vae(vae) as patch:
            called(vae, method, given, options)
        if not patch.report().calls:  # the method is given something else than a latent or a picture
            yield Row(method, "as it is", f"its input has shape {list(given.shape)}", float("nan"), own)
            continue
        call = patch.report().calls[0]
        difference = float("nan")
        if call.state == "on":
            run = BandedRun(given.device, 1 << 40, rows=3)
            found = called(vae, method, Banded(run.known(given), run, given.device), options)
            finish(run)
            difference = float((numbers(found) - wanted).abs().max()) / scale
        whole = ", ".join(sorted(call.figures.whole)) if call.figures else ""
        why = call.why or (f"{whole} whole" if whole else "")
        yield Row(method, "exact" if call.state == "on" else "refused", why, difference, own)


def page() -> str:
    """The document."""
    lines = [
        "# Autoencoders in bands",
        "",
        "`python tools/vae_table.py` writes this page. Each autoencoder of diffusers is the real class at a tiny size "
        "with random weights, in float32, cut into bands of at most three rows. **difference**: the largest to the "
        "whole call, relative to the largest value of the result; **torch's own**: the same between float32 and "
        "float64 without bands. An operator that runs **whole** is not known in bands: the result is the same, that "
        "step takes the memory it always took.",
        "",
        "| autoencoder | method | in bands | difference | torch's own | remarks |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    with torch.no_grad():
        for family in families():
            try:
                found = list(rows(family))
            except NotInThisVersion:
                continue
            for row in found:
                figures = f"{row.difference:.0e} | {row.own:.0e}".replace("nan", "")
                lines.append(f"| {family.name} | {row.method} | {row.state} | {figures} | {row.why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    text = page()
    print(text)
    PAGE.write_text(text, encoding="utf-8")
