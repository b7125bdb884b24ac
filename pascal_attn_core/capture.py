"""Capture the attention calls of a running model into one file, and load them again.

    with capture("calls.safetensors"):
        pipe(prompt)

``pascal-attn replay calls.safetensors`` then runs them through every route. The file holds the actual tensors of the
model, which may reveal a prompt or an image: consider that before you publish it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import PLAIN, AttentionCall, distinct
from .call.lazy_mask import LazyMask
from .machine.device import MIB
from .observe.report import add_observer
from .patching.interception import SDPA_NAME, bind_sdpa
from .patching.patch import Patch, replaced

__all__ = ["CapturedCall", "capture", "load_calls", "observe"]

log = logging.getLogger("pascal_attn")

FORMAT = "pascal-attention-capture"
VERSION = "1"
TENSORS = ("query", "key", "value", "attn_mask")
OPTIONS = ("is_causal", "enable_gqa", "scale", "dropout_p", "device")
# A tensor cut out of a larger one is laid out again as it was, unless that takes more than this times its own memory.
_MOST_PADDING = 4


@dataclass
class CapturedCall:
    """The arguments of one call of ``scaled_dot_product_attention``, as passed; its name for tables, how many calls of
    this kind were seen, and on which device."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    name: str = ""
    count: int = 1
    device: str = ""

    def to(self, device: torch.device | str) -> CapturedCall:
        """This call on another device, every tensor with its strides."""
        tensors = {name: t for name in TENSORS if (t := getattr(self, name)) is not None}
        moved: dict[str, Any] = {n: _lay_out(distinct(t).to(device), _layout(t)) for n, t in tensors.items()}
        return replace(self, **moved)


def capture(path: str | os.PathLike[str], *, limit: int = 32, max_mib: float = 1024.0) -> Patch:
    """Write the attention calls that this process makes, in any thread, to one ``.safetensors`` file: the first of each
    kind (shapes, strides, dtypes, options), the others are counted.

    Direct calls of :func:`pascal_attn_core.sdpa` are seen, and while it is active,
    ``torch.nn.functional.scaled_dot_product_attention`` is replaced by a function that copies its arguments to the CPU
    and then calls the original. It does not see callers that imported that function by name earlier, nor calls inside
    ``torch.compile`` or a CUDA graph. It leaves out calls with a window, softcap, sinks or a rule as mask, which the
    file format cannot represent. :func:`observe` covers functions of your own.

    Args:
        path: the file, replaced as a whole when the capture ends.
        limit: number of calls to keep; of the kinds kept, later ones are counted.
        max_mib: total size to keep in MiB; a call that no longer fits is skipped, and the log says so.
    Returns:
        a Patch; ``.remove()`` or the end of its ``with`` block ends the capture.
    Raises:
        ImportError: safetensors is not installed.
        ValueError: an invalid path or number.
    """
    _need_safetensors()
    target = Path(path)
    if target.suffix != ".safetensors":
        raise ValueError(f"path must end with .safetensors, got {str(path)!r}")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"path must be in a folder that exists, got {str(path)!r}")
    if limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    if not max_mib > 0:
        raise ValueError(f"max_mib must be greater than 0, got {max_mib}")
    recorder = _Recorder(target, limit, int(max_mib * MIB))
    original = F.scaled_dot_product_attention
    ours = observe(original)
    ours.__module__ = F.__name__  # where pickle finds it, and torch's function later
    give_back = replaced(F, SDPA_NAME, ours)
    end_observing = add_observer(recorder.see_checked)
    _active.append(recorder)

    def undo() -> list[str]:
        end_observing()
        _active.remove(recorder)
        return give_back() + recorder.finish()

    return Patch(f"capture to {target.name}", undo)


def observe(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with every call shown to the captures that are active. It takes the arguments of
    ``scaled_dot_product_attention`` first; its own keyword arguments are passed on and not recorded."""

    @functools.wraps(fn)
    def attention(*args: Any, **kwargs: Any) -> Any:
        # torch.compile folds the first question to True and sees nothing but the call
        if torch.compiler.is_compiling() or not (listening := [r for r in tuple(_active) if r.is_listening]):
            return fn(*args, **kwargs)
        for recorder in listening:
            recorder.see(args, kwargs)
            recorder.is_listening = False  # a call that this one makes is part of it
        try:
            return fn(*args, **kwargs)
        finally:
            for recorder in listening:
                recorder.is_listening = True

    return attention


_active: list[_Recorder] = []


@dataclass(eq=False)
class _Recorder:
    """The calls seen so far by one capture."""

    path: Path
    limit: int
    max_bytes: int
    calls: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    num_bytes: int = 0
    dropped: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    local: threading.local = field(default_factory=threading.local)

    @property
    def is_listening(self) -> bool:
        """Whether a call of this thread is to be seen."""
        return not getattr(self.local, "is_inside", False)

    @is_listening.setter
    def is_listening(self, value: bool) -> None:
        self.local.is_inside = not value

    def see(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Keep one call, if it is one to keep."""
        call = _bind(args, kwargs)
        if call is None:
            return
        layouts = {name: _layout(getattr(call, name)) for name in TENSORS if getattr(call, name) is not None}
        options = {name: getattr(call, name) for name in OPTIONS}
        with self.lock:
            key = json.dumps([layouts, options], default=float)
            if key in self.calls:
                self.calls[key]["count"] += 1
            elif len(self.calls) < self.limit:
                self._keep(key, call, layouts, options)

    def see_checked(self, checked: AttentionCall) -> None:
        """Keep one direct call of ours, if this file can say what it is."""
        mask = checked.attn_mask
        rules = (checked.softcap, checked.sinks, checked.score_rule)
        has_rule = isinstance(mask, LazyMask) or any(rule is not None for rule in rules)
        has_band = checked.left is not None or (checked.right is not None and not checked.plain_causal)
        if not self.is_listening or has_rule or has_band or torch.compiler.is_compiling():
            return
        options = {"is_causal": checked.is_causal, "scale": checked.scale, "enable_gqa": checked.groups > 1}
        tensors = checked.query, checked.key, checked.value, mask
        self.see(tensors, {**options, "dropout_p": checked.dropout_p})

    def _keep(self, key: str, call: CapturedCall, layouts: dict[str, Any], options: dict[str, Any]) -> None:
        dense = {name: distinct(getattr(call, name).detach()) for name in layouts}
        size = sum(tensor.numel() * tensor.element_size() for tensor in dense.values())
        if self.num_bytes + size > self.max_bytes:
            self.dropped += 1
            return
        number = len(self.calls)
        self.tensors |= {f"{number}.{name}": t.to("cpu", copy=True).contiguous() for name, t in dense.items()}
        self.calls[key] = {"count": 1, **options, "layouts": layouts}
        self.num_bytes += size

    def finish(self) -> list[str]:
        """Write the file and say what there is to say about it."""
        with self.lock:
            if not self.calls and not self.dropped:
                return ["no call of scaled_dot_product_attention was seen; nothing written"]
            if self.tensors:
                self._write()
            skipped = f"{self.dropped} calls were skipped: they did not fit into {self.max_bytes / MIB:g} MiB"
            return [skipped] if self.dropped else []

    def _write(self) -> None:
        from safetensors.torch import save_file

        header = {"format": FORMAT, "version": VERSION, "torch": torch.__version__, "dropped": str(self.dropped)}
        header["calls"] = json.dumps(list(self.calls.values()), default=float)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            save_file(self.tensors, temporary, metadata=header)
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
        log.info("captured %d calls, %.1f MiB: %s", len(self.calls), self.num_bytes / MIB, self.path)


def _bind(args: tuple, kwargs: dict[str, Any]) -> CapturedCall | None:
    """The call, or None where there is nothing to copy: wrong arguments, fake or meta tensors, a CUDA graph."""
    call = bind_sdpa(args, kwargs, like_torch=False)
    if isinstance(call, str):
        return None
    tensors = [t for t in call[:4] if t is not None]
    if any(type(t) not in PLAIN or t.is_meta or t.layout != torch.strided for t in tensors):
        return None
    if call.query.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    return CapturedCall(*call[:8], device=str(call.query.device))


def load_calls(path: str | os.PathLike[str]) -> list[CapturedCall]:
    """The calls that :func:`capture` wrote, on the CPU, with the strides they had.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the file cannot be opened.
        ValueError: not a file of :func:`capture`, or a damaged one.
    """
    _need_safetensors()
    from safetensors import SafetensorError, safe_open

    with open(path, "rb"):
        pass  # a missing file raises Python's own error
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
                raise ValueError(f"its format is {header.get('format')}, version {header.get('version')}")
            return [_load_call(file, number, call) for number, call in enumerate(json.loads(header["calls"]))]
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        expected = f"a whole file of pascal_attn_core.capture, version {VERSION}"
        raise ValueError(f"{os.fspath(path)!r} must be {expected}: {error!r}") from error


def _load_call(file: Any, number: int, described: dict[str, Any]) -> CapturedCall:
    layouts = described.pop("layouts")
    tensors = {name: _lay_out(file.get_tensor(f"{number}.{name}"), layout) for name, layout in layouts.items()}
    arguments: dict[str, Any] = {**tensors, **described}
    return CapturedCall(**arguments, name=f"call {number}")


def _layout(tensor: Tensor) -> dict[str, Any]:
    return {"shape": list(tensor.shape), "stride": list(tensor.stride()), "dtype": str(tensor.dtype)}


def _lay_out(dense: Tensor, layout: dict[str, Any]) -> Tensor:
    """The inverse of :func:`.call.distinct`, in memory as it was."""
    extent = 1 + sum((size - 1) * step for size, step in zip(dense.shape, layout["stride"], strict=True))
    if dense.numel() and extent <= _MOST_PADDING * dense.numel():
        dense = dense.new_zeros(extent).as_strided(dense.shape, layout["stride"]).copy_(dense)
    return dense.expand(layout["shape"])


def _need_safetensors() -> None:
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError("captures need safetensors: pip install safetensors")


# `pascal_attn_core.capture` is the function, which hides this module: the names of it are found there too.
vars(capture).update({name: globals()[name] for name in __all__})
