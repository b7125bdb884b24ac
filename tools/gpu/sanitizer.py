"""compute-sanitizer, where it is installed: it checks each access to memory of a kernel while it runs."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

# Patterns of kernels' names: each kernel and each way to read a mask, on geometries that ship; padding; every dtype; on
# tensor cores, where the card has some. Those whose warps wait for counters are apart: racecheck knows nothing of that
# and reports hazards there.
COUNTERS = "tensor-64-float16-none,tensor_even-64-float16-none,tensor_packed-64-float16-none"
OTHERS = (
    "forward-64-float32-none,forward-128-float16-bool,forward-40-padded-bfloat16-float,split-64-float32-none,"
    "grad_query-64-float32-none,grad_key_value-64-float32-none,grad_all-64-float32-none,grad_all-128-float16-none,"
    "int8-64-float16-none,int8-128-float32-bool,int8_linear-float16,gguf_linear-Q8_0-*,volta*-64-float16-none,"
    "tensor_[!ep]*-64-float16-none,tensor-32-float16-none,tensor_even-32-float16-none,tensor_packed-32-float16-none,"
    "tensor-128-padded-float16-bool,tensor_grad_key_value-64-float16-bool"
)
FALSE_ALARMS = "racecheck of counters"
# Name of a run -> tool, kernels.
RUNS = {
    "memcheck": ("memcheck", f"{OTHERS},{COUNTERS}"),
    "racecheck": ("racecheck", OTHERS),
    FALSE_ALARMS: ("racecheck", COUNTERS),
    "synccheck": ("synccheck", f"{OTHERS},{COUNTERS}"),
}
NAME = "compute-sanitizer"
ERRORS_STATUS = 86  # the exit status that it is asked for where it finds something
_SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")


def folders(env: Mapping[str, str]) -> Iterator[Path]:
    """Where it may be beside PATH: in CUDA's folders, those in /usr/local too, and in NVIDIA's wheels."""
    toolkits = [Path(env[name]) for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    installed = sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    # That of CUDA 13 knows neither Pascal nor Volta.
    installed.sort(key=lambda toolkit: not toolkit.name.startswith(("cuda-12", "cuda-11")))
    for toolkit in [*toolkits, *installed]:
        yield from (toolkit / "bin", toolkit / "compute-sanitizer")
    spec = importlib.util.find_spec("nvidia")
    for wheels in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(wheels).glob("*/bin"))


def command(path: str, tool: str) -> list[str]:
    """Arguments before the command that is to be checked."""
    return [path, "--tool", tool, "--error-exitcode", str(ERRORS_STATUS), "--print-limit", "20"]


def errors_in(output: str) -> int | None:
    """How many it found, by the last line of what it wrote; None: that line is not there."""
    counts = _SUMMARY.findall(output)
    return int(counts[-1]) if counts else None
