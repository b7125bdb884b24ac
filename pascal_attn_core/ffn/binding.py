"""Chunked feed-forward modules for hosts that take their patches off and put them back between runs."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from .find import Found, find_ffn
from .forward import SlicedForward, detach, place
from .plan import Settings, Site
from .report import FfnReport, FfnReportLine, report_line


class FfnBinding:
    """:func:`patch_ffn` for repeated attaching and detaching; what trials found is kept in between.

    It serves several copies of a model (one per device) and keeps none of them alive. One binding is attached to a
    module at a time: attaching a second one detaches the first.

    Args:
        passing: exceptions of the host that a trial must not take for a refusal, such as its interrupt.
        budget_mib, chunk_tokens, min_tokens, include, exclude, verify, checkpoint: as in :func:`patch_ffn`.
    """

    def __init__(
        self,
        *,
        budget_mib: float | None = None,
        chunk_tokens: int | None = None,
        min_tokens: int = 256,
        include: Any = None,
        exclude: Any = None,
        verify: bool = True,
        checkpoint: bool = True,
        passing: tuple[type[BaseException], ...] = (),
    ):
        self.settings = Settings(
            budget_mib, chunk_tokens, min_tokens=min_tokens, verify=verify, checkpoint=checkpoint, passing=passing
        )
        self._include, self._exclude = include, exclude
        self._sites: weakref.WeakKeyDictionary[nn.Module, BoundSite] = weakref.WeakKeyDictionary()

    def attach(self, model: nn.Module) -> int:
        """Let the feed-forward modules of ``model`` run in slices; returns how many. A second call changes nothing."""
        sites = [(found.module, self._site(found.module)) for found in self._found(model) if not found.why_not]
        for module, site in sites:
            site.leave()
            take_off(module)
            site.enter(place(module, site))
        return len(sites)

    def detach(self, model: nn.Module) -> int:
        """Undo :meth:`attach`; returns for how many modules. Slices and forwards of others stay."""
        sites = [self._sites.get(module) for module in model.modules()]
        return sum(site.leave() for site in sites if site is not None)

    def restart_report(self) -> None:
        """Reset the report."""
        for site in list(self._sites.values()):
            site.used.clear()

    def report(self, model: nn.Module) -> FfnReport:
        """The state of each module of ``model`` since the report was reset."""
        return FfnReport([self._line(found) for found in self._found(model)])

    def preview(self, model: nn.Module) -> FfnReport:
        """The report before any call: modules that are chosen are ``"waiting"``, since the first call tries them."""
        return self.report(model)

    def _found(self, model: nn.Module) -> list[Found]:
        return list(find_ffn(model, self._include, self._exclude))

    def _site(self, module: nn.Module) -> BoundSite:
        site = self._sites.get(module)
        if site is None:
            site = self._sites[module] = BoundSite(self.settings)
        return site

    def _line(self, found: Found) -> FfnReportLine:
        return report_line(found, None if found.why_not else self._site(found.module))


class BoundSite(Site):
    """A module under a binding."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self._sliced: Callable[[], SlicedForward | None] = _nothing  # weak: it holds its module
        self._is_plain, self._inner = True, _nothing

    def copy(self) -> BoundSite:
        return BoundSite(self.settings)

    def leave(self) -> bool:
        """Detach it from its module, also below another pack's forward; returns whether it was attached."""
        sliced, self._sliced = self._sliced(), _nothing
        if sliced is None or self not in sliced.sites:
            return False
        detach(sliced, self)
        return True

    def enter(self, sliced: SlicedForward) -> None:
        """Note that ``sliced`` uses it now. A refusal holds only for the forward that was tried."""
        self.plans.clear()  # nothing has compared the module's state in between; what trials found is shared
        self._sliced, inner = weakref.ref(sliced), sliced.inner
        is_same = self._is_plain if inner is None else not self._is_plain and inner == self._inner()
        if not is_same:
            self.used.clear()
            self.refusals.clear()
        self._is_plain, self._inner = inner is None, _nothing if inner is None else _reference(inner)


def take_off(module: nn.Module) -> None:
    """Remove the slices of any binding from one module."""
    forward = module.__dict__.get("forward")
    if isinstance(forward, SlicedForward):
        for site in [site for site in forward.sites if isinstance(site, BoundSite)]:
            detach(forward, site)


def _nothing() -> None:
    return None


def _reference(forward: Callable[..., Any]) -> Callable[[], Any]:
    """A weak reference, so that another pack's wrapper can be collected while we remember it."""
    try:
        return weakref.WeakMethod(forward) if isinstance(forward, types.MethodType) else weakref.ref(forward)
    except TypeError:
        return _nothing
