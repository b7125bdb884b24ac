"""Cost of a fused call in Python before its first launch, without a GPU: ``python tools/fused_cost.py``.

The CPU takes the place of a GTX 1080 Ti whose driver launches nothing. Per kind of call it prints the least CPU time
of many calls, from the call to the first launch, and how many of our Python functions ran, in how many files.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pascal_attn_core import AttentionConfig, sdpa  # noqa: E402
from pascal_attn_core.fused.code.source import Variant  # noqa: E402
from pascal_attn_core.fused.gpu.cuda import CudaRuntime  # noqa: E402
from pascal_attn_core.fused.trust.kernels import Kernels  # noqa: E402
from pascal_attn_core.fused.trust.trial import Trials  # noqa: E402
from pascal_attn_core.machine.device import DeviceInfo  # noqa: E402
from pascal_attn_core.machine.runtime import Runtime, using  # noqa: E402
from pascal_attn_core.routes.timing import Timings  # noqa: E402

CARD = DeviceInfo("cuda", "GTX 1080 Ti", capability=(6, 1), num_sms=28, l2_bytes=2816 << 10)
PACKAGE = str(ROOT / "pascal_attn_core")


class IdleDriver:
    """Launches nothing, and keeps when it was first asked to."""

    first: float | None = None

    def load(self, index: int, cubin: bytes, functions: tuple[str, ...]) -> dict[str, None]:
        return dict.fromkeys(functions)

    def launch(self, *_: Any) -> None:
        if self.first is None:
            self.first = time.thread_time()


class TrustedKernels(Kernels):
    """Not checked at their first use: nothing is computed."""

    def machine_code(self, variant: Variant, *, compiled: bool = False) -> bytes:
        return b""

    def largest_error(self, variant: Variant) -> float:
        return 0.0


class GoodTrials(Trials):
    """A machine on which the process that checks the kernels has found them right."""

    def _try(self, needed: list[Variant]) -> str:
        self._good.update(variant.name for variant in needed)
        return ""


class FasterThanTorch(Timings):
    """A card on which the fused kernel was timed at half of the time of torch's."""

    def _timed(self, *_: Any) -> dict[str, float]:
        return {"fused": 1.0, "torch": 2.0}

    def save(self) -> None:
        """Nothing that was really timed."""


def calls() -> dict[str, Callable[[], object]]:
    """Kinds of calls by name."""
    square = torch.randn(1, 8, 64, 64)
    query, key = torch.randn(1, 32, 1, 128), torch.randn(1, 8, 1024, 128)
    long_key = torch.randn(1, 8, 9000, 128)
    long = torch.randn(1, 8, 1200, 64)
    by_name = AttentionConfig(route="fused")
    return {
        "64 x 64 tokens, by name": lambda: sdpa(square, square, square, config=by_name),
        "one token, grouped heads, by name": lambda: sdpa(query, key, key, enable_gqa=True, config=by_name),
        "one token, grouped heads, auto": lambda: sdpa(query, long_key, long_key, enable_gqa=True),
        "1200 x 1200 tokens, auto": lambda: sdpa(long, long, long),
    }


def cost(call: Callable[[], object], driver: IdleDriver, repeats: int) -> float:
    """The least CPU microseconds of one call until its first launch."""
    best = float("inf")
    for _ in range(repeats):
        driver.first = None
        start = time.thread_time()
        call()
        if driver.first is None:
            raise RuntimeError("the call was not taken by the fused route")
        best = min(best, driver.first - start)
    return best * 1e6


def functions_of(call: Callable[[], object]) -> list[str]:
    """Files of our Python functions that a call runs, one entry for each time one is called."""
    files: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20_000, help="calls of each kind (default: %(default)s)")
    repeats = parser.parse_args(arguments).repeats
    torch.set_num_threads(1)
    driver = IdleDriver()
    parts = {
        Kernels: lambda runtime: TrustedKernels(runtime, gpu=CudaRuntime(lambda: driver)),
        Timings: FasterThanTorch,
        Trials: lambda runtime: GoodTrials(runtime, folder=lambda: None),
    }
    print(f"{'us':>5} {'functions':>9} {'files':>5}  call")
    with using(Runtime("cpu", CARD, parts)), torch.no_grad():
        for name, call in calls().items():
            call()
            files = functions_of(call)
            gc.disable()
            found = cost(call, driver, repeats)
            gc.enable()
            print(f"{found:5.0f} {len(files):9d} {len(set(files)):5d}  {name}", flush=True)


if __name__ == "__main__":
    main()
