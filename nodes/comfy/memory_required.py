"""ComfyUI's own estimate of the memory a step takes, with attention that stores no score matrix.

``BaseModel.memory_required`` has two formulas: one for attention whose memory grows with the number of tokens, and one,
up to 7.5 times larger, for all that it does not know. The second is what cards without torch's fused kernels get, and
what is reserved there pushes weights out of the card's memory. While the patched model is prepared and sampled, the
model at hand is asked by the first formula. Later versions read the override's attribute ``memory_efficient`` instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from ...pascal_attn_core.patching.function_copy import Instead, copy_over

NAME = "memory_required"
_ASKED = ("xformers_enabled", "pytorch_attention_flash_attention")
_lock = threading.RLock()


def efficient(model: Any) -> Callable[..., Any] | None:
    """``model.memory_required`` by the formula for attention without a score matrix; None where the host has that
    answer already, or a function of another kind there."""
    import comfy
    from comfy import model_management
    from comfy.model_base import BaseModel

    function: Any = getattr(type(model), NAME, None)
    known = function is getattr(BaseModel, NAME, None) and isinstance(function, FunctionType)
    if not known or NAME in vars(model) or not all(hasattr(model_management, name) for name in _ASKED):
        return None
    if any(getattr(model_management, name)() for name in _ASKED):
        return None
    management = Instead(model_management, dict.fromkeys(_ASKED, lambda: True))
    return copy_over(function, {"comfy": Instead(comfy, {"model_management": management})}).__get__(model)


@contextmanager
def asked_efficiently(model: Any) -> Iterator[None]:
    """In the block this one model estimates its memory with attention that stores no score matrix."""
    with _lock:
        function = efficient(model)
        if function is not None:
            setattr(model, NAME, function)
    try:
        yield
    finally:
        if function is not None:
            with _lock:
                vars(model).pop(NAME, None)


def preparing(executor: Callable[..., Any], patcher: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrapper around ``prepare_sampling``, which loads the model."""
    with asked_efficiently(patcher.model):
        return executor(patcher, *args, **kwargs)


def batching(executor: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrapper around ``calc_cond_batch``, which decides how many conditions run at once."""
    with asked_efficiently(model):
        return executor(model, *args, **kwargs)
