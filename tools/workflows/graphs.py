"""The workflows, with settings that the owner of a GTX 1080 Ti would use."""

from __future__ import annotations

import notes
import parts
from parts import BLUE, BROWN, GREEN, TEAL, VIOLET
from sheet import Out, Sheet


def sdxl() -> Sheet:
    sheet = Sheet("Pascal-SDXL")
    text = notes.page("SDXL, 1024x1024", [(parts.SDXL, "6.9 GB")], notes.SDXL)
    sheet.note("note", "Read me", text, (440, 660))
    model, clip, vae = parts.checkpoint(sheet, parts.SDXL)
    latent = sheet.add("latent", "EmptyLatentImage", width=1024, height=1024, batch_size=1)
    model = parts.attention_patch(sheet, model)
    vae = parts.vae_attention(sheet, vae)
    positive = parts.prompt(sheet, clip, "a lighthouse on a cliff at dusk, waves, warm light in its windows, photo")
    negative = parts.negative_prompt(sheet, clip, "blurry, text, watermark")
    settings = {"steps": 25, "cfg": 6.5, "sampler_name": "dpmpp_2m", "scheduler": "karras"}
    latent = parts.sampler(sheet, model, positive, negative, latent, **settings)
    image = sheet.add("decode", "VAEDecode", samples=latent, vae=vae)
    parts.report(sheet, image)
    parts.save_picture(sheet, image, "pascal/sdxl")

    sheet.group("", "", ["note"])
    sheet.group("Model and size", BLUE, ["checkpoint", "latent"])
    sheet.group("Pascal Attention", GREEN, ["attention", "vae_attention"])
    sheet.group("Prompt", VIOLET, ["positive", "negative"], below=True)
    sheet.group("Sample, decode, save", BROWN, ["sampler", "decode", "save"])
    sheet.group("What happened", TEAL, ["report", "text"])
    return sheet


def flux() -> Sheet:
    sheet = Sheet("Pascal-Flux")
    text = notes.page("Flux schnell, 1024x1024", [(parts.FLUX, "17.2 GB, text encoders and VAE inside")], notes.FLUX)
    sheet.note("note", "Read me", text, (440, 660))
    model, clip, vae = parts.checkpoint(sheet, parts.FLUX)
    latent = sheet.add("latent", "EmptySD3LatentImage", width=1024, height=1024, batch_size=1)
    model = parts.ffn_chunking(sheet, parts.attention_patch(sheet, model))
    clip = parts.text_encoder_attention(sheet, clip)
    vae = parts.vae_attention(sheet, vae)
    words = "a red bicycle leaning on a white wall in Lisbon, blue tiles, morning sun, the shadow of a tree"
    positive = parts.prompt(sheet, clip, words)
    negative = sheet.add("negative", "ConditioningZeroOut", title="No negative prompt", conditioning=positive)
    settings = {"steps": 4, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple"}
    latent = parts.sampler(sheet, model, positive, negative, latent, **settings)
    image = sheet.add("decode", "VAEDecode", samples=latent, vae=vae)
    parts.report(sheet, image)
    parts.save_picture(sheet, image, "pascal/flux")

    sheet.group("", "", ["note"])
    sheet.group("Model and size", BLUE, ["checkpoint", "latent"])
    sheet.group("Pascal Attention", GREEN, ["attention", "ffn", "text_attention", "vae_attention"])
    sheet.group("Prompt", VIOLET, ["positive", "negative"])
    sheet.group("Sample, decode, save", BROWN, ["sampler", "decode", "save"])
    sheet.group("What happened", TEAL, ["report", "text"])
    return sheet


def wan() -> Sheet:
    sheet = Sheet("Pascal-Wan-text-to-video")
    files = [(parts.WAN, "2.8 GB"), (parts.UMT5, "6.7 GB"), (parts.WAN_VAE, "0.25 GB")]
    sheet.note("note", "Read me", notes.page("Wan 2.1, text to video, 832x480", files, notes.WAN), (440, 900))
    name = parts.WAN["name"]
    model = sheet.add("model", "UNETLoader", size=(340, 0), models=(parts.WAN,), unet_name=name, weight_dtype="default")
    clip = parts.text_encoder(sheet, parts.UMT5, "wan")
    vae = sheet.add("vae", "VAELoader", size=(340, 0), models=(parts.WAN_VAE,), vae_name=parts.WAN_VAE["name"])
    latent = sheet.add("latent", "EmptyHunyuanLatentVideo", width=832, height=480, length=33, batch_size=1)
    model = sheet.add("shift", "ModelSamplingSD3", model=model, shift=8.0)
    model = parts.ffn_chunking(sheet, parts.attention_patch(sheet, model))
    vae = parts.vae_attention(sheet, vae)
    positive = parts.prompt(sheet, clip, "a fox runs through fresh snow between birches, tracking shot, daylight")
    negative = parts.negative_prompt(sheet, clip, "still picture, blurry, subtitles, overexposed, deformed")
    parts.memory_estimate(sheet, model, latent, positive)
    settings = {"steps": 30, "cfg": 6.0, "sampler_name": "uni_pc", "scheduler": "simple"}
    latent = parts.sampler(sheet, model, positive, negative, latent, **settings)
    images = sheet.add("decode", "VAEDecode", samples=latent, vae=vae)
    parts.report(sheet, images)
    parts.save_video(sheet, images, "pascal/wan", 16.0)

    sheet.group("", "", ["note"])
    sheet.group("Models and size", BLUE, ["model", "shift", "clip", "vae", "latent"])
    sheet.group("Pascal Attention", GREEN, ["attention", "ffn", "vae_attention"])
    sheet.group("Prompt", VIOLET, ["positive", "negative"])
    sheet.group("Before the run", TEAL, ["estimate", "estimate_text"], below=True)
    sheet.group("Sample, decode, save", BROWN, ["sampler", "decode", "save"])
    sheet.group("What happened", TEAL, ["report", "text"])
    return sheet


def ltxv() -> Sheet:
    sheet = Sheet("Pascal-LTXV")
    files = [(parts.LTXV, "6.3 GB"), (parts.T5, "5.2 GB")]
    sheet.note("note", "Read me", notes.page("LTX-Video 2B, text to video, 768x512", files, notes.LTXV), (440, 660))
    model, _, vae = parts.checkpoint(sheet, parts.LTXV)
    clip = parts.text_encoder(sheet, parts.T5, "ltxv")
    latent = sheet.add("latent", "EmptyLTXVLatentVideo", width=768, height=512, length=97, batch_size=1)
    model = parts.ffn_chunking(sheet, parts.attention_patch(sheet, model))
    words = (
        "A wooden sailing boat leaves a small harbour at sunrise. The camera follows it from the pier at a slow pace. "
        "Calm water mirrors an orange sky, gulls circle above the mast, and a man in a blue coat coils a rope on deck. "
        "The sail fills with wind and the boat leans gently to the left. Natural light, realistic, fine detail."
    )
    positive = parts.prompt(sheet, clip, words)
    negative = parts.negative_prompt(sheet, clip, "worst quality, inconsistent motion, blurry, jittery, distorted")
    parts.memory_estimate(sheet, model, latent, positive)
    pair = sheet.add("rate", "LTXVConditioning", positive=positive, negative=negative, frame_rate=25.0)
    method = sheet.add("method", "KSamplerSelect", sampler_name="euler")
    schedule = {"steps": 30, "max_shift": 2.05, "base_shift": 0.95, "stretch": True, "terminal": 0.1}
    sigmas = sheet.add("schedule", "LTXVScheduler", latent=latent, **schedule)
    links = {"positive": pair, "negative": Out("rate", 1), "sampler": method, "sigmas": sigmas, "latent_image": latent}
    settings = {"add_noise": True, "noise_seed": 1080, "cfg": 3.0}
    sheet.add("sampler", "SamplerCustom", size=(330, 0), model=model, **links, **settings)
    images = sheet.add("decode", "VAEDecode", samples=Out("sampler"), vae=vae)
    parts.report(sheet, images)
    parts.save_video(sheet, images, "pascal/ltxv", 25.0)

    sheet.group("", "", ["note"])
    sheet.group("Models and size", BLUE, ["checkpoint", "clip", "latent"])
    sheet.group("Pascal Attention", GREEN, ["attention", "ffn"])
    sheet.group("Prompt", VIOLET, ["positive", "negative", "rate"])
    sheet.group("Before the run", TEAL, ["estimate", "estimate_text"], below=True)
    sheet.group("Sample, decode, save", BROWN, ["method", "schedule", "sampler", "decode", "save"])
    sheet.group("What happened", TEAL, ["report", "text"])
    return sheet


def every_node() -> Sheet:
    sheet = Sheet("Pascal-every-node")
    text = notes.page("Stable Diffusion 1.5, 768x768", [(parts.SD15, "2.1 GB")], notes.EVERY_NODE)
    sheet.note("note", "Read me", text, (440, 900))
    model, clip, vae = parts.checkpoint(sheet, parts.SD15)
    latent = sheet.add("latent", "EmptyLatentImage", width=768, height=768, batch_size=1)
    shape = {"tokens": 9216, "heads": 8, "head_dim": 40, "dtype": "as ComfyUI computes", "budget_mib": 0}
    tile = sheet.add("tile", "PascalTileSize", size=(340, 0), mode="from the card", **shape)
    sheet.add("tile_text", "PreviewAny", title="Why this tile size", size=(340, 150), source=Out("tile", 1))
    model = parts.ffn_chunking(sheet, parts.attention_patch(sheet, model, tile_size=tile))
    clip = parts.text_encoder_attention(sheet, clip)
    vae = parts.vae_attention(sheet, vae)
    positive = parts.prompt(sheet, clip, "an old steam engine in a green valley, watercolour, soft light")
    negative = parts.negative_prompt(sheet, clip, "blurry, text, watermark")
    parts.memory_estimate(sheet, model, latent, positive)
    settings = {"steps": 20, "cfg": 7.0, "sampler_name": "euler", "scheduler": "normal"}
    latent = parts.sampler(sheet, model, positive, negative, latent, **settings)
    image = sheet.add("decode", "VAEDecode", samples=latent, vae=vae)
    parts.report(sheet, image)
    parts.save_picture(sheet, image, "pascal/every-node")

    sheet.group("", "", ["note"])
    sheet.group("Model and size", BLUE, ["checkpoint", "latent", "tile", "tile_text"])
    sheet.group("Pascal Attention", GREEN, ["attention", "ffn", "text_attention", "vae_attention"])
    sheet.group("Prompt", VIOLET, ["positive", "negative"])
    sheet.group("Before the run", TEAL, ["estimate", "estimate_text"], below=True)
    sheet.group("Sample, decode, save", BROWN, ["sampler", "decode", "save"])
    sheet.group("What happened", TEAL, ["report", "text"])
    return sheet


SHEETS = [sdxl(), flux(), wan(), ltxv(), every_node()]
