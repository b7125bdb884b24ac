"""``install_as_flash_attn()``: what it loads, keeps apart from the program, and returns by the names of FA3."""

from attn_support.fresh import run


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
        assert not extras() & {"norms", "mlp", "mha", "turing", "version3"}, extras()
        import flash_attn.layers.rotary
        from flash_attn import layers
        assert layers.rotary is flash_attn.layers.rotary
        import importlib.util
        spec = importlib.util.find_spec("flash_attn.ops.triton.layer_norm")
        assert spec is not None and "norms" not in extras()
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
            assert isinstance(fa3.flash_attn_func(q, q, q, return_attn_probs=False), torch.Tensor)
        with install_as_flash_attn(fa3=None) as patch:
            assert patch.sites == 27
            with raises(ModuleNotFoundError):
                import flash_attn_interface
        with raises(ValueError, match="fa3 must be 'out', 'out_and_lse' or None, got 'both'"):
            install_as_flash_attn(fa3="both")
        """)
