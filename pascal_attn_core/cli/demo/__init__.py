"""``pascal-attn demo``: an image and a video model with torch's math attention, with stock attention and with ours."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
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

from ... import AttentionConfig, UnsupportedAttention, __version__, patch_ffn
from ...device import device_info
from ...interception import TORCH_SDPA, SdpaMode
from ...observe.memory import PeakMemory, available_bytes
from ...observe.report import record
from .. import CommandError, charts
from ..tables import print_table
from .progress import Progress

if TYPE_CHECKING:
    from .models import Case

MIB, GIB = 1 << 20, 1 << 30
# what is imported, and the distribution that holds it
EXTRAS = {name: name for name in ("diffusers", "transformers", "safetensors", "numpy", "matplotlib", "rich")}
EXTRAS["PIL"] = "pillow"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
COLUMNS = ("attention", "seconds", "peak extra MiB", "largest difference", "attention calls")
STOCK, MATH, OURS, SLICED = "stock", "torch math", "Pascal Attention", "... and FFN in slices"
RUNS = (STOCK, MATH, OURS, SLICED)
_FFN_BUDGET_MIB = 8.0
NOTES = """\
stock: whatever torch chooses here.  torch math: what torch falls back to where it has no fused kernel for the call.
Pascal Attention: pipe.set_attn_processor(PascalAttnProcessor()).  ... and FFN in slices: with patch_ffn(pipe.unet) too.
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
    launches: int | None = None
    note: str = ""


def add_parser(subparsers: Any) -> None:
    """Add ``demo`` to the command line."""
    parser = subparsers.add_parser(
        "demo",
        help="an image and a video pipeline before and after, with the memory they took",
        description="Runs two real diffusers pipelines at real token counts, with few channels and random weights, so "
        "nothing is downloaded: with torch's math attention, with stock attention and with Pascal Attention. Shows "
        "time, peak memory and the difference of the results, and writes pictures, a chart and results.json.",
    )
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for the results (default: demo_out)")
    parser.add_argument("--quick", action="store_true", help="small sizes: a few seconds instead of a minute or two")
    parser.add_argument("--only", choices=("image", "video"), help="one of the two models")
    parser.add_argument("--steps", type=int, default=2, help="denoising steps (default: 2)")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="float32", help="dtype of the models (default: float32)"
    )
    parser.add_argument(
        "--also",
        choices=("fused", "torch", "tiled"),
        help="one more run, with this route for every call (tiled: what a card without any kernel gets)",
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    device = _checked(args)
    os.environ["HF_HUB_OFFLINE"] = "1"  # no library may access the network here
    with _quiet():
        from . import models

        cases = [models.image_case(quick=args.quick, steps=args.steps)]
        cases.append(models.video_case(quick=args.quick, steps=args.steps))
        cases = [case for case in cases if args.only in (None, case.name)]
        args.out.mkdir(parents=True, exist_ok=True)
        print(_heading(device, args))
        documents = []
        routes = [args.also] if args.also else []
        with Progress(len(cases) * (len(RUNS) + len(routes)), args.steps) as progress:
            for case in cases:
                rows, pictures = _run_case(case, device, DTYPES[args.dtype], routes, progress)
                documents.append(_document(case, rows))
                _write_pictures(case, pictures, args.out)
    for document in documents:
        _print(document)
    print(NOTES.format(memory=_ALLOCATED if device.type == "cuda" else _FOLLOWED))
    _write(documents, device, args)
    return 0


def _checked(args: argparse.Namespace) -> torch.device:
    missing = [package for name, package in EXTRAS.items() if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"{', '.join(missing)} must be installed for the demo: pip install {' '.join(missing)}")
    if args.steps < 1:
        raise CommandError(f"--steps must be at least 1, got {args.steps}")
    try:
        device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"--device must be a device that torch can use, got {args.device}: {error}") from error
    return device


def _run_case(
    case: Case, device: torch.device, dtype: torch.dtype, routes: list[str], progress: Progress
) -> tuple[list[Row], dict[str, list[Any]]]:
    """All runs of one model: the rows of its table, and the pictures by the run's name."""
    from .models import starting_latents

    pipe = case.build().to(device, dtype)
    start = starting_latents(case.latents_shape).to(device, dtype)
    rows: list[Row] = []
    latents: dict[str, Tensor] = {}
    total_calls = calls = 0
    for name in (*RUNS, *(f"route {route}" for route in routes)):
        progress.begin(f"{case.title}, {name}")
        row = Row(name, note=_too_little_memory(case, device) if name == MATH else "")
        if not row.note:
            try:
                with _attention(pipe, name):
                    calls = _warm_up(case, pipe, device, dtype)
                    latents[name] = _measure(case, pipe, start, row, progress)
            except UnsupportedAttention as error:
                row = Row(name, note=f"not run: {'; '.join(error.reasons)}")
            except (RuntimeError, MemoryError) as error:
                row = Row(name, note=_out_of_memory(error))
        if not row.note:
            total_calls = max(total_calls, calls)
            _compare(row, latents, calls, total_calls)
        rows.append(row)
        progress.end(row.note or f"{row.seconds:.1f} s")
    with _attention(pipe, OURS):  # the decoder has attention too
        return rows, {name: case.decode(pipe, latents[name]) for name in latents if name != MATH}


@contextmanager
def _attention(pipe: Any, name: str) -> Iterator[None]:
    """The pipeline with the attention of this run."""
    around: AbstractContextManager = sdpa_kernel(SDPBackend.MATH) if name == MATH else nullcontext()
    if name == SLICED:
        around = patch_ffn(getattr(pipe, "unet", None) or pipe.transformer, budget_mib=_FFN_BUDGET_MIB)
    if name not in (STOCK, MATH):
        from ...diffusers import PascalAttnProcessor

        if name in (OURS, SLICED):
            pipe.set_attn_processor(PascalAttnProcessor())
        else:
            config = AttentionConfig(route=name.removeprefix("route "))
            pipe.set_attn_processor(PascalAttnProcessor(config))
    with around:
        yield


def _warm_up(case: Case, pipe: Any, device: torch.device, dtype: torch.dtype) -> int:
    """One tiny generation, so that no run includes one-time costs. Returns its attention calls in the denoiser."""
    from .models import starting_latents

    arguments, shape = case.warm_up
    denoiser = getattr(pipe, "unet", None) or pipe.transformer
    calls, depth = 0, 0

    def entered(*_: Any) -> None:
        nonlocal depth
        depth += 1

    def left(*_: Any) -> None:
        nonlocal depth
        depth -= 1

    def counted(args: tuple, kwargs: dict[str, Any]) -> Tensor:
        nonlocal calls
        calls += depth > 0
        return TORCH_SDPA(*args, **kwargs)

    hooks = [denoiser.register_forward_pre_hook(entered), denoiser.register_forward_hook(left)]
    try:
        with SdpaMode(counted):
            latents = starting_latents(shape).to(device, dtype)
            pipe(**{**case.arguments, **arguments}, latents=latents, output_type="latent")
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _measure(case: Case, pipe: Any, start: Tensor, row: Row, progress: Progress) -> Tensor:
    """One generation: its figures into ``row``, its latents returned. Following each storage costs some microseconds
    per operator, far below the noise on a CPU; on CUDA the allocator's statistics are read and nothing is followed."""

    def step_done(pipe: Any, step: int, timestep: Any, values: dict) -> dict:
        progress.step()
        return values

    gc.collect()
    arguments = {**case.arguments, "latents": start.clone(), "output_type": "latent", "callback_on_step_end": step_done}
    is_cuda = start.device.type == "cuda"
    with record() as report, PeakMemory(start.device, follow=not is_cuda) as peak:
        began = time.perf_counter()
        latents = pipe(generator=torch.Generator().manual_seed(0), **arguments)[0]
        if is_cuda:
            torch.cuda.synchronize(start.device)
        row.seconds = time.perf_counter() - began
    row.peak_bytes = peak.peak_bytes
    row.launches = None if is_cuda else peak.launches
    row.calls = report.routes() or None
    return latents


def _compare(row: Row, latents: dict[str, Tensor], calls: int, total_calls: int) -> None:
    """The largest difference between this run's latents and the stock ones, and the number of its attention calls."""
    if STOCK in latents and row.name != STOCK:
        row.difference = (latents[row.name].double() - latents[STOCK].double()).abs().max().item()
    if row.name in (STOCK, MATH):
        row.calls = {"math" if row.name == MATH else "torch's choice": calls}
    elif row.calls is not None and sum(row.calls.values()) < total_calls:
        row.calls["not reached"] = total_calls - sum(row.calls.values())


def _too_little_memory(case: Case, device: torch.device) -> str:
    """Why the math run should not be tried, or ""."""
    available = available_bytes(device)
    needed = case.math_bytes + GIB // 4
    if available is None or needed <= available:
        return ""
    return f"not run: needs {needed / GIB:.1f} GiB, {available / GIB:.1f} GiB free"


def _out_of_memory(error: BaseException) -> str:
    """The note of a run that ran out of memory; any other error is raised again."""
    text = str(error)
    is_known = any(words in text.lower() for words in ("out of memory", "allocate memory", "not enough memory"))
    if not is_known and not isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)):
        raise error
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    found = re.search(r"tried to allocate ([\d.]+) (bytes|MiB|GiB)", text, re.IGNORECASE)
    if not found:
        return "out of memory"
    gib = float(found[1]) * {"bytes": 1, "MiB": MIB, "GiB": GIB}[found[2]] / GIB
    return f"out of memory: tried to allocate {gib:,.2f} GiB"


def _heading(device: torch.device, args: argparse.Namespace) -> str:
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' if count > 1 else ''}" if device.type == "cpu" else ""
    steps = f"{args.steps} step{'s' if args.steps > 1 else ''}"
    return f"{device_info(device).name}{threads}, {args.dtype}, torch {torch.__version__}, {steps}"


def _document(case: Case, rows: list[Row]) -> dict[str, Any]:
    fields = ("name", "title", "model", "tokens", "num_heads", "head_dim")
    return {**{field: getattr(case, field) for field in fields}, "rows": [asdict(row) for row in rows]}


def _print(document: dict[str, Any]) -> None:
    title = (
        f"{document['title']}: {document['model'].split()[-1]}, {document['tokens']:,} tokens, "
        f"{document['num_heads']} heads of {document['head_dim']}"
    )
    print_table(title, COLUMNS, [_cells(row) for row in document["rows"]])
    sentence = taken_away({row["name"]: row["peak_bytes"] for row in document["rows"]})
    if sentence:
        print(sentence, end="\n\n")


def taken_away(peaks: dict[str, int | None]) -> str:
    """What each step took away of the peak memory, in one sentence; "" where a run did not take place."""
    before, ours, sliced = (peaks.get(name) for name in (MATH, OURS, SLICED))
    stock = peaks.get(STOCK)
    if before is None or ours is None or sliced is None or stock is None:
        return ""
    fused = "torch has a fused kernel here" if stock < 2 * ours else "this device falls back to torch math"
    return (
        f"{fused}; of the {before / MIB:,.0f} MiB that a device without one needs, our attention saves "
        f"{(before - ours) / MIB:,.0f} MiB, and feed-forward layers in slices {(ours - sliced) / MIB:,.0f} of the "
        f"remaining {ours / MIB:,.0f} MiB."
    )


def _cells(row: dict[str, Any]) -> list[str]:
    calls = ", ".join(f"{count} {route}" for route, count in (row["calls"] or {}).items())
    return [
        row["name"],
        "-" if row["seconds"] is None else charts.short_number(row["seconds"]),
        "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MIB:,.0f}",
        "-" if row["difference"] is None else f"{row['difference']:.1e}" if row["difference"] else "0",
        row["note"] or calls,
    ]


def _write_pictures(case: Case, pictures: dict[str, list[Any]], out: Path) -> None:
    for name, ending in ((STOCK, "stock"), (OURS, "pascal")):
        frames = pictures.get(name, [])
        if len(frames) > 1:
            charts.write_gif(out / f"{case.name}_{ending}.gif", frames)
        elif frames:
            charts.write_png(out / f"{case.name}_{ending}.png", frames[0])
    if STOCK not in pictures or OURS not in pictures:
        return
    factor = 100
    differences = [
        charts.difference_picture(first, second, factor=factor)
        for first, second in zip(pictures[OURS], pictures[STOCK])
    ]
    shown = {**pictures, f"|{OURS} − stock| × {factor} (black: equal)": differences}
    title = f"{case.title}, random weights"
    if len(differences) > 1:
        title += f", the first {len(differences)} frames shown"
        rows = [[(label if i == 0 else "", frame) for i, frame in enumerate(frames)] for label, frames in shown.items()]
    else:
        cells = [(label, frames[0]) for label, frames in shown.items()]
        columns = 3 if len(cells) == 3 else 2
        rows = [cells[i : i + columns] for i in range(0, len(cells), columns)]
    charts.picture_sheet(out / f"{case.name}_compare.png", rows, title=title)


def _write(documents: list[dict[str, Any]], device: torch.device, args: argparse.Namespace) -> None:
    packages = ("torch", "diffusers", "transformers")
    versions = {name: importlib.metadata.version(name) for name in packages}
    report = {
        "command": getattr(args, "command_line", "pascal-attn demo"),
        "device": device_info(device).name,
        "threads": torch.get_num_threads(),
        "dtype": args.dtype,
        "versions": {"pascal-attention": __version__, "python": platform.python_version(), **versions},
        "cases": documents,
    }
    (args.out / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    panels = []
    for case in documents:
        for what, unit, key, scale in (("time", "s", "seconds", 1), ("peak memory", "MiB", "peak_bytes", MIB)):
            bars = [
                charts.Bar(row["name"], None if row[key] is None else row[key] / scale, row["note"])
                for row in case["rows"]
            ]
            panels.append((f"{case['title']}, {case['tokens']:,} tokens: {what}", unit, bars))
    charts.bar_chart(
        args.out / "chart.png",
        panels,
        title="The same generation, by different attentions",
        footer=_heading(device, args),
    )
    print(f"Pictures, chart.png and results.json are in {args.out}/")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence unrelated warnings of diffusers and transformers."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    before = of_diffusers.get_verbosity(), of_transformers.get_verbosity()
    of_diffusers.set_verbosity_error()
    of_transformers.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        of_diffusers.set_verbosity(before[0])
        of_transformers.set_verbosity(before[1])
