"""``pascal-attn info``: one block of facts about this machine, to paste into a bug report."""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import AttentionConfig
from ..call import check_call
from ..config import default_config
from ..int8.backends import backend_on
from ..int8.report import COMPUTED_BY
from ..machine.facts import Machine, device_lines, device_names, head_lines, line, look_around
from ..machine.runtime import runtime_of
from ..machine.wheels import judge
from ..routes import route_names, why_not
from ..routes.timing import Timings

_CALL, _GQA_KEY = (1, 8, 4096, 64), (1, 2, 4096, 64)


@dataclass(frozen=True)
class Info:
    """The content of the block.

    Attributes:
        routes: per kind of call and per route why it cannot take such a call here (an empty list = it can).
        timed: for two ways to compute that were timed here, "the fused kernel relative to torch's kernel": the ratio of
            their times per kind of call.
        int8: what would compute linear layers in 8 bits, and why nothing faster; None = no device to ask about.
        int8_attention: why attention cannot run in 8 bits, not exact, where it is asked for.
    """

    machine: Machine
    config: AttentionConfig = field(default_factory=AttentionConfig)
    routes: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    timed: dict[str, dict[str, float]] = field(default_factory=dict)
    int8: tuple[str, str] | None = None
    int8_attention: list[str] = field(default_factory=list)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(options: argparse.Namespace) -> int:
    info = gather()
    print(json.dumps(document(info), indent=1) if options.json else describe(info))
    return 0


def gather() -> Info:
    """Gather it for this machine; starts CUDA on every card."""
    machine, config = look_around(), default_config()
    runs = judge(machine.devices[0], machine.build).runs
    runtime = runtime_of(torch.device(device_names()[0]))
    query = torch.empty(_CALL, dtype=torch.float16, device=runtime.device if runs else "meta")
    return Info(
        machine,
        config,
        routes=ask_routes(device_names()[0], config) if runs else {},
        timed={
            "the fused kernel relative to torch's kernel": runtime.part(Timings).ratios("torch"),
            "the fused kernel relative to torch's math attention": runtime.part(Timings).ratios("plain"),
        },
        int8=backend_on(runtime.device) if runs else None,
        int8_attention=why_not("fused-int8", check_call(query, query, query), config) if runs else [],
    )


def document(info: Info) -> dict[str, Any]:
    """The fields of :class:`Machine` and of :class:`Info` as plain values."""
    facts = dataclasses.asdict(info)
    return {**facts.pop("machine"), **facts}


def describe(info: Info) -> str:
    """The whole block as text."""
    lines = head_lines(info.machine)
    for number in range(len(info.machine.devices)):
        lines += ["", *device_lines(info.machine, number)]
    lines += _route_lines(info)
    if info.int8 is not None:
        way, why = info.int8
        lines.append(line("int8", f"linear layers, if asked for: by {COMPUTED_BY[way]}" + (f"; {why}" if why else "")))
        on_cpu, reasons = info.machine.devices[0].kind == "cpu", "; ".join(info.int8_attention)
        kernel = "by the operators that define it, for checks" if on_cpu else "by the kernel"
        lines.append(line("", f"attention, if asked for: {f'no: {reasons}' if reasons else kernel}"))
    return "\n".join(lines)


def _route_lines(info: Info) -> list[str]:
    machine = info.machine
    if not machine.devices or not judge(machine.devices[0], machine.build).runs:
        return ["", line("routes", "none can run on this GPU with this torch")]
    lines = ["", line("routes", f"calls of {list(_CALL)} in {', '.join(info.routes)}:")]
    for route in route_names():
        refused: dict[str, list[str]] = {}
        for kind, reasons in info.routes.items():
            if reasons.get(route):
                refused.setdefault("; ".join(reasons[route]), []).append(kind)
        lines += [line("", f"  {text}") for text in _route_text(route, list(info.routes), refused)]
    for what, ratios in info.timed.items():
        if ratios:
            lines.append(line("timed", f"time of {what}, for each kind of call timed so far:"))
            lines += [line("", f"  {ratio:5.2f}  {kind}") for kind, ratio in sorted(ratios.items())]
    return lines


def _route_text(route: str, kinds: list[str], refused: dict[str, list[str]]) -> list[str]:
    """The lines about a route: the calls that it takes, and those that it refuses, grouped by reason."""
    none = [kind for group in refused.values() for kind in group]
    if not none:
        return [f"{route:6s} takes all of them"]
    taken = [kind for kind in kinds if kind not in none]
    if not taken and len(refused) == 1:
        return [f"{route:6s} takes none of them: {next(iter(refused))}"]
    lines = [f"{route:6s} takes {', '.join(taken) or 'none of them'}"]
    return lines + [f"       not {', '.join(group)}: {reason}" for reason, group in refused.items()]


def ask_routes(device: str, config: AttentionConfig) -> dict[str, dict[str, list[str]]]:
    """Per kind of call and per route: why it cannot take it on this device."""
    found = {}
    for name in ("float32", "float16", "bfloat16"):
        query, key = (torch.empty(size, dtype=getattr(torch, name), device=device) for size in (_CALL, _GQA_KEY))
        for kind, keys in ((name, query), (f"{name} GQA", key)):
            call = check_call(query, keys, keys, enable_gqa=True)
            found[kind] = {route: why_not(route, call, config) for route in route_names()}
    return found
