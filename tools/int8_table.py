"""How far whole models are from float64 in float16, in bfloat16, with int8 linear layers and with int8 attention: small
models of diffusers with random weights.

    python tools/int8_table.py                       # print the table
    python tools/int8_table.py --write docs/int8.md  # put it between the marks in the document
"""

from __future__ import annotations

import argparse
import copy
import functools
import logging
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from pascal_attn_core.int8 import Int8Report, patch_attention_int8, patch_linear_int8
from tools.families import Draw, Family, sections
from tools.families.table import TABLE

BEGIN, END = "<!-- errors: tools/int8_table.py -->", "<!-- end of errors -->"
Call = Callable[[nn.Module, torch.dtype], Tensor]
SEEDS = 3


class Numbers(Draw):
    """Inputs that are the same for every dtype, up to its rounding."""

    def normal(self, *size: int) -> Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)), dtype=torch.float64)

    @staticmethod
    def exactly(value: float) -> Tensor:
        """A number ``[1]``."""
        return torch.tensor([value], dtype=torch.float64)


def models(section: str) -> dict[str, Callable[[], tuple[nn.Module, Call]]]:
    """For each model of a section of int8.txt what makes it, and a call of it in a dtype."""
    families = sections(TABLE.with_name("int8.txt"))[section]
    return {family.variant: functools.partial(_made, family) for family in families}


def _made(family: Family) -> tuple[nn.Module, Call]:
    def call(model: nn.Module, dtype: torch.dtype) -> Tensor:
        sample = model(**family.arguments(dtype, Numbers())).sample
        return sample[0] if isinstance(sample, list) else sample

    return family.as_given(), call


MODELS = models("float")


def far(out: Tensor, exact: Tensor) -> float:
    """The relative error of an output (root of the sum of squares)."""
    return ((out.double() - exact.double()).norm() / exact.double().norm()).item()


def errors_of(name: str, seed: int) -> tuple[dict[str, float], Int8Report]:
    """Relative errors of a model's output, by what computed it."""
    torch.manual_seed(seed)
    model, call = MODELS[name]()
    model.eval().requires_grad_(False)
    exact = call(copy.deepcopy(model).double(), torch.float64)
    found: dict[str, float] = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        cast = copy.deepcopy(model).to(dtype)
        found[short] = far(call(cast, dtype), exact)
        with patch_linear_int8(cast) as patch:
            found[f"int8, rest in {short}"] = far(call(cast, dtype), exact)
            if dtype == torch.float32:
                report = patch.report()
        if dtype == torch.float32:
            with patch_attention_int8(cast, max_error=1.0):
                found["int8 attention"] = far(call(cast, dtype), exact)
    return found, report


def table() -> str:
    """In Markdown: the medians over SEEDS models with random weights."""
    floats = ("float32", "float16", "bfloat16")
    columns = (*floats, *(f"int8, rest in {name}" for name in floats), "int8 attention")
    lines = ["| model | layers in int8 | error per layer, median and most | " + " | ".join(columns) + " |"]
    lines.append("|---|---|---|" + "---|" * len(columns))
    for name in MODELS:
        runs = [errors_of(name, seed) for seed in range(SEEDS)]
        report = runs[0][1]
        layers = f"{report.count('on')} of {len(report.lines)}"
        worst = report.worst
        assert worst is not None
        medians = (sorted(errors[column] for errors, _ in runs)[SEEDS // 2] for column in columns)
        cells = [name, layers, f"{report.median_error:.2%}, {worst.error:.2%}", *(f"{error:.1e}" for error in medians)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def command(about: str | None, marks: tuple[str, str], table: Callable[..., str], **options: dict[str, Any]) -> None:
    """Print a table, and put it between two marks of the document that ``--write`` names.

    Args:
        options: of the command line, name -> arguments of ``add_argument``; ``table`` is called with their values.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, option in (options | {"write": {"type": Path, "help": "the document"}}).items():
        parser.add_argument(f"--{name}", **option)
    given = vars(parser.parse_args())
    path = given.pop("write")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("diffusers").setLevel(logging.ERROR)  # on casts, which are what this is about
    with torch.no_grad():
        text = table(**given)
    print(text)
    if path:
        document, (begin, end) = path.read_text(encoding="utf-8"), marks
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        assert pattern.search(document), f"{path} has no marks {begin}"
        path.write_text(pattern.sub(lambda _: f"{begin}\n{text}\n{end}", document), encoding="utf-8")


if __name__ == "__main__":
    command(__doc__, (BEGIN, END), table)
