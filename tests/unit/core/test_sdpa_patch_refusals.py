"""The process-wide switch: calls that it leaves to torch, whose words are torch's."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.sdpa_switch import TILED, TORCH, qkv, served, torch_stays_torch  # noqa: F401
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as taken_by_name

from pascal_attn_core import AttentionConfig, record
from pascal_attn_core.attention import sdpa
from pascal_attn_core.sdpa_patch import patch_sdpa


class Subclass(Tensor):
    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def _refusals() -> list[tuple[str, tuple, dict[str, Any]]]:
    q, k, v = qkv()
    mask = torch.ones(12, 12, dtype=torch.bool)
    return [
        ("head_dims differ", (q, k[..., :5], v), {}),
        ("no tensors", (1, 2, 3), {}),
        ("one argument", (q,), {}),
        ("none", (), {}),
        ("unknown word", (q, k, v), {"alignment": "lower_right"}),
        ("our word", (q, k, v), {"config": None}),
        ("scale by position", (q, k, v, None, 0.0, False, 1.0), {}),
        ("twice", (q, k, v), {"query": q}),
        ("dtypes differ", (q, k.double(), v), {}),
        ("whole numbers", (q.int(), k.int(), v.int()), {}),
        ("mask of whole numbers", (q, k, v, mask.int()), {}),
        ("mask does not broadcast", (q, k, v, mask[:5]), {}),
        ("heads differ", (q, k[:, :1].expand(2, 3, 12, 8), v), {}),
        ("sparse", (q.to_sparse(), k.to_sparse(), v.to_sparse()), {}),
    ]


@pytest.mark.parametrize(("name", "args", "kwargs"), _refusals(), ids=[name for name, _, _ in _refusals()])
@pytest.mark.parametrize("by_name", [False, True])
def test_what_torch_refuses_is_refused_by_torch_in_its_words(
    name: str, args: tuple, kwargs: dict[str, Any], by_name: bool
) -> None:
    with pytest.raises(Exception) as expected:
        TORCH(*args, **kwargs)
    with patch_sdpa(TILED), pytest.raises(type(expected.value)) as actual:
        (taken_by_name if by_name else F.scaled_dot_product_attention)(*args, **kwargs)
    assert str(actual.value) == str(expected.value)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_go_to_torch(layout: torch.layout) -> None:
    parts = [torch.randn(n, 2, 8) for n in (3, 5)]
    q = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
    q = q.contiguous() if layout is torch.strided else q
    expected = TORCH(q, q, q)
    with patch_sdpa(TILED):
        outs = [F.scaled_dot_product_attention(q, q, q), taken_by_name(q, q, q)]
        assert not served(lambda: F.scaled_dot_product_attention(q, q, q))
    for out in outs:
        for one, other in zip(out.unbind(), expected.unbind()):
            torch.testing.assert_close(one, other)


def test_a_mask_beside_is_causal_is_left_to_torch() -> None:
    q, k, v = qkv()
    mask = torch.rand(12, 12) < 0.7

    def attend() -> None:
        with contextlib.suppress(RuntimeError):  # torch 2.14 refuses it, 2.13 does not
            F.scaled_dot_product_attention(q, k, v, mask, is_causal=True)

    with patch_sdpa(TILED):
        assert not served(attend)


def test_tensor_subclasses_go_to_torch() -> None:
    q, k, v = qkv()
    Subclass.seen.clear()
    with patch_sdpa(TILED), record() as seen:
        out = F.scaled_dot_product_attention(q.as_subclass(Subclass), k, v)
    assert type(out) is Subclass
    assert TORCH in Subclass.seen
    assert seen.total == 0


def test_complex_numbers_and_fake_tensors_go_to_torch() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with patch_sdpa(TILED), FakeTensorMode() as mode, record() as seen:
        q = mode.from_tensor(torch.randn(1, 2, 4, 8))
        assert F.scaled_dot_product_attention(q, q, q).shape == (1, 2, 4, 8)
    assert seen.total == 0


def test_transforms_of_torch_func_go_to_torch() -> None:
    q, k, v = qkv(dtype=torch.float64)
    expected = torch.func.vmap(TORCH)(q, k, v), torch.func.grad(lambda x: TORCH(x, k, v).sum())(q)
    with patch_sdpa(TILED):
        actual = (
            torch.func.vmap(F.scaled_dot_product_attention)(q, k, v),
            torch.func.grad(lambda x: F.scaled_dot_product_attention(x, k, v).sum())(q),
        )
    for one, other in zip(actual, expected):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda *args: f(*args).sum())])
def test_compiled_transforms_of_torch_func_go_to_torch(transform) -> None:
    q, k, v = qkv()
    torch.compiler.reset()
    compiled = torch.compile(
        transform(lambda q, k, v: F.scaled_dot_product_attention(q, k, v)), fullgraph=True, backend="aot_eager"
    )
    expected = transform(TORCH)(q, k, v)
    with patch_sdpa(TILED):
        torch.testing.assert_close(compiled(q, k, v), expected)
    torch.compiler.reset()


def test_a_config_that_cannot_work_says_so_instead_of_leaving_the_call_to_torch() -> None:
    q, k, v = qkv(tokens=2048)
    config = AttentionConfig(route="tiled", q_block=2048, kv_block=2048, budget_mib=1)
    with pytest.raises(ValueError, match="budget"):
        sdpa(q, k, v, config=config)
    with patch_sdpa(config), pytest.raises(ValueError, match="budget"):
        F.scaled_dot_product_attention(q, k, v)
