"""These tests check what importing our module adds to models, and what set_attention_backend means beside ours."""

import logging

import diffusers
import pytest
import torch
from attn_support import tiny_pipelines as tiny
from attn_support.tiny_pipelines import FAMILIES, assert_same
from diffusers.models import attention_processor as host

import pascal_attn_core.diffusers as pascal
from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import PascalAttnProcessor
from tools.families.proof import attention_state, outputs

#: diffusers gives these no attn_processors (0.42.1); two have attention modules of their own kind
BARE = [name for name in FAMILIES if any(part in name for part in ("CogView4", "Latte", "Lumina2Trans", "MochiTrans"))]
assert len(BARE) >= 3
pytestmark = pytest.mark.filterwarnings("ignore")


def test_uninstalled_every_change_to_diffusers_is_gone_and_ours_is_off(routed):
    classes = [getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Model")]
    models = [cls for cls in classes if isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin)]
    assert all(hasattr(cls, "attn_processors") and hasattr(cls, "set_attn_processor") for cls in models)
    unet, vae = tiny.tiny_unet(), tiny.wan().pipe.vae
    before = [attention_state(each) for each in (unet, vae)]
    for each in (unet, vae):
        each.set_attn_processor(PascalAttnProcessor())
    try:
        pascal.install().remove()
        assert not hasattr(diffusers.DiffusionPipeline, "set_attn_processor")
        assert not hasattr(host.Attention.set_processor, "__wrapped__")
        assert all(hasattr(cls, "attn_processors") == hasattr(cls, "set_attn_processor") for cls in models)
        assert not all(hasattr(cls, "attn_processors") for cls in models)
        assert [attention_state(each) for each in (unet, vae)] == before
        tiny.run_unet(unet)
        assert not routed
    finally:
        patch = pascal.install()
    assert pascal.install() is patch
    assert patch.active
    assert hasattr(diffusers.AutoencoderKLCogVideoX, "set_attn_processor")
    assert not hasattr(host.Attention.set_processor.__wrapped__, "__wrapped__")


@pytest.mark.parametrize("name", BARE)
def test_every_processor_can_be_replaced_through_a_dict(name):
    """This is what diffusers' own tests ask of a model that has set_attn_processor."""
    model = tiny.family(name).build()
    current = model.attn_processors
    assert current
    new = {key: type(processor)() for key, processor in current.items()}
    model.set_attn_processor(dict(new))
    assert list(model.attn_processors) == list(current)
    assert all(model.attn_processors[key] is processor for key, processor in new.items())
    with pytest.raises(ValueError, match="number of processors"):
        model.set_attn_processor(dict([next(iter(new.items()))] if len(new) > 1 else []))
    with pytest.raises(ValueError, match="got no_such"):
        model.set_attn_processor({**dict(list(new.items())[1:]), "no_such.processor": None})


@pytest.mark.parametrize("name", [*BARE, "UNet2DConditionModel (SDXL)"])
def test_a_dict_gives_each_module_its_own_config_and_the_saved_ones_come_back(name, routed):
    family = tiny.family(name)
    model = family.build()
    stock, saved = outputs(family, model), model.attn_processors
    configs = {key: AttentionConfig(budget_mib=1 + i) for i, key in enumerate(saved)}
    model.set_attn_processor({key: PascalAttnProcessor(config) for key, config in configs.items()})
    assert {key: processor.config for key, processor in model.attn_processors.items()} == configs
    assert_same(outputs(family, model), stock)
    used = {call["config"] for call in routed}
    assert used == set(configs.values()) if name.startswith("UNet") else 0 < len(used) <= len(configs)
    routed.clear()
    model.set_attn_processor(dict(saved))
    assert all(processor is saved[key] for key, processor in model.attn_processors.items())
    assert torch.equal(outputs(family, model), stock)
    assert not routed


@pytest.fixture
def flux():
    pytest.importorskip("diffusers.models.attention_dispatch", reason="this diffusers has no backends")
    return tiny.flux()


def backend_warnings(caplog):
    return [r.getMessage() for r in caplog.records if "set_attention_backend" in r.getMessage()]


def test_a_backend_set_after_ours_is_answered_once(put_on, flux, routed, caplog):
    stock = flux.run()
    take_off = put_on(flux.pipe)
    with caplog.at_level(logging.WARNING, "pascal_attn"):
        flux.denoiser.set_attention_backend("_native_math")
        assert_same(flux.run(), stock)
    (sentence,) = backend_warnings(caplog)
    assert "Pascal Attention is set on 2 attention modules" in sentence
    assert "'_native_math'" in sentence
    assert routed
    # once ours is off, the backend is at work
    take_off()
    routed.clear()
    assert_same(flux.run(), stock)
    assert not routed
    backends = {str(p._attention_backend.value) for p in flux.denoiser.attn_processors.values()}
    assert backends == {"_native_math"}


@pytest.mark.parametrize("is_first", [True, False])
def test_flex_attention_that_is_chosen_is_computed_in_tiles(put_on, flux, routed, caplog, is_first):
    stock = flux.run()
    with caplog.at_level(logging.WARNING, "pascal_attn"):
        if is_first:
            flux.denoiser.set_attention_backend("flex")
        put_on(flux.denoiser)
        flux.denoiser.set_attention_backend("flex")
    assert not backend_warnings(caplog)
    routed.clear()
    assert_same(flux.run(), stock)
    assert len(routed) == 4
