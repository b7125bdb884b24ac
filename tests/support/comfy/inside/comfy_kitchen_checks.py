"""ComfyUI's own quantised files under Pascal 8-Bit, inside the host: see ``comfy_checks``."""

import contextlib
import json
import threading

import comfy.sd
import comfy.utils
import torch
from comfy_checks import Skip, check, pack, runs, unload
from comfy_inproc import load_lora, noise, sample, tiny_file
from comfy_int8_checks import far, near, network, node, patched


def kitchen():
    registry = pack("comfy.comfy_kitchen").registry_of_host()
    if registry is None:
        raise Skip("this host has no comfy_kitchen with int8 layers")
    return registry


def quantised_file(kind, **options):
    """The tiny Wan with the feed-forward layers of its blocks in a format of ComfyUI's files."""
    kitchen()
    try:
        from comfy.quant_ops import QUANT_ALGOS
    except ImportError:
        QUANT_ALGOS = {}
    if kind not in QUANT_ALGOS:
        raise Skip(f"this host does not load {kind}")
    from comfy_kitchen.tensor import QuantizedTensor

    weights = comfy.utils.load_torch_file(tiny_file("diffusion_models", "wan_t2v"))
    for name in [name for name in weights if ".ffn." in name and name.endswith(".weight")]:
        quantized = QuantizedTensor.from_float(
            weights[name].float(), QUANT_ALGOS[kind]["comfy_tensor_layout"], scale="recalculate", **options
        )
        layer = name.removesuffix(".weight")
        weights[name], weights[f"{layer}.weight_scale"] = quantized._qdata, quantized._params.scale
        settings = {"format": kind, **options}
        weights[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
    return comfy.sd.load_diffusion_model_state_dict(weights)


def int8_file(convrot=True):
    """The model file has its weights in int8."""
    model = quantised_file("int8_tensorwise", per_channel=True, convrot=convrot, convrot_groupsize=64)
    assert pack("comfy.comfy_kitchen").int8_layers(network(model)) == 4
    return model


def quantized(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator)
    return codes, torch.rand(rows, 1, generator=generator) * 0.01 + 1e-3


@contextlib.contextmanager
def served():
    kitchen_of_pack = pack("comfy.comfy_kitchen")
    record = kitchen_of_pack.FileLayers(torch.nn.Module(), torch.device("cpu"), "always")
    with kitchen_of_pack.serving(kitchen(), record):
        yield record


@check
def the_integer_part_is_the_hosts_bit_for_bit():
    kitchen()
    import comfy_kitchen

    for rows, count, columns in ((128, 64, 256), (40, 1, 64), (24, 300, 16)):
        codes, _ = quantized(rows, columns)
        x = noise(count, columns)
        x[:, 0] = 127.0  # the largest of each row, whose scale is then 1: results are the integer sums
        x[:, 1:] = x[:, 1:].clamp(-3, 3) * 40
        one = torch.ones(1)
        expected = comfy_kitchen.int8_linear(x, codes, one, None, torch.float32)
        assert torch.equal(expected, expected.round())
        with served() as record:
            ours = comfy_kitchen.int8_linear(x, codes, one, None, torch.float32)
        assert record.calls == 1
        assert torch.equal(ours, expected)


@check
def every_argument_means_the_same():
    kitchen()
    import comfy_kitchen

    codes, scales = quantized(48, 64)
    bias, x, wide = noise(48), noise(2, 33, 64, seed=2), noise(2, 33, 128, seed=3)
    # The host rounds the scaled sum to the result's dtype before it adds the bias, and inputs in their own dtype.
    rounding = {torch.float32: 2e-6, torch.float16: 2e-2, torch.bfloat16: 4e-2}
    calls = 0
    for dtype in rounding:
        for out in rounding:
            for scale in (scales, scales.flatten(), torch.tensor(0.01), torch.tensor([0.01])):
                for given in (
                    {},
                    {"bias": bias},
                    {"convrot": True, "convrot_groupsize": 64},
                    {"input_act": "gelu_tanh"},
                    {"input_act": "none", "bias": bias.to(dtype), "convrot": True, "convrot_groupsize": 16},
                    {"input_act": "swiglu"},
                ):
                    inputs = (wide if given.get("input_act") == "swiglu" else x).to(dtype)
                    expected = comfy_kitchen.int8_linear(inputs, codes, scale, out_dtype=out, **given)
                    with served() as record:
                        ours = comfy_kitchen.int8_linear(inputs, codes, scale, out_dtype=out, **given)
                    calls += record.calls
                    assert ours.dtype == expected.dtype == out
                    assert ours.shape == expected.shape
                    # One code in a thousand may round the other way where the rotation is summed in another order.
                    allowed = max(rounding[dtype], rounding[out], 2e-3 if given else 0)
                    assert far(ours, expected) < allowed, (dtype, out, given, far(ours, expected))
    assert calls == 3 * 3 * 4 * 6


@check
def outside_of_a_run_the_choice_is_as_it_was():
    registry = kitchen()

    def now():
        return registry.get_capable_backend("int8_linear"), list(registry._priority)

    before, elsewhere = now(), []
    with served(), served() as inner:
        assert registry.is_available("pascal")
        assert list(registry._priority) == before[1]
        chosen = threading.Thread(target=lambda: elsewhere.append(registry.get_capable_backend("int8_linear")))
        chosen.start()
        chosen.join()
        assert registry.get_capable_backend("int8_linear") == "pascal"
        assert registry.get_capable_backend("quantize_int8_rowwise") != "pascal"
    assert elsewhere == [before[0]] != ["pascal"]
    assert not inner.calls
    assert now() == before
    with contextlib.suppress(ValueError), served():
        raise ValueError("an accident")
    assert now() == before


@check
def an_int8_file_runs_here_where_it_was_asked_for_and_on_a_cpu_only_then():
    base = int8_file()
    stock = sample(base)
    for choice, calls in (("always", 4), ("auto", 0), ("off", 0)):
        with runs() as found:
            model, text = node(base, int8_files=choice, include="ffn.0")
            ours = sample(model)
        assert "4 linear layers are in int8 in the model's file" in text, text
        assert ("computed here" in text) == bool(calls), text
        assert any(f"{calls} calls by" in note for note in found[0].notes) == bool(calls), found[0].notes
        assert not found[0].warnings, found[0].warnings
        assert far(ours, stock) < (0.01 if calls else 1e-30), far(ours, stock)
        assert torch.equal(sample(base), stock)
    near(sample(patched(base, int8_files="always")), stock)
    last = patched(patched(base, int8_files="always", include="ffn.0"), int8_files="off", include="ffn.0")
    assert torch.equal(sample(last), stock), "the second node counts"


@check
def with_a_lora_on_an_int8_file():
    base = load_lora(int8_file(convrot=False))
    stock = sample(base)
    for model in (
        patched(base, int8_files="always"),
        load_lora(patched(int8_file(convrot=False), int8_files="always")),
    ):
        with runs() as found:
            assert far(sample(model), stock) < 0.01
        assert any("computed here: 4 calls by" in note for note in found[0].notes), found[0].notes
    unload()
    assert torch.equal(sample(base), stock)
