"""Pascal 8-Bit inside the host, attention above all, by the operators that define it: see ``comfy_checks``."""

import itertools

import torch
from comfy_checks import check, pack, run_of, runs, unload
from comfy_inproc import families, load_pack, sample, wan
from comfy_int8_checks import is_clean, near

NODES = load_pack()
OVERRIDE = "optimized_attention_override"
OF_LINEAR = {"max_error": 0.05, "include": "", "exclude": "", "weights": "host", "int8_files": "auto"}


def node(model, attention="always", limit=0.02, linear=True):
    given = {"attention": attention, "attention_max_error": limit, "linear_layers": linear}
    return NODES["Pascal8Bit"]().patch(model, "1", **given, **OF_LINEAR)


def patched(model, attention="always", limit=0.02, linear=True):
    return node(model, attention, limit, linear)[0]


def attention_patch(model):
    inputs = ("auto", 0, 0, "attention override", 0, True)
    return NODES["PascalAttentionPatch"]().patch(model, *inputs)[0]


def layers(model):
    return pack("patches.int8_attention").layers_in(model.model_options["transformer_options"].get(OVERRIDE))


def lines(model):
    return layers(model).report().lines


@check
def defaults_leave_attention_on_a_cpu_to_the_host_and_say_so():
    base, stock = wan()
    model, text = node(base, "auto", linear=False)
    assert "attention stays exact: on a CPU 8 bits are slow" in text, text
    run = run_of(lambda: torch.equal(sample(model), stock))
    assert "attention stays exact" in run.line(), run.line()
    assert torch.equal(sample(model), stock)
    near(sample(patched(base, "off")), stock)


@check
def a_limit_that_no_layer_keeps_leaves_the_model_bit_for_bit():
    base, stock = wan()
    model = patched(base, limit=1e-6, linear=False)
    with runs() as found:
        assert torch.equal(sample(model), stock)
    assert {line.state for line in lines(model)} == {"refused"}
    assert found[0].warnings[0].startswith("no attention layer runs in int8: its error"), found[0].warnings


@check
def beside_pascal_attention_patch_in_either_order():
    base, stock = wan()
    for model in (attention_patch(patched(base, linear=False)), patched(attention_patch(base), linear=False)):
        with runs() as found:
            near(sample(model), stock)
        assert {line.state for line in lines(model)} == {"on"}
        by_part = {run.part: run for run in found}
        assert "attention layers in int8" in by_part["int8"].gains[0]
        assert by_part["diffusion model"].notes == ["every attention call was computed in 8 bits, by Pascal 8-Bit"]
        assert not by_part["diffusion model"].warnings, by_part["diffusion model"].warnings
    model = attention_patch(patched(base, limit=1e-6, linear=False))
    with runs() as found:
        sample(model)
    (run,) = (run for run in found if run.part == "diffusion model")
    assert run.count("taken") == run.count() > 0
    assert any(note.startswith("Pascal 8-Bit (") and "runs before" in note for note in run.notes), run.notes


@check
def of_two_nodes_the_second_counts():
    base, stock = wan()
    near(sample(patched(patched(base, limit=1e-6, linear=False), linear=False)), stock)
    assert torch.equal(sample(patched(patched(base, linear=False), limit=1e-6, linear=False)), stock)


@check
def every_family_runs_both_near_its_float_self_and_its_float_self_is_untouched():
    for name, base in families("sdxl", "flux", "wan_t2v"):
        stock = sample(base, name, steps=2, cfg=3.0)
        model = patched(base)
        outs = []
        run = run_of(lambda: outs.append(sample(model, name, steps=2, cfg=3.0)))  # noqa: B023
        near(outs[0], stock, 0.15)
        assert (run.part, run.is_exact) == ("int8", False)
        assert "linear and attention layers in int8, not exact: relative error per layer" in run.gains[0], run.gains
        assert "s less than in float" in run.gains[0] or "s more than in float" in run.gains[0], run.gains
        found = lines(model)
        assert {line.state for line in found} <= {"on", "refused"}, found
        assert any(line.state == "on" and 0 < line.error < line.worst_row for line in found), (name, found)
        assert torch.equal(sample(base, name, steps=2, cfg=3.0), stock), name
        unload()
        assert is_clean(base), name


def halving(model):
    """A clone with another pack's override that changes the result, in front of the one that it had."""
    clone = model.clone()
    options = clone.model_options["transformer_options"] = dict(clone.model_options["transformer_options"])
    before = options.get(OVERRIDE)

    def override(func, query, key, value, *args, **kwargs):
        call = func if before is None else (lambda *args, **kwargs: before(func, *args, **kwargs))
        return call(query, key, value * 0.5, *args, **kwargs)

    options[OVERRIDE] = override
    return clone


@check
def another_packs_override_counts_in_every_order():
    base, stock = wan()
    changed = sample(halving(base))
    effect = (changed - stock).norm()

    def eight(model):
        return patched(model, linear=False)

    for order in itertools.permutations([halving, eight, attention_patch]):
        model = base
        for put_in in order:
            model = put_in(model)
        far = (sample(model) - changed).norm()
        assert far < 0.2 * effect, ([each.__name__ for each in order], float(far), float(effect))
    model = eight(halving(base))
    sample(model)
    assert {line.state for line in lines(model)} == {"on"}
