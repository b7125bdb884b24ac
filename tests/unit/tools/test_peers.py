"""tools/peers.py: other projects' attention runs in the benchmark, and leaves torch's function alone."""

import pytest
from attn_support import fresh

from tools import peers


def test_a_peer_is_imported_where_it_runs_and_leaves_torchs_function_alone() -> None:
    pytest.importorskip("pascal_attn")
    pytest.importorskip("noflash_attention")
    fresh.run(
        """
        import sys
        import torch
        import torch.nn.functional as F
        from pascal_attn_core.cli.bench.candidates import race
        from pascal_attn_core.cli.bench.contest import BenchSettings
        from pascal_attn_core.cli.bench.shapes import Shape
        from tools.peers import installed

        original = F.scaled_dot_product_attention
        found = installed()
        assert len(found) == 6
        assert not {"noflash_attention", "pascal_attn"} & set(sys.modules)
        call = Shape("tiny", "a tiny call", 1, 2, 2, 48, 40, 16, mask="bool").make()
        for backward in (False, True):
            results = race(call, found, BenchSettings(rounds=1, backward=backward))
            right = [result.name for result in results if not result.note and result.error < 1e-5]
            assert len(right) == 6 - 2 * backward, results  # two work in place: no gradients
        assert F.scaled_dot_product_attention is original
        """
    )


def test_missing_peers_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert peers.installed() == []
    assert capsys.readouterr().out.count("is not installed: not compared") == 2
