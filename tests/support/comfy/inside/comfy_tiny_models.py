"""Tiny random-weight models that ComfyUI's own loaders accept. Imported by the host's interpreter only.

``MODELS[name]`` is a ``Model``: the folder ComfyUI looks in, and the sizes to try in order. A host that takes the small
one gets it; an older host that has a width written into its code gets the published width with one block of each kind.
Widths that look odd (768, 2048, 4096, 3584) are what the host recognises the family by.
"""

import dataclasses
import functools
import importlib
import inspect
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

StateDict = dict[str, Tensor]


class NotOnThisHost(Exception):
    """The host does not know this family."""


@dataclasses.dataclass
class Built:
    """This class holds what goes into one file."""

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
        MODELS[name] = Model(folder, [functools.partial(build, **kw) for kw in sizes])
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


def network(module: str, name: str, **options: Any) -> torch.nn.Module:
    """A network of ``comfy.ldm``."""
    return host_class(f"comfy.ldm.{module}", name)(**{**host_settings(), **options})


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


def built(module: str, name: str, **options: Any) -> Built:
    """A network of ``comfy.ldm`` with random weights."""
    return Built(random_weights(network(module, name, **options)))


def published_norms(weights: StateDict) -> StateDict:
    """Published Flux-like files call the norm of queries and keys ``.scale``; newer hosts hold it as ``.weight``."""
    modules = ("query_norm", "key_norm")
    parents = {name: name.rpartition(".")[0] for name in weights}
    return {f"{parents[n]}.scale" if parents[n].endswith(modules) else n: tensor for n, tensor in weights.items()}


def unet(depth: list[int], depth_out: list[int], channel_mult: list[int], **options: Any) -> Built:
    fixed = {"image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "legacy": False}
    fixed |= {"transformer_depth_middle": 1, "use_spatial_transformer": True, "use_checkpoint": False}
    fixed |= {"transformer_depth": depth, "transformer_depth_output": depth_out, "channel_mult": channel_mult}
    fixed |= {"num_res_blocks": [1] * len(channel_mult)}
    return built("modules.diffusionmodules.openaimodel", "UNetModel", **fixed, **options)


@model("sd15")
def sd15() -> Built:
    return unet([1], [1, 1], [1], context_dim=768, num_heads=8)


@model("sdxl")
def sdxl() -> Built:
    # transformer depths [0, 2, 5] are how the host recognises an SDXL-like UNet of fewer blocks (KOALA).
    text = {"context_dim": 2048, "adm_in_channels": 2816, "num_classes": "sequential"}
    heads = {"use_linear_in_transformer": True, "num_heads": -1, "num_head_channels": 64}
    return unet([0, 2, 5], [0, 0, 1, 1, 1, 1], [1, 1, 1], **text, **heads)


@model("sd3")
def sd3() -> Built:
    text = {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 128}}
    sizes = {"patch_size": 2, "in_channels": 16, "out_channels": 16, "depth": 2, "adm_in_channels": 2048}
    places = {"input_size": None, "pos_embed_max_size": 32, "num_patches": 32 * 32, "pos_embed_scaling_factor": None}
    more = {"context_embedder_config": text, "qk_norm": "rms", "x_block_self_attn_layers": [0]}
    return built("modules.diffusionmodules.mmdit", "MMDiT", **sizes, **places, **more)


# As published, but for the number of blocks.
FLUX = {"image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096}
FLUX |= {"mlp_ratio": 4.0, "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2, "qkv_bias": True}
FLUX |= {"guidance_embed": True, "txt_ids_dims": []}


@model("flux", sizes=({"num_heads": 2}, {"num_heads": 24}))
def flux(num_heads: int) -> Built:
    fields = host_class("comfy.ldm.flux.model", "FluxParams").__dataclass_fields__  # 0.3.60 has no txt_ids_dims
    known = {name: value for name, value in FLUX.items() if name in fields or name == "image_model"}
    sizes = {"hidden_size": 128 * num_heads, "num_heads": num_heads, "depth": 1, "depth_single_blocks": 1}
    return Built(published_norms(random_weights(network("flux.model", "Flux", **known, **sizes))))


def wan(model_type: str, in_dim: int, out_dim: int = 16) -> Built:
    sizes = {"dim": 256, "ffn_dim": 512, "num_heads": 2, "num_layers": 2, "in_dim": in_dim, "out_dim": out_dim}
    return built("wan.model", "WanModel", model_type=model_type, **sizes)


wan_t2v = model("wan_t2v")(functools.partial(wan, "t2v", in_dim=16))
model("wan_i2v")(functools.partial(wan, "i2v", in_dim=36))
model("wan_ti2v")(functools.partial(wan, "t2v", in_dim=48, out_dim=48))  # as Wan 2.2 5B, known by its 48 channels


def ltx(module: str, name: str, **config: Any) -> Built:
    config |= {"cross_attention_dim": 128, "attention_head_dim": 32, "num_attention_heads": 4, "num_layers": 2}
    config["caption_channels"] = 64
    weights = random_weights(network(f"lightricks.{module}", name, **config))
    return Built(weights, {"config": json.dumps({"transformer": config})})


@model("ltxav")
def ltxav() -> Built:
    """As LTX-2: video and sound in one model."""
    audio = {"audio_cross_attention_dim": 64, "audio_attention_head_dim": 16, "audio_num_attention_heads": 4}
    sizes = {"attention_head_dim": 32, "num_attention_heads": 2, "num_layers": 1}
    return ltx("av_model", "LTXAVModel", **audio, **{f"connector_{name}": size for name, size in sizes.items()})


model("ltxv")(functools.partial(ltx, "model", "LTXVModel", in_channels=128))


@model("hunyuan_video")
def hunyuan_video() -> Built:
    params = host_class("comfy.ldm.hunyuan_video.model", "HunyuanVideoParams")
    wanted = {"in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 128, "hidden_size": 256}
    wanted |= {"mlp_ratio": 4.0, "num_heads": 2, "depth": 1, "depth_single_blocks": 1, "axes_dim": [16, 56, 56]}
    wanted |= {"theta": 256, "patch_size": [1, 2, 2], "qkv_bias": True, "guidance_embed": True, "byt5": False}
    wanted |= {"meanflow": False, "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False}
    known = {field.name for field in dataclasses.fields(params)}
    config = {name: value for name, value in wanted.items() if name in known}
    made = network("hunyuan_video.model", "HunyuanVideo", image_model="hunyuan_video", **config)
    return Built(published_norms(random_weights(made)))


@model("lumina2")
def lumina2() -> Built:
    # The host recognises Lumina 2 by its width of 2304 and then fixes 24 heads, 8 of them for keys.
    sizes = {"dim": 2304, "n_layers": 1, "n_heads": 24, "n_kv_heads": 8, "patch_size": 2, "in_channels": 16}
    axes = {"axes_dims": [32, 32, 32], "axes_lens": [300, 512, 512]}
    more = {"qk_norm": True, "cap_feat_dim": 64, "ffn_dim_multiplier": 4.0, "dtype": torch.float16}
    return built("lumina.model", "NextDiT", **sizes, **axes, **more)


QWEN = {"in_channels": 64, "num_layers": 1, "dtype": torch.float16}
model("qwen_image")(functools.partial(built, "qwen_image.model", "QwenImageTransformer2DModel", **QWEN))
KREA = {"features": 512, "heads": 4, "kvheads": 2, "layers": 1}
KREA |= {"txtdim": 160, "txtlayers": 2, "txtheads": 20, "txtkvheads": 20}
model("krea2")(functools.partial(built, "krea2.model", "SingleStreamDiT", **KREA))


@model("minimax_h3")
def minimax_h3() -> Built:
    sizes = {"hidden_size": 256, "num_attention_heads": 2, "attention_head_dim": 128, "ffn_hidden_size": 512}
    layers = {"num_layers": 1, "token_refiner_num_layers": 1}
    latents = {"latents_dim": 24, "audio_latents_dim": 32, "text_dim": 64}
    time = {"timestep_input_dim": 256, "time_embed_hidden_size": 64, "time_embed_dim": 64}
    weights = random_weights(network("minimax.model", "MiniMaxH3Model", **sizes, **layers, **latents, **time))
    float32 = ("video_patch_proj", "audio_patch_proj", "time_embedder", "rope", "final_layer")
    weights = {name: w.float() if name.startswith(float32) else w for name, w in weights.items()}
    weights["rope.inv_freq"] = 1.0 / (10000 ** (torch.arange(16) / 16.0))
    return Built(weights)


def kl_autoencoder(z_channels: int, channels: int) -> StateDict:
    build = host_class("comfy.ldm.models.autoencoder", "AutoencoderKL")
    shape = {"double_z": True, "z_channels": z_channels, "resolution": 256, "in_channels": 3, "out_ch": 3}
    depth = {"ch": channels, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}
    return random_weights(build(ddconfig={**shape, **depth}, embed_dim=z_channels), seed=2)


def decoder_only(weights: StateDict) -> StateDict:
    return {name: w for name, w in weights.items() if not name.startswith(("encoder.", "quant_conv"))}


@model("vae_kl", "vae", sizes=({"channels": 32}, {"channels": 128}))
def vae_kl(channels: int) -> Built:
    """A decoder: one attention block, head_dim = 4 * channels."""
    return Built(decoder_only(kl_autoencoder(4, channels)))


# Encoder and decoder in the published width (hosts fix the width of the encoder).
model("vae_kl_full", "vae")(lambda: Built(kl_autoencoder(4, 128)))


@model("vae_flux", "vae", sizes=({"channels": 32}, {"channels": 128}))
def vae_flux(channels: int) -> Built:
    weights = decoder_only(kl_autoencoder(16, channels))
    return Built({name: w for name, w in weights.items() if not name.startswith("post_quant_conv")})


@model("vae_wan", "vae", sizes=({"dim": 8}, {"dim": 96}))  # older hosts know the published width only
def vae_wan(dim: int) -> Built:
    build = host_class("comfy.ldm.wan.vae", "WanVAE")
    config = {"dim": dim, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": []}
    assert "temperal_downsample" in inspect.signature(build).parameters
    network = build(**config, temperal_downsample=[False, True, True], dropout=0.0)
    return Built(random_weights(network, seed=3))


def host_json(module: str, file: str) -> dict[str, Any]:
    folder = pathlib.Path(inspect.getfile(importlib.import_module(module))).parent
    return json.loads((folder / file).read_text())


@model("sd15_checkpoint", "checkpoints", sizes=({"channels": 32}, {"channels": 128}))
def sd15_checkpoint(channels: int) -> Built:
    """UNet, CLIP-L at its published size, and a VAE decoder, for CheckpointLoaderSimple."""
    clip_class = host_class("comfy.clip_model", "CLIPTextModel")
    config = host_json("comfy.sd1_clip", "sd1_clip_config.json")
    clip = random_weights(clip_class(config, *host_settings().values()), seed=1)
    parts = {
        "model.diffusion_model.": sd15().tensors,
        "cond_stage_model.transformer.": {n: w for n, w in clip.items() if "text_projection" not in n},
        "first_stage_model.": vae_kl(channels).tensors,
    }
    return Built({prefix + name: w for prefix, weights in parts.items() for name, w in weights.items()})


@model("t5", "text_encoders")
def t5() -> Built:
    """T5 base, for CLIPLoader with type stable_audio."""
    build = host_class("comfy.text_encoders.t5", "T5")
    config = host_json("comfy.text_encoders.t5", "t5_config_base.json")
    return Built(random_weights(build(config, *host_settings().values()), seed=5))


def lora_of(weights: StateDict, rank: int = 4, seed: int = 9) -> Built:
    """A LoRA on every matrix of an attention projection or feed-forward, in the names that Kohya's trainer writes."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in weights.items():
        if not name.endswith(".weight") or weight.ndim != 2:
            continue
        target = "lora_unet_" + name[: -len(".weight")].replace(".", "_")
        rows, columns = weight.shape
        up, down = (torch.randn(shape, generator=generator) for shape in ((rows, rank), (rank, columns)))
        tensors[f"{target}.lora_up.weight"] = up.mul_(0.2).half()
        tensors[f"{target}.lora_down.weight"] = down.div_(columns**0.5).half()
    return Built(tensors)


model("lora_sd15", "loras")(lambda: lora_of(sd15().tensors))
model("lora_wan_t2v", "loras")(lambda: lora_of(wan_t2v().tensors))
