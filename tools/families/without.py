"""Model classes of diffusers that are not in the table, and why."""

from __future__ import annotations

from collections.abc import Iterator

_NOTHING = "no attention"
_PART = "part of another model"
_SEVERAL = "holds several of another model"

#: class name -> why it is not in the table
WITHOUT = {
    "T2IAdapter": _NOTHING,
    "MultiAdapter": _SEVERAL,
    "MultiControlNetModel": _SEVERAL,
    "FluxMultiControlNetModel": _SEVERAL,
    "HunyuanDiT2DMultiControlNetModel": _SEVERAL,
    "QwenImageMultiControlNetModel": _SEVERAL,
    "SD3MultiControlNetModel": _SEVERAL,
    "ControlNetXSAdapter": _PART,
    "MotionAdapter": _PART,
    "Cosmos3AVAEAudioTokenizer": _NOTHING,
    "LongCatAudioDiTVae": _NOTHING,
    "Kandinsky6SRVAE": _NOTHING,
    "Kandinsky6SRLatentUpscalerBank": _NOTHING,
    "MiniMaxMusic3ConditionEncoder": "no attention (a softmax over layers)",
    "MiniMaxMusic3Vocoder": _NOTHING,
    "MMAudioVocoder": _NOTHING,
    "RFD4ProteinaAutoencoder": "the attention of RFD4ProteinaTransformer",
}


def unknown_models() -> Iterator[str]:
    """Model classes that the installed diffusers exports and that are in neither the table nor this list."""
    import diffusers

    from . import sections

    known = {family.model.rpartition(".")[2] for those in sections().values() for family in those} | set(WITHOUT)
    for name in dir(diffusers):
        cls = getattr(diffusers, name) if name[0].isupper() else None
        is_model = (
            isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin) and "diffusers.models." in cls.__module__
        )
        if is_model and name not in {*known, "ModelMixin"}:
            yield name
