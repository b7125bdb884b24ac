"""``pascal-attn bench --linear``: linear layers as real models have them, in float and in 8 bits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...fused.linear import LinearCall
from ...int8 import Int8Matrix, int8_linear, quantize_rows
from ...int8.backends import LinearWays
from ...machine.runtime import runtime_of
from .contest import BenchSettings, Entrant, Result, compete

BASELINE = "float32"


@dataclass(frozen=True)
class Layer:
    """One call of a linear layer: ``rows`` tokens, ``columns`` features in, ``outs`` out."""

    name: str
    what: str
    rows: int
    columns: int
    outs: int

    @property
    def text(self) -> str:
        """``"4608 x 3072 -> 12288"``."""
        return f"{self.rows} x {self.columns} -> {self.outs}"


LAYERS = (
    Layer("sdxl-attn", "SDXL 1024x1024, 640 channels, batch 2: to_q, to_out", 8192, 640, 640),
    Layer("sdxl-ff-in", "SDXL, 1280 channels, batch 2: GEGLU", 2048, 1280, 10240),
    Layer("sdxl-ff-out", "SDXL, 1280 channels, batch 2: out of the GEGLU", 2048, 5120, 1280),
    Layer("sdxl-text", "SDXL, 77 tokens of text, batch 2: to_k, to_v", 154, 2048, 1280),
    Layer("flux-qkv", "Flux 1024x1024: to_q, to_k, to_v", 4608, 3072, 3072),
    Layer("flux-ff-in", "Flux 1024x1024: into the feed-forward part", 4096, 3072, 12288),
    Layer("flux-ff-out", "Flux 1024x1024: out of the feed-forward part", 4096, 12288, 3072),
    Layer("flux-single", "Flux 1024x1024: linear1 of a single-stream block", 4608, 3072, 21504),
    Layer("flux-modulation", "Flux: modulation", 1, 3072, 18432),
    Layer("wan-1.3b", "Wan 1.3B 832x480, 81 frames: to_q, to_out", 32760, 1536, 1536),
    Layer("wan-1.3b-ff", "Wan 1.3B 832x480, 81 frames: into the feed-forward part", 32760, 1536, 8960),
    Layer("wan-14b-ff", "Wan 14B 832x480, 33 frames: into the feed-forward part", 14040, 5120, 13824),
    Layer("llm-decode", "a text model of 4B: one token", 1, 2560, 9728),
)
QUICK = ("sdxl-attn", "sdxl-ff-in", "sdxl-ff-out", "flux-qkv", "flux-modulation", "llm-decode")


def race_layer(layer: Layer, device: torch.device, settings: BenchSettings, *progress: Any) -> list[Result]:
    """Every way to compute a layer of normal random numbers, with a bias."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    x, weight, bias = normal(layer.rows, layer.columns), normal(layer.outs, layer.columns), normal(layer.outs)
    weight /= math.sqrt(layer.columns)
    sample = slice(None, None, max(1, layer.rows // 64))
    exact = F.linear(x[sample].double().cpu(), weight.double().cpu(), bias.double().cpu())

    def error_of(out: Tensor) -> float:
        """Root of the sum of squares, on some rows."""
        return ((out[sample].double().cpu() - exact).norm() / exact.norm()).item()

    operations = 2 * layer.rows * layer.columns * layer.outs
    return compete(_ways(x, weight, bias), error_of, operations, device, settings, *progress)


def _ways(x: Tensor, weight: Tensor, bias: Tensor) -> list[Entrant]:
    ways = []

    def add(name: str, fn: Callable[..., Any], *given: Any, ran: str = "") -> None:
        run = functools.partial(fn, *given)
        ways.append(Entrant(name, lambda: (run, run), ran))

    for name in (BASELINE, "float16", "bfloat16"):
        add(name, F.linear, *(t.to(getattr(torch, name)) for t in (x, weight, bias)))
    matrix = quantize_rows(weight)
    call = LinearCall(x, matrix, bias, "none", x.new_empty(x.shape[0], matrix.codes.shape[0]))
    backends = runtime_of(x.device).part(LinearWays)
    chosen = backends.chosen(call).name
    add("int8", int8_linear, x, matrix, bias, ran=chosen)
    for name in backends.able(call):
        if name != chosen:
            add(f"int8 by {name}", functools.partial(int8_linear, way=name), x, matrix, bias)
    rotation = next((group for group in (256, 64, 16) if x.shape[1] % group == 0), 0)
    if rotation:
        add(f"int8, rotated by {rotation}", int8_linear, x, quantize_rows(weight, rotation), bias, ran=chosen)
    add("int8 eager", eager, x, matrix, bias)
    return ways


def eager(x: Tensor, matrix: Int8Matrix, bias: Tensor) -> Tensor:
    """8 bits by torch's operators alone, as libraries without a kernel for a card do it: the weight is copied, and the
    32-bit sums and their float32 copy exist as a whole."""
    scale = x.abs().amax(dim=-1, keepdim=True).float() / 127
    codes = (x / scale).round_().clamp_(-128, 127).to(torch.int8)
    sums = torch._int_mm(codes, matrix.codes.t().contiguous()).float()
    return (sums * (scale * matrix.scales)).to(x.dtype) + bias
