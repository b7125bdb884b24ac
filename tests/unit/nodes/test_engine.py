"""The ComfyUI pack's engine and its record of runs, without ComfyUI."""

import functools
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from attn_support.comfy.stub import core_module, make_engine, node_module
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.reference.checks import gap

engine_module, runs = node_module("engine.engine"), node_module("engine.runs")
meter_module, Arguments = node_module("engine.meter"), core_module("call").Arguments
compare_module, in_run = node_module("engine.compare"), node_module("patches.replacements").in_run
pytestmark = pytest.mark.usefixtures("stub_host")


def qkv(length: int = 64, *, dtype: torch.dtype = torch.float32, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(1, heads, length, 8, dtype=dtype) for _ in range(3))  # type: ignore[return-value]


def close(out: Tensor, given: tuple[Tensor, ...], **options: Any) -> None:
    oracle = reference_sdpa(*(t.double() for t in given), **options)[0]
    torch.testing.assert_close(out.double(), oracle, rtol=1e-2 if out.dtype == torch.float16 else 1e-5, atol=1e-3)


def test_a_call_with_too_few_keys_is_left_to_the_host() -> None:
    given, engine = qkv(), make_engine(min_keys=65)
    assert engine.attend(Arguments(*given)) is None
    assert engine.run.reasons("passed to ComfyUI") == {"fewer than 65 keys": 1}
    close(make_engine(min_keys=64).attend(Arguments(*given)), given)
    many_heads = [torch.randn(64, 64, 32, 8) for _ in range(3)]  # 16 MiB of scores
    assert make_engine(min_keys=1024, budget_mib=17).attend(Arguments(*many_heads)) is None
    assert make_engine(min_keys=1024, budget_mib=15).attend(Arguments(*many_heads)) is not None


def test_shapes_that_do_not_fit_are_passed_with_the_reason() -> None:
    query, key, value = qkv()
    engine = make_engine()
    assert engine.attend(Arguments(query, key[..., :4], value), block="double 3") is None
    (kind,) = engine.run.tallies
    assert (kind.block, kind.outcome) == ("double 3", "passed to ComfyUI")
    assert "4" in kind.why


def test_a_route_that_cannot_take_a_call_gives_way_and_is_named_once() -> None:
    engine, given = make_engine(route="fused"), qkv()
    for _ in range(3):
        close(engine.attend(Arguments(*given), block="double 3"), given)
    (warning,) = engine.run.warnings
    assert "route fused cannot take every call (double 3: " in warning
    assert warning.endswith("these use auto")
    assert engine.run.count("taken") == 3


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
def test_an_output_that_overflows_is_computed_again_and_the_block_named(monkeypatch, dtype: torch.dtype) -> None:
    spoil_first_output(monkeypatch)
    engine, given = make_engine(), qkv(dtype=dtype)
    close(engine.attend(Arguments(*given), block="double 3"), given)
    assert sum(tally.repaired for tally in engine.run.tallies.values()) == 1
    (warning,) = engine.run.warnings
    assert warning.startswith("double 3: ")
    assert "recomputed in float32" in warning


OPTIONS = {"diffusion model": "--force-fp32", "VAE": "--fp32-vae", "text encoder": "--fp32-text-enc"}


@pytest.mark.parametrize("part", OPTIONS)
def test_inputs_that_hold_nan_are_named_once_with_the_option_that_helps(part: str) -> None:
    engine, (query, key, value) = make_engine(), qkv()
    engine.part = part
    key[0, 0, 0, 0] = float("nan")
    for block in ("double 3", "double 4"):
        assert engine.attend(Arguments(query, key, value), block=block).isnan().any()
    (warning,) = engine.run.warnings
    assert warning.startswith("double 3: key already held NaN")
    assert OPTIONS[part] in warning
    assert sum(tally.repaired for tally in engine.run.tallies.values()) == 0


class Cancelled(BaseException):
    """ComfyUI's exception since 0.33 is like this."""


@pytest.mark.parametrize("kind", [Cancelled, RuntimeError], ids=["BaseException", "Exception"])
def test_an_interrupt_between_blocks_ends_the_call_and_the_next_is_clean(stub_host, kind: type[BaseException]) -> None:
    engine = make_engine(route="tiled", q_block=16, kv_block=16)
    given = qkv()
    stub_host.interrupt, stub_host.at_look = kind("cancel"), 3
    with pytest.raises(kind, match="cancel"), in_run(engine):
        engine.attend(Arguments(*given))
    assert stub_host.looks == 3
    (run,) = runs.remembered()
    assert run.finished
    assert run.notes == [f"ended early by {kind.__name__}: the figures cover the time until then"]
    stub_host.interrupt = None
    engine.begin()
    close(engine.attend(Arguments(*given)), given)
    assert engine.end().count("taken") == 1
    assert stub_host.looks > 5


def test_each_prompt_begins_with_the_full_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    tiled_route = sys.modules[engine_module.forget_halvings.__module__]
    caps = tiled_route.runtime_of(torch.device("cpu")).part(tiled_route.MemoryCaps)
    prompt = "one"
    monkeypatch.setattr(node_module("comfy.host"), "prompt_id", lambda: prompt)
    for engine in (make_engine(), make_engine()):
        engine.begin()
        if not caps:
            caps["a shape",] = 1 << 20, time.monotonic() + 60
        engine.end()
        assert caps  # it is the same prompt still
    prompt = "two"
    engine.begin()
    assert not caps
    engine.end()


def test_a_run_counts_sums_and_says_its_line() -> None:
    engine = make_engine(min_keys=32, route="tiled")
    engine.begin()
    for tokens in (64, 64, 16):
        attend(engine, tokens)
    run = engine.end()
    assert run.line() == "Model: 3 calls, 2 taken (tiled 2), 1 passed to ComfyUI"
    assert run.math_bytes == 2 * 64 * 64 * 4
    assert run.extra_bytes is not None
    assert 0 < run.elapsed_ms / 1e3 <= run.elapsed_s
    assert (run.sample.query.shape, run.settings) == ((64, 8), "route tiled, budget 4 MiB, from 32 keys")


def test_threads_share_an_engine_without_losing_a_call() -> None:
    engine, given, failures = make_engine(), [qkv(length) for length in range(20, 60)], []

    def work() -> None:
        try:
            engine.begin()
            for tensors in given:
                close(engine.attend(Arguments(*tensors)), tensors)
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


def attend(engine: Any, tokens: int = 64, **options: Any) -> None:
    engine.attend(Arguments(*qkv(tokens), **options), block="double 0")


def test_a_run_is_over_when_its_outermost_sampling_is() -> None:
    engine = make_engine()
    engine.begin()
    engine.begin()
    attend(engine)
    assert engine.end() is None
    assert engine.is_running
    finished = engine.end()
    assert finished.finished
    assert finished.count() == 1
    assert not engine.is_running
    assert runs.remembered() == [finished]


def test_calls_outside_of_a_sampling_are_a_run_that_the_next_one_ends() -> None:
    engine = make_engine()
    attend(engine)
    stray = runs.remembered()[0]
    assert not stray.finished
    engine.begin()
    assert stray.finished
    assert engine.end() is not stray
    assert len(runs.remembered()) == 2


def test_the_sample_is_of_the_largest_call_that_can_be_sampled() -> None:
    engine = make_engine()
    engine.begin()
    attend(engine, 32)
    attend(engine, 64)
    attend(engine, 128, is_causal=True)
    attend(engine, 48)
    assert engine.end().sample.kind.query == (1, 2, 64, 8)


def test_gradient_checkpointing_finds_the_same_saved_tensors_in_both_passes() -> None:
    """The first call of a kind is compared with the host's function and sampled, its recomputation is not."""
    engine = make_engine()
    weight = torch.randn(8, 8, requires_grad=True)
    given = qkv()

    def block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (tensor @ weight for tensor in (query, key, value))

        def compare(out: Tensor) -> Any:
            wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value)
            return compare_module.Difference("torch", gap(out.square(), wanted.square()), out.dtype)

        out = engine.attend(Arguments(query, key, value), compare=compare)
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


def test_why_the_kernels_are_left_off_stands_on_the_node_in_the_log_once_and_in_the_report(monkeypatch, caplog) -> None:
    machine, kernels, trial = map(core_module, ("machine.runtime", "fused.trust.kernels", "fused.trust.trial"))
    info = core_module("machine.device").DeviceInfo("cuda", "GTX 1080 Ti", capability=(6, 1), num_sms=28)
    asked: list[int] = []
    monkeypatch.setattr(node_module("comfy.host"), "make_room", asked.append)
    monkeypatch.setattr(trial, "free_bytes", lambda device: 100 << 20)
    ready = type("Ready", (kernels.Kernels,), {"machine_reasons": (), "reasons": lambda self, variants: []})
    parts = {kernels.Kernels: ready, trial.Trials: functools.partial(trial.Trials, folder=lambda: None)}
    engine = make_engine(min_keys=0)
    with machine.using(machine.Runtime("cpu", info, parts=parts)):
        status = engine_module.left_off(engine.settings.config)
        assert engine_module.left_off(engine.settings.config) == status
        assert engine_module.left_off(replace(engine.settings.config, route="tiled")) == ""
        engine.begin()
        query = torch.zeros(1, 2, 2048, 64)
        engine.attend(Arguments(query, query, query), block="block 0")
        run = engine.end()
    why = "the fused kernel is left off: the kernels are not tried while less than 512 MiB are free, got 100"
    assert status == why
    assert asked == [512 << 20]
    assert why in "".join(run.reasons("taken"))
    assert [record.levelname for record in caplog.records if "not tried while" in record.getMessage()] == ["WARNING"]
