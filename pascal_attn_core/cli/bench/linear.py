"""``pascal-attn bench --linear``: linear layers as real models have them, in float and in 8 bits."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...fused.linear import LinearCall
from ...int8 import Int8Matrix, int8_linear, quantize_rows
from ...int8.ways import way_of, ways_of
from ...observe.memory import measure
from ..tables import print_table
from .clock import Clock
from .report import MIB

BASELINE = "float32"
COLUMNS = ("", "ms", "vs float32", "TFLOP/s", "extra MiB", "weight MiB", "error", "")


@dataclass(frozen=True)
class Layer:
    """One call of a linear layer: ``rows`` tokens, ``columns`` features in, ``outs`` out."""

    name: str
    what: str
    rows: int
    columns: int
    outs: int
    quick: bool = False

    @property
    def text(self) -> str:
        """``"4608 x 3072 -> 12288"``."""
        return f"{self.rows} x {self.columns} -> {self.outs}"


LAYERS = (
    Layer("sdxl-attn", "SDXL 1024x1024, 640 channels, batch 2: to_q, to_out", 8192, 640, 640, quick=True),
    Layer("sdxl-ff-in", "SDXL, 1280 channels, batch 2: GEGLU", 2048, 1280, 10240, quick=True),
    Layer("sdxl-ff-out", "SDXL, 1280 channels, batch 2: out of the GEGLU", 2048, 5120, 1280, quick=True),
    Layer("sdxl-text", "SDXL, 77 tokens of text, batch 2: to_k, to_v", 154, 2048, 1280),
    Layer("flux-qkv", "Flux 1024x1024: to_q, to_k, to_v", 4608, 3072, 3072, quick=True),
    Layer("flux-ff-in", "Flux 1024x1024: into the feed-forward part", 4096, 3072, 12288),
    Layer("flux-ff-out", "Flux 1024x1024: out of the feed-forward part", 4096, 12288, 3072),
    Layer("flux-single", "Flux 1024x1024: linear1 of a single-stream block", 4608, 3072, 21504),
    Layer("flux-modulation", "Flux: modulation", 1, 3072, 18432, quick=True),
    Layer("wan-1.3b", "Wan 1.3B 832x480, 81 frames: to_q, to_out", 32760, 1536, 1536),
    Layer("wan-1.3b-ff", "Wan 1.3B 832x480, 81 frames: into the feed-forward part", 32760, 1536, 8960),
    Layer("wan-14b-ff", "Wan 14B 832x480, 33 frames: into the feed-forward part", 14040, 5120, 13824),
    Layer("llm-decode", "a text model of 4B: one token", 1, 2560, 9728, quick=True),
)


def choose_layers(patterns: str | None) -> list[Layer]:
    """Those that match comma-separated patterns; None or "quick" = the quick ones, "all" = all.

    Raises:
        ValueError: a pattern matches none.
    """
    if patterns in (None, "quick"):
        return [layer for layer in LAYERS if layer.quick]
    chosen: dict[str, Layer] = {}
    for pattern in filter(None, (patterns or "").split(",")):
        found = [layer for layer in LAYERS if pattern == "all" or fnmatch.fnmatchcase(layer.name, pattern)]
        if not found:
            raise ValueError(
                f"--shapes must name layers of {', '.join(layer.name for layer in LAYERS)}, got {pattern!r}"
            )
        chosen |= {layer.name: layer for layer in found}
    return list(chosen.values())


def own_layers(texts: list[str]) -> list[Layer]:
    """``["M=4096,K=640,N=2560"]``: M rows, K columns, N outputs.

    Raises:
        ValueError: it is not of this form.
    """
    layers = []
    for text in texts:
        sizes = dict(re.findall(r"(?:^|,)([MKN])=([1-9]\d*)(?=,|$)", text))
        if sizes.keys() != {"M", "K", "N"} or text.count(",") != 2:
            raise ValueError(f"--shape must be like M=4096,K=640,N=2560 with --linear, got {text!r}")
        rows, columns, outs = (int(sizes[name]) for name in "MKN")
        layers.append(Layer(text, "a layer of your own", rows, columns, outs))
    return layers


@dataclass
class Figure:
    """One way to compute a layer. None = not known; ``note`` says why.

    Attributes:
        seconds: the median over rounds; ratio: the median over rounds of its time by the baseline's in the same round.
        extra_bytes: peak memory besides input, weight and output; weight_bytes: of the weight as it is stored.
        error: relative error (root of the sum of squares), against float64, on some rows.
    """

    name: str
    seconds: float | None = None
    ratio: float | None = None
    flops: float | None = None
    extra_bytes: int | None = None
    weight_bytes: int | None = None
    error: float | None = None
    ran: str = ""
    note: str = ""


@dataclass
class _Way:
    name: str
    run: Callable[[], Tensor]
    weight_bytes: int
    ran: str = ""


def race_layer(layer: Layer, device: torch.device, clock: Clock, rounds: int, seconds: float) -> list[Figure]:
    """Every way on one layer, interleaved: normal random numbers, with a bias."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    x, weight, bias = normal(layer.rows, layer.columns), normal(layer.outs, layer.columns), normal(layer.outs)
    weight /= math.sqrt(layer.columns)
    sample = slice(None, None, max(1, layer.rows // 64))
    exact = F.linear(x[sample].double().cpu(), weight.double().cpu(), bias.double().cpu())
    figures, lanes = [], []
    for way in _ways(x, weight, bias):
        figure = Figure(way.name, weight_bytes=way.weight_bytes, ran=way.ran)
        figures.append(figure)
        try:
            found = measure(way.run)
            out = found.out[sample].double().cpu()
        except RuntimeError as error:  # a dtype or a size that the device does not take
            figure.note = str(error).strip().splitlines()[0][:90]
            continue
        figure.extra_bytes, figure.error = found.extra_bytes, ((out - exact).norm() / exact.norm()).item()
        lanes.append((figure, way))
    times: dict[str, list[float]] = {figure.name: [] for figure, _ in lanes}
    for _ in range(rounds):
        for figure, way in lanes:
            if sum(times[figure.name]) < seconds:
                times[figure.name].append(clock.seconds(way.run))
    base = times.get(BASELINE, [])
    for figure, _ in lanes:
        figure.seconds = statistics.median(times[figure.name])
        figure.flops = 2 * layer.rows * layer.columns * layer.outs / figure.seconds
        figure.ratio = (
            statistics.median(mine / other for mine, other in zip(times[figure.name], base)) if base else None
        )
    return figures


def _ways(x: Tensor, weight: Tensor, bias: Tensor) -> list[_Way]:
    ways = []
    for name in ("float32", "float16", "bfloat16"):
        given = [t.to(getattr(torch, name)) for t in (x, weight, bias)]
        ways.append(_Way(name, functools.partial(F.linear, *given), given[1].numel() * given[1].element_size()))
    matrix = quantize_rows(weight)
    size = matrix.codes.numel() + 4 * matrix.scales.numel()
    call = LinearCall(x, matrix, bias, "none", x.new_empty(x.shape[0], matrix.codes.shape[0]))
    chosen = way_of(call).name
    ways.append(_Way("int8", lambda: int8_linear(x, matrix, bias), size, chosen))
    for name in ways_of(call):
        if name != chosen:
            ways.append(_Way(f"int8 by {name}", functools.partial(int8_linear, x, matrix, bias, way=name), size))
    rotation = next((group for group in (256, 64, 16) if x.shape[1] % group == 0), 0)
    if rotation:
        rotated = quantize_rows(weight, rotation)
        ways.append(_Way(f"int8, rotated by {rotation}", lambda: int8_linear(x, rotated, bias), size, chosen))
    ways.append(_Way("int8 eager", lambda: eager(x, matrix, bias), size))
    return ways


def eager(x: Tensor, matrix: Int8Matrix, bias: Tensor) -> Tensor:
    """8 bits by torch's operators alone, as libraries without a kernel for a card do it: the weight is copied, and the
    32-bit sums and their float32 copy exist as a whole."""
    scale = x.abs().amax(dim=-1, keepdim=True).float() / 127
    codes = (x / scale).round_().clamp_(-128, 127).to(torch.int8)
    sums = torch._int_mm(codes, matrix.codes.t().contiguous()).float()
    return (sums * (scale * matrix.scales)).to(x.dtype) + bias


def run_layer(layer: Layer, device: torch.device, clock: Clock, *, rounds: int, seconds: float) -> dict[str, Any]:
    """Time and print one layer; what ``--json`` writes of it."""
    figures = race_layer(layer, device, clock, rounds, seconds)
    print_table(f"{layer.name}: {layer.what}, {layer.text}", COLUMNS, [_row(figure) for figure in figures])
    return {"layer": dataclasses.asdict(layer), "results": [dataclasses.asdict(figure) for figure in figures]}


def _row(figure: Figure) -> list[str]:
    def cell(value: float | None, text: str) -> str:
        return "-" if value is None else text.format(value)

    return [
        figure.name,
        cell(None if figure.seconds is None else 1e3 * figure.seconds, "{:.2f}"),
        cell(figure.ratio, "{:.2f}"),
        cell(None if figure.flops is None else figure.flops / 1e12, "{:.3f}"),
        cell(None if figure.extra_bytes is None else figure.extra_bytes / MIB, "{:.1f}"),
        cell(None if figure.weight_bytes is None else figure.weight_bytes / MIB, "{:.1f}"),
        cell(figure.error, "{:.1e}"),
        ", ".join(filter(None, (figure.ran, figure.note))),
    ]
