"""``import sageattention`` and ``import xformers`` find ours, say so, and forget it. In processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from attn_support.fresh import PLAIN, run

# By diffusers, KJNodes, ComfyUI, WanVideoWrapper, SeedVR2, VibeVoice; A1111, sd-scripts, LyCORIS, musubi-tuner, DINOv2,
# TRELLIS, Mistral's inference, TinyLlama.
IMPORTED = {
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


@pytest.mark.parametrize("name", ["sageattention", "xformers"])
def test_what_programs_import_is_there_until_the_patch_is_removed(name: str) -> None:
    lines = "\n".join(
        f"        from {module} import {names.replace(' ', ', ')}"
        for module, names in IMPORTED.items()
        if module.partition(".")[0] == name
    )
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
        assert not [module for module in sys.modules if module.partition(".")[0] == "{name}"]
        assert sys.meta_path == finders and importlib.util.find_spec("{name}") is None
        with raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("{name}")
    """)
    assert out == {"sageattention": "2.2.0", "xformers": "0.0.35"}[name]


@pytest.mark.parametrize("name", ["flash_attn", "sageattention", "xformers"])
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
            put_in()
        with pascal_attn_core.patch_imports() as patch:
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
    (tmp_path / "xformers.py").write_text("real = True\n")
    out = run(
        """
        import importlib.util, logging, sys
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        import pascal_attn_core.auto, xformers
        print(xformers.real, *(importlib.util.find_spec(name) is not None for name in ("flash_attn", "sageattention")))
        """,
        env={**PLAIN, "PASCAL_ATTN_FLASH": "1", "PASCAL_ATTN_DISABLE": disable},
        paths=(tmp_path,),
    )
    told = [
        "PASCAL_ATTN_FLASH is ignored: xformers must not be installed, got the one at " + str(tmp_path / "xformers.py")
    ]
    assert out.splitlines() == (told if not disable else []) + [f"True {found} {found}"]
