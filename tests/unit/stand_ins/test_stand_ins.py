"""Beside attention in xformers' stand-in, wrong arguments, torch.compile; imports that find ours and forget it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attn_support.fresh import PLAIN, ROOT, run
from torch import nn

from pascal_attn_core.flash_attn.modules.rotary import rotary_emb
from pascal_attn_core.stand_ins import attn_bias as masks
from pascal_attn_core.stand_ins.sageattention import sageattn, sageattn_varlen
from pascal_attn_core.stand_ins.xformers import RMSNorm, SwiGLU, memory_efficient_attention, swiglu

X = torch.randn(2, 12, 3, 8)
ENDS = torch.tensor([0, 5, 12])


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: memory_efficient_attention(X, X[0], X), ValueError, r"must all be .*, got .*, \[12, 3, 8\]"),
        (lambda: memory_efficient_attention(X[0, 0], X[0, 0], X[0, 0]), ValueError, r"got \[3, 8\]"),
        (lambda: memory_efficient_attention(X, X, X, "causal"), TypeError, "an AttentionBias or None, got str"),
        (lambda: memory_efficient_attention(X, X, X, X), ValueError, r"attn_mask must broadcast to \(2, 3, 12, 12\)"),
        (lambda: memory_efficient_attention(X, X, X, p=2.0), ValueError, "dropout_p must be from 0 to 1, got 2.0"),
        (
            lambda: memory_efficient_attention(X, X, X, masks.BlockDiagonalMask.from_seqlens([12])),
            ValueError,
            r"query must be \[1, 12, heads, head_dim\], got \[2, 12, 3, 8\]",
        ),
        (
            lambda: memory_efficient_attention(X[:1], X[:1], X[:1], masks.BlockDiagonalMask.from_seqlens([12], [9])),
            ValueError,
            r"key must be \[1, 9, heads, head_dim\], got \[1, 12, 3, 8\]",
        ),
        (
            lambda: memory_efficient_attention(X[:1], X[:1], X[:1], masks.BlockDiagonalMask.from_seqlens([12], [9, 3])),
            ValueError,
            r"cu_seqlens_k must be \[2\], got \[3\]",
        ),
        (lambda: masks.BlockDiagonalMask.from_seqlens([5]).split(X), ValueError, r"\[1, 5, ...\], got \[2, 12, 3, 8\]"),
        (lambda: masks.BlockDiagonalMask.from_seqlens([5]).make_local_attention(0), ValueError, "window_size must be"),
        (lambda: masks.LocalAttentionFromBottomRightMask(-1, 0), ValueError, "must be at least 0, got -1 and 0"),
        (lambda: sageattn(X, X, X, "BNHD"), ValueError, r"tensor_layout must be one of \['HND', 'NHD'\], got 'BNHD'"),
        (lambda: sageattn(X, X, X[0]), ValueError, r"v must be \[B, heads, tokens, head_dim\], got \[12, 3, 8\]"),
        (lambda: sageattn(X, X[:, :5], X), ValueError, "heads"),
        (lambda: sageattn(X, None, X), TypeError, "k must be a tensor"),
        (lambda: sageattn_varlen(X[0], X[0], X[0], ENDS, ENDS[:2], 7, 7), ValueError, "cu_seqlens_k must be"),
        (lambda: sageattn_varlen(X, X, X, ENDS, ENDS, 7, 7), ValueError, r"q must be \[total, heads, head_dim\]"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call: Callable[[], Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize("bias", [True, False])
def test_swiglu_and_rms_norm_have_xformers_weights(bias: bool) -> None:
    packed, apart = SwiGLU(8, 20, 6, bias=bias), SwiGLU(8, 20, 6, bias, _pack_weights=False)
    names = {"w12.weight", "w3.weight"} | ({"w12.bias", "w3.bias"} if bias else set())
    assert packed.state_dict().keys() == names
    assert packed.w12.weight.shape == (40, 8)
    with torch.no_grad():
        for name, own in (("weight", nn.init.normal_), *((("bias", nn.init.normal_),) if bias else ())):
            own(getattr(packed.w12, name))
            first, second = getattr(packed.w12, name).chunk(2)
            getattr(apart.w1, name).copy_(first)
            getattr(apart.w2, name).copy_(second)
        apart.w3.load_state_dict(packed.w3.state_dict())
    expected = apart.w3(F.silu(apart.w1(X)) * apart.w2(X))
    torch.testing.assert_close(packed(X), expected)
    torch.testing.assert_close(apart(X), expected)
    norm = RMSNorm(8)
    assert norm.state_dict().keys() == {"weight"}
    torch.testing.assert_close(norm(X), X * (X.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
    assert RMSNorm(8, include_weight=False, eps=0.5).weight is None


# flash_attn by Qwen-7B, verl, nomic-bert, jina-bert, ModernBERT, HyenaDNA, Caduceus, mamba_ssm, H-Net, StripedHyena,
# InternVideo, InternVL, XTuner, VAR, Phi-1.5, LightGlue, NeMo, OpenFold, OpenRLHF, Wan 2.1, HRM, HunyuanVideo,
# Lumina-T2X, Open-Sora, LLM-Foundry, TinyLlama, vLLM, axolotl, and flash-attn's own models; the others by diffusers,
# KJNodes, ComfyUI, WanVideoWrapper, SeedVR2, VibeVoice, A1111, sd-scripts, LyCORIS, musubi-tuner, DINOv2, TRELLIS,
# Mistral's inference, TinyLlama.
IMPORTED = {
    "flash_attn": "bert_padding flash_attn_func flash_attn_interface flash_attn_kvpacked_func flash_attn_qkvpacked_func"
    " flash_attn_varlen_func flash_attn_varlen_kvpacked_func flash_attn_with_kvcache",
    "flash_attn.bert_padding": "index_first_axis index_first_axis_residual pad_input rearrange unpad_input"
    " unpad_input_for_concatenated_sequences",
    "flash_attn.flash_attn_interface": "flash_attn_kvpacked_func flash_attn_varlen_func flash_attn_varlen_kvpacked_func"
    " flash_attn_varlen_qkvpacked_func",
    "flash_attn.layers.patch_embed": "PatchEmbed",
    "flash_attn.layers.rotary": "RotaryEmbedding apply_rotary_emb apply_rotary_emb_func",
    "flash_attn.losses.cross_entropy": "CrossEntropyLoss",
    "flash_attn.modules.block": "Block",
    "flash_attn.modules.embedding": "GPT2Embeddings ParallelGPT2Embeddings",
    "flash_attn.modules.mha": "CrossAttention FlashCrossAttention FlashSelfAttention LinearResidual MHA ParallelMHA"
    " SelfAttention get_alibi_slopes",
    "flash_attn.modules.mlp": "FusedMLP GatedMlp Mlp ParallelFusedMLP ParallelGatedMlp ParallelMLP",
    "flash_attn.ops.activations": "SwiGLUFunction sqrelu_fwd swiglu",
    "flash_attn.ops.fused_dense": "ColumnParallelLinear FusedDense FusedMLP fused_dense_func fused_mlp_func",
    "flash_attn.ops.layer_norm": "dropout_add_layer_norm",
    "flash_attn.ops.rms_norm": "DropoutAddRMSNorm rms_norm",
    "flash_attn.ops.triton.cross_entropy": "cross_entropy_loss",
    "flash_attn.ops.triton.layer_norm": "RMSNorm layer_norm_fn rms_norm_fn",
    "flash_attn.ops.triton.rotary": "apply_rotary",
    "flash_attn.utils.distributed": "all_gather all_gather_raw all_reduce sync_shared_params",
    "flash_attn.utils.generation": "GenerationMixin InferenceParams",
    "flash_attn_interface": "flash_attn_func",
    "sageattention": "sageattn sageattn_qk_int8_pv_fp16_cuda sageattn_qk_int8_pv_fp16_triton"
    " sageattn_qk_int8_pv_fp8_cuda sageattn_qk_int8_pv_fp8_cuda_sm90 sageattn_varlen",
    "sageattention.core": "sageattn sageattn_qk_int8_pv_fp16_cuda sageattn_qk_int8_pv_fp8_cuda",
    "xformers": "__version__ _has_cpp_library ops version",
    "xformers.ops": "AttentionBias AttentionMask LowerTriangularMask MemoryEfficientAttentionCutlassOp"
    " MemoryEfficientAttentionFlashAttentionOp RMSNorm SwiGLU fmha index_select_cat memory_efficient_attention"
    " memory_efficient_attention_forward scaled_index_add unbind",
    "xformers.ops.fmha": "BlockDiagonalMask Inputs MemoryEfficientAttentionFlashAttentionOp attn_bias cutlass flash"
    " memory_efficient_attention",
    "xformers.ops.fmha.attn_bias": "AttentionBias BlockDiagonalCausalFromBottomRightMask BlockDiagonalCausalMask"
    " BlockDiagonalCausalWithOffsetPaddedKeysMask BlockDiagonalMask BlockDiagonalPaddedKeysMask"
    " LocalAttentionFromBottomRightMask LowerTriangularMask LowerTriangularMaskWithTensorBias",
}
VERSIONS = {"flash_attn": "2.8.4", "sageattention": "2.2.0", "xformers": "0.0.35"}


@pytest.mark.parametrize("name", VERSIONS)
def test_what_programs_import_is_there_until_the_patch_is_removed(name: str) -> None:
    own = {module: names for module, names in IMPORTED.items() if module.startswith(name)}
    lines = "\n".join(f"        from {module} import {names.replace(' ', ', ')}" for module, names in own.items())
    out = run(f"""
        import importlib.metadata, importlib.util, sys
        from pytest import raises
        import pascal_attn_core
        finders, put_in = list(sys.meta_path), getattr(pascal_attn_core, "patch_{name}")
        first, second = put_in(), put_in()
        first.remove()
{lines}
        import {name}
        assert importlib.metadata.version("{name}") == {name}.__version__
        assert not getattr({name}, "_has_cpp_library", False)  # or ComfyUI stores masks for it
        print({name}.__version__.partition("+")[0])
        second.remove()
        assert not [module for module in sys.modules if module.startswith("{name}")]
        assert sys.meta_path == finders and importlib.util.find_spec("{name}") is None
        with raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("{name}")
    """)
    assert out == VERSIONS[name]


def real_package(name: str, folder: Path) -> Path:
    """A package that is installed, with compiled kernels."""
    (folder / name).mkdir()
    (folder / name / "_C.so").touch()
    (folder / name / "__init__.py").write_text("real = True\n")
    return folder / name / "__init__.py"


# Before a program: torch believes in one card, of the compute capability in the environment.
ON_A_CARD = """
        import os, torch
        torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
        torch.cuda.get_device_capability = lambda index: tuple(map(int, os.environ["CAPABILITY"].split(".")))
"""


@pytest.mark.parametrize(
    ("name", "version", "capability", "runs"),
    [
        ("flash_attn", "", "8.0", True),
        ("sageattention", "", "7.5", False),
        ("sageattention", "1.0.6", "7.5", True),
        ("xformers", "", "7.5", True),
    ],
)
def test_a_real_package_makes_room_where_it_cannot_run(name, version, capability, runs: bool, tmp_path: Path) -> None:
    place = real_package(name, tmp_path)
    if version:
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    out = run(
        ON_A_CARD
        + """
        import importlib, logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        import pascal_attn_core
        with pascal_attn_core.patch_imports() as patch:
            assert hasattr(importlib.import_module(sys.argv[1]), "real") == bool(patch.left_alone)
        print(*patch.left_alone)
        assert importlib.import_module(sys.argv[1]).real
        with pascal_attn_core.patch_imports(replace=False) as patch:
            print(*patch.left_alone)
        """,
        name,
        paths=(tmp_path,),
        env={**PLAIN, "CAPABILITY": capability},
    )
    least = "7.5" if name == "xformers" else "8.0"
    reason = f"it needs compute capability {least}, and the newest card has {capability}"
    told = f"{name} at {place} cannot run here, {reason}: Pascal Attention takes its place"
    assert out.splitlines() == ([name, name] if runs else [told, "", name])


@pytest.mark.parametrize("name", VERSIONS)
def test_a_real_package_is_left_alone_unless_told(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("real = True\n")
    run(
        """
        import importlib, sys
        from pytest import raises
        import pascal_attn_core
        name, others = sys.argv[1], {"flash_attn", "sageattention", "xformers"} - {sys.argv[1]}
        put_in = getattr(pascal_attn_core, f"patch_{name}")
        with raises(RuntimeError, match=f"{name} must not be .*replace=True"):
            put_in(replace=False)
        with pascal_attn_core.patch_imports(replace=False) as patch:
            assert importlib.import_module(name).real
            assert [s.name for s in patch.report().states if s.state == "on"] == sorted(others)
            assert list(patch.left_alone) == [name] and f"{name} must not be installed" in patch.left_alone[name]
            for other in others:
                assert not hasattr(importlib.import_module(other), "real")
        assert not others & set(sys.modules)
        with put_in(replace=True):
            assert not hasattr(importlib.import_module(name), "real")
        assert importlib.import_module(name).real
        """,
        name,
        paths=(tmp_path,),
    )


def test_sageattn_computes_as_the_installation_says() -> None:
    run("""
        from pytest import raises
        import inspect, torch
        from pascal_attn_core import AttentionConfig, patch_imports, patch_sageattention
        from pascal_attn_core.observe.report import record
        from torch.nn.functional import scaled_dot_product_attention as torch_sdpa
        query, ends = torch.randn(1, 2, 700, 8), torch.tensor([0, 700])
        with patch_sageattention(AttentionConfig(route="tiled")):
            from sageattention import sageattn, sageattn_varlen
            assert "attn_mask" in inspect.signature(sageattn).parameters  # ComfyUI asks this
            with record() as seen:
                sageattn(query, query, query)
                sageattn_varlen(*[query[0].transpose(0, 1)] * 3, ends, ends, 700, 700)
            assert seen.routes() == {"tiled": 2}, seen.routes()
            with raises(ValueError, match="config must be AttentionConfig.* as in the installation in force, got None"):
                patch_sageattention()
            with patch_imports() as patch:
                assert list(patch.left_alone) == ["sageattention"], patch.left_alone
        with patch_sageattention(AttentionConfig(route="fused-int8")):
            from sageattention import sageattn
            with record() as seen:
                sageattn(query, query, query)
                wide = torch.randn(1, 2, 20, 160)
                assert torch.equal(sageattn(wide, wide, wide), torch_sdpa(wide, wide, wide)), "exact where 8 bits end"
            assert seen.routes().pop("fused-int8") == 1 == len(seen.routes()) - 1, seen.routes()
        with raises(TypeError, match="config must be an AttentionConfig or None, got 'int8'"):
            patch_sageattention("int8")
    """)


@pytest.mark.parametrize(("disable", "found"), [("", "True"), ("1", "False")])
def test_the_environment_puts_all_in_and_names_what_stays(disable: str, found: str, tmp_path: Path) -> None:
    place = real_package("xformers", tmp_path)
    out = run(
        ON_A_CARD
        + """
        import importlib.util, logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        import pascal_attn_core.auto, xformers
        print(xformers.real, *(importlib.util.find_spec(name) is not None for name in ("flash_attn", "sageattention")))
        """,
        env={**PLAIN, "PASCAL_ATTN_FLASH": "1", "PASCAL_ATTN_DISABLE": disable, "CAPABILITY": "8.0"},
        paths=(tmp_path,),
    )
    told = f"PASCAL_ATTN_FLASH is ignored: xformers must not be installed, got the one at {place}"
    told += "; PASCAL_ATTN_FLASH=replace takes its place"
    assert out.splitlines() == ([] if disable else [told]) + [f"True {found} {found}"]


def test_inside_of_another_package_nothing_is_imported_by_our_own_name() -> None:
    """As in a node pack, where this package is a part of the pack."""
    run(
        f"""
        import importlib, sys, types
        pack = sys.modules["pack"] = types.ModuleType("pack")
        pack.__path__ = [{str(ROOT)!r}]
        with importlib.import_module("pack.pascal_attn_core.stand_ins").patch_imports() as patch:
            finder = [each for each in sys.meta_path if hasattr(each, "modules")]
            for name in [name for each in finder for name in each.modules]:
                importlib.import_module(name)
        assert len(finder) == 3 and not any(name.startswith("pascal_attn_core") for name in sys.modules)
        """
    )


def test_names_that_programs_ask_for_by_class() -> None:
    blocks = masks.BlockDiagonalMask.from_seqlens([5, 7])
    assert isinstance(blocks.make_local_attention(3), masks.BlockDiagonalCausalLocalAttentionMask)
    of_last = blocks.make_local_attention_from_bottomright(3)
    assert isinstance(of_last, masks.BlockDiagonalCausalLocalAttentionFromBottomRightMask)
    local = masks.LowerTriangularFromBottomRightMask().make_local_attention(3)
    assert isinstance(local, masks.LowerTriangularFromBottomRightLocalAttentionMask)
    assert [mask.window for mask in (blocks.make_local_attention(3), of_last, local)] == [(2, 0)] * 3


def test_swiglu_is_that_of_the_module() -> None:
    module = SwiGLU(8, 16)
    (w1, w2), (b1, b2) = module.w12.weight.chunk(2), module.w12.bias.chunk(2)
    out = swiglu(X, w1, b1, w2, b2, module.w3.weight, module.w3.bias)
    torch.testing.assert_close(out, module(X))


def test_the_rotation_of_flash_attns_extension_goes_back() -> None:
    x1, x2, angle = (torch.randn(2, 5, 3, 4) for _ in range(3))
    given, turned = (x1.clone(), x2.clone()), (torch.empty_like(x1), torch.empty_like(x2))
    rotary_emb(*given, angle.cos(), angle.sin(), *turned, False)
    torch.testing.assert_close(turned[0], x1 * angle.cos() - x2 * angle.sin())
    rotary_emb(*turned, angle.cos(), angle.sin(), *turned, True)
    torch.testing.assert_close(turned, given)
