"""The kinds of kernels: which files of ``fused/cuda`` make the text of each, and which macros and functions it has."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from ..geometry.amd import RANGES, WMMA_KINDS
from ..geometry.tensor import MOST_PIECES
from . import gguf_source, linear_source


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

    def kind(suffix: str, *, packed: bool = False, small: bool = False, even: bool = False) -> Kind:
        function = f"pa_{name}{suffix}"
        macros = {"PA_PACKED": int(packed), "PA_SPLIT": int(small), "PA_FORWARD_NAME": function}
        if even:
            macros |= {"PA_EVEN": 1, "MOST_PIECES": MOST_PIECES}
        files = (*on_lanes, "tensor_lanes.cuh", "tensor_call.cuh", "tensor_tiles.cuh", *fragments, "mask_bits.cuh",
                 "tensor_masks.cuh", *(("tensor_even.cuh",) if even else ()), "tensor_forward.cu",
                 *(("combine.cuh",) if small else ()))  # fmt: skip
        combine = f"pa_{name}_combine"
        if small:
            macros["PA_COMBINE_NAME"] = combine
        functions = (function, combine) if small else (function,)
        return Kind(files, macros, functions, True, least, below, "pa_even_bits" if even else "pa_mask_bits")

    return {
        name: kind(""),
        f"{name}_packed": kind("_packed", packed=True),
        f"{name}_small": kind("_small", small=True),
        f"{name}_even": kind("_even", even=True),
    }


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
        (*_BACKWARD, "delta.cuh", "query_sums.cuh", "grad_key_value.cu"),
        {"PA_ALL": 1},
        ("pa_grad_all", "pa_delta", "pa_round_query"),
        below=(8, 0),
    ),
    "int8": Kind(
        (*linear_source.FILES[:3], "band.cuh", "lanes.cuh", "int8_pack.cuh", "mask_bits.cuh", "int8_attention.cu"),
        {},
        ("pa_int8_attention", "pa_pack_queries", "pa_pack_keys", "pa_pack_values"),
        least=linear_source.LEAST_CAPABILITY,
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
TABLE[linear_source.KIND] = Kind(linear_source.FILES, {}, linear_source.FUNCTIONS, least=linear_source.LEAST_CAPABILITY)
TABLE[gguf_source.KIND] = Kind(gguf_source.FILES, {}, tuple(gguf_source.KERNELS.values()))
TABLE[gguf_source.LINEAR_KIND] = Kind(gguf_source.LINEAR_FILES, {}, (), least=linear_source.LEAST_CAPABILITY)
ALL_KINDS = tuple(TABLE)
TABLE[RANGES] = _forward("pa_forward_ranges", "pa_combine", PA_RANGES=1)
_WMMA = _tensor_kinds("wmma", ("wmma.cuh",), (0, 0), (0, 0), (*_ON_LANES[:-1], "wave.cuh"))
TABLE |= {kind: _WMMA[kind] for kind in WMMA_KINDS}
