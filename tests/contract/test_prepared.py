"""Calls that run by what was found out for their kind: each must be the call that a fresh decision makes of it."""

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from attn_support.fused.device import UncheckedKernels, emulated_card
from attn_support.fused.emulation import CARD, T4
from attn_support.randomness import seeds, times
from torch import Tensor

from pascal_attn_core import AttentionConfig, sdpa
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.launch.repeat import _pointers
from pascal_attn_core.machine.runtime import begin_epoch
from pascal_attn_core.routes import prepared, torch_kernel
from pascal_attn_core.routes.torch_faults import TorchAlone

Spec = dict[str, Any]
BASE: Spec = {
    "sizes": (1, 4, 4, 24, 40, 16), "gqa": False, "q": "plain", "k": "plain", "v": "plain", "dtype": torch.float32,
    "mask": "none", "is_causal": False, "scale": None, "dropout_p": 0.0, "wants": "", "mode": "grad",
    "autocast": False, "config": AttentionConfig(math_limit_mib=0), "flags": "", "moved": "",
}  # fmt: skip
CONFIGS = [
    {"route": "tiled"}, {"route": "fused"}, {"route": "fused-tensor"}, {"route": "torch"}, {"route": "math"},
    {"math_limit_mib": 1}, {"fused": False}, {"budget_mib": 1 / 16}, {"q_block": 8}, {"atomic_gradients": True},
]  # fmt: skip
OTHERS: dict[str, list[Any]] = {
    "sizes": [(2, 4, 4, 24, 40, 16), (1, 4, 4, 25, 40, 16), (1, 4, 4, 24, 41, 16), (1, 4, 4, 24, 40, 24),
              (1, 4, 2, 24, 40, 16), (1, 4, 1, 24, 40, 16), (1, 4, 4, 1, 1030, 16), (1, 4, 4, 1, 1100, 16),
              (1, 4, 4, 1, 1300, 16), (1, 4, 2, 8, 1100, 16)],
    "gqa": [False, True],
    "q": ["inside", "sliced", "gaps", "expanded"],
    "k": ["inside", "sliced", "gaps", "expanded", "one head"],
    "v": ["inside", "sliced", "gaps", "expanded", "wide"],
    "dtype": [torch.float16, torch.bfloat16, torch.float64],
    "mask": ["bool", "padding", "float", "rows", "columns"],
    "is_causal": [True],
    "scale": [0.3, -0.5, 1],
    "dropout_p": [0.25],
    "wants": ["q", "k", "v", "qkv", "mask"],
    "mode": ["no_grad", "inference"],
    "autocast": [True],
    "config": [AttentionConfig(**{"math_limit_mib": 0, **changes}) for changes in CONFIGS],
    "flags": ["no flash", "no math", "deterministic"],
    "moved": ["q", "k", "negated"],
}  # fmt: skip
MODES: dict[str, Callable[[], Any]] = {
    "grad": contextlib.nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode,
}  # fmt: skip


def _laid_out(how: str, batch: int, heads: int, tokens: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    if how == "inside":
        return torch.randn(batch, tokens, heads, head_dim).to(dtype).transpose(1, 2)
    if how == "sliced":
        return torch.randn(batch, heads, tokens, 2 * head_dim).to(dtype)[..., :head_dim]
    if how == "gaps":
        return torch.randn(batch, heads, head_dim, tokens).to(dtype).mT
    if how == "one head":
        return torch.randn(batch, 1, tokens, head_dim).to(dtype)
    if how == "wide":
        return torch.randn(batch, heads, tokens, 2 * head_dim).to(dtype)
    if how == "expanded":
        return torch.randn(batch, 1, tokens, head_dim).to(dtype).expand(-1, heads, -1, -1)
    return torch.randn(batch, heads, tokens, head_dim).to(dtype)


def _moved(tensor: Tensor) -> Tensor:
    """The tensor at an address that is no multiple of 16."""
    held = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    return held.copy_(tensor)


def _mask(kind: str, batch: int, heads: int, rows: int, keys: int) -> Tensor | None:
    shapes = {"bool": (batch, heads, rows, keys), "padding": (batch, 1, 1, keys), "float": (rows, keys)}
    if kind in ("rows", "columns"):
        return torch.randn(rows, 1).expand(rows, keys) if kind == "rows" else torch.randn(keys, rows).mT
    if kind == "none":
        return None
    drawn = torch.randn(shapes[kind])
    return drawn if kind == "float" else drawn > -0.5


def _inputs(spec: Spec) -> tuple[list[Tensor | None], dict[str, Any]]:
    batch, heads, kv_heads, rows, keys, head_dim = spec["sizes"]
    sizes = {"q": (heads, rows), "k": (kv_heads, keys), "v": (kv_heads, keys)}
    tensors = {name: _laid_out(spec[name], batch, *size, head_dim, spec["dtype"]) for name, size in sizes.items()}
    if spec["moved"] in tensors:
        tensors[spec["moved"]] = _moved(tensors[spec["moved"]])
    elif spec["moved"]:
        tensors["q"] = torch._neg_view(tensors["q"])
    mask = _mask(spec["mask"], batch, heads, rows, keys)
    mask = mask.to(spec["dtype"]) if mask is not None and mask.dtype != torch.bool else mask
    inputs = [*tensors.values(), mask]
    wanted = {"mask": (3,)}.get(spec["wants"], ["qkv".index(name) for name in spec["wants"] if name in "qkv"])
    for place in wanted:
        if inputs[place] is not None and inputs[place].is_floating_point():
            inputs[place] = inputs[place].detach().requires_grad_()
    names = ("is_causal", "scale", "dropout_p", "config")
    return inputs, {**{name: spec[name] for name in names}, "enable_gqa": spec["gqa"]}


@contextlib.contextmanager
def _around(spec: Spec) -> Iterator[None]:
    flash, math = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(spec["flags"] != "no flash")
    torch.backends.cuda.enable_math_sdp(spec["flags"] != "no math")
    torch.use_deterministic_algorithms(spec["flags"] == "deterministic", warn_only=True)
    try:
        with MODES[spec["mode"]](), torch.autocast("cpu", torch.bfloat16, enabled=spec["autocast"]):
            yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_flash_sdp(flash)
        torch.backends.cuda.enable_math_sdp(math)


class Known(dict):
    """Counts the kinds that were found."""

    found = 0

    def get(self, kind: Any, *default: Any) -> Any:
        self.found += kind in self
        return super().get(kind, *default)


class Watch:
    """It records what calls become: those of torch's function, and launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, queued: list[Launch]):
        self.queued, self.of_torch = queued, list[Any]()
        for module in (torch_kernel, prepared):
            monkeypatch.setattr(module, "torch_sdpa", self._spy(module.torch_sdpa))
        monkeypatch.setattr(prepared, "known", Known())

    def _spy(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def spy(*tensors: Any, scale: float | None = None, **options: Any) -> Tensor:
            query, key, value, mask, dropout_p, is_causal = tensors
            given = [None if t is None else (t.shape, t.dtype) for t in (query, key, value, mask)]
            scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
            self.of_torch.append((given, dropout_p, is_causal, scale, options))
            return function(*tensors, scale=scale, **options)

        return spy

    def found(self, spec: Spec, inputs: list[Any], options: Spec) -> tuple[Any, ...]:
        """Return what one call becomes, and its results where they were computed."""
        self.of_torch.clear()
        self.queued.clear()
        torch.manual_seed(1)
        try:
            with _around(spec):
                out = sdpa(*inputs, **options)
            leaves = [t for t in inputs if t is not None and t.requires_grad]
            grads = torch.autograd.grad(out.float().square().sum(), leaves) if out.requires_grad else ()
        except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
            return type(error), str(error), list(self.of_torch)
        of_out = tuple(out.shape), out.stride(), out.dtype
        is_copied = spec["autocast"] or spec["moved"] == "negated"  # before anything reads it
        launches = [_described(launch, [None] * 4 if is_copied else inputs, out) for launch in self.queued]
        numbers = () if launches else [t.detach().nan_to_num(7.0).clone() for t in (out, *grads)]
        return of_out, launches, list(self.of_torch), numbers


def _described(launch: Launch, inputs: list[Any], out: Tensor) -> tuple[Any, ...]:
    """A launch, whose addresses are those of the call's tensors, or some."""
    params = launch.params
    tensors = {"q": inputs[0], "k": inputs[1], "v": inputs[2], "mask": inputs[3], "o": out}
    fields = {}
    for name, _ in [field for each in type(params).__mro__ for field in each.__dict__.get("_fields_", ())]:
        value = getattr(params, name)
        if name in _pointers(type(params)):
            tensor = tensors.get(name)
            value = bool(value) if tensor is None or not value else value - tensor.data_ptr()
        fields[name] = value if isinstance(value, (int, float, bool, type(None))) else bytes(value)
    return launch.variant.name, launch.function, launch.grid, launch.threads, fields


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_are_same, one, other))
    return bool(one == other)


def _differences(watch: Watch, seed: int, count: int, names: Sequence[str] = tuple(OTHERS)) -> list[str]:
    """Pairs of calls whose kinds differ in one property, one of these, made by what is known and afresh: those that
    differ."""
    rng, wrong = random.Random(seed), []
    bases = [BASE, BASE | {"wants": "qkv"}, BASE | {"dtype": torch.float16}, BASE | {"sizes": OTHERS["sizes"][6]}]
    routes = ("fused", "fused", "fused-tensor", "fused", "tiled", "torch", "math", "fused-tensor")
    configs = [AttentionConfig(math_limit_mib=0, route=route) for route in routes]
    bases += [base | {"config": config} for base, config in zip(bases * 2, configs)]
    bases.append(BASE | {"sizes": OTHERS["sizes"][4], "gqa": True, "is_causal": True})
    bases.append(BASE | {"wants": "qkv", "config": AttentionConfig(math_limit_mib=0, atomic_gradients=True)})
    for number in range(count):
        if number % 2 == 0:
            spec, name = rng.choice(bases), rng.choice(names)
        else:
            spec = spec | {name: rng.choice(OTHERS[name])}
        torch.manual_seed(rng.randrange(1 << 30))
        inputs, options = _inputs(spec)
        by_kind = watch.found(spec, inputs, options)
        kept, prepared.known = prepared.known, {}
        try:
            afresh = watch.found(spec, inputs, options)
        finally:
            prepared.known = kept
        if not _are_same(by_kind, afresh):
            wrong.append(f"{name} {spec}: {by_kind[:3]} != {afresh[:3]}")
    return wrong


@contextlib.contextmanager
def _device(card: str) -> Iterator[list[Launch]]:
    """A CPU, or a card by this name, which queues launches into the list."""
    if card == "CPU":
        answers, prepared_alone = frozenset(), prepared.runtime_of(torch.device("cpu")).part(TorchAlone)
        before, prepared_alone.answers = prepared_alone.answers, answers  # so that the memo has something to do
        try:
            yield []
        finally:
            prepared_alone.answers = before
        return
    info = {"GTX 1080 Ti": CARD, "T4": T4}[card]
    with emulated_card(lambda launch: None, info, UncheckedKernels) as kernels:
        yield kernels.queued


@pytest.mark.torch_2_5
@pytest.mark.parametrize("card", ["CPU", "GTX 1080 Ti", "T4"])
@pytest.mark.parametrize("seed", seeds(2))
def test_every_call_is_what_a_fresh_decision_makes_of_it(monkeypatch: pytest.MonkeyPatch, card: str, seed: int) -> None:
    with _device(card) as queued:
        watch = Watch(monkeypatch, queued)
        assert _differences(watch, seed, times(200)) == []
        assert prepared.known.found > times(200) // 4  # type: ignore[attr-defined]


def _choices(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls for which a route is chosen from now on."""
    from pascal_attn_core.routes import run

    choose, seen = run.choose, list[Any]()

    def counted(call: Any, *given: Any, **options: Any) -> Any:
        seen.append(call)
        return choose(call, *given, **options)

    monkeypatch.setattr(run, "choose", counted)
    return seen


def test_the_second_call_of_a_kind_asks_nobody_until_something_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, config = _choices(monkeypatch), AttentionConfig(route="fused")
    with _device("GTX 1080 Ti"):
        inputs = [torch.randn(1, 2, 40, 16) for _ in range(3)]

        def asked() -> int:
            before = len(seen)
            sdpa(*inputs, config=config)
            return len(seen) - before

        assert [asked(), asked(), asked()] == [1, 0, 0]
        begin_epoch()
        assert [asked(), asked()] == [1, 0]
        monkeypatch.setattr(prepared.time, "monotonic", lambda: 1e12)
        assert asked() == 1  # after some seconds
        config = AttentionConfig(route="fused")  # an equal one
        assert asked() == 0


def test_decoding_with_a_key_more_in_each_call_is_chosen_once_for_256_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _choices(monkeypatch)
    monkeypatch.setattr(prepared, "known", {})
    with _device("GTX 1080 Ti") as queued:
        query, key, value = torch.randn(1, 8, 1, 64), *(torch.randn(1, 2, 3000, 64) for _ in range(2))
        for keys in range(1024, 2048):
            cached = key[:, :, :keys], value[:, :, :keys]
            for own in (cached, [t.contiguous() for t in cached]) if keys % 64 == 0 else (cached,):
                sdpa(query, *own, enable_gqa=True, config=AttentionConfig(route="fused"))
                assert {launch.params.lk for launch in queued} == {keys}
                assert {launch.params.kh for launch in queued} == {own[0].stride(1)}
                queued.clear()
    assert len(seen) == len(prepared.known) == 8


def test_what_a_mask_holds_is_read_in_each_call() -> None:
    """A float mask that is written in place may concern a fault of torch's gradients in the next call."""
    leaves = [torch.randn(1, 2, 300, 16, requires_grad=True) for _ in range(3)]
    mask = torch.zeros(1, 1, 1, 300)
    for _ in range(2):
        for fill in (0.0, -10_000.0):
            mask.fill_(fill)
            inputs = [*leaves, mask]
            out = sdpa(*inputs, config=AttentionConfig(math_limit_mib=0))
            actual = torch.autograd.grad(out.square().sum(), leaves)
            double = [t.detach().double().requires_grad_() for t in leaves]
            expected = torch.nn.functional.scaled_dot_product_attention(*double, mask.double())
            for mine, right in zip(actual, torch.autograd.grad(expected.square().sum(), double)):
                torch.testing.assert_close(mine.double(), right, atol=2e-3, rtol=1e-3)


def test_kinds_are_few_and_threads_may_forget_them() -> None:
    stop, wrong = threading.Event(), list[BaseException]()
    calls = [[torch.randn(1, 2, tokens, 16) for _ in range(3)] for tokens in range(30, 50)]
    config = AttentionConfig(route="tiled")
    expected = [sdpa(*inputs, config=config) for inputs in calls]

    def work() -> None:
        try:
            for _ in range(20):
                for inputs, right in zip(calls, expected):
                    assert torch.equal(sdpa(*inputs, config=config), right)
        except BaseException as error:
            wrong.append(error)

    def forget() -> None:
        while not stop.wait(0.0005):
            prepared.known.clear()
            begin_epoch()

    threads = [threading.Thread(target=work) for _ in range(3)]
    forgetful = threading.Thread(target=forget)
    for thread in (*threads, forgetful):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    forgetful.join()
    assert wrong == []


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"enable_gqa": True}], ids=str)
def test_gradients_of_the_third_call_are_those_of_the_definition(options: dict[str, Any]) -> None:
    config, heads = AttentionConfig(route="fused"), 1 if options.get("enable_gqa") else 2
    with emulated_card() as kernels:
        for _ in range(3):
            leaves = [torch.randn(1, n, 40, 32, requires_grad=True) for n in (2, heads, heads)]
            kernels.queued.clear()
            out = sdpa(*leaves, **options, config=config)
            grads = torch.autograd.grad(out.square().sum(), leaves)
            double = [t.detach().double().requires_grad_() for t in leaves]
            expected = torch.nn.functional.scaled_dot_product_attention(*double, **options)
            right = (expected, *torch.autograd.grad(expected.square().sum(), double))
            for mine, its in zip((out, *grads), right):
                torch.testing.assert_close(mine.double(), its, atol=1e-5, rtol=1e-4)
            assert kernels.queued
