"""Vector arithmetic of gfx9 ("Vega" Instruction Set Architecture, chapter 12) and gfx10 ("RDNA 2" Instruction Set
Architecture, chapter 12), as far as the kernels have it. What gfx10 calls by another name, and what only gfx11 has
("RDNA3" Instruction Set Architecture, chapter 16), is at the end.

Products of two floats and their sum are computed in float64 and rounded once more to float32, and so are exp, log and
reciprocals: at least as exact as the card, whose exp, log and reciprocal are within one unit in the last place.
"""

from collections.abc import Callable

import numpy as np

from .code import EXEC, Instruction, Operand
from .scalar import Operation
from .wave import F32, F64, I64, U32, U64, Wave, with_signs

VECTOR: dict[str, Operation] = {}
_READ: dict[str, Callable[[Wave, Operand], np.ndarray]] = {
    "u": Wave.unsigned, "i": Wave.integer, "f": Wave.single, "U": Wave.unsigned64, "I": Wave.integer64,
    "m": Wave.mask, "w": lambda wave, o: wave.unsigned(o) & U32(0xFFFF),
    "h": lambda wave, o: with_signs(_half(wave.raw(o), 0), o),
}  # fmt: skip


def _plain(operands: str, name: str, f: Callable[..., np.ndarray]) -> None:
    """``operands``: the kind of each source, a key of ``_READ``; behind a "+" that of the destination, which is read as
    well. The result is written to the first operand."""
    readers, in_place = [_READ[kind] for kind in operands.replace("+", "")], "+" in operands

    def run(wave: Wave, i: Instruction) -> None:
        destination, *sources = i.operands
        if in_place:
            sources.append(destination)
        assert len(sources) == len(readers)
        wave.write(destination.number, f(*[read(wave, source) for read, source in zip(readers, sources)]))

    VECTOR[name] = run


_FIVE = U32(31)
_plain("u", "v_mov_b32", lambda x: x)
_plain("u", "v_not_b32", lambda x: ~x)
_plain("u", "v_bfrev_b32", lambda x: np.packbits(np.unpackbits(x.astype(">u4").view(np.uint8)).reshape(-1, 32)[:, ::-1])
       .view(">u4").astype(U32))  # fmt: skip
_plain("uu", "v_add_u32", lambda x, y: x + y)
_plain("uu", "v_sub_u32", lambda x, y: x - y)
_plain("uu", "v_subrev_u32", lambda x, y: y - x)
_plain("uu", "v_mul_lo_u32", lambda x, y: x * y)
_plain("uu", "v_mul_hi_u32", lambda x, y: (x.astype(U64) * y >> U64(32)).astype(U32))
_plain("ii", "v_mul_hi_i32", lambda x, y: (x.astype(I64) * y >> I64(32)).astype(np.int32))
_plain("ii", "v_mul_i32_i24", lambda x, y: (x << 8 >> 8) * (y << 8 >> 8))
_plain("uu", "v_and_b32", lambda x, y: x & y)
_plain("uu", "v_or_b32", lambda x, y: x | y)
_plain("uu", "v_xor_b32", lambda x, y: x ^ y)
_plain("uu", "v_lshlrev_b32", lambda x, y: y << (x & _FIVE))
_plain("uu", "v_lshrrev_b32", lambda x, y: y >> (x & _FIVE))
_plain("ii", "v_ashrrev_i32", lambda x, y: y >> (x & 31))
_plain("uu", "v_mul_u32_u24", lambda x, y: (x & U32(0xFFFFFF)) * (y & U32(0xFFFFFF)))
_plain("uuu", "v_mad_u32_u24", lambda x, y, z: (x & U32(0xFFFFFF)) * (y & U32(0xFFFFFF)) + z)
_plain("ii", "v_min_i32", np.minimum)
_plain("ii", "v_max_i32", np.maximum)
_plain("uu", "v_max_u32", np.maximum)
_plain("uuu", "v_alignbit_b32", lambda x, y, z: ((x.astype(U64) << U64(32) | y) >> (z & _FIVE).astype(U64)).astype(U32))
_plain("uuu", "v_add3_u32", lambda x, y, z: x + y + z)
_plain("uuu", "v_max3_u32", lambda x, y, z: np.maximum(np.maximum(x, y), z))
_plain("uuu", "v_or3_b32", lambda x, y, z: x | y | z)
_plain("uuu", "v_and_or_b32", lambda x, y, z: x & y | z)
_plain("uuu", "v_add_lshl_u32", lambda x, y, z: x + y << (z & _FIVE))
_plain("uuu", "v_lshl_add_u32", lambda x, y, z: (x << (y & _FIVE)) + z)
_plain("uuu", "v_lshl_or_b32", lambda x, y, z: x << (y & _FIVE) | z)


def _signed_part(x: np.ndarray, first: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The bits from ``first`` on, ``size`` of them, with the sign that the last of them is."""
    left = U32(32) - (size & _FIVE) & _FIVE
    part = (x >> (first & _FIVE) << left).view(np.int32) >> left.astype(np.int32)
    return np.where(size & _FIVE, part, 0).astype(np.int32).view(U32)


_plain("uuu", "v_bfe_i32", _signed_part)
_plain("uuu", "v_bfe_u32", lambda x, y, z: x >> (y & _FIVE) & ((U32(1) << (z & _FIVE)) - U32(1)))


_plain("ffm", "v_cndmask_b32", lambda x, y, second: np.where(second, y, x))


def _ones(x: np.ndarray) -> np.ndarray:
    return np.unpackbits(x.view(np.uint8).reshape(-1, 4), axis=1).sum(1).astype(U32)


_BELOW = np.array([(1 << lane) - 1 for lane in range(64)], U64)  # the lanes before each one
_LOW, _HIGH = (_BELOW & U64(0xFFFFFFFF)).astype(U32), (_BELOW >> U64(32)).astype(U32)
_plain("uu", "v_mbcnt_lo_u32_b32", lambda x, y: _ones(x & _LOW[: len(x)]) + y)
_plain("uu", "v_mbcnt_hi_u32_b32", lambda x, y: _ones(x & _HIGH[: len(x)]) + y)


def _carries(sign: int, *, reversed_: bool = False) -> Operation:
    """A sum or difference of 32 bits, and the mask of the lanes where it leaves them; a carry where one is read."""

    def run(wave: Wave, i: Instruction) -> None:
        destination, carry_out, *sources = i.operands
        x, y = (wave.unsigned(source).astype(I64) for source in sources[:2])
        if reversed_:
            x, y = y, x
        carry = wave.mask(sources[2]).astype(I64) if len(sources) > 2 else I64(0)
        result = x + sign * (y + carry)
        wave.write_mask(carry_out.number, (result < 0) | (result >= 1 << 32))
        wave.write(destination.number, (result & 0xFFFFFFFF).astype(U32))

    return run


VECTOR |= {
    "v_add_co_u32": _carries(1), "v_addc_co_u32": _carries(1),
    "v_sub_co_u32": _carries(-1), "v_subb_co_u32": _carries(-1),
    "v_subrev_co_u32": _carries(-1, reversed_=True), "v_subbrev_co_u32": _carries(-1, reversed_=True),
}  # fmt: skip


def _multiply_add64(read: Callable[..., np.ndarray], wide: type[np.generic]) -> Operation:
    """The carry of a signed one is not looked at."""

    def run(wave: Wave, i: Instruction) -> None:
        destination, carry_out, x, y, added = i.operands
        more = wave.unsigned64(added)
        result = (read(wave, x).astype(wide) * read(wave, y) + more.view(wide)).view(U64)
        wave.write_mask(carry_out.number, result < more)
        wave.write64(destination.number, result)

    return run


def _shift_left64(wave: Wave, i: Instruction) -> None:
    destination, by, x = i.operands
    wave.write64(destination.number, wave.unsigned64(x) << (wave.unsigned(by) & U32(63)).astype(U64))


VECTOR |= {
    "v_mad_i64_i32": _multiply_add64(Wave.integer, I64), "v_mad_u64_u32": _multiply_add64(Wave.unsigned, U64),
    "v_lshlrev_b64": _shift_left64,
}  # fmt: skip


def _read_first_lane(wave: Wave, i: Instruction) -> None:
    destination, source = i.operands
    wave.write_scalar(destination.number, int(wave.unsigned(source)[int(np.argmax(wave.lanes))]))


def _read_lane(wave: Wave, i: Instruction) -> None:
    destination, source, lane = i.operands
    wave.write_scalar(destination.number, int(wave.unsigned(source)[wave.scalar(lane) % wave.size]))


def _write_lane(wave: Wave, i: Instruction) -> None:
    """Whether it is active or not."""
    destination, source, lane = i.operands
    wave.vectors[destination.number, wave.scalar(lane) % wave.size] = wave.scalar(source)


VECTOR |= {"v_readfirstlane_b32": _read_first_lane, "v_readlane_b32": _read_lane, "v_writelane_b32": _write_lane}


_COMPARISONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
    "ne": np.not_equal, "neq": np.not_equal,
    "nlt": lambda x, y: ~(x < y), "nle": lambda x, y: ~(x <= y), "ngt": lambda x, y: ~(x > y),
    "nge": lambda x, y: ~(x >= y),
    "u": lambda x, y: np.isnan(x) | np.isnan(y), "o": lambda x, y: ~(np.isnan(x) | np.isnan(y)),
}  # fmt: skip


def _compare(name: str, kind: str, f: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    read = _READ[_OF_COMPARISON[kind]]

    def run(wave: Wave, i: Instruction) -> None:
        destination, x, y = i.operands
        wave.write_mask(destination.number, f(read(wave, x), read(wave, y)))

    def of_exec(wave: Wave, i: Instruction) -> None:
        assert wave.size == 32  # gfx9 writes a mask beside EXEC
        x, y = i.operands
        wave.write_mask(EXEC, f(read(wave, x), read(wave, y)))

    VECTOR[f"v_cmp_{name}_{kind}"], VECTOR[f"v_cmpx_{name}_{kind}"] = run, of_exec


_OF_FLOATS = ("neq", "nlt", "nle", "ngt", "nge", "u", "o")
_OF_COMPARISON = {"f32": "f", "u32": "u", "i32": "i", "u64": "U", "i64": "I", "u16": "w"}
for _name, _f in _COMPARISONS.items():
    for _kind in ("f32",) if _name in _OF_FLOATS else _OF_COMPARISON:
        _compare(_name, _kind, _f)


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    return (x.astype(F64) * y.astype(F64) + z.astype(F64)).astype(F32)


_plain("ff", "v_add_f32", lambda x, y: x + y)
_plain("ff", "v_sub_f32", lambda x, y: x - y)
_plain("ff", "v_mul_f32", lambda x, y: x * y)
_plain("ff", "v_max_f32", np.fmax)
_plain("ff", "v_min_f32", np.fmin)
_plain("fff", "v_max3_f32", lambda x, y, z: np.fmax(np.fmax(x, y), z))
_plain("fff", "v_fma_f32", _fma)
_plain("f", "v_trunc_f32", np.trunc)
_plain("f", "v_rndne_f32", np.rint)
_plain("f", "v_rcp_f32", lambda x: (1 / x.astype(F64)).astype(F32))
_plain("f", "v_exp_f32", lambda x: np.exp2(x.astype(F64)).astype(F32))
_plain("f", "v_log_f32", lambda x: np.log2(x.astype(F64)).astype(F32))
_plain("u", "v_cvt_f32_u32", lambda x: x.astype(F32))
_plain("i", "v_cvt_f32_i32", lambda x: x.astype(F32))
_plain("u", "v_cvt_f32_ubyte0", lambda x: (x & U32(0xFF)).astype(F32))
_plain("f", "v_cvt_u32_f32", lambda x: np.clip(np.nan_to_num(x.astype(F64)), 0, 2**32 - 1).astype(U32))
_plain("f", "v_cvt_i32_f32", lambda x: np.clip(np.nan_to_num(x.astype(F64)), -(2**31), 2**31 - 1).astype(np.int32))
VECTOR["v_rcp_iflag_f32"] = VECTOR["v_rcp_f32"]
_plain("ff+f", "v_fmac_f32", _fma)
_plain("ff+f", "v_mac_f32", lambda x, y, z: x * y + z)


def _middle(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return the median of three floats; where one is NaN, the least of the others."""
    low, high = np.minimum(x, y), np.maximum(x, y)
    return np.where(np.isnan(x + y + z), np.fmin(np.fmin(x, y), z), np.maximum(low, np.minimum(high, z)))


_plain("fff", "v_med3_f32", _middle)


# A division is v_div_scale of both, a reciprocal, its refinement, v_div_fmas and v_div_fixup. Here the last of them
# divides, so that the others need not scale.
def _div_scale(wave: Wave, i: Instruction) -> None:
    destination, scaled, x, _, _ = i.operands
    wave.write(destination.number, wave.single(x))
    wave.write_mask(scaled.number, np.zeros(wave.size, bool))


VECTOR["v_div_scale_f32"] = _div_scale
VECTOR["v_div_fmas_f32"] = VECTOR["v_fma_f32"]
_plain("fff", "v_div_fixup_f32", lambda quotient, y, x: (x.astype(F64) / y.astype(F64)).astype(F32))


def _dot4(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    products = x.view(np.int8).astype(np.int32) * y.view(np.int8)
    return products.reshape(*products.shape[:-1], -1, 4).sum(-1, dtype=np.int32) + z.view(np.int32)


def _permuted(high: np.ndarray, low: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """A byte of the selector below 8 names one of the words' bytes, from that of ``low`` up; 8 to 11 are the signs of
    every second one, 12 is 0, and 13 and above are 255."""
    chosen = np.minimum(selector.view(np.uint8).reshape(-1, 4), 13)
    content = np.concatenate([low.view(np.uint8).reshape(-1, 4), high.view(np.uint8).reshape(-1, 4)], 1)
    signs = np.where(content[:, 1::2] > 127, 255, 0).astype(np.uint8)
    content = np.concatenate([content, signs, np.pad(signs[:, :1] * 0, ((0, 0), (0, 1)), constant_values=255)], 1)
    return np.take_along_axis(content, chosen.astype(I64), 1).reshape(-1).view(U32)


def _low_half(f: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Operation:
    """An operation on the low halves; the high one becomes zero on gfx9, and stays what it is on gfx10."""

    def run(wave: Wave, i: Instruction) -> None:
        destination, x, y = i.operands
        kept = wave.unsigned(destination) & U32(0xFFFF0000 if wave.size == 32 else 0)
        found = f(*(wave.unsigned(o) & U32(0xFFFF) for o in (x, y))) & U32(0xFFFF)
        wave.write(destination.number, found | kept)

    return run


_plain("uuu", "v_dot4_i32_i8", _dot4)
_plain("uu+u", "v_dot4c_i32_i8", _dot4)
_plain("uuu", "v_perm_b32", _permuted)
VECTOR |= {
    "v_lshlrev_b16": _low_half(lambda by, x: x << (by & U32(15))),
    "v_lshrrev_b16": _low_half(lambda by, x: x >> (by & U32(15))),
    "v_add_nc_u16": _low_half(np.add), "v_sub_nc_u16": _low_half(np.subtract), "v_mul_lo_u16": _low_half(np.multiply),
}  # fmt: skip


def _half(words: np.ndarray, place: int) -> np.ndarray:
    """The float16 in the low (0) or the high (1) half of each word, as float32."""
    return words.view(np.float16)[place::2].astype(F32)


def _to_half(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float16).view(np.uint16).astype(U32)


def _dot2(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    products = x.view(np.float16).astype(F64) * y.view(np.float16).astype(F64)  # low, high, low, ...
    return (products[..., ::2] + products[..., 1::2] + z).astype(F32)


_plain("uuf", "v_dot2_f32_f16", _dot2)
_plain("uu+f", "v_dot2c_f32_f16", _dot2)
_plain("uu", "v_pack_b32_f16", lambda x, y: x & U32(0xFFFF) | y << U32(16))
_plain("f", "v_cvt_f16_f32", _to_half)
_plain("h", "v_cvt_f32_f16", lambda x: x)


def _fma_mix(wave: Wave, i: Instruction) -> None:
    """Each source is float16 where op_sel_hi says so, in the half that op_sel says, or else float32."""
    of_half, halves = (i.options.get(name, "[0,0,0]")[1:-1].split(",") for name in ("op_sel_hi", "op_sel"))
    sources = [
        with_signs(_half(wave.raw(source), int(half)) if is_half == "1" else wave.raw(source).view(F32), source)
        for source, is_half, half in zip(i.operands[1:], of_half, halves)
    ]
    wave.write(i.operands[0].number, _fma(*sources))


VECTOR["v_fma_mix_f32"] = _fma_mix


def _options_are(i: Instruction, **expected: str) -> None:
    if i.options != expected:
        raise NotImplementedError(i.text)


def _fma_to_half(high: bool) -> Operation:
    """A multiply-add of float32 numbers, rounded to float16 into one half; the other half stays what it is."""

    def run(wave: Wave, i: Instruction) -> None:
        _options_are(i)
        destination, *sources = i.operands
        kept = wave.unsigned(destination) & U32(0xFFFF if high else 0xFFFF0000)
        wave.write(destination.number, _to_half(_fma(*map(wave.single, sources))) << U32(16 * high) | kept)

    return run


VECTOR |= {"v_fma_mixlo_f16": _fma_to_half(False), "v_fma_mixhi_f16": _fma_to_half(True)}


for _own, _of_gfx9 in (
    ("v_add_nc_u32", "v_add_u32"), ("v_sub_nc_u32", "v_sub_u32"), ("v_subrev_nc_u32", "v_subrev_u32"),
    ("v_add_co_ci_u32", "v_addc_co_u32"), ("v_sub_co_ci_u32", "v_subb_co_u32"),
    ("v_subrev_co_ci_u32", "v_subbrev_co_u32"),
):  # fmt: skip
    VECTOR[_own] = VECTOR[_of_gfx9]
_plain("uuu", "v_xad_u32", lambda x, y, z: (x ^ y) + z)
_plain("fff", "v_fmamk_f32", _fma)  # the factor is a constant
_plain("fff", "v_fmaak_f32", _fma)  # the summand is


def _place_of(selection: str) -> tuple[int, int]:
    """The first bit and the number of bits of a part of a word: "DWORD", "WORD_1", "BYTE_3"."""
    part, _, place = selection.partition("_")
    size = {"DWORD": 32, "WORD": 16, "BYTE": 8}[part]
    return size * int(place or 0), size


def _part(wave: Wave, operand: Operand, selection: str) -> np.ndarray:
    first, size = _place_of(selection)
    words = wave.raw(operand) << U32(32 - first - size)
    return (words.view(np.int32) if operand.extended else words) >> (32 - size)


def _of_parts(whole: Operation) -> Operation:
    """An operation whose sources and result may be parts of words (SDWA): the rest of the word of the result becomes
    zero, or stays what it is. It is computed on registers behind those that instructions can name."""

    def run(wave: Wave, i: Instruction) -> None:
        destination, *sources = i.operands
        result = Operand("v", len(wave.vectors) - 3)
        for n, source in enumerate(sources[:2]):
            if f"src{n}_sel" in i.options:
                sources[n] = source._replace(kind="v", number=result.number + 1 + n, extended=False)
                wave.vectors[sources[n].number] = _part(wave, source, i.options[f"src{n}_sel"]).view(U32)
        wave.vectors[result.number] = 0
        whole(wave, i._replace(operands=(destination if destination.kind == "s" else result, *sources), options={}))
        if destination.kind == "s":
            return
        first, size = _place_of(i.options["dst_sel"])
        bits, unused = U32((1 << size) - 1 << first), i.options["dst_unused"]
        assert unused in ("UNUSED_PAD", "UNUSED_PRESERVE")
        kept = wave.unsigned(destination) & ~bits if unused == "UNUSED_PRESERVE" else U32(0)
        wave.write(destination.number, wave.vectors[result.number] << U32(first) & bits | kept)

    return run


VECTOR |= {f"{name}_sdwa": _of_parts(operation) for name, operation in VECTOR.items()}

_plain("fff", "v_maxmin_f32", lambda x, y, z: np.fmin(np.fmax(x, y), z))


def _dot4_of_signs(wave: Wave, i: Instruction) -> None:
    """Both factors are signed where neg_lo says so."""
    _options_are(i, neg_lo="[1,1,0]")
    wave.write(i.operands[0].number, _dot4(*map(wave.unsigned, i.operands[1:])))


def _at_once(wave: Wave, i: Instruction) -> None:
    """Both read their sources before either writes its result."""
    first, second = i.both
    at = first.operands[0].number
    before = wave.vectors[at].copy()
    VECTOR[first.name](wave, first)
    result, wave.vectors[at] = wave.vectors[at].copy(), before
    VECTOR[second.name](wave, second)
    wave.vectors[at] = result


VECTOR |= {"v_dot4_i32_iu8": _dot4_of_signs, "v_dual": _at_once}


def _of_bfloats(words: np.ndarray) -> np.ndarray:
    """The bfloat16 in each half of a row of words, the low one first."""
    return np.stack([words << U32(16), words & U32(0xFFFF0000)], -1).view(F32).reshape(*words.shape[:-1], -1)


def _matrices(read: Callable[[np.ndarray], np.ndarray]) -> Operation:
    """16 x 16 by 16 x 16, and floats: lane l has row l % 16 of the first, column l % 16 of the second, and of the sums
    rows l / 16, 2 + l / 16, ... of that column ("RDNA3", 7.9). Whether inactive lanes take part, nobody says."""
    rows, columns = 2 * np.arange(8)[:, None] + np.arange(32) // 16, np.arange(32) % 16

    def run(wave: Wave, i: Instruction) -> None:
        destination, *factors, added = (slice(o.number, o.number + 8) for o in i.operands)
        words = [np.ascontiguousarray(wave.vectors[factor].T) for factor in factors]
        assert wave.lanes.all(), i.text
        assert all((w[:16] == w[16:]).all() for w in words), f"{i.text}: the halves of the wave have other factors"
        first, second = (read(w[:16]).astype(F64) for w in words)
        sums = wave.vectors[added].view(F32) if i.operands[3].kind == "v" else F32(0)
        wave.vectors[destination] = ((first @ second.T)[rows, columns] + sums).astype(F32).view(U32)

    return run


VECTOR |= {
    "v_wmma_f32_16x16x16_f16": _matrices(lambda words: words.view(np.float16).astype(F32)),
    "v_wmma_f32_16x16x16_bf16": _matrices(_of_bfloats),
}


def _permute_other_row(wave: Wave, i: Instruction) -> None:
    """Each lane receives the word of a lane of the other 16, which the selectors name, active or not."""
    _options_are(i, op_sel="[1,0]")
    destination, source, low, high = i.operands
    nibbles = wave.scalar(low) | wave.scalar(high) << 32
    other = [n & ~15 ^ 16 | nibbles >> 4 * (n % 16) & 15 for n in range(wave.size)]
    wave.write(destination.number, wave.raw(source)[other])


VECTOR["v_permlanex16_b32"] = _permute_other_row

# Products for many instructions at once: of the words of both factors and of floats, ``[instructions, lanes]``.
Product = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
PRODUCTS: dict[str, Product] = {
    "v_dot2_f32_f16": _dot2,
    "v_dot2c_f32_f16": _dot2,
    "v_dot4_i32_i8": _dot4,
    "v_dot4c_i32_i8": _dot4,
    "v_fma_f32": lambda x, y, z: _fma(x.view(F32), y.view(F32), z),
    "v_fmac_f32": lambda x, y, z: _fma(x.view(F32), y.view(F32), z),
    "v_mac_f32": lambda x, y, z: x.view(F32) * y.view(F32) + z,
}
