"""Pascal Memory Estimate inside the host: see ``comfy_checks``."""

import asyncio
import re
from collections import Counter

import torch
from comfy_checks import check, pack, replaced
from comfy_inproc import LATENTS, conditioning, families, load_checkpoint, load_lora, load_model, load_pack, sample

NODE = load_pack()["PascalMemoryEstimate"]
OVERRIDE = "optimized_attention_override"
SINGLE = ("flux", "hunyuan_video")  # sampled with cfg 1


def real_calls(model, name, cfg):
    """Shapes of the attention and feed-forward calls of one real evaluation, as an override and hooks see them."""
    layout, trace = pack("comfy.layout"), pack("estimate.trace")
    attention, ffn = [], []

    def override(func, *args, **kwargs):
        call = layout.HostCall.of(args, kwargs)
        shapes = (tuple(tensor.shape) for tensor in call.given[:3])
        attention.append(trace.AttentionShape(*shapes, call.given.query.dtype, call.given.attn_mask is not None))
        return func(*args, **kwargs)

    model = model.clone()
    model.model_options["transformer_options"][OVERRIDE] = override
    find = pack("core.ffn.find").find_ffn
    hooks = [
        module.register_forward_hook(lambda module, args, out, name=name: ffn.append((name, tuple(args[0].shape))))
        for name, module, state, _ in find(model.model.diffusion_model)
        if not state
    ]
    try:
        sample(model, name, cfg=cfg)
    finally:
        for hook in hooks:
            hook.remove()
    return attention, ffn


def followed(model, name, copies=1, shape=None):
    samples = torch.zeros(1, *LATENTS[name]) if shape is None else torch.zeros(shape)
    latent = pack("estimate.trace").Latent.of(model, {"samples": samples})
    found = pack("memory_estimate").follow(model, latent, conditioning(name), copies)
    assert not isinstance(found, str), found
    return found


@check
def every_family_is_followed_as_it_really_runs():
    for name, model in families():
        copies = 1 if name in SINGLE else 2
        attention, ffn = real_calls(model, name, 1.0 if copies == 1 else 3.0)
        call, trace = followed(model, name, copies), pack("estimate.trace")
        found = call.of(trace.AttentionShape)
        assert found == attention, (name, Counter(attention) - Counter(found))
        assert [(shape.name, shape.shape) for shape in call.of(trace.FfnShape)] == ffn, name


@check
def memory_of_a_feed_forward_call_and_of_a_whole_evaluation_is_what_they_really_take():
    trace, memory = pack("estimate.trace"), pack("core.observe.memory")
    for name, model in families("sd15", "wan_t2v", "flux", "ltxv"):
        call, measured = followed(model, name), []
        largest = max(call.of(trace.FfnShape), key=lambda shape: shape.extra_bytes)
        module = model.model.diffusion_model.get_submodule(largest.name)
        real = memory.measure(module, torch.randn(largest.shape, dtype=largest.dtype))
        assert largest.extra_bytes == real.extra_bytes, (name, largest, real.extra_bytes)
        if name == "ltxv":
            continue
        # Attention is replaced by an empty result in both.
        layers = [live + shape.extra_bytes for shape, live in call.calls if isinstance(shape, trace.FfnShape)]
        peak = max([call.other_bytes, *layers])
        silent = pack("core.patching.interception").SdpaMode(trace.Tracer().attend)

        def wrapped(executor, *args, measured=measured, silent=silent, **kwargs):
            with memory.PeakMemory("cpu") as peak, silent:
                out = executor(*args, **kwargs)
            measured.append(peak.peak_bytes)
            return out

        model.add_wrapper_with_key("apply_model", "peak", wrapped)
        sample(model, name)
        assert abs(peak / measured[0] - 1) < 0.15, (name, peak, measured)


@check
def nothing_is_loaded_moved_or_changed():
    base = load_lora(load_model("wan_t2v"))
    state = {name: (value.data_ptr(), value.device, value.dtype) for name, value in base.model.state_dict().items()}
    attributes = {name: dict(vars(module)) for name, module in base.model.named_modules()}
    random = torch.get_rng_state()
    with replaced(base, "patch_model", None), replaced(base, "load", None):
        NODE().estimate(base, {"samples": torch.zeros(1, *LATENTS["wan_t2v"])}, conditioning("wan_t2v"))
    now = {name: (value.data_ptr(), value.device, value.dtype) for name, value in base.model.state_dict().items()}
    assert now == state
    for name, module in base.model.named_modules():
        assert vars(module).keys() == attributes[name].keys(), name
        assert all(vars(module)[key] is value for key, value in attributes[name].items()), name
    assert torch.equal(torch.get_rng_state(), random)
    assert base.loaded_size() == 0


@check
def every_family_has_an_estimate():
    for name, model in families():
        text, saved = NODE().estimate(model, {"samples": torch.zeros(1, *LATENTS[name])}, conditioning(name))
        assert "Counted: the tensors of one model evaluation" in text, (name, text)
        assert saved >= 0.0


@check
def latents_of_video_and_sound_are_packed():
    import nodes

    model = load_model("minimax_h3")
    asyncio.run(nodes.init_builtin_extra_nodes())
    latent = nodes.NODE_CLASS_MAPPINGS["EmptyMiniMaxH3LatentAV"].execute(width=128, height=128, length=22)[0]
    text, *_ = NODE().estimate(model, latent, [[torch.zeros(1, 16, 64), {}]])
    assert "Counted: the tensors of one model evaluation" in text, text
    assert "one prompt at a time" in text, text


@check
def where_it_cannot_be_traced_it_says_so():
    model = load_model("sd15")
    with replaced(type(model.model.diffusion_model), "forward", lambda *args, **kwargs: 1 / 0):
        text, saved = NODE().estimate(model, {"samples": torch.zeros(1, 4, 64, 64)}, conditioning("sd15"))
    assert "no estimate, since the model could not be traced (ZeroDivisionError" in text, text
    assert saved == 0.0


@check
def sizes_lie_on_a_line_through_two_of_them():
    largest = pack("estimate.figures")
    for name, model in families("sd15", "flux", "wan_t2v"):
        for axis in largest.axes_of([(1, *LATENTS[name])], None):
            one, two, third = (axis.sizes[i] for i in (1, 3, 6))
            calls = [followed(model, name, shape=size.shape) for size in (one, two, third)]
            found, real = largest.line_through(one.amount, calls[0], two.amount, calls[1])(third.amount), calls[2]
            assert [shape for shape, _ in found.calls] == [shape for shape, _ in real.calls], (name, axis.name)
            pairs = zip([live for _, live in found.calls], [live for _, live in real.calls])
            for ours, theirs in ((found.other_bytes, real.other_bytes), *pairs):
                assert abs(ours - theirs) <= 0.01 * theirs + 65536, (name, axis.name, ours, theirs)


@check
def the_largest_is_named_with_the_vae():
    model, _, vae = load_checkpoint()
    text, _ = NODE().estimate(model, {"samples": torch.zeros(1, 4, 16, 16)}, conditioning("sd15"), vae=vae)
    assert "The largest size that fits into" in text, text
    assert "resolution (now 128 x 128): as ComfyUI is" in text, text
    assert "batch (now batch of 1):" in text, text
    assert "decoding in one piece, by ComfyUI's own estimate of its VAE: " in text, text


@check
def guidance_doubles_the_batch_and_a_prompt_is_read():
    model = load_model("sd15")
    latent = {"samples": torch.zeros(1, 4, 16, 16)}
    both = NODE().estimate(model, latent, conditioning("sd15"))[0]
    one = NODE().estimate(model, latent, conditioning("sd15"), guidance=False)[0]
    assert "Attention: 8 calls, nothing without the patch" in both, both
    assert "the largest 2 x 8 heads x 256 queries x 256 keys of 40 in float32" in both, both
    assert "the largest 1 x 8 heads" in one, one
    longer = [[tensor.repeat(1, 60, 1), extra] for tensor, extra in conditioning("sd15")]
    peaks = [re.search("Peak .*", text).group() for text in (both, NODE().estimate(model, latent, longer)[0])]
    assert peaks[0] != peaks[1], peaks
