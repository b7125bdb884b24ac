"""All that is known of a device belongs to one object, which can be replaced for a while."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.runtime import Runtime, runtime_of, runtimes, using

CPU = torch.device("cpu")


class Part:
    def __init__(self, runtime: Runtime):
        self.runtime = runtime


class OtherPart(Part):
    pass


def test_a_part_is_made_once_from_its_runtime() -> None:
    runtime = Runtime(CPU)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: runtime.part(Part), range(8)))
    assert len(set(map(id, found))) == 1
    assert found[0].runtime is runtime


def test_what_makes_a_part_can_be_given_and_is_found_under_the_class_it_stands_for() -> None:
    runtime = Runtime(CPU, parts={Part: OtherPart})
    assert type(runtime.part(Part)) is OtherPart
    assert runtime.part(Part) is runtime.part(Part)
    ready = OtherPart(runtime)
    assert Runtime(CPU, parts={Part: lambda _: ready}).part(Part) is ready


def test_a_runtime_is_the_one_of_its_device_while_the_block_runs() -> None:
    before = runtime_of(CPU)
    card = DeviceInfo("cuda", "GTX 1080 Ti", capability=(6, 1), num_sms=28)
    with using(Runtime("cpu", card)) as runtime:
        assert runtime_of(CPU) is runtime
        assert runtime_of(CPU).info is card
        assert runtime in runtimes()
        with using(Runtime("cuda:3", card)) as other:
            assert runtime_of(torch.device("cuda", 3)) is other
        assert other not in runtimes()
    assert runtime_of(CPU) is before
