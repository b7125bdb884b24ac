"""Feed-forward networks in slices of their tokens: the wide tensors inside never exist at once.

    with patch_ffn(model, budget_mib=64) as patch:
        model(x)
    print(patch.report().text())

Each module keeps its place, its class and its state-dict keys; what changes is the ``forward`` of the instance. Before
a module is run in slices it is proven to treat every token on its own (see :mod:`.ffn_verify`); until then, and when
it does not, it runs whole, as if it had not been patched.
"""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .ffn_find import Found, find_ffn
from .ffn_plan import WHOLE, Plan, Settings, Site, kind_of_call, make_plan
from .ffn_run import inputs_of, run_checkpointed, run_sliced
from .ffn_state import fingerprint
from .patching import Patch, PatchGroup

__all__ = ["FfnPatch", "FfnReport", "FfnReportLine", "patch_ffn"]

_MAX_PLANS = 256


def patch_ffn(
    model: nn.Module,
    *,
    budget_mib: float | None = None,
    chunk_tokens: int | None = None,
    min_tokens: int = 256,
    include: Any = None,
    exclude: Any = None,
    verify: bool = True,
    checkpoint: bool = True,
) -> FfnPatch:
    """Run the feed-forward modules of ``model`` over slices of their tokens, dimension -2 of ``[..., T, C]``.

    Args:
        model: any module; of a diffusers pipeline pass ``pipe.transformer`` or ``pipe.unet``.
        budget_mib: largest extra memory of one call in MiB, besides the input and the output; None = 64. The fewest
            slices that keep it are used: each reads the weights once more. A call that fits runs whole.
        chunk_tokens: most tokens of one slice, instead of a budget.
        min_tokens: calls with fewer tokens run whole.
        include: exactly these modules instead of those recognised: a shell pattern for the qualified name
            (``"blocks.*.ffn"``), a class, a predicate ``(name, module) -> bool``, or several of them.
        exclude: never these modules; likewise.
        verify: prove each module token by token before its first call in slices. False = you vouch for all of them.
        checkpoint: where gradients are wanted, each slice is computed once more in the backward pass, about a third
            of the module's time; without that all slices' wide tensors would be kept. False = such calls run whole.
    Returns:
        A Patch with ``num_wrapped`` and ``report()``. Patches may be removed in any order; of several the newest
        decides. Deep copies of the model made meanwhile follow the patch; pickled, a model is stored without it.
    Raises:
        TypeError, ValueError: an argument that cannot be used.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(f"model must be a torch.nn.Module, got {kind}; of a pipeline pass its transformer or unet")
    settings = Settings(budget_mib, chunk_tokens, min_tokens, verify, checkpoint)
    found = list(find_ffn(model, include, exclude))
    sites: dict[str, Site] = {}
    with PatchGroup(f"feed-forward of {type(model).__name__}") as group:
        for name, module, why_not in found:
            if not why_not:
                sites[name] = site = Site(settings)
                group.add(_attach(module, site))
    return FfnPatch(group, settings, found, sites)


_proof_lock = threading.RLock()


class SlicedForward:
    """Stands in a module's ``forward``. A callable with slots: hooks that wrap it copy no attributes from it."""

    __slots__ = ("__weakref__", "inner", "module", "sites", "whole")

    def __init__(self, module: nn.Module, inner: Callable[..., Any] | None):
        self.module, self.inner = module, inner
        self.whole = inner or types.MethodType(type(module).forward, module)  # the module's forward without us
        self.sites: list[Site] = []

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.whole)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        site = self.sites[-1] if self.sites else None
        if site is None or not site.settings.enabled:
            return self.whole(*args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()), None)
        if type(x) is not Tensor or x.dim() < 2 or x.shape[-2] < site.settings.min_tokens:
            return self.whole(*args, **kwargs)
        plan = self._plan(site, x, args, kwargs)
        if not plan.sizes:
            return self.whole(*args, **kwargs)
        run = run_checkpointed if plan.recompute else run_sliced
        return run(self.whole, inputs_of(args, kwargs), plan.sizes)

    def _plan(self, site: Site, x: Tensor, args: tuple, kwargs: dict) -> Plan:
        key = kind_of_call(self.module, x, args, kwargs)
        plan = site.plans.get(key)
        if torch.compiler.is_compiling():
            return plan or WHOLE
        if plan is None or (plan.proof is not None and plan.proof != fingerprint(self.module)):
            with _proof_lock:
                plan = make_plan(self.whole, self.module, site, args, kwargs)
            if len(site.plans) >= _MAX_PLANS:
                site.plans.clear()
            if plan is not WHOLE:
                site.plans[key] = plan
        return plan

    def __deepcopy__(self, memo: dict) -> SlicedForward:
        copied = SlicedForward.__new__(SlicedForward)
        memo[id(self)] = copied
        copied.module = copy.deepcopy(self.module, memo)
        copied.inner = copy.deepcopy(self.inner, memo)
        copied.whole = copied.inner or types.MethodType(type(copied.module).forward, copied.module)
        copied.sites = [site.copy() for site in self.sites]
        return copied

    def __reduce__(self) -> tuple:
        """Pickled, only the module's own forward remains: a file must not depend on this package."""
        if self.inner is None:
            return getattr, (self.module, "forward")
        return functools.partial, (self.inner,)


# --- attaching ---


def _slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a module's forward may lie, innermost first: below accelerate's hook, below those of diffusers, plain."""
    if "_old_forward" in module.__dict__:
        yield module.__dict__, "_old_forward"
    for reference in getattr(module.__dict__.get("_diffusers_hook"), "_fn_refs", ()):
        yield vars(reference), "forward" if reference.original_forward is None else "original_forward"
    yield module.__dict__, "forward"


def _attach(module: nn.Module, site: Site) -> Callable[[], list[str]]:
    forwards = [place.get(key) for place, key in _slots(module)]
    sliced = next((forward for forward in forwards if isinstance(forward, SlicedForward)), None)
    if sliced is None:
        place, key = next(_slots(module))
        sliced = SlicedForward(module, place.get(key))
        place[key] = sliced
    sliced.sites.append(site)
    return lambda: _detach(sliced, site)


def _detach(sliced: SlicedForward, site: Site) -> list[str]:
    sliced.sites = [other for other in sliced.sites if other is not site]
    if sliced.sites:
        return []
    for place, key in _slots(sliced.module):
        if place.get(key) is sliced:
            if sliced.inner is not None or key != "forward" or place is not sliced.module.__dict__:
                place[key] = sliced.whole
            else:
                del place[key]
            return []
    kind = type(sliced.module).__name__
    return [f"the forward of a {kind} was replaced while patched; ours stays below it and hands every call on"]


# --- report ---


class FfnReportLine(NamedTuple):
    """One module: its qualified name, its class, ``"chunked"``, ``"whole"``, ``"refused"``, ``"waiting"`` (not called
    yet with enough tokens) or ``"cannot be"``, and why."""

    name: str
    kind: str
    state: str
    why: str


@dataclass(frozen=True)
class FfnReport:
    """What became of each feed-forward module."""

    lines: list[FfnReportLine]

    def count(self, state: str) -> int:
        """How many modules are in this state."""
        return sum(line.state == state for line in self.lines)

    def text(self) -> str:
        """A heading and one line per module; equal neighbours (``blocks.0``, ``blocks.1`` ...) are one line."""
        states = {line.state: self.count(line.state) for line in self.lines}
        heading = ", ".join(f"{count} {state}" for state, count in states.items())
        rows = [f"{len(self.lines)} feed-forward modules: {heading}" if self.lines else "no feed-forward modules found"]
        groups: dict[tuple, list[str]] = {}
        for line in self.lines:
            groups.setdefault((line.kind, line.state, line.why), []).append(line.name or "(the model)")
        for (kind, state, why), names in groups.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            rows.append(f"  {names[0]}{more} ({kind}): {state}{': ' if why else ''}{why}")
        return "\n".join(rows)


class FfnPatch(Patch):
    """What :func:`patch_ffn` returns."""

    def __init__(self, group: PatchGroup, settings: Settings, found: list[Found], sites: dict[str, Site]):
        self._found, self._sites_by_name = found, sites

        def undo() -> list[str]:
            settings.enabled = False  # deep copies share it
            return group._undo_all()

        super().__init__(group.name, undo, sites=len(sites))

    @property
    def num_wrapped(self) -> int:
        """How many modules run in slices as soon as they are proven and it saves memory; 0 once removed."""
        return self.sites if self.active else 0

    def report(self) -> FfnReport:
        """What became of each module up to now."""
        return FfnReport([self._line(*found) for found in self._found])

    def _line(self, name: str, module: nn.Module, why_not: str) -> FfnReportLine:
        kind = type(module).__name__
        if why_not:
            return FfnReportLine(name, kind, "cannot be", why_not.removeprefix("cannot be: "))
        plans = list(self._sites_by_name[name].plans.values())
        sliced = [plan for plan in plans if plan.sizes]
        refused = [plan for plan in plans if plan.refused]
        chosen = (sliced or refused or plans or [WHOLE])[-1]
        state = "chunked" if sliced else "refused" if refused else "whole" if plans else "waiting"
        return FfnReportLine(name, kind, state, chosen.why)
