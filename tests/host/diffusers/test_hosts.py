"""Ours beside what diffusers, accelerate and torch do to a model: offloading, caches, parallelism, compilation."""

import functools
import itertools
from typing import Any

import diffusers
import pytest
import torch
from attn_support import tiny_pipelines as tiny
from attn_support.randomness import some
from attn_support.tiny_pipelines import SOME, assert_same, do

from tools.families.proof import counted, outputs

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")


@functools.cache
def stock_of(name):
    family = tiny.family(name)
    return outputs(family, family.build())


def in_groups(model, by):
    hooks = pytest.importorskip("diffusers.hooks.group_offloading", reason="this diffusers has no group offloading")
    blocks = {"num_blocks_per_group": 1} if by == "block_level" else {}
    hooks.apply_group_offloading(model, onload_device=CPU, offload_device=CPU, offload_type=by, **blocks)


def in_sequence(model, _):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerate.cpu_offload(model, execution_device=CPU, offload_buffers=True)
    assert any(parameter.device.type == "meta" for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "by", "ours_first"),
    some(itertools.product(SOME, ("leaf_level", "block_level", "accelerate"), (True, False)), 4),
)
def test_offloaded_it_gives_the_output_of_stock(name, by, ours_first, put_on):
    if by == "block_level" and name == "AutoencoderKL":
        pytest.skip("an autoencoder has no stack of blocks")
    family, stock = tiny.family(name), stock_of(name)
    model = family.build()
    offload = in_sequence if by == "accelerate" else in_groups
    do(lambda: offload(model, by), lambda: put_on(model), backwards=ours_first)
    with counted() as calls:
        assert_same(outputs(family, model), stock)
    assert calls


@pytest.mark.parametrize("name", SOME)
def test_gradient_checkpointing_gives_the_gradients_of_stock(name, put_on):
    family = tiny.family(name)

    def gradients(model):
        model.zero_grad()
        out = model(**family.arguments())[0]
        out.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    model = family.build()
    if not getattr(model, "_supports_gradient_checkpointing", False):
        pytest.skip(f"{name} has no gradient checkpointing")
    torch.manual_seed(0)
    stock = gradients(model)
    model.enable_gradient_checkpointing()
    put_on(model)
    with counted() as calls:
        model.train()
        assert_same(gradients(model), stock)
    assert calls


def compiled(family, model):
    torch._dynamo.reset()
    return outputs(family, torch.compile(model, fullgraph=True, backend="eager"))


#: test_compile compiles whole pipelines of the other families
COMPILED = ["QwenImageTransformer2DModel", "UNet2DConditionModel (SDXL)"]
COMPILED += ["HunyuanVideoTransformer3DModel (text to video)", "AutoencoderKL"]


@pytest.mark.parametrize("name", some(COMPILED, 5))
def test_a_family_compiles_to_one_graph(name, put_on):
    family, stock = tiny.family(name), stock_of(name)
    model = family.build()
    put_on(model)
    try:
        with counted() as calls:
            ours = compiled(family, model)
    except Exception:
        try:
            compiled(family, family.build())
        except Exception as error:  # whatever diffusers cannot have compiled
            pytest.skip(f"{name} does not compile by itself: {type(error).__name__}")
        raise
    assert_same(ours, stock)
    assert calls  # seen while tracing


ATTENTION_CACHE = {"spatial_attention_block_skip_range": 2, "spatial_attention_timestep_skip_range": (-1, 1001)}
CACHES: dict[str, dict[str, Any]] = {
    "PyramidAttentionBroadcastConfig": ATTENTION_CACHE,
    "FirstBlockCacheConfig": {"threshold": 100.0},
    "TaylorSeerCacheConfig": {"cache_interval": 2, "disable_cache_before_step": 1},
    "cache-dit": {"Fn_compute_blocks": 1, "residual_diff_threshold": 100.0, "max_warmup_steps": 1},
}


def enable_cache(case: tiny.Tiny, name: str) -> None:
    if name == "cache-dit":
        cache_dit = pytest.importorskip("cache_dit", reason="cache-dit is not installed")
        cache_dit.enable_cache(case.pipe, cache_config=cache_dit.DBCacheConfig(**CACHES[name]))
        return
    if not hasattr(diffusers, name):
        pytest.skip(f"this diffusers has no {name}")
    now = {"current_timestep_callback": lambda: case.pipe.current_timestep} if "Pyramid" in name else {}
    case.denoiser.enable_cache(getattr(diffusers, name)(**CACHES[name], **now))


@pytest.mark.parametrize(("name", "is_ours_first"), some(itertools.product(CACHES, (False, True)), 3))
def test_a_cache_that_skips_attention_gives_its_stock_output(name, is_ours_first, put_on, routed):
    stock_case, case = ((tiny.cogvideox if "Pyramid" in name else tiny.flux)() for _ in range(2))
    for each in (stock_case, case):
        each.arguments["num_inference_steps"] = 6
    enable_cache(stock_case, name)
    stock = stock_case.run()
    take_off = put_on(case.denoiser)
    case.run()
    whole = len(routed)
    take_off()
    do(lambda: enable_cache(case, name), lambda: put_on(case.denoiser), backwards=is_ours_first)
    routed.clear()
    assert_same(case.run(), stock)
    assert 0 < len(routed) < whole
