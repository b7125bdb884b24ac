"""These tests check what `pascal-attn info` says of several cards and the links between them."""

from dataclasses import replace

import pytest

from pascal_attn_core.cli.info import Info, describe, document
from pascal_attn_core.machine import facts as machine_facts
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.facts import Link, Machine, describe_facts, parse_link
from pascal_attn_core.machine.wheels import TorchBuild

CARD = DeviceInfo("cuda", "GTX 1080 Ti", (6, 1), num_sms=28, clock_hz=1_582_000_000)
BUILD = TorchBuild("2.14.0+cu126", "cuda", "12.6", ("sm_61",))


@pytest.mark.parametrize(
    ("line", "link"),
    [("3, 8, 16\n", Link(3, 8, 16)), ("[N/A], 8, 16", None), ("", None), ("3, 8", None), ("1, 1, 1", Link(1, 1, 1))],
)
def test_a_line_of_nvidia_smi_is_read(line: str, link: Link | None) -> None:
    assert parse_link(line) == link
    assert Link(9, 4, 4).text == "PCIe 9.0 x4", "of an unknown generation no speed is said"


def _machine(*links: Link | None, direct: tuple[tuple[int, int], ...] = ()) -> Machine:
    cards = tuple(replace(CARD, arch="sm_61", total_bytes=11 << 30) for _ in links)
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
        "device_info": lambda name: CARD,
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
