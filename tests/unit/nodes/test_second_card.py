"""Pascal Second Card without ComfyUI: what the engine shares and reports, and which card is taken."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attn_support.comfy.runs import findings
from attn_support.comfy.stub import StubHost, core_module, make_engine, node_module

NODE, HOST, TEXT = node_module("second_card"), node_module("comfy.host"), node_module("reporting.text")
FIND, Arguments = node_module("reporting.findings"), core_module("call").Arguments


@pytest.fixture(autouse=True)
def _helpers_of_its_own(stub_host: StubHost) -> Iterator[None]:
    core = core_module("machine.runtime")
    with core.using(core.Runtime("cpu")):
        yield


def _attend(engine: Any, tokens: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, tokens, 16, generator=generator) for _ in range(3))
    return engine.attend(Arguments(query, key, value), block="double 0")


def test_calls_are_shared_and_the_report_says_what_each_did() -> None:
    engine = make_engine(route="torch")
    alone = _attend(engine)
    engine.share(("cpu", "cpu"), 128)
    engine.begin()
    out = _attend(engine)
    _attend(engine, 100)
    run = engine.end()
    assert torch.equal(out, alone)
    assert run.routes() == {"several": 1, "torch": 1}
    assert run.shares == {"cpu": 2, "cpu #2": 2}
    assert "shared by cpu and cpu from 128 tokens" in run.settings
    assert "on one device: it has fewer than 128 queries or keys" in "".join(run.reasons("taken"))
    engine.share((), 1024)  # a run without the node
    engine.begin()
    _attend(engine)
    after = engine.end()
    assert (after.shares, after.routes()) == ({}, {"torch": 1})
    assert "cpu 50%" in TEXT.report_text(findings(run))


def test_calls_on_the_other_card_keep_it_busy_for_as_long_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the clones of ComfyUI's work split make them, whose decisions are remembered."""
    seen: list[tuple[str, list[str]]] = []
    module = node_module("engine.engine")
    monkeypatch.setattr(module, "seen_on", lambda device, devices: seen.append((str(device), list(map(str, devices)))))
    engine = make_engine(route="torch")
    engine.share(("cuda:0", "cpu"), 128)
    engine.begin()
    for _ in range(3):
        _attend(engine)
    run = engine.end()
    assert seen == [("cpu", ["cuda:0", "cpu"])] * 3
    assert run.routes() == {"torch": 3}
    assert run.reasons("taken").popitem()[0].endswith("its tensors are on cpu, and only calls on cuda:0 are shared")


def test_what_went_wrong_is_a_note_of_the_run() -> None:
    runtime, several = core_module("machine.runtime"), core_module("routes.several")
    engine = make_engine(route="torch")
    engine.share(("cpu", "cpu"), 128)
    engine.begin()
    _attend(engine)
    runtime.runtime_of(torch.device("cpu")).part(several.Helpers)[torch.device("cpu"), 0].leave_alone("cpu is busy")
    _attend(engine)
    assert "cpu is busy" in engine.end().notes


@pytest.mark.parametrize(
    ("home", "wanted", "cards", "expected"),
    [
        ("cuda:0", "auto", 2, ("cuda:1", "")),
        ("cuda:1", "auto", 2, ("cuda:0", "")),
        ("cuda:0", "cuda:2", 3, ("cuda:2", "")),
        ("cuda:0", "cuda:0", 2, ("", "cuda:0 holds the model itself; choose another card, or auto")),
        ("cuda:0", "cuda:5", 2, ("", "there is no cuda:5 here, only cuda:1")),
        ("cpu", "auto", 2, ("", "the model is on cpu, not on a card")),
    ],
)
def test_which_card_helps(home: str, wanted: str, cards: int, expected: tuple[str, str], monkeypatch) -> None:
    monkeypatch.setattr(HOST, "visible_cards", lambda: [f"cuda:{i}" for i in range(cards)])
    assert NODE._other_card(home, wanted) == expected


def test_one_card_passes_the_model_on(monkeypatch: pytest.MonkeyPatch, stub_host: StubHost) -> None:
    monkeypatch.setattr(HOST, "visible_cards", lambda: ["cuda:0"])
    model = SimpleNamespace(load_device=torch.device("cuda", 0))
    assert NODE.PascalSecondCard.VALIDATE_INPUTS(device="cuda:7") is True, "a workflow of another machine"
    assert NODE.PascalSecondCard().patch(model, "auto", 2048, "3") == (model,)
    assert stub_host.said == [
        "second card: there is only one card (ComfyUI's --cuda-device and CUDA_VISIBLE_DEVICES hide others): "
        "the model is returned unchanged"
    ]
