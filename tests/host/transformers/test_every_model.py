"""Every model class of Transformers that can be built tiny: the same answer under our name as under "eager"."""

import logging
from typing import Any

import pytest
import torch
from attn_support import tiny_models as tiny
from attn_support.randomness import some
from torch import Tensor

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5")

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

KINDS = {
    "decoder": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "encoder": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "both": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
AT_LEAST = {"decoder": 90, "encoder": 30, "both": 10}
PARAMETERS = 20_000_000  # what ignores our sizes is left out


def config_of(model_type: str) -> Any:
    return tiny.config_of(getattr(transformers, CONFIG_MAPPING_NAMES[model_type]))


def build(model_class: Any, model_type: str, implementation: str) -> Any:
    torch.manual_seed(0)
    model = model_class._from_config(config_of(model_type), attn_implementation=implementation).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.25)
    return model


def logits(model: Any, kind: str) -> Tensor:
    ids = torch.randint(3, 60, (2, 19), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, slice(0, 5) if kind == "decoder" else slice(-5, None)] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if kind == "both":
        inputs["decoder_input_ids"] = ids[:, :7]
    with torch.no_grad():
        outputs = model(**inputs)
    found = outputs[0] if getattr(outputs, "logits", None) is None else outputs.logits
    return found if kind == "both" else found * mask[..., None]


def stock(name: str, model_type: str, kind: str) -> Tensor | None:
    """Return what a class computes with "eager"; None if it cannot be built this small or takes other inputs."""
    model_class = getattr(transformers, name, None)
    try:
        with torch.device("meta"):
            size = sum(weight.numel() for weight in model_class(config_of(model_type)).parameters())
        return None if size > PARAMETERS else logits(build(model_class, model_type, "eager"), kind)
    except Exception:  # of any kind: these are other people's constructors
        return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_no_model_computes_anything_else_under_our_name(registered: str, kind: str, caplog) -> None:
    caplog.set_level(logging.CRITICAL)
    same, wrong = [], []
    for model_type, names in some(KINDS[kind].items(), 12):
        name = names if isinstance(names, str) else names[0]
        expected = stock(name, model_type, kind) if model_type in CONFIG_MAPPING_NAMES else None
        if expected is None:
            continue
        try:
            found = logits(build(getattr(transformers, name), model_type, registered), kind)
        except (NotImplementedError, KeyError):  # refused by us or by the host (Falcon), not computed wrongly
            continue
        difference = ((found - expected).abs().max() / expected.abs().max().clamp_min(1e-9)).item()
        same.append(name) if difference < 1e-3 else wrong.append(f"{name}: {difference:.1e}")
    assert not wrong
    assert len(same) >= len(some(range(AT_LEAST[kind]), 12)), "too few models could be built to say anything"
