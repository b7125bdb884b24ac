"""MODEL -> MODEL: an independent count of attention calls, another pack's attention patch, accidents in the middle."""

import collections
import os
import sys
from typing import ClassVar

import comfy.ldm.modules.attention as host_attention
import comfy.model_management
import comfy.patcher_extension
import torch

HOST = os.path.dirname(os.path.dirname(os.path.abspath(comfy.model_management.__file__)))
OVERRIDE = "optimized_attention_override"
SDPA = torch._C._nn.scaled_dot_product_attention
WRAPPER_CODE = host_attention.attention_basic.__code__  # one code object for every function that the host wraps
THIS_FILE = __file__
RECORDS = collections.defaultdict(collections.Counter)


def _is_comparison(frame):
    """Whether the patch asks the host's function for a few rows, to compare its own with them."""
    while frame is not None and frame.f_code.co_filename != THIS_FILE:
        if frame.f_code.co_filename.endswith(os.path.join("engine", "compare.py")):
            return True
        frame = frame.f_back
    return False


class CallCount:
    """A profiler: calls of the host's attention functions (``wrapped``, outermost only), and of torch's SDPA by the
    host (``sdpa``), without those that the patch makes to compare its own answer."""

    def __init__(self, counts):
        self.counts = counts

    def __call__(self, frame, event, arg):
        if event == "call" and frame.f_code is WRAPPER_CODE:
            self.counts["wrapped"] += "_inside_attn_wrapper" not in frame.f_locals["kwargs"]
        elif event == "c_call" and arg is SDPA:
            path = frame.f_code.co_filename
            self.counts["sdpa"] += path.startswith(HOST) and "custom_nodes" not in path and not _is_comparison(frame)

    def __enter__(self):
        self.previous = sys.getprofile()
        sys.setprofile(self)

    def __exit__(self, *_):
        sys.setprofile(self.previous)


class Probe:
    """A node of this pack; ``INPUTS`` are required."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "run"
    CATEGORY = "probe"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": cls.INPUTS}


TAG = ("STRING", {"default": ""})


class ProbeCount(Probe):
    """Counts attention calls of every sampling with this model into the record ``tag``."""

    INPUTS: ClassVar = {"model": ("MODEL",), "tag": TAG}

    def run(self, model, tag):
        def counted(executor, *args, **kwargs):
            with CallCount(RECORDS[tag]):
                return executor(*args, **kwargs)

        clone = model.clone()
        clone.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.OUTER_SAMPLE, "probe_count", counted)
        return (clone,)


class ProbeOtherPatch(Probe):
    """Another pack's attention override: ``chain`` calls the one before it, ``replace`` forgets it, ``wrong`` gives
    every key the same weight. Counts its calls as ``other`` in the record ``tag``."""

    INPUTS: ClassVar = {"model": ("MODEL",), "kind": (["chain", "replace", "wrong"],), "tag": TAG}

    def run(self, model, kind, tag):
        clone = model.clone()
        options = clone.model_options["transformer_options"] = clone.model_options["transformer_options"].copy()
        previous = options.get(OVERRIDE) if kind == "chain" else None

        def override(func, q, k, v, *args, **kwargs):
            RECORDS[tag]["other"] += 1
            if kind == "wrong":
                k = torch.zeros_like(k)
            if previous is not None:
                return previous(func, q, k, v, *args, **kwargs)
            return func(q, k, v, *args, **kwargs)

        options[OVERRIDE] = override
        return (clone,)


class ProbeTrip(Probe):
    """At the ``at_call``-th evaluation of the model: raise, or press the interrupt button, once in the node's life."""

    INPUTS: ClassVar = {
        "model": ("MODEL",),
        "action": (["raise", "interrupt"],),
        "at_call": ("INT", {"default": 1, "min": 1}),
    }

    def run(self, model, action, at_call):
        calls = 0

        def tripped(executor, *args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == at_call and action == "interrupt":
                comfy.model_management.interrupt_current_processing()
            output = executor(*args, **kwargs)
            if calls == at_call and action == "raise":
                raise RuntimeError("probe: an accident in the middle of sampling")
            return output

        clone = model.clone()
        clone.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "probe_trip", tripped)
        return (clone,)
