"""The exactness check: rows of one real call against float64, beside what plain attention would have given, and rows of
each kind of call against the host's own function, given the host's own arguments.

The first measures rounding; the second cannot be fooled by a misreading of the arguments, which both sides of the first
would share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...pascal_attn_core.reference import reference_sdpa
from ...pascal_attn_core.reference.checks import exact_limit, gap
from ..engine.compare import Difference
from ..engine.runs import Run, Sample
from .words import plural, shape_text


class Exactness(NamedTuple):
    """How far a run's answers were from the right ones.

    Attributes:
        is_exact: whether all errors are those of rounding. NaN is not, where the right answer is a number. None: there
            is no right answer, since query, key or value held NaN.
        text: the verdict, the error beside that of plain attention, and where.
    """

    is_exact: bool | None
    text: str


def check(run: Run) -> Exactness | None:
    """Compare the run's sample, once; its tensors are dropped. None while the run goes on, and without a sample."""
    if run.sample is not None and run.finished:
        run.exactness = exactness_of(run.sample, [found for found in run.compared.values() if found is not None])
        run.sample = None
    return run.exactness


def exactness_of(sample: Sample, host: Sequence[Difference] = ()) -> Exactness:
    """The errors of a sample, over the rows whose right answer is finite; ``host``: how far the first call of each kind
    was from the host's own answer."""
    kind, dtype = sample.kind, sample.query.dtype
    right, plain = _plain(sample, torch.float64), _plain(sample, dtype)
    known = torch.isfinite(right).all(dim=-1)
    ours, theirs = (gap(rows[known], right[known]) for rows in (sample.out, plain))
    limit, rows, where = exact_limit(theirs, dtype), int(known.sum()), kind.block or "unnamed"
    is_close = ours.error <= limit if rows else None
    is_exact = is_close if all(found.is_rounding for found in host) else False
    verdict = {True: "exact within rounding", False: "NOT EXACT", None: "exactness could not be checked"}[is_exact]
    if rows:
        rounding = "" if is_close else f" (rounding explains at most {limit:.2g})"
        beside = f"plain {kind.dtype} attention: {theirs.error:.2g}; values up to {theirs.largest:.2g}"
        found = f"{rounding}, largest error {ours.error:.2g} ({beside}), against float64 in {rows} rows of the largest "
        found += f"call: {where}, route {kind.route}, {shape_text(kind)}"
    else:
        found = f": query, key or value held NaN or infinity before attention ({where})"
    return Exactness(is_exact, f"{verdict}{found}{_host_text(host)}")


def _host_text(host: Sequence[Difference]) -> str:
    if not host:
        return ""
    worst = max(host, key=lambda found: found.gap.relative)
    other, kinds = sum(not found.is_rounding for found in host), f"{plural(len(host), 'kind')} of calls"
    agree = f"{other} of {kinds} DIFFER" if other else f"{kinds} compared"
    return f"; {agree}, at most {worst.text()} on the same arguments"


def _plain(sample: Sample, dtype: torch.dtype) -> Tensor:
    mask = sample.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    query, key, value = (tensor.to(dtype) for tensor in (sample.query, sample.key, sample.value))
    return reference_sdpa(query, key, value, mask, scale=sample.scale)[0]
