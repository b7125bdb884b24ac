"""The common questions: what is right, is it right, which rows show it, and was memory short."""

import contextlib
import math

import pytest
import torch

from pascal_attn_core.fused.gpu.runtime import DriverError
from pascal_attn_core.machine.out_of_memory import is_out_of_memory, out_of_memory
from pascal_attn_core.reference import allowed_keys, reference_sdpa
from pascal_attn_core.reference.checks import Gap, exact_limit, gap, rows_to_check, tolerance


@pytest.mark.parametrize(
    ("found", "right", "expected"),
    [
        ([1.0, 2.0], [1.0, 4.0], (2.0, 4.0)),
        ([math.nan, 4.0], [1.0, 4.0], (math.inf, 4.0)),
        ([math.inf, 4.0], [1.0, 4.0], (math.inf, 4.0)),
        ([1.0, 4.0], [math.nan, 4.0], (0.0, 4.0)),
        ([1.0, 4.5], [-math.inf, 4.0], (0.5, 4.0)),
        ([[1.0, 4.0]], [1.0, 4.0], (math.inf, 0.0)),
        ([], [], (0.0, 0.0)),
    ],
)
def test_a_gap_is_the_largest_difference_where_the_right_answer_is_a_number(found, right, expected) -> None:
    assert gap(torch.tensor(found), torch.tensor(right)) == expected


def test_a_relative_error_is_zero_only_without_an_error() -> None:
    assert (Gap(1.0, 4.0).relative, Gap(0.0, 0.0).relative, Gap(1.0, 0.0).relative) == (0.25, 0.0, math.inf)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rounding_passes_and_a_misplaced_row_does_not(dtype: torch.dtype) -> None:
    query, key, value = torch.randn(3, 1, 2, 40, 32, dtype=torch.float64).to(dtype)
    right = reference_sdpa(query.double(), key.double(), value.double())[0]
    plain = reference_sdpa(query, key, value)[0]
    found = gap(plain, right)
    assert found.is_rounding(dtype)
    assert found.error <= exact_limit(found, dtype)
    wrong = gap(plain.roll(1, dims=-2), right)
    assert not wrong.is_rounding(dtype)
    assert wrong.error > exact_limit(found, dtype)


def test_the_coarsest_dtype_sets_the_tolerance() -> None:
    assert tolerance(torch.float32) < tolerance(torch.int64, torch.float32, torch.bfloat16) == tolerance(torch.bfloat16)


def test_where_torch_may_round_the_factors_of_products_that_is_allowed() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert tolerance(torch.float32) == tolerance(torch.float16)
        torch.set_float32_matmul_precision("medium")
        assert tolerance(torch.float32) == tolerance(torch.bfloat16)
    finally:
        torch.set_float32_matmul_precision(before)


def test_rows_to_check_see_an_outlier_what_is_not_finite_and_rows_at_any_period() -> None:
    rows = torch.randn(4096, 8)
    rows[1234] *= 100
    state = torch.get_rng_state()
    found = rows_to_check(rows, 64)
    assert torch.equal(torch.get_rng_state(), state)
    assert 1234 in found
    assert 48 <= len(found) <= 64
    assert all(len(set((found % period).tolist())) == period for period in (2, 3, 4, 8))
    assert not torch.equal(found, rows_to_check(rows, 64, seed=1))
    assert rows_to_check(rows[:5], 64).tolist() == [0, 1, 2, 3, 4]
    rows = torch.randn(1000, 4)
    rows[[7, 700]] = torch.tensor([[math.nan], [math.inf]])
    assert {7, 700} <= set(rows_to_check(rows, 16).tolist())


class _AcceleratorError(RuntimeError):
    error_code = 2


@pytest.mark.parametrize(
    ("error", "is_short"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("HIP error: HIPBLAS_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (DriverError("cuMemAlloc: error 2", 2), True),
        (_AcceleratorError("some words"), True),
        (DriverError("cuLaunchKernel: an illegal memory access was encountered", 700), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt("out of memory"), False),
    ],
    ids=str,
)
def test_a_lack_of_memory_is_told_from_other_errors(error: BaseException, is_short: bool) -> None:
    assert is_out_of_memory(error) is is_short
    with contextlib.nullcontext() if is_short else pytest.raises(type(error)):
        try:
            raise error
        except out_of_memory():
            pass


def test_lse_by_hand() -> None:
    query, key = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [math.log(3.0)]])
    out, lse = reference_sdpa(query, key, torch.tensor([[0.0], [1.0]]), scale=1.0)
    torch.testing.assert_close(lse, torch.tensor([math.log(4.0), math.log(10.0)]))
    torch.testing.assert_close(out, torch.tensor([[0.75], [0.9]]))


def test_rows_without_keys_are_zero_with_finite_gradients() -> None:
    query, key, value = (torch.randn(3, 4, requires_grad=True) for _ in range(3))
    allowed = torch.tensor([[True] * 3, [False] * 3, [True, False, False]])
    out, lse = reference_sdpa(query, key, value, allowed)
    assert not out[1].any()
    assert lse[1] == -torch.inf
    (out.sum() + lse[[0, 2]].sum()).backward()
    assert query.grad.isfinite().all()
    assert not query.grad[1].any()


def test_the_rules_as_matrices() -> None:
    assert allowed_keys(2, 4, is_causal=True).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0]]
    lower = allowed_keys(2, 4, is_causal=True, alignment="lower_right")
    assert lower.int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert allowed_keys(3, 4, window=(1, 0)).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0]]
    assert allowed_keys(2, 3, window=(-1, -1)).all()
    assert allowed_keys(3, 2, is_causal=True, alignment="lower_right").int().tolist() == [[0, 0], [1, 0], [1, 1]]
