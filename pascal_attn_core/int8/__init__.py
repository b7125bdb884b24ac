"""Linear layers and attention in 8-bit integers. Not exact, therefore opt-in, and the error is reported.

    with patch_linear_int8(pipe.unet, max_error=0.03) as patch:
        pipe(prompt)
        print(patch.report())

Each layer is measured on its first inputs against its float version, and then runs in 8 bits, or stays in float if its
error is above ``max_error``. Modules keep their classes and state-dict keys; what changes is the weight, which becomes
an :class:`.weight.Int8Weight`. Adapters beside a layer, such as peft's LoRA, stay in float.
:mod:`.float16` multiplies the same layers of a float32 model in float16 instead.
"""

from __future__ import annotations

from typing import Any

from ..reference.int8_rows import Int8Matrix, quantize_rows, rotate
from .attention import AttentionBinding
from .backends import ACTIVATIONS
from .binding import Int8Binding, Int8Patch, patched
from .float16 import patch_linear_float16
from .product import int8_linear
from .report import Int8Report, Int8ReportLine
from .weight import Int8Weight

__all__ = [
    "ACTIVATIONS",
    "Int8Matrix",
    "Int8Patch",
    "Int8Report",
    "Int8ReportLine",
    "Int8Weight",
    "int8_linear",
    "patch_attention_int8",
    "patch_linear_float16",
    "patch_linear_int8",
    "quantize_rows",
    "rotate",
]


def patch_linear_int8(
    model: Any,
    *,
    include: Any = None,
    exclude: Any = None,
    max_error: float = 0.05,
    weights: str = "host",
    only_faster: bool = False,
) -> Int8Patch:
    """Run linear layers of ``model`` in 8-bit integers. Not exact.

    Args:
        model: any module, or a diffusers pipeline: then its denoisers, both of Wan 2.2 for example, and the names of
            their layers begin with that of the component (``"transformer_2.blocks.0.ffn.net.2"``).
        include: exactly these layers instead of the default, which is those of the repeated blocks without embeddings,
            norms, modulation and routers: a shell pattern for the qualified name (``"*.ff.*"``), a class, a predicate
            ``(name, module) -> bool``, or several of them.
        exclude: layers that stay in float, given in the same way.
        max_error: relative error (root of the sum of squares) of a layer's product, on its actual inputs, above which
            it stays in float. Typical errors are 0.01 to 0.02; layers with outlier channels have larger ones. It is
            measured in the first call of a layer and now and then (:mod:`.watch` says when); a layer that exceeds it
            is rotated, or goes back to float, if its float weight still exists.
        weights: where the float weights are kept. "host": they move to host memory, and back when the patch is removed.
            "keep": they stay where they are. "free": they are discarded; after the patch is removed, the model has
            rounded weights.
        only_faster: layers that are not faster in 8 bits than in float, timed in their first call, stay in float;
            otherwise they run in 8 bits for the memory that they save.
    Returns:
        A Patch with ``report()``. Copies of a model, state dicts and pickles hold float weights.
    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an invalid argument, a pattern that chooses nothing, or no layer that can run in 8 bits.
    """
    binding = Int8Binding(
        max_error=max_error, include=include, exclude=exclude, weights=weights, only_faster=only_faster
    )
    return patched(model, binding)


def patch_attention_int8(
    model: Any,
    *,
    include: Any = None,
    exclude: Any = None,
    max_error: float = 0.02,
) -> Int8Patch:
    """Run attention layers of ``model`` in 8-bit integers. Not exact.

    Calls of torch's ``scaled_dot_product_attention`` within the layers are caught, so this takes the place of
    ``patch_attention``, whose processors would catch them first. Calls that the 8-bit kernel does not support, and
    those of layers whose error is above ``max_error``, run by the exact route that ``sdpa`` chooses. On a CPU 8 bits
    are slow, and for checks. Compiled modules run as they do without the patch.

    Args:
        model, include, exclude: as in :func:`patch_linear_int8`; by default the modules whose class is named
            ``Attention`` or ``Attn`` and that hold no other one.
        max_error: relative error (root of the sum of squares) of a layer's output on its actual inputs, on at most 512
            rows of each head, above which it stays exact. Typical errors are 0.001 to 0.013. It is measured in the
            first call of a layer and now and then (:mod:`.watch` says when).
    Returns:
        A Patch with ``report()``: for each layer its error, and that of its worst row. Copies and pickles of a model
        are without it.
    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an invalid argument, a pattern that chooses nothing, or no attention layer.
    """
    return patched(model, AttentionBinding(max_error=max_error, include=include, exclude=exclude))
