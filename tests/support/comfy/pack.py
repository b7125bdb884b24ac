"""The ComfyUI pack as a package, without ComfyUI: what its modules import on import is all here."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "pascal_attention_pack"
ROOT = Path(__file__).parents[3]


def load_pack() -> ModuleType:
    """The repository's root as ComfyUI's loader imports it: a package by a name of its own, loaded once."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            NAME, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[NAME]
            raise
    return sys.modules[NAME]


def node_module(name: str) -> Any:
    """A module of the pack's folder ``nodes``."""
    return importlib.import_module(f"{load_pack().__name__}.nodes.{name}")


def core_module(name: str) -> Any:
    """A module of the core that the pack brings."""
    return importlib.import_module(f"{load_pack().__name__}.pascal_attn_core.{name}")
