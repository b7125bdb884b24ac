"""Shows on a small input that bands give what the VAE gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..machine.out_of_memory import is_out_of_memory
from .lazy import NotInBands

# Rounding inside some sixty layers, against that of the input alone.
_ALLOWED = 16.0
# Not an interrupt, whatever its class.
_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError,
           ValueError)  # fmt: skip


def small(given: Tensor, *, is_picture: bool, batch: int = 1, first: int = 2) -> Tensor:
    """Random numbers in a shape like the input's, small, with sizes that the VAE takes: those of the input, less whole
    multiples of 32 pixels or 8 frames. Dimensions before ``first`` are left as they are."""
    sizes = list(given.shape)
    sizes[0] = batch
    for dim in range(first, len(sizes)):
        is_frames = len(sizes) == 5 and dim == 2
        if len(sizes) == 3:
            least, step = (4096, 4096) if is_picture else (24, 1)
        elif is_picture:
            least, step = (9, 8) if is_frames else (64, 32)
        else:
            least, step = (3, 1) if is_frames else (12 - dim, 1)
        if sizes[dim] > least:
            sizes[dim] = least + (sizes[dim] - least) % step
    random = torch.Generator().manual_seed(0)
    numbers = torch.rand(sizes, generator=random) * 2 - 1 if is_picture else torch.randn(sizes, generator=random)
    return numbers.to(given.device, given.dtype)


@torch.no_grad()
def differs(
    whole: Callable[[Tensor], Any], banded: Callable[[Tensor], Any], given: Tensor, *, is_picture: bool, batch: int = 1
) -> str:
    """Why the two ways are not the same, "" = they agree to rounding. An error that says that memory was short, which
    tells nothing about the VAE, is raised."""
    why = ""
    for first in dict.fromkeys((2, given.dim() - 1)):  # of sound the rows may be frequencies, a fixed number
        sample = small(given, is_picture=is_picture, batch=batch, first=first)
        random = torch.Generator().manual_seed(1)
        signs = torch.randint(0, 2, sample.shape, generator=random).to(sample) * 2 - 1
        try:
            wanted = _tensors(whole(sample.clone()))
        except _FAULTS as error:
            if is_out_of_memory(error):
                raise
            why = why or f"the VAE itself failed on a small input: {type(error).__name__}: {error}"
            continue
        try:
            got = _tensors(banded(sample.clone()))
            moved = _tensors(whole(sample * (1 + torch.finfo(sample.dtype).eps / 2 * signs)))
        except NotInBands as error:
            return str(error)
        except _FAULTS as error:  # this model does something that bands cannot follow: it runs as it is
            if is_out_of_memory(error):
                raise
            return f"bands failed on a small input: {type(error).__name__}: {error}"
        return _apart(got, wanted, moved, sample.dtype)
    return why


def _apart(got: list[Tensor], wanted: list[Tensor], moved: list[Tensor], dtype: torch.dtype) -> str:
    if [t.shape for t in got] != [t.shape for t in wanted]:
        return f"bands give {[list(t.shape) for t in got]} where the VAE gives {[list(t.shape) for t in wanted]}"
    for one, other, third in zip(got, wanted, moved):
        if not bool(torch.isfinite(other).all()):
            name = str(dtype).removeprefix("torch.")
            return f"the VAE's own result for a small input in {name} holds NaN or infinity"
        gap, noise = _rows(one - other), _rows(third - other)
        floor = torch.finfo(dtype).eps * other.abs().amax()
        limit = _ALLOWED * torch.maximum(noise, floor)
        if not bool(gap <= limit):  # NaN too
            where = f"on a small input, of which rounding explains {float(limit):.1e}"
            return f"bands differ from the VAE by {float(gap):.1e} {where}"
    return ""


def _tensors(found: Any) -> list[Tensor]:
    leaves: list[Any] = []
    for leaf in tree_leaves(found):
        leaves += [leaf] if isinstance(leaf, Tensor) else getattr(leaf, "__dict__", {}).values()
    floats = (leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return [leaf.double() if leaf.dtype == torch.float64 else leaf.float() for leaf in floats]


def _rows(difference: Tensor) -> Tensor:
    """The largest root mean square of a row: a seam is a row or two."""
    if difference.dim() < 3:
        return difference.abs().amax()
    squares = difference.square()
    dim = -2 if difference.dim() >= 4 else -1
    others = [d for d in range(difference.dim()) if d != dim % difference.dim()]
    return squares.mean(others).amax().sqrt()
