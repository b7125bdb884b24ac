"""``pascal-attn selftest``: whether everything is right on this machine, and how fast, as one block to paste."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from .. import AttentionConfig
from ..contest.timing_table import milliseconds
from ..machine.device import device_info
from ..machine.facts import ask_clocks
from ..selftest import Selftest, check, describe, document
from ..selftest.cases import in_one_line
from . import check_numbers, check_output, write_figures
from .bench.candidates import needed_operations, race, route_candidates
from .bench.contest import BenchSettings, device_named, quiet_torch
from .bench.shapes import SHAPES, Shape
from .charts import progress_of

SECONDS = 60.0
_show = progress_of("")
# What a part may have used of the time when it ends; a part that needs less leaves the rest to the next ones.
_UNTIL = {"kernels": 0.25, "checks": 0.6, "speed": 0.95}
MODELS = ("sd15", "sdxl", "flux", "wan", "gqa", "decode", "vae")
_LEAST_TOKENS = 512
_ROUNDS = 3
_CALLS_PER_CANDIDATE = _ROUNDS + 4  # rounds, warm-up, the measured call and its float64 rows


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compares every route and every shipped kernel with float64 on this machine, times the routes on "
        "the shapes of real models, and prints one block to paste. Needs nothing but torch. The exit status is 0 if "
        "everything was right, 1 if something was wrong."
    )
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit (default: 60)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads (default: torch's)")
    parser.add_argument("--no-speed", action="store_true", help="only check for correctness, time nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")


def run(options: argparse.Namespace) -> int:
    check_numbers(options, "seconds", "threads")
    check_output(options.json)
    device = device_named(options.device)
    with quiet_torch(options.threads):
        found = selftest(device, options.seconds, speed=not options.no_speed)
    print(describe(found))
    write_figures(options.json, {"command": options.command_line, **document(found)})
    return 0 if found.is_right else 1


def selftest(device: torch.device, seconds: float = SECONDS, *, speed: bool = True) -> Selftest:
    """Check everything on ``device``, and time the routes too if ``speed`` is set. What does not fit into ``seconds``
    is left out and named; no check is begun after them. Progress goes to stderr where that is a terminal."""
    start = time.monotonic()

    def left(part: str) -> float:
        return start + (_UNTIL[part] if speed else 1.0) * seconds - time.monotonic()

    found = check(device, left, _show)
    if speed:
        found.speed = found.collect("speed", run_speed(device, lambda: left("speed")), left, _show)
        found.clocks = ask_clocks(device)
    _show("")
    found.seconds = time.monotonic() - start
    return found


# ---- how fast each route is, interleaved with torch's own function ----


def model_shapes(device: torch.device) -> list[Shape]:
    """One attention call of each model, in float32, on a GPU in float16 too."""
    shapes = [shape for shape in SHAPES if shape.name in MODELS]
    return shapes if device.type == "cpu" else shapes + [replace(shape, dtype="float16") for shape in shapes]


def run_speed(device: torch.device, left: Callable[[], float]) -> Iterator[dict[str, Any]]:
    """Time all routes on each shape, none without seconds that are ``left``; one that would take too long here gets
    fewer heads, then fewer tokens. Yields the shape's name, what was timed, the peak operations per second of the
    card's plain float32 units (0 if unknown), why it failed, and results as those of ``pascal-attn bench``."""
    shapes = model_shapes(device)
    speed = functools.cache(functools.partial(product_speed, device))
    for number, shape in enumerate(shapes):
        seconds = left() / (len(shapes) - number)
        if seconds <= 0:
            return
        candidates = [c for c in route_candidates(AttentionConfig()) if c.name != "ours-math"]
        fitted = fit(shape, speed(shape.dtype), seconds / (len(candidates) * _CALLS_PER_CANDIDATE))
        settings = BenchSettings(_ROUNDS, seconds / len(candidates), error_rows=64)
        peak = device_info(device).fp32_flops if fitted.dtype == "float32" else 0.0
        results, failed = [], ""
        try:
            results = [asdict(result) for result in race(fitted.make(device), candidates, settings)]
        except Exception as failure:  # the test goes on: whatever it is belongs into the report
            failed = in_one_line(failure)
        yield {"shape": shape.name, "text": fitted.text, "peak": peak, "failed": failed, "results": results}


def product_speed(device: torch.device, dtype: str) -> float:
    """Operations per second of a large matrix product, roughly."""
    size = 512 if device.type == "cpu" else 2048
    one = torch.ones(size, size, dtype=getattr(torch, dtype), device=device)
    seconds = min(milliseconds(lambda: one @ one, device) for _ in range(3)) / 1e3
    return 2 * size**3 / max(seconds, 1e-9)


def fit(shape: Shape, flops: float, seconds: float) -> Shape:
    """The shape with as few heads, and then tokens, that a call takes about ``seconds`` at ``flops`` operations per
    second."""

    def takes(candidate: Shape) -> float:
        return needed_operations(candidate.make("meta")) / flops

    while takes(shape) > seconds:
        if shape.batch > 1:
            shape = replace(shape, batch=(shape.batch + 1) // 2)
        elif shape.num_kv_heads > 1:
            groups, heads = shape.num_heads // shape.num_kv_heads, (shape.num_kv_heads + 1) // 2
            shape = replace(shape, num_heads=groups * heads, num_kv_heads=heads)
        elif shape.seq_len_q == shape.seq_len_kv > _LEAST_TOKENS:
            tokens = max(_LEAST_TOKENS, shape.seq_len_q // 2)
            shape = replace(shape, seq_len_q=tokens, seq_len_kv=tokens)
        else:
            break
    return shape
