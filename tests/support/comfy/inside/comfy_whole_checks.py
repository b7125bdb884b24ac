"""Pascal Attention Patch with MODEL, CLIP and VAE inside the host: see ``comfy_checks``."""

import torch
from comfy_checks import check, close, log_lines, pack, replaced, runs
from comfy_inproc import families, load_checkpoint, load_model, load_pack, noise, sample

NODES = load_pack()
DEFAULTS = ("auto", 0, 0, "auto", 1024, True)
LATENT = noise(1, 4, 13, 10)


def whole(model, clip=None, vae=None, **more):
    return NODES["PascalAttentionPatch"]().patch(model, *DEFAULTS, clip=clip, vae=vae, unique_id="1", **more)


def encode(clip):
    return clip.encode_from_tokens(clip.tokenize("a lighthouse"))


@check
def the_three_are_what_the_single_nodes_give():
    model, clip, vae = load_checkpoint()
    ours = whole(model, clip, vae)
    alone = (
        NODES["PascalFFNChunking"]().patch(NODES["PascalAttentionPatch"]().patch(model, *DEFAULTS)[0], 0, 1024)[0],
        NODES["PascalTextEncoderAttention"]().patch(clip, "auto", 0, True)[0],
        NODES["PascalVAEAttention"]().patch(vae, "auto", 0, True)[0],
    )
    results = [[sample(m, "sd15"), encode(c), v.decode(LATENT)] for m, c, v in (ours, alone, (model, clip, vae))]
    for found, single, stock in zip(*results):
        assert torch.equal(found, single)
        close(found, stock)


@check
def what_is_not_connected_stays_away():
    model = load_model("wan_t2v")
    patched, clip, vae = whole(model)
    assert clip is vae is None
    assert patched is not model


@check
def the_node_says_what_all_its_parts_did():
    model, clip, vae = load_checkpoint()
    ours = whole(model, clip, vae)
    said = []
    host = pack("comfy.host")
    with replaced(host, "send_status", lambda text, unique_id: said.append(text)), runs() as found:
        encode(ours[1])
        sample(ours[0], "sd15")
        ours[2].decode(LATENT)
    last = said[-1]
    assert last.startswith(("Gained: ", "Fits: ", "Nothing")), last
    assert last.endswith(" attention calls taken."), last
    parts = {run.part for run in found if run.unique_id == "1"}
    assert parts >= {"diffusion model", "text encoder", "VAE"}


@check
def feed_forward_layers_run_in_chunks_where_a_call_would_not_fit_in_every_family():
    for name, model in families("wan_t2v", "flux", "sd3"):
        stock = sample(model, name)
        with replaced(pack("ffn_chunking"), "budget_from", lambda total: 1):
            tight, off = whole(model)[0], whole(model, chunk_feed_forward=False)[0]
        assert "pascal_attn_ffn" in tight.injections
        assert "pascal_attn_ffn" not in off.injections
        close(sample(tight, name), stock)


@check
def a_status_line_before_the_run_names_every_part_and_a_patch_on_weights_only():
    model, clip, vae = load_checkpoint()
    merge = {"class_type": "ModelMergeSimple", "inputs": {"model1": ["2", 0], "model2": ["1", 0]}}
    prompt = {
        "1": {"class_type": "PascalAttentionPatch", "inputs": {"model": ["2", 0]}},
        "2": {"class_type": "UNETLoader", "inputs": {}},
        "3": merge,
        "4": {"class_type": "KSampler", "inputs": {"model": ["3", 0]}},
    }
    with log_lines() as lines:
        whole(model, clip, vae, prompt=prompt)
    text = " ".join(lines)
    for word in ("blocks of SD15", "feed-forward", "SD1ClipModel", "AutoencoderKL", "decoding and encoding in bands"):
        assert word in text, text
    assert "WITHOUT EFFECT: ModelMergeSimple takes only the weights of model2" in text, text


@check
def eight_bits_are_asked_for_and_say_so():
    model = load_model("wan_t2v")
    stock = sample(model)
    with runs() as found:
        patched = whole(model, precision="8-bit where it saves time")[0]
        rounded = sample(patched)
    (run,) = [run for run in found if run.part == "int8"]
    if run.gains:  # the layers of a host's tiny model may be too small
        assert not run.is_exact
        assert "error" in run.gains[0]
    assert (rounded - stock).norm() < 0.1 * stock.norm()
    assert torch.equal(sample(model), stock)


@check
def float16_products_are_asked_for_and_say_so():
    for name, model in families("wan_t2v", "flux", "qwen_image"):
        stock = sample(model, name)
        with replaced(pack("core.int8.binding"), "median_times", lambda attempts, device: [2.0, 1.0]):
            patched = whole(model, precision="float16 where it saves time")[0]
        with runs() as found:
            rounded = sample(patched, name)
        (run,) = [run for run in found if run.part == "float16"]
        assert not run.is_exact, run.notes
        assert " linear layers in float16, not exact: relative error per layer 0.0" in run.gains[0], run.gains
        assert 0 < (rounded - stock).norm() < 0.01 * stock.norm()
        assert torch.equal(sample(model, name), stock)
