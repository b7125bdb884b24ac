"""These tests check what `pascal-attn second-card` and `info` say of several cards, and docs/several-cards.md."""

from dataclasses import replace
from pathlib import Path

import pytest

from pascal_attn_core.cli import main
from pascal_attn_core.cli.info import Info, describe, document
from pascal_attn_core.cli.second_card import GTX_1060, GTX_1080_TI, MODELS, P40
from pascal_attn_core.machine import facts as machine_facts
from pascal_attn_core.machine.facts import Link, Machine, describe_facts
from pascal_attn_core.machine.wheels import TorchBuild

PAGE = Path(__file__).parents[3] / "docs" / "several-cards.md"
BUILD = TorchBuild("2.14.0+cu126", "cuda", "12.6", ("sm_61",))


def test_the_page_has_the_table_that_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["second-card"]) == 0
    printed = capsys.readouterr().out.strip()
    assert printed in PAGE.read_text(encoding="utf-8")
    assert "model" in printed.splitlines()[0]


def test_more_bandwidth_a_faster_card_and_longer_calls_gain_more() -> None:
    home, slow, fast = GTX_1080_TI, GTX_1060, P40
    gains = [model.gain(home, fast, 6e9) for model in MODELS]
    assert gains == sorted(gains)
    assert 1.4 < gains[0] < gains[-1] < 2
    flux = MODELS[1]
    assert flux.gain(home, slow, 6e9) < flux.gain(home, fast, 6e9) < flux.gain(home, fast, 12e9)
    assert flux.gain(home, fast, 1e6) == 1.0


def _machine(*links: Link | None, direct: tuple[tuple[int, int], ...] = ()) -> Machine:
    cards = tuple(replace(GTX_1080_TI, arch="sm_61", total_bytes=11 << 30) for _ in links)
    return Machine("0.2.0", "3.12", "Linux", BUILD, cards, (None,) * len(cards), links=links, direct=direct)


def test_info_shows_links() -> None:
    machine = _machine(Link(3, 16, 16), Link(3, 4, 16), None, direct=((0, 1), (1, 0)))
    text = describe(Info(machine))
    assert "together    cuda:0: PCIe 3.0 x16, about 12.0 GB/s each way" in text
    assert "cuda:1: PCIe 3.0 x4 of x16, about 3.0 GB/s each way" in text
    assert "cuda:2: PCIe link unknown" in text
    assert "cuda:0 and cuda:1: copies cross directly" in text
    assert "cuda:1 and cuda:2: copies cross through the computer's memory" in text
    assert "cuda:0 and cuda:1: copies cross directly" in "\n".join(describe_facts(machine))
    assert document(Info(machine))["links"][1] == Link(3, 4, 16)


def test_the_facts_of_two_cards_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"GPU-0": "3, 16, 16\n", "GPU-1": "3, 1, 16\n"}
    stand_ins = {
        "device_names": lambda: ["cuda:0", "cuda:1"],
        "device_info": lambda name: P40,
        "free_bytes": lambda name: None,
        "smi_id": lambda device: f"GPU-{device.index}",
        "direct_pairs": lambda count: ((0, 1),),
        "_asked": lambda query, *more: said[more[-1]] if more else "",
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(machine_facts, name, stand_in)
    machine = machine_facts.look_around()
    assert machine.links == (Link(3, 16, 16), Link(3, 1, 16))
    assert machine.direct == ((0, 1),)
    assert machine_facts.look_around(asks_devices=False).links == ()
