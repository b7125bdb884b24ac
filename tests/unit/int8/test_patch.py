"""patch_linear_int8: which layers, how they decide, what hosts do to their weights, and that nothing is lost."""

import copy
import io
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.oracle import error_of
from torch import Tensor, nn

from pascal_attn_core.int8 import Int8Patch, Int8Weight, int8_linear, patch_linear_int8, quantize_rows
from pascal_attn_core.int8.layer import WEIGHTS
from pascal_attn_core.int8.measure import Errors, best_rotation

WIDTH = 64


class Block(nn.Module):
    """Residual, with a feed-forward part that chunking knows, and a layer that sets the scale of all."""

    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm_linear = nn.Linear(width, width)
        self.attn = nn.ModuleDict({"to_q": nn.Linear(width, width), "to_out": nn.Linear(width, width, bias=False)})
        self.ff = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.tiny = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn["to_out"](self.attn["to_q"](x * torch.tanh(self.norm_linear(x))))
        return x + self.ff(x) + self.tiny(x).mean()


class Model(nn.Module):
    def __init__(self, blocks: int = 2):
        super().__init__()
        self.proj_in = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x)
        return x


CHOSEN = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("attn.to_q", "attn.to_out", "ff.0", "ff.2")]


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval().requires_grad_(False)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 33, WIDTH, generator=torch.Generator().manual_seed(1))


def states(patch: Int8Patch) -> dict[str, str]:
    return {line.name: line.state for line in patch.report().lines}


def in_int8(patch: Int8Patch) -> list[str]:
    return [name for name, state in states(patch).items() if state == "on"]


def test_layers_of_the_blocks_are_chosen_and_the_others_named_with_a_reason(model: Model, x: Tensor) -> None:
    patch = patch_linear_int8(model)
    model(x)
    assert in_int8(patch) == CHOSEN
    left = {line.name: line.why for line in patch.report().of("off")}
    assert left["proj_in"] == "outside the repeated blocks"
    assert left["blocks.0.norm_linear"] == "every later layer depends on its few outputs"
    assert left["blocks.1.tiny"] == "fewer than 4096 weights"


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("*.ff.*", None, ["blocks.0.ff.0", "blocks.0.ff.2", "blocks.1.ff.0", "blocks.1.ff.2"]),
        (["proj_in", "blocks.0.tiny"], None, ["proj_in", "blocks.0.tiny"]),
        (None, "blocks.0.*", CHOSEN[4:]),
        (None, lambda name, module: module.bias is None, [n for n in CHOSEN if not n.endswith("to_out")]),
        (lambda name, module: module.out_features == 4 * WIDTH, None, ["blocks.0.ff.0", "blocks.1.ff.0"]),
    ],
)
def test_include_and_exclude(model: Model, x: Tensor, include: Any, exclude: Any, expected: list[str]) -> None:
    patch = patch_linear_int8(model, include=include, exclude=exclude)
    model(x)
    assert in_int8(patch) == expected


def test_what_cannot_run_in_8_bits_is_named() -> None:
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
    layers[1].weight = layers[0].weight
    layers[2].double()
    layers[3] = nn.Linear(WIDTH + 2, WIDTH)
    nn.utils.parametrizations.weight_norm(layers[4])
    attention = nn.MultiheadAttention(WIDTH, 2)
    patch = patch_linear_int8(nn.ModuleList([*layers, attention]), include=nn.Linear)
    why = {line.name: line.why for line in patch.report().of("unable")}
    assert (why["1"], why["2"]) == ("it shares its weight with 0", "its weight is float64")
    assert why["3"].startswith("its width must be a multiple of 4 up to 131072, got 66")
    assert "MultiheadAttention" in why["6.out_proj"]
    assert "4" not in states(patch) or why["4"] == "its weight is computed, or is not a parameter"
    assert why["0"] == "it shares its weight with 1"
    assert states(patch)["5"] == "waiting"


@pytest.mark.parametrize(
    ("kind", "message", "arguments"),
    [
        (TypeError, "must be a diffusers pipeline or a torch.nn.Module, got dict", {"model": {}}),
        (TypeError, "max_error must be a number, got '1%'", {"max_error": "1%"}),
        (ValueError, "max_error must be a share from 0 to 1 .*, got -1", {"max_error": -1}),
        (ValueError, "max_error must be a share from 0 to 1 .*, got 5", {"max_error": 5}),
        (ValueError, "max_error must be a share from 0 to 1 .*, got nan", {"max_error": float("nan")}),
        (ValueError, "weights must be one of keep, host, free, got 'drop'", {"weights": "drop"}),
        (TypeError, "include must be a pattern", {"include": 5}),
        (TypeError, "exclude must hold patterns", {"exclude": [5]}),
    ],
)
def test_what_cannot_be_used_is_refused(model: Model, kind: type, message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(kind, match=message):
        patch_linear_int8(**{"model": model, **arguments})
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_error_in_the_report_is_the_one_of_the_first_input(model: Model) -> None:
    layer, x = model.blocks[0].attn["to_q"], torch.randn(1, 40, WIDTH)
    weight = layer.weight.detach().clone()
    patch = patch_linear_int8(model, include="blocks.0.attn.to_q")
    out = layer(x)
    (line,) = patch.report().lines
    assert 0.004 < line.error < 0.02
    exact = F.linear(x.double(), weight.double(), layer.bias.double())
    centred = (out - exact).norm() / (exact - layer.bias).norm()
    assert line.error == pytest.approx(centred.item(), rel=1e-3)
    assert line.float_ms is not None
    assert line.int8_ms is not None
    assert (line.float_bytes, line.int8_bytes) == (4 * WIDTH * WIDTH, WIDTH * WIDTH + 4 * WIDTH)


def test_layers_above_the_limit_stay_as_they_are_and_are_named(model: Model, x: Tensor) -> None:
    expected = model(x)
    patch = patch_linear_int8(model, max_error=0.0)
    assert torch.equal(model(x), expected)
    report = patch.report()
    assert report.count("refused") == len(CHOSEN)
    assert all(line.why == f"its error {line.error:.2%} is above 0.00%" for line in report.of("refused"))
    assert all(line.error is not None and 0 < line.error < 0.02 for line in report.of("refused"))
    assert report.sentence().endswith("8 stay in float")
    assert all(type(module.weight) is nn.Parameter for module in model.modules() if isinstance(module, nn.Linear))


@pytest.mark.parametrize(("times", "faster"), [([2.0, 1.0], True), ([1.0, 2.0], False)])
def test_layers_that_8_bits_do_not_make_faster_may_stay(model, x, monkeypatch, times, faster: bool) -> None:
    monkeypatch.setattr("pascal_attn_core.int8.binding.median_times", lambda attempts, device: times)
    expected = model(x)
    patch = patch_linear_int8(model, only_faster=True)
    assert torch.equal(model(x), expected) is not faster
    assert set(states(patch).values()) - {"off"} == {"on" if faster else "refused"}


def test_an_outlier_channel_is_rotated_away() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, WIDTH)).eval().requires_grad_(False)
    model[0].weight.data[:, 3] *= 300  # 8 bits hold little of the other channels then
    weight = model[0].weight.detach().clone()
    x = torch.randn(100, 256)
    x[:, 3] /= 300
    patch = patch_linear_int8(model, include="0", max_error=1.0)
    model(x)
    (line,) = patch.report().lines
    assert line.rotation == 256
    assert line.error < 0.75 * error_of(int8_linear(x, quantize_rows(weight)), F.linear(x, weight))


def test_a_rotation_must_be_worth_its_time() -> None:
    def best(**errors: float) -> int:
        return best_rotation({int(size[1:]): Errors(error, 0.0, 0.0) for size, error in errors.items()}, 0.05)

    assert best(_0=0.010, _256=0.009) == 0
    assert best(_0=0.010, _256=0.004) == 256
    assert best(_0=0.052, _256=0.048) == 256
    assert best(_0=0.9, _256=0.8) == 0
    assert best(_0=0.01) == 0


def test_gradients_reach_the_input_also_of_layers_measured_in_inference_mode(model: Model, x: Tensor) -> None:
    expected, found = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(expected).square().sum().backward()
    patch = patch_linear_int8(model)
    with torch.inference_mode():
        out = model(x)
    assert in_int8(patch) == CHOSEN
    assert torch.equal(model(x), out)
    model(found).square().sum().backward()
    assert error_of(found.grad, expected.grad) < 0.05


def test_graphs_take_the_operator(model: Model, x: Tensor) -> None:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    patch_linear_int8(model)
    eager = model(x)
    operators: list[str] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        operators.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    assert torch.equal(compiled(x), eager)
    assert sum("int8_linear" in name for name in operators) == len(CHOSEN)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_trace_serves_any_number_of_rows(model: Model, x: Tensor, gradients: bool) -> None:
    patch = patch_linear_int8(model)
    with torch.set_grad_enabled(gradients):
        model(x)
        for _ in range(3):  # also where the error would be measured again
            traced = torch.jit.trace(model, x)
            for rows in (x, torch.cat((x, x[:1]), 0).repeat(1, 3, 1)):
                assert torch.equal(traced(rows), model(rows))
    assert set(states(patch).values()) >= {"on"}


@pytest.mark.parametrize("weights", WEIGHTS)
def test_removed_the_model_is_what_it_was(model: Model, x: Tensor, weights: str) -> None:
    expected, before = model(x), dict(model.named_parameters())
    patch_linear_int8(model, weights=weights).remove()
    assert torch.equal(model(x), expected), "before any call"
    with patch_linear_int8(model, weights=weights) as patch:
        model(x)
        assert isinstance(model.blocks[0].ff[0].weight, Int8Weight)
    assert not patch.active
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert not any(m._forward_pre_hooks or m._state_dict_hooks for m in model.modules())
    if weights == "free":
        assert 1e-4 < error_of(model(x), expected) < 0.02
        assert all(type(p) is nn.Parameter for p in after.values())
    else:
        assert all(before[name] is after[name] for name in before)
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_state_dicts_hold_float_weights_under_the_same_names(model: Model, x: Tensor, weights: str) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    patch_linear_int8(model, weights=weights)
    model(x)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(type(tensor) is Tensor for tensor in after.values())
    for name, tensor in after.items():
        is_rounded = weights == "free" and name.removesuffix(".weight") in CHOSEN
        assert torch.equal(tensor, before[name]) != is_rounded
    fresh = Model()
    fresh.load_state_dict(after)


# What writes ``value``, ``delta`` above the weight's own, into the weight of a layer.
WRITES: dict[str, Callable[[nn.Linear, Tensor, Tensor], Any]] = {
    "data in place": lambda layer, value, delta: layer.weight.data.add_(delta),
    "data": lambda layer, value, delta: setattr(layer.weight, "data", layer.weight.data.clone() + delta),
    "a clone of data": lambda layer, value, delta: setattr(layer.weight, "data", layer.weight.data.clone().add_(delta)),
    "data of another dtype": lambda layer, value, delta: setattr(layer.weight, "data", value.half()),
    "the weight": lambda layer, value, delta: layer.weight.copy_(value),
    "a state dict": lambda layer, value, delta: layer.load_state_dict({"weight": value}),
}


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_into_a_weight_rounds_what_is_written(write: Callable, weights: str) -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    x, delta = torch.randn(9, WIDTH), torch.randn(WIDTH, WIDTH) / 20
    patch = patch_linear_int8(layer, include=nn.Linear, weights=weights, max_error=1)
    layer(x)
    value = layer.weight.float_matrix() + delta
    write(layer, value, delta)
    dtype = torch.float16 if write is WRITES["data of another dtype"] else torch.float32
    near = 0.01 if weights == "free" else 1e-6 if dtype == torch.float32 else 1e-3
    assert isinstance(layer.weight, Int8Weight)
    assert layer.weight.dtype == dtype
    assert error_of(layer.weight.float_matrix(), value) < near
    assert error_of(layer(x.to(dtype)), F.linear(x, value)) < 0.03
    patch.remove()
    assert type(layer.weight) is nn.Parameter
    assert error_of(layer.weight, value) < near


@pytest.mark.parametrize("weights", WEIGHTS)
def test_deep_copies_hold_float_weights(model: Model, x: Tensor, weights: str) -> None:
    expected = model(x)
    patch = patch_linear_int8(model, weights=weights)
    waiting = copy.deepcopy(model)
    assert torch.equal(waiting(x), expected)
    assert patch.report().count("waiting") == patch.report().able
    out = model(x)
    copied = copy.deepcopy(model)
    for each in (waiting, copied):
        assert type(each.blocks[0].ff[0].weight) is nn.Parameter
    if weights != "free":
        assert torch.equal(copied(x), expected)
    copied.blocks[0].ff[0].weight.data.zero_()
    assert torch.equal(model(x), out)
    patch.remove()
    if weights != "free":
        assert torch.equal(model(x), expected)


@pytest.mark.parametrize("is_measured", [False, True])
def test_pickles_do_not_depend_on_this_package(model: Model, x: Tensor, is_measured: bool) -> None:
    expected = model(x)
    patch_linear_int8(model)
    if is_measured:
        model(x)
    torch.save(model, buffer := io.BytesIO())
    for stored in (pickle.dumps(model), buffer.getvalue()):
        assert b"pascal_attn_core" not in stored
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(x), expected)
    assert torch.equal(copy.deepcopy(loaded)(x), expected)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_casts_and_moves(model: Model, x: Tensor, weights: str) -> None:
    expected = model(x)
    patch = patch_linear_int8(model, weights=weights)
    model(x)
    codes = model.blocks[0].ff[0].weight.codes.clone()
    model.to(torch.bfloat16)
    weight = model.blocks[0].ff[0].weight
    assert isinstance(weight, Int8Weight)
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight.codes, codes)
    assert weight.scales.dtype == torch.float32
    assert error_of(model(x.bfloat16()), expected) < 0.02
    model.to("cpu").float()
    assert error_of(model(x), expected) < 0.02
    patch.remove()
    assert model.blocks[0].ff[0].weight.dtype == torch.float32


def test_a_weight_that_the_user_has_replaced_stays(model: Model, x: Tensor, caplog: pytest.LogCaptureFixture) -> None:
    patch = patch_linear_int8(model)
    model(x)
    theirs = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    model.blocks[0].attn["to_q"].weight = theirs
    assert states(patch)["blocks.0.attn.to_q"] == "refused"
    with caplog.at_level(logging.WARNING, "pascal_attn"):
        patch.remove()
    assert model.blocks[0].attn["to_q"].weight is theirs
    assert "the weight of blocks.0.attn.to_q was replaced in the meantime" in caplog.text


def test_the_report_says_what_it_costs(model: Model, x: Tensor) -> None:
    patch = patch_linear_int8(model)
    assert patch.report().sentence() == "0 of 8 linear layers in int8; 8 not measured yet"
    model(x)
    report = patch.report()
    assert report.sentence().startswith("8 of 8 linear layers in int8, not exact: relative error per layer 0.")
    assert "the float ones in host memory" in report.sentence()
    text = report.text()
    assert "blocks.0.ff.0 (Linear): on: 64 -> 256, float32, 0.06 -> 0.02 MiB, error 0." in text
    assert "computed by torch._int_mm" in text
    assert report.worst.error >= report.median_error
