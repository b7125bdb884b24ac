"""The pictures in docs/comfyui.md: a workflow after its run, and its report."""

from __future__ import annotations

import io
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
    queue = server.request("/queue")
    ((_, prompt_id, *_),) = queue["queue_running"] + queue["queue_pending"]
    outcome = server.outcome(server.wait(prompt_id, timeout_s=600), 0)
    if outcome.status != "success":
        raise RuntimeError(outcome.message)
    images = [image for shown in outcome.outputs.values() for image in shown.get("images", [])]
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


def _save(source: Path | io.BytesIO, target: Path, width: int = 1400) -> None:
    """A small PNG: at most ``width`` pixels wide, 5 bits per colour; it says from which workflow it was drawn."""
    image = Image.open(source).convert("RGB")
    if image.width > width:
        image = image.resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
    origin = PngInfo()
    origin.add_text("comment", digest(SHOWN).decode())
    ImageOps.posterize(image, 5).save(target, optimize=True, pnginfo=origin)
