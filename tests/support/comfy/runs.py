"""Runs and findings made by hand, as the pack's nodes would have recorded them, without a host and a card."""

from collections.abc import Iterable
from typing import Any

from attn_support.comfy.pack import core_module, node_module

RUNS, FIND = node_module("engine.runs"), node_module("reporting.findings")
DEVICE, WHEELS, INFO = (core_module(f"machine.{name}") for name in ("device", "wheels", "facts"))
GTX = DEVICE.DeviceInfo("cuda", "GTX 1080 Ti", (6, 1), 28, 2816 << 10, 11 << 30, "sm_61")
CU126 = WHEELS.TorchBuild("2.14.0+cu126", "cuda", "12.6", ("sm_50", "sm_60", "sm_70"))
CU130 = WHEELS.TorchBuild("2.14.0+cu130", "cuda", "13.0", ("sm_75", "sm_80", "sm_120"))


def machine(build: Any = CU126) -> Any:
    return INFO.Machine("0.1.0", "3.12.3", "Windows-11", build, (GTX,), (9 << 30,), driver="560.94")


def kind(block: str, outcome: str = "taken", route: str = "torch", why: str = "it is fused", **changes: Any) -> Any:
    shape = (1, 24, 4608, 128)
    route = route if outcome == "taken" else ""
    return RUNS.CallKind(block, outcome, route, why, **{"query": shape, "key": shape, "dtype": "float16", **changes})


def run(tallies: Iterable[tuple[Any, dict[str, Any]]] = (), **changes: Any) -> Any:
    """A finished run of ten seconds; each tally is a kind and the fields of its CallTally."""
    given = {"subject": "Flux", "part": "diffusion model", "settings": "route auto", "device": "cuda:0"}
    fields = {"unique_id": "5", "prompt_id": "p", "elapsed_s": 10.0, "finished": True, "peak_bytes": 7 << 30}
    made = RUNS.Run(**{**given, **fields, **changes})
    made.devices.add(made.device)
    for entry, values in tallies:
        made.tallies[entry] = RUNS.CallTally(**{"count": 1, **values})
    return made


def findings(*runs: Any, build: Any = CU126, attention: str = "attention_sub_quad", **changes: Any) -> Any:
    shown = [entry if isinstance(entry, FIND.Shown) else FIND.Shown(entry) for entry in runs]
    return FIND.Findings(machine(build), shown, host={"ComfyUI": "0.33.0", "attention": attention}, **changes)


def blocks(number: int, family: str = "double", **values: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return the same sentences for each of ``number`` blocks."""
    return [
        (kind(f"{family} {i}"), {"count": 4, "elapsed_ms": 40.0, "extra_bytes": 1 << 20, **values})
        for i in range(number)
    ]
