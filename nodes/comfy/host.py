"""Questions of the nodes to ComfyUI itself. Everything newer than ComfyUI 0.3.60 is looked for before it is used."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

import torch
from torch import nn

log = logging.getLogger("pascal_attn")
KEY = "pascal_attn"  # of our callbacks, wrappers and injections on a model


def _management() -> Any:
    from comfy import model_management

    return model_management


def throw_if_interrupted() -> None:
    """Raise ComfyUI's own exception if the user pressed Cancel."""
    _management().throw_exception_if_processing_interrupted()


def interrupts() -> tuple[type[BaseException], ...]:
    """ComfyUI's own exception for Cancel: an ``Exception`` up to 0.8, only a ``BaseException`` later."""
    management = sys.modules.get("comfy.model_management")
    return () if management is None else (management.InterruptProcessingException,)


def is_interrupt(error: BaseException) -> bool:
    """Whether this is an exception for Cancel, which must not be swallowed."""
    return not isinstance(error, Exception) or isinstance(error, interrupts())


def compute_device() -> torch.device:
    return _management().get_torch_device()


def make_room(num_bytes: int) -> None:
    """Have ComfyUI move models off the device on which it computes until so much memory is free."""
    _management().free_memory(num_bytes, compute_device())


def free_and_total_bytes(device: torch.device) -> tuple[int, int]:
    """Memory of a device that a model may still take, and all of it, as ComfyUI counts them."""
    return int(_management().get_free_memory(device)), int(_management().get_total_memory(device))


_DEVICES, _LEAST_TOKENS = f"{KEY}_devices", 1024


def visible_cards() -> list[str]:
    """``["cuda:0", "cuda:1"]``; nothing is started for it but what ComfyUI has started."""
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []


def own_options(patcher: Any) -> dict[str, Any]:
    """The ``transformer_options`` of a fresh clone, which from now on are its own."""
    options: dict[str, Any] = patcher.model_options["transformer_options"].copy()
    patcher.model_options["transformer_options"] = options
    return options


def share_over(patcher: Any, devices: tuple[str, ...], least_tokens: int) -> None:
    """Let a fresh clone's attention be shared out over devices. It is written into the clone's options, so that the
    nodes that set and read it may come in either order."""
    own_options(patcher)[_DEVICES] = (devices, least_tokens)


def shared_over(patcher: Any) -> tuple[tuple[str, ...], int]:
    """(devices, least tokens) of a model; no devices where none were set."""
    return patcher.model_options.get("transformer_options", {}).get(_DEVICES, ((), _LEAST_TOKENS))


def attention_function() -> Any:
    from comfy.ldm.modules import attention

    return attention.optimized_attention


_EXACT = ("attention_basic", "attention_sub_quad", "attention_split", "attention_pytorch")


def exact_attention(function: Any, *, plain: bool) -> tuple[Any, str]:
    """The function that says what a call of ``function`` means, called with the same arguments, and its name.

    A function of ComfyUI's that rounds coarsely (Sage) stands for the one that does not; and so do those that add a
    bool mask or know no scale, unless the call is ``plain``. Any other function is returned itself.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if getattr(function, "__module__", "") != "comfy.ldm.modules.attention":
        return function, name
    if not plain or name not in _EXACT:
        from comfy.ldm.modules import attention

        function, name = attention.attention_pytorch, "attention_pytorch"
    return functools.partial(function, _inside_attn_wrapper=True), f"ComfyUI's {name}"


def attention_name() -> str:
    """The name of the host's own attention function, such as ``"attention_pytorch"``."""
    return str(getattr(attention_function(), "__name__", "unknown"))


def prompt_id() -> str:
    """The prompt being executed, "" outside of one."""
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    return "" if context is None else str(context.prompt_id)


def progress_bar(steps: int) -> Any:
    """A bar on the node that is being executed: ``update_absolute(step)``."""
    from comfy import utils

    return utils.ProgressBar(steps)


def send_status(text: str, unique_id: str | None) -> None:
    """Write a line on a node; hosts without that (and runs without a server) only get the log."""
    try:
        from server import PromptServer
    except ImportError:
        return
    send = getattr(getattr(PromptServer, "instance", None), "send_progress_text", None)
    if send is not None and unique_id is not None:
        send(text, unique_id)


def say(text: str, unique_id: str | None, status: str = "") -> None:
    """One line in the log, and on the node the same or a shorter one."""
    log.info("pascal_attn: %s", text)
    send_status(status or text, unique_id)


def name_of_model(model: nn.Module) -> str:
    """``"Flux"``, ``"SDXL"``: ComfyUI's class of the model; ``"SD15"``, that of its configuration, where many share it;
    its network's where there is neither."""
    kinds = type(model).__name__, type(getattr(model, "model_config", None)).__name__
    shared = ("BaseModel", "NoneType", "BASE")
    return next((kind for kind in kinds if kind not in shared), type(model.diffusion_model).__name__)


def node_title(module: str, name: str) -> str:
    """The title of the node whose class of this name is in this module; "" if no node's is."""
    nodes = sys.modules.get("nodes")
    for key, kind in getattr(nodes, "NODE_CLASS_MAPPINGS", {}).items():
        if (kind.__module__, kind.__name__) == (module, name):
            return str(getattr(nodes, "NODE_DISPLAY_NAME_MAPPINGS", {}).get(key, key))
    return ""


def versions() -> dict[str, str]:
    """ComfyUI's version and how it was told to compute attention, for bug reports."""
    from comfyui_version import __version__

    return {"ComfyUI": __version__, "attention": attention_name()}
