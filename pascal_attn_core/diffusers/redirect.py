"""How one attention call inside a diffusers model reaches our ``sdpa``: nothing of the model is re-implemented.

:class:`SdpaRedirect` has a thread-local mode that passes ``scaled_dot_product_attention`` to ours and everything else
to torch. Python is called for every torch function that runs under a mode, at 1 to 2 us each, and a processor calls 15
to 60. So where the code of a processor shows how it calls attention, a copy of that code calls :data:`FUNCTIONAL`
instead, and no mode is needed (see ``code`` and ``dispatch``).
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from ..attention import sdpa
from ..config import AttentionConfig
from ..patching.interception import TORCH_SDPA, SdpaMode

#: the attribute in which a redirected module keeps its redirects, a tuple; the last one decides
REDIRECTS = "_pascal_redirects"


class ThisThread(threading.local):
    """State of the module calls in progress in a thread."""

    redirect: Any = None  # the SdpaRedirect in force while a copied processor runs
    acting: tuple[Any, Any] | None = None  # a module, and what stands in for its processor


this_thread = ThisThread()


class SdpaRedirect:
    """How the attention calls of a module are computed. No call changes its state, so one object serves any number of
    threads.

    Args:
        scale: the scale of the scores for calls that give none; None = 1/sqrt(head_dim).
        lasting: set by a processor, not by a Patch; it decides over those of patches.
    Attributes:
        attend: ``attend(args, kwargs)`` computes one call of ``scaled_dot_product_attention``.
        mode: while it is entered in a thread, torch's function is ``attend`` there.
    """

    def __init__(self, config: AttentionConfig | None = None, *, scale: float | None = None, lasting: bool = False):
        self.config, self.lasting = config, lasting
        self.attend = functools.partial(_attend, config, scale)
        self.mode = SdpaMode(self.attend)


def _attend(config: AttentionConfig | None, scale: float | None, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    if scale is not None:
        kwargs = {"scale": scale, **kwargs}
    if not torch.compiler.is_compiling() and _scores_are_skipped(*args, **kwargs):
        return TORCH_SDPA(*args, **kwargs)
    return sdpa(*args, config=config, **kwargs)


def redirects_of(module: nn.Module) -> tuple[SdpaRedirect, ...]:
    """The redirects in force on ``module``; the last one decides."""
    return module.__dict__.get(REDIRECTS, ())


def _scores_are_skipped(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> bool:
    """Whether a guider of diffusers replaces this call: by a mode outside ours that returns ``value`` as it is."""
    if not torch._C._len_torch_function_stack() or query.shape[2:3] != value.shape[2:3]:
        return False
    return any(type(mode).__name__ == "AttentionScoreSkipFunctionMode" for mode in _get_current_function_mode_stack())


class _Functional:
    """``torch.nn.functional`` for a copied processor."""

    __slots__ = ()

    @staticmethod
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        redirect = this_thread.redirect
        if F.scaled_dot_product_attention is TORCH_SDPA:
            return redirect.attend(args, kwargs)
        with redirect.mode:  # another replacement of torch's function comes first, and may call torch's
            return F.scaled_dot_product_attention(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)


FUNCTIONAL = _Functional()
