"""Scripts inside the host's interpreter use this. ``COMFYUI_PATH``, ``TINY_MODELS`` name it and the tiny models."""

import asyncio
import contextlib
import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOST, TINY_MODELS = Path(os.environ["COMFYUI_PATH"]), Path(os.environ["TINY_MODELS"])
PACK = Path(__file__).parents[4]
# The host's own modules come first: this folder and the pack hold names of their own.
sys.path[0:1] = [str(HOST)]
sys.path.append(str(Path(__file__).parent))
sys.argv[1:] = ["--cpu", *sys.argv[1:]]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.model_management  # noqa: E402
import comfy.sample  # noqa: E402
import comfy.sd  # noqa: E402
import comfy.utils  # noqa: E402
import torch  # noqa: E402
from comfy_checks import Skip, unload  # noqa: E402

# Of each family: shape of the latent; tokens, dim and pooled of the conditioning.
FAMILIES = {
    "sd15": ((4, 16, 16), 77, 768, 0),
    "sdxl": ((4, 16, 16), 77, 2048, 1280),
    "sd3": ((16, 16, 16), 16, 4096, 2048),
    "flux": ((16, 16, 16), 16, 4096, 768),
    "wan_t2v": ((16, 3, 16, 16), 16, 4096, 0),
    "wan_i2v": ((16, 2, 16, 16), 16, 4096, 0),
    "ltxv": ((128, 2, 4, 4), 16, 64, 0),
    "hunyuan_video": ((16, 3, 16, 16), 16, 128, 768),
    "lumina2": ((16, 16, 16), 16, 64, 0),
    "qwen_image": ((16, 1, 16, 16), 16, 3584, 0),
    "krea2": ((16, 1, 16, 16), 16, 320, 0),
}
LATENTS = {name: latent for name, (latent, *_) in FAMILIES.items()}


def load_pack() -> Any:
    """Our pack as the host's custom node loader imports it; the module."""
    import nodes

    if not asyncio.run(nodes.load_custom_node(str(PACK))):
        raise RuntimeError(f"ComfyUI could not import {PACK}")
    return nodes.NODE_CLASS_MAPPINGS


def tiny_file(folder: str, name: str) -> str:
    """A tiny model's file. Raises ``Skip`` with the reason where this host does not load it."""
    reason = json.loads((TINY_MODELS / "manifest.json").read_text())[name].get("skip")
    if reason:
        raise Skip(f"{name}: {reason}")
    return str(TINY_MODELS / folder / f"tiny_{name}.safetensors")


def load_model(name: str) -> Any:
    """A tiny diffusion model (a ModelPatcher)."""
    return comfy.sd.load_diffusion_model(tiny_file("diffusion_models", name))


def vae_of(path: str) -> Any:
    return comfy.sd.VAE(sd=comfy.utils.load_torch_file(path))


def load_vae(name: str) -> Any:
    return vae_of(tiny_file("vae", name))


def load_checkpoint() -> tuple[Any, Any, Any]:
    """MODEL, CLIP, VAE of the tiny SD1.5 checkpoint."""
    return comfy.sd.load_checkpoint_guess_config(tiny_file("checkpoints", "sd15_checkpoint"))[:3]


def t5_of(path: str) -> Any:
    return comfy.sd.load_clip([path], clip_type=comfy.sd.CLIPType.STABLE_AUDIO)


def load_lora(model: Any, strength: float = 1.0) -> Any:
    """A clone of the tiny Wan with its LoRA on it."""
    lora = comfy.utils.load_torch_file(tiny_file("loras", "lora_wan_t2v"))
    return comfy.sd.load_lora_for_models(model, None, lora, strength, 0.0)[0]


def wan() -> tuple[Any, torch.Tensor]:
    """The tiny Wan, and the latent that it gives."""
    base = load_model("wan_t2v")
    return base, sample(base)


@contextlib.contextmanager
def in_host_memory(model: Any) -> Iterator[None]:
    """The model as the host runs it where it does not fit: weights are cast, moved and patched in each call."""
    unload()
    model.patch_model(comfy.model_management.get_torch_device(), lowvram_model_memory=1)
    yield
    model.unpatch_model(comfy.model_management.get_torch_device())


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def drawn(module: torch.nn.Module, std: float) -> torch.nn.Module:
    """The module with every parameter drawn anew."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=std, generator=generator)
    return module


def families(*names: str) -> Iterator[tuple[str, Any]]:
    """The tiny diffusion models that this host loads, of all or of ``names``; each is unloaded after its turn."""
    for name in names or FAMILIES:
        try:
            model = load_model(name)
        except Skip:
            continue
        yield name, model
        unload()
        del model
        gc.collect()


def conditioning(name: str, seed: int = 1) -> list:
    _, tokens, dim, pooled = FAMILIES[name]
    generator = torch.Generator().manual_seed(seed)
    extra = {"pooled_output": torch.randn(1, pooled, generator=generator)} if pooled else {}
    if name == "ltxv":
        extra["attention_mask"] = torch.ones(1, tokens, dtype=torch.int64)
    return [[torch.randn(1, tokens, dim, generator=generator), extra]]


def sample(
    model: Any, name: str = "wan_t2v", *, steps: int = 1, cfg: float = 1.0, seed: int = 0, texts: Any = None
) -> torch.Tensor:
    """The latent after ``steps`` steps of Euler from the noise of ``seed``."""
    start = noise(1, *LATENTS[name], seed=seed)
    texts = texts or [conditioning(name, 1), conditioning(name, 2)]
    given = (model, start, steps, cfg, "euler", "simple", *texts, torch.zeros_like(start))
    return comfy.sample.sample(*given, disable_pbar=True, seed=seed)
