"""Calls that torch's own kernels compute wrongly: whatever the installed torch does, ours are right; and the list of
its faults is held against it, so that a torch that is mended is used again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.fresh import run
from torch import Tensor

import pascal_attn_core.sdpa_patch as switch
from pascal_attn_core import AttentionConfig, UnsupportedAttention, explain, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.fused.launch.select import call_reasons
from pascal_attn_core.machine.runtime import Runtime, using
from pascal_attn_core.patching import interception
from pascal_attn_core.routes import torch_faults
from pascal_attn_core.routes.torch_faults import FAULTS, Kind, ShownFaults, is_shown, torch_sdpa
from pascal_attn_core.routes.torch_kernel import find_form
from pascal_attn_core.tiled.layout import rows_overlap

TORCH = AttentionConfig(route="torch")
CONFIGS = {
    "auto": AttentionConfig(),
    "auto, long": AttentionConfig(math_limit_mib=0),
    "tiled": AttentionConfig(route="tiled"),
    "small tiles": AttentionConfig(route="tiled", q_block=128, kv_block=112),
    "math": AttentionConfig(route="math", math_limit_mib=100),
}
CPU = torch.device("cpu")
FLOAT32 = Kind(CPU, torch.float32, torch.float32)


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Plain attention in float32, in which -1e9 swallows a score, or in float64."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scale = options.get("scale", query.shape[-1] ** -0.5)
    scores = query.to(wide) @ key.to(wide).mT * scale
    if options.get("is_causal"):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(wide)
    return scores.softmax(-1).nan_to_num(0.0) @ value.to(wide)


def _errors(function: Any, leaves: list[Tensor], mask: Tensor | None = None, **options: Any) -> list[float]:
    """Errors of the output and, where wanted, of the gradients, relative to it and to the largest of them."""
    out, expected = function(*leaves, mask, **options), _plain(*leaves, mask, **options)
    results, wanted = [out], [expected]
    if leaves[0].requires_grad:
        grad_out = torch.randn(out.shape, dtype=out.dtype)
        results += torch.autograd.grad(out, leaves, grad_out)
        wanted += torch.autograd.grad(expected, leaves, grad_out.to(expected.dtype))
    pairs = [(r.detach().double(), w.detach().double()) for r, w in zip(results, wanted)]
    sizes = [wanted[0].norm(), *[max((w.norm() for w in wanted[1:]), default=0)] * (len(wanted) - 1)]
    return [((r - w).norm() / size).nan_to_num(torch.inf, torch.inf).item() for (r, w), size in zip(pairs, sizes)]


def _padding(length: int, low: float, dtype: torch.dtype) -> Tensor:
    """Causal, with the first rows and columns padding, as Transformers makes it: the first rows hold ``low`` only."""
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    mask = torch.zeros(length, length, dtype=dtype).masked_fill(later, low)
    mask[:, :5] = low
    return mask[None, None]


def _masked(length: int, dtype: torch.dtype = torch.float32, low: float | None = None) -> tuple[list[Tensor], Tensor]:
    leaves = [torch.randn(1, 2, length, 16, dtype=dtype).requires_grad_() for _ in range(3)]
    return leaves, _padding(length, torch.finfo(dtype).min if low is None else low, dtype)


@pytest.mark.parametrize("length", [16, 400])
@pytest.mark.parametrize("low", [-1e4, torch.finfo(torch.float32).min, 1e9])
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_beside_rows_that_hold_large_numbers_only(name: str, low: float, length: int) -> None:
    leaves, mask = _masked(length, low=low)
    assert max(_errors(lambda *a: sdpa(*a, config=CONFIGS[name]), leaves, mask)) < 1e-5
    if name == "auto":
        with switch.patch_sdpa():
            assert max(_errors(F.scaled_dot_product_attention, leaves, mask)) < 1e-5


MASKED_IN = [(torch.float64, torch.float64, 1e-10), (torch.bfloat16, torch.bfloat16, 2e-2),
             (torch.bfloat16, torch.float32, 2e-2), (torch.float16, torch.float16, 2e-3),
             (torch.float16, torch.float32, 2e-3)]  # fmt: skip


@pytest.mark.parametrize(("dtype", "of_mask", "tolerance"), MASKED_IN, ids=str)
def test_the_same_in_other_dtypes_of_query_and_mask(dtype: torch.dtype, of_mask: torch.dtype, tolerance: float) -> None:
    for length in (32, 400):
        leaves, _ = _masked(length, dtype)
        mask = _padding(length, max(-1e9, torch.finfo(of_mask).min), of_mask)
        assert max(_errors(sdpa, leaves, mask)) < tolerance
        with switch.patch_sdpa():
            assert max(_errors(F.scaled_dot_product_attention, leaves, mask)) < tolerance


@pytest.mark.torch_2_5
def test_other_float_masks_keep_torchs_kernel() -> None:
    """A look at the mask's values decides, since its kernel is faster; and nothing is looked at without gradients."""
    leaves, low = _masked(600)
    causal = torch.zeros(600, 600).masked_fill(torch.ones(600, 600).triu(1).bool(), -torch.inf)
    for mask in (causal, torch.randn(600, 600), torch.full((600, 1), -torch.inf), torch.full((600, 1), 50.0)):
        assert explain(*leaves, mask).startswith("route torch")
    assert explain(*(t.detach() for t in leaves), low).startswith("route torch")
    with torch.no_grad():
        assert explain(*leaves, low).startswith("route torch")


def test_by_name_torchs_kernel_is_refused_with_the_reason() -> None:
    leaves, mask = _masked(64)
    if not is_shown(FAULTS[0], FLOAT32):
        pytest.skip("the installed torch is mended")
    with pytest.raises(UnsupportedAttention, match="row of a float mask holds very large numbers only"):
        sdpa(*leaves, mask, config=TORCH)


def test_scales_that_are_not_positive() -> None:
    leaves = [t.detach() * 8 for t in _masked(64)[0]]
    keep = torch.ones(64, 64, dtype=torch.bool).tril()
    for scale in (0.0, -0.7):
        for options in ({}, {"is_causal": True}, {"mask": keep}):
            mask = options.get("mask")
            rest = {"scale": scale, "is_causal": "is_causal" in options}
            for config in CONFIGS.values():
                attend = lambda *a, c=config, **o: sdpa(*a, config=c, **o)  # noqa: E731
                assert max(_errors(attend, leaves, mask, **rest)) < 1e-5


def test_float32_masks_of_float64_queries() -> None:
    leaves = [t.detach() for t in _masked(64, torch.float64)[0]]
    mask = torch.randn(64, 64)
    for config in CONFIGS.values():
        assert max(_errors(lambda *a, c=config: sdpa(*a, config=c), leaves, mask)) < 1e-10


def _examples() -> dict[str, tuple[list[Tensor], Tensor | None, dict[str, Any]]]:
    leaves, mask = _masked(64)
    wide = [t.detach() for t in _masked(64, torch.float64)[0]]
    without_keys = torch.ones(64, 64, dtype=torch.bool)
    without_keys[5] = False
    detached = [t.detach() for t in leaves]
    return {
        FAULTS[0].name: (leaves, mask, {}),
        FAULTS[1].name: (detached, without_keys, {}),
        FAULTS[2].name: (detached, torch.randn(64, 1), {}),
        FAULTS[3].name: ([(100 * t).half() for t in detached], None, {}),
        FAULTS[4].name: (detached, None, {"scale": 0.0, "is_causal": True}),
        FAULTS[5].name: (wide, torch.randn(128, 64)[:64], {}),
    }


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_list_is_that_of_the_installed_torch(fault: torch_faults.Fault) -> None:
    """Where torch's kernel is wrong the probe finds it, and where it is right the probe does not."""
    leaves, mask, options = _examples()[fault.name]
    call = check_call(*leaves, mask, **options)
    assert fault.concerns(call)
    assert fault.is_in is None or fault.is_in(call)
    errors = _errors(lambda *a, is_causal=False, **o: torch_sdpa(*a, 0.0, is_causal, **o), leaves, mask, **options)
    assert is_shown(fault, Kind.of(call)) == (max(errors) > (1e-2 if leaves[0].dtype == torch.float16 else 1e-3))


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """A CPU of which nothing is known yet."""
    with using(Runtime(CPU)) as fresh:
        yield fresh


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_mended_torch_is_used_again(fault: torch_faults.Fault, runtime: Runtime) -> None:
    leaves, mask, options = _examples()[fault.name]
    call = check_call(*leaves, mask, **options)
    for shown in (True, False):
        runtime.part(ShownFaults).found[fault.name, Kind.of(call)] = shown
        form = find_form(call, 1 << 22)
        assert form == [fault.reason.format(call=call)] if shown else not isinstance(form, list)


def test_the_probe_is_not_disturbed_by_what_surrounds_the_call(runtime: Runtime) -> None:
    found = runtime.part(ShownFaults).found
    expected = is_shown(FAULTS[0], FLOAT32)
    state = torch.get_rng_state()
    leaves, mask = _masked(64)
    for surroundings in (torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(), switch.patch_sdpa()):
        found.clear()
        with surroundings:
            assert is_shown(FAULTS[0], FLOAT32) == expected
    found.clear()
    torch.func.vmap(lambda x: (x, is_shown(FAULTS[0], FLOAT32))[0])(torch.zeros(2))
    assert found[FAULTS[0].name, FLOAT32] == expected
    torch.set_rng_state(state)
    found.clear()
    sdpa(*leaves, mask)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_probe_is_made_once_and_not_before_a_call_needs_it(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(torch_faults, "_try", lambda *a: made.append(a[0].name) or True)
    leaves, mask = _masked(32)
    sdpa(*leaves)
    assert made == []
    long = AttentionConfig(math_limit_mib=0)
    for _ in range(2):
        sdpa(*(t.detach() for t in leaves), mask, config=long)
        assert made == [FAULTS[1].name]
    for _ in range(2):
        sdpa(*leaves, mask, config=long)
        assert made == [FAULTS[1].name, FAULTS[0].name]


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_of_the_calls_that_a_fault_concerns_those_without_such_values_keep_torchs_kernel(
    runtime: Runtime, kind: str
) -> None:
    for mask_dtype in (torch.bool, torch.float32):
        runtime.part(ShownFaults).found[FAULTS[1].name, FLOAT32._replace(mask=mask_dtype)] = True
    tensors = [torch.randn(1, 2, 64, 16) for _ in range(3)]
    mask = torch.ones(2, 1, 64, 64, dtype=torch.bool).tril_().narrow(0, 0, 1)
    empty = mask.clone()
    empty[..., 7, :] = False
    for given, reasons in ((mask, 0), (empty, 1)):
        given = given if kind == "bool" else torch.zeros(given.shape).masked_fill_(~given, -torch.inf)
        form = find_form(check_call(*tensors, given), 1 << 22)
        assert isinstance(form, list) == bool(reasons)


def test_a_probe_without_memory_is_not_an_answer(runtime: Runtime) -> None:
    def fails(kind: Kind) -> bool:
        raise error

    found = runtime.part(ShownFaults).found
    fault = torch_faults.Fault("a test", "", lambda call: True, fails)
    error: Exception
    for no_memory in (
        torch.cuda.OutOfMemoryError("a test"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ):
        error = no_memory
        assert is_shown(fault, FLOAT32)
        assert not found
    error = RuntimeError("could not construct a memory descriptor")
    assert is_shown(fault, FLOAT32)
    assert found


# ---- rows that overlap ---------------------------------------------------------------------------------------------


def _overlapping(*lead: int, tokens: int, head_dim: int, step: int, dtype: torch.dtype) -> Tensor:
    """Rows that begin ``step`` elements after each other."""
    size = tokens * head_dim
    strides = [size]
    for length in reversed(lead[1:]):
        strides.insert(0, strides[0] * length)
    base = torch.randn(torch.Size(lead).numel() * size).to(dtype)
    return base.as_strided((*lead, tokens, head_dim), (*strides, step, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize(("lead", "step"), [((2, 3), 0), ((2, 3), 3), ((2, 1, 3), 1), ((), 3)], ids=str)
def test_overlapping_rows(which: str, lead: tuple[int, ...], step: int, dtype: torch.dtype) -> None:
    tensors = []
    for name, tokens in (("query", 40), ("key", 57), ("value", 57)):
        overlaps = which == name
        tensor = _overlapping(*(lead or (1,)), tokens=tokens, head_dim=8, step=step if overlaps else 8, dtype=dtype)
        tensor = tensor if lead else tensor[0]
        assert rows_overlap(tensor) == overlaps
        tensors.append(tensor.requires_grad_())
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    configs = [*CONFIGS.values(), TORCH, AttentionConfig(math_limit_mib=0, budget_mib=1 / 16)]
    if not lead:
        configs = configs[:-1]
    for config in configs:
        for needs_grad in (False, True):
            given = tensors if needs_grad else [t.detach() for t in tensors]
            try:
                errors = _errors(lambda *a, c=config: sdpa(*a, config=c), given)
            except UnsupportedAttention:
                assert config is TORCH
                continue
            assert max(errors) < tolerance


@pytest.mark.parametrize("tokens", [20, 600])
@pytest.mark.parametrize("strides", [(0, 1, 128, 1), (1, 64 * 700, 64, 1), (1, 64, 128, 1)], ids=str)
def test_queries_whose_heads_or_batch_elements_begin_one_element_apart(tokens: int, strides: tuple[int, ...]) -> None:
    shape = (1 if strides[0] == 0 else 2, 2, tokens, 64)
    query = torch.randn(200_000).as_strided(shape, strides)
    key, value = (torch.randn(*shape[:2], 33, 64) for _ in range(2))
    expected = _plain(query, key, value)
    for function in (sdpa, F.scaled_dot_product_attention):
        freed = [torch.full(shape, 1e30) for _ in range(4)]  # what memory that is not written to may hold
        del freed
        with switch.patch_sdpa():
            torch.testing.assert_close(function(query, key, value), expected, atol=1e-5, rtol=1e-5)


def test_a_view_that_overlaps_nothing_stays_a_view() -> None:
    query = torch.randn(2, 50, 3, 8)
    for tensor in (query.transpose(1, 2), query[:, ::2].transpose(1, 2), query.permute(0, 2, 3, 1), query[:, :1]):
        assert not rows_overlap(tensor)
    assert rows_overlap(query[..., :1].expand_as(query))
    assert rows_overlap(query[:, :, :1].expand_as(query))


def test_too_large_to_be_copied_they_go_by_tiles() -> None:
    query = _overlapping(1, 2, tokens=500, head_dim=64, step=2, dtype=torch.float32)
    config = AttentionConfig(math_limit_mib=0, budget_mib=0.2)
    assert explain(query, query, query, config=config).startswith("route tiled: its rows are not contiguous or overlap")
    assert max(_errors(lambda *a: sdpa(*a, config=config), [query] * 3)) < 1e-5


def test_the_fused_kernels_only_read_them() -> None:
    query = _overlapping(1, 2, tokens=50, head_dim=64, step=4, dtype=torch.float32)
    assert call_reasons(check_call(query, query, query)) == []
    odd = _overlapping(1, 2, tokens=50, head_dim=64, step=3, dtype=torch.float32)
    assert "rows must be contiguous" in call_reasons(check_call(odd, odd, odd))[0]


# ---- kernels that do not run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [16, 700])
@pytest.mark.parametrize("entry", ["sdpa", "switch", "gradients"])
def test_a_kernel_that_torch_promises_and_that_raises_is_left_with_one_warning(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tokens: int, entry: str
) -> None:
    def lying(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError(f"USE_FLASH_ATTENTION was not enabled for build. {entry} {tokens}")

    leaves = [torch.randn(1, 2, tokens, 16, requires_grad=entry == "gradients") for _ in range(3)]
    expected = _plain(*leaves)
    for module in (interception, switch):
        monkeypatch.setattr(module, "TORCH_SDPA", lying)
    for _ in range(2):
        with switch.patch_sdpa():
            out = (F.scaled_dot_product_attention if entry == "switch" else sdpa)(*leaves)
        torch.testing.assert_close(out, expected)
    if entry == "gradients":
        out.sum().backward()
    assert len([each for each in caplog.records if "USE_FLASH_ATTENTION" in each.message]) == 1
    assert "raised: USE_FLASH_ATTENTION" in explain(*leaves)
    with pytest.raises(UnsupportedAttention, match="raised: USE_FLASH_ATTENTION"):
        sdpa(*leaves, config=TORCH)


def test_a_lack_of_memory_in_torchs_kernel_is_no_broken_promise(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short_of_memory(*args: Any, **kwargs: Any) -> Tensor:
        raise torch.cuda.OutOfMemoryError("a test")

    query = torch.randn(1, 2, 700, 16)
    with monkeypatch.context() as patched:
        patched.setattr(interception, "TORCH_SDPA", short_of_memory)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            sdpa(query, query, query)
    assert explain(query, query, query).startswith("route torch")


def test_nothing_is_probed_on_import() -> None:
    run("import pascal_attn_core, pascal_attn_core.machine.runtime as r; assert not r.runtimes()")
