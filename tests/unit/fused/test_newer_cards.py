"""Which route a call takes on a card of compute capability 9.0, whose torch answers as it does there."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from attn_support.fused.device import UncheckedKernels, emulated_card, fresh_card
from attn_support.fused.driver import StandIn
from attn_support.fused.emulation import T4
from torch import Tensor

from pascal_attn_core import AttentionConfig, explain
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.gpu.cuda import CudaRuntime
from pascal_attn_core.routes import prepared, short, torch_kernel

H200 = replace(T4, name="NVIDIA H200", capability=(9, 0), num_sms=132)
MATH, FLASH, EFFICIENT = 0, 1, 2


def _choice(query: Tensor, key: Tensor, value: Tensor, mask: Any, *options: Any) -> int:
    if query.shape[1] > key.shape[1] and (query.dtype == torch.float32 or mask is not None):
        return MATH  # the memory-efficient kernel takes no grouped heads
    return FLASH if mask is None and query.dtype != torch.float32 else EFFICIENT


@pytest.fixture(autouse=True)
def torch_answers(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_our_kernel_is_a_candidate(name: str, ratio: float | None, expected: str) -> None:
    with emulated_card(lambda launch: None, H200, UncheckedKernels, ratio=ratio):
        assert _explained(name).startswith(expected)


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
