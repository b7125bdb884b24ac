"""Int8Binding: attached and detached again and again, on plain modules."""

import gc
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from attn_support.oracle import error_of
from torch import Tensor, nn

from pascal_attn_core.int8.binding import Int8Binding
from pascal_attn_core.int8.exchange import Exchange, FloatWeight, Source
from pascal_attn_core.int8.weight import Int8Weight, LowRank
from pascal_attn_core.reference.int8_rows import quantize_rows


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).eval().requires_grad_(False)


def inputs(seed: int = 1, rows: int = 32) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))


def codes_of(model: nn.Module) -> list[Tensor]:
    return [module.weight.matrix.codes for module in model if isinstance(getattr(module, "weight", None), Int8Weight)]


def state_of(model: nn.Module) -> dict[str, tuple[int, int, Tensor]]:
    """Each parameter's identity, its storage and a copy of its values."""
    return {name: (id(p), p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}


def assert_same(model: nn.Module, before: dict[str, tuple[int, int, Tensor]]) -> None:
    after = state_of(model)
    assert after.keys() == before.keys()
    for name, (identity, pointer, values) in before.items():
        assert after[name][:2] == (identity, pointer), name
        assert torch.equal(after[name][2], values), name
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._state_dict_hooks


def test_attached_again_it_only_rounds() -> None:
    model, x = network(), inputs()
    binding = Int8Binding(max_error=0.05)
    binding.attach(model)
    first, codes = model(x), codes_of(model)
    binding.detach(model)
    binding.attach(model)
    assert all(torch.equal(a, b) for a, b in zip(codes, codes_of(model), strict=True)), "without any call"
    assert torch.equal(model(x), first)
    with torch.no_grad():
        binding.detach(model)
        model[0].weight.mul_(-1)
        binding.attach(model)
    assert torch.equal(codes_of(model)[0], -codes[0])


def test_copies_of_a_model_have_layers_of_their_own_and_none_is_kept_alive() -> None:
    binding = Int8Binding(max_error=0.05)
    models = [network(), network(1)]
    for model in models:
        binding.attach(model)
        model(inputs())
    assert not torch.equal(*(codes_of(model)[0] for model in models))
    assert all(binding.report(model).count("on") == 2 for model in models)
    watched = weakref.ref(models.pop()[0])
    del model
    gc.collect()
    assert watched() is None
    assert binding.report(models[0]).count("on") == 2


class Kept(Source):
    """A host that has something else beside or instead of the parameter, or fails."""

    def __init__(self, error: Exception | None = None, lora: LowRank | None = None, **fields: Any):
        self.error, self.lora, self.fields = error, lora, fields

    def read(self, module: nn.Module, device: torch.device) -> FloatWeight:
        if self.error:
            raise self.error
        whole = "matrix" in self.fields
        return FloatWeight(**self.fields) if whole else replace(super().read(module, device), **self.fields)


def test_an_adapter_stays_in_float_beside_the_base_weight() -> None:
    model, x = network(), inputs()
    base = model[0].weight.detach().clone()
    generator = torch.Generator().manual_seed(3)
    down, up = torch.randn(4, 64, generator=generator), torch.randn(128, 4, generator=generator)
    adapter = LowRank(down, up * 0.02)
    with torch.no_grad():
        model[0].weight += adapter.matrix()
    before, exact = state_of(model), model(x)
    binding = Int8Binding(max_error=0.05, exclude="2")
    binding.attach(model, lambda name, module: Kept(matrix=base, original=base, lora=adapter))
    ours = model(x)
    weight = model[0].weight
    assert torch.equal(weight.matrix.codes, quantize_rows(base, weight.matrix.rotation).codes)
    assert 1e-4 < error_of(ours, exact) < 0.03
    product = F.linear(x, base, model[0].bias)
    assert error_of(model[0](x) - adapter(x), product) < 0.03
    assert error_of(weight + 0.0, before["0.weight"][2]) < 1e-6, "for every other operator it is the whole weight"
    assert torch.equal(model.state_dict()["0.weight"], before["0.weight"][2])
    binding.detach(model)
    assert_same(model, before)


class Patient(Source):
    """A host that can work with a weight in host memory, or not."""

    def __init__(self, is_patient: bool):
        self.is_patient, self.asked = is_patient, 0

    def stays_in_host_memory(self, module: nn.Module) -> bool:
        self.asked += 1
        return self.is_patient


@pytest.mark.parametrize("is_patient", [False, True])
def test_a_weight_that_its_device_has_no_room_for_stays_in_host_memory_if_the_host_can_do_with_that(
    is_patient: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    before = state_of(model)
    sources = {"0": Patient(is_patient), "2": Patient(True)}
    bound = Int8Binding(max_error=0.05)
    bound.attach(model, lambda name, module: sources[name])
    model(inputs())
    monkeypatch.setattr(Exchange, "bring_back", Mock(side_effect=RuntimeError("CUDA error: out of memory")))
    if is_patient:
        bound.detach(model)
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            bound.detach(model)
    assert [source.asked for source in sources.values()] == [1, 1], "one that fails does not keep the others"
    assert_same(model, before)
    assert ("0: its float weight stays in host memory" in caplog.text) == is_patient


def test_a_layer_that_there_is_no_memory_to_round_stays_in_float_for_that_load() -> None:
    model, x = network(), inputs()
    before = state_of(model)
    bound = Int8Binding(max_error=0.05)
    bound.attach(model)
    first = model(x)
    short = Kept(RuntimeError("CUDA error: out of memory"))
    bound.attach(model, lambda name, module: short if name == "2" else Source())
    model(x)
    report = bound.report(model)
    assert [line.state for line in report.lines] == ["on", "refused"]
    assert report.lines[1].why == "out of memory while rounding it"
    assert len(codes_of(model)) == 1
    bound.attach(model)
    assert torch.equal(model(x), first)
    assert bound.report(model).count("on") == 2
    bound.detach(model)
    assert_same(model, before)


def test_an_accident_in_the_middle_leaves_the_model_as_it_was() -> None:
    model = network()
    before = state_of(model)
    binding = Int8Binding(max_error=0.05)
    binding.attach(model)
    model(inputs())
    broken = Kept(RuntimeError("an accident"))
    with pytest.raises(RuntimeError, match="an accident"):
        binding.attach(model, lambda name, module: broken if name == "2" else Source())
    assert_same(model, before)


def test_attributes_and_bias_are_overridden_while_it_is_in() -> None:
    model, x = network(), inputs()
    layer = model[0]
    layer.casts, bias = True, layer.bias
    binding = Int8Binding(max_error=0.05, exclude="2")
    binding.attach(model, lambda name, module: Kept(bias=torch.zeros(128), attributes={"casts": False, "extra": 1}))
    assert layer.casts is True, "not before it is in"
    model(x)
    assert (layer.casts, layer.extra) == (False, 1)
    assert not layer.bias.any()
    binding.detach(model)
    assert (layer.casts, hasattr(layer, "extra")) == (True, False)
    assert layer.bias is bias


@pytest.mark.parametrize("weights", ["host", "keep"])
def test_float_weights_that_leave_a_device_make_room_for_int8_weights_of_others(weights: str) -> None:
    """The second layer's float weight is elsewhere; its int8 weight takes what the first one's has left."""
    model, x = network(), inputs()
    bound = Int8Binding(max_error=0.05, weights=weights)
    bound.attach(model)
    first = model(x)
    bound.detach(model)
    sizes = [4 * 64 * 128, 64 * 128 + 4 * 128, 64 * 128 + 4 * 64]  # float, int8 with its scales, int8 of the second
    values = model[2].weight.detach()
    model[2].weight = nn.Parameter(torch.empty(64, 128, device="meta"), requires_grad=False)
    bound.attach(model, lambda name, module: Kept(matrix=values, original=values) if name == "2" else Source())
    room = bound.options.room[torch.device("cpu")]
    assert room == (sizes[0] - sizes[1] - sizes[2] if weights == "host" else 0)
    assert torch.equal(model(x), first)


NAMES = {
    "off": "input_blocks.1.0.emb_layers.1 time_embed.0 label_emb.0.0 "  # ComfyUI's UNets
    "time_projection.1 distilled_guidance_layer.layers.0.in_layer "  # Wan, Chroma
    "double_blocks.0.img_mod.lin joint_blocks.0.x_block.adaLN_modulation.1",  # Flux, SD3
    "waiting": "input_blocks.4.1.transformer_blocks.0.attn1.to_q middle_block.1.transformer_blocks.0.ff.net.0.proj "
    "double_blocks.0.img_attn.qkv double_blocks.0.txt_mlp.0 single_blocks.3.linear2 "
    "joint_blocks.0.context_block.mlp.fc1 blocks.0.cross_attn.k_img layers.5.feed_forward.w1",
}


@pytest.mark.parametrize(("name", "state"), [(name, state) for state in NAMES for name in NAMES[state].split()])
def test_layers_of_the_repeated_blocks_are_taken_and_those_that_set_the_timestep_left(name: str, state: str) -> None:
    model: nn.Module = nn.Linear(64, 64)
    for part in reversed(name.split(".")):
        model = nn.ModuleDict({part: model})
    (line,) = Int8Binding(max_error=0.05).report(model).lines
    assert (line.name, line.state) == (name, state)
