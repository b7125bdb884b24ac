"""The process-wide switch: who is served, how it goes away, and what the environment says."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.fresh import run
from attn_support.sdpa_switch import TILED, TORCH, qkv, served, torch_stays_torch  # noqa: F401
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as taken_by_name

from pascal_attn_core import AttentionConfig, record
from pascal_attn_core.attention import sdpa
from pascal_attn_core.capture import capture
from pascal_attn_core.sdpa_patch import disable, enable, is_enabled, patch_sdpa

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
        assert "replaced since" in caplog.text
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


@pytest.mark.torch_2_5
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


# ---- the environment -------------------------------------------------------------------------------------------------


def test_the_environment_can_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASCAL_ATTN_DISABLE", "1")
    enable()
    assert not is_enabled()
    with patch_sdpa() as patch:
        assert F.scaled_dot_product_attention is TORCH
        assert patch.sites == 0


def test_a_word_that_is_neither_yes_nor_no_is_a_warning_and_forbids_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PASCAL_ATTN_DISABLE", "perhaps")
    with patch_sdpa() as patch:
        assert patch.sites == 1
    assert "PASCAL_ATTN_DISABLE is ignored: it must be one of" in caplog.text


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


# ---- a threshold -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_environment", [False, True])
def test_calls_with_fewer_keys_stay_torchs(by_environment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_environment:
        monkeypatch.setenv("PASCAL_ATTN_MIN_KEYS", "12")
    q, k, v = qkv(tokens=12)
    with patch_sdpa(TILED, min_keys=None if by_environment else 12):
        assert served(lambda: F.scaled_dot_product_attention(q, k, v))
        assert served(lambda: F.scaled_dot_product_attention(q[..., :1, :], key=k, value=v))
        assert served(lambda: taken_by_name(q, k, v))
        short = k[..., :11, :], v[..., :11, :]
        assert not served(lambda: F.scaled_dot_product_attention(q, *short))
        assert not served(lambda: F.scaled_dot_product_attention(query=q, key=short[0], value=short[1]))
        assert not served(lambda: taken_by_name(q, *short))
    if by_environment:
        enable(TILED)
        assert not served(lambda: F.scaled_dot_product_attention(q, *short))
        assert served(lambda: F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize(("given", "kind"), [(-1, ValueError), ("12", TypeError), (True, TypeError)])
def test_a_threshold_is_a_whole_number(given: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="min_keys must be"):
        patch_sdpa(min_keys=given)


def test_a_threshold_in_the_environment_that_is_no_number_is_reported_and_ignored(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PASCAL_ATTN_MIN_KEYS", "many")
    q, k, v = qkv()
    with patch_sdpa(TILED):
        assert served(lambda: F.scaled_dot_product_attention(q, k, v))
    assert "PASCAL_ATTN_MIN_KEYS is ignored: it must be a whole number, got 'many'" in caplog.text
