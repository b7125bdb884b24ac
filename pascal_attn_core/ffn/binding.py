"""FfnBinding: the feed-forward modules of models in slices, put in and taken out as often as their host wants."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from .find import find_ffn
from .forward import detach, place
from .plan import FfnSettings, FfnSite
from .report import FfnReport, report_line


class FfnBinding:
    """Feed-forward modules in slices. It serves several copies of a model (one per device) and keeps none of them
    alive. Several bindings may be attached to a module, in any order; the newest applies."""

    def __init__(self, *, include: Any = None, exclude: Any = None, **options: Any):
        self.settings = FfnSettings(**options)
        self._include, self._exclude = include, exclude
        self._sites: weakref.WeakKeyDictionary[nn.Module, FfnSite] = weakref.WeakKeyDictionary()

    def attach(self, model: nn.Module) -> int:
        """Let the feed-forward modules of ``model`` run in slices; returns how many. A second call begins anew,
        apart from the report."""
        self.detach(model)
        found = list(find_ffn(model, self._include, self._exclude))
        modules = [each.module for each in found if not each.state]
        for module in modules:
            site = self._sites[module] = FfnSite(self.settings, used=self._site(module).used)
            site.sliced = weakref.ref(place(module, site))
        return len(modules)

    def detach(self, model: nn.Module | None = None) -> list[str]:
        """Undo :meth:`attach` for one model or, with None, for all; returns what could not be undone. Slices and
        forwards of others stay."""
        modules = list(self._sites) if model is None else [each for each in model.modules() if each in self._sites]
        left = []
        for module in modules:
            site = self._sites[module]
            sliced, site.sliced = None if site.sliced is None else site.sliced(), None
            left += [] if sliced is None else detach(sliced, site)
        return left

    def restart_report(self) -> None:
        for site in list(self._sites.values()):
            site.used.clear()

    def report(self, model: nn.Module) -> FfnReport:
        """The state of each module of ``model`` since the report was reset; those that were not called are waiting."""
        found = find_ffn(model, self._include, self._exclude)
        return FfnReport([report_line(each, None if each.state else self._site(each.module)) for each in found])

    def _site(self, module: nn.Module) -> FfnSite:
        return self._sites.setdefault(module, FfnSite(self.settings))
