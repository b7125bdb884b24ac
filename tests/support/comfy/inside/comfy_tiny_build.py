"""Builds the tiny models and proves that this host loads them. Run by the host's interpreter, from anywhere:

    COMFYUI_PATH=... TINY_MODELS=OUT [TINY_ONLY="name ..."] $COMFYUI_PYTHON comfy_tiny_build.py

Writes OUT/<folder>/<name>.safetensors, and OUT/manifest.json: {name: {"file": ...}} or {name: {"skip": reason}}.
"""

import json
import logging
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import safetensors.torch
from comfy_inproc import TINY_MODELS, comfy, t5_of, vae_of
from comfy_tiny_models import MODELS, Built, Model, NotOnThisHost


def load_vae(path: str) -> Any:
    vae = vae_of(path)
    vae.throw_exception_if_invalid()
    return vae


LOADERS: dict[str, Callable[[str], Any]] = {
    "diffusion_models": comfy.sd.load_diffusion_model,
    "vae": load_vae,
    "text_encoders": t5_of,
    "checkpoints": comfy.sd.load_checkpoint_guess_config,
    "loras": comfy.utils.load_torch_file,
}


class Complaints(logging.Handler):
    """Messages in which a loader says that weights do not fit: left alone they would be uninitialised memory."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        # A decoder alone is a complete file for decoding.
        keys = [key for key in re.findall(r"'([^']+)'", text) if not key.startswith(("encoder.", "quant_conv"))]
        if "missing" in text.lower() and keys:
            self.found.append(f"no weights for {', '.join(keys)}"[:300])


def why_not_loadable(folder: str, path: pathlib.Path) -> str:
    """Load the file as the host's nodes do; empty when every weight found its place."""
    complaints = Complaints()
    logging.getLogger().addHandler(complaints)
    try:
        loaded = LOADERS[folder](str(path))
    except Exception as error:  # whatever the loader says is the reason
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        logging.getLogger().removeHandler(complaints)
    if loaded is None:
        return "the loader does not recognise it"
    return "; ".join(complaints.found)


def save(built: Built, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in built.tensors.items()}
    safetensors.torch.save_file(tensors, path, metadata=built.metadata)


def build(name: str, spec: Model) -> dict[str, str]:
    path = TINY_MODELS / spec.folder / f"tiny_{name}.safetensors"
    reasons = []
    for size in spec.sizes:
        try:
            save(size(), path)
        except NotOnThisHost as missing:
            return {"skip": str(missing)}
        reason = why_not_loadable(spec.folder, path)
        if not reason:
            return {"file": path.name, "folder": spec.folder}
        reasons.append(reason)
    path.unlink()
    return {"skip": "the host does not load it: " + " | ".join(reasons)}


def main() -> None:
    manifest = {}
    for name in os.environ.get("TINY_ONLY", "").split() or MODELS:
        manifest[name] = build(name, MODELS[name])
        print(name, manifest[name], flush=True)
    (TINY_MODELS / "manifest.json").write_text(json.dumps(manifest, indent=1))


main()
