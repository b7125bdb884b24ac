"""Cost of a short call beyond torch's own function: sdpa, the switch, and code within ``with patch_sdpa()``.

python tools/short_calls.py [--rounds N]        one thread, CPU time; interleaved with torch's function in one process
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from pascal_attn_core import sdpa
from pascal_attn_core.patching.interception import TORCH_SDPA as TORCH
from pascal_attn_core.sdpa_patch import patch_sdpa

CALLS_A_ROUND = 100
KINDS = ("plain", "causal", "bool mask")


def microseconds(function: Callable[[], object], calls: int = CALLS_A_ROUND) -> float:
    """CPU time of one call of this thread."""
    start = time.thread_time_ns()
    for _ in range(calls):
        function()
    return (time.thread_time_ns() - start) / calls / 1e3


def differences(
    ours: Callable[[], object], torchs: Callable[[], object], rounds: int, within: Callable[[], Any] = nullcontext
) -> str:
    """Difference of the smallest rounds / median of the differences between neighbouring rounds.

    Args:
        within: makes what our calls run in.
    """
    pairs = []
    for _ in range(rounds):
        with within():
            taken = microseconds(ours)
        pairs.append((taken, microseconds(torchs)))
    smallest = min(a for a, _ in pairs) - min(b for _, b in pairs)
    return f"{smallest:+6.1f} / {statistics.median(a - b for a, b in pairs):+6.1f}"


def cells(query: torch.Tensor, kind: str, rounds: int) -> list[str]:
    """One line of the table."""
    mask = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool) if kind == "bool mask" else None
    options = {"attn_mask": mask, "is_causal": kind == "causal"}
    imported = lambda: TORCH(query, query, query, **options)  # noqa: E731
    by_name = lambda: F.scaled_dot_product_attention(query, query, query, **options)  # noqa: E731
    found = [differences(lambda: sdpa(query, query, query, **options), imported, rounds)]
    switch = patch_sdpa()
    found.append(differences(by_name, imported, rounds))
    switch.remove()
    return found + [differences(each, imported, rounds, patch_sdpa) for each in (by_name, imported)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of 100 calls each (default 40)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("microseconds above torch's function: smallest rounds / median of neighbouring rounds")
    print(f"{'':24s}{'sdpa':>18s}{'the switch':>18s}{'with: F.sdpa':>18s}{'with: by name':>18s}")
    with torch.no_grad():
        for tokens in (16, 64, 256):
            query = torch.randn(1, 1, tokens, 16)
            for kind in KINDS:
                line = "".join(f"{cell:>18s}" for cell in cells(query, kind, rounds))
                print(f"{f'{tokens} tokens, {kind}':24s}{line}", flush=True)


if __name__ == "__main__":
    main()
