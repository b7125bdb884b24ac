"""AttentionConfig: every choice checked once, from arguments, environment and tokens."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from pascal_attn_core import AttentionConfig, UnsupportedAttention
from pascal_attn_core import config as config_module


def test_it_is_frozen_and_changed_by_replace() -> None:
    config = AttentionConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.route = "tiled"  # type: ignore[misc]
    changed = dataclasses.replace(config, route="tiled", q_block=64)
    assert (changed.route, changed.q_block, config.route) == ("tiled", 64, "auto")
    assert hash(changed) != hash(config)
    assert changed == AttentionConfig(route="tiled", q_block=64)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (
            {"route": "flash"},
            ValueError,
            r"route must be one of \['auto', 'fused', 'torch', 'tiled', 'math', 'fused-int8'\], got 'flash'",
        ),
        ({"softmax": "fast"}, ValueError, r"softmax must be one of .*, got 'fast'"),
        ({"budget_mib": 0}, ValueError, r"budget_mib must be at least 0.0625 .*, got 0"),
        ({"budget_mib": float("inf")}, ValueError, r"finite, got inf"),
        ({"budget_mib": float("nan")}, ValueError, r"got nan"),
        ({"budget_mib": "64"}, TypeError, r"budget_mib must be a number, got '64'"),
        ({"budget_mib": True}, TypeError, r"got True"),
        ({"math_limit_mib": -1}, ValueError, r"at least 0 .*, got -1"),
        ({"math_limit_mib": None}, TypeError, r"got None"),
        ({"q_block": 0}, ValueError, r"q_block must be at least 1, got 0"),
        ({"kv_block": 1.5}, TypeError, r"kv_block must be a whole number, got 1.5"),
        ({"q_block": True}, TypeError, r"got True"),
        ({"trim_masks": "no"}, TypeError, r"trim_masks must be a bool, got 'no'"),
    ],
    ids=str,
)
def test_wrong_fields_say_what_is_expected(change: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        AttentionConfig(**change)


def test_the_environment_changes_the_default() -> None:
    environ = {"PASCAL_ATTN_ROUTE": " Tiled ", "PASCAL_ATTN_BUDGET_MIB": "16.5", "PASCAL_ATTN_Q_BLOCK": "128",
               "PASCAL_ATTN_TRIM_MASKS": "off", "PASCAL_ATTN_KV_BLOCK": "auto", "HOME": "/"}  # fmt: skip
    expected = AttentionConfig(route="tiled", budget_mib=16.5, q_block=128, trim_masks=False)
    assert AttentionConfig.from_env(environ) == expected
    assert AttentionConfig.from_env({}) == AttentionConfig()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("BUDGET_MIB", "lots"),
        ("BUDGET_MIB", "-1"),
        ("BUDGET_MIB", "nan"),
        ("Q_BLOCK", "1.5"),
        ("ROUTE", "flash"),
        ("TRIM_MASKS", "perhaps"),
        ("MATH_LIMIT_MIB", ""),
        ("SOFTMAX", ""),
    ],
)
def test_an_unusable_variable_is_named(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"PASCAL_ATTN_{name} is not usable"):
        AttentionConfig.from_env({f"PASCAL_ATTN_{name}": text})


def test_an_unknown_variable_is_one_warning_with_the_nearest_name(caplog: pytest.LogCaptureFixture) -> None:
    config_module._warn_unknown.cache_clear()
    with caplog.at_level(logging.WARNING, logger="pascal_attn"):
        for _ in range(3):
            assert AttentionConfig.from_env({"PASCAL_ATTN_BUGDET": "16"}) == AttentionConfig()
    (entry,) = caplog.records
    assert "PASCAL_ATTN_BUGDET" in entry.getMessage()
    assert "PASCAL_ATTN_BUDGET_MIB" in entry.getMessage()


def test_the_argument_is_above_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from pascal_attn_core import record, sdpa

    monkeypatch.setenv("PASCAL_ATTN_ROUTE", "tiled")
    config_module.default_config.cache_clear()
    try:
        query = torch.randn(1, 1, 4, 8)
        with record() as report:
            sdpa(query, query, query)
            sdpa(query, query, query, config=AttentionConfig(route="math"))
        assert report.routes() == {"tiled": 1, "math": 1}
    finally:
        monkeypatch.undo()
        config_module.default_config.cache_clear()


@pytest.mark.parametrize(
    "config",
    [
        AttentionConfig(),
        AttentionConfig(route="tiled", budget_mib=16, q_block=64, kv_block=32),
        AttentionConfig(softmax="online", math_limit_mib=0.5, trim_masks=False, budget_mib=0.1),
        AttentionConfig(math_limit_mib=1e-7),
    ],
    ids=lambda config: config.token,
)
def test_a_config_comes_back_from_its_token(config: AttentionConfig) -> None:
    assert AttentionConfig.from_token(config.token) == config


def test_the_default_has_an_empty_token() -> None:
    assert AttentionConfig().token == ""
    assert AttentionConfig(route="tiled", budget_mib=16).token == "route=tiled;budget_mib=16"


def test_an_unsupported_call_carries_its_reasons() -> None:
    error = UnsupportedAttention("fused", ["head_dim 300 > 256", "dtype float64"])
    assert error.reasons == ["head_dim 300 > 256", "dtype float64"]
    assert "route 'fused' cannot take this call: head_dim 300 > 256; dtype float64" in str(error)
    assert isinstance(error, NotImplementedError)
