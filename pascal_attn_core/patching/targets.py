"""The part of a pipeline that a patch is meant for, found by the names under which diffusers' pipelines keep it."""

from __future__ import annotations

from typing import Any

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
