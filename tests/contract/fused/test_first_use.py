"""The first call that needs a kernel checks it and may time it; nothing of the route is replaced but the driver."""

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attn_support.fused.device import CardKernels, always_faster, execute, fresh_card
from attn_support.fused.driver import StandIn
from attn_support.fused.emulation import emulate
from attn_support.fused.hip import HipStandIn
from attn_support.fused.modes import MODES
from attn_support.randomness import some
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pascal_attn_core import AttentionConfig, UnsupportedAttention, record, sdpa
from pascal_attn_core.call import check_call
from pascal_attn_core.fused.code.source import Variant, source
from pascal_attn_core.fused.launch import Launch
from pascal_attn_core.fused.trust import verify
from pascal_attn_core.machine.runtime import runtime_of
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes import prepared
from pascal_attn_core.routes.timing import Timings, kind_of
from pascal_attn_core.stand_ins.sageattention import sageattn

FUSED, AUTO = AttentionConfig(route="fused"), AttentionConfig(math_limit_mib=0)  # no call is too short for it
CPU = torch.device("cpu")


@pytest.fixture(params=["NVIDIA", "AMD"])
def kernels(request: pytest.FixtureRequest) -> Iterator[CardKernels]:
    """The kernels of a card on which none has ever run."""
    is_amd = request.param == "AMD"
    # On AMD's ours is timed against torch's math attention, which the emulation cannot win.
    driver, clock = (HipStandIn(execute=execute), always_faster) if is_amd else (StandIn(execute=execute), None)
    with fresh_card(driver, clock) as made:
        yield made


def _leaves(tokens: int = 70, head_dim: int = 64, *, requires_grad: bool = True) -> list[Tensor]:
    return [torch.randn(1, 2, tokens, head_dim).requires_grad_(requires_grad) for _ in range(3)]


def _check_gradients(out: Tensor, leaves: list[Tensor], **options: Any) -> None:
    wide = [t.detach().double().requires_grad_() for t in leaves]
    expected = torch.autograd.grad(reference_sdpa(*wide, **options)[0].square().sum(), wide)
    out.square().sum().backward()
    for leaf, wanted in zip(leaves, expected):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad.double(), wanted, atol=1e-4, rtol=1e-4)
        leaf.grad = None


@pytest.mark.parametrize("is_right", [True, False])
def test_sageattn_in_8_bits_takes_a_kernel_that_was_checked_and_else_is_exact(is_right: bool) -> None:
    """As by the route's name: what is asked for by name has no trial in a process of its own."""
    inputs, config = _leaves(requires_grad=False), AttentionConfig(route="fused-int8")
    driver = StandIn(execute=execute if is_right else lambda launch: None)
    with fresh_card(driver) as kernels, record() as seen:
        found = sageattn(*inputs, config=config)
        assert {variant.kind for variant in kernels._checked} == ({"int8"} if is_right else set())
        if not is_right:
            with pytest.raises(UnsupportedAttention, match="int8-64-float32-none differs from the definition by"):
                sdpa(*inputs, config=config)
    assert ("fused-int8" in seen.routes()) == is_right
    expected = reference_sdpa(*(t.double() for t in inputs))[0]
    assert is_right == bool(1e-3 < (found - expected).norm() / expected.norm() < 0.02)


@pytest.mark.parametrize(
    ("config", "options", "use_reentrant"),
    [(FUSED, {}, False), (AUTO, {"window": (20, 0)}, True)],
    ids=["by name", "auto"],
)
def test_the_first_training_step_with_gradient_checkpointing(
    kernels: CardKernels, config: AttentionConfig, options: dict[str, Any], use_reentrant: bool
) -> None:
    leaves = _leaves()
    for _ in range(2):
        out = checkpoint(lambda *t: sdpa(*t, config=config, **options), *leaves, use_reentrant=use_reentrant)
        _check_gradients(out, leaves, **options)
    assert _gradients_of(kernels) in ({"grad_all"}, {"grad_query", "grad_key_value"})


def test_the_first_compiled_training_step(kernels: CardKernels) -> None:
    leaves = _leaves()
    compiled = torch.compile(lambda *t: sdpa(*t, config=FUSED), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        _check_gradients(compiled(*leaves), leaves)
    checks = sum(launch.function.startswith("pa_delta") for launch in kernels.queued) - 2
    assert checks == len(_gradients_of(kernels))  # each gradient kernel once, and not in every step


def _gradients_of(kernels: CardKernels) -> set[str]:
    """The kinds of the gradient kernels that were checked."""
    return {variant.kind for variant in kernels._checked if isinstance(variant, Variant) and variant.is_gradient}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_kind_of_call_is_timed_inside_of_gradient_checkpointing(tmp_path: Path, use_reentrant: bool) -> None:
    leaves = [torch.randn(1, 1, 60, 16).requires_grad_() for _ in range(3)]
    with fresh_card(StandIn(execute=execute), folder=lambda: tmp_path):
        known = runtime_of(CPU).part(Timings).known
        kinds = [kind_of(check_call(*some)) for some in (leaves, [t.detach() for t in leaves])]
        for step in range(2):
            out = checkpoint(lambda *t: sdpa(*t, config=AUTO), *leaves, use_reentrant=use_reentrant)
            assert step == 0 or kinds[0] in known
            _check_gradients(out, leaves)
            # Recomputation is part of the backward pass, in which another one must not be waited for.
            assert (kinds[0] in known) == (not use_reentrant or step == 1)
        assert set(known) == (set(kinds) if use_reentrant else {kinds[0]})
        assert all(known.values())
        text = next(tmp_path.glob("timings-*")).read_text()
        assert all(f'"{kind.kernel}"' in text for kind in known)


class Operators(TorchDispatchMode):
    """Counts what is dispatched."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Counts the functions of torch that are called."""

    count = 0
    __torch_function__ = Operators.__torch_dispatch__


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts the tensors that are saved for gradients."""

    count = 0

    def __init__(self) -> None:
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor: Tensor) -> Tensor:
        self.count += 1
        return tensor


@pytest.mark.parametrize("observer", [Operators, Functions, Saved])
def test_whoever_looks_sees_the_call_and_nothing_of_its_first_time(kernels: CardKernels, observer: Any) -> None:
    leaves, counts = _leaves(), []
    for _ in range(2):
        prepared.known.clear()
        with (seen := observer()):
            sdpa(*leaves, config=FUSED)
        counts.append(seen.count)
    assert counts[0] == counts[1] > 0
    assert kernels._checked


@pytest.mark.parametrize("mode", some(MODES, 3))
@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_first_call_may_be_made_in_any_mode(kernels: CardKernels, mode: str, requires_grad: bool) -> None:
    if requires_grad and mode in ("inference", "no_grad"):
        pytest.skip("has no gradients")
    leaves = _leaves(head_dim=16, requires_grad=requires_grad)
    with MODES[mode]():
        out = sdpa(*leaves, config=FUSED)
        grads = torch.autograd.grad(out.float().square().sum(), leaves) if requires_grad else ()
    assert all(grad.isfinite().all() for grad in grads)
    tolerance = 5e-2 if mode == "autocast" else 1e-5
    expected = reference_sdpa(*(t.detach() for t in leaves))[0]
    torch.testing.assert_close(out.detach().float(), expected, atol=tolerance, rtol=tolerance)
    assert len(kernels._checked) == 1 + len(_gradients_of(kernels))
    assert bool(_gradients_of(kernels)) == requires_grad


def test_no_thread_is_left_and_an_error_of_the_check_is_a_reason(kernels: CardKernels) -> None:
    before = threading.enumerate()

    kernels.driver.execute = Mock(side_effect=ZeroDivisionError("of the check"))
    with pytest.raises(UnsupportedAttention, match="of the check"):
        sdpa(*_leaves(), config=FUSED)
    assert threading.enumerate() == before


def test_an_interrupt_during_the_check_reaches_the_user(kernels: CardKernels) -> None:
    leaves, ended = _leaves(requires_grad=False), []

    def interrupted(launch: Launch) -> None:
        _thread.interrupt_main()
        execute(launch)
        ended.append(launch.function)

    kernels.driver.execute = interrupted
    before = threading.enumerate()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of the test run may ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            sdpa(*leaves, config=FUSED)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(ended) >= 1  # the check has ended before
    assert threading.enumerate() == before
    kernels.driver.execute = execute
    torch.testing.assert_close(sdpa(*leaves, config=FUSED), reference_sdpa(*leaves)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_the_gradients_that_it_expects_are_those_of_autograd(mask: str) -> None:
    call = verify._on_cpu(verify.sample_call(Variant("grad_query", 64, "float32", mask), CPU))
    leaves = [t.clone().requires_grad_() for t in (call.query, call.key, call.value)]
    rules: dict[str, Any] = {"is_causal": True, "enable_gqa": True, "alignment": "lower_right"}
    out, lse = reference_sdpa(*leaves, call.attn_mask, **rules)
    expected = torch.autograd.grad(out, leaves, verify._grad_out(call))
    for ours, theirs in zip(verify.expected_gradients(call, out.detach(), lse.detach()), expected):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", ["forward", "grad_query"])
def test_no_flag_of_the_process_changes_what_it_finds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 rounds the factors of torch's float32 products to 11 bits, where the flag allows that."""
    variant = Variant(kind, 64, "float32")

    def found() -> tuple[float, float]:
        return verify.largest_error(variant, CPU, emulate), verify.tolerance(variant)

    def rounded(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def short(t: Tensor) -> Tensor:
            if t.dtype != torch.float32 or torch.get_float32_matmul_precision() != "high":
                return t
            return ((t.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)

        return lambda one, other: product(short(one), short(other))

    before, precision = found(), torch.get_float32_matmul_precision()
    monkeypatch.setattr(torch, "matmul", rounded(torch.matmul))
    monkeypatch.setattr(Tensor, "__matmul__", rounded(Tensor.__matmul__))
    torch.set_float32_matmul_precision("high")
    try:
        assert found() == before
    finally:
        torch.set_float32_matmul_precision(precision)


def test_what_ships_is_loaded_checked_timed_and_launched(tmp_path: Path) -> None:
    leaves = [torch.randn(1, 1, 60, 64).half() for _ in range(3)]
    with fresh_card(StandIn(execute=execute), folder=lambda: tmp_path) as kernels, record() as report:
        out = sdpa(*leaves, config=AUTO)
        (ratio,) = runtime_of(CPU).part(Timings).ratios("torch").values()
        assert ratio is not None
        assert report.routes() == {"fused" if ratio < 1 else "torch": 1}
        assert kernels.gpu.find_compiler(61).compiled == []
        torch.testing.assert_close(sdpa(*leaves, config=FUSED), out, atol=2e-3, rtol=2e-3)
    assert {launch.variant.name for launch in kernels.queued} == {"split-64-float16-none"}


VARIANTS = (
    Variant("forward", 64, "float32"),
    Variant("forward", 128, "float16", "bool"),
    Variant("forward", 160, "float32", "float", True),
    Variant("split", 80, "bfloat16", "float"),
    Variant("grad_query", 40, "float32", "float"),
    Variant("grad_key_value", 64, "float16", "bool"),
    Variant("grad_all", 128, "float16"),
    Variant("int8", 64, "float32"),
    Variant("tensor_grad_query", 64, "float16"),
)
# One number or sign of the source made wrong.
WRONG = {
    "forward": ("sum > 0.f ? 1.f / sum : 0.f, p.dim_v", "sum > 0.f ? 1.1f / sum : 0.f, p.dim_v"),
    "split": ("out = fmaf(p.part_out", "out = fmaf(-p.part_out"),
    "grad_query": ("S[i][j] *= dP[i][j] - delta[i]", "S[i][j] *= dP[i][j] + delta[i]"),
    "grad_all": ("f.x = fmaf(O[i][4 * j], factor, f.x)", "f.x = fmaf(-O[i][4 * j], factor, f.x)"),
    "grad_key_value": ("S[i][j] * (dP[i][j] - delta)", "S[i][j] * dP[i][j]"),
    "int8": ("row_sum[i] *= fade;", ""),
    "tensor_grad_query": ("at.b * p.range + p.range_end", "p.range_end"),  # the second range of columns has none
}


@pytest.mark.parametrize("variant", some(VARIANTS, 2), ids=lambda variant: variant.name)
def test_a_right_kernel_passes_the_first_check_and_a_wrong_one_does_not(variant: Variant) -> None:
    tolerance, (right, wrong), text = verify.tolerance(variant), WRONG[variant.kind], source(variant.kind)
    assert verify.largest_error(variant, CPU, emulate) <= tolerance / 4
    assert right in text
    mutated = {variant.kind: text.replace(right, wrong)}
    assert verify.largest_error(variant, CPU, lambda some: emulate(some, mutated=mutated)) > tolerance
