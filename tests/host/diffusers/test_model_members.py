"""What importing our module adds to models, and what set_attention_backend means beside ours."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("diffusers", reason="diffusers is not installed")

import diffusers
import torch

import pascal_attn_core.diffusers as pascal
from pascal_attn_core import AttentionConfig
from pascal_attn_core.diffusers import PascalAttnProcessor, patch_pipeline
from tools.families import families
from tools.families.proof import outputs

FAMILIES = {family.name: family for family in families()}
#: diffusers gives these no attn_processors (0.42.1); two have attention modules of their own kind
BARE = [name for name in FAMILIES if any(part in name for part in ("CogView4", "Latte", "Lumina2Trans", "MochiTrans"))]
pytestmark = pytest.mark.filterwarnings("ignore")


def build(name):
    family = FAMILIES[name]
    if family.model_class() is None:
        pytest.skip(f"this diffusers has no {name}")
    return family, family.build()


def test_there_are_such_models():
    assert len(BARE) >= 3


@pytest.mark.parametrize("name", BARE)
def test_every_processor_can_be_replaced_through_a_dict(name):
    """What diffusers' own tests ask of a model that has set_attn_processor."""
    _, model = build(name)
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


@pytest.mark.parametrize("name", BARE)
def test_a_dict_gives_each_module_its_own_config_and_the_saved_ones_come_back(name, routed, assert_same):
    family, model = build(name)
    stock, saved = outputs(family, model), model.attn_processors
    configs = {key: AttentionConfig(budget_mib=1 + i) for i, key in enumerate(saved)}
    model.set_attn_processor({key: PascalAttnProcessor(config) for key, config in configs.items()})
    assert {key: processor.config for key, processor in model.attn_processors.items()} == configs
    assert_same(outputs(family, model), stock)
    assert {call["config"] for call in routed} <= set(configs.values())
    assert routed
    routed.clear()
    model.set_attn_processor(saved)
    assert torch.equal(outputs(family, model), stock)
    assert not routed


def test_the_keys_are_those_of_diffusers(tiny):
    unet = tiny.tiny_unet()
    assert list(pascal._attn_processors(unet)) == list(unet.attn_processors)
    assert all(p is unet.attn_processors[name] for name, p in pascal._attn_processors(unet).items())


def test_setter_and_getter_come_and_go_together():
    classes = [getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Model")]
    models = [cls for cls in classes if isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin)]
    assert all(hasattr(cls, "attn_processors") and hasattr(cls, "set_attn_processor") for cls in models)
    try:
        pascal.uninstall()
        ours = {hasattr(cls, "attn_processors") == hasattr(cls, "set_attn_processor") for cls in models}
        assert ours == {True}
        assert not all(hasattr(cls, "attn_processors") for cls in models)
    finally:
        pascal.install()


def test_a_model_without_attention_has_no_processors():
    assert diffusers.AutoencoderTiny().attn_processors == {}


# --- backends ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def flux(tiny):
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch", reason="this diffusers has no backends")
    before = dispatch._AttentionBackendRegistry._active_backend
    yield tiny.flux()
    dispatch._AttentionBackendRegistry.set_active_backend(before)


def backend_warnings(caplog):
    return [r.getMessage() for r in caplog.records if "set_attention_backend" in r.getMessage()]


@pytest.mark.parametrize("how", ["processor", "patch"])
def test_a_backend_set_after_ours_is_answered_once(how, flux, routed, caplog, assert_same):
    stock = flux.run()
    patch = patch_pipeline(flux.pipe) if how == "patch" else flux.pipe.set_attn_processor(PascalAttnProcessor())
    with caplog.at_level(logging.WARNING, "pascal_attn"):
        flux.denoiser.set_attention_backend("_native_math")
        assert_same(flux.run(), stock)
    (sentence,) = backend_warnings(caplog)
    assert "Pascal Attention is set on 2 attention modules" in sentence
    assert "'_native_math'" in sentence
    assert routed
    # once ours is off, the backend is at work
    if patch is None:
        flux.pipe.set_attn_processor(None)
    else:
        patch.remove()
    routed.clear()
    assert_same(flux.run(), stock)
    assert not routed
    backends = {str(p._attention_backend.value) for p in flux.denoiser.attn_processors.values()}
    assert backends == {"_native_math"}


def test_flex_set_after_ours_takes_attention_and_is_named(put_on, flux, routed, caplog):
    put_on(flux.denoiser)
    with caplog.at_level(logging.WARNING, "pascal_attn"):
        flux.denoiser.set_attention_backend("flex")
    (sentence,) = backend_warnings(caplog)
    assert "set_attention_backend('flex') takes effect" in sentence
    flux.denoiser.set_attention_backend("native")
    flux.run()
    assert len(routed) == 4


def test_flex_set_before_ours_stays_and_is_named_once(put_on, flux, routed, caplog):
    flux.denoiser.set_attention_backend("flex")
    with caplog.at_level(logging.WARNING, "pascal_attn"):
        put_on(flux.denoiser)
    assert len(backend_warnings(caplog)) == 1
    flux.denoiser.set_attention_backend("native")
    flux.run()
    assert len(routed) == 4


def test_without_ours_nothing_is_said(flux, caplog):
    with caplog.at_level(logging.WARNING, "pascal_attn"):
        flux.denoiser.set_attention_backend("native")
        flux.denoiser.transformer_blocks[0].attn.set_attention_backend("_native_math")
    assert not backend_warnings(caplog)
    flux.denoiser.set_attn_processor(PascalAttnProcessor())
    with caplog.at_level(logging.WARNING, "pascal_attn"):
        flux.denoiser.transformer_blocks[0].attn.set_attention_backend("_native_math")
    (sentence,) = backend_warnings(caplog)
    assert "on 1 attention module:" in sentence
