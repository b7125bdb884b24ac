"""Pascal Int8 Linear inside the host: see ``comfy_checks``."""

from __future__ import annotations

import gc

import comfy.hooks
import comfy.model_management as host
import comfy.patcher_extension as extension
import comfy.sd
import comfy.utils
import comfy.weight_adapter
import torch
from comfy_checks import Skip, check, log_lines, pack, raises, replaced, run_checks, runs, unload
from comfy_ffn_checks import patched as chunked
from comfy_ffn_checks import sample
from comfy_inproc import LATENTS, TINY_MODELS, load_lora, load_model, load_pack

NODE = load_pack()["PascalInt8Linear"]
KEY = "diffusion_model.blocks.0.ffn.0.weight"
NEAR = 0.05  # of the result's size: what a hundred layers that err by 1 % each make of it at most

__all__ = ["run_checks"]


def node(model, max_error=0.05, include="", exclude="", weights="host", int8_files="auto"):
    return NODE().patch(model, max_error, include, exclude, weights, int8_files, "1")


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
    return pack("core.int8.quantize").quantize_rows(weight, like.matrix.rotation).codes


def far(ours, exact):
    return float((ours - exact).float().norm() / exact.float().norm())


def near(ours, exact, limit=NEAR):
    error = far(ours, exact)
    assert 0 < error < limit, error


def state_of(model):
    """Of each parameter: the object, its storage and its values; and what else could be left in a module."""
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


def wan():
    base = load_model("wan_t2v")
    return base, sample(base)


@check
def every_family_runs_near_its_float_self_and_its_float_self_is_untouched():
    for name in LATENTS:
        try:
            base = load_model(name)
        except FileNotFoundError:
            continue  # this host does not know it
        stock = sample(base, name)
        model = patched(base)
        with runs() as found:
            ours = sample(model, name)
        (run,) = found
        assert run.part == "int8", run
        states = {line.state for line in report(model).lines}
        assert "int8" in states, (name, report(model).text())
        assert states <= {"int8", "float", "left", "cannot be"}, (name, report(model).text())
        worst = report(model).worst
        assert 0.001 < worst.error < 0.05, (name, worst)
        near(ours, stock, 0.15)
        assert torch.equal(sample(base, name), stock), name
        unload()
        assert is_clean(base), name
        gc.collect()


@check
def what_was_measured_once_is_only_rounded_again():
    base, stock = wan()
    model = patched(base)
    first = sample(model)
    near(first, stock)
    measure, made = pack("core.int8.layer").errors_by_rotation, []
    with replaced(pack("core.int8.layer"), "errors_by_rotation", lambda *args: made.append(1) or measure(*args)):
        assert torch.equal(sample(base), stock)
        assert torch.equal(sample(model), first)
        unload()
        assert torch.equal(sample(model), first)
        again = patched(base)  # the node is executed again
        assert torch.equal(sample(again), first)
        assert not made
        other = patched(base, 0.04)
        assert torch.equal(sample(other), first)
        assert made


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
def a_limit_that_no_layer_keeps_leaves_the_model_bit_for_bit():
    base, stock = wan()
    model = patched(base, 1e-6)
    with runs() as found:
        assert torch.equal(sample(model), stock)
    assert "no linear layer runs in int8" in found[0].warnings[0], found[0].warnings
    assert line_of(model).state == "float"


@check
def blocks_and_layers_are_chosen_by_name():
    base, stock = wan()
    for include, exclude, expected in (
        ("blocks.0", "", {"blocks.0"}),
        ("*.ffn.*", "", {"blocks.0", "blocks.1"}),
        ("", "blocks.0, *.self_attn.*", {"blocks.1"}),
    ):
        model = patched(base, include=include, exclude=exclude)
        near(sample(model), stock)
        names = {line.name for line in report(model).of("int8")}
        assert {".".join(name.split(".")[:2]) for name in names} == expected, names
        assert not exclude or not any("self_attn" in name for name in names), names


@check
def a_lora_stays_in_float_beside_the_weight_before_and_after_and_while_live():
    base, stock = wan()
    with_lora = load_lora(base, "lora_wan_t2v")
    expected = sample(with_lora)
    assert far(expected, stock) > 0.1
    unload()
    plain = layer(base).weight.detach().clone()
    live = patched(base)
    near(sample(live), stock)
    codes = int8_weight(live).matrix.codes.clone()
    assert torch.equal(codes, rounded(plain, int8_weight(live)))
    for model in (patched(with_lora), load_lora(patched(base), "lora_wan_t2v"), load_lora(live, "lora_wan_t2v")):
        near(sample(model), expected)
        assert torch.equal(int8_weight(model).matrix.codes, codes), "the weight is rounded without the LoRA"
        assert int8_weight(model).branch is not None
        assert line_of(model).why == "LoRA of rank 4 beside it in float", line_of(model)
        near(sample(live), stock)
        assert torch.equal(sample(base), stock)
    unload()
    assert torch.equal(sample(with_lora), expected)


@check
def loras_add_up_and_their_strengths_may_change_between_runs():
    base, _ = wan()
    for strengths in ((0.5,), (1.0, -0.5), (0.25, 0.0, 0.5)):
        with_lora = base
        for strength in strengths:
            with_lora = load_lora(with_lora, "lora_wan_t2v", strength)
        expected = sample(with_lora)
        model = patched(with_lora)
        near(sample(model), expected)
        used = [strength for strength in strengths if strength]
        assert line_of(model).why == f"LoRA of rank {4 * len(used)} beside it in float", (strengths, line_of(model))


@check
def chained_twice_the_second_node_counts():
    base, stock = wan()
    model = patched(patched(base), 1e-6)
    assert torch.equal(sample(model), stock)
    model = patched(patched(base, 1e-6))
    near(sample(model), stock)


def adapters():
    """Patches of the layer's weight that are no plain LoRA, by the word that the report has for them."""
    generator = torch.Generator().manual_seed(5)

    def noise(*shape, size=0.1):
        return torch.randn(shape, generator=generator) * size

    rows, columns = 512, 256
    kinds = comfy.weight_adapter
    up, down = noise(rows, 4), noise(4, columns)
    lora = kinds.LoRAAdapter(set(), (up, down, 4.0, None, None, None))
    dora = kinds.LoRAAdapter(set(), (up, down, 4.0, None, torch.ones(rows, 1), None))
    loha = kinds.LoHaAdapter(
        set(), (up, down, 4.0, noise(rows, 4, size=1), noise(4, columns, size=1), None, None, None)
    )
    return {
        "diff": ({KEY: (noise(rows, columns, size=0.02),)}, {}),
        "dora": ({KEY: dora}, {}),
        "loha": ({KEY: loha}, {}),
        "lora that scales the weight": ({KEY: lora}, {"strength_model": 0.5}),
        "lora of a part of the weight": (
            {(KEY, (0, 0, 128)): kinds.LoRAAdapter(set(), (up[:128], down, 4.0, None, None, None))},
            {},
        ),
    }


@check
def any_other_patch_is_rounded_with_the_weight_and_said():
    base, stock = wan()
    assert tuple(layer(base).weight.shape) == (512, 256)
    for word, (patches, options) in adapters().items():
        other = base.clone()
        assert other.add_patches(patches, **options), word
        expected = sample(other)
        assert far(expected, stock) > 1e-3, word
        whole = layer(other).weight.detach().clone()
        model = patched(other)
        near(sample(model), expected)
        weight = int8_weight(model)
        assert weight.branch is None, word
        assert torch.equal(weight.matrix.codes, rounded(whole, weight)), word
        assert line_of(model).why == f"rounded with its patch ({word})", line_of(model)
        mixed = load_lora(other, "lora_wan_t2v")
        expected = sample(mixed)
        near(sample(patched(mixed)), expected)


@check
def weights_that_stay_in_host_memory_and_are_patched_in_each_call_are_followed():
    base, stock = wan()
    diff = base.clone()
    diff.add_patches(adapters()["diff"][0])
    for other, words in (
        (base, ""),
        (load_lora(base, "lora_wan_t2v"), "LoRA of rank 4 beside it in float"),
        (diff, "rounded with its patch (diff)"),
    ):
        expected = sample(other)
        model = patched(other)
        near(sample(model), expected)
        for _ in range(2):
            unload()
            model.patch_model(host.get_torch_device(), lowvram_model_memory=1)
            assert layer(model).comfy_cast_weights is False
            x = torch.randn(1, 192, 256, generator=torch.Generator().manual_seed(1))
            ours = layer(model)(x)
            assert line_of(model).why == words, line_of(model)
            model.eject_model()
            assert layer(model).comfy_cast_weights is True
            functions = [*layer(model).weight_function, getattr(layer(model), "weight_lowvram_function", None)]
            assert any(functions) == bool(words), functions
            near(ours, layer(model)(x))
            model.inject_model()
            assert torch.equal(layer(model)(x), ours)
            model.unpatch_model(host.get_torch_device())
            assert is_clean(base)
        near(sample(model), expected)
    assert torch.equal(sample(base), stock)


@check
def half_precision_weights_are_taken_without_casting_them():
    path = str(TINY_MODELS / "diffusion_models" / "tiny_wan_t2v.safetensors")
    base = comfy.sd.load_diffusion_model(path, model_options={"dtype": torch.float16})
    assert layer(base).weight.dtype == torch.float16
    stock = sample(base)
    model = patched(base)
    near(sample(model), stock)
    assert int8_weight(model).dtype == torch.float16
    assert layer(model).comfy_cast_weights is False
    unload()
    assert layer(base).comfy_cast_weights is True
    assert torch.equal(sample(base), stock)


@check
def float8_weights_are_left_and_said():
    path = str(TINY_MODELS / "diffusion_models" / "tiny_wan_t2v.safetensors")
    base = comfy.sd.load_diffusion_model(path, model_options={"dtype": torch.float8_e4m3fn})
    stock = sample(base)
    model, text = node(base)
    assert "its weight is float8_e4m3fn" in text, text
    with runs() as found:
        assert torch.equal(sample(model), stock)
    assert "no linear layer runs in int8: its weight is float8_e4m3fn" in found[0].warnings[0], found[0].warnings


@check
def a_model_that_is_saved_or_merged_while_it_is_live_has_its_float_weights():
    base, _ = wan()
    with_lora = load_lora(base, "lora_wan_t2v")
    sample(with_lora)
    expected = {name: values.clone() for name, values in with_lora.model_state_dict().items()}
    model = patched(with_lora)
    sample(model)
    for found in (model.model_state_dict(), model.model.state_dict()):
        assert sorted(found) == sorted(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert not any(isinstance(values, pack("core.int8.weight").Int8Weight) for values in found.values())
    saved = model.model_state_dict_for_saving() if hasattr(model, "model_state_dict_for_saving") else {}
    assert all(torch.equal(torch.as_tensor(saved[name].to("cpu")), expected[name]) for name in saved if name == KEY)
    int8_weight(model)
    merged = base.clone()
    merged.add_patches(model.get_key_patches("diffusion_model."), 0.5, 0.5)
    plain = base.clone()
    unload()
    plain.add_patches(with_lora.get_key_patches("diffusion_model."), 0.5, 0.5)
    assert torch.equal(sample(merged), sample(plain))


@check
def hooks_that_patch_weights_during_the_run_are_followed():
    base, stock = wan()
    lora = comfy.utils.load_torch_file(str(TINY_MODELS / "loras" / "tiny_lora_wan_t2v.safetensors"))
    group = comfy.hooks.create_hook_lora(lora, 1.0, 0.0)

    def hooked(model):
        from comfy_ffn_checks import conditioning

        model = model.clone()
        texts = [conditioning("wan_t2v", seed) for seed in (1, 2)]
        texts = [comfy.hooks.set_hooks_for_conditioning(text, group) for text in texts]
        latent = torch.zeros(1, *LATENTS["wan_t2v"])
        noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(0))
        return comfy.sample.sample(model, noise, 1, 1.0, "euler", "simple", *texts, latent, disable_pbar=True, seed=0)

    expected = hooked(base)
    assert far(expected, stock) > 0.1
    near(hooked(patched(base)), expected)
    assert torch.equal(sample(base), stock)


@check
def the_hosts_count_of_loaded_memory_is_the_same():
    base, _ = wan()
    sizes = base.model_size(), base.loaded_size()
    assert sizes[1] > 0
    model = patched(base)
    sample(model)
    assert (model.model_size(), model.loaded_size()) == sizes
    assert model.clone().model_size() == sizes[0]
    unload()
    assert base.loaded_size() == 0


@check
def a_weight_that_cannot_return_to_its_device_is_cast_by_the_host():
    base, stock = wan()
    model = patched(base)
    near(sample(model), stock)
    module, loaded = layer(model), model.model.model_loaded_weight_memory
    state = int8_weight(model).state
    assert state.source.stays_in_host_memory(module)
    binding(model).detach(network(model))
    module.comfy_cast_weights = True
    assert model.model.model_lowvram
    assert loaded - model.model.model_loaded_weight_memory == module.weight.numel() * module.weight.element_size()
    unload()
    assert not model.model.model_lowvram
    assert not hasattr(module, "prev_comfy_cast_weights")
    assert torch.equal(sample(base), stock)


@check
def a_clone_that_is_collected_while_live_leaves_nothing():
    base, stock = wan()
    model = patched(base)
    near(sample(model), stock)
    assert not is_clean(base)
    del model
    gc.collect()
    assert is_clean(base)
    assert torch.equal(sample(base), stock)


@check
def an_exception_in_the_middle_leaves_a_clean_model():
    base, stock = wan()
    model = patched(base)

    def accident(executor, *args, **kwargs):
        raise ValueError("an accident")

    broken = model.clone()
    broken.add_wrapper_with_key(extension.WrappersMP.DIFFUSION_MODEL, "accident", accident)
    raises(ValueError, lambda: sample(broken))
    assert torch.equal(sample(base), stock)
    assert is_clean(base)
    near(sample(model), stock)


@check
def cancel_during_a_measurement_decides_nothing():
    base, stock = wan()
    model = patched(base)
    measure = pack("core.int8.layer").errors_by_rotation
    count = []

    def cancelled(*args):
        count.append(1)
        if len(count) == 3:
            host.interrupt_current_processing()
            host.throw_exception_if_processing_interrupted()
        return measure(*args)

    with replaced(pack("core.int8.layer"), "errors_by_rotation", cancelled):
        raises(host.InterruptProcessingException, lambda: sample(model))
    host.interrupt_current_processing(False)
    assert torch.equal(sample(base), stock)
    with runs() as found:
        near(sample(model), stock)
    assert not found[0].warnings or "slower" in found[0].warnings[0], found[0].warnings
    assert not report(model).count("waiting")


@check
def eject_twice_is_harmless_and_inject_twice_never_stacks():
    base, stock = wan()
    model = patched(base)
    first = sample(model)
    (injection,) = model.injections["pascal_attn_int8"]
    for _ in range(2):
        injection.inject(model)
    assert torch.equal(sample(model), first)
    for _ in range(2):
        injection.eject(model)
    assert is_clean(base)
    assert torch.equal(sample(base), stock)


@check
def with_chunked_feed_forward_layers_in_both_orders():
    base, stock = wan()
    alone = sample(patched(base))
    for model in (patched(chunked(base)), chunked(patched(base))):
        for _ in range(2):
            with runs() as found:
                ours = sample(model)
            near(ours, stock)
            assert far(ours, alone) < 0.01
            notes = {run.part: run.notes[0] for run in found}
            assert notes["feed-forward"].startswith("2 of 2 feed-forward modules chunked"), notes
            assert "linear layers in int8" in notes["int8"], notes
    assert torch.equal(sample(base), stock)


@check
def a_copy_for_another_device_has_layers_of_its_own():
    base, stock = wan()
    if not hasattr(base, "deepclone_multigpu"):
        raise Skip("this host has no copies for several devices")
    model = patched(base)
    near(sample(model), stock)
    copy = model.deepclone_multigpu()
    assert copy.model is not model.model
    near(sample(copy), stock)
    near(sample(model), stock)
    unload()
    assert is_clean(model)
    assert is_clean(copy)


@check
def the_record_and_the_text_say_what_happened():
    base, _ = wan()
    model, text = node(base)
    assert "0 of 20 linear layers in int8; 20 not measured yet" in text, text
    with runs() as found, log_lines() as lines:
        sample(model)
    (run,) = found
    assert run.notes[0].startswith("20 of 20 linear layers in int8, not exact: relative error per layer"), run.notes
    assert "the float ones in host memory" in run.notes[0], run.notes
    assert sum("256 -> 512, error" in note for note in run.notes) == 2, run.notes
    assert any("20 of 20 linear layers in int8" in line for line in lines), lines
    text = node(base)[1]
    assert "20 of 20 linear layers in int8, not exact" in text, text
    assert NODE.DESCRIPTION.startswith(
        "Not exact: typical relative error per layer about 1 %, measured on your model in the report."
    )
