"""Parts that the workflows have in common. Nodes of ours have their own defaults: only what differs is set."""

from __future__ import annotations

from typing import Any

import notes
from sheet import NARROW, PATCH, WIDE, Out, Sheet, model_file, width_for

BLUE, GREEN, VIOLET, BROWN, TEAL = "#3f5f9e", "#3f7a54", "#6f5494", "#8a6a3b", "#3b7a80"
GGUF = "comfyui-gguf"  # of city96, in ComfyUI's registry

_SDXL, _SD15 = "stabilityai/stable-diffusion-xl-base-1.0", "Comfy-Org/stable-diffusion-v1-5-archive"
SDXL = model_file(_SDXL, "sd_xl_base_1.0.safetensors", "6.9 GB", "checkpoints")
SD15 = model_file(_SD15, "v1-5-pruned-emaonly-fp16.safetensors", "2.1 GB", "checkpoints")
FLUX_FP8 = model_file("Comfy-Org/flux1-dev", "flux1-dev-fp8.safetensors", "17.2 GB", "checkpoints")

_Z, _MODELS, _TEXTS = "Comfy-Org/z_image_turbo", "split_files/diffusion_models", "split_files/text_encoders"
Z_IMAGE = model_file(_Z, f"{_MODELS}/z_image_turbo_bf16.safetensors", "12.3 GB")
QWEN_3_4B = model_file(_Z, f"{_TEXTS}/qwen_3_4b.safetensors", "8.0 GB")
Z_IMAGE_INT8 = model_file(_Z, f"{_MODELS}/z_image_turbo_int8_convrot.safetensors", "6.2 GB")
QWEN_3_4B_FP8 = model_file(_Z, f"{_TEXTS}/qwen_3_4b_fp8_mixed.safetensors", "5.6 GB")
AE = model_file(_Z, "split_files/vae/ae.safetensors", "0.3 GB")

_KREA = "Comfy-Org/Krea-2"
KREA = model_file(_KREA, "diffusion_models/krea2_turbo_fp8_scaled.safetensors", "13.1 GB")
QWEN_3_VL = model_file(_KREA, "text_encoders/qwen3vl_4b_fp8_scaled.safetensors", "5.2 GB")
KREA_VAE = model_file(_KREA, "vae/qwen_image_vae.safetensors", "0.25 GB")

_QWEN, _LIGHTNING = "Comfy-Org/Qwen-Image_ComfyUI", "Qwen-Image-Lightning-8steps-V1.0.safetensors"
QWEN_GGUF = model_file("city96/Qwen-Image-gguf", "qwen-image-Q3_K_S.gguf", "9.0 GB", "diffusion_models")
QWEN_25_VL = model_file(_QWEN, f"{_TEXTS}/qwen_2.5_vl_7b_fp8_scaled.safetensors", "9.4 GB")
QWEN_VAE = model_file(_QWEN, "split_files/vae/qwen_image_vae.safetensors", "0.25 GB")
LIGHTNING = model_file("lightx2v/Qwen-Image-Lightning", _LIGHTNING, "1.7 GB", "loras")

_WAN_21, _WAN_22 = "Comfy-Org/Wan_2.1_ComfyUI_repackaged", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged"
WAN = model_file(_WAN_22, f"{_MODELS}/wan2.2_ti2v_5B_fp16.safetensors", "10.0 GB")
WAN_VAE = model_file(_WAN_22, "split_files/vae/wan2.2_vae.safetensors", "1.4 GB")
UMT5 = model_file(_WAN_21, f"{_TEXTS}/umt5_xxl_fp8_e4m3fn_scaled.safetensors", "6.7 GB")

LTX = model_file("Lightricks/LTX-2", "ltx-2-19b-distilled-fp8.safetensors", "27.1 GB", "checkpoints")
GEMMA = model_file("Comfy-Org/ltx-2", f"{_TEXTS}/gemma_3_12B_it_fp4_mixed.safetensors", "9.5 GB")


# ---- loaders ----


def checkpoint(sheet: Sheet, file: dict[str, str]) -> tuple[Out, Out, Out]:
    """MODEL, CLIP, VAE of one file."""
    name = file["name"]
    model = sheet.add("checkpoint", "CheckpointLoaderSimple", size=(width_for(name), 0), models=(file,), ckpt_name=name)
    return model, Out("checkpoint", 1), Out("checkpoint", 2)


def diffusion_model(sheet: Sheet, file: dict[str, str], weight_dtype: str = "default") -> Out:
    name, size = file["name"], (width_for(file["name"]), 0)
    return sheet.add("model", "UNETLoader", size=size, models=(file,), unet_name=name, weight_dtype=weight_dtype)


def text_encoder(sheet: Sheet, file: dict[str, str], kind: str) -> Out:
    """A file of its own for the prompt."""
    inputs = {"clip_name": file["name"], "type": kind, "device": "default"}
    return sheet.add("clip", "CLIPLoader", size=(width_for(file["name"]), 0), models=(file,), **inputs)


def vae(sheet: Sheet, file: dict[str, str]) -> Out:
    return sheet.add("vae", "VAELoader", models=(file,), vae_name=file["name"])


# ---- around the sampler ----


def note(sheet: Sheet, title: str, text: str) -> None:
    """The page to read beside the graph, on the files so far."""
    page = notes.page(title, sheet.files, text).strip()
    sheet.add("note", "MarkdownNote", title="Read me", size=(NARROW, 390), text=page)


def latent(sheet: Sheet, width: int, height: int, kind: str = "EmptyLatentImage") -> Out:
    return sheet.add("latent", kind, width=width, height=height, batch_size=1)


def everything(sheet: Sheet, model: Out, clip: Out, vae: Out) -> tuple[Out, Out, Out]:
    """MODEL, CLIP and VAE through the one node that most need."""
    patched = sheet.add("attention", "PascalAttentionPatch", size=(PATCH, 0), model=model, clip=clip, vae=vae)
    return patched, Out("attention", 1), Out("attention", 2)


def prompt(sheet: Sheet, clip: Out, text: str) -> Out:
    height = 95 if len(text) < 150 else 160
    return sheet.add("positive", "CLIPTextEncode", title="Prompt", size=(NARROW, height), clip=clip, text=text)


def negative_prompt(sheet: Sheet, clip: Out, text: str) -> Out:
    return sheet.add("negative", "CLIPTextEncode", title="Negative prompt", size=(NARROW, 50), clip=clip, text=text)


def memory_estimate(sheet: Sheet, model: Out, latent: Out, prompt: Out, vae: Out) -> None:
    """The estimate and a node that shows its text."""
    links = {"model": model, "latent": latent, "conditioning": prompt, "vae": vae}
    text = sheet.add("estimate", "PascalMemoryEstimate", **links)
    sheet.add("estimate_text", "PreviewAny", title="Estimate as text", size=(NARROW, 200), source=text)


def sample(sheet: Sheet, model: Out, positive: Out, negative: Out, latent: Out, **settings: Any) -> Out:
    links = {"model": model, "positive": positive, "negative": negative, "latent_image": latent}
    return sheet.add("sampler", "KSampler", **links, seed=1080, denoise=1.0, **settings)


def decode(sheet: Sheet, latent: Out, vae: Out) -> Out:
    return sheet.add("decode", "VAEDecode", size=(0, 0), samples=latent, vae=vae)


def report(sheet: Sheet, value: Out) -> None:
    """The report's picture and its text."""
    sheet.add("report", "PascalAttentionReport", size=(WIDE, 600), value=value)
    sheet.add("text", "PreviewAny", title="Report as text", size=(310, 260), source=Out("report", 2))


def save(sheet: Sheet, images: Out, prefix: str, fps: float | None = None) -> None:
    """Save a picture, or a video with this many frames a second."""
    kind, video = ("SaveWEBM", {"codec": "vp9", "fps": fps, "crf": 32.0}) if fps else ("SaveImage", {})
    sheet.add("save", kind, size=(310, 260), images=images, filename_prefix=prefix, **video)


# ---- frames ----


def frames(
    sheet: Sheet,
    models: list[str],
    pascal: list[str],
    prompt: list[str],
    sample: list[str],
    output: list[str],
    page: str = "models",
    not_exact: list[str] | None = None,
) -> None:
    """Place the nodes in columns, alike in each workflow.

    The columns are: models, and below them our nodes that are not exact; our other nodes and the prompt; the sampler;
    what came out. Where the memory estimate stands below the prompt, the prompt has a column of its own.

    So narrow and low that ComfyUI, which fits a template into three quarters of the window, still draws its text. The
    page to read stands where there is room: below the ``"models"``, ``"pascal"`` or the ``"sampler"``, or in a column
    ``"of its own"``.
    """
    known = {node["key"] for node in sheet.nodes}
    before = [key for key in ("estimate", "estimate_text") if key in known]
    if page == "of its own":
        sheet.group("", "", ["note"])
    sheet.group("Models and size", BLUE, models)
    if not_exact:
        sheet.group("Not exact: bypassed", BROWN, not_exact, below=True)
    if page == "models":
        sheet.group("", "", ["note"], below=True)
    sheet.group("Pascal Attention", GREEN, pascal)
    if page == "pascal":
        sheet.group("", "", ["note"], below=True)
    sheet.group("Prompt", VIOLET, prompt, below=not before)
    if before:
        sheet.group("Before the run", TEAL, before, below=True)
    sheet.group("Sample and decode", BROWN, sample)
    if page == "sampler":
        sheet.group("", "", ["note"], below=True)
    sheet.group("What happened", TEAL, ["report"])
    sheet.group("Output", BROWN, output, ["text"], below=True)
