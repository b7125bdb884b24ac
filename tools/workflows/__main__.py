"""Makes ``workflows/``: the workflows, their twins in API format, and their pictures, with ComfyUI's own front end.

    COMFYUI_PATH=/path/to/ComfyUI COMFYUI_PYTHON=/path/to/its/python python tools/workflows [steps] [names]

needs Chromium with its driver, and Pillow. The steps: ``files``; ``pictures``, those of the template browser;
``readme``, those of docs/comfyui.md, after a run on random weights. Without a word it does all three on the ComfyUI
given.

``COMFYUI_PACKS=/path/to/ComfyUI-GGUF:...`` are packs of other authors whose nodes some workflows need; a workflow whose
pack is not among them is left as it is, and named.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
WORKFLOWS = REPOSITORY / "workflows"
sys.path.append(str(HERE.parent))

import readme  # noqa: E402
from attn_support.comfy.browser import Browser  # noqa: E402
from attn_support.comfy.frontend import open_page, picture, show  # noqa: E402
from attn_support.comfy.server import ComfyServer, Host, base_directory  # noqa: E402
from attn_support.comfy.workflow_files import digest, is_drawn, is_shown  # noqa: E402
from graphs import SHEETS  # noqa: E402
from PIL import Image, ImageDraw, ImageEnhance, ImageFont  # noqa: E402
from sheet import Sheet  # noqa: E402

STEPS = ["files", "pictures", "readme"]
WIDTH = 1200  # of the pictures, in pixels; they go into the registry's archive, which is to stay small


def main() -> None:
    steps = [word for word in sys.argv[1:] if word in STEPS] or STEPS
    names = [word for word in sys.argv[1:] if word not in STEPS]
    sheets = [sheet for sheet in SHEETS if sheet.name in names or not names]
    with tempfile.TemporaryDirectory() as folder:
        server = start(Path(folder))
        try:
            with Browser(WIDTH, 900) as browser:
                open_page(browser, server)
                for sheet in sheets:
                    if "files" in steps:
                        write(browser, sheet)
                    if "pictures" in steps:
                        draw(browser, sheet, Path(folder))
                if "readme" in steps:
                    readme.put_tiny_checkpoint(server.base / "models")
                    readme.photograph(browser, server, Path(folder))
        finally:
            server.stop()
    if older := [sheet.name for sheet in SHEETS if not is_drawn(sheet.name)]:
        sys.exit(f"older than their workflows, or made by hand: the pictures of {', '.join(older)}")
    if not is_shown():
        sys.exit("older than their workflow, or made by hand: the pictures of docs/comfyui.md")


def start(folder: Path) -> ComfyServer:
    """ComfyUI with our pack and an empty file for every model that a workflow names."""
    packs = [Path(path) for path in os.environ.get("COMFYUI_PACKS", "").split(os.pathsep) if path]
    base = base_directory(folder / "comfyui", None, packs)
    for file in (file for sheet in SHEETS for file in sheet.files):
        path = base / "models" / file["directory"] / file["name"]
        path.parent.mkdir(exist_ok=True)
        path.touch()
    host = Host(Path(os.environ["COMFYUI_PATH"]), os.environ.get("COMFYUI_PYTHON", sys.executable), "")
    server = ComfyServer(host, base)
    server.wait_until_up()
    return server


def write(browser: Browser, sheet: Sheet) -> None:
    """Both files of a workflow, as the front end saves them."""
    absent = {n["pack"] for n in sheet.nodes if n["pack"] and not browser.script(_KNOWS, n["type"])}
    if absent:
        print(sheet.name, "left as it is: COMFYUI_PACKS does not name", ", ".join(sorted(absent)))
        return
    code = (HERE / "draw.js").read_text(encoding="utf-8")
    drawn = json.loads(browser.script(code, vars(sheet)))
    save(WORKFLOWS / f"{sheet.name}.json", tidy(drawn["workflow"], sheet.name))
    save(WORKFLOWS / "api" / f"{sheet.name}.json", drawn["prompt"])
    print(sheet.name, len(drawn["prompt"]), "nodes that run")


_KNOWS = "return arguments[0] in LiteGraph.registered_node_types"


def tidy(workflow: dict[str, Any], name: str) -> dict[str, Any]:
    """Without what belongs to the page that saved it: an id drawn by chance, the view, versions. The name of another
    author's pack stays: by it ComfyUI says what to install."""
    kept = {key: value for key, value in workflow.items() if value is not None and key not in ("id", "revision")}
    packs = {node["type"]: node["pack"] for sheet in SHEETS if sheet.name == name for node in sheet.nodes}
    for node in kept["nodes"]:
        for key in ("cnr_id", "ver", "aux_id", "Node name for S&R"):
            node["properties"].pop(key, None)
        if packs[node["type"]]:
            node["properties"]["cnr_id"] = packs[node["type"]]
    return {**kept, "extra": {}}


def save(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def draw(browser: Browser, sheet: Sheet, folder: Path) -> None:
    """The picture that the template browser shows beside the name."""
    show(browser, json.loads((WORKFLOWS / f"{sheet.name}.json").read_text(encoding="utf-8")))
    drawn = Image.open(picture(browser, folder / "picture.png")).convert("RGB")
    size = WIDTH, round(drawn.height * WIDTH / drawn.width)
    small = titled(drawn.resize(size, Image.Resampling.LANCZOS), sheet.name.removeprefix("Pascal-").replace("-", " "))
    jpeg = {"quality": 70, "optimize": True, "progressive": True, "comment": digest(sheet.name)}
    small.save(WORKFLOWS / f"{sheet.name}.jpg", **jpeg)


def titled(picture: Image.Image, title: str) -> Image.Image:
    """The graph behind its title: large, and in the middle, of which the template browser shows a square."""
    picture = ImageEnhance.Brightness(picture).enhance(0.6)
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(88)
    text = "\n".join(textwrap.wrap(title, 13))
    middle = picture.width // 2, picture.height // 2
    left, top, right, bottom = pen.textbbox(middle, text, font, anchor="mm", align="center")
    pen.rounded_rectangle((left - 40, top - 30, right + 40, bottom + 30), 24, fill=(24, 26, 32))
    pen.text(middle, text, "white", font, anchor="mm", align="center")
    return picture


main()
