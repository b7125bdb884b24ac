"""Scalar instructions of gfx9 ("Vega" Instruction Set Architecture, chapter 12) and gfx10 ("RDNA 2" Instruction Set
Architecture, chapter 12), as far as the kernels have them."""

from __future__ import annotations

import operator
from collections.abc import Callable

from .code import EXEC, Instruction
from .wave import ALL, Wave

Operation = Callable[[Wave, Instruction], None]
SCALAR: dict[str, Operation] = {}


def _low(number: int) -> int:
    """The low 16 bits, signed."""
    return (number & 0xFFFF) - ((number & 0x8000) << 1)


def _arithmetic(name: str, f: Callable[[int, int], int], carries: Callable[[int], bool] | None = None) -> None:
    """32 bits; signed where the name ends in i32. carries: scc from the exact result."""
    read = Wave.signed if name.endswith("i32") else Wave.scalar

    def run(wave: Wave, i: Instruction) -> None:
        result = f(read(wave, i.operands[1]), read(wave, i.operands[2]))
        wave.write_scalar(i.operands[0].number, result)
        if carries is not None:
            wave.scc = int(carries(result))

    SCALAR[name] = run


def _overflows(number: int) -> bool:
    return not -(1 << 31) <= number < 1 << 31


def _leaves_32_bits(number: int) -> bool:
    return not 0 <= number < 1 << 32


def _is_set(number: int) -> bool:
    return number & 0xFFFFFFFF != 0


_arithmetic("s_add_i32", operator.add, _overflows)
_arithmetic("s_sub_i32", operator.sub, _overflows)
_arithmetic("s_add_u32", operator.add, _leaves_32_bits)
_arithmetic("s_sub_u32", operator.sub, _leaves_32_bits)
_arithmetic("s_mul_i32", operator.mul)
_arithmetic("s_mul_hi_i32", lambda x, y: x * y >> 32)
_arithmetic("s_mul_hi_u32", lambda x, y: x * y >> 32)
_arithmetic("s_lshl_b32", lambda x, y: x << (y & 31), _is_set)
_arithmetic("s_lshr_b32", lambda x, y: x >> (y & 31), _is_set)
_arithmetic("s_ashr_i32", lambda x, y: x >> (y & 31), _is_set)
_arithmetic("s_bfe_u32", lambda x, y: x >> (y & 31) & ((1 << (y >> 16 & 127)) - 1), _is_set)
_arithmetic(
    "s_bfe_i32",
    lambda x, y: (x >> (y & 31) & (1 << (y >> 16)) - 1 ^ 1 << (y >> 16) - 1) - (1 << (y >> 16) - 1),
    _is_set,
)


def _with_carry(sign: int) -> Operation:
    def run(wave: Wave, i: Instruction) -> None:
        result = wave.scalar(i.operands[1]) + sign * (wave.scalar(i.operands[2]) + wave.scc)
        wave.write_scalar(i.operands[0].number, result)
        wave.scc = int(_leaves_32_bits(result))

    return run


SCALAR["s_addc_u32"], SCALAR["s_subb_u32"] = _with_carry(1), _with_carry(-1)


def _extreme(choose: Callable[[int, int], int]) -> Operation:
    def run(wave: Wave, i: Instruction) -> None:
        x, y = wave.signed(i.operands[1]), wave.signed(i.operands[2])
        result = choose(x, y)
        wave.write_scalar(i.operands[0].number, result)
        wave.scc = int(result == x and x != y)  # whether the first one was taken

    return run


SCALAR["s_min_i32"], SCALAR["s_max_i32"] = _extreme(min), _extreme(max)


def _for(lanes: int, operation: Operation) -> Operation:
    """That waves of another size must not meet: the other half of a mask would be lost."""

    def run(wave: Wave, i: Instruction) -> None:
        assert wave.size == lanes, f"a mask of {lanes} lanes in a wave of {wave.size}"
        operation(wave, i)

    return run


def _bits(name: str, f: Callable[[int, int], int]) -> None:
    """A bitwise operation in its three forms."""

    def of_32(wave: Wave, i: Instruction) -> None:
        result = f(wave.scalar(i.operands[1]), wave.scalar(i.operands[2])) & 0xFFFFFFFF
        wave.write_scalar(i.operands[0].number, result)
        wave.scc = int(result != 0)

    def of_64(wave: Wave, i: Instruction) -> None:
        result = f(wave.scalar64(i.operands[1]), wave.scalar64(i.operands[2])) & ALL
        wave.write_scalar64(i.operands[0].number, result)
        wave.scc = int(result != 0)

    def of_exec(wave: Wave, i: Instruction) -> None:
        is_wide = wave.size == 64
        before, operand = wave.exec, wave.scalar64(i.operands[1]) if is_wide else wave.scalar(i.operands[1])
        result = f(operand, before) & (ALL if is_wide else 0xFFFFFFFF)
        wave.write_lanes(i.operands[0].number, before)
        wave.write_lanes(EXEC, result)
        wave.scc = int(result != 0)

    SCALAR[f"s_{name}_b32"], SCALAR[f"s_{name}_b64"] = of_32, of_64
    SCALAR[f"s_{name}_saveexec_b32"] = _for(32, of_exec)
    SCALAR[f"s_{name}_saveexec_b64"] = _for(64, of_exec)


_bits("and", operator.and_)
_bits("or", operator.or_)
_bits("xor", operator.xor)
_bits("andn2", lambda x, y: x & ~y)
_bits("orn2", lambda x, y: x | ~y)


def _compare(name: str, f: Callable[[int, int], bool]) -> None:
    def against_constant(read: Callable[..., int], bits: Callable[[int], int]) -> Operation:
        return lambda wave, i: setattr(wave, "scc", int(f(read(wave, i.operands[0]), bits(i.operands[1].number))))

    def against(read: Callable[..., int]) -> Operation:
        return lambda wave, i: setattr(wave, "scc", int(f(read(wave, i.operands[0]), read(wave, i.operands[1]))))

    SCALAR[f"s_cmp_{name}_i32"] = against(Wave.signed)
    SCALAR[f"s_cmp_{name}_u32"] = against(Wave.scalar)
    SCALAR[f"s_cmp_{name}_u64"] = against(Wave.scalar64)
    SCALAR[f"s_cmpk_{name}_i32"] = against_constant(Wave.signed, _low)
    SCALAR[f"s_cmpk_{name}_u32"] = against_constant(Wave.scalar, lambda number: number & 0xFFFF)


for _name, _f in (
    ("eq", operator.eq), ("lg", operator.ne), ("lt", operator.lt), ("le", operator.le), ("gt", operator.gt),
    ("ge", operator.ge),
):  # fmt: skip
    _compare(_name, _f)


def _move(name: str, f: Callable[[int], int], sets_scc: bool = False) -> None:
    """One operand of 32 bits."""

    def run(wave: Wave, i: Instruction) -> None:
        result = f(wave.scalar(i.operands[1])) & 0xFFFFFFFF
        wave.write_scalar(i.operands[0].number, result)
        if sets_scc:
            wave.scc = int(result != 0)

    SCALAR[name] = run


_move("s_mov_b32", lambda x: x)
_move("s_movk_i32", _low)
_move("s_not_b32", lambda x: ~x, sets_scc=True)
_move("s_brev_b32", lambda x: int(f"{x:032b}"[::-1], 2))


def _in_place(f: Callable[[int, int], int]) -> Operation:
    """The first operand is read and written: its number as signed, and the other one's bits."""

    def run(wave: Wave, i: Instruction) -> None:
        wave.write_scalar(i.operands[0].number, f(wave.signed(i.operands[0]), wave.scalar(i.operands[1])))

    return run


def _addk(wave: Wave, i: Instruction) -> None:
    result = wave.signed(i.operands[0]) + _low(i.operands[1].number)
    wave.write_scalar(i.operands[0].number, result)
    wave.scc = int(_overflows(result))


SCALAR["s_addk_i32"] = _addk
SCALAR["s_mulk_i32"] = _in_place(lambda x, y: x * _low(y))
SCALAR["s_bitset0_b32"] = _in_place(lambda x, y: x & ~(1 << (y & 31)))
SCALAR["s_bitset1_b32"] = _in_place(lambda x, y: x | 1 << (y & 31))


def _mov64(wave: Wave, i: Instruction) -> None:
    wave.write_scalar64(i.operands[0].number, wave.scalar64(i.operands[1]))


def _shift_left64(wave: Wave, i: Instruction) -> None:
    result = wave.scalar64(i.operands[1]) << (wave.scalar(i.operands[2]) & 63) & ALL
    wave.write_scalar64(i.operands[0].number, result)
    wave.scc = int(result != 0)


def _select(read: Callable[..., int], write: Callable[..., None]) -> Operation:
    return lambda wave, i: write(wave, i.operands[0].number, read(wave, i.operands[1 if wave.scc else 2]))


SCALAR |= {
    "s_mov_b64": _mov64,
    "s_lshl_b64": _shift_left64,
    "s_cselect_b32": _select(Wave.scalar, Wave.write_scalar),
    "s_cselect_b64": _select(Wave.scalar64, Wave.write_scalar64),
}


def _branch(condition: Callable[[Wave], bool]) -> Operation:
    def run(wave: Wave, i: Instruction) -> None:
        if condition(wave):
            wave.place = i.target

    return run


SCALAR |= {
    "s_branch": _branch(lambda wave: True),
    "s_cbranch_scc0": _branch(lambda wave: not wave.scc),
    "s_cbranch_scc1": _branch(lambda wave: bool(wave.scc)),
    "s_cbranch_vccz": _branch(lambda wave: not wave.vcc),
    "s_cbranch_vccnz": _branch(lambda wave: bool(wave.vcc)),
    "s_cbranch_execz": _branch(lambda wave: not wave.exec),
    "s_cbranch_execnz": _branch(lambda wave: bool(wave.exec)),
} | dict.fromkeys(
    (
        "s_nop", "s_clause", "s_inst_prefetch", "s_waitcnt_depctr", "s_code_end", "buffer_gl0_inv", "s_delay_alu",
        "s_sendmsg",
    ),
    lambda wave, i: None,
)  # fmt: skip


def _waitcnt(wave: Wave, i: Instruction) -> None:
    for counter, most in i.options.items():
        if counter in wave.transfers:
            wave.wait(counter, int(most))


def _barrier(wave: Wave, i: Instruction) -> None:
    under_way = any(transfer.writes_lds for transfer in wave.transfers["lgkmcnt"])
    assert not under_way, "a barrier while the wave's writes to shared memory are under way"


def _end(wave: Wave, i: Instruction) -> None:
    wave.done = True


SCALAR |= {"s_waitcnt": _waitcnt, "s_waitcnt_vscnt": _waitcnt, "s_barrier": _barrier, "s_endpgm": _end}
