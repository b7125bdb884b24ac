"""The replacement ``forward`` of a chunked module; attaching and detaching it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..patching.forward import ReplacedForward, put_in, take_out
from ..patching.hosts import forward_slots
from .plan import WHOLE, FfnSite, Slicing, kind_of_call, make_plan, refuse
from .recheck import Recheck
from .run import inputs_of, run_checkpointed, run_sliced
from .state import State
from .trial import hooked_children

_MAX_PLANS = 256
_trial_lock = threading.RLock()


class SlicedForward(ReplacedForward):
    """The replacement forward of a module whose tokens are computed in slices."""

    __slots__ = ("recheck", "sites", "state")

    def __init__(self, module: nn.Module, inner: Callable[..., Any] | None):
        super().__init__(module, inner)
        self.sites: list[FfnSite] = []
        self.recheck = Recheck()
        self.state: State | None = None  # what the module's code referred to when it was tried

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.follow_class()
        site = self.sites[-1] if self.sites else None
        if site is None or torch._C._get_tracing_state() is not None:
            return self.whole(*args, **kwargs)
        x = args[0] if args else next(iter(kwargs.values()), None)
        if type(x) is not Tensor or x.dim() < 2 or x.shape[-2] < site.settings.min_tokens:
            return self.whole(*args, **kwargs)
        plan = self._plan(site, x, args, kwargs)
        if not plan.sizes:
            return self.whole(*args, **kwargs)
        run = run_checkpointed if plan.recompute else run_sliced
        inputs = inputs_of(args, kwargs)
        out = run(self.whole, inputs, plan.sizes)
        if torch.compiler.is_compiling() or plan.relative is None:
            return out
        if (x.is_cuda and torch.cuda.is_current_stream_capturing()) or not self.recheck.is_due():
            return out
        if self.recheck.passes(self.whole, self.module, inputs, plan, out):
            return out
        del out
        refuse(site, inputs, self.module, _FOUND_LATER)
        site.plans.clear()
        site.used.clear()
        return self(*args, **kwargs)

    def _plan(self, site: FfnSite, x: Tensor, args: tuple, kwargs: dict) -> Slicing:
        key = kind_of_call(self.module, x, args, kwargs)
        plan = site.plans.get(key)
        if torch.compiler.is_compiling():
            return plan or WHOLE
        if self.state is not None and self.state.has_changed():
            self._forget()
            plan = None
        if plan is None:
            hooked = hooked_children(self.module) if site.settings.verify else []
            if hooked:  # until it is taken off
                plan = site.used[key] = Slicing(
                    (), f"a hook on {hooked[0]} would see slices of its tokens", refused=True
                )
                return plan
            with _trial_lock:
                plan = make_plan(self.whole, self.module, site, args, kwargs, is_own=self.inner is None)
                is_tried = site.settings.verify and plan is not WHOLE and not plan.refused
                if is_tried and (self.state is None or self.state.has_changed()):
                    self.state = State(self.module, self.whole)  # also if the trial has filled caches
            if len(site.plans) >= _MAX_PLANS:
                site.plans.clear()
                site.used.clear()
            if plan is not WHOLE:
                site.plans[key] = plan
        if plan is not WHOLE:
            site.used[key] = plan
        return plan

    def _forget(self) -> None:
        """Discard what was decided: the module's code refers to other things than it did in the trial."""
        self.state, self.recheck = None, Recheck()
        for site in self.sites:
            site.plans.clear()


_FOUND_LATER = "passed the trial, but a later check found that its tokens affect each other"


# --- attaching ---


def place(module: nn.Module, site: FfnSite) -> SlicedForward:
    """Let ``site`` decide about the calls of ``module``; returns the replacement forward."""
    forwards = [place.get(key) for place, key in forward_slots(module)]
    sliced = next((forward for forward in forwards if isinstance(forward, SlicedForward)), None)
    sliced = sliced or put_in(module, SlicedForward)
    sliced.sites.append(site)
    return sliced


def detach(sliced: SlicedForward, site: FfnSite) -> list[str]:
    """Remove ``site``, and with the last one the replacement forward, unless another forward was put over it."""
    sliced.sites = [other for other in sliced.sites if other is not site]
    return [] if sliced.sites else take_out(sliced)
