"""``pascal-attn bench``: every route and torch's own kernels on the shapes of real models."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ... import AttentionConfig
from ...machine.device import device_info
from ...machine.room import available_bytes
from .. import CommandError, check_numbers, check_output, write_figures
from ..charts import print_table, progress_of
from .candidates import BASELINE, all_candidates, choose_candidates, race
from .contest import (
    COLUMNS,
    BenchSettings,
    Result,
    clock_name,
    device_named,
    geometric_means,
    quiet_torch,
    result_row,
    versions,
)
from .shapes import Shape, choose, choose_shapes, own_shapes

GIB = 1 << 30
DTYPES = ("float32", "float16", "bfloat16", "float64")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Times all candidates interleaved in one process. 'vs torch' is the time relative to torch's own "
        "function, unmodified; 'extra' the peak memory besides inputs and outputs; 'TFLOP/s' the operations that the "
        "call needs over its time (in float32 on a GPU also as a share of the peak of the card's float32 units); "
        "'error' the difference from float64, relative to its values."
    )
    parser.add_argument("--shapes", help="names or patterns, comma-separated; quick (default); all")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="B=1,Hq=32,L=2048,D=64",
        help="a shape of your own, may be repeated; also Hkv (default: Hq) and S (default: L)",
    )
    parser.add_argument("--causal", action="store_true", help="the shapes given by --shape are causal")
    parser.add_argument("--candidates", default="all", help="names or patterns, comma-separated (default: all)")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of all shapes, instead of each shape's own")
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    parser.add_argument("--rounds", type=int, default=5, help="maximum number of timed rounds (default: 5)")
    parser.add_argument("--seconds", type=float, default=10.0, help="time for one candidate on one call (default: 10)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--budget-mib", type=float, help="extra memory that the routes of this package may use")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument(
        "--linear",
        action="store_true",
        help="time linear layers in float and in 8 bits instead; --shapes then names layers",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw memory against length into this file instead of timing anything"
    )


def run(options: argparse.Namespace) -> int:
    if options.plot is not None:
        return _plot(options.plot, options.budget_mib)
    settings = BenchSettings(options.rounds, options.seconds, backward=options.backward)
    hold(options, _layers if options.linear else _calls, settings)
    return 0


class Programme(NamedTuple):
    """The works of a run: their kind (a word of the file), the works, who runs each, and what they are compared
    with."""

    kind: str
    works: list[Any]
    race: Callable[..., list[Result]]
    baseline: str


def hold(
    options: argparse.Namespace, find: Callable[[argparse.Namespace, torch.device], Programme], settings: BenchSettings
) -> dict[str, Any]:
    """Run the contest that ``find`` finds by the options: print a table for each of its works, write the figures where
    the options say so, and return them. A mistake in the options is a CommandError,
    before anything has run."""
    check_output(options.json)
    check_numbers(options, "rounds", "seconds", "threads")
    device = device_named(options.device)
    try:
        contest = find(options, device)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        raise CommandError(str(error).splitlines()[0]) from error
    columns = ["vs " + contest.baseline.removesuffix("-fused") if name == "vs torch" else name for name in COLUMNS]
    with quiet_torch(options.threads):
        document = _document(options, device, settings, contest.baseline)
        reports: list[dict[str, Any]] = []
        for work in contest.works:
            results = contest.race(work, settings, progress_of(f"{work.name}: "))
            peak = device_info(device).fp32_flops if getattr(work, "dtype", "") == "float32" else 0.0
            print_table(f"{work.name}: {work.what}, {work.text}", columns, [result_row(each, peak) for each in results])
            figures = [dataclasses.asdict(result) for result in results]
            reports.append({contest.kind: dataclasses.asdict(work), "text": work.text, "results": figures})
            document |= {f"{contest.kind}s": reports, "geometric_means": geometric_means(reports)}
            write_figures(options.json, document)  # what has been measured remains if the run is cut short
    means = sorted(document["geometric_means"].items(), key=lambda item: item[1]["ratio"])
    rows = [[name, f"{mean['ratio']:.2f}", f"{mean['shapes']} of {len(reports)}", ""] for name, mean in means]
    print_table(f"time relative to {contest.baseline}, geometric mean", ("", "ratio", "shapes", ""), rows)
    if options.json:
        print(f"figures: {options.json}")
    return document


def _calls(options: argparse.Namespace, device: torch.device) -> Programme:
    """The shapes that were named."""
    found = all_candidates(AttentionConfig(budget_mib=options.budget_mib), device.type)
    candidates = choose_candidates(found, options.candidates)
    shapes = _shapes(options, device)
    return Programme("shape", shapes, lambda shape, *how: race(shape.make(device), candidates, *how), BASELINE)


def _layers(options: argparse.Namespace, device: torch.device) -> Programme:
    """The layers that were named."""
    from . import linear

    unused = [f"--{name}" for name in ("shape", "dtype", "backward", "causal") if getattr(options, name)]
    if unused:
        raise ValueError(f"--linear does not take {', '.join(unused)}")
    layers = choose("layer", linear.LAYERS, options.shapes or "quick", linear.QUICK)
    return Programme("layer", layers, lambda layer, *how: linear.race_layer(layer, device, *how), linear.BASELINE)


def _plot(path: Path, budget_mib: float | None) -> int:
    from . import length

    check_output(path)
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install matplotlib")
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise CommandError(f"--plot must name a .png, .svg or .pdf file, got {path}")
    try:
        figures = length.memory_by_length(length.LENGTHS, budget_mib)
    except ValueError as error:
        raise CommandError(str(error)) from error
    rows = [[f"{tokens:,}", *(f"{mib:,.2f}" for mib in sizes)] for tokens, sizes in figures.items()]
    title = "peak extra memory of self-attention [1, 8, tokens, 64] in float32, MiB"
    print_table(title, ("tokens", *length.COLUMNS), rows)
    length.draw_memory_by_length(figures, path)
    print(f"chart: {path}")
    return 0


def _shapes(options: argparse.Namespace, device: torch.device) -> list[Shape]:
    """The shapes that were named, the quick ones if none was; ValueError where one does not exist or does not fit."""
    if options.causal and not options.shape:
        raise ValueError("--causal applies only to shapes given by --shape; of those listed, name the causal ones")
    own = own_shapes(options.shape, is_causal=options.causal, dtype=options.dtype or "float32")
    free = available_bytes(device)
    for shape in own:
        if free is not None and shape.num_bytes > free:
            sizes = f"{shape.text} take {shape.num_bytes / GIB:,.1f} GiB, {free / GIB:,.1f} GiB are free"
            raise ValueError(f"--shape must fit into memory: the tensors of {sizes}")
    patterns = options.shapes if options.shapes is not None else "" if own else "quick"
    listed = choose_shapes(patterns, device_type=device.type, dtype=options.dtype)
    if not listed and not own:
        raise ValueError(f"--shapes must name at least one shape, got {options.shapes!r}")
    return own + listed


def _document(
    options: argparse.Namespace, device: torch.device, settings: BenchSettings, baseline: str
) -> dict[str, Any]:
    """The facts of a run, which are also printed as a heading."""
    info, clock = device_info(device), clock_name(device)
    by = f", {options.threads} thread{'s'[: options.threads > 1]}" if device.type == "cpu" else ""
    what = "forward and backward" if settings.backward else "forward"
    print(f"{what} on {info.name}{by}, torch {torch.__version__}, {clock}, medians", end="\n\n")
    return {
        "command": options.command_line,
        "versions": versions("pascal-attn", "noflash-attention", "diffusers", "transformers"),
        "machine": {
            "device": str(device),
            "name": info.name,
            "facts": dataclasses.asdict(info),
            "fp32_flops": info.fp32_flops,
            "system": platform.platform(),
            "threads": options.threads,
            "clock": clock,
        },
        "settings": {**dataclasses.asdict(settings), "budget_mib": options.budget_mib},
        "baseline": baseline,
    }
