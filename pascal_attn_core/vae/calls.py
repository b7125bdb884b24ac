"""The methods of a patched VAE, and the report on their calls."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..call import PLAIN
from ..config import check_bools, check_number
from ..machine.device import MIB
from ..machine.out_of_memory import out_of_memory
from ..machine.own_thread import made_up_inputs
from ..machine.room import available_bytes
from ..patching.patch import OFF, ON, REFUSED, WAITING, AnyReport, State
from .banded import Banded, finish
from .lazy import NotInBands
from .proof import differs
from .run import BandedRun, Figures, same_random_numbers
from .state import hooked_weights, is_compiled, snapshot

_WORDS = {ON: "in bands", OFF: "as it is", REFUSED: "refused"}


@dataclass(frozen=True)
class VaeCall:
    """One call: on = in bands, off = as it is, or refused, and why."""

    method: str
    shape: tuple[int, ...]  # of the input
    state: str
    why: str
    seconds: float
    figures: Figures | None = None  # if it ran in bands

    def text(self, expected_bytes: int = 0) -> str:
        """``"decode of 1x4x128x128 in bands: 610 MiB at most (8714 expected whole), 39 layers in 446 bands, 2.3 s"``.
        Bytes are those of the calculation, values that wait included; ``expected_bytes`` a host's own, without bands.
        """
        facts, f = [], self.figures
        if f is not None:
            whole = f" ({expected_bytes / MIB:.0f} expected whole)" if expected_bytes else ""
            facts = [
                f"{f.expected_bytes / MIB:.0f} MiB at most{whole}",
                f"{f.layers} layers in {f.bands} bands",
                f"{f.host_bytes / MIB:.0f} MiB in host memory" if f.host_bytes else "",
                f"rows per band reduced {f.retries} times after running out of memory" if f.retries else "",
                f"not in bands: {', '.join(sorted(f.whole))}" if f.whole else "",
            ]
        shape = "x".join(map(str, self.shape))
        facts = [*filter(None, [*facts, self.why]), f"{self.seconds:.1f} s"]
        return f"{self.method} of {shape} {_WORDS[self.state]}: {', '.join(facts)}"


@dataclass(frozen=True)
class VaeReport(AnyReport):
    """All calls so far, of the methods that are patched."""

    calls: list[VaeCall]
    methods: tuple[str, ...] = ()

    @property
    def states(self) -> list[State]:
        """The state of each method after its latest call, in the words that all patches share."""
        latest = {call.method: call for call in self.calls}
        called = [State(name, call.state, call.why) for name, call in latest.items()]
        return called + [State(name, WAITING) for name in self.methods if name not in latest]

    def text(self) -> str:
        return "\n".join(call.text() for call in self.calls) if self.calls else "the VAE has not been called yet"


log = logging.getLogger("pascal_attn")
METHODS = ("decode", "encode")
_CPU_BUDGET = 64 * MIB
_REMEMBERED = 100  # calls in the report
_GRADIENTS = "gradients are on; call it under torch.no_grad()"
_running = threading.local()


@dataclass
class BandSettings:
    """The arguments of :func:`.patch_vae`."""

    budget_mib: float | None = None
    keep: str = "auto"
    when_needed: bool = False
    verify: bool = True
    progress: Callable[[float], None] | None = None
    expected_bytes: Callable[..., int] | None = None
    enabled: bool = True  # until the patch is removed

    def __post_init__(self) -> None:
        if self.budget_mib is not None:
            check_number("budget_mib", self.budget_mib, float, 0, above=True)
        check_bools(self, "verify")
        for name in ("progress", "expected_bytes"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"{name} must be a function or None, got {getattr(self, name)!r}")


class PatchedMethod:
    """One method of one VAE: an attribute of the VAE that replaces the method ``own``."""

    def __init__(self, vae: nn.Module, name: str, own: Callable[..., Any], settings: BandSettings):
        functools.update_wrapper(self, own)
        self.vae, self.name, self.own, self.settings = vae, name, own, settings
        self.had = vars(vae).get(name)  # None = the method is the class's
        self.calls: deque[VaeCall] = deque(maxlen=_REMEMBERED)
        self._proofs: dict[tuple[Any, ...], str] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:  # copies and pickles of a VAE are without the patch
        return (getattr, (self.vae, self.name)) if self.had is None else (functools.partial, (self.own,))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = _Given(args, kwargs)
        if not self._is_ours(given.tensor):
            return given.to(self.own)
        start = time.perf_counter()

        def note(state: str, why: str, figures: Figures | None = None) -> None:
            shape, seconds = tuple(given.tensor.shape), time.perf_counter() - start
            self.calls.append(VaeCall(self.name, shape, state, why, seconds, figures))

        if self._needs_gradients(given.tensor):
            note(OFF, _GRADIENTS)
            return given.to(self.own)
        why_bands = self._does_not_fit(given.tensor) if self.settings.when_needed else ""
        if self.settings.when_needed and not why_bands:
            put_back = snapshot(self.vae)
            try:
                out = given.to(self.own)
            except out_of_memory():
                pass
            else:
                note(OFF, "fits: whole")
                return out
            put_back()
            why_bands = "it ran out of memory without bands"
            if given.tensor.device.type == "cuda":
                torch.cuda.empty_cache()
        refused = self._refusal(given)
        if not refused:
            try:
                out, figures = self._in_bands(given)
            except NotInBands as error:
                refused = str(error)
            else:
                note(ON, why_bands, figures)
                return out
        note(REFUSED, refused)
        return given.to(self.own)

    def _is_ours(self, given: Any) -> bool:
        """Whether a call could run in bands; others are passed on and not reported."""
        is_plain = type(given) in PLAIN and given.dim() >= 3 and given.is_floating_point() and given.numel()
        if not self.settings.enabled or getattr(_running, "on", False) or not is_plain or given.is_meta:
            return False
        return not torch.compiler.is_compiling()

    def _needs_gradients(self, given: Tensor) -> bool:
        """Whether a call needs gradients, which bands do not have; the first one is logged."""
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in (given, *self.vae.parameters())):
            return False
        if all(call.why != _GRADIENTS for call in self.calls):
            log.warning("%s.%s does not run in bands: %s", type(self.vae).__name__, self.name, _GRADIENTS)
        return True

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

    def _refusal(self, given: _Given) -> str:
        """Why this kind of call must not run in bands; "" = it may."""
        if is_compiled(self.vae):
            return "it is compiled by torch.compile"
        if not self.settings.verify:
            return ""
        tensor, kind = given.tensor, given.tensor.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        shape = tensor.dtype, tensor.device, tensor.dim(), tensor.shape[1]
        key = (*shape, autocast, tuple(sorted(given.kwargs)), len(given.args))
        with self._lock:
            if key not in self._proofs:

                def whole(sample: Tensor) -> Any:
                    with self._trial(given), _without_tiles(self.vae):
                        return given.replaced(sample).to(self.own)

                def banded(sample: Tensor) -> Any:
                    run = BandedRun(sample.device, 1 << 62, least_bands=3)
                    with self._trial(given):
                        return self._call(run, given.replaced(sample))

                # frames instead of a batch: their number is another argument
                counts = {leaf for leaf in tree_leaves(given) if type(leaf) is int and leaf > 1}
                batch = tensor.shape[0] if any(tensor.shape[0] % count == 0 for count in counts) else 1
                is_picture = self.name.startswith("encode")
                try:
                    self._proofs[key] = differs(whole, banded, tensor, is_picture=is_picture, batch=batch)
                except out_of_memory():
                    return "a trial on a small input ran out of memory; it is tried again in the next call"
            return self._proofs[key]

    @contextmanager
    def _trial(self, given: _Given) -> Iterator[None]:
        """The block leaves the VAE and the random numbers as they were."""
        with ExitStack() as stack:
            stack.callback(snapshot(self.vae))
            stack.enter_context(_in_bands_now())
            stack.enter_context(made_up_inputs())
            stack.enter_context(same_random_numbers(given, given.tensor.device))
            yield

    def _in_bands(self, given: _Given) -> tuple[Any, Figures]:
        budget, (keep, progress) = self._budget(given.tensor.device), (self.settings.keep, self.settings.progress)
        is_on_host = keep == "host" or (keep == "auto" and given.tensor.device.type == "cuda")
        expected = self._rehearsal(given, budget) if is_on_host or progress is not None else None
        if expected is not None:
            free = available_bytes("cpu")
            if free is not None and expected.host_bytes > free:
                raise MemoryError(
                    f"{self.name} of {list(given.tensor.shape)} in bands needs {expected.host_bytes / MIB:.0f} MiB of "
                    f"host memory for the activations between its layers, {free / MIB:.0f} are free"
                )
        done = 0

        def on_band() -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(0.0 if expected is None else min(1.0, done / max(expected.bands, 1)))

        run = BandedRun(given.tensor.device, budget, keep=keep, on_band=on_band)
        with ExitStack() as stack:
            stack.callback(snapshot(self.vae))
            with _in_bands_now():
                out = self._call(run, given)
            stack.pop_all()  # what the VAE remembers of this call stays
        return out, run.figures

    def _rehearsal(self, given: _Given, budget: int) -> Figures | None:
        """The figures of the coming call, from shapes alone; None where they cannot be told."""
        run = BandedRun(given.tensor.device, budget, keep=self.settings.keep, is_rehearsal=True)
        try:
            with self._trial(given):
                self._call(run, given)
        except (NotInBands, RuntimeError, NotImplementedError, TypeError, ValueError):
            return None
        return run.figures

    def _call(self, run: BandedRun, given: _Given) -> Any:
        run.unsteady = hooked_weights(self.vae)
        with torch.no_grad(), _without_tiles(self.vae):
            out = given.replaced(Banded(run.known(given.tensor), run, given.tensor.device)).to(self.own)
            finish(run)
            return out


class _Given(NamedTuple):
    """The arguments of a call, the first of which is the latent or picture."""

    args: tuple
    kwargs: dict[str, Any]

    @property
    def tensor(self) -> Any:
        return self.args[0] if self.args else next(iter(self.kwargs.values()), None)

    def replaced(self, tensor: Any) -> _Given:
        """These arguments with another latent or picture."""
        if self.args:
            return _Given((tensor, *self.args[1:]), self.kwargs)
        return _Given((), {**self.kwargs, next(iter(self.kwargs)): tensor})

    def to(self, function: Callable[..., Any]) -> Any:
        return function(*self.args, **self.kwargs)


def bound(site: PatchedMethod) -> Callable[[], list[str] | None]:
    """Replace a method by its site; returns what undoes that."""
    vae, name = site.vae, site.name
    object.__setattr__(vae, name, site)

    def undo() -> list[str] | None:
        site.settings.enabled = False
        found = vars(vae).get(name)
        if found is site and site.had is None:
            object.__delattr__(vae, name)
        elif found is site:
            object.__setattr__(vae, name, site.had)
        else:
            while isinstance(found, PatchedMethod) and found.had is not site:
                found = found.had
            if not isinstance(found, PatchedMethod):
                return [f"{name} has been replaced since; the replacement stays"]
            found.own, found.had = site.own, site.had  # a later patch, which goes on without this one
        return None

    return undo


@contextmanager
def _in_bands_now() -> Iterator[None]:
    """Methods of the VAE that call each other are one call."""
    before, _running.on = getattr(_running, "on", False), True
    try:
        yield
    finally:
        _running.on = before


@contextmanager
def _without_tiles(vae: Any) -> Iterator[None]:
    if not getattr(vae, "use_tiling", False):
        yield
        return
    vae.use_tiling = False
    try:
        yield
    finally:
        vae.use_tiling = True
