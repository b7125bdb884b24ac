"""Cards with tensor cores and with matrix units; without g++ only the machine code of this folder is tested."""

from pathlib import Path

import pytest
from attn_support.fused.emulation import GXX, T4, V100
from attn_support.fused.hip import RX_7600
from attn_support.randomness import some

from pascal_attn_core.machine.device import DeviceInfo

CARDS = {"T4": T4, "V100": V100, "RX 7600": RX_7600}


@pytest.fixture(params=CARDS)
def card(request: pytest.FixtureRequest) -> DeviceInfo:
    return CARDS[request.param]


def _is_of_a_table(item: pytest.Item) -> bool:
    """Whether a test takes a card and a row: of those on AMD's, one of four runs by day."""
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return params.get("card") == "RX 7600" and len(params) > 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if GXX is None and item.path.parent == Path(__file__).parent and item.path.stem != "test_amd_machine_code":
            item.add_marker(pytest.mark.skip(reason="needs g++ to build the emulation"))
    of_tables = [item for item in items if item.path.stem == "test_tensor" and _is_of_a_table(item)]
    by_day = some(of_tables, 4)
    for item in of_tables:
        if item not in by_day:
            item.add_marker(pytest.mark.skip(reason="in profile nightly"))
