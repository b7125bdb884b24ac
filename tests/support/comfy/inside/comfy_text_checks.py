"""Pascal Text Encoder Attention inside the host: see ``comfy_checks``."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import comfy.sd
import comfy.sd1_clip
import torch
from comfy_checks import Skip, check, close, log_lines, pack, raises, replaced, runs
from comfy_inproc import load_checkpoint, load_pack, load_t5

NODE = load_pack()["PascalTextEncoderAttention"]
PROMPT = "a photo of a (cat:1.3), a dog and a horse"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
LOADED: dict = {}


def patched(clip, route="auto", budget_mib=0, nan_guard=True):
    return NODE().patch(clip, route, budget_mib, nan_guard, "1")[0]


def once(load):
    if load not in LOADED:
        LOADED[load] = load()
    return LOADED[load]


def clip_l():
    return load_checkpoint()[1]


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
            super().__init__(
                device=device,
                dtype=dtype,
                layer="hidden",
                layer_idx=-2,
                textmodel_json_config={**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2},
                special_tokens={"pad": 151643},
                layer_norm_hidden_state=False,
                model_class=model_class,
                enable_attention_masks=True,
                return_attention_masks=True,
                model_options=model_options or {},
            )

    class TinyEncoder(comfy.sd1_clip.SD1ClipModel):
        def __init__(self, device="cpu", dtype=None, model_options=None):
            options = model_options or {}
            super().__init__(device=device, dtype=dtype, name=name, clip_model=Tiny, model_options=options)

    target = SimpleNamespace(params={}, clip=TinyEncoder, tokenizer=Tokenizer)
    return with_random_weights(comfy.sd.CLIP(target))


def network_of(clip):
    """Its language model."""
    return getattr(clip.cond_stage_model, clip.cond_stage_model.clip).transformer


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


def encoding_equals(load, layers):
    clip = once(load)
    stock, pooled = encode(clip, return_pooled=True)
    for route in ("auto", "torch", "tiled"):
        with runs() as found:
            ours, ours_pooled = encode(patched(clip, route), return_pooled=True)
        close(ours, stock)
        if pooled is not None:
            close(ours_pooled, pooled)
        assert [(run.part, run.count(), run.count("taken"), run.warnings) for run in found] == [
            ("text encoder", layers, layers, [])
        ]
        assert len({kind.block for kind in found[0].tallies}) == layers
        assert route == "auto" or set(found[0].routes()) == {route}


@check
def encoding_with_clip_l_equals_the_unpatched_one():
    encoding_equals(clip_l, 12)


@check
def encoding_with_t5_equals_the_unpatched_one():
    encoding_equals(load_t5, 12)


@check
def encoding_with_a_language_model_equals_the_unpatched_one():
    encoding_equals(qwen, 3)


@check
def a_wrong_attention_would_be_seen():
    engine = pack("engine.engine").Engine
    attend = engine.attend

    def without_mask(self, query, key, value, mask=None, *args, **options):
        return attend(self, query, key, value, None, *args, **options)

    for load in (clip_l, load_t5, qwen):
        clip = once(load)
        stock = encode(clip)
        with replaced(engine, "attend", without_mask):
            with replaced(engine, "_agrees", lambda *_: True):
                raises(AssertionError, lambda: close(encode(patched(clip)), stock, 2e-3))  # noqa: B023
            close(encode(patched(clip)), stock)  # compared with the host's own function, the calls are passed to it


@check
def the_original_is_untouched_bit_for_bit_and_keeps_its_keys():
    for load in (clip_l, load_t5, qwen):
        clip = once(load)
        stock, keys = encode(clip), list(clip.cond_stage_model.state_dict())
        ours = patched(clip)
        encode(ours)
        assert list(clip.cond_stage_model.state_dict()) == keys == list(ours.patcher.model_state_dict())
        with runs() as found:
            assert torch.equal(encode(clip), stock)
        assert found == []
        encode(ours)
        del ours
        gc.collect()
        with runs() as found:
            assert torch.equal(encode(clip), stock)
        assert found == []


@check
def a_long_prompt_and_a_schedule_are_encoded_alike():
    clip = once(clip_l)
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


def lora():
    torch.manual_seed(7)
    found = {}
    for layer in range(12):
        for matrix in ("self_attn_q_proj", "self_attn_v_proj", "mlp_fc1"):
            rows, columns = (3072, 768) if matrix == "mlp_fc1" else (768, 768)
            name = f"lora_te_text_model_encoder_layers_{layer}_{matrix}"
            found[f"{name}.lora_up.weight"] = torch.randn(rows, 4) * 0.2
            found[f"{name}.lora_down.weight"] = torch.randn(4, columns) * columns**-0.5
    return found


def with_lora(clip):
    return comfy.sd.load_lora_for_models(None, clip, lora(), 0.0, 1.0)[1]


@check
def a_lora_works_before_and_after_and_leaves_again():
    clip = once(clip_l)
    plain, stock = encode(clip), encode(with_lora(clip))
    raises(AssertionError, lambda: close(plain, stock, 1e-2))
    for ours in (patched(with_lora(clip)), with_lora(patched(clip))):
        with runs() as found:
            close(encode(ours), stock)
        assert found[0].count("taken") == 12
    assert torch.equal(encode(clip), plain)


@check
def generation_is_the_same_and_single_queries_are_left_to_the_host():
    clip = once(qwen)
    if not hasattr(clip, "generate") or not hasattr(network_of(clip), "generate"):
        raise Skip("this ComfyUI does not generate text")
    tokens, options = clip.tokenize("tell me"), {"do_sample": False, "max_length": 6}
    stock = clip.generate(tokens, **options)
    with runs() as found:
        assert patched(clip).generate(tokens, **options) == stock
    (run,) = found
    assert run.count("taken") == 3, run.line()
    assert run.count("passed to ComfyUI") == 3 * (len(stock) - 1), run.line()
    assert run.reasons("passed to ComfyUI").keys() <= {"fewer than 2 queries"}


@check
def an_encoder_that_asks_for_the_hosts_attention_itself_is_served():
    try:
        from comfy.text_encoders import gemma4
    except ImportError:
        raise Skip("this ComfyUI has no encoder that asks for attention itself") from None
    config = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-6}
    torch.manual_seed(0)
    vision = gemma4.Gemma4VisionAttention(config, device="cpu", dtype=torch.float32, ops=comfy.ops.manual_cast)
    for parameter in vision.parameters():
        torch.nn.init.normal_(parameter, std=0.1) if parameter.ndim == 2 else torch.nn.init.ones_(parameter)

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = vision

        def encode_token_weights(self, tokens):
            x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(1))
            with replaced(gemma4, "_apply_vision_2d_rope", lambda x, freqs: x):
                return self.attention(x, None), None

    clip = clip_around(Encoder())
    stock = clip.encode_from_tokens({})
    with runs() as found:
        close(patched(clip, "tiled").encode_from_tokens({}), stock)
    assert [(kind.block, kind.via) for run in found for kind in run.tallies] == [("attention", "text encoder")]
    with runs() as found:
        assert torch.equal(clip.encode_from_tokens({}), stock)
    assert found == []


def clip_around(model):
    """A CLIP of the host around a model that needs no tokenizer."""
    model.reset_clip_options = model.set_clip_options = lambda *_: None
    clip = comfy.sd.CLIP(no_init=True)
    clip.cond_stage_model, clip.tokenizer, clip.layer_idx = model, None, None
    clip.tokenizer_options, clip.use_clip_schedule, clip.apply_hooks_to_conds = {}, False, None
    clip.patcher = comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu"))
    return clip


@check
def an_encoder_that_calls_sdpa_itself_is_served():
    class Direct(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = Direct()

        def encode_token_weights(self, tokens):
            return self.attention(torch.randn(1, 2, 40, 16, generator=torch.Generator().manual_seed(1))), None

    clip = clip_around(Encoder())
    stock = clip.encode_from_tokens({})
    with runs() as found:
        close(patched(clip, "tiled").encode_from_tokens({}), stock)
    assert [(kind.via, kind.outcome) for run in found for kind in run.tallies] == [("SDPA", "taken")]
    with runs() as found:
        assert torch.equal(clip.encode_from_tokens({}), stock)
    assert found == []


@check
def an_encoder_without_attention_is_returned_as_it_is_and_says_so():
    clip = clip_around(torch.nn.Linear(4, 4))
    with log_lines() as lines:
        assert patched(clip) is clip
    assert "has no attention" in lines[0]


@check
def nan_in_the_encoded_text_is_named():
    clip = once(qwen)
    norm = network_of(clip).model.layers[0].mlp
    hook = norm.register_forward_hook(lambda *args: args[2] * float("nan"))
    with runs() as found:
        encode(patched(clip))
    hook.remove()
    assert any("--fp32-text-enc" in warning for warning in found[0].warnings), found[0].warnings


@check
def what_is_not_a_clip_is_refused_in_a_sentence():
    assert "got dict; use a Load CLIP node" in str(raises(TypeError, lambda: patched({})))
