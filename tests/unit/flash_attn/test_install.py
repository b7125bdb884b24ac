"""``import flash_attn`` finds ours, says so, and forgets it again. What is loaded, and what FA3's names return.
In processes of their own: imports are for good."""

from pathlib import Path

import pytest
from attn_support.fresh import run


def test_every_way_to_import_it_finds_ours() -> None:
    run("""
        from pytest import raises
        import importlib, importlib.metadata, importlib.util
        from pascal_attn_core import Patch
        from pascal_attn_core import flash_attn as ours
        patch = ours.install_as_flash_attn()
        assert isinstance(patch, Patch) and patch.active and patch.sites == 28
        import flash_attn.flash_attn_interface
        import flash_attn.bert_padding as padding
        assert ours.flash_attn_func is flash_attn.flash_attn_func is flash_attn.flash_attn_interface.flash_attn_func
        assert padding.unpad_input is ours.unpad_input and flash_attn.bert_padding is padding
        assert importlib.import_module("flash_attn.bert_padding") is padding
        for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"):
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.name == name
        assert "pascal" in repr(flash_attn) or "pascal" in flash_attn.__doc__
        from packaging.version import parse
        assert parse("2.8") < parse(flash_attn.__version__) < parse("3")
        assert importlib.metadata.version("flash-attn") == flash_attn.__version__
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash_attn"]
        assert importlib.metadata.version("torch")
        with raises(ModuleNotFoundError, match="flash_attn.cute"):
            import flash_attn.cute
        patch.remove()
        patch.remove()
    """)


def test_the_real_fa3_is_left_alone_unless_told(tmp_path: Path) -> None:
    (tmp_path / "flash_attn_interface.py").write_text("def flash_attn_func(): return 'real'\n")
    run(
        """
        import importlib
        from pytest import raises
        from pascal_attn_core.flash_attn import install_as_flash_attn
        with raises(RuntimeError, match="_interface must not be .*fa3=None"):
            install_as_flash_attn(replace=False)
        real = importlib.import_module("flash_attn_interface")
        with install_as_flash_attn(fa3=None):
            assert importlib.import_module("flash_attn_interface") is real
        with install_as_flash_attn(replace=True):
            assert importlib.import_module("flash_attn_interface").flash_attn_func is not real.flash_attn_func
        assert importlib.import_module("flash_attn_interface") is real and real.flash_attn_func() == "real"
        """,
        paths=(tmp_path,),
    )


BELIEVED = """
import torch
from pascal_attn_core import flash_attn as ours
ours.install_as_flash_attn()
from transformers.utils import import_utils
# the real package, too, counts only where torch has a CUDA device
assert import_utils.is_flash_attn_2_available() == torch.cuda.is_available()
assert import_utils.is_flash_attn_greater_or_equal("2.3.3")
import_utils.is_flash_attn_2_available.cache_clear()
import_utils.is_torch_cuda_available = lambda: True
assert import_utils.is_flash_attn_2_available()
assert not import_utils.is_flash_attn_4_available()
from transformers import modeling_flash_attention_utils as utils
utils.is_flash_attn_2_available = lambda: True
functions, _ = utils.lazy_import_flash_attention("flash_attention_2")
assert functions[:2] == (ours.flash_attn_func, ours.flash_attn_varlen_func)
"""
A_MODEL = """
from pascal_attn_core.observe import report
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2)
torch.manual_seed(0)
model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
tokens, mask = torch.randint(0, 64, (2, 10)), torch.ones(2, 10, dtype=torch.long)
mask[0, :4] = 0
with torch.no_grad():
    expected = model(tokens, attention_mask=mask).logits
    model.config._attn_implementation = "flash_attention_2"
    utils.lazy_import_flash_attention("flash_attention_2")
    with report.record() as seen:
        actual = model(tokens, attention_mask=mask).logits
    assert seen.total == 4, seen.total  # two layers of two sequences of different lengths
torch.testing.assert_close(actual[mask.bool()], expected[mask.bool()])
"""


def test_transformers_believes_it_where_a_gpu_is_and_a_model_gives_the_same() -> None:
    pytest.importorskip("transformers")
    run(BELIEVED + A_MODEL)


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
