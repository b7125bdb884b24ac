"""``pascal-attn demo``: an image and a video model with torch's math attention, with its own choice and with ours."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ... import AttentionConfig, patch_ffn
from ...checks import is_out_of_memory
from ...machine.device import MIB, device_info
from ...observe.memory import PeakMemory, available_bytes
from ...observe.report import record
from .. import CommandError, charts
from ..bench.clock import device_named
from ..bench.contest import versions
from ..tables import print_table

if TYPE_CHECKING:
    from .models import Case

GIB = 1 << 30
EXTRAS = ("diffusers", "transformers", "safetensors", "matplotlib")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
COLUMNS = ("attention", "seconds", "peak extra MiB", "largest difference", "our attention calls")
STOCK, MATH, OURS, SLICED = "stock", "torch math", "Pascal Attention", "... and FFN in slices"
RUNS = (STOCK, MATH, OURS, SLICED)
_FFN_BUDGET_MIB = 8.0
NOTES = """\
stock: torch's choice, on a CPU its fused kernel.  torch math: what torch does where it has no fused kernel for a call.
Pascal Attention: pipe.set_attn_processor(PascalAttnProcessor()), on a CPU with its tiles, which are what a card without
any kernel gets (by itself it would take torch's kernel here).  ... and FFN in slices: with patch_ffn(pipe.unet) too.
peak extra: most bytes {memory}.
largest difference: of the final latents, against stock."""
_FOLLOWED = "of tensors alive at once, beyond those before the run (not the scratch inside torch's fused CPU kernel)"
_ALLOCATED = "that torch's CUDA allocator allocated at once, beyond those before the run"


@dataclass
class Row:
    """One run. Figures are None, and ``note`` says why, if it did not take place."""

    name: str
    seconds: float | None = None
    peak_bytes: int | None = None
    difference: float | None = None
    calls: dict[str, int] | None = None
    note: str = ""


def add_parser(subparsers: Any) -> None:
    """Add ``demo`` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="an image and a video pipeline before and after, with the memory they took",
        description="Runs two real diffusers pipelines at real token counts, with few channels and random weights, so "
        "nothing is downloaded: with torch's math attention, with stock attention and with Pascal Attention. Shows "
        "time, peak memory and the difference of the results, and writes a chart and results.json.",
    )
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for the results (default: demo_out)")
    parser.add_argument("--quick", action="store_true", help="small sizes: a few seconds instead of a minute or two")
    parser.add_argument("--only", choices=("image", "video"), help="one of the two models")
    parser.add_argument("--steps", type=int, default=2, help="denoising steps (default: 2)")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="float32", help="dtype of the models (default: float32)"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    device = _checked(args)
    os.environ["HF_HUB_OFFLINE"] = "1"  # no library may access the network here
    with _quiet():
        from . import models

        args.out.mkdir(parents=True, exist_ok=True)
        print(_heading(device, args))
        documents = []
        for name, make in models.CASES.items():
            if args.only in (None, name):
                documents.append(_run_case(make(quick=args.quick, steps=args.steps), device, args))
    for case in documents:
        title = f"{case['title']}, {case['tokens']:,} tokens, {case['num_heads']} heads of {case['head_dim']}"
        print_table(title, COLUMNS, [_cells(row) for row in case["rows"]])
    print(NOTES.format(memory=_ALLOCATED if device.type == "cuda" else _FOLLOWED))
    _write(documents, device, args)
    return 0


def _checked(args: argparse.Namespace) -> torch.device:
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"{', '.join(missing)} must be installed for the demo: pip install {' '.join(missing)}")
    if args.steps < 1:
        raise CommandError(f"--steps must be at least 1, got {args.steps}")
    try:
        return device_named(args.device)
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"--device must be a device that torch can use, got {args.device}: {error}") from error


def _run_case(case: Case, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """All runs of one model: what the file says of it."""
    pipe = case.build().to(device, DTYPES[args.dtype])
    rows: list[Row] = []
    latents: dict[str, Tensor] = {}
    for name in RUNS:
        row = Row(name, note=_too_little_memory(case, device) if name == MATH else "")
        rows.append(row)
        if not row.note:
            try:
                with _attention(pipe, name):
                    _generate(case, pipe, case.small, **case.warm_up)  # so that no run includes one-time costs
                    latents[name] = _measure(case, pipe, row)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                row.note = "out of memory"
        if name in latents and STOCK in latents and name != STOCK:
            row.difference = (latents[name].double() - latents[STOCK].double()).abs().max().item()
        print(f"{case.title}, {name}: {row.note or f'{row.seconds:.1f} s'}", flush=True)
    fields = ("name", "title", "tokens", "num_heads", "head_dim")
    return {**{field: getattr(case, field) for field in fields}, "rows": [asdict(row) for row in rows]}


@contextmanager
def _attention(pipe: Any, name: str) -> Iterator[None]:
    """The pipeline with the attention of this run."""
    around: AbstractContextManager = sdpa_kernel(SDPBackend.MATH) if name == MATH else nullcontext()
    if name == SLICED:
        around = patch_ffn(getattr(pipe, "unet", None) or pipe.transformer, budget_mib=_FFN_BUDGET_MIB)
    if name in (OURS, SLICED):
        from ...diffusers import PascalAttnProcessor

        route = "tiled" if pipe.device.type == "cpu" else "auto"
        pipe.set_attn_processor(PascalAttnProcessor(AttentionConfig(route=route)))
    with around:
        yield


def _generate(case: Case, pipe: Any, shape: tuple[int, ...], **changed: Any) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    arguments = {**case.arguments, **changed, "latents": torch.randn(shape, generator=generator)}
    for name in ("prompt_embeds", "latents"):
        arguments[name] = arguments[name].to(pipe.device, pipe.dtype)
    return pipe(generator=generator, output_type="latent", **arguments)[0]


def _measure(case: Case, pipe: Any, row: Row) -> Tensor:
    """One generation: its figures into ``row``, its latents returned. Following each storage costs some microseconds
    per operator, far below the noise on a CPU; on CUDA the allocator's statistics are read and nothing is followed."""
    gc.collect()
    is_cuda = pipe.device.type == "cuda"
    with record() as report, PeakMemory(pipe.device, follow=not is_cuda) as peak:
        began = time.perf_counter()
        latents = _generate(case, pipe, case.latents_shape)
        if is_cuda:
            torch.cuda.synchronize(pipe.device)
        row.seconds = time.perf_counter() - began
    row.peak_bytes, row.calls = peak.peak_bytes, report.routes() or None
    return latents


def _too_little_memory(case: Case, device: torch.device) -> str:
    """Why the math run should not be tried, or ""."""
    available = available_bytes(device)
    needed = case.math_bytes + GIB // 4
    if available is None or needed <= available:
        return ""
    return f"not run: needs {needed / GIB:.1f} GiB, {available / GIB:.1f} GiB free"


def _heading(device: torch.device, args: argparse.Namespace) -> str:
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' if count > 1 else ''}" if device.type == "cpu" else ""
    steps = f"{args.steps} step{'s' if args.steps > 1 else ''}"
    return f"{device_info(device).name}{threads}, {args.dtype}, torch {torch.__version__}, {steps}"


def _cells(row: dict[str, Any]) -> list[str]:
    calls = ", ".join(f"{count} {route}" for route, count in (row["calls"] or {}).items())
    return [
        row["name"],
        "-" if row["seconds"] is None else charts.short_number(row["seconds"]),
        "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MIB:,.0f}",
        "-" if row["difference"] is None else f"{row['difference']:.1e}" if row["difference"] else "0",
        row["note"] or calls,
    ]


def _write(documents: list[dict[str, Any]], device: torch.device, args: argparse.Namespace) -> None:
    report = {
        "command": args.command_line,
        "device": device_info(device).name,
        "threads": torch.get_num_threads(),
        "dtype": args.dtype,
        "versions": versions("diffusers", "transformers"),
        "cases": documents,
    }
    (args.out / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    panels = []
    for case in documents:
        for what, unit, key, scale in (("time", "s", "seconds", 1), ("peak memory", "MiB", "peak_bytes", MIB)):
            bars = [charts.Bar(row["name"], row[key] and row[key] / scale, row["note"]) for row in case["rows"]]
            panels.append((f"{case['title']}, {case['tokens']:,} tokens: {what}", unit, bars))
    title = "The same generation, by different attentions"
    charts.bar_chart(args.out / "chart.png", panels, title=title, footer=_heading(device, args))
    print(f"chart.png and results.json are in {args.out}/")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence unrelated warnings of diffusers and transformers."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
