"""The CPU time that our code adds to one attention module of diffusers at 16 tokens: stock against ours.

python tools/diffusers_cost.py [--calls N] [names]        one thread; medians and minima of interleaved calls
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import torch
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import nn

from pascal_attn_core.diffusers import PascalAttnProcessor, patch_pipeline

WARM_UP = 300
Case = tuple[nn.Module, Callable[[nn.Module], object]]
JOINT = {"query_dim": 32, "heads": 2, "dim_head": 16, "added_kv_proj_dim": 32, "out_dim": 32, "context_pre_only": False}
IMAGE, TEXT = torch.randn(1, 16, 32), torch.randn(1, 5, 32)


def stable_diffusion() -> Case:
    return Attention(32, heads=2, dim_head=16), lambda module: module(IMAGE)


def sd3() -> Case:
    module = Attention(**JOINT, bias=True, processor=JointAttnProcessor2_0(), qk_norm="rms_norm")
    return module, lambda module: module(IMAGE, encoder_hidden_states=TEXT)


def flux_joint() -> Case:
    rotary = torch.randn(21, 16), torch.randn(21, 16)
    module = FluxAttention(**JOINT, bias=True, processor=FluxAttnProcessor())
    return module, lambda module: module(IMAGE, encoder_hidden_states=TEXT, image_rotary_emb=rotary)


def flux_single() -> Case:
    rotary = torch.randn(16, 16), torch.randn(16, 16)
    sizes = {"query_dim": 32, "heads": 2, "dim_head": 16, "out_dim": 32}
    module = FluxAttention(**sizes, bias=True, pre_only=True, processor=FluxAttnProcessor())
    return module, lambda module: module(IMAGE, image_rotary_emb=rotary)


def qwen_image() -> Case:
    rotary = tuple(torch.polar(torch.ones(tokens, 8), torch.randn(tokens, 8)) for tokens in (16, 5))
    module = Attention(**JOINT, bias=True, processor=QwenDoubleStreamAttnProcessor2_0(), qk_norm="rms_norm")
    return module, lambda module: module(IMAGE, encoder_hidden_states=TEXT, image_rotary_emb=rotary)


def wan() -> Case:
    rotary, image = (torch.randn(1, 16, 1, 12), torch.randn(1, 16, 1, 12)), torch.randn(1, 16, 24)
    module = WanAttention(dim=24, heads=2, dim_head=12, processor=WanAttnProcessor())
    return module, lambda module: module(image, None, None, rotary)


CASES = {case.__name__: case for case in (stable_diffusion, sd3, flux_joint, flux_single, qwen_image, wan)}


@torch.no_grad()
def measure(case: Case, calls: int) -> dict[str, list[float]]:
    """Microseconds of each call after the warm-up, taking turns."""
    stock, run = case
    patched, processed = copy.deepcopy(stock), copy.deepcopy(stock)
    patch_pipeline(patched)
    processed.set_processor(PascalAttnProcessor())
    modules = {"stock": stock, "patch_pipeline": patched, "processor": processed}
    times: dict[str, list[float]] = {name: [] for name in modules}
    for _ in range(WARM_UP + calls):
        for name, module in modules.items():
            start = time.thread_time_ns()
            run(module)
            times[name].append((time.thread_time_ns() - start) / 1e3)
    return {name: values[WARM_UP:] for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(CASES)}; all without one")
    parser.add_argument("--calls", type=int, default=3700)
    given = parser.parse_args()
    unknown = sorted(set(given.names) - set(CASES))
    if unknown:
        parser.error(f"name must be one of {', '.join(CASES)}, got {', '.join(unknown)}")
    torch.set_num_threads(1)
    for name in given.names or CASES:
        times = measure(CASES[name](), given.calls)
        line = [f"{name:17s} stock {statistics.median(times['stock']):6.1f} us"]
        for way in ("patch_pipeline", "processor"):
            median, least = (kind(times[way]) - kind(times["stock"]) for kind in (statistics.median, min))
            line.append(f"{way} {median:+.1f} us ({least:+.1f} at least)")
        print(", ".join(line))


if __name__ == "__main__":
    main()
