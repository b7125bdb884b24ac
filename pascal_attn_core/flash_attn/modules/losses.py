"""Cross entropy: ``flash_attn.ops.triton.cross_entropy`` and ``flash_attn.losses.cross_entropy``.

Computed in float32 (float64 for float64), some rows at a time: besides the logits and their gradient no tensor of the
vocabulary's size exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..options import FlashArgumentError, on_one_device

# Elements of the logits that are computed at a time.
_CHUNK = 1 << 24


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each row.

    Args:
        logits: ``[N, V]``.
        labels: whole numbers ``[N]``. One outside of the vocabulary is not refused (as in flash-attn): check labels
            before, torch's own cross entropy would raise.
        precomputed_lse: ``[N]``, logsumexp of the rows; used where logit_scale is 1 and label_smoothing 0.
        label_smoothing: share of the target that is spread over the vocabulary.
        logit_scale: factor of the logits.
        lse_square_scale: this * logsumexp ** 2 (z-loss) is added to the loss.
        ignore_index: rows with this label have loss 0 and no gradient.
        inplace_backward: the gradient is written into the memory of the logits.
    Returns:
        (losses ``[N]``, what lse_square_scale has added ``[N]``, without a gradient), float32 or float64.
    Raises:
        TypeError, ValueError: arguments that do not fit together.
        NotImplementedError: process_group is given.
    """
    on_one_device(process_group)
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(f"logits must be floating point numbers, got {getattr(logits, 'dtype', type(logits).__name__)}")
    if logits.dim() != 2:
        raise FlashArgumentError(f"logits must be [N, V], got shape {tuple(logits.shape)}")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise TypeError(f"labels must be whole numbers, got {labels.dtype}")
    for name, rows in (("labels", labels), ("precomputed_lse", precomputed_lse)):
        if rows is not None and rows.shape != logits.shape[:1]:
            raise FlashArgumentError(f"{name} must be [{logits.shape[0]}], got {list(rows.shape)}")
    if not logit_scale > 0.0:
        raise FlashArgumentError(f"logit_scale must be above 0, got {logit_scale}")
    rule = _Rule(label_smoothing, logit_scale, lse_square_scale, ignore_index, inplace_backward)
    losses, z_losses = _CrossEntropy.apply(logits, labels, precomputed_lse, rule)
    return losses, z_losses


class CrossEntropyLoss(torch.nn.Module):
    """:func:`cross_entropy_loss` as a module; "mean" is over the rows that are not ignored.

    Args:
        reduction: "mean", "sum" or "none".
        return_z_loss: return (loss, what lse_square_scale has added).
        others: see :func:`cross_entropy_loss`.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: None = None,
        return_z_loss: bool = False,
    ):
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise NotImplementedError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.logit_scale, self.lse_square_scale = logit_scale, lse_square_scale
        self.inplace_backward, self.process_group = inplace_backward, process_group
        self.return_z_loss = return_z_loss

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """input ``[N, V]``, target ``[N]``: a number, with "none" ``[N]``."""
        loss, z_loss = cross_entropy_loss(
            input,
            target,
            precomputed_lse,
            label_smoothing=self.label_smoothing,
            logit_scale=self.logit_scale,
            lse_square_scale=self.lse_square_scale,
            ignore_index=self.ignore_index,
            inplace_backward=self.inplace_backward,
            process_group=self.process_group,
        )
        if self.reduction == "none":
            return (loss, z_loss) if self.return_z_loss else loss
        count = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
        loss = loss.sum() / count
        return (loss, z_loss.sum() / count) if self.return_z_loss else loss


class _Rule(NamedTuple):
    """The options of a loss, see :func:`cross_entropy_loss`."""

    smoothing: float
    scale: float
    z_scale: float
    ignore_index: int
    inplace_backward: bool


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, precomputed_lse: Tensor | None, rule: _Rule
    ) -> tuple[Tensor, Tensor]:
        smoothing, scale, z_scale, ignore_index, _ = rule
        dtype = torch.promote_types(logits.dtype, torch.float32)
        count, classes = logits.shape
        known = precomputed_lse is not None and scale == 1.0 and smoothing == 0.0
        lse = logits.new_empty(count, dtype=dtype)
        if known and precomputed_lse is not None:
            lse.copy_(precomputed_lse)
        # The losses without lse, from this part of the vocabulary.
        losses = logits.new_zeros(count, dtype=dtype)
        if not known or smoothing:
            for rows in _chunks(logits):
                part = logits[rows].to(dtype) * scale
                if not known:
                    lse[rows] = torch.logsumexp(part, -1) if classes else -torch.inf
                if smoothing:
                    losses[rows] -= smoothing / classes * part.sum(-1)
        place, here = _places(labels, classes)
        if classes:
            at_label = logits.gather(1, place[:, None])[:, 0].to(dtype) * scale
            losses -= torch.where(here, (1.0 - smoothing) * at_label, 0.0)
        # a label outside of the vocabulary has only the part of the loss that smoothing spreads
        losses += torch.where(here, lse, smoothing * lse)
        z_losses = z_scale * lse.square()
        ignored = labels == ignore_index
        losses = (losses + z_losses).masked_fill_(ignored, 0.0)
        z_losses.masked_fill_(ignored, 0.0)
        ctx.save_for_backward(logits, lse, labels)
        ctx.mark_non_differentiable(z_losses)
        ctx.rule = rule
        return losses, z_losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        logits, lse, labels = ctx.saved_tensors
        smoothing, scale, z_scale, ignore_index, inplace = ctx.rule
        grad = logits if inplace else torch.empty_like(logits)
        ignored = labels == ignore_index
        factor = grads[0].to(lse.dtype) * scale
        place, here = _places(labels, logits.shape[1])
        at_label = here.to(lse.dtype) * (smoothing - 1.0)
        for rows in _chunks(logits):
            part = (logits[rows].to(lse.dtype) * scale).sub_(lse[rows, None]).exp_()
            if z_scale:
                part *= 1.0 + 2.0 * z_scale * lse[rows, None]
            if smoothing:
                part -= smoothing / logits.shape[1]
            part.scatter_add_(1, place[rows, None], at_label[rows, None])
            part *= factor[rows, None]
            grad[rows] = part.masked_fill_(ignored[rows, None], 0.0).to(grad.dtype)
        return grad, None, None, None


def _places(labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """(the column of each label in the vocabulary, whether it has one), both ``[N]``."""
    place = labels.long()
    here = (place >= 0) & (place < classes)
    return place.clamp(0, max(classes - 1, 0)), here


def _chunks(logits: Tensor) -> Iterator[slice]:
    step = max(1, _CHUNK // max(1, logits.shape[1]))
    for first in range(0, logits.shape[0] if logits.shape[1] else 0, step):
        yield slice(first, first + step)
