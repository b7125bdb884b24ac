"""The table of operators that may run in slices: each row, with the tokens in each dimension of each argument."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pascal_attn_core.int8.operator  # noqa: F401
from pascal_attn_core.ffn.rules import RULES, Along, Call, Later, along_results
from pascal_attn_core.observe.memory import tensors_in

TOKENS, PART = 6, slice(1, 4)
aten: Any = torch.ops.aten


def _x(*shape: int) -> Tensor:
    count = math.prod(shape)
    return (torch.arange(count) * 0.618034 % 1 + 0.05).reshape(shape) * 0.8


_COMPLEX = torch.complex(_x(6, 6), _x(6, 6).flip(0))


def _of_entries() -> Iterator[tuple[Any, tuple]]:
    """Every operator of single entries; those of several tensors with one that is spread over the others' entries."""
    flags, half = _x(6, 6) > 0.4, _x(6) > 0.4
    special = {
        "clamp": ("default", _x(6, 6), 0.2, 0.6), "clamp_max": ("default", _x(6, 6), 0.5),
        "clamp_min": ("default", _x(6, 6), 0.5), "full_like": ("default", _x(6, 6), 0.5),
        "fill": ("Scalar", _x(6, 6), 0.5), "pow": ("Tensor_Tensor", _x(6, 6), _x(6)),
        "masked_fill": ("Scalar", _x(6, 6), flags, 0.5), "threshold": ("default", _x(6, 6), 0.4, 0.1),
        "where": ("self", flags, _x(6, 6), _x(6)), "addcdiv": ("default", _x(6, 6), _x(6), _x(6, 1)),
        "addcmul": ("default", _x(6, 6), _x(6), _x(6, 1)), "lerp": ("Scalar", _x(6, 6), _x(6, 6), 0.3),
        "logit": ("default", _x(6, 6), 1e-3), "_prelu_kernel": ("default", _x(6, 6), _x(6, 1)),
        "_conj": ("default", _COMPLEX), "copy": ("default", _x(6, 6), _x(6, 6)), "bitwise_not": ("default", flags),
    }  # fmt: skip
    special |= {name: ("Tensor", flags, half) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")}
    for name in (name for name, rule in RULES.items() if rule is RULES["add"]):
        packet = getattr(aten, name)
        kind, *args = special.get(name, ("Tensor" if "Tensor" in packet.overloads() else "default",))
        func = getattr(packet, kind)
        tensors = [argument for argument in func._schema.arguments if str(argument.type) == "Tensor"]
        yield func, tuple(args) or (_x(6, 6), _x(6))[: len(tensors)]


_MATRIX = (_x(6, 6), _x(6, 6))
_CODES = torch.arange(36, dtype=torch.int8).reshape(6, 6)
_NORM = (_x(6, 6, 6), [6], _x(6), _x(6), 1e-5)
ROWS: list[tuple[Any, tuple]] = [
    *_of_entries(),
    (aten.mm.default, _MATRIX), (aten.addmm.default, (_x(6), *_MATRIX)), (aten.addmm.default, (_x(6, 1), *_MATRIX)),
    (aten.bmm.default, (_x(6, 6, 6), _x(6, 6, 6).flip(1))),
    (aten.baddbmm.default, (_x(6, 1), _x(6, 6, 6), _x(6, 6, 6))),
    (aten.linear.default, (_x(6, 6, 6), _x(6, 6), _x(6))),
    (torch.ops.pascal_attn.int8_linear.default, (_x(6, 6), _CODES, _x(6), None, 0, "none", torch.float32, "auto")),
    (aten.cat.default, ([_x(6, 6, 6), _x(6, 6, 6).flip(0)], 1)),
    (aten.stack.default, ([_x(6, 6), _x(6, 6).flip(0)], 1)),
    (aten.convolution.default, (_x(6, 6, 6), _x(6, 6, 1), None, [1], [0], [1], False, [0], 1)),
    (aten.convolution.default, (_x(6, 6, 6), _x(6, 6, 3), None, [1], [1], [1], False, [0], 1)),
    (aten.native_layer_norm.default, _NORM), (aten.native_layer_norm.default, (_x(6, 6, 6), [6, 6], None, None, 1e-5)),
    (aten.native_batch_norm.default, (_x(6, 6, 6), _x(6), _x(6), _x(6), _x(6), False, 0.1, 1e-5)),
    (aten.native_batch_norm.default, (_x(6, 6, 6), _x(6), _x(6), None, None, True, 0.1, 1e-5)),
    (aten.constant_pad_nd.default, (_x(6, 6, 6), [0, 0, 1, -1])),
    (aten.embedding.default, (_x(6, 6), _CODES.long() % 6)),
    (aten.unsqueeze.default, (_x(6, 6), 1)), (aten.squeeze.dim, (_x(6, 1, 6), 1)), (aten.t.default, (_x(6, 6),)),
    (aten.permute.default, (_x(6, 6, 6), [2, 0, 1])), (aten.transpose.int, (_x(6, 6, 6), 0, 2)),
    (aten.expand.default, (_x(6, 6), [2, 6, 6])), (aten.slice.Tensor, (_x(6, 6, 6), 1, 2, 4)),
    (aten.slice.Tensor, (_x(6, 6, 6), 1, 0, 6)), *((name, (_x(6, 6, 6), [6, 2, 3, 6])) for name in (
        aten.view.default, aten._unsafe_view.default, aten.view_copy.default)),
    (aten.view.default, (_x(6, 6, 6), [36, 6])), (aten.view.default, (_x(6, 6, 6), [2, 18, 6])),
    (aten.view_as_real.default, (_COMPLEX,)), (aten.view_as_complex.default, (_x(6, 6, 2),)),
    *((getattr(aten, name).dim, (_x(6, 6, 6) > 0.4, 1)) for name in ("all", "any")),
    *((getattr(aten, name).default, (_x(6, 6, 6), [1])) for name in ("amax", "amin", "logsumexp", "flip")),
    *((getattr(aten, name).default, (_x(6, 6, 6), 1)) for name in ("argmax", "argmin", "cumsum", "glu")),
    *((getattr(aten, name).default, (_x(6, 6, 6), 1, False)) for name in ("_log_softmax", "_softmax")),
    *((getattr(aten, name).dim, (_x(6, 6, 6), 1)) for name in ("max", "min")), (aten.sort.default, (_x(6, 6, 6), 1)),
    *((getattr(aten, name).correction, (_x(6, 6, 6), [1])) for name in ("std", "var", "var_mean")),
    (aten.mean.dim, (_x(6, 6, 6), [1])), (aten.sum.dim_IntList, (_x(6, 6, 6), [0, 1], True)),
    (aten.prod.dim_int, (_x(6, 6, 6), 1)), (aten.linalg_vector_norm.default, (_x(6, 6, 6), 2, [1])),
    (aten.roll.default, (_x(6, 6, 6), [1], [1])), (aten.topk.default, (_x(6, 6, 6), 2, 1)),
    (aten.select.int, (_x(6, 6, 6), 1, 0)), (aten.unbind.int, (_x(6, 6, 6), 1)),
    (aten.split.Tensor, (_x(6, 6, 6), 3, 1)),
    (aten.split_with_sizes.default, (_x(6, 6, 6), [2, 4], 1)),
    (aten.index_select.default, (_x(6, 6, 6), 1, torch.tensor([5, 0]))),
    (aten._fft_r2c.default, (_x(6, 6, 6), [1], 0, True)), (aten._fft_c2r.default, (_COMPLEX, [1], 0, 10)),
    (aten._fft_c2c.default, (_COMPLEX, [1], 0, True)),
    (aten._fused_rms_norm.default, (_x(6, 6, 6), [6], _x(6), 1e-5)), (aten._int_mm.default, (_CODES, _CODES.clone())),
]  # fmt: skip
NOT_HERE = {"cudnn_batch_norm", "_scaled_mm", "_weight_int8pack_mm", "_weight_int4pack_mm"}  # no kernel on this machine


def _name(func: Any) -> str:
    return func._schema.name.removeprefix("aten::")


def _places(args: tuple) -> Iterator[dict[int, int]]:
    """Where tokens may be: a dimension of six entries of one tensor, or of each of two."""
    tensors = list(tensors_in(args))
    for number, tensor in enumerate(tensors):
        for dim in (dim for dim, size in enumerate(tensor.shape) if size == TOKENS):
            yield {number: dim}
    for one, two in itertools.combinations(range(len(tensors)), 2):
        for dims in itertools.product(range(tensors[one].dim()), range(tensors[two].dim())):
            if tensors[one].shape[dims[0]] == tensors[two].shape[dims[1]] == TOKENS:
                yield {one: dims[0], two: dims[1]}


def _judged(func: Any, args: tuple, dims: dict[int, int]) -> tuple[Along | None, tuple]:
    """Where the table finds the tokens in the results, and the arguments for a slice."""
    along = {id(tensor): Along(dims[n]) for n, tensor in enumerate(tensors_in(args)) if n in dims}
    call = Call(func._schema, args, {}, TOKENS, lambda value: along.get(id(value)))
    call.shape = next(tensors_in((func(*args),))).shape
    found = along_results(call, len(along))
    return found, tuple(list(call.given.values())[: len(args)])


def _in_slice(value: Any, dims: dict[int, int], numbers: Iterator[int]) -> Any:
    if isinstance(value, Later):
        next(numbers, None) if value.get.__code__.co_varnames[:1] == ("_",) else None  # one in place of a tensor
        return value.get({}, PART.start, PART.stop - PART.start)
    if isinstance(value, list):
        return [_in_slice(item, dims, numbers) for item in value]
    if not isinstance(value, Tensor) or (number := next(numbers)) not in dims:
        return value
    return value.narrow(dims[number], PART.start, PART.stop - PART.start).contiguous()


def _is_right(func: Any, args: tuple, sliced: tuple, dims: dict[int, int], along: Along) -> bool:
    """Whether the results of a slice are the slice of the results."""
    try:
        part, whole = (
            list(tensors_in((func(*each),))) for each in (_in_slice(list(sliced), dims, iter(range(9))), args)
        )
    except (RuntimeError, IndexError):
        return False
    shape, compared = (along.before, TOKENS, along.after), 0
    for one, all_of in zip(part, whole):
        if all_of.dim() <= along.dim or all_of.shape[along.dim] != math.prod(shape):
            continue  # a result without tokens
        compared += 1
        wanted = (
            all_of.unflatten(along.dim, shape).narrow(along.dim + 1, PART.start, 3).flatten(along.dim, along.dim + 2)
        )
        if one.shape != wanted.shape:
            return False
        if "empty" not in _name(func) and not torch.allclose(one, wanted, atol=1e-5, equal_nan=True):
            return False
    return compared > 0


def test_every_operator_of_the_table_has_a_row_here() -> None:
    assert {_name(func) for func, _ in ROWS} == RULES.keys() - NOT_HERE


@pytest.mark.parametrize(("func", "args"), ROWS, ids=lambda value: _name(value) if hasattr(value, "_schema") else "")
def test_a_row_is_right_and_would_be_wrong_with_one_dimension_more(func: Any, args: tuple) -> None:
    judged = [(dims, *_judged(func, args, dims)) for dims in _places(args)]
    owners = {tuple(dims) for dims, along, _ in judged if along is not None}
    assert owners or _name(func) == "native_batch_norm"  # in training
    for dims, along, sliced in judged:
        if along is not None:
            assert _is_right(func, args, sliced, dims, along), (dims, along)
        elif tuple(dims) in owners:
            for dim in range(next(tensors_in((func(*args),))).dim()):
                assert not _is_right(func, args, args, dims, Along(dim)), (dims, dim)
