"""The list of calls that torch's own kernels compute wrongly is held against the installed torch."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.autograd.forward_ad as fwAD
import torch.nn.functional as F
from attn_support.oracle import cast, gradients
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import pascal_attn_core.sdpa_patch as switch
from pascal_attn_core import AttentionConfig, UnsupportedAttention, explain, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.fused.launch.select import call_reasons
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.runtime import Runtime, using
from pascal_attn_core.patching import interception
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes import torch_faults, torch_kernel, why_not
from pascal_attn_core.routes.prepared import BY_TORCH, kind_of
from pascal_attn_core.routes.short import is_short
from pascal_attn_core.routes.torch_faults import FAULTS, FaultyKind, ShownFaults, is_shown, torch_sdpa
from pascal_attn_core.routes.torch_kernel import find_form
from pascal_attn_core.tiled.layout import rows_overlap

TORCH, TILED = AttentionConfig(route="torch"), AttentionConfig(route="tiled")
CPU = torch.device("cpu")
FLOAT32 = FaultyKind(CPU, torch.float32, torch.float32)


def _masked(length: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Inputs, and a causal mask whose first rows and columns are padding, as Transformers makes it."""
    leaves = [torch.randn(1, 2, length, 16, dtype=dtype).requires_grad_() for _ in range(3)]
    low = torch.finfo(dtype).min
    mask = torch.zeros(length, length, dtype=dtype).masked_fill(torch.ones(length, length).triu(1).bool(), low)
    mask[:, :5] = low
    return leaves, mask[None, None]


def _largest_error(attend: Any, leaves: list[Tensor], mask: Tensor | None = None, **options: Any) -> float:
    """Return the relative errors of the output and, where wanted, of the gradients, these by the largest of them."""
    wide = [cast(t, torch.float64 if leaves[0].dtype == torch.float64 else torch.float32) for t in (*leaves, mask)]
    out, expected = attend(*leaves, mask, **options), reference_sdpa(*wide, **options)[0]
    errors = [((out - expected).norm() / expected.norm()).nan_to_num(torch.inf, torch.inf).item()]
    if leaves[0].requires_grad:
        grad_out = torch.randn_like(out)
        found, right = gradients(out, leaves, grad_out), gradients(expected, wide[:3], grad_out)  # type: ignore[arg-type]
        size = max(grad.norm() for grad in right)
        errors += [((f - r).norm() / size).nan_to_num(torch.inf, torch.inf).item() for f, r in zip(found, right)]
    return max(errors)


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
    attend = lambda *a, is_causal=False, **o: torch_sdpa(*a, 0.0, is_causal, **o)  # noqa: E731
    is_wrong = _largest_error(attend, leaves, mask, **options) > (1e-2 if leaves[0].dtype == torch.float16 else 1e-3)
    assert is_shown(fault, FaultyKind.of(call)) == is_wrong


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
        runtime.part(ShownFaults).found[fault.name, FaultyKind.of(call)] = shown
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
    names = {fault.probe: fault.name for fault in FAULTS}
    monkeypatch.setattr(torch_faults, "in_own_thread", lambda probe, _: made.append(names[probe.func]) or True)
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
def test_of_the_calls_that_a_fault_concerns_those_without_such_values_keep_torchs_kernel(runtime, kind: str) -> None:
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
    found = runtime.part(ShownFaults).found
    words = "DefaultCPUAllocator: can't allocate memory", "could not construct a memory descriptor"
    for error in (torch.cuda.OutOfMemoryError("a test"), *map(RuntimeError, words)):
        assert is_shown(torch_faults.Fault("a test", "", lambda call: True, Mock(side_effect=error)), FLOAT32)
        assert bool(found) == ("descriptor" in str(error))


def _overlapping(tokens: int, step: int) -> Tensor:
    """Rows of 64 that begin ``step`` elements after each other."""
    return torch.randn(2 * tokens * 64).as_strided((1, 2, tokens, 64), (0, tokens * 64, step, 1))


def test_a_view_that_overlaps_nothing_stays_a_view() -> None:
    query = torch.randn(2, 50, 3, 8)
    for tensor in (query.transpose(1, 2), query[:, ::2].transpose(1, 2), query.permute(0, 2, 3, 1), query[:, :1]):
        assert not rows_overlap(tensor)
    assert rows_overlap(query[..., :1].expand_as(query))
    assert rows_overlap(query[:, :, :1].expand_as(query))


@pytest.mark.parametrize("which", range(3))
def test_one_tensor_whose_rows_overlap_keeps_a_call_from_being_short(which: int) -> None:
    given = [torch.randn(1, 2, 50, 64) for _ in range(3)]
    assert is_short(check_call(*given), AttentionConfig())
    given[which] = _overlapping(50, step=2)
    assert not is_short(check_call(*given), AttentionConfig())


def test_too_large_to_be_copied_they_go_by_tiles_and_the_fused_kernels_only_read_them() -> None:
    query = _overlapping(500, step=2)
    config = AttentionConfig(math_limit_mib=0, budget_mib=0.2)
    assert explain(query, query, query, config=config).startswith("route tiled: torch's kernel needs a copy")
    assert _largest_error(lambda *a: sdpa(*a, config=config), [query] * 3) < 1e-5
    query = _overlapping(50, step=4)
    assert call_reasons(check_call(query, query, query)) == []
    odd = _overlapping(50, step=3)
    assert "rows must be contiguous" in call_reasons(check_call(odd, odd, odd))[0]


@pytest.mark.parametrize(("queries", "keys"), [(20, 33_000), (33_000, 20)])
def test_products_that_an_apple_m1_adds_up_wrongly_are_not_made(queries: int, keys: int) -> None:
    leaves = [torch.randn(1, 1, tokens, 16, requires_grad=True) for tokens in (queries, keys, keys)]
    call = check_call(*leaves)
    with using(Runtime("cpu", DeviceInfo("mps", "Apple M1"))):
        assert _largest_error(lambda *inputs: sdpa(*inputs, config=TILED), leaves) < 1e-5
        generous = AttentionConfig(math_limit_mib=64)
        kind = kind_of(generous, (*leaves, None, 0.0, False, None, False))
        assert (kind == BY_TORCH) == (keys < queries)
        assert is_short(call, generous) == (not why_not("math", call, generous)) == (keys < queries)
    assert is_short(call, generous)


@pytest.mark.parametrize("tokens", [16, 700])
@pytest.mark.parametrize("entry", ["sdpa", "switch", "gradients"])
def test_a_kernel_that_torch_promises_and_that_raises_is_left_with_one_warning(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tokens: int, entry: str
) -> None:
    leaves = [torch.randn(1, 2, tokens, 16, requires_grad=entry == "gradients") for _ in range(3)]
    expected = reference_sdpa(*leaves)[0]
    for module in (interception, switch):
        error = RuntimeError(f"USE_FLASH_ATTENTION was not enabled for build. {entry} {tokens}")
        monkeypatch.setattr(module, "TORCH_SDPA", Mock(side_effect=error))
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


def test_a_call_that_torch_refuses_bans_its_kernel_for_calls_like_it_alone(runtime: Runtime, monkeypatch) -> None:
    """More heads than a grid has blocks, a kernel that a program forces, forward mode."""
    monkeypatch.setattr(torch_faults, "MOST_BLOCKS", 9)
    spatial, temporal = torch.randn(1, 2, 700, 16), torch.randn(1, 10, 700, 16)
    torchs = interception.TORCH_SDPA

    def refuses(query: Tensor, *rest: Any, **options: Any) -> Tensor:
        if query.shape[1] > 9 or not torch.backends.cuda.math_sdp_enabled() or fwAD._current_level >= 0:
            raise RuntimeError("CUDA error: invalid configuration argument")
        return torchs(query, *rest, **options)

    for module in (interception, switch):
        monkeypatch.setattr(module, "TORCH_SDPA", refuses)
    torch.testing.assert_close(sdpa(temporal, temporal, temporal), torchs(temporal, temporal, temporal))
    assert explain(temporal, temporal, temporal).startswith("route tiled")
    wide = torch.randn(1, 2, 700, 32)
    kinds = [kind_of(AttentionConfig(), (t, t, t, None, 0.0, False, None, False)) for t in (wide, temporal)]
    assert kinds[0] == BY_TORCH != kinds[1]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.testing.assert_close(sdpa(spatial, spatial, spatial), torchs(spatial, spatial, spatial))
    with fwAD.dual_level():
        sdpa(fwAD.make_dual(spatial, spatial), spatial, spatial)
    assert explain(spatial, spatial, spatial).startswith("route torch")


@pytest.mark.parametrize("mask", [None, (1, 1, 1, 16), (8, 1, 16, 16)])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_batches_beyond_a_grid_go_in_parts(mask: tuple | None, needs_grad: bool, monkeypatch: Any) -> None:
    leaves = [torch.randn(8, 2, 16, 4, requires_grad=needs_grad) for _ in range(3)]
    bias = None if mask is None else torch.randn(mask)
    expected = reference_sdpa(*leaves, bias)[0]
    monkeypatch.setattr(torch_kernel, "MOST_BLOCKS", 3)
    monkeypatch.setattr(torch_kernel, "CPU_LIKE", ())
    sizes: list[int] = []
    real = torch_kernel.torch_sdpa
    monkeypatch.setattr(
        torch_kernel, "torch_sdpa", lambda q, *rest, **options: sizes.append(len(q)) or real(q, *rest, **options)
    )
    out = torch_kernel.call_torch(check_call(*leaves, bias), *leaves, bias)
    torch.testing.assert_close(out, expected)
    assert sizes == [3, 3, 2]
    assert out.requires_grad == needs_grad


def test_a_lack_of_memory_in_torchs_kernel_is_no_broken_promise(runtime: Runtime, monkeypatch: Any) -> None:
    query = torch.randn(1, 2, 700, 16)
    with monkeypatch.context() as patched:
        patched.setattr(interception, "TORCH_SDPA", Mock(side_effect=torch.cuda.OutOfMemoryError("a test")))
        with pytest.raises(torch.cuda.OutOfMemoryError):
            sdpa(query, query, query)
    assert explain(query, query, query).startswith("route torch")
