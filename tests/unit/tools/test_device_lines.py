"""The list of lines that only run on a card."""

from collections import Counter

from tools import device_lines


def test_what_is_said_to_be_unreached_is_there() -> None:
    counts = Counter(
        f"{file}:{name}" for file, lines in device_lines.device_lines().items() for name, _ in lines.values()
    )
    assert {name: count for name, (count, _) in device_lines.UNREACHED.items() if count > counts[name]} == {}
