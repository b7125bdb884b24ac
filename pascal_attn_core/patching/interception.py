"""Intercepting calls of torch's ``scaled_dot_product_attention``.

Whatever must see these calls (the switch :mod:`..sdpa_patch`, patched diffusers models, the ComfyUI nodes, counters of
tools and tests) enters a :class:`SdpaMode` with a handler of its own and reads the arguments by :func:`bind_sdpa`. Our
own routes call torch by :func:`torch_sdpa`, which no mode intercepts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..call import Arguments

SDPA_NAME = "scaled_dot_product_attention"

#: torch's own function, even where another one has been put at ``torch.nn.functional.scaled_dot_product_attention``
TORCH_SDPA: Any = torch._C._nn.scaled_dot_product_attention

_NAMES = Arguments._fields[:8]  # the arguments of torch's function
POSITIONAL = 6  # torch takes the arguments after these by keyword only


def bind_sdpa(args: tuple, kwargs: dict[str, Any], *, like_torch: bool = True) -> Arguments | str:
    """The arguments of a call, or a sentence why they are none that torch's function takes.

    Args:
        like_torch: False for functions like ours: ``scale`` and ``enable_gqa`` may be given by position too, and
            keywords that torch does not know are left out.
    """
    most = POSITIONAL if like_torch else len(_NAMES)
    if len(args) > most:
        return f"it has {len(args)} positional arguments, {SDPA_NAME} takes {most}"
    given = dict(zip(_NAMES, args))
    for name, value in kwargs.items():
        if name in given:
            return f"its argument {name} is given twice"
        if name in _NAMES:
            given[name] = value
        elif like_torch:
            return f"its argument {name} is not known"
    for name in _NAMES[:3]:
        if name not in given:
            return f"its argument {name} is missing"
    return Arguments(**given)


class SdpaMode(TorchFunctionMode):
    """While active in a thread, calls of torch's ``scaled_dot_product_attention`` return ``handler(args, kwargs)``.

    It sees the function under every name that code may hold it by. The handler runs outside the mode: what it calls is
    seen only by the modes further out. Calls made by :func:`torch_sdpa` are never intercepted.

    Python is called for every torch function under a mode, at 1 to 2 us each.
    """

    def __init__(self, handler: Callable[[tuple, dict[str, Any]], Any]):
        super().__init__()
        self.handler = handler

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is TORCH_SDPA and (torch.compiler.is_compiling() or not _this_thread.inside_ours):
            return self.handler(args, kwargs or {})
        if func is torch.Tensor.unflatten:
            func = torch.unflatten  # the same operation; dynamo cannot trace the method's super() call under a mode
        return func(*args, **kwargs) if kwargs else func(*args)


class _ThisThread(threading.local):
    inside_ours = False  # torch's function is being called by a route of ours


_this_thread = _ThisThread()


def torch_sdpa(*args: Any, **kwargs: Any) -> Tensor:
    """Torch's function as our own routes call it: no :class:`SdpaMode` intercepts it, or the call would come back."""
    if not torch._C._len_torch_function_stack():
        return TORCH_SDPA(*args, **kwargs)
    before, _this_thread.inside_ours = _this_thread.inside_ours, True
    try:
        return TORCH_SDPA(*args, **kwargs)
    finally:
        _this_thread.inside_ours = before
