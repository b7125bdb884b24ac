"""One judge for all that is not exact: what is measured is watched, whatever changes, in layers of every kind."""

import logging
import math
from collections.abc import Callable
from types import SimpleNamespace

import gguf
import pytest
import torch
import torch.nn.functional as F
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
from torch import Tensor, nn

from pascal_attn_core import patch_attention_int8, patch_linear_float16, patch_linear_int8
from pascal_attn_core.int8 import Int8Patch, attention, layer
from pascal_attn_core.int8.attention import AttentionSite
from pascal_attn_core.int8.judged import Judged
from pascal_attn_core.int8.measure import Times, errors_of, row_squares

WIDTH = 512
Q4, Q8 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q8_0


def in_gguf(weight: Tensor, kind: gguf.GGMLQuantizationType) -> GGUFParameter:
    return GGUFParameter(torch.from_numpy(gguf.quants.quantize(weight.numpy(), kind)), quant_type=kind)


class Attention(nn.Module):
    def forward(self, x: Tensor, keys: int = 64) -> Tensor:
        query = x.unflatten(-1, (-1, 64)).transpose(1, 2)
        key = query[:, :, :1].expand(-1, -1, keys, -1) * torch.linspace(-1, 1, keys)[:, None] + torch.sin(
            torch.arange(keys * 64.0).view(keys, 64)
        )
        return F.scaled_dot_product_attention(query, key, key.roll(1, -1)).transpose(1, 2).flatten(2)


KINDS = ("int8", "gguf", "float16", "attention")


def model_of(kind: str, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    if kind == "attention":
        return nn.Sequential(Attention())
    made = nn.Linear(width, width)
    if kind == "gguf":
        made = GGUFLinear(width, width, True, compute_dtype=torch.float32)
        made.weight = in_gguf(torch.randn(width, width) / 20, Q4)
    return nn.Sequential(made).eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def everything_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pascal_attn_core.int8.binding.median_times", lambda attempts, device: [2.0, 1.0])
    monkeypatch.setattr("pascal_attn_core.int8.gguf_layer.way_for", lambda x, weight: layer.Way("int_mm", ""))
    monkeypatch.setattr("pascal_attn_core.int8.gguf_layer.product.__defaults__", ("int_mm",))


def patched(kind: str, model: nn.Module, max_error: float = 0.5) -> Int8Patch:
    if kind == "attention":
        return patch_attention_int8(model, max_error=max_error)
    put_in = patch_linear_float16 if kind == "float16" else patch_linear_int8
    return put_in(model, include="*", max_error=max_error)


def checked_in(patch: Int8Patch, call: Callable[[], object]) -> bool:
    """Whether a call is measured."""
    (layer,) = patch._binding.layers_of(patch._model)
    before = layer.watch.latest
    layer.watch.latest = None
    call()
    found = layer.watch.latest is not None
    layer.watch.latest = layer.watch.latest or before
    return found


def used(model: nn.Module, x: Tensor, calls: int = 30) -> None:
    """Calls until most are not measured any more."""
    for _ in range(calls):
        model(x)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_other_inputs_begin_again_and_so_does_a_run(kind: str) -> None:
    model, x = model_of(kind), torch.randn(1, 64, WIDTH)
    patch = patched(kind, model)
    used(model, x)
    assert patch.report().lines[0].state == "on"
    assert not checked_in(patch, lambda: model(x))
    assert checked_in(patch, lambda: model(torch.randn(1, 500, WIDTH)))
    if kind == "attention":
        assert checked_in(patch, lambda: model[0](x, keys=256))
    used(model, x, 12)
    assert not checked_in(patch, lambda: model(x))
    patch._binding.restart()
    assert checked_in(patch, lambda: model(x))


WRITES: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "add_": lambda layer, other: layer.weight.add_(other),
    "load_state_dict": lambda layer, other: layer.load_state_dict({**layer.state_dict(), "weight": other}),
    "data =": lambda layer, other: setattr(layer.weight, "data", other),
}


@pytest.mark.parametrize("kind", ["int8", "gguf", "float16"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@torch.no_grad()
def test_a_weight_that_is_written_is_judged_in_the_next_call(kind: str, write: Callable) -> None:
    model, x = model_of(kind, 64), torch.randn(64, 64)
    patch = patched(kind, model)
    used(model, x)
    other = torch.randn(64, 64)
    write(model[0], in_gguf(other, Q4) if kind == "gguf" else other)
    assert checked_in(patch, lambda: model(x))


@torch.no_grad()
def test_a_written_weight_above_the_limit_is_exact_in_the_same_call() -> None:
    model, x = model_of("int8", 20), torch.randn(64, 20)
    x[:, 3] = 0.0
    patch = patched("int8", model, 0.05)
    used(model, x)
    weight = torch.randn(20, 20) * 0.02
    weight[:, 3] = 100.0
    model[0].weight.copy_(weight)
    torch.testing.assert_close(model(x), F.linear(x, weight, model[0].bias))
    (line,) = patch.report().lines
    assert line.state == "refused"
    assert "in call 31" in line.why


@torch.no_grad()
def test_another_file_in_a_gguf_layer_is_judged_anew_and_offloading_is_not_another() -> None:
    model, x = model_of("gguf"), torch.randn(64, WIDTH)
    patch = patched("gguf", model)
    used(model, x)
    model[0].weight = GGUFParameter(model[0].weight.data.clone(), quant_type=Q4)
    assert not checked_in(patch, lambda: model(x)), "the same bytes elsewhere"
    model[0].weight = in_gguf(torch.randn(WIDTH, WIDTH), Q8)
    assert checked_in(patch, lambda: model(x))
    assert patch.report().lines[0].format == "Q8_0"
    model[0].weight.data[3] += 1
    used(model, x)
    model[0].weight = in_gguf(torch.randn(WIDTH, WIDTH), gguf.GGMLQuantizationType.BF16)
    model(x)
    assert patch.report().lines[0].state == "refused"


@pytest.mark.parametrize(
    ("kind", "shape", "part"),
    [(kind, (1, 1101), (0, slice(900, 977))) for kind in KINDS]
    + [(kind, (16, 48), (5, slice(20, 24))) for kind in KINDS[:3]],  # in 4 rows attention is not far off
)
@torch.no_grad()
def test_a_part_with_outliers_makes_the_layer_exact_in_the_same_call(kind: str, shape: tuple, part: tuple) -> None:
    """The limit is a third of the part's own error, and more than that of the whole call."""
    model, x = model_of(kind), torch.randn(*shape, WIDTH)
    spoiled = x.clone()
    if kind == "attention":
        spoiled[part] *= 300
    else:
        spoiled[(*part, ..., slice(None, None, 32))] = 1e8
        weight = torch.randn(WIDTH, WIDTH) / 20
        weight[:, ::32] = 0.0
        model[0].weight = in_gguf(weight, Q8) if kind == "gguf" else nn.Parameter(weight, requires_grad=False)
    right = model(spoiled)
    with patched(kind, model, 1.0) as patch:
        model(x)
        model(spoiled)
        wrong = (model(spoiled) - right)[part]
    own = (wrong.norm() / right[part].norm()).item()
    patch = patched(kind, model, own / 3)
    model(x)
    assert patch.report().lines[0].state == "on"
    torch.testing.assert_close(model(spoiled), right)
    (line,) = patch.report().lines
    assert (line.state, line.went_back) == ("refused", True)
    assert line.worst_row > own / 3


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_layer_that_is_no_faster_stays_exact(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def time(self: Judged, *_: object) -> None:
        self.times = Times(1.0, 1.5)

    monkeypatch.setattr(AttentionSite, "_time", time)
    monkeypatch.setattr("pascal_attn_core.int8.binding.median_times", lambda attempts, device: [1.0, 1.5])
    model, x = model_of(kind), torch.randn(1, 64, WIDTH)
    right = model(x)
    if kind in ("attention", "float16"):
        patch = patched(kind, model)
    else:
        patch = patch_linear_int8(model, include="*", max_error=0.5, only_faster=True)
    torch.testing.assert_close(model(x), right)
    (line,) = patch.report().lines
    assert (line.state, line.why) == ("refused", "not faster: 1.50 ms, 1.00 ms as it was")


@pytest.mark.parametrize("items", [2, 5, 7, 16])
@pytest.mark.parametrize("is_flat", [False, True])
def test_each_item_of_a_batch_is_judged(items: int, is_flat: bool) -> None:
    if is_flat and items != 2:
        pytest.skip("of rows without a batch, halves and thirds are known")
    model = model_of("int8", 20)
    model[0].weight[:, 0] /= 3000
    x = torch.randn(items, 48, 20)
    patch = patched("int8", model, 0.05)
    model(x)
    x = x * 100
    x[1] /= 100
    x[1, :, 0] *= 3000
    model(x.flatten(0, 1) if is_flat else x)
    assert patch.report().lines[0].state == "refused"


@pytest.mark.parametrize("kind", ["int8", "float16"])
@torch.no_grad()
def test_a_text_of_few_tokens_beside_a_picture_goes_back_and_shows(kind: str) -> None:
    model = model_of(kind, 20)
    model[0].bias.zero_()
    size = {"int8": 300.0, "float16": 1e8}[kind]
    model[0].weight[:, 0] = 0.0
    patch = patched(kind, model, 0.05)
    model(torch.randn(1, 1101, 20))
    x = torch.cat([torch.randn(1, 77, 20) * 0.1, torch.randn(1, 1024, 20)], 1)
    x[:, :77, 0] = size
    exact = F.linear(x, model[0].weight if kind == "float16" else model[0].weight.float_matrix())
    torch.testing.assert_close(model(x), exact, rtol=1e-3, atol=1e-3)
    (line,) = patch.report().lines
    assert line.state == "refused"
    assert "in one row of 32" in line.why
    assert line.error < 0.2 < line.worst_row


def test_errors_of_rows_by_part() -> None:
    wrong, size = torch.zeros(2, 200, dtype=torch.float64)
    size += 1.0
    wrong[150:] = 0.01
    counts = F.one_hot(torch.arange(200) // 100, 2).double()
    found = errors_of(wrong, size, counts)
    assert found.error == pytest.approx((0.01 / 2) ** 0.5)
    assert found.rows == found.worst_row == pytest.approx(0.1)
    wrong.zero_()[5:8] = 0.04
    assert errors_of(wrong, size, counts).rows == 0.0, "3 of 100 are not more than one in 32"
    wrong[8] = math.nan
    assert errors_of(wrong, size, counts).error == math.inf
    tiny = torch.full((3, 8), 1e-30)
    assert row_squares(tiny).sqrt().tolist() == pytest.approx([1e-30 * 8**0.5] * 3)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_inputs_that_are_not_finite_judge_nothing(kind: str) -> None:
    model, x = model_of(kind), torch.randn(1, 64, WIDTH)
    patch = patched(kind, model)
    black = torch.full_like(x, math.nan)
    model(black)
    assert patch.report().lines[0].why == "its inputs are not finite"
    model(x)
    model(black)
    assert patch.report().lines[0].state == "on"


@pytest.mark.parametrize("kind", ["int8", "gguf", "float16", "attention"])
@torch.no_grad()
def test_without_memory_to_measure_there_are_three_tries(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def short(*_: object, **__: object) -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("out of memory")

    for module in ("layer", "gguf_layer", "float16"):
        monkeypatch.setattr(f"pascal_attn_core.int8.{module}.sample_of", short)
    monkeypatch.setattr(attention, "attention_error", short)
    model, x = model_of(kind), torch.randn(1, 64, WIDTH)
    patch = patched(kind, model)
    used(model, x, 10)
    assert len(tries) == 3
    assert patch.report().lines[0].why == "out of memory while measuring it"


@pytest.mark.parametrize("kind", ["int8", "float16"])
@pytest.mark.parametrize("when", ["at first", "later"])
def test_training_moves_the_weight_of_a_layer_in_eval_mode(kind: str, when: str, caplog) -> None:
    model, x = model_of(kind, 64), torch.randn(9, 64)
    patch = patched(kind, model)
    if when == "later":
        with torch.no_grad():
            model(x)
        assert patch.report().lines[0].state == "on"
    model.requires_grad_(True)
    with caplog.at_level(logging.WARNING, "pascal_attn"):
        for _ in range(3):
            before = model(x)
            before.square().mean().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
            assert model[0].weight.grad is not None
    assert not torch.equal(model(x), before)
    assert sum("asks for a gradient" in record.getMessage() for record in caplog.records) == 1
    (line,) = patch.report().lines
    assert line.state == ("on" if kind == "float16" and when == "later" else "waiting")
    assert kind == "float16" or line.why == "its weight is being trained"


@torch.no_grad()
def test_a_module_that_multiplies_by_its_weight_itself_is_named_and_in_float() -> None:
    class MyLinear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.T

    model, x = nn.Sequential(MyLinear(64, 64, bias=False)).requires_grad_(False), torch.randn(9, 64)
    weight = model[0].weight
    patch = patched("int8", model)
    model(x)
    assert model[0].weight is weight
    (line,) = patch.report().lines
    assert (line.state, line.why) == ("refused", "its module does not multiply by it as a linear layer does")


@torch.no_grad()
def test_a_compiled_layer_is_not_counted_as_watched() -> None:
    model, x = model_of("int8", 64), torch.randn(9, 64)
    patch = patched("int8", model)
    model(x)
    torch.compile(model, backend="aot_eager")(x)
    (line,) = patch.report().lines
    assert line.why == "compiled calls are neither counted nor measured"


@torch.no_grad()
def test_a_wrong_width_is_the_hosts_error_and_float64_is_named() -> None:
    model = model_of("int8", 64)
    patch = patched("int8", model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(3, 60))
        model(torch.randn(3, 64))
    model.double()(torch.randn(3, 64, dtype=torch.float64))
    (line,) = patch.report().lines
    assert (line.state, line.why) == ("refused", "its inputs are float64")
    model.float()(torch.randn(3, 64))
    assert patch.report().lines[0].state == "on"


@pytest.mark.parametrize("bias", [30.0, 1e5])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e5, 1e20, 1e37])
@torch.no_grad()
def test_float16_beside_a_large_bias_and_with_rows_of_any_size(bias: float, size: float) -> None:
    model, x = model_of("float16", 256), torch.randn(64, 256)
    weight, offset = model[0].weight, model[0].bias.fill_(bias)
    patched("float16", model)
    model(x)
    right = F.linear((x * size).double(), weight.double(), offset.double())
    product = right - bias
    found = model(x * size).double()
    assert ((found - right).norm(dim=1) <= 0.002 * product.norm(dim=1) + 1e-6 * right.norm(dim=1)).all()


def test_the_report_follows_a_module_that_an_adapter_wraps() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Sequential(nn.Linear(64, 64))).eval().requires_grad_(False)
    x = torch.randn(9, 64)
    for kind in ("int8", "float16"):
        patch = patched(kind, model)
        with torch.no_grad():
            model(x)
            wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0.0"])).eval()
            wrapped(x)
            assert [line.state for line in patch.report().lines if line.calls] == ["on"], kind
            model = wrapped.unload()
        patch.remove()


def test_a_run_of_a_pipeline_begins_at_set_timesteps() -> None:
    from diffusers import DDIMScheduler

    scheduler, x = DDIMScheduler(), torch.randn(9, 64)
    pipe = SimpleNamespace(components={"unet": model_of("int8", 64), "scheduler": scheduler})
    linear, half = (put_in(pipe, include="*") for put_in in (patch_linear_int8, patch_linear_float16))
    with torch.no_grad():
        used(pipe.components["unet"], x)
    assert linear.report().lines[0].calls >= 30
    scheduler.set_timesteps(4)
    assert len(scheduler.timesteps) == 4
    assert linear.report().lines[0].calls == 0
    linear.remove()
    scheduler.set_timesteps(5)
    half.remove()
    assert "set_timesteps" not in vars(scheduler)
