"""The gain that the report names: measured figures alone, and the reason where there is nothing."""

import pytest
import torch
from attn_support.comfy.pack import node_module
from attn_support.comfy.runs import findings, kind, run
from attn_support.comfy.stub import core_module, make_engine

Arguments = core_module("call").Arguments
GAIN, RUNS, TEXT = (node_module(name) for name in ("reporting.gain", "engine.runs", "reporting.text"))
SDPA = "attention_pytorch"
STORED = {"route": "tiled", "torch_stores": True}
WAN = {"query": (1, 24, 5070, 128), "key": (1, 24, 5070, 128), "dtype": "float32"}


def with_call(block="block 0", *, outcome="taken", **more):
    """A run of one call: fields of its tally, and of its kind."""
    tally = {name: more.pop(name) for name in ("extra_bytes", "elapsed_ms", "repaired", "count") if name in more}
    changes = {"part": more.pop("part")} if "part" in more else {}
    return run([(kind(block, outcome, **more), tally)], **changes)


LARGE = with_call(**STORED, **WAN, extra_bytes=64 << 20, elapsed_ms=9.0)
UNMEASURED = with_call(**STORED, **WAN, extra_bytes=None)
TIMED = with_call(route="fused", over_torch=0.5, torch_stores=False, elapsed_ms=41_000.0)
UNTIMED = with_call(torch_stores=False, elapsed_ms=99_000.0)
VAE = with_call("mid", part="VAE", route="fused", over_torch=0.8, elapsed_ms=4000.0, repaired=2)
ALL_PASSED = with_call(outcome="passed to ComfyUI", why="fewer than 1024 keys", count=32)
PASSED = {kind("b", "passed to ComfyUI", why=why): n for why, n in (("fewer than 1024 keys", 32), ("a sink", 2))}
SOME_PASSED = run([(entry, {"count": count}) for entry, count in PASSED.items()])
UNASKED = with_call(route="tiled", torch_stores=None, extra_bytes=1 << 20)
SMALL = with_call(**STORED, query=(1, 1, 64, 64), key=(1, 1, 64, 64), extra_bytes=0, elapsed_ms=1.0)
INT8, BANDS = run(part="int8", gains=["40 of 40 layers in int8, not exact"]), run(part="VAE", gains=["in bands"])
LESS = "2.24 GiB less memory in the largest call (64 MiB instead of 2.3 GiB)"
SENTENCES = {
    "torch's scores less what the call took": ([LARGE], f"Gained: {LESS}."),
    "not measured, not subtracted": ([UNMEASURED], "Gained: 2.3 GiB of scores never stored in the largest call."),
    "timed against torch's kernel": ([TIMED], "Gained: 41 s less in attention (timed on this machine)."),
    "several runs in one sentence": (
        [LARGE, VAE],
        f"Gained: {LESS}, 1 s less in attention (timed on this machine), 2 outputs saved from NaN.",
    ),
    "torch's own kernel": (
        [UNTIMED],
        "Nothing to gain: PyTorch's own kernel takes every call here, with or without this node; attention is 100% of "
        "sampling.",
    ),
    "nobody asked torch": (
        [UNASKED],
        "Fits: 972 MiB of scores in a call are never stored, 1 MiB extra at most in a call.",
    ),
    "all passed": ([ALL_PASSED], "Nothing to gain: all 32 calls passed to ComfyUI: fewer than 1024 keys."),
    "some passed": ([SOME_PASSED], "Nothing to gain: 32 of 34 calls passed to ComfyUI: fewer than 1024 keys."),
    "no runs": ([], "Nothing gained: no attention call reached a patch."),
    "no calls": ([run()], "Nothing gained: no attention call reached a patch."),
    "notes": ([run(notes=["0 of 9 modules chunked"])], "Nothing gained: 0 of 9 modules chunked."),
    "beside attention": ([UNTIMED, INT8, BANDS], "Gained: 40 of 40 layers in int8, not exact; in bands."),
    "too small to notice": ([SMALL], "Fits: 0 KiB extra at most in a call"),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_the_first_line_says_what_was_gained_or_why_nothing_was(case):
    runs, sentence = SENTENCES[case]
    assert sentence in GAIN.gain_line(runs, SDPA)


def test_on_a_host_with_another_attention_nothing_is_claimed():
    assert GAIN.gain_line([LARGE], "attention_sub_quad") == (
        "Fits: 2.3 GiB of scores in a call are never stored (ComfyUI's own attention_sub_quad splits them, too), "
        "64 MiB extra at most in a call; attention is less than 1% of sampling."
    )


def test_it_is_the_first_line_of_the_text_also_above_warnings():
    text = TEXT.report_text(findings(LARGE, attention=SDPA, alarms=["beware"]))
    assert text.splitlines()[0].startswith("Gained: 2.24 GiB")
    assert text.index("Gained") < text.index("beware")


def test_the_engine_counts_calls_with_what_their_choice_says(stub_host):
    engine, plain = make_engine(), torch.randn(1, 2, 64, 16)
    engine.begin()
    assert engine.attend(Arguments(plain, plain, plain)) is not None
    (counted,) = engine.end().tallies
    assert (counted.route, counted.torch_stores, counted.over_torch) == ("torch", False, None)


def test_a_node_with_several_parts_has_one_sentence_and_how_many_calls_it_took(stub_host, monkeypatch):
    monkeypatch.setattr(RUNS, "_recent", [LARGE, VAE])
    monkeypatch.setattr(GAIN.host, "attention_name", lambda: SDPA)
    GAIN.say(VAE)
    assert stub_host.said == [f"{GAIN.gain_line([LARGE, VAE], SDPA)} 2 of 2 attention calls taken."]
