"""A trial of a feed-forward module leaves nothing behind, and what changes after it is seen."""

import array
import functools
import gc
import io
import itertools
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attn_support.ffn_zoo import GOOD, WIDTH, Case, Ffn, Product, With
from torch import Tensor, nn

from pascal_attn_core.ffn import FfnPatch, patch_ffn


TOKENS = 64


def _patch(module: nn.Module, **options: Any) -> FfnPatch:
    return patch_ffn(module, **{"include": "", "chunk_tokens": 16, "min_tokens": 2, **options})


def _state(patch: FfnPatch) -> str:
    return patch.report().lines[0].state


def _why(patch: FfnPatch) -> str:
    return patch.report().lines[0].why


def mixed(x: Tensor) -> Tensor:
    return x + x.mean(-2, keepdim=True)


FLAG = False
LOCAL = threading.local()
LOCAL.mix = False


def _helper() -> bool:
    return FLAG


class Slotted:
    __slots__ = ("mix",)
    calls = 0

    def __init__(self) -> None:
        self.mix = 0


class Act(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return mixed(x)


def function(mix: bool) -> Callable[[Tensor], Tensor]:
    return (lambda x: mixed(x)) if mix else (lambda x: x * 1)


def attentive() -> nn.Module:
    """A module that mixes tokens if any state that its code can refer to says so; its classes are of this call only."""
    mix = False

    class Layer(nn.Linear):
        pass

    class Own(Ffn):
        attribute = False

        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.act, self.function = Layer(WIDTH, 4 * WIDTH), Act(), function(False)
            self.register_buffer("gate", torch.zeros(()))
            self.register_parameter("slot", None)
            self.context: ContextVar[bool] = ContextVar("mix", default=False)
            self.slotted, self.deque, self.options = Slotted(), deque([False]), {"mix": False}
            self.partial = functools.partial(lambda given: given["mix"], given=self.options)
            self.config = types.SimpleNamespace(deep=types.SimpleNamespace(settings={"a": [{"mix": False}]}))
            self.table = {f"setting {place}": False for place in range(50)}

        def turn_closure(self) -> None:
            nonlocal mix
            mix = True

        def is_mixing(self) -> bool:
            return (
                mix or self.attribute or self.slot is not None or self.slotted.mix or self.deque[0] or self.partial()
                or self.context.get() or self.table["setting 49"] or self.config.deep.settings["a"][0]["mix"]
            )  # fmt: skip

        def change(self, x: Tensor) -> Tensor:
            return x

        def forward(self, x: Tensor) -> Tensor:
            if FLAG or _helper() or LOCAL.mix or self.is_mixing():
                x = mixed(x)
            if self.gate.dim():
                x = x + self.gate * x.mean(-2, keepdim=True)
            return self.fc2(self.act(F.gelu(self.fc1(self.change(self.function(x))))))

    return Own().eval()


def _global_hook(undo: pytest.MonkeyPatch) -> None:
    hook = lambda m, args, out: mixed(out) if isinstance(m, nn.Linear) else None  # noqa: E731
    undo.setitem(nn.modules.module._global_forward_hooks, -1, hook)


def _function_at_the_same_address(m: Any) -> None:
    m.function = None
    m.function = function(True)


TURNS: dict[str, Callable[[Any, pytest.MonkeyPatch], Any]] = {
    "a global, also of a helper": lambda m, undo: undo.setitem(globals(), "FLAG", True),
    "a context variable": lambda m, undo: m.context.set(True),
    "a thread local": lambda m, undo: undo.setattr(LOCAL, "mix", True),
    "a closure": lambda m, undo: m.turn_closure(),
    "a slot": lambda m, undo: setattr(m.slotted, "mix", 1),
    "a nested config": lambda m, undo: m.config.deep.settings["a"][0].update(mix=True),
    "a large dict": lambda m, undo: m.table.update({"setting 49": True}),
    "a deque": lambda m, undo: m.deque.appendleft(True),
    "an argument of a partial": lambda m, undo: m.options.update(mix=True),
    "an attribute of the class": lambda m, undo: setattr(type(m), "attribute", True),
    "a method of the class": lambda m, undo: setattr(type(m), "change", lambda self, x: mixed(x)),
    "the forward of the class": lambda m, undo: setattr(type(m), "forward", lambda self, x: self.mlp(mixed(x))),
    "the forward of a child's class": lambda m, undo: setattr(
        type(m.fc1), "forward", lambda self, x: F.linear(mixed(x), self.weight, self.bias)
    ),
    "a global hook": lambda m, undo: _global_hook(undo),
    "a function of torch": lambda m, undo: undo.setattr(F, "gelu", lambda x, gelu=F.gelu: mixed(gelu(x))),
    "a function at the same address": lambda m, undo: _function_at_the_same_address(m),
    "a replaced child": lambda m, undo: setattr(m, "act", Mixing()),
    "a child in the dict of modules": lambda m, undo: m._modules.__setitem__("act", Mixing()),
    "the class of a child": lambda m, undo: setattr(m.act, "__class__", Mixing),
    "a child around another": lambda m, undo: setattr(m, "fc2", nn.Sequential(Mixing(), m.fc2)),
    "the forward of a child": lambda m, undo: setattr(m.act, "forward", mixed),
    "a replaced buffer": lambda m, undo: setattr(m, "gate", torch.ones(1)),
    "a parameter's slot": lambda m, undo: setattr(m, "slot", nn.Parameter(torch.zeros(1))),
}


@pytest.mark.parametrize("calls_before", [1, 10], ids=["after the first call", "between two checks"])
@pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
def test_a_switch_counts_in_the_very_next_call(turn: Callable, calls_before: int, monkeypatch) -> None:
    module, x = attentive(), torch.randn(1, TOKENS, WIDTH)
    with torch.no_grad(), _patch(module) as patch:
        for _ in range(calls_before):
            before = module(x)
        assert _state(patch) == "on", _why(patch)
        turn(module, monkeypatch)
        out = module(x)
        assert _state(patch) == "refused"
        patch.remove()
        assert torch.equal(out, module(x))
        assert not torch.allclose(out, before, atol=1e-4)


CACHE: dict[Any, Any] = {}


def _cell() -> Callable[[Any], int]:
    calls = 0

    def step(m: Any) -> int:
        nonlocal calls
        calls += 1
        return calls

    return step


def _numbers(numbers: Iterator[int]) -> Callable[[Any], int]:
    return lambda m: next(numbers)


# What each call does to the state, as a function of the module, and returns of it; and the module's attributes.
STEPS: dict[str, Callable[[], tuple[Callable[[Any], float], dict[str, Any]]]] = {
    "a global": lambda: (lambda m: CACHE.update(calls=CACHE.get("calls", 0) + 1) or CACHE["calls"], {}),
    "a closure": lambda: (_cell(), {}),
    "a nested attribute": lambda: (lambda m: m.seen["a"].append(0) or len(m.seen["a"]), {"seen": {"a": []}}),
    "a class": lambda: (lambda m: setattr(Slotted, "calls", Slotted.calls + 1) or Slotted.calls, {}),
    "a slot": lambda: (lambda m: setattr(m.held, "mix", m.held.mix + 1) or m.held.mix, {"held": Slotted()}),
    "a deque": lambda: (lambda m: m.held.rotate(-1) or m.held[0], {"held": deque(range(50))}),
    "an iterator of the module": lambda: (lambda m: next(m.numbers), {"numbers": itertools.count()}),
    "an iterator of a closure": lambda: (_numbers(iter(range(100))), {}),
    "a generator of random numbers": lambda: (lambda m: 15 * m.draws.random(), {"draws": np.random.default_rng(0)}),
}


def _counted(step: Callable[[Any], float], state: dict[str, Any]) -> nn.Module:
    return With(lambda m, x: mixed(x) if step(m) > 14 else x, **state)


def _cached(module: Any, hidden: Tensor) -> Tensor:
    """As TeaCache does: every second call takes the first one's result."""
    calls = CACHE["calls"] = CACHE.get("calls", 0) + 1
    if calls % 2:
        CACHE[hidden.shape] = hidden
    return CACHE[hidden.shape]


@pytest.mark.parametrize("kind", [*STEPS, "a cache of activations"])
def test_state_that_calls_change_is_that_of_the_module_alone(kind: str) -> None:
    x = torch.randn(5, 1, TOKENS, WIDTH)
    outs, found = [], []
    for is_patched in (False, True):
        torch.manual_seed(0)
        CACHE.clear()
        Slotted.calls = 0
        step, state = STEPS[kind]() if kind in STEPS else (lambda m: list(CACHE), {})
        module = (_counted(step, state) if kind in STEPS else With(_cached, wide=True)).eval()
        with torch.no_grad(), _patch(module) as patch:
            if not is_patched:
                patch.remove()
            outs.append([module(one) for one in x])
            found.append(step(module))
            assert not is_patched or _state(patch) == "refused"
    assert found[0] == found[1]
    assert all(map(torch.equal, *outs))


@functools.lru_cache
def signs(count: int) -> Tensor:
    return torch.where(torch.arange(count) % 2 == 0, 1.0, -1.0)


class Cached(Ffn):
    cache: ClassVar[dict[Any, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.fc1(x))
        if hidden.shape[-1] not in self.cache:
            Cached.cache[hidden.shape[-1]] = torch.full((hidden.shape[-1],), 2.0)
        return self.fc2(hidden * self.cache[hidden.shape[-1]])


def _by_global(module: Any, hidden: Tensor) -> Tensor:
    if hidden.shape[-1] not in CACHE:
        CACHE[hidden.shape[-1]] = torch.arange(float(hidden.shape[-1]))
    return hidden * CACHE[hidden.shape[-1]]


@pytest.mark.parametrize(
    "make",
    [lambda: With(lambda m, h: h * signs(h.shape[-1]), wide=True), lambda: With(_by_global, wide=True), Cached],
    ids=["lru_cache", "global", "class"],
)
@pytest.mark.parametrize("budget", [{}, {"chunk_tokens": None, "budget_mib": 0.01}], ids=["tokens", "budget"])
def test_constants_that_a_module_caches_are_real_and_it_is_chunked(make, budget: dict) -> None:
    signs.cache_clear(), CACHE.clear(), Cached.cache.clear()
    module, x = make().eval(), torch.randn(1, 512, WIDTH)
    with torch.no_grad():
        with _patch(module, **budget) as patch:
            out = module(x)
            assert _state(patch) == "on", _why(patch)
            cached = [signs(64), *CACHE.values(), *Cached.cache.values()]
            assert all(type(tensor) is Tensor for tensor in [out, *cached])
        torch.testing.assert_close(module(x), out)


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_where_gradients_are_wanted_the_same_modules_are_chunked(case: Case) -> None:
    module = case.make().eval()
    with _patch(module) as patch:
        module(torch.randn(2, TOKENS, WIDTH)).sum().backward()
        assert _state(patch) == "on", _why(patch)


def test_what_cannot_be_named_is_found_within_sixteen_calls_and_the_result_mended() -> None:
    held = array.array("b", [0])
    module = With(lambda m, x: mixed(x) if held[0] else x).eval()
    x = torch.randn(2, 8 * TOKENS, WIDTH)
    with torch.no_grad(), _patch(module) as patch:
        for _ in range(40):
            module(x)
        assert _state(patch) == "on"
        held[0] = 1
        calls = 0
        while calls < 17:
            calls += 1
            out = module(x)
            if _state(patch) == "refused":
                break
        assert "later check" in _why(patch)
        assert calls <= 16
        patch.remove()
        assert torch.equal(out, module(x))


@pytest.mark.parametrize("grad", [False, True])
def test_a_check_leaves_random_numbers_and_gradients_alone(grad: bool) -> None:
    module, x = Ffn().eval(), torch.randn(2, TOKENS, WIDTH, requires_grad=grad)
    plain = module(x)
    draws = torch.get_rng_state()
    with torch.set_grad_enabled(grad), _patch(module) as patch:
        for _ in range(20):
            out = module(x)
        assert _state(patch) == "on"
    assert torch.equal(torch.get_rng_state(), draws)
    torch.testing.assert_close(out, plain if grad else plain.detach())


def test_checks_are_as_rare_as_promised() -> None:
    recheck = Recheck()
    due = [call for call in range(1, 200) if recheck.is_due()]
    assert due[:6] == [3, 4, 6, 9, 13, 19]
    assert max(later - earlier for earlier, later in pairwise(due)) == 16


def test_what_a_module_keeps_of_long_inputs_only_is_seen_before_they_run() -> None:
    module = With(lambda m, x: x if x.shape[1] < 49 else setattr(m, "last", x) or x).eval()
    with torch.no_grad(), _patch(module) as patch:
        module(torch.randn(1, TOKENS, WIDTH))
        assert _state(patch) == "refused"
    assert type(module.last) is Tensor


def test_a_module_that_was_patched_is_not_kept_alive() -> None:
    from pascal_attn_core.ffn.binding import FfnBinding

    binding, x = FfnBinding(chunk_tokens=16, min_tokens=2, include=""), torch.randn(1, TOKENS, WIDTH)
    held: list[Any] = []
    module = With(lambda m, x: x if held else x * 2, owner=held).eval()
    held.append(module)  # reaches itself through a list
    with torch.no_grad():
        binding.attach(module)
        module(x)
    gone = weakref.ref(module)
    held.clear()
    del module
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_is_passed_over_with_a_reason() -> None:
    child, x = With(lambda m, h: m.act(h), wide=True, act=torch.jit.script(Act())).eval(), torch.randn(1, TOKENS, WIDTH)
    whole = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(WIDTH, 64), Act(), nn.Linear(64, WIDTH)))).eval()
    with torch.no_grad():
        expected = child(x)
        with _patch(child) as patch:
            assert torch.equal(child(x), expected)
            assert _state(patch) == "refused"
            assert "TorchScript" in _why(patch)
    with pytest.raises(ValueError, match="TorchScript"):
        _patch(whole, include="0")


@pytest.mark.torch_2_5
def test_compiled_children_are_chunked_and_compiled_modules_say_why_not() -> None:
    x, child = torch.randn(1, TOKENS, WIDTH), Ffn().eval()
    child.fc1 = torch.compile(child.fc1, backend="eager")
    whole = Ffn().eval()
    whole.compile(backend="eager")
    outer = nn.Sequential(torch.compile(Ffn().eval(), backend="eager"))
    with torch.no_grad():
        for module, include, state in ((child, "", "on"), (whole, "", "waiting"), (outer, "0", "on")):
            expected = module(x)
            with _patch(module, include=include) as patch:
                for _ in range(4):
                    torch.testing.assert_close(module(x), expected)
                assert _state(patch) == state
                assert _why(patch)
    torch._dynamo.reset()


def test_dropout_around_a_module_that_is_trained_does_not_matter() -> None:
    block = nn.Sequential(nn.Dropout(0.5), Ffn(), nn.Dropout(0.5)).train()
    x = torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    torch.manual_seed(5)
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)
    with _patch(block, include="1") as patch:
        torch.manual_seed(5)
        (grad,) = torch.autograd.grad(block(x).square().sum(), x)
        assert _state(patch) == "on"
    torch.testing.assert_close(grad, expected)


class Clipped(Product):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        one, two = ctx.saved_tensors
        grad = grad / grad.norm()
        return grad * two, grad * one


@pytest.mark.torch_2_5
@pytest.mark.parametrize(("function", "state"), [(Product, "on"), (Clipped, "refused")])
def test_a_weights_own_backward_pass_is_tried(function: type[Product], state: str) -> None:
    scale = {name: nn.Parameter(torch.randn(WIDTH)) for name in ("one", "two")}
    module, x = With(lambda m, x: x * function.apply(m.one, m.two), **scale), torch.randn(2, TOKENS, WIDTH)
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    with _patch(module) as patch:
        grads = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
        assert _state(patch) == state, _why(patch)
    for grad, wanted in zip(grads, expected):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-3)


class _LoggedStream(io.StringIO):
    """A stream that keeps what is written to it, as hosts put one in place of ``sys.stderr``."""

    lines = 0

    def write(self, text: str) -> int:
        self.lines += 1
        return super().write(text)


def test_a_module_that_writes_to_a_stream_of_its_host_is_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", _LoggedStream())

    def logged(module: Any, x: Tensor) -> Tensor:
        print("called", file=sys.stderr)
        return x

    module, x = With(logged), torch.randn(1, TOKENS, WIDTH)
    expected = module(x)
    with _patch(module) as patch:
        for _ in range(3):
            torch.testing.assert_close(module(x), expected)
        assert _state(patch) == "on", _why(patch)
