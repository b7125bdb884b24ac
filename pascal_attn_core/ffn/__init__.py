"""Feed-forward modules run over slices of their tokens, so that their wide hidden tensors never exist as a whole.

    with patch_ffn(model, budget_mib=64) as patch:
        model(x)
    print(patch.report())

Each module keeps its place, its class and its state-dict keys; what changes is the ``forward`` of the instance. Its
code runs once a call, on tensors without data (:mod:`.graph`). Only operators that are known to treat every token by
itself (:mod:`.rules`) then run slice by slice; any other makes the call run as if the module had not been patched.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..config import number_of
from ..patching.patch import Patch, require_sites
from ..patching.selectors import denoisers_of, require_matches
from .binding import FfnBinding
from .report import FfnReport, FfnReportLine

__all__ = ["FfnPatch", "FfnReport", "FfnReportLine", "patch_ffn"]


def patch_ffn(
    model: Any,
    *,
    budget_mib: float | None = None,
    chunk_tokens: int | None = None,
    num_chunks: int | None = None,
    min_tokens: int = 256,
    min_seq: int | None = None,
    include: Any = None,
    exclude: Any = None,
    verbose: bool = False,
) -> FfnPatch:
    """Run the feed-forward modules of ``model`` over slices of their tokens, dimension -2 of ``[..., T, C]``.

    Args:
        model: any module, or a diffusers pipeline: then its denoisers, both of Wan 2.2 for example, and the names of
            their modules begin with that of the component (``"transformer_2.blocks.0.ffn"``).
        budget_mib: largest extra memory of one call in MiB, besides its input and output; None = a quarter of a GPU's
            free memory, or 64 if that is more. The fewest slices that stay within it are used; a call that fits runs
            whole. Where gradients are needed, each slice is recomputed in the backward pass.
        chunk_tokens: maximum number of tokens per slice, instead of a budget.
        num_chunks: number of slices, instead of a budget; None or 0 = ``PASCAL_ATTN_FFN_CHUNKS`` in the environment, or
            the budget if that is not set.
        min_tokens: calls with fewer tokens run whole.
        min_seq: noflash-attention's name for ``min_tokens``; None = ``min_tokens`` applies.
        include: exactly these modules instead of those recognised: a shell pattern for the qualified name
            (``"blocks.*.ffn"``), a class, a predicate ``(name, module) -> bool``, or several of them.
        exclude: modules that stay whole, given in the same way.
        verbose: print which modules were found; ``report()`` lists the same, and later how each of them runs.
    Returns:
        A Patch with ``num_wrapped`` and ``report()``. Patches may be removed in any order; if there are several, the
        newest applies. Copies and pickles of a model are without the patch.
    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an invalid argument, a pattern that chooses nothing, or no module that can run in slices.
    """
    target, model = model, denoisers_of(model)
    require_matches(model, include=include, exclude=exclude)
    if chunk_tokens is not None and num_chunks:
        raise ValueError(f"chunk_tokens must be None where num_chunks is given, got {chunk_tokens} and {num_chunks}")
    if chunk_tokens is None and budget_mib is None:
        num_chunks = num_chunks or number_of("PASCAL_ATTN_FFN_CHUNKS")
    binding = FfnBinding(
        include=include,
        exclude=exclude,
        budget_mib=budget_mib,
        chunk_tokens=chunk_tokens,
        num_chunks=num_chunks or None,
        min_tokens=min_tokens if min_seq is None else min_seq,
    )
    patch = require_sites(FfnPatch(type(target).__name__, model, binding))
    if verbose:
        print(patch.report())
    return patch


class FfnPatch(Patch):
    """The patch that :func:`patch_ffn` returns."""

    def __init__(self, kind: str, model: nn.Module, binding: FfnBinding):
        self._model, self._binding = model, binding
        super().__init__(f"feed-forward of {kind}", binding.detach, sites=binding.attach(model))

    @property
    def num_wrapped(self) -> int:
        """Number of modules that run in slices where their operators allow it and it saves memory; 0 after removal."""
        return self.sites if self.active else 0

    def report(self) -> FfnReport:
        """The state of each module so far."""
        return self._binding.report(self._model)
