"""The import lines of real programs run after ``install_as_flash_attn()``, and leave nothing behind.

Each row: a program, and names that it imports from flash-attn in one of its versions.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

from attn_support.fresh import run

PROGRAMS = {
    "Qwen-7B": """
        from flash_attn.layers.rotary import apply_rotary_emb_func as __apply_rotary_emb_func
        from flash_attn.ops.rms_norm import rms_norm as __rms_norm
        from flash_attn.flash_attn_interface import flash_attn_unpadded_func as __flash_attn_unpadded_func
        from flash_attn import flash_attn_func
        """,
    "verl": """
        from flash_attn.bert_padding import pad_input, unpad_input, rearrange, index_first_axis
        from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
        """,
    "nomic-bert": """
        from flash_attn import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
        from flash_attn import flash_attn_varlen_func, flash_attn_varlen_kvpacked_func
        from flash_attn.bert_padding import index_first_axis, index_first_axis_residual, pad_input, unpad_input
        from flash_attn.layers.rotary import apply_rotary_emb_func
        """,
    "jina-bert flash": """
        from flash_attn.ops.triton.rotary import apply_rotary
        from flash_attn.layers.rotary import RotaryEmbedding as FlashRotaryEmbedding
        from flash_attn.modules.mha import get_alibi_slopes
        from flash_attn.losses.cross_entropy import CrossEntropyLoss
        from flash_attn.ops.triton.layer_norm import layer_norm_fn
        """,
    "ModernBERT": """
        from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func
        from flash_attn.layers.rotary import RotaryEmbedding
        from flash_attn.ops.triton.rotary import apply_rotary
        """,
    "HyenaDNA": """
        from flash_attn.modules.mha import MHA, ParallelMHA
        from flash_attn.modules.mlp import Mlp, FusedMLP, ParallelFusedMLP
        from flash_attn.modules.block import Block
        from flash_attn.modules.embedding import GPT2Embeddings, ParallelGPT2Embeddings
        from flash_attn.utils.generation import GenerationMixin
        from flash_attn.utils.distributed import sync_shared_params, all_gather_raw
        from flash_attn.ops.fused_dense import ColumnParallelLinear
        from flash_attn.ops.layer_norm import dropout_add_layer_norm
        """,
    "Caduceus": """
        from flash_attn.utils.generation import GenerationMixin
        from flash_attn.ops.fused_dense import ColumnParallelLinear
        """,
    "mamba_ssm": """
        from flash_attn import flash_attn_with_kvcache
        from flash_attn.layers.rotary import RotaryEmbedding
        """,
    "H-Net": """
        from flash_attn.ops.triton.layer_norm import RMSNorm
        from flash_attn.utils.generation import GenerationMixin
        """,
    "StripedHyena (Evo)": """
        from flash_attn.modules.mha import MHA
        from flash_attn.layers.rotary import RotaryEmbedding
        """,
    "InternVideo / VideoChat2": """
        from flash_attn.flash_attention import FlashAttention
        from flash_attn.modules.mlp import FusedMLP
        from flash_attn.ops.rms_norm import DropoutAddRMSNorm
        """,
    "InternVL": """
        from flash_attn.bert_padding import pad_input, unpad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func
        """,
    "InternLM (XTuner)": """
        from flash_attn.ops.triton.layer_norm import rms_norm_fn
        from flash_attn import flash_attn_func, flash_attn_varlen_func
        from flash_attn.bert_padding import index_first_axis, unpad_input
        """,
    "VAR": """
        from flash_attn.ops.layer_norm import dropout_add_layer_norm
        from flash_attn.ops.fused_dense import fused_mlp_func
        from flash_attn import flash_attn_func
        from flash_attn import flash_attn_qkvpacked_func
        """,
    "Phi-1.5 remote code": """
        from flash_attn.bert_padding import pad_input, unpad_input
        from flash_attn.layers.rotary import RotaryEmbedding as FlashRotaryEmbedding
        from flash_attn.modules.mha import FlashCrossAttention, FlashSelfAttention
        from flash_attn.ops.fused_dense import FusedDense
        """,
    "LightGlue": "from flash_attn.modules.mha import FlashCrossAttention",
    "NVIDIA NeMo / Megatron": """
        from flash_attn.bert_padding import pad_input, unpad_input
        from flash_attn.flash_attn_interface import flash_attn_unpadded_func
        from flash_attn.flash_attn_interface import flash_attn_varlen_func
        """,
    "OpenFold": """
        from flash_attn.bert_padding import unpad_input
        from flash_attn.flash_attn_interface import flash_attn_unpadded_kvpacked_func
        """,
    "OpenRLHF": """
        from flash_attn.utils.distributed import all_gather, all_reduce
        from flash_attn.bert_padding import index_first_axis, pad_input, rearrange, unpad_input
        """,
    "Wan 2.1": """
        import flash_attn_interface
        import flash_attn
        """,
    "HRM / TRM": "from flash_attn_interface import flash_attn_func",
    "HunyuanVideo": """
        import flash_attn
        from flash_attn.flash_attn_interface import flash_attn_varlen_func
        """,
    "Lumina-T2X": """
        from flash_attn import flash_attn_varlen_func
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        """,
    "Open-Sora (attention)": "from flash_attn import flash_attn_func",
    "LLM-Foundry (MPT)": """
        from flash_attn import bert_padding, flash_attn_interface
        from flash_attn.layers.rotary import RotaryEmbedding as DAILRotaryEmbedding
        from flash_attn.losses.cross_entropy import CrossEntropyLoss as FusedCrossEntropyLoss
        """,
    "TinyLlama (lit-gpt)": """
        from flash_attn import flash_attn_func
        from flash_attn.losses.cross_entropy import CrossEntropyLoss
        """,
    "vLLM": "from flash_attn.layers.rotary import apply_rotary_emb",
    "axolotl": """
        from flash_attn.bert_padding import pad_input
        from flash_attn.bert_padding import unpad_input_for_concatenated_sequences
        from flash_attn.flash_attn_interface import flash_attn_kvpacked_func, flash_attn_varlen_kvpacked_func
        """,
    "a packed vision encoder": "from flash_attn.ops.activations import SwiGLUFunction",
    "flash-attn's models": """
        from flash_attn.ops.activations import sqrelu_fwd
        from flash_attn.ops.fused_dense import FusedDense, FusedMLP, fused_mlp_func, fused_dense_func
        from flash_attn.modules.mlp import GatedMlp, ParallelGatedMlp, ParallelMLP
        from flash_attn.modules.mha import CrossAttention, SelfAttention, LinearResidual
        from flash_attn.utils.generation import InferenceParams
        from flash_attn.layers.patch_embed import PatchEmbed
        """,
}
SCRIPT = """
import json, sys, traceback
from pascal_attn_core.flash_attn import install_as_flash_attn

def theirs():
    return sorted(name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "flash_attn_interface"))

answers, finders = {}, list(sys.meta_path)
for program, lines in json.load(sys.stdin).items():
    with install_as_flash_attn():
        try:
            exec(lines, {})
        except Exception:
            answers[program] = traceback.format_exc()
    if theirs() or sys.meta_path != finders:
        answers[program] = f"left behind: {theirs()} {sys.meta_path}"
try:
    import flash_attn.layers.rotary
except ModuleNotFoundError:
    pass
else:
    answers["afterwards"] = "flash_attn is still there"
print(json.dumps(answers))
"""


def test_the_import_lines_of_real_programsrun() -> None:
    assert len(PROGRAMS) >= 22
    lines = {program: "\n".join(line.strip() for line in text.split("\n")) for program, text in PROGRAMS.items()}
    for text in lines.values():
        ast.parse(text)
    done = run(SCRIPT, stdin=json.dumps(lines))
    assert json.loads(done) == {}


def test_what_is_loaded_when() -> None:
    """Importing the package and installing load none of it; importing a submodule loads what it needs."""
    run("""
        import sys
        def extras():
            ours = "pascal_attn_core.flash_attn.modules."
            return {name[len(ours):] for name in sys.modules if name.startswith(ours)}
        import pascal_attn_core
        assert not extras()
        from pascal_attn_core.flash_attn import install_as_flash_attn
        patch = install_as_flash_attn()
        assert not extras() & {"norms", "losses", "mha", "turing", "version3"}, extras()
        import flash_attn.layers.rotary
        from flash_attn import layers
        assert layers.rotary is flash_attn.layers.rotary
        import importlib.util
        spec = importlib.util.find_spec("flash_attn.ops.triton.layer_norm")
        assert spec is not None and "norms" not in extras()
        """)


def test_a_program_may_change_its_names_without_changing_ours() -> None:
    run("""
        from pascal_attn_core.flash_attn import install_as_flash_attn
        from pascal_attn_core.flash_attn.modules import rotary
        ours = rotary.apply_rotary_emb
        with install_as_flash_attn():
            import flash_attn.layers.rotary as theirs
            assert theirs.apply_rotary_emb is ours
            theirs.apply_rotary_emb = None
        assert rotary.apply_rotary_emb is ours
        """)


def test_what_fa3_returns_is_for_the_user_to_say() -> None:
    run("""
        import torch
        from pascal_attn_core.flash_attn import install_as_flash_attn
        q = torch.randn(1, 4, 2, 8)
        ends = torch.tensor([0, 4], dtype=torch.int32)
        with install_as_flash_attn(fa3="out") as patch:
            import flash_attn_interface as fa3
            assert patch.sites == 28
            assert isinstance(fa3.flash_attn_func(q, q, q), torch.Tensor)
            out, lse = fa3.flash_attn_func(q, q, q, return_attn_probs=True)
            assert lse.shape == (1, 2, 4)
            try:
                install_as_flash_attn(fa3=None)
            except ValueError as error:
                assert "must be 'out' as in the installation in force" in str(error)
            else:
                raise SystemExit("two kinds at once")
        with install_as_flash_attn():
            import flash_attn_interface as fa3
            out, lse = fa3.flash_attn_func(q, q, q)
            # as Wan 2.1 calls it
            wan = fa3.flash_attn_varlen_func(q=q[0], k=q[0], v=q[0], cu_seqlens_q=ends, cu_seqlens_k=ends,
                seqused_q=None, seqused_k=None, max_seqlen_q=4, max_seqlen_k=4, softmax_scale=None, causal=False,
                deterministic=False)[0].unflatten(0, (1, 4))
            torch.testing.assert_close(wan, out)
            assert len(fa3.flash_attn_qkvpacked_func(torch.stack([q, q, q], 2))) == 2
        with install_as_flash_attn(fa3=None) as patch:
            assert patch.sites == 27
            try:
                import flash_attn_interface
            except ModuleNotFoundError:
                pass
            else:
                raise SystemExit("there must be no flash_attn_interface")
        try:
            install_as_flash_attn(fa3="both")
        except ValueError as error:
            assert "fa3 must be 'out', 'out_and_lse' or None, got 'both'" in str(error)
        else:
            raise SystemExit("fa3='both' must be refused")
        """)


def test_a_real_flash_attention_3_is_left_alone_unless_told(tmp_path: Path) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("def flash_attn_func(): return 'real'\n")
    run(
        """
        from pascal_attn_core.flash_attn import install_as_flash_attn
        try:
            install_as_flash_attn()
        except RuntimeError as error:
            assert "flash_attn_interface must not be installed" in str(error) and "fa3=None" in str(error)
        else:
            raise SystemExit("the real one must not be hidden")
        import flash_attn_interface as real
        with install_as_flash_attn(fa3=None):
            import flash_attn_interface
            assert flash_attn_interface is real
        with install_as_flash_attn(replace=True):
            import flash_attn_interface
            assert flash_attn_interface is not real
        import flash_attn_interface
        assert flash_attn_interface is real and real.flash_attn_func() == "real"
        """,
        paths=(tmp_path,),
    )
