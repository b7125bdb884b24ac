"""Patched weights under Pascal 8-Bit, inside the host: see ``comfy_checks``."""

import comfy.hooks
import comfy.sd
import comfy.utils
import comfy.weight_adapter
import torch
from comfy_checks import Skip, check, pack, unload
from comfy_inproc import conditioning, in_host_memory, load_lora, noise, sample, tiny_file, wan
from comfy_int8_checks import KEY, far, int8_weight, is_clean, layer, line_of, near, patched, rounded


def adapters():
    """Patches of the layer's weight that are no plain LoRA, by the word that the report has for them."""
    rows, columns = 512, 256
    kinds = comfy.weight_adapter
    up, down = noise(rows, 4, seed=5) * 0.1, noise(4, columns, seed=6) * 0.1
    more = noise(rows, 4, seed=7), noise(4, columns, seed=8)

    def lora(up, scale=None):
        return kinds.LoRAAdapter(set(), (up, down, 4.0, None, scale, None))

    return {
        "diff": ({KEY: (noise(rows, columns) * 0.02,)}, {}),
        "dora": ({KEY: lora(up, torch.ones(rows, 1))}, {}),
        "loha": ({KEY: kinds.LoHaAdapter(set(), (up, down, 4.0, *more, None, None, None))}, {}),
        "lora that scales the weight": ({KEY: lora(up)}, {"strength_model": 0.5}),
        "lora of a part of the weight": ({(KEY, (0, 0, 128)): lora(up[:128])}, {}),
    }


@check
def a_lora_stays_in_float_beside_the_weight_before_and_after_and_while_live():
    base, stock = wan()
    with_lora = load_lora(base)
    expected = sample(with_lora)
    assert far(expected, stock) > 0.1
    unload()
    plain = layer(base).weight.detach().clone()
    live = patched(base)
    near(sample(live), stock)
    codes = int8_weight(live).matrix.codes.clone()
    assert torch.equal(codes, rounded(plain, int8_weight(live)))
    for model in (patched(with_lora), load_lora(patched(base)), load_lora(live)):
        near(sample(model), expected)
        assert torch.equal(int8_weight(model).matrix.codes, codes), "the weight is rounded without the LoRA"
        assert int8_weight(model).lora is not None
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
            with_lora = load_lora(with_lora, strength)
        expected = sample(with_lora)
        model = patched(with_lora)
        near(sample(model), expected)
        used = [strength for strength in strengths if strength]
        assert line_of(model).why == f"LoRA of rank {4 * len(used)} beside it in float", (strengths, line_of(model))


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
        assert weight.lora is None, word
        assert torch.equal(weight.matrix.codes, rounded(whole, weight)), word
        assert line_of(model).why == f"rounded with its patch ({word})", line_of(model)
        mixed = load_lora(other)
        expected = sample(mixed)
        near(sample(patched(mixed)), expected)


@check
def weights_that_stay_in_host_memory_and_are_patched_in_each_call_are_followed():
    base, stock = wan()
    diff = base.clone()
    diff.add_patches(adapters()["diff"][0])
    for other, words in (
        (base, ""),
        (load_lora(base), "LoRA of rank 4 beside it in float"),
        (diff, "rounded with its patch (diff)"),
    ):
        expected = sample(other)
        model = patched(other)
        near(sample(model), expected)
        for _ in range(2):
            with in_host_memory(model):
                assert "forward_comfy_cast_weights" in vars(layer(model))
                x = noise(1, 192, 256)
                ours = layer(model)(x)
                assert line_of(model).why == words, line_of(model)
                model.eject_model()
                assert layer(model).comfy_cast_weights is True
                functions = [*layer(model).weight_function, getattr(layer(model), "weight_lowvram_function", None)]
                assert any(functions) == bool(words), functions
                near(ours, layer(model)(x))
                model.inject_model()
                assert torch.equal(layer(model)(x), ours)
            assert is_clean(base)
        near(sample(model), expected)
    assert torch.equal(sample(base), stock)


@check
def a_model_that_is_saved_or_merged_while_it_is_live_has_its_float_weights():
    base, _ = wan()
    with_lora = load_lora(base)
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
    lora = comfy.utils.load_torch_file(tiny_file("loras", "lora_wan_t2v"))
    group = comfy.hooks.create_hook_lora(lora, 1.0, 0.0)

    def hooked(model):
        texts = [conditioning("wan_t2v", seed) for seed in (1, 2)]
        texts = [comfy.hooks.set_hooks_for_conditioning(text, group) for text in texts]
        return sample(model, texts=texts)

    expected = hooked(base)
    assert far(expected, stock) > 0.1
    near(hooked(patched(base)), expected)
    assert torch.equal(sample(base), stock)


@check
def a_lora_that_bypasses_the_weight_keeps_its_effect():
    base, stock = wan()
    load = getattr(comfy.sd, "load_bypass_lora_for_models", None)
    if load is None:
        raise Skip("this host has no LoRA that bypasses the weight")
    lora = comfy.utils.load_torch_file(tiny_file("loras", "lora_wan_t2v"))
    expected = sample(load(base, None, lora, 1.0, 0.0)[0])
    assert far(expected, stock) > 0.1
    for model in (patched(load(base, None, lora, 1.0, 0.0)[0]), load(patched(base), None, lora, 1.0, 0.0)[0]):
        near(sample(model), expected)
        assert int8_weight(model).lora is None
    unload()
    assert is_clean(base)
    assert torch.equal(sample(base), stock)
