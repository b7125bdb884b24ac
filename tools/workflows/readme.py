"""The pictures in docs/comfyui.md: a workflow after its run, and its report."""

from __future__ import annotations

import io
import json
import os
import subprocess
import time
import urllib.parse
from pathlib import Path

from attn_support.comfy.browser import Browser
from attn_support.comfy.frontend import open_page, picture, show
from attn_support.comfy.server import ComfyServer
from attn_support.comfy.workflow_files import SHOWN, digest, opened
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"
CHECKPOINT = "v1-5-pruned-emaonly-fp16.safetensors"
STEPS, SIZE = 2, 512  # of the run, which a CPU has to do; everything else is as in the file


def put_tiny_checkpoint(models: Path) -> None:
    """Random weights of one UNet level under the name of the published file."""
    builder = REPOSITORY / "tests" / "support" / "comfy" / "inside" / "comfy_tiny_build.py"
    env = {**os.environ, "TINY_MODELS": str(models), "TINY_ONLY": "sd15_checkpoint"}
    subprocess.run([env["COMFYUI_PYTHON"], str(builder)], check=True, env=env, stdout=subprocess.DEVNULL)
    (models / "checkpoints" / "tiny_sd15_checkpoint.safetensors").rename(models / "checkpoints" / CHECKPOINT)


def photograph(browser: Browser, server: ComfyServer, folder: Path) -> None:
    """Run the workflow in the page; write docs/comfyui-graph.png and docs/report.png."""
    open_page(browser, server, **{"Comfy.ColorPalette": "dark"})
    show(browser, _short(opened(SHOWN)))
    browser.script("return app.queuePrompt(0, 1).then(() => true)")
    outputs = _wait(server)
    images = [image for shown in outputs.values() for image in shown.get("images", [])]
    (report,) = (image for image in images if image["filename"].startswith("pascal_attention_report"))
    _save(io.BytesIO(server.fetched(f"/view?{urllib.parse.urlencode(report)}")), DOCS / "report.png")
    time.sleep(3)  # the front end fetches the pictures
    _save(picture(browser, folder / "graph.png"), DOCS / "comfyui-graph.png")


def _short(workflow: dict) -> dict:
    for node in workflow["nodes"]:
        if node["type"] == "KSampler":
            node["widgets_values"][2] = STEPS
        if node["type"] == "EmptyLatentImage":
            node["widgets_values"][:2] = SIZE, SIZE
    return workflow


def _wait(server: ComfyServer, timeout_s: float = 600) -> dict:
    """Texts that the nodes show when the only prompt has ended."""
    deadline = time.monotonic() + timeout_s
    while not (history := server.request("/history")):
        if time.monotonic() > deadline:
            raise TimeoutError("the workflow did not end")
        time.sleep(1)
    (entry,) = history.values()
    if entry["status"]["status_str"] != "success":
        raise RuntimeError(json.dumps(entry["status"]["messages"])[-2000:])
    return entry["outputs"]


def _save(source: Path | io.BytesIO, target: Path, width: int = 1400) -> None:
    """A small PNG: at most ``width`` pixels wide, 5 bits per colour; it says from which workflow it was drawn."""
    image = Image.open(source).convert("RGB")
    if image.width > width:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    origin = PngInfo()
    origin.add_text("comment", digest(SHOWN).decode())
    ImageOps.posterize(image, 5).save(target, optimize=True, pnginfo=origin)
