"""The device and the clock of commands that time something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .. import CommandError


def device_named(name: str | None) -> torch.device:
    """The device of ``--device``, by default cuda if there is one, else cpu; CommandError if torch cannot use it."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        why = f"{str(error).splitlines()[0]}; `pascal-attn info` names the torch for this machine"
        raise CommandError(f"--device must be a device that torch can use: {why}") from error
    return device


def clock_name(device: torch.device) -> str:
    """The clock of :func:`.milliseconds` on this device, for the heading of a table."""
    if device.type == "cuda":
        return "CUDA events"
    return "thread time" if device.type == "cpu" and torch.get_num_threads() == 1 else "wall time"


@contextmanager
def quiet_torch(threads: int) -> Iterator[None]:
    """Use this many CPU threads and no TF32 within a block."""
    matmul = torch.backends.cuda.matmul
    before = torch.get_num_threads(), matmul.allow_tf32
    torch.set_num_threads(threads)
    matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        matmul.allow_tf32 = before[1]
