"""Trials of our own in the middle of a user's call: without the user's modes and hooks, and without a trace in them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch

Result = TypeVar("Result")


_local = threading.local()


@contextmanager
def made_up_inputs() -> Iterator[None]:
    """The user's modules run below on made-up inputs: what learns from inputs must not learn from these."""
    before, _local.is_made_up = inputs_are_made_up(), True
    try:
        yield
    finally:
        _local.is_made_up = before


def inputs_are_made_up() -> bool:
    """Whether this thread is within :func:`made_up_inputs`."""
    return getattr(_local, "is_made_up", False)


def in_own_thread(work: Callable[[], Result], device: torch.device) -> Result:
    """Return ``work()``, run in a new thread that has ended when this returns.

    Nothing that belongs to the thread of the caller holds there: saved-tensor hooks (those of gradient checkpointing,
    say), dispatch and function modes, grad and inference mode, autocast, the default device. Nor do dispatch keys: the
    body of a custom operator lies below autograd. The default dtype belongs to the process. On CUDA ``device`` and the
    caller's stream are the current ones there too.

    An exception of ``work`` is raised here as it is. An interrupt of the caller is raised when ``work`` has ended.
    ``work`` must not wait for a lock that the caller holds, nor for a backward pass where :func:`in_backward` is true.
    """
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):  # makes its device the current one too
                result = work()
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    thread = threading.Thread(target=run, name="pascal_attn")
    try:
        thread.start()
        return outcome.result()
    finally:
        if thread in threading.enumerate():  # even where the wait for its start was interrupted
            wait([outcome])
            thread.join()


def in_backward() -> bool:
    """Whether this thread is in a backward pass, as recomputation by gradient checkpointing is. On CUDA it may be the
    one thread that serves all backward passes of its device: waiting here for another one would never end."""
    return torch._C._current_graph_task_id() != -1
