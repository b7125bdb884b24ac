"""Every autoencoder of diffusers in bands, as docs/vae-families.md says."""

import math
from functools import cache

import pytest
import torch

pytest.importorskip("diffusers")

from attn_support.randomness import some

from tools.families.family import Family, NotInThisVersion
from tools.vae_table import PAGE, families, rows


@cache
def stated() -> dict[tuple[str, str], str]:
    """(autoencoder, method) -> what the page says."""
    lines = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| Auto")]
    return {(line[0].removeprefix("| "), line[1]): line[2] for line in lines}


@pytest.mark.parametrize("family", some(families(), 20), ids=lambda family: family.name)
@torch.no_grad()
def test_an_autoencoder(family: Family) -> None:
    try:
        found = list(rows(family))
    except NotInThisVersion:
        pytest.skip("this diffusers does not have it")
    for row in found:
        assert row.state == stated().get((family.name, row.method), row.state)
        if row.state == "exact":
            own = 0.0 if math.isnan(row.own) else row.own
            assert row.difference <= max(4 * own, 5e-6)


def test_the_page_names_all_of_them() -> None:
    named = {family.name for family in families() if family.name.startswith("Auto")}
    assert {name for name, _ in stated()} == named
