"""diffusers' own ``sage`` and ``xformers`` paths on our functions, in processes that import diffusers afterwards."""

from pathlib import Path

import pytest
from attn_support import fresh

PROGRAM = """
import dataclasses
import torch
from diffusers.utils.import_utils import is_sageattention_available, is_xformers_available, is_xformers_version
from pascal_attn_core.observe.report import record
from tools.families import families

assert is_sageattention_available() and is_xformers_available() and is_xformers_version(">=", "0.0.29")
known = {family.name: family for family in families()}
family = known["WanTransformer3DModel (text to video)"]
wan, given = dataclasses.replace(family, sizes=family.sizes | {"num_layers": 2}).build(), family.arguments()
with torch.no_grad():
    expected = wan(**given).sample
    for backend in ("sage", "sage_varlen", "_sage_qk_int8_pv_fp16_triton", "xformers", "flash"):
        wan.set_attention_backend(backend)
        with record() as seen:
            torch.testing.assert_close(wan(**given).sample, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
        assert seen.total == 4, (backend, seen.total)
family = known["UNet2DConditionModel (Stable Diffusion 1.5)"]
unet, given = family.build(), family.arguments()
grads = []
for is_xformers in (False, True):
    if is_xformers:
        # diffusers asks for a CUDA device, and tries a call on it
        torch.cuda.is_available, randn = (lambda: True), torch.randn
        torch.randn = lambda *sizes, device=None, **options: randn(*sizes, **options)
        from xformers.ops import MemoryEfficientAttentionFlashAttentionOp
        unet.enable_xformers_memory_efficient_attention(attention_op=MemoryEfficientAttentionFlashAttentionOp)
        torch.cuda.is_available, torch.randn = (lambda: False), randn
        assert {type(p).__name__ for p in unet.attn_processors.values()} == {"XFormersAttnProcessor"}
    unet.zero_grad()
    with record() as seen:
        out = unet(**given).sample
    out.square().mean().backward()
    grads.append([out.detach(), *(p.grad for p in unet.parameters() if p.grad is not None)])
assert seen.total > 0
for ours, stock in zip(*grads):
    torch.testing.assert_close(ours, stock, rtol=0, atol=1e-4 * stock.abs().max().item() + 1e-9)
print("same")
"""


@pytest.mark.slow
def test_models_are_the_same_on_the_backends_and_on_xformers_processors(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    code = "import sys; from pascal_attn_core.cli import main; sys.exit(main(sys.argv[1:]))"
    done = fresh.execute(code, "run", str(tmp_path / "program.py"), env=fresh.PLAIN, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, "same"), done.stderr
