"""Replacements of attention in the modules of VAEs and text encoders, without ComfyUI."""

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.comfy.stub import Patcher, StubHost, host_attention, make_engine, node_module, vae_attention
from torch import Tensor, nn

objects, attention, sites = map(node_module, ("comfy.objects", "patches.replacements", "comfy.sites"))
Scope = node_module("patches.scope").Scope
pytestmark = pytest.mark.usefixtures("stub_host")


optimized_attention = host_attention


def optimized_attention_for_device(device: Any, mask: bool = False, small_input: bool = False) -> Any:
    return optimized_attention


class Held(nn.Module):
    """A VAE's block, which holds its attention function."""

    def __init__(self) -> None:
        super().__init__()
        self.optimized_attention = vae_attention

    def forward(self, x: Tensor) -> Tensor:
        return self.optimized_attention(x, x * 2, x + 1)


class Given(nn.Module):
    """A text encoder's block, which is given it."""

    def forward(self, x: Tensor, mask: Any = None, optimized_attention: Any = None) -> Tensor:
        return optimized_attention(x, x, x, 2, mask)


class Giver(nn.Module):
    """Hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Given()

    def forward(self, x: Tensor, mask: Any = None, optimized_attention: Any = None) -> Tensor:
        return self.inner(x, mask, optimized_attention)


class Encoder(nn.Module):
    """Asks for the function and hands it down."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Giver()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, None, optimized_attention_for_device(x.device))


class ByName(nn.Module):
    def forward(self, x: Tensor, *, times: int = 2) -> Tensor:
        def heads() -> int:
            return times

        return super().extra_repr() or optimized_attention(x, x, x, heads())


class ByDevice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return optimized_attention_for_device(x.device, small_input=True)(x, x, x, heads=2)


def helper(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x)


class ByHelper(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return helper(x)


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


@pytest.mark.parametrize("positions", [(9,), (3, 4), (2, 3, 4)], ids=["sound", "picture", "video"])
def test_a_vaes_attention_over_any_positions(positions: tuple[int, ...]) -> None:
    engine = make_engine(route="tiled")
    query, key, value = torch.randn(3, 2, 8, *positions).unbind()
    ours = attention.Replacement(engine, Scope(), "mid").channels_first(vae_attention)
    torch.testing.assert_close(ours(query, key, value), vae_attention(query, key, value))
    shape = (2, 1, torch.Size(positions).numel(), 8)
    assert [(kind.block, kind.query) for kind in engine.run.tallies] == [("mid", shape)]


def test_a_vae_call_that_is_left_goes_to_the_function_that_was_there() -> None:
    engine = make_engine(min_keys=100)
    query = torch.randn(1, 8, 9)
    ours = attention.Replacement(engine, Scope(), "mid").channels_first(lambda *args, **kwargs: (args, kwargs))
    assert ours(query, query, query) == ((query, query, query), {})
    assert ours(query, query, query, scale=2)[1] == {"scale": 2}
    assert engine.run.count("passed to ComfyUI") == 2


def test_a_given_attention_is_replaced_wherever_it_stands() -> None:
    engine, x, mask = make_engine(), torch.randn(1, 6, 8), torch.randn(6, 6)
    ours = attention.Replacement(engine, Scope(), "layer").given(2, Given().forward)
    expected = optimized_attention(x, x, x, 2, mask)
    torch.testing.assert_close(ours(x, mask, optimized_attention), expected)
    torch.testing.assert_close(ours(x, mask, optimized_attention=optimized_attention), expected)
    assert [(kind.block, tally.count) for kind, tally in engine.run.tallies.items()] == [("layer", 2)]
    seen: list[Any] = []
    without = attention.Replacement(engine, Scope(), "layer").given(1, lambda *args, **more: seen.append((args, more)))
    without("x")
    without("x", optimized_attention=None)
    assert seen == [(("x",), {}), (("x",), {"optimized_attention": None})], "it is called as it is"


@pytest.mark.parametrize("kind", [ByName, ByDevice])
def test_attention_looked_up_by_its_name_is_replaced_in_a_copy(kind: type[nn.Module]) -> None:
    engine, module, x = make_engine(), kind(), torch.randn(1, 6, 8)
    assert sites.host_names(kind)
    ours = attention.Replacement(engine, Scope(), "layer").named(module.forward)
    torch.testing.assert_close(ours(x), module(x))
    assert engine.run.count("taken") == 1  # the module's own forward is not ours


def test_the_copy_hears_of_later_changes_to_the_file_it_was_made_in(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, module, x = make_engine(min_keys=100), ByName(), torch.randn(1, 6, 8)
    ours = attention.Replacement(engine, Scope(), "layer").named(module.forward)
    monkeypatch.setitem(globals(), "optimized_attention", lambda *args, **kwargs: "another")
    assert ours(x) == "another"


def test_a_forward_that_another_pack_replaced_is_left_alone() -> None:
    engine, x = make_engine(), torch.randn(1, 6, 8)
    ours = attention.Replacement(engine, Scope(), "layer").named(lambda x: "theirs")
    assert ours(x) == "theirs"
    assert engine.run.count() == 0


def test_a_whole_call_is_one_run_and_is_watched(stub_host: StubHost) -> None:
    engine, seen, x = make_engine(), [], torch.randn(1, 2, 6, 8)
    sites = attention.Sites(engine, nn.Module(), lambda *_: ())
    ours = attention.whole_call(lambda x, y: helper(x), sites, lambda *what: seen.append(what), catches=True)
    out = ours(x, y=1)
    assert seen == [((x,), {"y": 1}, out)]
    assert stub_host.said == ["Model: 1 calls, 1 taken (torch 1), 0 passed to ComfyUI"]
    assert not engine.is_running


def test_every_kind_of_site_is_found_once() -> None:
    blocks = {"held": Held(), "encoder": Encoder(), "name": ByName(), "helper": ByHelper(), "plain": Plain()}
    model = nn.ModuleDict(blocks)
    assert [name for name, module in model.named_modules() if sites.attributes(module)] == ["held"]
    assert [(name, at) for name, _, at in sites.argument_leaves(model)] == [("encoder.layer.inner", 2)]
    known = ["held", "encoder.layer.inner"]
    assert sites.calls_directly(model, known) == ["name", "helper"]
    assert sites.host_names(ByName) == {"optimized_attention"}
    assert sites.host_names(Given) == sites.host_names(Plain) == set()
    assert sites.calls_directly(nn.Sequential(nn.MultiheadAttention(8, 2)), []) == [], "torch's own modules are none"


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
    patcher = Patcher(Plain(), {NAME: lambda x: x + 1})
    for _ in range(3):
        objects.replace_functions(patcher, lambda model: {NAME: doubled})
    assert patcher.object_patches[NAME](3) == 8
    assert objects.is_ours(patcher.object_patches[NAME])
    assert objects.replaced_by_others(patcher.model, [NAME]) == [NAME], "it is not put in yet"
    objects.replace_functions(patcher, lambda model: {})
    assert patcher.object_patches[NAME](3) == 4


@pytest.mark.usefixtures("_patcher_extension")
def test_another_packs_wrapper_of_ours_is_not_taken_off() -> None:
    patcher = Patcher(Plain(), {NAME: lambda x: x})
    objects.replace_functions(patcher, lambda model: {NAME: doubled})
    ours = patcher.object_patches[NAME]

    def theirs(x: int) -> int:
        return ours(x) + 100

    theirs.__dict__.update(vars(ours))  # as functools.wraps does
    assert not objects.is_ours(theirs)
    patcher.object_patches[NAME] = theirs
    objects.replace_functions(patcher, lambda model: {NAME: doubled})
    assert patcher.object_patches[NAME](1) == 2 * 102


@pytest.mark.usefixtures("_patcher_extension")
def test_a_clone_with_a_model_of_its_own_gets_replacements_of_that_model() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    patcher = Patcher(first)
    objects.replace_functions(patcher, lambda model: {NAME: doubled})
    x = torch.ones(1, 1)
    assert patcher.clone().object_patches[NAME] is patcher.object_patches[NAME]
    torch.testing.assert_close(patcher.clone(second).object_patches[NAME](x), 2 * second(x))
    torch.testing.assert_close(patcher.object_patches[NAME](x), 2 * first(x))
