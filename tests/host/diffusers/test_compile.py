"""torch.compile(fullgraph=True) of whole denoisers, called by their pipelines with attention kwargs: as stock."""

import pytest
import torch
from attn_support import tiny_pipelines as tiny
from attn_support.randomness import at_night, some
from attn_support.tiny_pipelines import assert_same
from torch._dynamo.utils import counters

from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import PascalAttnProcessor, patch_attention

#: the keyword with which each pipeline takes attention kwargs; FluxPipeline passes a dict on in every call
KEYWORD = {
    "sd3": "joint_attention_kwargs",
    "sd15": "cross_attention_kwargs",
    "flux": "joint_attention_kwargs",
    "ltx": "attention_kwargs",
    "wan": "attention_kwargs",
    "cogvideox": "attention_kwargs",
}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _dynamo_forgets():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


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
    ("name", "hows"),
    [(name, ("processor", "patch") if name == "sd3" else ("processor",)) for name in some(KEYWORD, 8)],
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
