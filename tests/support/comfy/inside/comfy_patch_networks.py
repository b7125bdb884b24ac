"""Tiny networks of ``comfy/ldm`` whose attention calls pass the override by, inside the host."""

import dataclasses
import importlib

import comfy.model_patcher
import comfy.ops
import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP
from comfy_checks import Skip
from comfy_inproc import noise

OPERATIONS = comfy.ops.disable_weight_init


def built(module, name, *args, **options):
    """A network with random weights that never leave the range in which softmax is not a step."""
    try:
        kind = getattr(importlib.import_module(f"comfy.ldm.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise Skip(f"this host has no {name}: {error}") from None
    network = kind(*args, dtype=torch.float32, device="cpu", operations=OPERATIONS, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in [*network.parameters(), *network.buffers()]:
            if parameter.is_floating_point():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return network.eval()


@dataclasses.dataclass
class Case:
    """A network, the inputs of one call of it, and how many calls of attention that makes (None = any number)."""

    module: str
    name: str
    options: dict
    inputs: tuple
    named: dict = dataclasses.field(default_factory=dict)
    calls: int | None = None

    def made(self):
        """The network, and a function that calls it with ``transformer_options``."""
        network = built(self.module, self.name, **self.options)
        return network, lambda options: network(*self.inputs, **self.named, transformer_options=options)


HYDIT_TEXTS = noise(1, 77, 1024), torch.ones(1, 77), noise(1, 256, 2048), torch.ones(1, 256)
HALF, LATE = torch.tensor([0.5]), torch.tensor([500.0])
NETWORKS = {
    "HunyuanDiT": Case(
        "hydit.models",
        "HunYuanDiT",
        {"input_size": (8, 8), "hidden_size": 64, "depth": 2, "num_heads": 2, "log_fn": lambda *_: None},
        (noise(1, 4, 16, 16), LATE, *HYDIT_TEXTS, None, None),
        calls=5,
    ),
    "Ernie-Image": Case(
        "ernie.model",
        "ErnieImageModel",
        {"hidden_size": 96, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 64, "text_in_dim": 24}
        | {"in_channels": 4, "out_channels": 4, "rope_axes_dim": (16, 16, 16)},
        (noise(1, 4, 8, 8), HALF, noise(1, 6, 24)),
        calls=2,
    ),
    "SeedVR2": Case(
        "seedvr.model",
        "NaDiT",
        {"norm_eps": 1e-5, "num_layers": 2, "mlp_type": "normal", "vid_dim": 128, "txt_in_dim": 128, "heads": 1}
        | {"head_dim": 128, "mm_layers": 1, "expand_ratio": 2, "vid_in_channels": 33},
        (noise(2, 16, 2, 8, 8), torch.full((2,), 500.0), noise(2, 58, 128)),
        {"condition": noise(2, 17, 2, 8, 8)},
    ),
    "Hunyuan3D 2.1": Case(
        "hunyuan3dv2_1.hunyuandit",
        "HunYuanDiTPlain",
        {"in_channels": 8, "hidden_size": 64, "context_dim": 32, "depth": 3, "num_heads": 2, "num_moe_layers": 1}
        | {"guidance_cond_proj_dim": 64, "num_experts": 2},
        (noise(2, 8, 20), torch.tensor([0.5, 0.5]), noise(2, 6, 32)),
        calls=6,
    ),
    "ACE-Step 1.5": Case(
        "ace.ace_step15",
        "AceStepConditionGenerationModel",
        {"in_channels": 24, "hidden_size": 64, "text_hidden_dim": 32, "timbre_hidden_dim": 8, "num_dit_layers": 2}
        | {"audio_acoustic_hidden_dim": 8, "num_lyric_layers": 1, "num_timbre_layers": 1, "num_tokenizer_layers": 1}
        | {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 64, "fsq_dim": 64}
        | {"encoder_hidden_size": 64, "encoder_intermediate_size": 64, "encoder_num_heads": 4},
        (noise(1, 8, 32), HALF, noise(1, 6, 32)),
        {"lyric_embed": noise(1, 5, 32), "refer_audio": noise(1, 8, 750)},
    ),
    "Anima": Case(
        "anima.model",
        "Anima",
        {"max_img_h": 16, "max_img_w": 16, "max_frames": 1, "in_channels": 4, "out_channels": 4, "patch_spatial": 2}
        | {"patch_temporal": 1, "model_channels": 128, "num_blocks": 2, "num_heads": 2, "crossattn_emb_channels": 1024}
        | {"use_adaln_lora": True, "adaln_lora_dim": 16, "pos_emb_cls": "rope3d", "concat_padding_mask": True},
        (noise(1, 4, 1, 8, 8), HALF, noise(1, 6, 1024)),
        {"t5xxl_ids": torch.arange(5)[None]},
    ),
    "WanDancer without a picture": Case(
        "wan.model_wandancer",
        "WanDancerModel",
        {"in_dim": 16, "dim": 128, "ffn_dim": 64, "num_heads": 1, "num_layers": 2, "text_dim": 32, "music_dim": 64}
        | {"audio_inject_layers": [0], "music_heads": 4, "music_latent_dim": 64},
        (noise(1, 36, 2, 8, 8)[:, :16], LATE, noise(1, 6, 32)),
        {"audio_embed": noise(1, 12, 35)},
    ),
}


class Around(torch.nn.Module):
    """This class holds what a model patcher expects around a network."""

    def __init__(self, network):
        super().__init__()
        self.diffusion_model = network
        self.model_config = None
        self.device = torch.device("cpu")
        self.current_patcher = None

    def get_dtype(self):
        return torch.float32


def patcher_of(network):
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(Around(network), load_device=cpu, offload_device=cpu)


def applied(patcher, run):
    """One evaluation of the network through a patcher, as the host's sampler makes it."""
    patcher.patch_model(device_to=torch.device("cpu"))
    try:
        patcher.pre_run()
        options = patcher.model_options["transformer_options"].copy()
        options["sigmas"] = torch.tensor([0.5])
        wrappers = patcher.get_all_wrappers(WrappersMP.APPLY_MODEL)
        return WrapperExecutor.new_executor(lambda: run(options), wrappers).execute()
    finally:
        patcher.cleanup()
        patcher.unpatch_model(device_to=torch.device("cpu"))
