"""Shared by all tests: GPU tests are skipped without a GPU, and ``attn_support`` is importable from every test."""

import contextlib
import gc
import os
import random
import sys
import types
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch

# Here and in the processes that tests start: which route is faster on this machine must not decide what is tested.
os.environ["PASCAL_ATTN_NO_TIMING"] = "1"

# Today's diffusers and transformers need torch 2.6: with an older one they are as good as not installed.
if not hasattr(torch, "accelerator"):
    sys.modules.update(dict.fromkeys(("diffusers", "transformers")))  # type: ignore[arg-type]

# Under --import-mode=importlib tests are no package: what they share is one by this name.
_support = types.ModuleType("attn_support")
_support.__path__ = [str(Path(__file__).parent / "support")]
sys.modules.setdefault("attn_support", _support)


class _RootIsNoPackage:
    """The repository's root has an ``__init__.py`` for ComfyUI's loader; pytest would import it as a package."""

    def __init__(self, root: Path):
        self.root = root

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == self.root else None


FUZZ_CALLS = 1_000

from attn_support import precision, randomness  # noqa: E402  from here on there is such a package

randomness.register()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz", "random calls (tests/contract/test_fuzz.py)")
    group.addoption("--fuzz-first", type=int, help="number of the first call")
    group.addoption("--fuzz-calls", type=int, help="how many calls; 1,000, or twenty times as many in profile nightly")


@pytest.hookimpl(trylast=True)  # behind Hypothesis', which loads the profile that the command line names
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_RootIsNoPackage(config.rootpath))
    options = config.option  # goes from here to the processes of pytest-xdist
    if options.fuzz_calls is None:
        options.fuzz_calls = randomness.times(FUZZ_CALLS) * (1 + randomness.is_random())
    if options.fuzz_first is None:
        options.fuzz_first = random.SystemRandom().randrange(10**9, 10**12) if randomness.is_random() else 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if randomness.is_random():
        first, count = config.option.fuzz_first, config.option.fuzz_calls
        terminalreporter.write_line(f"random calls: --fuzz-first {first} --fuzz-calls {count}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not hasattr(torch, "_safe_softmax"):
        older = pytest.mark.skip(reason="before torch 2.5 its kernels refuse this, or its compiler cannot trace it")
        for item in items:
            if item.get_closest_marker("torch_2_5"):
                item.add_marker(older)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):  # not `in item.keywords`, which has the names of folders too
            item.add_marker(skip)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Return what is imported for it stays: the garbage collector would walk over it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _modules_are_no_garbage() -> None:
    """They stay until the end: the garbage collector need not walk over millions of objects each time it runs."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> Iterator[None]:
    """Every test draws the same inputs, whichever tests ran before it."""
    state = torch.get_rng_state()
    # torch.manual_seed would note a whole stack for a CUDA that is not there yet, in every test.
    (torch.manual_seed if torch.cuda.is_initialized() else torch.default_generator.manual_seed)(0)
    yield
    torch.set_rng_state(state)


@pytest.fixture(autouse=True)
def _float32_in_full_on_a_card(request: pytest.FixtureRequest) -> Iterator[None]:
    """TF32 is a choice of the user, not of this library."""
    with precision.without_tf32() if request.node.get_closest_marker("gpu") else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def _no_memory_of_failures() -> Iterator[None]:
    """Budgets halved by one test must not plan the next one's tiles."""
    from pascal_attn_core.routes.tiled import forget_halvings

    yield
    forget_halvings()
