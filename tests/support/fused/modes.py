"""Modes of torch in which a user may call."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic(*, warn_only: bool = False) -> Iterator[None]:
    """The wish for the same bits every time, for which torch fills new tensors with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype float16": lambda: default_dtype(torch.float16),
    "default device meta": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "no hooks allowed": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
}
