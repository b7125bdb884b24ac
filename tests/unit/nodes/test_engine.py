"""The ComfyUI pack's engine and its record of runs, without ComfyUI."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from attn_support.comfy.stub import StubHost, make_engine, node_module, stub_host  # noqa: F401
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pascal_attn_core.observe.memory import PeakMemory
from pascal_attn_core.reference import reference_sdpa

engine_module, runs = node_module("engine.engine"), node_module("engine.runs")
compare_module = node_module("engine.compare")
pytestmark = pytest.mark.usefixtures("stub_host")


def qkv(length: int = 64, *, dtype: torch.dtype = torch.float32, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(1, heads, length, 8, dtype=dtype) for _ in range(3))  # type: ignore[return-value]


def close(out: Tensor, given: tuple[Tensor, ...], **options: Any) -> None:
    oracle = reference_sdpa(*(t.double() for t in given), **options)[0]
    torch.testing.assert_close(out.double(), oracle, rtol=1e-2 if out.dtype == torch.float16 else 1e-5, atol=1e-3)


# ---- what is taken ----


def test_a_call_below_the_least_number_of_keys_is_left_to_the_host() -> None:
    engine = make_engine(min_keys=65)
    assert engine.attend(*qkv()) is None
    assert engine.run.reasons("passed to ComfyUI") == {"fewer than 65 keys": 1}
    engine = make_engine(min_keys=64)
    close(engine.attend(*(given := qkv())), given)


def test_a_small_call_whose_scores_exceed_the_budget_is_taken_all_the_same() -> None:
    many_heads = [torch.randn(64, 64, 32, 8) for _ in range(3)]  # 16 MiB of scores
    assert make_engine(min_keys=1024, budget_mib=17).attend(*many_heads) is None
    assert make_engine(min_keys=1024, budget_mib=15).attend(*many_heads) is not None


def test_a_single_query_is_left_to_the_host_where_the_node_says_so() -> None:
    query, key, value = qkv()
    engine = make_engine(min_queries=2)
    assert engine.attend(query[:, :, :1], key, value) is None
    assert engine.attend(query[:, :, :2], key, value) is not None
    assert engine.run.reasons("passed to ComfyUI") == {"fewer than 2 queries": 1}


def test_shapes_that_do_not_fit_are_passed_with_the_reason() -> None:
    query, key, value = qkv()
    engine = make_engine()
    assert engine.attend(query, key[..., :4], value, place=runs.Place("double 3")) is None
    (kind,) = engine.run.tallies
    assert (kind.block, kind.outcome) == ("double 3", "passed to ComfyUI")
    assert "4" in kind.why


@pytest.mark.parametrize("route", ["torch", "tiled"])
def test_the_route_asked_for_is_taken(route: str) -> None:
    engine, given = make_engine(route=route), qkv()
    close(engine.attend(*given), given)
    assert engine.run.routes() == {route: 1}


def test_a_route_that_cannot_take_a_call_gives_way_and_is_named_once() -> None:
    engine, given = make_engine(route="fused"), qkv()
    for _ in range(3):
        close(engine.attend(*given, place=runs.Place("double 3")), given)
    (warning,) = engine.run.warnings
    assert "route fused cannot take every call (double 3: " in warning
    assert warning.endswith("these use auto")
    assert engine.run.count("taken") == 3


def test_a_tile_that_does_not_fit_the_budget_is_chosen_from_the_card_instead() -> None:
    given = tuple(torch.randn(1, 1, 4096, 512) for _ in range(3))
    engine = make_engine(route="tiled", kv_block=4096, q_block=4096, budget_mib=1)
    out = engine.attend(*given, place=runs.Place("mid"))
    assert any("the automatic value is used instead" in warning and "mid" in warning for warning in engine.run.warnings)
    close(out[:, :, :8], (given[0][:, :, :8], *given[1:]))


def test_memory_stays_within_the_budget_whatever_the_number_of_tokens() -> None:
    for tokens in (2048, 2047):
        engine = make_engine(route="tiled", budget_mib=2)
        given = tuple(torch.randn(1, 1, tokens, 64) for _ in range(3))
        with PeakMemory("cpu") as peak:
            out = engine.attend(*given)
        assert peak.peak_bytes - out.numel() * 4 < (2 << 20) + 2 * given[0].numel() * 4 < tokens * tokens * 4


# ---- the NaN guard ----


def spoil_first_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first output of the core overflows, as a kernel that sums in float16 does; the next ones are its own."""
    run_call, spoilt = engine_module.run_call, []

    def overflowing(call: Any, *args: Any, **kwargs: Any) -> Any:
        out = run_call(call, *args, **kwargs)
        if not spoilt:
            spoilt.append(True)
            out[0][..., 0] = float("inf")
        return out

    monkeypatch.setattr(engine_module, "run_call", overflowing)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_output_that_overflows_is_computed_again_and_the_block_named(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    spoil_first_output(monkeypatch)
    engine, given = make_engine(), qkv(dtype=dtype)
    close(engine.attend(*given, place=runs.Place("double 3")), given)
    assert sum(tally.repaired for tally in engine.run.tallies.values()) == 1
    (warning,) = engine.run.warnings
    assert warning.startswith("double 3: ")
    assert "recomputed in float32" in warning


def test_without_the_guard_the_output_is_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_first_output(monkeypatch)
    engine = make_engine(nan_guard=False)
    assert not torch.isfinite(engine.attend(*qkv())).all()
    assert engine.run.warnings == []


def test_float16_scores_far_beyond_its_range_are_exact_work() -> None:
    query, key, value = qkv(dtype=torch.float16)
    given = (query * 300, key * 300, value)
    engine = make_engine()
    out = engine.attend(*given)
    assert torch.isfinite(out).all()
    assert engine.run.warnings == []


OPTIONS = {"diffusion model": "--force-fp32", "VAE": "--fp32-vae", "text encoder": "--fp32-text-enc"}


@pytest.mark.parametrize("part", OPTIONS)
def test_inputs_that_hold_nan_are_named_once_with_the_option_that_helps(part: str) -> None:
    engine, (query, key, value) = make_engine(), qkv()
    engine.part = part
    key[0, 0, 0, 0] = float("nan")
    for block in ("double 3", "double 4"):
        assert engine.attend(query, key, value, place=runs.Place(block)).isnan().any()
    (warning,) = engine.run.warnings
    assert warning.startswith("double 3: key already held NaN")
    assert OPTIONS[part] in warning
    assert sum(tally.repaired for tally in engine.run.tallies.values()) == 0


# ---- interrupts ----


def attend_in_run(engine: Any, given: tuple[Tensor, ...]) -> None:
    engine.begin()
    try:
        engine.attend(*given)
    finally:
        engine.end()


class Cancelled(BaseException):
    """As ComfyUI's exception since 0.33."""


@pytest.mark.parametrize("kind", [Cancelled, RuntimeError], ids=["BaseException", "Exception"])
def test_an_interrupt_between_blocks_ends_the_call_and_the_next_is_clean(
    stub_host: StubHost,  # noqa: F811
    kind: type[BaseException],
) -> None:
    engine = make_engine(route="tiled", q_block=16, kv_block=16)
    given = qkv()
    stub_host.interrupt, stub_host.at_look = kind("cancel"), 3
    with pytest.raises(kind, match="cancel"):
        attend_in_run(engine, given)
    assert stub_host.looks == 3
    (run,) = runs.remembered()
    assert run.finished
    assert any(kind.__name__ in note for note in run.notes)
    stub_host.interrupt = None
    engine.begin()
    close(engine.attend(*given), given)
    assert engine.end().count("taken") == 1
    assert stub_host.looks > 5


# ---- runs ----


def test_each_prompt_begins_with_the_full_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    tiled_route = sys.modules[engine_module.forget_halvings.__module__]
    caps = tiled_route.runtime_of(torch.device("cpu")).part(tiled_route.MemoryCaps)
    prompt = "one"
    monkeypatch.setattr(node_module("comfy.host"), "prompt_id", lambda: prompt)
    sampler, decoder = make_engine(), make_engine()
    for engine in (sampler, decoder):
        engine.begin()
        if engine is sampler:
            caps.lower(("a shape",), 1 << 20)
        engine.end()
        assert caps  # it is the same prompt still
    prompt = "two"
    sampler.begin()
    assert not caps
    sampler.end()


def test_a_run_counts_sums_and_says_its_line() -> None:
    engine = make_engine(min_keys=32, route="tiled")
    engine.begin()
    for length in (64, 64, 16):
        engine.attend(*qkv(length), place=runs.Place(f"call {length}"))
    run = engine.end()
    assert run.line() == "Model: 3 calls, 2 taken (tiled 2), 1 passed to ComfyUI"
    assert run.math_bytes == 2 * 64 * 64 * 4
    assert run.extra_bytes is not None
    assert 0 < run.elapsed_ms / 1e3 <= run.elapsed_s
    assert run.sample.query.shape == (64, 8)
    assert run.settings == "route tiled, budget 4 MiB, from 32 keys"


def test_the_newest_runs_are_remembered() -> None:
    found = [runs.Run("Model", "VAE", "", "cpu", prompt_id=str(number // 2)) for number in range(40)]
    for run in found:
        runs.remember(run)
    assert runs.remembered() == found[8:]
    runs.forget()
    assert runs.remembered() == []


def test_a_warning_is_kept_once() -> None:
    run = runs.Run("Model", "VAE", "", "cpu")
    assert run.warn("one")
    assert not run.warn("one")
    assert run.warnings == ["one"]


def test_threads_share_an_engine_without_losing_a_call() -> None:
    engine, given, failures = make_engine(), [qkv(length) for length in range(20, 60)], []

    def work() -> None:
        try:
            engine.begin()
            for tensors in given:
                close(engine.attend(*tensors), tensors)
            engine.end()
        except BaseException as error:
            failures.append(error)

    engine.begin()
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run = engine.end()
    assert failures == []
    assert run.count("taken") == 4 * len(given)
    assert run.finished


# ---- training ----


def test_gradient_checkpointing_finds_the_same_saved_tensors_in_both_passes() -> None:
    """The first call of a kind is compared with the host's function and sampled, its recomputation is not."""
    engine = make_engine()
    weight = torch.randn(8, 8, requires_grad=True)
    given = qkv()

    def block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (tensor @ weight for tensor in (query, key, value))

        def compare(out: Tensor) -> Any:
            wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value)
            return compare_module.difference("torch", out.square(), wanted.square(), out.dtype)

        out = engine.attend(query, key, value, compare=compare)
        assert out is not None
        return out * weight.sum()

    out = checkpoint(block, *given, use_reentrant=False)
    out.square().sum().backward()
    assert engine.run.sample is not None
    assert len(engine.run.compared) == 1
    engine.end()
    found, weight.grad = weight.grad, None
    q, k, v = (tensor @ weight for tensor in given)
    (torch.nn.functional.scaled_dot_product_attention(q, k, v) * weight.sum()).square().sum().backward()
    torch.testing.assert_close(found, weight.grad, rtol=1e-4, atol=1e-4)
