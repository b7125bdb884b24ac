"""Scalar instructions of gfx9 ("Vega" Instruction Set Architecture, chapter 12) and gfx10 ("RDNA 2" Instruction Set
Architecture, chapter 12), as far as the kernels have them."""

import operator
from collections.abc import Callable

from .code import EXEC, VCC, Instruction
from .wave import ALL, Wave

Operation = Callable[[Wave, Instruction], None]
SCALAR: dict[str, Operation] = {}
Condition = Callable[[int], bool]


_READ: dict[str, Callable[..., int]] = {
    "u": Wave.scalar, "i": Wave.signed, "U": Wave.scalar64, "c": lambda wave, _: wave.scc,
    "k": lambda wave, o: (o.number & 0xFFFF) - ((o.number & 0x8000) << 1), "K": lambda wave, o: o.number & 0xFFFF,
}  # fmt: skip


def _define(
    name: str, operands: str, f: Callable[..., int], scc: Condition | None = None, *, wide: bool = False
) -> None:
    """``operands``: the kind of each source, a key of ``_READ``; before a "+" that of the destination, which is read
    as well. scc: from the exact result; wide: of 64 bits."""
    in_place, _, sources = operands.rpartition("+")
    readers = [_READ[kind] for kind in in_place + sources]
    write = Wave.write_scalar64 if wide else Wave.write_scalar

    def run(wave: Wave, i: Instruction) -> None:
        given = (*i.operands[0 if in_place else 1 :], None)  # behind the last one SCC may be read
        result = f(*[read(wave, operand) for read, operand in zip(readers, given)])
        write(wave, i.operands[0].number, result)
        if scc is not None:
            wave.scc = int(scc(result))

    SCALAR[name] = run


def _overflows(number: int) -> bool:
    return not -(1 << 31) <= number < 1 << 31


def _leaves_32_bits(number: int) -> bool:
    return not 0 <= number < 1 << 32


def _is_set(number: int) -> bool:
    return number & 0xFFFFFFFF != 0


def _is_set64(number: int) -> bool:
    return number & ALL != 0


def _signed_part(x: int, y: int) -> int:
    first, size = y & 31, y >> 16
    sign = 1 << size - 1
    return (x >> first & (1 << size) - 1 ^ sign) - sign


_define("s_add_i32", "ii", operator.add, _overflows)
_define("s_sub_i32", "ii", operator.sub, _overflows)
_define("s_add_u32", "uu", operator.add, _leaves_32_bits)
_define("s_sub_u32", "uu", operator.sub, _leaves_32_bits)
_define("s_addc_u32", "uuc", lambda x, y, carry: x + y + carry, _leaves_32_bits)
_define("s_subb_u32", "uuc", lambda x, y, carry: x - y - carry, _leaves_32_bits)
_define("s_mul_i32", "ii", operator.mul)
_define("s_mul_hi_i32", "ii", lambda x, y: x * y >> 32)
_define("s_mul_hi_u32", "uu", lambda x, y: x * y >> 32)
_define("s_lshl_b32", "uu", lambda x, y: x << (y & 31), _is_set)
_define("s_lshr_b32", "uu", lambda x, y: x >> (y & 31), _is_set)
_define("s_ashr_i32", "ii", lambda x, y: x >> (y & 31), _is_set)
_define("s_bfe_u32", "uu", lambda x, y: x >> (y & 31) & ((1 << (y >> 16 & 127)) - 1), _is_set)
_define("s_bfe_i32", "ii", _signed_part, _is_set)
_define("s_mov_b32", "u", lambda x: x)
_define("s_mov_b64", "U", lambda x: x, wide=True)
_define("s_movk_i32", "k", lambda x: x)
_define("s_not_b32", "u", lambda x: ~x, _is_set)
_define("s_brev_b32", "u", lambda x: int(f"{x:032b}"[::-1], 2))
_define("s_lshl_b64", "Uu", lambda x, y: x << (y & 63), _is_set64, wide=True)
_define("s_addk_i32", "i+k", operator.add, _overflows)
_define("s_mulk_i32", "i+k", operator.mul)
_define("s_bitset0_b32", "i+u", lambda x, y: x & ~(1 << (y & 31)))
_define("s_bitset1_b32", "i+u", lambda x, y: x | 1 << (y & 31))
_define("s_cselect_b32", "uuc", lambda x, y, scc: x if scc else y)
_define("s_cselect_b64", "UUc", lambda x, y, scc: x if scc else y, wide=True)


def _extreme(choose: Callable[[int, int], int]) -> Operation:
    def run(wave: Wave, i: Instruction) -> None:
        x, y = wave.signed(i.operands[1]), wave.signed(i.operands[2])
        result = choose(x, y)
        wave.write_scalar(i.operands[0].number, result)
        wave.scc = int(result == x and x != y)  # whether the first one was taken

    return run


SCALAR["s_min_i32"], SCALAR["s_max_i32"] = _extreme(min), _extreme(max)


def _bits(name: str, f: Callable[[int, int], int]) -> None:
    """A bitwise operation in its three forms."""

    def of_exec(lanes: int) -> Operation:
        def run(wave: Wave, i: Instruction) -> None:
            assert wave.size == lanes, f"a mask of {lanes} lanes in a wave of {wave.size}"  # half of it would be lost
            before = wave.lanes_of(EXEC)
            result = f((wave.scalar64 if lanes == 64 else wave.scalar)(i.operands[1]), before) & (1 << lanes) - 1
            wave.write_lanes(i.operands[0].number, before)
            wave.write_lanes(EXEC, result)
            wave.scc = int(result != 0)

        return run

    _define(f"s_{name}_b32", "uu", f, _is_set)
    _define(f"s_{name}_b64", "UU", f, _is_set64, wide=True)
    SCALAR[f"s_{name}_saveexec_b32"], SCALAR[f"s_{name}_saveexec_b64"] = of_exec(32), of_exec(64)


_bits("and", operator.and_)
_bits("or", operator.or_)
_bits("xor", operator.xor)
_bits("andn2", lambda x, y: x & ~y)
_bits("orn2", lambda x, y: x | ~y)


_define("s_ctz_i32_b32", "u", lambda x: (x & -x).bit_length() - 1)  # -1: no bit is set


def _compare(name: str, operands: str, f: Callable[[int, int], bool]) -> None:
    one, other = (_READ[kind] for kind in operands)
    SCALAR[name] = lambda wave, i: setattr(wave, "scc", int(f(one(wave, i.operands[0]), other(wave, i.operands[1]))))


for _name, _f in (
    ("eq", operator.eq), ("lg", operator.ne), ("lt", operator.lt), ("le", operator.le), ("gt", operator.gt),
    ("ge", operator.ge),
):  # fmt: skip
    for _form in ("cmp i32 ii", "cmp u32 uu", "cmp u64 UU", "cmpk i32 ik", "cmpk u32 uK"):
        _what, _kind, _operands = _form.split()
        _compare(f"s_{_what}_{_name}_{_kind}", _operands, _f)


def _branch(condition: Callable[[Wave], bool]) -> Operation:
    def run(wave: Wave, i: Instruction) -> None:
        if condition(wave):
            wave.place = i.target

    return run


def _waitcnt(wave: Wave, i: Instruction) -> None:
    for counter, most in i.options.items():
        if counter in wave.transfers:
            wave.wait(counter, int(most))


def _barrier(wave: Wave, i: Instruction) -> None:
    under_way = any(transfer.writes_lds for transfer in wave.transfers["lgkmcnt"])
    assert not under_way, "a barrier while the wave's writes to shared memory are under way"


_NOTHING = (
    "s_nop", "s_clause", "s_inst_prefetch", "s_waitcnt_depctr", "s_code_end", "buffer_gl0_inv", "s_delay_alu",
    "s_sendmsg",
)  # fmt: skip
SCALAR |= {
    "s_branch": _branch(lambda wave: True),
    "s_cbranch_scc0": _branch(lambda wave: not wave.scc),
    "s_cbranch_scc1": _branch(lambda wave: bool(wave.scc)),
    "s_cbranch_vccz": _branch(lambda wave: not wave.lanes_of(VCC)),
    "s_cbranch_vccnz": _branch(lambda wave: bool(wave.lanes_of(VCC))),
    "s_cbranch_execz": _branch(lambda wave: not wave.lanes_of(EXEC)),
    "s_cbranch_execnz": _branch(lambda wave: bool(wave.lanes_of(EXEC))),
    "s_waitcnt": _waitcnt,
    "s_waitcnt_vscnt": _waitcnt,
    "s_barrier": _barrier,
    "s_endpgm": lambda wave, i: setattr(wave, "done", True),
    **dict.fromkeys(_NOTHING, lambda wave, i: None),
}
