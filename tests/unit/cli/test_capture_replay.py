"""Real calls into a file, out of it again, and over every route."""

import json
import logging

import pytest
import torch
import torch.nn.functional as F

from pascal_attn_core import cli, sdpa
from pascal_attn_core.capture import capture, load_calls, observe
from pascal_attn_core.sdpa_patch import patch_sdpa

ORIGINAL = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was():
    yield
    assert F.scaled_dot_product_attention is ORIGINAL


@pytest.fixture
def path(tmp_path):
    return tmp_path / "calls.safetensors"


def qkv(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_call_comes_back_as_it_was(path, dtype):
    given = qkv(1, 2, 8, 4, dtype=dtype)
    with capture(path):
        F.scaled_dot_product_attention(*given, is_causal=True, scale=0.3)
    (call,) = load_calls(path)
    for loaded, tensor in zip((call.query, call.key, call.value), given):
        assert loaded.dtype == dtype
        assert torch.equal(loaded, tensor)
    assert (call.is_causal, call.scale, call.dropout_p, call.enable_gqa) == (True, 0.3, 0.0, False)
    assert call.attn_mask is None


TOKENS_FIRST, PACKED = torch.randn(2, 16, 4, 8).transpose(1, 2), torch.randn(2, 16, 3, 4, 8)[:, :, 1].transpose(1, 2)
ONE_HEAD, MASK = torch.randn(1, 1, 64, 16).expand(1, 4, 64, 16), torch.rand(1, 1, 1, 64).gt(0.5).expand(1, 4, 64, 64)
LAYOUTS = {  # tensors, and the most bytes of their file beside its header
    "tokens first": ([TOKENS_FIRST, TOKENS_FIRST, PACKED], 1 << 20),
    "expanded": ([torch.randn(1, 4, 64, 16), ONE_HEAD, ONE_HEAD, MASK], 4 * (64 * 64 + 2 * 64 * 16)),
    "overlapping itself": ([torch.randn(40).as_strided((1, 1, 8, 8), (1, 1, 3, 1))] * 3, 4096),
    "a small cut out of a large tensor": ([torch.randn(1, 1, 64, 4096)[..., :8]] * 3, 3 * 2048),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_come_back_and_cuts_out_of_large_tensors_by_value(path, layout):
    tensors, most = LAYOUTS[layout]
    with capture(path):
        F.scaled_dot_product_attention(*tensors)
    assert path.stat().st_size < most + 4096
    (call,) = load_calls(path)
    for same in (call, call.to("cpu")):
        for loaded, tensor in zip((same.query, same.key, same.value, same.attn_mask), tensors):
            assert torch.equal(loaded, tensor)
            assert (loaded.stride() == tensor.stride()) == (layout != "a small cut out of a large tensor")


def test_equal_calls_are_kept_once_and_counted(path):
    small, large = qkv(1, 1, 4, 8), qkv(1, 1, 6, 8)
    with capture(path):
        for _ in range(3):
            F.scaled_dot_product_attention(*small)
        F.scaled_dot_product_attention(*large)
        F.scaled_dot_product_attention(*small, is_causal=True)
    assert [(call.query.shape[-2], call.count) for call in load_calls(path)] == [(4, 3), (6, 1), (4, 1)]


def test_observed_functions_are_seen_and_their_inner_calls_are_not(path):
    @observe
    def watched(query, key, value, *, note=""):
        return F.scaled_dot_product_attention(query.repeat(1, 2, 1, 1), key, value)[:, :1]

    watched(*qkv(1, 1, 4, 8))
    with capture(path):
        watched(*qkv(1, 1, 4, 8), note="passed on")
    (call,) = load_calls(path)
    assert call.query.shape == (1, 1, 4, 8)


def test_direct_calls_of_ours_are_seen_once(path):
    query, key, value = qkv(1, 4, 24, 8)
    key, value = key[:, :2], value[:, :2]
    with capture(path):
        sdpa(query, key, value, None, 0.0, True, None, True)  # is_causal and enable_gqa
        sdpa(query, key, value, enable_gqa=True, window=(3, 3))  # the file has no word for it
        with patch_sdpa():
            F.scaled_dot_product_attention(query, key, value, scale=0.5, enable_gqa=True)
    sdpa(query, key, value, enable_gqa=True)
    causal, scaled = load_calls(path)
    assert (causal.is_causal, causal.enable_gqa, causal.count) == (True, True, 1)
    assert (scaled.is_causal, scaled.scale) == (False, 0.5)
    assert torch.equal(causal.key, key)


def test_the_original_function_is_back_after_an_error_in_the_model(path):
    def model():
        F.scaled_dot_product_attention(*qkv(1, 1, 4, 8))
        return 1 / 0

    with pytest.raises(ZeroDivisionError), capture(path):
        model()
    assert F.scaled_dot_product_attention is ORIGINAL
    assert len(load_calls(path)) == 1


def test_wrong_calls_and_tensors_without_data_pass_through_and_nothing_seen_writes_nothing(path, caplog):
    with caplog.at_level(logging.WARNING, "pascal_attn"), capture(path):
        with pytest.raises(TypeError):
            F.scaled_dot_product_attention()
        meta = torch.empty(1, 1, 4, 8, device="meta")
        F.scaled_dot_product_attention(meta, meta, meta)
    assert "no call" in caplog.text
    assert not path.exists()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("calls.pt", {}, "must end with .safetensors"),
        ("missing/calls.safetensors", {}, "folder that exists"),
        ("calls.safetensors", {"limit": 0}, "limit must be at least 1"),
        ("calls.safetensors", {"max_mib": 0}, "max_mib must be greater than 0"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_patched(tmp_path, name, options, message):
    with pytest.raises(ValueError, match=message):
        capture(tmp_path / name, **options)


def damaged(path, kind):
    from safetensors.torch import save_file

    if kind == "text":
        path.write_text("no tensors here")
    elif kind == "cut":
        with capture(path):
            F.scaled_dot_product_attention(*qkv(1, 1, 64, 8))
        path.write_bytes(path.read_bytes()[:-100])
    else:
        layout = {"shape": [4, 8], "stride": [8, 1], "dtype": "torch.float32"}
        header = {"format": "pascal-attention-capture", "version": "1", "calls": "[]"}
        if kind == "stride":
            layout["stride"] = [-8, 1]
        if kind in ("stride", "tensor", "option"):
            calls = [{"count": 1, "layouts": {name: layout for name in ("query", "key", "value")}}]
            if kind == "option":
                calls[0]["colour"] = "red"
            header["calls"] = json.dumps(calls)
        changed = {"other": {"format": "pt"}, "version": {**header, "version": "9"}, "json": {**header, "calls": "[{"}}
        tensors = {} if kind == "tensor" else {f"0.{name}": torch.zeros(4, 8) for name in ("query", "key", "value")}
        save_file(tensors, path, metadata=changed.get(kind, header))


@pytest.mark.parametrize("kind", ["missing", "text", "cut", "other", "version", "json", "tensor", "stride", "option"])
def test_missing_damaged_and_foreign_files_end_with_a_clear_error(path, kind, capsys):
    if kind != "missing":
        damaged(path, kind)
    with pytest.raises((ValueError, FileNotFoundError), match=r"calls\.safetensors"):
        load_calls(path)
    assert cli.main(["replay", str(path)]) == 2
    err = capsys.readouterr().err
    assert "calls.safetensors" in err
    assert "Traceback" not in err


def record_some(path):
    query, key, value = qkv(1, 4, 40, 16)
    with capture(path):
        F.scaled_dot_product_attention(query, key, value, is_causal=True)
        F.scaled_dot_product_attention(query, key[:, :2], value[:, :2], enable_gqa=True, dropout_p=0.5)
        F.scaled_dot_product_attention(*(t.bfloat16() for t in (query, key, value)), attn_mask=torch.rand(40, 40) > 0.3)
        F.scaled_dot_product_attention(query[0, 0], key[0, 0], value[0, 0], attn_mask=torch.randn(40), scale=0.7)
        F.scaled_dot_product_attention(query.expand(2, 4, 40, 16), key, value, attn_mask=torch.randn(4, 1, 40))
        sdpa(query, key, value, torch.randn(40, 40), is_causal=True)


def test_replay_shows_and_writes_times_memory_small_errors_and_reasons(path, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pascal_attn_core.cli.oracle._BLOCK_BYTES", 8 * 40 * 4)  # the definition in blocks of rows
    record_some(path)
    figures = tmp_path / "figures.json"
    command = ["replay", str(path), "--rounds", "1", "--seconds", "1", "--device", "cpu", "--json", str(figures)]
    assert cli.main(command) == 0
    out = capsys.readouterr().out.partition("time relative to")[0]
    for name in ("torch-fused", "torch-math", *(f"ours-{r}" for r in ["auto", "tiled", "torch", "fused ", "math"])):
        assert out.count(name) == 6
    assert "q[1, 4, 40, 16]" in out
    assert "bfloat16 mask bool [40, 40]" in out
    document = json.loads(figures.read_text())
    assert len(document["calls"]) == 6
    for call in document["calls"]:
        found = {result["name"]: result for result in call["results"]}
        tiled, fused = found["ours-tiled"], found["ours-fused"]
        assert tiled["seconds"] > 0
        assert tiled["extra_bytes"] >= 0
        assert tiled["error"] < (2e-2 if "bfloat16" in call["text"] else 1e-5)
        assert fused["seconds"] is None
        assert fused["note"]
