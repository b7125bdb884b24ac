"""diffusers' own ``sage`` and ``xformers`` paths on our functions, in processes that import diffusers afterwards."""

from pathlib import Path

import pytest
from attn_support import fresh

PROGRAM = """
import sys
import torch
from diffusers import UNet2DConditionModel, WanTransformer3DModel
from diffusers.utils.import_utils import is_sageattention_available, is_xformers_available, is_xformers_version
from pascal_attn_core.observe.report import record

assert is_sageattention_available() and is_xformers_available() and is_xformers_version(">=", "0.0.29")
torch.manual_seed(0)
wan = WanTransformer3DModel(
    patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
    freq_dim=256, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
).eval()
given = torch.randn(1, 4, 2, 16, 16), torch.tensor([3]), torch.randn(1, 12, 16)
with torch.no_grad():
    expected = wan(*given).sample
    for backend in ("sage", "sage_varlen", "_sage_qk_int8_pv_fp16_triton", "xformers", "flash"):
        wan.set_attention_backend(backend)
        with record() as seen:
            torch.testing.assert_close(wan(*given).sample, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
        assert seen.total == 4, (backend, seen.total)
unet = UNet2DConditionModel(
    block_out_channels=(4, 8), layers_per_block=1, sample_size=32, in_channels=4, out_channels=4, norm_num_groups=2,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    cross_attention_dim=8, attention_head_dim=2,
)
given = torch.randn(1, 4, 16, 16), torch.tensor([3]), torch.randn(1, 12, 8)
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
        out = unet(*given).sample
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
