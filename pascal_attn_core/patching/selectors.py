"""Which modules a patch is meant for: the models of a pipeline, and in a model ``include`` and ``exclude``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from .patch import NothingToPatch

#: the models that a pipeline calls in every step; transformer_2 is the second expert of Wan 2.2, prior and decoder are
#: the stages of a cascade
DENOISERS = ("unet", "transformer", "transformer_2", "prior", "decoder")
AUTOENCODERS = ("vae", "movq", "vqvae", "vqgan")


def parts_of(target: Any) -> dict[str, nn.Module]:
    """The modules of a target by name: those of a pipeline's ``components``, or a module itself, by the name ""; raises
    TypeError for anything else."""
    if isinstance(target, nn.Module):
        return {"": target}
    components = getattr(target, "components", None)
    if not isinstance(components, dict):
        raise TypeError(f"the target must be a diffusers pipeline or a torch.nn.Module, got {type(target).__name__}")
    # torch.compile(model) keeps the model itself as _orig_mod
    parts = {name: getattr(part, "_orig_mod", part) for name, part in components.items()}
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def denoisers_of(target: Any) -> nn.Module:
    """A module itself, or a pipeline's denoisers as one module, in which the name of a component leads the names of its
    modules: ``"transformer_2.blocks.0.ffn"``. Raises NothingToPatch for a pipeline without any."""
    parts = parts_of(target)
    if "" in parts:
        return parts[""]
    return nn.ModuleDict({name: parts[name] for name in _present(target, parts, DENOISERS)})


def autoencoder_of(target: Any) -> nn.Module:
    """A module itself, or a pipeline's autoencoder; raises NothingToPatch for a pipeline without one."""
    parts = parts_of(target)
    return parts[""] if "" in parts else parts[_present(target, parts, AUTOENCODERS)[0]]


def _present(target: Any, parts: dict[str, nn.Module], names: tuple[str, ...]) -> list[str]:
    present = [name for name in names if name in parts]
    if not present:
        raise NothingToPatch(
            f"{type(target).__name__} must have one of {', '.join(names)}, got {', '.join(parts) or 'no model'}"
        )
    return present


Selector = str | type | Callable[[str, nn.Module], Any]


class Found(NamedTuple):
    """A module that was found: its qualified name, "" for the model itself; and where a patch leaves it alone, a state,
    :data:`.patch.OFF` or :data:`.patch.UNABLE`, and why."""

    name: str
    module: nn.Module
    state: str = ""
    why: str = ""


def selectors(what: str, given: Any) -> list[Selector]:
    """An argument as a list: a shell pattern for the qualified name (``"blocks.*.ffn"``), a class, a predicate
    ``(name, module) -> bool``, several of them, or None; raises TypeError for anything else."""
    if given is None:
        return []
    several = [given] if isinstance(given, (str, type)) or callable(given) else given
    if not isinstance(several, Iterable):
        raise TypeError(f"{what} must be a pattern, a class, a predicate or several of them, got {given!r}")
    several = list(several)
    for one in several:
        if not (isinstance(one, (str, type)) or callable(one)):
            raise TypeError(f"{what} must hold patterns, classes and predicates, got {one!r}")
    return several


def require_matches(model: nn.Module, **given: Any) -> None:
    """Raise ValueError if a pattern or a class among the arguments chooses no module of the model."""
    for what, value in given.items():
        for selector in selectors(what, value):
            # a predicate may rely on being asked about some modules only
            known = isinstance(selector, (str, type))
            if known and not any(matches([selector], name, module) for name, module in model.named_modules()):
                raise ValueError(f"{what} must choose a module, got {selector!r}, which matches none")


def matches(chosen: list[Selector], name: str, module: nn.Module) -> bool:
    """Whether any of them chooses the module with this qualified name."""

    def chooses(selector: Selector) -> Any:
        if isinstance(selector, str):
            return fnmatchcase(name, selector)
        return isinstance(module, selector) if isinstance(selector, type) else selector(name, module)

    return any(map(chooses, chosen))
