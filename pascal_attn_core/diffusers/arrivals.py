"""Attention modules that are added to a model after ours was set on it.

Pipelines rebuild parts of their models. FreeNoise of AnimateDiff builds the temporal blocks a second time; an
IP-Adapter brings attention of its own. Since torch calls a hook whenever a module is assigned to another, no forward,
compiled or not, has to look for new modules. The hook exists only while some module is redirected.
"""

from __future__ import annotations

import collections
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from .redirect import SdpaRedirect, redirects_of
from .sites import is_site

log = logging.getLogger("pascal_attn")

_lock = threading.Lock()
_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_hook: Any = None
_serve: Callable[[nn.Module, SdpaRedirect], None] | None = None


def serve_arrivals(serve: Callable[[nn.Module, SdpaRedirect], None]) -> None:
    """Have ``serve(module, redirect)`` called for each attention module that is added to redirected ones."""
    global _serve
    _serve = serve


def watch(module: nn.Module) -> None:
    """``module`` is redirected: attention that is added beside it or replaces it is to be redirected as well."""
    global _hook
    with _lock:
        _watched.add(module)
        if _hook is None:
            _hook = register_module_module_registration_hook(_on_registration)


def unwatch(module: nn.Module) -> None:
    with _lock:
        _watched.discard(module)
        if not _watched:
            _remove_hook()


def stop() -> list[nn.Module]:
    """Remove the hook. Returns the modules that are still redirected."""
    with _lock:
        redirected = list(_watched)
        _watched.clear()
        _remove_hook()
    return redirected


def _remove_hook() -> None:
    global _hook
    if _hook is not None:
        _hook.remove()
        _hook = None


def _on_registration(parent: nn.Module, name: str, arrived: nn.Module | None) -> None:
    """``arrived`` is about to become ``parent.name``. Each attention module in it is redirected as the one that it
    replaces; where there was none, as most of the attention around it, if all of that is redirected."""
    if torch.compiler.is_compiling() or not _watched or arrived is None or _serve is None:
        return
    replaced = parent._modules.get(name)
    if replaced is None and isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return  # models slice such lists in their forward, which makes a list of modules that are elsewhere already
    sites = {path: part for path, part in arrived.named_modules() if not redirects_of(part) and is_site(part)}
    if not sites:
        return
    whole = parent if replaced is None else replaced
    around = {path: redirects_of(part) for path, part in whole.named_modules() if is_site(part)}
    if not any(around.values()):
        return
    most = collections.Counter(around.values()).most_common(1)[0][0] if all(around.values()) else ()
    served = 0
    for path, part in sites.items():
        redirects = most if replaced is None else around.get(path, most)
        for redirect in redirects:
            _serve(part, redirect)
        served += bool(redirects)
    log.info(
        "%d of %d attention modules that were added to %s are redirected", served, len(sites), type(parent).__name__
    )
