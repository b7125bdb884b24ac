"""A trial of a feed-forward module leaves nothing behind, and what changes after it is seen."""

from __future__ import annotations

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
from collections.abc import Callable
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attn_support.ffn_zoo import GOOD, WIDTH, Case, Ffn, With
from torch import Tensor, nn

from pascal_attn_core.ffn import FfnPatch, patch_ffn
from pascal_attn_core.ffn.recheck import Recheck

TOKENS = 64


def _patch(module: nn.Module, **options: Any) -> FfnPatch:
    return patch_ffn(module, **{"include": "", "chunk_tokens": 16, "min_tokens": 2, **options})


def _state(patch: FfnPatch) -> str:
    return patch.report().lines[0].state


def _why(patch: FfnPatch) -> str:
    return patch.report().lines[0].why


def mixed(x: Tensor) -> Tensor:
    return x + x.mean(-2, keepdim=True)


# --- state that decides whether tokens are mixed ---

FLAG = False
TABLE = {f"setting {place}": False for place in range(50)}
CONTEXT: ContextVar[bool] = ContextVar("CONTEXT", default=False)
LOCAL = threading.local()
LOCAL.mix = False


class Slotted:
    __slots__ = ("mix",)

    def __init__(self) -> None:
        self.mix = False


class Switch(NamedTuple):
    """A module that works token by token, what makes it mix them, and what puts that back."""

    module: nn.Module
    turn: Callable[[], Any]
    back: Callable[[], Any] = lambda: None


def by_global() -> Switch:
    def turn(on: bool) -> None:
        global FLAG
        FLAG = on

    return Switch(With(lambda m, x: mixed(x) if FLAG else x), lambda: turn(True), lambda: turn(False))


def by_global_of_a_helper() -> Switch:
    def turn(on: bool) -> None:
        global FLAG
        FLAG = on

    return Switch(With(lambda m, x: _helper(x)), lambda: turn(True), lambda: turn(False))


def _helper(x: Tensor) -> Tensor:
    return mixed(x) if FLAG else x


def by_context_variable() -> Switch:
    return Switch(
        With(lambda m, x: mixed(x) if CONTEXT.get() else x), lambda: CONTEXT.set(True), lambda: CONTEXT.set(False)
    )


def by_thread_local() -> Switch:
    return Switch(
        With(lambda m, x: mixed(x) if LOCAL.mix else x),
        lambda: setattr(LOCAL, "mix", True),
        lambda: setattr(LOCAL, "mix", False),
    )


def by_closure() -> Switch:
    mix = False

    def change(module: Any, x: Tensor) -> Tensor:
        return mixed(x) if mix else x

    def turn() -> None:
        nonlocal mix
        mix = True

    return Switch(With(change), turn)


def by_slots() -> Switch:
    held = Slotted()
    return Switch(With(lambda m, x: mixed(x) if m.held.mix else x, held=held), lambda: setattr(held, "mix", True))


def by_nested_config() -> Switch:
    inner = types.SimpleNamespace(deep=types.SimpleNamespace(settings={"a": [{"mix": False}]}))
    module = With(lambda m, x: mixed(x) if m.config.deep.settings["a"][0]["mix"] else x, config=inner)
    return Switch(module, lambda: inner.deep.settings["a"][0].update(mix=True))


def by_large_dict() -> Switch:
    module = With(lambda m, x: mixed(x) if m.table["setting 49"] else x, table=dict(TABLE))
    return Switch(module, lambda: module.table.update({"setting 49": True}))


def by_class_attribute() -> Switch:
    class Own(Ffn):
        mix = False

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(mixed(x) if self.mix else x)

    return Switch(Own(), lambda: setattr(Own, "mix", True))


def by_method_of_the_class() -> Switch:
    class Own(Ffn):
        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.change(x))

        def change(self, x: Tensor) -> Tensor:
            return x

    return Switch(Own(), lambda: setattr(Own, "change", lambda self, x: mixed(x)))


def by_forward_of_the_class() -> Switch:
    class Own(Ffn):
        pass

    return Switch(Own(), lambda: setattr(Own, "forward", lambda self, x: self.mlp(mixed(x))))


def by_forward_of_a_child() -> Switch:
    class Layer(nn.Linear):
        pass

    module = Ffn()
    module.fc1 = Layer(WIDTH, 4 * WIDTH)
    return Switch(module, lambda: setattr(Layer, "forward", lambda self, x: F.linear(mixed(x), self.weight, self.bias)))


def by_a_global_hook() -> Switch:
    handles: list[Any] = []

    def hook(module: nn.Module, args: tuple, out: Tensor) -> Tensor | None:
        return mixed(out) if isinstance(module, nn.Linear) else None

    return Switch(
        Ffn(),
        lambda: handles.append(nn.modules.module.register_module_forward_hook(hook)),
        lambda: [handle.remove() for handle in handles],
    )


def by_a_function_at_the_same_address() -> Switch:
    def make(mix: bool) -> Callable[[Tensor], Tensor]:
        return (lambda x: mixed(x)) if mix else (lambda x: x * 1)

    module = With(lambda m, x: m.act(x), act=make(False))

    def turn() -> None:
        module.act = None
        module.act = make(True)

    return Switch(module, turn)


def by_deque() -> Switch:
    held = deque([False])
    return Switch(With(lambda m, x: mixed(x) if held[0] else x), lambda: held.appendleft(True))


def by_partial() -> Switch:
    options = {"mix": False}
    act = functools.partial(lambda x, given: mixed(x) if given["mix"] else x, given=options)
    return Switch(With(lambda m, x: m.act(x), act=act), lambda: options.update(mix=True))


def by_a_function_of_torch() -> Switch:
    gelu = F.gelu
    return Switch(Ffn(), lambda: setattr(F, "gelu", lambda x: mixed(gelu(x))), lambda: setattr(F, "gelu", gelu))


class Mixing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return mixed(x)


class Act(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


def _with_act() -> nn.Module:
    return With(lambda m, h: m.act(h), wide=True, act=Act())


def by_a_replaced_child() -> Switch:
    module = _with_act()
    return Switch(module, lambda: setattr(module, "act", Mixing()))


def by_a_child_in_the_dict_of_modules() -> Switch:
    module = _with_act()
    return Switch(module, lambda: module._modules.__setitem__("act", Mixing()))


def by_the_class_of_a_child() -> Switch:
    module = _with_act()
    return Switch(module, lambda: setattr(module.act, "__class__", Mixing))


def by_a_child_around_another() -> Switch:
    module = _with_act()
    return Switch(module, lambda: setattr(module, "fc2", nn.Sequential(Mixing(), module.fc2)))


def by_a_forward_of_a_child() -> Switch:
    module = _with_act()
    return Switch(module, lambda: setattr(module.act, "forward", mixed))


def by_a_replaced_buffer() -> Switch:
    module = With(lambda m, x: x + m.gate * x.mean(-2, keepdim=True) if m.gate.dim() else x, gate=torch.zeros(()))
    return Switch(module, lambda: setattr(module, "gate", torch.ones(1)))


def by_a_parameters_slot() -> Switch:
    module = With(lambda m, x: x if m.gate is None else mixed(x))
    module.register_parameter("gate", None)
    return Switch(module, lambda: setattr(module, "gate", nn.Parameter(torch.zeros(1))))


SWITCHES = [
    by_global, by_global_of_a_helper, by_context_variable, by_thread_local, by_closure, by_slots, by_nested_config,
    by_large_dict, by_class_attribute, by_method_of_the_class, by_forward_of_the_class, by_forward_of_a_child,
    by_a_global_hook, by_a_function_at_the_same_address, by_deque, by_partial, by_a_function_of_torch,
    by_a_replaced_child, by_a_child_in_the_dict_of_modules, by_the_class_of_a_child, by_a_child_around_another,
    by_a_forward_of_a_child, by_a_replaced_buffer, by_a_parameters_slot,
]  # fmt: skip


@pytest.mark.parametrize("calls_before", [1, 10], ids=["after the first call", "between two checks"])
@pytest.mark.parametrize("make", SWITCHES, ids=lambda make: make.__name__)
def test_a_switch_counts_in_the_very_next_call(make: Callable[[], Switch], calls_before: int) -> None:
    module, turn, back = make()
    module.eval()
    x = torch.randn(1, TOKENS, WIDTH)
    try:
        with torch.no_grad(), _patch(module) as patch:
            for _ in range(calls_before):
                before = module(x)
            assert _state(patch) == "chunked", _why(patch)
            turn()
            out = module(x)
            assert _state(patch) == "refused"
            patch.remove()
            assert torch.equal(out, module(x))
            assert not torch.allclose(out, before, atol=1e-4)
    finally:
        back()


# --- state that a call changes ---


class Counting(NamedTuple):
    """A module whose calls change something, and what that has become."""

    module: nn.Module
    found: Callable[[], Any]


CACHE: dict[Any, Any] = {}


def in_a_global() -> Counting:
    CACHE.clear()

    def change(module: Any, x: Tensor) -> Tensor:
        CACHE["calls"] = CACHE.get("calls", 0) + 1
        return mixed(x) if CACHE["calls"] > 14 else x

    return Counting(With(change), lambda: CACHE["calls"])


def in_a_cache_of_activations() -> Counting:
    """As TeaCache does: every second call takes the first one's result."""
    CACHE.clear()

    def change(module: Any, hidden: Tensor) -> Tensor:
        calls = CACHE["calls"] = CACHE.get("calls", 0) + 1
        if calls % 2:
            CACHE[hidden.shape] = hidden
        return CACHE[hidden.shape]

    return Counting(With(change, wide=True), lambda: [key if key == "calls" else tuple(key) for key in CACHE])


def in_a_closure() -> Counting:
    calls = 0

    def change(module: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return mixed(x) if calls > 14 else x

    return Counting(With(change), lambda: calls)


def in_a_nested_attribute() -> Counting:
    def change(module: Any, x: Tensor) -> Tensor:
        module.state["seen"][0] += 1
        return x

    module = With(change, state={"seen": [0]})
    return Counting(module, lambda: module.state["seen"])


def in_a_class() -> Counting:
    class Own(Ffn):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Own.calls += 1
            return self.mlp(mixed(x) if Own.calls > 14 else x)

    return Counting(Own(), lambda: Own.calls)


def in_a_slot() -> Counting:
    held = Slotted()

    def change(module: Any, x: Tensor) -> Tensor:
        held.mix += 1
        return x

    return Counting(With(change), lambda: held.mix)


def in_a_deque() -> Counting:
    held = deque([1, 2, 3, 4, 5])

    def change(module: Any, x: Tensor) -> Tensor:
        held.rotate(-1)
        return x

    return Counting(With(change), lambda: list(held))


def in_an_iterator_of_the_module() -> Counting:
    module = With(lambda m, x: mixed(x) if next(m.numbers) > 13 else x, numbers=itertools.count())
    return Counting(module, lambda: repr(module.numbers))


def in_an_iterator_of_a_closure() -> Counting:
    numbers = iter(range(100))
    return Counting(With(lambda m, x: x if next(numbers) < 14 else mixed(x)), numbers.__length_hint__)


def in_a_generator_of_random_numbers() -> Counting:
    draws = np.random.default_rng(0)

    def change(module: Any, x: Tensor, draws: Any = draws) -> Tensor:
        return mixed(x) if draws.random() < 0.02 else x

    return Counting(With(change), lambda: draws.bit_generator.state["state"]["state"])


COUNTING = [
    in_a_global, in_a_cache_of_activations, in_a_closure, in_a_nested_attribute, in_a_class, in_a_slot, in_a_deque,
    in_an_iterator_of_the_module, in_an_iterator_of_a_closure, in_a_generator_of_random_numbers,
]  # fmt: skip


@pytest.mark.parametrize("make", COUNTING, ids=lambda make: make.__name__)
def test_state_that_calls_change_is_that_of_the_module_alone(make: Callable[[], Counting]) -> None:
    x = torch.randn(5, 1, TOKENS, WIDTH)
    outs, found = [], []
    for is_patched in (False, True):
        torch.manual_seed(0)
        module, state = make()
        module.eval()
        with torch.no_grad(), _patch(module) as patch:
            if not is_patched:
                patch.remove()
            outs.append([module(one) for one in x])
            found.append(state())
            assert not is_patched or _state(patch) == "refused"
    assert found[0] == found[1]
    assert all(map(torch.equal, *outs))


# --- nothing of a trial is left behind ---


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
            assert _state(patch) == "chunked", _why(patch)
            cached = [signs(64), *CACHE.values(), *Cached.cache.values()]
            assert all(type(tensor) is Tensor for tensor in [out, *cached])
        torch.testing.assert_close(module(x), out)


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_where_gradients_are_wanted_the_same_modules_are_chunked(case: Case) -> None:
    module = case.make().eval()
    with _patch(module) as patch:
        module(torch.randn(2, TOKENS, WIDTH)).sum().backward()
        assert _state(patch) == "chunked", _why(patch)


# --- what no name leads to is found by and by ---


def test_what_cannot_be_named_is_found_within_sixteen_calls_and_the_result_mended() -> None:
    held = array.array("b", [0])
    module = With(lambda m, x: mixed(x) if held[0] else x).eval()
    x = torch.randn(2, 8 * TOKENS, WIDTH)
    with torch.no_grad(), _patch(module) as patch:
        for _ in range(40):
            module(x)
        assert _state(patch) == "chunked"
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
        assert _state(patch) == "chunked"
    assert torch.equal(torch.get_rng_state(), draws)
    torch.testing.assert_close(out, plain if grad else plain.detach())


def test_checks_are_as_rare_as_promised() -> None:
    recheck = Recheck()
    due = [call for call in range(1, 200) if recheck.is_due()]
    assert due[:6] == [3, 4, 6, 9, 13, 19]
    assert max(later - earlier for earlier, later in pairwise(due)) == 16


# --- formulas that change for long inputs ---


@pytest.mark.parametrize(
    "change",
    [
        lambda m, x: x * (2.0 if x.shape[1] > 48 else 1.0),
        lambda m, x: mixed(x) if x.shape[1] > 48 else x,
        lambda m, x: x if x.shape[1] < 49 else setattr(m, "last", x) or x,
    ],
    ids=["another number", "other operators", "keeps what it is given"],
)
def test_what_a_module_does_to_long_inputs_only_is_seen_before_they_run(
    change: Callable[[Any, Tensor], Tensor],
) -> None:
    module, x = With(change).eval(), torch.randn(1, TOKENS, WIDTH)
    with torch.no_grad(), _patch(module) as patch:
        out = module(x)
        assert _state(patch) == "refused"
        patch.remove()
        assert torch.equal(out, module(x))
    assert type(vars(module).get("last", x)) is Tensor


# --- modules that come and go ---


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
        for module, include, state in ((child, "", "chunked"), (whole, "", "waiting"), (outer, "0", "chunked")):
            expected = module(x)
            with _patch(module, include=include) as patch:
                for _ in range(4):
                    torch.testing.assert_close(module(x), expected)
                assert _state(patch) == state
                assert _why(patch)
    torch._dynamo.reset()


def test_dropout_around_a_module_that_is_trained_does_not_matter() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.ffn, self.after = nn.Dropout(0.5), Ffn(), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.ffn(self.before(x)))

    block, x = Block().train(), torch.randn(2, TOKENS, WIDTH, requires_grad=True)
    torch.manual_seed(5)
    (expected,) = torch.autograd.grad(block(x).square().sum(), x)
    with _patch(block, include="ffn") as patch:
        torch.manual_seed(5)
        (grad,) = torch.autograd.grad(block(x).square().sum(), x)
        assert _state(patch) == "chunked"
    torch.testing.assert_close(grad, expected)
    inside = nn.Sequential(Ffn(), nn.Dropout(0.5)).train()
    with _patch(inside) as patch:
        inside(x)
        assert _state(patch) == "refused"


# --- backward passes written in Python ---


class Product(torch.autograd.Function):
    """A weight made of two, with its own backward pass."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, two: Tensor) -> Tensor:
        ctx.save_for_backward(one, two)
        return one * two

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        one, two = ctx.saved_tensors
        return grad * two, grad * one


class Clipped(Product):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        one, two = ctx.saved_tensors
        grad = grad / grad.norm()
        return grad * two, grad * one


@pytest.mark.torch_2_5
@pytest.mark.parametrize(("function", "state"), [(Product, "chunked"), (Clipped, "refused")])
def test_a_weights_own_backward_pass_is_tried(function: type[Product], state: str) -> None:
    scale = {name: nn.Parameter(torch.randn(WIDTH)) for name in ("one", "two")}
    module, x = With(lambda m, x: x * function.apply(m.one, m.two), **scale), torch.randn(2, TOKENS, WIDTH)
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    with _patch(module) as patch:
        grads = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
        assert _state(patch) == state, _why(patch)
    for grad, wanted in zip(grads, expected):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-3)


class _LoggedStream(io.TextIOWrapper):
    """A stream that keeps what is written to it, as hosts put one in place of ``sys.stderr``."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")
        self.lines: list[str] = []

    def write(self, text: str) -> int:
        self.lines.append(text)
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
        assert _state(patch) == "chunked", _why(patch)
