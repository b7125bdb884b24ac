"""Every model family: taken and right, by every door; and a table that would notice if they were not."""

import diffusers
import pytest
from attn_support.randomness import some

from pascal_attn_core.diffusers import sites as _diffusers_sites
from tools.families import NotInThisVersion, families
from tools.families import __main__ as command
from tools.families import proof as proving
from tools.families.without import unknown_models

FAMILIES = {family.name: family for family in families()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", some(FAMILIES, 12))
def test_every_call_of_the_family_is_taken_and_right(name):
    try:
        proof = proving.prove(FAMILIES[name])
    except NotInThisVersion as missing:
        pytest.skip(f"diffusers {diffusers.__version__}: {missing}")
    assert not proof.problems, proof
    assert proof.made or proof.taken or proof.left_alone


def test_every_model_class_of_diffusers_is_in_the_table():
    if not diffusers.__version__.startswith("0.42."):
        pytest.skip("the table is kept for the newest version it was made with, 0.42")
    assert list(unknown_models()) == []


def test_families_have_names_of_their_own():
    assert len(FAMILIES) == len(families())


FLUX = FAMILIES["FluxTransformer2DModel"]
LUMINA = FAMILIES["LuminaNextDiT2DModel"]
RIGHT = proving.redirecting.sdpa


def slightly_wrong(*args, **kwargs):
    return RIGHT(*args, **kwargs) * (1 + 1e-4)


@pytest.mark.parametrize(
    ("wrong", "family"), [(proving.uniform, FLUX), (slightly_wrong, FLUX), (proving.maskless, LUMINA)]
)
def test_attention_that_is_wrong_is_a_problem(wrong, family, monkeypatch):
    monkeypatch.setattr(proving.redirecting, "sdpa", wrong)
    assert any("error" in problem for problem in proving.prove(family).problems)


def test_attention_that_silently_stays_torchs_is_a_problem(monkeypatch):
    missed = []

    def misses_one(models):
        sites = list(_diffusers_sites.sites_of(models))
        missed.append(sites.pop())
        return iter(sites)

    monkeypatch.setattr("pascal_attn_core.diffusers.sites_of", misses_one)
    assert any("calls made, taken" in problem for problem in proving.prove(FLUX).problems)
    assert missed


def test_something_left_behind_is_a_problem(monkeypatch):
    monkeypatch.setattr("pascal_attn_core.diffusers.release_module", lambda module, redirect: [])
    assert "what was there before is not back" in proving.prove(FLUX).problems


def test_the_command_writes_a_table_and_keeps_the_runs_of_other_versions(tmp_path, capsys, monkeypatch):
    stem = tmp_path / "table"
    assert command.main(["fluxtransformer2d", "--out", str(stem)]) == 0
    monkeypatch.setattr(command, "versions", lambda *others: {"diffusers": "0.1.0"})
    assert command.main(["FluxTransformer2D", "UNet1DModel", "--out", str(stem)]) == 0
    table = stem.with_suffix(".md").read_text(encoding="utf-8")
    assert "diffusers 0.1.0 |" in table
    assert "| FluxTransformer2DModel | 2 | - | 2 |" in table
    assert "SelfAttention1d: a softmax of its own" in capsys.readouterr().out


def test_the_command_fails_when_something_is_not_proven(monkeypatch, capsys):
    monkeypatch.setattr(proving.redirecting, "sdpa", proving.uniform)
    assert command.main(["FluxTransformer2D"]) == 1
    assert "NOT PROVEN FluxTransformer2DModel: error" in capsys.readouterr().out


def test_a_family_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["Nonsense"])
    assert "Nonsense" in capsys.readouterr().err
