"""``import flash_attn`` finds ours, says so, and forgets it again. In processes of their own: imports are for good."""

from pathlib import Path

import pytest
from attn_support.fresh import run


def real_package(folder: Path) -> Path:
    package = folder / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.7.0'\ndef flash_attn_func(): return 'real'\n")
    (package / "flash_attn_interface.py").write_text("from flash_attn import flash_attn_func\n")
    return folder


def test_every_way_to_import_it_finds_ours() -> None:
    run("""
        from pytest import raises
        import importlib, importlib.metadata, importlib.util, sys
        from pascal_attn_core import Patch
        from pascal_attn_core import flash_attn as ours
        with raises(ModuleNotFoundError):
            import flash_attn
        patch = ours.install_as_flash_attn()
        assert isinstance(patch, Patch) and patch.active and patch.sites == 28
        import flash_attn
        import flash_attn.flash_attn_interface
        import flash_attn.bert_padding as padding
        from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func
        assert flash_attn_func is ours.flash_attn_func is flash_attn.flash_attn_interface.flash_attn_func
        assert unpad_input is ours.unpad_input and flash_attn.bert_padding is padding
        assert importlib.import_module("flash_attn.bert_padding") is padding
        for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.bert_padding"):
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.name == name
        assert "pascal" in repr(flash_attn) or "pascal" in flash_attn.__doc__
        from packaging.version import parse
        assert parse("2.8") < parse(flash_attn.__version__) < parse("3")
        assert importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn")
        assert importlib.metadata.version("flash_attn") == flash_attn.__version__
        assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash_attn"]
        assert importlib.metadata.version("torch")
        with raises(ModuleNotFoundError, match="flash_attn.cute"):
            import flash_attn.cute
        patch.remove()
        patch.remove()
        assert not [name for name in sys.modules if name.split(".")[0] == "flash_attn"]
        assert importlib.util.find_spec("flash_attn") is None
        with raises(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version("flash_attn")
    """)


@pytest.mark.parametrize(
    ("real", "words", "is_imported"),
    [
        ("flash_attn.flash_attn_interface", "flash_attn must not be .*replace=True", True),
        ("flash_attn_interface", "_interface must not be .*fa3=None", False),
    ],
)
def test_the_real_package_is_left_alone_unless_told(real: str, words: str, is_imported: bool, tmp_path: Path) -> None:
    if real == "flash_attn_interface":
        (tmp_path / f"{real}.py").write_text("def flash_attn_func(): return 'real'\n")
    else:
        real_package(tmp_path)
    run(
        """
        import importlib, sys
        from pytest import raises
        from pascal_attn_core.flash_attn import install_as_flash_attn
        name, words, is_imported = sys.argv[1:]
        if is_imported:
            importlib.import_module(name)
        with raises(RuntimeError, match=words):
            install_as_flash_attn(replace=False)
        real = importlib.import_module(name)
        if name == "flash_attn_interface":
            with install_as_flash_attn(fa3=None):
                assert importlib.import_module(name) is real
        with install_as_flash_attn(replace=True):
            assert importlib.import_module(name).flash_attn_func is not real.flash_attn_func
        assert importlib.import_module(name) is real and real.flash_attn_func() == "real"
        """,
        real, words, "yes" if is_imported else "",
        paths=(tmp_path,),
    )  # fmt: skip


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
try:
    import diffusers
except ImportError:
    pass
else:
    import diffusers.models.attention_dispatch as dispatch
    assert dispatch._CAN_USE_FLASH_ATTN
    query = torch.randn(1, 12, 2, 8)
    out = dispatch.dispatch_attention_fn(query, query, query, backend="flash")
    query = query.transpose(1, 2)
    right = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    torch.testing.assert_close(out.transpose(1, 2), right)
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


def test_transformers_and_diffusers_believe_it_where_a_gpu_is_and_a_model_gives_the_same() -> None:
    pytest.importorskip("transformers")
    run(BELIEVED + A_MODEL)
