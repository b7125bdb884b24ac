"""Tiny random-weight models that ComfyUI's own loaders accept. Imported by the host's interpreter only.

``MODELS[name]`` is a ``Model``: the folder ComfyUI looks in, and the sizes to try in order. A host that takes the small
one gets it; an older host that has a width written into its code gets the published width with one block of each kind.
Widths that look odd (768, 2048, 4096, 3584) are what the host recognises the family by.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

StateDict = dict[str, Tensor]


class NotOnThisHost(Exception):
    """The host does not know this family."""


@dataclasses.dataclass
class Built:
    """What goes into one file."""

    tensors: StateDict
    metadata: dict[str, str] | None = None


@dataclasses.dataclass(frozen=True)
class Model:
    """One file to build: its folder, and its builders from the smallest size up."""

    folder: str
    sizes: Sequence[Callable[[], Built]]


MODELS: dict[str, Model] = {}


def model(name: str, folder: str = "diffusion_models", sizes: Sequence[dict] = ({},)) -> Callable:
    """Register a builder; each entry of ``sizes`` are keywords for one attempt."""

    def add(build: Callable[..., Built]) -> Callable[..., Built]:
        MODELS[name] = Model(folder, [lambda kw=kw: build(**kw) for kw in sizes])
        return build

    return add


def host_class(module: str, name: str) -> Any:
    """A class of the host, or ``NotOnThisHost``."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as missing:
        raise NotOnThisHost(f"this ComfyUI has no {missing.name}") from None


def host_settings() -> dict[str, Any]:
    """The keywords that every network of the host takes."""
    import comfy.ops

    return {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.disable_weight_init}


def random_weights(network: torch.nn.Module, seed: int = 0) -> StateDict:
    """Weights that keep activations near unit size: N(0, 1/fan_in) matrices, zero biases, unit scales."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, like: Tensor) -> Tensor:
        if not like.is_floating_point():
            return like.clone()
        if like.ndim >= 2:
            return torch.randn(like.shape, generator=generator).div_(math.sqrt(like[0].numel())).half()
        return (torch.zeros if name.endswith("bias") else torch.ones)(like.shape, dtype=torch.float16)

    return {name: draw(name, like) for name, like in network.state_dict().items()}


def published_norms(weights: StateDict) -> StateDict:
    """Published Flux-like files call the norm of queries and keys ``.scale``; newer hosts hold it as ``.weight``."""
    modules = ("query_norm", "key_norm")
    parents = {name: name.rpartition(".")[0] for name in weights}
    return {f"{parents[n]}.scale" if parents[n].endswith(modules) else n: tensor for n, tensor in weights.items()}


def unet(depth: list[int], depth_out: list[int], channel_mult: list[int], **options: Any) -> torch.nn.Module:
    build = host_class("comfy.ldm.modules.diffusionmodules.openaimodel", "UNetModel")
    fixed = {
        "image_size": 32,
        "in_channels": 4,
        "out_channels": 4,
        "model_channels": 320,
        "transformer_depth_middle": 1,
    }
    return build(
        transformer_depth=depth,
        transformer_depth_output=depth_out,
        channel_mult=channel_mult,
        num_res_blocks=[1] * len(channel_mult),
        use_spatial_transformer=True,
        legacy=False,
        use_checkpoint=False,
        **fixed,
        **options,
        **host_settings(),
    )


@model("sd15")
def sd15() -> Built:
    return Built(random_weights(unet([1], [1, 1], [1], context_dim=768, num_heads=8)))


@model("sdxl")
def sdxl() -> Built:
    # transformer depths [0, 2, 5] are how the host recognises an SDXL-like UNet of fewer blocks (KOALA).
    network = unet(
        [0, 2, 5],
        [0, 0, 1, 1, 1, 1],
        [1, 1, 1],
        context_dim=2048,
        use_linear_in_transformer=True,
        adm_in_channels=2816,
        num_classes="sequential",
        num_heads=-1,
        num_head_channels=64,
    )
    return Built(random_weights(network))


@model("sd3")
def sd3() -> Built:
    build = host_class("comfy.ldm.modules.diffusionmodules.mmdit", "MMDiT")
    text = {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 128}}
    network = build(
        input_size=None,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        depth=2,
        adm_in_channels=2048,
        context_embedder_config=text,
        pos_embed_max_size=32,
        num_patches=32 * 32,
        pos_embed_scaling_factor=None,
        qk_norm="rms",
        x_block_self_attn_layers=[0],
        **host_settings(),
    )
    return Built(random_weights(network))


@model("flux", sizes=({"num_heads": 2}, {"num_heads": 24}))
def flux(num_heads: int) -> Built:
    build = host_class("comfy.ldm.flux.model", "Flux")
    fields = host_class("comfy.ldm.flux.model", "FluxParams").__dataclass_fields__
    later = {name: value for name, value in {"txt_ids_dims": []}.items() if name in fields}  # not in 0.3.60
    network = build(
        image_model="flux",
        in_channels=16,
        out_channels=16,
        vec_in_dim=768,
        context_in_dim=4096,
        hidden_size=128 * num_heads,
        mlp_ratio=4.0,
        num_heads=num_heads,
        depth=1,
        depth_single_blocks=1,
        axes_dim=[16, 56, 56],
        theta=10000,
        patch_size=2,
        qkv_bias=True,
        guidance_embed=True,
        **later,
        **host_settings(),
    )
    return Built(published_norms(random_weights(network)))


def wan(model_type: str, in_dim: int, out_dim: int = 16) -> Built:
    build = host_class("comfy.ldm.wan.model", "WanModel")
    sizes = {"dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 2, "in_dim": in_dim, "out_dim": out_dim}
    return Built(random_weights(build(model_type=model_type, **sizes, **host_settings())))


@model("wan_t2v")
def wan_t2v() -> Built:
    return wan("t2v", in_dim=16)


@model("wan_i2v")
def wan_i2v() -> Built:
    return wan("i2v", in_dim=36)


@model("wan_ti2v")
def wan_ti2v() -> Built:
    """As Wan 2.2 5B, which the host recognises by 48 channels."""
    return wan("t2v", in_dim=48, out_dim=48)


@model("ltxav")
def ltxav() -> Built:
    """As LTX-2: video and sound in one model."""
    build = host_class("comfy.ldm.lightricks.av_model", "LTXAVModel")
    config = {
        "cross_attention_dim": 128,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "audio_cross_attention_dim": 64,
        "audio_attention_head_dim": 16,
        "audio_num_attention_heads": 4,
        "caption_channels": 64,
        "num_layers": 2,
        "connector_attention_head_dim": 32,
        "connector_num_attention_heads": 2,
        "connector_num_layers": 1,
    }
    weights = random_weights(build(**config, **host_settings()))
    return Built(weights, {"config": json.dumps({"transformer": config})})


@model("ltxv")
def ltxv() -> Built:
    build = host_class("comfy.ldm.lightricks.model", "LTXVModel")
    config = {
        "in_channels": 128,
        "cross_attention_dim": 128,
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "caption_channels": 64,
        "num_layers": 2,
    }
    weights = random_weights(build(**config, **host_settings()))
    return Built(weights, {"config": json.dumps({"transformer": config})})


@model("hunyuan_video")
def hunyuan_video() -> Built:
    build = host_class("comfy.ldm.hunyuan_video.model", "HunyuanVideo")
    params = host_class("comfy.ldm.hunyuan_video.model", "HunyuanVideoParams")
    wanted = {
        "in_channels": 16,
        "out_channels": 16,
        "vec_in_dim": 768,
        "context_in_dim": 128,
        "hidden_size": 256,
        "mlp_ratio": 4.0,
        "num_heads": 2,
        "depth": 1,
        "depth_single_blocks": 1,
        "axes_dim": [16, 56, 56],
        "theta": 256,
        "patch_size": [1, 2, 2],
        "qkv_bias": True,
        "guidance_embed": True,
        "byt5": False,
        "meanflow": False,
        "use_cond_type_embedding": False,
        "vision_in_dim": None,
        "meanflow_sum": False,
    }
    known = {field.name for field in dataclasses.fields(params)}
    config = {name: value for name, value in wanted.items() if name in known}
    return Built(published_norms(random_weights(build(image_model="hunyuan_video", **config, **host_settings()))))


@model("lumina2")
def lumina2() -> Built:
    # The host recognises Lumina 2 by its width of 2304 and then fixes 24 heads, 8 of them for keys.
    build = host_class("comfy.ldm.lumina.model", "NextDiT")
    network = build(
        patch_size=2,
        in_channels=16,
        dim=2304,
        n_layers=1,
        n_heads=24,
        n_kv_heads=8,
        qk_norm=True,
        cap_feat_dim=64,
        axes_dims=[32, 32, 32],
        axes_lens=[300, 512, 512],
        ffn_dim_multiplier=4.0,
        **{**host_settings(), "dtype": torch.float16},
    )
    return Built(random_weights(network))


@model("qwen_image")
def qwen_image() -> Built:
    build = host_class("comfy.ldm.qwen_image.model", "QwenImageTransformer2DModel")
    return Built(random_weights(build(in_channels=64, num_layers=1, **{**host_settings(), "dtype": torch.float16})))


@model("krea2")
def krea2() -> Built:
    build = host_class("comfy.ldm.krea2.model", "SingleStreamDiT")
    sizes = {"features": 512, "heads": 4, "kvheads": 2, "layers": 1}
    text = {"txtdim": 160, "txtlayers": 2, "txtheads": 20, "txtkvheads": 20}
    return Built(random_weights(build(**sizes, **text, **host_settings())))


@model("minimax_h3")
def minimax_h3() -> Built:
    build = host_class("comfy.ldm.minimax.model", "MiniMaxH3Model")
    network = build(
        hidden_size=256,
        num_layers=1,
        token_refiner_num_layers=1,
        num_attention_heads=2,
        attention_head_dim=128,
        ffn_hidden_size=512,
        latents_dim=24,
        audio_latents_dim=32,
        text_dim=64,
        timestep_input_dim=256,
        time_embed_hidden_size=64,
        time_embed_dim=64,
        **host_settings(),
    )
    weights = random_weights(network)
    float32 = ("video_patch_proj", "audio_patch_proj", "time_embedder", "rope", "final_layer")
    weights = {name: w.float() if name.startswith(float32) else w for name, w in weights.items()}
    weights["rope.inv_freq"] = 1.0 / (10000 ** (torch.arange(16) / 16.0))
    return Built(weights)
