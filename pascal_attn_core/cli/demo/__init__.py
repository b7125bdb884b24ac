"""``pascal-attn demo``: an image and a video model with torch's math attention, with its own choice and with ours."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import AttentionConfig, patch_ffn
from ...machine.device import MIB
from ...reference.checks import gap
from .. import CommandError, charts, check_numbers
from ..bench import Programme, hold
from ..bench.contest import BenchSettings, Entrant, Named, Result, Step, compete, no_room

if TYPE_CHECKING:
    from .models import Case

EXTRAS = ("diffusers", "transformers", "safetensors", "matplotlib")
STOCK, MATH, OURS, SLICED = "stock", "torch math", "Pascal Attention", "... and FFN in slices"
RUNS = (STOCK, MATH, OURS, SLICED)
_FFN_BUDGET_MIB = 8.0
NOTES = """\
stock: torch's choice, on a CPU its fused kernel.  torch math: what torch does where it has no fused kernel for a call.
Pascal Attention: pipe.set_attn_processor(PascalAttnProcessor()), on a CPU with its tiles, which are what a card without
any kernel gets (by itself it would take torch's kernel here).  ... and FFN in slices: with patch_ffn(pipe.unet) too.
extra: the most beyond what there was before the run (not the scratch inside torch's fused CPU kernel).
error: the largest difference of the final latents from those of stock."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs two real diffusers pipelines at real token counts, with few channels and random weights, so "
        "nothing is downloaded: with torch's math attention, with stock attention and with Pascal Attention. Shows "
        "time, peak memory and the difference of the results, and writes a chart and results.json."
    )
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for the results (default: demo_out)")
    parser.add_argument("--quick", action="store_true", help="small sizes: a few seconds instead of some minutes")
    parser.add_argument("--only", choices=("image", "video"), help="one of the two models")
    parser.add_argument("--steps", type=int, default=2, help="denoising steps (default: 2)")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.set_defaults(rounds=1, seconds=1.0, threads=torch.get_num_threads(), budget_mib=None)


def run(options: argparse.Namespace) -> int:
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"{', '.join(missing)} must be installed for the demo: pip install {' '.join(missing)}")
    check_numbers(options, "steps")
    os.environ["HF_HUB_OFFLINE"] = "1"  # no library may access the network here
    options.out.mkdir(parents=True, exist_ok=True)
    options.json = options.out / "results.json"
    with _quiet():
        document = hold(options, _models, BenchSettings(rounds=0))
    print(NOTES)
    chart = options.out / "chart.png"
    _draw(document, chart)
    print(f"chart: {chart}")
    return 0


def _models(options: argparse.Namespace, device: torch.device) -> Programme:
    from . import models

    cases: dict[Named, tuple[Case, Case]] = {}
    for name, make in models.CASES.items():
        if options.only in (None, name):
            case = make(quick=options.quick, steps=options.steps)
            size = f"{case.tokens:,} tokens, {case.num_heads} heads of {case.head_dim}, float32"
            cases[Named(name, case.title, size)] = case, make(quick=True, steps=1)
    return Programme("model", list(cases), lambda work, *how: race(*cases[work], device, *how), STOCK)


def race(case: Case, small: Case, device: torch.device, *how: Any) -> list[Result]:
    """One generation with each attention, without further rounds, after a ``small`` one by the same pipeline: each is
    done before the next is prepared."""
    began, pipe = time.perf_counter(), case.build().to(device)
    found: list[Tensor] = []
    names: list[str] = []

    def error_of(latents: Tensor) -> float:
        found.append(latents)
        print(f"{case.title}: {names[-1]} done after {time.perf_counter() - began:.0f} s", file=sys.stderr)
        return gap(latents, found[0]).error

    def prepared(name: str) -> tuple[Step, Step]:
        attention.close()
        attention.enter_context(_attention(pipe, name))
        names.append(name)
        generate(small, pipe)  # so that no run includes one-time costs
        whole = functools.partial(generate, case, pipe)
        return whole, whole

    notes = {MATH: no_room(case.math_bytes, device)}
    entrants = [Entrant(name, functools.partial(prepared, name), note=notes.get(name, "")) for name in RUNS]
    with ExitStack() as attention:
        return compete(entrants, error_of, 0, device, *how)


@contextmanager
def _attention(pipe: Any, name: str) -> Iterator[None]:
    """The pipeline with the attention of this run."""
    with ExitStack() as stack:
        if name == MATH:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if name == SLICED:
            part = getattr(pipe, "unet", None) or pipe.transformer
            stack.enter_context(patch_ffn(part, budget_mib=_FFN_BUDGET_MIB))
        if name in (OURS, SLICED):
            from ...diffusers import PascalAttnProcessor

            route = "tiled" if pipe.device.type == "cpu" else "auto"
            pipe.set_attn_processor(PascalAttnProcessor(AttentionConfig(route=route)))
            stack.callback(pipe.set_attn_processor, None)
        yield


def generate(case: Case, pipe: Any) -> Tensor:
    """The latents of one generation, whose starting latents are the same in every run."""
    generator = torch.Generator().manual_seed(0)
    arguments = {**case.arguments, "latents": torch.randn(case.latents_shape, generator=generator)}
    for name in ("prompt_embeds", "latents"):
        arguments[name] = arguments[name].to(pipe.device, pipe.dtype)
    return pipe(generator=generator, output_type="latent", **arguments)[0]


def _draw(document: dict[str, Any], path: Path) -> None:
    panels = []
    for report in document["models"]:
        for what, unit, key, scale in (("time", "s", "seconds", 1), ("peak memory", "MiB", "extra_bytes", MIB)):
            rows = report["results"]
            bars = [(row["name"], row[key] and row[key] / scale, row["note"]) for row in rows]
            panels.append((f"{report['model']['what']}: {what}", unit, bars))
    title = "The same generation, by different attentions"
    machine = document["machine"]
    footer = f"{machine['name']}, threads: {machine['threads']}, torch {document['versions']['torch']}"
    charts.bar_chart(path, panels, title=title, footer=footer)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence unrelated warnings of diffusers and transformers."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
