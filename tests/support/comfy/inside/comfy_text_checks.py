"""Pascal Text Encoder Attention inside the host: see ``comfy_checks``."""

import functools
import gc
from types import SimpleNamespace

import comfy.sd
import comfy.sd1_clip
import torch
from comfy_checks import Skip, check, close, is_untouched, log_lines, raises, replaced, run_of, runs
from comfy_inproc import drawn, load_checkpoint, load_pack, noise, t5_of, tiny_file

NODE = load_pack()["PascalTextEncoderAttention"]
PROMPT = "a photo of a (cat:1.3), a dog and a horse"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}


def patched(clip, route="auto", budget_mib=0, nan_guard=True):
    return NODE().patch(clip, route, budget_mib, nan_guard, "1")[0]


clip_l = functools.cache(lambda: load_checkpoint()[1])
t5 = functools.cache(lambda: t5_of(tiny_file("text_encoders", "t5")))


@functools.cache
def qwen():
    """A small Qwen 3 of the host's classes: grouped heads, causal mask, head_dim 128. Qwen 2.5 in one without it."""
    from comfy.text_encoders import llama

    try:
        from comfy.text_encoders.z_image import ZImageTokenizer as Tokenizer

        name, model_class = "qwen3_4b", llama.Qwen3_4B
    except ImportError:
        from comfy.text_encoders.qwen_image import QwenImageTokenizer as Tokenizer

        name, model_class = "qwen25_7b", llama.Qwen25_3B

    class Tiny(comfy.sd1_clip.SDClipModel):
        def __init__(self, device="cpu", dtype=None, model_options=None):
            shape = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
            masks = {"enable_attention_masks": True, "return_attention_masks": True}
            more = {"special_tokens": {"pad": 151643}, "layer_norm_hidden_state": False, "model_class": model_class}
            given = {"device": device, "dtype": dtype, "model_options": model_options or {}}
            super().__init__(layer="hidden", layer_idx=-2, textmodel_json_config=shape, **masks, **more, **given)

    class TinyEncoder(comfy.sd1_clip.SD1ClipModel):
        def __init__(self, device="cpu", dtype=None, model_options=None):
            options = model_options or {}
            super().__init__(device=device, dtype=dtype, name=name, clip_model=Tiny, model_options=options)

    target = SimpleNamespace(params={}, clip=TinyEncoder, tokenizer=Tokenizer)
    return with_random_weights(comfy.sd.CLIP(target))


def with_random_weights(clip):
    torch.manual_seed(3)
    for name, parameter in clip.cond_stage_model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(float("norm" in name))
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return clip


def encode(clip, text=PROMPT, **options):
    return clip.encode_from_tokens(clip.tokenize(text), **options)


@check
def encoding_equals_the_unpatched_one():
    for load, layers in ((clip_l, 12), (t5, 12), (qwen, 3)):
        clip = load()
        stock, pooled = encode(clip, return_pooled=True)
        for route in ("auto", "torch", "tiled"):
            with runs() as found:
                ours, ours_pooled = encode(patched(clip, route), return_pooled=True)
            close(ours, stock)
            if pooled is not None:
                close(ours_pooled, pooled)
            (run,) = found
            assert (run.part, run.count(), run.count("taken"), run.warnings) == ("text encoder", layers, layers, [])
            assert len({kind.block for kind in run.tallies}) == layers
            assert route == "auto" or set(run.routes()) == {route}


@check
def the_original_is_untouched_bit_for_bit_and_keeps_its_keys():
    for load in (clip_l, t5, qwen):
        clip = load()
        stock, keys = encode(clip), list(clip.cond_stage_model.state_dict())
        ours = patched(clip)
        encode(ours)
        assert list(clip.cond_stage_model.state_dict()) == keys == list(ours.patcher.model_state_dict())
        is_untouched(lambda: encode(clip), stock)  # noqa: B023
        encode(ours)
        del ours
        gc.collect()
        is_untouched(lambda: encode(clip), stock)  # noqa: B023


@check
def a_long_prompt_and_a_schedule_are_encoded_alike():
    clip = clip_l()
    text = " ".join(f"word{i}" for i in range(120))
    ours = patched(clip, "tiled")
    close(encode(ours, text), encode(clip, text))
    tokens = clip.tokenize(PROMPT)
    stock = clip.encode_from_tokens_scheduled(tokens)
    with runs() as found:
        scheduled = ours.encode_from_tokens_scheduled(tokens)
    close(scheduled[0][0], stock[0][0])
    close(scheduled[0][1]["pooled_output"], stock[0][1]["pooled_output"])
    assert sum(run.count("taken") for run in found) == 12


def clip_around(module, run):
    """A CLIP of the host that needs no tokenizer: it encodes tokens by ``run(tokens)``, which calls ``module``."""

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = module

        def encode_token_weights(self, tokens):
            return run(tokens), None

    model = Encoder()
    model.reset_clip_options = model.set_clip_options = lambda *_: None
    clip = comfy.sd.CLIP(no_init=True)
    clip.cond_stage_model, clip.tokenizer, clip.layer_idx = model, None, None
    clip.tokenizer_options, clip.use_clip_schedule, clip.apply_hooks_to_conds = {}, False, None
    clip.patcher = comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))
    return clip


def run_of_encoding(clip, tokens=None):
    """The only run of an encoding, whose result is that of the unpatched encoder, which stays as it was."""
    stock = clip.encode_from_tokens(tokens)
    run = run_of(lambda: patched(clip, "tiled").encode_from_tokens(tokens), stock)
    is_untouched(lambda: clip.encode_from_tokens(tokens), stock)
    assert run.count("taken") == run.count() > 0, run.line()
    assert run.warnings == []
    return run


@check
def an_encoder_that_asks_for_the_hosts_attention_itself_is_served():
    try:
        from comfy.text_encoders import gemma4
    except ImportError:
        raise Skip("this ComfyUI has no encoder that asks for attention itself") from None
    config = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-6}
    vision = gemma4.Gemma4VisionAttention(config, device="cpu", dtype=torch.float32, ops=comfy.ops.manual_cast)
    for parameter in drawn(vision, 0.1).parameters():
        if parameter.ndim != 2:
            torch.nn.init.ones_(parameter)
    with replaced(gemma4, "_apply_vision_2d_rope", lambda x, freqs: x):
        run = run_of_encoding(clip_around(vision, lambda _: vision(noise(1, 40, 64), None)))
    assert [kind.block for kind in run.tallies] == ["attention"]


@check
def an_encoder_without_attention_is_returned_as_it_is_and_says_so():
    clip = clip_around(torch.nn.Linear(4, 4), None)
    with log_lines() as lines:
        assert patched(clip) is clip
    assert "has no attention" in lines[0]


@check
def what_is_not_a_clip_is_refused_in_a_sentence():
    assert "got dict; use a Load CLIP node" in str(raises(TypeError, lambda: patched({})))
