"""Ours beside what diffusers, accelerate and torch do to a model: offloading, caches, parallelism, compilation."""

import functools
import itertools
from typing import Any

import diffusers
import pytest
import torch
from attn_support import tiny_pipelines as tiny
from attn_support.randomness import at_night, some
from attn_support.tiny_pipelines import SOME, assert_same, do
from torch._dynamo.utils import counters

from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import PascalAttnProcessor, patch_attention
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


#: whole pipelines of the other families are compiled below
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


#: the keyword with which each pipeline takes attention kwargs; FluxPipeline passes a dict on in every call
KEYWORD = {
    "sd3": "joint_attention_kwargs",
    "sd15": "cross_attention_kwargs",
    "flux": "joint_attention_kwargs",
    "ltx": "attention_kwargs",
    "wan": "attention_kwargs",
    "cogvideox": "attention_kwargs",
}


def compiled_runs(case, how, all_kwargs, config=None):
    """The outputs of one run per entry of ``all_kwargs``, and the graphs they took."""
    torch._dynamo.reset()
    counters.clear()
    graphs = []

    def backend(module, inputs):
        graphs.append(module.graph)
        return module

    if how == "patch":
        patch_attention(case.denoiser, config)
    elif how == "processor":
        case.denoiser.set_attn_processor(PascalAttnProcessor(config))
    case.denoiser.compile(backend=backend, fullgraph=True)
    outputs = runs(case, all_kwargs)
    assert not counters["graph_break"]
    return outputs, graphs


def runs(case, all_kwargs):
    """The output of one run per entry of ``all_kwargs``."""
    outputs = []
    for kwargs in all_kwargs:
        case.arguments.update(kwargs)
        outputs.append(case.run())
    return outputs


def attention_of(graph):
    """The names of the attention operators in ``graph``, in order."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [n for n in names if "pascal" in n or "scaled_dot_product_attention" in n]


# processors of Wan and others that take no kwargs compiled before too
@pytest.mark.parametrize(
    ("name", "hows"), [(name, ("processor", "patch") if name == "sd3" else ("processor",)) for name in some(KEYWORD, 8)]
)
def test_a_pipeline_with_attention_kwargs_compiles_as_stock(name, hows):
    kwargs = {KEYWORD[name]: {"scale": 1.0}}
    (stock,), stock_graphs = compiled_runs(tiny.BUILD[name](), "stock", [kwargs])
    for how in hows:
        tiled = AttentionConfig(route="tiled")
        ours, graphs = compiled_runs(tiny.BUILD[name](), how, [kwargs, kwargs], tiled)
        for each in ours:
            assert_same(each, stock)
        assert len(graphs) == len(stock_graphs)
        calls, stock_calls = attention_of(graphs[0]), attention_of(stock_graphs[0])
        assert len(calls) == len(stock_calls) > 0
        assert all("pascal" in name for name in calls)


@at_night
def test_the_scale_of_a_lora_reaches_a_compiled_model():
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def with_lora():
        case = tiny.flux()
        torch.manual_seed(0)
        case.denoiser.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
        return case

    all_kwargs = [{"joint_attention_kwargs": {"scale": scale}} for scale in (1.0, 0.0)]
    stock = runs(with_lora(), all_kwargs)
    assert not torch.allclose(stock[0], stock[1])
    ours, graphs = compiled_runs(with_lora(), "processor", all_kwargs)
    assert len(graphs) <= 2  # one for each scale
    for mine, theirs in zip(ours, stock):
        assert_same(mine, theirs)
