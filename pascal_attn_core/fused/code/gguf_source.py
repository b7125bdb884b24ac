"""The texts of the kernels that expand blocks of GGUF files, ``cuda/gguf_expand.cu``, and of those that multiply them
by rows of x in 8 bits, ``cuda/gguf_linear.cu``: their files, formats and the sizes of their tiles."""

from __future__ import annotations

from typing import NamedTuple

KIND = "gguf_expand"
FILES = ("base.cuh", "elements.cuh", "gguf_expand.cu")
_FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
KERNELS = {name: f"pa_gguf_{name.lower()}" for name in _FORMATS}  # format -> function
THREADS, WEIGHTS_OF_THREAD = 256, 4

LINEAR_KIND = "gguf_linear"
LINEAR_FILES = ("base.cuh", "elements.cuh", "codes.cuh", "gguf_linear.cu")
# In the order of the text's numbers.
PRODUCT_FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "Q3_K")
# Formats with two scales for 32 weights, and from which capability on NVIDIA's compiler has too few registers for their
# sums, by rows of the outputs of a thread.
TWO_SCALES, TOO_NEW = ("Q6_K", "Q3_K"), {8: (9, 0), 4: (7, 0)}


class GgufTile(NamedTuple):
    """The part of a product that a block computes: rows of x, rows of the weight, threads."""

    rows: int
    cols: int
    threads: int


FEW = {"pa_gguf_few": GgufTile(4, 16, 256), "pa_gguf_some": GgufTile(16, 8, 256)}
