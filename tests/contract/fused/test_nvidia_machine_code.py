"""The machine code that ships for NVIDIA's cards, instruction by instruction on a CPU, on the call with which a card
checks a kernel before its first use. ``attn_support.nvidia.machine`` says what it notices.

By day a share of it, which is another one with every change of what ships; all of it in profile nightly.
"""

import functools
import hashlib
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import fused as tool
import pytest
from attn_support.fused.executed import CodeOf, largest_error, limit, result
from attn_support.nvidia.code import NVDISASM, WANTED, Instruction, MachineKernel, Operand, instruction
from attn_support.nvidia.operations import operation_of
from attn_support.randomness import at_night, seeds, some, times

from pascal_attn_core.fused.code import prebuilt
from pascal_attn_core.fused.code.compilation import Compilation
from pascal_attn_core.fused.code.source import MASKS, Variant, source
from pascal_attn_core.fused.geometry.plain import GRAD_ALL_HEAD_DIMS
from pascal_attn_core.fused.gpu.nvrtc import Compiled

pytestmark = pytest.mark.skipif(NVDISASM is None, reason=WANTED)
_SHIPPED = [(arch, variant) for arch, variants in prebuilt.packs() for variant in variants]
_MANIFEST = hashlib.sha256((prebuilt.FOLDER / "manifest.json").read_bytes()).hexdigest()
_DRAWN = random.Random(_MANIFEST).sample(_SHIPPED, len(_SHIPPED))


def _code(arch: int, variant: Compilation) -> bytes:
    code = prebuilt.load(variant, arch)
    assert code is not None, f"{variant.name} was made from another source: python tools/fused.py prebuilt"
    return code


def _named(job: tuple[int, Compilation]) -> str:
    return f"sm_{job[0]}-{job[1].name}"


@pytest.mark.parametrize("job", some(_DRAWN, 300), ids=_named)
def test_what_ships_is_right(job: tuple[int, Compilation]) -> None:
    arch, variant = job
    found = result(variant, functools.partial(_code, arch))
    assert found.is_right, found


@pytest.mark.parametrize(("job", "seed"), some(itertools.product(_DRAWN[::3], range(2)), 802))
def test_warps_may_run_ahead_of_others_behind_a_barrier(job: tuple[int, Compilation], seed: int) -> None:
    arch, variant = job
    assert largest_error(variant, functools.partial(_code, arch), scatter=seed) <= limit(variant), _named(job)


_AT_ONCE = list(itertools.product((50, 60, 61, 70, 75), GRAD_ALL_HEAD_DIMS, ("float32", "float16"), MASKS))


@pytest.mark.parametrize(
    ("arch", "head_dim", "dtype", "mask"), random.Random(seeds(1)[0]).sample(_AT_ONCE, times(1)), ids=str
)
def test_gradients_that_are_compiled_at_first_use_are_right(arch: int, head_dim: int, dtype: str, mask: str) -> None:
    """Blocks wait for each other here, as in no kernel that ships."""
    variant = Variant("grad_all", head_dim, dtype, mask)
    found = result(variant, lambda _: tool.compiled(variant, arch).cubin)
    assert found.is_right, found


def test_a_pack_is_only_written_when_all_that_is_new_in_it_was_executed_and_was_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pack = [Variant("forward", 32, dtype) for dtype in ("float16", "bfloat16")]
    codes = {variant: _code(61, variant) for variant in pack}
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt, "packs", lambda: [(61, pack)])
    wrong = {**codes, pack[1]: codes[pack[0]]}
    for given, executed, is_right in ((codes, 2, True), (codes, 0, True), (wrong, 1, False)):
        monkeypatch.setattr(tool, "compiled", lambda variant, arch, given=given: Compiled(given[variant], ""))
        with nullcontext() if is_right else pytest.raises(SystemExit):
            tool.write_prebuilt([61], None)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "sm_61-32.xz"]
        assert f"{executed} variants: 0 not executed, {executed * (not is_right)} wrong" in capsys.readouterr().out
    assert [prebuilt.load(variant, 61) for variant in pack] == list(codes.values())


@at_night
@pytest.mark.parametrize(("arch", "kind"), [(70, "volta"), (75, "tensor")])
def test_an_addend_to_the_bits_of_products_is_lost(arch: int, kind: str) -> None:
    """ptxas takes the former way to round probabilities for a product of integers: the reason for this file."""
    own = "return x >> 13 | (y << 3 & 0xffff0000u);"
    folded = "return x * 8u + 0x8000u >> 16 | (y * 8u + 0x8000u & 0xffff0000u);"
    variant = Variant(kind, 32, "float16")
    assert variant.macros()["PA_INTEGER_PACKED"]
    for text, is_right in ((source(kind), True), (source(kind).replace(own, folded), False)):
        code = tool.nvrtc(arch).compile(text, arch, variant.macros()).cubin
        assert result(variant, lambda _, code=code: code).is_right == is_right


# Of each architecture and kind of kernel some.
_MUTATED = [
    (61, "forward-32-float16-none"), (70, "volta_small-64-float16-none"), (61, "int8-64-float32-none"),
    (50, "forward-40-float32-bool"), (75, "tensor_packed-128-float16-none"), (61, "split-64-float16-none"),
    (70, "forward-32-float32-none"), (61, "gguf_linear-Q4_K-8"), (75, "tensor_grad_query-64-float16-none"),
    (61, "int8_linear-float16"), (60, "forward-64-bfloat16-none"),
]  # fmt: skip
_NO_RESULT = {"NOP", "DEPBAR", "MEMBAR", "ERRBAR", "YIELD", "CCTL", "BMOV", "RRO", "EXIT"}
Place = tuple[str, int]  # a function, and the place of an instruction in it


def _executed(variant: Compilation, code_of: CodeOf) -> dict[tuple[Place, Instruction], int]:
    """The instructions that the calls of :func:`result` execute, in their order, and how often."""
    found: Counter[tuple[Place, Instruction]] = Counter()
    current = ""

    def change(kernel: MachineKernel) -> MachineKernel:
        nonlocal current
        current = kernel.name
        return kernel

    assert result(variant, code_of, change=change, watch=lambda i: found.update([((current, i.address), i)])).is_right
    return dict(sorted(found.items(), key=lambda item: item[0][0]))


def _other(o: Operand) -> Operand:
    """An operand that is not that one."""
    if o.kind in ("c", "m"):
        return o._replace(offset=o.offset + 4)
    if o.kind == "i":
        return o._replace(number=o.number ^ 1 << max(0, o.number.bit_length() - 1))  # without its highest bit
    return o._replace(number=o.number - 1 if o.number else 1)


def _reads_a_predicate(i: Instruction) -> bool:
    """Whether its last one changes anything: that of LOP3 only changes the predicate that it may have as a result."""
    return any(o.kind == "P" for o in i.operands[2:]) and (i.name != "LOP3" or i.operands[0].kind == "P")


def _inverted(i: Instruction) -> Instruction:
    """With the opposite of its guard, or of the last predicate that it reads."""
    if i.guard is not None:
        return i._replace(guard=i.guard._replace(inverted=not i.guard.inverted))
    at = max(n for n, o in enumerate(i.operands) if o.kind == "P")
    o = i.operands[at]
    return i._replace(operands=(*i.operands[:at], o._replace(inverted=not o.inverted), *i.operands[at + 1 :]))


def _with_another_source(i: Instruction, rng: random.Random) -> Instruction:
    at = rng.choice([n for n, o in enumerate(i.operands) if n and o.kind in "RcmiUR" and not o.is_zero])
    return i._replace(operands=(*i.operands[:at], _other(i.operands[at]), *i.operands[at + 1 :]))


def _lost(i: Instruction, rng: random.Random) -> Instruction:
    return i._replace(name="NOP", options=(), operands=())


# What each kind of mutant may be made of, and the change.
CHANGES: dict[str, tuple[Callable[[Instruction], bool], Callable[[Instruction, random.Random], Instruction]]] = {
    "lost": (lambda i: i.name not in _NO_RESULT, _lost),
    "another source": (
        lambda i: i.name not in _NO_RESULT and any(o.kind in "RcmiUR" and not o.is_zero for o in i.operands[1:]),
        _with_another_source,
    ),
    "inverted": (
        lambda i: i.name not in _NO_RESULT and (i.guard is not None or _reads_a_predicate(i)),
        lambda i, rng: _inverted(i),
    ),
    "no barrier": (lambda i: i.name == "BAR", _lost),
}


_ORDER = ("lost", "another source", "inverted", "lost", "another source", "no barrier")


def _how(number: int) -> str:
    return _ORDER[number % len(_ORDER)]


def _mutant(number: int) -> tuple[Compilation, CodeOf, Callable[[MachineKernel], MachineKernel], str]:
    """A shipped kernel, its code, the change of one of the instructions that it executes, and which one it is. It is
    drawn by how often it is executed: many that run once bound ranges, or are there for sizes beyond any call."""
    arch, name = _MUTATED[number % len(_MUTATED)]
    may, changed = CHANGES[_how(number)]
    variant = next(v for a, v in _SHIPPED if (a, v.name) == (arch, name))
    code_of, rng = functools.partial(_code, arch), random.Random(number)
    executed = {key: count for key, count in _executed(variant, code_of).items() if may(key[1])}
    (((function, address), instruction),) = rng.choices(list(executed), list(executed.values()))
    instead = changed(instruction, rng)

    def change(kernel: MachineKernel) -> MachineKernel:
        if kernel.name != function:
            return kernel
        instructions = list(kernel.instructions)
        instructions[kernel.places[address]] = instead
        return replace(kernel, instructions=tuple(instructions))

    return variant, code_of, change, f"sm_{arch} {name}, {function} {address:#x} {_how(number)}: {instruction.text}"


def _is_right(variant: Compilation, code_of: CodeOf, change: Callable, how: str) -> bool:
    if how != "no barrier":
        return result(variant, code_of, change=change).is_right
    try:
        errors = [largest_error(variant, code_of, change=change, scatter=seed) for seed in range(3)]
    except AssertionError:
        return False
    return max(errors) <= limit(variant)


@pytest.mark.parametrize("number", some(range(30), 30))
def test_a_change_of_one_instruction_is_seen(number: int) -> None:
    variant, code_of, change, words = _mutant(number)
    assert not _is_right(variant, code_of, change, _how(number)), words


@pytest.mark.parametrize(
    "line", ["FOO R1, R2", "FADD.RN R1, R2, R3", "LDG.E.SOON R1, [R2]", "HMMA.16816.F32 R0, R2, R4, R6", ".word 0x1234"]
)
def test_what_is_not_known_is_an_error(line: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(line[-6:])):
        operation_of(instruction(f"/*0010*/ {line} ;", 75))
