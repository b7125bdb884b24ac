"""Patch: one reversible change to a host."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

log = logging.getLogger("pascal_attn")

ON, WAITING, REFUSED, OFF, UNABLE = STATES = ("on", "waiting", "refused", "off", "unable")


class State(NamedTuple):
    """The state of one place that a patch was meant for.

    Attributes:
        name: qualified name of a module, or what else was changed.
        state: "on"; "waiting" for a call; "refused", where a check failed; "off", where it was not chosen, is not worth
            it, or has been removed; or "unable", where nothing can be done with any call.
        why: a reason, or "".
    """

    name: str
    state: str
    why: str = ""


def alike(lines: Iterable[tuple[Any, str]]) -> Iterator[tuple[Any, str]]:
    """(what, "blocks.0 and 3 more") for lines (what, name of a place) that say the same of several places."""
    places: dict[Any, list[str]] = {}
    for what, name in lines:
        places.setdefault(what, []).append(name or "(the model)")
    for what, names in places.items():
        yield what, names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


class AnyReport:
    """A report of any kind of patch. Printed, it is its text.

    Attributes:
        lines: one for each place, with at least ``name``, ``state`` and ``why`` as in :class:`State`.
    """

    lines: Sequence[Any]

    @property
    def states(self) -> list[State]:
        """The state of each place."""
        return [State(line.name or "(the model)", line.state, line.why) for line in self.lines]

    def of(self, state: str) -> list[Any]:
        """The lines of the places in this state."""
        return [line for line in self.lines if line.state == state]

    def count(self, state: str) -> int:
        """The number of places in this state."""
        return len(self.of(state))

    def text(self) -> str:
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text()


class PatchReport(AnyReport):
    """The states of all places that a patch was meant for."""

    def __init__(self, states: list[State]):
        self.lines = states

    def text(self) -> str:
        counts = collections.Counter(state.state for state in self.states)
        rows = [", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])]
        for (state, why), names in alike(((state, why), name) for name, state, why in self.states):
            rows.append(f"  {names}: {state}{': ' if why else ''}{why}")
        return "\n".join(rows)


class Patch:
    """A change that is in force until :meth:`remove`.

    Args:
        name: what was changed, for the log.
        undo: undoes the change. Called once. It restores the original only where ours is still on top; for what it had
            to leave in place it returns a list of sentences, which are logged as warnings.
        sites: in how many places the change was made.
        places: their names, for the report; refused: places that run as before, and why.

    ``with`` leaves it in force for a block:

        with patch_attention(pipe) as patch:
            pipe(prompt)
        print(patch.report())
    """

    def __init__(
        self,
        name: str,
        undo: Callable[[], list[str] | None],
        *,
        sites: int = 1,
        places: Iterable[str] = (),
        refused: Mapping[str, str] | None = None,
    ):
        self.name, self.sites = name, sites
        self._places, self._refused = list(places) or ([] if refused else [name]), refused or {}
        self._undo: Callable[[], list[str] | None] | None = undo
        self._lock = threading.Lock()
        log.info("%s: applied at %d place%s", name, sites, "" if sites == 1 else "s")

    @property
    def active(self) -> bool:
        """Whether the change is still in force."""
        return self._undo is not None

    @property
    def left_alone(self) -> dict[str, str]:
        """The places that the patch was meant for and that run as before, with the reason."""
        return {name: why for name, state, why in self.report().states if state in (REFUSED, UNABLE)}

    def report(self) -> AnyReport:
        """The state of each place that the patch was meant for. Patches that know more return a report of their own."""
        now = ON if self.active and self.sites else OFF
        refused = (State(name, REFUSED, why) for name, why in self._refused.items())
        return PatchReport([*(State(name, now) for name in self._places), *refused])

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

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"Patch({self.name!r}, sites={self.sites}, {'active' if self.active else 'removed'})"


class NothingToPatch(ValueError):
    """A model or pipeline has nothing that a patch is for."""


AnyPatch = TypeVar("AnyPatch", bound=Patch)


def require_sites(patch: AnyPatch) -> AnyPatch:
    """The patch, if it is in force anywhere; else raises NothingToPatch, which names what was left alone."""
    if patch.sites:
        return patch
    patch.remove()
    left = "; ".join(f"{name}: {why}" for name, why in patch.left_alone.items())
    raise NothingToPatch(f"{patch.name}: the model must have something to patch, got {left or 'nothing'}")


@dataclass(eq=False)
class _Layer:
    """A value at a name, what it replaced, and whether it is still wanted there."""

    ours: Any
    before: Any
    is_wanted: bool = True


_layers: dict[tuple[int, str], list[_Layer]] = {}


def replaced(owner: Any, name: str, ours: Any) -> Callable[[], list[str]]:
    """Give a class or a module an attribute, or a dict of theirs an entry; returns what gives it the one that it had,
    unless it has got another since. Those that are taken back below a newer one of ours go together with that one."""
    is_dict = isinstance(owner, dict)
    put, drop = (dict.__setitem__, dict.__delitem__) if is_dict else (setattr, delattr)
    layers = _layers.setdefault((id(owner), name), [])
    layers.append(_Layer(ours, (owner if is_dict else vars(owner)).get(name)))
    layer = layers[-1]
    put(owner, name, ours)

    def undo() -> list[str]:
        layer.is_wanted, sentences = False, []
        while layers and not layers[-1].is_wanted:
            top = layers.pop()
            if (owner if is_dict else vars(owner)).get(name) is not top.ours:
                where = repr(name) if is_dict else f"{owner.__name__}.{name}"
                sentences.append(f"{where} has been replaced since: ours stays underneath it, without effect")
            elif top.before is None:
                drop(owner, name)
            else:
                put(owner, name, top.before)
        return sentences

    return undo


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
        self._undos.append(undo)

    def __enter__(self) -> PatchGroup:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if error is not None:
            self._undo_all()

    def patch(self, *, places: Iterable[str] = (), refused: Mapping[str, str] | None = None) -> Patch:
        """The finished change as one Patch; see there."""
        return Patch(self.name, self._undo_all, sites=len(self._undos), places=places, refused=refused)

    def _undo_all(self) -> list[str]:
        sentences: list[str] = []
        while self._undos:
            sentences += self._undos.pop()() or []
        return sentences
