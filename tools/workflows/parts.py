"""What the workflows have in common."""

from __future__ import annotations

from typing import Any

from sheet import Out, Sheet, model_file

BLUE, GREEN, VIOLET, BROWN, TEAL = "#3f5f9e", "#3f7a54", "#6f5494", "#8a6a3b", "#3b7a80"

SDXL = model_file("sd_xl_base_1.0.safetensors", "checkpoints", "stabilityai/stable-diffusion-xl-base-1.0")
SD15 = model_file("v1-5-pruned-emaonly-fp16.safetensors", "checkpoints", "Comfy-Org/stable-diffusion-v1-5-archive")
FLUX = model_file("flux1-schnell-fp8.safetensors", "checkpoints", "Comfy-Org/flux1-schnell")
LTXV = model_file("ltx-video-2b-v0.9.5.safetensors", "checkpoints", "Lightricks/LTX-Video")
T5 = model_file("t5xxl_fp8_e4m3fn_scaled.safetensors", "text_encoders", "comfyanonymous/flux_text_encoders")
_WAN = "Comfy-Org/Wan_2.1_ComfyUI_repackaged"
WAN = model_file("wan2.1_t2v_1.3B_fp16.safetensors", "diffusion_models", _WAN, "split_files/diffusion_models/")
WAN_VAE = model_file("wan_2.1_vae.safetensors", "vae", _WAN, "split_files/vae/")
UMT5 = model_file("umt5_xxl_fp8_e4m3fn_scaled.safetensors", "text_encoders", _WAN, "split_files/text_encoders/")

_OF_AN_OBJECT = {"route": "auto", "budget_mib": 0, "nan_guard": True}


def checkpoint(sheet: Sheet, file: dict[str, str]) -> tuple[Out, Out, Out]:
    """MODEL, CLIP, VAE of one file."""
    model = sheet.add("checkpoint", "CheckpointLoaderSimple", size=(340, 0), models=(file,), ckpt_name=file["name"])
    return model, Out("checkpoint", 1), Out("checkpoint", 2)


def text_encoder(sheet: Sheet, file: dict[str, str], kind: str) -> Out:
    """A file of its own for the prompt."""
    inputs = {"clip_name": file["name"], "type": kind, "device": "default"}
    return sheet.add("clip", "CLIPLoader", size=(340, 0), models=(file,), **inputs)


def prompt(sheet: Sheet, clip: Out, text: str) -> Out:
    return sheet.add("positive", "CLIPTextEncode", title="Prompt", size=(400, 170), clip=clip, text=text)


def negative_prompt(sheet: Sheet, clip: Out, text: str) -> Out:
    return sheet.add("negative", "CLIPTextEncode", title="Negative prompt", size=(400, 170), clip=clip, text=text)


def sampler(sheet: Sheet, model: Out, positive: Out, negative: Out, latent: Out, **settings: Any) -> Out:
    links = {"model": model, "positive": positive, "negative": negative, "latent_image": latent}
    fixed = {"seed": 1080, "denoise": 1.0}
    return sheet.add("sampler", "KSampler", size=(360, 0), **links, **fixed, **settings)


def attention_patch(sheet: Sheet, model: Out, **inputs: Any) -> Out:
    """Every setting at its default but those given."""
    settings = {"route": "auto", "budget_mib": 0, "tile_size": 0, "coverage": "attention override"}
    settings |= {"min_keys": 1024, "nan_guard": True, **inputs}
    return sheet.add("attention", "PascalAttentionPatch", size=(340, 0), model=model, **settings)


def ffn_chunking(sheet: Sheet, model: Out) -> Out:
    return sheet.add("ffn", "PascalFFNChunking", size=(340, 0), model=model, budget_mib=0, min_tokens=1024)


def vae_attention(sheet: Sheet, vae: Out) -> Out:
    return sheet.add("vae_attention", "PascalVAEAttention", size=(340, 0), vae=vae, **_OF_AN_OBJECT)


def text_encoder_attention(sheet: Sheet, clip: Out) -> Out:
    return sheet.add("text_attention", "PascalTextEncoderAttention", size=(340, 0), clip=clip, **_OF_AN_OBJECT)


def memory_estimate(sheet: Sheet, model: Out, latent: Out, prompt: Out) -> None:
    """The estimate and a node that shows its text."""
    settings = {"guidance": True, "text_tokens": 0}
    links = {"model": model, "latent": latent, "conditioning": prompt}
    text = sheet.add("estimate", "PascalMemoryEstimate", size=(340, 0), **links, **settings)
    sheet.add("estimate_text", "PreviewAny", title="Estimate as text", size=(340, 220), source=text)


def report(sheet: Sheet, value: Out) -> None:
    """The report's picture and its text."""
    sheet.add("report", "PascalAttentionReport", size=(560, 800), value=value, exactness_check=True)
    sheet.add("text", "PreviewAny", title="Report as text", size=(560, 200), source=Out("report", 2))


def save_picture(sheet: Sheet, image: Out, prefix: str) -> None:
    sheet.add("save", "SaveImage", size=(360, 380), images=image, filename_prefix=prefix)


def save_video(sheet: Sheet, images: Out, prefix: str, fps: float) -> None:
    settings = {"filename_prefix": prefix, "codec": "vp9", "fps": fps, "crf": 32.0}
    sheet.add("save", "SaveWEBM", size=(360, 380), images=images, **settings)
