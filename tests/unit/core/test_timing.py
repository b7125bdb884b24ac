"""Which of two kernels is faster is timed once per kind of call, and remembered."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attn_support.fused.cases import CARD
from torch import Tensor

from pascal_attn_core import AttentionConfig
from pascal_attn_core.call import AttentionCall, check_call
from pascal_attn_core.fused.kernels import KernelUnavailable
from pascal_attn_core.fused.launches import num_splits, variant_of
from pascal_attn_core.observe.progress import between_blocks, current_checkpoint
from pascal_attn_core.routes import _choose_kernel, fused, timing
from pascal_attn_core.routes.tiled import run_tiled
from pascal_attn_core.routes.torch_kernel import TorchForm, find_form, run_form

BUDGET = 64 << 20


def _call(
    q: tuple[int, ...] = (2, 10, 4096, 64),
    kv_tokens: int | None = None,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> AttentionCall:
    query = torch.empty(q, dtype=dtype)
    key = torch.empty((*q[:-2], kv_tokens or q[-2], q[-1]), dtype=dtype)
    return check_call(query, key, key, mask, **options)  # type: ignore[arg-type]


def _grouped(heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> AttentionCall:
    query, key = (torch.empty(1, n, 600, 64, dtype=dtype) for n in (heads, kv_heads))
    return check_call(query, key, key, enable_gqa=True)


CALLS = {
    "self-attention": lambda: _call(),
    "cross-attention": lambda: _call(kv_tokens=77),
    "one head of a VAE": lambda: _call((1, 1, 4096, 512)),
    "causal": lambda: _call((1, 8, 700, 128), is_causal=True),
    "one query": lambda: _call((1, 8, 1, 128), kv_tokens=5000),
    "bool mask": lambda: _call((1, 8, 300, 72), mask=torch.ones(300, 300, dtype=torch.bool)),
    "padding": lambda: _call((2, 4, 300, 64), mask=torch.zeros(2, 1, 1, 300)),
    "half precision": lambda: _call((1, 8, 300, 64), dtype=torch.float16),
    "grouped heads": lambda: _grouped(8, 2),
    "odd head_dim": lambda: _call((1, 8, 300, 60)),
}


class Clock:
    """Runs what is timed and says what it is told: the milliseconds of ours and of torch's."""

    def __init__(self, ours: float, theirs: float):
        self.times, self.runs = (ours, theirs), 0

    def __call__(self, attempts: list[Callable[[], object]], device: torch.device) -> list[float]:
        self.runs += 1
        self.results = [attempt() for attempt in attempts]
        return list(self.times)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A GTX 1080 Ti whose fused kernel is the tiled route, and an empty cache."""
    monkeypatch.setattr(timing, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(timing, "_known", {})
    monkeypatch.setattr(timing, "device_info", lambda device: CARD)
    monkeypatch.setattr(fused, "run", lambda call, with_lse: run_tiled(call, AttentionConfig(), with_lse=with_lse))
    return tmp_path / "cache"


def _clock(monkeypatch: pytest.MonkeyPatch, ours: float, theirs: float) -> Clock:
    clock = Clock(ours, theirs)
    monkeypatch.setattr(timing, "median_times", clock)
    return clock


@pytest.mark.parametrize("name", CALLS)
def test_the_timed_call_is_small_and_needs_the_same_kernels(name: str) -> None:
    call = CALLS[name]()
    kind = timing.Kind.of(call)
    sample = timing.sample_call(call, kind)
    assert timing.Kind.of(sample) == kind
    assert variant_of(sample, "forward") == variant_of(call, "forward")
    assert (num_splits(sample, CARD) > 0) == (num_splits(call, CARD) > 0)
    assert sample.num_scores <= 1 << 26
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (sample.query, sample.key)}
    assert sum(memory.values()) <= 32 << 20
    form = find_form(sample, BUDGET)
    assert isinstance(form, TorchForm)


def test_lengths_beyond_the_timed_ones_are_one_kind() -> None:
    assert timing.Kind.of(_call()) == timing.Kind.of(_call((1, 24, 9000, 64)))
    kinds = {timing.Kind.of(make()) for make in CALLS.values()}
    assert len(kinds) == len(CALLS)
    leaf = torch.empty(1, 2, 300, 64, requires_grad=True)
    assert timing.Kind.of(check_call(leaf, leaf, leaf)) != timing.Kind.of(check_call(*[leaf.detach()] * 3))


def test_both_compute_the_same_and_are_timed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _clock(monkeypatch, 3.0, 4.0)
    for _ in range(2):
        assert timing.fused_over_torch(_call((1, 2, 300, 64)), BUDGET) == 0.75
    assert clock.runs == 1
    torch.testing.assert_close(*clock.results, atol=1e-5, rtol=1e-4)


def test_gradients_are_timed_too_where_a_call_has_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _clock(monkeypatch, 3.0, 4.0)
    leaf = torch.empty(1, 2, 100, 16, requires_grad=True)
    with torch.no_grad():
        timing.fused_over_torch(check_call(leaf, leaf, leaf), BUDGET)
    assert isinstance(clock.results[0], Tensor)
    timing.fused_over_torch(check_call(leaf, leaf, leaf), BUDGET)
    ours, theirs = clock.results
    assert len(ours) == len(theirs) == 3
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    assert leaf.grad is None


def test_the_next_process_on_the_same_machine_reads_the_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _clock(monkeypatch, 3.0, 4.0)
    timing.fused_over_torch(_call((1, 2, 300, 64)), BUDGET)
    later = _clock(monkeypatch, 9.0, 1.0)
    monkeypatch.setattr(timing, "_known", {})
    assert timing.fused_over_torch(_call((1, 2, 300, 64)), BUDGET) == 0.75
    assert later.runs == 0
    (kind,) = timing.timed_on(CARD)
    assert str(kind) == "forward-64-float32-none: 512 x 512 tokens, 1024 rows"
    (file,) = folder.iterdir()
    assert json.loads(file.read_text())["card"] == CARD.name
    monkeypatch.setattr(timing, "device_info", lambda device: replace(CARD, name="another card"))
    assert timing.fused_over_torch(_call((1, 2, 300, 64)), BUDGET) == 9.0
    assert len(list(folder.iterdir())) == 2


def test_what_another_process_wrote_meanwhile_stands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _clock(monkeypatch, 3.0, 4.0)
    timing.fused_over_torch(_call((1, 2, 300, 64)), BUDGET)
    monkeypatch.setattr(timing, "_known", {timing.file_name(CARD): {}})
    _clock(monkeypatch, 9.0, 1.0)
    assert timing.fused_over_torch(_call((1, 2, 300, 64)), BUDGET) == 0.75


@pytest.mark.parametrize("content", ["", "{", "[]", '{"fused_over_torch": 3}', '{"fused_over_torch": [{"kind": {}}]}'])
def test_a_damaged_file_is_written_anew(folder: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    clock = _clock(monkeypatch, 3.0, 4.0)
    folder.mkdir()
    file = folder / timing.file_name(CARD)
    file.write_text(content)
    assert timing.fused_over_torch(_call((1, 2, 300, 64)), BUDGET) == 0.75
    assert clock.runs == 1
    assert json.loads(file.read_text())["fused_over_torch"][0]["ratio"] == 0.75


def test_a_folder_that_cannot_be_written_costs_only_the_memory_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _clock(monkeypatch, 3.0, 4.0)
    folder.write_text("a file where the folder should be")
    for _ in range(2):
        assert timing.fused_over_torch(_call((1, 2, 300, 64)), BUDGET) == 0.75
    assert clock.runs == 1


@pytest.mark.parametrize("error", [KernelUnavailable("no kernel"), torch.cuda.OutOfMemoryError("no memory")])
def test_where_it_cannot_be_timed_nothing_is_claimed_or_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    runs = []

    def fails(*arguments: object, **options: object) -> None:
        runs.append(1)
        raise error

    monkeypatch.setattr(timing, "median_times", fails)
    for _ in range(2):
        assert timing.fused_over_torch(_call((1, 2, 300, 64)), BUDGET) is None
    assert runs == [1]
    timing._save(CARD, timing._known[timing.file_name(CARD)])
    assert json.loads(next(folder.iterdir()).read_text())["fused_over_torch"] == []


def test_an_interrupt_is_not_swallowed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "median_times", interrupted)
    with pytest.raises(KeyboardInterrupt):
        timing.fused_over_torch(_call((1, 2, 300, 64)), BUDGET)


def test_threads_that_ask_together_time_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _clock(monkeypatch, 3.0, 4.0)
    answers: list[float | None] = []
    threads = [
        threading.Thread(target=lambda: answers.append(timing.fused_over_torch(_call((1, 2, 300, 64)), BUDGET)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [0.75] * 8
    assert clock.runs == 1


def test_the_callers_state_is_left_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def look(attempts: list[Callable[[], object]], device: torch.device) -> list[float]:
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        seen.append((current_checkpoint(), *modes))
        return [1.0, 2.0]

    monkeypatch.setattr(timing, "median_times", look)
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu"), between_blocks(lambda done, total: None):
        timing.fused_over_torch(_call((1, 2, 300, 64)), BUDGET)
        assert current_checkpoint() is not None
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert seen == [(None, False, False, False)]
    assert torch.equal(state, torch.get_rng_state())


class _OnCuda:
    """A call's query as far as the choice looks at it, on a card that is not here."""

    device = torch.device("cuda", 0)
    requires_grad = False


@pytest.mark.parametrize(("ratio", "route"), [(0.8, "fused"), (1.2, "torch"), (1.0, "torch"), (None, "torch")])
def test_the_timing_decides_and_is_given_as_the_reason(
    monkeypatch: pytest.MonkeyPatch, ratio: float | None, route: str
) -> None:
    from pascal_attn_core import routes

    call = _call((1, 8, 300, 64))
    form = find_form(call, BUDGET)
    call.query = _OnCuda()  # type: ignore[assignment]
    monkeypatch.setattr(fused, "may_win", lambda call, torch_has_a_kernel: True)
    monkeypatch.setattr(fused, "why_not", lambda call, config: [])
    monkeypatch.setattr(routes, "fused_over_torch", lambda call, budget: ratio)
    monkeypatch.setattr(routes, "_budget", lambda call, config: BUDGET)
    choice = _choose_kernel(call, AttentionConfig(), form)
    assert choice is not None
    assert choice.route == route
    assert ratio is None or f"{ratio:.2f}" in choice.why
    rewritten = _choose_kernel(call, AttentionConfig(), replace(form, upcast=True))  # type: ignore[type-var]
    assert rewritten is not None
    assert rewritten.route == (route if ratio else "fused")
    none = _choose_kernel(call, AttentionConfig(), ["torch's function has no sliding window"])
    assert none is not None
    assert (none.route, none.why) == ("fused", "torch's function has no sliding window")
    monkeypatch.setattr(fused, "may_win", lambda call, torch_has_a_kernel: False)
    other = _choose_kernel(call, AttentionConfig(), form)
    assert other is not None
    assert (other.route, other.why) == ("torch", "torch has a fused kernel for it")
    assert _choose_kernel(call, AttentionConfig(), ["no kernel"]) is None


def test_a_call_too_short_to_matter_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from pascal_attn_core import routes

    monkeypatch.setattr(fused, "takes_device", lambda device: True)
    monkeypatch.setattr(fused, "may_win", lambda call, torch_has_a_kernel: True)
    monkeypatch.setattr(fused, "why_not", lambda call, config: [])
    timed: list[AttentionCall] = []
    monkeypatch.setattr(routes, "fused_over_torch", lambda call, budget: timed.append(call))
    for tokens in (77, 600):
        call = _call((1, 8, tokens, 64))
        assert routes.choose(call, AttentionConfig()).route == "torch"
    assert [call.seq_len_q for call in timed] == [600]


def test_medians_are_taken_in_turn_after_a_run_that_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = iter([9.0, 1.0, 1.0, 2.0, 2.0, 3.0])

    def timed(attempt: Callable[[], object], device: torch.device) -> float:
        attempt()
        return next(clock)

    monkeypatch.setattr(timing, "_milliseconds", timed)
    attempts: list[Callable[[], object]] = [lambda: order.append("a"), lambda: order.append("b")]
    assert timing.median_times(attempts, torch.device("cpu")) == [2.0, 2.0]
    assert "".join(order) == "abababab"


def test_run_form_is_what_the_route_torch_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[AttentionCall] = []
    monkeypatch.setattr(timing, "run_form", lambda call, form: seen.append(call) or run_form(call, form))
    _clock(monkeypatch, 1.0, 1.0)
    timing.fused_over_torch(_call((1, 2, 300, 64)), BUDGET)
    assert [call.seq_len_q for call in seen] == [512]
