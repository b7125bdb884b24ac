"""Which of two kernels is faster is timed once per kind of call, and stored."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attn_support.clock import Clock
from attn_support.fused.device import Timed, emulated_card
from attn_support.fused.emulation import CARD
from torch import Tensor

from pascal_attn_core import AttentionConfig
from pascal_attn_core.call import AttentionCall, check_call
from pascal_attn_core.fused.launch.plan import plan_call, variant_of
from pascal_attn_core.fused.trust.kernels import KernelUnavailable
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.runtime import Runtime, runtime_of
from pascal_attn_core.observe.progress import between_blocks, this_thread
from pascal_attn_core.routes import choose, route_named, timing
from pascal_attn_core.routes.timing import Timings, kind_of
from pascal_attn_core.routes.torch_kernel import TorchForm, find_form

OURS = route_named("tiled")  # in place of the fused route, for whose kernel there is no card
BUDGET = 64 << 20


def _call(q=(2, 10, 4096, 64), kv_tokens=None, mask=None, dtype=torch.float32, **options: object) -> AttentionCall:
    query = torch.empty(q, dtype=dtype)
    key = torch.empty((*q[:-2], kv_tokens or q[-2], q[-1]), dtype=dtype)
    return check_call(query, key, key, mask, **options)  # type: ignore[arg-type]


CALLS = {
    "self-attention": lambda: _call(),
    "cross-attention": lambda: _call(kv_tokens=77),
    "one head of a VAE": lambda: _call((1, 1, 4096, 512)),
    "causal": lambda: _call((1, 8, 700, 128), is_causal=True),
    "one query": lambda: _call((1, 8, 1, 128), kv_tokens=5000),
    "bool mask": lambda: _call((1, 8, 300, 72), mask=torch.ones(300, 300, dtype=torch.bool)),
    "padding": lambda: _call((2, 4, 300, 64), mask=torch.zeros(2, 1, 1, 300)),
    "half precision": lambda: _call((1, 8, 300, 64), dtype=torch.float16),
    "grouped heads": lambda: check_call(*(torch.empty(1, n, 600, 64) for n in (8, 2, 2)), enable_gqa=True),
    "odd head_dim": lambda: _call((1, 8, 300, 60)),
}


def _timings(folder: Path, clock: Callable, info: DeviceInfo = CARD) -> Timings:
    """These are the timings of a card as a new process finds it."""
    return Timings(Runtime("cpu", info), clock=clock, folder=lambda: folder, is_on=True)


def _ask(timings: Timings, call: AttentionCall | None = None) -> float | None:
    return timings.fused_over_torch(OURS, _call((1, 2, 300, 64)) if call is None else call, BUDGET)


@pytest.mark.parametrize("name", CALLS)
def test_the_timed_call_is_small_and_needs_the_same_kernels(name: str) -> None:
    call = CALLS[name]()
    kind = kind_of(call)
    sample = timing.sample_call(call, kind)
    assert kind_of(sample) == kind
    assert variant_of(sample, "forward") == variant_of(call, "forward")
    assert plan_call(sample, CARD.num_sms).forward == plan_call(call, CARD.num_sms).forward
    assert sample.num_scores <= 1 << 26
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (sample.query, sample.key)}
    assert sum(memory.values()) <= 32 << 20
    form = find_form(sample, BUDGET)
    assert isinstance(form, TorchForm)


def test_gradients_are_timed_too_where_a_call_has_them(tmp_path: Path) -> None:
    clock = Clock(3.0, 4.0)
    timings = _timings(tmp_path, clock)
    leaf = torch.empty(1, 2, 100, 16, requires_grad=True)
    with torch.no_grad():
        _ask(timings, check_call(leaf, leaf, leaf))
    assert isinstance(clock.results[0], Tensor)
    _ask(timings, check_call(leaf, leaf, leaf))
    ours, theirs = clock.results
    assert len(ours) == len(theirs) == 3
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    assert leaf.grad is None


def test_the_next_process_on_the_same_machine_reads_the_answer(tmp_path: Path) -> None:
    _ask(_timings(tmp_path, Clock(3.0, 4.0)))
    clock = Clock(9.0, 1.0)
    later = _timings(tmp_path, clock)
    assert _ask(later) == 0.75
    assert clock.runs == 0
    words = (
        "kernel forward-64-float32-none, head_dim 64, head_dim_v 64, q_tokens 512, kv_tokens 512, groups 1, rows 1024"
    )
    assert list(later.ratios("torch")) == [f"{words}, against torch"]
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["card"] == CARD.name
    assert _ask(_timings(tmp_path, clock, replace(CARD, name="another card"))) == 9.0
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: "{",
        lambda text: "[]",
        lambda text: '{"milliseconds": 3}',
        lambda text: '{"milliseconds": [{"kind": {}}]}',
        *(
            lambda text, time=time: text.replace('"fused": 9.0', f'"fused": {time}')
            for time in ("NaN", "Infinity", "-1", "0", '"0.1"', "true", "[9.0]", "1" + "0" * 400)
        ),
    ],
)
def test_a_damaged_file_is_written_again(tmp_path: Path, damage: Callable[[str], str]) -> None:
    _ask(_timings(tmp_path, Clock(9.0, 1.0)))
    clock = Clock(3.0, 4.0)
    file = tmp_path / _timings(tmp_path, clock).file_name()
    file.write_text(damage(file.read_text()))
    assert _ask(_timings(tmp_path, clock)) == 0.75
    assert clock.runs == 1
    assert json.loads(file.read_text())["milliseconds"][0]["times"] == {"fused": 3.0, "torch": 4.0}


@pytest.mark.parametrize(
    ("error", "runs"),
    [
        (KernelUnavailable("no kernel"), 1),
        (torch.cuda.OutOfMemoryError("no memory"), 2),  # once more after torch's unused memory was given back
        (RuntimeError("CUDA error: out of memory"), 2),
        (RuntimeError("CUDA error: invalid configuration argument"), 1),
    ],
    ids=repr,
)
def test_where_it_cannot_be_timed_nothing_is_claimed_or_kept(tmp_path: Path, error: Exception, runs: int) -> None:
    clock = Mock(side_effect=error)
    timings = _timings(tmp_path, clock)
    assert [_ask(timings), _ask(timings), clock.call_count] == [None, None, runs]
    timings.save()
    assert json.loads(next(tmp_path.iterdir()).read_text())["milliseconds"] == []


def test_an_interrupt_is_not_swallowed(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        _ask(_timings(tmp_path, Mock(side_effect=KeyboardInterrupt)))


def test_both_compute_the_same_and_are_timed_once_though_threads_ask_together(tmp_path: Path) -> None:
    clock = Clock(3.0, 4.0)
    timings = _timings(tmp_path, clock)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: _ask(timings), range(8))) == [0.75] * 8
    assert clock.runs == 1
    torch.testing.assert_close(*clock.results, atol=1e-5, rtol=1e-4)


def test_the_callers_state_is_left_alone(tmp_path: Path) -> None:
    seen: list[object] = []

    def look(attempts: list[Callable[[], object]], device: torch.device) -> list[float]:
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        seen.append((this_thread.checkpoint, *modes))
        return [1.0, 2.0]

    state, packed = torch.get_rng_state(), Mock()
    hooks = torch.autograd.graph.saved_tensors_hooks(packed, packed)
    with torch.inference_mode(), torch.autocast("cpu"), between_blocks(lambda done, total: None), hooks:
        _ask(_timings(tmp_path, look), check_call(*[torch.empty(1, 2, 300, 64, requires_grad=True)] * 3))
        assert this_thread.checkpoint is not None
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert seen == [(None, False, False, False)]
    assert not packed.called
    assert torch.equal(state, torch.get_rng_state())


def _choice(call: AttentionCall, ratio: float | None, info: DeviceInfo = CARD) -> tuple[str, str, float | None]:
    with emulated_card(lambda launch: None, info, ratio=ratio):
        choice = choose(call, AttentionConfig())
    return choice.route, choice.why, choice.over_torch


@pytest.mark.parametrize(("ratio", "route"), [(0.8, "fused"), (1.2, "torch"), (1.0, "torch"), (None, "fused")])
def test_the_timing_decides_and_is_given_as_the_reason(ratio: float | None, route: str) -> None:
    call = _call((1, 8, 600, 64))
    chosen, why, over_torch = _choice(call, ratio)
    assert chosen == route
    assert ("untimed" if ratio is None else f"{ratio:.2f}") in why
    assert over_torch == (ratio if route == "fused" else None)
    none = _choice(_call((1, 8, 600, 64), window=(64, 0)), ratio)
    assert none == ("fused", "torch's function has no sliding window", None)
    ampere = _choice(call, ratio, replace(CARD, capability=(8, 6)))
    assert ampere == ("torch", "torch has a fused kernel for it", None)
    assert _choice(_call((1, 8, 600, 64), softcap=5.0), ratio)[0] == "fused"


@pytest.mark.parametrize(("ratio", "route"), [(0.8, "fused"), (1.2, "torch"), (None, "fused")])
def test_what_torch_takes_only_rewritten_is_ours_unless_it_was_timed_as_slower(monkeypatch, ratio, route: str) -> None:
    torch_route = route_named("torch")
    form = find_form(_call((1, 8, 600, 64)), BUDGET)
    assert isinstance(form, TorchForm)
    monkeypatch.setattr(torch_route, "plan", lambda request: replace(form, upcast=True))
    assert _choice(_call((1, 8, 600, 64)), ratio)[0] == route


@pytest.mark.parametrize(
    ("head_dim", "options", "expected"),
    [
        (64, {}, "fused"),
        (64, {"is_causal": True}, "torch"),
        (64, {"needs_grad": True}, "fused"),
        (64, {"needs_grad": True, "capability": (7, 0)}, "torch"),
        (128, {"needs_grad": True}, "fused"),
        (40, {"needs_grad": True}, "fused"),
        (160, {}, "torch"),
        (64, {"dtype": torch.float16}, "torch"),
    ],
    ids=str,
)
def test_untimed_what_was_measured_on_an_h200_counts(head_dim: int, options: dict[str, Any], expected: str) -> None:
    made = {"dtype": options.get("dtype"), "requires_grad": options.get("needs_grad", False)}
    tensors = [torch.empty(1, 8, 600, head_dim, **made) for _ in range(3)]
    card = replace(CARD, capability=options.get("capability", CARD.capability))
    assert _choice(check_call(*tensors, is_causal=options.get("is_causal", False)), None, card)[0] == expected


def test_a_call_too_short_to_matter_is_not_timed() -> None:
    with emulated_card(lambda launch: None):
        for tokens in (77, 600):
            assert choose(_call((1, 8, tokens, 64)), AttentionConfig()).route == ("torch" if tokens < 100 else "fused")
        timings = runtime_of(torch.device("cpu")).part(Timings)
    assert isinstance(timings, Timed)
    assert [call.seq_len_q for call in timings.asked] == [600]
