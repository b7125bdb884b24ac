"""This prints what a call costs the host: our own microseconds in the second call of each kind.

python tools/call_cost.py [--on cpu fake card] [--rounds N]   one thread, CPU time, fastest rounds

On a CPU torch's function is replaced by one that returns a tensor that is there: what is left is ours. On fake cards, a
GTX 1080 Ti and a T4 on which nothing is executed, the functions of the driver do nothing, and what autograd takes for a
function that computes nothing is taken off. On a card that is here the driver's own time is in it.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pascal_attn_core import AttentionConfig, UnsupportedAttention, explain, patch_ffn, sdpa
from pascal_attn_core.diffusers.redirect import FUNCTIONAL, SdpaRedirect, this_thread
from pascal_attn_core.patching import interception
from pascal_attn_core.sdpa_patch import patch_sdpa

CALLS_A_ROUND = 10  # short enough that some round is not disturbed
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


def microseconds(function: Run) -> float:
    """CPU time of one call of this thread."""
    start = time.thread_time_ns()
    for _ in range(CALLS_A_ROUND):
        function()
    return (time.thread_time_ns() - start) / CALLS_A_ROUND / 1e3


def cost(case: Case, rounds: int) -> float:
    """Microseconds of the fastest round of a case, less those beside it."""
    ours, others = [], []
    for _ in range(3):
        case.run()
    for _ in range(rounds):
        with case.within():
            ours.append(microseconds(case.run))
            others.append(microseconds(case.beside) if case.beside else 0.0)
    return min(ours) - min(others)


def _tensors(dtype: torch.dtype, heads: int, kv_heads: int, tokens: int, head_dim: int, **options: Any) -> list[Any]:
    shapes = [(1, of, tokens, head_dim) for of in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=dtype, **options) for shape in shapes]


def _decoding(tensors: list[Tensor], function: Callable[..., Any], **options: Any) -> Run:
    """Calls of one query with one key more each, from half of the keys on."""
    query, key, value = tensors
    counts = itertools.cycle(range(key.shape[-2] // 2, key.shape[-2]))

    def run() -> Tensor:
        keys = next(counts)
        return function(query[..., :1, :], key[..., :keys, :], value[..., :keys, :], **options)

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


def on_cpu() -> Iterator[Case]:
    """Calls by ``sdpa``, under the switch and from a processor."""
    floats = functools.partial(_tensors, torch.float32)
    long = floats(4, 4, 1100, 8)
    kinds: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "short": (floats(4, 4, 64, 8), {}),
        "long": (long, {}),
        "long, causal": (long, {"is_causal": True}),
        "long, GQA": (floats(4, 2, 1100, 8), {"enable_gqa": True}),
        "long, gradients": (floats(4, 4, 1100, 8, requires_grad=True), {}),
        "padding mask": (long, {"attn_mask": torch.ones(1, 1, 1, 1100, dtype=torch.bool)}),
        "rows with gaps, their copies included": ([t.mT.contiguous().mT for t in long], {}),
    }
    for name, (inputs, options) in kinds.items():
        call = functools.partial(_given, inputs, options)
        out, beside = inputs[0].detach(), call(_nothing)
        within = functools.partial(_torch_is_there, out)
        yield Case(f"{name}: sdpa", call(sdpa), beside, within)
        yield Case(f"{name}: the switch", call(_by_name), beside, functools.partial(_switched, out))
        yield Case(f"{name}: a processor", call(_by_processor), beside, within)


def _given(inputs: list[Any], options: dict[str, Any], function: Callable[..., Any]) -> Run:
    return lambda: function(*inputs, **options)


def _by_name(*args: Any, **kwargs: Any) -> Tensor:
    return F.scaled_dot_product_attention(*args, **kwargs)


def _nothing(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return query


@contextmanager
def _switched(out: Tensor) -> Iterator[None]:
    patch = patch_sdpa()  # as a context manager it costs more
    try:
        with _torch_is_there(out):
            yield
    finally:
        patch.remove()


def in_slices() -> Iterator[Case]:
    """A feed-forward module in four slices, beyond one call of its own on each, and one more."""
    module, x = (
        nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)).requires_grad_(False),
        torch.randn(1, 64, 32),
    )
    beside, part = copy.deepcopy(module), x[:, :16]
    patch_ffn(module, num_chunks=4, min_tokens=2, include="")
    yield Case("feed-forward in 4 slices", functools.partial(module, x), lambda: [beside(part) for _ in range(5)])


def in_comfyui() -> Iterator[Case]:
    """The override of a patched model, with ComfyUI's answers from the tests: calls that it leaves to the host, and
    calls that it takes."""
    from attn_support.comfy.stub import host_attention, make_engine, node_module

    host, override = node_module("comfy.host"), node_module("patches.override")
    host.throw_if_interrupted, host.compute_device = lambda: None, lambda: torch.device("cpu")
    host.prompt_id, host.attention_name, host.send_status = lambda: "", lambda: "attention_pytorch", lambda *given: None
    given, options = [torch.randn(1, 70, 32) for _ in range(3)], {"transformer_options": {"block": ("middle", 0)}}
    for name, min_keys in (("passed on", 1 << 20), ("taken", 0)):
        engine = make_engine(min_keys=min_keys)
        ours = override.make_override(engine, functools.partial(override.by_engine, engine, override.Scope()), None)
        run: Run = functools.partial(ours, host_attention, *given, 4, **options)
        yield Case(f"ComfyUI, {name}", run, functools.partial(host_attention, *given, 4, **options))


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


def with_kernels(route: str, dtype: torch.dtype, device: str = "cpu") -> list[Case]:
    """Cases for a route of ours."""
    config, tensors = AttentionConfig(route=route), functools.partial(_tensors, dtype, device=device)
    inputs, of_group = tensors(8, 8, 256, 64), tensors(8, 2, 256, 64)
    mask, out = torch.ones(1, 1, 1, 256, dtype=torch.bool, device=device), torch.empty_like(inputs[0])
    leaves, few = tensors(8, 8, 256, 64, requires_grad=True), tensors(8, 2, 4096, 64)
    decoding = _decoding(few, sdpa, enable_gqa=True, config=config)
    empty = _with_gradients(lambda *t: Empty.apply(*t, out), leaves)
    return [
        Case(route, lambda: sdpa(*inputs, config=config)),
        Case(f"{route}, padding mask", lambda: sdpa(*inputs, mask, config=config)),
        Case(f"{route}, GQA", lambda: sdpa(*of_group, enable_gqa=True, config=config)),
        Case(f"{route}, decoding, a key more each", decoding, _decoding(few, _nothing)),
        Case(f"{route}, forward and backward", _with_gradients(lambda *t: sdpa(*t, config=config), leaves), empty),
    ]


def on_fake_cards() -> Iterator[Case]:
    """Calls of our kernels, to be run before the next one is asked for."""
    from attn_support.fused.device import UncheckedKernels, emulated_card
    from attn_support.fused.emulation import CARD, T4

    for route, dtype, info in (("fused", torch.float32, CARD), ("fused-tensor", torch.float16, T4)):
        with emulated_card(lambda launch: None, info, UncheckedKernels) as kernels:
            driver = kernels.driver
            context = driver._context(0).value

            def answer(function: str, *given: Any) -> None:
                if function == "cuCtxGetCurrent":
                    given[0]._obj.value = context  # noqa: B023

            driver.call = answer
            for case in with_kernels(route, dtype):
                yield case._replace(name=f"{info.name}: {case.name}")


def on_card(device: str) -> Iterator[Case]:
    """Calls on a card that is here; each round begins when it has nothing to do."""
    for route, dtype in (("torch", torch.float16), ("fused", torch.float32), ("fused-tensor", torch.float16)):
        for case in with_kernels(route, dtype, device):
            yield case._replace(within=lambda: nullcontext(torch.cuda.synchronize(device)))


# ---- choices ---------------------------------------------------------------------------------------------------------

# Time of ours over torch's on an H200, by shape: in float32 over the kernel that torch runs there, and over the one for
# older cards; in float16 on tensor cores over the one for a T4. Then the same with gradients. None = not measured.
MEASURED: dict[str, tuple[float | None, ...]] = {
    "sd15": (0.80, 0.79, 0.93, 1.06, 0.82, 0.68), "sdxl": (1.17, 0.94, 0.79, 2.20, 1.50, 0.72),
    "flux": (1.25, 0.90, 0.78, 1.62, 0.89, 0.61), "causal": (1.56, 1.33, 1.40, 2.29, 1.62, 1.24),
    "wan": (1.23, 0.87, 0.75), "decode": (0.23,), "gqa": (0.54,), "cross512": (1.00,), "vae": (1.57,),
    "mask_bool": (0.88,), "mask_padding": (0.61,),
}  # fmt: skip
NEWER = "NVIDIA H200"


def torchs_kernel(
    is_newer: bool, query: Tensor, key: Tensor, value: Tensor, mask: Any, *given: Any, **more: Any
) -> int:
    """Torch's choice on CUDA by its rules: flash attention from 8.0 on, in 16 bits without a mask; the memory-efficient
    kernel else, and for grouped heads none."""
    if is_newer and query.dtype != torch.float32 and mask is None and query.shape[-1] <= 256:
        return 1
    return 2 if query.shape[1] == key.shape[1] else 0


def choices(name: str) -> None:
    """The choices for the bench's shapes where nothing is timed, in a process that believes in a card of this name."""
    from attn_support.gpu import cards

    from pascal_attn_core.cli.bench.shapes import SHAPES

    known = {**cards.CARDS, NEWER: cards.Card(NEWER, (9, 0), 132, total_bytes=140 << 30, free_bytes=139 << 30)}
    cards.believe(known[name], run=lambda launch: None)
    torch._fused_sdp_choice = functools.partial(torchs_kernel, name == NEWER)
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.float16)):
        with mock.patch.object(torch, "randn", lambda *size, generator: torch.empty(*size)):
            given = shape.make("cuda")
        for needs_grad in (False, True):
            inputs = [t.detach().to(dtype).requires_grad_(needs_grad) for t in given[:3]]
            sentence = explain(*inputs, *given[3:8]).splitlines()[0].removeprefix("route ")
            place = 3 * needs_grad + (2 if dtype == torch.float16 else name != NEWER)
            is_measured = dtype == torch.float32 or name == "Tesla T4"
            ratio = dict(enumerate(MEASURED.get(shape.name, ()))).get(place) if is_measured else None
            lost = "" if ratio is None else f"{max(1, ratio if sentence.startswith('fused') else 1 / ratio):.2f}"
            what = f"{shape.name}{', gradients' * needs_grad}, {str(dtype).removeprefix('torch.')}"
            print(f"{name[-11:]:12s}{what:34s} {lost:5s} {sentence}", flush=True)


def all_choices() -> None:
    from attn_support.gpu import guard

    for name in ("NVIDIA GeForce GTX 1080 Ti", "Tesla T4", NEWER):
        with tempfile.TemporaryDirectory() as folder:
            print(guard.call(choices, name, folder=Path(folder), PASCAL_ATTN_NO_TIMING="1").stdout)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))  # attn_support imports tools
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", choices=("cpu", "fake", "card"), nargs="*", default=["cpu", "fake"])
    parser.add_argument("--rounds", type=int, default=150, help="rounds of 10 calls each (default 150)")
    parser.add_argument("--device", default="cuda", help="of --on card (default cuda)")
    parser.add_argument("--choices", action="store_true", help="print choices instead, with their time over the best's")
    options = parser.parse_args()
    if options.choices:
        return all_choices()
    if "card" in options.on and not torch.cuda.is_available():
        parser.error("no CUDA device was found")  # status 2
    torch.set_num_threads(1)
    cpu = itertools.chain(on_cpu(), in_slices(), in_comfyui())
    places = {"cpu": lambda: cpu, "fake": on_fake_cards, "card": functools.partial(on_card, device=options.device)}
    for where in options.on:
        for case in places[where]():
            with suppress(UnsupportedAttention):
                print(f"{case.name:60s} {cost(case, options.rounds):7.1f} us", flush=True)


if __name__ == "__main__":
    main()
