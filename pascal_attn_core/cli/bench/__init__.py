"""``pascal-attn bench``: every route, torch's own kernels and installed peers on the shapes of real models."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from ...config import AttentionConfig
from ...device import device_info
from ...observe.memory import available_bytes
from ...storage import write_object
from .. import CommandError, check_numbers
from ..tables import print_table
from .candidates import BASELINE, Candidate, all_candidates, choose_candidates
from .clock import Clock, quiet_torch
from .measure import Settings, race
from .report import COLUMNS, geometric_means, result_row, versions
from .shapes import Shape, choose_shapes, own_shapes

GIB = 1 << 30
DTYPES = ("float32", "float16", "bfloat16", "float64")


def add_parser(subparsers: Any) -> None:
    """Add ``bench`` to the command line."""
    parser = subparsers.add_parser(
        "bench",
        help="time every route, torch's own kernels and installed peers on typical shapes",
        description="Times all candidates interleaved in one process. 'vs torch' is the time relative to torch's own "
        "function, unmodified; 'of products' the speed relative to the two bare matrix products; 'extra' the peak "
        "memory besides inputs and outputs; 'TFLOP/s' the operations that the call needs over its time (in "
        "float32 on a GPU also as a share of the peak of the card's float32 units); 'error' the largest "
        "difference from float64 relative to the largest value.",
    )
    parser.add_argument("--shapes", help="names or patterns, comma-separated; quick (default); all")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="B=1,Hq=32,L=2048,D=64",
        help="a shape of your own, may be repeated; also Hkv (default: Hq), S (default: L) and Dv (default: D); with "
        "--linear M=4096,K=640,N=2560: rows, columns, outputs",
    )
    parser.add_argument("--causal", action="store_true", help="the shapes given by --shape are causal")
    parser.add_argument("--candidates", default="all", help="names or patterns, comma-separated (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="maximum number of timed rounds (default: 5)")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="time limit for one candidate on one shape (default: 10)"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of all shapes, instead of each shape's own")
    parser.add_argument("--budget-mib", type=float, help="extra memory that the routes of this package may use")
    parser.add_argument("--backward", action="store_true", help="time forward and backward together")
    parser.add_argument(
        "--max-operators", type=int, default=200_000, help="skip candidates that launch more operators than this"
    )
    parser.add_argument("--no-products", action="store_true", help="do not time the bare matrix products")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw time and memory into this file")
    parser.add_argument(
        "--linear",
        action="store_true",
        help="time linear layers in float and in 8 bits instead; --shapes then names layers",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw memory against length into this file instead of timing anything"
    )
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    _check_outputs(options)
    if options.plot is not None:
        return _plot(options.plot, options.budget_mib)
    if options.linear:
        return _linear(options)
    device, shapes, candidates, settings = _read(options)
    clock = Clock(device, options.threads)
    reports = []
    with quiet_torch(options.threads):
        print(_heading(device, clock, options), end="\n\n")
        for shape in shapes:
            reports.append(_bench_shape(shape, device, candidates, clock, settings))
            document = _document(options, device, clock, settings, reports)
            _write_figures(document, options)  # of a run that is cut short the shapes so far remain
    _print_summary(document["geometric_means"], len(shapes))
    _finish(document, options)
    return 0


def _linear(options: argparse.Namespace) -> int:
    from .linear import choose_layers, own_layers, run_layer

    check_numbers(options, "rounds", "seconds", "threads")
    unused = {"png": options.png, "dtype": options.dtype, "backward": options.backward}
    if any(unused.values()):
        raise CommandError(
            f"--linear does not take {', '.join(f'--{name}' for name, given in unused.items() if given)}"
        )
    try:
        device, layers = _device(options), own_layers(options.shape)
        if options.shapes is not None or not layers:
            layers += choose_layers(options.shapes)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise CommandError(str(error).splitlines()[0]) from error
    clock = Clock(device, options.threads)
    reports: list[dict[str, Any]] = []
    document = {**_machine(options, device, clock), "baseline": "float32", "layers": reports}
    with quiet_torch(options.threads):
        print(_heading(device, clock, options), end="\n\n")
        for layer in layers:
            reports.append(run_layer(layer, device, clock, rounds=options.rounds, seconds=options.seconds))
            _write_figures(document, options)  # of a run that is cut short the layers so far remain
    _finish(document, options)
    return 0


def _plot(path: Path, budget_mib: float | None) -> int:
    from .length import draw_memory_by_length, memory_by_length

    try:
        figures = memory_by_length(budget_mib=budget_mib)
    except ValueError as error:
        raise CommandError(str(error)) from error
    rows = [
        [f"{tokens:,.0f}", *(f"{figures[name][i]:,.2f}" for name in ("math", "tiled", "planned"))]
        for i, tokens in enumerate(figures["tokens"])
    ]
    title = "peak extra memory of self-attention [1, 8, tokens, 64] in float32, MiB"
    print_table(title, ("tokens", "torch math", "tiled", "planned"), rows)
    draw_memory_by_length(figures, path)
    print(f"chart: {path}")
    return 0


def _read(options: argparse.Namespace) -> tuple[torch.device, list[Shape], list[Candidate], Settings]:
    check_numbers(options, "rounds", "seconds", "threads", "max_operators")
    try:
        device = _device(options)
        config = AttentionConfig(budget_mib=options.budget_mib)
        shapes = _shapes(options, device)
        found, missing = all_candidates(config, device.type)
        candidates = choose_candidates(found, options.candidates)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise CommandError(str(error).splitlines()[0]) from error
    for sentence in missing:
        print(sentence)
    settings = Settings(
        options.rounds,
        options.seconds,
        options.max_operators,
        backward=options.backward,
        products=not options.no_products,
    )
    return device, shapes, candidates, settings


def _device(options: argparse.Namespace) -> torch.device:
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.empty(0, device=device)
    return device


def _shapes(options: argparse.Namespace, device: torch.device) -> list[Shape]:
    """The shapes that were named; the quick ones if none was.

    Raises:
        ValueError: a shape that does not exist or does not fit into memory.
    """
    if options.causal and not options.shape:
        raise ValueError(
            "--causal applies only to shapes given by --shape; of the listed shapes, name those that are causal"
        )
    own = own_shapes(options.shape, is_causal=options.causal, dtype=options.dtype or "float32")
    free = available_bytes(device)
    for shape in own:
        if free is not None and shape.num_bytes > free:
            raise ValueError(
                f"--shape must fit into memory: the tensors of {shape.text} take {shape.num_bytes / GIB:,.1f} GiB, "
                f"{free / GIB:,.1f} GiB are free"
            )
    patterns = options.shapes if options.shapes is not None else "" if own else "quick"
    listed = choose_shapes(patterns, device_type=device.type, dtype=options.dtype)
    if not listed and not own:
        raise ValueError(f"--shapes must name at least one shape, got {options.shapes!r}")
    return own + listed


def _heading(device: torch.device, clock: Clock, options: argparse.Namespace) -> str:
    what = "forward and backward" if options.backward else "forward"
    threads = f", {options.threads} thread{'s'[: options.threads > 1]}" if device.type == "cpu" else ""
    return f"{what} on {device_info(device).name}{threads}, torch {torch.__version__}, {clock.kind}, medians"


def _bench_shape(
    shape: Shape, device: torch.device, candidates: list[Candidate], clock: Clock, settings: Settings
) -> dict[str, Any]:
    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{shape.name}: {text}", end="", file=sys.stderr, flush=True)

    results = race(shape.make(device), candidates, clock, settings, progress)
    progress("done\r\033[K")
    peak = device_info(device).fp32_flops if shape.dtype == "float32" else 0.0
    rows = [result_row(result, peak) for result in results]
    print_table(f"{shape.name}: {shape.what}, {shape.text}", COLUMNS, rows)
    return {
        "shape": dataclasses.asdict(shape),
        "text": shape.text,
        "results": [dataclasses.asdict(result) for result in results],
    }


def _print_summary(means: dict[str, dict[str, float]], num_shapes: int) -> None:
    rows = [
        [name, f"{mean['ratio']:.2f}", f"{mean['shapes']:.0f} of {num_shapes}", ""]
        for name, mean in sorted(means.items(), key=lambda item: item[1]["ratio"])
    ]
    print_table(f"time relative to {BASELINE}, geometric mean", ("", "ratio", "shapes", ""), rows)


def _document(
    options: argparse.Namespace, device: torch.device, clock: Clock, settings: Settings, reports: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        **_machine(options, device, clock),
        "settings": {**dataclasses.asdict(settings), "budget_mib": options.budget_mib},
        "baseline": BASELINE,
        "shapes": reports,
        "geometric_means": geometric_means(reports),
    }


def _machine(options: argparse.Namespace, device: torch.device, clock: Clock) -> dict[str, Any]:
    return {
        "command": options.command_line,
        "versions": versions(),
        "machine": {
            "device": str(device),
            "name": device_info(device).name,
            "facts": dataclasses.asdict(device_info(device)),
            "fp32_flops": device_info(device).fp32_flops,
            "system": platform.platform(),
            "threads": options.threads,
            "clock": clock.kind,
        },
    }


def _check_outputs(options: argparse.Namespace) -> None:
    """Find what would make a long run fail at its end, before it starts."""
    for path in (options.json, options.png, options.plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise CommandError(f"the folder of {path} does not exist")
        if path is not None and path.is_dir():
            raise CommandError(f"{path} must be a file, not a folder")
    for name, path in (("--png", options.png), ("--plot", options.plot)):
        if path is None:
            continue
        if importlib.util.find_spec("matplotlib") is None:
            raise CommandError(f"{name} needs matplotlib: pip install matplotlib")
        if path.suffix not in (".png", ".svg", ".pdf"):
            raise CommandError(f"{name} must name a .png, .svg or .pdf file, got {path}")


def _write_figures(document: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        try:
            write_object(options.json, document)
        except OSError as error:
            raise CommandError(f"cannot write: {error}") from error


def _finish(document: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        print(f"figures: {options.json}")
    if options.png:
        from .chart import draw  # matplotlib is optional, and slow to import

        try:
            draw(document, options.png)
        except OSError as error:
            raise CommandError(f"cannot write: {error}") from error
        print(f"chart: {options.png}")
