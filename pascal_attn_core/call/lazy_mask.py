"""A mask that is a rule, not a tensor: evaluated for one tile at a time, so that no L*S mask exists."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class MaskRule:
    """A rule known by its name ``"module:qualified name"``: what :func:`mask_rule` makes of a function."""

    def __init__(self, function: Callable[..., Tensor]):
        self.function, self.name = function, f"{function.__module__}:{function.__qualname__}"

    def __call__(self, *arguments: Tensor) -> Tensor:
        return self.function(*arguments)

    def __repr__(self) -> str:
        return f"mask_rule({self.name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return rule_named, (self.name, True)


_rules: dict[str, MaskRule] = {}


def mask_rule(function: Callable[..., Tensor]) -> MaskRule:
    """Register a rule for :class:`LazyMask` under its name, so that ``torch.compile`` can keep it a rule.

    A compiled graph holds tensors, numbers and strings, no Python functions. It calls a registered rule by its name and
    holds the tensors that the rule reads, so these must be arguments, not variables of a closure::

        @mask_rule
        def alibi(batch, head, query, key, slopes):
            return -slopes[batch, head] * (query - key).abs()

        mask = LazyMask((B, H, L, S), alibi, device=query.device, dtype=torch.float32, tensors=(slopes,))

    A rule that is not registered ends the graph at the call of :func:`pascal_attn_core.sdpa`, and with
    ``fullgraph=True`` raises.

    Args:
        function: defined at the top level of a module.
    Raises:
        ValueError: a function inside another one, or a lambda, which no other process could find by its name.
    """
    if "<" in function.__qualname__:
        raise ValueError(f"a mask_rule must be defined at the top level of a module, got {function.__qualname__}")
    rule = MaskRule(function)
    _rules[rule.name] = rule
    return rule


def rule_named(name: str, may_import: bool = False) -> MaskRule:
    """The rule of that :attr:`MaskRule.name`.

    Args:
        may_import: import its module if that has not happened, as unpickling does. The name in a saved graph is data
            from a file and imports nothing but modules of this package.
    Raises:
        LookupError: there is none.
    """
    if name not in _rules and (may_import or name.startswith(f"{__package__}.")):
        importlib.import_module(name.partition(":")[0])
    if name not in _rules:
        raise LookupError(f"no mask_rule is registered as {name!r}: import the module that defines it first")
    return _rules[name]


class LazyMask:
    """Passed as ``attn_mask`` to :func:`pascal_attn_core.sdpa`.

    Args:
        shape: (B, Hq, L, S); any of them may be 1, which broadcasts: the rule is then evaluated for index 0 only.
        rule: called with int64 index tensors batch ``[b, 1, 1, 1]``, head ``[1, h, 1, 1]``, query ``[1, 1, q, 1]`` and
            key ``[1, 1, 1, k]``, then with ``tensors``. It returns the values of the mask there, in a shape that
            broadcasts to ``[b, h, q, k]``: bool (True = takes part) or float (added). It may be called again for the
            gradients and must then give the same. It gets no gradient. Under ``torch.compile`` see :func:`mask_rule`.
        device: of the index tensors and the result.
        dtype: bool or a float dtype: which of the two the rule returns. None: found by evaluating the rule for one
            element when it is first needed.
        tensors: what the rule reads besides the indices, on ``device``.
    Raises:
        TypeError, ValueError: here, arguments that do not fit; in a call, a rule that returns something else than the
            mask's kind of dtype on its device in a shape that broadcasts: every tile is checked.
    What the rule itself allocates is read off a small tile, and counts in the memory budget.
    """

    ndim = 4
    requires_grad = False

    def __init__(
        self,
        shape: Sequence[int],
        rule: Callable[..., Tensor],
        *,
        device: torch.device | str,
        dtype: torch.dtype | None = None,
        tensors: Sequence[Tensor] = (),
    ):
        if len(shape) != 4:
            raise ValueError(f"shape must be (B, H, L, S), got {tuple(shape)}")
        if not callable(rule):
            raise TypeError(f"rule must be a function, got {type(rule).__name__}")
        if dtype is not None and dtype != torch.bool and dtype not in _FLOATS:
            raise TypeError(f"dtype must be bool, a float dtype or None, got {dtype}")
        for size in shape:
            if operator.index(size) < 0:
                raise ValueError(f"shape must hold no negative size, got {tuple(shape)}")
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"tensors must hold tensors, got {type(tensor).__name__}")
        self.shape, self.rule, self.tensors = torch.Size(shape), rule, tuple(tensors)
        self.device, self._dtype = torch.device(device), dtype

    @property
    def dtype(self) -> torch.dtype:
        """bool, or the float dtype of what is added."""
        if self._dtype is None:
            self._dtype = self._kind()
        return self._dtype

    def dim(self) -> int:
        return 4

    def on(self, device: torch.device) -> LazyMask:
        """This rule with its indices on another device."""
        return LazyMask(self.shape, self.rule, device=device, dtype=self._dtype, tensors=self.tensors)

    def at(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The rule's values for some elements, checked: bool or float, broadcastable to ``[b, h, q, k]``.

        Args:
            batch: int64 ``[b, 1, 1, 1]``; head ``[1, h, 1, 1]``; query ``[1, 1, q, 1]``; key ``[1, 1, 1, k]``.
        """
        values = self.rule(batch, head, query, key, *self.tensors)
        self._check(values, (batch.shape[0], head.shape[1], query.shape[2], key.shape[3]))
        return values

    def tile(self, batch: int, heads: tuple[int, int], queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """``[heads, queries, keys]`` of one batch element; ranges are first and one-past-last."""
        spans = ((batch, batch + 1), heads, queries, keys)
        own = [(0, 1) if size == 1 else span for size, span in zip(self.shape, spans)]
        ranges = [torch.arange(*span, device=self.device) for span in own]
        shapes = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))
        values = self.at(*(r.view(s) for r, s in zip(ranges, shapes)))
        lengths = (1, heads[1] - heads[0], queries[1] - queries[0], keys[1] - keys[0])
        return values.expand(lengths)[0]

    def dense(self) -> Tensor:
        """The equivalent tensor in the mask's shape: O(L*S) memory."""
        batch, heads, queries, keys = self.shape
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return torch.stack([self.tile(b, (0, heads), (0, queries), (0, keys)) for b in range(batch)])

    def _kind(self) -> torch.dtype:
        if 0 in self.shape:
            return torch.bool  # no element: what the rule would say does not matter
        first = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=self.device)
        values = self.rule(first, first, first, first, *self.tensors)
        if isinstance(values, Tensor) and (values.dtype == torch.bool or values.dtype in _FLOATS):
            return values.dtype
        raise TypeError(f"the rule of a LazyMask must return a bool or float tensor, got {_described(values)}")

    def _check(self, values: Any, sizes: tuple[int, ...]) -> None:
        try:
            dtype, shape, device = values.dtype, values.shape, values.device
        except AttributeError:
            raise TypeError(f"the rule of a LazyMask must return a tensor, got {_described(values)}") from None
        expected = self.dtype
        if dtype != expected and (expected == torch.bool or dtype not in _FLOATS):
            name = str(expected).removeprefix("torch.")
            hint = f"; pass LazyMask(..., dtype={dtype})" if dtype in (torch.bool, *_FLOATS) else ""
            raise TypeError(f"the rule of a LazyMask of {name} must return that, got {_described(values)}{hint}")
        if device != self.device and (device.type != self.device.type or self.device.index is not None):
            raise ValueError(f"the rule of a LazyMask must return a tensor on {self.device}, got one on {device}")
        if len(shape) > 4 or any(n not in (1, size) for n, size in zip(reversed(shape), reversed(sizes))):
            raise ValueError(f"the rule of a LazyMask must return what broadcasts to {sizes}, got {tuple(shape)}")


def _described(values: Any) -> str:
    if isinstance(values, Tensor):
        return f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
    return type(values).__name__
