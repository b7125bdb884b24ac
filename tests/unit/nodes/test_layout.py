"""The ComfyUI pack's layout adapter, without ComfyUI: every way in which its models call attention."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attn_support.comfy.pack import load_pack
from attn_support.oracle import assert_close, exact, plain
from torch import Tensor

from pascal_attn_core import sdpa

load_pack()
from pascal_attention_pack.nodes.comfy.layout import HostCall, NotOurs, empty_containers, is_container  # noqa: E402

B, H, L, S, D = 2, 3, 5, 7, 4


class Container:
    """ComfyUI's single-owner container of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor

    def peek(self) -> Tensor:
        assert self.tensor is not None
        return self.tensor

    def take(self) -> Tensor:
        tensor, self.tensor = self.peek(), None
        return tensor


def heads_first(*, kv_heads: int = H) -> list[Tensor]:
    """q, k, v as ``[B, H, N, D]``."""
    return [torch.randn(B, h, n, D) for h, n in ((H, L), (kv_heads, S), (kv_heads, S))]


def flat(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).flatten(2)


def by_token(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous()


def moved(tensor: Tensor) -> Tensor:
    """The same values, not contiguous in any dimension that the call uses."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def answer(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    call = HostCall.of(args, kwargs)
    return call.returned(
        sdpa(call.query, call.key, call.value, call.mask, scale=call.scale, enable_gqa=call.enable_gqa)
    )


def check(
    args: tuple, kwargs: dict[str, Any], tensors: list[Tensor], mask: Tensor | None = None, **options: Any
) -> None:
    """The adapter's answer, in the host's layout, against float64."""
    out = answer(args, kwargs)
    keep = kwargs.get("skip_output_reshape", False)
    oracle, rough = (t if keep else flat(t) for t in (o[0] for o in both([*tensors, mask], options)))
    assert_close(out, oracle, rough, "out", dtype=torch.float32)


def both(inputs: list[Tensor | None], options: dict[str, Any]) -> tuple[Any, Any]:
    return exact(inputs, options), plain(inputs, options, torch.float32)


LAYOUTS = {
    "SD, SDXL, Wan: [B, N, H*D]": (flat, flat, flat),
    "SD3: q and k [B, N, H*D], v [B, N, H, D]": (flat, flat, by_token),
    "[B, N, H, D]": (by_token, by_token, by_token),
    "q [B, N, H, D], k and v [B, N, H*D]": (by_token, flat, flat),
    "views": (lambda t: moved(flat(t)), lambda t: moved(flat(t)), lambda t: moved(by_token(t))),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_with_tokens_before_heads_is_read(layout: tuple) -> None:
    tensors = heads_first()
    check((*(form(t) for form, t in zip(layout, tensors)), H), {}, tensors)


@pytest.mark.parametrize("keep", [False, True], ids=["[B, L, H*D] out", "[B, H, L, D] out"])
@pytest.mark.parametrize("form", [torch.Tensor.contiguous, moved], ids=["contiguous", "views"])
def test_heads_first_under_skip_reshape(form: Any, keep: bool) -> None:
    tensors = heads_first()
    options = {"skip_reshape": True, "skip_output_reshape": keep}
    check((*map(form, tensors), H), options, tensors)


def test_skip_output_reshape_returns_heads_first_from_flat_tensors() -> None:
    tensors = heads_first()
    check((*map(flat, tensors), H), {"skip_output_reshape": True}, tensors)


def masks() -> dict[str, Tensor]:
    """By what the host's families send; each as ``[B or 1, H or 1, L or 1, S]`` after reading."""
    lowest = torch.finfo(torch.float32).min
    keep = torch.rand(B, 1, L, S) > 0.3
    keep[..., 0] = True
    added = torch.randn(B, H, L, S)
    padding = torch.zeros(1, 1, S)
    padding[..., -2:] = -torch.finfo(torch.float32).max
    return {
        "rank 2 bool": keep[0, 0],
        "rank 2 float, causal": torch.full((L, S), lowest / 4).triu_(1),
        "rank 3 bool": keep[:, 0],
        "rank 3 float": added[:, 0],
        "HunyuanVideo: rank 3 [1, 1, N]": padding,
        "HunyuanVideo: sum of two masks": padding + padding,
        "LTXV: rank 4 [B, 1, 1, N]": added[:, :1, :1],
        "T5: a bias per head [1, H, L, S]": added[:1],
        "rank 4 bool": keep,
        "rank 4 float": added,
    }


@pytest.mark.parametrize("positional", [False, True], ids=["by keyword", "positional"])
@pytest.mark.parametrize("name", masks())
def test_every_mask_is_read(name: str, positional: bool) -> None:
    mask, tensors = masks()[name], heads_first()
    full = {2: lambda m: m[None, None], 3: lambda m: m[:, None], 4: lambda m: m}[mask.dim()](mask)
    args, options = (*tensors, H, mask) if positional else (*tensors, H), {"skip_reshape": True}
    check(args, options if positional else {**options, "mask": mask}, tensors, full.expand(B, H, L, S))


def test_a_row_that_may_look_at_no_key_is_zero_not_nan() -> None:
    tensors = heads_first()
    out = answer((*tensors, H), {"skip_reshape": True, "mask": torch.zeros(L, S, dtype=torch.bool)})
    assert out.abs().max() == 0


@pytest.mark.parametrize("kv_heads", [1, 3], ids=["one key/value head", "as many"])
@pytest.mark.parametrize("form", [flat, by_token, None], ids=["flat", "by token", "heads first"])
def test_grouped_heads_are_folded_in_every_layout(form: Any, kv_heads: int) -> None:
    tensors = heads_first(kv_heads=kv_heads)
    given = tensors if form is None else [form(t) for t in tensors]
    options = {"enable_gqa": True, "skip_reshape": form is None}
    assert HostCall.of((*given, H), options).enable_gqa == (kv_heads != H)
    check((*given, H), options, tensors, enable_gqa=True)


def test_a_scale_of_the_models_own_is_used() -> None:
    tensors = heads_first()
    check((*tensors, H), {"skip_reshape": True, "scale": 1.0}, tensors, scale=1.0)


HINTS = {
    "_inside_attn_wrapper": True,
    "transformer_options": {"block": ("input", 1)},
    "attn_precision": torch.float32,
    "low_precision_attention": False,
    "preferred_attention": "sage",
}


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_does_not_change_the_result(name: str) -> None:
    tensors = heads_first()
    check((*map(flat, tensors), H), {name: HINTS[name]}, tensors)


def test_all_eight_arguments_may_come_by_position() -> None:
    tensors = heads_first()
    mask = torch.randn(L, S)
    out = answer((*tensors, H, mask, torch.float32, True, True), {})
    oracle, rough = both([*tensors, mask.expand(B, H, L, S)], {})
    assert_close(out, oracle[0], rough[0], "out", dtype=torch.float32)


NOT_OURS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown argument": ({"sinks": torch.ones(H)}, "sinks is not known"),
    "an unknown flag that is set": ({"is_causal": True}, "is_causal is not known"),
    "a mask of five dimensions": ({"mask": torch.ones(1, 1, 1, L, S)}, "5 dimensions"),
    "heads that do not divide": ({"heads": 5}, "not divisible by 5 heads"),
    "two dimensions": ({"q": torch.ones(L, H * D)}, "q has 2 dimensions"),
    "no tensor": ({"k": [1.0]}, "k is a list"),
    "nothing": ({"v": None}, "v is a NoneType"),
}


@pytest.mark.parametrize("case", NOT_OURS.values(), ids=NOT_OURS)
def test_what_is_not_known_is_refused_with_the_reason(case: tuple[dict[str, Any], str]) -> None:
    changes, reason = case
    query, key, value = map(flat, heads_first())
    with pytest.raises(NotOurs, match=reason):
        HostCall.of((), {"q": query, "k": key, "v": value, "heads": H, **changes})


def test_missing_doubled_and_surplus_arguments_are_refused() -> None:
    query, key, value = map(flat, heads_first())
    with pytest.raises(NotOurs, match="no v and no heads"):
        HostCall.of((query, key), {})
    with pytest.raises(NotOurs, match="two values for q"):
        HostCall.of((query, key, value, H), {"q": query})
    with pytest.raises(NotOurs, match="9 positional arguments"):
        HostCall.of((query, key, value, H, None, None, False, False, 1), {})
    with pytest.raises(NotOurs, match="3, 3 and 3 dimensions"):
        HostCall.of((query, key, value, H), {"skip_reshape": True})
    with pytest.raises(NotOurs, match="q has 3 heads, not 6"):
        HostCall.of((*heads_first(), 6), {"skip_reshape": True})


@pytest.mark.parametrize("value", [None, False])
def test_an_unknown_argument_that_asks_for_nothing_is_let_through(value: Any) -> None:
    tensors = heads_first()
    check((*map(flat, tensors), H), {"something_new": value}, tensors)


def test_containers_are_read_and_stay_full_until_they_are_emptied() -> None:
    tensors = heads_first()
    for positional in itertools.product([True, False], repeat=1):
        boxes = [Container(t) for t in tensors]
        args: tuple = (*boxes, H) if positional[0] else ()
        kwargs: dict[str, Any] = {"skip_reshape": True}
        kwargs |= {} if positional[0] else {"q": boxes[0], "k": boxes[1], "v": boxes[2], "heads": H}
        check(args, kwargs, tensors)
        assert all(box.tensor is not None for box in boxes)
        emptied, named = empty_containers(args, kwargs)
        assert all(box.tensor is None for box in boxes)
        assert not any(map(is_container, (*emptied, *named.values())))
        check(emptied, named, tensors)


def test_nothing_is_copied_on_the_way_in() -> None:
    query, key, value = map(flat, heads_first())
    call = HostCall.of((query, key, value, H), {})
    for ours, theirs in ((call.query, query), (call.key, key), (call.value, value)):
        assert ours.data_ptr() == theirs.data_ptr()
