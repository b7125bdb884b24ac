"""The ComfyUI pack's layout adapter, without ComfyUI: every way in which its models call attention."""

from typing import Any

import pytest
import torch
from attn_support.comfy.pack import load_pack
from attn_support.comfy.stub import Container
from attn_support.oracle import assert_close, exact, plain
from torch import Tensor

from pascal_attn_core import sdpa

load_pack()
from pascal_attention_pack.nodes.comfy.layout import HostCall, NotOurs, empty_containers, is_container  # noqa: E402

B, H, L, S, D = 2, 3, 5, 7, 4


def heads_first(*, kv_heads: int = H) -> list[Tensor]:
    """q, k, v as ``[B, H, N, D]``."""
    return [torch.randn(B, h, n, D) for h, n in ((H, L), (kv_heads, S), (kv_heads, S))]


def flat(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).flatten(2)


def by_token(tensor: Tensor) -> Tensor:
    return tensor.transpose(1, 2).contiguous()


def moved(tensor: Tensor) -> Tensor:
    """Return the same values, not contiguous in any dimension that the call uses."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def answer(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    call = HostCall.of(args, kwargs)
    return call.returned(sdpa(**call.given.keywords()))


def check(
    args: tuple, kwargs: dict[str, Any], tensors: list[Tensor], mask: Tensor | None = None, **options: Any
) -> None:
    """The adapter's answer, in the host's layout, against float64."""
    out = answer(args, kwargs)
    inputs = [*tensors, mask]
    oracle, similar = exact(inputs, options)[0], plain(inputs, options, torch.float32)[0]
    if out.dim() == 3:
        oracle, similar = flat(oracle), flat(similar)
    assert_close(out, oracle, similar, "out", dtype=torch.float32)


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
@pytest.mark.parametrize("form", [torch.Tensor.contiguous, moved, flat], ids=["heads first", "views", "flat"])
def test_heads_first_in_and_out(form: Any, keep: bool) -> None:
    tensors = heads_first()
    options = {"skip_reshape": form is not flat, "skip_output_reshape": keep}
    assert answer((*map(form, tensors), H), options).dim() == (4 if keep else 3)
    check((*map(form, tensors), H), options, tensors)


def masks() -> dict[str, Tensor]:
    """Masks by what the host's families send; each is ``[B or 1, H or 1, L or 1, S]`` after reading."""
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
    assert HostCall.of((*given, H), options).given.enable_gqa == (kv_heads != H)
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
    "something_new": None,
    "another": False,
}


@pytest.mark.parametrize("name", HINTS)
def test_a_hint_or_what_asks_for_nothing_does_not_change_the_result(name: str) -> None:
    tensors = heads_first()
    check((*map(flat, tensors), H), {name: HINTS[name]}, tensors)


def test_all_eight_arguments_may_come_by_position() -> None:
    tensors, mask = heads_first(), torch.randn(L, S)
    check((*tensors, H, mask, torch.float32, True, True), {}, tensors, mask.expand(B, H, L, S))


Q, K, V = map(flat, heads_first())
NOT_OURS: dict[str, tuple[tuple, dict[str, Any]]] = {
    "sinks is not known": ((Q, K, V, H), {"sinks": torch.ones(H)}),
    "is_causal is not known": ((Q, K, V, H), {"is_causal": True}),
    "5 dimensions": ((Q, K, V, H), {"mask": torch.ones(1, 1, 1, L, S)}),
    "not divisible by 5 heads": ((Q, K, V, 5), {}),
    "q has 2 dimensions": ((torch.ones(L, H * D), K, V, H), {}),
    "k is a list": ((Q, [1.0], V, H), {}),
    "v is a NoneType": ((Q, K, None, H), {}),
    "no v and no heads": ((Q, K), {}),
    "two values for q": ((Q, K, V, H), {"q": Q}),
    "9 positional arguments": ((Q, K, V, H, None, None, False, False, 1), {}),
    "3, 3 and 3 dimensions": ((Q, K, V, H), {"skip_reshape": True}),
    "q has 3 heads, not 6": ((), {**dict(zip("qkv", heads_first())), "heads": 6, "skip_reshape": True}),
}


@pytest.mark.parametrize("reason", NOT_OURS)
def test_what_is_not_known_is_refused_with_the_reason(reason: str) -> None:
    args, kwargs = NOT_OURS[reason]
    with pytest.raises(NotOurs, match=reason):
        HostCall.of(args, kwargs)


@pytest.mark.parametrize("positional", [True, False])
def test_containers_are_read_and_stay_full_until_they_are_emptied(positional: bool) -> None:
    tensors = heads_first()
    boxes = [Container(t) for t in tensors]
    args = (*boxes, H) if positional else ()
    kwargs: dict[str, Any] = {"skip_reshape": True}
    kwargs |= {} if positional else {**dict(zip("qkv", boxes)), "heads": H}
    check(args, kwargs, tensors)
    assert all(box.tensor is not None for box in boxes)
    emptied, named = empty_containers(args, kwargs)
    assert all(box.tensor is None for box in boxes)
    assert not any(map(is_container, (*emptied, *named.values())))
    check(emptied, named, tensors)


def test_nothing_is_copied_on_the_way_in() -> None:
    query, key, value = map(flat, heads_first())
    call = HostCall.of((query, key, value, H), {})
    for ours, theirs in zip(call.given, (query, key, value)):
        assert ours.data_ptr() == theirs.data_ptr()
