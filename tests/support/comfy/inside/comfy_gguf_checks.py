"""Linear layers of ComfyUI-GGUF with and without ``patch_gguf``, inside the host's interpreter.

COMFYUI_PATH=... $COMFYUI_PYTHON comfy_gguf_checks.py <folder of ComfyUI-GGUF>
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

HERE = Path(__file__).resolve()
sys.path[0] = os.environ["COMFYUI_PATH"]
sys.path.append(str(HERE.parents[4]))
pack, sys.argv[1:] = Path(sys.argv[1]), ["--cpu"]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import gguf  # noqa: E402
import torch  # noqa: E402

from pascal_attn_core import patch_gguf  # noqa: E402
from pascal_attn_core.gguf import matrix  # noqa: E402
from pascal_attn_core.reference.gguf_blocks import FORMATS  # noqa: E402

sys.modules["the_pack"] = package = ModuleType("the_pack")  # without its nodes, which need a running server
package.__path__ = [str(pack)]
ops = importlib.import_module("the_pack.ops")


def layer(name: str, rows: int, columns: int) -> torch.nn.Module:
    """A layer as the pack's loader fills it, with finite numbers."""
    weights, size, _ = FORMATS[name]
    data = torch.randint(0, 40, (rows, columns // weights, size), dtype=torch.uint8).flatten(1)
    kind = gguf.GGMLQuantizationType[name]
    found = ops.GGMLOps.Linear(columns, rows)
    weight = ops.GGMLTensor(data, tensor_type=kind, tensor_shape=torch.Size((rows, columns)))
    bias = ops.GGMLTensor(torch.randn(rows), tensor_type=None, tensor_shape=torch.Size((rows,)))
    found.load_state_dict({"weight": weight, "bias": bias})
    return found


def main() -> None:
    torch.manual_seed(0)
    for name in FORMATS:
        for dtype in (torch.float32, torch.bfloat16):
            for arithmetic in (None, "target", torch.float32):
                module, x = layer(name, 48, 512), torch.randn(3, 512, dtype=dtype)
                module.dequant_dtype = arithmetic
                expected = module(x)
                assert expected.isfinite().all()
                with patch_gguf(module) as patch:
                    assert [state[1:] for state in patch.report().states] == [("on", name)], patch.report()
                    assert torch.equal(module(x), expected), (name, dtype, arithmetic)
                    with mock.patch.object(matrix, "slice_weights", return_value=5000) as asked:
                        torch.testing.assert_close(module(x), expected, msg=f"{name}, {dtype}, {arithmetic}")
                    asked.assert_called_once()
                assert torch.equal(module(x), expected)
    module, x = layer("Q4_K", 48, 512), torch.randn(3, 512)
    before = module(x)
    lora = ("diff", (torch.randn(48, 512),))
    module.weight.patches = [([(1.0, lora, 1.0, None, None)], "key")]
    expected = module(x)
    assert not torch.equal(expected, before)
    with patch_gguf(module):
        assert torch.equal(module(x), expected)
    print(f"{len(FORMATS)} formats")


if __name__ == "__main__":
    with torch.no_grad():
        main()
