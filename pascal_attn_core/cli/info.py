"""``pascal-attn info``: one block of facts about this machine, to paste into a bug report."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import platform
import subprocess
from dataclasses import dataclass, field
from typing import Any

import torch

from ..call import check_call
from ..config import ROUTES, AttentionConfig, default_config
from ..device import DeviceInfo, device_info, free_bytes
from ..observe.wheels import TorchBuild, judge, wheel_for
from ..routes import why_not
from ..routes.timing import Timings
from ..runtime import runtime_of
from ..tiled.tiles import describe_plan, recommended_tile_size_for
from ..version import __version__

MIB, GIB = 1 << 20, 1 << 30
_LABEL = 12
_CALL, _GQA_KEY = (1, 8, 4096, 64), (1, 2, 4096, 64)
_SMI_DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_SMI = ("nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv")

# name: batch, num_heads, num_kv_heads, seq_len_q, seq_len_kv, head_dim
TYPICAL = {
    "SD1.5": (2, 8, 8, 4096, 4096, 40),
    "SDXL": (2, 10, 10, 4096, 4096, 64),
    "Flux": (1, 24, 24, 4608, 4608, 128),
    "Wan": (1, 12, 12, 32760, 32760, 128),
    "LLM 32/8": (1, 32, 8, 4096, 4096, 128),
}


@dataclass(frozen=True)
class SmiCard:
    """One line of nvidia-smi. ``capability`` is None where an old driver does not tell."""

    name: str
    capability: tuple[int, int] | None
    memory: str


@dataclass(frozen=True)
class Machine:
    """Everything that the block says, gathered; can be made by hand for any card.

    Attributes:
        devices: what torch can use: one per GPU, else the CPU alone.
        free: free memory of each device in bytes, None where nobody tells.
        smi: cards that nvidia-smi lists; asked only where torch sees no GPU.
        routes: per kind of call and per route why it cannot take such a call here (an empty list = it can).
        driver: version of NVIDIA's driver, "" if unknown.
        timed: kinds of calls for which the fused kernel and torch's were timed here, and ours over theirs.
    """

    package: str
    python: str
    system: str
    build: TorchBuild
    devices: tuple[DeviceInfo, ...]
    free: tuple[int | None, ...]
    smi: tuple[SmiCard, ...] = ()
    routes: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    config: AttentionConfig = field(default_factory=AttentionConfig)
    driver: str = ""
    timed: dict[str, float] = field(default_factory=dict)


def add_parser(subparsers: Any) -> None:
    """Add ``info`` to the command line."""
    parser = subparsers.add_parser("info", help="one block of facts about this machine, to paste into a bug report")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(func=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    machine = look_around()
    print(json.dumps(document(machine), indent=1) if options.json else describe(machine))
    return 0


def document(machine: Machine) -> dict[str, Any]:
    """Everything that the block says as plain values: the facts, and what follows from them.

    Returns:
        the fields of :class:`Machine`, and ``tiles`` per device and typical shape, ``complaints`` (as of
        :func:`complaints`) and ``budget_mib`` per device: what one call may take beside inputs and outputs.
    """
    facts = dataclasses.asdict(machine)
    facts["budget_mib"] = [_budget_mib(info, machine.config) for info in machine.devices]
    facts["tiles"] = [dict(_tile_plans(info, machine.config)) for info in machine.devices]
    facts["complaints"] = complaints(machine)
    return facts


def describe(machine: Machine) -> str:
    """The whole block as text."""
    lines = _head(machine)
    for number, (info, free) in enumerate(zip(machine.devices, machine.free)):
        lines += ["", *_device_lines(info, free, machine, number), *_tile_lines(info, machine.config)]
    lines += _route_lines(machine)
    return "\n".join(lines)


def describe_facts(machine: Machine) -> list[str]:
    """The lines that a bug report needs of any machine: no tiles and no routes."""
    lines = _head(machine)
    for number, (info, free) in enumerate(zip(machine.devices, machine.free)):
        lines += _device_lines(info, free, machine, number)
    return lines


def complaints(machine: Machine) -> list[str]:
    """A sentence for each card that this torch cannot use, or not well, with what to install; [] if all is fine."""
    verdicts = [(info.name, judge(info, machine.build)) for info in machine.devices]
    found = [f"{name}: {verdict.why}. Install: {verdict.install}" for name, verdict in verdicts if verdict.install]
    for card in machine.smi:
        if machine.build.kind == "cuda":
            found.append(f"{card.name}: torch {machine.build.version} finds no GPU: is the driver new enough for it?")
        else:
            wheel = wheel_for(card.capability or (6, 1))
            found.append(f"{card.name}: torch {machine.build.version} is built without CUDA. Install: {wheel}")
    return found


def _head(machine: Machine) -> list[str]:
    first = f"Pascal Attention {machine.package}, Python {machine.python}, {machine.system}"
    driver = [_line("driver", machine.driver)] if machine.driver else []
    return [first, *_torch_lines(machine), *driver]


def _torch_lines(machine: Machine) -> list[str]:
    build = machine.build
    toolkit = {"cuda": f"CUDA {build.toolkit}", "hip": f"ROCm {build.toolkit}"}.get(build.kind, "CPU only")
    lines = [_line("torch", f"{build.version}, {toolkit}")]
    if build.archs:
        lines.append(_line("code for", " ".join(build.archs)))
    for card in machine.smi:
        capability = "unknown" if card.capability is None else "{}.{}".format(*card.capability)
        lines.append(_line("unused GPU", f"{card.name}, compute capability {capability}, {card.memory}"))
        if build.kind == "cuda":
            lines.append(_line("", "torch is built with CUDA but finds no GPU: is the driver new enough for it?"))
        else:
            lines.append(_line("", "this torch is built without CUDA and cannot use it. Install"))
            lines.append(_line("", "  " + wheel_for(card.capability or (6, 1))))
    return lines


def _device_lines(info: DeviceInfo, free: int | None, machine: Machine, number: int) -> list[str]:
    if not info.is_gpu:
        lines = [
            _line("device", f"CPU, {info.num_sms} cores" + (f", {_size(info.l2_bytes)} cache" * bool(info.l2_bytes)))
        ]
    else:
        units = "compute units" if info.kind == "hip" else "SMs"
        lines = [_line("device", f"{info.name} ({_torch_name(info, number)}), {info.arch or info.kind}")]
        facts = [f"compute capability {info.capability[0]}.{info.capability[1]}"] if info.capability else []
        facts += [f"{info.num_sms} {units}", f"L2 {_size(info.l2_bytes) if info.l2_bytes else 'unknown'}"]
        lines.append(_line("", ", ".join(facts)))
        lines.append(_line("memory", _memory(info.total_bytes, free)))
        verdict = judge(info, machine.build)
        lines.append(_line("wheel", verdict.why))
        if verdict.install:
            lines.append(_line("install", verdict.install))
    return lines


def _tile_lines(info: DeviceInfo, config: AttentionConfig) -> list[str]:
    lines = [
        _line("tile size", f"{recommended_tile_size_for(info.l2_bytes)} (square, for code that asks for one number)")
    ]
    lines.append(_line("tiles", f"for a budget of {_budget_mib(info, config):g} MiB:"))
    for name, plan in _tile_plans(info, config):
        batch, heads, kv_heads, rows, _, head_dim = TYPICAL[name]
        shape = f"B{batch} H{heads}{f'/{kv_heads}' if kv_heads != heads else ''} N{rows} D{head_dim}"
        lines.append(_line("", f"  {name:9s}{shape:22s}{plan}"))
    return lines


def _budget_mib(info: DeviceInfo, config: AttentionConfig) -> float:
    return config.budget_mib if config.budget_mib is not None else info.default_budget_bytes() / MIB


def _tile_plans(info: DeviceInfo, config: AttentionConfig) -> list[tuple[str, str]]:
    """(name, plan in words) of each typical shape."""
    plans = []
    for name, (batch, heads, kv_heads, rows, keys, head_dim) in TYPICAL.items():
        plan = describe_plan(
            info,
            batch=batch,
            num_heads=heads,
            num_kv_heads=kv_heads,
            seq_len_q=rows,
            seq_len_kv=keys,
            head_dim=head_dim,
            budget_mib=config.budget_mib,
        )
        plans.append((name, plan))
    return plans


def _route_lines(machine: Machine) -> list[str]:
    if not machine.devices or not judge(machine.devices[0], machine.build).runs:
        return ["", _line("routes", "none can run on this GPU with this torch")]
    lines = ["", _line("routes", f"calls of {list(_CALL)} in {', '.join(machine.routes)}:")]
    for route in ROUTES:
        refused: dict[str, list[str]] = {}
        for kind, reasons in machine.routes.items():
            if reasons.get(route):
                refused.setdefault("; ".join(reasons[route]), []).append(kind)
        lines += [_line("", f"  {text}") for text in _route_text(route, list(machine.routes), refused)]
    if machine.timed:
        lines.append(_line("timed", "time of the fused kernel over that of torch's, once for each kind of call:"))
        lines += [_line("", f"  {ratio:5.2f}  {kind}") for kind, ratio in sorted(machine.timed.items())]
    return lines


def _route_text(route: str, kinds: list[str], refused: dict[str, list[str]]) -> list[str]:
    """What a route takes, and what it refuses by reason."""
    none = [kind for group in refused.values() for kind in group]
    if not none:
        return [f"{route:6s} takes all of them"]
    if len(none) == len(kinds) and len(refused) == 1:
        return [f"{route:6s} takes none of them: {next(iter(refused))}"]
    taken = [kind for kind in kinds if kind not in none]
    lines = [f"{route:6s} takes {', '.join(taken) or 'none of them'}"]
    return lines + [f"       not {', '.join(group)}: {reason}" for reason, group in refused.items()]


def look_around(*, asks_devices: bool = True) -> Machine:
    """Gather the facts of this machine.

    Args:
        asks_devices: also how much memory is free and what each route takes, which starts CUDA on every card.
    """
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        names = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    else:
        names = ["mps"] if torch.backends.mps.is_available() else ["cpu"]
    devices = tuple(device_info(name) for name in names)
    config, build = default_config(), torch_build()
    runs = judge(devices[0], build).runs
    return Machine(
        package=__version__,
        python=platform.python_version(),
        system=platform.platform(),
        build=build,
        devices=devices,
        free=tuple(_free(name) if asks_devices else None for name in names),
        smi=() if has_gpu else ask_nvidia_smi(),
        routes=ask_routes(names[0], config) if runs and asks_devices else {},
        config=config,
        driver=ask_driver() if build.kind == "cuda" else "",
        timed={
            str(kind): ratio
            for kind, ratio in runtime_of(torch.device(names[0])).part(Timings).known.items()
            if ratio is not None
        },
    )


def torch_build() -> TorchBuild:
    """The torch of this process."""
    if torch.version.hip is not None:
        return TorchBuild(torch.__version__, "hip", torch.version.hip, tuple(torch.cuda.get_arch_list()))
    if torch.version.cuda is not None:
        # the flags that torch was built with; get_arch_list() is empty where no driver is found
        archs = torch.cuda.get_arch_list() or (torch._C._cuda_getArchFlags() or "").split()
        return TorchBuild(torch.__version__, "cuda", torch.version.cuda, tuple(archs))
    return TorchBuild(torch.__version__, "cpu")


def ask_routes(device: str, config: AttentionConfig) -> dict[str, dict[str, list[str]]]:
    """Per kind of call and per route: why it cannot take it on this device."""
    kinds = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    found = {}
    for name, dtype in kinds.items():
        query = torch.empty(_CALL, dtype=dtype, device=device)
        key = torch.empty(_GQA_KEY, dtype=dtype, device=device)
        found[name] = _ask(query, query, config, enable_gqa=False)
        found[f"{name} GQA"] = _ask(query, key, config, enable_gqa=True)
    return found


def _ask(query: torch.Tensor, key: torch.Tensor, config: AttentionConfig, *, enable_gqa: bool) -> dict[str, list[str]]:
    call = check_call(query, key, key, enable_gqa=enable_gqa)
    return {route: why_not(route, call, config) for route in ROUTES}


def ask_nvidia_smi() -> tuple[SmiCard, ...]:
    """The cards that nvidia-smi lists; none where it is missing or fails."""
    return parse_smi(_output_of(_SMI))


@functools.cache
def ask_driver() -> str:
    """The version of NVIDIA's driver, asked once per process; "" where nvidia-smi is missing or fails."""
    return _output_of(_SMI_DRIVER).partition("\n")[0].strip()


def _output_of(command: tuple[str, ...]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def parse_smi(text: str) -> tuple[SmiCard, ...]:
    """The cards in nvidia-smi's CSV; lines that do not fit are left out."""
    cards = []
    for line in text.splitlines()[1:]:
        parts = [part.strip() for part in line.rsplit(",", 2)]
        if len(parts) != 3:
            continue
        major, _, minor = parts[1].partition(".")
        capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None
        cards.append(SmiCard(parts[0], capability, parts[2]))
    return tuple(cards)


def _torch_name(info: DeviceInfo, number: int) -> str:
    return f"cuda:{number}" if info.kind in ("cuda", "hip") else f"{info.kind}:{number}"


def _free(name: str) -> int | None:
    try:
        return free_bytes(name)
    except RuntimeError:  # a card that the driver lists but cannot start
        return None


def _line(label: str, text: str) -> str:
    return f"{label:{_LABEL}s}{text}".rstrip()


def _size(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes < GIB else f"{num_bytes / GIB:.1f} GiB"


def _memory(total: int, free: int | None) -> str:
    text = _size(total) if total else "unknown"
    return text if free is None else f"{text}, {_size(free)} free"
