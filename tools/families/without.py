"""Model classes of diffusers that are not in the table, and why."""

from __future__ import annotations

from collections.abc import Iterator

# Reason -> names of the classes.
WITHOUT = {
    "no attention": "T2IAdapter Cosmos3AVAEAudioTokenizer LongCatAudioDiTVae Kandinsky6SRVAE MiniMaxMusic3Vocoder "
    "Kandinsky6SRLatentUpscalerBank MMAudioVocoder",
    "a softmax over layers": "MiniMaxMusic3ConditionEncoder",
    "part of another model": "ControlNetXSAdapter MotionAdapter",
    "the attention of RFD4ProteinaTransformer": "RFD4ProteinaAutoencoder",
    "several of another model": "MultiAdapter MultiControlNetModel FluxMultiControlNetModel SD3MultiControlNetModel "
    "HunyuanDiT2DMultiControlNetModel QwenImageMultiControlNetModel",
}


def unknown_models() -> Iterator[str]:
    """Model classes that the installed diffusers exports and that are in neither the table nor this list."""
    import diffusers

    from . import sections

    known = {family.model.rpartition(".")[2] for those in sections().values() for family in those}
    for name in dir(diffusers):
        cls = getattr(diffusers, name) if name[0].isupper() else None
        is_model = (
            isinstance(cls, type) and issubclass(cls, diffusers.ModelMixin) and "diffusers.models." in cls.__module__
        )
        if is_model and name not in {*known, *" ".join(WITHOUT.values()).split(), "ModelMixin"}:
            yield name
