"""Pascal Attention Patch inside the host, on calls that are read, announced or patched in an unusual way: see
``comfy_checks``."""

from __future__ import annotations

import comfy.ldm.modules.attention as host_attention
import comfy.model_management
import comfy.sampler_helpers
import torch
from comfy_checks import Skip, check, close, log_lines, pack, replaced, runs, unload
from comfy_inproc import LATENTS, load_model, load_pack, sample
from comfy_patch_networks import NETWORKS, applied, patcher_of

import nodes

load_pack()
KEY = "optimized_attention_override"
IS_SDPA = host_attention.optimized_attention is host_attention.attention_pytorch


def patched(model, *, route="tiled", coverage="auto", min_keys=0, **more):
    node = nodes.NODE_CLASS_MAPPINGS["PascalAttentionPatch"]()
    return node.patch(model, route, 0, 0, coverage, min_keys, True, **more)[0]


def with_hypertile(model):
    node = nodes.NODE_CLASS_MAPPINGS.get("HyperTile")
    if node is None:
        import asyncio

        if not asyncio.run(nodes.load_custom_node(comfy_extra("nodes_hypertile.py"), module_parent="comfy_extras")):
            raise Skip("this host's HyperTile could not be loaded")
        node = nodes.NODE_CLASS_MAPPINGS["HyperTile"]
    given = {"tile_size": 32, "swap_size": 1, "max_depth": 3, "scale_depth": False}
    if hasattr(node, "execute"):
        return node.execute(model=model, **given)[0]
    return node().patch(model=model, **given)[0]


def comfy_extra(name):
    import os

    return os.path.join(os.path.dirname(nodes.__file__), "comfy_extras", name)


def seeded(model, **options):
    torch.manual_seed(5)  # HyperTile draws its divisors
    return sample(model, "sd15", steps=2, **options)


def hypertile_keeps_result_and_saving(cfg):
    model = load_model("sd15")
    plain, stock = seeded(model, cfg=cfg), seeded(with_hypertile(model), cfg=cfg)
    assert float((plain - stock).abs().max()) > 1e-3, "HyperTile changes nothing in this model"
    for place in (lambda m: patched(with_hypertile(m)), lambda m: with_hypertile(patched(m))):
        with runs() as found:
            close(seeded(place(model), cfg=cfg), stock)
        (run,) = found
        assert run.count("taken") == run.count() > 0, run.line()
        assert run.warnings == []
        tiled = [kind for kind in run.tallies if kind.query[0] > 2]
        assert tiled, "no call was tiled"
        # Each tile looks at its own keys alone, not at those of all tiles.
        assert all(kind.key[0] == kind.query[0] and kind.key[2] == kind.query[2] for kind in tiled if kind.key[2] != 77)
        assert all(found is not None and found.is_rounding for found in run.compared.values())


@check
def hypertile_without_guidance_keeps_its_result_and_saving():
    hypertile_keeps_result_and_saving(1.0)


@check
def hypertile_with_guidance_keeps_its_result_and_saving():
    hypertile_keeps_result_and_saving(3.0)


def whole_model_takes_all_of(name):
    network, run, calls = NETWORKS[name]()
    model = patcher_of(network)
    stock = applied(model, run)
    with runs() as found:
        close(applied(patched(model), run), stock)
    (ours,) = found
    empty = ours.reasons("passed to ComfyUI").get("it has no keys", 0)
    assert ours.count("taken") + empty == ours.count() > 0, ours.line()
    assert calls is None or ours.count() == calls, ours.line()
    assert ours.warnings == []
    assert torch.equal(applied(model, run), stock), "the model itself is changed"


@check
def every_call_of_hunyuan_dit():
    whole_model_takes_all_of("hydit")


@check
def every_call_of_ernie_image():
    whole_model_takes_all_of("ernie")


@check
def every_call_of_seedvr2():
    whole_model_takes_all_of("seedvr2")


@check
def every_call_of_hunyuan3d():
    whole_model_takes_all_of("hunyuan3d")


@check
def every_call_of_ace_step():
    whole_model_takes_all_of("ace_step")


@check
def every_call_of_anima():
    whole_model_takes_all_of("anima")


@check
def every_call_of_wan_dancer_whose_picture_is_missing():
    whole_model_takes_all_of("wan_dancer")


@check
def by_name_and_announced_calls_are_counted_once():
    """Where methods are copied, an announced call still goes to the override, and through others' overrides."""
    model = load_model("flux") if IS_SDPA else load_model("sd15")
    name = "flux" if IS_SDPA else "sd15"
    with runs() as found:
        sample(patched(model, coverage="attention override"), name)
        sample(patched(model), name)
    before, whole = found
    assert before.count("taken") == whole.count("taken") > 0


# ---- other overrides ----


def other_override(model, function, qualname="", module=""):
    model = model.clone()
    options = model.model_options["transformer_options"] = model.model_options["transformer_options"].copy()
    function.__qualname__, function.__module__ = qualname or function.__qualname__, module or function.__module__
    options[KEY] = function
    return model


@check
def an_earlier_patch_that_only_computes_is_replaced():
    def attention_override_sage(func, *args, **kwargs):
        raise AssertionError("sage is not here")

    module = "/x/custom_nodes/ComfyUI-KJNodes.nodes.model_optimization_nodes"
    model = load_model("sd15")
    with runs() as found, log_lines() as lines:
        ours = sample(patched(other_override(model, attention_override_sage, module=module)), "sd15")
    close(ours, sample(model, "sd15"))
    (run,) = found
    assert run.count("taken") == run.count() > 0
    assert any("attention_override_sage (ComfyUI-KJNodes) is replaced" in line for line in lines), lines
    assert any("attention_override_sage" in note and "this patch took" in note for note in run.notes), run.notes


@check
def the_hosts_own_backend_node_is_replaced():
    model = load_model("sd15").clone()
    if not hasattr(model, "set_model_optimized_attention"):
        raise Skip("this host has no node that chooses an attention function per model")
    stock = sample(model, "sd15")
    model.set_model_optimized_attention(host_attention.attention_split)
    with runs() as found:
        close(sample(patched(model), "sd15"), stock)
    assert found[0].count("taken") == found[0].count() > 0
    with runs() as found:
        close(sample(patched(model, earlier_patch="run it first"), "sd15"), stock)
    assert found[0].count("taken") == 0
    assert found[0].came_before > 0
    assert any("computed all" in warning for warning in found[0].warnings), found[0].warnings


# ---- the host's estimate of memory ----


@check
def the_hosts_own_memory_estimate_is_that_of_efficient_attention():
    model = load_model("sd15")
    network, shape = model.model, [2, *LATENTS["sd15"]]
    management = comfy.model_management
    conservative = network.memory_required(shape)
    with replaced(management, "pytorch_attention_flash_attention", lambda: True):
        efficient = network.memory_required(shape)
    assert efficient < conservative
    asked = []
    load = management.load_models_gpu

    def loading(models, memory_required=0, **options):
        asked.append(memory_required)
        return load(models, memory_required=memory_required, **options)

    def reserved(model):
        asked.clear()
        with replaced(management, "load_models_gpu", loading):
            sample(model, "sd15")
        return asked[0]

    before, ours, after = reserved(model), reserved(patched(model)), reserved(model)
    assert before == after, "the model is left as it was"
    assert abs((before - ours) / (conservative - efficient) - 1) < 1e-6, (before, ours, conservative, efficient)
    assert network.memory_required(shape) == conservative
    # How many conditions run at once is asked of the model while it is sampled.
    seen = []

    def watching(func, *args, **kwargs):
        seen.append(network.memory_required(shape))
        return func(*args, **kwargs)

    sample(patched(other_override(model, watching), earlier_patch="run it first"), "sd15")
    assert set(seen) == {conservative}, "another patch that runs first may need more"
    override = patched(model).model_options["transformer_options"][KEY]
    assert override.memory_efficient is True  # what versions after 0.33 read
    unload()


@check
def an_error_while_sampling_leaves_the_estimate_as_it_was():
    model = load_model("sd15")
    shape = [2, *LATENTS["sd15"]]
    conservative = model.model.memory_required(shape)

    def failing(executor, *args, **kwargs):
        raise ZeroDivisionError

    broken = patched(model)
    broken.add_wrapper_with_key("calc_cond_batch", "fails", failing)
    try:
        sample(broken, "sd15")
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError("no error")
    assert "memory_required" not in vars(model.model)
    assert model.model.memory_required(shape) == conservative
    broken.cleanup()
    engine = pack("patches.override").engine_of(broken.model_options["transformer_options"][KEY])
    while engine.is_running:
        engine.end()


@check
def a_patch_on_weights_only_says_so():
    prompt = {
        "1": {"class_type": "UNETLoader", "inputs": {}},
        "2": {"class_type": "PascalAttentionPatch", "inputs": {"model": ["1", 0]}},
        "3": {"class_type": "ModelMergeSimple", "inputs": {"model1": ["1", 0], "model2": ["2", 0], "ratio": 0.5}},
        "4": {"class_type": "KSampler", "inputs": {"model": ["3", 0]}},
    }
    with log_lines() as lines:
        patched(load_model("sd15"), unique_id="2", prompt=prompt)
    assert any("WITHOUT EFFECT: ModelMergeSimple takes only the weights of model2" in line for line in lines), lines
    prompt["3"]["inputs"].update(model1=["2", 0], model2=["1", 0])
    with log_lines() as lines:
        patched(load_model("sd15"), unique_id="2", prompt=prompt)
    assert not any("WITHOUT EFFECT" in line for line in lines), lines


# ---- attention with a softcap, by hand ----


@check
def t5gemmas_softcap_attention_is_served():
    try:
        from comfy.text_encoders.sa3 import T5GemmaEncoder, T5GemmaEncoderConfig
    except ImportError:
        raise Skip("this host has no T5Gemma") from None
    import comfy.model_patcher
    import comfy.ops

    config = T5GemmaEncoderConfig()
    config.vocab_size, config.hidden_size, config.intermediate_size, config.head_dim = 50, 64, 64, 16
    config.num_hidden_layers = 2
    config.num_attention_heads = config.num_key_value_heads = 4
    config.query_pre_attn_scalar, config.attn_logit_softcapping = 0.25, 2.0  # scores that the cap bends
    network = T5GemmaEncoder(config, "cpu", torch.float32, comfy.ops.disable_weight_init)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = network
            self.device = torch.device("cpu")

        def encode_token_weights(self, hidden, mask):
            freqs = sa3_freqs(config, hidden.shape[1])
            for layer in self.encoder.layers:
                hidden = layer(hidden, attention_mask=mask, freqs_cis=freqs)
            return hidden

    class Clip:
        def __init__(self, model, patcher):
            self.cond_stage_model, self.patcher = model, patcher

        def clone(self):
            return Clip(self.cond_stage_model, self.patcher.clone())

    model, cpu = Model(), torch.device("cpu")
    clip = Clip(model, comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu))
    hidden = torch.randn(1, 40, 64, generator=generator)
    mask = torch.zeros(1, 1, 40, 40)
    mask[..., 30:] = -torch.finfo(torch.float32).max
    for given in (None, mask):
        stock = model.encode_token_weights(hidden, given)
        node = nodes.NODE_CLASS_MAPPINGS["PascalTextEncoderAttention"]()
        (ours,) = node.patch(clip, "auto", 0, True)
        assert ours is not clip, "no attention was found"
        with runs() as found:
            ours.patcher.patch_model(device_to=cpu)
            try:
                close(model.encode_token_weights(hidden, given), stock)
            finally:
                ours.patcher.unpatch_model(device_to=cpu)
        (run,) = found
        assert run.count("taken") == run.count() == 2, run.line()
        assert run.warnings == []
        assert all(found is not None and found.is_rounding for found in run.compared.values())


def sa3_freqs(config, tokens):
    from comfy.text_encoders.llama import precompute_freqs_cis

    return precompute_freqs_cis(config.head_dim, torch.arange(tokens)[None], config.rope_theta)
