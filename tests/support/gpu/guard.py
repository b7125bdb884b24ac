"""Processes whose torch has been told in C++ that there are cards: a library that must be loaded before torch."""

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from attn_support import fresh
from attn_support.fused.emulation import GXX, built_once

SOURCE = Path(__file__).with_name("guard.cpp")
_OLDEST = (2, 13)  # older ones have other hooks


def why_not() -> str:
    """Why there can be no such processes on this machine; "" = there can."""
    if GXX is None or not hasattr(os, "fork"):
        return "needs g++ and fork"
    if torch.version.cuda or torch.version.hip:
        return "needs a torch that was built without CUDA and ROCm: it has a guard and hooks of its own"
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST:
        return f"needs torch {_OLDEST[0]}.{_OLDEST[1]}, whose hooks for CUDA it fills, got {torch.__version__}"
    return ""


@functools.cache
def library() -> Path:
    """The library, built once with g++ for this source and this torch."""
    home = Path(torch.__file__).parent
    key = hashlib.sha256(f"{SOURCE.read_text()}{home}{torch.__version__}".encode()).hexdigest()[:24]
    linked = f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-lc10", "-ltorch_cpu"
    options = "-std=c++20", "-shared", f"-I{home / 'include'}"
    return built_once(f"guard-{key}.so", [*options, SOURCE, *linked], SOURCE.name)


def alone(**variables: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the test runs by :func:`call`, with a folder of its own; its parameters are strings."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run_alone(**arguments: str) -> None:
            with tempfile.TemporaryDirectory() as folder:
                call(test, *arguments.values(), folder=Path(folder), **variables)

        return run_alone

    return decorate


def call(function: Callable[..., object], *arguments: str, folder: Path, **variables: str) -> fresh.Done:
    """Call a function of a test module in a process that may believe in cards; what it raises fails the test.
    ``folder`` is where the package stores what it finds out, ``variables`` are of the environment."""
    env = {**os.environ, "XDG_CACHE_HOME": str(folder), "PASCAL_ATTN_TRUST": "1", **variables}
    return fresh.call(function, *arguments, env=env, preload=library())
