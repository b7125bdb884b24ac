"""flash-attn's cross entropy against its definition in float64."""

from typing import Any

import pytest
import torch
from attn_support.flash_attn.oracle import F64, assert_same_gradients, leaves_of, near, rand
from torch import Tensor

from pascal_attn_core.flash_attn.modules import losses as module
from pascal_attn_core.flash_attn.modules.losses import CrossEntropyLoss, cross_entropy_loss
from pascal_attn_core.observe.memory import measure

CLOSE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def defined(
    logits: Tensor, labels: Tensor, smoothing: float, scale: float, z_scale: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    log_probs = (logits * scale).log_softmax(-1)
    lse = (logits * scale).logsumexp(-1)
    target = torch.nn.functional.one_hot(labels.clamp(0), logits.shape[1]).double()
    target = (1 - smoothing) * target + smoothing / logits.shape[1]
    z_loss = z_scale * lse**2
    counts = labels != ignore_index
    return torch.where(counts, -(target * log_probs).sum(-1) + z_loss, 0.0), torch.where(counts, z_loss, 0.0)


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("z_scale", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1 << 24, 30])
def test_every_option(dtype, smoothing, scale, z_scale, chunk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    torch.manual_seed(0)
    logits = (rand(7, 11) * 3).to(dtype).requires_grad_()
    (reference,) = leaves_of([logits])
    labels = torch.tensor([0, 10, 3, -7, 5, 5, -7])
    losses, z_losses = cross_entropy_loss(logits, labels, None, smoothing, scale, z_scale, -7, True)
    expected, expected_z = defined(reference, labels, smoothing, scale, z_scale, -7)
    assert losses.dtype == (F64 if dtype == F64 else torch.float32)
    assert not z_losses.requires_grad
    near(losses, expected, CLOSE[dtype])
    near(z_losses, expected_z, CLOSE[dtype])
    assert_same_gradients(losses, [logits], expected, [reference], CLOSE[dtype])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("return_z_loss", [False, True])
def test_the_module(reduction: str, return_z_loss: bool) -> None:
    logits, labels = torch.randn(5, 6, dtype=F64), torch.tensor([1, -100, 0, 5, 2])
    loss = CrossEntropyLoss(reduction=reduction, lse_square_scale=0.3, return_z_loss=return_z_loss)
    result = loss(logits, labels)
    expected = defined(logits, labels, 0.0, 1.0, 0.3, -100)
    if reduction != "none":
        expected = tuple(part.sum() / (4 if reduction == "mean" else 1) for part in expected)  # type: ignore[assignment]
    assert isinstance(result, tuple) == return_z_loss
    torch.testing.assert_close(result if return_z_loss else (result,), expected if return_z_loss else expected[:1])
    plain = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    torch.testing.assert_close(CrossEntropyLoss(label_smoothing=0.1)(logits, labels), plain)


def test_edges() -> None:
    assert cross_entropy_loss(torch.zeros(0, 5), torch.zeros(0).long())[0].shape == (0,)
    logits = torch.full((1, 3), -torch.inf)
    logits[0, 1] = 4.0
    assert cross_entropy_loss(logits, torch.tensor([1]))[0].item() == 0.0
    nothing = torch.full((1, 3), torch.nan, requires_grad=True)
    cross_entropy_loss(nothing, torch.tensor([-100]))[0].sum().backward()
    assert not nothing.grad.any()
    strided = torch.randn(6, 4).t()
    labels = torch.tensor([0, 1, 2, 3])
    torch.testing.assert_close(
        cross_entropy_loss(strided, labels)[0], torch.nn.functional.cross_entropy(strided, labels, reduction="none")
    )
    int32 = cross_entropy_loss(strided, labels.int())[0]
    assert torch.equal(int32, cross_entropy_loss(strided, labels)[0])


def test_rows_are_computed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 1 << 12)
    logits, labels = torch.randn(256, 512).bfloat16().requires_grad_(), torch.randint(0, 512, (256,))

    def both() -> Tensor:
        return torch.autograd.grad(cross_entropy_loss(logits, labels)[0].sum(), logits)[0]

    assert measure(both).peak_bytes < 2.5 * logits.nbytes  # the gradient, its parts, and some rows in float32


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"logits": torch.zeros(3)}, ValueError, r"logits must be \[N, V\]"),
    ({"logits": torch.zeros(2, 3).int()}, TypeError, "floating point"),
    ({"labels": torch.zeros(3).long()}, ValueError, r"labels must be \[2\], got \[3\]"),
    ({"labels": torch.zeros(2)}, TypeError, "whole numbers"),
    ({"logit_scale": 0.0}, ValueError, "logit_scale must be above 0"),
]


@pytest.mark.parametrize(("changed", "kind", "words"), WRONG)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        cross_entropy_loss(**{"logits": torch.zeros(2, 3), "labels": torch.zeros(2).long(), **changed})
    with pytest.raises(NotImplementedError, match="reduction"):
        CrossEntropyLoss(reduction="median")
