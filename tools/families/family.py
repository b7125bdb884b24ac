"""One model family at a tiny size: how to build it, and the inputs of a call."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Draw:
    """Random inputs, the same ones each time: ``draw(2, 4, 8, 8)``."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(1)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random)

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.random)

    def time(self, batch: int) -> Tensor:
        """Timesteps out of 1000, as whole numbers."""
        return 1 + self.ints(999, batch)

    @staticmethod
    def padding(batch: int, length: int) -> Tensor:
        """bool ``[batch, length]``, True = a real token: each row ends in padding of a different length."""
        lengths = torch.tensor([length - 2 - (3 * row) % max(1, length - 3) for row in range(batch)])
        return torch.arange(length) < lengths[:, None]

    @staticmethod
    def grid(*sizes: int) -> Tensor:
        """Positions ``[tokens, len(sizes)]`` of a grid, last axis fastest, as floats."""
        return torch.cartesian_prod(*(torch.arange(size) for size in sizes)).reshape(-1, len(sizes)).float()

    @staticmethod
    def rotary(tokens: int, dim: int) -> tuple[Tensor, Tensor]:
        """cos and sin ``[tokens, dim]`` of rotary positions in neighbouring pairs."""
        angles = torch.arange(tokens)[:, None] * 10 ** -torch.linspace(0, 2, dim // 2)
        angles = angles.repeat_interleave(2, dim=1)
        return angles.cos(), angles.sin()


class NotInThisVersion(Exception):
    """The installed diffusers does not have this family."""


@dataclass(frozen=True)
class Family:
    """A model class of diffusers at one tiny configuration.

    Attributes:
        model: name of the class in ``diffusers``, or of a module below it and the class.
        settings: arguments of the constructor.
        inputs: makes the arguments of ``forward``.
        variant: which form of the family, where there are several.
        prepare: changes the model once it is built.
    """

    model: str
    settings: dict[str, Any]
    inputs: Callable[[Draw], dict[str, Any]]
    variant: str = ""
    prepare: Callable[[Any], None] | None = None

    @property
    def name(self) -> str:
        name = self.model.rpartition(".")[2]
        return f"{name} ({self.variant})" if self.variant else name

    def model_class(self) -> Any:
        """The class, or None where the installed diffusers does not have it."""
        module, _, name = self.model.rpartition(".")
        try:
            return getattr(importlib.import_module(f"diffusers.{module}" if module else "diffusers"), name, None)
        except ImportError:
            return None

    def build(self) -> nn.Module:
        """The model in evaluation mode, with weights that all affect the output.

        Raises:
            NotInThisVersion: the installed diffusers has no such class or not this form of it.
        """
        cls = self.model_class()
        unknown = set(self.settings) - set(inspect.signature(cls.__init__).parameters) if cls is not None else ()
        if cls is None or unknown:
            raise NotInThisVersion(f"{self.model} has no {', '.join(unknown)}" if unknown else f"no {self.model}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = cls(**self.settings)
        if self.prepare is not None:
            self.prepare(model)
        return reinitialise(model)

    def arguments(self, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Fresh arguments for one call, floats in ``dtype``."""
        return _cast(self.inputs(Draw()), dtype)


def before_031() -> bool:
    """Whether the installed diffusers is older than 0.31, which changed what some models take."""
    import diffusers

    return tuple(int(part) for part in diffusers.__version__.split(".")[:2]) < (0, 31)


def reinitialise(model: nn.Module, *, gain: float = 1.2, seed: int = 7) -> nn.Module:
    """Random weights under which attention, masks and positions all move the output; the model in evaluation mode."""
    random = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=random)
        if parameter.ndim >= 2 and parameter.numel():
            values *= gain / math.sqrt(parameter[0].numel())
        elif ("norm" in name and name.endswith("weight")) or name.endswith((".gamma", ".alpha")):
            values = 1 + 0.2 * values
        else:
            values *= 0.1
        parameter.data = values
    return model.eval()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value
