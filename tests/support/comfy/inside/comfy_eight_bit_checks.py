"""Pascal 8-Bit inside the host, attention above all, by the operators that define it: see ``comfy_checks``."""

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
