"""flash-attn's functions by the definition, the flags they are tried with, and what both lengths' tests need."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pascal_attn_core.config import default_config
from pascal_attn_core.reference import reference_sdpa

F64 = torch.float64
CLOSE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out ``[B, L, H, D]``, lse ``[B, H, L]``) by the definition, in the dtype of the inputs."""
    bias, length, keys = None, q.shape[1], k.shape[1]
    if alibi_slopes is not None:
        distance = torch.arange(keys)[None] - (torch.arange(length)[:, None] + keys - length)
        bias = -alibi_slopes.to(q.dtype).reshape(-1, q.shape[2])[:, :, None, None] * distance.abs()
    rules: dict[str, Any] = {"alignment": "lower_right", "window": window_size, "softcap": softcap or None}
    out, lse = reference_sdpa(*(t.transpose(1, 2) for t in (q, k, v)), bias, causal, softmax_scale, True, **rules)
    return out.transpose(1, 2), lse


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


def inputs(
    batch: int, length: int, keys: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = F64
) -> list[Tensor]:
    shapes = (batch, length, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim)
    return [rand(*shape).to(dtype).requires_grad_() for shape in shapes]


def assert_same(actual: Tensor, expected: Tensor, dtype: torch.dtype = F64, what: str = "out") -> None:
    near(actual, expected, CLOSE[dtype], what)


def near(actual: Tensor, expected: Tensor, close: float, what: str = "out") -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=close, atol=close, msg=lambda m: f"{what}: {m}")


def leaves_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def assert_same_gradients(
    outs: Tensor | Sequence[Tensor],
    leaves: Sequence[Tensor],
    expected: Tensor | Sequence[Tensor],
    references: Sequence[Tensor],
    close: float = CLOSE[F64],
) -> None:
    """Both have the same gradients of random gradients of their results, which stay as they are."""
    outs, expected = ([each] if isinstance(each, Tensor) else list(each) for each in (outs, expected))
    grads = [rand(*out.shape).to(out.dtype) for out in outs]
    kept = [grad.clone() for grad in grads]
    options = {"allow_unused": True, "materialize_grads": True}
    actual = torch.autograd.grad(outs, leaves, grads, **options)
    assert all(map(torch.equal, grads, kept))
    doubles = [grad.to(result.dtype) for grad, result in zip(grads, expected)]
    for leaf, one, other in zip(leaves, actual, torch.autograd.grad(expected, references, doubles, **options)):
        assert one.dtype == leaf.dtype
        near(one, other, close, "gradient")


FLAGS: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"softmax_scale": 0.3},
    {"window_size": (3, 2)},
    {"window_size": (4, -1)},
    {"window_size": (-1, 1)},
    {"window_size": (5, 3), "causal": True},
    {"softcap": 1.5},
    {"alibi_slopes": "heads"},
    {"alibi_slopes": "batch", "causal": True},
    {"alibi_slopes": "batch", "softcap": 2.0, "window_size": (6, 6)},
]


def with_slopes(flags: dict[str, Any], batch: int, heads: int) -> dict[str, Any]:
    kind = flags.get("alibi_slopes")
    if kind is None:
        return flags
    return {**flags, "alibi_slopes": torch.rand((heads,) if kind == "heads" else (batch, heads)) + 0.1}


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every call by the tiled route with small tiles."""
    for name, value in {"ROUTE": "tiled", "Q_BLOCK": "8", "KV_BLOCK": "16"}.items():
        monkeypatch.setenv(f"PASCAL_ATTN_{name}", value)
    default_config.cache_clear()
    yield
    monkeypatch.undo()
    default_config.cache_clear()


class Largest(TorchDispatchMode):
    """Elements of the largest piece of memory that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.untyped_storage().nbytes() // t.element_size())
        return result
