"""The pack in ComfyUI's own front end, in headless Chromium."""

from collections.abc import Iterator
from typing import Any

import pytest
from attn_support.comfy import frontend
from attn_support.comfy.browser import Browser, why_no_browser
from attn_support.comfy.server import ComfyServer, Host, base_directory
from attn_support.comfy.workflow_files import FOREIGN, NAMES, opened, prompt_of, touch_models

DIALOG = ".p-dialog, [role=dialog]"

pytestmark = pytest.mark.skipif(bool(why_no_browser()), reason=f"no headless browser: {why_no_browser()}")
every_workflow = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def server_with_files(comfy_host: Host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """ComfyUI with our pack alone, and files of the names that the workflows load."""
    base = base_directory(tmp_path_factory.mktemp("frontend"), None)
    touch_models(base)
    server = ComfyServer(comfy_host, base)
    try:
        server.wait_until_up()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(1600, 1000) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, server_with_files: ComfyServer) -> Browser:
    """The front end, freshly opened."""
    frontend.open_page(browser, server_with_files, **{"Comfy.Workflow.Persist": False})
    return browser


@every_workflow
def test_a_workflow_opens_without_red_nodes_and_sends_its_twin(page: Browser, comfy_host: Host, name: str) -> None:
    frontend.show(page, opened(name))
    unknown = set(frontend.red_nodes(page)) - set(FOREIGN)
    if unknown and comfy_host.version_tuple < (0, 8):
        pytest.skip(f"ComfyUI {comfy_host.version} has no {', '.join(sorted(unknown))}")
    missing = [node["type"] for node in opened(name)["nodes"] if node["type"] in FOREIGN]
    assert frontend.red_nodes(page) == missing
    if missing:  # the front end says what to install; without that node it cannot send the prompt
        pack, _ = FOREIGN[missing[0]]
        assert missing[0] in page.wait_for(_SAID) or pack in page.wait_for(_SAID)
        return
    assert not page.script("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText)", DIALOG)
    sent, twin = known_inputs(frontend.prompt_of_page(page)), known_inputs(prompt_of(name))
    for key, (kind, inputs) in twin.items():
        # The twin is of a newer host, whose nodes have some inputs more.
        of_host = page.script(_INPUTS, kind)
        known = {n: value for n, value in inputs.items() if n in of_host or f"{n.partition('.')[0]}." in of_host}
        twin[key] = kind, known
    assert sent == twin


_SAID = "return document.body.innerText"
# "format.codec" belongs to a choice in "format".
_INPUTS = """const {required, optional} = LiteGraph.registered_node_types[arguments[0]].nodeData.input;
             return Object.entries({...required, ...optional}).flatMap(
                 ([name, spec]) => spec[0].includes?.('DYNAMIC') ? [name, name + '.'] : [name])"""


def known_inputs(prompt: dict[str, Any]) -> dict[str, Any]:
    """Class and inputs of each node, without the front end's own widgets of previews."""
    shown = {"PreviewAny": ("source",), "SaveImage": ("images", "filename_prefix")}
    return {
        key: (kind, {name: value for name, value in node["inputs"].items() if name in shown.get(kind, (name,))})
        for key, node in prompt.items()
        for kind in [node["class_type"]]
    }


@pytest.mark.parametrize("theme", ["dark", "light"])
@every_workflow
def test_a_template_opens_from_the_browser_with_its_picture_and_readable(
    browser: Browser, server_with_files: ComfyServer, name: str, theme: str
) -> None:
    browser.resize(1600, 900)
    frontend.open_page(browser, server_with_files, **{"Comfy.ColorPalette": theme, "Comfy.Workflow.Persist": False})
    try:
        zoom = frontend.open_template(browser, name)
        assert browser.script("return app.graph.nodes.length") == len(opened(name)["nodes"])
        assert not browser.script("return app.canvas.low_quality"), f"no text at zoom {zoom}"
    finally:
        browser.resize(1600, 1000)
