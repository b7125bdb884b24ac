"""The page has what the model of a multiprocessor gives."""

from pathlib import Path

import pytest
from attn_support.randomness import some

from tools.models import tensor as model
from tools.models import tensor_table


def test_the_page_has_the_table_that_the_model_gives() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "fused-kernel.md").read_text(encoding="utf-8")
    text = page.partition(tensor_table.BEGIN)[2].partition(tensor_table.END)[0]
    assert tensor_table.made_from() in text, "the kernels have changed: python -m tools.models.tensor_table --write"
    (_, *head_dims), _, *body = ([*map(str.strip, x.split("|")[1:-1])] for x in text.splitlines() if x.startswith("|"))
    found = {label: dict(zip(map(int, head_dims), words)) for label, *words in body}
    assert list(found) == [row.label for row in tensor_table.ROWS]
    for row, head_dim in some(tensor_table.cells(), 50):
        try:
            assert found[row.label][head_dim] == tensor_table.cell(row, head_dim)
        except SystemExit:
            pytest.skip("needs NVRTC 12.6")


def test_machine_code_of_later_cards_is_refused() -> None:
    header = bytearray(64)
    header[0x30] = 90
    with pytest.raises(ValueError, match="must be for sm_70 to sm_89, got sm_90"):
        next(model.paths(bytes(header)))
