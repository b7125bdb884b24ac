"""These tests pickle what users hold: torch's function under the switch, errors, configs, reports."""

import copy
import importlib
import inspect
import pickle
import pkgutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.fresh import run
from attn_support.sdpa_switch import TILED, TORCH, qkv, served, torch_stays_torch  # noqa: F401

import pascal_attn_core
from pascal_attn_core import sdpa
from pascal_attn_core.sdpa_patch import disable, enable


class Holder(torch.nn.Module):
    """A model that keeps the function it found when it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = F.scaled_dot_product_attention


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_model_that_holds_sdpa_is_saved_as_a_reference_by_name(protocol: int) -> None:
    enable(TILED)
    saved = pickle.dumps(Holder(), protocol)
    assert b"torch.nn.functional" in saved
    assert b"pascal" not in saved.replace(__name__.encode(), b""), "it must load where this package is not installed"
    q, k, v = qkv()
    assert served(lambda: pickle.loads(saved).attend(q, k, v))
    disable()
    assert pickle.loads(saved).attend is TORCH


ARGUMENTS: dict[str, tuple[Any, ...]] = {"UnsupportedAttention": ("tiled", ["head_dim 300 > 256", "float64"])}


def _errors() -> list[type[Exception]]:
    """Every exception class that a module of this package defines."""
    found = set()
    for module in pkgutil.walk_packages(pascal_attn_core.__path__, "pascal_attn_core."):
        if module.name.endswith((".auto", ".__main__")):  # their import does something
            continue
        try:
            values = vars(importlib.import_module(module.name)).values()
        except ImportError:  # an optional package is missing
            continue
        found |= {value for value in values if inspect.isclass(value) and issubclass(value, Exception)}
    return sorted((one for one in found if one.__module__.startswith("pascal_attn_core")), key=lambda one: one.__name__)


class Windowed(torch.nn.Module):
    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return sdpa(query, query, query, window=(9, 3), config=TILED)


def test_saved_programs_run_in_another_process_with_another_version(tmp_path: Path) -> None:
    query = torch.randn(1, 2, 70, 8)
    torch.save((query, Windowed()(query)), tmp_path / "query.pt")
    torch.jit.save(torch.jit.trace(Windowed(), query), tmp_path / "traced.pt")
    torch.export.save(torch.export.export(Windowed(), (query,)), tmp_path / "exported.pt2")
    program = """
        import sys
        import torch
        import pascal_attn_core.version
        pascal_attn_core.version.__version__ = "999.0"
        import pascal_attn_core.routes.operator
        query, expected = torch.load(sys.argv[1])
        torch.testing.assert_close(torch.jit.load(sys.argv[2])(query), expected)
        torch.testing.assert_close(torch.export.load(sys.argv[3]).module()(query), expected)
        """
    run(program, *(str(tmp_path / name) for name in ("query.pt", "traced.pt", "exported.pt2")))


def test_every_error_of_ours_comes_back_from_pickle_as_it_was() -> None:
    kinds = _errors()
    assert {"UnsupportedAttention", "KernelUnavailable", "NotTokenwise"} <= {kind.__name__ for kind in kinds}
    for kind in kinds:
        error = kind(*ARGUMENTS.get(kind.__name__, ("a sentence",)))
        error.place = "worker 3"  # type: ignore[attr-defined]
        for back in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert (type(back), str(back), back.args, vars(back)) == (kind, str(error), error.args, vars(error))
