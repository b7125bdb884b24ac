"""Attention layers in 8-bit integers: which modules, what each measures and decides, and how its calls are caught."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import sdpa
from ..checks import is_out_of_memory
from ..config import AttentionConfig, UnsupportedAttention
from ..patching.forward import ReplacedForward
from ..patching.interception import PLAIN, TORCH_SDPA, SdpaMode, bind_sdpa
from ..patching.selectors import matches, selectors
from ..routes.timing_table import median_times
from .layer import FLOAT, INT8, WAITING, Int8Options, has_numbers, limit_of
from .measure import SAMPLE_ROWS, Times, chosen_rows
from .report import Int8Report, Int8ReportLine
from .watch import ErrorWatch

log = logging.getLogger("pascal_attn")
_IN_8_BITS = AttentionConfig(route="fused-int8")


class CaughtForward(ReplacedForward):
    """A module's ``forward`` during which calls of torch's ``scaled_dot_product_attention`` in the same thread come to
    a site."""

    __slots__ = ("site",)

    def __init__(self, module: nn.Module, site: AttentionSite, inner: Callable[..., Any] | None):
        super().__init__(module, inner)
        self.site = site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.follow_class()
        if not self.site.options.enabled or torch.compiler.is_compiling():
            return self.whole(*args, **kwargs)
        with SdpaMode(self.site.attend):
            return self.whole(*args, **kwargs)

    def put(self) -> Callable[[], list[str]]:
        """Set it; returns what takes it away, unless another forward was put over it."""
        vars(self.module)["forward"] = self

        def take_away() -> list[str]:
            if vars(self.module).get("forward") is not self:
                kind = type(self.module).__name__
                return [f"the forward of a {kind} was replaced: ours stays underneath it and passes every call through"]
            vars(self.module).pop("forward")
            if self.inner is not None:
                vars(self.module)["forward"] = self.inner
            return []

        return take_away

    def __deepcopy__(self, memo: dict[int, Any]) -> CaughtForward:
        copied = memo[id(self)] = CaughtForward.__new__(CaughtForward)
        CaughtForward.__init__(copied, copy.deepcopy(self.module, memo), self.site, copy.deepcopy(self.inner, memo))
        return copied


def find_attention(model: nn.Module, include: Any = None, exclude: Any = None) -> Iterator[tuple[str, nn.Module]]:
    """(qualified name, module) of the attention layers of ``model``: those whose class is named so and that hold no
    other one; or exactly those that ``include`` chooses."""
    chosen, dropped = selectors("include", include), selectors("exclude", exclude)

    def is_one(module: nn.Module) -> bool:
        name = type(module).__name__.lower()
        return ("attention" in name or "attn" in name) and type(module).__call__ is nn.Module.__call__

    for name, module in model.named_modules():
        is_innermost = is_one(module) and not any(is_one(part) for part in module.modules() if part is not module)
        is_chosen = is_innermost if include is None else matches(chosen, name, module)
        if is_chosen and not matches(dropped, name, module):
            yield name, module


class AttentionSite:
    """The state of one attention layer, and its calls: those that 8 bits do not take, and those of a layer in float,
    are computed exactly.

    Attributes:
        state, why: as of :class:`.layer.Int8Layer`.
        watch: its calls in this run, and the errors found.
        worst_row: the largest relative error of one row of one head.
        times: of a call like the first one; None = not timed.
    """

    def __init__(self, name: str, kind: str, options: Int8Options):
        self.name, self.kind, self.options = name, kind, options
        self.state, self.why, self.watch = WAITING, "", ErrorWatch()
        self.worst_row: float | None = None
        self.times: Times | None = None
        self.way = ""

    def attend(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """One call of torch's function."""
        bound = bind_sdpa(args, kwargs)
        if isinstance(bound, str) or not all(has_numbers(t) for t in bound[:3]):
            return TORCH_SDPA(*args, **kwargs)
        if bound.attn_mask is not None and type(bound.attn_mask) not in PLAIN:
            return TORCH_SDPA(*args, **kwargs)
        given = bound.keywords()
        if self.state == FLOAT:
            return sdpa(**given)
        rounded = self._rounded(given)
        if rounded is None:
            return sdpa(**given)
        is_to_check = self.watch.check_now(bound.query.shape[:-1].numel())
        return self._checked(given, rounded) if is_to_check or self.state == WAITING else rounded

    def _rounded(self, given: dict[str, Any]) -> Tensor | None:
        try:
            return sdpa(**given, config=_IN_8_BITS)
        except UnsupportedAttention as error:
            self.why = error.reasons[0]
            return None

    def _checked(self, given: dict[str, Any], rounded: Tensor) -> Tensor:
        """The output of a call, of which ``rounded`` is that in 8 bits, after its error was measured."""
        limit = self.options.max_error
        try:
            with torch.no_grad():
                error, worst = attention_error(given, rounded, self.watch.calls)
        except (RuntimeError, MemoryError) as failure:
            if not is_out_of_memory(failure):
                raise
            return rounded if self.state == INT8 else sdpa(**given)
        self.watch.saw(error)
        self.worst_row = worst if self.worst_row is None else max(worst, self.worst_row)
        if self.options.gathers:
            return sdpa(**given)
        if self.state == WAITING:
            self.decide()
            self._time(given)
        elif not error <= limit:
            self.state, self.why = FLOAT, f"its error was {error:.2%} in call {self.watch.calls}, above {limit:.2%}"
            log.warning("%s: %s", self.name, self.why)
        return rounded if self.state == INT8 else sdpa(**given)

    def decide(self) -> None:
        """8 bits or float, by the largest error that was measured; without any, the layer waits on."""
        error, limit = self.watch.largest, self.options.max_error
        if error is None or self.state != WAITING:
            return
        is_within = error <= limit
        self.state = INT8 if is_within else FLOAT
        self.why = "" if is_within else f"its error {error:.2%} is above {limit:.2%}"

    def _time(self, given: dict[str, Any]) -> None:
        """On a card: a CPU has 8-bit attention for checks only."""
        query = given["query"]
        self.way = "kernel" if query.is_cuda else "operators"
        if self.state == INT8 and query.is_cuda:
            shapes = tuple((t.shape, t.dtype, t.device) for t in given.values() if isinstance(t, Tensor))
            if shapes not in self.options.times:
                attempts = [lambda: sdpa(**given), lambda: sdpa(**given, config=_IN_8_BITS)]
                self.options.times[shapes] = Times(*self.options.clock(attempts, query.device))
            self.times = self.options.times[shapes]

    def line(self) -> Int8ReportLine:
        """The line of this layer in the report."""
        state, why = self.state, self.why
        if state == INT8 and not self.options.enabled:
            state, why = FLOAT, "the patch was removed"
        elif state == WAITING and why:  # no call so far can be in 8 bits
            state = FLOAT
        return Int8ReportLine(
            name=self.name,
            kind=self.kind,
            shape=(),
            state=state,
            why=why,
            error=self.watch.largest,
            way=self.way if state == INT8 else "",
            why_way="the 8-bit kernel needs an NVIDIA GPU" if self.way == "operators" else "",
            float_ms=None if self.times is None else self.times.in_float,
            int8_ms=None if self.times is None else self.times.in_int8,
            calls=self.watch.calls,
            latest=self.watch.latest,
            worst_row=self.worst_row,
        )


def attention_error(given: dict[str, Any], rounded: Tensor, seed: int) -> tuple[float, float]:
    """``|o8 - o| / |o|`` (root of the sum of squares) of a call's output, and the largest of one row of one head,
    against the exact route. At most 512 of its rows are looked at, in every head and batch element: a quarter of them
    those of largest norm of the query, the others drawn. inf or NaN in either make both inf.

    Args:
        given: the arguments of the call by name.
        rounded: its output in 8 bits, ``[*batch, Hq, L, Dv]``.
        seed: of the draw; another one for each check of a layer.
    """
    query, mask = given["query"], given.get("attn_mask")
    rows, counts = chosen_rows(query.detach().movedim(-2, 0).flatten(1), SAMPLE_ROWS, seed)
    if given.get("is_causal") or len(rows) == query.shape[-2]:
        exact = sdpa(**given).index_select(-2, rows)
    else:
        if mask is not None and mask.dim() > 1 and mask.shape[-2] > 1:
            mask = mask.index_select(-2, rows)
        exact = sdpa(**{**given, "query": query.index_select(-2, rows), "attn_mask": mask})
    wrong, size = (
        t.double().square().sum(dim=-1) for t in (rounded.index_select(-2, rows).double() - exact.double(), exact)
    )
    of_rows = torch.where(wrong == 0, 0.0, wrong / size)
    whole = [(squares.flatten(0, -2).sum(dim=0) @ counts) for squares in (wrong, size)]
    found = torch.stack([whole[0] / whole[1] if whole[1] else whole[0], of_rows.amax()]).sqrt()
    error, worst = found.nan_to_num(float("inf")).tolist()
    return error, worst


class AttentionBinding:
    """Attention layers of models in 8 bits; what a binding does is said in :class:`.binding.Int8Binding`."""

    what = "attention layers"

    def __init__(self, *, max_error: float = 0.02, include: Any = None, exclude: Any = None):
        self.options = Int8Options(limit_of(max_error), "", median_times)
        self._include, self._exclude = include, exclude
        self._sites: weakref.WeakKeyDictionary[nn.Module, AttentionSite] = weakref.WeakKeyDictionary()
        self._undos: list[Callable[[], list[str]]] = []

    def attach(self, model: nn.Module) -> int:
        """Let the attention layers of ``model`` run in 8 bits. Returns their number."""
        found = list(find_attention(model, self._include, self._exclude))
        for name, module in found:
            site = self._sites[module] = AttentionSite(name or "(the model)", type(module).__name__, self.options)
            self._undos.append(CaughtForward(module, site, vars(module).get("forward")).put())
        return len(found)

    def calibrate(self, model: nn.Module, run: Callable[[nn.Module], Any]) -> None:
        """Measure every call while ``run`` is called with the model, and decide for each layer by its largest error."""
        self.options.gathers = True
        run(model)
        self.options.gathers = False
        for site in self._sites.values():
            site.decide()

    def detach(self, model: nn.Module) -> list[str]:
        """Undo :meth:`attach`. Returns what could not be."""
        undos, self._undos = self._undos, []
        return [sentence for undo in undos for sentence in undo()]

    def report(self, model: nn.Module) -> Int8Report:
        """The state of each layer."""
        sites = [self._sites[module] for module in model.modules() if module in self._sites]
        return Int8Report([site.line() for site in sites], self.options.max_error, "", self.what)
