"""Patch: one reversible change to a host."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

log = logging.getLogger("pascal_attn")


class Patch:
    """A change that is in force until :meth:`remove`.

    Args:
        name: what was changed, for the log.
        undo: undoes the change. Called once. It restores the original only where ours is still on top; for what it had
            to leave in place it returns a list of sentences, which are logged as warnings.
        sites: in how many places the change was made.

    ``with`` leaves it in force for a block:

        with patch_pipeline(pipe):
            pipe(prompt)
    """

    def __init__(self, name: str, undo: Callable[[], list[str] | None], *, sites: int = 1):
        self.name, self.sites = name, sites
        self._undo: Callable[[], list[str] | None] | None = undo
        self._lock = threading.Lock()
        log.info("%s: applied at %d place%s", name, sites, "" if sites == 1 else "s")

    @property
    def active(self) -> bool:
        """Whether the change is still in force."""
        return self._undo is not None

    def remove(self) -> None:
        """Undo the change. A second call does nothing."""
        with self._lock:
            undo, self._undo = self._undo, None
        if undo is None:
            return
        for sentence in undo() or []:
            log.warning("%s: %s", self.name, sentence)
        log.info("%s: removed", self.name)

    def __enter__(self) -> Patch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"Patch({self.name!r}, sites={self.sites}, {'active' if self.active else 'removed'})"


class PatchGroup:
    """Collects undo steps while a change is made in many places; after a failure half-way all of them are undone.

    with PatchGroup("my change") as group:
        for module in modules:
            group.add(swap(module))
    patch = group.patch()
    """

    def __init__(self, name: str):
        self.name = name
        self._undos: list[Callable[[], list[str] | None]] = []

    def add(self, undo: Callable[[], list[str] | None]) -> None:
        """Remember how to undo the step just made."""
        self._undos.append(undo)

    def __enter__(self) -> PatchGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._undo_all()

    def patch(self) -> Patch:
        """The finished change as one Patch."""
        return Patch(self.name, self._undo_all, sites=len(self._undos))

    def _undo_all(self) -> list[str]:
        sentences: list[str] = []
        while self._undos:
            sentences += self._undos.pop()() or []
        return sentences
