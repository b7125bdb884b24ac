"""A caller's function that runs between the blocks of a long call: to report progress, or to end the call by
raising."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Checkpoint = Callable[[int, int], None]


class _ThisThread(threading.local):
    checkpoint: Checkpoint | None = None


this_thread = _ThisThread()


@contextmanager
def between_blocks(checkpoint: Checkpoint | None) -> Iterator[None]:
    """Call ``checkpoint(done, total)`` in this thread after each block of queries that a call has finished; None
    disables it.

    A block is the smallest piece of work that the route ``tiled`` (and the route ``torch`` where it walks over heads
    or queries) does at a time; a call that is a single kernel has none. On a GPU a block is finished when it has been
    launched. An exception from the checkpoint ends the call and propagates to its caller; the outputs so far are
    discarded.

        with between_blocks(lambda done, total: throw_if_interrupted()):
            out = sdpa(query, key, value)
    """
    before = this_thread.checkpoint
    this_thread.checkpoint = checkpoint
    try:
        yield
    finally:
        this_thread.checkpoint = before
