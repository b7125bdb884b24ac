"""When ``auto`` takes the tensor cores: where a timing on the card says so, and nowhere else.

Which route a call takes on a card of compute capability 9.0, whose torch answers as it does there.
"""

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attn_support.fused.device import UncheckedKernels, emulated_card, fresh_card, route_of
from attn_support.fused.driver import StandIn
from attn_support.fused.emulation import CARD, GXX, T4, V100
from torch import Tensor

from pascal_attn_core import AttentionConfig, explain, sdpa_backward
from pascal_attn_core.call import check_call
from pascal_attn_core.fused.code import prebuilt
from pascal_attn_core.fused.code.source import Variant, all_variants, source
from pascal_attn_core.fused.gpu.cuda import CudaRuntime
from pascal_attn_core.fused.launch.plan import tensor_plan
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.runtime import runtime_of
from pascal_attn_core.routes import prepared, short, torch_kernel
from pascal_attn_core.routes.timing import Times, Timings

GTX_1650 = replace(T4, name="GTX 1650", num_sms=14)  # says 7.5 as well, and has no tensor cores


def _fresh(card: DeviceInfo, clock: Any, **options: Any) -> Any:
    return fresh_card(StandIn(card), clock, kind=UncheckedKernels, **options)


def _timed(card: DeviceInfo, times: Times | None, **options: Any) -> Any:
    """A card on which nothing is executed, and kernels were timed."""
    return emulated_card(lambda launch: None, info=card, times=times, **options)


def _clock(
    on_tensor_cores: float, plain: float, by_torch: float, seen: list[bool] | None = None
) -> Callable[..., list[float]]:
    """Milliseconds of what is timed, in the order in which it is; nothing is run. ``seen``: whether gradients were."""

    def times(attempts: list[Callable[[], Any]], device: torch.device) -> list[float]:
        if seen is not None:
            seen.append(torch.is_grad_enabled())
        return [on_tensor_cores, plain, by_torch][: len(attempts)]

    return times


def _query(tokens: int = 600, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(1, 2, tokens, 64).to(dtype)


def _route(query: torch.Tensor, **options: Any) -> str:
    return route_of(query, query, query, **options)


@pytest.mark.parametrize(
    ("card", "times", "expected", "of_window"),
    [
        (T4, (1.0, 9.0, 2.7), "fused-tensor", "fused-tensor"),
        (V100, (1.0, 9.0, 2.7), "fused-tensor", "fused-tensor"),
        (GTX_1650, (3.0, 2.0, 2.5), "torch", "fused"),  # plain cores are faster there
        (GTX_1650, (2.0, 3.0, 1.0), "torch", "fused-tensor"),
        (replace(T4, name="RTX 2070"), (1.0, 9.0, 0.9), "torch", "fused-tensor"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_timing_decides(card: DeviceInfo, times: tuple[float, float, float], expected: str, of_window: str) -> None:
    """Torch has no kernel for windows: there ours on plain cores is the other one."""
    with _fresh(card, _clock(*times), work_per_sm=1 << 40):
        query = _query()
        assert _route(query) == expected
        assert _route(query, window=(64, 0)) == of_window


@pytest.mark.parametrize(
    ("card", "options", "expected"),
    [
        (T4, {}, "fused-tensor"),
        (T4, {"is_causal": True}, "torch"),
        (T4, {"window": (64, 0)}, "fused"),
        (GTX_1650, {}, "torch"),  # which has no tensor cores
        (V100, {}, "torch"),
    ],
    ids=str,
)
def test_without_a_timing_only_what_was_measured_is_taken_for_granted(
    card: DeviceInfo, options: dict[str, Any], expected: str
) -> None:
    with _timed(card, None):
        assert _route(_query(), **options) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types_are_never_squeezed_through_float16(dtype: torch.dtype) -> None:
    with _timed(T4, Times(9.0, 9.0), ratio=0.5) as kernels:
        _route(_query(dtype=dtype))
        _back(_query(dtype=dtype))
    assert kernels.queued[-1].variant.kind == "grad_key_value"
    assert not any(launch.variant.on_tensor_cores for launch in kernels.queued)


@pytest.mark.parametrize("capability", [(6, 1), (8, 0), (8, 6), (9, 0)])
def test_newer_cards_take_it_where_torch_has_no_flash_attention(capability: tuple[int, int]) -> None:
    is_newer = capability >= (8, 0)
    with _timed(replace(T4, capability=capability), Times(9.0, 9.0)):
        assert (_route(_query(), window=(64, 0)) == "fused-tensor") == is_newer
        if is_newer:
            assert _route(_query()) == "torch"  # flash attention, by the answer of this CPU
            assert _route(_query(), config=AttentionConfig(route="fused-tensor")) == "fused-tensor"


def test_gradients_are_timed_with_the_forward_pass() -> None:
    seen: list[bool] = []
    leaf = _query().requires_grad_()
    with _fresh(T4, _clock(1.0, 2.0, 3.0, seen=seen)):
        assert _route(leaf) == "fused-tensor"
        assert [kind.gradients for kind in runtime_of(leaf.device).part(Timings).known] == seen == [True]


def _back(query: torch.Tensor, **options: Any) -> None:
    """From results that nobody has computed: which kernels take them is all that is asked."""
    sdpa_backward(query, query, query, query, query, query[..., 0].float(), **options)


@pytest.mark.parametrize(
    ("card", "times", "head_dim", "expected"),
    [
        (T4, Times(0.9, 3.0), 64, "tensor_"),  # torch's kernel, faster or not, cannot go back from given results
        (V100, Times(2.0, 3.0), 64, "volta_"),
        (T4, Times(2.0, None), 64, "tensor_"),
        (GTX_1650, Times(2.0, 0.8), 64, ""),
        (T4, None, 64, ""),
        (T4, Times(2.0, 3.0), 160, ""),  # there its gradients are those on plain cores
        (replace(T4, capability=(8, 6)), Times(2.0, 3.0), 64, "tensor_"),
    ],
)
def test_gradients_of_given_results(card: DeviceInfo, times: Times | None, head_dim: int, expected: str) -> None:
    with _timed(card, times) as kernels:
        _back(torch.randn(1, 2, 300, head_dim).half())
        kinds = [launch.variant.kind for launch in kernels.queued]
    names = ["grad_query", "grad_query", "grad_key_value"]  # delta, and the two gradients
    assert kinds == ([expected + name for name in names] if expected else ["grad_all"] * 3)


def _plan(q: tuple[int, ...], k: tuple[int, ...], card: DeviceInfo = T4, **rules: Any) -> Any:
    tensors = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in (q, k, k))
    assert card.capability is not None
    return tensor_plan(check_call(*tensors, enable_gqa=True, **rules), card.num_sms, card.capability)


@pytest.mark.parametrize("card", [T4, V100], ids=lambda card: card.name)
def test_long_calls_take_wide_tiles_and_new_tokens_fill_the_card(card: DeviceInfo) -> None:
    assert not _plan((2, 10, 4096, 64), (2, 10, 4096, 64), card).forward.is_small
    decode = _plan((1, 32, 1, 128), (1, 8, 8192, 128), card)
    assert decode.forward.is_small
    assert 8 * decode.splits >= card.num_sms
    short = _plan((1, 8, 256, 64), (1, 8, 77, 64), card)  # a wide tile for each head would leave most of the card idle
    assert short.forward.is_small


def test_a_plan_names_the_kernels_of_the_generation() -> None:
    for capability, kind in (((7, 0), "volta"), ((7, 2), "volta"), ((7, 5), "tensor"), ((8, 6), "tensor")):
        variant = _plan((1, 10, 4096, 64), (1, 10, 4096, 64), replace(T4, capability=capability)).forward
        assert variant.kind == kind
        assert variant.runs_on(capability)


def test_large_tiles_are_asked_for_before_they_are_launched() -> None:
    """A card that has not as much leaves the call to others."""
    large = Variant("tensor", 128, "float16")
    assert large.dynamic_bytes > 48 << 10
    with fresh_card(StandIn(T4)) as kernels:
        for variant in (large, Variant("tensor", 32, "float16")):
            kernels.functions(variant)
            assert kernels.driver.asked["cuFuncSetAttribute"] == 1
    driver = StandIn(T4)
    driver.faults["cuFuncSetAttribute"] = 1
    query = torch.randn(1, 80, 600, 128).half()
    with fresh_card(driver, _clock(1.0, 2.0, 3.0), kind=UncheckedKernels) as kernels:
        assert _route(query) == "torch"
        assert "cuFuncSetAttribute" in next(iter(kernels._refused.values()))[0]


def test_what_ships_runs_on_its_card_without_a_compiler() -> None:
    plain = Variant("forward", 64, "float32")
    for (major, minor), kind in (((7, 5), "tensor"), ((7, 0), "volta"), ((7, 2), "volta")):
        on_tensor_cores = [v for v in prebuilt.all_variants((major, minor)) if v.on_tensor_cores]
        assert {variant.head_dim for variant in on_tensor_cores} >= {32, 64, 80, 96, 128}
        for variant in on_tensor_cores:
            assert variant.kind.startswith(kind)
            assert prebuilt.find(variant, f"sm_{major}{minor}") is not None
        assert prebuilt.find(plain, f"sm_{major}{minor}") == prebuilt.load(plain, 70)
    assert not any(variant.on_tensor_cores for variant in prebuilt.all_variants(CARD.capability))


def test_every_variant_fits_the_shared_memory_of_its_cards() -> None:
    for variant in all_variants():
        if variant.on_tensor_cores:
            of_block = variant.tile_bytes + variant.own_bytes
            assert of_block * variant.geometry.blocks <= (64 if variant.kind.startswith("tensor") else 96) << 10


@pytest.mark.skipif(GXX is None, reason="needs g++ to compute what the macros say")
@pytest.mark.parametrize("kind", ["tensor", "tensor_grad_query"])
def test_the_shared_memory_asked_for_is_what_the_source_declares(tmp_path: Path, kind: str) -> None:
    """SMEM_BYTES, as a compiler computes it from the macros of each variant."""
    is_gradient = "grad" in kind
    variants = [v for v in all_variants() if v.on_tensor_cores and v.is_gradient == is_gradient]
    one_line = re.compile(r"#define [A-Z0-9_]+(?:\([a-z, ]*\))? .*[^\\]$")
    defines = [line for line in source(kind).splitlines() if one_line.match(line)]
    text = ["#include <cstdio>", "int main() {"]
    for variant in variants:
        names = [f"#define {name} {value}" for name, value in variant.macros().items() if isinstance(value, int)]
        text += [*names, 'printf("%d\\n", (int)(SMEM_BYTES));', *(f"#undef {line.split()[1]}" for line in names)]
    text.insert(1, "\n".join(defines))
    (tmp_path / "print.cpp").write_text("\n".join([*text, "}"]))
    subprocess.run([GXX, "-w", tmp_path / "print.cpp", "-o", tmp_path / "print"], check=True)
    found = subprocess.run([tmp_path / "print"], check=True, capture_output=True, text=True).stdout.split()
    assert [int(n) for n in found] == [variant.tile_bytes for variant in variants]


def _chosen(heads: int, tokens: int, keys: int | None = None, **rules: Any) -> tuple[str, int]:
    """The kind of kernel on a T4, and into how many ranges it cuts the keys."""
    found = _plan((1, heads, tokens, 64), (1, heads, keys or tokens, 64), **rules)
    return found.forward.kind, found.splits


def test_short_calls_take_small_tiles_where_their_busiest_multiprocessor_has_less_to_do() -> None:
    """Under a causal rule large tiles spend a third of 512 tokens beyond their diagonals."""
    assert _chosen(16, 512) == _chosen(8, 1024) == ("tensor", 0)
    assert _chosen(8, 512, is_causal=True) == ("tensor_small", 1)
    assert _chosen(16, 512, is_causal=True) == ("tensor", 0)  # its last blocks would end later
    assert _chosen(8, 1024, is_causal=True) == ("tensor_even", 0)
    assert _chosen(32, 2048, is_causal=True) == ("tensor_even", 0)
    assert _plan((1, 8, 2048, 96), (1, 8, 2048, 96), is_causal=True).forward.kind == "tensor_even"  # of two blocks
    kind, splits = _chosen(8, 1, 4096)
    assert (kind, splits > 1) == ("tensor_small", True)
    assert _chosen(8, 1, 4096, is_causal=True, alignment="lower_right") == (kind, splits)
    # A window leaves no keys to cut.
    assert _chosen(8, 1, 4096, window=(63, 0), alignment="lower_right") == ("tensor_small", 1)


H200 = replace(T4, name="NVIDIA H200", capability=(9, 0), num_sms=132)
MATH, FLASH, EFFICIENT = 0, 1, 2


def _choice(query: Tensor, key: Tensor, value: Tensor, mask: Any, *options: Any) -> int:
    if query.shape[1] > key.shape[1] and (query.dtype == torch.float32 or mask is not None):
        return MATH  # the memory-efficient kernel takes no grouped heads
    return FLASH if mask is None and query.dtype != torch.float32 else EFFICIENT


@pytest.fixture
def torch_answers_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "sdp_choice", _choice)
    monkeypatch.setattr(torch_kernel, "sdp_choice", _choice)
    monkeypatch.setattr(short, "fused_takes", lambda call, *tensors: _choice(*tensors) > MATH)


def _tensors(dtype: torch.dtype, *, kv_heads: int = 8, tokens: int = 300, head_dim: int = 64, keys: int = 300) -> Any:
    query = torch.randn(1, 8, tokens, head_dim).to(dtype)
    return query, *(torch.randn(1, kv_heads, keys, head_dim).to(dtype) for _ in range(2))


CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "float16": (_tensors(torch.float16), {}),
    "float32": (_tensors(torch.float32), {}),
    "head_dim 40": (_tensors(torch.float32, head_dim=40), {}),
    "mask": (_tensors(torch.float32), {"attn_mask": torch.ones(300, 300, dtype=torch.bool).tril()}),
    "decoding": (_tensors(torch.float32, kv_heads=2, tokens=1, keys=2048), {"enable_gqa": True}),
    "GQA": (_tensors(torch.float32, kv_heads=2), {"enable_gqa": True}),
}


def _explained(name: str) -> str:
    inputs, options = CALLS[name]
    return explain(*inputs, **options, config=AttentionConfig(math_limit_mib=0)).splitlines()[0]


@pytest.mark.parametrize(
    ("name", "ratio", "expected"),
    [
        ("float16", 0.5, "route torch"),  # flash attention is not timed
        ("float32", 0.9, "route fused: timed on this card at 0.90"),
        ("float32", 1.1, "route torch: torch has a fused kernel for it (ours was timed on this card at 1.10"),
        ("float32", None, "route torch"),
        ("head_dim 40", None, "route fused: untimed"),
        ("mask", None, "route fused: untimed"),
        ("decoding", None, "route fused: torch has no fused kernel that takes it as it is (GQA folded into rows)"),
        ("decoding", 3.0, "route torch"),
        ("GQA", 0.6, "route fused: timed"),
    ],
)
@pytest.mark.usefixtures("torch_answers_as_there")
def test_our_kernel_is_a_candidate(name: str, ratio: float | None, expected: str) -> None:
    with emulated_card(lambda launch: None, H200, UncheckedKernels, ratio=ratio):
        assert _explained(name).startswith(expected)


@pytest.mark.usefixtures("torch_answers_as_there")
def test_without_our_kernel_tiles_and_torchs_rewritten_form_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_kernel, "CPU_LIKE", ("cpu", "meta"))
    monkeypatch.setattr("pascal_attn_core.routes.tiled.CPU_LIKE", ("meta",))
    for tiles, expected in ((1.0, "route tiled: timed on this card at 0.25"), (9.0, "route torch: torch has")):

        def clock(attempts: list[Any], device: torch.device, tiles: float = tiles) -> list[float]:
            return [tiles, 4.0][: len(attempts)]

        with fresh_card(StandIn(H200), clock, kind=UncheckedKernels) as kernels:
            monkeypatch.setattr(type(kernels), "machine_reasons", ("there is no driver",))
            assert _explained("decoding").startswith(expected)


@pytest.mark.parametrize(("arch", "expected"), [("sm_75", 4), ("sm_80", 0), ("sm_90", 0)])
def test_two_numbers_become_halves_by_one_instruction(arch: str, expected: int) -> None:
    compiler = Mock()
    CudaRuntime(find_compiler=lambda number: compiler).compile(Variant("tensor", 64, "float16"), arch)
    assert compiler.compile.call_args.args[2]["PA_INTEGER_PACKED"] == expected
