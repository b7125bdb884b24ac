"""What the report says was gained: measured figures alone, and the reason where there is nothing."""

from __future__ import annotations

import pytest
import torch
from attn_support.comfy.runs import blocks, findings, kind, part, run
from attn_support.comfy.stub import make_engine, stub_host  # noqa: F401

GAIN, TEXT = part("nodes.reporting.gain"), part("nodes.reporting.text")
SDPA = "attention_pytorch"
STORED = {"route": "tiled", "torch_stores": True}
WAN = {"query": (1, 24, 5070, 128), "key": (1, 24, 5070, 128), "dtype": "float32"}


def line(*runs, attention=SDPA):
    return GAIN.gain_line(runs, attention)


def test_memory_is_that_of_torchs_scores_less_what_the_call_took():
    tallies = [(kind("block 0", **STORED, **WAN), {"extra_bytes": 64 << 20, "elapsed_ms": 9.0})]
    expected = "Gained: 2,289 MiB less memory in the largest call (64 instead of 2,353 MiB)."
    assert line(run(tallies)) == expected


def test_memory_that_was_not_measured_is_not_subtracted():
    tallies = [(kind("block 0", **STORED, **WAN), {"extra_bytes": None})]
    assert line(run(tallies)) == "Gained: 2,353 MiB of scores not stored in the largest call."


def test_seconds_are_those_of_calls_timed_against_torchs_kernel():
    timed = (kind("block 0", route="fused", over_torch=0.5, torch_stores=False), {"elapsed_ms": 41_000.0})
    other = (kind("block 1", torch_stores=False), {"elapsed_ms": 99_000.0})
    assert line(run([timed, other])) == "Gained: 41.0 s less in attention (timed on this machine)."
    assert "less in attention" not in line(run([other]))


def test_memory_seconds_and_saved_outputs_of_several_runs_stand_in_one_sentence():
    model = run([(kind("block 0", **STORED, **WAN), {"extra_bytes": 64 << 20})])
    vae = run([(kind("mid", route="fused", over_torch=0.8), {"elapsed_ms": 4000.0, "repaired": 2})], part="VAE")
    assert line(model, vae) == (
        "Gained: 2,289 MiB less memory in the largest call (64 instead of 2,353 MiB), 1.00 s less in attention (timed "
        "on this machine), 2 outputs saved from NaN."
    )


def test_torchs_own_kernel_gains_nothing_and_that_is_said():
    tallies = [(kind("double 0", torch_stores=False), {"elapsed_ms": 9.0, "extra_bytes": 1 << 20})]
    assert line(run(tallies)) == (
        "Nothing to gain: PyTorch's own kernel takes every call here, with or without this node."
    )


def test_on_a_host_with_another_attention_nothing_is_claimed():
    tallies = [(kind("double 0", **STORED, **WAN), {"extra_bytes": 64 << 20})]
    assert line(run(tallies), attention="attention_sub_quad") == (
        "64 MiB extra at most in a call, whose scores are 2,353 MiB; what ComfyUI's attention_sub_quad would have "
        "needed here was not measured."
    )


def test_what_nobody_asked_torch_about_is_not_claimed():
    tallies = [(kind("double 0", route="tiled", torch_stores=None), {"extra_bytes": 1 << 20})]
    assert "not measured" in line(run(tallies))


def test_calls_that_were_all_passed_say_why():
    tallies = [(kind("layer 0", "passed to ComfyUI", why="fewer than 1024 keys"), {"count": 32})]
    assert line(run(tallies)) == "Nothing to gain: all 32 calls passed to ComfyUI: fewer than 1024 keys."
    tallies += [(kind("layer 1", "passed to ComfyUI", why="its argument sinks is not known"), {"count": 2})]
    assert "32 of 34 calls passed to ComfyUI: fewer than 1024 keys" in line(run(tallies))


@pytest.mark.parametrize(
    ("runs", "sentence"),
    [
        ((), "Nothing gained: no attention call reached a patch."),
        ((run(),), "Nothing gained: no attention call reached a patch."),
        ((run(part="feed-forward", notes=["0 of 9 modules chunked"]),), "Nothing gained: 0 of 9 modules chunked."),
    ],
)
def test_without_calls_it_says_so(runs, sentence):
    assert line(*runs) == sentence


def test_layers_in_int8_and_bands_are_gains_beside_attention_that_had_nothing_to_gain():
    int8, vae = run(part="int8", gains=["40 of 40 layers in int8, not exact"]), run(part="VAE", gains=["in bands"])
    plain = run([(kind("double 0", torch_stores=False), {"elapsed_ms": 9.0})])
    assert line(plain, int8, vae) == "Gained: 40 of 40 layers in int8, not exact; in bands."
    assert GAIN.status_line(int8, SDPA) == "Flux: 40 of 40 layers in int8, not exact"
    assert int8.line() == "Flux: 40 of 40 layers in int8, not exact"


def test_differences_that_nobody_would_notice_are_none():
    small = {"query": (1, 1, 64, 64), "key": (1, 1, 64, 64)}
    tallies = [(kind("a", **STORED, **small), {"extra_bytes": 0, "elapsed_ms": 1.0})]
    assert not line(run(tallies)).startswith("Gained")


def test_it_is_the_first_line_of_the_text_also_above_warnings():
    tallies = [(kind("block 0", **STORED, **WAN), {"extra_bytes": 64 << 20})]
    text = TEXT.report_text(findings(run(tallies), attention=SDPA, alarms=["beware"]))
    assert text.splitlines()[0].startswith("Gained: 2,289 MiB")
    assert text.index("Gained") < text.index("!! beware")


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (
            run([(kind("b", **STORED, **WAN), {"extra_bytes": 64 << 20})]),
            "Flux: 2,289 MiB less memory in the largest call",
        ),
        (run(blocks(3)), "Flux: 12 of 12 calls taken, 1 MiB extra at most"),
        (
            run([(kind("b", "passed to ComfyUI", why="fewer than 7 keys"), {"count": 4})]),
            "Flux: 0 of 4 calls taken: fewer than 7",
        ),
        (run(notes=["compiled"]), "Flux: compiled"),
    ],
)
def test_the_status_line_is_one_short_sentence_with_the_figure(made, sentence):
    found = GAIN.status_line(made, SDPA)
    assert found.startswith(sentence)
    assert "\n" not in found
    assert len(found) < 110


def test_the_engine_counts_calls_with_what_their_choice_says(stub_host):  # noqa: F811
    engine, plain = make_engine(), torch.randn(1, 2, 64, 16)
    engine.begin()
    assert engine.attend(plain, plain, plain) is not None
    (counted,) = engine.end().tallies
    assert (counted.route, counted.torch_stores, counted.over_torch) == ("torch", False, None)
