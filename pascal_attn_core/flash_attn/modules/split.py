"""What flash-attn splits over the ranks of a process group. Programs import these names beside others that they use:
the names are here, and raise where they are called."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"{name} is not provided by Pascal Attention: it splits a model over processes")

    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return type(name, (), {"__new__": refuse, "__module__": __name__})
