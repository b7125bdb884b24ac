"""The exactness check: rows of one real call against float64, beside what plain attention would have given, and rows of
each kind of call against the host's own function, given the host's own arguments.

The first measures rounding; the second cannot be fooled by a misreading of the arguments, which both sides of the first
would share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...pascal_attn_core.reference import reference_sdpa
from ..engine.compare import Difference
from ..engine.runs import CallKind, Run, Sample
from .words import shape_text

# An exact answer may be twice as far off as plain attention, and some units in the last place where that is lucky.
_FACTOR, _ULPS = 2.0, 16.0


@dataclass(frozen=True)
class Exactness:
    """How far the rows of one call were from float64.

    Attributes:
        kind: the call, the largest of the run.
        rows: how many rows of one head were compared: those whose right answer is finite.
        error, plain_error: largest absolute error of ours, and of plain attention computed in the call's dtype.
        largest: the largest absolute value of the right answer.
        host: how far the first call of each kind was from the host's own answer.
    """

    kind: CallKind
    rows: int
    error: float
    plain_error: float
    largest: float
    host: tuple[Difference, ...] = ()

    @property
    def limit(self) -> float:
        """The largest error that rounding explains."""
        dtype = getattr(torch, self.kind.dtype)
        ulps = _ULPS * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps
        plain_error = self.plain_error if math.isfinite(self.plain_error) else 0.0  # float16 that has overflowed
        return _FACTOR * plain_error + ulps * self.largest

    @property
    def is_known(self) -> bool:
        """Whether there was a right answer to compare with: there is none where query, key or value held NaN."""
        return self.rows > 0

    @property
    def is_exact(self) -> bool:
        """Whether all errors are those of rounding. NaN is not, where the right answer is a number."""
        right = not self.is_known or self.error <= self.limit
        return right and all(found.is_rounding for found in self.host)

    @property
    def verdict(self) -> str:
        """The result in some words."""
        if not self.is_exact:
            return "NOT EXACT"
        return "exact within rounding" if self.is_known else "exactness could not be checked"

    @property
    def tone(self) -> str:
        """The tone of the picture's row, see ``picture.TONES``."""
        return "good" if self.is_exact and self.is_known else "bad" if self.is_known else "caution"

    def text(self) -> str:
        """One line for the report."""
        if not self.is_known:
            found = f"{self.verdict}: query, key or value held NaN or infinity before attention"
            return f"{found} ({self.kind.block or 'unnamed'}){self._host_text()}"
        verdict = self.verdict
        if not self.error <= self.limit:
            verdict += f" (rounding explains at most {self.limit:.2g})"
        plain = f"plain {self.kind.dtype} attention: {self.plain_error:.2g}"
        where = f"{self.kind.block or 'unnamed'}, route {self.kind.route}, {shape_text(self.kind)}"
        return (
            f"{verdict}, largest error {self.error:.2g} ({plain}; values up to {self.largest:.2g}), against float64 in "
            f"{self.rows} rows of the largest call: {where}{self._host_text()}"
        )

    def _host_text(self) -> str:
        if not self.host:
            return ""
        worst = max(self.host, key=lambda found: found.error / max(found.largest, 1e-30))
        other = sum(not found.is_rounding for found in self.host)
        kinds = f"{len(self.host)} kind{'' if len(self.host) == 1 else 's'} of calls"
        agree = f"{other} of {kinds} DIFFER" if other else f"{kinds} compared"
        return f"; {agree}, at most {worst.text()} on the same arguments"


_checked: WeakKeyDictionary[Run, Exactness] = WeakKeyDictionary()


def check(run: Run) -> Exactness | None:
    """Compare the run's sample, once; its tensors are dropped. None while the run goes on, and without a sample."""
    if run.sample is not None and run.finished:
        host = tuple(found for found in run.compared.values() if found is not None)
        _checked[run] = replace(exactness_of(run.sample), host=host)
        run.sample = None
    return _checked.get(run)


def exactness_of(sample: Sample) -> Exactness:
    """The errors of a sample, over the rows whose right answer is finite."""
    right = _plain(sample, torch.float64)
    known = torch.isfinite(right).all(dim=-1)
    plain = _plain(sample, sample.query.dtype)
    errors = [_distance(answer[known], right[known]) for answer in (sample.out, plain)]
    return Exactness(sample.kind, int(known.sum()), *errors, _largest(right[known]))


def _plain(sample: Sample, dtype: torch.dtype) -> Tensor:
    mask = sample.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    query, key, value = (tensor.to(dtype) for tensor in (sample.query, sample.key, sample.value))
    return reference_sdpa(query, key, value, mask, scale=sample.scale)[0]


def _distance(answer: Tensor, right: Tensor) -> float:
    return _largest(answer.double() - right)


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
