"""The precision of float32 products on a card."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_tf32() -> Iterator[None]:
    """Let torch round no factor of a float32 product to TF32 while the block runs. By default it rounds those of
    convolutions, from compute capability 8.0 on, and cuDNN's algorithms for different shapes give different errors."""
    places = torch.backends.cudnn, torch.backends.cuda.matmul
    before = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = False
    try:
        yield
    finally:
        for place, allowed in zip(places, before):
            place.allow_tf32 = allowed
