"""The interpreter of NVIDIA's machine code, on a kernel whose every result is known: what NVRTC makes of it for four
architectures, bit for bit."""

import ctypes
import math
import re
from collections.abc import Callable
from typing import Any

import fused as tool
import numpy as np
import pytest
import torch
from attn_support.nvidia import machine
from attn_support.nvidia.code import NVDISASM, WANTED, instruction, kernels
from attn_support.nvidia.operations import operation_of
from attn_support.randomness import some

from pascal_attn_core.fused.code.params import Params
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.launch import Launch

COUNT = 512
M32, M64 = (1 << 32) - 1, (1 << 64) - 1


def s32(x: int) -> int:
    return x - ((x & 0x80000000) << 1)


def s64(x: int) -> int:
    return x - ((x & 1 << 63) << 1)


def divided(x: int, y: int) -> int:
    """Towards zero, as C does; 0 by 0."""
    return (abs(x) // abs(y)) * (1 if (x < 0) == (y < 0) else -1) if y else 0


def bytes_of(x: int, y: int, choice: int) -> int:
    return sum(((x | y << 32) >> 8 * (choice >> 4 * n & 7) & 0xFF) << 8 * n for n in range(4))


# What the kernel computes of x and y, 32 bits, and a = x:y and b = y:x, 64 bits; "x ? y : z" as C's.
OF_WORDS: dict[str, Callable[[int, int], int]] = {
    "__umulhi(x, y)": lambda x, y: x * y >> 32,
    "__mulhi((int)x, (int)y)": lambda x, y: s32(x) * s32(y) >> 32,
    "x * y": lambda x, y: x * y,
    "y ? x / y : 0": lambda x, y: divided(x, y),
    "y ? (int)x / (int)y : 0": lambda x, y: divided(s32(x), s32(y)),
    **{f"x / {n}u": lambda x, y, n=n: x // n for n in (5, 7, 10, 28, 112)},
    **{f"(int)x / {n}": lambda x, y, n=n: divided(s32(x), n) for n in (12, 28, 112)},
    **{f"(int)x % {n}": lambda x, y, n=n: s32(x) - n * divided(s32(x), n) for n in (7, 28)},
    "x % 7u": lambda x, y: x % 7,
    "__byte_perm(x, y, 0x5410)": lambda x, y: bytes_of(x, y, 0x5410),
    "__byte_perm(x, y, (x ^ y) & 0x7777)": lambda x, y: bytes_of(x, y, (x ^ y) & 0x7777),
    "__clz(x)": lambda x, y: 32 - x.bit_length(),
    "__ffs(x)": lambda x, y: (x & -x).bit_length(),
    "__popc(x)": lambda x, y: bin(x).count("1"),
    "__brev(x)": lambda x, y: int(f"{x:032b}"[::-1], 2),
    "x >> 7 & 0x1ff": lambda x, y: x >> 7 & 0x1FF,
    "(int)(x << 9) >> 20": lambda x, y: s32(x << 9 & M32) >> 20,
    "(x & 0xff00ff) | (y & ~0xff00ff)": lambda x, y: x & 0xFF00FF | y & ~0xFF00FF,
    "(x ^ y) | (x & 0x1234) ": lambda x, y: (x ^ y) | (x & 0x1234),
    "abs((int)x)": lambda x, y: abs(s32(x)),
    "min((int)x, (int)y)": lambda x, y: min(s32(x), s32(y)),
    "max(x, y)": lambda x, y: max(x, y),
    "__funnelshift_l(x, y, x ^ y)": lambda x, y: (y << 32 | x) << ((x ^ y) & 31) >> 32,
    "x << (y & 31)": lambda x, y: x << (y & 31),
    "(int)x >> (y & 31)": lambda x, y: s32(x) >> (y & 31),
    "dp(x, y)": lambda x, y: sum(((x >> n & 255 ^ 128) - 128) * ((y >> n & 255 ^ 128) - 128) for n in (0, 8, 16, 24)),
}
OF_PAIRS: dict[str, Callable[[int, int], int]] = {
    "a * b": lambda a, b: a * b,
    "a + b": lambda a, b: a + b,
    "a - b": lambda a, b: a - b,
    "(u64)x * y": lambda a, b: (a >> 32) * (b >> 32),
    "(u64)((i64)(int)x * (int)y)": lambda a, b: s32(a >> 32) * s32(b >> 32),
    "(u64)x * y + b": lambda a, b: (a >> 32) * (b >> 32) + b,
    "(u64)(i64)(int)x * 24 + y": lambda a, b: s32(a >> 32) * 24 + (b >> 32),
    "a << (y & 63)": lambda a, b: a << (b >> 32 & 63),
    "a >> (y & 63)": lambda a, b: a >> (b >> 32 & 63),
    "(u64)((i64)a >> (y & 63))": lambda a, b: s64(a) >> (b >> 32 & 63),
    "a < b": lambda a, b: int(a < b),
    "(i64)a >= (i64)b": lambda a, b: int(s64(a) >= s64(b)),
    "a == b": lambda a, b: int(a == b),
    "y ? a / (u64)y : 0": lambda a, b: divided(a, b >> 32),
}
Floats = Any
# Of f, g and h, and how far, in units of the last place, a result may be from the one that is written here.
OF_FLOATS: dict[str, tuple[Callable[[Floats, Floats, Floats], Floats], float]] = {
    "f / g": (lambda f, g, h: f / g, 0),
    "f / 127.f": (lambda f, g, h: f / 127, 0),
    "sqrtf(fabsf(f))": (lambda f, g, h: np.sqrt(abs(f)), 0),
    "__frcp_rn(f)": (lambda f, g, h: 1 / f, 0),
    "fmaf(f, g, h)": (lambda f, g, h: f * g + h, 0),
    "f * g": (lambda f, g, h: f * g, 0),
    "f - h": (lambda f, g, h: f - h, 0),
    "fabsf(f) - fabsf(g)": (lambda f, g, h: abs(f) - abs(g), 0),
    "fminf(f, g)": (lambda f, g, h: np.fmin(f, g), 0),
    "fmaxf(f, g)": (lambda f, g, h: np.fmax(f, g), 0),
    "f < g ? h : f": (lambda f, g, h: np.where(f < g, h, f), 0),
    "f <= g ? f : h": (lambda f, g, h: np.where(f <= g, f, h), 0),
    "f != g ? h : f": (lambda f, g, h: np.where(f != g, h, f), 0),
    "from_half(to_half(f))": (lambda f, g, h: f.astype(np.float16), 0),
    "(float)__float2int_rn(f)": (lambda f, g, h: np.clip(np.nan_to_num(np.rint(f)), -(2.0**31), 2.0**31 - 1), 0),
    "(float)(u32)f": (lambda f, g, h: np.clip(np.nan_to_num(np.trunc(f)), 0, 2.0**32 - 1), 0),
    "rsqrtf(fabsf(f))": (lambda f, g, h: 1 / np.sqrt(abs(f)), 2),
    "exp2f(f)": (lambda f, g, h: np.exp2(f), 2),
    "expf(f)": (lambda f, g, h: np.exp(f), 2),
    "tanhf(f)": (lambda f, g, h: np.tanh(f), 2),
    "logf(fabsf(f))": (lambda f, g, h: np.log(abs(f)), 2),
    "erff(f)": (lambda f, g, h: np.vectorize(math.erf)(f), 2),
}
# Of x in other lanes of a warp: which one.
OF_LANES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "__shfl_xor_sync(~0u, x, 5)": lambda lane: lane ^ 5,
    "__shfl_sync(~0u, x, lane * 7 & 31)": lambda lane: lane * 7 & 31,
    "__shfl_sync(~0u, x, lane, 8)": lambda lane: lane,
    "__shfl_down_sync(~0u, x, 3)": lambda lane: np.where(lane < 29, lane + 3, lane),
}
_HEAD = """
typedef unsigned int u32; typedef unsigned long long u64; typedef long long i64;
__device__ float from_half(u32 h) {
    float f; asm("{ .reg .b16 t; cvt.u16.u32 t, %1; cvt.f32.f16 %0, t; }" : "=f"(f) : "r"(h)); return f;
}
__device__ u32 to_half(float f) {
    u32 r; asm("{ .reg .b16 t; cvt.rn.f16.f32 t, %1; cvt.u32.u16 %0, t; }" : "=r"(r) : "f"(f)); return r;
}
__device__ u32 dp(u32 x, u32 y) {
#if __CUDA_ARCH__ == 610
    return __dp4a((int)x, (int)y, 0);
#else
    u32 sum = 0;
    for (int n = 0; n < 32; n += 8) sum += (int)(signed char)(x >> n) * (int)(signed char)(y >> n);
    return sum;
#endif
}
extern "C" __global__ void k(const u32* words, const float* floats, u32* o, u64* w, float* out, u32* others) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
    const u32 x = words[i], y = words[n + i], lane = threadIdx.x & 31;
    const u64 a = (u64)x << 32 | y, b = (u64)y << 32 | x;
    const float f = floats[i], g = floats[n + i], h = floats[2 * n + i];
"""


_NAMES = "words", "floats", "o", "w", "out", "others"


class _Known(Params):
    _fields_ = [(name, ctypes.c_void_p) for name in _NAMES]  # noqa: RUF012


def _text() -> str:
    lines = [
        f"    {array}[{row} * n + i] = {expression};"
        for array, table in (("o", OF_WORDS), ("w", OF_PAIRS), ("out", OF_FLOATS), ("others", OF_LANES))
        for row, expression in enumerate(table)
    ]
    return "\n".join([_HEAD, *lines, "}"])


def _numbers(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    words = (rng.integers(0, 1 << 32, (2, COUNT), np.uint64) >> rng.integers(0, 32, (2, COUNT), np.uint64)).astype("u4")
    words[:, :64] = rng.choice([0, 1, 2, M32, 1 << 31, M32 >> 1, 0xFFFF, 1 << 16, 0xFFFF0000, 27, 28], (2, 64))
    floats = rng.integers(0, 1 << 32, (3, COUNT), np.uint64).astype("u4").view("f4")
    middle = slice(COUNT // 3, None)
    floats[:, middle] = (rng.standard_normal((3, COUNT)) * np.exp2(rng.integers(-20, 20, (3, COUNT))))[:, middle]
    odd = [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-45, 1.17549435e-38, 3.4e38, 0.5, 2.5, 65504, 65520, 127]
    floats[:, :48] = rng.choice(np.array(odd, "f4"), (3, 48))
    return words, floats


pytestmark = pytest.mark.skipif(NVDISASM is None, reason=WANTED)


@pytest.mark.parametrize("arch", some((61, 75, 50, 70), 2))
def test_every_result_is_known(arch: str) -> None:
    cubin = tool.nvrtc(arch).compile(_text(), arch, {}).cubin
    words, floats = _numbers(np.random.default_rng(arch))
    tables = OF_WORDS, OF_PAIRS, OF_FLOATS, OF_LANES
    dtypes = torch.int32, torch.int64, torch.float32, torch.int32
    found = [torch.zeros(len(table), COUNT, dtype=dtype) for table, dtype in zip(tables, dtypes)]
    given = [torch.from_numpy(words.view("i4")), torch.from_numpy(floats)]
    tensors = dict(zip(_NAMES, [*given, *found]))
    variant = Variant("forward", 64, "float32")
    machine.run(Launch.over(variant, "k", (4, 1, 1), 128, _Known, tensors, {}), kernels(cubin)["k"])
    x, y = (row.tolist() for row in words)
    pairs = [(p << 32 | q, q << 32 | p) for p, q in zip(x, y)]
    for (expression, of), row in zip(OF_WORDS.items(), found[0].numpy()):
        assert (row.view("u4") == [of(p, q) & M32 for p, q in zip(x, y)]).all(), expression
    for (expression, of), row in zip(OF_PAIRS.items(), found[1].numpy()):
        assert (row.view("u8") == np.array([of(*pair) & M64 for pair in pairs], "u8")).all(), expression
    lanes = np.arange(COUNT) % 32
    for (expression, of), row in zip(OF_LANES.items(), found[3].numpy()):
        assert (row.view("u4") == words[0][np.arange(COUNT) - lanes + of(lanes)]).all(), expression
    with np.errstate(all="ignore"):
        for (expression, (right_of, most)), row in zip(OF_FLOATS.items(), found[2].numpy()):
            right = np.asarray(right_of(*floats.astype("f8"))).astype("f4")
            is_same = (row == right) | (np.isnan(row) & np.isnan(right))
            ulps = abs(row - right.astype("f8")) / np.spacing(np.maximum(abs(right), np.float32(1.2e-38)))
            assert (is_same | (ulps <= most)).all(), expression


@pytest.mark.parametrize(
    "line", ["FOO R1, R2", "FADD.RN R1, R2, R3", "LDG.E.SOON R1, [R2]", "HMMA.16816.F32 R0, R2, R4, R6", "BAR.ARV 0x0"]
)
def test_what_is_not_known_is_an_error(line: str) -> None:
    with pytest.raises(NotImplementedError, match=re.escape(line)):
        operation_of(instruction(f"/*0010*/ {line} ;", 75))


def test_a_line_that_is_no_instruction_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="0x1234"):
        instruction("        /*0010*/  .word 0x1234", 75)
