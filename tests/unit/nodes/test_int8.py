"""The node Pascal Int8 Linear and what stands behind it, without ComfyUI; with it: tests/host/comfyui."""

from __future__ import annotations

import gc
import importlib
import weakref
from typing import Any

import pytest
import torch
from attn_support.comfy.stub import Patcher, StubHost, node_module, stub_host  # noqa: F401
from torch import nn

from pascal_attn_core.int8.report import Int8ReportLine

LINE = {"name": "blocks.0.ff", "kind": "Linear", "shape": (64, 64), "state": "int8", "why": "", "error": 0.01}

int8 = node_module("patches.int8")


def report(*lines: dict[str, Any], weights: str = "host") -> Any:
    return int8.Int8Report([Int8ReportLine(**{**LINE, **line}) for line in lines], 0.05, weights)


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.ModuleDict({"attn": nn.Linear(64, 64), "ff": nn.Linear(64, 64)}) for _ in range(11)]
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "time_embed": nn.ModuleList([nn.Linear(64, 64)])})
    return model.eval().requires_grad_(False)


def names(binding: Any, model: nn.Module) -> set[str]:
    return {line.name for line in binding.report(model).of("waiting")}


def test_texts_become_patterns() -> None:
    assert int8.patterns(" double_blocks.3,*.ff.* ;\nimg_mlp,,") == ("double_blocks.3", "*.ff.*", "img_mlp")
    assert int8.patterns("  ") == ()


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ((), (), {f"blocks.{i}.{part}" for i in range(11) for part in ("attn", "ff")}),
        (("blocks.1",), (), {"blocks.1.attn", "blocks.1.ff"}),  # not blocks.10
        (("*.1?.*",), (), {"blocks.10.attn", "blocks.10.ff"}),
        (
            ("ff", "time_embed"),
            ("blocks.0", "*.9.*"),
            {f"blocks.{i}.ff" for i in (*range(1, 9), 10)} | {"time_embed.0"},
        ),
        (("none",), (), set()),
        (("diffusion_model.blocks.1",), (), {"blocks.1.attn", "blocks.1.ff"}),  # as in files and LoRAs
        (("model.diffusion_model.*.10.*",), (), {"blocks.10.attn", "blocks.10.ff"}),
        (("diffusion_model.blocks.0.ff.weight",), (), {"blocks.0.ff"}),
    ],
)
def test_patterns_choose_blocks_and_layers(include: Any, exclude: Any, expected: set[str]) -> None:
    model = network()
    assert names(int8.binding_for(model, (0.05, include, exclude, "host")), model) == expected


def test_a_pattern_that_no_layer_matches_is_named_before_the_run() -> None:
    model = network()
    assert int8.unmatched(model, ("blocks.3", "*.ff", "time_embed")) == ""
    examples = "layers of this model are, for example, blocks.3.ff and blocks.7.attn"
    assert (
        int8.unmatched(model, ("Blocks.3", "ff", "img_mpl")) == f"no linear layer matches Blocks.3, img_mpl; {examples}"
    )
    assert int8.unmatched(nn.ReLU(), ("ff",)) == ""


def test_the_same_options_on_the_same_model_go_on_with_what_was_measured() -> None:
    model, options = network(), (0.05, (), (), "host")
    binding = int8.binding_for(model, options)
    assert int8.binding_for(model, (0.05, (), (), "host")) is binding
    assert int8.binding_for(model, (0.04, (), (), "host")) is not binding
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
    back = {"name": "blocks.1.ff", "state": "float", "why": "its error was 9.00% in call 4, above 5.00%"}
    measured = {"state": "float", "why": "its error 7.00% is above 5.00%"}
    (sentence,) = int8.warnings_of(report(fast, back, measured))
    assert sentence == "blocks.1.ff went back to float: its error was 9.00% in call 4, above 5.00%"
    (sentence,) = int8.warnings_of(report(measured, {"state": "left", "why": "outside the repeated blocks"}))
    assert sentence == "no linear layer runs in int8: its error 7.00% is above 5.00%"
    assert int8.warnings_of(report(measured), is_file_in_int8=True) == []
    assert int8.warnings_of(report()) == ["no linear layer runs in int8: none was found"]
    chosen = int8.chosen_by(("img_mpl", "*.ff.*"), ("txt_mlp",))
    assert int8.warnings_of(report(), chosen=chosen) == [
        "no linear layer runs in int8: none is left by include img_mpl, *.ff.*, exclude txt_mlp"
    ]
    waiting = {"state": "waiting", "why": ""}  # as in training, where the weight of each call is another one
    assert int8.warnings_of(report(waiting)) == ["no linear layer runs in int8: none was measured"]
    slow = {"float_ms": 1.0, "int8_ms": 1.2}
    (sentence,) = int8.warnings_of(report(slow, slow))
    assert sentence == "int8 is slower than float here: one call of each layer takes 2.4 ms in total, 2.0 ms in float"
    assert int8.warnings_of(report({"float_ms": 1.0, "int8_ms": 1.05})) == []


def test_the_line_on_the_node_before_a_run() -> None:
    status = int8.status
    left, cannot = {"state": "left"}, {"state": "cannot be"}
    text = status(report({"state": "waiting"}, {}, left, left, cannot), "Flux", "error at most 5.0%")
    assert text == "2 linear layers of Flux for int8, error at most 5.0%; 2 left, 1 cannot be"
    assert status(report(cannot), "Flux", "") == "0 linear layers of Flux for int8; 1 cannot be"
    assert status(report(), "Flux", "include img_mpl") == "0 linear layers of Flux for int8, include img_mpl"


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch, stub_host: StubHost) -> tuple[Any, Patcher, Any]:  # noqa: F811
    """The layers of a node, its patcher and a call of the model; weights as they are in plain modules."""
    source = importlib.import_module(int8.Int8Binding.__module__).Source
    monkeypatch.setattr(int8, "LoadedWeight", lambda patcher, name, module: source())
    model = network()
    patcher = Patcher.around(model)
    found = int8.Int8Layers(patcher, int8.Settings(0.05, "", "", "host", "auto"), "1")

    def call() -> None:
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
        for block in model["blocks"]:
            x = x + block["ff"](block["attn"](x))

    return found, patcher, call


@torch.no_grad()
def test_the_record_says_what_one_run_did(layers: Any, stub_host: StubHost) -> None:  # noqa: F811
    injection, patcher, call = layers
    runs = node_module("engine.runs")
    injection.inject(patcher)
    for calls in (1, 3):
        injection.before_run(patcher)
        for _ in range(calls):
            call()
        injection.after_run(patcher)
        run = runs.remembered()[-1]
        assert (run.part, run.finished, run.settings) == ("int8", True, "settings")
        assert run.gains[0].startswith("22 of 22 linear layers in int8, not exact: relative error per layer")
        assert sum("64 -> 64, float32, 0.02 -> 0.00 MiB, error" in note for note in run.notes) == 22
        assert stub_host.said[-1] == f"Model: {run.gains[0]}"
        report_now = injection.binding.report(patcher.model.diffusion_model)
        assert {line.calls for line in report_now.of("int8")} == {calls}
    injection.after_run(patcher)
    assert len(runs.remembered()) == 2
    injection.eject(patcher)
    assert all(type(p) is nn.Parameter for p in patcher.model.parameters())


def test_without_comfy_kitchen_its_files_are_left_alone() -> None:
    kitchen = node_module("comfy.comfy_kitchen")
    if kitchen.registry_of_host() is not None:
        pytest.skip("comfy_kitchen is installed here")
    assert "no comfy_kitchen" in kitchen.why_not(torch.device("cpu"), "always")
    assert kitchen.int8_layers(network()) == 0
    assert kitchen.Served().wrapper(lambda value: value + 1, 1) == 2
