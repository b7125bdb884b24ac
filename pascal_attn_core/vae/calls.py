"""The methods of a patched VAE."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..device import MIB
from ..observe.memory import available_bytes
from .banded import Banded, ordinary
from .proof import differs
from .report import VaeCall
from .run import Figures, NotInBands, Run, is_out_of_memory, same_random_numbers

METHODS = ("decode", "encode")
_CPU_BUDGET = 64 * MIB
_REMEMBERED = 100  # calls in the report
_running = threading.local()


class Settings(NamedTuple):
    """The arguments of :func:`.patch_vae`."""

    budget_mib: float | None
    keep: str
    when_needed: bool
    verify: bool
    progress: Callable[[float], None] | None
    expected_bytes: Callable[..., int] | None


class Site:
    """One method of one VAE.

    Attributes:
        own: the method as it was; None = what the VAE has now.
        calls: the last ones.
    """

    def __init__(self, vae: nn.Module, name: str, settings: Settings, own: Callable[..., Any] | None = None):
        self.vae, self.name, self.settings = vae, name, settings
        self.own = getattr(vae, name) if own is None else own
        self.calls: deque[VaeCall] = deque(maxlen=_REMEMBERED)
        self._proofs: dict[tuple[Any, ...], str] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        place, given = _input(args, kwargs)
        why_not = self._why_not(given)
        if why_not is not None:
            return self.own(*args, **kwargs)
        start = time.perf_counter()

        def note(state: str, why: str, figures: Figures | None = None) -> None:
            self.calls.append(
                VaeCall(self.name, tuple(given.shape), state, why, time.perf_counter() - start, figures)
            )

        reason = ""
        if self.settings.when_needed:
            reason = self._does_not_fit(given)
            if not reason:
                try:
                    out = self.own(*args, **kwargs)
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    reason = "it ran out of memory as it is"
                else:
                    note("as it is", "it fits")
                    return out
                if given.device.type == "cuda":
                    torch.cuda.empty_cache()
        refused = self._refusal(given, place, args, kwargs)
        if refused:
            note("refused", refused)
            return self.own(*args, **kwargs)
        try:
            out, figures = self._in_bands(given, place, args, kwargs)
        except NotInBands as error:
            note("refused", str(error))
            return self.own(*args, **kwargs)
        note("in bands", reason, figures)
        return out

    def _why_not(self, given: Any) -> str | None:
        """Why a call is none for us: it passes as it is."""
        if getattr(_running, "on", False):
            return "within another call in bands"
        if type(given) is not Tensor or given.dim() < 3 or not given.is_floating_point() or not given.numel():
            return "the input is not a plain tensor of at least three dimensions"
        if given.device.type == "meta" or torch.compiler.is_compiling():
            return "it is being traced"
        if torch.is_grad_enabled() and (given.requires_grad or any(p.requires_grad for p in self.vae.parameters())):
            return "gradients are needed" if self.vae.training or given.requires_grad else None
        return None

    def _does_not_fit(self, given: Tensor) -> str:
        estimate, free = self.settings.expected_bytes, available_bytes(given.device)
        if estimate is None or free is None:
            return ""
        expected = estimate(self.name, tuple(given.shape), given.dtype)
        return f"it needs {expected / MIB:.0f} MiB as it is, {free / MIB:.0f} are free" if expected > free else ""

    def _budget(self, device: torch.device) -> int:
        if self.settings.budget_mib is not None:
            return int(self.settings.budget_mib * MIB)
        free = None if device.type == "cpu" else available_bytes(device)
        return _CPU_BUDGET if free is None else int(0.7 * free)

    def _refusal(self, given: Tensor, place: Any, args: tuple, kwargs: dict[str, Any]) -> str:
        """Why this kind of call must not run in bands; "" = it may."""
        if not self.settings.verify:
            return ""
        key = (given.dtype, given.device, given.dim(), given.shape[1], tuple(sorted(kwargs)), len(args))
        with self._lock:
            if key not in self._proofs:

                def whole(sample: Tensor) -> Any:
                    with _without_tiles(self.vae):
                        return self.own(*_replaced(args, kwargs, place, sample)[0], **_replaced(args, kwargs, place, sample)[1])

                def banded(sample: Tensor) -> Any:
                    run = Run(sample.device, 1 << 62, least_bands=3)
                    return self._call(run, sample, place, args, kwargs)

                with _in_bands_now(is_trial=True), same_random_numbers(given.device):
                    self._proofs[key] = differs(whole, banded, given, is_picture=self.name.startswith("encode"))
            return self._proofs[key]

    def _in_bands(self, given: Tensor, place: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Figures]:
        budget, keep = self._budget(given.device), self.settings.keep
        expected = self._rehearsal(given, place, args, kwargs, budget) if self._needs_plan(given) else None
        if expected is not None:
            free = available_bytes("cpu")
            if free is not None and expected.host_bytes > free:
                raise MemoryError(
                    f"{self.name} of {list(given.shape)} in bands needs {expected.host_bytes / MIB:.0f} MiB of host "
                    f"memory for what lies between its layers, {free / MIB:.0f} are free"
                )
        progress, done = self.settings.progress, 0

        def on_band() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(0.0 if expected is None else min(1.0, done / max(expected.bands, 1)))

        run = Run(given.device, budget, keep=keep, on_band=on_band)
        with _in_bands_now():
            out = self._call(run, given, place, args, kwargs)
        return out, run.figures

    def _needs_plan(self, given: Tensor) -> bool:
        is_on_host = self.settings.keep == "host" or (self.settings.keep == "auto" and given.device.type == "cuda")
        return is_on_host or self.settings.progress is not None

    def _rehearsal(self, given: Tensor, place: Any, args: tuple, kwargs: dict[str, Any], budget: int) -> Figures | None:
        """What the call will take, from shapes alone; None where that cannot be told."""
        run = Run(given.device, budget, keep=self.settings.keep, is_rehearsal=True)
        try:
            with _in_bands_now(is_trial=True), same_random_numbers(given.device):
                self._call(run, given, place, args, kwargs)
        except (NotInBands, RuntimeError, NotImplementedError, TypeError, ValueError):
            return None
        return run.figures

    def _call(self, run: Run, given: Tensor, place: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        with torch.no_grad(), _without_tiles(self.vae):
            tensor = Banded(run.known(given), run, given.device)
            args, kwargs = _replaced(args, kwargs, place, tensor)
            return _with_numbers(self.own(*args, **kwargs), run)


def bound(site: Site) -> Callable[[], list[str] | None]:
    """Put a site in the place of its method; returns how to undo that."""
    vae, name = site.vae, site.name
    had = vars(vae).get(name)

    def method(*args: Any, **kwargs: Any) -> Any:
        return site(*args, **kwargs)

    method.__wrapped__ = site.own  # type: ignore[attr-defined]
    object.__setattr__(vae, name, method)

    def undo() -> list[str] | None:
        if vars(vae).get(name) is not method:
            return [f"{name} has been replaced by something else, which stays"]
        if had is None:
            object.__delattr__(vae, name)
        else:
            object.__setattr__(vae, name, had)
        return None

    return undo


def _input(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """(place, value) of the first argument."""
    if args:
        return 0, args[0]
    return next(iter(kwargs.items()), (None, None))


def _replaced(args: tuple, kwargs: dict[str, Any], place: Any, value: Any) -> tuple[tuple, dict[str, Any]]:
    return ((value, *args[1:]), kwargs) if place == 0 else (args, {**kwargs, place: value})


@contextmanager
def _in_bands_now(*, is_trial: bool = False) -> Iterator[None]:
    """Methods of the VAE that call each other are one call."""
    before = getattr(_running, "on", False), getattr(_running, "trial", False)
    _running.on, _running.trial = True, is_trial or before[1]
    try:
        yield
    finally:
        _running.on, _running.trial = before


def is_trial() -> bool:
    """Whether what this thread calls now is part of a proof or of a run of shapes: no call of the user's."""
    return getattr(_running, "trial", False)


@contextmanager
def _without_tiles(vae: nn.Module) -> Iterator[None]:
    had = getattr(vae, "use_tiling", None)
    if had:
        vae.use_tiling = False  # type: ignore[assignment]
    try:
        yield
    finally:
        if had:
            vae.use_tiling = had  # type: ignore[assignment]


def _with_numbers(found: Any, run: Run) -> Any:
    """A result with ordinary tensors; those of objects are put in their place."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Banded):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if run.is_rehearsal else ordinary(leaf)
        return leaf

    if isinstance(found, (Tensor, tuple, list, dict)):
        return tree_map(real, found)
    for name, value in list(getattr(found, "__dict__", {}).items()):
        if any(isinstance(leaf, Banded) for leaf in tree_leaves(value)):
            setattr(found, name, tree_map(real, value))
        elif type(value).__module__.partition(".")[0] not in ("builtins", "torch"):
            _with_numbers(value, run)
    return found
