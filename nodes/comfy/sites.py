"""Where the modules of a model compute attention, read from the modules and from their code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType

from torch import nn

from ...pascal_attn_core.patching.function_copy import names_in
from ...pascal_attn_core.patching.interception import SDPA_NAME

ARGUMENT = "optimized_attention"
#: ComfyUI's attention functions, and the function that returns one of them
HOST_FUNCTIONS = frozenset({"optimized_attention", "optimized_attention_masked", "optimized_attention_for_device"})
_HELPER_DEPTH = 2


def attributes(module: nn.Module) -> list[str]:
    """Attention functions that the module holds itself: ``optimized_attention``, ``optimized_vae_attention``."""
    held = vars(module).items()
    return [name for name, value in held if name.startswith("optimized_") and name.endswith("attention") and value]


def argument_leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Modules whose forward is given the attention function and passes it to no module below: name, module, and the
    argument's position in a call."""
    for name, module in model.named_modules():
        position = _position(type(module))  # type: ignore[arg-type]  # mypy: a class is not Hashable
        below = (child for child in module.modules() if child is not module)
        if position is not None and all(_position(type(child)) is None for child in below):  # type: ignore[arg-type]
            yield name, module, position


@functools.cache
def _position(kind: type[nn.Module]) -> int | None:
    names = list(inspect.signature(kind.forward).parameters)
    return names.index(ARGUMENT) - 1 if ARGUMENT in names else None


def host_names(kind: type[nn.Module]) -> set[str]:
    """Names of ComfyUI's attention functions that ``forward`` itself looks up among the globals of its file; none if
    ``forward`` is not a plain function."""
    forward = kind.forward
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return set()
    return {name for name in HOST_FUNCTIONS & names_in(forward.__code__) if name in forward.__globals__}


@functools.cache
def by_name(kind: type[nn.Module]) -> tuple[str, ...]:
    """Methods of a class that call ComfyUI's attention by its name: themselves, or in helper functions that know
    nothing of the options in which overrides are. Whether a call of the first kind is announced to the override shows
    only when it is made: some models leave the options at their default."""
    found: dict[str, bool] = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        for name, method in vars(base).items():
            if name not in found and isinstance(method, FunctionType) and not name.startswith("__"):
                plain = not hasattr(method, "__wrapped__")
                found[name] = plain and (_names_host(method) or calls_unannounced(method, _HELPER_DEPTH))
    return tuple(name for name, calls in found.items() if calls)


def calls_unannounced(function: FunctionType, depth: int) -> bool:
    """Whether a plain function calls the host's attention by name without options, itself or in a helper."""
    plain = (each for each in within(function, depth) if not hasattr(each, "__wrapped__"))
    return any(_names_host(each) and not _speaks_of(each.__code__, "transformer_options") for each in plain)


def within(function: FunctionType, depth: int) -> Iterator[FunctionType]:
    """A function and its helpers, those at most ``depth`` calls away."""
    yield function
    for _, helper in helpers(function) if depth else ():
        yield from within(helper, depth - 1)


def _names_host(function: FunctionType) -> bool:
    hosts = names_in(function.__code__) & HOST_FUNCTIONS
    return bool(hosts) and (bool(hosts & set(function.__globals__)) or any(modules_with_attention(function)))


def helpers(function: FunctionType) -> Iterator[tuple[str, FunctionType]]:
    """Plain functions that a function calls by a global name, but not the host's attention functions themselves."""
    for name in names_in(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType) and name not in HOST_FUNCTIONS and value is not function:
            yield name, value


def modules_with_attention(function: FunctionType) -> Iterator[tuple[str, ModuleType]]:
    """Modules that a function knows by a global name and whose attention functions it names."""
    names = names_in(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and any(hasattr(value, host) for host in names & HOST_FUNCTIONS):
            yield name, value


def _speaks_of(code: CodeType, word: str) -> bool:
    if word in (*code.co_varnames, *code.co_names, *code.co_freevars):
        return True
    for constant in code.co_consts:
        if constant == word or (isinstance(constant, tuple) and word in constant):
            return True
        if isinstance(constant, CodeType) and _speaks_of(constant, word):
            return True
    return False


def has_softcap(module: nn.Module) -> bool:
    """Whether a module's ``forward`` computes attention with a softcap by hand, as T5Gemma's does in ComfyUI."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or not {"q_proj", "k_proj", "v_proj", "o_proj"} <= set(module._modules):
        return False
    sizes = ("num_heads", "num_kv_heads", "head_dim", "inner_size")
    numbers = all(isinstance(getattr(module, name, None), (int, float)) for name in ("softcap", "scale", *sizes))
    rotates = callable(forward.__globals__.get("apply_rope"))
    return numbers and rotates and {"tanh", "softmax"} <= names_in(forward.__code__)


def calls_directly(model: nn.Module, known: Iterable[str]) -> list[str]:
    """Names of modules whose code, or a helper of it, names an attention function, besides the modules ``known`` and
    those around them."""
    known = [f"{name}." for name in known]
    reaching = (name for name, module in model.named_modules() if reaches_attention(type(module)))  # type: ignore[arg-type]
    return [name for name in reaching if not any(other.startswith(f"{name}.".lstrip(".")) for other in known)]


@functools.cache
def reaches_attention(kind: type[nn.Module]) -> bool:
    """Whether a method of the class names an attention function, itself or in a function of its file."""
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    methods = [method for base in own for name, method in vars(base).items() if name != "__init__"]
    plain = (inspect.unwrap(getattr(method, "__func__", method)) for method in methods)
    known = {SDPA_NAME, *HOST_FUNCTIONS}
    functions = (each for method in plain if isinstance(method, FunctionType) for each in within(method, _HELPER_DEPTH))
    return any(names_in(inspect.unwrap(each).__code__) & known for each in functions)
