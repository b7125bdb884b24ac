"""Pascal Attention Patch inside the host, on calls that are made in an unusual way: see ``comfy_checks``."""

import asyncio
import os

import comfy.ldm.modules.attention as host_attention
import comfy.model_management
import torch
from comfy_checks import Skip, check, replaced, run_of, unload
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
        extra = os.path.join(os.path.dirname(nodes.__file__), "comfy_extras", "nodes_hypertile.py")
        if not asyncio.run(nodes.load_custom_node(extra, module_parent="comfy_extras")):
            raise Skip("this host's HyperTile could not be loaded")
        node = nodes.NODE_CLASS_MAPPINGS["HyperTile"]
    given = {"tile_size": 32, "swap_size": 1, "max_depth": 3, "scale_depth": False}
    if hasattr(node, "execute"):
        return node.execute(model=model, **given)[0]
    return node().patch(model=model, **given)[0]


def seeded(model, **options):
    torch.manual_seed(5)  # HyperTile draws its divisors
    return sample(model, "sd15", steps=2, **options)


@check
def hypertile_keeps_its_result_and_saving_with_guidance_and_without():
    model = load_model("sd15")
    for cfg in (1.0, 3.0):
        plain, stock = seeded(model, cfg=cfg), seeded(with_hypertile(model), cfg=cfg)
        assert float((plain - stock).abs().max()) > 1e-3, "HyperTile changes nothing in this model"
        for place in (lambda m: patched(with_hypertile(m)), lambda m: with_hypertile(patched(m))):
            run = run_of(lambda: seeded(place(model), cfg=cfg), stock)  # noqa: B023
            assert run.count("taken") == run.count() > 0, run.line()
            assert run.warnings == []
            tiled = [kind for kind in run.tallies if kind.query[0] > 2]
            assert tiled, "no call was tiled"
            # Each tile looks at its own keys alone, not at those of all tiles.
            own = [kind for kind in tiled if kind.key[2] != 77]
            assert all(kind.key[0] == kind.query[0] and kind.key[2] == kind.query[2] for kind in own)
            assert all(found is not None and found.is_rounding for found in run.compared.values())


@check
def every_call_of_networks_that_pass_the_override_by():
    seen = []
    for name, case in NETWORKS.items():
        try:
            network, run = case.made()
        except Skip:
            continue
        seen.append(name)
        model = patcher_of(network)
        stock = applied(model, run)
        ours = run_of(lambda: applied(patched(model), run), stock)  # noqa: B023
        empty = ours.reasons("passed to ComfyUI").get("it has no keys", 0)
        assert ours.count("taken") + empty == ours.count() > 0, (name, ours.line())
        assert case.calls in (None, ours.count()), (name, ours.line())
        assert ours.warnings == [], (name, ours.warnings)
        assert torch.equal(applied(model, run), stock), f"{name}: the model itself is changed"
    assert "HunyuanDiT" in seen, seen


@check
def by_name_and_announced_calls_are_counted_once_and_again_once_the_model_was_unloaded():
    """Where methods are copied, an announced call still goes to the override, and through others' overrides."""
    name = "flux" if IS_SDPA else "sd15"
    model = load_model(name)
    ours = patched(model)
    before = run_of(lambda: sample(patched(model, coverage="attention override"), name))
    whole = run_of(lambda: sample(ours, name))
    unload()
    again = run_of(lambda: sample(ours, name))
    assert before.count("taken") == whole.count("taken") == again.count("taken") > 0


def other_override(model, function):
    model = model.clone()
    options = model.model_options["transformer_options"] = model.model_options["transformer_options"].copy()
    options[KEY] = function
    return model


@check
def the_hosts_own_backend_node_is_replaced():
    model = load_model("sd15").clone()
    if not hasattr(model, "set_model_optimized_attention"):
        raise Skip("this host has no node that chooses an attention function per model")
    stock = sample(model, "sd15")
    model.set_model_optimized_attention(host_attention.attention_split)
    run = run_of(lambda: sample(patched(model), "sd15"), stock)
    assert run.count("taken") == run.count() > 0
    run = run_of(lambda: sample(patched(model, earlier_patch="run it first"), "sd15"), stock)
    assert run.count("taken") == 0
    assert any("passes none on" in warning for warning in run.warnings), run.warnings


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
