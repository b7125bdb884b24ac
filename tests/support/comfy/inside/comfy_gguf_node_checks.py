"""GGUF files of ComfyUI-GGUF under Pascal 8-Bit, inside the host: see ``comfy_checks``."""

import asyncio
import functools
import itertools
import os
import sys
import tempfile
from pathlib import Path

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy_checks import Skip, check, close, pack, raises, replaced, run_of, unload
from comfy_inproc import load_lora, sample, tiny_file
from comfy_int8_checks import far, layer, line_of, near, patched, report

import nodes


@functools.cache
def folder():
    """A folder of models in which the loaders of ComfyUI-GGUF look, for the life of the process."""
    path = os.environ.get("GGUF_PACK")
    if not path:
        raise Skip("no folder of ComfyUI-GGUF is given")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise Skip("the host has no package gguf") from None
    assert asyncio.run(nodes.load_custom_node(path))
    found = tempfile.TemporaryDirectory()
    for kind in ("diffusion_models", "text_encoders"):
        folder_paths.add_model_folder_path(kind, found.name)
    return found


def of_pack(module):
    """A module of ComfyUI-GGUF."""
    folder()
    return sys.modules[f"{nodes.NODE_CLASS_MAPPINGS['UnetLoaderGGUF'].__module__.rpartition('.')[0]}.{module}"]


def written(name, architecture, weights, formats):
    """A GGUF file: each matrix in the format that ``formats(its name)`` gives, everything else in float32."""
    import gguf

    writer = gguf.GGUFWriter(Path(folder().name) / name, architecture)
    for key, value in weights.items():
        kind, numbers = gguf.GGMLQuantizationType[formats(key)], value.float().numpy()
        if value.dim() == 2 and value.shape[1] % 32 == 0:
            writer.add_tensor(key, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
            continue
        if value.dim() > 4:
            writer.add_array(f"comfy.gguf.orig_shape.{key}", list(value.shape))
            numbers = numbers.reshape(value.shape[0], -1)
        writer.add_tensor(key, numbers)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def wan(kind="Q4_0", other=None):
    """The tiny Wan from a GGUF file; the layers that are named ``ffn`` may have another format."""
    weights = comfy.utils.load_torch_file(tiny_file("diffusion_models", "wan_t2v"))
    written("wan.gguf", "wan", weights, lambda key: other if other and ".ffn." in key else kind)
    return nodes.NODE_CLASS_MAPPINGS["UnetLoaderGGUF"]().load_unet("wan.gguf")[0]


def products(model):
    """How many modules multiply by ours."""
    return sum("forward_ggml_cast_weights" in vars(module) for module in model.model.modules())


@check
def a_file_runs_near_its_float_self_and_everything_is_back_when_it_is_unloaded():
    for kind in ("Q8_0", "Q4_0", "Q5_1"):
        base = wan(kind)
        stock = sample(base)
        held = {name: id(parameter) for name, parameter in base.model.named_parameters()}
        model = patched(base)
        run = run_of(lambda: near(sample(model), stock))  # noqa: B023
        assert "20 of 20 linear layers in int8" in run.gains[0], run.gains
        assert "GGUF weights" in run.gains[0], run.gains
        line = line_of(model)
        assert (line.format, line.is_as_stored) == (kind, True), line
        assert 0.001 < line.error < 0.02, line
        assert products(model) == 20
        assert {name: id(parameter) for name, parameter in base.model.named_parameters()} == held
        unload()
        assert products(model) == 0
        assert torch.equal(sample(base), stock)


@check
def with_the_limit_0_it_is_exact_and_expanded_in_slices():
    base = wan()
    stock = sample(base)
    model = patched(base, 0.0)
    assert torch.equal(sample(model), stock), "each layer fits into one slice"
    asked = []
    matrix = pack("core.gguf.matrix")
    with replaced(matrix, "slice_weights", lambda device: asked.append(1) or 4096):
        assert 0 <= far(sample(model), stock) < 1e-5
    assert len(asked) >= 20
    assert {each.state for each in report(model).lines} == {"refused", "off"}


@check
def a_lora_stays_beside_the_blocks_in_float():
    base = wan()
    stock, expected = sample(base), sample(load_lora(base))
    assert far(expected, stock) > 0.1
    for model in (patched(load_lora(base)), load_lora(patched(base))):
        near(sample(model), expected)
        assert line_of(model).state == "on"
        assert line_of(model).why == "LoRA of rank 4 beside it in float"
    near(sample(patched(base)), stock)
    assert torch.equal(sample(load_lora(base)), expected)
    whole = base.clone()
    whole.add_patches({"diffusion_model.blocks.0.ffn.0.weight": (torch.ones(layer(base).out_features, 256),)})
    stock = sample(whole)
    model = patched(whole)
    near(sample(model), stock)
    assert line_of(model).why == "its weight is with its patch (diff)", line_of(model)


@check
def where_models_are_loaded_dynamically_those_of_that_loader_are_not():
    patchers = comfy.model_patcher
    if not hasattr(patchers, "CoreModelPatcher"):
        raise Skip("this host has no dynamic loading")
    dynamic = type("Dynamic", (patchers.ModelPatcher,), {"is_dynamic": lambda self: True})
    with replaced(patchers, "CoreModelPatcher", dynamic):
        base = wan()
    assert not base.is_dynamic()
    runs_twice_and_goes(base)


def runs_twice_and_goes(base):
    """In 8 bits and exactly, two runs are the same, and the host's own have the same bits afterwards."""
    stock = sample(base)
    for limit in (0.05, 0.0):
        model = patched(base, limit)
        first = sample(model)
        assert torch.equal(sample(model), first)
        assert products(model) == 20
        assert torch.equal(first, stock) == (not limit)
        assert far(first, stock) < 0.05
        unload()
        assert products(model) == 0
        assert torch.equal(sample(base), stock)


def layer_of(name, rows, columns):
    """A layer as the pack's loader fills it, with finite numbers."""
    import gguf

    weights, size, _ = pack("core.reference.gguf_blocks").FORMATS[name]
    data = torch.randint(0, 40, (rows, columns // weights, size), dtype=torch.uint8).flatten(1)
    kind, shape = gguf.GGMLQuantizationType[name], torch.Size((rows, columns))
    tensor, found = of_pack("ops").GGMLTensor, of_pack("ops").GGMLOps.Linear(columns, rows)
    bias = tensor(torch.randn(rows), tensor_type=None, tensor_shape=shape[:1])
    found.load_state_dict({"weight": tensor(data, tensor_type=kind, tensor_shape=shape), "bias": bias})
    return found


@check
def layers_of_every_format_are_the_hosts():
    of_pack("ops")
    patch_gguf, asked, formats = pack("core.gguf").patch_gguf, [], pack("core.reference.gguf_blocks").FORMATS
    assert len(formats) == 13
    torch.manual_seed(0)
    for name, dtype, arithmetic in itertools.product(
        formats, (torch.float32, torch.bfloat16), (None, "target", torch.float32)
    ):
        module, x = layer_of(name, 48, 512), torch.randn(3, 512, dtype=dtype)
        module.dequant_dtype = arithmetic
        expected = module(x)
        assert expected.isfinite().all()
        with patch_gguf(module) as patch:
            assert [state[1:] for state in patch.report().states] == [("on", name)], patch.report()
            assert torch.equal(module(x), expected), (name, dtype, arithmetic)
            with replaced(pack("core.gguf.matrix"), "slice_weights", lambda device: asked.append(1) or 5000):
                close(module(x), expected, max(2 * torch.finfo(dtype).eps, 4e-6))  # sums of 512 in another order
            assert asked.pop() == 1
            assert asked == []
        assert torch.equal(module(x), expected)


@check
def a_patch_of_the_weights_is_left_to_the_pack():
    of_pack("ops")
    module, x = layer_of("Q4_K", 48, 512), torch.randn(3, 512)
    before = module(x)
    module.weight.patches = [([(1.0, ("diff", (torch.randn(48, 512),)), 1.0, None, None)], "key")]
    expected = module(x)
    assert not torch.equal(expected, before)
    with pack("core.gguf").patch_gguf(module):
        assert torch.equal(module(x), expected)


@check
def a_text_encoder_from_a_file():
    weights = comfy.utils.load_torch_file(tiny_file("text_encoders", "t5"))
    written("t5.gguf", "t5encoder", weights, lambda key: "F16" if "shared" in key or "relative" in key else "Q8_0")
    try:
        clip = nodes.NODE_CLASS_MAPPINGS["CLIPLoaderGGUF"]().load_clip("t5.gguf", "stable_audio")[0]
    except (ValueError, KeyError, RuntimeError) as error:
        raise Skip(f"this tiny T5 is not loaded from GGUF: {error}") from None

    def encoded():
        out = clip.encode_from_tokens(clip.tokenize("a lighthouse"))
        return out[0] if isinstance(out, tuple) else out

    expected = encoded()
    with pack("core.gguf").patch_gguf(clip.cond_stage_model) as patch:
        assert patch.sites > 0
        assert torch.equal(encoded(), expected)
    with pack("core.int8").patch_linear_int8(clip.cond_stage_model) as patch:
        near(encoded(), expected, 0.15)
        assert patch.report().count("on") > 0
    assert torch.equal(encoded(), expected)
    assert raises(ValueError, lambda: pack("core.gguf").patch_gguf(torch.nn.Linear(4, 4)))
