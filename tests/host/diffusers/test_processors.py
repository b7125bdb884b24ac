"""PascalAttnProcessor: what set_attn_processor does with it, and what it leaves as it was."""

import copy

import pytest
import torch
from attn_support import tiny_pipelines as tiny
from attn_support.tiny_pipelines import assert_same
from diffusers import DiffusionPipeline
from diffusers.models import attention_processor as host

from pascal_attn_core.diffusers import PascalAttnProcessor


def attention(**changes):
    torch.manual_seed(0)
    return host.Attention(**{"query_dim": 32, "heads": 2, "dim_head": 16, **changes}).eval()


@pytest.mark.parametrize(
    ("given", "words"),
    [({}, "set it on one model"), ("pascal", "'pascal'"), (host.AttnProcessor2_0(), "set it on one model")],
)
def test_what_is_no_processor_of_a_whole_pipeline_is_refused(given, words):
    with pytest.raises(TypeError, match=words):
        DiffusionPipeline().set_attn_processor(given)


@pytest.mark.parametrize("make", [lambda: tiny.flux().pipe.transformer, tiny.tiny_unet, attention])
def test_a_class_in_the_place_of_a_processor_is_refused(make):
    model = make()
    with pytest.raises(TypeError, match="must be an attention processor, got the class PascalAttnProcessor: call it"):
        getattr(model, "set_attn_processor", getattr(model, "set_processor", None))(PascalAttnProcessor)


def test_a_processor_assigned_past_set_processor_says_how_to_set_it():
    module = attention()
    module.processor = PascalAttnProcessor()
    with pytest.raises(RuntimeError, match=r"set_attn_processor\(\)"):
        module(torch.zeros(1, 4, 32))


class StrongAttnProcessor(host.AttnProcessor2_0):
    """A third party's processor with a keyword of its own."""

    def __call__(self, attn, hidden_states, *args, strength=1.0, **kwargs):
        kwargs.pop("cross_attention_kwargs", None)
        return strength * super().__call__(attn, hidden_states, *args, **kwargs)


def test_keywords_of_a_third_partys_processor_arrive(put_on, routed):
    module, x = attention(processor=StrongAttnProcessor()), torch.randn(1, 5, 32)
    stock, plain = module(x, strength=2.0), module(x)
    assert not torch.allclose(stock, plain)
    put_on(module)
    assert_same(module(x, strength=2.0), stock)
    assert len(routed) == 1


@pytest.mark.parametrize("slice_size", [None, 1], ids=["AttnProcessor", "SlicedAttnProcessor"])
def test_older_processors_run_as_their_sdpa_successors(put_on, slice_size, routed):
    unet = tiny.tiny_unet()
    unet.set_attn_processor(host.SlicedAttnProcessor(1) if slice_size else host.AttnProcessor())
    stock, saved = tiny.run_unet(unet), dict(unet.attn_processors)
    put_on(unet)
    assert_same(tiny.run_unet(unet), stock)
    unet.set_attn_processor(dict(saved))
    assert len(routed) == len(saved)
    assert all(p is saved[name] for name, p in unet.attn_processors.items())


def test_copies_and_files_of_a_model_compute_the_same_and_stay_routed(put_on, routed):
    unet = tiny.tiny_unet()
    take_off = put_on(unet)
    ours = tiny.run_unet(unet)
    count = len(routed)
    for other in (copy.deepcopy(unet), tiny.from_file(unet)):
        routed.clear()
        assert torch.equal(tiny.run_unet(other), ours)
        assert len(routed) == count
    take_off()
    routed.clear()
    tiny.run_unet(unet)
    assert not routed
    tiny.run_unet(other)
    assert len(routed) == count
