"""Pieces of one call on their way to another device and back, while the caller computes the rest at home."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import distinct
from .lanes import Lane, Lanes, Mark, Place

_LOOK_SECONDS = 0.1  # between two looks at whether the caller wants to stop


@dataclass(frozen=True, eq=False)
class Piece:
    """One part of the work, copied, computed and returned as a whole.

    Attributes:
        sources: views of tensors at home.
        targets: views of tensors at home into which the results go.
        compute: from the common tensors and ``sources``, both on the other device, the results there, of the shapes and
            dtypes of ``targets``.
    """

    sources: Sequence[Tensor]
    targets: Sequence[Tensor]
    compute: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]


class _Brought(NamedTuple):
    """Tensors on the other device, what they came through, and the mark from which on they are there."""

    tensors: list[Tensor]
    through: list[Tensor]
    mark: Mark


class _Returning(NamedTuple):
    """The mark from which on the results of a piece are at home, and all memory that they need until then."""

    mark: Mark
    held: list[Tensor]


class Errand:
    """Runs pieces in a thread of its own: while one is computed the next is copied there and the one before is copied
    back. Not more than three pieces' inputs and two pieces' results are on the other device at once, and at home not
    more than as many copies of those that are not :func:`is_dense`, where copies are not direct.

    Attributes:
        finished: how many pieces, from the first on, have their results at home.
        error: what ended it before the last one; None if nothing did, or the caller cancelled.
    """

    def __init__(self, lanes: Lanes, common: Sequence[Tensor], pieces: Sequence[Piece]):
        """
        Args:
            common: tensors at home that every piece needs, copied once.
        """
        self.finished = 0
        self.error: BaseException | None = None
        self.copy_ms = self.run_ms = 0.0
        self._lanes, self._common, self._pieces = lanes, common, pieces
        self._is_cancelled = False
        self._in_inference = torch.is_inference_mode_enabled()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._main, name="pascal_attn second device", daemon=True)

    def start(self) -> None:
        """
        Raises:
            RuntimeError: the system gives no more threads.
        """
        self._lanes.follow_caller()
        self._thread.start()

    def join(self, checkpoint: Callable[[], None] | None = None) -> None:
        """Wait for the end.

        Args:
            checkpoint: called ten times a second; may raise to stop waiting.
        """
        while not self._over.wait(_LOOK_SECONDS):
            if checkpoint is not None:
                checkpoint()
        self._thread.join()

    def cancel(self) -> None:
        """End after the piece in progress, and wait for that: nothing reads or writes the caller's tensors any more."""
        self._is_cancelled = True
        self._over.wait()
        self._thread.join()

    def _main(self) -> None:
        try:
            with self._lanes.open(), torch.inference_mode(self._in_inference), torch.no_grad():
                try:
                    self._run()
                finally:
                    self._lanes.drain()
                self.copy_ms, self.run_ms = self._lanes.spent()
        except BaseException as error:
            self.error = error
        finally:
            self._common = self._pieces = ()
            self._over.set()

    def _run(self) -> None:
        lanes, pieces = self._lanes, self._pieces
        common = bring(lanes, self._common)  # in one lane with the first piece, whose mark is behind it
        ahead: _Brought | None = bring(lanes, pieces[0].sources)
        returning: _Returning | None = None
        for number, piece in enumerate(pieces):
            if self._is_cancelled:
                break
            here, ahead = ahead, bring(lanes, pieces[number + 1].sources) if number + 1 < len(pieces) else None
            assert here is not None
            lanes.after(Lane.RUN, here.mark)
            with lanes.on(Lane.RUN):
                results = list(piece.compute(common.tensors, here.tensors))
            before, returning = returning, take_back(lanes, results, piece.targets)
            if before is not None:
                lanes.wait(before.mark)
                self.finished += 1
        if returning is not None:
            lanes.wait(returning.mark)
            self.finished += 1


def bring(lanes: Lanes, sources: Sequence[Tensor]) -> _Brought:
    """Copies of tensors on the other device, in the same order of dimensions; those that repeat along a dimension
    (stride 0) do so there too."""
    tensors, through = [], []
    for source in sources:
        once = distinct(source)
        if lanes.is_direct:
            landing = lanes.empty_like(once, Place.AWAY, Lane.RECEIVE)
            lanes.after(Lane.RECEIVE, lanes.mark(Lane.SEND))
            lanes.copy(landing, once, Lane.SEND, Lane.RECEIVE)
        else:
            packed = once
            if not is_dense(once):  # torch would make this copy by itself
                packed = lanes.empty_like(once, Place.HOME, Lane.SEND)
                lanes.copy(packed, once, Lane.SEND)
            pinned = lanes.empty_like(packed, Place.PINNED, Lane.SEND)
            lanes.copy(pinned, packed, Lane.SEND)
            landing = lanes.empty_like(packed, Place.AWAY, Lane.RECEIVE)
            lanes.after(Lane.RECEIVE, lanes.mark(Lane.SEND))
            lanes.copy(landing, pinned, Lane.RECEIVE)
            through += [packed, pinned]
        tensors.append(landing.expand(source.shape))
    return _Brought(tensors, through, lanes.mark(Lane.RECEIVE))


def take_back(lanes: Lanes, results: Sequence[Tensor], targets: Sequence[Tensor]) -> _Returning:
    """Copy results from the other device, where ``RUN`` computes them, into ``targets``.

    Raises:
        RuntimeError: they are not of the targets' shapes and dtypes.
    """
    held = list(results)
    lanes.after(Lane.RETURN, lanes.mark(Lane.RUN))
    for result, target in zip(results, targets, strict=True):
        if result.shape != target.shape or result.dtype != target.dtype:
            raise RuntimeError(
                f"a part came back as {result.dtype} {list(result.shape)}, not {target.dtype} {list(target.shape)}"
            )
        if lanes.is_direct:
            lanes.after(Lane.LAND, lanes.mark(Lane.RETURN))  # within one device the copy is in LAND alone
            lanes.copy(target, result, Lane.RETURN, Lane.LAND)
            continue
        packed = lanes.empty_like(target, Place.AWAY, Lane.RETURN)
        if is_dense(result) and result.stride() == packed.stride():
            packed = result
        else:
            lanes.copy(packed, result, Lane.RETURN)
        pinned = lanes.empty_like(packed, Place.PINNED, Lane.RETURN)
        lanes.copy(pinned, packed, Lane.RETURN)
        lanes.after(Lane.LAND, lanes.mark(Lane.RETURN))
        landing = target
        if not is_dense(target):
            landing = lanes.empty_like(target, Place.HOME, Lane.LAND)
            held.append(landing)
        lanes.copy(landing, pinned, Lane.LAND)
        if landing is not target:
            lanes.copy(target, landing, Lane.LAND)
        held += [packed, pinned]
    return _Returning(lanes.mark(Lane.LAND), held)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie in one range of memory without gaps, each once, in whatever order of dimensions: such a
    tensor crosses in one copy."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
