"""This prints what a call costs the host: our own microseconds in the second call of each kind.

python tools/call_cost.py [--on cpu|fake|card] [--rounds N]        one thread, CPU time, fastest rounds

On a CPU torch's function is replaced by one that returns a tensor that is there: what is left is ours. On fake cards, a
GTX 1080 Ti and a T4 on which nothing is executed, the time within the stand-in for the driver is taken off, and what
autograd takes for a function that computes nothing. On a card the time of torch's own function is taken off, where
there is one for the call.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from pascal_attn_core import AttentionConfig, sdpa
from pascal_attn_core.diffusers.redirect import FUNCTIONAL, SdpaRedirect, this_thread
from pascal_attn_core.patching import interception
from pascal_attn_core.sdpa_patch import patch_sdpa

_support = types.ModuleType("attn_support")
_support.__path__ = [str(Path(__file__).parents[1] / "tests" / "support")]
sys.modules.setdefault("attn_support", _support)

CALLS_A_ROUND = 100
_LONG = AttentionConfig(math_limit_mib=0)
Run = Callable[[], Any]


class Case(NamedTuple):
    """One kind of call.

    Attributes:
        run: one call of ours; beside: what is no cost of ours, to be taken off; None = nothing.
        within: makes what both run in.
    """

    name: str
    run: Run
    beside: Run | None = None
    within: Callable[[], Any] = nullcontext


def microseconds(function: Run, calls: int = CALLS_A_ROUND) -> float:
    """CPU time of one call of this thread."""
    start = time.thread_time_ns()
    for _ in range(calls):
        function()
    return (time.thread_time_ns() - start) / calls / 1e3


def cost(case: Case, rounds: int, spent: Callable[[], float] = lambda: 0.0, wait: Run = lambda: None) -> float:
    """Microseconds of the fastest round of a case, less those beside it. ``spent``: microseconds so far that are no
    cost of ours; ``wait`` is called between rounds."""
    ours, others = [], [0.0] if case.beside is None else []
    for _ in range(3):
        case.run()
    for _ in range(rounds):
        wait()
        before = spent()
        with case.within():
            ours.append(microseconds(case.run) - (spent() - before) / CALLS_A_ROUND)
        wait()
        if case.beside is not None:
            with case.within():
                others.append(microseconds(case.beside))
    return min(ours) - min(others)


def _tensors(
    dtype: torch.dtype, device: str, sizes: tuple[int, int, int, int, int], *, grad: bool = False
) -> list[Any]:
    heads, kv_heads, tokens, keys, head_dim = sizes
    shapes = [(1, heads, tokens, head_dim), *[(1, kv_heads, keys, head_dim)] * 2]
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=grad) for shape in shapes]


def _growing(tensors: list[Tensor], function: Callable[..., Any], options: dict[str, Any]) -> Run:
    """Calls with one key more each, from half of the keys on."""
    query, key, value = tensors
    keys = key.shape[-2] // 2

    def run() -> Tensor:
        nonlocal keys
        keys = keys + 1 if keys < key.shape[-2] else key.shape[-2] // 2
        return function(query, key[..., :keys, :], value[..., :keys, :], **options)

    return run


# ---- torch's function on a CPU ---------------------------------------------------------------------------------------


@contextmanager
def _torch_is_there(out: Tensor) -> Iterator[None]:
    """Torch's function returns this tensor, under its name and in every module of ours."""

    def stub(*args: Any, **options: Any) -> Tensor:
        return out

    modules = [m for name, m in sys.modules.items() if "pascal_att" in name and hasattr(m, "TORCH_SDPA")]
    own = F.scaled_dot_product_attention is interception.TORCH_SDPA
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "TORCH_SDPA", stub))
        if own:
            stack.enter_context(mock.patch.object(F, interception.SDPA_NAME, stub))
        yield


def _by_processor(*args: Any, **kwargs: Any) -> Tensor:
    this_thread.redirect = _REDIRECT
    return FUNCTIONAL.scaled_dot_product_attention(*args, **kwargs)


_REDIRECT = SdpaRedirect()


def on_cpu() -> list[Case]:
    short, long, grouped, tile = (4, 4, 64, 64, 8), (4, 4, 1100, 1100, 8), (4, 2, 1100, 1100, 8), (1, 1, 70, 70, 8)
    cases = []
    mask = torch.ones(1, 1, 1, 1100, dtype=torch.bool)
    gaps = [t.mT.contiguous().mT for t in _tensors(torch.float32, "cpu", long)]
    kinds: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "short": (_tensors(torch.float32, "cpu", short), {}),
        "long": (_tensors(torch.float32, "cpu", long), {}),
        "long, causal": (_tensors(torch.float32, "cpu", long), {"is_causal": True}),
        "long, GQA": (_tensors(torch.float32, "cpu", grouped), {"enable_gqa": True}),
        "long, gradients": (_tensors(torch.float32, "cpu", long, grad=True), {}),
    }
    for name, (inputs, options) in kinds.items():
        out = inputs[0].detach()
        within = lambda out=out: _torch_is_there(out)  # noqa: E731
        stub: Run = lambda inputs=inputs, options=options: _nothing(*inputs, **options)  # noqa: E731
        by_name: Run = lambda i=inputs, o=options: F.scaled_dot_product_attention(*i, **o)  # noqa: E731
        cases += [
            Case(f"{name}: sdpa", lambda i=inputs, o=options: sdpa(*i, **o), stub, within),
            Case(f"{name}: the switch", by_name, stub, lambda out=out: _switched(out)),
            Case(f"{name}: a processor", lambda i=inputs, o=options: _by_processor(*i, **o), stub, within),
        ]
    inputs = kinds["long"][0]
    inputs = kinds["long"][0]
    out = inputs[0].detach()
    within = lambda: _torch_is_there(out)  # noqa: E731
    cases += [
        Case("padding mask", lambda: sdpa(*inputs, mask), lambda: _nothing(*inputs), within),
        Case("rows with gaps, their copies included", lambda: sdpa(*gaps), lambda: _nothing(*gaps), within),
    ]
    of_tile = _tensors(torch.float32, "cpu", tile)
    cases.append(Case("one tile, whole call", lambda: sdpa(*of_tile, config=AttentionConfig(route="tiled"))))
    return cases


def _nothing(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return query


@contextmanager
def _switched(out: Tensor) -> Iterator[None]:
    patch = patch_sdpa()
    try:
        with _torch_is_there(out):
            yield
    finally:
        patch.remove()


def in_comfyui() -> list[Case]:
    """The override of a patched model, with ComfyUI's answers from the tests: calls that it leaves to the host, and
    calls that it takes."""
    from attn_support.comfy.stub import host_attention, make_engine, node_module

    host, override = node_module("comfy.host"), node_module("patches.override")
    host.throw_if_interrupted = lambda: None
    host.compute_device, host.prompt_id = lambda: torch.device("cpu"), lambda: "prompt"
    host.attention_name, host.send_status = lambda: "attention_pytorch", lambda text, unique_id: None
    given = [torch.randn(1, 70, 32) for _ in range(3)]
    options = {"transformer_options": {"block": ("middle", 0)}}

    def beside() -> Tensor:
        return host_attention(*given, 4, **options)

    cases = []
    for name, min_keys in (("passed on", 1 << 20), ("taken", 0)):
        ours = override.make_override(make_engine(min_keys=min_keys), override.Scope(), None)
        run: Run = functools.partial(ours, host_attention, *given, 4, **options)
        cases.append(Case(f"ComfyUI, {name}", run, beside))
    return cases


# ---- kernels on fake cards -------------------------------------------------------------------------------------------


class Empty(torch.autograd.Function):
    """Computes nothing: what autograd itself costs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return *ctx.saved_tensors, None


def _with_gradients(forward: Callable[..., Tensor], leaves: list[Tensor]) -> Run:
    seed = torch.ones_like(leaves[0])
    return lambda: torch.autograd.grad(forward(*leaves), leaves, seed)


def with_kernels(route: str, dtype: torch.dtype, device: str) -> list[Case]:
    """Cases for a route of ours on the device of these tensors."""
    config = AttentionConfig(route=route)
    plain, grouped = (8, 8, 256, 256, 64), (8, 2, 256, 256, 64)
    inputs, of_group = _tensors(dtype, device, plain), _tensors(dtype, device, grouped)
    mask = torch.ones(1, 1, 1, 256, dtype=torch.bool, device=device)
    leaves = _tensors(dtype, device, plain, grad=True)
    out = torch.empty_like(inputs[0])
    ones: Run = _with_gradients(lambda *t: Empty.apply(*t, out), leaves)
    few = _tensors(dtype, device, (8, 2, 1, 4096, 64))
    grouped_options = {"enable_gqa": True, "config": config}
    return [
        Case(f"{route}", lambda: sdpa(*inputs, config=config)),
        Case(f"{route}, padding mask", lambda: sdpa(*inputs, mask, config=config)),
        Case(f"{route}, GQA", lambda: sdpa(*of_group, enable_gqa=True, config=config)),
        Case(f"{route}, decoding, a key more each", _growing(few, sdpa, grouped_options), _growing(few, _nothing, {})),
        Case(f"{route}, forward and backward", _with_gradients(lambda *t: sdpa(*t, config=config), leaves), ones),
    ]


def on_fake_cards(rounds: int) -> dict[str, float]:
    """Microseconds by the name of the case."""
    from attn_support.fused.device import UncheckedKernels, emulated_card
    from attn_support.fused.emulation import CARD, T4

    found = {}
    for route, dtype, info in (("fused", torch.float32, CARD), ("fused-tensor", torch.float16, T4)):
        with emulated_card(lambda launch: None, info, UncheckedKernels) as kernels:
            driver, spent, call = kernels.driver, 0, kernels.driver.call

            def timed(*given: Any) -> None:
                nonlocal spent
                start = time.thread_time_ns()
                try:
                    call(*given)  # noqa: B023
                finally:
                    spent += time.thread_time_ns() - start

            driver.make_current(0)
            driver.call = timed
            for case in with_kernels(route, dtype, "cpu"):
                name = f"{info.name}: {case.name}"
                found[name] = cost(case, rounds, lambda: spent / 1e3, driver.queued.clear)  # noqa: B023
            driver.call = call
    return found


# ---- on a card -------------------------------------------------------------------------------------------------------


def on_card(device: str, rounds: int) -> dict[str, float]:
    """Microseconds of the host by the name of the case, beyond those of torch's own function."""
    wait = lambda: torch.cuda.synchronize(device)  # noqa: E731
    cases = []
    for name, tokens in (("short", 64), ("long", 1100)):
        inputs = _tensors(torch.float16, device, (8, 8, tokens, tokens, 64))
        torchs: Run = lambda i=inputs: interception.TORCH_SDPA(*i)  # noqa: E731
        by_name: Run = lambda i=inputs: F.scaled_dot_product_attention(*i)  # noqa: E731
        cases += [
            Case(f"{name}: sdpa", lambda i=inputs: sdpa(*i), torchs),
            Case(f"{name}: the switch", by_name, torchs, lambda: _removed(patch_sdpa())),
            Case(f"{name}: a processor", lambda i=inputs: _by_processor(*i), torchs),
        ]
    cases += with_kernels("fused", torch.float32, device)
    if torch.cuda.get_device_capability(device) >= (7, 0):
        cases += with_kernels("fused-tensor", torch.float16, device)
    return {case.name: cost(case, rounds, wait=wait) for case in cases}


@contextmanager
def _removed(patch: Any) -> Iterator[None]:
    try:
        yield
    finally:
        patch.remove()


def measured(where: str, rounds: int, device: str = "cuda") -> dict[str, float]:
    """Our microseconds of the host in one call, by the kind of call. ``where``: "cpu", "fake" or "card"."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if where == "card":
            return on_card(device, rounds)
        if where == "fake":
            return on_fake_cards(rounds)
        return {case.name: cost(case, rounds) for case in [*on_cpu(), *in_comfyui()]}
    finally:
        torch.set_num_threads(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("cpu", "fake", "card"), nargs="*", default=["cpu", "fake"])
    parser.add_argument("--rounds", type=int, default=15, help="rounds of 100 calls each (default 15)")
    options = parser.parse_args()
    for where in options.on:
        for name, found in measured(where, options.rounds).items():
            print(f"{name:60s} {found:7.1f} us", flush=True)


if __name__ == "__main__":
    main()
