"""The files of ``workflows/``, and the same graphs in a size that the tiny models run."""

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

FOLDER = Path(__file__).parents[3] / "workflows"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
SHOWN = "Pascal-SD15-every-node"  # in the pictures of docs/comfyui.md
PAGES = ("MarkdownNote", "Note")  # nodes that are only read
SEED_MODES = ("fixed", "increment", "decrement", "randomize")  # the front end's own widget after a seed
Prompt = dict[str, dict[str, Any]]


def opened(name: str) -> dict[str, Any]:
    """The workflow as the front end opens it."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def prompt_of(name: str) -> Prompt:
    """Return the workflow's twin in API format, as the server gets it."""
    return json.loads((FOLDER / "api" / f"{name}.json").read_text(encoding="utf-8"))


def digest(name: str) -> bytes:
    """The comment in the picture of a workflow: the hash of the file that it was drawn from."""
    return hashlib.sha256((FOLDER / f"{name}.json").read_bytes()).hexdigest().encode()


def is_drawn(name: str) -> bool:
    """Whether the picture in the template browser shows the workflow as it is now."""
    with Image.open(FOLDER / f"{name}.jpg") as picture:
        return picture.info.get("comment") == digest(name)


def is_shown() -> bool:
    """Whether both pictures of docs/comfyui.md are of a run of the workflow as it is now, with its nodes' inputs."""
    files = (FOLDER.parent / "docs" / name for name in ("comfyui-graph.png", "report.png"))
    return all(Image.open(file).info.get("comment") == digest(SHOWN).decode() for file in files)


def touch_models(base: Path) -> None:
    """Under a ``--base-directory``: an empty file for every model that a workflow loads, so that menus list it."""
    for node in (node for name in NAMES for node in opened(name)["nodes"]):
        for model in node.get("properties", {}).get("models", []):
            path = base / "models" / model["directory"] / model["name"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()


def is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)


def ours(prompt: Prompt) -> dict[str, str]:
    """The class of each node of the pack, by node id."""
    return {key: node["class_type"] for key, node in prompt.items() if node["class_type"].startswith("Pascal")}


def find(prompt: Prompt, class_type: str) -> str:
    """The id of the only node of a class."""
    (found,) = (key for key, node in prompt.items() if node["class_type"] == class_type)
    return found


def redirect(prompt: Prompt, old: list[Any], new: list[Any]) -> None:
    """Everything that was linked to the output ``old`` gets ``new``."""
    for node in prompt.values():
        for name, value in node["inputs"].items():
            if value == old:
                node["inputs"][name] = new


def without_ours(prompt: Prompt) -> Prompt:
    """The graph without the pack: each node that patches is left out as if bypassed, the others with what they feed."""
    plain = copy.deepcopy(prompt)
    for key, kind in ours(plain).items():
        inputs = plain[key]["inputs"]
        through = [inputs[name] for name in ("model", "clip", "vae") if name in inputs]
        if kind != "PascalMemoryEstimate":
            for slot, link in enumerate(through):
                redirect(plain, [key, slot], link)
    while dead := [key for key, node in plain.items() if _is_ours_or_hangs_on_it(plain, node)]:
        for key in dead:
            del plain[key]
    return plain


def _is_ours_or_hangs_on_it(prompt: Prompt, node: dict[str, Any]) -> bool:
    links = [value for value in node["inputs"].values() if is_link(value)]
    return node["class_type"].startswith("Pascal") or any(link[0] not in prompt for link in links)


@dataclass(frozen=True)
class Tiny:
    """This class names the tiny models that stand for the published files of a workflow."""

    model: str
    vae: str
    clip: str  # sd15_checkpoint: the CLIP in that file
    tokens: int = 16
    dim: int = 0  # of conditioning in the place of a text encoder that does not fit the model
    pooled: int = 0
    mask: bool = False
    decodes: bool = True  # whether the tiny VAE fits the model's latent


TINY = {
    "Pascal-SD15-every-node": Tiny("sd15", "vae_kl", "sd15_checkpoint"),
    "Pascal-SDXL": Tiny("sdxl", "vae_kl", "sd15_checkpoint", 77, 2048, 1280),
    "Pascal-Flux-fp8": Tiny("flux", "vae_flux", "sd15_checkpoint", 16, 4096, 768),
    "Pascal-Z-Image-Turbo": Tiny("lumina2", "vae_flux", "sd15_checkpoint", 16, 64),
    "Pascal-Z-Image-Turbo-int8": Tiny("lumina2", "vae_flux", "sd15_checkpoint", 16, 64),
    "Pascal-11-GB-card": Tiny("lumina2", "vae_flux", "sd15_checkpoint", 16, 64),
    "Pascal-Krea2-Turbo": Tiny("krea2", "vae_wan", "sd15_checkpoint", 16, 320),
    "Pascal-Qwen-Image-GGUF": Tiny("qwen_image", "vae_wan", "sd15_checkpoint", 16, 3584),
    "Pascal-Wan-2.2-5B": Tiny("wan_ti2v", "vae_wan", "t5", 16, 4096, decodes=False),
    "Pascal-Wan-2.2-5B-EasyCache": Tiny("wan_ti2v", "vae_wan", "t5", 16, 4096, decodes=False),
    "Pascal-LTX-2": Tiny("ltxav", "vae_wan", "t5", 16, 128, decodes=False),
}
# Nodes of other authors' packs: where a user gets them.
FOREIGN = {"UnetLoaderGGUF": ("comfyui-gguf", "https://github.com/city96/ComfyUI-GGUF")}
SMALL = {"width": 128, "height": 128, "length": 9, "steps": 2, "min_keys": 0}


def small_prompt(name: str, file_of: Callable[[str], str]) -> Prompt:
    """The twin of a workflow with tiny models, whose files ``file_of(name)`` gives, sizes and steps."""
    tiny, prompt = TINY[name], prompt_of(name)
    _replace_loaders(prompt, tiny, file_of)
    for node in prompt.values():
        node["inputs"].update({key: value for key, value in SMALL.items() if key in node["inputs"]})
    if tiny.dim:
        _replace_conditioning(prompt, tiny)
    _replace_sound(prompt)
    for key in [key for key, node in prompt.items() if node["class_type"] == "LoraLoaderModelOnly"]:
        redirect(prompt, [key, 0], prompt.pop(key)["inputs"]["model"])  # no tiny LoRA is made
    if not tiny.decodes:
        latent = _add(prompt, "EmptyHunyuanLatentVideo", width=64, height=64, length=5, batch_size=1)
        decode, report = find(prompt, "VAEDecode"), find(prompt, "PascalAttentionReport")
        prompt[report]["inputs"]["value"] = prompt[decode]["inputs"]["samples"]
        prompt[decode]["inputs"]["samples"] = latent
    return prompt


def _add(prompt: Prompt, class_type: str, **inputs: Any) -> list[Any]:
    """A link to the first output of a new node."""
    key = str(max(map(int, prompt)) + 1)
    prompt[key] = {"class_type": class_type, "inputs": inputs}
    return [key, 0]


_LOADERS = {
    "CheckpointLoaderSimple": ("MODEL", "CLIP", "VAE"),
    "UNETLoader": ("MODEL",),
    "VAELoader": ("VAE",),
    "CLIPLoader": ("CLIP",),
    "UnetLoaderGGUF": ("MODEL",),
    "LTXAVTextEncoderLoader": ("CLIP",),
}


def _replace_sound(prompt: Prompt) -> None:
    """LTX-2 without the decoder of its sound, of which there is no tiny one; frames are decoded whole."""
    for key, node in list(prompt.items()):
        if node["class_type"] == "LTXVEmptyLatentAudio":
            redirect(prompt, [key, 0], _add(prompt, "ProbeSound", length=9))
            del prompt[key]
        elif node["class_type"] == "VAEDecodeTiled":
            prompt[key] = {"class_type": "VAEDecode", "inputs": {k: node["inputs"][k] for k in ("samples", "vae")}}
        elif node["class_type"] == "CreateVideo":
            node["inputs"].pop("audio", None)
    for key in [
        key for key, node in prompt.items() if node["class_type"] in ("LTXVAudioVAELoader", "LTXVAudioVAEDecode")
    ]:
        del prompt[key]


def _replace_loaders(prompt: Prompt, tiny: Tiny, file_of: Callable[[str], str]) -> None:
    published = [key for key, node in prompt.items() if node["class_type"] in _LOADERS]
    new = {
        "MODEL": _add(prompt, "UNETLoader", unet_name=file_of(tiny.model), weight_dtype="default"),
        "VAE": _add(prompt, "VAELoader", vae_name=file_of(tiny.vae)),
    }
    if tiny.clip == "sd15_checkpoint":
        new["CLIP"] = [_add(prompt, "CheckpointLoaderSimple", ckpt_name=file_of(tiny.clip))[0], 1]
    else:
        new["CLIP"] = _add(prompt, "CLIPLoader", clip_name=file_of(tiny.clip), type="stable_audio", device="default")
    for key in published:
        for slot, kind in enumerate(_LOADERS[prompt[key]["class_type"]]):
            redirect(prompt, [key, slot], new[kind])
    for key in published:
        del prompt[key]


def _replace_conditioning(prompt: Prompt, tiny: Tiny) -> None:
    """The text is still encoded, and looked at; the model gets conditioning of its own width."""
    encoders = [key for key, node in prompt.items() if node["class_type"] == "CLIPTextEncode"]
    for seed, key in enumerate(encoders):
        settings = {"tokens": tiny.tokens, "dim": tiny.dim, "pooled": tiny.pooled, "seed": seed, "mask": tiny.mask}
        redirect(prompt, [key, 0], _add(prompt, "ProbeCond", **settings))
        _add(prompt, "PreviewAny", source=[key, 0])
