"""The report's text, for runs made by hand."""

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from attn_support.comfy.pack import core_module, node_module
from attn_support.comfy.runs import FIND, INFO, RUNS, blocks, findings, kind, machine, run

CHECK, TEXT, WORDS = (node_module(f"reporting.{name}") for name in ("exactness", "text", "words"))
REPORT = node_module("report")

PATCH, SAMPLER, REPORTER = "PascalAttentionPatch", "KSampler", "PascalAttentionReport"


def graph(*, through_report: bool = True, **more: tuple[str, dict]) -> dict:
    """A patch (node 5), a sampler (6) and the report (9); ``n7=(class, inputs)`` adds or replaces node 7."""
    nodes = {
        "5": (PATCH, {"model": ["1", 0]}),
        "6": (SAMPLER, {"model": ["5", 0], "seed": 3}),
        "9": (REPORTER, {"value": ["6", 0]} if through_report else {}),
    }
    nodes |= {name.removeprefix("n"): node for name, node in more.items()}
    return {key: {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in nodes.items()}


MERGE = {"n7": ("ModelMergeSimple", {"model1": ["1", 0], "model2": ["5", 0]}), "n6": (SAMPLER, {"model": ["7", 0]})}
TWICE = {"n7": ("LoraLoader", {"model": ["5", 0]}), "n8": (PATCH, {"model": ["7", 0]})}
TWICE |= {"n6": (SAMPLER, {"model": ["8", 0]})}
ON_MODEL = {"n9": (REPORTER, {"value": ["5", 0]}), "n6": (SAMPLER, {"model": ["9", 0]})}
NO_VALUE = "Nothing is connected to this report"
# What is on record (of this prompt: "now"), the graph, which of it is shown, and the remarks.
CHOICES = {
    "this prompt's, and no others": ([run(prompt_id="old"), run(prompt_id="now")], graph(), [1], []),
    "a cached sampler's newest": (
        [run(prompt_id="a"), run(prompt_id="b")],
        graph(),
        [1],
        ["or this report does not stand behind what samples or decodes"],
    ),
    "a cached sampler's beside a decoder's": (
        [run(prompt_id="a"), run(prompt_id="now", unique_id="7", part="VAE")],
        graph(n7=("PascalVAEAttention", {})),
        [0, 1],
        ["in its cache"],
    ),
    "of the same kind of node, although two workflows may number nodes alike": (
        [run(prompt_id="a", part="feed-forward")],
        graph(),
        [],
        ["if one is on record"],
    ),
    "a patch connected to nothing": ([], {"5": graph()["5"]}, [], ["its first output is not connected"]),
    "a patch whose CLIP alone is used, and has run": (
        [run(prompt_id="now", part="text encoder")],
        {**graph(), "6": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["5", 1]}}},
        [0],
        ["its first output is not connected"],
    ),
    "a report that may come too early": ([], graph(through_report=False), [], ["has not run in this prompt", NO_VALUE]),
    "a patch that another one behind it replaces": (
        [run(prompt_id="a"), run(prompt_id="now", unique_id="8")],
        graph(**TWICE),
        [1],
        ["Pascal Attention Patch (node 5) has no effect: node 8 of the same kind after it takes its place."],
    ),
    "a patch on a model that only gives weights": (
        [run(prompt_id="a")],
        graph(**MERGE),
        [],
        ["has no effect: ModelMergeSimple takes only the weights of model2"],
    ),
    "a report on the model itself": (
        [run(prompt_id="a")],
        graph(**ON_MODEL),
        [0],
        ["Connect the sampler's LATENT or the decoder's IMAGE to it. Its most recent earlier run is shown"],
    ),
    "no patch in the prompt": (
        [run(blocks(2), prompt_id="a")],
        {"9": graph()["9"]},
        [],
        ["no Pascal node that patches anything in this prompt (bypassed and muted nodes count as absent)."],
    ),
}


@pytest.mark.parametrize("case", CHOICES)
def test_runs_are_chosen_and_what_is_missing_is_told(case):
    known, prompt, expected, told = CHOICES[case]
    shown, remarks = FIND.choose_runs(known, prompt, "now", "9" if "9" in prompt else None)
    assert [entry.run for entry in shown] == [known[i] for i in expected]
    assert [entry.run.prompt_id != "now" for entry in shown] == ["of an earlier prompt" in e.remark for e in shown]
    assert len(remarks) == len(told)
    assert all(words in remark for words, remark in zip(told, remarks)), remarks


def test_a_run_that_goes_on_is_marked():
    shown, _ = FIND.choose_runs([run(finished=False, elapsed_s=0.0)], graph(), "p", "9")
    assert "not finished" in shown[0].remark
    assert TEXT.report_text(findings(*shown))


def test_a_node_that_runs_again_in_its_prompt_goes_on_with_its_run(monkeypatch):
    monkeypatch.setattr(RUNS, "_recent", [])
    first = RUNS.remember(run(blocks(2), warnings=["beware"]))
    again = run(warnings=["beware", "of the dog"], finished=False, elapsed_s=0.0)
    assert RUNS.remember(again) is first
    assert not first.finished
    first.finish()
    assert first.elapsed_s == pytest.approx(10.0, abs=1.0)
    assert first.warnings == ["beware", "of the dog"]
    for other in (run(unique_id="6"), run(prompt_id="next"), run(part="VAE"), run(settings="route tiled")):
        assert RUNS.remember(other) is other
    assert len(RUNS.remembered()) == 5


def test_blocks_whose_names_differ_in_numbers_only_are_told_together():
    text = TEXT.report_text(findings(run([*blocks(19), *blocks(38, "single")])))
    assert "taken       228 x torch, q[1, 24, 4608, 128] k[1, 24, 4608, 128] float16, mask none," in text
    assert "in double 0 to double 18, single 0 to single 37: it is fused" in " ".join(text.split())
    layers = [f"encoder.layers.{i}.self_attn" for i in range(12)]
    assert FIND.blocks_text(layers) == "encoder.layers.0.self_attn to encoder.layers.11.self_attn"
    assert FIND.blocks_text([f"block {chr(97 + i)}" for i in range(9)]).endswith("block f and 3 more")


def test_reasons_routes_memory_and_troubles_are_all_told():
    tallies = [
        (kind("double 0", route="tiled", why="no kernel"), {"count": 3, "elapsed_ms": 5000, "extra_bytes": 63 << 20}),
        (kind("double 1", route="tiled", why="no kernel"), {"budget_halvings": 2, "repaired": 1}),
        (kind("double 1", "passed to ComfyUI", why="fewer than 1024 keys"), {"count": 7}),
    ]
    text = " ".join(TEXT.report_text(findings(run(tallies, notes=["compiled"], warnings=["beware"]))).split())
    facts = ["taken 4 x tiled, q[", "in double 0 to double 1: no kernel", "passed 7 x passed to ComfyUI, q["]
    facts += ["in double 1: fewer than"]
    facts += ["5 s in attention of 10 s (50%)", "+63 MiB", "11 calls, 4 taken (tiled 4), 7 passed to ComfyUI"]
    facts += [
        "at most 63 MiB in a call",
        "would store at least 972 MiB",
        "memory in the run was 7 GiB",
        "halved 2 times",
    ]
    facts += ["1 output not finite", "note compiled", "WARNING beware"]
    assert [fact for fact in facts if fact not in text] == []


def test_shares_of_several_devices_stay_below_one():
    made = run([(kind("double 0"), {"elapsed_ms": 15000.0})])
    made.devices.add("cuda:1")
    assert made.share == 0.75
    assert "on 2 devices (75%)" in TEXT.report_text(findings(made))


def test_the_bug_report_shares_the_facts_of_the_command_line():
    block = TEXT.report_text(findings(run(blocks(2)))).partition("copy from here")[2]
    for line in INFO.describe_facts(machine()):
        assert line in block
    assert "driver      560.94" in block
    assert "tiles" not in block


def sample(dtype: torch.dtype = torch.float32, factor: float = 1.0, mask: torch.Tensor | None = None):
    query, key, value = (torch.randn(n, 64, dtype=dtype) for n in (64, 300, 300))
    right = CHECK.reference_sdpa(query.float(), key.float(), value.float(), mask)[0]
    entry = kind("double 0", dtype=str(dtype).removeprefix("torch."))
    return RUNS.Sample(entry, query, key, value, mask, None, (right * factor).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_right_answer_is_exact_and_a_wrong_one_is_not(dtype):
    assert CHECK.exactness_of(sample(dtype)).is_exact
    found = CHECK.exactness_of(sample(dtype, 1.1))
    assert not found.is_exact
    assert found.text.startswith("NOT EXACT (rounding explains at most")


def test_masks_take_part_in_the_check():
    assert CHECK.exactness_of(sample(mask=torch.rand(1, 300) > 0.5)).is_exact
    assert not CHECK.exactness_of(replace(sample(), mask=torch.rand(64, 300) > 0.5)).is_exact


def test_inputs_that_were_nan_already_are_not_held_against_the_answer(host):
    broken = sample()
    broken.value[5, 5] = math.nan
    broken.out[:] = math.nan
    RUNS.remember(run(blocks(3), device="cpu", sample=broken))
    text = report_of()[2]
    assert "exactness could not be checked: query, key or value held NaN" in text
    assert "NOT EXACT" not in text


def test_rows_of_a_query_that_was_nan_are_left_out():
    broken = sample()
    broken.query[7] = math.nan
    found = CHECK.exactness_of(broken)
    assert found.is_exact
    assert "in 63 rows" in found.text
    for wrong in (broken.out[8] + 1, math.nan):
        broken.out[8] = wrong
        assert not CHECK.exactness_of(broken).is_exact


def test_the_check_lets_the_tensors_of_a_finished_run_go_and_remembers_the_result():
    made = run(blocks(1), sample=sample(), finished=False)
    assert CHECK.check(made) is None
    held = weakref.ref(made.sample.key)
    made.finished = True
    first = CHECK.check(made)
    gc.collect()
    assert held() is None
    assert CHECK.check(made) is first


@pytest.fixture
def host(monkeypatch):
    """No ComfyUI: the facts that the node would ask it for."""
    monkeypatch.setattr(REPORT.host, "versions", lambda: {"ComfyUI": "0.33.0", "attention": "attention_pytorch"})
    monkeypatch.setattr(REPORT.host, "prompt_id", lambda: "p")
    RUNS._recent.clear()
    yield
    RUNS._recent.clear()


def report_of(**inputs):
    """Return the node's outputs for the runs that are remembered."""
    return REPORT.PascalAttentionReport().report(True, None, "9", graph(), **inputs)["result"]


def test_the_node_hands_its_value_on_and_returns_picture_and_text(host):
    RUNS.remember(run(blocks(3), device="cpu", sample=sample()))
    value = {"samples": torch.zeros(1)}
    given = REPORT.PascalAttentionReport().report(True, value, "9", graph())
    same, image, text = given["result"]
    assert same is value
    assert (image.shape[0], image.dtype) == (1, torch.float32)
    assert 0 <= float(image.min()) < float(image.max()) <= 1
    assert "12 calls, 12 taken" in text
    assert "exact within rounding" in text
    assert given["ui"]["text"] == [text]


def test_a_finished_run_without_calls_and_an_inexact_answer_are_alarms_above_everything_else(host, caplog):
    RUNS.remember(run(device="cpu"))
    text = report_of()[2]
    assert text.index("=== WARNING ===\n            Flux, diffusion model: no attention") < text.index("settings")
    assert "no attention call reached the patch" in caplog.text
    RUNS.remember(run(blocks(3), device="cpu", sample=sample(factor=1.5), unique_id="6"))
    assert " Flux, diffusion model: NOT EXACT" in report_of()[2]


@pytest.fixture
def selftest(host, monkeypatch):
    """The self-test on the CPU, of two kinds of calls."""
    cases = core_module("selftest.cases")
    kinds = [next(case for case in cases.CASES if case.way == way) for way in ("out", "gradients")]
    monkeypatch.setattr(cases, "CASES", kinds)
    monkeypatch.setattr(REPORT.host, "compute_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(REPORT.host, "throw_if_interrupted", lambda: None)
    RUNS.remember(run(blocks(3), device="cpu"))
    return cases


def test_the_self_test_is_added_to_the_text_where_it_is_asked_for(selftest, monkeypatch):
    said = []
    monkeypatch.setattr(REPORT.host, "send_status", lambda text, unique_id: said.append(text))
    assert "self-test" not in report_of()[2]
    with torch.inference_mode():  # as ComfyUI runs its nodes
        text = report_of(selftest=True)[2]
    *_, verdict, end = text.splitlines()
    assert verdict.startswith("PASS")
    assert end == "--- to here ---"
    assert "WARNING" not in text
    assert said[-1] == f"self-test: {verdict}"


def test_what_the_self_test_finds_wrong_is_an_alarm(selftest, monkeypatch):
    monkeypatch.setattr(selftest, "exact_limit", lambda *_: 1e-30)
    text = report_of(selftest=True)[2]
    assert "=== WARNING ===\n            FAIL" in text
    assert "differs from float64 by" in text
