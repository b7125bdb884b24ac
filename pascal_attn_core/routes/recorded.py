"""The functions of :mod:`.derivatives` in graphs of ``make_fx``. Imported at the first use only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree


def as_one_node(function: Any, inputs: Sequence[Any]) -> Any:
    """``function.compute(*inputs)`` as one node, which calls ``function.apply``, of the graph that ``make_fx`` records.
    What is no tensor is kept by the node."""
    others = [Tensor if isinstance(t, Tensor) else t for t in inputs]

    def derivative(*tensors: Tensor) -> Any:
        given = iter(tensors)
        return function.apply(*(next(given) if t is Tensor else t for t in others))

    with disable_proxy_modes_tracing() as mode:
        found = function.compute(*inputs)
    tracer: Any = mode.tracer
    proxies = tuple(tracer.unwrap_proxy(t) for t in inputs if isinstance(t, Tensor))
    node = tracer.create_proxy("call_function", derivative, proxies, {})
    return track_tensor_tree(found, node, constant=None, tracer=tracer)
