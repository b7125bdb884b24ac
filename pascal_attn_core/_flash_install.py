"""Let ``import flash_attn`` find ours."""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .patching import Patch
from .version import __version__

# The version whose words we speak; behind the "+" whose they are.
VERSION = f"2.8.4+pascal.{__version__}"
_ROOT = "flash_attn"
_INTERFACE = (
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
)
_PADDING = ("index_first_axis", "index_put_first_axis", "pad_input", "unpad_input")
_MODULES = {_ROOT: _INTERFACE, f"{_ROOT}.flash_attn_interface": _INTERFACE, f"{_ROOT}.bert_padding": _PADDING}

_lock = threading.Lock()
_installed: list[_Installation] = []
_users = 0


def install_as_flash_attn(*, replace: bool = False) -> Patch:
    """Let ``flash_attn``, ``flash_attn.flash_attn_interface`` and ``flash_attn.bert_padding`` mean our functions.

    Code that has imported the name before, or found that it is missing, keeps what it found: call this first. Package
    metadata says so too (``importlib.metadata.version("flash_attn")`` is ``"2.8.4+pascal..."``), since that is what
    Transformers asks: with a CUDA device its ``is_flash_attn_2_available()`` is then True, and
    ``attn_implementation="flash_attention_2"`` runs on ours; without CUDA it stays False, as with the real package.
    Diffusers also wants functions that the real package keeps private, reports that they are missing and goes on
    without; use :func:`pascal_attn_core.diffusers.patch_pipeline` there. Other submodules (``flash_attn.ops``,
    ``flash_attn.layers``) do not exist.

    Args:
        replace: take the place of the real package where it is installed.
    Returns:
        A Patch; ``.remove()`` takes away what is ours, and brings back what was there.
    Raises:
        RuntimeError: the real package is installed.
    """
    global _users
    with _lock:
        if not _installed:
            if not replace and _real_package() is not None:
                raise RuntimeError(
                    f"flash_attn must not be installed, got the one at {_real_package()}; pass replace=True to hide it"
                )
            _installed.append(_Installation())
        _users += 1
    return Patch("flash_attn", _release, sites=len(_MODULES))


def _release() -> list[str]:
    global _users
    with _lock:
        _users -= 1
        return _installed.pop().undo() if not _users else []


def _real_package() -> str | None:
    spec = importlib.util.find_spec(_ROOT)
    return None if spec is None else str(spec.origin or spec.name)


class _Installation:
    """Our entries in ``sys.modules`` and on ``sys.meta_path``."""

    def __init__(self) -> None:
        self.before = {name: module for name, module in sys.modules.items() if _is_below_root(name)}
        for name in self.before:
            del sys.modules[name]
        self.modules = _modules()
        sys.modules.update(self.modules)
        self.finder = _MetadataFinder()
        sys.meta_path.insert(0, self.finder)

    def undo(self) -> list[str]:
        """Take away what is ours, and only that."""
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        sentences = []
        for name, module in self.modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
            elif name in sys.modules:
                sentences.append(f"{name} was replaced in sys.modules since: left in place")
        for name, before in self.before.items():
            sys.modules.setdefault(name, before)
        return sentences


def _modules() -> dict[str, ModuleType]:
    from . import flash_attn as ours

    modules = {}
    for name, members in _MODULES.items():
        module: Any = ModuleType(name, f"Stands in for {name}: pascal_attn_core.flash_attn.")
        module.__spec__ = ModuleSpec(name, None, origin=ours.__file__, is_package=name == _ROOT)
        module.__package__, module.__file__, module.__version__ = _ROOT, ours.__file__, VERSION
        for member in members:
            setattr(module, member, getattr(ours, member))
        modules[name] = module
    root: Any = modules[_ROOT]
    root.__path__ = []
    for name, module in modules.items():
        if name != _ROOT:
            setattr(root, name.rpartition(".")[2], module)
    return modules


def _is_below_root(name: str) -> bool:
    return name == _ROOT or name.startswith(f"{_ROOT}.")


class _Metadata(importlib.metadata.Distribution):
    """What ``importlib.metadata`` sees of us under the name of flash-attn."""

    def read_text(self, filename: str) -> str | None:
        files = {
            "METADATA": f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {VERSION}\nSummary: Pascal Attention\n",
            "top_level.txt": _ROOT,
        }
        return files.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: this stands in for flash_attn and has no files")


class _MetadataFinder(importlib.metadata.DistributionFinder):
    """Finds our metadata, and no modules."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        return None

    def find_distributions(self, context: Any = None) -> Iterator[_Metadata]:
        name = None if context is None else context.name
        if name is None or name.lower().replace("-", "_").replace(".", "_") == _ROOT:
            yield _Metadata()
