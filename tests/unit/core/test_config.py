"""AttentionConfig: every choice checked once, from arguments, environment and tokens."""

import dataclasses
import logging
from collections.abc import Callable

import pytest
import torch

from pascal_attn_core import AttentionConfig, record, sdpa
from pascal_attn_core import config as config_module


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"route": "flash"}, ValueError, r"one of \['auto', 'fused-tensor', 'fused', .*, 'fused-int8'\], got 'flash'"),
        ({"softmax": "fast"}, ValueError, r"softmax must be one of .*, got 'fast'"),
        ({"budget_mib": 0}, ValueError, r"budget_mib must be at least 0.0625 .*, got 0"),
        ({"budget_mib": float("inf")}, ValueError, r"finite, got inf"),
        ({"budget_mib": "64"}, TypeError, r"budget_mib must be a number, got '64'"),
        ({"math_limit_mib": -1}, ValueError, r"at least 0 .*, got -1"),
        ({"math_limit_mib": None}, TypeError, r"got None"),
        ({"q_block": 0}, ValueError, r"q_block must be at least 1, got 0"),
        ({"q_block": 10**30}, ValueError, r"q_block must be at most 2147483647, got 10+$"),
        ({"route": 999 * "x"}, ValueError, r"got 'x+\.\.\.x+'$"),
        ({"budget_mib": 1e30}, ValueError, r"budget_mib must be at most 1099511627776, got 1e\+30"),
        ({"kv_block": 1.5}, TypeError, r"kv_block must be a whole number, got 1.5"),
        ({"q_block": True}, TypeError, r"got True"),
        ({"devices": ("cuda:0",)}, ValueError, r"devices must be two or more names of devices, .*, got \('cuda:0',\)"),
        ({"devices": "cuda:0,cuda:1"}, TypeError, r"devices must be two or more names .*, got 'cuda:0,cuda:1'"),
        ({"share_from_tokens": 0}, ValueError, r"share_from_tokens must be at least 1, got 0"),
        ({"trim_masks": "no"}, TypeError, r"trim_masks must be a bool, got 'no'"),
    ],
    ids=lambda value: None if isinstance(value, dict) else str(value),
)
def test_wrong_fields_say_what_is_expected(change: dict, error: type, match: str) -> None:
    with pytest.raises(error, match=match):
        AttentionConfig(**change)


def test_the_environment_changes_the_default_and_devices_are_also_read_from_a_list() -> None:
    environ = {"PASCAL_ATTN_ROUTE": " Tiled ", "PASCAL_ATTN_BUDGET_MIB": "16.5", "PASCAL_ATTN_Q_BLOCK": "128",
               "PASCAL_ATTN_TRIM_MASKS": "off", "PASCAL_ATTN_KV_BLOCK": "auto", "HOME": "/"}  # fmt: skip
    expected = AttentionConfig(route="tiled", budget_mib=16.5, q_block=128, trim_masks=False)
    assert AttentionConfig.from_env(environ) == expected
    assert AttentionConfig.from_env({}) == AttentionConfig()
    devices = ("cuda:0", "cuda:1")
    assert AttentionConfig.from_env({"PASCAL_ATTN_DEVICES": " cuda:0, CUDA:1 "}) == AttentionConfig(devices=devices)
    assert AttentionConfig(devices=list(devices)).devices == devices  # type: ignore[arg-type]


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings so far; none was given before the test."""
    config_module.log_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="pascal_attn")
    return lambda: [entry.getMessage() for entry in caplog.records]


NAMES = [f"PASCAL_ATTN_{field.name.upper()}" for field in dataclasses.fields(AttentionConfig)]


@pytest.mark.parametrize("text", ["", "  ", "\t"])
def test_an_empty_variable_is_as_good_as_none(text: str, warnings_of, monkeypatch) -> None:
    assert AttentionConfig.from_env({name: text for name in NAMES}) == AttentionConfig()
    for name in config_module.SWITCHES:
        monkeypatch.setenv(name, text)
        assert config_module.switched_on(name) is False
    assert warnings_of() == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("BUDGET_MIB", "lots", "budget_mib must be a number, got 'lots'"),
        ("BUDGET_MIB", "nan", "budget_mib must be at least 0.0625 and finite, got nan"),
        ("Q_BLOCK", "1.5", "q_block must be a whole number, got '1.5'"),
        ("KV_BLOCK", "0", "kv_block must be at least 1, got 0"),
        ("ROUTE", "flash", "'torch', 'math', 'tiled', 'fused-int8'], got 'flash'"),
        ("FUSED", "2", "fused must be one of ['0', '1', 'false', 'no', 'off', 'on', 'true', 'yes'], got '2'"),
    ],
)
def test_nonsense_is_one_warning_with_what_was_expected_and_changes_nothing(name, text, expected, warnings_of) -> None:
    for _ in range(3):
        found = AttentionConfig.from_env({f"PASCAL_ATTN_{name}": text, "PASCAL_ATTN_SOFTMAX": "online"})
        assert found == AttentionConfig(softmax="online")
    (sentence,) = warnings_of()
    assert sentence.startswith(f"PASCAL_ATTN_{name} is ignored: ")
    assert expected in sentence


@pytest.mark.parametrize(("text", "on"), [("1", True), ("Yes", True), ("off", False), ("0", False), ("maybe", False)])
def test_a_switch_is_on_only_where_it_says_so(text: str, on: bool, warnings_of, monkeypatch) -> None:
    monkeypatch.setenv("PASCAL_ATTN_ENABLE", text)
    assert [config_module.switched_on("PASCAL_ATTN_ENABLE") for _ in range(2)] == [on, on]
    assert [one.startswith("PASCAL_ATTN_ENABLE is ignored: ") for one in warnings_of()] == [True] * (text == "maybe")


@pytest.mark.parametrize(
    ("name", "meant"),
    [("BUGDET", "BUDGET_MIB"), ("ROUT", "ROUTE"), ("ENABLED", "ENABLE"), ("QBLOCK", "Q_BLOCK"), ("TOKEN", None)],
)
def test_an_unknown_variable_is_one_warning_with_the_nearest_name(name: str, meant: str | None, warnings_of) -> None:
    for _ in range(3):
        assert AttentionConfig.from_env({f"PASCAL_ATTN_{name}": "tiled"}) == AttentionConfig()
    (sentence,) = warnings_of()
    assert sentence.startswith(f"unknown environment variable PASCAL_ATTN_{name}; ")
    if meant is None:
        assert "did you mean" not in sentence
        assert all(repr(known) in sentence for known in [*NAMES, *config_module.SWITCHES])
    else:
        assert sentence.endswith(f"did you mean PASCAL_ATTN_{meant}?")


def test_the_argument_is_above_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("fields", "token"),
    [
        ({}, ""),
        ({"route": "tiled", "budget_mib": 16}, "route=tiled;budget_mib=16"),
        ({"softmax": "online", "math_limit_mib": 1e-7, "trim_masks": False, "budget_mib": 0.1}, None),
        ({"devices": ("cuda:0", "cuda:1"), "q_block": 4096}, "q_block=4096;devices=cuda:0,cuda:1"),
    ],
)
def test_a_config_comes_back_from_its_token(fields: dict, token: str | None) -> None:
    config = AttentionConfig(**fields)
    assert AttentionConfig.from_token(config.token) == config
    assert token is None or config.token == token
