"""These tests count what being in the way costs: no function but the attention call is seen by Python."""

import pytest
import torch.nn.functional as F
from attn_support import tiny_pipelines as tiny
from attn_support.tiny_pipelines import FAMILIES, SOME, assert_same

from pascal_attn_core.diffusers import patch_attention
from pascal_attn_core.patching.interception import SdpaMode
from tools.families.proof import counted, outputs


@pytest.fixture
def seen(monkeypatch):
    """The functions that the redirect has been asked about."""
    functions = []
    original = SdpaMode.__torch_function__

    def asked(self, func, types, args=(), kwargs=None):
        functions.append(func)
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(SdpaMode, "__torch_function__", asked)
    return functions


@pytest.mark.parametrize("name", [*SOME, "StableAudioDiTModel"])
def test_no_function_of_the_model_is_seen(name, put_on, seen):
    family = tiny.family(name)
    model = family.build()
    put_on(model)
    with counted() as calls:
        outputs(family, model)
    assert calls
    assert not seen


@pytest.mark.parametrize("what", ["backend", "dispatch function"])
def test_what_is_replaced_meanwhile_keeps_its_turn(what, monkeypatch):
    backends = pytest.importorskip("diffusers.models.attention_dispatch", reason="this diffusers has no backends")
    flux = pytest.importorskip("diffusers.models.transformers.transformer_flux")
    family = FAMILIES["FluxTransformer2DModel"]
    model, theirs = family.build(), []
    stock = outputs(family, model)
    place, name = vars(flux), "dispatch_attention_fn"
    if what == "backend":
        place, name = backends._AttentionBackendRegistry._backends, backends.AttentionBackendName.NATIVE
    original = place[name]

    def counting(*args, **kwargs):
        theirs.append(kwargs)
        return original(*args, **kwargs)

    with patch_attention(model), counted() as ours:
        assert_same(outputs(family, model), stock)
        monkeypatch.setitem(place, name, counting)
        assert_same(outputs(family, model), stock)
    assert len(theirs) == 2
    assert len(ours) == 4


def test_a_replacement_of_sdpa_comes_first(monkeypatch):
    """Code that had replaced torch's function keeps its turn; we get what it passes to torch's own."""
    torchs, calls = F.scaled_dot_product_attention, []

    def doubled(query, key, value, *args, **kwargs):
        calls.append(query.shape)
        return 2 * torchs(query, key, value, *args, **kwargs)

    family = FAMILIES["SD3Transformer2DModel (SD3)"]
    model = family.build()
    monkeypatch.setattr(F, "scaled_dot_product_attention", doubled)
    stock, made = outputs(family, model), len(calls)
    with patch_attention(model), counted() as ours:
        assert_same(outputs(family, model), stock)
    assert len(calls) == 2 * made
    assert len(ours) == made
