"""Parts that the workflows have in common. Nodes of ours have their own defaults: only what differs is set."""

from __future__ import annotations

from typing import Any

from sheet import Out, Sheet, model_file

BLUE, GREEN, VIOLET, BROWN, TEAL = "#3f5f9e", "#3f7a54", "#6f5494", "#8a6a3b", "#3b7a80"
NARROW, WIDE = 290, 640  # columns
GGUF = "comfyui-gguf"  # of city96, in ComfyUI's registry

SDXL = model_file(
    "sd_xl_base_1.0.safetensors", "checkpoints", "stabilityai/stable-diffusion-xl-base-1.0", size="6.9 GB"
)
SD15 = model_file(
    "v1-5-pruned-emaonly-fp16.safetensors", "checkpoints", "Comfy-Org/stable-diffusion-v1-5-archive", size="2.1 GB"
)
FLUX_FP8 = model_file("flux1-dev-fp8.safetensors", "checkpoints", "Comfy-Org/flux1-dev", size="17.2 GB")

_Z = ("Comfy-Org/z_image_turbo", "split_files/")
Z_IMAGE = model_file(
    "z_image_turbo_bf16.safetensors", "diffusion_models", _Z[0], f"{_Z[1]}diffusion_models/", size="12.3 GB"
)
QWEN_3_4B = model_file("qwen_3_4b.safetensors", "text_encoders", _Z[0], f"{_Z[1]}text_encoders/", size="8.0 GB")
Z_IMAGE_INT8 = model_file(
    "z_image_turbo_int8_convrot.safetensors", "diffusion_models", _Z[0], f"{_Z[1]}diffusion_models/", size="6.2 GB"
)
QWEN_3_4B_FP8 = model_file(
    "qwen_3_4b_fp8_mixed.safetensors", "text_encoders", _Z[0], f"{_Z[1]}text_encoders/", size="5.6 GB"
)
AE = model_file("ae.safetensors", "vae", _Z[0], f"{_Z[1]}vae/", size="0.3 GB")

_KREA = "Comfy-Org/Krea-2"
KREA = model_file("krea2_turbo_fp8_scaled.safetensors", "diffusion_models", _KREA, "diffusion_models/", size="13.1 GB")
QWEN_3_VL = model_file("qwen3vl_4b_fp8_scaled.safetensors", "text_encoders", _KREA, "text_encoders/", size="5.2 GB")
KREA_VAE = model_file("qwen_image_vae.safetensors", "vae", _KREA, "vae/", size="0.25 GB")

_QWEN = "Comfy-Org/Qwen-Image_ComfyUI"
QWEN_GGUF = model_file("qwen-image-Q3_K_S.gguf", "diffusion_models", "city96/Qwen-Image-gguf", size="9.0 GB")
QWEN_25_VL = model_file(
    "qwen_2.5_vl_7b_fp8_scaled.safetensors", "text_encoders", _QWEN, "split_files/text_encoders/", size="9.4 GB"
)
QWEN_VAE = model_file("qwen_image_vae.safetensors", "vae", _QWEN, "split_files/vae/", size="0.25 GB")
LIGHTNING = model_file(
    "Qwen-Image-Lightning-8steps-V1.0.safetensors", "loras", "lightx2v/Qwen-Image-Lightning", size="1.7 GB"
)

_WAN_21, _WAN_22 = "Comfy-Org/Wan_2.1_ComfyUI_repackaged", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged"
WAN = model_file(
    "wan2.2_ti2v_5B_fp16.safetensors", "diffusion_models", _WAN_22, "split_files/diffusion_models/", size="10.0 GB"
)
WAN_VAE = model_file("wan2.2_vae.safetensors", "vae", _WAN_22, "split_files/vae/", size="1.4 GB")
UMT5 = model_file(
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors", "text_encoders", _WAN_21, "split_files/text_encoders/", size="6.7 GB"
)

LTX = model_file("ltx-2-19b-distilled-fp8.safetensors", "checkpoints", "Lightricks/LTX-2", size="27.1 GB")
GEMMA = model_file(
    "gemma_3_12B_it_fp4_mixed.safetensors",
    "text_encoders",
    "Comfy-Org/ltx-2",
    "split_files/text_encoders/",
    size="9.5 GB",
)


# ---- loaders ----


def checkpoint(sheet: Sheet, file: dict[str, str]) -> tuple[Out, Out, Out]:
    """MODEL, CLIP, VAE of one file."""
    model = sheet.add("checkpoint", "CheckpointLoaderSimple", size=(NARROW, 0), models=(file,), ckpt_name=file["name"])
    return model, Out("checkpoint", 1), Out("checkpoint", 2)


def diffusion_model(sheet: Sheet, file: dict[str, str], weight_dtype: str = "default") -> Out:
    inputs = {"unet_name": file["name"], "weight_dtype": weight_dtype}
    return sheet.add("model", "UNETLoader", size=(NARROW, 0), models=(file,), **inputs)


def gguf_model(sheet: Sheet, file: dict[str, str]) -> Out:
    """A node of the pack ComfyUI-GGUF. Where that is missing, the front end draws a larger one in its place."""
    inputs = {"unet_name": file["name"]}
    return sheet.add("model", "UnetLoaderGGUF", size=(NARROW, 120), models=(file,), pack=GGUF, **inputs)


def text_encoder(sheet: Sheet, file: dict[str, str], kind: str) -> Out:
    """A file of its own for the prompt."""
    inputs = {"clip_name": file["name"], "type": kind, "device": "default"}
    return sheet.add("clip", "CLIPLoader", size=(NARROW, 0), models=(file,), **inputs)


def vae(sheet: Sheet, file: dict[str, str]) -> Out:
    return sheet.add("vae", "VAELoader", size=(NARROW, 0), models=(file,), vae_name=file["name"])


# ---- prompt, sampler, output ----


def prompt(sheet: Sheet, clip: Out, text: str) -> Out:
    return sheet.add("positive", "CLIPTextEncode", title="Prompt", size=(NARROW, 95), clip=clip, text=text)


def negative_prompt(sheet: Sheet, clip: Out, text: str) -> Out:
    return sheet.add("negative", "CLIPTextEncode", title="Negative prompt", size=(NARROW, 50), clip=clip, text=text)


def no_negative_prompt(sheet: Sheet, positive: Out) -> Out:
    return sheet.add("negative", "ConditioningZeroOut", title="No negative prompt", conditioning=positive)


def sampler(
    sheet: Sheet, model: Out, positive: Out, negative: Out, latent: Out, key: str = "sampler", **settings: Any
) -> Out:
    links = {"model": model, "positive": positive, "negative": negative, "latent_image": latent}
    fixed = {"seed": 1080, "denoise": 1.0, **settings}
    return sheet.add(key, "KSampler", size=(NARROW, 0), **links, **fixed)


def decode(sheet: Sheet, latent: Out, vae: Out) -> Out:
    return sheet.add("decode", "VAEDecode", samples=latent, vae=vae)


def save_picture(sheet: Sheet, image: Out, prefix: str) -> None:
    sheet.add("save", "SaveImage", size=(310, 260), images=image, filename_prefix=prefix)


def save_video(sheet: Sheet, images: Out, prefix: str, fps: float) -> None:
    settings = {"filename_prefix": prefix, "codec": "vp9", "fps": fps, "crf": 32.0}
    sheet.add("save", "SaveWEBM", size=(310, 260), images=images, **settings)


# ---- ours ----


def attention_patch(sheet: Sheet, model: Out, **inputs: Any) -> Out:
    return sheet.add("attention", "PascalAttentionPatch", size=(NARROW, 0), model=model, **inputs)


def everything(sheet: Sheet, model: Out, clip: Out, vae: Out) -> tuple[Out, Out, Out]:
    """MODEL, CLIP and VAE through the one node that most need."""
    patched = attention_patch(sheet, model, clip=clip, vae=vae)
    return patched, Out("attention", 1), Out("attention", 2)


def ffn_chunking(sheet: Sheet, model: Out) -> Out:
    return sheet.add("ffn", "PascalFFNChunking", size=(NARROW, 0), model=model)


def eight_bit(sheet: Sheet, model: Out) -> Out:
    """Bypassed: it is not exact, and users get it only if they ask for it."""
    return sheet.add("int8", "Pascal8Bit", size=(NARROW, 0), bypassed=True, model=model)


def vae_attention(sheet: Sheet, vae: Out) -> Out:
    return sheet.add("vae_attention", "PascalVAEAttention", size=(NARROW, 0), vae=vae)


def text_encoder_attention(sheet: Sheet, clip: Out) -> Out:
    return sheet.add("text_attention", "PascalTextEncoderAttention", size=(NARROW, 0), clip=clip)


def memory_estimate(sheet: Sheet, model: Out, latent: Out, prompt: Out, **more: Out) -> None:
    """The estimate and a node that shows its text."""
    links = {"model": model, "latent": latent, "conditioning": prompt, **more}
    text = sheet.add("estimate", "PascalMemoryEstimate", size=(NARROW, 0), **links)
    sheet.add("estimate_text", "PreviewAny", title="Estimate as text", size=(NARROW, 200), source=text)


def report(sheet: Sheet, value: Out) -> None:
    """The report's picture and its text."""
    sheet.add("report", "PascalAttentionReport", size=(WIDE, 600), value=value)
    sheet.add("text", "PreviewAny", title="Report as text", size=(310, 260), source=Out("report", 2))


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
    """Place the nodes in columns, alike in each workflow: models, and below them nodes of ours that are not exact; our
    others and the prompt, which has a column of its own where the memory estimate stands below it; the sampler; what
    came out.

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
