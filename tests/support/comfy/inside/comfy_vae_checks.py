"""Pascal VAE Attention inside the host: see ``comfy_checks``."""

from __future__ import annotations

import copy
import gc

import comfy.model_management as host
import torch
import torch.nn.functional as F
from comfy_checks import (
    cancel_at,
    check,
    close,
    log_lines,
    pack,
    raises,
    replaced,
    runs,
    unload,
)
from comfy_inproc import load_vae
from comfy_vae_parts import (
    IMAGE,
    DirectAttention,
    attention_memory,
    kl,
    latent,
    one_block,
    patched,
    vae_around,
)


def decoding_equals(name, route):
    vae, samples = load_vae(name), latent(name)
    stock = vae.decode(samples)
    ours = patched(vae, route)
    with runs() as found:
        close(ours.decode(samples), stock)
    (run,) = found
    assert run.part == "VAE"
    assert run.count("taken") == run.count() == (2 if name == "vae_wan" else 1), run.line()
    assert route == "auto" or set(run.routes()) == {route}
    assert all(kind.via == "VAE" and kind.block.startswith("decoder.mid") for kind in run.tallies)
    assert run.warnings == []


@check
def decoding_with_a_kl_vae_equals_the_unpatched_one():
    for route in ("auto", "torch", "tiled"):
        decoding_equals("vae_kl", route)


@check
def decoding_with_the_flux_vae_equals_the_unpatched_one():
    for route in ("auto", "torch", "tiled"):
        decoding_equals("vae_flux", route)


@check
def decoding_a_video_with_the_wan_vae_equals_the_unpatched_one():
    for route in ("auto", "torch", "tiled"):
        decoding_equals("vae_wan", route)


@check
def a_wrong_attention_would_be_seen():
    vae, samples = kl()
    stock = vae.decode(samples)
    ours = patched(vae)
    engine = pack("engine.engine").Engine
    attend = engine.attend

    def wrong(self, query, key, value, *args, **kwargs):
        return attend(self, query, torch.zeros_like(key), value, *args, **kwargs)

    with replaced(engine, "attend", wrong):
        with replaced(engine, "_agrees", lambda *_: True):
            raises(AssertionError, lambda: close(ours.decode(samples), stock, 2e-3))
        # Compared with the host's own function, the call is passed to it.
        with runs() as found:
            close(ours.decode(samples), stock)
    assert found[0].count("taken") == 0
    assert any("passed to ComfyUI" in warning for warning in found[0].warnings)


@check
def encoding_equals_the_unpatched_one():
    for name in ("vae_kl_full", "vae_wan"):
        vae = load_vae(name)
        stock = vae.encode(IMAGE)
        with runs() as found:
            close(patched(vae, "tiled").encode(IMAGE), stock)
        assert [run.count("taken") for run in found] == [1]
        assert {kind.block.partition(".")[0] for kind in found[0].tallies} == {"encoder"}


@check
def tiled_decoding_and_encoding_are_one_run_each_whatever_the_tiles():
    vae = load_vae("vae_kl_full")
    samples, tiles = latent("vae_kl"), {"tile_x": 8, "tile_y": 8, "overlap": 2}
    stock, ours = vae.decode_tiled(samples, **tiles), patched(vae, "tiled")
    with runs() as found:
        close(ours.decode_tiled(samples, **tiles), stock)
    assert [run.count() > 2 and run.count() == run.count("taken") for run in found] == [True]
    tiles = {"tile_x": 64, "tile_y": 64, "overlap": 16}
    stock = vae.encode_tiled(IMAGE, **tiles)
    with runs() as found:
        close(ours.encode_tiled(IMAGE, **tiles), stock)
    assert [run.count() > 2 for run in found] == [True]


@check
def the_original_is_untouched_bit_for_bit_before_between_and_after():
    vae, samples = kl()
    stock, keys = vae.decode(samples), list(vae.first_stage_model.state_dict())
    ours = patched(vae)
    with runs() as found:
        assert torch.equal(vae.decode(samples), stock)
    assert found == []
    ours.decode(samples)
    assert list(ours.patcher.model_state_dict()) == keys == list(vae.first_stage_model.state_dict())
    with runs() as found:
        assert torch.equal(vae.decode(samples), stock)
    assert found == []
    assert type(vae).__name__ == type(ours).__name__ == "VAE"
    assert not hasattr(vae, "pascal_attn")


@check
def a_patched_vae_that_is_forgotten_leaves_nothing_behind():
    vae, samples = kl()
    stock = vae.decode(samples)
    ours = patched(vae)
    ours.decode(samples)  # it is the one that is loaded
    del ours
    gc.collect()
    with runs() as found:
        assert torch.equal(vae.decode(samples), stock)
    assert found == []


@check
def unloaded_and_loaded_again_it_is_still_patched():
    vae, samples = kl()
    stock = vae.decode(samples)
    ours = patched(vae)
    for _ in range(2):
        with runs() as found:
            close(ours.decode(samples), stock)
        assert found[0].count("taken") == 1
        unload()
    assert torch.equal(vae.decode(samples), stock)


@check
def two_copies_with_different_settings_do_not_mix():
    vae, samples = one_block()
    first, second = patched(vae, "tiled"), patched(vae, "torch")
    for ours, route in ((first, "tiled"), (second, "torch"), (first, "tiled")):
        with runs() as found:
            ours.decode(samples)
        assert [run.routes() for run in found] == [{route: 1}]


@check
def cancelled_between_two_blocks_it_stops_and_the_next_run_is_clean():
    vae, samples = one_block()
    stock = vae.decode(samples)
    ours = patched(vae, "tiled", 1)
    with cancel_at(10**6) as looked:
        ours.decode(samples)
    assert looked[0] > 2, "one block only: nothing to cancel between"
    with runs() as found, cancel_at(2) as looked:
        raises(host.InterruptProcessingException, lambda: ours.decode(samples))
    assert looked[0] == 2
    assert len(found) == 1
    with runs() as found:
        close(ours.decode(samples), stock)
    assert [run.count("taken") for run in found] == [1]
    assert torch.equal(vae.decode(samples), stock)


@check
def memory_does_not_jump_where_the_tokens_do_not_divide():
    vae, _ = kl()
    matrices = 4096 * 512 * 4  # one of q, k, v or the result
    for route in ("torch", "tiled"):
        ours = patched(vae, route, 16)
        whole, odd = attention_memory(ours, 64, 64), attention_memory(ours, 63, 65)
        assert odd <= 1.05 * whole, (route, odd, whole)
        assert odd <= (16 << 20) + 4 * matrices < 4095 * 4095 * 4, (route, odd)


@check
def another_packs_patch_before_ours_gives_way_and_one_after_ours_is_named():
    vae, samples = one_block()
    stock = vae.decode(samples)
    key, calls = "block.attn.optimized_attention", []

    def other(query, key, value):
        calls.append(query.shape)
        tokens = (t.flatten(2).transpose(1, 2) for t in (query, key, value))
        return F.scaled_dot_product_attention(*tokens).transpose(1, 2).reshape(query.shape)

    before = copy.copy(vae)
    before.patcher = vae.patcher.clone()
    before.patcher.add_object_patch(key, other)
    ours = patched(before)
    with runs() as found:
        close(ours.decode(samples), stock)
    assert found[0].count("taken") == 1
    assert calls == []
    after = copy.copy(ours)
    after.patcher = ours.patcher.clone()
    after.patcher.add_object_patch(key, other)
    with runs() as found:
        close(after.decode(samples), stock)
    assert len(calls) == 1
    # Its direct SDPA call is caught where the replaced function makes it.
    assert [kind.via for run in found for kind in run.tallies] == ["SDPA"]


@check
def nan_in_the_latent_is_told_from_nan_in_the_vae():
    vae, samples = kl()
    ours = patched(vae)
    broken = samples.clone()
    broken[0, 0, 0, 0] = float("nan")
    with runs() as found:
        ours.decode(broken)
    assert any("latent given to decode already holds NaN" in warning for warning in found[0].warnings)
    late = vae.first_stage_model.decoder.norm_out.register_forward_hook(lambda *args: args[2] * float("inf"))
    with runs() as found:
        ours.decode(samples)
    late.remove()
    assert any("--fp32-vae" in warning for warning in found[0].warnings), found[0].warnings
    with runs() as found:
        ours.decode(samples)
    assert found[0].warnings == []


@check
def a_block_that_calls_sdpa_itself_is_served():
    vae, samples = vae_around(DirectAttention()), latent("vae_kl")
    stock = vae.decode(samples)
    with log_lines() as lines:
        ours = patched(vae, "tiled")
    assert "1 attention block of Network" in lines[0]
    with runs() as found:
        close(ours.decode(samples), stock)
    assert [(run.count("taken"), run.routes()) for run in found] == [(1, {"tiled": 1})]
    assert [kind.via for run in found for kind in run.tallies] == ["SDPA"]


@check
def a_block_that_calls_the_hosts_attention_by_name_is_served():
    from comfy.ldm.genmo.vae.model import AttentionBlock  # temporal attention of the Mochi VAE

    torch.manual_seed(0)
    block = AttentionBlock(32, head_dim=16)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.5)

    class Video(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = block

        def forward(self, samples):
            frames = samples[:, :, None].repeat(1, 8, 3, 1, 1) * torch.tensor([1.0, 2.0, 3.0])[:, None, None]
            return self.inner(frames)

    vae, samples = vae_around(Video()), latent("vae_kl")
    stock = vae.decode(samples)
    ours = patched(vae, "tiled")
    with runs() as found:
        close(ours.decode(samples), stock)
    assert [(run.count("taken"), run.routes()) for run in found] == [(1, {"tiled": 1})]
    assert [kind.block for run in found for kind in run.tallies] == ["block.inner.attn"]
    with runs() as found:
        assert torch.equal(vae.decode(samples), stock)
    assert found == []


@check
def a_vae_without_attention_is_returned_as_it_is_and_says_so():
    import comfy.sd
    import comfy.taesd.taesd

    vae = comfy.sd.VAE(sd=comfy.taesd.taesd.TAESD(None, None).state_dict())
    with log_lines() as lines:
        assert patched(vae, decode="as it is") is vae
    assert "has no attention" in lines[0]


@check
def what_is_not_a_vae_is_refused_in_a_sentence():
    assert "got dict; use a Load VAE node" in str(raises(TypeError, lambda: patched({})))
