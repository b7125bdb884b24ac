"""These tests import what real programs import after ``install_as_flash_attn()``; nothing is left behind."""

import json

from attn_support.fresh import run

# By Qwen-7B, verl, nomic-bert, jina-bert, ModernBERT, HyenaDNA, Caduceus, mamba_ssm, H-Net, StripedHyena (Evo),
# InternVideo, InternVL, XTuner, VAR, Phi-1.5, LightGlue, NeMo, OpenFold, OpenRLHF, Wan 2.1, HRM, HunyuanVideo,
# Lumina-T2X, Open-Sora, LLM-Foundry, TinyLlama, vLLM, axolotl, and flash-attn's own models.
IMPORTED = {
    "flash_attn": "bert_padding flash_attn_func flash_attn_interface flash_attn_kvpacked_func flash_attn_qkvpacked_func"
    " flash_attn_varlen_func flash_attn_varlen_kvpacked_func flash_attn_with_kvcache",
    "flash_attn.bert_padding": "index_first_axis index_first_axis_residual pad_input rearrange unpad_input"
    " unpad_input_for_concatenated_sequences",
    "flash_attn.flash_attention": "FlashAttention",
    "flash_attn.flash_attn_interface": "flash_attn_kvpacked_func flash_attn_unpadded_func"
    " flash_attn_unpadded_kvpacked_func flash_attn_varlen_func flash_attn_varlen_kvpacked_func"
    " flash_attn_varlen_qkvpacked_func",
    "flash_attn.layers.patch_embed": "PatchEmbed",
    "flash_attn.layers.rotary": "RotaryEmbedding apply_rotary_emb apply_rotary_emb_func",
    "flash_attn.losses.cross_entropy": "CrossEntropyLoss",
    "flash_attn.modules.block": "Block",
    "flash_attn.modules.embedding": "GPT2Embeddings ParallelGPT2Embeddings",
    "flash_attn.modules.mha": "CrossAttention FlashCrossAttention FlashSelfAttention LinearResidual MHA ParallelMHA"
    " SelfAttention get_alibi_slopes",
    "flash_attn.modules.mlp": "FusedMLP GatedMlp Mlp ParallelFusedMLP ParallelGatedMlp ParallelMLP",
    "flash_attn.ops.activations": "SwiGLUFunction sqrelu_fwd",
    "flash_attn.ops.fused_dense": "ColumnParallelLinear FusedDense FusedMLP fused_dense_func fused_mlp_func",
    "flash_attn.ops.layer_norm": "dropout_add_layer_norm",
    "flash_attn.ops.rms_norm": "DropoutAddRMSNorm rms_norm",
    "flash_attn.ops.triton.cross_entropy": "cross_entropy_loss",
    "flash_attn.ops.triton.layer_norm": "RMSNorm layer_norm_fn rms_norm_fn",
    "flash_attn.ops.triton.rotary": "apply_rotary",
    "flash_attn.utils.distributed": "all_gather all_gather_raw all_reduce sync_shared_params",
    "flash_attn.utils.generation": "GenerationMixin InferenceParams",
    "flash_attn_interface": "flash_attn_func",
}
SCRIPT = """
import json, sys, traceback
from pascal_attn_core.flash_attn import install_as_flash_attn

def theirs():
    return sorted(name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "flash_attn_interface"))

answers, finders = {}, list(sys.meta_path)
for module, names in json.load(sys.stdin).items():
    with install_as_flash_attn():
        try:
            for name in names.split():
                exec(f"from {module} import {name}", {})
        except Exception:
            answers[module] = traceback.format_exc()
    if theirs() or sys.meta_path != finders:
        answers[module] = f"left behind: {theirs()} {sys.meta_path}"
try:
    import flash_attn.layers.rotary
except ModuleNotFoundError:
    pass
else:
    answers["afterwards"] = "flash_attn is still there"
print(json.dumps(answers))
"""


def test_what_real_programs_import_is_there() -> None:
    assert json.loads(run(SCRIPT, stdin=json.dumps(IMPORTED))) == {}


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
        assert "flash_attn" not in sys.modules
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
        from pytest import raises
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
            with raises(ValueError, match="must be 'out' as in the installation in force"):
                install_as_flash_attn(fa3=None)
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
            with raises(ModuleNotFoundError):
                import flash_attn_interface
        with raises(ValueError, match="fa3 must be 'out', 'out_and_lse' or None, got 'both'"):
            install_as_flash_attn(fa3="both")
        """)
