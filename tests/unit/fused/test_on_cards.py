"""The whole package as on a card, its kernels in the emulation (``attn_support.gpu``)."""

import contextlib
import json
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attn_support import fresh
from attn_support.comfy.stub import make_engine, node_module
from attn_support.fused.device import AnyStandIn
from attn_support.gpu import cards, guard, tensors, windows
from attn_support.randomness import is_random, some
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pascal_attn_core import AttentionConfig, explain, measure_memory, sdpa
from pascal_attn_core.call import Arguments
from pascal_attn_core.cli import main
from pascal_attn_core.cli.bench.contest import clock_name
from pascal_attn_core.compat import device_l2_mb
from pascal_attn_core.flex import flex_attention, patch_flex_attention
from pascal_attn_core.fused.trust import trial
from pascal_attn_core.gguf.int8 import GgufWays
from pascal_attn_core.machine.room import available_bytes
from pascal_attn_core.machine.runtime import runtime_of
from pascal_attn_core.sdpa_patch import patch_sdpa
from pascal_attn_core.vae import patch_vae
from pascal_attn_core.vae.store import Queues

pytestmark = pytest.mark.skipif(bool(guard.why_not()), reason=guard.why_not())
NVIDIA = ("NVIDIA GeForce GTX 1080 Ti", "Tesla T4")
FUSED = AttentionConfig(route="fused")
BOTH = AttentionConfig(devices=("cuda:0", "cuda:1"), share_from_tokens=1)
# Beyond the rounding of each dtype, below what a wrong element gives.
CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3}
torchs = torch.nn.functional.scaled_dot_product_attention


def _numbers(tokens: int = 300, dim: int = 64, device: str = "cuda") -> Tensor:
    return torch.randn(1, 2, tokens, dim, device=device)


def _is_close(actual: Tensor, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor, **rules: bool) -> bool:
    wide = [t.detach().cpu().float() for t in (query, key, value)]
    expected = torchs(*wide, *(t.cpu() for t in mask), **rules)
    assert actual.device == query.device
    return bool((actual.detach().cpu().float() - expected).abs().max() <= CLOSE[query.dtype])


def _by_name(query: Tensor, key: Tensor, value: Tensor, *mask: Tensor, **rules: bool) -> bool:
    return _is_close(sdpa(query, key, value, *mask, config=FUSED, **rules), query, key, value, *mask, **rules)


def _gradients(run: Callable[..., Tensor], dim: int = 64) -> bool:
    leaves = [_numbers(200, dim).requires_grad_() for _ in range(3)]
    run(*leaves).sum().backward()
    wide = [t.detach().cpu().requires_grad_() for t in leaves]
    expected = torch.autograd.grad(torchs(*wide).sum(), wide)
    return all(bool((a.grad.cpu() - b).abs().max() <= 4 * CLOSE[torch.float32]) for a, b in zip(leaves, expected))


def _fused(*tensors: Tensor) -> Tensor:
    return sdpa(*tensors, config=FUSED)


@contextlib.contextmanager
def _capturing() -> Iterator[None]:
    cards.is_capturing = True
    try:
        yield
    finally:
        cards.is_capturing = False


Attempts = Iterator[tuple[str, Callable[[], bool]]]  # what is tried, and whether it is right


def _kinds_of_calls(query: Tensor, key: Tensor, value: Tensor) -> Attempts:
    yield "info", lambda: main(["info"]) == 0
    yield "by name", lambda: _by_name(query, key, value)
    yield "float16", lambda: _by_name(*(t.half() for t in (query, key, value)))
    yield "causal", lambda: _by_name(query, key, value, is_causal=True)
    odd = torch.randn(query.numel() + 1, device="cuda")[1:].view_as(query)
    yield "an address that is no multiple of 16", lambda: _is_close(sdpa(odd, key, value), odd, key, value)
    mask = (torch.rand(1, 1, 300, 301, device="cuda") > 0.3)[..., 1:]
    yield "a mask at an odd byte", lambda: _by_name(query, key, value, mask)
    yield "a mask that is expanded", lambda: _by_name(query, key, value, mask[:, :, :1].expand(1, 2, 300, 300))
    one, many = _numbers(1, 128), _numbers(2000, 128)
    yield "one query, its keys in parts", lambda: _by_name(one, many, many)
    yield "gradients", lambda: _gradients(_fused)
    yield "checkpointing", lambda: _gradients(lambda *t: checkpoint(_fused, *t, use_reentrant=False), 40)
    yield "checkpointing, reentrant", lambda: _gradients(lambda *t: checkpoint(sdpa, *t, use_reentrant=True), 80)


def _ways_to_call(query: Tensor, key: Tensor, value: Tensor) -> Attempts:
    def on_a_stream() -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            return _by_name(query, key, value)

    def in_inference_mode() -> bool:
        with torch.inference_mode():
            out = sdpa(query, key, value, config=FUSED).cpu()
        return _is_close(out.to(query.device), query, key, value)

    def while_capturing() -> bool:
        with _capturing():
            return "left off" not in explain(_numbers(600, 32), *2 * [_numbers(600, 32)]) and _by_name(*3 * [first_use])

    def in_threads() -> bool:
        with ThreadPoolExecutor(3) as pool:
            return all(pool.map(lambda _: _by_name(query, key, value), range(3)))

    def patched() -> bool:
        with patch_sdpa(FUSED):
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return _is_close(out, query, key, value)

    first_use = _numbers(200, 96)
    yield "a stream of its own", on_a_stream
    yield "inference mode", in_inference_mode
    yield "first use while a graph is captured", while_capturing
    yield "three threads", in_threads
    yield "patched", patched


def _two_cards() -> Attempts:
    """Calls on the second card while the first is current, and on both."""
    second = [_numbers(device="cuda:1") for _ in range(3)]
    yield "the second card", lambda: _by_name(*second)
    long = [_numbers(2048) for _ in range(3)]
    yield "both cards", lambda: _is_close(sdpa(*long, config=BOTH), *long)


def _believe(name: str, system: str) -> AnyStandIn:
    driver = cards.believe(cards.CARDS[name])
    if system == "Windows":
        windows.follow(Path(os.environ["XDG_CACHE_HOME"]))
    return driver


def _failures(attempts: Attempts) -> list[str]:
    found = []
    for what, is_right in attempts:
        try:
            if not is_right():
                found.append(f"{what}: wrong numbers")
        except Exception:
            found.append(f"{what}: {traceback.format_exc()}")
    return found


@pytest.mark.parametrize(
    ("name", "count"), some([("Tesla T4", "2"), ("AMD Instinct MI50", "1"), ("NVIDIA GeForce GTX 1080 Ti", "2")], 3)
)
@guard.alone()
def test_calls_on_cards_are_right_and_nothing_is_left_behind(name: str, count: str) -> None:
    driver = cards.believe(cards.CARDS[name], int(count))
    given = _numbers(), _numbers(), _numbers()
    failures = _failures(_kinds_of_calls(*given)) + _failures(_ways_to_call(*given))
    if int(count) > 1:
        failures += _failures(_two_cards())
    assert failures == [], "\n".join(failures)
    assert driver.queued
    assert driver.problems == driver.left_behind() == []
    assert torch.cuda.current_device() == 0


CARD = torch.device("cuda")


def _alike(found: Tensor, right: Tensor, apart: float = 1e-4) -> bool:
    return found.device == right.device and bool((found - right).abs().max() <= apart * right.abs().max())


def _captured() -> bool:
    query = _numbers(600)
    with _capturing():
        sdpa(query, query, query)
        return "being captured" in explain(query, query, query, config=BOTH)


def _measured() -> bool:
    with measure_memory() as peak:
        torch.ones(8, device=CARD)
    return peak.peak_bytes == 0 and available_bytes(CARD) == cards.CARDS["Tesla T4"].free_bytes


def _flexible() -> bool:
    query = _numbers(600)
    from torch.nn.attention import flex_attention as theirs

    with patch_flex_attention():
        return _alike(theirs.flex_attention(query, query, query), flex_attention(query, query, query))


def _on_a_node() -> bool:
    query = _numbers(600)
    engine, meter, host = make_engine(), node_module("engine.meter"), node_module("comfy.host")
    host.compute_device, host.prompt_id, host.attention_name = lambda: CARD, lambda: "1", lambda: "torch's"
    host.throw_if_interrupted = lambda: None
    engine.begin()
    meter.start_of_run(CARD)
    out = engine.attend(Arguments(query, query, query), block="block 0")
    run = engine.end()
    is_right = _is_close(out, query, query, query) and meter.peak_of_run(CARD) == 1 << 20 and run is not None
    return is_right and node_module("comfy.host").visible_cards() == ["cuda:0", "cuda:1"]


def _beside_the_hosts_kernel() -> bool:
    kitchen = node_module("comfy.comfy_kitchen")
    registry = SimpleNamespace(is_available=lambda name: True, get_constraints=lambda *names: names)
    kitchen.registry_of_host = lambda: registry
    return "its own kernel for this card" in kitchen.why_not(CARD, "auto")


def _on_another_card() -> bool:
    with pytest.raises(RuntimeError, match="expected Tesla P4 as cuda:0, got Tesla T4"):
        trial.run_job(trial.Job("cuda:0", "Tesla P4", [], []), print)
    return True


def _out_of_memory(channels: int, **options: Any) -> tuple[bool, Any]:
    """The first convolution of so many channels finds no memory."""
    run, left = tensors._run, [1]

    def fails_once(operator: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if operator is torch.ops.aten.convolution.default and args[0].shape[1] == channels and left:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {left.pop()}")
        return run(operator, args, kwargs)

    vae = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Conv2d(8, 3, 3, padding=1))
    vae.requires_grad_(False).to(CARD)
    latent = torch.randn(1, 4, 40, 16, device=CARD)
    right = vae(latent)
    vae.decode = vae.forward
    with patch_vae(vae, budget_mib=0.02, **options) as patch:
        vae.decode(latent)  # after a trial, if in bands
        tensors._run = fails_once
        try:
            return _alike(vae.decode(latent), right), patch.report().calls[-1]
        finally:
            tensors._run = run


def _in_bands() -> bool:
    is_right, call = _out_of_memory(8, keep="device")
    return is_right and call.figures.retries == 1 and call.figures.host_bytes > 0


def _whole_first() -> bool:
    is_right, call = _out_of_memory(4, when="needed")
    return is_right and call.why == "it ran out of memory without bands" and call.figures.retries == 0


def _beside_the_computation() -> bool:
    queues, piece, place = Queues(CARD), _numbers(3), torch.empty(1, 2, 3, 64)
    queues.store(piece, place, 0)
    queues.settle()
    return _alike(queues.arrived(queues.send(place, 0)), piece)


def _others() -> Attempts:
    yield "a call while a graph is captured", _captured
    yield "copies", _beside_the_computation
    yield "facts", lambda: device_l2_mb() == device_l2_mb(1) == 4.0 and clock_name(CARD) == "CUDA events"
    yield "GGUF", lambda: runtime_of(CARD).part(GgufWays).conditions()["arch"] == "sm_75"
    yield "memory", _measured
    yield "flex_attention", _flexible
    yield "a node", _on_a_node
    yield "int8 files", _beside_the_hosts_kernel
    yield "a VAE in bands", _in_bands
    yield "a VAE that did not fit", _whole_first
    yield "a child", _on_another_card


@guard.alone()
def test_whatever_else_asks_for_cards_is_right_on_one() -> None:
    driver = cards.believe(cards.CARDS["Tesla T4"], 2)
    assert (failures := _failures(_others())) == [], "\n".join(failures)
    assert driver.problems == []


_CHILD = """
import sys, types
support = sys.modules["attn_support"] = types.ModuleType("attn_support")
support.__path__ = [{support!r}]
sys.path.append({root!r})
from attn_support.gpu import cards, windows
cards.believe(cards.CARDS[{name!r}])
if {system!r} == "Windows":
    windows.follow(__import__("pathlib").Path({folder!r}))
main()
assert windows.problems == []
assert windows.modes == [0x8007] * ({system!r} == "Windows")
open({folder!r} + "/ended", "w").close()
"""
FIRST_USES = some([(NVIDIA[0], "Windows"), (NVIDIA[0], "Linux"), ("AMD Instinct MI50", "Linux")], 3)


@pytest.mark.parametrize(("name", "system"), FIRST_USES)
@guard.alone(PASCAL_ATTN_TRUST="")
def test_the_first_use_starts_a_child_on_the_card_and_stores_its_verdict(name: str, system: str) -> None:
    from attn_support import __path__ as support

    _believe(name, system)
    folder = os.environ["XDG_CACHE_HOME"]
    os.environ["LD_PRELOAD"] = str(guard.library())  # of the child
    code = _CHILD.format(support=support[0], root=str(fresh.ROOT), name=name, system=system, folder=folder)
    trial._CODE = trial._CODE.replace("main()\n", code)
    trial._EXTRA_SECONDS = 0.0  # what no call asks for is not tried
    query = _numbers(600)
    assert _is_close(sdpa(query, query, query), query, query, query)
    assert "left off" not in explain(query, query, query)
    (stored,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("trial-*.json")
    content = json.loads(stored.read_text())
    assert (content["card"], content["off"]) == (name, {})
    assert any("-64-float32-none" in each for each in content["good"])
    assert Path(folder, "ended").exists()  # the child
    assert windows.problems == []


_FAULT = """
import json, os, signal, sys
job = json.loads(sys.argv[1])
with open(sys.argv[2], "a") as file:
    print(json.dumps({"variant": "-".join(map(str, job["needed"][0][:4])), "begun": True}), file=file)
os.kill(os.getpid(), signal.SIGSEGV)
"""


@guard.alone(PASCAL_ATTN_TRUST="")
def test_a_fault_in_8_bits_ends_a_child_and_the_layer_stays_exact() -> None:
    from pascal_attn_core.int8.attention import AttentionBinding, AttentionSite

    cards.believe(cards.CARDS[NVIDIA[0]])
    trial._CODE = _FAULT.replace("{", "{{").replace("}", "}}")
    site, query = AttentionSite("layer", "Attention", AttentionBinding(max_error=0.02).options), _numbers()
    assert site.attend(Arguments(query, query, query)) is None
    assert site.line().state == "refused"
    assert site.why.startswith("the 8-bit kernel is left off: its check in a process of its own failed"), site.why
    assert "SIGSEGV" in site.why
    (verdict,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("trial-*.json")
    assert list(json.loads(verdict.read_text())["off"]) == ["8-bit attention"], "nothing about exact attention"


@pytest.mark.parametrize("where", some(["check", "timing", "event"], 3))
@guard.alone(PASCAL_ATTN_NO_TIMING="")
def test_a_trial_that_fails_does_not_end_the_users_call(where: str) -> None:
    from pascal_attn_core.fused.trust import verify
    from pascal_attn_core.routes import timing

    cards.believe(cards.CARDS["NVIDIA GeForce GTX 1080 Ti"])
    places = {"check": (verify, "_reference"), "timing": (timing, "run_form"), "event": (cards.Event, "record")}
    words = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED" if where == "timing" else "CUDA error: busy"
    setattr(*places[where], Mock(side_effect=RuntimeError(words)))
    query = _numbers(600)
    assert _is_close(sdpa(query, query, query), query, query, query)


# By day one card on one of the two systems, each sixth case and each eighteenth kernel.
BY_SYSTEM = some([(name, s) for i, name in enumerate(cards.CARDS) for s in ("Linux", "Windows")[:: 1 - i % 2 * 2]], 20)


@pytest.mark.slow
@pytest.mark.parametrize("every", ["1" if is_random() else "6"])
@pytest.mark.parametrize(("name", "system"), BY_SYSTEM)
@guard.alone()
def test_the_selftest_finds_every_kernel_and_route_right(name: str, system: str, every: str) -> None:
    from pascal_attn_core.cli.selftest import selftest
    from pascal_attn_core.selftest import cases, kernels

    variants = kernels.checked_variants
    kernels.checked_variants = lambda arch: variants(arch)[:: int(every) ** 2 // 2 or 1]
    cases.CASES = cases.CASES[int(every) // 2 :: int(every)]  # gradients among them
    driver = _believe(name, system)
    found = selftest(torch.device("cuda"), 250.0, speed=False)
    problems = [problem for problem in found.problems if "torch.compile" not in problem]  # which such tensors lack
    assert problems == [], problems
    assert found.cut == []
    assert len(found.kernels) > 60 // int(every) ** 2
    assert {check.route for check in found.checks if not check.refused} >= {"fused", "torch", "tiled", "math"}
    assert windows.problems == driver.problems == driver.left_behind() == []
