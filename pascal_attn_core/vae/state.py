"""The state that a VAE's modules hold besides their weights, and the weights that change while the VAE runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

_SMALL = 1 << 16  # elements of a buffer whose numbers are kept


def snapshot(root: nn.Module) -> Callable[[], None]:
    """Note the attributes of a module and of all inside it, the lists, dicts and sets in them, and the numbers of small
    buffers; returns what puts them back."""
    kept: dict[int, tuple[Any, Any]] = {}  # containers and their content

    def note(value: Any) -> None:
        if isinstance(value, (list, dict, set)) and id(value) not in kept:
            kept[id(value)] = value, value.copy()
            for each in value.values() if isinstance(value, dict) else value:
                note(each)

    for module in root.modules():
        note(vars(module))
    buffers = [b for b in root.buffers() if type(b) is Tensor and b.numel() <= _SMALL and not b.is_inference()]
    numbers = [(buffer, buffer._version, buffer.detach().clone()) for buffer in buffers]

    def put_back() -> None:
        for container, content in kept.values():
            _refill(container, content)
        for buffer, version, values in numbers:
            if buffer._version != version:
                buffer.detach().copy_(values)

    return put_back


def _refill(container: Any, content: Any) -> None:
    """Give a container its content back; what has not changed is not touched, since other threads may use it."""
    if isinstance(container, dict):
        for key in [key for key in container if key not in content]:
            del container[key]
        for key, value in content.items():
            if key not in container or container[key] is not value:
                container[key] = value
    elif isinstance(container, list):
        if len(container) != len(content) or any(one is not other for one, other in zip(container, content)):
            container[:] = content
    else:
        container.symmetric_difference_update(container ^ content)


def is_compiled(root: nn.Module) -> bool:
    return any("_orig_mod" in module._modules or module._compiled_call_impl is not None for module in root.modules())


def hooked_weights(root: nn.Module) -> set[int]:
    """Ids of the parameters of modules inside around which a host runs code of its own, by hooks or by a ``forward`` of
    the instance: it may move, cast or change them for the time of that call."""
    found: set[int] = set()
    for module in root.modules():
        if module is not root and (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)):
            found.update(map(id, module.parameters()))
    return found
