"""``python -m tools.families``: every model family of diffusers with and without us, as a table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers

from pascal_attn_core.cli.bench.contest import quiet_torch, versions
from pascal_attn_core.cli.charts import print_table

from . import NotInThisVersion, families
from .proof import prove
from .without import unknown_models

_COLUMNS = ("family", "calls", "masked", "taken", "error", "torch's", "uniform", "no mask", "sliced", "left alone")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if something is not proven, 2 for invalid arguments.

    Args:
        argv: the arguments after the program's name; None = those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m tools.families",
        description="Runs each model family of the installed diffusers at a tiny size as it is, with exact attention, "
        "with ours, and with two wrong ones that must be noticed. docs/diffusers-families.md explains the columns.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only families whose name contains one of these")
    parser.add_argument("--out", type=Path, metavar="STEM", help="write STEM.json and STEM.md, and keep older runs")
    options = parser.parse_args(arguments)
    diffusers.utils.logging.set_verbosity_error()
    with quiet_torch(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows, absent = _prove_all(options.names)
    if not rows:
        parser.error(f"no family of diffusers {diffusers.__version__} is called {' or '.join(options.names)}")
    command = " ".join(["python -m tools.families", *arguments])
    this_run = {
        "versions": {**versions("diffusers", "transformers"), "device": "cpu, 1 thread"},
        "command": command,
        "families": rows,
        "absent": absent,
    }
    print_table(_title(this_run), _COLUMNS, [_cells(row) for row in rows])
    problems = [f"{row['family']}: {problem}" for row in rows for problem in row["problems"]]
    if not options.names:
        problems += [f"{name}: this table has no tiny configuration of it" for name in unknown_models()]
    for problem in problems:
        print("NOT PROVEN", problem)
    if options.out:
        _write(options.out, this_run)
    return 1 if problems else 0


def _prove_all(names: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    rows, absent = [], []
    wanted = [family for family in families() if any(name.lower() in family.name.lower() for name in names or [""])]
    for family in wanted:
        if sys.stderr.isatty():
            print(f"\r{family.name:<70}", end="", file=sys.stderr)
        try:
            rows.append(dataclasses.asdict(prove(family)))
        except NotInThisVersion:
            absent.append(family.name)
    return rows, absent


def _title(run: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return f"{len(run['families'])} families; {versions}"


def _cells(row: dict[str, Any]) -> list[str]:
    masked, maskless = row["masked"], row["maskless"]
    has_site = bool(row["taken"])
    return [
        row["family"],
        str(row["made"]) if row["made"] or not has_site else "older",
        str(masked) if masked else "-",
        _taken(row),
        f"{row['error']:.1e}" if has_site else "-",
        f"{row['torch_error']:.1e}" if has_site else "-",
        f"{row['uniform']:.2g}" if has_site else "-",
        "-" if maskless is None else f"{maskless:.2g}",
        str(row["sliced"] or "-"),
        "; ".join(row["left_alone"]),
    ]


def _taken(row: dict[str, Any]) -> str:
    counts = list(row["taken"].values())
    return "-" if not counts else str(counts[0]) if len(set(counts)) == 1 else " / ".join(map(str, counts))


# ---- the kept table --------------------------------------------------------------------------------------------------


def _write(stem: Path, this_run: dict[str, Any]) -> None:
    path = stem.with_suffix(".json")
    kept = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.exists() else []
    version = this_run["versions"]["diffusers"]
    runs = [run for run in kept if run["versions"]["diffusers"] != version] + [this_run]
    runs.sort(key=lambda run: [int(part) for part in run["versions"]["diffusers"].split(".")[:2]], reverse=True)
    path.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")
    stem.with_suffix(".md").write_text(markdown(runs), encoding="utf-8")


def markdown(runs: list[dict[str, Any]]) -> str:
    """The newest run as a table, with a column for each of the others."""
    newest, *others = runs
    made_by = f"Made by `{newest['command']}`: {_title(newest)}."
    lines = ["# Model families of diffusers", "", made_by, "", _LEGEND, ""]
    columns = [*_COLUMNS, *(f"diffusers {run['versions']['diffusers']}" for run in others)]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in newest["families"]:
        beside = [_beside(run, row["family"]) for run in others]
        lines.append("| " + " | ".join([*_cells(row), *beside]) + " |")
    return "\n".join(lines) + "\n"


_LEGEND = """\
Each model is the real class at a tiny size with random weights, real padding masks and rotary positions.

- **calls**: calls of torch's SDPA and FlexAttention in the stock model; `older`: it computes attention without SDPA.
- **masked**: how many of them have a mask that tells keys apart.
- **taken**: how many reach us, by `patch_pipeline`, `model.set_attn_processor` and `pipe.set_attn_processor` alike.
- **error**: the largest difference to exact (float64) attention, relative to the largest value of the output, in tiles
  of 5 x 4 tokens and with the default configuration; **torch's**: that of torch's own backends, the worse of two.
- **uniform**, **no mask**: the same when every key counts the same, or when masks are dropped.
- **sliced**: feed-forward modules that `patch_ffn` runs in slices at the same time.
- **left alone**: attention that is not ours.

In every row what was there before is back after removal, the same objects and the same bits."""


def _beside(run: dict[str, Any], family: str) -> str:
    row = next((row for row in run["families"] if row["family"] == family), None)
    if row is None:
        return "-"
    return f"{_taken(row)} of {_cells(row)[1]}, {_cells(row)[4]}" + (" NOT PROVEN" if row["problems"] else "")


if __name__ == "__main__":
    sys.exit(main())
