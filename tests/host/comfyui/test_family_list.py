"""docs/comfyui-families.md names every network that this ComfyUI can sample with."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from attn_support.comfy.graph import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "comfyui-families.md"

# What each entry of supported_models builds: its BaseModel is stopped where it would make the network.
WALK = """
import inspect, json, pkgutil
import comfy.ldm, comfy.model_base as base, comfy.supported_models as supported

class Anything(dict):  # a configuration, or weights, in which whatever is asked for is there
    def __missing__(self, key):
        return torch.zeros(4, 4) if "." in str(key) else 4
    def copy(self):
        return self

class Reached(Exception):
    pass

default = inspect.signature(base.BaseModel.__init__).parameters["unet_model"].default

def stop(self, model_config, model_type=None, device=None, unet_model=default):
    raise Reached(unet_model)

base.BaseModel.__init__ = stop
reached, failed = {}, {}
for entry in supported.models:
    try:
        config = entry(Anything(entry.unet_config))
        config.get_model(Anything(), "", device="cpu")
        failed[entry.__name__] = "built no network"
    except Reached as found:
        kind = found.args[0]
        reached.setdefault(f"{kind.__module__}.{kind.__qualname__}", []).append(entry.__name__)
    except Exception as error:
        failed[entry.__name__] = f"{type(error).__name__}: {error}"
parts = [f"comfy.ldm.{found.name}" for found in pkgutil.iter_modules(comfy.ldm.__path__)]
folders = [f"comfy.ldm.{p.name}" for root in comfy.ldm.__path__ for p in __import__("pathlib").Path(root).iterdir()
           if p.is_dir() and any(p.rglob("*.py"))]
print("FOUND", json.dumps({"reached": reached, "failed": failed, "parts": sorted({*parts, *folders})}))
"""


@cache
def rows() -> dict[str, tuple[str, str]]:
    """Network -> (state, remark); of the second table (remark, "")."""
    found = re.findall(r"^\| `([\w.]+)` \| ([^|]*?) \| ?(?:([^|]*?) ?\|)?$", PAGE.read_text(encoding="utf-8"), re.M)
    return {name: (state, remark) for name, state, remark in found}


@pytest.fixture(scope="module")
def host(host_script: Callable[..., str]) -> dict[str, Any]:
    return found_in(host_script(WALK))


def found_in(printed: str) -> dict[str, Any]:
    return json.loads(next(line for line in printed.splitlines() if line.startswith("FOUND")).partition(" ")[2])


def test_every_network_and_every_part_of_comfy_ldm_has_a_row(host: dict[str, Any]) -> None:
    assert host["failed"] == {}, "an entry of supported_models that does not say which network it builds"
    networks = tuple(host["reached"])
    assert len(networks) > 20
    assert [name for name in networks if name not in rows()] == []
    silent = [part for part in host["parts"] if not any(name.startswith(f"{part}.") for name in networks)]
    assert [part for part in silent if part not in rows()] == []


def test_each_row_has_a_state_and_those_not_run_a_reason() -> None:
    networks = {name: row for name, row in rows().items() if name.count(".") > 2}
    assert len(networks) > 50
    for name, (state, remark) in networks.items():
        assert state in {"tested", "by hand", "not run", "not sampled"}, name
        assert remark or state == "by hand", name


def families_of_rows() -> list[tuple[str, str]]:
    """(family of the tests, network) of the rows that name one."""
    rows_tested = [(name, remark) for name, (state, remark) in rows().items() if state == "tested"]
    return [(family, name) for name, remark in rows_tested for family in re.findall(r"`(\w+)`", remark)]


def test_the_rows_name_each_family_of_the_tests_once() -> None:
    assert sorted(family for family, _ in families_of_rows()) == sorted(FAMILIES)
