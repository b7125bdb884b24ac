"""``patch_gguf`` on the layers of ComfyUI-GGUF, where its folder is given: ``PASCAL_ATTN_GGUF=<folder>``.

Skipped where its own requirement, the package ``gguf``, is missing in the host.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from attn_support.comfy.server import Host

SCRIPT = Path(__file__).parents[2] / "support" / "comfy" / "inside" / "comfy_gguf_checks.py"


def test_layers_of_comfyui_gguf_are_the_hosts(comfy_host: Host) -> None:
    pack = os.environ.get("PASCAL_ATTN_GGUF")
    if not pack:
        pytest.skip("no folder of ComfyUI-GGUF is given")
    done = subprocess.run(
        [comfy_host.python, str(SCRIPT), pack],
        cwd=comfy_host.path,
        env=comfy_host.environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    if "No module named 'gguf'" in done.stderr:
        pytest.skip("the host has no package gguf")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "13 formats"
