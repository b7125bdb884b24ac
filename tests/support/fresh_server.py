"""Imports torch, then forks once per line of its input and answers with exit code or process id: see ``fresh``."""

import atexit
import json
import os
import signal
import sys
import traceback
import types
from typing import Any

import torch  # noqa: F401


def child(job: dict[str, Any]) -> int:
    signal.alarm(int(job["timeout"]))
    for number, (name, flags) in enumerate((("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY))):
        os.dup2(os.open(job[name], flags | (os.O_CREAT if number else 0)), number)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.path[:1] = ["", *job["paths"]]  # in the place of this folder
    sys.argv = ["-c", *job["arguments"]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(job["code"], "<string>", "exec"), main.__dict__)  # noqa: S102
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    return code


def fork(job: dict[str, Any]) -> int:
    process = os.fork()
    if process == 0:
        code = 1
        try:
            code = child(job)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    return process


def ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def alone(job: dict[str, Any]) -> None:
    """The process id is printed at once; the exit code goes into a file once there is one."""
    waiting = os.fork()
    if waiting == 0:
        process = fork(job)
        print(process, flush=True)
        code = ended(process)
        with open(f"{job['ended']}.unfinished", "w") as file:
            file.write(str(code))
        os.rename(file.name, job["ended"])
        os._exit(0)


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        if "ended" in job:
            alone(job)
        else:
            print(ended(fork(job)), flush=True)


main()
