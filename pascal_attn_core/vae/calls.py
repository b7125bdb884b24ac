"""The methods of a patched VAE."""

from __future__ import annotations

import copy
import functools
import logging
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..machine.device import MIB
from ..observe.memory import available_bytes
from .banded import Banded, ordinary
from .proof import differs
from .report import VaeCall
from .run import Figures, NotInBands, Run, is_out_of_memory, same_random_numbers

log = logging.getLogger("pascal_attn")
METHODS = ("decode", "encode")
_CPU_BUDGET = 64 * MIB
_REMEMBERED = 100  # calls in the report
_running = threading.local()


@dataclass
class Settings:
    """The arguments of :func:`.patch_vae`.

    Attributes:
        enabled: False once the patch has been removed: deep copies of the VAE share it.
    """

    budget_mib: float | None
    keep: str
    when_needed: bool
    verify: bool
    progress: Callable[[float], None] | None
    expected_bytes: Callable[..., int] | None
    enabled: bool = True


class Site:
    """One method of one VAE; an attribute of the VAE in the place of the method.

    Attributes:
        own: the method as it was.
        calls: the last ones.
    """

    def __init__(self, vae: nn.Module, name: str, own: Callable[..., Any], settings: Settings):
        functools.update_wrapper(self, own)
        self.vae, self.name, self.own, self.settings = vae, name, own, settings
        self.calls: deque[VaeCall] = deque(maxlen=_REMEMBERED)
        self._proofs: dict[tuple[Any, ...], str] = {}
        self._lock = threading.Lock()
        self._has_warned = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Site:
        vae = copy.deepcopy(self.vae, memo)
        return Site(vae, self.name, _rebound(self.own, self.vae, vae), self.settings)

    def __reduce__(self) -> Any:  # pickled, a VAE is stored without the patch
        return _same, (self.own,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        place, given = _input(args, kwargs)
        if not self._is_ours(given):
            return self.own(*args, **kwargs)
        start = time.perf_counter()

        def note(state: str, why: str, figures: Figures | None = None) -> None:
            self.calls.append(VaeCall(self.name, tuple(given.shape), state, why, time.perf_counter() - start, figures))

        if self._needs_gradients(given):
            if not self._has_warned:
                self._has_warned = True
                log.warning("%s.%s does not run in bands while gradients are on: call it under torch.no_grad()",
                            type(self.vae).__name__, self.name)  # fmt: skip
            note("as it is", "gradients are on; call it under torch.no_grad()")
            return self.own(*args, **kwargs)
        reason = ""
        if self.settings.when_needed:
            reason = self._does_not_fit(given)
            if not reason:
                try:
                    out = self.own(*args, **kwargs)
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    reason = "it ran out of memory without bands"
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

    def _is_ours(self, given: Any) -> bool:
        """Whether a call could run in bands; others are passed on and not reported."""
        is_plain = type(given) is Tensor and given.dim() >= 3 and given.is_floating_point() and given.numel()
        if not self.settings.enabled or getattr(_running, "on", False) or not is_plain or given.is_meta:
            return False
        return not torch.compiler.is_compiling()

    def _needs_gradients(self, given: Tensor) -> bool:
        return torch.is_grad_enabled() and (given.requires_grad or any(p.requires_grad for p in self.vae.parameters()))

    def _does_not_fit(self, given: Tensor) -> str:
        estimate, free = self.settings.expected_bytes, available_bytes(given.device)
        if estimate is None or free is None:
            return ""
        expected = estimate(self.name, tuple(given.shape), given.dtype)
        return f"without bands it needs {expected / MIB:.0f} MiB, {free / MIB:.0f} are free" if expected > free else ""

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
                    given_args, given_kwargs = _replaced(args, kwargs, place, sample)
                    with _without_tiles(self.vae), same_random_numbers((args, kwargs), sample.device):
                        return self.own(*given_args, **given_kwargs)

                def banded(sample: Tensor) -> Any:
                    run = Run(sample.device, 1 << 62, least_bands=3)
                    with same_random_numbers((args, kwargs), sample.device):
                        return self._call(run, sample, place, args, kwargs)

                # frames in the place of the batch: their number is another argument
                counts = {leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is int and leaf > 1}
                batch = given.shape[0] if any(given.shape[0] % count == 0 for count in counts) else 1
                is_picture = self.name.startswith("encode")
                with _in_bands_now(is_trial=True):
                    self._proofs[key] = differs(whole, banded, given, is_picture=is_picture, batch=batch)
            return self._proofs[key]

    def _in_bands(self, given: Tensor, place: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Figures]:
        budget, keep = self._budget(given.device), self.settings.keep
        expected = self._rehearsal(given, place, args, kwargs, budget) if self._needs_plan(given) else None
        if expected is not None:
            free = available_bytes("cpu")
            if free is not None and expected.host_bytes > free:
                raise MemoryError(
                    f"{self.name} of {list(given.shape)} in bands needs {expected.host_bytes / MIB:.0f} MiB of host "
                    f"memory for the activations between its layers, {free / MIB:.0f} are free"
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
            with _in_bands_now(is_trial=True), same_random_numbers((args, kwargs), given.device):
                self._call(run, given, place, args, kwargs)
        except (NotInBands, RuntimeError, NotImplementedError, TypeError, ValueError):
            return None
        return run.figures

    def _call(self, run: Run, given: Tensor, place: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        with torch.no_grad(), _without_tiles(self.vae):
            tensor = Banded(run.known(given), run, given.device)
            args, kwargs = _replaced(args, kwargs, place, tensor)
            return with_numbers(self.own(*args, **kwargs), run)


def bound(site: Site) -> Callable[[], list[str] | None]:
    """Put a site in the place of its method; returns how to undo that."""
    vae, name = site.vae, site.name
    had = vars(vae).get(name)
    object.__setattr__(vae, name, site)

    def undo() -> list[str] | None:
        site.settings.enabled = False
        if vars(vae).get(name) is not site:
            return [f"{name} has been replaced since; the replacement stays"]
        if had is None:
            object.__delattr__(vae, name)
        else:
            object.__setattr__(vae, name, had)
        return None

    return undo


def _rebound(own: Callable[..., Any], vae: nn.Module, other: nn.Module) -> Callable[..., Any]:
    if isinstance(own, types.MethodType) and own.__self__ is vae:
        return types.MethodType(own.__func__, other)
    return own


def _same(own: Callable[..., Any]) -> Callable[..., Any]:
    return own


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
            vae.use_tiling = had


def with_numbers(found: Any, run: Run) -> Any:
    """A result with ordinary tensors; those of objects are put in their place."""

    def real(leaf: Any) -> Any:
        if isinstance(leaf, Banded):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if run.is_rehearsal else ordinary(leaf)
        is_object = hasattr(leaf, "__dict__") and not isinstance(leaf, (Tensor, nn.Module, type))
        return with_numbers(leaf, run) if is_object else leaf

    if isinstance(found, (Tensor, tuple, list, dict)):
        return tree_map(real, found)
    for name, value in list(getattr(found, "__dict__", {}).items()):
        if any(isinstance(leaf, Banded) for leaf in tree_leaves(value)):
            setattr(found, name, tree_map(real, value))
    return found
