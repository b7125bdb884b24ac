"""Cross entropy: ``flash_attn.ops.triton.cross_entropy`` and ``flash_attn.losses.cross_entropy``.

Computed in float32 (float64 for float64), some rows at a time, and once more for the gradients: besides the logits,
their gradient and the parts that it is joined from no tensor of the vocabulary's size exists.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..options import FlashArgumentError, check_layout, check_whole_numbers
from ..signatures import called_as

# Elements of the logits that are computed at a time.
_CHUNK = 1 << 24
_OPTIONS = "label_smoothing=0.0 logit_scale=1.0 lse_square_scale=0.0"
_FIELDS = ("label_smoothing", "logit_scale", "lse_square_scale", "ignore_index", "inplace_backward", "process_group")


@called_as(
    f"logits labels precomputed_lse=None {_OPTIONS} ignore_index=-100 inplace_backward=False process_group=None",
    ignored="precomputed_lse inplace_backward",
    refused="process_group",
)
def cross_entropy_loss(logits: Tensor, labels: Tensor, logit_scale: float, **options: Any) -> tuple[Tensor, Tensor]:
    """The loss of each row.

    Args:
        logits: ``[N, V]``.
        labels: whole numbers ``[N]`` within the vocabulary, or ignore_index.
        precomputed_lse: ``[N]``, ignored, for compatibility: logsumexp of the rows is computed with the loss.
        label_smoothing: share of the target that is spread over the vocabulary.
        logit_scale: factor of the logits.
        lse_square_scale: this * logsumexp ** 2 (z-loss) is added to the loss.
        ignore_index: rows with this label have loss 0 and no gradient.
        inplace_backward: ignored, for compatibility: the gradient has memory of its own.
    Returns:
        (losses ``[N]``, what lse_square_scale has added ``[N]``, without a gradient), float32 or float64.
    Raises:
        TypeError, ValueError: arguments that do not fit together.
        NotImplementedError: process_group is given.
    """
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(f"logits must be floating point numbers, got {getattr(logits, 'dtype', type(logits).__name__)}")
    check_layout(("N", "V"), logits=logits)
    check_whole_numbers(logits.shape[:1], labels=labels)
    if not logit_scale > 0.0:
        raise FlashArgumentError(f"logit_scale must be above 0, got {logit_scale}")
    rule = functools.partial(_of_rows, logit_scale=logit_scale, **options)
    step = max(1, _CHUNK // max(1, logits.shape[1]))
    parts = [
        checkpoint(rule, *rows, use_reentrant=False, preserve_rng_state=False)
        for rows in zip(logits.split(step), labels.split(step))
    ]
    losses, z_losses = (torch.cat(each) for each in zip(*parts))
    return losses, z_losses


class CrossEntropyLoss(torch.nn.Module):
    """:func:`cross_entropy_loss` as a module; "mean" is over the rows that are not ignored.

    Args:
        reduction: "mean", "sum" or "none".
        return_z_loss: return (loss, what lse_square_scale has added).
        others: see :func:`cross_entropy_loss`.
    """

    ignore_index: int

    @called_as(
        f"self ignore_index=-100 reduction='mean' {_OPTIONS} inplace_backward=False process_group=None "
        "return_z_loss=False"
    )
    def __init__(self, reduction: str, **given: Any) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise NotImplementedError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
        self.reduction = reduction
        vars(self).update(given)

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """input ``[N, V]``, target ``[N]``: a number, with "none" ``[N]``."""
        options = {name: getattr(self, name) for name in _FIELDS}
        loss, z_loss = cross_entropy_loss(input, target, precomputed_lse, **options)
        if self.reduction != "none":
            count = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
            loss, z_loss = loss.sum() / count, z_loss.sum() / count
        return (loss, z_loss) if self.return_z_loss else loss


def _of_rows(
    logits: Tensor,
    labels: Tensor,
    *,
    label_smoothing: float,
    logit_scale: float,
    lse_square_scale: float,
    ignore_index: int,
) -> tuple[Tensor, Tensor]:
    """:func:`cross_entropy_loss` of some rows."""
    ignored = labels == ignore_index
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    scores = scores.masked_fill(ignored[:, None], 0.0)  # their gradient is 0 whatever they hold
    losses = F.cross_entropy(
        scores, labels.long(), ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    z_losses = (lse_square_scale * scores.logsumexp(-1).square()).masked_fill(ignored, 0.0)
    return losses + z_losses, z_losses.detach()
