"""What stands in a module's ``forward`` while it is chunked, and how it gets there and away again."""

from __future__ import annotations

import copy
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .ffn_plan import WHOLE, Plan, Site, kind_of_call, make_plan
from .ffn_run import inputs_of, run_checkpointed, run_sliced
from .ffn_state import fingerprint

_MAX_PLANS = 256
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
                plan = make_plan(self.whole, self.module, site, args, kwargs, kind=key if self.inner is None else None)
            if len(site.plans) >= _MAX_PLANS:
                site.plans.clear()
                site.used.clear()
            if plan is not WHOLE:
                site.plans[key] = plan
        if plan is not WHOLE:
            site.used[key] = plan
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


def forward_slots(module: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Where a module's forward may lie, innermost first: below accelerate's hook, below those of diffusers, plain."""
    if "_old_forward" in module.__dict__:
        yield module.__dict__, "_old_forward"
    for reference in getattr(module.__dict__.get("_diffusers_hook"), "_fn_refs", ()):
        yield vars(reference), "forward" if reference.original_forward is None else "original_forward"
    yield module.__dict__, "forward"


def attach(module: nn.Module, site: Site) -> Callable[[], list[str]]:
    """Let ``site`` decide over the calls of ``module``; returns what undoes it and says what could not be undone."""
    sliced = place(module, site)
    return lambda: detach(sliced, site)


def place(module: nn.Module, site: Site) -> SlicedForward:
    """Likewise; returns what stands in the module's forward."""
    forwards = [place.get(key) for place, key in forward_slots(module)]
    sliced = next((forward for forward in forwards if isinstance(forward, SlicedForward)), None)
    if sliced is None:
        holder, key = next(forward_slots(module))
        sliced = SlicedForward(module, holder.get(key))
        holder[key] = sliced
    sliced.sites.append(site)
    return sliced


def detach(sliced: SlicedForward, site: Site) -> list[str]:
    """Take ``site`` off again, and the rest with the last of them unless somebody's forward lies on top of it."""
    sliced.sites = [other for other in sliced.sites if other is not site]
    if sliced.sites:
        return []
    for place, key in forward_slots(sliced.module):
        if place.get(key) is sliced:
            if sliced.inner is not None or key != "forward" or place is not sliced.module.__dict__:
                place[key] = sliced.whole
            else:
                del place[key]
            return []
    kind = type(sliced.module).__name__
    return [f"the forward of a {kind} was replaced while patched; ours stays below it and hands every call on"]
