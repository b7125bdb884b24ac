"""The workflows, with settings for a card with 8 or 11 GB."""

from __future__ import annotations

from typing import Any

import notes
import parts
from sheet import NARROW, PATCH, Out, Sheet, width_for

_LOADERS = ("checkpoint", "model", "lora", "shift", "clip", "vae", "latent")
_EIGHT_STEPS = {"steps": 8, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}


def _drawn(
    sheet: Sheet,
    loaded: tuple[Out, Out, Out, Out],
    words: str,
    file: str,
    *,
    negative: str = "",
    page: str = "sampler",
    more: tuple[str, ...] = (),
    **settings: Any,
) -> Sheet:
    """Return the sheet with all that follows the nodes that load and the note.

    Args:
        loaded: MODEL, CLIP, VAE, LATENT.
        negative: the negative prompt; "" = the model needs none.
        page: where the note stands, see ``parts.frames``.
        more: ``"guidance"``, ``"estimate"``, ``"cache"``: what stands before the sampler; ``"video"``: not a picture.
        settings: of the sampler.
    """
    models = [key for key in _LOADERS if key in {node["key"] for node in sheet.nodes}]
    (model, clip, vae), latent = parts.everything(sheet, *loaded[:3]), loaded[3]
    texts, sampling = ["positive", "negative"], ["sampler", "decode"]
    positive = parts.prompt(sheet, clip, words)
    if "guidance" in more:
        positive = sheet.add("guidance", "FluxGuidance", conditioning=positive, guidance=3.5)
        texts.insert(1, "guidance")
    if negative:
        unwanted = parts.negative_prompt(sheet, clip, negative)
    else:
        none = {"title": "No negative prompt", "size": (0, 0), "conditioning": Out("positive")}
        unwanted = sheet.add("negative", "ConditioningZeroOut", **none)
    if "estimate" in more:
        parts.memory_estimate(sheet, model, latent, positive, vae)
    if "cache" in more:
        model, sampling = sheet.add("cache", "EasyCache", model=model), ["cache", *sampling]
    image = parts.decode(sheet, parts.sample(sheet, model, positive, unwanted, latent, **settings), vae)
    parts.report(sheet, image)
    parts.save(sheet, image, f"pascal/{file}", 24.0 if "video" in more else None)
    parts.frames(sheet, models, ["attention"], texts, sampling, ["save"], page)
    return sheet


def sd15() -> Sheet:
    """Every node of the pack."""
    sheet = Sheet("Pascal-SD15-every-node")
    model, clip, vae = parts.checkpoint(sheet, parts.SD15)
    parts.note(sheet, "Stable Diffusion 1.5, 768x768", notes.SD15)
    latent = parts.latent(sheet, 768, 768)
    model = sheet.add("int8", "Pascal8Bit", bypassed=True, model=model)  # not exact: users get it only if they ask
    model = sheet.add("attention", "PascalAttentionPatch", size=(PATCH, 0), model=model)
    model = sheet.add("ffn", "PascalFFNChunking", model=model)
    clip = sheet.add("text_attention", "PascalTextEncoderAttention", clip=clip)
    vae = sheet.add("vae_attention", "PascalVAEAttention", vae=vae)
    positive = parts.prompt(sheet, clip, "an old steam engine in a green valley, watercolour, soft light")
    negative = parts.negative_prompt(sheet, clip, "blurry, text, watermark")
    parts.memory_estimate(sheet, model, latent, positive, vae)
    settings = {"steps": 20, "cfg": 7.0, "sampler_name": "euler", "scheduler": "normal"}
    image = parts.decode(sheet, parts.sample(sheet, model, positive, negative, latent, **settings), vae)
    parts.report(sheet, image)
    parts.save(sheet, image, "pascal/sd15")
    pascal = ["attention", "ffn", "text_attention", "vae_attention"]
    texts, sampling = ["positive", "negative"], ["sampler", "decode"]
    parts.frames(sheet, ["checkpoint", "latent"], pascal, texts, sampling, ["save"], "sampler", ["int8"])
    return sheet


def sdxl() -> Sheet:
    sheet = Sheet("Pascal-SDXL")
    loaded = parts.checkpoint(sheet, parts.SDXL)
    parts.note(sheet, "SDXL, 1024x1024", notes.SDXL)
    latent = parts.latent(sheet, 1024, 1024)
    words = "a lighthouse on a cliff at dusk, waves, warm light in its windows, photo"
    settings = {"steps": 25, "cfg": 6.5, "sampler_name": "dpmpp_2m", "scheduler": "karras"}
    unwanted = "blurry, text, watermark"
    return _drawn(sheet, (*loaded, latent), words, "sdxl", negative=unwanted, page="models", **settings)


def flux_fp8() -> Sheet:
    sheet = Sheet("Pascal-Flux-fp8")
    loaded = parts.checkpoint(sheet, parts.FLUX_FP8)
    parts.note(sheet, "Flux.1 dev in fp8, 1024x1024", notes.FLUX_FP8)
    latent = parts.latent(sheet, 1024, 1024, "EmptySD3LatentImage")
    words = "a night train at a small station in the mountains, lit windows, snow, photo"
    settings = {"steps": 20, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}
    return _drawn(sheet, (*loaded, latent), words, "flux-fp8", page="models", more=("guidance",), **settings)


def _z_image(sheet: Sheet, width: int, height: int, *, is_int8: bool = False) -> tuple[Out, Out, Out, Out]:
    """MODEL, CLIP, VAE, LATENT. With weights of 8 bits the model stays on a card of 8 GB."""
    model = parts.diffusion_model(sheet, *((parts.Z_IMAGE_INT8,) if is_int8 else (parts.Z_IMAGE, "fp8_e4m3fn")))
    clip = parts.text_encoder(sheet, parts.QWEN_3_4B_FP8 if is_int8 else parts.QWEN_3_4B, "lumina2")
    vae = parts.vae(sheet, parts.AE)
    latent = parts.latent(sheet, width, height, "EmptySD3LatentImage")
    model = sheet.add("shift", "ModelSamplingAuraFlow", model=model, shift=3.0)
    return model, clip, vae, latent


_Z_SETTINGS = {"steps": 8, "cfg": 1.0, "sampler_name": "res_multistep", "scheduler": "simple"}


def z_image(is_int8: bool = False) -> Sheet:
    """Z-Image Turbo from a bfloat16 file that is loaded in 8-bit floats, or from one in 8-bit integers."""
    sheet = Sheet("Pascal-Z-Image-Turbo-int8" if is_int8 else "Pascal-Z-Image-Turbo")
    loaded = _z_image(sheet, 1024, 1024, is_int8=is_int8)
    title, here = ("Z-Image Turbo in int8", notes.Z_IMAGE_INT8) if is_int8 else ("Z-Image Turbo", notes.Z_IMAGE)
    parts.note(sheet, f"{title}, 1024x1024", here)
    words = "a baker opens the door of a small shop at dawn, steam, warm light, photo"
    return _drawn(sheet, loaded, words, "z-image", **_Z_SETTINGS)


def eleven_gb() -> Sheet:
    """A picture of 1536 x 1536 on a card with 11 GB, from the files on."""
    sheet = Sheet("Pascal-11-GB-card")
    loaded = _z_image(sheet, 1536, 1536)
    parts.note(sheet, "A card with 11 GB, 1536x1536", notes.ELEVEN_GB)
    words = "a fishing village on a steep green coast seen from the sea, painted boats, laundry, gulls, morning haze"
    return _drawn(sheet, loaded, words, "11-gb", more=("estimate",), **_Z_SETTINGS)


def krea() -> Sheet:
    sheet = Sheet("Pascal-Krea2-Turbo")
    model = parts.diffusion_model(sheet, parts.KREA)
    clip = parts.text_encoder(sheet, parts.QWEN_3_VL, "krea2")
    vae = parts.vae(sheet, parts.KREA_VAE)
    parts.note(sheet, "Krea-2 Turbo, 1024x1024", notes.KREA)
    latent = parts.latent(sheet, 1024, 1024)
    words = "an empty swimming pool in autumn, one red leaf, soft light, film photo"
    return _drawn(sheet, (model, clip, vae, latent), words, "krea2", **_EIGHT_STEPS)


def qwen_gguf() -> Sheet:
    sheet = Sheet("Pascal-Qwen-Image-GGUF")
    file = parts.QWEN_GGUF
    # Where the pack ComfyUI-GGUF is missing, the front end draws a larger node in its place.
    place = {"size": (width_for(file["name"]), 120), "pack": parts.GGUF}
    model = sheet.add("model", "UnetLoaderGGUF", models=(file,), **place, unet_name=file["name"])
    name = parts.LIGHTNING["name"]
    lora = {"size": (width_for(name), 0), "lora_name": name, "strength_model": 1.0}
    model = sheet.add("lora", "LoraLoaderModelOnly", models=(parts.LIGHTNING,), model=model, **lora)
    clip = parts.text_encoder(sheet, parts.QWEN_25_VL, "qwen_image")
    vae = parts.vae(sheet, parts.QWEN_VAE)
    parts.note(sheet, "Qwen-Image from a GGUF file", notes.QWEN_GGUF)
    latent = parts.latent(sheet, 1024, 1024, "EmptySD3LatentImage")
    model = sheet.add("shift", "ModelSamplingAuraFlow", model=model, shift=3.1)
    words = 'a paper shop window with a hand-painted sign that reads "OPEN ON SUNDAYS", rain, neon reflections'
    return _drawn(sheet, (model, clip, vae, latent), words, "qwen-image", **_EIGHT_STEPS)


def wan(easy_cache: bool = False) -> Sheet:
    """Wan 2.2 5B; with ComfyUI's own node that skips steps, if it is wanted."""
    sheet = Sheet("Pascal-Wan-2.2-5B-EasyCache" if easy_cache else "Pascal-Wan-2.2-5B")
    model = parts.diffusion_model(sheet, parts.WAN, "fp8_e4m3fn")
    clip = parts.text_encoder(sheet, parts.UMT5, "wan")
    vae = parts.vae(sheet, parts.WAN_VAE)
    title, here = ("Wan 2.2 5B with EasyCache", notes.EASY_CACHE) if easy_cache else ("Wan 2.2 5B", notes.WAN)
    parts.note(sheet, f"{title}, text to video", here)
    size = {"width": 832, "height": 480, "length": 49, "batch_size": 1}
    latent = sheet.add("latent", "Wan22ImageToVideoLatent", vae=vae, **size)
    model = sheet.add("shift", "ModelSamplingSD3", model=model, shift=8.0)
    words = "a fox runs through fresh snow between birches, tracking shot, daylight"
    settings = {"steps": 20, "cfg": 5.0, "sampler_name": "uni_pc", "scheduler": "simple"}
    negative, page = "still picture, blurry, subtitles, overexposed, deformed", "pascal" if easy_cache else "sampler"
    more = ("estimate", "video", *["cache"] * easy_cache)
    return _drawn(sheet, (model, clip, vae, latent), words, "wan", negative=negative, page=page, more=more, **settings)


def ltx() -> Sheet:
    """LTX-2 with sound; long because each node of the graph has a line."""
    sheet = Sheet("Pascal-LTX-2")
    model, _, vae = parts.checkpoint(sheet, parts.LTX)
    file, gemma = parts.LTX["name"], parts.GEMMA["name"]
    encoder = {"size": (width_for(gemma), 0), "text_encoder": gemma, "ckpt_name": file, "device": "default"}
    clip = sheet.add("clip", "LTXAVTextEncoderLoader", models=(parts.GEMMA,), **encoder)
    audio_vae = sheet.add("audio_vae", "LTXVAudioVAELoader", ckpt_name=file)
    parts.note(sheet, "LTX-2, video with sound", notes.LTX)
    size = {"width": 768, "height": 512, "length": 97, "batch_size": 1}
    video = sheet.add("latent", "EmptyLTXVLatentVideo", **size)
    sound = {"frames_number": 97, "frame_rate": 25, "batch_size": 1}
    audio = sheet.add("audio", "LTXVEmptyLatentAudio", audio_vae=audio_vae, **sound)
    latent = sheet.add("both", "LTXVConcatAVLatent", video_latent=video, audio_latent=audio)
    model, clip, vae = parts.everything(sheet, model, clip, vae)
    words = (
        "A wooden sailing boat leaves a small harbour at sunrise. The camera follows it from the pier at a slow pace. "
        "Gulls circle above the mast and call, small waves lap against the stones, a rope creaks. Natural light."
    )
    positive = parts.prompt(sheet, clip, words)
    negative = parts.negative_prompt(sheet, clip, "")
    links = {"positive": positive, "negative": negative}
    pair = sheet.add("rate", "LTXVConditioning", frame_rate=25.0, **links)
    method = sheet.add("method", "KSamplerSelect", sampler_name="euler_ancestral")
    steps = "1., 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0"
    sigmas = sheet.add("schedule", "ManualSigmas", size=(NARROW, 84), sigmas=steps)
    links = {"positive": pair, "negative": Out("rate", 1), "sampler": method, "sigmas": sigmas, "latent_image": latent}
    settings = {"add_noise": True, "noise_seed": 1080, "cfg": 1.0}
    sampled = sheet.add("sampler", "SamplerCustom", model=model, **links, **settings)
    sheet.add("split", "LTXVSeparateAVLatent", av_latent=sampled)
    images = parts.decode(sheet, Out("split"), vae)
    heard = sheet.add("hear", "LTXVAudioVAEDecode", samples=Out("split", 1), audio_vae=audio_vae)
    parts.report(sheet, images)
    film = sheet.add("film", "CreateVideo", images=images, audio=heard, fps=25.0)
    sheet.add("save", "SaveVideo", size=(310, 120), video=film, filename_prefix="pascal/ltx-2")
    models, texts = ["checkpoint", "clip", "audio_vae", "latent", "audio", "both"], ["positive", "negative", "rate"]
    sampling = ["method", "schedule", "sampler", "split", "decode", "hear"]
    parts.frames(sheet, models, ["attention"], texts, sampling, ["film", "save"], "of its own")
    return sheet


_PICTURES = [sd15(), sdxl(), flux_fp8(), z_image(), z_image(is_int8=True), eleven_gb(), krea(), qwen_gguf()]
SHEETS = [*_PICTURES, wan(), wan(easy_cache=True), ltx()]
