"""Pascal FFN Chunking inside the host: see ``comfy_checks``."""

import contextlib

from comfy_checks import check, close, replaced, run_of, unload
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
