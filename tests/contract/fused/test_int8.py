"""Attention in 8-bit integers: the kernels have the definition's bits, and what each part of the definition is for."""

import ctypes
import ctypes.util
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attn_support.fused.cases import LOWER_RIGHT, sized
from attn_support.fused.device import emulated_card
from attn_support.fused.emulation import CARD, RACES, LeftOut, build_text, each_left_out, emulate, params_of
from attn_support.oracle import error_of, exact
from attn_support.randomness import some
from attn_support.table import Case
from torch import Tensor

from pascal_attn_core import AttentionConfig, UnsupportedAttention, explain
from pascal_attn_core.call import AttentionCall, check_call
from pascal_attn_core.fused.code.source import Variant, source
from pascal_attn_core.fused.launch import Launch, int8, int8_definition
from pascal_attn_core.fused.launch.fields import view_of
from pascal_attn_core.fused.launch.int8 import int8_launches
from pascal_attn_core.fused.launch.plan import plan_call
from pascal_attn_core.fused.launch.select import call_reasons
from pascal_attn_core.fused.trust.kernels import parts
from pascal_attn_core.routes import route_names

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
# Normal numbers: what 8 bits cost (fp16 attention itself errs by 7e-4).
TYPICAL = 1.5e-2
NAN_OF_CARDS = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(FLOAT32).item()  # NVIDIA's: adding to its bits wraps
Result = tuple[Tensor, Tensor]  # out, lse


@pytest.fixture(autouse=True)
def _exp2_of_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ctypes.CDLL(ctypes.util.find_library("m") or "libm.so.6")
    for name in ("exp2", "log2"):
        function = getattr(library, f"{name}f")
        function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float]

        def of_tensor(x: Tensor, function: Any = function) -> Tensor:
            with np.errstate(all="ignore"):
                return torch.from_numpy(np.frompyfunc(function, 1, 1)(x.numpy()).astype(np.float32))

        monkeypatch.setattr(int8_definition, name, of_tensor)


def emulated(
    call: AttentionCall,
    seed: int = 1,
    text: str | LeftOut | None = None,
    edit: Callable[[list[Launch]], Any] = list,
    arch: str = "",
) -> Result:
    """Return what the kernels write. edit: the launches that are run, of all; arch: AMD's."""
    out = torch.full(call.out_shape, math.nan, dtype=call.query.dtype)
    lse = torch.full(call.out_shape[:-1], math.nan)
    launches = int8_launches(call, plan_call(call, 1, int8=True, arch=arch), out, lse)
    emulate(edit(launches), seed, None if text is None else {"int8": text})
    return out, lse


def defined(call: AttentionCall, arch: str = "") -> Result:
    out, lse = torch.empty(call.out_shape, dtype=call.query.dtype), torch.empty(call.out_shape[:-1])
    int8_definition.compute(call, out, lse, arch)
    return out, lse


def same_bits(found: Result, right: Result) -> bool:
    return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(found, right))


def of_case(case: Case) -> AttentionCall:
    (query, key, value, mask), options = case.build()
    common, heads = torch.linspace(-3, 3, key.shape[-1]), torch.linspace(0.2, 3, value.shape[-2])[:, None]
    value = value * heads + 0.5
    value[..., 1::50, :] *= 0.02  # without the mean they would be larger
    return check_call(query, (key + common).to(key.dtype), value.to(key.dtype), mask, **options)


# Tiles are 128 x 64 and 64 x 128: lengths end beside a tile's edge.
CASES = [
    sized(FLOAT32, 64, 130, 200),
    sized(FLOAT16, 128, 66, 300),
    sized(BFLOAT16, 128, 3, 129, "bool [B, 1, 1, S]", batch=2),
    sized(FLOAT16, 64, 129, 129, is_causal=True),
    sized(FLOAT32, 128, 66, 254, "none", "sliced", **LOWER_RIGHT),
    sized(FLOAT32, 64, 130, 330, "bool blocks", "tokens_first", window=(30, 70)),
    sized(FLOAT32, 64, 130, 330, window=(-1, 62)),  # of one tile only the last key of the first row is outside
    sized(FLOAT32, 64, 130, 330, window=(62, -1)),  # and only the first key of the last row
    sized(FLOAT32, 128, 66, 400, "bool some rows empty", "expanded", heads=(4, 1)),
    sized(FLOAT16, 64, 130, 190, "bool [B, H, L, S]", batch=2, **LOWER_RIGHT),
    sized(FLOAT32, 64, 66, 130, "bool nothing allowed"),
    sized(FLOAT16, 40, 130, 77),
    sized(FLOAT32, 72, 65, 65, dim_v=96),
    sized(FLOAT32, 80, 1, 64, dim_v=40),
    sized(FLOAT32, 96, 2, 63, "bool expanded"),
    sized(BFLOAT16, 64, 5, 1),
]


@pytest.mark.parametrize("case", some(CASES, 2), ids=lambda case: case.name)
def test_the_output_and_lse_have_the_bits_of_the_definition(case: Case) -> None:
    call = of_case(case)
    right = defined(call)
    for seed in (1, 2):
        assert same_bits(emulated(call, seed), right)
    oracle, lse = exact([call.query, call.key, call.value, call.attn_mask], case.options)
    assert error_of(right[0], oracle) <= TYPICAL or oracle.norm() == 0
    is_finite = lse.isfinite()
    assert torch.equal(is_finite, right[1].isfinite())
    assert not is_finite.any() or (right[1] - lse)[is_finite].abs().max() < 0.1


@pytest.mark.parametrize(
    ("arch", "case"),
    [
        ("gfx906", sized(FLOAT32, 64, 130, 200, "bool some rows empty")),
        ("gfx906", sized(FLOAT16, 128, 66, 150, is_causal=True)),
        ("gfx1030", sized(FLOAT32, 96, 65, 130)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_on_amd_too_where_bytes_of_p_have_a_sign(arch: str, case: Case) -> None:
    call = of_case(case)
    assert same_bits(emulated(call, arch=arch), defined(call, arch))


@pytest.mark.parametrize("dim", [64, 128, 72])
def test_the_words_and_scales_have_the_bits_of_the_definition(dim: int) -> None:
    call = of_case(sized(FLOAT32, dim, 70, 150, batch=2))
    launches = int8_launches(call, plan_call(call, 1, int8=True), torch.empty(call.out_shape))
    emulate(launches)
    variant = launches[0].variant
    view = view_of(call)
    right = int8_definition.pack(call, view, variant.head_dim, variant.geometry.cols)
    queries, keys, values, _ = launches
    assert torch.equal(_written(queries, "words").view(torch.int8).view(right.q.shape).float(), right.q)
    tiles = (2, 2, -1, variant.head_dim // 4, variant.geometry.cols, 4)
    of_keys = _written(keys, "words").view(torch.int8).view(tiles).movedim(3, 4).reshape(right.k.shape)
    tiles = (2, 2, -1, variant.geometry.cols // 4, variant.head_dim, 4)
    of_values = _written(values, "words").view(torch.int8).view(tiles).movedim(5, 4).reshape(right.v.shape)
    for found, codes in ((of_keys, right.k), (of_values, right.v)):
        assert torch.equal(found[..., :150, :].float(), codes[..., :150, :])
    assert torch.equal(_written(keys, "scales").view(right.k_scales.shape)[..., :150], right.k_scales[..., :150])
    for launch, field, scales in (
        (queries, "scales", right.q_scales),
        (values, "scales", right.v_inverses),
        (values, "logs", right.v_logs),
    ):
        assert torch.equal(_written(launch, field).view(scales.shape), scales)


def _written(launch: Launch, field: str) -> Tensor:
    return next(t for t in launch.keep if t.data_ptr() == getattr(launch.params, field))


def test_tiles_heads_and_batch_elements_come_in_any_order_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    call = of_case(sized(FLOAT32, 64, 300, 70, "bool [B, H, L, S]", heads=(6, 3), batch=2))
    right = defined(call)

    def backwards(launches: list[Launch]) -> list[Launch]:
        *others, last = launches
        cut = parts(last, 1)
        assert len(cut) > 4
        return [*others, *reversed(cut)]

    assert same_bits(emulated(call, edit=backwards), right)
    for words in (1, 100_000, 200_000):  # one head at a time, two, one batch element
        monkeypatch.setattr(int8, "_SLICE_BYTES", words)
        assert same_bits(emulated(call), right)


def test_tiles_without_an_allowed_key_are_not_read() -> None:
    mask = torch.zeros(1, 1, 70, 512, dtype=torch.bool)
    mask[..., [3, 200, 300]] = True
    call = replace(of_case(sized(FLOAT32, 64, 70, 512, "bool [B, 1, 1, S]")), attn_mask=mask)

    def spoil_others(launches: list[Launch]) -> list[Launch]:
        *others, last = launches
        emulate(others)
        for field in ("v_scales", "v_logs"):
            _written(last, field).view(-1, 512 // 64, 64)[:, [1, 2, 5, 6, 7]] = math.nan
        return [last]

    assert same_bits(emulated(call, edit=spoil_others), defined(call))


def test_memory_beside_the_tensors_is_that_of_words_and_scales() -> None:
    call = of_case(sized(FLOAT32, 128, 1000, 1000, heads=(2, 2)))
    out = torch.empty(call.out_shape)
    own = {t.data_ptr(): t for launch in int8_launches(call, plan_call(call, 1, int8=True), out) for t in launch.keep}
    for tensor in (call.query, call.key, call.value, out):
        del own[tensor.data_ptr()]
    keys = 8 * 128  # whole tiles
    words_and_scales = 2 * (1000 * (128 + 4) + keys * (2 * 128 + 12))
    assert sum(t.nbytes for t in own.values()) == words_and_scales + 3 * 2 * 4 * 128  # means, that of V twice


def _normal(*shape: int) -> Tensor:
    return torch.randn(1, 1, *shape)


def _channel(rows: int, dim: int) -> Tensor:
    """Rows whose rotated channels are all alike."""
    return torch.eye(dim)[:1].expand(rows, dim).clone()[None, None]


def _with(tensor: Tensor, number: float, row: int = 7) -> Tensor:
    changed = tensor.clone()
    changed[0, 0, row, 3] = number
    return changed


def _sinks(dim: int, places: list[int], common: float = 0.0) -> list[Tensor]:
    """Keys with most of the weight and small values, beside values with a common part."""
    query, key, value = _normal(70, dim), _normal(700, dim), _normal(700, dim) + common * _normal(1, dim)
    direction = torch.nn.functional.normalize(torch.randn(dim), dim=0)
    key[:, :, places] += direction * math.sqrt(dim) * 1.1
    value[:, :, places] = 0.05 * _normal(len(places), dim)
    return [query + 6 * direction, key, value]


def _matching(dim: int) -> list[Tensor]:
    """A key for each query, with a score far above the others."""
    key = _normal(200, dim)
    return [3e4 * key[:, :, :70], key, _normal(200, dim)]


# name: query, key, value and perhaps a mask for a head_dim, and the largest error.
EDGES: dict[str, tuple[Callable[[int], list[Tensor]], float]] = {
    "scores above 47,000": (_matching, 0.02),
    "the largest sums of Q K": (
        lambda d: [50 * _channel(5, d), _normal(9, 1).sign() * _channel(9, d), _normal(9, d)],
        0.02,
    ),
    "the largest sums of P V": (
        lambda d: [0 * _channel(5, d), _channel(256, d), (torch.arange(256) // 128 * 4 - 3)[:, None] * _channel(1, d)],
        0.01,
    ),
    "zero queries, equal keys": (lambda d: [0 * _normal(70, d), 0 * _normal(90, d) + 1, _normal(90, d) + 1], 0.01),
    "a constant value": (lambda d: [_normal(70, d), _normal(90, d), 0 * _normal(90, d) + 3], 1e-6),
    "tiny queries": (lambda d: [1e-20 * _normal(70, d), _normal(90, d), _normal(90, d) + 1], 0.01),
    "tiny values": (lambda d: [_normal(70, d), _normal(90, d), 1e-20 * _normal(90, d)], TYPICAL),
    "huge values": (lambda d: [_normal(70, d), _normal(90, d), 1e6 * _normal(90, d)], TYPICAL),
    "a channel a hundred times as large": (
        lambda d: [_normal(70, d), _normal(90, d), torch.eye(d)[0] * 99 * _normal(90, d) + _normal(90, d)],
        TYPICAL,
    ),
    "values of uneven size": (
        lambda d: [_normal(70, d), _normal(500, d), _normal(500, d) * _normal(500, 1).exp()],
        0.02,
    ),
    "an attention sink": (lambda d: _sinks(d, [5]), 0.02),
    "an attention sink beside values with a common part": (lambda d: _sinks(d, [5], 2.0), 0.02),
    "four attention sinks beside values with a common part": (lambda d: _sinks(d, [5, 9, 300, 699], 2.0), 0.02),
    "keys that grow": (
        lambda d: [_normal(70, d), torch.linspace(0.2, 6, 400)[:, None] * _normal(400, d), _normal(400, d)],
        0.05,
    ),
    "a score below -1e20": (
        lambda d: [
            -1e23 * _channel(5, d),
            torch.tensor([[1.0], [-1.0]]) * _channel(2, d),
            _normal(2, d),
            torch.tensor([[True, False]]),
        ],
        0.01,
    ),
    "a large common key": (lambda d: [_normal(70, d), _normal(200, d) + 30 * _normal(1, d), _normal(200, d)], TYPICAL),
}  # fmt: skip


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", EDGES)
def test_an_edge_has_the_bits_of_the_definition_and_its_error_stays_small(name: str, dim: int) -> None:
    torch.manual_seed(1)
    make, largest = EDGES[name]
    inputs = make(dim)
    call = check_call(*inputs)
    found = emulated(call)
    assert same_bits(found, defined(call))
    assert error_of(found[0], exact([*inputs, None][:4], {})[0]) <= largest


@pytest.mark.parametrize("rule", ["[B, 1, 1, S]", "[B, H, L, S]", "causal"])
@pytest.mark.parametrize("dim", [64, 128])
def test_keys_that_no_row_sees_change_nothing(dim: int, rule: str) -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(2, 4, 77, dim)[:, :heads] for heads in (4, 2, 2))
    padding = 300 * torch.randn(2, 1, 1, dim).expand(2, 2, 200, dim)
    inputs = [query, torch.cat([key, padding], 2), torch.cat([value, padding], 2)]
    mask = (torch.arange(277) < 77).expand(2, 1, 1, 277)
    if rule == "causal":
        call = check_call(*inputs, is_causal=True, enable_gqa=True)
        allowed = torch.ones(77, 77, dtype=torch.bool).tril()
    else:
        call = check_call(*inputs, mask if rule == "[B, 1, 1, S]" else mask.repeat(1, 4, 77, 1), enable_gqa=True)
        allowed = None
    found = emulated(call)
    assert same_bits(found, defined(call))
    assert error_of(found[0], exact([query, key, value, allowed], {"enable_gqa": True})[0]) <= TYPICAL


@pytest.mark.parametrize("number", [math.nan, math.inf, NAN_OF_CARDS])
@pytest.mark.parametrize("which", range(3))
def test_what_is_not_finite_reaches_the_rows_that_depend_on_it(which: int, number: float) -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(1, 2, n, 64) for n in (70, 90, 90)]
    inputs[which] = _with(inputs[which], number)
    call = check_call(*inputs)
    found = emulated(call)
    assert same_bits(found, defined(call))
    rows = found[0].isfinite().all(dim=-1)
    assert rows[0, 1].all()
    assert rows[0, 0].sum() == (69 if which == 0 else 0)


@pytest.mark.parametrize("which", [1, 2])
def test_what_is_not_finite_does_not_reach_blocks_of_rows_without_a_key(which: int) -> None:
    torch.manual_seed(1)
    inputs = [torch.randn(1, 2, n, 64) for n in (300, 150, 150)]
    inputs[which] = _with(inputs[which], math.nan)
    mask = (torch.arange(300)[:, None] < 100).expand(1, 1, 300, 150)
    call = check_call(*inputs, mask)
    out, lse = found = emulated(call)
    assert same_bits(found, defined(call))
    assert out[0, 0, :100].isnan().all()
    assert not out[0, :, 128:].any()
    assert lse[0, :, 128:].eq(-math.inf).all()


@pytest.mark.parametrize("text", ["PA_BC=256", "PA_D=512"])
def test_tiles_whose_sums_would_not_fit_are_refused_by_the_source(text: str) -> None:
    name, size = text.split("=")
    variant = Variant("int8", 64, "float32")
    macros = {key: str(value) for key, value in variant.macros().items()} | {name: size}
    with pytest.raises(RuntimeError, match="unsupported tile geometry"):
        build_text(source("int8"), {kernel: params_of(kernel) for kernel in variant.functions}, macros)


def test_a_kernel_without_any_one_barrier_is_wrong() -> None:
    text = source("int8")
    calls = [of_case(sized(FLOAT32, dim, 130, 330)) for dim in (64, 128)]

    def is_right(text: LeftOut | None) -> bool:
        return all(same_bits(emulated(call, seed, text), defined(call)) for call in calls for seed in (1, 2))

    assert is_right(None)
    mutants = list(each_left_out(text, re.finditer(r"__syncthreads\(\);", text)))
    assert len(mutants) == 3
    for mutant, line in mutants:
        assert not is_right(mutant), line


def test_what_is_read_a_step_ahead_is_not_being_written() -> None:
    """Behind the last step of a product it is of the next buffer and not used, so that no number would show it."""
    call = of_case(sized(FLOAT32, 64, 10, 200))
    emulate(int8_launches(call, plan_call(call, 1, int8=True), torch.empty(call.out_shape)), flags=RACES)


def test_explain_names_the_route_or_what_the_card_lacks() -> None:
    inputs, config = [torch.zeros(1, 1, 8, 64) for _ in range(3)], AttentionConfig(route="fused-int8")
    with emulated_card():
        assert explain(*inputs, config=config).startswith("route fused-int8")
    words = re.escape("needs compute capability 6.1, got 6.0")
    with emulated_card(info=replace(CARD, capability=(6, 0))), pytest.raises(UnsupportedAttention, match=words):
        explain(*inputs, config=config)


def test_it_is_never_chosen_unasked_and_refuses_what_it_cannot_do() -> None:
    assert "fused-int8" not in route_names()
    assert AttentionConfig(route="fused-int8").route == "fused-int8"
    tensor = torch.zeros(1, 1, 8, 160, requires_grad=True)
    call = check_call(tensor, tensor, tensor, torch.zeros(8, 8), scale=-1.0)
    assert call_reasons(call, int8=True) == [
        "the int8 mode has no gradients",
        "the int8 mode's head_dim ends at 128, got 160",
        "the int8 mode has no float mask",
        "the int8 mode needs a positive scale, got -1",
    ]
