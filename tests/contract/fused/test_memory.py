"""The emulated kernels under the address sanitizer, with forbidden memory around every tensor and in shared memory."""

import subprocess
from pathlib import Path

import pytest
from attn_support import fresh
from attn_support.fused.emulation import GXX
from attn_support.randomness import is_random, some

_HEAD = """
import sys, types
support = types.ModuleType("attn_support"); support.__path__ = [{support!r}]; sys.modules["attn_support"] = support
import torch
from attn_support.fused.cases import at_once, backward, forward
from attn_support.fused.emulation import ADDRESS_SANITIZER
how = {{"flags": ADDRESS_SANITIZER}}
EVERY = {every}  # how many of the cases
def numbers(heads, tokens, dim): return torch.randn(1, heads, tokens, dim)
"""
_RUN = """
for dim, mask, options in ((64, None, {"is_causal": True}), (40, torch.rand(1, 1, 131, 75) > 0.5, {}),
                           (36, torch.randn(131, 75), {"window": (9, 4)}))[::EVERY]:
    inputs = [numbers(2, 131, dim), numbers(1, 75, dim), numbers(1, 75, dim), mask]
    result = forward(inputs, {"enable_gqa": True, **options}, **how)
    backward(result, torch.randn_like(result.out), **how)
    backward(at_once(result), torch.randn_like(result.out), **how)
query, key = numbers(4, 3, 64), numbers(2, 331, 64)
forward([query, key, key, None], {"enable_gqa": True}, parts=True, **how)
from attn_support.fused.cases import check_call
from attn_support.fused.emulation import emulate
from pascal_attn_core.fused.launch.int8 import int8_launches
from pascal_attn_core.fused.launch.plan import plan_call
for dim, mask, options in ((64, None, {"is_causal": True}), (40, None, {}),
                           (128, torch.rand(1, 1, 131, 75) > 0.5, {}))[::EVERY]:
    call = check_call(numbers(2, 131, dim), *(numbers(1, 75, dim) for _ in range(2)), mask, enable_gqa=True, **options)
    out, lse = torch.empty(call.out_shape), torch.empty(call.out_shape[:-1])
    emulate(int8_launches(call, plan_call(call, 1, int8=True), out, lse), **how)
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.trust import verify
for kind, arch, mask in (("wmma", "gfx1102", "none"), ("tensor", "", "none"), ("tensor_grad_query", "", "none"),
                         ("tensor_grad_key_value", "", "none"), ("volta_small", "", "none"),
                         ("wmma", "gfx1200", "bool"), ("forward", "gfx906", "bool"),
                         ("volta_grad_key_value", "", "none"))[::EVERY]:
    # 96 columns are 12 pieces of 16 bytes, of which eight are loaded in a round.
    variant = Variant(kind, 96, "float16", mask, arch=arch)
    error = verify.largest_error(variant, torch.device("cpu"), lambda launches: emulate(launches, **how))
    assert error <= verify.tolerance(variant), variant.name
print("clean")
"""
_ONE_KEY_TOO_MANY = """
from attn_support.fused.cases import check_call, forward_launches, whole
from attn_support.fused.emulation import emulate
query, key = numbers(1, 131, 64), numbers(1, 75, 64)
call = check_call(query, key, key)
(launch,) = forward_launches(call, whole(call), torch.empty_like(query))
launch.params.lk += 1
emulate([launch], **how)
"""
_ONE_QUERY_TOO_MANY = """
from pascal_attn_core.fused.code.source import source
right = "QUERY(i) >= queries"
assert right in source("grad_all")
mutated = {"grad_all": source("grad_all").replace(right, right + " + 1")}
query, key = numbers(1, 131, 64), numbers(1, 75, 64)
result = at_once(forward([query, key, key, None], {}, **how))
backward(result, torch.randn_like(result.out), mutated=mutated, **how)
"""
_LINEAR = """
from attn_support.fused.emulation import emulate
from pascal_attn_core.fused.launch.linear import LinearCall, linear_launches
from pascal_attn_core.fused.code.kinds import TILES
from pascal_attn_core.reference.int8_rows import Int8Matrix
for product, tile in TILES.items():
    # Codes that are read four at a time and one by one, outputs that are written so.
    for columns, cols, activation in ((64, tile.cols + 4, "none"), (36, tile.cols - 1, "geglu"), (4, 3, "silu")):
        rows, of_weight = tile.rows + 1, cols * (2 if activation == "geglu" else 1)
        weight = Int8Matrix(torch.ones(of_weight, columns, dtype=torch.int8), torch.ones(of_weight), 4)
        for dtype in (torch.float32, torch.bfloat16)[::EVERY]:
            x, bias = torch.randn(rows, columns + 1).to(dtype)[:, :columns], torch.ones(of_weight, dtype=dtype)
            call = LinearCall(x, weight, bias, activation, torch.empty(rows, cols, dtype=dtype))
            launches = linear_launches(call, 28, product)
            emulate(launches, **how)
print("clean")
"""
_GGUF = """
from attn_support.fused.emulation import emulate
from pascal_attn_core.fused.code.kinds import FEW
from pascal_attn_core.fused.launch.gguf import GgufLinearCall, gguf_linear_launches
from pascal_attn_core.fused.trust.verify_linear import sane_blocks
for columns in (32, 96):
    for function, cols in (*((function, tile.cols + 1) for function, tile in FEW.items()), ("pa_gguf_linear", 65)):
        blocks = sane_blocks("Q5_0", cols, columns, torch.Generator())
        x = torch.randn(3 if function in FEW else 129, columns + 1).half()[:, :columns]
        call = GgufLinearCall(x, blocks, "Q5_0", torch.randn(cols), torch.empty(len(x), cols, dtype=torch.float16))
        launches = gguf_linear_launches(call, 8, function)
        emulate(launches, **how)
print("clean")
"""
_ONE_BLOCK_TOO_MANY = _GGUF.replace("        emulate(", "        launches[1].params.blocks += 1\n        emulate(")
_ONE_COLUMN_TOO_MANY = _LINEAR.replace(
    "            emulate(",
    "            launches[1].params.cols += 1; launches[1].params.in_fours = 0\n            emulate(",
)


def _run(code: str) -> fresh.Done:
    found = subprocess.run([GXX or "g++", "-print-file-name=libasan.so"], capture_output=True, text=True)
    library = Path(found.stdout.strip())
    if not library.is_absolute():
        pytest.skip("g++ has no address sanitizer")
    head = _HEAD.format(support=str(fresh.ROOT / "tests" / "support"), every=1 if is_random() else 3)
    return fresh.execute(head + code, env={}, preload=library)


@pytest.mark.parametrize("code", [_RUN, _LINEAR, _GGUF], ids=["attention", "linear layers", "GGUF"])
def test_no_kernel_touches_memory_outside_of_its_tensors(code: str) -> None:
    done = _run(code)
    assert done.stdout.strip() == "clean", done.stderr[-3000:]


@pytest.mark.parametrize(
    "code", some([_ONE_QUERY_TOO_MANY, _ONE_COLUMN_TOO_MANY, _ONE_BLOCK_TOO_MANY, _ONE_KEY_TOO_MANY], 2)
)
def test_one_behind_the_last_is_noticed(code: str) -> None:
    """The query is the one of a kernel that adds nothing to it."""
    assert "heap-buffer-overflow" in _run(code).stderr
