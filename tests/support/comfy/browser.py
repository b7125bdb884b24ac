"""A headless Chromium over chromedriver's HTTP interface; ``CHROMEDRIVER`` and ``CHROMIUM`` may name the programs."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

from attn_support.comfy.server import free_port

FLAGS = ("--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars", "--force-color-profile=srgb")
FLAGS += tuple(f"--disable-{name}" for name in ("gpu", "quic", "dev-shm-usage", "sync", "background-networking"))
FLAGS += ("--disable-component-update",)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the name that the standard gives to a reference
SELECT_ALL, BACKSPACE = "\ue009a\ue000", "\ue003"  # Control with "a", both released; as the standard writes keys


class BrowserError(AssertionError):
    """This class holds what chromedriver or a script in the page complained of."""


def _program(variable: str, *names: str) -> str | None:
    """Return the program that a variable of the environment names, or else the first of these on the path."""
    return os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)


DRIVER = _program("CHROMEDRIVER", "chromedriver")
CHROMIUM = _program("CHROMIUM", "chromium", "chromium-browser", "google-chrome")


def why_no_browser() -> str:
    """ "" if a browser can be started, else what is missing."""
    missing = [name for name, program in (("CHROMEDRIVER", DRIVER), ("CHROMIUM", CHROMIUM)) if not program]
    return f"nothing on the path, and not set: {', '.join(missing)}" if missing else ""


class Browser(contextlib.AbstractContextManager["Browser"]):
    """One page of a size in CSS pixels, of which ``scale`` device pixels make one in screenshots; a context manager."""

    def __init__(self, width: int = 1600, height: int = 900, scale: float = 1.0) -> None:
        self.profile = tempfile.mkdtemp(prefix="pascal-attn-chromium-")
        port = free_port()
        self.root = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [str(DRIVER), f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._wait_until_up()
            self.root += f"/session/{self._new_session()}"
            self.resize(width, height, scale)
        except BaseException:
            self.close()
            raise

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the browser and its driver, and remove the profile."""
        if "/session/" in self.root and self.process.poll() is None:
            self._request("DELETE", "")
        self.process.terminate()
        self.process.wait(15)
        shutil.rmtree(self.profile, ignore_errors=True)

    def _wait_until_up(self) -> None:
        for _ in range(300):
            try:
                self._request("GET", "/status")
                return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise BrowserError("chromedriver does not answer")

    def _new_session(self) -> str:
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={self.profile}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "unhandledPromptBehavior": "accept"}
        return self._request("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def _request(self, method: str, path: str, data: Any = None, timeout_s: float = 120) -> Any:
        body = json.dumps(data or {}).encode() if method == "POST" else None
        request = urllib.request.Request(self.root + path, body, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as refusal:
            raise BrowserError(json.load(refusal)["value"]["message"].partition("\n  (")[0]) from None

    def cdp(self, command: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._request("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.cdp("Emulation.setDeviceMetricsOverride", **size)

    def open(self, url: str) -> None:
        self._request("POST", "/url", {"url": url})

    def script(self, code: str, *arguments: Any) -> Any:
        """The value of a function body with ``arguments``; it may ``return`` a promise. Raises what it raises."""
        return self._request("POST", "/execute/sync", {"script": code, "args": list(arguments)})

    def wait_for(self, code: str, *arguments: Any, timeout_s: float = 180) -> Any:
        """The first truthy value of the function body; ``BrowserError`` if there is none in time."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.script(code, *arguments)):
            if time.monotonic() > deadline:
                raise BrowserError(
                    f"waited {timeout_s:g} s for: {code} {arguments or ''}; the page says: {self.text()!r}"
                )
            time.sleep(0.1)
        return value

    def text(self) -> str:
        """Return what can be read on the page, shortened."""
        return self.script("return document.body.innerText").replace("\n", " | ")[:1500]

    def find(self, css: str, timeout_s: float = 120) -> dict[str, str]:
        """The first visible element of a selector, as soon as there is one."""
        visible = "return [...document.querySelectorAll(arguments[0])].find(e => e.getClientRects().length)"
        return self.wait_for(visible, css, timeout_s=timeout_s)

    def click(self, element: dict[str, str]) -> None:
        self._request("POST", f"/element/{element[ELEMENT]}/click")

    def fill(self, element: dict[str, str], text: str) -> None:
        """Type ``text`` over what is in a field, as a user does: a value that WebDriver clears, a page may put back."""
        self._request("POST", f"/element/{element[ELEMENT]}/value", {"text": SELECT_ALL + BACKSPACE + text})

    def screenshot(self, path: Path) -> Path:
        """The viewport as a PNG."""
        path.write_bytes(base64.b64decode(self._request("GET", "/screenshot")))
        return path
