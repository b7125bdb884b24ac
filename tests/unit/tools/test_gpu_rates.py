"""The rates of multiplications: what is launched, and that the machine code has what is to be measured."""

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from attn_support.fused.device import CardKernels, emulated_card
from attn_support.fused.driver import cubin
from attn_support.fused.emulation import CARD
from attn_support.randomness import some

from pascal_attn_core.fused.gpu import nvrtc
from pascal_attn_core.fused.launch import Launch
from tools.gpu import rates
from tools.gpu.rates import WHAT, Rate
from tools.models.sass import loops, maxwell, sections, within


def _compiled(text: str, arch: int, macros: dict[str, Any]) -> nvrtc.Compiled:
    rate = Rate("int8", macros["PA_D"], "float32", what=WHAT[macros["PA_RATE"]])
    assert (text, macros) == (rates.text(), rate.macros())
    return nvrtc.Compiled(cubin(rate, arch), "")


def _measured(path: Path, card: Any = CARD) -> tuple[int, list[Launch]]:
    compiler = Mock(version=(12, 6), compile=_compiled)
    with emulated_card(lambda launch: None, card, CardKernels, find_compiler=lambda arch: compiler) as kernels:
        return rates.main(["--device", "cpu", "--json", str(path), "--chunks", "2"]), kernels.queued


def test_every_way_is_timed_in_turns_with_ffma(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, queued = _measured(tmp_path / "rates.json")
    assert status == 0
    found = json.loads((tmp_path / "rates.json").read_text())
    assert {tiles: list(each) for tiles, each in found.items()} == {
        f"head_dim {dim}": ["dp4a", "dp4a and loads"] for dim in (64, 128)
    }
    assert all(rate > 0 for each in found.values() for rate in each.values())
    assert capsys.readouterr().out.startswith("in units of FFMA, head_dim 64: dp4a ")
    names = [launch.variant.name for launch in queued]
    assert names[3:6] == names[6:9] == names[:3] == [f"rate-64 {what}" for what in WHAT]
    assert {(launch.grid, launch.threads, launch.params.rows) for launch in queued} == {((56, 1, 1), 128, 2)}


@pytest.mark.parametrize("what", WHAT)
def test_the_kernel_multiplies_as_often_as_it_says(what: str, tmp_path: Path) -> None:
    """All of its sums are written, and only the loop over chunks multiplies."""
    library = next((lib for lib in nvrtc.loaded(nvrtc.Nvrtc, nvrtc.candidates()) if 61 in lib.archs()), None)
    if library is None:
        pytest.skip("needs NVRTC")
    for head_dim in some((64, 128), 2):
        rate = Rate("int8", head_dim, "float32", what=what)
        code = maxwell(sections(library.compile(rates.text(), 61, rate.macros()).cubin)["pa_pack_rate"])
        (loop,) = [loop for loop in loops(code) if len(within(code, loop)) > 512]
        counts = Counter(i.kind for i in within(code, loop))
        kind = "FFMA" if what == "FFMA" else "IDP"
        assert counts[kind] == 512 == sum(i.kind == kind for i in code)
        assert counts["LDS"] == (32 if what == "dp4a and loads" else 0)
        assert sum(counts.values()) < 512 + 60
