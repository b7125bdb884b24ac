"""How a route's gradients meet autograd's request for a graph of them.

``create_graph=True`` asks for gradients that can be differentiated. The routes that compute theirs by hand have no
formula for that, but many programs ask and never differentiate: they get the gradients, attached to a node that raises
when their gradient is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Grads = tuple[Tensor | None, ...]
Compute = Callable[[Tensor, Tensor | None], Grads]


def in_any_graph(
    compute: Compute, route: str, grad_out: Tensor, grad_lse: Tensor | None, inputs: Sequence[Tensor | None]
) -> Grads:
    """The gradients that ``compute(grad_out, grad_lse)`` returns, in a form that serves any backward pass.

    Args:
        compute: a gradient or None for each of ``inputs``; it is called without a graph.
        route: its name, for the error of differentiating the gradients.
        inputs: the tensors besides grad_out and grad_lse on which the gradients depend.
    Raises:
        RuntimeError: the backward pass is for many gradients at once (``is_grads_batched``, ``torch.func.vmap``).
    """
    functorch, given = torch._C._functorch, [t for t in (grad_out, grad_lse) if t is not None]
    if any(functorch.is_legacy_batchedtensor(t) or functorch.is_batchedtensor(t) for t in given):
        raise RuntimeError(f"many gradients at once must be taken with route='math', got a {route} call")
    with torch.no_grad():
        grads = compute(grad_out, grad_lse)
    if not torch.is_grad_enabled():
        return grads
    error = (
        f"gradients of gradients must be taken with route='math', got a {route} call; "
        "pass config=AttentionConfig(route='math', math_limit_mib=...)"
    )
    sources: list[Any] = [*grads, *given, *inputs]
    return torch._C._functions.DelayedError(error, len(sources))(*sources)[: len(grads)]
