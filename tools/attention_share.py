"""Share of attention in one denoising step: the multiplications of real models, counted on tensors without data.

    python tools/attention_share.py
    python tools/attention_share.py --attention 3.5 --linear 3

Prints a table: the share of attention, of linear layers and of convolutions, and the speedup of a step if attention and
linear layers are so many times as fast. That is Amdahl's law, all kinds at the same rate: for attention alone 1 / (1 -
share + share / 1.5). The models are the published configurations of diffusers; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[1]))
from pascal_attn_core.patching.interception import SdpaMode, bind_sdpa
from tools.families import Family, sections
from tools.families.table import TABLE


class Step(NamedTuple):
    """Floating-point operations of one step, a multiply-add counted as two."""

    attention: int
    linear: int
    convolution: int

    def gain(self, attention: float, linear: float) -> float:
        """How many times as fast the step gets if attention and linear layers get so many times as fast."""
        return sum(self) / (self.attention / attention + self.linear / linear + self.convolution)


class _Attention:
    """Counts the two products of each call of torch's attention and computes neither of them."""

    def __init__(self) -> None:
        self.flops = 0

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        call = bind_sdpa(args, kwargs)
        assert not isinstance(call, str), call
        rows, keys = call.query.shape[:-1], call.key.shape[-2]
        self.flops += 2 * rows.numel() * keys * (call.query.shape[-1] + call.value.shape[-1])
        return call.query.new_empty(*rows, call.value.shape[-1])


def count(family: Family) -> Step:
    """The operations of one call of a model, made on the meta device."""
    with torch.device("meta"):
        model = family.as_given().eval()
        attention, rest = _Attention(), FlopCounterMode(display=False)
        with torch.no_grad(), rest, SdpaMode(attention):
            model(**family.arguments())
    by_operator = rest.get_flop_counts()["Global"]
    convolution = sum(flops for operator, flops in by_operator.items() if "conv" in str(operator))
    return Step(attention.flops, rest.get_total_flops() - convolution, convolution)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", type=float, default=1.5, help="how many times as fast")
    parser.add_argument("--linear", type=float, default=1.0, help="how many times as fast")
    faster = vars(parser.parse_args())
    words = ", ".join(f"{name} {times:g} times as fast" for name, times in faster.items() if times != 1)
    print(f"| one step | attention | linear | convolution | {words} gives |")
    print("|---|---|---|---|---|")
    for family in sections(TABLE.with_name("published.txt"))["steps"]:
        step = count(family)
        shares = " | ".join(f"{part / sum(step):.1%}" for part in step)
        print(f"| {family.variant} | {shares} | {step.gain(**faster):.2f} times |", flush=True)


if __name__ == "__main__":
    main()
