"""``python -m tools.gpu precompile``: compiled by this machine's NVRTC, found by the kernels of a card."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attn_support.fused.emulation import CARD
from attn_support.randomness import at_night

from pascal_attn_core.fused.code.source import Variant
from pascal_attn_core.fused.gpu import nvrtc
from pascal_attn_core.fused.gpu.cuda import CudaRuntime
from pascal_attn_core.fused.trust.kernels import Kernels
from pascal_attn_core.machine.runtime import Runtime
from tools.gpu import precompile
from tools.gpu.__main__ import main

SMALL = Variant("split", 32, "float16", "float")


def _source_of(version: tuple[int, int]) -> str:
    """Where a card whose machine has an NVRTC of this version takes the machine code from."""
    gpu = CudaRuntime(find_compiler=lambda arch: SimpleNamespace(version=version))
    return Kernels(Runtime(torch.device("cpu"), CARD), gpu=gpu).existing_code(SMALL)[1]


@at_night
@pytest.mark.skipif(nvrtc.find(61) is None, reason="needs an NVRTC that compiles for sm_61")
def test_a_card_finds_what_was_compiled_without_it(tmp_path, monkeypatch, capsys) -> None:
    library = nvrtc.find(61)
    assert library is not None
    version = library.version
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(precompile, "variants_of", lambda kernels: [SMALL, Variant("forward", 32, "float32")])
    assert _source_of(version) == f"NVRTC {version[0]}.{version[1]}"
    command = ["precompile", "--arch", "61", "--nvrtc", library.path, "--processes", "1"]
    assert main(command) == 0
    assert capsys.readouterr().out == f"1 kernels to be compiled into {tmp_path / 'pascal-attention'}\n1 of 1\n"
    assert _source_of(version) == "disk cache"
    assert _source_of((version[0], version[1] + 1)) != "disk cache"
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("0 kernels to be compiled")


def test_without_such_a_compiler_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precompile", "--arch", "61", "--nvrtc", str(tmp_path / "libnvrtc.so")]) == 2
    assert "libnvrtc.so: cannot open" in capsys.readouterr().err
    assert main(["precompile", "--arch", "999"]) == 2
    assert "NVRTC must compile for sm_999, got none that does" in capsys.readouterr().err
