"""Files of checks run inside the host, which takes ten seconds to import; a test asks for the outcome of each."""

import contextlib
import gc
import importlib
import json
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import TestCase, mock

import torch

MARKER = "CHECKS "


def names_in(path: Path) -> list[str]:
    """The checks of a file, without importing it."""
    return re.findall(r"^@check\ndef (\w+)\(", path.read_text(), re.MULTILINE)


def outcomes(output: str) -> dict[str, list[str]]:
    """Return what was printed of each check: ``["passed", ""]``, ``["skipped", why]``, ``["failed", traceback]``."""
    lines = [line.removeprefix(MARKER) for line in output.splitlines() if line.startswith(MARKER)]
    return dict(map(json.loads, lines))


CHECKS: dict[str, Callable[[], None]] = {}


class Skip(Exception):
    """This host cannot do it; the message says why."""


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def run_checks(module: str) -> None:
    """Run the checks of one module, each in inference mode, as the host executes nodes, and each from a clean host."""
    import comfy.model_management

    for name, function in CHECKS.items():
        if function.__module__ != module:  # a module borrows helpers from others
            continue
        with torch.inference_mode():
            try:
                function()
                outcome = ["passed", ""]
            except Skip as reason:
                outcome = ["skipped", str(reason)]
            except BaseException:
                outcome = ["failed", traceback.format_exc()]
        print(MARKER + json.dumps([name, outcome]), flush=True)
        comfy.model_management.interrupt_current_processing(False)
        gc.collect()
        pack("engine.runs")._recent.clear()


def pack(module: str) -> Any:
    """A module of the pack's folder ``nodes``, or with ``core.`` in front one of the core, as the host loaded it."""
    import nodes

    package = nodes.NODE_CLASS_MAPPINGS["PascalVAEAttention"].__module__.rpartition(".nodes.")[0]
    inner = f"pascal_attn_core.{module.removeprefix('core.')}" if module.startswith("core.") else f"nodes.{module}"
    return importlib.import_module(f"{package}.{inner}")


@contextlib.contextmanager
def runs() -> Iterator[list]:
    """The pack's runs of the block, in order; complete when it is left."""
    pack("engine.runs")._recent.clear()
    found: list = []
    yield found
    found.extend(pack("engine.runs").remembered())
    assert all(run.finished for run in found), "a run was not ended"


replaced = mock.patch.object  # ``with replaced(owner, name, value)``: another value for the block


@contextlib.contextmanager
def log_lines() -> Iterator[list[str]]:
    """Return what the pack logs in the block, which must be something."""
    with TestCase().assertLogs("pascal_attn", "INFO") as log:
        yield log.output


def raises(kind: type[BaseException], function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def close(ours: Any, stock: Any, rounding: float = 2e-5) -> None:
    """Equal within rounding, in parts of the largest value."""
    assert ours.shape == stock.shape, (ours.shape, stock.shape)
    difference = float((ours - stock).abs().max() / stock.abs().max().clamp_min(1e-30))
    assert difference <= rounding, difference


def run_of(function: Callable[[], Any], stock: Any = None) -> Any:
    """The only run of the pack in a call, whose result equals ``stock``."""
    with runs() as found:
        out = function()
    if stock is not None:
        close(out, stock)
    (run,) = found
    return run


def is_untouched(function: Callable[[], Any], stock: Any) -> None:
    """An unpatched object gives ``stock`` bit for bit, and the pack has no run of it."""
    with runs() as found:
        assert torch.equal(function(), stock)
    assert found == []


def unload() -> None:
    import comfy.model_management

    comfy.model_management.unload_all_models()
