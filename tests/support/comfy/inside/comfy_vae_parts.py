"""VAEs inside the host for ``comfy_vae_checks``: tiny ones, and ones around a single block."""

from __future__ import annotations

import copy

import comfy.model_management as host
import comfy.model_patcher
import torch
import torch.nn.functional as F
from comfy.ldm.modules.diffusionmodules.model import AttnBlock
from comfy_checks import close, pack
from comfy_inproc import load_pack, load_vae

NODE = load_pack()["PascalVAEAttention"]
LATENTS = {"vae_kl": (1, 4, 13, 10), "vae_flux": (1, 16, 13, 10), "vae_wan": (1, 16, 2, 14, 10)}
IMAGE = torch.rand(1, 96, 80, 3, generator=torch.Generator().manual_seed(1))


def patched(vae, route="auto", budget_mib=0, nan_guard=True, **more):
    return NODE().patch(vae, route, budget_mib, nan_guard, "1", **more)[0]


def latent(name, seed=0):
    return torch.randn(LATENTS[name], generator=torch.Generator().manual_seed(seed))


def kl():
    return load_vae("vae_kl"), latent("vae_kl")


class DirectAttention(torch.nn.Module):
    """A block whose own forward calls SDPA."""

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)[:, None]
        return F.scaled_dot_product_attention(tokens, tokens, tokens)[:, 0].transpose(1, 2).reshape(x.shape)


def vae_around(block):
    """A VAE of the host around one block: it decodes ``[B, 4, H, W]`` to three channels."""

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def decode(self, samples):
            return self.block(samples)[:, :3]

    vae = copy.copy(load_vae("vae_kl"))
    vae.first_stage_model = Network()
    vae.patcher = comfy.model_patcher.ModelPatcher(vae.first_stage_model, torch.device("cpu"), torch.device("cpu"))
    return vae


def one_block():
    """A VAE of the host around one of its attention blocks, 896 tokens, and a latent for it: quick."""
    torch.manual_seed(0)
    block = AttnBlock(32)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = block

        def forward(self, samples):
            return self.attn(samples.repeat(1, 8, 1, 1))

    return vae_around(Block()), torch.randn(1, 4, 32, 28)


def attention_memory(vae, height, width):
    """Extra bytes of the attention function of a loaded KL VAE at D = 512, besides its result."""
    host.load_models_gpu([vae.patcher])
    attend = vae.first_stage_model.decoder.mid.attn_1.optimized_attention
    query, key, value = torch.randn(3, 1, 512, height, width).unbind()
    with pack("core.observe.memory").PeakMemory("cpu") as peak:
        out = attend(query, key, value)
    assert out.shape == query.shape
    tokens = (t.flatten(2).transpose(1, 2).double() for t in (query, key, value))
    exact = F.scaled_dot_product_attention(*tokens).transpose(1, 2).reshape(query.shape)
    close(out, exact.float())
    return peak.peak_bytes - out.numel() * out.element_size()
