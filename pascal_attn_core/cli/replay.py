"""``pascal-attn replay FILE...``: captured calls over every route, with time, memory and error."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch

from ..attention import explain
from ..capture import CapturedCall, load_calls
from ..config import AttentionConfig
from ..observe.report import mask_kind
from . import CommandError, check_numbers
from .bench.candidates import BASELINE, Candidate, route_candidates
from .bench.clock import Clock, device_named, quiet_torch
from .bench.contest import COLUMNS, Result, Settings, result_row, versions
from .bench.measure import race
from .tables import print_table, progress_of


def add_parser(subparsers: Any) -> None:
    """Add ``replay`` to the command line."""
    parser = subparsers.add_parser(
        "replay",
        help="run captured attention calls through every route",
        description="Runs each call in files written by pascal_attn_core.capture through every route and through "
        "torch's own kernels. 'error' is the largest difference from float64 relative to the largest value.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--rounds", type=int, default=3, help="maximum number of timed rounds (default: 3)")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="time limit for one route on one call (default: 10)"
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--rows", type=int, help="query rows compared with float64 (default: all)")
    parser.add_argument("--budget-mib", type=float, help="extra memory that the routes of this package may use")
    parser.add_argument("--explain", action="store_true", help="explain for each call which route is chosen and why")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    device, candidates = _read(options)
    clock = Clock(device, options.threads)
    settings = Settings(options.rounds, options.seconds, error_rows=options.rows)
    reports = []
    with quiet_torch(options.threads):
        # every file is read before the first call runs, so that a bad one fails at once
        for path, calls in [(path, _load(path)) for path in options.files]:
            for call in calls:
                # With dropout results cannot be compared: each route draws its own numbers.
                call = dataclasses.replace(call.to(device), dropout_p=0.0)
                results = race(call, candidates, clock, settings, progress_of(call.name))
                report = {
                    "file": path.name,
                    "call": call.name,
                    "count": call.count,
                    "what": describe(call),
                    "captured_on": call.device,
                    "explain": _explain(call, AttentionConfig(budget_mib=options.budget_mib)),
                    "results": [dataclasses.asdict(result) for result in results],
                }
                reports.append(report)
                if not options.json:
                    _print(report, options.explain)
    if options.json:
        document = {"command": options.command_line, "versions": versions(), "baseline": BASELINE, "calls": reports}
        json.dump(document, sys.stdout, indent=1)
        print()
    return 0


def _read(options: argparse.Namespace) -> tuple[torch.device, list[Candidate]]:
    check_numbers(options, "rounds", "seconds", "threads", "rows")
    try:
        return device_named(options.device), route_candidates(AttentionConfig(budget_mib=options.budget_mib))
    except (ValueError, RuntimeError, AssertionError) as error:
        raise CommandError(str(error).splitlines()[0]) from error


def _load(path: Path) -> list[CapturedCall]:
    try:
        return load_calls(path)
    except (OSError, ValueError, ImportError) as error:
        raise CommandError(str(error)) from error


def describe(call: CapturedCall) -> str:
    """``"q[2, 10, 4096, 64] k[2, 10, 77, 64] float16 mask none"``."""
    dtype = str(call.query.dtype).removeprefix("torch.")
    mask = mask_kind(call.attn_mask, is_causal=call.is_causal, left=None, right=None)
    text = f"q{list(call.query.shape)} k{list(call.key.shape)} v{list(call.value.shape)} {dtype} mask {mask}"
    if call.scale is not None:
        text += f" scale {call.scale:g}"
    strided = [name for name in ("query", "key", "value") if not getattr(call, name).is_contiguous()]
    return text + (f" ({', '.join(strided)} not contiguous)" if strided else "")


def _explain(call: CapturedCall, config: AttentionConfig) -> str:
    options = {name: getattr(call, name) for name in ("is_causal", "scale", "enable_gqa")}
    try:
        return explain(call.query, call.key, call.value, call.attn_mask, **options, config=config)
    except (ValueError, TypeError) as error:  # calls that no route takes are captured too
        return str(error)


def _print(report: dict[str, Any], with_explanation: bool) -> None:
    seen = f", seen {report['count']} times" if report["count"] > 1 else ""
    where = f", captured on {report['captured_on']}" if report["captured_on"] else ""
    title = f"{report['file']} {report['call']}: {report['what']}{seen}{where}"
    print_table(title, COLUMNS, [result_row(Result(**result)) for result in report["results"]])
    if with_explanation:
        print(report["explain"], end="\n\n")
