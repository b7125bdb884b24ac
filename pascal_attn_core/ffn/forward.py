"""The replacement ``forward`` of a chunked module; attaching and detaching it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves

from ..machine.out_of_memory import is_out_of_memory
from ..machine.own_thread import made_up_inputs
from ..patching.forward import ReplacedForward, put_in, take_out
from ..patching.hosts import forward_slots
from .graph import Graph, StandIn, place_of
from .known import is_known, is_seen, state_of
from .layers import brought_layers, noted, waiting_layer
from .plan import FfnSite, Proven, Slicing, as_whole, decide, kind_of_call, run_slices
from .rules import Along, NotTokenwise

_MAX_PLANS = 256


class SlicedForward(ReplacedForward):
    """The replacement forward of a module whose tokens are computed in slices."""

    __slots__ = ("sites",)

    def __init__(self, module: nn.Module, inner: Callable[..., Any] | None):
        super().__init__(module, inner)
        self.sites: list[FfnSite] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.follow_class()
        site = self.sites[-1] if self.sites else None
        if site is None or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return self.whole(*args, **kwargs)
        x: Any = args[0] if args else next(iter(kwargs.values()), None)
        is_plain = type(x) is Tensor and not (x.is_meta or x.is_nested or is_functorch_wrapped_tensor(x))
        if not is_plain or x.dim() < 2 or x.shape[-2] < site.settings.min_tokens:
            return self.whole(*args, **kwargs)
        key = kind_of_call(self.module, x, len(args) + len(kwargs))
        plan = site.plans.get(key)
        if plan is not None and plan.fits and plan.fits > site.settings.bytes_on(x.device, torch.is_grad_enabled()):
            plan = None  # memory has become short
        if plan is not None or place_of(x):  # within another module that is patched too
            site.used.update({} if plan is None else {key: plan})
            return self.whole(*args, **kwargs)
        if (out := self._as_proven(site, key, x, kwargs)) is not None:
            return out
        if waiting := waiting_layer(self.module):
            plan, out = _refused(f"{waiting} is being measured"), self.whole(*args, **kwargs)
        else:
            plan, out = self._decided(site, key, args, kwargs)
        if len(site.used) >= _MAX_PLANS:
            for kinds in (site.plans, site.proven, site.used):
                kinds.clear()
        site.used[key] = plan
        if not plan.sizes and not waiting:
            site.plans[key] = plan
        return out

    def _as_proven(self, site: FfnSite, key: Any, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """The result of a module of known code, called for each slice; None = the call is to be noted."""
        proven = site.proven.get(key)
        if proven is None or is_seen() or proven.state != state_of(self.module):
            return None
        plan = decide(site.settings, [x], proven.peak, proven.of_output, wants_grad=False)
        if not plan.sizes:
            return None
        site.used[key] = plan
        whole = self.whole if not kwargs else lambda part: self.whole(**dict.fromkeys(kwargs, part))
        try:
            if not x.is_contiguous():
                return run_slices(lambda _, part: whole(as_whole(part)), [x], plan.sizes, recompute=False)
            rows = x.flatten(0, -2)  # slices of them need no copy, and each lies as a whole tensor
            times = len(rows) // x.shape[-2]
            sizes = [size * times for size in plan.sizes]
            out = run_slices(lambda _, part: whole(part), [rows], sizes, recompute=False)
            return out.view(x.shape[:-1] + out.shape[-1:])
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            return None

    def _decided(self, site: FfnSite, key: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Slicing, Any]:
        """How a call runs, and its result."""
        settings = site.settings
        x, whole = (*args, *kwargs.values())[0], functools.partial(self.whole, *args, **kwargs)
        leaves = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (*leaves, *self.module.parameters()))
        if x.shape[-2] < 4 or not x.numel():
            return Slicing((), "too few tokens for two slices"), whole()
        try:
            layers, graph = list(brought_layers(self.module)), Graph(args, kwargs)
            out = self._noted(graph, [] if wants_grad else layers)
        except NotTokenwise as reason:
            return _refused(str(reason)), whole()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if graph.why or is_out_of_memory(error):
                raise
            return _refused("cannot be put off", error), whole()
        if why := graph.why or _why_not(out, x, len(graph.real)):
            return _refused(why), graph.settle(why, out)
        number = place_of(out).number  # type: ignore[union-attr]
        peak, of_output = graph.peak_bytes(number), graph.likes[number].nbytes
        plan = decide(settings, graph.real, peak, of_output, wants_grad)
        if not plan.sizes:
            return plan, graph.settle(plan.why, out)
        out = None  # and with it those that it is a view of or that autograd has saved for it
        if graph.in_use():
            why = "keeps a tensor of its tokens between calls"
            return _refused(why), graph.settle(why, None, number)
        try:
            out = run_slices(graph.evaluator(number), graph.real, plan.sizes, wants_grad)
            if not wants_grad and self.inner is None and len(args) + len(kwargs) == 1 and is_known(self.module):
                site.proven[key] = Proven(state_of(self.module), peak, of_output)
            return plan, out
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            return _refused("fails in slices", error), whole()

    def _noted(self, graph: Graph, layers: list[nn.Module]) -> Any:
        """The result of the module's code on the stand-ins of the graph."""
        try:
            with made_up_inputs(), noted(graph, layers), graph.noting():
                return self.whole(*graph.args, **graph.kwargs)
        except BaseException:
            for leaf in graph.in_use():  # what the module keeps is computed when it is used
                leaf.__class__ = StandIn
            raise


def _refused(why: str, error: Exception | None = None) -> Slicing:
    words = f": {type(error).__name__}: {' '.join(str(error).split())[:160]}" if error else ""
    return Slicing((), f"{why}{words}", refused=True)


def _why_not(out: Any, x: Tensor, given: int) -> str:
    """Why a result is not one output for each token; "" if it is."""
    place = place_of(out)
    if place is None:
        return f"returns a {type(out).__name__}, not one tensor of its tokens"
    if place.number < given:
        return "returns its input"
    if place.along != Along(x.dim() - 2) or out.shape[:-1] != x.shape[:-1]:
        return f"turns tokens {list(x.shape)} into {list(out.shape)}, not one output per token"
    return ""


def place(module: nn.Module, site: FfnSite) -> SlicedForward:
    """Let ``site`` decide about the calls of ``module``; returns the replacement forward."""
    forwards = (place.get(key) for place, key in forward_slots(module))
    ours = (forward for forward in forwards if isinstance(forward, SlicedForward))
    sliced = next(ours, None) or put_in(module, SlicedForward)
    sliced.sites.append(site)
    return sliced


def detach(sliced: SlicedForward, site: FfnSite) -> list[str]:
    """Remove ``site``, and with the last one the replacement forward, unless another forward was put over it."""
    sliced.sites = [other for other in sliced.sites if other is not site]
    return [] if sliced.sites else take_out(sliced)
