"""The proof that a module works token by token: f(concat(a, b)) == concat(f(a), f(b)).

:func:`prove` follows the module's operators at the full length and at the length of a slice: every operator that
touches the tokens must be one that keeps them apart, both lengths must run the same operators with the same numbers,
and nothing but fresh tensors may be written. Only then is the module run for real, on a few of its own tokens: the same
operators must run, and tokens must not be affected by NaN in their neighbours, nor by the number of their neighbours.

The module is given its real input. What it computes from the tokens has no data, so that the wide tensors take no
memory; everything else (weights, constants, caches that it fills) is real. If a tensor without data outlives the trial,
it is computed and replaced, and the module is refused: see :class:`_Record`.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from .hosts import casting_layers, movable_parameters
from .probe import probe, probe_gradients
from .rules import NotTokenwise, TokenAxis, token_axis_of_output
from .run import Inputs, slice_of
from .state import announced, uncompiled, undisturbed
from .watch import Watch

_PROBE_TOKENS = 24


class Backward(NamedTuple):
    """A backward pass written in Python: its name, and the shapes of what its forward pass gave."""

    name: str
    shapes: tuple
    is_known: bool


class Trace(NamedTuple):
    """The result of one trial.

    Attributes:
        steps: the operators with their numbers, comparable between lengths.
        shape, dtype: of the output.
        peak_bytes: most bytes that the run's own tensors take at once, including the output.
        dtypes: of all tensors that held tokens.
        kept: tensors that ``steps`` name by their address, which must not be reused.
        backwards: the backward passes written in Python.
        has_constants: tensors were made that do not depend on the tokens; the module may keep them for later.
    """

    steps: list[Any]
    shape: torch.Size
    dtype: torch.dtype
    peak_bytes: int
    dtypes: set[torch.dtype]
    kept: list[Tensor]
    backwards: list[Backward]
    has_constants: bool

    @property
    def out_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def trace(
    fn: Callable[..., Any],
    module: nn.Module,
    inputs: Inputs,
    tokens: int,
    *,
    strict: bool = True,
    real: bool = False,
    watch: Watch | None = None,
    passing: tuple[type[BaseException], ...] = (),
) -> Trace:
    """Run ``fn`` on the first ``tokens`` tokens, without computing anything from them.

    Weight-casting layers really fetch their weights, as in every call; that memory is not counted.

    Args:
        strict: refuse operators that do not keep tokens apart; False follows the memory only.
        real: compute everything.
        watch: of what the module's code refers to; restored if the trial fails.
        passing: exceptions that say nothing about the module (a host's interrupt): raised as they are.
    Raises:
        NotTokenwise: what keeps the module from being run in slices.
    """
    mode = _Follow(tokens, inputs.x.device, strict, real)
    try:
        found = _traced(mode, fn, module, inputs, passing)
    except BaseException as error:
        _forget_frames(error)
        mode.settle(watch)
        if watch is not None:
            watch.put_back()
        raise
    if mode.settle(watch):
        raise NotTokenwise("keeps values computed from its tokens after the call")
    return found


def _traced(
    mode: _Follow, fn: Callable[..., Any], module: nn.Module, inputs: Inputs, passing: tuple[type[BaseException], ...]
) -> Trace:
    mode.movable = movable_parameters(module)
    layers = casting_layers(module)
    # A tensor that such a layer caches may only be written in the mode in which it was made.
    inference = bool(layers) and torch.is_inference_mode_enabled()
    wants_grad = torch.is_grad_enabled()  # leaving inference mode would turn it on
    with undisturbed(module), uncompiled(module), _as_plain_autograd(wants_grad, inference):
        given = mode.given(inputs)
        with announced(layers, mode.layers), _NoPeeking(mode), mode:
            try:
                out = inputs.call(fn, given)
            except (NotTokenwise, torch.OutOfMemoryError):
                raise
            except passing:
                raise
            except Exception as error:  # whatever foreign code raises during a trial becomes the reason
                raise mode.refusal or NotTokenwise(f"cannot be followed without data: {_one_line(error)}") from error
        if mode.refusal is not None:  # raised inside, and swallowed by the module
            raise mode.refusal
        return mode.trace_of(out, given[0])


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tensors of a trial that the frames of its error hold."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def prove(
    fn: Callable[..., Any],
    module: nn.Module,
    inputs: Inputs,
    lengths: Sequence[int],
    full: Trace,
    watch: Watch | None = None,
    passing: tuple[type[BaseException], ...] = (),
    proven: Trace | None = None,
) -> None:
    """Prove that ``fn`` over slices of these lengths gives what it gives over all tokens, or raise NotTokenwise.

    Args:
        full: the trace at the full length.
        watch, passing: as for :func:`trace`.
        proven: of an earlier proof at another length. Where the same operators run, only the lengths are new.
    """
    count = _probe_tokens(inputs, lengths)
    is_known = proven is not None and proven.steps == full.steps and not full.backwards
    trials = [(length, False) for length in sorted({*lengths} if is_known else {*lengths, count})]
    trials += [] if is_known else [(count, True)]
    for length, real in trials:
        part = trace(fn, module, inputs, length, real=real, watch=watch, passing=passing)
        if _computing(part.steps) != _computing(full.steps) if real else part.steps != full.steps:
            raise NotTokenwise(f"runs different operators on {length} tokens than on {inputs.x.shape[-2]}")
        same = part.shape[:-2] == full.shape[:-2] and part.shape[-1] == full.shape[-1]
        if not same or part.dtype != full.dtype:
            raise NotTokenwise(f"returns a different kind of output for {length} tokens than for {inputs.x.shape[-2]}")
        _check_backwards(full.backwards, part.backwards)
    if is_known:
        return
    try:
        with undisturbed(module), uncompiled(module):
            with torch.no_grad():
                limit = probe(fn, inputs, count, full.dtypes)
            if full.backwards:
                with _hidden_from_checkpoints():
                    probe_gradients(fn, module, inputs, count, limit)
    except (NotTokenwise, torch.OutOfMemoryError):
        raise
    except passing:
        raise
    except Exception as error:
        raise NotTokenwise(f"cannot be tried on a few of its tokens: {_one_line(error)}") from error


def _computing(steps: list[Any]) -> list[Any]:
    """The steps that must be the same with data: some views are only made of tensors without data, and a kernel may
    omit statistics that its schema declares."""
    return [(name, before) for name, before, _, is_view in steps if not is_view]


def _probe_tokens(inputs: Inputs, lengths: Sequence[int]) -> int:
    return min(_PROBE_TOKENS, max(2, *lengths), inputs.x.shape[-2])


def _check_backwards(full: list[Backward], part: list[Backward]) -> None:
    """Refuse a backward pass written in Python, which may mix tokens without any operator showing it; one that computes
    a weight returns the same shape for any number of tokens."""
    for here, there in zip(full, part):
        if not here.is_known and (here.shapes != there.shapes or not here.shapes):
            raise NotTokenwise(f"has a backward pass of its own ({here.name})")


def _backwards_of(out: Tensor) -> list[Backward]:
    nodes, seen = [out.grad_fn], set()
    found: list[Backward] = []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            shapes = tuple(tuple(value.shape) for value in getattr(node, "_input_metadata", ()))
            origin = getattr(type(node), "_forward_cls", type(node))
            found.append(Backward(node.name(), shapes, (origin.__module__, origin.__name__) in _KNOWN_BACKWARDS))
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
    return found


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


class _NoPeeking(TorchFunctionMode):
    """Refuses code that reads a tensor's values in Python, which may decide what runs and change with the next training
    step; or how a tensor was made (view, version, autograd operator), which differs between slices and the whole."""

    def __init__(self, mode: _Follow):
        super().__init__()
        self.mode = mode

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _VALUES and not (self.mode.layers and isinstance(args[0], Tensor) and not self.mode.holds(args[0])):
            raise self.mode.refuse(f"reads the values of a tensor in Python (Tensor.{name})")
        if name in _ORIGINS and isinstance(args[0], Tensor) and self.mode.holds(args[0]):
            raise self.mode.refuse(f"inspects how its input was made (Tensor.{name})")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _as_plain_autograd(wants_grad: bool, inference: bool) -> Iterator[None]:
    """Hides the block from a surrounding checkpoint, and leaves inference mode, in which composite operators arrive
    whole, unless ``inference``."""
    with torch.inference_mode(inference), torch.set_grad_enabled(wants_grad), _hidden_from_checkpoints():
        yield


def _hidden_from_checkpoints() -> contextlib.AbstractContextManager[None]:
    """A surrounding checkpoint counts what is saved for the backward pass, and a backward pass of ours would make it
    recompute the user's block."""
    return torch.autograd.graph.saved_tensors_hooks(_alias, lambda tensor: tensor)


def _alias(tensor: Tensor) -> Tensor:
    """An output that its own operator saves for the backward pass would keep itself alive forever."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return tensor.detach()


class _Follow(TorchDispatchMode):
    """Runs what depends on the tokens without data, everything else (unpacking of weights, constants) as usual."""

    def __init__(self, tokens: int, device: torch.device, strict: bool, real: bool):
        super().__init__()
        self.tokens, self.device, self.strict = tokens, device, strict
        self.real = real or device.type == "meta"  # tensors there have no data anyway
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.steps: list[Any] = []
        self.dtypes: set[torch.dtype] = set()
        self.refusal: NotTokenwise | None = None
        self.kept: list[Tensor] = []
        self.live = self.peak = 0
        self.has_constants = False
        self._axes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of tensors that hold tokens
        self._token_storages: set[int] = set()  # real ones
        self._storages: dict[int, tuple[weakref.ref, int]] = {}  # made in this run: address -> in which step
        self._literals: set[int] = set()
        self._record = _Record()
        self.movable: set[int] = set()
        self.layers: list[int] = []  # weight-casting layers that are running, by number

    def given(self, inputs: Inputs) -> list[Tensor]:
        """The tensors to call with: the input itself, or a slice cut as in a real call."""
        tokens = list(inputs.tokens.values())
        if self.tokens != inputs.x.shape[-2]:
            tokens = [slice_of(tensor, 0, self.tokens) for tensor in tokens]
        for tensor in tokens:
            self._axes[tensor] = TokenAxis(tensor.dim() - 2)
            self._token_storages.add(tensor.untyped_storage()._cdata)
        for leaf in tree_leaves((inputs.args, inputs.kwargs)):
            if isinstance(leaf, Tensor) and leaf not in self._axes:
                self._axes[leaf] = None  # may share memory
        return tokens

    def refuse(self, reason: str) -> NotTokenwise:
        """The exception to raise; remembered in case the module swallows it."""
        self.refusal = self.refusal or NotTokenwise(reason)
        return self.refusal

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` was computed from the tokens, or may have been."""
        return isinstance(tensor, FakeTensor) or self._axes.get(tensor) is not None or self._in_tokens(tensor)

    def axis_of(self, tensor: Tensor) -> TokenAxis | None:
        if tensor in self._axes:
            return self._axes[tensor]
        if isinstance(tensor, FakeTensor) or self._in_tokens(tensor):
            raise NotTokenwise("makes a tensor in a way that cannot be followed")
        return None

    def _in_tokens(self, tensor: Tensor) -> bool:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor not in self._axes
        return plain and _has_storage(tensor) and tensor.untyped_storage()._cdata in self._token_storages

    def created(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def trace_of(self, out: Any, x: Tensor) -> Trace:
        """The result of the trial, which holds none of its tensors."""
        if not isinstance(out, Tensor):
            raise NotTokenwise(f"returns a {type(out).__name__}, not one tensor")
        if not self.holds(out):
            raise NotTokenwise("returns a tensor that does not depend on its input")
        if out.dim() != x.dim() or out.shape[:-1] != x.shape[:-1]:
            raise NotTokenwise(f"turns tokens {list(x.shape)} into {list(out.shape)}, not one output per token")
        if not self.created(out):
            raise NotTokenwise("returns its input")
        backwards = []
        if self.strict:
            if self.axis_of(out) != TokenAxis(out.dim() - 2):
                raise NotTokenwise("moves the tokens to another dimension")
            backwards = _backwards_of(out)
        return Trace(self.steps, out.shape, out.dtype, self.peak, self.dtypes, self.kept, backwards, self.has_constants)

    def settle(self, watch: Watch | None) -> bool:
        """Whether a tensor without data has outlived the trial; it has been computed then."""
        self._axes, self.fake = WeakTensorKeyDictionary(), None  # type: ignore[assignment]
        if not self._record.survivors():
            return False
        gc.collect()
        if watch is not None and self._record.survivors():
            watch.put_back()
        return self._record.make_real()

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
        held = any([self.holds(tensor) for tensor in tensors])
        if self.layers and not held:
            return func(*args, **kwargs)  # the weights are fetched
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        self._check_effects(func, args, kwargs, tensors)
        axis = None
        if self.strict and held:
            axis = token_axis_of_output(func, args, kwargs, self.axis_of, self.tokens)
        sized = axis is not None and func._schema.name in _SIZED
        before = self._described((args, kwargs), sized=sized) if self.strict else None
        known = {tensor.untyped_storage()._cdata for tensor in tensors if _has_storage(tensor)}
        out = self._result(func, args, kwargs, tensors, held, known)
        is_literal = func._schema.name == "aten::lift_fresh"
        self.has_constants |= not (held or is_literal or _is_view(func))
        for result in tree_leaves(out):
            if isinstance(result, Tensor):
                self._mark(func, result, axis, held)
                self._count(result, is_literal, known, held)
        if self.strict:
            self.steps.append((str(func), before, self._described(out), _is_view(func)))
        return out

    def _result(
        self, func: OpOverload, args: tuple, kwargs: dict, tensors: list[Tensor], held: bool, known: set[int]
    ) -> Any:
        """What ``func`` returns; views of the input are real."""
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if not held or self.real or (_is_view(func) and not is_fake):
            return func(*args, **kwargs)

        def without_data(leaf: Any) -> Any:
            if type(leaf) not in (Tensor, nn.Parameter) or not _has_storage(leaf):
                return leaf
            fake = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
            known.add(fake.untyped_storage()._cdata)
            return fake

        with self.fake:
            out = func(*tree_map(without_data, args), **tree_map(without_data, kwargs))
        if func._schema.is_mutable and any(isinstance(result, FakeTensor) for result in tree_leaves(out)):
            out = self._written(func, args, kwargs, out)
        self._record.add(func, args, kwargs, out, lent=bool(self.layers or self.movable))
        return out

    def _written(self, func: OpOverload, args: tuple, kwargs: dict, out: Any) -> Any:
        """An operator in place returns the very tensor that it was given."""
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = _value_of(func, argument.name, args, kwargs)
                if isinstance(value, Tensor) and isinstance(out, Tensor):
                    return value
        return out

    def _check_effects(self, func: OpOverload, args: tuple, kwargs: dict, tensors: list[Tensor]) -> None:
        name = func._schema.name.partition("::")[2]
        if torch.Tag.nondeterministic_seeded in func.tags:
            inside = "; dropout inside it is on" if "dropout" in name or name == "bernoulli_" else ""
            raise NotTokenwise(f"draws random numbers ({name}{inside})")
        if name in _READS and not all(self._is_literal(tensor) for tensor in tensors):
            raise NotTokenwise(f"branches on the values of a tensor ({name})")
        for argument in func._schema.arguments if func._schema.is_mutable else ():
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for written in tree_leaves(_value_of(func, argument.name, args, kwargs)):
                if isinstance(written, Tensor) and not self.created(written):
                    what = "its input" if self.holds(written) else "its own state, a buffer or parameter"
                    raise NotTokenwise(f"writes to {what} ({name})")

    def _is_literal(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._literals

    def _mark(self, func: OpOverload, result: Tensor, axis: TokenAxis | None, held: bool) -> None:
        if not held:
            if self._in_tokens(result):
                self._axes[result] = None  # an argument without tokens that shares memory
            return
        if axis is not None and result.numel() == 0:
            axis = None  # statistics that an operator did not need
        if axis is not None:
            if axis.dim >= result.dim() or result.shape[axis.dim] % (self.tokens * axis.inner):
                raise NotTokenwise(f"operator {func} does not keep one result per token")
            self.dtypes.add(result.dtype)
        self._axes[result] = axis if self.strict else _SOMEWHERE

    def _count(self, tensor: Tensor, is_literal: bool, known: set[int], held: bool) -> None:
        if not _has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._storages or (address in known and not is_literal):
            return
        nbytes = storage.nbytes() if _device_of(tensor) == self.device else 0

        def freed(_: Any) -> None:
            del self._storages[address]
            self._literals.discard(address)
            self._token_storages.discard(address)
            self.live -= nbytes

        self._storages[address] = weakref.ref(storage, freed), len(self.steps)
        if held:
            self._token_storages.add(address)
        if is_literal:
            self._literals.add(address)
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _described(self, values: Any, *, sized: bool = False) -> list[Any]:
        """The part of a step that must be the same at every length. Size arguments of a view are left out: its result
        shows them."""
        leaves = tree_leaves(values)
        return [self._description(leaf) for leaf in leaves if isinstance(leaf, Tensor) or not sized]

    def _description(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        shape, axis = list(leaf.shape), self.axis_of(leaf)
        if axis is not None:
            shape[axis.dim] //= self.tokens
            return "tokens", axis, shape, leaf.dtype
        if leaf in self._axes and self.holds(leaf):
            return "made", shape, leaf.dtype
        if self.layers:
            return "weight of", self.layers[-1], shape, leaf.dtype
        if not _has_storage(leaf):
            return "given", id(leaf), shape, leaf.dtype
        address = leaf.untyped_storage()._cdata
        where = leaf.storage_offset(), shape, leaf.stride(), leaf.dtype
        if id(leaf) in self.movable:
            return "given", id(leaf), where
        if address in self._storages:
            return "made", self._storages[address][1], where
        self.kept.append(leaf)
        literal = leaf.tolist() if leaf.numel() <= _LITERAL_SIZE and _device_of(leaf).type == "cpu" else None
        return "given", address if literal is None else literal, where


class _Number(int):
    """A tensor of a :class:`_Record`, by the order in which they were made."""


class _Record:
    """What a trial did not compute, so that it can be computed if something outlives the trial."""

    def __init__(self) -> None:
        self._steps: list[tuple[OpOverload, tuple, dict, list[_Number | None]]] = []
        self._made: list[weakref.ref] = []
        self._numbers: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._versions: list[tuple[Tensor, int]] = []

    def add(self, func: OpOverload, args: tuple, kwargs: dict, out: Any, *, lent: bool) -> None:
        """Remember one operator with its arguments and its results without data.

        Args:
            lent: a host takes the weights away again after each layer; they must not be kept.
        """
        args, kwargs = tree_map(self._kept, (args, kwargs))
        if lent:
            args, kwargs = tree_map(lambda leaf: _GONE if _is_large(leaf) else leaf, (args, kwargs))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.is_inference()]
        self._versions += [(leaf, leaf._version) for leaf in given]
        numbers = []
        for result in tree_leaves(out):
            if isinstance(result, FakeTensor) and result not in self._numbers:
                self._numbers[result] = _Number(len(self._made))
                self._made.append(weakref.ref(result))
            numbers.append(self._numbers.get(result) if isinstance(result, Tensor) else None)
        self._steps.append((func, args, kwargs, numbers))

    def _kept(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if isinstance(leaf, FakeTensor):
            return self._numbers[leaf]
        return leaf

    def survivors(self) -> list[_Number]:
        """The tensors without data that are still alive."""
        return [_Number(place) for place, refer in enumerate(self._made) if refer() is not None]

    def make_real(self) -> bool:
        """Compute the data of the survivors; returns whether there were any."""
        wanted = self.survivors()
        if not wanted:
            return False
        if any(tensor._version != version for tensor, version in self._versions):
            raise RuntimeError(_STUCK)
        if any(leaf is _GONE for step in self._steps for leaf in tree_leaves(step[1:3])):
            raise RuntimeError(_STUCK)
        with _disable_current_modes(), torch.no_grad():
            values = self._computed(set(wanted))
            fakes = [self._made[number]() for number in wanted]
            self._made, self._numbers = [], WeakTensorKeyDictionary()  # nothing may refer to exchanged tensors
            for number, fake in zip(wanted, fakes):
                try:
                    torch.utils.swap_tensors(fake, values[number])
                except RuntimeError as error:
                    raise RuntimeError(_STUCK) from error
        return True

    def _computed(self, wanted: set[_Number]) -> dict[_Number, Tensor]:
        last = {leaf: place for place, step in enumerate(self._steps) for leaf in tree_leaves(step[1:3])
                if isinstance(leaf, _Number)}  # fmt: skip
        values: dict[_Number, Tensor] = {}

        def real(leaf: Any) -> Any:
            return values[leaf] if isinstance(leaf, _Number) else leaf

        for place, (func, args, kwargs, numbers) in enumerate(self._steps):
            out = func(*tree_map(real, args), **tree_map(real, kwargs))
            values.update({number: value for number, value in zip(numbers, tree_leaves(out)) if number is not None})
            for number in [number for number in values if last.get(number, -1) <= place and number not in wanted]:
                del values[number]
        return values


def _is_large(leaf: Any) -> bool:
    return isinstance(leaf, nn.Parameter) or (isinstance(leaf, Tensor) and leaf.numel() > _LITERAL_SIZE**2)


def _has_storage(tensor: Tensor) -> bool:
    return torch._C._has_storage(tensor)


def _is_view(func: OpOverload) -> bool:
    results = [result.alias_info for result in func._schema.returns]
    return bool(results) and all(alias is not None and not alias.is_write for alias in results)


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
_VALUES = ("tolist", "numpy", "__array__", "data_ptr", "__dlpack__", "storage")
_ORIGINS = ("_version", "_base", "grad_fn", "is_leaf", "_is_view", "storage_offset", "is_inference", "register_hook",
            "untyped_storage", "_typed_storage", "__deepcopy__", "__reduce_ex__", "__reduce__")  # fmt: skip
_KNOWN_BACKWARDS = {
    ("optimum.quanto.tensor.function", "QuantizedLinearFunction"),
    ("optimum.quanto.tensor.weights.qbytes", "WeightQBytesLinearFunction"),
}
_GONE = object()
_SOMEWHERE = TokenAxis(0)
_STUCK = (
    "a feed-forward module keeps values computed from its tokens in a place that cannot be restored after a trial; "
    "exclude it: patch_ffn(..., exclude=...)"
)
