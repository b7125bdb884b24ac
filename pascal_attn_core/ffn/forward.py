"""The replacement ``forward`` of a chunked module; attaching and detaching it."""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..machine.out_of_memory import is_out_of_memory
from ..machine.own_thread import made_up_inputs
from ..patching.forward import ReplacedForward, put_in, take_out
from ..patching.hosts import forward_slots
from .graph import Graph, place_of
from .layers import brought_layers, noted, waiting_layer
from .plan import FfnSite, Slicing, decide, is_beyond, kind_of_call
from .rules import Along
from .run import Inputs, NotTokenwise, inputs_of, run_checkpointed, run_sliced

_MAX_PLANS = 256
_LEAST_TOKENS = 4
_local = threading.local()


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
        x = args[0] if args else next(iter(kwargs.values()), None)
        if type(x) is not Tensor or x.dim() < 2 or x.shape[-2] < site.settings.min_tokens or is_beyond(x):
            return self.whole(*args, **kwargs)
        key = kind_of_call(self.module, x, args, kwargs)
        plan, is_known = site.plans.get(key), True
        if plan is not None:
            out = self.whole(*args, **kwargs)
        elif getattr(_local, "is_noting", False):  # within another module that is patched too
            return self.whole(*args, **kwargs)
        elif waiting := waiting_layer(self.module):
            plan, out, is_known = _refused(f"{waiting} is being measured"), self.whole(*args, **kwargs), False
        else:
            plan, out = self._decided(site, args, kwargs)
        if len(site.used) >= _MAX_PLANS:
            site.plans.clear()
            site.used.clear()
        site.used[key] = plan
        if is_known and not plan.sizes:
            site.plans[key] = plan
        return out

    def _decided(self, site: FfnSite, args: tuple, kwargs: dict[str, Any]) -> tuple[Slicing, Any]:
        """How a call runs, and its result."""
        settings, whole = site.settings, self.whole
        leaves = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (*leaves, *self.module.parameters()))
        try:
            inputs = inputs_of(args, kwargs)
            layers = [] if wants_grad else list(brought_layers(self.module))
        except NotTokenwise as reason:
            return _refused(str(reason)), whole(*args, **kwargs)
        tokens = inputs.x.shape[-2]
        if tokens < _LEAST_TOKENS or not inputs.x.numel():
            return Slicing((), "too few tokens for two slices"), whole(*args, **kwargs)
        if wants_grad and not settings.checkpoint:
            return Slicing((), "gradients are needed and checkpoint=False"), whole(*args, **kwargs)
        run = run_checkpointed if wants_grad else run_sliced
        if not settings.verify and settings.slices(tokens) is not None:
            plan = decide(settings, inputs, None, wants_grad)
            return plan, run(lambda parts, _: inputs.call(whole, parts), inputs, plan.sizes or (tokens,))
        graph = Graph(list(inputs.tokens.values()))
        try:
            out = self._noted(graph, inputs, layers)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if graph.why or is_out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold stand-ins
            why = f"cannot be put off: {type(error).__name__}: {' '.join(str(error).split())[:160]}"
            return _refused(why), whole(*args, **kwargs)
        if why := graph.why or _why_not(out, inputs.x, graph.given):
            return _refused(why), graph.settle(why, out)
        place = place_of(out)
        assert place is not None
        plan = decide(settings, inputs, (graph.peak_bytes(place.number), place.like.nbytes), wants_grad)
        if not plan.sizes:
            return plan, graph.settle(plan.why, out)
        number, out, place = place.number, None, None
        graph.inputs = []
        if not graph.alive():
            return plan, run(lambda parts, start: graph.value(number, parts, start), inputs, plan.sizes)
        why = "keeps a tensor of its tokens between calls"
        return _refused(why), graph.settle(why, None, number)

    def _noted(self, graph: Graph, inputs: Inputs, layers: list[nn.Module]) -> Any:
        """The result of the module's code on the stand-ins of the graph."""
        _local.is_noting = True
        try:
            with made_up_inputs(), noted(graph, layers), _uncompiled(self.module), graph.noting():
                return inputs.call(self.whole, graph.inputs)
        except BaseException:
            graph.let_go()
            raise
        finally:
            _local.is_noting = False


def _refused(why: str) -> Slicing:
    return Slicing((), why, refused=True)


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


@contextlib.contextmanager
def _uncompiled(module: nn.Module) -> Iterator[None]:
    """Children compiled by torch.compile run uncompiled: stand-ins are no reason for another compilation."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # loaded if any child is compiled
    if dynamo is None or not any(isinstance(child, dynamo.OptimizedModule) for child in module.modules()):
        yield
        return
    if not hasattr(torch.compiler, "set_stance"):
        raise NotImplementedError("it holds a module compiled by torch.compile, which only torch 2.6 can run uncompiled")
    with torch.compiler.set_stance("force_eager"):
        yield


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
