"""The table ``families.txt``: every model family of diffusers at a tiny size, and the inputs of one call. The other
tables of this folder, which tools beside it read, have its form.

A paragraph of a table is one family::

    SD3Transformer2DModel (SD3.5) like SD3Transformer2DModel (SD3)      class, form, and what it starts from
      dual_attention_layers=(0,) qk_norm='rms_norm'                     arguments of the constructor beyond SIZES
      > hidden_states=normal(2,4,8,8)                                   arguments of forward

Values are literals and calls: of a method of :class:`Draw` or, where it has none of that name, a function of torch.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from .family import Draw, Family, reinitialise

TABLE = Path(__file__).with_name("families.txt")
_HEAD = re.compile(r"(?P<model>\S+)(?: \((?P<variant>[^)]*)\))?(?: like (?P<base>.+))?")


def _resize_without_torchvision(controlnet: Any) -> None:
    """diffusers imports torchvision for one nearest-neighbour resize, where it is installed."""
    module = sys.modules[type(controlnet).__module__]
    if not hasattr(module, "transforms"):
        functional = SimpleNamespace(resize=lambda image, size, interpolation: F.interpolate(image, size))
        module.transforms = SimpleNamespace(  # type: ignore[attr-defined]
            functional=functional, InterpolationMode=SimpleNamespace(NEAREST="nearest")
        )


def _share_z_image(controlnet: Any) -> None:
    transformer = next(
        family for those in sections().values() for family in those if family.name == "ZImageTransformer2DModel"
    )
    controlnet.from_transformer(controlnet, reinitialise(transformer.build()))


# Class -> what changes its model once it is built. The encoder of an RAE is a model of Transformers, which has an
# attention interface of its own.
PREPARE: dict[str, Callable[[Any], None]] = {
    "CosmosControlNetModel": _resize_without_torchvision,
    "ZImageControlNetModel": _share_z_image,
    "AutoencoderKLAllegro": lambda model: model.enable_tiling(),
    "AutoencoderRAE": lambda model: model.encoder.set_attn_implementation("eager"),
}


def value(node: ast.expr, draw: Draw | None = None) -> Any:
    """Value of an expression of the table."""
    again: Callable[[ast.expr], Any] = partial(value, draw=draw)
    if isinstance(node, ast.Call):
        of = node.func
        if isinstance(of, ast.Name):
            function = getattr(draw, of.id, None) or getattr(torch, of.id)
        elif isinstance(of, ast.Attribute):
            function = getattr(again(of.value), of.attr)
        return function(*map(again, node.args))
    if isinstance(node, (ast.List, ast.Tuple)):
        items = [again(item) for item in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.Dict):
        return {again(key): again(item) for key, item in zip(node.keys, node.values) if key is not None}
    return ast.literal_eval(node)


def _inputs(expressions: dict[str, ast.expr], draw: Draw) -> dict[str, Any]:
    return {name: value(expression, draw) for name, expression in expressions.items()}


@cache
def sections(table: Path = TABLE) -> dict[str, list[Family]]:
    """The families of each section of a table, including those that the installed version of diffusers lacks."""
    found: dict[str, list[Family]] = {}
    by_name: dict[str, tuple[dict[str, Any], dict[str, ast.expr]]] = {}
    for paragraph in re.split(r"\n(?=\S)", table.read_text(encoding="utf-8").rstrip()):
        head, *lines = paragraph.splitlines()
        if head.startswith("#"):
            continue
        if head.startswith("["):
            section = found.setdefault(head.strip("[]"), [])
            continue
        parts = _HEAD.fullmatch(head)
        assert parts is not None, head
        sizes, expressions = ({**given} for given in by_name.get(parts["base"] or "", ({}, {})))
        for line in lines:
            into: Any = expressions if line.startswith("  >") else sizes
            for name, text in re.findall(r"(\w+)=(\S+)", line):
                node = ast.parse(text, mode="eval").body
                into[name] = node if into is expressions else value(node)
        model = parts["model"]
        prepare = PREPARE.get(model.rpartition(".")[2])
        family = Family(model, sizes, partial(_inputs, expressions), parts["variant"] or "", prepare)
        by_name[family.name] = sizes, expressions
        section.append(family)
    return found
