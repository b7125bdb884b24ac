"""The kinds of kernels: which files of ``fused/cuda`` make the text of each, and which macros and functions it has; and
the sizes of the tiles of those for linear layers."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

from ..geometry.amd import RANGES, WMMA_KINDS
from ..geometry.tensor import MOST_PIECES
from ..geometry.traits import traits_of

# ---- linear layers in 8-bit integers, cuda/int8_linear.cu ------------------------------------------------------------

INT8_LINEAR = "int8_linear"
_INT8_LINEAR_FILES = ("base.cuh", "elements.cuh", "codes.cuh", "int8_linear.cu")
LEAST_CAPABILITY = (6, 1)  # dp4a
CHUNK_WORDS = 8  # CHUNK of the text: rows of x in 8 bits are padded to a multiple of it
QUANTIZE = "pa_linear_quantize"
ROTATIONS = (0, 4, 16, 64, 256)
MOST_COLUMNS = 1 << 17  # 2**17 products of two codes, each at most 128 * 127, fit 32 bits


class LinearTile(NamedTuple):
    """The part of a product that a block of ``threads`` computes: rows of x, and rows of the weight. ``has_few_rows``:
    a block reads whole rows of the weight; else it is one of a grid of tiles."""

    rows: int
    cols: int
    threads: int
    has_few_rows: bool = False


TILES = {
    "pa_linear": LinearTile(128, 128, 256),
    "pa_linear_small": LinearTile(64, 64, 64),
    "pa_linear_few": LinearTile(4, 32, 256, True),
    "pa_linear_some": LinearTile(16, 16, 256, True),
}

# ---- GGUF weights: expanded, cuda/gguf_expand.cu, and multiplied by rows in 8 bits, cuda/gguf_linear.cu --------------

GGUF_EXPAND = "gguf_expand"
_GGUF_EXPAND_FILES = ("base.cuh", "elements.cuh", "gguf_expand.cu")
_FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
KERNELS = {name: f"pa_gguf_{name.lower()}" for name in _FORMATS}  # format -> function
THREADS, WEIGHTS_OF_THREAD = 256, 4

GGUF_LINEAR = "gguf_linear"
_GGUF_LINEAR_FILES = ("base.cuh", "elements.cuh", "codes.cuh", "gguf_linear.cu")
# In the order of the text's numbers.
PRODUCT_FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "Q3_K")
# Formats with two scales for 32 weights, and from which capability on NVIDIA's compiler has too few registers for their
# sums, by rows of the outputs of a thread.
TWO_SCALES, TOO_NEW = ("Q6_K", "Q3_K"), {8: (9, 0), 4: (7, 0)}
FEW = {"pa_gguf_few": LinearTile(4, 16, 256), "pa_gguf_some": LinearTile(16, 8, 256)}

# ---- attention -------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of kernels.

    Attributes:
        files: its text, in this order: each uses those before it.
        macros: those that all its variants have.
        functions: in it.
        on_tensor_cores: it multiplies there: float16, tables of its own.
        least, below: compute capabilities that it is for.
        mask_function: of masked variants, the one that turns the mask into bits; "" = none does.
    """

    files: tuple[str, ...]
    macros: dict[str, object]
    functions: tuple[str, ...]
    on_tensor_cores: bool = False
    least: tuple[int, int] = (5, 0)
    below: tuple[int, int] = (99, 0)
    mask_function: str = ""


_PLAIN = ("base.cuh", "common.cuh", "elements.cuh", "lanes.cuh", "band.cuh", "product.cuh", "sequence.cuh")
_ON_LANES = ("base.cuh", "band.cuh", "sequence.cuh", "warp.cuh")


def _tensor_kinds(
    name: str,
    fragments: tuple[str, ...],
    least: tuple[int, int],
    below: tuple[int, int],
    on_lanes: tuple[str, ...] = _ON_LANES,
) -> dict[str, Kind]:
    """Whole calls, also with keys cut so that they fill the card, packed sequences, and few query rows, on the tensor
    cores of one generation."""
    found = {}
    for suffix in ("", "_packed", "_small", "_even"):
        function, combine = f"pa_{name}{suffix}", f"pa_{name}_combine"
        is_small, is_even = suffix == "_small", suffix == "_even"
        macros = {"PA_PACKED": int(suffix == "_packed"), "PA_SPLIT": int(is_small), "PA_FORWARD_NAME": function}
        macros |= {"PA_EVEN": 1, "MOST_PIECES": MOST_PIECES} if is_even else {}
        macros |= {"PA_COMBINE_NAME": combine} if is_small else {}
        files = (*on_lanes, "tensor_lanes.cuh", "tensor_call.cuh", "tensor_tiles.cuh", *fragments, "mask_bits.cuh",
                 "tensor_masks.cuh", *(("tensor_even.cuh",) if is_even else ()), "tensor_forward.cu",
                 *(("combine.cuh",) if is_small else ()))  # fmt: skip
        functions = (function, combine) if is_small else (function,)
        of_mask = "pa_even_bits" if is_even else "pa_mask_bits"
        found[name + suffix] = Kind(files, macros, functions, True, least, below, of_mask)
    return found


def _gradient_kinds(
    generation: str, fragments: tuple[str, ...], least: tuple[int, int], below: tuple[int, int]
) -> dict[str, Kind]:
    """The gradients of query, and of key and value, on the tensor cores of one generation."""
    files = (*_ON_LANES, "gradients.cuh", "tensor_lanes.cuh", "tensor_gradient.cuh", *fragments, "mask_bits.cuh",
             "gradient_masks.cuh", "tensor_gradient.cu")  # fmt: skip
    found = {}
    for of_keys, name in enumerate((f"{generation}_grad_query", f"{generation}_grad_key_value")):
        for capped, packed in itertools.product((0, 1), (0, 1)):
            suffix = "_capped" * capped + "_packed" * packed
            macros: dict[str, object] = {"PA_KEYS": of_keys, "PA_CAPPED": capped, "PA_PACKED": packed}
            macros["PA_GRADIENT_NAME"] = f"pa_{name}{suffix}"
            functions = (f"pa_{name}{suffix}", *(() if of_keys else ("pa_tensor_delta",)))
            found[name + suffix] = Kind(files, macros, functions, True, least, below, "pa_gradient_bits")
    return found


_BACKWARD = (*_PLAIN, "masks.cuh", "gradients.cuh", "backward.cuh")


def _forward(function: str, combine: str = "", **macros: object) -> Kind:
    """The forward kernel on plain cores; with ``combine`` the keys may be cut, and that function joins the parts."""
    joins = ("combine.cuh",) if combine else ()
    macros = {"PA_SPLIT": len(joins), "PA_FORWARD_NAME": function, **macros}
    if combine:
        macros["PA_COMBINE_NAME"] = combine
    text = (*_PLAIN, "masks.cuh", "amd_softmax.cuh", "forward.cu", *joins)
    return Kind(text, macros, (function, combine) if combine else (function,))


TABLE = {
    "forward": _forward("pa_forward"),
    "split": _forward("pa_forward_split", "pa_combine"),
    "grad_query": Kind((*_BACKWARD, "delta.cuh", "grad_query.cu"), {}, ("pa_delta", "pa_grad_query")),
    "grad_key_value": Kind((*_BACKWARD, "grad_key_value.cu"), {}, ("pa_grad_key_value",)),
    "grad_all": Kind(
        (*_BACKWARD, "query_sums.cuh", "delta.cuh", "grad_key_value.cu"),
        {"PA_ALL": 1},
        ("pa_grad_all", "pa_delta_all", "pa_round_query"),
    ),
    "int8": Kind(
        (*_INT8_LINEAR_FILES[:3], "band.cuh", "lanes.cuh", "int8_pack.cuh", "mask_bits.cuh", "int8_attention.cu"),
        {},
        ("pa_int8_attention", "pa_pack_queries", "pa_pack_keys", "pa_pack_values"),
        least=LEAST_CAPABILITY,
        mask_function="pa_int8_mask_bits",
    ),
    "capped": _forward("pa_capped", PA_CAPPED=1),
    "capped_split": _forward("pa_capped_split", "pa_capped_combine", PA_CAPPED=1),
    **_tensor_kinds("volta", ("volta.cuh",), (7, 0), (7, 5)),
    **_tensor_kinds("tensor", ("turing.cuh", "turing_forward.cuh"), (7, 5), (99, 0)),
    **_gradient_kinds("tensor", ("turing.cuh", "turing_gradient.cuh"), (7, 5), (99, 0)),
    **_gradient_kinds("volta", ("volta.cuh",), (7, 0), (7, 5)),
}
KINDS = tuple(TABLE)  # of attention
TABLE[INT8_LINEAR] = Kind(_INT8_LINEAR_FILES, {}, (*TILES, QUANTIZE), least=LEAST_CAPABILITY)
TABLE[GGUF_EXPAND] = Kind(_GGUF_EXPAND_FILES, {}, tuple(KERNELS.values()))
TABLE[GGUF_LINEAR] = Kind(_GGUF_LINEAR_FILES, {}, (), least=LEAST_CAPABILITY)
ALL_KINDS = tuple(TABLE)
TABLE[RANGES] = _forward("pa_forward_ranges", "pa_combine", PA_RANGES=1)
_WMMA = _tensor_kinds("wmma", ("wmma.cuh",), (0, 0), (0, 0), (*_ON_LANES[:-1], "wave.cuh"))
TABLE |= {kind: _WMMA[kind] for kind in WMMA_KINDS}


def sibling(kind: str, **changes: Any) -> str:
    """The kind of attention that has the traits of ``kind`` but for ``changes``: ``sibling("tensor_even",
    is_even=False)`` is ``"tensor"``."""
    wanted = traits_of(kind)._replace(**changes)
    return next(other for other in (*KINDS, *WMMA_KINDS) if traits_of(other) == wanted)
