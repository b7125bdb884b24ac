"""VAE decoding and encoding in bands of rows or frames: exact, without tiles, within the available memory.

    with patch_vae(pipe.vae, budget_mib=512) as patch:
        pipe(prompt)
    print(patch.report())

The VAE's own ``forward`` runs on a tensor that records the operators applied to it (:mod:`.banded`). Convolutions are
computed range by range, including the neighbouring rows that each range depends on; group norms gather their sums over
all ranges before they are applied; attention takes this package's routes. Between two layers a tensor is kept on the
device if it fits, else in host memory. Before the first run with a given VAE, dtype and kind of input, a small input is
computed both ways. If the two do not agree to rounding, the VAE runs as if it had not been patched, and the report says
so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..patching.patch import NothingToPatch, Patch, PatchGroup
from ..patching.selectors import autoencoder_of
from .calls import METHODS, BandSettings, PatchedMethod, VaeReport, bound
from .lazy import NotInBands
from .store import KEEP

__all__ = ["NotInBands", "VaePatch", "VaeReport", "patch_vae"]


def patch_vae(
    vae: Any,
    *,
    budget_mib: float | None = None,
    keep: str = "auto",
    when: str = "always",
    verify: bool = True,
    progress: Callable[[float], None] | None = None,
    expected_bytes: Callable[..., int] | None = None,
) -> VaePatch:
    """Let ``vae.decode`` and ``vae.encode`` run in bands.

    Args:
        vae: an autoencoder of diffusers, ComfyUI's ``first_stage_model``, or any module with such methods whose first
            argument is the latent or picture, ``[B, C, ..., H, W]`` (audio: ``[B, C, L]``), float; or a diffusers
            pipeline: then its ``vae``.
        budget_mib: memory on the device in MiB for one band and what is kept there between layers, besides the weights,
            the input and the result. None = 0.7 of what is free when a call begins; 64 on a CPU. A single row that
            needs more is computed anyway.
        keep: where tensors are kept between layers: ``"auto"`` = on the device up to half of the budget, then in host
            memory; ``"device"``; ``"host"``. On a CPU the two are the same memory.
        when: ``"always"``; or ``"needed"``: a call runs without bands, and in bands only if ``expected_bytes`` exceeds
            the free memory or if it runs out of memory.
        verify: compare on a small input first, see above. False = trust the VAE.
        progress: called after each band with the fraction done, 0 to 1 (0 if unknown). An exception from it ends the
            call.
        expected_bytes: the host's own estimate for a call, given the method's name and the input's shape and dtype.
    Returns:
        A Patch with ``report()``. While patched, the VAE's own tiled decoding is not used even if it is enabled;
        slicing is.
    Raises:
        TypeError, ValueError: an invalid argument.
    """
    vae = autoencoder_of(vae)
    if keep not in KEEP:
        raise ValueError(f"keep must be one of {', '.join(KEEP)}, got {keep!r}")
    if when not in ("always", "needed"):
        raise ValueError(f"when must be 'always' or 'needed', got {when!r}")
    found = [name for name in METHODS if callable(getattr(vae, name, None))]
    if not found:
        raise NothingToPatch(f"vae must have one of the methods {', '.join(METHODS)}, got {type(vae).__name__}")
    settings = BandSettings(budget_mib, keep, when == "needed", verify, progress, expected_bytes)
    sites = {}
    with PatchGroup(f"bands of {type(vae).__name__}") as group:
        for name in found:
            sites[name] = site = PatchedMethod(vae, name, getattr(vae, name), settings)
            group.add(bound(site))
    return VaePatch(group, sites)


class VaePatch(Patch):
    """The patch that :func:`patch_vae` returns."""

    def __init__(self, group: PatchGroup, sites: dict[str, PatchedMethod]):
        self._sites = sites
        super().__init__(group.name, group._undo_all, sites=len(sites))

    def report(self) -> VaeReport:
        return VaeReport([call for site in self._sites.values() for call in site.calls], tuple(self._sites))
