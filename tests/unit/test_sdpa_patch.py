"""The process-wide switch: who is served, who is left alone, and how it goes away."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as taken_by_name
from torch.overrides import TorchFunctionMode

import pascal_attn_core
from pascal_attn_core import AttentionConfig, record, sdpa_patch
from pascal_attn_core.capture import capture
from pascal_attn_core.dispatch import sdpa
from pascal_attn_core.sdpa_patch import disable, enable, is_enabled, patch_sdpa

TORCH = torch._C._nn.scaled_dot_product_attention
TILED = AttentionConfig(route="tiled")


@pytest.fixture(autouse=True)
def _torch_stays_torch() -> Iterator[None]:
    assert F.scaled_dot_product_attention is TORCH
    yield
    disable()
    assert F.scaled_dot_product_attention is TORCH


def qkv(heads: int = 2, tokens: int = 12, dim: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, heads, tokens, dim, dtype=dtype) for _ in range(3)]


def served(call: Any) -> bool:
    """Whether a call comes to us."""
    with record() as seen:
        call()
    return seen.total > 0


# ---- on and off ------------------------------------------------------------------------------------------------------


def test_enable_serves_all_calls_until_disable() -> None:
    q, k, v = qkv()
    expected = TORCH(q, k, v)
    assert not is_enabled()
    enable(TILED)
    assert is_enabled()
    assert served(lambda: torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), expected))
    disable()
    assert not is_enabled()
    assert not served(lambda: F.scaled_dot_product_attention(q, k, v))


def test_enabling_and_disabling_twice_is_harmless_and_the_last_config_counts() -> None:
    q, k, v = qkv()
    enable(AttentionConfig(route="math"))
    function = F.scaled_dot_product_attention
    enable(TILED)
    assert F.scaled_dot_product_attention is function
    with record() as seen:
        F.scaled_dot_product_attention(q, k, v)
    assert seen.routes() == {"tiled": 1}
    disable()
    disable()
    assert F.scaled_dot_product_attention is TORCH


def test_patches_leave_in_any_order_and_the_newest_decides() -> None:
    q, k, v = qkv()

    def route() -> dict[str, int]:
        with record() as seen:
            F.scaled_dot_product_attention(q, k, v)
        return seen.routes()

    first, second = patch_sdpa(AttentionConfig(route="math")), patch_sdpa(TILED)
    assert route() == {"tiled": 1}
    third = patch_sdpa(AttentionConfig(route="torch"))
    second.remove()
    assert route() == {"torch": 1}
    third.remove()
    assert route() == {"math": 1}
    first.remove()
    first.remove()
    assert F.scaled_dot_product_attention is TORCH


def test_disable_leaves_a_patch_in_force() -> None:
    q, k, v = qkv()
    enable()
    patch = patch_sdpa(TILED)
    disable()
    assert served(lambda: F.scaled_dot_product_attention(q, k, v))
    patch.remove()


def test_a_block_ends_also_by_an_error() -> None:
    with pytest.raises(KeyError), patch_sdpa():
        raise KeyError
    assert F.scaled_dot_product_attention is TORCH


def test_a_patch_of_somebody_else_over_ours_lives_on(caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = qkv()
    patch = patch_sdpa(TILED)
    below, calls = F.scaled_dot_product_attention, []

    def theirs(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return below(*args, **kwargs)

    F.scaled_dot_product_attention = theirs
    try:
        with caplog.at_level(logging.WARNING, logger="pascal_attn"):
            patch.remove()
        assert "replaced again since" in caplog.text
        assert F.scaled_dot_product_attention is theirs
        assert not served(lambda: F.scaled_dot_product_attention(q, k, v))
        assert calls == [1]
        with patch_sdpa(TILED):
            assert served(lambda: F.scaled_dot_product_attention(q, k, v))
        assert F.scaled_dot_product_attention is theirs
    finally:
        F.scaled_dot_product_attention = below
    with patch_sdpa(TILED):
        assert F.scaled_dot_product_attention is below
    F.scaled_dot_product_attention = TORCH


def test_it_goes_over_a_patch_of_somebody_else_and_off_again() -> None:
    q, k, v = qkv()
    calls = []

    def theirs(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return TORCH(*args, **kwargs)

    F.scaled_dot_product_attention = theirs
    try:
        with patch_sdpa(TILED):
            F.scaled_dot_product_attention(q, k, v)
            assert not calls
            with pytest.raises(RuntimeError):
                F.scaled_dot_product_attention(q, k[..., :5], v)
            assert calls == [1]
        assert F.scaled_dot_product_attention is theirs
    finally:
        F.scaled_dot_product_attention = TORCH


def test_a_capture_sees_the_calls_under_it(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    q, k, v = qkv()
    with patch_sdpa(TILED):
        with capture(tmp_path / "calls.safetensors"):
            assert served(lambda: F.scaled_dot_product_attention(q, k, v))
        assert served(lambda: F.scaled_dot_product_attention(q, k, v))
    assert (tmp_path / "calls.safetensors").exists()


def test_a_wrong_config_is_refused() -> None:
    with pytest.raises(TypeError, match="config must be an AttentionConfig or None, got 'tiled'"):
        enable("tiled")  # type: ignore[arg-type]
    assert not is_enabled()


# ---- who is served ---------------------------------------------------------------------------------------------------


def test_a_block_serves_code_that_took_the_function_by_name() -> None:
    q, k, v = qkv()
    assert taken_by_name is TORCH
    with patch_sdpa(TILED):
        with record() as seen:
            out = taken_by_name(q, k, v)
        assert seen.routes() == {"tiled": 1}
    torch.testing.assert_close(out, taken_by_name(q, k, v))
    assert not served(lambda: taken_by_name(q, k, v))


def test_inside_a_block_the_innermost_decides_whichever_name_is_called() -> None:
    q, k, v = qkv()
    for function in (taken_by_name, lambda *args: F.scaled_dot_product_attention(*args)):
        with patch_sdpa(AttentionConfig(route="math")), patch_sdpa(TILED), record() as seen:
            function(q, k, v)
        assert seen.routes() == {"tiled": 1}


def test_a_patch_removed_within_its_block_serves_nobody() -> None:
    q, k, v = qkv()
    with patch_sdpa(TILED) as patch:
        patch.remove()
        assert not served(lambda: taken_by_name(q, k, v))


def test_enable_says_who_took_the_function_by_name(caplog: pytest.LogCaptureFixture) -> None:
    module = type(sys)("takes_by_name")
    module.attend = TORCH  # type: ignore[attr-defined]
    sys.modules["takes_by_name"] = module
    try:
        with caplog.at_level(logging.WARNING, logger="pascal_attn"):
            enable()
    finally:
        del sys.modules["takes_by_name"]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "takes_by_name" in warning
    assert "patch_sdpa" in warning
    assert "torch.nn" not in warning
    assert "pascal_attn_core" not in warning


@pytest.mark.parametrize("route", ["torch", "tiled", "math"])
def test_our_own_routes_are_not_taken_for_calls(route: str) -> None:
    q, k, v = qkv(tokens=64)
    config = AttentionConfig(route=route)
    for block in (patch_sdpa(TILED), patch_sdpa(config)):
        with block:
            for call in (lambda: sdpa(q, k, v, config=config), lambda: F.scaled_dot_product_attention(q, k, v)):
                with record() as seen:
                    call()
                assert seen.total == 1
    with patch_sdpa(TILED), record() as seen:
        sdpa(q, k, v, config=config)
    assert seen.routes() == {route: 1}


def test_all_threads_are_served_while_patches_come_and_go() -> None:
    q, k, v = qkv(tokens=32)
    expected, errors, stop = TORCH(q, k, v), [], threading.Event()

    def calls() -> None:
        try:
            while not stop.is_set():
                torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), expected)
                with patch_sdpa(TILED):
                    torch.testing.assert_close(taken_by_name(q, k, v), expected)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        enable(TILED)
        disable()
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    enable(TILED)
    seen_there = []
    other = threading.Thread(target=lambda: seen_there.append(served(lambda: F.scaled_dot_product_attention(q, k, v))))
    other.start()
    other.join()
    assert seen_there == [True]


def test_gradients_dropout_autocast_and_gqa_come_to_us() -> None:
    q, k, v = (t.requires_grad_() for t in qkv(heads=4))
    with patch_sdpa(TILED):
        out = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True, is_causal=True)
        actual = torch.autograd.grad(out.square().sum(), (q, k, v))
    out = TORCH(q, k[:, :2], v[:, :2], enable_gqa=True, is_causal=True)
    for one, other in zip(actual, torch.autograd.grad(out.square().sum(), (q, k, v))):
        torch.testing.assert_close(one, other)
    with patch_sdpa(TILED), torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    with patch_sdpa(TILED):
        assert F.scaled_dot_product_attention(q, k, torch.ones_like(v), dropout_p=0.5).std() > 0.01


def test_causal_bias_objects_mean_what_they_mean() -> None:
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 8)
    bias = causal_lower_right(3, 7)
    expected = TORCH(q, k, v, attn_mask=torch.ones(3, 7, dtype=torch.bool).tril(4))
    for function in (taken_by_name, lambda *args: F.scaled_dot_product_attention(*args)):
        with patch_sdpa(TILED):
            torch.testing.assert_close(function(q, k, v, bias), expected)


# ---- who is left alone -----------------------------------------------------------------------------------------------


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
    with patch_sdpa(TILED):
        assert not served(lambda: F.scaled_dot_product_attention(q, k, v, mask, is_causal=True))


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


def test_a_config_that_cannot_work_says_so_instead_of_leaving_the_call_to_torch() -> None:
    q, k, v = qkv(tokens=2048)
    config = AttentionConfig(route="tiled", q_block=2048, kv_block=2048, budget_mib=1)
    with pytest.raises(ValueError, match="budget"):
        sdpa(q, k, v, config=config)
    with patch_sdpa(config), pytest.raises(ValueError, match="budget"):
        F.scaled_dot_product_attention(q, k, v)


# ---- other machinery -------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("how", ["enable", "block"])
def test_torchs_own_transformer_keeps_working(batch_first: bool, train: bool, how: str) -> None:
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
                if how == "enable":
                    enable(TILED)
                    actual = model(x, **case)
                    disable()
                else:
                    with patch_sdpa(TILED):
                        actual = model(x, **case)
            keep = torch.ones(3, 7, dtype=torch.bool) if "src_key_padding_mask" not in case else ~padding
            keep = keep if batch_first else keep.T
            torch.testing.assert_close(actual[keep], expected[keep])
    if train:
        with patch_sdpa(TILED):
            assert served(lambda: model(x).sum().backward())


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_multihead_attention_keeps_working(need_weights: bool, train: bool) -> None:
    model = nn.MultiheadAttention(16, 4, batch_first=True).train(train)
    x = torch.randn(2, 6, 16, requires_grad=True)
    expected, weights = model(x, x, x, need_weights=need_weights)
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    with patch_sdpa(TILED):
        actual, ours = model(x, x, x, need_weights=need_weights)
        (grad,) = torch.autograd.grad(actual.square().sum(), x)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(grad, wanted)
    assert (ours is None) == (weights is None)


class Block(nn.Module):
    """Attention by the attribute and by the name, as models have it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y + taken_by_name(q, k, y, scale=0.1)


def test_checkpointed_models_recompute_by_the_same() -> None:
    x = torch.randn(1, 2, 20, 24, requires_grad=True)

    def attend(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*x.chunk(3, dim=-1), is_causal=True)

    (expected,) = torch.autograd.grad(attend(x).square().sum(), x)
    with patch_sdpa(TILED), record() as seen:
        out = torch.utils.checkpoint.checkpoint(attend, x, use_reentrant=False)
        (actual,) = torch.autograd.grad(out.square().sum(), x)
    assert seen.routes().keys() == {"tiled"}
    torch.testing.assert_close(actual, expected)


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


def test_a_scripted_multihead_attention_compiles_under_the_switch() -> None:
    enable()
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 3, 8)
    torch.testing.assert_close(torch.jit.script(model)(x, x, x)[0], model(x, x, x)[0])


def test_transformers_models_give_the_same_under_the_switch() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    tokens = torch.randint(0, 64, (2, 10))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask).logits
        generated = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
        enable(TILED)
        with record() as seen:
            actual = model(tokens, attention_mask=mask).logits
        assert seen.routes() == {"tiled": 2}
        torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()])
        again = model.generate(tokens, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert torch.equal(again, generated)


def test_diffusers_models_give_the_same_under_the_switch() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1, cross_attention_dim=8,
        attention_head_dim=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ).eval()  # fmt: skip
    x, text = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 8)
    with torch.no_grad():
        expected = model(x, 3, text).sample
        with patch_sdpa(TILED), record() as seen:
            actual = model(x, 3, text).sample
    assert seen.routes().keys() == {"tiled"}
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_patched_pipeline_decides_over_the_switch() -> None:
    redirect = pytest.importorskip("pascal_attn_core._diffusers_redirect")
    q, k, v = qkv()
    enable(AttentionConfig(route="math"))
    with redirect.SdpaRedirect(TILED), record() as seen:
        F.scaled_dot_product_attention(q, k, v)
    assert seen.routes() == {"tiled": 1}


# ---- the environment -------------------------------------------------------------------------------------------------


def test_the_environment_can_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASCAL_ATTN_DISABLE", "1")
    enable()
    assert not is_enabled()
    with patch_sdpa() as patch:
        assert F.scaled_dot_product_attention is TORCH
        assert patch.sites == 0


def test_a_word_that_is_neither_yes_nor_no_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASCAL_ATTN_DISABLE", "maybe")
    with pytest.raises(ValueError, match=r"PASCAL_ATTN_DISABLE must be one of .* got 'maybe'"):
        patch_sdpa()


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
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(pascal_attn_core.__file__).parent.parent), **environ}
    env |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected


def test_importing_the_switch_changes_nothing() -> None:
    assert sdpa_patch.F.scaled_dot_product_attention is TORCH
