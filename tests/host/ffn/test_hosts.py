"""Feed-forward slicing beside others who lay hands on a module: peft, accelerate, diffusers, torch.compile, pickle."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attn_support.fresh import run
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pascal_attn_core.ffn import FfnPatch, forward, graph, patch_ffn

attention = pytest.importorskip("diffusers.models.attention")


class Block(nn.Module):
    """A feed-forward module inside a model, as hosts see it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.ff = attention.FeedForward(16, activation_fn="gelu-approximate")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ff(self.norm(x))


def _patch(model: nn.Module, **options: object) -> FfnPatch:
    return patch_ffn(model, **{"chunk_tokens": 16, "min_tokens": 8, **options})  # type: ignore[arg-type]


def _states(patch: FfnPatch) -> list[str]:
    return [line.state for line in patch.report().lines]


def _lora(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["proj", "2"], lora_alpha=4))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return adapted


def test_lora_added_before_or_after_gives_the_same_and_unloads() -> None:
    x, model = torch.randn(2, 64, 16), Block().eval()
    before = _lora(copy.deepcopy(model)).eval()
    after_patch = copy.deepcopy(model)
    with torch.no_grad(), _patch(after_patch) as patch:
        after_patch(x)  # proven without LoRA
        after = _lora(after_patch).eval()
        after.load_state_dict(before.state_dict())
        expected = before(x)
        assert not torch.allclose(expected, model(x), atol=1e-3)
        torch.testing.assert_close(after(x), expected)
        assert _states(patch) == ["on"]
        with _patch(before) as other:
            torch.testing.assert_close(before(x), expected)
            assert _states(other) == ["on"]
        unloaded = after.unload()
        torch.testing.assert_close(unloaded(x), model(x))
    assert "forward" not in unloaded.ff.__dict__


def _hook_of(host: str, ff: nn.Module, seen: list[torch.Size]) -> tuple[Callable, Callable]:
    """Two functions: one adds a hook that notes the shapes that the module is called with, the other removes it."""
    hooks = pytest.importorskip(host)

    class Counting(hooks.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: object) -> object:
            seen.append(args[0].shape)
            return args, kwargs

    if host == "accelerate.hooks":
        return lambda: hooks.add_hook_to_module(ff, Counting()), lambda: hooks.remove_hook_from_module(ff)
    registry = hooks.HookRegistry.check_if_exists_or_initialize(ff)
    return lambda: registry.register_hook(Counting(), "counting"), lambda: registry.remove_hook("counting")


@pytest.mark.parametrize("removed_first", [True, False])
@pytest.mark.parametrize("patched_first", [True, False])
@pytest.mark.parametrize("host", ["accelerate.hooks", "diffusers.hooks.hooks"])
def test_hooks_of_a_host_come_and_go(host: str, patched_first: bool, removed_first: bool) -> None:
    x, model, seen = torch.randn(1, 64, 16), Block().eval(), []
    add, remove = _hook_of(host, model.ff, seen)
    with torch.no_grad():
        expected = model(x)
        if not patched_first:
            add()
        patch = _patch(model)
        if patched_first:
            add()
        assert torch.equal(model(x), expected)
        assert seen == [x.shape]  # once for the call, not once for each slice
        assert _states(patch) == ["on"], patch.report().text()
        if removed_first:
            patch.remove()
            assert _count_slices(model.ff, lambda: model(x)) == 1
        remove()
        if not removed_first:
            assert _count_slices(model.ff, lambda: model(x)) == 4
            patch.remove()
        assert torch.equal(model(x), expected)
        assert _count_slices(model.ff, lambda: model(x)) == 1


@pytest.mark.parametrize("kind", ["geglu", "geglu-approximate", "gelu", "gelu-approximate", "swiglu", "linear-silu"])
def test_the_feed_forward_modules_of_diffusers_are_noted_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"ff": attention.FeedForward(16, activation_fn=kind)}).eval().requires_grad_(False)
    x, graphs, ff = torch.randn(2, 64, 16), [], model["ff"]
    monkeypatch.setattr(forward, "Graph", lambda *given: graphs.append(given) or graph.Graph(*given))
    expected = ff(x)
    with _patch(model):
        for given, named in (((x,), {}), ((x,), {}), ((), {"hidden_states": x})):
            torch.testing.assert_close(ff(*given, **named), expected)
        assert len(graphs) == 1
        for _ in range(2):  # one argument more
            torch.testing.assert_close(ff(x, other=1), expected)
        assert len(graphs) == 3
        first = type(ff.net[0])
        for name in {"gelu", "forward"} & vars(first).keys():
            with monkeypatch.context() as within:
                own = getattr(first, name)
                within.setattr(first, name, lambda self, x, own=own: own(self, x).flip(1))
                torch.testing.assert_close(ff(x), ff.forward.whole(x))


def test_hooked_models_need_no_import_of_ours_beside_patch_ffn() -> None:
    pytest.importorskip("accelerate")
    program = """
import sys, torch, accelerate
from torch import nn
from pascal_attn_core.ffn import patch_ffn
model, x = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).eval(), torch.randn(1, 64, 16)
with torch.no_grad():
    expected = model(x)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with patch_ffn(model, include="", chunk_tokens=16, min_tokens=8) as patch:
        for _ in range(2):
            torch.testing.assert_close(model(x), expected)
        assert patch.report().lines[0].state == "on", patch.report().text()
        assert all(parameter.is_meta for parameter in model.parameters())
assert not {"diffusers", "pascal_attn_core.diffusers"} & set(sys.modules)
"""
    run(program)


@pytest.mark.parametrize("is_cast", [True, False], ids=["layerwise casting", "group offloading of leaves"])
def test_weights_that_diffusers_brings_for_each_layer(is_cast: bool) -> None:
    hooks = pytest.importorskip("diffusers.hooks")
    x, model, cpu = torch.randn(1, 64, 16), Block().eval(), torch.device("cpu")
    if is_cast:
        dtypes = {"storage_dtype": torch.bfloat16, "compute_dtype": torch.float32}
        hooks.apply_layerwise_casting(model, **dtypes, skip_modules_pattern=("norm",))
    else:
        hooks.apply_group_offloading(model, onload_device=cpu, offload_device=cpu, offload_type="leaf_level")
    with torch.no_grad():
        expected = model(x)
        with _patch(model) as patch:
            for _ in range(2):
                assert torch.equal(model(x), expected)
            assert _states(patch) == ["on"], patch.report().text()
        assert torch.equal(model(x), expected)
    assert model.ff.net[2].weight.dtype == (torch.bfloat16 if is_cast else torch.float32)


def test_state_dict_keys_stay_and_pickles_hold_the_plain_model() -> None:
    x, model = torch.randn(1, 64, 16), Block().eval()
    keys, expected = list(model.state_dict()), model(x)
    with _patch(model):
        model(x)
        assert list(model.state_dict()) == keys
        buffer = io.BytesIO()
        torch.save(model, buffer)
    assert b"pascal_attn_core" not in buffer.getvalue()
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(x), expected)
    assert loaded.ff.forward.__self__ is loaded.ff


def test_deep_copies_are_without_the_patch() -> None:
    x, model = torch.randn(1, 64, 16), Block().eval()
    with torch.no_grad():
        expected = model(x)
        patch = _patch(model)
        copied = copy.deepcopy(model)
        for parameter in copied.ff.parameters():
            parameter.zero_()
        assert torch.equal(model(x), expected)
        assert torch.equal(copied(x), x)
        assert _count_slices(copied.ff, lambda: copied(x)) == 1
        patch.remove()


def test_somebody_elses_later_swap_lives_on(caplog: pytest.LogCaptureFixture) -> None:
    x, model = torch.randn(1, 64, 16), Block().eval()
    plain, patch = copy.deepcopy(model), _patch(model)
    ours = model.ff.forward
    model.ff.forward = lambda hidden: ours(hidden) * 2
    with torch.no_grad():
        model(x)
        patch.remove()
        assert "replaced while patched" in caplog.text
        torch.testing.assert_close(model(x) - x, 2 * (plain(x) - x))


def _count_slices(ff: nn.Module, call: Callable[[], object]) -> int:
    """How often the last linear layer is multiplied by."""
    width = ff.net[2].weight.shape[1]

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten.addmm.default and args[1].shape[1] == width
            return func(*args, **(kwargs or {}))

    with Counting() as counting:
        call()
    return counting.count
