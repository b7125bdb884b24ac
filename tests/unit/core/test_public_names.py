"""The import paths and names that programs may rely on. A name that leaves this list breaks somebody's program."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest

PUBLIC: dict[str, set[str]] = {
    "pascal_attn_core": {
        "AttentionConfig",
        "AttentionOutput",
        "LazyMask",
        "Patch",
        "Report",
        "TiledAttention",
        "UnsupportedAttention",
        "__version__",
        "attention_map",
        "capture",
        "explain",
        "mask_rule",
        "measure_memory",
        "patch_ffn",
        "patch_flash_attn",
        "patch_linear_int8",
        "patch_sdpa",
        "patch_transformers",
        "patch_vae",
        "record",
        "recommended_tile_size",
        "saved_by_band",
        "sdpa",
        "sdpa_backward",
        "sdpa_with_lse",
        "tiled_attention",
    },
    "pascal_attn_core.attention_map": {"AttentionMap", "Saved", "attention_map", "saved_by_band"},
    "pascal_attn_core.capture": {"CapturedCall", "capture", "load_calls", "observe"},
    "pascal_attn_core.compat": {
        "TiledAttention",
        "device_l2_mb",
        "install_as_pascal_attn",
        "recommended_tile_size",
        "tiled_attention",
    },
    "pascal_attn_core.diffusers": {
        "PascalAttnProcessor",
        "PipelinePatch",
        "install",
        "patch_attention",
        "patch_pipeline",
        "uninstall",
    },
    "pascal_attn_core.vae": {"NotInBands", "VaePatch", "VaeReport", "patch_vae"},
    "pascal_attn_core.int8": {
        "ACTIVATIONS",
        "Int8Matrix",
        "Int8Patch",
        "Int8Report",
        "Int8ReportLine",
        "Int8Weight",
        "int8_linear",
        "patch_linear_int8",
        "quantize_rows",
        "rotate",
    },
    "pascal_attn_core.ffn": {"FfnPatch", "FfnReport", "FfnReportLine", "patch_ffn"},
    "pascal_attn_core.flash_attn": {
        "flash_attn_func",
        "flash_attn_kvpacked_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func",
        "flash_attn_varlen_kvpacked_func",
        "flash_attn_varlen_qkvpacked_func",
        "flash_attn_with_kvcache",
        "index_first_axis",
        "index_put_first_axis",
        "install_as_flash_attn",
        "pad_input",
        "patch_flash_attn",
        "unpad_input",
    },
    "pascal_attn_core.parallel": {"context_parallel_sdpa"},
    "pascal_attn_core.layers": {
        "FlashAttentionV1",
        "FlashAttentionV2",
        "GroupedQueryAttention",
        "MaskedAttention",
        "MultiQueryAttention",
        "NaiveAttention",
        "SelfAttention",
        "SlidingWindowAttention",
        "create_causal_mask",
        "create_padding_mask",
        "get_attention",
    },
    "pascal_attn_core.plots": {"plot_rows", "plot_softmax", "plot_tiles", "softmax_states", "tile_states"},
    "pascal_attn_core.sdpa_patch": {"disable", "enable", "is_enabled", "patch_sdpa"},
    "pascal_attn_core.transformers": {
        "make_hf_attention_fn",
        "pascal_mask",
        "patch_transformers",
        "register_with_transformers",
        "unsupported_reason",
    },
}


def module_at(path: str) -> ModuleType:
    """The module, also where the package has a function of the same name."""
    host = path.rpartition(".")[2]
    if host in ("diffusers", "transformers"):
        pytest.importorskip(host)
    importlib.import_module(path)
    return sys.modules[path]


@pytest.mark.parametrize("path", PUBLIC)
def test_the_names_of_an_import_path(path: str) -> None:
    module = module_at(path)
    assert set(module.__all__) == PUBLIC[path]
    assert [name for name in PUBLIC[path] if not hasattr(module, name)] == []


@pytest.mark.parametrize("path", PUBLIC)
def test_they_can_be_imported_by_name_and_by_star(path: str) -> None:
    module_at(path)
    found: dict[str, object] = {}
    exec(f"from {path} import {', '.join(PUBLIC[path])}", found)  # noqa: S102  # what a program writes
    starred: dict[str, object] = {}
    exec(f"from {path} import *", starred)  # noqa: S102
    assert PUBLIC[path] <= set(starred)
    assert all(found[name] is starred[name] for name in PUBLIC[path])


def test_the_switch_for_programs_that_are_not_touched_exists() -> None:
    assert importlib.util.find_spec("pascal_attn_core.auto") is not None


def test_every_public_function_and_class_says_what_it_does() -> None:
    silent = [
        f"{path}.{name}"
        for path in PUBLIC
        if not path.endswith(("diffusers", "transformers"))
        for name in PUBLIC[path]
        if callable(value := getattr(module_at(path), name)) and not value.__doc__
    ]
    assert silent == []
