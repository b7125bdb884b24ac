"""The process-wide switch: who is served, how it goes away, what the environment says; other machinery under it."""

import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from attn_support.fresh import run
from attn_support.sdpa_switch import TILED, TORCH, qkv, served, torch_stays_torch  # noqa: F401
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as taken_by_name
from torch.overrides import TorchFunctionMode

from pascal_attn_core import AttentionConfig, record
from pascal_attn_core.sdpa_patch import disable, enable, is_enabled, patch_sdpa


def route() -> dict[str, int]:
    """Return by which route of ours a call of torch's function goes."""
    with record() as seen:
        F.scaled_dot_product_attention(*qkv())
    return seen.routes()


def test_enable_serves_all_calls_until_disable_and_the_last_config_counts() -> None:
    assert not is_enabled()
    enable(AttentionConfig(route="math"))
    function = F.scaled_dot_product_attention
    enable(TILED)
    assert F.scaled_dot_product_attention is function
    assert is_enabled()
    assert route() == {"tiled": 1}
    disable()
    disable()
    assert not is_enabled()
    assert route() == {}
    assert F.scaled_dot_product_attention is TORCH


def test_patches_leave_in_any_order_and_the_newest_decides() -> None:
    enable()
    first, second = patch_sdpa(AttentionConfig(route="math")), patch_sdpa(TILED)
    assert route() == {"tiled": 1}
    third = patch_sdpa(AttentionConfig(route="torch"))
    second.remove()
    disable()
    assert route() == {"torch": 1}
    third.remove()
    assert route() == {"math": 1}
    first.remove()
    first.remove()
    assert F.scaled_dot_product_attention is TORCH


def test_a_patch_of_somebody_else_over_ours_lives_on(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    patch = patch_sdpa(TILED)
    below = F.scaled_dot_product_attention
    with monkeypatch.context() as over:
        over.setattr(F, "scaled_dot_product_attention", theirs := Mock(side_effect=below))
        with caplog.at_level(logging.WARNING, logger="pascal_attn"):
            patch.remove()
        assert "replaced since" in caplog.text
        assert F.scaled_dot_product_attention is theirs
        assert route() == {}
        assert theirs.call_count == 1
        with patch_sdpa(TILED):
            assert route() == {"tiled": 1}
        assert F.scaled_dot_product_attention is theirs
    with patch_sdpa(TILED):
        assert F.scaled_dot_product_attention is below
    F.scaled_dot_product_attention = TORCH


def test_inside_a_block_the_innermost_decides_whichever_name_is_called_until_it_is_removed() -> None:
    q, k, v = qkv()
    assert taken_by_name is TORCH
    for function in (taken_by_name, lambda *args: F.scaled_dot_product_attention(*args)):
        with patch_sdpa(AttentionConfig(route="math")), patch_sdpa(TILED), record() as seen:
            out = function(q, k, v)
        assert seen.routes() == {"tiled": 1}
    torch.testing.assert_close(out, taken_by_name(q, k, v))
    assert not served(lambda: taken_by_name(q, k, v))
    with patch_sdpa(TILED) as patch:
        patch.remove()
        assert not served(lambda: taken_by_name(*qkv()))


def test_all_threads_are_served_while_patches_come_and_go() -> None:
    q, k, v = qkv(tokens=32)
    expected, stop = TORCH(q, k, v), threading.Event()

    def calls() -> None:
        while not stop.is_set():
            torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), expected)
            with patch_sdpa(TILED):
                torch.testing.assert_close(taken_by_name(q, k, v), expected)

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(calls) for _ in range(4)]
        for _ in range(20):
            enable(TILED)
            disable()
        stop.set()
        for each in running:
            each.result()
        enable(TILED)
        assert pool.submit(served, lambda: F.scaled_dot_product_attention(q, k, v)).result()


@pytest.mark.torch_2_5
def test_gradients_dropout_autocast_and_gqa_come_to_us() -> None:
    leaves = [t.requires_grad_() for t in (qkv(heads=4)[0], *qkv()[1:])]
    options = {"enable_gqa": True, "is_causal": True}
    with patch_sdpa(TILED):
        actual = torch.autograd.grad(F.scaled_dot_product_attention(*leaves, **options).square().sum(), leaves)
        assert F.scaled_dot_product_attention(*qkv()[:2], torch.ones(2, 2, 12, 8), dropout_p=0.5).std() > 0.01
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert F.scaled_dot_product_attention(*qkv()).dtype == torch.bfloat16
    torch.testing.assert_close(actual, torch.autograd.grad(TORCH(*leaves, **options).square().sum(), leaves))


def test_causal_bias_objects_mean_what_they_mean() -> None:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (3, 7, 7))
    expected = TORCH(q, k, v, attn_mask=torch.ones(3, 7, dtype=torch.bool).tril(4))
    for function in (taken_by_name, lambda *args: F.scaled_dot_product_attention(*args)):
        with patch_sdpa(TILED):
            torch.testing.assert_close(function(q, k, v, causal_lower_right(3, 7)), expected)


@pytest.mark.parametrize("transform", ["vmap", "grad", "trace"])
def test_causal_bias_objects_in_what_is_handed_back_to_torch(transform: str) -> None:
    q, k, v = (torch.randn(1, 2, n, 8) for n in (3, 7, 7))

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(3, 7))

    transformed = {
        "vmap": lambda: torch.vmap(attend)(q[None])[0],
        "grad": lambda: torch.func.grad(lambda q: attend(q).square().sum())(q),
        "trace": lambda: torch.jit.trace(attend, (q,), check_trace=False)(q),
    }[transform]
    expected = transformed()
    with patch_sdpa():
        torch.testing.assert_close(transformed(), expected)
        with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
            F.scaled_dot_product_attention(q, k, v, causal_lower_right(3, 7), is_causal=True)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "False"),
        ({"PASCAL_ATTN_ENABLE": "1"}, "True"),
        ({"PASCAL_ATTN_ENABLE": "off"}, "False"),
        ({"PASCAL_ATTN_ENABLE": "1", "PASCAL_ATTN_DISABLE": "1"}, "False"),
        ({"PASCAL_ATTN_ENABLE": "1", "PASCAL_ATTN_DISABLE": "0"}, "True"),
    ],
    ids=str,
)
def test_the_import_asks_the_environment(environ: dict[str, str], expected: str) -> None:
    code = """
import pascal_attn_core.auto, pascal_attn_core.sdpa_patch as s, torch.nn.functional as F, torch
assert s.is_enabled() == (F.scaled_dot_product_attention is not torch._C._nn.scaled_dot_product_attention)
print(s.is_enabled())
"""
    assert run(code, env=environ) == expected


@pytest.mark.parametrize("by_environment", [False, True])
def test_calls_with_fewer_keys_stay_torchs(by_environment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_environment:
        monkeypatch.setenv("PASCAL_ATTN_MIN_KEYS", "12")
    q, k, v = qkv(tokens=12)
    attend = lambda *args, **kwargs: F.scaled_dot_product_attention(*args, **kwargs)  # noqa: E731  looked up late
    with patch_sdpa(TILED, min_keys=None if by_environment else 12):
        for keys, is_ours in (12, True), (11, False):
            k, v = k[..., :keys, :], v[..., :keys, :]
            assert served(attend, q, k, v) is is_ours
            assert served(attend, query=q[..., :1, :], key=k, value=v) is is_ours
            assert served(taken_by_name, q, k, v) is is_ours
    if by_environment:
        enable(TILED)
        assert not served(attend, q, k, v)
        assert route() == {"tiled": 1}


@pytest.mark.parametrize(("given", "kind", "words"), [
    ({"config": "tiled"}, TypeError, "config must be an AttentionConfig or None, got 'tiled'"),
    ({"min_keys": -1}, ValueError, "min_keys must be"),
    *(({"min_keys": keys}, TypeError, "min_keys must be") for keys in ("12", True)),
])  # fmt: skip
def test_what_is_no_config_or_threshold_is_refused(given: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        patch_sdpa(**given)
    assert not is_enabled()


class Subclass(Tensor):
    pass


def _refusals() -> dict[str, tuple[tuple, dict[str, Any]]]:
    q, k, v = qkv()
    mask = torch.ones(12, 12, dtype=torch.bool)
    return {
        "head_dims differ": ((q, k[..., :5], v), {}),
        "no tensors": ((1, 2, 3), {}),
        "one argument": ((q,), {}),
        "none": ((), {}),
        "unknown word": ((q, k, v), {"alignment": "lower_right"}),
        "our word": ((q, k, v), {"config": None}),
        "scale by position": ((q, k, v, None, 0.0, False, 1.0), {}),
        "twice": ((q, k, v), {"query": q}),
        "dtypes differ": ((q, k.double(), v), {}),
        "whole numbers": ((q.int(), k.int(), v.int()), {}),
        "mask of whole numbers": ((q, k, v, mask.int()), {}),
        "mask does not broadcast": ((q, k, v, mask[:5]), {}),
        "heads differ": ((q, k[:, :1].expand(2, 3, 12, 8), v), {}),
        "sparse": ((q.to_sparse(), k.to_sparse(), v.to_sparse()), {}),
    }


@pytest.mark.parametrize(("args", "kwargs"), _refusals().values(), ids=_refusals())
@pytest.mark.parametrize("by_name", [False, True])
def test_what_torch_refuses_is_refused_by_torch_in_its_words(args: tuple, kwargs: dict, by_name: bool) -> None:
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


def test_tensor_subclasses_fake_tensors_and_a_mask_beside_is_causal_go_to_torch() -> None:
    q, k, v = qkv()
    with patch_sdpa(TILED), record() as seen:
        with contextlib.suppress(RuntimeError):  # torch 2.14 refuses it
            F.scaled_dot_product_attention(q, k, v, torch.rand(12, 12) < 0.7, is_causal=True)
        out = F.scaled_dot_product_attention(q.as_subclass(Subclass), k, v)
        with FakeTensorMode() as mode:
            q = mode.from_tensor(q)
            assert F.scaled_dot_product_attention(q, q, q).shape == (2, 2, 12, 8)
    assert type(out) is Subclass
    assert seen.total == 0


@pytest.mark.parametrize("transform", [torch.func.vmap, lambda f: torch.func.grad(lambda *args: f(*args).sum())])
@pytest.mark.parametrize("compiled", [False, True])
def test_transforms_of_torch_func_go_to_torch(transform, compiled: bool) -> None:
    q, k, v = qkv()
    attend = transform(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
    torch.compiler.reset()
    if compiled:
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with patch_sdpa(TILED):
        torch.testing.assert_close(attend(q, k, v), transform(TORCH)(q, k, v))
    torch.compiler.reset()


class Watch(TorchFunctionMode):
    """Somebody else's mode, as diffusers has one for skipped layers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def test_modes_of_others_see_the_call_once_under_torchs_name() -> None:
    q, k, v = qkv(tokens=40)
    enable(TILED)
    with Watch() as watch:
        assert served(lambda: F.scaled_dot_product_attention(q, k, v))
    assert watch.calls == 1
    with torch.device("cpu"):
        assert served(lambda: F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("switch", [enable, patch_sdpa])
def test_torchs_own_transformer_keeps_working(batch_first: bool, train: bool, switch: Any) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2).train(train)
    x = torch.randn(3, 7, 16) if batch_first else torch.randn(7, 3, 16)
    padding = torch.arange(7)[None] >= torch.tensor([7, 4, 2])[:, None]
    causal = nn.Transformer.generate_square_subsequent_mask(7)
    cases: list[dict[str, Any]] = [{}, {"src_key_padding_mask": padding}, {"mask": causal, "is_causal": True}]
    for case in cases:
        for context in (torch.enable_grad, torch.no_grad):
            with context():
                expected = model(x, **case)
                with switch(TILED) or contextlib.nullcontext():
                    actual = model(x, **case)
                disable()
            keep = torch.ones(3, 7, dtype=torch.bool) if "src_key_padding_mask" not in case else ~padding
            keep = keep if batch_first else keep.T
            torch.testing.assert_close(actual[keep], expected[keep])
    if train:
        with patch_sdpa(TILED):
            assert served(lambda: model(x).sum().backward())


class Block(nn.Module):
    """Attention by the attribute and by the name, as models have it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y + taken_by_name(q, k, y, scale=0.1)


def test_compiled_models_follow_the_switch() -> None:
    torch._dynamo.reset()
    x = torch.randn(1, 2, 20, 24)
    model = Block()
    expected = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    assert not served(lambda: compiled(x))
    enable(TILED)
    with record() as seen:
        torch.testing.assert_close(compiled(x), expected)
    assert seen.routes() == {"tiled": 1}
    disable()
    assert not served(lambda: compiled(x))
    with patch_sdpa(TILED), record() as seen:
        torch.testing.assert_close(compiled(x), expected)
    assert seen.routes() == {"tiled": 2}
    assert not served(lambda: compiled(x))


@pytest.mark.torch_2_5
def test_torchscript_and_traces_hold_torchs_operator() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    q, k, v = qkv()
    expected = TORCH(q, k, v)
    with patch_sdpa(TILED):
        scripted = torch.jit.script(attend)
        traced = torch.jit.trace(attend, (q, k, v))
        exported = torch.export.export(Block(), (torch.randn(1, 2, 20, 24),))
    for function in (scripted, traced):
        torch.testing.assert_close(function(q, k, v), expected)
        assert "aten::scaled_dot_product_attention" in str(function.inlined_graph)
    assert "pascal" not in str(exported.graph)
