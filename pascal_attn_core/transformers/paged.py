"""Continuous batching of Transformers: the tokens of many requests in one row, their keys in pages of one cache.

The host's paged cache stores new keys and returns those of each request; its manager gives the cumulative lengths of
the requests. Its own "sdpa" gets a mask of all queries by all keys; here the requests are computed as sequences of
different lengths, so that no such mask is built.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..config import AttentionConfig
from ..flash_attn.options import FlashOptions
from ..flash_attn.varlen import varlen_attend
from ..patching.patch import replaced
from .call import with_query_sinks


# Like the cache itself: torch.compile would copy its views of one tensor at every write.
@torch._disable_dynamo
def paged_attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kwargs: dict[str, Any],
    *,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    s_aux: Tensor | None,
    config: AttentionConfig | None,
) -> Tensor:
    """Attention of the requests of one step, each causal over its own keys.

    Args:
        query: ``[1, Hq, total_q, D]``; key, value: ``[1, Hkv, total_k, D]`` of all requests; before Transformers 5.24,
            which pass the ``cache``, the new tokens only: ``[1, Hkv, total_q, D]``.
        kwargs: what the host also passes: ``cu_seq_lens_q``, ``cu_seq_lens_k``, and what the cache needs.
    Returns:
        ``[1, total_q, Hq, Dv]``; zero after the last request, where the host pads a step.
    Raises:
        NotImplementedError: a form of continuous batching that is not supported.
    """
    _refuse(query, kwargs)
    keys, values = _all_keys(key, value, module.layer_idx, kwargs)
    ends_q, ends_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    window = _window(module)
    if isinstance(ends_k, dict):  # versions before 5.23, and layers that share the keys of another one
        ends_k = ends_k["full_attention" if window is None else "sliding_attention"]
    sides = None if window is None else (window - 1, -1)
    options = FlashOptions(dropout, True, scaling, "lower_right", sides, softcap, config=config)
    ends, query = (_on_cpu(ends_q), _on_cpu(ends_k)), query[0].transpose(0, 1)
    out, lse = varlen_attend(query, keys, values, *ends, options, with_lse=s_aux is not None)
    if s_aux is not None and lse is not None:
        out = with_query_sinks(out.transpose(0, 1), lse, s_aux.flatten()[:, None, None]).transpose(0, 1)
    return out[None].contiguous()


def _refuse(query: Tensor, kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("cache")
    missing = [name for name in ("cu_seq_lens_q", "cu_seq_lens_k") if kwargs.get(name) is None]
    if missing or not (cache is None or hasattr(cache, "update")) or query.shape[0] != 1:
        what = f"a {type(cache).__name__}" + (f" without {' and '.join(missing)}" if missing else "")
        raise NotImplementedError(
            "cache must be the paged cache of continuous batching, with cu_seq_lens_q and cu_seq_lens_k and one row of "
            f"tokens, got {what} and {query.shape[0]} rows: set attn_implementation='sdpa'"
        )
    if kwargs.get("block_table") is not None:
        raise NotImplementedError(
            "decoding by block_table is for flash attention's own kernels: set max_blocks_per_request=0 in the "
            "ContinuousBatchingConfig"
        )
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            "the lengths of the requests are read at every step, which a CUDA graph cannot capture: set "
            "use_cuda_graph=False in the ContinuousBatchingConfig"
        )


def _all_keys(key: Tensor, value: Tensor, layer: int, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The keys and values of all requests, concatenated: ``[total_k, Hkv, D]``. A cache that is passed gets the new
    tokens here; since Transformers 5.24 the model itself has given them to it."""
    cache = kwargs.get("cache")
    cache_class: type = type(cache)
    if cache is not None and _takes_kwargs(cache_class):  # 5.23; it puts this layer's lengths into kwargs
        key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=kwargs)
    elif cache is not None:
        indices = {name: kwargs[name] for name in ("read_index", "write_index")}
        key, value = cache.update(key, value, layer, **indices)
    if key.dim() == 4:
        key, value = (t[0].transpose(0, 1) for t in (key, value))
    return key, value


@functools.lru_cache(maxsize=16)
def _takes_kwargs(cache_class: Any) -> bool:
    parameter = inspect.signature(cache_class.update).parameters.get("kwargs")
    return parameter is not None and parameter.kind is not inspect.Parameter.VAR_KEYWORD


def _window(module: Any) -> int | None:
    """Keys that a query of this layer sees, itself among them; None = all. Taken from the model's config, as the cache
    and the masks that the host builds: not every model passes it to the attention."""
    types = getattr(module.config, "layer_types", None)
    if types is not None and types[module.layer_idx] != "sliding_attention":
        return None
    return getattr(module.config, "sliding_window", None)


_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _on_cpu(ends: Tensor) -> Tensor:
    """The numbers of a tensor on the CPU; the tensor of one step is read once for all of its layers."""
    if ends.device.type == "cpu":
        return ends
    if ends.is_inference():  # writes to it cannot be detected
        return ends.cpu()
    version, numbers = _read.get(ends, (None, ends))
    if version != ends._version:
        version, numbers = ends._version, ends.cpu()
        _read[ends] = version, numbers
    return numbers


# ---- the manager ---------------------------------------------------------------------------------------------------


def serve_batching(name: str, registered: Mapping[str, Any]) -> Iterator[Callable[[], list[str]]]:
    """Make the manager of continuous batching keep models on the implementation ``name`` while it is registered; yields
    what undoes it.

    Newer versions accept names of their own only, and plan memory for a mask that is not built for ``name``.
    """

    def answer(owner: Any, method: str, config_of: Callable[..., Any], ours: Any) -> Iterator[Callable[[], list[str]]]:
        original = getattr(owner, method, None)
        if original is not None:  # not in every version

            @functools.wraps(original)
            def answering(*args: Any, **kwargs: Any) -> Any:
                is_ours = name == config_of(*args, **kwargs)._attn_implementation and name in registered
                return ours if is_ours else original(*args, **kwargs)

            yield replaced(owner, method, answering)

    manager = _class_of("continuous_api", "ContinuousBatchingManager")
    yield from answer(manager, "switch_to_cb_friendly_attn", lambda own, model, *_, **__: model.config, None)
    handler = _class_of("cache", "PagedAttentionMemoryHandler")
    yield from answer(handler, "attention_mask_bytes", lambda own, *_, **__: own.config, 0)


def adds_prefix() -> bool:
    """Whether this version's manager looks for ``"paged|" + name``."""
    manager = _class_of("continuous_api", "ContinuousBatchingManager")
    return manager is not None and not hasattr(manager, "switch_to_cb_friendly_attn")


def _class_of(module: str, name: str) -> Any:
    try:
        found = importlib.import_module(f"transformers.generation.continuous_batching.{module}")
    except ImportError:
        return None
    return getattr(found, name, None)
