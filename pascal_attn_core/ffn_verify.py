"""The proof that a module works token by token: f(concat(a, b)) == concat(f(a), f(b)).

:func:`prove` follows the module's operators on tensors without data, at the full length and at the length of a slice:
every operator that touches the tokens must be one that keeps them apart, both lengths must run the same operators with
the same numbers, and nothing but fresh tensors may be written. Only then is the module run for real, on a few of its
own tokens: tokens must not see NaN planted in their neighbours, nor care how many neighbours they have.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .ffn_probe import probe
from .ffn_rules import NotTokenwise, TokenAxis, token_axis_of_output
from .ffn_run import Inputs
from .ffn_state import announced, casting_layers, movable_parameters, undisturbed

_PROBE_TOKENS = 24


class Trace(NamedTuple):
    """What one run without data showed.

    Attributes:
        steps: the operators with their numbers, comparable between lengths.
        out: the output, without data; None if it is not one tensor.
        peak_bytes: most bytes that the run's own tensors take at once, the output among them.
        dtypes: of all tensors that held tokens.
        kept: tensors that ``steps`` name by their address, which must not be used again.
    """

    steps: list[Any]
    out: Tensor
    peak_bytes: int
    dtypes: set[torch.dtype]
    kept: list[Tensor]


def trace(
    fn: Callable[..., Any],
    module: nn.Module,
    inputs: Inputs,
    tokens: int,
    *,
    strict: bool = True,
    passing: tuple[type[BaseException], ...] = (),
) -> Trace:
    """Run ``fn`` on ``tokens`` tokens without data and without touching anything outside.

    Weight-casting layers bring their weights for real, as in every call; that memory is not counted.

    Args:
        strict: refuse operators that do not keep tokens apart; False follows the memory only.
        passing: exceptions that say nothing about the module (a host's interrupt): raised as they are.
    Raises:
        NotTokenwise: what keeps the module from being run in slices.
    """
    mode = _Follow(tokens, inputs.x.device, strict)
    fakes = [mode.fake_input(tensor, tokens) for tensor in inputs.tokens.values()]
    mode.movable = movable_parameters(module)
    layers = casting_layers(module)
    # What such a layer keeps between calls may only be written in the mode that it was made in.
    inference = bool(layers) and torch.is_inference_mode_enabled()
    wants_grad = torch.is_grad_enabled()  # leaving inference mode would turn it on
    with (
        undisturbed(module),
        _as_plain_autograd(wants_grad, inference),
        announced(layers, mode.layers),
        _NoPeeking(mode.layers),
        mode,
    ):
        try:
            out = inputs.call(fn, fakes)
        except (NotTokenwise, torch.OutOfMemoryError):
            raise
        except passing:
            raise
        except Exception as error:  # whatever foreign code raises on a trial becomes the reason
            raise mode.refusal or NotTokenwise(f"cannot be followed without data: {_one_line(error)}") from error
    if mode.refusal is not None:  # raised inside, and swallowed by the module
        raise mode.refusal
    return Trace(mode.steps, _checked_output(mode, out, fakes[0]), mode.peak, mode.dtypes, mode.kept)


def prove(
    fn: Callable[..., Any],
    module: nn.Module,
    inputs: Inputs,
    lengths: Sequence[int],
    full: Trace,
    passing: tuple[type[BaseException], ...] = (),
) -> None:
    """Prove that ``fn`` over slices of these lengths gives what it gives over all tokens, or raise NotTokenwise.

    Args:
        full: the trace at the full length.
        passing: as for :func:`trace`.
    """
    for length in sorted({*lengths, _probe_tokens(inputs, lengths)}):
        part = trace(fn, module, inputs, length, passing=passing)
        if part.steps != full.steps:
            raise NotTokenwise(f"runs other operators on {length} tokens than on {inputs.x.shape[-2]}")
        same = part.out.shape[:-2] == full.out.shape[:-2] and part.out.shape[-1] == full.out.shape[-1]
        if not same or part.out.dtype != full.out.dtype:
            raise NotTokenwise(f"gives another kind of output on {length} tokens than on {inputs.x.shape[-2]}")
    with undisturbed(module), torch.no_grad():
        probe(fn, inputs, _probe_tokens(inputs, lengths), full.dtypes)


def _probe_tokens(inputs: Inputs, lengths: Sequence[int]) -> int:
    return min(_PROBE_TOKENS, max(2, *lengths), inputs.x.shape[-2])


def _checked_output(mode: _Follow, out: Any, x: Tensor) -> Tensor:
    if not isinstance(out, FakeTensor):
        raise NotTokenwise(f"returns a {type(out).__name__}, not one tensor")
    if out.dim() != x.dim() or out.shape[:-1] != x.shape[:-1]:
        raise NotTokenwise(f"turns tokens {list(x.shape)} into {list(out.shape)}, not one output per token")
    if not mode.created(out):
        raise NotTokenwise("returns its input")
    if mode.strict and mode.axis_of(out) != TokenAxis(out.dim() - 2):
        raise NotTokenwise("moves the tokens to another dimension")
    if mode.strict:
        _check_backward(out)
    return out


def _check_backward(out: Tensor) -> None:
    """A backward pass written in Python may mix tokens, and none of the operators seen would show it."""
    nodes, seen = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise NotTokenwise(f"has a backward pass of its own ({node.name()})")
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


class _NoPeeking(TorchFunctionMode):
    """Values read from a tensor in Python may decide what runs, and the next training step changes them."""

    def __init__(self, layers: list[int]):
        super().__init__()
        self.layers = layers

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "__array__", "data_ptr", "__dlpack__", "storage") and not (
            self.layers and isinstance(args[0], Tensor) and not isinstance(args[0], FakeTensor)
        ):
            raise NotTokenwise(f"looks at the values of a tensor in Python (Tensor.{name})")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _as_plain_autograd(wants_grad: bool, inference: bool) -> Iterator[None]:
    """Unseen by a surrounding checkpoint, which counts what is saved for the backward pass; and unless ``inference``
    outside inference mode, where operators arrive unsplit."""
    keep = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.inference_mode(inference), torch.set_grad_enabled(wants_grad), keep:
        yield


class _Follow(TorchDispatchMode):
    """Runs what depends on the input without data, everything else (weights being unpacked) as it is."""

    def __init__(self, tokens: int, device: torch.device, strict: bool):
        super().__init__()
        self.tokens, self.device, self.strict = tokens, device, strict
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.steps: list[Any] = []
        self.dtypes: set[torch.dtype] = set()
        self.refusal: NotTokenwise | None = None
        self.kept: list[Tensor] = []
        self.live = self.peak = 0
        self._storages: dict[int, tuple[weakref.ref, int]] = {}  # made in this run: address -> in which step
        self._literals: set[int] = set()
        self.movable: set[int] = set()
        self.layers: list[int] = []  # weight-casting layers that are running, by number

    def fake_input(self, tensor: Tensor, tokens: int) -> Tensor:
        shape = (*tensor.shape[:-2], tokens, tensor.shape[-1])
        with self.fake:
            fake: Any = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        fake.requires_grad_(tensor.requires_grad)
        fake._token_axis = TokenAxis(tensor.dim() - 2)
        return fake

    def axis_of(self, tensor: Tensor) -> TokenAxis | None:
        if not isinstance(tensor, FakeTensor):
            return None
        try:
            return tensor._token_axis  # type: ignore[attr-defined]
        except AttributeError:
            raise NotTokenwise("makes a tensor in a way that cannot be followed") from None

    def created(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        try:
            with torch._C.DisableTorchFunction():
                return self._run(func, args, kwargs)
        except NotTokenwise as refusal:
            self.refusal = self.refusal or refusal
            raise

    def _run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if not isinstance(func, OpOverload):
            raise NotTokenwise(f"operator {func} cannot be followed")
        if func is torch.ops.prim.device.default:
            return _device_of(args[0])
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self.layers and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)  # the weights are brought
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        self._check_effects(func, args, kwargs, tensors)
        axis = None
        if self.strict and any(self.axis_of(tensor) is not None for tensor in tensors):
            axis = token_axis_of_output(func, args, kwargs, self.axis_of, self.tokens)
        without_data = not tensors or any(isinstance(tensor, FakeTensor) for tensor in tensors)
        sized = axis is not None and func._schema.name in _SIZED
        before = self._described((args, kwargs), sized=sized) if self.strict else None
        known = {tensor.untyped_storage()._cdata for tensor in tensors}
        with self.fake if without_data else contextlib.nullcontext():
            out = func(*args, **kwargs)
        for result in tree_leaves(out):
            if isinstance(result, Tensor):
                self._mark(func, result, axis)
                self._count(result, func._schema.name == "aten::lift_fresh", known)
        if self.strict:
            self.steps.append((str(func), before, self._described(out)))
        return out

    def _check_effects(self, func: OpOverload, args: tuple, kwargs: dict, tensors: list[Tensor]) -> None:
        name = func._schema.name.partition("::")[2]
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotTokenwise(f"draws random numbers ({name})")
        if name in _READS and not all(self._is_literal(tensor) for tensor in tensors):
            raise NotTokenwise(f"chooses its path by the values of a tensor ({name})")
        for argument in func._schema.arguments if func._schema.is_mutable else ():
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for written in tree_leaves(_value_of(func, argument.name, args, kwargs)):
                if isinstance(written, Tensor) and not self.created(written):
                    what = "its input" if isinstance(written, FakeTensor) else "its own state, a buffer or parameter"
                    raise NotTokenwise(f"writes to {what} ({name})")

    def _is_literal(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._literals

    def _mark(self, func: OpOverload, result: Any, axis: TokenAxis | None) -> None:
        if not isinstance(result, FakeTensor):
            return
        if axis is not None and result.numel() == 0:
            axis = None  # statistics that an operator did not need
        if axis is not None:
            if axis.dim >= result.dim() or result.shape[axis.dim] % (self.tokens * axis.inner):
                raise NotTokenwise(f"operator {func} does not keep one result per token")
            self.dtypes.add(result.dtype)
        result._token_axis = axis  # type: ignore[attr-defined]

    def _count(self, tensor: Tensor, is_literal: bool, known: set[int]) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._storages or (address in known and not is_literal):
            return
        nbytes = storage.nbytes() if _device_of(tensor) == self.device else 0

        def freed(_: Any) -> None:
            del self._storages[address]
            self._literals.discard(address)
            self.live -= nbytes

        self._storages[address] = weakref.ref(storage, freed), len(self.steps)
        if is_literal:
            self._literals.add(address)
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _described(self, values: Any, *, sized: bool = False) -> list[Any]:
        """What must be the same at every length. Sizes asked of a view are left out: its result shows them."""
        leaves = tree_leaves(values)
        return [self._description(leaf) for leaf in leaves if isinstance(leaf, Tensor) or not sized]

    def _description(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape, axis = list(leaf.shape), self.axis_of(leaf)
        if axis is not None:
            shape[axis.dim] //= self.tokens
            return "tokens", axis, shape, leaf.dtype
        if isinstance(leaf, FakeTensor):
            return "made", shape, leaf.dtype
        if self.layers:
            return "weight of", self.layers[-1], shape, leaf.dtype
        address = leaf.untyped_storage()._cdata
        where = leaf.storage_offset(), shape, leaf.stride(), leaf.dtype
        if id(leaf) in self.movable:
            return "given", id(leaf), where
        if address in self._storages:
            return "made", self._storages[address][1], where
        self.kept.append(leaf)
        literal = leaf.tolist() if leaf.numel() <= _LITERAL_SIZE and _device_of(leaf).type == "cpu" else None
        return "given", address if literal is None else literal, where


def _is_composite(func: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _device_of(tensor: Tensor) -> torch.device:
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device  # .device is an operator there


def _value_of(func: OpOverload, name: str, args: tuple, kwargs: dict) -> Any:
    if name in kwargs:
        return kwargs[name]
    place = [argument.name for argument in func._schema.arguments].index(name)
    return args[place] if place < len(args) else None


_LITERAL_SIZE = 64
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_SIZED = {"aten::view", "aten::_unsafe_view", "aten::reshape", "aten::expand", "aten::_reshape_alias"}
_READS = ("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose")
