"""Cost of a short call beyond torch's own function: sdpa, the switch, and code within ``with patch_sdpa()``.

python tools/short_calls.py [--rounds N]        one thread, CPU time; interleaved with torch's function in one process
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

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


def differences(ours: Callable[[], object], torchs: Callable[[], object], rounds: int) -> tuple[float, float]:
    """(difference of the smallest rounds, median of the differences between neighbouring rounds) in microseconds."""
    pairs = [(microseconds(ours), microseconds(torchs)) for _ in range(rounds)]
    smallest = min(a for a, _ in pairs) - min(b for _, b in pairs)
    return smallest, statistics.median(a - b for a, b in pairs)


def rows(rounds: int) -> list[tuple[str, ...]]:
    found = []
    for tokens in (16, 64, 256):
        query = torch.randn(1, 1, tokens, 16)
        for kind in KINDS:
            mask = torch.ones(tokens, tokens, dtype=torch.bool) if kind == "bool mask" else None
            options = {"attn_mask": mask, "is_causal": kind == "causal"}
            torchs = lambda: TORCH(query, query, query, **options)  # noqa: B023, E731
            found.append((f"{tokens} tokens, {kind}", *_of_one(query, options, torchs, rounds)))
    return found


def _of_one(query: torch.Tensor, options: dict, torchs: Callable[[], object], rounds: int) -> list[str]:
    cells = [differences(lambda: sdpa(query, query, query, **options), torchs, rounds)]
    by_name = lambda: F.scaled_dot_product_attention(query, query, query, **options)  # noqa: E731
    patch = patch_sdpa()
    cells.append(differences(by_name, torchs, rounds))
    patch.remove()
    pairs = []
    for _ in range(rounds):
        with patch_sdpa():
            ours = microseconds(by_name), microseconds(torchs)
        pairs.append((*ours, microseconds(torchs)))
    for column in (0, 1):  # called as F's function, and by a name that was imported
        smallest = min(p[column] for p in pairs) - min(p[2] for p in pairs)
        cells.append((smallest, statistics.median(p[column] - p[2] for p in pairs)))
    return [f"{smallest:+6.1f} / {median:+6.1f}" for smallest, median in cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of 100 calls each (default 40)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("microseconds above torch's function: smallest rounds / median of neighbouring rounds")
    print(f"{'':24s}{'sdpa':>18s}{'the switch':>18s}{'with: F.sdpa':>18s}{'with: by name':>18s}")
    with torch.no_grad():
        for name, *cells in rows(rounds):
            print(f"{name:24s}" + "".join(f"{cell:>18s}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
