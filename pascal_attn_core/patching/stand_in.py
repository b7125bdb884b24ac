"""Modules that stand in for another package, so that programs written for it import ours: ``import flash_attn``."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.metadata
import importlib.util
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..config import log_once
from ..version import __version__
from .patch import Patch

Around = Callable[[str, Callable[..., Any]], Callable[..., Any]]
# The least compute capability that packages have kernels for.
_LEAST = {"flash_attn": (8, 0), "flash_attn_interface": (8, 0), "sageattention": (8, 0), "xformers": (7, 5)}
_lock = threading.RLock()


class StandIn(importlib.metadata.DistributionFinder, importlib.abc.Loader):
    """Finds and loads modules by the names of another package, and the metadata of its distribution.

    Args:
        provides: the distribution and the version whose API the modules have, ``"flash_attn==2.8.4"``: the name that
            ``importlib.metadata`` is asked for. What it answers, and the modules' ``__version__``, has our own version
            as a local label.
        modules: name of a module -> where its names come from: ``"module: a b c=d"``, our d under the name c;
            a module that begins with "." is relative to ``package``.
        package: of relative modules.
        eager: modules that are loaded by :meth:`put_in`, so that they exist without being imported; the others are
            loaded when a program imports them.
        adapt: changes the members of a module, given its name and them, before they are set.
        around: ``around(name, function)`` gives what programs find for each function whose name in its module begins
            as one of ``counted``; name is ``"module.function"``.
    """

    def __init__(
        self,
        provides: str,
        modules: Mapping[str, Sequence[str]],
        *,
        package: str,
        eager: Sequence[str] = (),
        adapt: Callable[[str, dict[str, Any]], None] | None = None,
        around: Around | None = None,
        counted: tuple[str, ...] = (),
    ):
        self.distribution, _, version = provides.partition("==")
        self.version, self.package = f"{version}+pascal.{__version__}", package
        self.modules, self._eager, self._adapt = modules, eager, adapt
        self._around, self._counted = around, counted
        self._loaded: dict[str, ModuleType] = {}
        self._hidden: dict[str, ModuleType] = {}

    def put_in(self) -> None:
        """Put the modules where ``import`` finds them; what was imported under their names before is hidden
        meanwhile."""
        try:
            roots = tuple(f"{name}." for name in self.modules if "." not in name)
            for name, module in list(sys.modules.items()):
                if name in self.modules or name.startswith(roots):
                    self._hidden[name] = sys.modules.pop(name, module)
            sys.meta_path.insert(0, self)
            for name in self._eager:
                importlib.import_module(name)
        except BaseException:
            self.take_away()
            raise

    def take_away(self) -> list[str]:
        """Undo :meth:`put_in`; returns what could not be undone."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        sentences = []
        for name, module in self._loaded.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
            elif name in sys.modules:
                sentences.append(f"{name} was replaced in sys.modules since: left in place")
        for name, before in self._hidden.items():
            sys.modules.setdefault(name, before)
        self._loaded, self._hidden = {}, {}
        return sentences

    # ---- what the import system asks ---------------------------------------------------------------------------------

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.modules:
            return None
        is_package = any(other.startswith(f"{name}.") for other in self.modules)
        return ModuleSpec(name, self, origin=__file__, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ModuleType(spec.name, f"Stands in for {spec.name}: {self.package}.")

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        members: dict[str, Any] = {"__file__": __file__, "__version__": self.version}
        for source in self.modules[name]:
            members.update(self._members(source))
        if self._adapt is not None:
            self._adapt(name, members)
        for member, value in members.items():
            if self._around is not None and member.startswith(self._counted) and callable(value):
                members[member] = self._around(f"{name}.{member}", value)
        vars(module).update(members)
        self._loaded[name] = module

    def _members(self, source: str) -> dict[str, Any]:
        """The objects that ``"module: a b c=d"`` names, by the names that programs find."""
        where, _, names = source.partition(": ")
        ours = importlib.import_module(where, self.package)
        pairs = (member.partition("=") for member in names.split())
        return {public: getattr(ours, own or public) for public, _, own in pairs}

    def find_distributions(self, context: Any = None) -> Iterator[_Metadata]:
        asked = self.distribution if context is None or context.name is None else context.name
        if re.sub("[-_.]", "_", asked.lower()) == self.distribution.lower().replace("-", "_"):
            yield _Metadata(self.distribution, self.version)


class Installer:
    """Installs the stand-ins of one package by the name of its top module, which may differ by an option. The one in
    force is shared by all who ask for one."""

    def __init__(self, root: str, option: str = ""):
        self._root, self._option = root, option
        self._users, self._value = 0, None
        self._in_force: Any = None

    def install(self, make: Callable[[], StandIn], value: Any = None, *, replace: bool | None) -> Patch:
        """Install the stand-in that ``make`` returns, or share the one in force, which goes with the last Patch.

        Args:
            replace: whether it may take the place of a real package that is installed; None = of one that cannot run
                on this machine's devices.
        Raises:
            ValueError: the stand-in in force has another value of the option.
            RuntimeError: the real package is installed and stays.
        """
        with _lock:
            if not self._users:
                refuse_real_package(self._root, replace)
                self._value, self._in_force = value, make()
                self._in_force.put_in()
            elif self._value != value:
                raise ValueError(
                    f"{self._option} must be {self._value!r} as in the installation in force, got {value!r}"
                )
            self._users += 1
            return Patch(self._in_force.distribution, self._release, sites=len(self._in_force.modules))

    def _release(self) -> list[str]:
        with _lock:
            self._users -= 1
            return [] if self._users else self._in_force.take_away()


class _Metadata(importlib.metadata.Distribution):
    """The metadata that ``importlib.metadata`` finds under another package's name."""

    def __init__(self, name: str, version: str):
        lines = ("Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", "Summary: Pascal Attention", "")
        self._files = {"METADATA": "\n".join(lines), "top_level.txt": name}

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: this stands in for another package and has no files")


def real_package(name: str) -> ModuleSpec | None:
    """Where a package of that name, not ours, would be imported from; None = nowhere. ValueError: a program has made
    one by hand."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or isinstance(spec.loader, StandIn) else spec


def refuse_real_package(name: str, replace: bool | None, hint: str = "") -> None:
    """Raise RuntimeError if a package of that name, not ours, can be imported and is not to be replaced: see
    :meth:`Installer.install`. If it is replaced because it cannot run, the log says so."""
    spec = None if replace else real_package(name)
    if spec is None:
        return
    found = spec.origin or spec.name
    reason = _cannot_run(name, spec) if replace is None else ""
    if not reason:
        raise RuntimeError(f"{name} must not be installed, got the one at {found}; pass replace=True to hide it{hint}")
    log_once(logging.WARNING, "%s", f"{name} at {found} cannot run here, {reason}: Pascal Attention takes its place")


def _cannot_run(name: str, spec: ModuleSpec) -> str:
    """Why no device of this machine can run a real package that is installed; empty = one may."""
    least = _LEAST.get(name)
    if least is None or torch.version.hip:  # some of AMD's cards run the Triton kernels that these packages have
        return ""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if name == "sageattention" and _version_of(name).startswith("1."):
        least = (7, 5)  # in Triton alone
    found = max(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))
    if found < least:
        return f"it needs compute capability {_dotted(least)}, and the newest card has {_dotted(found)}"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if name == "xformers" and not any(any(folder.glob("_C*.*")) for folder in folders):
        return "it has no compiled kernels"
    return ""


def _version_of(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
