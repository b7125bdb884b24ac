"""``pascal-attn selftest``: it finds what is wrong, goes on after it, keeps its time, and says what to use."""

import dataclasses
import json
import time
from unittest.mock import Mock

import pytest
import torch
from attn_support.randomness import some

from pascal_attn_core.call import Results
from pascal_attn_core.cli import main
from pascal_attn_core.cli import selftest as command
from pascal_attn_core.cli.bench.shapes import Shape
from pascal_attn_core.fused.code.source import all_variants, gguf_variants, linear_variants
from pascal_attn_core.fused.trust.kernels import Kernels, KernelUnavailable
from pascal_attn_core.machine.device import DeviceInfo
from pascal_attn_core.machine.facts import Clocks, parse_clocks
from pascal_attn_core.machine.runtime import Runtime, using
from pascal_attn_core.routes.tiled import TiledRoute
from pascal_attn_core.selftest import Selftest, cases, describe
from pascal_attn_core.selftest.cases import ALL_ROUTES, CASES, DTYPES, Check, run_checks
from pascal_attn_core.selftest.kernels import check_kernels, checked_variants

CPU = torch.device("cpu")
SOME_DTYPES = tuple(some(DTYPES, 3))
GTX_1080_TI = DeviceInfo("cuda", "GTX 1080 Ti", capability=(6, 1), num_sms=28, l2_bytes=2816 << 10)


def plenty() -> float:
    return 1e9


@pytest.fixture(scope="module")
def whole() -> list[Check]:
    """Every check, on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "DTYPES", SOME_DTYPES)
        return list(run_checks(CPU, plenty))


def test_every_route_is_right_on_every_kind_of_call_or_says_why_it_does_not_take_it(whole) -> None:
    asked = {(check.case, check.route, check.dtype) for check in whole}
    assert len(asked) == len(whole) == ((len(CASES) - 1) * len(ALL_ROUTES) + 1) * len(SOME_DTYPES)
    assert [check.text for check in whole if not check.is_right] == []
    computed = {route: {c.case for c in whole if c.route == route and not c.refused} for route in ALL_ROUTES}
    assert computed["auto"] == {case.name for case in CASES}
    assert computed["tiled"] == {case.name for case in CASES} - {"varlen"}
    assert len(computed["torch"]) >= 9
    assert computed["fused"] == set()
    assert all(check.error > 1e-9 for check in whole if check.route == "tiled" and not check.refused), "it is measured"
    assert {c.refused for c in whole if c.route == "fused"} == {"the fused kernel needs a CUDA or ROCm device, got cpu"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_route_that_is_slightly_wrong_is_found(case, monkeypatch) -> None:
    """Half a per cent too large: as far as a forgotten key among two hundred."""
    right = TiledRoute.forward

    def forward(*args, **kwargs) -> Results:
        found = right(*args, **kwargs)
        return found._replace(out=found.out * 1.005, lse=None if found.lse is None else found.lse + 0.005)

    monkeypatch.setattr(TiledRoute, "forward", forward)
    monkeypatch.setattr(cases, "CASES", (case,))
    monkeypatch.setattr(cases, "DTYPES", ("float32",))
    monkeypatch.setattr(cases, "ALL_ROUTES", ("tiled",))
    wrong = [check for check in run_checks(CPU, plenty) if not check.is_right]
    assert len(wrong) == (case.way != "varlen")  # torch's kernel takes these by themselves
    assert all("differs from float64 by" in check.text for check in wrong)


def test_a_route_that_raises_does_not_end_the_test(monkeypatch) -> None:
    forward = Mock(side_effect=RuntimeError("CUDA error: an illegal memory access was encountered\nmore"))
    monkeypatch.setattr(TiledRoute, "forward", forward)
    monkeypatch.setattr(cases, "CASES", CASES[:2])
    monkeypatch.setattr(cases, "DTYPES", ("float32",))
    checks = list(run_checks(CPU, plenty))
    assert len(checks) == 2 * len(ALL_ROUTES)
    failed = {check.route: check.failed for check in checks if check.failed}
    assert failed["tiled"] == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_the_users_interrupt_ends_it(monkeypatch) -> None:
    monkeypatch.setattr(TiledRoute, "forward", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(run_checks(CPU, plenty))


class _Kernels(Kernels):
    """A card whose kernels are right but for one that is wrong and one that cannot be loaded."""

    machine_reasons = ()

    def largest_error(self, variant):
        if variant.name == "forward-40-float16-none":
            return 0.3
        if variant.name == "split-64-float32-none":
            raise KernelUnavailable("no kernel split-64-float32-none: CUDA_ERROR_NO_BINARY_FOR_GPU")
        return 1e-7


@pytest.fixture
def card():
    with using(Runtime(CPU, GTX_1080_TI, parts={Kernels: _Kernels})) as runtime:
        yield runtime


def test_every_kernel_is_tried_whatever_became_of_the_others(card) -> None:
    found = {check.name: check for check in check_kernels(CPU, plenty)}
    assert list(found) == [variant.name for variant in checked_variants("sm_61")]
    assert len(found) > 60
    assert {name for name, check in found.items() if not check.is_right} == {
        "forward-40-float16-none",
        "split-64-float32-none",
    }
    assert "differs from the definition by 3.0e-01" in found["forward-40-float16-none"].text
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in found["split-64-float32-none"].text


def test_kernels_on_tensor_cores_are_tried_where_there_are_some() -> None:
    kinds = {
        capability: {v.kind for v in checked_variants(f"sm_{capability[0]}{capability[1]}") if v.on_tensor_cores}
        for capability in ((6, 1), (7, 0), (7, 5))
    }
    assert kinds[6, 1] == set()
    for capability, generation in (((7, 0), "volta"), ((7, 5), "tensor")):
        forward = {generation, f"{generation}_small", f"{generation}_packed"}
        assert forward | {f"{generation}_grad_query", f"{generation}_grad_key_value"} <= kinds[capability]
    assert set(checked_variants()) <= {*all_variants(), *linear_variants(), *gguf_variants()}  # calls can ask for all


def test_routes_are_timed_interleaved_and_what_fails_is_named(monkeypatch) -> None:
    tiny = Shape("sd15", "", 1, 2, 2, 256, 256, 40)
    race, odd = command.race, Shape("odd", "", 1, 2, 2, 64, 64, 8)
    monkeypatch.setattr(command, "model_shapes", lambda device: [odd, tiny])

    def failing(call, *args):
        if call.query.shape[-1] == odd.head_dim:
            raise RuntimeError("CUDA error: unspecified launch failure\nmore")
        return race(call, *args)

    monkeypatch.setattr(command, "race", failing)
    second, first = command.run_speed(CPU, lambda: 3.0)
    by_name = {result["name"]: result for result in first["results"]}
    assert first["text"] == "B1 H2 N256 D40 float32"
    assert by_name["torch-fused"]["ratio"] == 1
    assert by_name["ours-tiled"]["seconds"] > 0
    assert by_name["ours-fused"]["seconds"] is None
    assert (second["shape"], second["results"]) == ("odd", [])
    assert second["failed"] == "RuntimeError: CUDA error: unspecified launch failure"
    found = _found(why_no_kernels=["x"], checks=[RIGHT], speed=[second, first])
    assert found.problems == ["timing B1 H2 N64 D8 float32: RuntimeError: CUDA error: unspecified launch failure"]


def _found(**fields) -> Selftest:
    return Selftest("cuda:0", ["Pascal Attention 0.2.0"], **fields)


RIGHT = Check("plain", "tiled", "float32", 1e-6, 2e-5)


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        ([], "use route auto (the default)"),
        ([Check("plain", "fused", "float16", 0.5, 1e-2)], "use fused=False (PASCAL_ATTN_FUSED=0), and report this"),
        ([Check("plain", "fused-tensor", "float16", 0.5, 1e-2)], "use fused=False"),
        ([Check("plain", "torch", "float16", 0.5, 1e-2)], 'use route="tiled" (PASCAL_ATTN_ROUTE=tiled), and report'),
        ([Check("plain", "tiled", "float16", failed="X: y")], "use torch's own attention, and report this"),
        ([Check("varlen", "auto", "float16", 0.5, 1e-2)], "use route auto, and report this"),
    ],
)
def test_the_last_line_says_whether_all_was_right_and_what_to_use(wrong, advice) -> None:
    found = _found(why_no_kernels=["no GPU"], checks=[RIGHT, *wrong])
    last = describe(found).splitlines()[-1]
    assert last.startswith("FAIL 1/2" if wrong else "PASS 1/1")
    assert advice in last


def test_speed_is_shown_with_its_share_of_the_peak() -> None:
    def result(name, seconds, ratio):
        return {"name": name, "seconds": seconds, "ratio": ratio, "flops": 4e9 / seconds, "extra_bytes": 1 << 20}

    results = [result("torch-fused", 0.002, 1.0), result("ours-fused", 0.001, 0.5), result("ours-auto", 0.001, 0.5)]
    entry = {"shape": "sdxl", "text": "B2 H10 N4096 D64 float32", "peak": 8e12, "failed": "", "results": results}
    clocks = Clocks(1480, 5005, 61, 212)
    found = _found(why_no_kernels=["x"], speed=[entry], checks=[RIGHT], clocks=clocks)
    text = describe(found)
    assert "1.00 50%" in text
    assert "clocks      1480 MHz, memory 5005 MHz, 61 C, 212 W after the load" in text
    assert "fused 0.50, auto 0.50" in text
    assert "auto takes 0.50 of the time of torch's own function (median)" in text.splitlines()[-1]


def test_the_command_prints_the_block_writes_the_figures_and_its_status_says_whether_all_was_right(
    monkeypatch, tmp_path, capsys
) -> None:
    monkeypatch.setattr(cases, "CASES", CASES[:2])
    path = tmp_path / "self.json"
    assert main(["selftest", "--device", "cpu", "--no-speed", "--json", str(path)]) == 0
    written, shown = json.loads(path.read_text()), capsys.readouterr().out
    assert written["verdict"] == shown.splitlines()[-1]
    assert written["verdict"].startswith("PASS")
    assert len(written["checks"]) == 2 * len(ALL_ROUTES) * len(DTYPES)
    assert written["device"] == "cpu"
    assert written["clocks"] is None
    monkeypatch.setattr(cases, "exact_limit", lambda plain, dtype: 1e-30)
    assert main(["selftest", "--device", "cpu", "--no-speed"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("FAIL")


def test_it_keeps_its_time_and_names_what_it_left_out() -> None:
    start = time.monotonic()
    found = command.selftest(CPU, 0.5)
    assert time.monotonic() - start < 30
    assert found.cut == ["some checks", "some speed"]
    assert "not reached in the time: some checks, some speed" in found.verdict
    unfinished = dataclasses.replace(found, checks=[], kernels=[], speed=[])
    assert unfinished.verdict == "UNFINISHED 0/0; not reached in the time: some checks, some speed; use more --seconds"


@pytest.mark.parametrize(
    ("said", "clocks", "text"),
    [
        ("1480, 5005, 61, 212.34\n", Clocks(1480, 5005, 61, 212.34), "1480 MHz, memory 5005 MHz, 61 C, 212 W"),
        ("324, 405, 38, [N/A]", Clocks(324, 405, 38, None), "324 MHz, memory 405 MHz, 38 C"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the driver.", None, ""),
    ],
)
def test_clocks_are_read_and_what_a_card_does_not_say_is_left_out(said: str, clocks: Clocks | None, text: str) -> None:
    found = parse_clocks(said)
    assert found == clocks
    assert found is None or found.text == text
