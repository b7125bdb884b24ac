"""One call of a module whose operators are noted before they run: its code runs once, on tensors that have the shapes
of the whole call but no data yet; then the operators run, slice by slice.

So the code sees the lengths, numbers and state that it would see anyway, and changes its state once. Some operators
cannot be put off: those that are not in the table of :mod:`.rules`, and those that write to a tensor from outside.
Where one comes, or the code asks for a value, all operators noted so far run on all tokens at once. The rest of the
call then runs as it would without this module.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..observe.memory import is_composite, mapped, tensors_in
from ..observe.without_data import results_without_data, storage_of, written_by
from .plan import as_whole
from .rules import Along, Call, Later, NotTokenwise, along_results, rule_of

_PLAIN = (
    "dim element_size is_complex is_contiguous is_floating_point is_tensor ndimension nelement numel result_type size "
    "storage_offset stride type __hash__ __len__ .device .dtype .is_cpu .is_cuda .is_meta .is_mps .is_nested "
    ".is_quantized .is_sparse .is_xpu .itemsize .layout .nbytes .ndim .requires_grad .shape"
)
"""Functions and attributes (with a dot) that a stand-in answers as its value would, without an operator."""
_OPERATORS = ".T .mT .H .mH .real .imag .data"
_plain, _operators = frozenset(_PLAIN.split()), frozenset(_OPERATORS.split())
_places: dict[int, tuple[Place, weakref.ref[Tensor]]] = {}  # by address


@dataclass(slots=True, eq=False)
class Place:
    """A stand-in in its graph: its number, shape and strides, tokens (None = none), and value, once it is computed."""

    graph: Any
    number: int
    like: Tensor
    along: Along | None
    value: Tensor | None = None


class StandIn(Tensor):
    """A tensor whose operators have been noted. While the module's code runs its class is torch.Tensor, which code may
    ask for; only the modes of its graph see it then. It gets this class if it outlives the call."""

    @staticmethod
    def of(place: Place, device: Any) -> Tensor:
        like = place.like
        layout = like.shape, like.stride(), like.storage_offset()
        made = Tensor._make_wrapper_subclass(StandIn, *layout, dtype=like.dtype, device=device)
        torch._C._set_throw_on_mutable_data_ptr(made)
        return _noted(made, place)

    @staticmethod
    def saved(tensor: Tensor) -> Tensor:
        """Return what autograd saves of a tensor: another one, since a result must not keep itself alive."""
        return tensor.detach() if (place := place_of(tensor)) is None else StandIn.of(place, tensor.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return on_values(func, args, kwargs or {})


def _noted(made: Tensor, place: Place) -> Tensor:
    address = id(made)
    _places[address] = place, weakref.ref(made, lambda _: _places.pop(address, None))
    return made


def place_of(value: Any) -> Place | None:
    return found[0] if (found := _places.get(id(value))) else None


def places_of(graph: Any) -> list[tuple[Place, Tensor]]:
    """The stand-ins of a graph that are in use, those that autograd has saved included."""
    return [
        (place, leaf) for place, ref in list(_places.values()) if place.graph is graph and (leaf := ref()) is not None
    ]


def exchange(leaf: Tensor) -> None:
    """Make a plain tensor of a stand-in that has a value, where that is possible."""
    place: Any = _places.pop(id(leaf))[0]  # a tensor with a weak reference cannot be exchanged
    try:
        torch.utils.swap_tensors(leaf, place.value.view_as(place.value))
    except RuntimeError:  # autograd has it too
        _noted(leaf, place).__class__ = StandIn


class _Refused(BaseException):
    """An operator cannot be put off: its function is called on values instead. The module's code must not catch it."""


class _Functions(TorchFunctionMode):
    """Sees what code asks of a stand-in without an operator."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.graph = graph

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        graph, kwargs, name = self.graph, kwargs or {}, getattr(func, "__name__", "")
        is_set = name in ("__set__", "__delete__")
        if is_set or name == "__get__":
            name = f".{getattr(func.__self__, '__name__', '')}"
        if (name in _plain and not is_set) or not any(map(place_of, tensors_in((*args, *kwargs.values())))):
            return func(*args, **kwargs)
        why = f"asks for {name.strip('._')} of a tensor of its tokens"
        if not (graph.why or is_set) and (not name.startswith(".") or name in _operators):
            before, graph.may_refuse = graph.met, True
            try:
                out = func(*args, **kwargs)
                if graph.met > before or (out is args[0] and not name.endswith("_")):  # such as contiguous
                    return out
            except _Refused as reason:
                why = str(reason)
            except (RuntimeError, TypeError, NotImplementedError):
                pass  # said again below, if it is right
            finally:
                graph.may_refuse = False
        graph.catch_up(why)
        return on_values(func, args, kwargs)


class _Enter(torch.autograd.Function):
    """A stand-in for an input; its gradient is the input's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, graph: Graph) -> Tensor:
        return graph.input_of(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


# An operator or a layer: a function of values by number, first token and length; the numbers that it takes and makes.
Step = tuple[Callable[..., Any], list[int], list[int | None]]


class Graph(TorchDispatchMode):
    """Notes the operators of a block on stand-ins, which :attr:`args` and :attr:`kwargs` have in place of the tensors
    that carry tokens, :attr:`real` [..., T, *]: the first argument, and each further one with as many entries in
    dimension -2. Others are the same for every slice, or have an entry for each token where an operator meets them.

    ``why`` says why the rest of the block ran as ever; "" = it was noted to its end.
    """

    supports_higher_order_operators = True

    def __init__(self, args: tuple, kwargs: dict[str, Any]):
        super().__init__()
        self.tokens = (*args, *kwargs.values())[0].shape[-2]
        self.why, self.steps = "", list[Step]()
        self.real, self.likes = list[Tensor](), list[Tensor]()  # of all stand-ins, by number
        self.met, self.may_refuse = 0, False  # operators on stand-ins; within a function that has written to none
        self._mode = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self._unseen = contextlib.ExitStack()  # what autograd saves of stand-ins, by hooks of the caller
        self._held: set[int] = set()  # storages from outside that a noted operator will read
        self.args, self.kwargs = [self._given(x) for x in args], {name: self._given(x) for name, x in kwargs.items()}
        self._inputs = set(map(storage_of, self.likes))

    def _given(self, x: Any) -> Any:
        if type(x) is not Tensor or x.dim() < 2 or x.shape[-2] != self.tokens:
            return x
        self.real.append(x)
        return _Enter.apply(x, self) if self._mode[1] and x.requires_grad else self.input_of(x)

    def input_of(self, x: Tensor) -> Tensor:
        made = self._new(like_of(x), x.device, Along(x.dim() - 2))
        made.__dict__.update(x.__dict__)
        return made

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        with self._unseen, self, _Functions(self):
            if self._mode[1]:
                self._unseen.enter_context(saved_tensors_hooks(StandIn.saved, lambda saved: saved))
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any("__tensor_flatten__" in vars(kind) for kind in types):
            return NotImplemented  # a wrapper around tensors unwraps itself, and its operators are seen then
        kwargs, is_operator = kwargs or {}, isinstance(func, OpOverload)
        places = [place for leaf in tensors_in((*args, *kwargs.values())) if (place := place_of(leaf))]
        self.met += bool(places)
        why = ""
        if any(place.value is None for place in places):
            try:
                if not is_operator or any(place.graph is not self for place in places):
                    raise NotTokenwise(f"runs {func}")
                if rule_of(func._schema.name.removeprefix("aten::")) is None and is_composite(func):
                    with self:
                        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
                with torch._C.DisableTorchFunctionSubclass():
                    return self._note(func, args, kwargs, places)
            except NotTokenwise as reason:
                why = str(reason)
            except (NotImplementedError, RuntimeError, TypeError) as error:
                why = f"runs {func}: {' '.join(str(error).split())[:160]}"
        elif self._held and is_operator and func._schema.is_mutable:
            is_read = not self._held.isdisjoint(map(storage_of, written_by(func, args, kwargs)))
            why = "writes to a tensor that an operator before it reads" if is_read else ""
        if why and self.may_refuse:
            raise _Refused(why)
        if why:
            with enable_reentrant_dispatch():
                self.catch_up(why)
        with torch._C.DisableTorchFunctionSubclass():  # which would turn results into the classes of a host's weights
            return on_values(func, args, kwargs)

    def _note(self, func: OpOverload, args: tuple, kwargs: dict[str, Any], places: list[Place]) -> Any:
        if self._mode != (torch.is_inference_mode_enabled(), torch.is_grad_enabled()):
            raise NotTokenwise("has a backward pass of its own, or parts without gradients")
        written = written_by(func, args, kwargs) if func._schema.is_mutable else []
        owners = [place_of(leaf) for leaf in written]
        if any(owner is None or storage_of(owner.like) in self._inputs for owner in owners):
            raise NotTokenwise("writes to its input, or to a tensor that it keeps between calls")
        held, named = mapped(self._held_now, (args, kwargs))
        call = Call(func._schema, held, named, self.tokens, lambda leaf: getattr(place_of(leaf), "along", None))
        results = results_without_data(func, *mapped(like_of, (args, kwargs)))
        call.shape = next(tensors_in((results,))).shape
        along = along_results(call, len(places)) if None not in [place.along for place in places] else None
        if along is None or (written and [owner.along for owner in owners if owner] != [along]):
            raise NotTokenwise(f"runs {func}, which is not known to treat every token by itself")
        device = kwargs.get("device") or next(leaf.device for leaf in tensors_in(args) if place_of(leaf))
        outs = written[0] if written else mapped(lambda like: self._new(like, device, along), results)
        self.may_refuse &= not written
        given = list(call.given.values())[: len(args)], {name: call[name] for name in kwargs}
        self._add(functools.partial(_run_operator, func, *mapped(_later, given)), places, outs)
        return outs

    def _add(self, run: Callable[..., Any], places: list[Place], outs: Any) -> None:
        several = outs if isinstance(outs, (list, tuple)) else [outs]
        makes = [getattr(place_of(out), "number", None) for out in several]
        self.steps.append((run, [place.number for place in places], makes))

    def _new(self, like: Any, device: Any, along: Along | None) -> Any:
        if not isinstance(like, Tensor) or along is None:
            return like
        has_tokens = like.dim() > along.dim and like.shape[along.dim] == along.before * self.tokens * along.after
        self.likes.append(like)
        made = StandIn.of(Place(self, len(self.likes) - 1, like, along if has_tokens else None), device)
        made.__class__ = Tensor
        return made

    def _held_now(self, value: Any) -> Any:
        """A tensor from outside with the memory that it has now: its host may exchange it before the operator runs."""
        if not isinstance(value, Tensor) or place_of(value):
            return value
        self._held.add(storage_of(value))
        if value.is_cuda:  # or free it
            value.record_stream(torch.cuda.current_stream(value.device))
        return value if value.requires_grad and self._mode[1] else value.detach()

    def note_layer(self, forward: Callable[[Tensor], Any], x: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
        """Note a call of a layer that gives ``channels`` for each token."""
        place: Any = place_of(x)
        with _disable_current_modes():
            like = torch.empty((*x.shape[:-1], channels), dtype=dtype, device="meta")
        made = self._new(like, x.device, place.along)

        def run(values: dict[int, Any], _start: int, _count: int) -> Tensor:
            out = forward(values[place.number])
            if (out.dtype, out.shape[-1]) != (dtype, channels):
                raise RuntimeError(f"a layer must give {dtype} [..., {channels}], got {out.dtype} {list(out.shape)}")
            return out

        self._add(run, [place], made)
        return made

    def catch_up(self, why: str, also: int | None = None) -> Tensor | None:
        """Run what has been noted on all tokens, for all stand-ins in use; nothing is noted from now on. Returns the
        value of number ``also``."""
        self.why = self.why or why
        self._unseen.close()
        waiting = [place for place, _ in places_of(self) if place.value is None]
        steps, self.steps = self.steps, []
        self._held.clear()
        with torch.inference_mode(self._mode[0]), torch.set_grad_enabled(self._mode[1]):
            wanted = {also, *(place.number for place in waiting)}
            values = _run(steps, _dropped(steps, wanted), self.real, 0, self.tokens)
        for place in waiting:
            place.value = values[place.number]
        return values.get(also)

    def in_use(self) -> list[Tensor]:
        """The stand-ins that are known outside this graph and autograd."""
        self.args, self.kwargs = [], {}
        return [leaf for _, leaf in places_of(self) if type(leaf) is Tensor]

    def settle(self, why: str, out: Any, also: int | None = None) -> Any:
        """After the block: :meth:`catch_up`, make plain tensors of all that the module keeps, and return ``out`` with
        values, or the value of number ``also``."""
        value = self.catch_up(why, also)
        out = values_of(out) if also is None else value
        for leaf in self.in_use():
            exchange(leaf)
        return out

    def evaluator(self, number: int) -> Callable[..., Tensor]:
        """The value of a stand-in as a function of the first token and of parts of the inputs that begin there."""
        steps, dropped = self.steps, _dropped(self.steps, {number})

        def value(start: int, *parts: Tensor) -> Tensor:
            return _run(steps, dropped, [as_whole(part) for part in parts], start, parts[0].shape[-2])[number]

        return value

    def peak_bytes(self, out: int) -> float:
        """The most memory that the steps take at once on all tokens besides the inputs, the output included."""
        ends = {**_ends(self.steps), out: len(self.steps)}
        spans: dict[int, tuple[int, int, int]] = {}  # first step, last step, bytes of a storage
        for number, (_, _, makes) in enumerate(self.steps):
            for place in makes:
                if place is not None and (key := storage_of(self.likes[place])) not in self._inputs:
                    first, end, _ = spans.get(key, (number, 0, 0))
                    spans[key] = first, max(end, ends[place]), self.likes[place].untyped_storage().nbytes()
        at = range(len(self.steps))
        return max(sum(size for first, end, size in spans.values() if first <= number <= end) for number in at)


def _run(steps: list[Step], dropped: Sequence, inputs: Sequence[Tensor], start: int, count: int) -> dict[Any, Any]:
    """The values of the stand-ins that are not ``dropped``, by number."""
    values: dict[Any, Any] = dict(enumerate(inputs))
    for (run, _, makes), numbers in zip(steps, dropped):
        results = run(values, start, count)
        values.update(zip(makes, results if isinstance(results, (list, tuple)) else [results]))
        del results
        for number in numbers:
            values.pop(number, None)
    return values


def _dropped(steps: list[Step], wanted: set) -> list[list[int | None]]:
    """After each step the numbers of the stand-ins that no later one needs."""
    ends = _ends(steps)
    return [[n for n in {*takes, *makes} - wanted if ends[n] == at] for at, (_, takes, makes) in enumerate(steps)]


def _run_operator(func: OpOverload, args: Any, kwargs: Any, *part: Any) -> Any:
    uncast = torch._C._DisableAutocast if torch._C._is_any_autocast_enabled() else contextlib.nullcontext
    with uncast(), torch._C.DisableTorchFunctionSubclass():
        return func(*_filled(args, part), **{name: _filled(value, part) for name, value in kwargs.items()})


def _filled(value: Any, part: tuple) -> Any:
    if isinstance(value, Later):
        return value.get(*part)
    return [_filled(item, part) for item in value] if isinstance(value, list) else value


def _later(value: Any) -> Any:
    if (place := place_of(value)) is None:
        return _cast_later(value) if isinstance(value, Tensor) and value.grad_fn is not None else value
    number = place.number
    return Later(lambda values, _start, _count: values[number])


def _ends(steps: list[Step]) -> dict[int | None, int]:
    """The number of the last step that uses each stand-in."""
    return {place: number for number, (_, takes, makes) in enumerate(steps) for place in (*takes, *makes)}


def _cast_later(value: Tensor) -> Any:
    """A parameter in another dtype (of autocast), or its transpose, is cast for each slice: so the gradients of slices
    are added up in its own precision."""
    names, node = [], value.grad_fn
    while node is not None and node.name() in ("TBackward0", "ToCopyBackward0"):
        names.append(node.name())
        node = node.next_functions[0][0]
    weight, dtype, turns = getattr(node, "variable", None), value.dtype, names[:1] == ["TBackward0"]
    if names[turns:] != ["ToCopyBackward0"] or not isinstance(weight, nn.Parameter) or weight.device != value.device:
        return value
    return Later(lambda _values, _start, _count: weight.to(dtype).t() if turns else weight.to(dtype))


def values_of(tree: Any) -> Any:
    return mapped(lambda leaf: place.value if (place := place_of(leaf)) else leaf, tree)


def on_values(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an operator or a function on the values of stand-ins."""
    found: dict[int, Tensor] = {}
    for leaf in tensors_in((*args, *kwargs.values())):
        if place := place_of(leaf):
            if place.value is None:
                place.graph.catch_up("is used outside the call")
            found[id(place.value)] = leaf
    out = func(*values_of(args), **values_of(kwargs)) if found else func(*args, **kwargs)
    return found.get(id(out), out)  # one that was written to stays the tensor that the code has


def like_of(value: Any) -> Any:
    """An argument without data."""
    if not isinstance(value, Tensor):
        return value
    if (place := place_of(value)) is not None:
        return place.like
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
