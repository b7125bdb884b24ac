"""A module of known code is noted once: the next call of its kind runs it on each slice, unless anything changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from attn_support.ffn_zoo import CASES
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pascal_attn_core.ffn import forward, known, patch_ffn
from pascal_attn_core.int8 import patch_linear_int8
from pascal_attn_core.observe.memory import measure

TOKENS, WIDTH = 64, 16


def _known(linear: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
    layers = norm, linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.5), linear(64, WIDTH)
    return nn.Sequential(*layers).eval().requires_grad_(False)


def _patched(module: nn.Module, **options: Any) -> Any:
    return patch_ffn(module, **{"include": "", "num_chunks": 4, "min_tokens": 2, **options})


@contextmanager
def _noted() -> Iterator[list[Any]]:
    """The graphs that are made in the block."""
    made = []
    with mock.patch.object(forward, "Graph", lambda *given: made.append(graph := _GRAPH(*given)) or graph):
        yield made


_GRAPH = forward.Graph


def test_the_second_call_is_not_noted_and_follows_the_weights() -> None:
    module, x = _known(), torch.randn(2, TOKENS, WIDTH)
    plain = copy.deepcopy(module)
    with _patched(module) as patch:
        module(x)
        with _noted() as graphs:
            for change in (
                lambda m: m[1].weight.mul_(2),
                lambda m: setattr(m[1].weight, "data", torch.ones_like(m[1].weight)),
                lambda m: setattr(m[4], "bias", nn.Parameter(torch.ones(WIDTH), requires_grad=False)),
            ):
                change(module), change(plain)
                for given in (x, x.mT.contiguous().mT):
                    torch.testing.assert_close(module(given), plain(given))
            torch.testing.assert_close(module(input=x), plain(x))
        assert graphs == []
        assert patch.report().lines[0].why.startswith("4 slices of 16")


def test_a_call_that_is_not_noted_takes_no_more_memory() -> None:
    module, x = _known(), torch.randn(2, 512, WIDTH)
    with torch.no_grad(), _patched(module):
        first, second = measure(module, x), measure(module, x)
    assert second.extra_bytes <= first.extra_bytes


def _set(place: Any, name: str, value: Any) -> Callable[[Any], Any]:
    """A change of an attribute of a class or of torch's functions."""
    return lambda module: mock.patch.object(place, name, value)


def _of(name: int, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A change of a layer, which stays."""
    return lambda module: nullcontext(change(module[name]))


def _mixing(*given: Tensor, **options: Any) -> Tensor:
    return given[-1].flip(-2) * 2


def _whole(layer: nn.LayerNorm) -> None:
    layer.normalized_shape = (TOKENS, WIDTH)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a function of torch": _set(F, "gelu", lambda x, **options: _mixing(x)),
    "every call": _set(nn.Module, "__call__", lambda self, *given, call=nn.Module.__call__: call(self, *given).flip(1)),
    "a layer": lambda module: nullcontext(module.__setitem__(2, nn.Softmax(1))),
    "a layer more": lambda module: nullcontext(module.append(nn.Softmax(1))),
    "what a layer is set to": _of(0, _whole),
    "a random layer": _of(3, lambda layer: layer.train()),
}  # fmt: skip


@pytest.mark.parametrize("first", [True, False], ids=["before the first call", "after it"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_counts_in_the_very_next_call(change: Callable[[Any], Any], first: bool) -> None:
    module, x = _known(), torch.randn(2, TOKENS, WIDTH)
    plain = copy.deepcopy(module)
    with _patched(module) as patch:
        if not first:
            module(x), module(x)
        with change(module), change(plain):
            for _ in range(2):
                torch.manual_seed(1)
                out = module(x)
                torch.manual_seed(1)
                torch.testing.assert_close(out, plain(x))
    assert patch is not None


def test_what_a_layer_is_set_to_belongs_to_the_state() -> None:
    """On a GPU the random numbers of slices are others than those of the whole; on a CPU they may be the same."""
    for change in (lambda m: m[3].train(), lambda m: setattr(m[3], "p", 0.25), lambda m: setattr(m[0], "eps", 0.5)):
        module = _known()
        before = known.state_of(module)
        change(module)
        assert known.state_of(module) != before


SEEN: list[int] = []


def _look(*given: Any) -> None:
    SEEN.extend(tensor.shape[-2] for tensor in given[-1:] if isinstance(tensor, Tensor))


def _looking(layer: Any, x: Tensor | None = None) -> Tensor:
    x = layer if x is None else x
    _look(x)
    return torch.nn.functional.gelu(x)


class _Looking(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                _look(args[0])
            return func(*args, **(kwargs or {}))


class _Gelu(nn.GELU):
    __call__ = _looking


def _weight_of_class(layer: nn.Linear) -> None:
    layer._parameters["weight"] = layer.weight.detach().as_subclass(_Looking)


@contextmanager
def _hook_of_all(module: nn.Module) -> Iterator[None]:
    hook = nn.modules.module.register_module_forward_hook(
        lambda layer, args, out: _look(out) if type(layer) is nn.GELU else None
    )
    try:
        yield
    finally:
        hook.remove()


OBSERVERS: dict[str, Callable[[Any], Any]] = {
    "a forward": _of(2, lambda layer: setattr(layer, "forward", _looking)),
    "a forward of the whole": lambda module: nullcontext(setattr(module, "forward", _looking)),
    "a compiled layer": _of(2, lambda layer: setattr(layer, "_compiled_call_impl", _looking)),
    "the name of an attribute": _of(2, lambda layer: setattr(layer, "forward", vars(layer).pop("own", None))),
    "a forward of a class": _set(nn.GELU, "forward", _looking),
    "a call of a class": _of(2, lambda layer: setattr(layer, "__class__", _Gelu)),
    "a hook": _of(2, lambda layer: layer.register_forward_hook(lambda m, args, out: _look(out))),
    "a hook before": _of(2, lambda layer: layer.register_forward_pre_hook(lambda m, args: _look(*args))),
    "a hook of all layers": _hook_of_all,
    "a weight": _of(1, _weight_of_class),
}


@pytest.mark.parametrize("patched_first", [False, True])
@pytest.mark.parametrize("observer", OBSERVERS.values(), ids=OBSERVERS)
def test_whoever_looks_at_a_layer_sees_all_tokens_once(observer: Callable[[Any], Any], patched_first: bool) -> None:
    module, x = _known(), torch.randn(2, TOKENS, WIDTH)
    module[2].own = _looking
    with ExitStack() as stack:
        if patched_first:
            stack.enter_context(_patched(module))
            module(x), module(x)
        stack.enter_context(observer(module))
        if not patched_first:
            stack.enter_context(_patched(module))
        SEEN.clear()
        module(x), module(x)
        assert set(SEEN) == {TOKENS}


def test_gradients_that_are_wanted_from_now_on() -> None:
    module, x = _known(), torch.randn(2, TOKENS, WIDTH)
    with _patched(module):
        module(x)
        module[1].weight.requires_grad_()
        with _noted() as graphs:
            for _ in range(2):
                found = torch.autograd.grad(module(x).square().sum(), module[1].weight)
        assert len(graphs) == 2
        expected = torch.autograd.grad(module.forward.whole(x).square().sum(), module[1].weight)
    torch.testing.assert_close(found, expected)


class _Counting(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is F.linear
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("within", [_Counting, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["mode", "autocast"])
def test_calls_under_a_mode_or_autocast_are_noted(within: Callable[[], Any]) -> None:
    module, x = _known(), torch.randn(2, TOKENS, WIDTH)
    with _patched(module), _noted() as graphs:
        module(x)
        for _ in range(2):
            with within() as mode:
                out = module(x)
                torch.testing.assert_close(out, module.forward.whole(x))
            assert mode is None or isinstance(mode, torch.autocast) or mode.count == 4  # ours, and that beside it
    assert len(graphs) == 3


def test_layers_that_bring_their_weights_are_called_for_each_slice() -> None:
    module, x = _known(), torch.randn(2, TOKENS, WIDTH)
    with _patched(module):
        module(x)
        with patch_linear_int8(module, include=nn.Linear) as patch, _noted() as graphs:
            module(x)  # is measured
            for _ in range(3):
                torch.testing.assert_close(module(x), module.forward.whole(x))
            assert patch.report().count("on") == 2
        assert len(graphs) == 1
        for _ in range(2):
            torch.testing.assert_close(module(x), module.forward.whole(x))


@pytest.mark.parametrize("case", [case for case in CASES if case.state == "on"], ids=lambda case: case.name)
def test_code_that_is_not_known_is_noted_each_time(case: Any) -> None:
    module, x = case.make().eval(), torch.randn(2, TOKENS, WIDTH)
    is_known = case.name in ("Wan's Sequential", "in-place inside")  # all layers are those of torch
    with torch.no_grad(), _patched(module), _noted() as graphs:
        module(x)
        before = len(graphs)
        module(x)
    assert len(graphs) == (before if is_known else 2 * before)


def test_errors_in_slices_are_those_of_the_module() -> None:
    module, x = _known(), torch.randn(2, TOKENS, WIDTH)
    with _patched(module):
        module(x)
        module[4].weight.data = torch.ones(WIDTH, 63)
        with pytest.raises(RuntimeError, match="shapes cannot"):
            module(x)


def test_memory_that_is_free_again_makes_calls_whole() -> None:
    module, x = _known(), torch.randn(2, TOKENS, WIDTH)
    with _patched(module, num_chunks=None, budget_mib=1e-3) as patch:
        module(x), module(x)
        assert "slices" in patch.report().lines[0].why
        patch._binding.settings.budget_mib = 64.0
        torch.testing.assert_close(module(x), module.forward.whole(x))
        assert list(patch._binding._site(module).used.values())[-1].sizes == ()
