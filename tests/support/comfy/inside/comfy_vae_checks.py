"""Pascal VAE Attention inside the host: see ``comfy_checks``."""

import copy
import functools
import gc

import comfy.model_patcher
import torch
import torch.nn.functional as F
from comfy.ldm.modules.diffusionmodules.model import AttnBlock
from comfy_checks import check, close, is_untouched, pack, raises, replaced, run_of, unload
from comfy_inproc import drawn, load_pack, load_vae, noise

NODE = load_pack()["PascalVAEAttention"]
LATENTS = {"vae_kl": (1, 4, 13, 10), "vae_flux": (1, 16, 13, 10), "vae_wan": (1, 16, 2, 14, 10)}
IMAGE = torch.rand(1, 96, 80, 3, generator=torch.Generator().manual_seed(1))


def patched(vae, route="auto", budget_mib=0, nan_guard=True, **more):
    return NODE().patch(vae, route, budget_mib, nan_guard, "1", **more)[0]


def latent(name, seed=0):
    return noise(*LATENTS[name], seed=seed)


def kl():
    return load_vae("vae_kl"), latent("vae_kl")


def vae_around(block, run=None):
    """A VAE of the host around one block: it decodes ``[B, 4, H, W]`` to three channels, by ``run``, which calls it."""

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def decode(self, samples):
            return (run or block)(samples)[:, :3]

    vae = copy.copy(load_vae("vae_kl"))
    vae.first_stage_model = Network()
    vae.patcher = comfy.model_patcher.ModelPatcher(vae.first_stage_model, torch.device("cpu"), torch.device("cpu"))
    return vae


@check
def decoding_equals_the_unpatched_one():
    for name in ("vae_kl", "vae_flux", "vae_wan"):
        vae, samples = load_vae(name), latent(name)
        stock = vae.decode(samples)
        for route in ("auto", "torch", "tiled"):
            ours = patched(vae, route)
            run = run_of(lambda: ours.decode(samples), stock)  # noqa: B023
            assert run.part == "VAE"
            assert run.count("taken") == run.count() == (2 if name == "vae_wan" else 1), run.line()
            assert route == "auto" or set(run.routes()) == {route}
            assert all(kind.block.startswith("decoder.mid") for kind in run.tallies)
            assert run.warnings == []


@check
def a_wrong_attention_would_be_seen():
    vae, samples = kl()
    stock = vae.decode(samples)
    ours = patched(vae)
    engine = pack("engine.engine").Engine
    attend = engine.attend

    def wrong(self, given, *args, **kwargs):
        return attend(self, given._replace(key=torch.zeros_like(given.key)), *args, **kwargs)

    with replaced(engine, "attend", wrong):
        raises(AssertionError, lambda: close(ours.decode(samples), stock, 2e-3))


@check
def encoding_equals_the_unpatched_one():
    for name in ("vae_kl_full", "vae_wan"):
        vae = load_vae(name)
        stock = vae.encode(IMAGE)
        run = run_of(lambda: patched(vae, "tiled").encode(IMAGE), stock)  # noqa: B023
        assert run.count("taken") == 1
        assert {kind.block.partition(".")[0] for kind in run.tallies} == {"encoder"}


@check
def tiled_decoding_and_encoding_are_one_run_each_whatever_the_tiles():
    vae = load_vae("vae_kl_full")
    samples, ours = latent("vae_kl"), patched(vae, "tiled")
    for what, given, size, overlap in (("decode_tiled", samples, 8, 2), ("encode_tiled", IMAGE, 64, 16)):
        tiles = {"tile_x": size, "tile_y": size, "overlap": overlap}
        stock = getattr(vae, what)(given, **tiles)
        run = run_of(lambda: getattr(ours, what)(given, **tiles), stock)  # noqa: B023
        assert run.count() == run.count("taken") > 2, run.line()


@check
def the_original_is_untouched_bit_for_bit_before_between_and_after():
    vae, samples = kl()
    stock, keys = vae.decode(samples), list(vae.first_stage_model.state_dict())
    ours = patched(vae)
    for _ in range(2):
        is_untouched(lambda: vae.decode(samples), stock)
        assert run_of(functools.partial(ours.decode, samples), stock).count("taken") == 1
        unload()  # and loaded again it is still patched
    assert list(ours.patcher.model_state_dict()) == keys == list(vae.first_stage_model.state_dict())
    is_untouched(lambda: vae.decode(samples), stock)
    assert type(vae).__name__ == type(ours).__name__ == "VAE"
    assert not hasattr(vae, "pascal_attn")
    ours.decode(samples)  # it is the one that is loaded, and is forgotten
    del ours
    gc.collect()
    is_untouched(lambda: vae.decode(samples), stock)


@check
def another_packs_patch_before_ours_gives_way_and_one_after_ours_is_named():
    block, samples = drawn(AttnBlock(32), 0.2), noise(1, 4, 32, 28)
    vae = vae_around(block, lambda samples: block(samples.repeat(1, 8, 1, 1)))
    stock = vae.decode(samples)
    key, calls = "block.optimized_attention", []

    def other(query, key, value):
        calls.append(query.shape)
        tokens = (t.flatten(2).transpose(1, 2) for t in (query, key, value))
        return F.scaled_dot_product_attention(*tokens).transpose(1, 2).reshape(query.shape)

    def with_other(vae):
        vae, patcher = copy.copy(vae), vae.patcher.clone()
        vae.patcher = patcher
        patcher.add_object_patch(key, other)
        return vae

    ours = patched(with_other(vae))
    assert run_of(lambda: ours.decode(samples), stock).count("taken") == 1
    assert calls == []
    run = run_of(lambda: with_other(ours).decode(samples), stock)
    assert len(calls) == 1
    # Its direct SDPA call is caught where the replaced function makes it.
    assert len(run.tallies) == 1


@check
def nan_in_the_latent_is_told_from_nan_in_the_vae():
    vae, samples = kl()
    ours = patched(vae)
    broken = samples.clone()
    broken[0, 0, 0, 0] = float("nan")
    warnings = run_of(lambda: ours.decode(broken)).warnings
    assert any("latent given to decode already holds NaN" in warning for warning in warnings)
    late = vae.first_stage_model.decoder.norm_out.register_forward_hook(lambda *args: args[2] * float("inf"))
    warnings = run_of(lambda: ours.decode(samples)).warnings
    late.remove()
    assert any("--fp32-vae" in warning for warning in warnings), warnings
    assert run_of(lambda: ours.decode(samples)).warnings == []


@check
def a_block_that_calls_the_hosts_attention_by_name_is_served():
    from comfy.ldm.genmo.vae.model import AttentionBlock  # temporal attention of the Mochi VAE

    block = drawn(AttentionBlock(32, head_dim=16), 0.5)

    def run(samples):
        frames = samples[:, :, None].repeat(1, 8, 3, 1, 1) * torch.tensor([1.0, 2.0, 3.0])[:, None, None]
        return block(frames)

    vae, samples = vae_around(block, run), latent("vae_kl")
    stock = vae.decode(samples)
    run = run_of(lambda: patched(vae, "tiled").decode(samples), stock)
    assert (run.count("taken"), run.routes()) == (1, {"tiled": 1})
    assert [kind.block for kind in run.tallies] == ["block.attn"]
    is_untouched(lambda: vae.decode(samples), stock)


@check
def what_is_not_a_vae_is_refused_in_a_sentence():
    assert "got dict; use a Load VAE node" in str(raises(TypeError, lambda: patched({})))
