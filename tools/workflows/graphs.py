"""The workflows, with settings for a card with 8 or 11 GB."""

from __future__ import annotations

from typing import Any

import notes
import parts
from parts import NARROW
from sheet import Out, Sheet

_NOTE = (NARROW, 390)
_LOADERS = ("checkpoint", "model", "lora", "shift", "clip", "vae", "latent")
_EIGHT_STEPS = {"steps": 8, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}


def _drawn(
    sheet: Sheet,
    loaded: tuple[Out, Out, Out, Out],
    words: str,
    file: str,
    *,
    negative: str = "",
    estimate: bool = False,
    page: str = "sampler",
    **settings: Any,
) -> Sheet:
    """Return the sheet of a picture with all that follows the nodes that load and the note.

    Args:
        loaded: MODEL, CLIP, VAE, LATENT.
        negative: the negative prompt; "" = the model needs none.
        page: where the note stands, see ``parts.frames``.
        settings: of the sampler.
    """
    models = [key for key in _LOADERS if key in {node["key"] for node in sheet.nodes}]
    model, clip, vae = parts.everything(sheet, *loaded[:3])
    positive = parts.prompt(sheet, clip, words)
    unwanted = parts.negative_prompt(sheet, clip, negative) if negative else parts.no_negative_prompt(sheet, positive)
    if estimate:
        parts.memory_estimate(sheet, model, loaded[3], positive, vae=vae)
    image = parts.decode(sheet, parts.sampler(sheet, model, positive, unwanted, loaded[3], **settings), vae)
    parts.report(sheet, image)
    parts.save_picture(sheet, image, f"pascal/{file}")
    parts.frames(sheet, models, ["attention"], ["positive", "negative"], ["sampler", "decode"], ["save"], page)
    return sheet


def sd15() -> Sheet:
    """Every node of the pack."""
    sheet = Sheet("Pascal-SD15-every-node")
    model, clip, vae = parts.checkpoint(sheet, parts.SD15)
    sheet.note("note", "Read me", notes.page("Stable Diffusion 1.5, 768x768", sheet.files, notes.SD15), _NOTE)
    latent = sheet.add("latent", "EmptyLatentImage", size=(NARROW, 0), width=768, height=768, batch_size=1)
    shape = {"tokens": 9216, "heads": 8, "head_dim": 40}
    tile = sheet.add("tile", "PascalTileSize", size=(NARROW, 0), **shape)
    model = parts.eight_bit(sheet, model)
    model = parts.ffn_chunking(sheet, parts.attention_patch(sheet, model, tile_size=tile))
    clip = parts.text_encoder_attention(sheet, clip)
    vae = parts.vae_attention(sheet, vae)
    positive = parts.prompt(sheet, clip, "an old steam engine in a green valley, watercolour, soft light")
    negative = parts.negative_prompt(sheet, clip, "blurry, text, watermark")
    parts.memory_estimate(sheet, model, latent, positive)
    settings = {"steps": 20, "cfg": 7.0, "sampler_name": "euler", "scheduler": "normal"}
    latent = parts.sampler(sheet, model, positive, negative, latent, **settings)
    image = parts.decode(sheet, latent, vae)
    parts.report(sheet, image)
    parts.save_picture(sheet, image, "pascal/sd15")
    parts.frames(
        sheet,
        ["checkpoint", "latent", "tile"],
        ["attention", "ffn", "text_attention", "vae_attention"],
        ["positive", "negative"],
        ["sampler", "decode"],
        ["save"],
        "sampler",
        ["int8"],
    )
    return sheet


def sdxl() -> Sheet:
    sheet = Sheet("Pascal-SDXL")
    model, clip, vae = parts.checkpoint(sheet, parts.SDXL)
    sheet.note("note", "Read me", notes.page("SDXL, 1024x1024", sheet.files, notes.SDXL), _NOTE)
    latent = sheet.add("latent", "EmptyLatentImage", size=(NARROW, 0), width=1024, height=1024, batch_size=1)
    words = "a lighthouse on a cliff at dusk, waves, warm light in its windows, photo"
    settings = {"steps": 25, "cfg": 6.5, "sampler_name": "dpmpp_2m", "scheduler": "karras"}
    negative = "blurry, text, watermark"
    return _drawn(sheet, (model, clip, vae, latent), words, "sdxl", negative=negative, page="models", **settings)


def flux_fp8() -> Sheet:
    sheet = Sheet("Pascal-Flux-fp8")
    model, clip, vae = parts.checkpoint(sheet, parts.FLUX_FP8)
    sheet.note("note", "Read me", notes.page("Flux.1 dev in fp8, 1024x1024", sheet.files, notes.FLUX_FP8), _NOTE)
    latent = sheet.add("latent", "EmptySD3LatentImage", size=(NARROW, 0), width=1024, height=1024, batch_size=1)
    model, clip, vae = parts.everything(sheet, model, clip, vae)
    prompt = parts.prompt(sheet, clip, "a night train at a small station in the mountains, lit windows, snow, photo")
    positive = sheet.add("guidance", "FluxGuidance", size=(NARROW, 0), conditioning=prompt, guidance=3.5)
    negative = parts.no_negative_prompt(sheet, prompt)
    settings = {"steps": 20, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}
    latent = parts.sampler(sheet, model, positive, negative, latent, **settings)
    image = parts.decode(sheet, latent, vae)
    parts.report(sheet, image)
    parts.save_picture(sheet, image, "pascal/flux-fp8")
    texts = ["positive", "guidance", "negative"]
    parts.frames(sheet, ["checkpoint", "latent"], ["attention"], texts, ["sampler", "decode"], ["save"])
    return sheet


def _z_image(sheet: Sheet, width: int, height: int, *, is_int8: bool = False) -> tuple[Out, Out, Out, Out]:
    """MODEL, CLIP, VAE, LATENT. With weights of 8 bits the model stays on a card of 8 GB."""
    model = parts.diffusion_model(sheet, *((parts.Z_IMAGE_INT8,) if is_int8 else (parts.Z_IMAGE, "fp8_e4m3fn")))
    clip = parts.text_encoder(sheet, parts.QWEN_3_4B_FP8 if is_int8 else parts.QWEN_3_4B, "lumina2")
    vae = parts.vae(sheet, parts.AE)
    latent = sheet.add("latent", "EmptySD3LatentImage", size=(NARROW, 0), width=width, height=height, batch_size=1)
    model = sheet.add("shift", "ModelSamplingAuraFlow", size=(NARROW, 0), model=model, shift=3.0)
    return model, clip, vae, latent


_Z_SETTINGS = {"steps": 8, "cfg": 1.0, "sampler_name": "res_multistep", "scheduler": "simple"}


def z_image(is_int8: bool = False) -> Sheet:
    """Z-Image Turbo from a bfloat16 file that is loaded in 8-bit floats, or from one in 8-bit integers."""
    sheet = Sheet("Pascal-Z-Image-Turbo-int8" if is_int8 else "Pascal-Z-Image-Turbo")
    loaded = _z_image(sheet, 1024, 1024, is_int8=is_int8)
    title, here = ("Z-Image Turbo in int8", notes.Z_IMAGE_INT8) if is_int8 else ("Z-Image Turbo", notes.Z_IMAGE)
    sheet.note("note", "Read me", notes.page(f"{title}, 1024x1024", sheet.files, here), _NOTE)
    words = "a baker opens the door of a small shop at dawn, steam, warm light, photo"
    return _drawn(sheet, loaded, words, "z-image", **_Z_SETTINGS)


def eleven_gb() -> Sheet:
    """A picture of 1536 x 1536 on a card with 11 GB, from the files on."""
    sheet = Sheet("Pascal-11-GB-card")
    loaded = _z_image(sheet, 1536, 1536)
    sheet.note("note", "Read me", notes.page("A card with 11 GB, 1536x1536", sheet.files, notes.ELEVEN_GB), _NOTE)
    words = "a fishing village on a steep green coast seen from the sea, painted boats, laundry, gulls, morning haze"
    return _drawn(sheet, loaded, words, "11-gb", estimate=True, **_Z_SETTINGS)


def krea() -> Sheet:
    sheet = Sheet("Pascal-Krea2-Turbo")
    model = parts.diffusion_model(sheet, parts.KREA)
    clip = parts.text_encoder(sheet, parts.QWEN_3_VL, "krea2")
    vae = parts.vae(sheet, parts.KREA_VAE)
    sheet.note("note", "Read me", notes.page("Krea-2 Turbo, 1024x1024", sheet.files, notes.KREA), _NOTE)
    latent = sheet.add("latent", "EmptyLatentImage", size=(NARROW, 0), width=1024, height=1024, batch_size=1)
    words = "an empty swimming pool in autumn, one red leaf, soft light, film photo"
    return _drawn(sheet, (model, clip, vae, latent), words, "krea2", **_EIGHT_STEPS)


def qwen_gguf() -> Sheet:
    sheet = Sheet("Pascal-Qwen-Image-GGUF")
    model = parts.gguf_model(sheet, parts.QWEN_GGUF)
    name = parts.LIGHTNING["name"]
    lora = {"lora_name": name, "strength_model": 1.0}
    model = sheet.add("lora", "LoraLoaderModelOnly", size=(NARROW, 0), models=(parts.LIGHTNING,), model=model, **lora)
    clip = parts.text_encoder(sheet, parts.QWEN_25_VL, "qwen_image")
    vae = parts.vae(sheet, parts.QWEN_VAE)
    sheet.note("note", "Read me", notes.page("Qwen-Image from a GGUF file", sheet.files, notes.QWEN_GGUF), _NOTE)
    latent = sheet.add("latent", "EmptySD3LatentImage", size=(NARROW, 0), width=1024, height=1024, batch_size=1)
    model = sheet.add("shift", "ModelSamplingAuraFlow", size=(NARROW, 0), model=model, shift=3.1)
    words = 'a paper shop window with a hand-painted sign that reads "OPEN ON SUNDAYS", rain, neon reflections'
    return _drawn(sheet, (model, clip, vae, latent), words, "qwen-image", **_EIGHT_STEPS)


def wan(easy_cache: bool = False) -> Sheet:
    """Wan 2.2 5B; with ComfyUI's own node that skips steps, if it is wanted."""
    sheet = Sheet("Pascal-Wan-2.2-5B-EasyCache" if easy_cache else "Pascal-Wan-2.2-5B")
    model = parts.diffusion_model(sheet, parts.WAN, "fp8_e4m3fn")
    clip = parts.text_encoder(sheet, parts.UMT5, "wan")
    vae = parts.vae(sheet, parts.WAN_VAE)
    title, here = ("Wan 2.2 5B with EasyCache", notes.EASY_CACHE) if easy_cache else ("Wan 2.2 5B", notes.WAN)
    sheet.note("note", "Read me", notes.page(f"{title}, text to video", sheet.files, here), _NOTE)
    size = {"width": 832, "height": 480, "length": 49, "batch_size": 1}
    latent = sheet.add("latent", "Wan22ImageToVideoLatent", size=(NARROW, 0), vae=vae, **size)
    model = sheet.add("shift", "ModelSamplingSD3", size=(NARROW, 0), model=model, shift=8.0)
    model, clip, vae = parts.everything(sheet, model, clip, vae)
    positive = parts.prompt(sheet, clip, "a fox runs through fresh snow between birches, tracking shot, daylight")
    negative = parts.negative_prompt(sheet, clip, "still picture, blurry, subtitles, overexposed, deformed")
    parts.memory_estimate(sheet, model, latent, positive)
    if easy_cache:
        model = sheet.add("cache", "EasyCache", size=(NARROW, 0), model=model)
    settings = {"steps": 20, "cfg": 5.0, "sampler_name": "uni_pc", "scheduler": "simple"}
    latent = parts.sampler(sheet, model, positive, negative, latent, **settings)
    images = parts.decode(sheet, latent, vae)
    parts.report(sheet, images)
    parts.save_video(sheet, images, "pascal/wan", 24.0)
    models, sampling = ["model", "shift", "clip", "vae", "latent"], ["cache"] * easy_cache + ["sampler", "decode"]
    page = "pascal" if easy_cache else "sampler"
    parts.frames(sheet, models, ["attention"], ["positive", "negative"], sampling, ["save"], page)
    return sheet


def ltx() -> Sheet:
    """LTX-2 with sound; long because each node of the graph has a line."""
    sheet = Sheet("Pascal-LTX-2")
    model, _, vae = parts.checkpoint(sheet, parts.LTX)
    file, gemma = parts.LTX["name"], parts.GEMMA["name"]
    encoder = {"text_encoder": gemma, "ckpt_name": file, "device": "default"}
    clip = sheet.add("clip", "LTXAVTextEncoderLoader", size=(NARROW, 0), models=(parts.GEMMA,), **encoder)
    audio_vae = sheet.add("audio_vae", "LTXVAudioVAELoader", size=(NARROW, 0), ckpt_name=file)
    sheet.note("note", "Read me", notes.page("LTX-2, video with sound", sheet.files, notes.LTX), _NOTE)
    size = {"width": 768, "height": 512, "length": 97, "batch_size": 1}
    video = sheet.add("latent", "EmptyLTXVLatentVideo", size=(NARROW, 0), **size)
    sound = {"frames_number": 97, "frame_rate": 25, "batch_size": 1}
    audio = sheet.add("audio", "LTXVEmptyLatentAudio", size=(NARROW, 0), audio_vae=audio_vae, **sound)
    latent = sheet.add("both", "LTXVConcatAVLatent", size=(NARROW, 0), video_latent=video, audio_latent=audio)
    model, clip, vae = parts.everything(sheet, model, clip, vae)
    words = (
        "A wooden sailing boat leaves a small harbour at sunrise. The camera follows it from the pier at a slow pace. "
        "Gulls circle above the mast and call, small waves lap against the stones, a rope creaks. Natural light."
    )
    positive = parts.prompt(sheet, clip, words)
    negative = parts.negative_prompt(sheet, clip, "")
    links = {"positive": positive, "negative": negative}
    pair = sheet.add("rate", "LTXVConditioning", size=(NARROW, 0), frame_rate=25.0, **links)
    method = sheet.add("method", "KSamplerSelect", size=(NARROW, 0), sampler_name="euler_ancestral")
    steps = "1., 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0"
    sigmas = sheet.add("schedule", "ManualSigmas", size=(NARROW, 84), sigmas=steps)
    links = {"positive": pair, "negative": Out("rate", 1), "sampler": method, "sigmas": sigmas, "latent_image": latent}
    settings = {"add_noise": True, "noise_seed": 1080, "cfg": 1.0}
    sampled = sheet.add("sampler", "SamplerCustom", size=(NARROW, 0), model=model, **links, **settings)
    sheet.add("split", "LTXVSeparateAVLatent", size=(NARROW, 0), av_latent=sampled)
    images = parts.decode(sheet, Out("split"), vae)
    heard = sheet.add("hear", "LTXVAudioVAEDecode", size=(NARROW, 0), samples=Out("split", 1), audio_vae=audio_vae)
    parts.report(sheet, images)
    film = sheet.add("film", "CreateVideo", size=(NARROW, 0), images=images, audio=heard, fps=25.0)
    sheet.add("save", "SaveVideo", size=(310, 120), video=film, filename_prefix="pascal/ltx-2")
    parts.frames(
        sheet,
        ["checkpoint", "clip", "audio_vae", "latent", "audio", "both"],
        ["attention"],
        ["positive", "negative", "rate"],
        ["method", "schedule", "sampler", "split", "decode", "hear"],
        ["film", "save"],
        "of its own",
    )
    return sheet


SHEETS = [
    sd15(),
    sdxl(),
    flux_fp8(),
    z_image(),
    z_image(is_int8=True),
    eleven_gb(),
    krea(),
    qwen_gguf(),
    wan(),
    wan(easy_cache=True),
    ltx(),
]
