"""ComfyUI's own front end in a headless browser."""

import time
from pathlib import Path
from typing import Any

from attn_support.comfy.browser import Browser
from attn_support.comfy.server import ComfyServer

READY = "return !!(window.app?.canvas && (app.rootGraph ?? app.graph) && app.extensionManager?.command)"
# Settings of a user who has seen the first-run pages.
SEEN = {"Comfy.TutorialCompleted": True, "Comfy.InstalledVersion": "1.0.0", "Comfy.Graph.CanvasInfo": False}


def open_page(browser: Browser, server: ComfyServer, **settings: Any) -> None:
    """The front end with an empty graph, nothing in front of it."""
    server.request("/settings", {**SEEN, **settings})
    browser.open(f"http://127.0.0.1:{server.port}/")
    browser.wait_for(READY)
    browser.wait_for("return !document.querySelector('.p-progressspinner') && document.body.innerText.includes('Run')")


def open_template(browser: Browser, name: str) -> float:
    """Search a template of our pack in the template browser and click it; the zoom at which it opens."""
    browser.script("return app.extensionManager.command.execute('Comfy.BrowseTemplates').then(() => true)")
    browser.fill(browser.find("[role=dialog] input[type=text], .p-dialog input"), name)
    card = f"[data-testid='template-workflow-{name}'] img"
    browser.find(card)
    time.sleep(0.5)  # the list is drawn once more when the search is over
    browser.click(browser.find(card))
    # A host without some of its nodes opens a dialog of its own about them.
    browser.wait_for("return !document.querySelector(arguments[0])", card)
    time.sleep(1.5)  # it moves to its place
    return browser.script("return app.canvas.ds.scale")


def show(browser: Browser, workflow: dict[str, Any]) -> None:
    """Open a workflow as if its file had been dropped on the page."""
    browser.script("return app.loadGraphData(arguments[0]).then(() => true)", workflow)


def prompt_of_page(browser: Browser) -> dict[str, Any]:
    """Return what the Run button would send, in API format."""
    return browser.script("return app.graphToPrompt().then(p => p.output)")


def red_nodes(browser: Browser) -> list[str]:
    """The nodes that ComfyUI does not know (drawn red), or that it marks as faulty."""
    code = """return app.graph.nodes.filter(n => n.has_errors ||
              (!LiteGraph.registered_node_types[n.type] && n.type !== 'MarkdownNote')).map(n => n.type)"""
    return browser.script(code)


_BOUNDS = """
      const title = LiteGraph.NODE_TITLE_HEIGHT;
      const boxes = app.graph.nodes.map(n => [n.pos[0], n.pos[1] - title, n.size[0], n.size[1] + title]);
      for (const g of app.graph.groups) boxes.push([...g.pos, ...g.size]);
      const left = Math.min(...boxes.map(b => b[0])), top = Math.min(...boxes.map(b => b[1]));
      const width = Math.max(...boxes.map(b => b[0] + b[2])) - left;
      const height = Math.max(...boxes.map(b => b[1] + b[3])) - top;"""


def fit(browser: Browser, margin: int = 24) -> None:
    """Scale and move the canvas so that the whole graph fills the viewport."""
    code = """
      const margin = arguments[0], ds = app.canvas.ds;
      const across = window.innerWidth - 2 * margin, down = window.innerHeight - 2 * margin;
      ds.scale = Math.min(across / width, down / height);
      ds.offset[0] = (margin + (across - ds.scale * width) / 2) / ds.scale - left;
      ds.offset[1] = (margin + (down - ds.scale * height) / 2) / ds.scale - top;
      app.canvas.setDirty(true, true)"""
    browser.script(_BOUNDS + code, margin)
    time.sleep(0.5)


def picture(browser: Browser, path: Path, zoom: float = 1.0, margin: int = 24) -> Path:
    """The graph alone, without the menus around it, as a PNG of ``zoom`` pixels per unit of the graph."""
    size = (round(side * zoom) + 2 * margin for side in browser.script(_BOUNDS + "return [width, height]"))
    browser.resize(*size)
    browser.script(_ADD_STYLE, _ONLY_THE_GRAPH)
    fit(browser, margin)
    time.sleep(1.0)
    browser.screenshot(path)
    browser.script("document.getElementById('picture').remove()")
    return path


_ADD_STYLE = """
const style = document.createElement('style');
style.id = 'picture';
style.textContent = arguments[0];
document.head.append(style)"""
_ONLY_THE_GRAPH = """
body * { visibility: hidden; }
#graph-canvas, .dom-widget, .dom-widget *, .lg-node, .lg-node * { visibility: visible; }
"""
