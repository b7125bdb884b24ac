"""The first run of the kernels, in real child processes whose kernels are right, wrong, fault and hang."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from attn_support import fresh
from attn_support.fused.emulation import CARD
from attn_support.fused.trials import Starter

from pascal_attn_core import AttentionConfig, explain
from pascal_attn_core.call import check_call
from pascal_attn_core.fused.code import prebuilt
from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.trust import trial
from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.fused.trust.trial import Job, Trials
from pascal_attn_core.machine import facts as machine
from pascal_attn_core.machine.runtime import Runtime, using
from pascal_attn_core.routes import choose, torch_kernel

ROOT = Path(trial.__file__).parents[3]
FORWARD, MASKED = Variant("forward", 64, "float32"), Variant("forward", 64, "float32", "bool")
# A child whose kernels load, and whose first answers are computed by this body.
_CHILD = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
import torch
from pascal_attn_core.fused.trust import trial
from pascal_attn_core.fused.gpu.runtime import DriverError
from pascal_attn_core.fused.trust.kernels import Kernels, KernelUnavailable

def functions(self, variant):
    if variant.mask == {unloadable!r}:
        raise KernelUnavailable("no NVRTC for sm_61")
    return {{}}

def largest_error(self, variant):
    if variant.name == {culprit!r}:
        {body}
    return 1e-7

Kernels.machine_reasons, Kernels.functions, Kernels.largest_error = (), functions, largest_error
trial.main()
"""


class Child(Starter):
    """Starts such children."""

    def __init__(self, body: str = "return 1e-7", unloadable: str = ""):
        super().__init__()
        self.code = _CHILD.format(root=str(ROOT), body=body, culprit=FORWARD.name, unloadable=unloadable)

    def started(self, errors: Any, *arguments: str) -> Any:
        return fresh.start(self.code, *arguments)


@pytest.fixture
def trials(tmp_path: Path) -> Callable[..., Trials]:
    """Makes the trials of a card that nobody has tried: each object is what one process knows."""
    return lambda start, **options: Trials(Runtime("cpu", CARD), start=start, folder=lambda: tmp_path, **options)


def test_kernels_that_are_right_are_tried_once_on_a_machine(trials, tmp_path) -> None:
    start = Child()
    first = trials(start)
    assert first.reason([FORWARD]) == ""
    assert first.reason([FORWARD, MASKED]) == ""  # it ships, so the same child has tried it
    (job,) = start.jobs
    assert job.needed == [["forward", 64, "float32", "none", False, ""]]
    shipped = prebuilt.all_variants(CARD.capability)
    assert len(job.others) == len(shipped) - 1
    again, gradient = trials(start), Variant("grad_query", 64, "float32")
    assert again.reason([MASKED]) == ""
    assert again.reason([FORWARD, gradient]) == ""
    assert [job.needed for job in start.jobs[1:]] == [[["grad_query", 64, "float32", "none", False, ""]]]
    (stored,) = tmp_path.iterdir()
    content = json.loads(stored.read_text())
    assert (content["card"], content["off"]) == ("GTX 1080 Ti", {})
    assert {FORWARD.name, gradient.name} <= set(content["good"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "forward-64-float32-none ended its process: SIGSEGV"),
        ("return 0.25", "forward-64-float32-none gives wrong numbers, 0.25 off"),
        ("return float('nan')", "forward-64-float32-none gives wrong numbers, 1e+30 off"),
        (
            "raise DriverError('CUDA_ERROR_ILLEGAL_ADDRESS in cuStreamSynchronize', 700)",
            "forward-64-float32-none ended its process: DriverError: CUDA_ERROR_ILLEGAL_ADDRESS in cuStreamSynchronize",
        ),
    ],
)
def test_a_child_that_dies_or_finds_wrong_numbers_leaves_the_route_off_for_good(trials, caplog, body, words) -> None:
    start = Child(body)
    here = trials(start)
    with caplog.at_level(logging.WARNING):
        reason = here.reason([FORWARD])
        assert here.reason([MASKED]) == reason
    (warning,) = [record.getMessage() for record in caplog.records]
    assert words in reason
    assert all(part in warning for part in (words, "pascal-attn selftest", "PASCAL_ATTN_TRUST=1"))
    assert trials(start).reason([MASKED]) == reason  # another process on the same machine
    assert len(start.jobs) == 1


# What says nothing about the kernels: a child's body -> the reason.
PASSING = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "ended its process: SIGKILL"),
    "ends": ("print('cannot: 1\\n', file=sys.stderr); sys.exit(3)", "ended its process: exit status 3: cannot: 1"),
    "raises": ("raise IndexError('an index')", "ended its process: exit status 1: IndexError: an index"),
    "hangs": ("time.sleep(600)", "forward-64-float32-none: it said nothing for 2 s"),
}


@pytest.mark.parametrize(("body", "words"), PASSING.values(), ids=PASSING)
def test_what_is_not_the_kernels_fault_leaves_the_route_off_in_this_process_only(trials, caplog, body, words) -> None:
    start = Starter(body)
    here = trials(start, seconds=2.0)
    assert words in here.reason([FORWARD])
    assert words in here.reason([MASKED])
    assert len(start.jobs) == 1
    assert start.children[0].returncode is not None
    (record,) = caplog.records
    assert record.getMessage().startswith("the fused route is left off in this process: ")
    assert trials(Starter()).reason([FORWARD]) == ""


def test_a_child_that_lacked_memory_is_tried_again_later(trials, monkeypatch) -> None:
    words = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"
    start = Child(f"raise RuntimeError('{words}')")
    here = trials(start)
    assert [here.reason([FORWARD]) for _ in range(2)] == [words, words]
    assert len(start.jobs) == 1
    monkeypatch.setattr(trial, "RETRY_SECONDS", 0.0)
    later = trials(start)
    assert later.reason([FORWARD]) == words
    later.start = Starter()
    assert later.reason([FORWARD]) == ""


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", "nvidia-smi -c DEFAULT"),
        ("CUDA error: MPS client failed to connect to the MPS control daemon", "nvidia-cuda-mps-control"),
    ],
)
def test_modes_of_a_card_that_let_no_child_in_are_named_with_what_to_do(trials, words, advice) -> None:
    reason = trials(Child(f"raise RuntimeError({words!r})")).reason([FORWARD])
    assert all(part in reason for part in (words, advice, "PASCAL_ATTN_TRUST=1"))


def test_an_interrupt_of_the_user_ends_the_child_and_comes_through(trials, monkeypatch) -> None:
    start = Starter("time.sleep(600)")
    here = trials(start)

    def interrupted(self, timeout=None):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        here.reason([FORWARD])
    assert start.children[0].returncode is not None


def test_a_variant_that_cannot_be_loaded_is_left_to_other_routes_and_the_others_are_good(trials, tmp_path) -> None:
    start = Child(unloadable="bool")
    here, why = trials(start), "no NVRTC for sm_61"
    assert [here.reason([variant]) for variant in (FORWARD, MASKED, MASKED)] == ["", why, why]
    assert len(start.jobs) == 1
    assert trials(start).reason([MASKED]) == why  # asked again in another process
    assert len(start.jobs) == 2


def _no_child(job: Job, answers: Path) -> subprocess.Popen[bytes]:
    raise AssertionError("no child is to be started")


def test_a_child_that_comes_to_no_result_decides_for_all_kinds_in_this_process(trials) -> None:
    start = Starter()
    start.code = "import no_such_module"
    here, words = trials(start), "the process that checks the kernels came to no result: exit status 1: ModuleNotFound"
    assert [here.reason([variant]).startswith(words) for variant in (FORWARD, MASKED)] == [True, True]
    assert len(start.jobs) == 1


def test_who_trusts_the_kernels_has_no_trial(trials, monkeypatch) -> None:
    monkeypatch.setenv("PASCAL_ATTN_TRUST", "1")
    assert trials(_no_child).reason([FORWARD]) == ""


def test_no_child_while_memory_is_short_or_in_a_forked_worker_but_later(trials, monkeypatch, caplog) -> None:
    here = trials(_no_child)
    monkeypatch.setattr(trial, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(trial, "free_bytes", lambda device: 100 << 20)
    for _ in range(2):
        assert here.reason([FORWARD]) == "the kernels are not tried while less than 512 MiB are free, got 100"
    (record,) = caplog.records  # is said once
    assert "the fused route is left off in this process: the kernels are not tried" in record.getMessage()
    monkeypatch.setattr(trial, "free_bytes", lambda device: 8 << 30)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert here.reason([FORWARD]) == "the kernels are not tried from a worker process that was forked"
    monkeypatch.undo()
    here.start = Starter()
    assert here.reason([FORWARD]) == ""


def test_a_host_has_what_ships_tried_before_any_call_and_makes_room_for_it(trials, monkeypatch) -> None:
    asked, start = [], Child()
    monkeypatch.setattr(trial, "free_bytes", lambda device: 8 << 30 if asked else 100 << 20)
    make_room = asked.append
    here = trials(start)
    for each in (here, here, trials(start)):  # the last one is another process
        assert each.ask_early(make_room) == ""
        assert each.reason([FORWARD, MASKED]) == ""
    assert [(job.needed, bool(job.others)) for job in start.jobs] == [([], True)]
    assert asked == [512 << 20]


@pytest.mark.parametrize("text", ["", "not json", '["a list"]', '{"good": 3, "off": 4}'])
def test_a_file_that_cannot_be_read_counts_as_none(trials, text) -> None:
    here = trials(_no_child)
    here._path().write_text(text)
    here.start = Starter()
    assert here.reason([FORWARD]) == ""


def test_threads_wait_for_one_child_whose_verdict_holds_where_nothing_can_be_stored() -> None:
    start = Starter()
    here = Trials(Runtime("cpu", CARD), start=start, folder=lambda: None)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(here.reason, [[FORWARD]] * 4)) == [""] * 4
    assert len(start.jobs) == 1


def test_the_child_as_it_is_started_imports_this_package_and_reports_what_ended_it(tmp_path, monkeypatch) -> None:
    """The real command, on this machine: the CPU is no card. What lies in the host's folder is not imported."""
    answers = tmp_path / "answers"
    answers.touch()
    for name in ("torch", "pascal_attn_core", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(5)")
    monkeypatch.chdir(tmp_path)
    child = trial.start_child(Job("cpu", "CPU", [["forward", 64, "float32", "none", False, ""]], []), answers)
    assert child.wait(120) == 0
    assert json.loads(answers.read_text()) == {
        "stopped": "RuntimeError: the fused kernel needs a GPU of NVIDIA's, or of AMD's with ROCm",
        "is_fault": False,
    }


@pytest.mark.parametrize(
    ("name", "value"), [("executable", "/opt/studio/studio.exe"), ("executable", None), ("frozen", True)]
)
def test_a_program_that_is_not_python_is_not_started_again(trials, monkeypatch, tmp_path, name, value) -> None:
    machine.ask_driver()  # starts a program, once per process
    monkeypatch.setattr(sys, name, value, raising=False)
    monkeypatch.setattr(subprocess, "Popen", None)
    reason = trials(trial.start_child).reason([FORWARD])
    assert reason.startswith("the process that checks the kernels cannot be started: ")
    assert "the path of a Python interpreter is not known" in reason
    assert list(tmp_path.iterdir()) == []  # off in this process only


class _Loaded(Kernels):
    machine_reasons = ()


class _Refused(Trials):
    is_trusted = False

    def reason(self, variants: object) -> str:
        return "its check failed"


def test_without_a_good_verdict_the_route_is_taken_by_name_only_and_auto_says_why(monkeypatch) -> None:
    """Where torch has no kernel either, the reason of the tiles names it."""
    query = torch.zeros(1, 2, 2048, 64)
    call, why = check_call(query, query, query), "the fused kernel is left off: its check failed"
    with using(Runtime("cpu", CARD, parts={Kernels: _Loaded, Trials: _Refused})):
        assert choose(call, AttentionConfig(route="fused")).route == "fused"
        assert choose(call, AttentionConfig()).route != "fused"
        assert why in explain(query, query, query)
        monkeypatch.setattr(torch_kernel, "find_form", lambda *_, **__: ["torch has no kernel for it"])
        choice = choose(call, AttentionConfig())
    assert (choice.route, choice.why) == ("tiled", f"torch has no kernel for it; {why}")
