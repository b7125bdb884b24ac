"""How a route's gradients meet autograd's two special requests: a graph of the gradients, and many gradients at once.

``create_graph=True`` asks for gradients that can be differentiated. The routes that compute theirs by hand have no
formula for that, but many programs ask and never differentiate: they get the gradients, attached to a node that raises
when their gradient is asked for.

``is_grads_batched=True`` (``jacobian(vectorize=True)``, ``gradcheck(check_batched_grad=True)``, ``torch.func.vmap``
around ``torch.autograd.grad``) calls a backward once with a tensor that stands for many. Buffers, ``out=`` and launches
by address cannot take one; an operator that torch knows no batching rule for is called once per element instead.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

Grads = tuple[Tensor | None, ...]
Compute = Callable[[Tensor, Tensor | None], Grads]

_computes: dict[int, Compute] = {}  # those that run in the operator right now
_tickets = itertools.count()


def in_any_transform(
    compute: Compute, route: str, grad_out: Tensor, grad_lse: Tensor | None, inputs: Sequence[Tensor | None]
) -> Grads:
    """The gradients that ``compute(grad_out, grad_lse)`` returns, in a form that serves any backward pass.

    Args:
        compute: a gradient or None for each of ``inputs``; it is called without a graph, once per element of a batch.
        route: its name, for the error of differentiating the gradients.
        inputs: the tensors besides grad_out and grad_lse on which the gradients depend.
    """
    if torch.is_grad_enabled():
        return _NoSecondOrder.apply(compute, route, grad_out, grad_lse, *inputs)
    return _one_by_one(compute, grad_out, grad_lse, len(inputs))


class _NoSecondOrder(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: Compute, route: str, grad_out: Tensor, grad_lse: Tensor | None, *inputs: Tensor | None
    ) -> Grads:
        ctx.route = route
        return _one_by_one(compute, grad_out, grad_lse, len(inputs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        raise RuntimeError(
            f"gradients of gradients must be taken with route='math', got a {ctx.route} call; "
            "pass config=AttentionConfig(route='math', math_limit_mib=...)"
        )


def _one_by_one(compute: Compute, grad_out: Tensor, grad_lse: Tensor | None, count: int) -> Grads:
    if not (_is_batched(grad_out) or (grad_lse is not None and _is_batched(grad_lse))):
        return compute(grad_out, grad_lse)
    given: list[bool] = []

    def noted(*grads_in: Any) -> Grads:
        grads = compute(*grads_in)
        given[:] = [grad is not None for grad in grads]
        return grads

    ticket = next(_tickets)
    _computes[ticket] = noted
    try:
        grads = _operator(count)(grad_out, grad_lse, ticket)
    finally:
        del _computes[ticket]
    return tuple(grad if there else None for grad, there in zip(grads, given))


def _is_batched(tensor: Tensor) -> bool:
    functorch = torch._C._functorch
    return functorch.is_legacy_batchedtensor(tensor) or functorch.is_batchedtensor(tensor)


@cache
def _operator(count: int) -> Any:
    """``pascal_attn::gradients_5`` (of query, key, value, attn_mask and sinks), or of more: registered when it is first
    needed."""
    library = torch.library.Library("pascal_attn", "FRAGMENT")
    name, results = f"gradients_{count}", ", ".join(["Tensor"] * count)
    library.define(f"{name}(Tensor grad_out, Tensor? grad_lse, int ticket) -> ({results})")
    library.impl(name, _run, "CompositeExplicitAutograd")
    if hasattr(torch.library, "register_vmap"):  # torch.func loops without it as well, but with a warning
        torch.library.register_vmap(f"pascal_attn::{name}", functools.partial(_run_each, count), lib=library)
    _libraries.append(library)  # its operators end with it
    return getattr(torch.ops.pascal_attn, name)


_libraries: list[Any] = []


def _run(grad_out: Tensor, grad_lse: Tensor | None, ticket: int) -> tuple[Tensor, ...]:
    with torch.no_grad():
        grads = _computes[ticket](grad_out, grad_lse)
    return tuple(grad_out.new_empty(0) if grad is None else grad for grad in grads)


def _run_each(
    count: int, info: Any, in_dims: tuple[int | None, ...], grad_out: Tensor, grad_lse: Tensor | None, ticket: int
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """:func:`_run` as torch.func wants it: for each element of a batch."""
    results = []
    for i in range(info.batch_size):
        parts = (t if t is None or dim is None else t.select(dim, i) for t, dim in zip((grad_out, grad_lse), in_dims))
        results.append(_operator(count)(*parts, ticket))
    return tuple(torch.stack(grads) for grads in zip(*results)), (0,) * count
