"""Replacements of attention in the modules of VAEs and text encoders, without ComfyUI."""

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.comfy.stub import Patcher, StubHost, host_attention, make_engine, node_module, vae_attention
from torch import Tensor, nn

objects, attention = map(node_module, ("comfy.objects", "patches.replacements"))
Scope, OVERRIDE = node_module("patches.override").Scope, node_module("comfy.by_name").OVERRIDE
pytestmark = pytest.mark.usefixtures("stub_host")


class Held(nn.Module):
    """A VAE's block, which holds its attention function."""

    def __init__(self) -> None:
        super().__init__()
        self.optimized_attention = vae_attention

    def forward(self, x: Tensor) -> Tensor:
        return self.optimized_attention(x, x * 2, x + 1)


@pytest.mark.parametrize("positions", [(9,), (3, 4), (2, 3, 4)], ids=["sound", "picture", "video"])
def test_a_vaes_attention_over_any_positions(positions: tuple[int, ...]) -> None:
    engine = make_engine(route="tiled")
    query, key, value = torch.randn(3, 2, 8, *positions).unbind()
    ours = attention.channels_first(engine, Scope(), "mid", vae_attention)
    torch.testing.assert_close(ours(query, key, value), vae_attention(query, key, value))
    shape = (2, 1, torch.Size(positions).numel(), 8)
    assert [(kind.block, kind.query) for kind in engine.run.tallies] == [("mid", shape)]


@pytest.fixture
def host_functions(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    """A function of the host's, in a wrapper as the host's own, in a module of the name of the host's."""

    def wrap_attn(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Tensor:
            options = kwargs.get("transformer_options") or {}
            if OVERRIDE in options:
                return options[OVERRIDE](func, *args, **kwargs)
            return func(*args, **kwargs)

        return wrapper

    module = types.ModuleType("comfy.ldm.modules.attention")
    wrapped = module.optimized_attention = module.attention_pytorch = wrap_attn(host_attention)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return wrapped


def test_calls_of_the_hosts_function_are_caught_within_a_whole_call_alone(host_functions) -> None:
    engine, x = make_engine(), torch.randn(1, 6, 8)
    variable = host_functions.__closure__[0]  # type: ignore[index]
    assert variable.cell_contents is host_attention

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            other = threading.Thread(target=host_functions, args=(x, x, x, 2))  # of a model without the patch
            other.start()
            other.join()
            return host_functions(x, x, x, 2)

    model = nn.ModuleDict({"layer": Layer()})
    found = attention.Sites(engine, model, lambda module: [("forward", attention.located)] * isinstance(module, Layer))
    layer = found.replacements["layer.forward"](model["layer"].forward)

    def whole(x: Tensor, **options: Any) -> Tensor:
        return layer(x) + host_functions(x, x, x, 2, **options)

    ours = attention.whole_call(whole, found, lambda *_: None)
    torch.testing.assert_close(ours(x), 2 * host_attention(x, x, x, 2))
    ours(x, transformer_options={OVERRIDE: lambda func, *args, **kwargs: func(*args, **kwargs)})
    with pytest.raises(ZeroDivisionError):
        ours(x, transformer_options={OVERRIDE: lambda func, *args, **kwargs: 1 / 0})
    assert variable.cell_contents is host_attention, "it is as it was, after an error too"
    first, second, _ = node_module("engine.runs").remembered()
    assert [kind.block for kind in first.tallies] == ["layer", "call 2"]
    assert [kind.block for kind in second.tallies] == ["layer", "call 2"]


def test_a_whole_call_is_one_run_and_is_watched(stub_host: StubHost) -> None:
    engine, seen, x = make_engine(), [], torch.randn(1, 2, 6, 8)
    sites = attention.Sites(engine, nn.Module(), lambda module: ())
    ours = attention.whole_call(
        lambda x, y: F.scaled_dot_product_attention(x, x, x), sites, lambda *what: seen.append(what)
    )
    out = ours(x, y=1)
    assert seen == [((x,), {"y": 1}, out)]
    assert stub_host.said == ["Model: 1 call, 1 taken (torch 1), 0 passed to ComfyUI"]
    assert not engine.is_running


class T5LayerSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2)


def test_the_modules_that_compute_attention_are_found() -> None:
    projections = nn.ModuleDict({"to_q": nn.Linear(8, 8), "to_k": nn.Linear(8, 8)})
    model = nn.ModuleDict({"held": Held(), "layer": T5LayerSelfAttention(), "named": projections, "plain": nn.ReLU()})
    assert [name for name, module in model.named_modules() if objects.attributes(module)] == ["held"]
    assert [name for name, module in model.named_modules() if objects.is_innermost(module)] == ["layer.inner", "named"]


@pytest.fixture
def _patcher_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("comfy.patcher_extension")
    module.CallbacksMP = types.SimpleNamespace(ON_CLONE="on_clone")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "comfy", types.ModuleType("comfy"))
    monkeypatch.setitem(sys.modules, "comfy.patcher_extension", module)


def doubled(previous: Any) -> Any:
    return lambda *args: 2 * previous(*args)


NAME = "forward"


@pytest.mark.usefixtures("_patcher_extension")
def test_replaced_twice_it_does_not_stack_and_keeps_what_was_below() -> None:
    patcher = Patcher(nn.ReLU(), {NAME: lambda x: x + 1})
    for _ in range(3):
        objects.replace_functions(patcher, lambda model: {NAME: doubled})
    assert patcher.object_patches[NAME](3) == 8
    assert objects.is_ours(patcher.object_patches[NAME])
    assert objects.replaced_by_others(patcher.model, [NAME]) == [NAME], "it is not put in yet"
    objects.replace_functions(patcher, lambda model: {})
    assert patcher.object_patches[NAME](3) == 4


@pytest.mark.usefixtures("_patcher_extension")
def test_a_clone_with_a_model_of_its_own_gets_replacements_of_that_model() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    patcher = Patcher(first)
    objects.replace_functions(patcher, lambda model: {NAME: doubled})
    x = torch.ones(1, 1)
    assert patcher.clone().object_patches[NAME] is patcher.object_patches[NAME]
    torch.testing.assert_close(patcher.clone(second).object_patches[NAME](x), 2 * second(x))
    torch.testing.assert_close(patcher.object_patches[NAME](x), 2 * first(x))
