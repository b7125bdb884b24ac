"""The process-wide switch: calls of torch's ``scaled_dot_product_attention`` are computed by
:func:`pascal_attn_core.sdpa`.

It replaces the attribute ``torch.nn.functional.scaled_dot_product_attention``. Code that imported the function by name
earlier keeps torch's; inside ``with patch_sdpa():`` its calls are redirected too, in the thread that entered the block.
Short calls (``math_limit_mib``), which ``sdpa`` would pass to torch unchanged, go to torch directly. So does everything
that ``sdpa`` does not support, with torch's results and errors: nested, sparse and quantised tensors, tensor
subclasses, and arguments that torch refuses. ``torch.func`` transforms go there if torch's kernels have what they want
(gradients, and ``vmap``). So do tracing and export: a graph that leaves this process holds torch's operator.
``torch.jit.script`` compiles torch's function.

In eval mode ``nn.TransformerEncoder`` and ``nn.MultiheadAttention`` have a native fast path that never calls the
function. ``torch.backends.mha.set_fastpath_enabled(False)`` turns it off. A model with activation checkpointing needs
the patch in its backward pass too; functions that it has imported by name are not redirected there, because torch
function modes are not active while torch runs the backward pass.

If the switch was set before torch's own ``context_parallel`` is entered, calls inside it stay torch's; inside it the
switch cannot be set.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import _get_current_function_mode, handle_torch_function

from .attention import sdpa
from .call import PLAIN, check_call, is_causal_bias, order_of_transforms
from .config import AttentionConfig, check_number, config_of, log_once, number_of, switched_on
from .patching.interception import POSITIONAL, SDPA_NAME, TORCH_SDPA, SdpaMode, bind_sdpa
from .patching.patch import Patch
from .routes.prepared import again

__all__ = ["disable", "enable", "is_enabled", "patch_sdpa"]

log = logging.getLogger("pascal_attn")

_lock = threading.RLock()
_enabled: Patch | None = None


def enable(config: AttentionConfig | None = None, *, min_keys: int | None = None) -> None:
    """Send the attention calls of all threads of this process to :func:`pascal_attn_core.sdpa` until :func:`disable`.

    A second call changes the config. With ``PASCAL_ATTN_DISABLE=1`` in the environment it does nothing.

    Args:
        config, min_keys: see :func:`patch_sdpa`.
    """
    global _enabled
    with _lock:
        earlier, _enabled = _enabled, patch_sdpa(config, min_keys=min_keys)
        if earlier is not None:
            earlier.remove()


def disable() -> None:
    """Revert :func:`enable`. A :func:`patch_sdpa` in force stays. Does nothing when nothing is enabled."""
    global _enabled
    with _lock:
        earlier, _enabled = _enabled, None
    if earlier is not None:
        earlier.remove()


def is_enabled() -> bool:
    """Whether :func:`enable` is in force."""
    patch = _enabled
    return patch is not None and patch.active and patch.sites > 0


def enable_if_asked() -> bool:
    """:func:`enable` if the environment has ``PASCAL_ATTN_ENABLE=1``; returns whether it is in force."""
    if switched_on("PASCAL_ATTN_ENABLE"):
        enable()
    return is_enabled()


def patch_sdpa(config: AttentionConfig | None = None, *, min_keys: int | None = None) -> Patch:
    """Send the attention calls of this process to :func:`pascal_attn_core.sdpa` until ``.remove()``.

    As a context manager it also redirects, in the thread that enters the block, code that imported torch's function by
    name earlier (at the cost of a Python call around each torch function in the block). Patches may be removed in any
    order; if there are several, the newest applies, or the innermost block in a thread within such a block. A
    replacement that other code installs on top of it in the meantime stays.

    Args:
        config: how to compute; None = the environment's.
        min_keys: calls with fewer keys (S) go to torch unchanged; None = ``PASCAL_ATTN_MIN_KEYS`` in the environment,
            or 0 if that is not set.
    Raises:
        TypeError, ValueError: an invalid argument.
        RuntimeError: torch's ``context_parallel`` is in force, see the module.
    """
    config = config_of(config)
    least = number_of("PASCAL_ATTN_MIN_KEYS") if min_keys is None else min_keys
    check_number("min_keys", least, int, 0)
    if switched_on("PASCAL_ATTN_DISABLE"):
        log.info("PASCAL_ATTN_DISABLE is set: %s stays torch's", SDPA_NAME)
        return Patch(SDPA_NAME, lambda: None, sites=0)
    with _lock:
        return _SdpaPatch(config, least, _replacement())


class _SdpaPatch(Patch):
    """The Patch of :func:`patch_sdpa`: computes by ``config`` what has ``min_keys`` keys, as long as it is active. As a
    context manager it enters a mode too, whose handler it is."""

    def __init__(self, config: AttentionConfig, min_keys: int, replacement: _Replacement):
        super().__init__(SDPA_NAME, lambda: replacement.take_away(self))
        self.config, self.min_keys, self._mode = config, min_keys, SdpaMode(self)
        replacement.add(self)

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        return _attend(TORCH_SDPA, self, args, kwargs) if self.active else TORCH_SDPA(*args, **kwargs)

    def __enter__(self) -> Patch:
        self._mode.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._mode.__exit__(kind, error, traceback)
        self.remove()


class _Replacement:
    """The function put at ``F.scaled_dot_product_attention`` in place of ``original``.

    Its patches are one tuple that is replaced as a whole, so that other threads may call meanwhile; the last one
    decides. Without any it only calls ``original``.
    """

    def __init__(self, original: Any):
        self.original = original
        self.patches: tuple[_SdpaPatch, ...] = ()
        self.function = _function_of(self)

    def add(self, patch: _SdpaPatch) -> None:
        self.patches = (*self.patches, patch)
        if getattr(F, SDPA_NAME) is not self.function:
            setattr(F, SDPA_NAME, self.function)
            from torch.jit import _builtins

            if register := getattr(_builtins, "_register_builtin", None):  # torch.jit.script compiles torch's operator
                register(self.function, f"aten::{SDPA_NAME}")

    def take_away(self, patch: _SdpaPatch) -> list[str]:
        with _lock:
            self.patches = tuple(other for other in self.patches if other is not patch)
            if self.patches:
                return []
            if getattr(F, SDPA_NAME) is self.function:
                setattr(F, SDPA_NAME, self.original)
                return []
        return [f"{SDPA_NAME} has been replaced since: ours stays underneath it and only calls the original"]


# Kept for good: torch.jit knows their functions by id. One for each function that was found at torch's name.
_made: list[_Replacement] = []


def _replacement() -> _Replacement:
    """The one whose function is at torch's name now, active or not, else one over the function that is there."""
    current = getattr(F, SDPA_NAME)
    if str(getattr(current, "__module__", "")).startswith("torch.distributed."):
        raise RuntimeError(
            f"the switch must be set before torch's context_parallel is entered, got {SDPA_NAME} of "
            f"{current.__module__}: on top of it ours would see only the tokens of this process"
        )
    for made in _made:
        if made.function is current or (made.original is current and not made.patches):
            return made
    _made.append(_Replacement(current))
    return _made[-1]


def _function_of(replacement: _Replacement) -> Any:
    @functools.wraps(replacement.original, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        patches, original = replacement.patches, replacement.original
        if not patches:
            return original(*args, **kwargs)
        patch = patches[-1]
        if torch.compiler.is_compiling():
            return _attend(original, patch, args, kwargs)
        if torch._C._len_torch_function_stack():
            closest = _get_current_function_mode()
            if isinstance(closest, SdpaMode):
                if not isinstance(closest.handler, _SdpaPatch):
                    return TORCH_SDPA(*args, **kwargs)  # its handler decides, say that of a patched pipeline
                patch = closest.handler if closest.handler.active else patch
            else:
                # Modes of others see the call under the name that they look for; then it comes back without them.
                tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
                return handle_torch_function(scaled_dot_product_attention, tensors, *args, **kwargs)
        return _attend(original, patch, args, kwargs)

    scaled_dot_product_attention.__module__ = F.__name__  # where pickle finds it, and torch's function later
    return scaled_dot_product_attention


def _attend(original: Any, patch: _SdpaPatch, args: tuple, kwargs: dict[str, Any]) -> Any:
    """One call by ours, or by ``original`` if ours does not support it or it has too few keys."""
    config = patch.config
    if patch.min_keys and _has_fewer_keys(patch.min_keys, args, kwargs):
        return _passed_on(original, args, kwargs)
    if torch.compiler.is_compiling():
        return sdpa(*args, **kwargs, config=config) if _is_known(args, kwargs) else original(*args, **kwargs)
    try:
        if not torch._C._len_torch_function_stack():
            out, _ = again(*args, **kwargs, config=config)
        else:
            with torch._C.DisableTorchFunction():  # under a mode each look at a tensor would be a call of the mode
                out, _ = again(*args, **kwargs, config=config)
        if out is not None and len(args) <= POSITIONAL:
            return out
    except (TypeError, ValueError):  # arguments that torch's function does not have, or refuses: it will say so
        pass
    if not _is_known(args, kwargs):
        return _passed_on(original, args, kwargs)
    try:
        with torch._C.DisableTorchFunction():  # modes have seen the call, not the operators that it is made of
            return sdpa(*args, **kwargs, config=config)
    except (TypeError, ValueError):  # raised before anything is computed
        if not _is_refused(args, kwargs):
            raise
    return _passed_on(original, args, kwargs)


def _passed_on(original: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return what ``original`` answers. torch's CausalBias acts only in calls of the function that stands at torch's
    name, where ours stands: it is asked directly, or torch's function would take its numbers for a mask."""
    mask: Any = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if original is TORCH_SDPA and is_causal_bias(mask):
        return type(mask)._dispatch(*args, **kwargs)
    return original(*args, **kwargs)


def _has_fewer_keys(least: int, args: tuple, kwargs: dict[str, Any]) -> bool:
    key = args[1] if len(args) > 1 else kwargs.get("key")
    return isinstance(key, Tensor) and not key.is_nested and key.dim() > 1 and key.shape[-2] < least


def _is_refused(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether our check refuses the arguments; torch's function then computes them or raises its own error."""
    call = bind_sdpa(args, kwargs)
    assert not isinstance(call, str)
    try:
        check_call(call)
    except (TypeError, ValueError) as error:
        log_once(logging.INFO, "%s: a call was passed to torch unchanged: %s", SDPA_NAME, str(error))
        return True
    return False


def _is_known(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether ours supports the call: plain strided tensors, arguments that torch takes, and nothing that records the
    call instead of computing it."""
    call = bind_sdpa(args, kwargs)
    if isinstance(call, str):
        return False
    three, mask = call[:3], call.attn_mask
    if any(type(t) not in PLAIN or t.is_nested or t.layout is not torch.strided or t.is_quantized for t in three):
        return False
    if mask is not None and (call.is_causal or (type(mask) not in PLAIN and not is_causal_bias(mask))):
        return False
    if order_of_transforms() == 1:
        return False
    if torch.compiler.is_compiling():
        return not (hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting())
    return not torch.jit.is_tracing()
