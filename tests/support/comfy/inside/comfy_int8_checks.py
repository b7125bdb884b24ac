"""Pascal 8-Bit inside the host: see ``comfy_checks``."""

import comfy.sd
import torch
from comfy_checks import Skip, check, pack, raises, replaced, run_of, runs, unload
from comfy_estimate_checks import followed
from comfy_inproc import families, load_lora, load_model, load_pack, sample, tiny_file, wan

NODE = load_pack()["Pascal8Bit"]
KEY = "diffusion_model.blocks.0.ffn.0.weight"
NEAR = 0.05  # of the result's size: what a hundred layers that err by 1 % each make of it at most


def node(model, max_error=0.05, include="", exclude="", weights="host", int8_files="auto"):
    given = {"max_error": max_error, "include": include, "exclude": exclude, "weights": weights}
    return NODE().patch(model, "1", attention="off", attention_max_error=0.02, **given, int8_files=int8_files)


def patched(*args, **options):
    return node(*args, **options)[0]


def network(model):
    return model.model.diffusion_model


def layer(model):
    return network(model).blocks[0].ffn[0]


def binding(model):
    return model.injections["pascal_attn_int8"][0].inject.__self__.binding


def report(model):
    return binding(model).report(network(model))


def line_of(model, name="blocks.0.ffn.0"):
    (line,) = [line for line in report(model).lines if line.name == name]
    return line


def int8_weight(model):
    """The weight of ``layer(model)``, which is loaded in 8 bits."""
    weight = layer(model).weight
    assert isinstance(weight, pack("core.int8.weight").Int8Weight), type(weight)
    return weight


def rounded(weight, like):
    """The codes of a float weight, with the rotation of a weight in 8 bits."""
    return pack("core.reference.int8_rows").quantize_rows(weight, like.matrix.rotation).codes


def far(ours, exact):
    return float((ours - exact).float().norm() / exact.float().norm())


def near(ours, exact, limit=NEAR):
    error = far(ours, exact)
    assert 0 < error < limit, error


def state_of(model):
    """Return of each parameter the object, its storage and its values; and what else could be left in a module."""
    parameters = {name: (id(p), p.data_ptr(), p.detach().clone()) for name, p in model.model.named_parameters()}
    return parameters, {name: dict(attributes(module)) for name, module in model.model.named_modules()}


def attributes(module):
    for name, value in vars(module).items():
        if name in ("_forward_pre_hooks", "_state_dict_hooks", "_forward_pre_hooks_with_kwargs"):
            yield name, len(value)
        elif name.startswith(("comfy_", "prev_comfy_")) or name.endswith("_function"):
            yield name, value


def same(before, after):
    assert before[0].keys() == after[0].keys()
    for name, (identity, pointer, values) in before[0].items():
        assert after[0][name][:2] == (identity, pointer), name
        assert torch.equal(after[0][name][2], values), name
    assert before[1] == after[1]


def is_clean(model):
    kind = pack("core.int8.weight").Int8Weight
    hooks = any(module._forward_pre_hooks or module._state_dict_hooks for module in model.model.modules())
    return not hooks and not any(isinstance(p, kind) for p in model.model.parameters())


def wan_in(dtype):
    return comfy.sd.load_diffusion_model(tiny_file("diffusion_models", "wan_t2v"), model_options={"dtype": dtype})


@check
def every_family_runs_near_its_float_self_and_its_float_self_is_untouched():
    seen = []
    for name, base in families():
        seen.append(name)
        stock = sample(base, name)
        model = patched(base)
        outs = []
        run = run_of(lambda: outs.append(sample(model, name)))  # noqa: B023
        assert run.part == "int8", run
        states = {line.state for line in report(model).lines}
        assert {"on"} <= states <= {"on", "refused", "off", "unable"}, (name, report(model).text())
        worst = report(model).worst
        assert 0.001 < worst.error < 0.05, (name, worst)
        near(outs[0], stock, 0.15)
        assert torch.equal(sample(base, name), stock), name
        unload()
        assert is_clean(base), name
    assert {"sd15", "sdxl", "sd3", "wan_t2v"} <= set(seen), seen


@check
def unloaded_everything_is_back_as_it_was():
    base, stock = wan()
    unload()
    before = state_of(base)
    model = patched(base)
    for _ in range(2):
        near(sample(model), stock)
        assert not is_clean(base)
        unload()
        same(before, state_of(base))
    assert torch.equal(sample(base), stock)
    unload()
    same(before, state_of(base))


@check
def a_limit_that_no_layer_keeps_leaves_the_model_bit_for_bit_and_of_two_nodes_the_second_counts():
    base, stock = wan()
    for model in (patched(base, 1e-6), patched(patched(base), 1e-6)):
        with runs() as found:
            assert torch.equal(sample(model), stock)
        assert "no linear layer runs in int8" in found[0].warnings[0], found[0].warnings
        assert line_of(model).state == "refused"
    model, text = node(patched(base, 1e-6), include="diffusion_model.blocks, img_mpl")
    assert "no linear layer matches img_mpl; layers of this model are, for example, blocks." in text, text
    near(sample(model), stock)


@check
def half_precision_weights_are_taken_without_casting_them():
    base = wan_in(torch.float16)
    assert layer(base).weight.dtype == torch.float16
    stock = sample(base)
    model = patched(base)
    near(sample(model), stock)
    assert int8_weight(model).dtype == torch.float16
    assert "forward_comfy_cast_weights" in vars(layer(model))
    unload()
    assert "forward_comfy_cast_weights" not in vars(layer(base))
    assert torch.equal(sample(base), stock)


@check
def float8_weights_are_rounded_to_integers_of_the_same_bytes():
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        base = wan_in(dtype)
        stock = sample(base)
        unload()
        before = state_of(base)
        model = patched(base)
        near(sample(model), stock)
        line = line_of(model)
        assert line.format == str(dtype).removeprefix("torch."), line
        assert line.float_bytes == int8_weight(model).matrix.codes.numel(), line
        unload()
        same(before, state_of(base))
        assert torch.equal(sample(base), stock)
        near(sample(load_lora(model)), sample(load_lora(base)))


@check
def a_weight_that_cannot_return_to_its_device_is_cast_by_the_host():
    base, stock = wan()
    model = patched(base)
    near(sample(model), stock)
    module, loaded = layer(model), model.model.model_loaded_weight_memory
    assert int8_weight(model).layer.source.stays_in_host_memory(module)
    binding(model).detach(network(model))
    module.comfy_cast_weights = True
    assert model.model.model_lowvram
    assert loaded - model.model.model_loaded_weight_memory == module.weight.numel() * module.weight.element_size()
    unload()
    assert not model.model.model_lowvram
    assert not hasattr(module, "prev_comfy_cast_weights")
    assert torch.equal(sample(base), stock)


@check
def a_model_that_is_loaded_dynamically_is_loaded_once_more_as_a_whole():
    base, stock = wan()
    if not hasattr(base, "cached_patcher_init"):
        raise Skip("this host has no dynamic loading")
    kind = type(base)
    with replaced(kind, "is_dynamic", lambda self: self.model is base.model):
        model, again = patched(base), patched(load_lora(base))
        assert model.model is not base.model
        assert again.model is model.model, "once, and no more"
        assert patched(base, include="nothing").model is base.model
        unknown = base.clone()
        unknown.cached_patcher_init = None
        patched(unknown)  # the other model is known already
        stranger = load_model("wan_t2v")
        stranger.cached_patcher_init = None
        with replaced(kind, "is_dynamic", lambda self: True):
            error = raises(RuntimeError, lambda: patched(stranger))
        assert "--disable-dynamic-vram" in str(error), error
    near(sample(model), stock)
    near(sample(again), sample(load_lora(base)))
    assert torch.equal(sample(base), stock)


@check
def the_memory_estimate_of_a_live_model_is_that_of_the_model():
    def estimated(model):
        return [shape for shape, _ in followed(model, "wan_t2v").calls]

    base, stock = wan()
    expected = estimated(base)
    model = patched(base)
    near(sample(model), stock)
    codes = int8_weight(model).matrix.codes.clone()
    assert estimated(model) == estimated(base) == expected
    assert torch.equal(int8_weight(model).matrix.codes, codes)
    near(sample(model), stock)
