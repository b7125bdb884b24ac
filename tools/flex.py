"""Memory and time of FlexAttention in tiles, against the dense call.

    python tools/flex.py                    8,192 tokens, 4 heads of 64, a window of 256
    python tools/flex.py --tokens 32768

One CPU thread; times are the median of calls in turn.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch

from pascal_attn_core import AttentionConfig, create_block_mask, flex_attention, sdpa
from pascal_attn_core.call.flex_rules import known_of
from pascal_attn_core.contest.timing_table import median_times
from pascal_attn_core.observe.memory import measure

MIB = 1 << 20
WINDOW = 256


def near(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A window."""
    return (query - key).abs() <= WINDOW


def alibi(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    """A bias by distance."""
    return score - (query - key).abs() * 2.0 ** -(head + 1)


def documents(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Documents of 512 tokens, which are no window."""
    return query // 512 == key // 512


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    tokens, config = parser.parse_args().tokens, AttentionConfig(route="tiled")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    query, key, value = torch.randn(3, 1, 4, tokens, 64).unbind()
    made = measure(lambda: create_block_mask(near, None, None, tokens, tokens, device="cpu"))
    masks = {"window": made.out, "documents": create_block_mask(documents, None, None, tokens, tokens, device="cpu")}
    known_of(masks["window"]).clear()  # as a BlockMask of torch's own function
    print(f"create_block_mask, {tokens} tokens: {made.peak_bytes / MIB:.1f} MiB")
    calls: dict[str, Callable[[], Any]] = {
        "dense": lambda: sdpa(query, key, value, config=config),
        "window, as a window": lambda: sdpa(query, key, value, window=(WINDOW, WINDOW), config=config),
        "window": lambda: flex_attention(query, key, value, None, masks["window"], config=config),
        "documents": lambda: flex_attention(query, key, value, None, masks["documents"], config=config),
        "window, alibi": lambda: flex_attention(query, key, value, alibi, masks["window"], config=config),
    }
    with torch.no_grad():
        times = median_times(list(calls.values()), torch.device("cpu"))
        taken = {name: milliseconds / 1e3 for name, milliseconds in zip(calls, times)}
        for name, call in calls.items():
            extra = measure(call).extra_bytes / MIB
            print(f"{name:24}{taken[name]:8.2f} s{taken[name] / taken['dense']:8.1%} of dense{extra:8.2f} MiB")
    for name, mask in masks.items():
        share = 1 - mask.sparsity() / 100
        ratio = taken[name] / taken["dense"] / share
        print(f"{name}: {share:.1%} of the blocks, {ratio:.2f} times that share of the dense call's time")


if __name__ == "__main__":
    main()
