"""The functions ``patch_*``: which part of a pipeline each finds, what its report says, and what it refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attn_support.ffn_zoo import mlp
from attn_support.fresh import run
from torch import Tensor, nn

from pascal_attn_core import Patch, patch_ffn, patch_linear_int8, patch_vae


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"ffn": mlp(64, 256)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["ffn"](x)
        return x


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 3, 3, padding=1)

    def decode(self, latent: Tensor) -> Tensor:
        return self.conv(latent)


class Pipeline:
    """Holds its parts as diffusers' pipelines do, of both kinds."""

    def __init__(self, **components: Any):
        self.components = components


def wan() -> Pipeline:
    return Pipeline(transformer=Denoiser(), transformer_2=Denoiser(), vae=Vae(), scheduler=object(), text_encoder=None)


ON_MODELS: dict[str, Callable[..., Patch]] = {
    "ffn": lambda target, **given: patch_ffn(target, **{"chunk_tokens": 8, "min_tokens": 2, **given}),
    "int8": lambda target, **given: patch_linear_int8(target, **{"include": "*", **given}),
}


@pytest.mark.parametrize("patch_it", ON_MODELS.values(), ids=ON_MODELS)
def test_all_denoisers_of_a_pipeline_are_patched_and_named_by_their_component(patch_it: Callable[..., Patch]) -> None:
    pipe = wan()
    x = torch.randn(1, 32, 64)
    before = [pipe.components[name](x) for name in ("transformer", "transformer_2")]
    with torch.no_grad(), patch_it(pipe) as patch:
        assert {state.name.partition(".")[0] for state in patch.report().states} == {"transformer", "transformer_2"}
        assert {state.state for state in patch.report().states} <= {"on", "waiting", "refused", "off", "unable"}
        for name, expected in zip(("transformer", "transformer_2"), before):
            torch.testing.assert_close(pipe.components[name](x), expected, rtol=0.1, atol=0.05)
        assert {state.state for state in patch.report().states} == {"on"}
        assert patch.left_alone == {}
    for name, expected in zip(("transformer", "transformer_2"), before):
        assert torch.equal(pipe.components[name](x), expected)


def test_the_vae_of_a_pipeline_is_patched() -> None:
    pipe = wan()
    latent = torch.randn(1, 4, 16, 16)
    with torch.no_grad(), patch_vae(pipe, budget_mib=1) as patch:
        torch.testing.assert_close(pipe.components["vae"].decode(latent), pipe.components["vae"].conv(latent))
        assert [(state.name, state.state) for state in patch.report().states] == [("decode", "on")]


@pytest.mark.parametrize("patch_it", [*ON_MODELS.values(), patch_vae], ids=[*ON_MODELS, "vae"])
def test_nothing_to_patch_is_an_error(patch_it: Callable[..., Patch]) -> None:
    with pytest.raises(ValueError, match="must have"):
        patch_it(nn.ReLU())
    with pytest.raises(ValueError, match="Pipeline must have one of"):
        patch_it(Pipeline(text_encoder=nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="must be a diffusers pipeline or a torch"):
        patch_it(object())


@pytest.mark.parametrize("patch_it", ON_MODELS.values(), ids=ON_MODELS)
@pytest.mark.parametrize("given", [{"include": "*.nope"}, {"include": ["*", nn.Conv1d]}, {"exclude": "nope"}], ids=str)
def test_a_pattern_that_chooses_nothing_is_an_error(patch_it: Callable[..., Patch], given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="clude must choose a module"):
        patch_it(Denoiser(), **given)


def test_the_entry_points_are_loaded_when_they_are_used() -> None:
    run("""
        import sys
        import pascal_attn_core
        names = ("ffn", "vae", "int8", "diffusers", "transformers", "flash_attn", "sdpa_patch")
        def loaded():
            return [name for name in names if f"pascal_attn_core.{name}" in sys.modules]
        assert not {"vae", "int8", "diffusers", "transformers", "flash_attn"} & set(loaded()), loaded()
        from pascal_attn_core import patch_flash_attn
        assert "flash_attn" in loaded() and "int8" not in loaded()
        assert {"patch_attention", "patch_ffn", "patch_vae", "sdpa"} <= set(dir(pascal_attn_core))
        try:
            pascal_attn_core.patch_nothing
        except AttributeError as error:
            assert "patch_nothing" in str(error)
        else:
            raise SystemExit("there is no such name")
    """)
