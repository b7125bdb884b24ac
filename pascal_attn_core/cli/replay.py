"""``pascal-attn replay FILE...``: captured calls over every route, with time, memory and error."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import torch

from .. import AttentionConfig
from ..capture import CapturedCall, load_calls
from ..observe.report import mask_kind
from .bench import Programme, add_timing_options, hold
from .bench.candidates import BASELINE, race, route_candidates
from .bench.contest import BenchSettings, Named, Result


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs each call in files written by pascal_attn_core.capture through every route and through "
        "torch's own kernels. 'error' is the largest difference from float64 relative to the largest value."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    add_timing_options(parser, rounds=3)


def run(options: argparse.Namespace) -> int:
    hold(options, _calls, BenchSettings(options.rounds, options.seconds, error_rows=None))
    return 0


def _calls(options: argparse.Namespace, device: torch.device) -> Programme:
    """The calls of the files; every file is read before the first call runs, so that a bad one fails at once."""
    candidates = route_candidates(AttentionConfig(budget_mib=options.budget_mib))
    calls: dict[Named, CapturedCall] = {}
    for path in options.files:
        for call in load_calls(path):
            seen = f", seen {call.count} times" if call.count > 1 else ""
            calls[Named(call.name, f"{path}{seen}, captured on {call.device}", describe(call))] = call

    def race_call(work: Named, *how: Any) -> list[Result]:
        # With dropout results cannot be compared: each route draws its own numbers.
        return race(dataclasses.replace(calls[work].to(device), dropout_p=0.0), candidates, *how)

    return Programme("call", list(calls), race_call, BASELINE)


def describe(call: CapturedCall) -> str:
    """``"q[2, 10, 4096, 64] k[2, 10, 77, 64] float16 mask none"``."""
    dtype = str(call.query.dtype).removeprefix("torch.")
    mask = mask_kind(call.attn_mask, is_causal=call.is_causal, left=None, right=None)
    text = f"q{list(call.query.shape)} k{list(call.key.shape)} v{list(call.value.shape)} {dtype} mask {mask}"
    if call.scale is not None:
        text += f" scale {call.scale:g}"
    strided = [name for name in ("query", "key", "value") if not getattr(call, name).is_contiguous()]
    return text + (f" ({', '.join(strided)} not contiguous)" if strided else "")
