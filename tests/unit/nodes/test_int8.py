"""The node Pascal 8-Bit and what stands behind it, without ComfyUI; with it: tests/host/comfyui."""

import functools
import gc
import importlib
import itertools
import weakref
from typing import Any

import pytest
import torch
from attn_support.comfy.stub import Patcher, StubHost, host_attention, make_engine, node_module
from torch import Tensor, nn

from pascal_attn_core.int8.report import Int8ReportLine

LINE = {"name": "blocks.0.ff", "kind": "Linear", "shape": (64, 64), "state": "on", "why": "", "error": 0.01}

int8 = node_module("patches.int8")


def report(*lines: dict[str, Any], weights: str = "host") -> Any:
    return int8.Int8Report([Int8ReportLine(**{**LINE, **line}) for line in lines], 0.05, weights)


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.ModuleDict({"attn": nn.Linear(64, 64), "ff": nn.Linear(64, 64)}) for _ in range(11)]
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "time_embed": nn.ModuleList([nn.Linear(64, 64)])})
    return model.eval().requires_grad_(False)


def settings(include: str = "", exclude: str = "", max_error: float = 0.05) -> Any:
    return int8.Int8Settings(max_error, include, exclude, "host", "off")


WITHOUT_TWO = (*range(1, 9), 10)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", {f"blocks.{i}.{part}" for i in range(11) for part in ("attn", "ff")}),
        ("blocks.1", "", {"blocks.1.attn", "blocks.1.ff"}),  # not blocks.10
        ("*.1?.*", "", {"blocks.10.attn", "blocks.10.ff"}),
        ("ff, time_embed", "blocks.0; *.9.*", {f"blocks.{i}.ff" for i in WITHOUT_TWO} | {"time_embed.0"}),
        ("none", "", set()),
        ("diffusion_model.blocks.1", "", {"blocks.1.attn", "blocks.1.ff"}),  # as in files and LoRAs
        ("model.diffusion_model.*.10.*", "", {"blocks.10.attn", "blocks.10.ff"}),
        ("diffusion_model.blocks.0.ff.weight", "", {"blocks.0.ff"}),
    ],
)
def test_patterns_choose_blocks_and_layers(include: str, exclude: str, expected: set[str]) -> None:
    model = network()
    report = int8.binding_for(model, settings(include, exclude)).report(model)
    assert {line.name for line in report.of("waiting")} == expected


def test_a_pattern_that_no_layer_matches_is_named_before_the_run() -> None:
    model = network()
    assert int8.unmatched(model, ("blocks.3", "*.ff", "time_embed")) == ""
    examples = "layers of this model are, for example, blocks.3.ff and blocks.7.attn"
    assert (
        int8.unmatched(model, ("Blocks.3", "ff", "img_mpl")) == f"no linear layer matches Blocks.3, img_mpl; {examples}"
    )
    assert int8.unmatched(nn.ReLU(), ("ff",)) == ""


def test_the_same_options_on_the_same_model_go_on_with_what_was_measured() -> None:
    model, options = network(), settings()
    binding = int8.binding_for(model, options)
    assert int8.binding_for(model, settings()) is binding
    assert int8.binding_for(model, settings(max_error=0.04)) is not binding
    assert int8.binding_for(network(), options) is not binding
    binding.attach(model)
    model["blocks"][0]["ff"](torch.randn(8, 64))
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None, "what is remembered keeps no model alive"


def test_what_a_user_must_not_miss() -> None:
    fast = {"float_ms": 2.0, "int8_ms": 1.0}
    assert int8.warnings_of(report(fast)) == []
    back = {"name": "blocks.1.ff", "state": "refused", "went_back": True}
    back["why"] = "its error 9.00% in call 4 is above 5.00%"
    measured = {"state": "refused", "why": "its error 7.00% is above 5.00%"}
    sentence = "blocks.1.ff went back to float: its error 9.00% in call 4 is above 5.00%"
    assert int8.warnings_of(report(fast, back, measured)) == [sentence]
    nothing, left = "no linear layer runs in int8: ", {"state": "off", "why": "outside the repeated blocks"}
    assert int8.warnings_of(report(measured, left)) == [f"{nothing}its error 7.00% is above 5.00%"]
    assert int8.warnings_of(report(measured), is_file_in_int8=True) == []
    assert int8.warnings_of(report()) == [f"{nothing}none was found"]
    waiting = {"state": "waiting", "why": ""}  # as in training, where the weight of each call is another one
    assert int8.warnings_of(report(waiting)) == [f"{nothing}none was measured"]
    slow = {"float_ms": 1.0, "int8_ms": 1.2}
    (sentence,) = int8.warnings_of(report(slow, slow))
    assert sentence == "int8 is slower than float here: one call of each layer takes 2.4 ms in total, 2.0 ms in float"
    assert int8.warnings_of(report({"float_ms": 1.0, "int8_ms": 1.05})) == []


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch, stub_host: StubHost) -> tuple[Any, Patcher, Any]:
    """The layers of a node, its patcher and a call of the model; weights as they are in plain modules."""
    source = importlib.import_module(int8.Int8Binding.__module__).Source
    monkeypatch.setattr(int8, "LoadedWeight", lambda patcher, name, module: source())
    model = network()
    patcher = Patcher.around(model)
    found = int8.Int8Layers(patcher, int8.Int8Settings(0.05, "", "", "host", "auto"), "1")

    def call() -> None:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
        for block in model["blocks"]:
            x = x + block["ff"](block["attn"](x))

    return found, patcher, call


@torch.no_grad()
def test_the_record_says_what_one_run_did(layers: Any, stub_host: StubHost) -> None:
    injection, patcher, call = layers
    runs = node_module("engine.runs")
    injection.inject(patcher)
    for calls in (1, 3):
        injection.before_run(patcher)
        for _ in range(calls):
            call()
        injection.after_run(patcher)
        run = runs.remembered()[-1]
        assert (run.part, run.finished, run.settings) == ("int8", True, "error at most 5.0%, weights host")
        assert run.gains[0].startswith("22 of 22 linear layers in int8, not exact: relative error per layer")
        assert sum("64 -> 64, float32, 0.02 -> 0.00 MiB, error" in note for note in run.notes) == 22
        assert stub_host.said[-1] == f"ModuleDict: {run.gains[0]}"
        report_now = injection.binding.report(patcher.model.diffusion_model)
        assert {line.calls for line in report_now.of("on")} == {calls}
    injection.after_run(patcher)
    assert len(runs.remembered()) == 2
    injection.eject(patcher)
    assert all(type(p) is nn.Parameter for p in patcher.model.parameters())


def test_a_copy_of_the_model_that_was_never_patched_itself_is_put_in_8_bits(layers: Any) -> None:
    injection, copy = layers[0], Patcher.around(network())
    injection.inject(copy)
    copy.model.diffusion_model["blocks"][0]["ff"](torch.randn(32, 64))
    assert injection.binding.report(copy.model.diffusion_model).count("on") == 1
    other = int8.Int8Layers(layers[1], int8.Int8Settings(0.04, "", "", "host", "auto"), "2")
    other.inject(copy)
    assert injection.binding.layers_of(copy.model.diffusion_model)[0].weight is None
    other.eject(copy)
    assert all(type(p) is nn.Parameter for p in copy.model.parameters())


@pytest.mark.parametrize("is_faster", [True, False])
@torch.no_grad()
def test_the_record_of_layers_in_float16_says_what_one_run_did(is_faster: bool, stub_host: StubHost) -> None:
    node, runs, model = node_module("attention_patch"), node_module("engine.runs"), network()
    patcher, x = Patcher.around(model), torch.randn(32, 64)
    injection = node.Float16Layers(node.Float16Binding(max_error=0.002), "ModuleDict", "float16 linear layers", "1")
    injection.binding.options.clock = lambda attempts, device: [2.0, 1.0] if is_faster else [1.0, 2.0]
    right = model["blocks"][0]["ff"](x)
    injection.inject(patcher)
    for calls in (1, 3):
        injection.before_run(patcher)
        for _ in range(calls):
            found = model["blocks"][0]["ff"](x)
        injection.after_run(patcher)
        run = runs.remembered()[-1]
        assert (run.part, run.finished, run.is_exact, torch.equal(found, right)) == (
            "float16",
            True,
            *[not is_faster] * 2,
        )
        first, *lines = [*run.gains, *run.notes]
        assert first.startswith(f"{int(is_faster)} of 22 linear layers in float16")
        told = "on: 64 -> 64, error 0.0" if is_faster else "refused: not faster: 2.00 ms, 1.00 ms as it was"
        assert [line for line in lines if line.startswith(f"blocks.0.ff (Linear): {told}")]
        (line,) = [line for line in injection.binding.report(model).lines if line.name == "blocks.0.ff"]
        assert line.calls == calls or not is_faster
    injection.eject(patcher)
    assert torch.equal(model["blocks"][0]["ff"](x), right)


ATTENTION, OVERRIDE = node_module("patches.int8_attention"), node_module("patches.override")


def call_of(override: Any, *tensors: Tensor, index: int = 3, **more: Any) -> Tensor:
    options = {"block_type": "double", "block_index": index}
    return override(host_attention, *tensors, heads=2, transformer_options=options, **more)


@torch.no_grad()
def test_attention_comes_through_the_override_and_what_8_bits_leave_goes_on(stub_host: StubHost) -> None:
    torch.manual_seed(0)
    layers, before = ATTENTION.AttentionLayers(0.015), []
    plain = query, key, value = torch.randn(3, 1, 90, 64).unbind()
    sharp = query * 12, key, value

    def previous(func: Any, *args: Any, **kwargs: Any) -> Tensor:
        before.append(kwargs.get("mask"))
        return func(*args, **kwargs)

    override, mask = OVERRIDE.make_override(layers, layers.answer, previous, "replace it"), torch.randn(90, 90)
    exact = host_attention(*plain, 2)

    def model() -> list[Tensor]:
        return [call_of(override, *plain), call_of(override, *sharp), call_of(override, *plain, index=4, mask=mask)]

    for _ in range(2):
        first, second, third = layers.around_model(model)
        assert 0 < (first - exact).norm() / exact.norm() < 0.015
        assert torch.equal(second, host_attention(*sharp, 2)), "above the limit: bit for bit the host's"
        assert torch.equal(third, host_attention(*plain, 2, mask))
    assert [each is mask for each in before] == [False, True] * 2, "both went on to the override before ours"
    lines = {line.name: line for line in layers.report().lines}
    states = {"double 3": "on", "double 3 (2)": "refused", "double 4": "refused"}
    assert {name: line.state for name, line in lines.items()} == states
    assert lines["double 4"].why == "the int8 mode has no float mask"
    assert lines["double 3"].calls == 2
    layers.restart()
    assert layers.report().lines[0].calls == 0
    stub_host.interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        call_of(override, *plain)


@pytest.mark.parametrize("order", itertools.permutations(["mask", "8-bit", "patch"]), ids=" -> ".join)
@pytest.mark.parametrize("limit", [0.05, 0.0], ids=["8 bits take", "8 bits leave"])
@torch.no_grad()
def test_a_mask_that_another_pack_adds_counts_in_every_order(order: tuple[str, ...], limit: float, stub_host) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 90, 64).unbind()
    allowed = torch.rand(90, 90) < 0.3
    layers, engine = ATTENTION.AttentionLayers(limit), make_engine(min_keys=0)
    override: Any = None
    for name in order:
        if name == "mask":
            before = override

            def override(func: Any, *args: Any, before: Any = before, **kwargs: Any) -> Tensor:
                kwargs["mask"] = allowed
                return func(*args, **kwargs) if before is None else before(func, *args, **kwargs)

        elif name == "8-bit":
            override = OVERRIDE.make_override(layers, layers.answer, override)
        else:
            answer = functools.partial(OVERRIDE.by_engine, engine, OVERRIDE.Scope())
            override = OVERRIDE.make_override(engine, answer, override)
    masked, plain = host_attention(query, key, value, 2, allowed), host_attention(query, key, value, 2)
    for _ in range(2):
        found = call_of(override, query, key, value)
        assert (found - masked).norm() < 0.05 * masked.norm() < 0.2 * (found - plain).norm()


def test_both_kinds_of_layers_are_one_headline_with_seconds_and_errors() -> None:
    timed, sizes = {"float_ms": 3.0, "int8_ms": 1.0, "calls": 600}, {"float_bytes": 4, "int8_bytes": 1}
    attention = int8.Int8Report(
        [Int8ReportLine(**{**LINE, **timed, "shape": (), "error": 0.004})], 0.02, "", "attention layers"
    )
    text = int8.together([report(*[{**sizes, "error": error} for error in (0.01, 0.02)]), attention]).sentence()
    assert text.startswith(
        "3 of 3 linear and attention layers in int8, not exact: relative error per layer 1.00% (median)"
    )
    assert "at most 2.00%; 1.20 s less than in float (one call of each of 1: 3.0 -> 1.0 ms)" in text
    assert "GGUF" not in text
    (sentence,) = int8.warnings_of(int8.Int8Report([], 0.02, "", "attention layers"))
    assert sentence == "no attention layer runs in int8: none was found"


@pytest.mark.parametrize(
    ("attention", "device", "expected"),
    [("auto", "cpu", False), ("always", "cpu", True), ("auto", "cuda", True), ("off", "cuda", False)],
)
def test_on_a_cpu_attention_is_left_alone_unless_asked_for(attention: str, device: str, expected, stub_host) -> None:
    patcher = Patcher.around(network())
    patcher.load_device = torch.device(device)
    settings = int8.Int8Settings(0.05, "", "", "host", "off", attention=attention, attention_max_error=0.02)
    layers = int8.Int8Layers(patcher, settings, "1")
    assert (layers.attention is not None) == expected
    assert bool(layers.why_exact) == (attention == "auto" and not expected)
    assert ("attention in 8 bits with an error of at most 2.0%" in layers.settings) == expected
