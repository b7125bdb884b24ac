"""The exactness check: rows of one real call against float64, beside what plain attention would have given, and rows of
each kind of call against the host's own function, given the host's own arguments.

The first measures rounding; the second cannot be fooled by a misreading of the arguments, which both sides of the first
would share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...pascal_attn_core.reference import reference_sdpa
from ...pascal_attn_core.reference.checks import Gap, exact_limit, gap
from ..engine.compare import Difference
from ..engine.runs import CallKind, Run, Sample
from .words import plural, shape_text


@dataclass(frozen=True)
class Exactness:
    """How far the rows of one call were from float64.

    Attributes:
        kind: the call, the largest of the run.
        rows: how many rows of one head were compared: those whose right answer is finite.
        ours, plain: distance from the right answer, of our rows and of plain attention computed in the call's dtype.
        host: how far the first call of each kind was from the host's own answer.
    """

    kind: CallKind
    rows: int
    ours: Gap
    plain: Gap
    host: tuple[Difference, ...] = ()

    @property
    def limit(self) -> float:
        """The largest error that rounding explains."""
        return exact_limit(self.plain, getattr(torch, self.kind.dtype))

    @property
    def is_known(self) -> bool:
        """Whether there was a right answer to compare with: there is none where query, key or value held NaN."""
        return self.rows > 0

    @property
    def is_exact(self) -> bool:
        """Whether all errors are those of rounding. NaN is not, where the right answer is a number."""
        right = not self.is_known or self.ours.error <= self.limit
        return right and all(found.is_rounding for found in self.host)

    @property
    def tone(self) -> str:
        return "bad" if not self.is_exact else "good" if self.is_known else "caution"

    def text(self) -> str:
        """The verdict, the error beside that of plain attention, where, and how far the host's own answers are."""
        where = self.kind.block or "unnamed"
        if self.is_known:
            verdict = "exact within rounding" if self.is_exact else "NOT EXACT"
            rounding = "" if self.ours.error <= self.limit else f" (rounding explains at most {self.limit:.2g})"
            plain = f"plain {self.kind.dtype} attention: {self.plain.error:.2g}"
            error = f"largest error {self.ours.error:.2g} ({plain}; values up to {self.plain.largest:.2g})"
            rows = f"against float64 in {self.rows} rows of the largest call"
            found = f"{rounding}, {error}, {rows}: {where}, route {self.kind.route}, {shape_text(self.kind)}"
        else:
            verdict = "exactness could not be checked" if self.is_exact else "NOT EXACT"
            found = f": query, key or value held NaN or infinity before attention ({where})"
        if not self.host:
            return verdict + found
        worst = max(self.host, key=lambda found: found.gap.relative)
        other, kinds = sum(not found.is_rounding for found in self.host), plural(len(self.host), "kind")
        agree = f"{other} of {kinds} of calls DIFFER" if other else f"{kinds} of calls compared"
        return f"{verdict}{found}; {agree}, at most {worst.text()} on the same arguments"


def check(run: Run) -> Exactness | None:
    """Compare the run's sample, once; its tensors are dropped. None while the run goes on, and without a sample."""
    if run.sample is not None and run.finished:
        host = tuple(found for found in run.compared.values() if found is not None)
        run.exactness = replace(exactness_of(run.sample), host=host)
        run.sample = None
    return run.exactness


def exactness_of(sample: Sample) -> Exactness:
    """The errors of a sample, over the rows whose right answer is finite."""
    right, plain = _plain(sample, torch.float64), _plain(sample, sample.query.dtype)
    known = torch.isfinite(right).all(dim=-1)
    ours, others = (gap(rows[known], right[known]) for rows in (sample.out, plain))
    return Exactness(sample.kind, int(known.sum()), ours, others)


def _plain(sample: Sample, dtype: torch.dtype) -> Tensor:
    mask = sample.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    query, key, value = (tensor.to(dtype) for tensor in (sample.query, sample.key, sample.value))
    return reference_sdpa(query, key, value, mask, scale=sample.scale)[0]
