"""Cost of an attention call beside the attention itself when it goes through the ComfyUI pack's override.

    python tools/comfyui_cost.py [--tokens 8 --keys 8] [--baseline FOLDER]
    COMFYUI_PATH=... TINY_MODELS=... $COMFYUI_PYTHON tools/comfyui_cost.py --models krea2,wan_t2v [--baseline FOLDER]

The first runs without ComfyUI: the host's function is torch's SDPA over ``[B, N, H*D]``, as ``attention_pytorch`` calls
it. The second replays the calls of one step of real tiny models in the real ComfyUI; ``TINY_MODELS`` is a folder that
``tests/support/comfy/inside/comfy_tiny_build.py`` has filled. ``--baseline`` names another checkout of the pack, timed
in the same process, interleaved. Times are CPU time of this thread in microseconds per call, the least and the median
of many rounds; the do-nothing override is subtracted. The last lines are differences of the least times: what a taken
call costs beside a direct call of the core's ``sdpa`` with the same settings inside the same host function, and what
the NaN guard adds.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).parents[1]
INSIDE = ROOT / "tests" / "support" / "comfy" / "inside"
ROUNDS, WARM, CALLS = 200, 10, 40
HEADS, HEAD_DIM = 2, 8
TAKEN, UNGUARDED = "taken, route torch", "taken, without the NaN guard"
DIRECT = "direct call of sdpa, route torch"
Call = tuple[Callable[..., Tensor], tuple, dict[str, Any]]  # the host's function, and what the override gets with it


def load(folder: Path, name: str) -> Any:
    """The pack in ``folder`` as ComfyUI's loader imports it, under a name of its own."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def host_attention(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, **_: Any) -> Tensor:
    """Attention as ``attention_pytorch`` computes it."""
    batch, _, width = q.shape
    q, k, v = (t.view(batch, -1, heads, width // heads).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False)
    return out.transpose(1, 2).reshape(batch, -1, width)


def direct(name: str) -> Callable[..., Any]:
    """Calls the core's ``sdpa`` in place of torch's function inside the host's, whatever it is asked to call."""
    core = importlib.import_module(f"{name}.pascal_attn_core")
    config = core.AttentionConfig(route="torch")

    def sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        kwargs.pop("dropout_p", None)
        return core.sdpa(q, k, v, attn_mask, config=config, **kwargs)

    def attention(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        torchs, F.scaled_dot_product_attention = F.scaled_dot_product_attention, sdpa
        try:
            return func(*args, **kwargs)
        finally:
            F.scaled_dot_product_attention = torchs

    return attention


def overrides(name: str, label: str) -> dict[str, Callable[..., Any]]:
    """The pack's override at its defaults (which leaves these calls), and with every call taken by torch's kernel."""
    engine, override, scope, host = (
        importlib.import_module(f"{name}.nodes.{part}")
        for part in ("engine.engine", "patches.override", "patches.scope", "comfy.host")
    )
    host.throw_if_interrupted = lambda: None
    host.compute_device = lambda: torch.device("cpu")
    host.prompt_id = str
    config = engine.AttentionConfig
    settings = {
        "passed to ComfyUI": engine.PatchSettings(),
        TAKEN: engine.PatchSettings(config(route="torch"), 0),
        UNGUARDED: engine.PatchSettings(config(route="torch"), 0, nan_guard=False),
    }
    return {
        f"{label}{what}": override.make_override(engine.Engine(given, "Model", "model", None), scope.Scope(), None)
        for what, given in settings.items()
    }


def synthetic(tokens: int, keys: int) -> list[Call]:
    """One call of the stand-in for the host's function, as often as a round makes it."""
    q = torch.randn(2, tokens, HEADS * HEAD_DIM)
    k, v = torch.randn(2, keys, HEADS * HEAD_DIM), torch.randn(2, keys, HEADS * HEAD_DIM)
    more = {"attn_precision": None, "_inside_attn_wrapper": True, "transformer_options": {"block": ("input", 4)}}
    return [(host_attention, (q, k, v, HEADS), more)] * CALLS


def of_model(name: str) -> list[Call]:
    """The attention calls of one step of a tiny model in the real ComfyUI, as they reach an override."""
    comfy_inproc = importlib.import_module("comfy_inproc")
    calls: list[Call] = []

    def keep(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        calls.append((func, args, kwargs))
        return func(*args, **kwargs)

    model = comfy_inproc.load_model(name).clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = keep
    comfy_inproc.sample(model, name)
    return calls


def measure(functions: dict[str, Callable[..., Any]], calls: list[Call]) -> dict[str, list[float]]:
    """CPU microseconds per call, one number per round, the functions in turn in each."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(max(20, ROUNDS * CALLS // len(calls))):
        for name, function in functions.items():
            for func, args, kwargs in calls[:WARM]:
                function(func, *args, **kwargs)
            start = time.thread_time_ns()
            for func, args, kwargs in calls:
                function(func, *args, **kwargs)
            times[name].append((time.thread_time_ns() - start) / len(calls) / 1e3)
    return times


def import_seconds(folder: Path) -> float:
    """Least CPU time of several to import the pack, compiled to bytecode before, where torch and Pillow are imported
    already, as in ComfyUI. Torch's objects are collected before: when that falls due is not the pack's doing."""
    code = (
        "import gc, sys, time, importlib.util, torch, PIL.ImageDraw, PIL.ImageFont; gc.collect();"
        "start = time.process_time();"
        f"spec = importlib.util.spec_from_file_location('p', {str(folder / '__init__.py')!r},"
        f" submodule_search_locations=[{str(folder)!r}]); m = importlib.util.module_from_spec(spec);"
        "sys.modules['p'] = m; spec.loader.exec_module(m); print(time.process_time() - start)"
    )
    with tempfile.TemporaryDirectory() as bytecode:
        environment = os.environ | {"PYTHONPYCACHEPREFIX": bytecode, "PYTHONDONTWRITEBYTECODE": ""}
        run = functools.partial(subprocess.run, env=environment, capture_output=True, text=True, check=True)
        return min(float(run([sys.executable, "-c", code]).stdout) for _ in range(6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--keys", type=int, default=8)
    parser.add_argument("--baseline", type=Path, help="another checkout of the pack, timed beside this one")
    parser.add_argument("--models", default="", help="tiny models of ComfyUI whose calls are replayed, by name")
    options = parser.parse_args()
    torch.set_num_threads(1)
    packs = {"": ROOT} | ({"baseline: ": options.baseline.resolve()} if options.baseline else {})
    functions: dict[str, Callable[..., Any]] = {"nothing": lambda func, *args, **kwargs: func(*args, **kwargs)}
    with torch.inference_mode():
        if options.models:
            sys.path.append(str(INSIDE))
            sys.argv[1:] = ["--use-pytorch-cross-attention"]  # ComfyUI reads them: attention as on NVIDIA's cards
            measured = {f"{name}, one step": of_model(name) for name in options.models.split(",")}
        else:
            measured = {f"{options.tokens} x {options.keys} tokens": synthetic(options.tokens, options.keys)}
        for label, folder in packs.items():
            name = f"pack_{len(functions)}"
            load(folder, name)
            functions |= overrides(name, label) | {f"{label}{DIRECT}": direct(name)}
        gc.freeze()
        for title, calls in measured.items():
            measure(functions, calls)
            show(title, list(packs), measure(functions, calls))
    for label, folder in packs.items():
        print(f"{label}import: {import_seconds(folder):.3f} s beyond torch")


def show(title: str, labels: list[str], times: dict[str, list[float]]) -> None:
    nothing = times.pop("nothing")
    print(f"{title}: {min(nothing):.1f} us per call with an empty override; beside it")
    for name, found in times.items():
        least, median = min(found) - min(nothing), statistics.median(found) - statistics.median(nothing)
        print(f"  {name:50} least {least:6.1f} us   median {median:6.1f} us")
    for label in labels:
        taken, unguarded, route = (min(times[f"{label}{what}"]) for what in (TAKEN, UNGUARDED, DIRECT))
        print(f"{label}taken, beside the direct call: {taken - route:.1f} us; NaN guard: {taken - unguarded:.1f} us")


if __name__ == "__main__":
    main()
