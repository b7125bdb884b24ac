"""Runs modules, whose arguments come by a socket, in forks of a process that has imported torch: by ``cpu`` the CPU is
the card of the strict stand-in where the kernels run, by ``cuda`` torch believes in a card in all (:mod:`.cards`)."""

import contextlib
import functools
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import types
from pathlib import Path
from typing import Any

import torch  # noqa: F401

import pascal_attn_core.cli.bench
import pascal_attn_core.cli.selftest  # noqa: F401

SUPPORT = Path(__file__).resolve().parents[1]
DEVICE = sys.argv[2]
ON_THE_CARD = ("tools.peers", "tools.gpu.card")


def child(job: dict[str, Any]) -> int:
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.path[0] = job["cwd"]
    option, module, *arguments = job["arguments"]
    assert option == "-m"
    sys.argv = [module, *arguments]
    try:
        with card(module):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def card(module: str) -> contextlib.AbstractContextManager[Any]:
    if DEVICE == "cpu" and module not in ON_THE_CARD:
        return contextlib.nullcontext()
    shared = sys.modules["attn_support"] = types.ModuleType("attn_support")
    shared.__path__ = [str(SUPPORT)]
    from attn_support.fused.device import CardKernels, emulated_card
    from attn_support.fused.driver import Compiler

    compiler, run = Compiler(), functools.partial(execute, json.loads(os.environ.get("FAULTS", "{}")))
    if DEVICE == "cuda":
        from attn_support.gpu import cards

        cards.believe(cards.CARDS["NVIDIA GeForce GTX 1080 Ti"], run=run, compiler=compiler)
        return contextlib.nullcontext()
    return emulated_card(run, kind=CardKernels, find_compiler=lambda arch: compiler)


def execute(faults: dict[str, str], launch: Any) -> None:
    """A launch in the emulation, but of kernels that are wrong, hang, or lose the context."""
    from attn_support.fused import device

    from pascal_attn_core.fused.gpu.runtime import DriverError

    fault = faults.get(launch.variant.name)
    if fault == "hangs":
        time.sleep(600)
    if fault == "loses the context":
        raise DriverError("an illegal memory access was encountered", 700)
    if fault == "ends its process":
        os.abort()
    if fault != "is wrong":
        device.execute(launch)


def serve(connection: socket.socket) -> None:
    """One module, in a process of its own; the one that has asked is told how it ended, and takes it along."""
    message, (out, err), _, _ = socket.recv_fds(connection, 1 << 20, 2)
    os.dup2(out, 1)
    os.dup2(err, 2)
    threading.Thread(target=lambda: connection.recv(1) or os._exit(1), daemon=True).start()
    status = child(json.loads(message))
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(str(status).encode())


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(sys.argv[1])
        server.listen()
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    try:
                        serve(connection)
                    finally:
                        os._exit(1)


main()
