"""The process-wide switch: torch's ``scaled_dot_product_attention`` becomes ours for everything that calls it.

    import pascal_attn_core.sdpa_patch as pascal

    pascal.enable()                      # this process, until pascal.disable()
    with pascal.patch_sdpa(config):      # until the block ends
        model(x)

    PASCAL_ATTN_ENABLE=1 python -c "import pascal_attn_core.auto; ..."      # without touching the program's code

It replaces the attribute ``torch.nn.functional.scaled_dot_product_attention``. Code that took the function by name
before keeps torch's; within ``with patch_sdpa():`` it is served too, in the thread that entered the block. Calls that
``sdpa`` would hand to torch as they are, the short ones (``math_limit_mib``), go there, and what it does not know goes
to torch untouched, with torch's results and errors: nested, sparse and quantised tensors, tensor subclasses,
``torch.func`` transforms, tracing and export (a graph that leaves this process holds torch's operator), arguments that
torch refuses. ``torch.jit.script`` compiles torch's function.

In evaluation ``nn.TransformerEncoder`` and ``nn.MultiheadAttention`` have a native path that never calls the function.
``torch.backends.mha.set_fastpath_enabled(False)`` turns it off. There is no double backward in the routes that
torch has no kernel for: take the patch off for a gradient penalty. A model with activation checkpoints needs the patch
in its backward pass too; what it took by name is not served there, since torch leaves modes while it runs backward.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode, _get_current_function_mode, handle_torch_function

from .attention import sdpa
from .call import check_call
from .config import AttentionConfig, default_config, switched_on
from .patching import Patch
from .routes import is_plainly_short
from .routes import torch_kernel as torch_route
from .routes.run import is_watched

__all__ = ["disable", "enable", "is_enabled", "patch_sdpa"]

log = logging.getLogger("pascal_attn")

_NAME = "scaled_dot_product_attention"
_PACKAGE = __name__.rpartition(".")[0]
_PACKAGE_NAME = _PACKAGE.rpartition(".")[2]  # also of a second copy, say one in a ComfyUI pack
_TORCH_SDPA = torch_route.torch_sdpa
_PLAIN = (Tensor, torch.nn.Parameter)
_MASKS = (*_PLAIN, CausalBias)
_KEYWORDS = frozenset(("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"))
_POSITIONAL = 6  # torch takes the last two by keyword only

_lock = threading.RLock()
_enabled: Patch | None = None


def enable(config: AttentionConfig | None = None) -> None:
    """Send the attention calls of this process, of all threads, to :func:`pascal_attn_core.sdpa` until :func:`disable`.

    A second call changes the config. ``PASCAL_ATTN_DISABLE=1`` in the environment wins: nothing is changed then.

    Args:
        config: how to compute; None = the environment's.
    """
    global _enabled
    with _lock:
        earlier, _enabled = _enabled, patch_sdpa(config)
        if earlier is not None:
            earlier.remove()
        elif _enabled.active and _enabled.sites:
            _report_holders()


def disable() -> None:
    """Take :func:`enable` back. A :func:`patch_sdpa` in force stays. Harmless when nothing is enabled."""
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


def patch_sdpa(config: AttentionConfig | None = None) -> Patch:
    """Send the attention calls of this process to :func:`pascal_attn_core.sdpa` until ``.remove()``.

    As a context manager it also serves, in the thread that enters the block, code that took torch's function by name
    before (at the price of a Python call around each of torch's functions there). Patches may be removed in any order;
    of several the newest decides, in a thread within such a block the innermost block. A patch that somebody else puts
    over it meanwhile stays.

    Args:
        config: how to compute; None = the environment's.
    Raises:
        TypeError: config is something else.
    """
    if config is not None and not isinstance(config, AttentionConfig):
        raise TypeError(f"config must be an AttentionConfig or None, got {config!r}")
    scope = _Scope(default_config() if config is None else config)
    if switched_on("PASCAL_ATTN_DISABLE"):
        log.info("PASCAL_ATTN_DISABLE is set: %s stays torch's", _NAME)
        return Patch(_NAME, lambda: None, sites=0)
    with _lock:
        replacement = _replacement()
        replacement.add(scope)
    return _SdpaPatch(scope, replacement)


class _Scope:
    """One request to compute by ``config``, as long as it is active."""

    def __init__(self, config: AttentionConfig):
        self.config, self.active = config, True


class _SdpaPatch(Patch):
    """The Patch of :func:`patch_sdpa`; as a context manager it enters a mode too."""

    def __init__(self, scope: _Scope, replacement: _Replacement):
        super().__init__(_NAME, functools.partial(replacement.take_away, scope))
        self._mode = _SdpaMode(scope)

    def __enter__(self) -> Patch:
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, traceback)
        self.remove()


class _Replacement:
    """The function that stands at ``F.scaled_dot_product_attention``, over ``original``.

    Its scopes are replaced as one tuple, so that other threads may call meanwhile; the last one decides. Without any
    it only hands on.
    """

    def __init__(self, original: Any):
        self.original = original
        self.scopes: tuple[_Scope, ...] = ()
        self.function = _function_of(self)

    def add(self, scope: _Scope) -> None:
        self.scopes = (*self.scopes, scope)
        if getattr(F, _NAME) is not self.function:
            setattr(F, _NAME, self.function)
            _tell_torchscript(self.function)

    def take_away(self, scope: _Scope) -> list[str]:
        scope.active = False
        with _lock:
            self.scopes = tuple(other for other in self.scopes if other is not scope)
            if self.scopes:
                return []
            if getattr(F, _NAME) is self.function:
                setattr(F, _NAME, self.original)
                return []
        return [f"{_NAME} was replaced again since: ours stays below, handing calls on"]


# Never forgotten: torch.jit knows their functions by id. One for each function that was found at torch's name.
_made: list[_Replacement] = []


def _replacement() -> _Replacement:
    """The one whose function is at torch's name now, in force or not, or else one over what is there."""
    current = getattr(F, _NAME)
    for made in _made:
        if made.function is current or (made.original is current and not made.scopes):
            return made
    _made.append(_Replacement(current))
    return _made[-1]


def _function_of(replacement: _Replacement) -> Any:
    @functools.wraps(replacement.original, assigned=("__name__", "__qualname__", "__doc__"), updated=())
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        scopes, original = replacement.scopes, replacement.original
        if not scopes:
            return original(*args, **kwargs)
        config = scopes[-1].config
        if torch.compiler.is_compiling():
            return _attend(original, config, args, kwargs)
        if torch._C._len_torch_function_stack():
            closest = _get_current_function_mode()
            if isinstance(closest, _SdpaMode):
                config = closest.scope.config if closest.scope.active else config
            elif type(closest).__module__.startswith(_PACKAGE):
                return _TORCH_SDPA(*args, **kwargs)  # that of a patched pipeline decides
            else:
                # Modes of others see the call under the name that they know it by; then it comes back without them.
                tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
                return handle_torch_function(scaled_dot_product_attention, tensors, *args, **kwargs)
        return _attend(original, config, args, kwargs)

    scaled_dot_product_attention.__module__ = F.__name__  # where pickle finds it, and torch's function later
    return scaled_dot_product_attention


class _SdpaMode(TorchFunctionMode):
    """While active in a thread, torch's function means ours also where it is held by another name."""

    def __init__(self, scope: _Scope):
        super().__init__()
        self.scope = scope

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is _TORCH_SDPA:
            return self._attend(args, kwargs or {})
        if func is torch.Tensor.unflatten:
            func = torch.unflatten  # the same operation; dynamo cannot trace the method's super() call under a mode
        return func(*args, **kwargs) if kwargs else func(*args)

    def _attend(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not self.scope.active or (not torch.compiler.is_compiling() and _called_by_our_route()):
            return _TORCH_SDPA(*args, **kwargs)
        return _attend(_TORCH_SDPA, self.scope.config, args, kwargs)


def _called_by_our_route() -> bool:
    """Whether the call that a mode is looking at is torch's kernel as a route of ours."""
    return sys._getframe(3).f_globals is vars(torch_route)


def _attend(original: Any, config: AttentionConfig, args: tuple, kwargs: dict[str, Any]) -> Any:
    """One call by ours, or by ``original`` what is not for us."""
    if torch.compiler.is_compiling():
        return sdpa(*args, **kwargs, config=config) if _is_known(args, kwargs) else original(*args, **kwargs)
    if not torch._C._len_torch_function_stack():
        if _is_plainly_short(config, args, kwargs):
            return _TORCH_SDPA(*args, **kwargs)
    else:
        with torch._C.DisableTorchFunction():  # under a mode each look at a tensor would be a call of the mode
            if _is_plainly_short(config, args, kwargs):
                return _TORCH_SDPA(*args, **kwargs)
    if not _is_known(args, kwargs):
        return original(*args, **kwargs)
    try:
        with torch._C.DisableTorchFunction():  # modes have seen the call; what it is made of is not for them
            return sdpa(*args, **kwargs, config=config)
    except (TypeError, ValueError):  # raised before anything is computed
        if not _is_refused(args, kwargs):
            raise
    return original(*args, **kwargs)


def _is_plainly_short(config: AttentionConfig, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether :func:`sdpa` would give the call to torch's function at first sight."""
    try:
        return is_plainly_short(config, *args, **kwargs) and not is_watched()
    except TypeError:  # arguments that torch's function does not have, or too few
        return False


def _is_refused(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether our check does not accept the arguments; torch then says what it makes of them."""
    try:
        check_call(*args, **kwargs)
    except (TypeError, ValueError) as error:
        _note_refusal(str(error))
        return True
    return False


def _is_known(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call is of the kind that we compute: plain strided tensors, given as torch wants them, to be computed
    here and now."""
    if len(args) > _POSITIONAL or not kwargs.keys() <= _KEYWORDS:
        return False
    three = (
        args[:3] if len(args) > 2 else (*args, *(kwargs.get(name) for name in ("query", "key", "value")[len(args) :]))
    )
    mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if any(type(t) not in _PLAIN for t in three) or (mask is not None and type(mask) not in _MASKS):
        return False
    if any(t.is_nested or t.layout is not torch.strided or t.is_quantized for t in three):
        return False
    is_causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
    if mask is not None and is_causal:
        return False
    if torch.compiler.is_compiling():
        return not (hasattr(torch.compiler, "is_exporting") and torch.compiler.is_exporting())
    return not torch.jit.is_tracing() and not torch._C._are_functorch_transforms_active()


@functools.lru_cache(maxsize=256)
def _note_refusal(reason: str) -> None:
    log.info("%s: a call went to torch as it was: %s", _NAME, reason)


def _tell_torchscript(function: Any) -> None:
    """Let torch.jit.script compile torch's operator where it meets ours."""
    from torch.jit import _builtins

    register = getattr(_builtins, "_register_builtin", None)
    if register is not None:
        register(function, f"aten::{_NAME}")


def _report_holders() -> None:
    """Say who took torch's function by name before, since those calls are not reached."""
    holders = sorted(
        name
        for name, module in list(sys.modules.items())
        if not name.startswith("torch.") and _PACKAGE_NAME not in name.split(".") and _holds_torch_sdpa(module)
    )
    if holders:
        log.warning(
            "%s was taken by name before by %s, which keep torch's; wrap their calls in `with patch_sdpa():`",
            _NAME,
            ", ".join(holders),
        )


def _holds_torch_sdpa(module: Any) -> bool:
    return any(value is _TORCH_SDPA for value in list(getattr(module, "__dict__", {}).values()))
