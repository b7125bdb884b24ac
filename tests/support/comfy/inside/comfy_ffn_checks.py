"""Pascal FFN Chunking inside the host: see ``comfy_checks``."""

import contextlib

import comfy.model_management as host
from comfy_checks import check, close, raises, replaced, run_of, runs, unload
from comfy_inproc import families, load_lora, load_pack, sample, wan

NODE = load_pack()["PascalFFNChunking"]
SMALL = 0.02  # MiB: everything is chunked as finely as it may be


def patched(model, budget=SMALL, min_tokens=2):
    return NODE().patch(model, budget, min_tokens, "1")[0]


def ffn(model):
    return model.model.diffusion_model.blocks[0].ffn


@contextlib.contextmanager
def tokens_of(model):
    """The tokens of each call of the first layer in the first feed-forward module that has data."""
    layer, found = ffn(model)[0], []
    kind, forward = type(layer), type(layer).forward

    def counted(self, *args, **kwargs):
        if self is layer:
            found.append(args[0].shape[-2])
        return forward(self, *args, **kwargs)

    counted.__module__ = forward.__module__  # the host's own still
    with replaced(kind, "forward", counted):
        yield found


def chunks(model, stock=None):
    """How many slices one run made of a call; its result is compared with ``stock``."""
    with tokens_of(model) as found:
        out = sample(model)
    if stock is not None:
        close(out, stock)
    assert sum(found) == 192, found
    return len(found)


def is_clean(model):
    return not any("forward" in vars(module) for module in model.model.modules())


@check
def every_family_is_chunked_and_exact():
    for name, base in families():
        stock = sample(base, name)
        model = patched(base)
        run = run_of(lambda: sample(model, name), stock)  # noqa: B023
        assert run.part == "feed-forward", run
        binding = model.injections["pascal_attn_ffn"][0].inject.__self__.binding
        report = binding.report(model.model.diffusion_model)
        # no picture is given, and two layers of text are two tokens
        small = ("img_emb", "txtfusion.layerwise_blocks")
        states = {line.state for line in report.lines if not line.name.startswith(small)}
        assert states - {"unable"} == {"on"}, (name, report.text())
        assert ("unable" in states) == (name in ("flux", "hunyuan_video")), name
        assert not run.warnings, run.warnings
        unload()
        assert is_clean(base), name


@check
def clones_keep_their_own_budgets_and_the_base_is_whole():
    base, stock = wan()
    fine, coarse = patched(base, SMALL), patched(base, 0.42)
    for _ in range(2):
        assert chunks(fine, stock) == 3
        assert chunks(coarse, stock) in (2, 3)
        assert chunks(base, stock) == 1
        assert is_clean(base)


@check
def a_lora_works_before_after_and_while_it_is_live():
    base, stock = wan()
    with_lora = load_lora(base)
    expected = sample(with_lora)
    assert float((expected - stock).abs().max()) > 1e-2
    live = patched(base)
    assert chunks(live, stock) == 3
    for model in (patched(with_lora), load_lora(patched(base)), load_lora(live)):
        assert chunks(model, expected) == 3
        assert chunks(base, stock) == 1


@check
def unloaded_it_is_gone_and_loaded_it_is_back_under_the_same_names():
    base, stock = wan()
    names = sorted(base.model_state_dict())
    model = patched(base)
    for _ in range(2):
        assert chunks(model, stock) == 3
        assert "forward" in vars(ffn(model))
        assert sorted(model.model_state_dict()) == sorted(base.model.state_dict()) == names
        unload()
        assert is_clean(base)


@check
def cancel_inside_a_layer_is_no_refusal():
    base, stock = wan()
    model = patched(base)
    ops = type(ffn(base)[0])
    forward = ops.forward

    def cancelled(self, x, *args, **kwargs):
        if self is ffn(base)[0]:
            host.interrupt_current_processing()
            host.throw_exception_if_processing_interrupted()
        return forward(self, x, *args, **kwargs)

    with replaced(ops, "forward", cancelled):
        raises(host.InterruptProcessingException, lambda: sample(model))
    host.interrupt_current_processing(False)
    assert chunks(base, stock) == 1
    assert is_clean(base)
    with runs() as found:
        assert chunks(model, stock) == 3
    assert not found[0].warnings


@check
def another_packs_forward_patch_is_called():
    base, stock = wan()
    key, sizes = "diffusion_model.blocks.0.ffn.forward", []

    def with_patch(model, factor):
        model = model.clone()
        below = model.get_model_object(key)
        model.add_object_patch(key, lambda x: sizes.append(x.shape[-2]) or below(x) * factor)
        return model

    expected = sample(with_patch(base, 0.5))
    assert float((expected - stock).abs().max()) > 1e-3
    for model in (patched(with_patch(base, 0.5)), with_patch(patched(base), 0.5)):
        del sizes[:]
        close(sample(model), expected)
        assert sizes[-1] == 192  # the code sees all tokens
        assert chunks(base, stock) == 1
    assert chunks(patched(base), stock) == 3, "another clone's patch must not remain below ours"
