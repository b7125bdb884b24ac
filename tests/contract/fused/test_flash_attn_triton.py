"""flash-attn's Triton backend as a candidate on a card of AMD's, with a package in its place that computes in plain
torch what the real one does."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from attn_support.fused.device import UncheckedKernels, execute, fresh_card
from attn_support.fused.driver import StandIn
from attn_support.fused.emulation import CARD
from attn_support.fused.hip import RX_6800, HipStandIn
from torch import Tensor

from pascal_attn_core import AttentionConfig, explain, patch_flash_attn, sdpa, sdpa_with_lse
from pascal_attn_core.call import check_call
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.routes import flash_attn_triton, torch_kernel, why_not

AUTO = AttentionConfig(math_limit_mib=0)
_PACKAGE = """
import torch

fault, calls = "", []

def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    if fault == "raises" and q.shape[1] != 192:
        raise NotImplementedError("failed to legalize operation 'tt.dot'")
    calls.append(tuple(q.shape))
    q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * softmax_scale
    if causal:
        hidden = torch.ones(scores.shape[-2:]).tril(scores.shape[-1] - scores.shape[-2]) == 0
        scores = scores.masked_fill(hidden, -torch.inf)
    out = scores.softmax(-1) @ v * (1.2 if fault == "is wrong" else 1)
    return out.transpose(1, 2).half()
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ModuleType]]:
    """Installed, switched on, and not imported; the result imports it."""
    folder = tmp_path / "flash_attn"
    folder.mkdir()
    (folder / "__init__.py").write_text(_PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE")
    monkeypatch.setattr(torch_kernel, "fused_takes", lambda *_: False)
    importlib.invalidate_caches()
    flash_attn_triton._function.cache_clear()
    yield lambda: importlib.import_module("flash_attn")
    sys.modules.pop("flash_attn", None)
    flash_attn_triton._function.cache_clear()


def _card(ours: float, **options: Any) -> Any:
    """A card on which ours takes so many times the time of the other."""

    def clock(attempts: list[Callable[[], Any]], device: torch.device) -> list[float]:
        return [ours] + [attempt() is None or 1.0 for attempt in attempts[1:]]

    return fresh_card(HipStandIn(RX_6800, execute), clock, **options)


def _inputs(q: tuple[int, ...] = (2, 2, 150, 40), kv: tuple[int, ...] | None = None) -> list[Tensor]:
    return [torch.randn(shape).half() for shape in (q, kv or q, kv or q)]


@pytest.mark.parametrize("kv", [(2, 2, 150, 40), (2, 1, 150, 40), (2, 2, 77, 40)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_it_computes_calls_for_which_it_was_timed_as_faster(
    package: Callable[[], ModuleType], kv: tuple[int, ...], is_causal: bool, needs_grad: bool
) -> None:
    leaves = [t.requires_grad_(needs_grad) for t in _inputs(kv=kv)]
    options = {"is_causal": is_causal, "enable_gqa": kv[1] == 1}
    is_its = not (is_causal and kv[2] == 77)  # it aligns the rule to the lower right
    with _card(2.0):
        out = sdpa(*leaves, config=AUTO, **options)
        why = explain(*leaves, config=AUTO, **options)
    assert ((2, 150, 2, 40) in package().calls) == is_its
    assert (
        "torch has none, flash-attn has a fused kernel for it (by flash-attn's Triton backend; ours was" in why
    ) == is_its
    wide = [t.detach().double().requires_grad_(needs_grad) for t in leaves]
    expected = reference_sdpa(*wide, **options)[0]
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    if needs_grad:
        found, right = (torch.autograd.grad(o.square().sum(), i) for o, i in ((out, leaves), (expected, wide)))
        for ours, theirs in zip(found, right):
            torch.testing.assert_close(ours.double(), theirs, atol=2e-2, rtol=2e-2)


def test_ours_takes_them_where_it_is_faster(package: Callable[[], ModuleType]) -> None:
    with _card(0.5):
        assert "route fused: timed on this card at 0.50 of the time of flash-attn's Triton backend" in explain(
            *_inputs(), config=AUTO
        )


REFUSED: dict[str, Callable[[], Any]] = {
    "float32": lambda: sdpa(*(t.float() for t in _inputs()), config=AUTO),
    "mask": lambda: sdpa(*_inputs(), torch.ones(150, 150).bool(), config=AUTO),
    "dropout": lambda: sdpa(*_inputs(), dropout_p=0.5, config=AUTO),
    "window": lambda: sdpa(*_inputs(), window=(20, 0), config=AUTO),
    "softcap": lambda: sdpa(*_inputs(), softcap=5.0, config=AUTO),
    "causal, more keys": lambda: sdpa(*_inputs(kv=(2, 2, 250, 40)), is_causal=True, config=AUTO),
    "lse": lambda: sdpa_with_lse(*_inputs(), config=AUTO),
    "head_dim": lambda: sdpa(*_inputs((1, 1, 80, 264)), config=AUTO),
    "head_dim of values": lambda: sdpa(*_inputs()[:2], _inputs((2, 2, 150, 24))[0], config=AUTO),
    "short": lambda: sdpa(*_inputs()),
    "vmap": lambda: torch.vmap(lambda *each: sdpa(*each, config=AUTO))(*_inputs((3, 2, 2, 150, 40))),
    "torch by name": lambda: why_not("torch", check_call(*_inputs()), AttentionConfig(route="torch"))[0],
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_cannot_do_does_not_import_it(package: Callable[[], ModuleType], what: str) -> None:
    with _card(2.0):
        REFUSED[what]()
    assert "flash_attn" not in sys.modules


@pytest.mark.parametrize("why", ["off", "torch has a kernel", "NVIDIA", "ours stands in"])
def test_it_is_not_imported_where_it_is_no_candidate(package: Callable[[], ModuleType], monkeypatch, why: str) -> None:
    patch = None
    if why == "off":
        monkeypatch.delenv("FLASH_ATTENTION_TRITON_AMD_ENABLE")
    elif why == "torch has a kernel":
        monkeypatch.setattr(torch_kernel, "fused_takes", lambda *_: True)
    elif why == "ours stands in":
        patch = patch_flash_attn(replace=True)
    with _card(2.0) if why != "NVIDIA" else fresh_card(StandIn(CARD, execute)):
        sdpa(*_inputs(), config=AUTO)
    assert not hasattr(sys.modules.get("flash_attn"), "calls")
    if patch is not None:
        patch.remove()


@pytest.mark.parametrize("fault", ["is wrong", "raises"])
def test_a_kind_of_call_for_which_it_is_wrong_or_raises_is_ours(package, fault: str, caplog) -> None:
    inputs = _inputs()
    package().fault = fault
    with _card(2.0, kind=UncheckedKernels):
        out = sdpa(*inputs, config=AUTO)
        assert not explain(*inputs, config=AUTO).startswith("route torch")
        package().fault = ""
        if fault == "raises":  # its small call did not, and no other kind is concerned
            assert "flash-attn's Triton backend for it raised: failed to legalize" in caplog.text
            assert explain(*_inputs((2, 2, 150, 64)), config=AUTO).startswith("route torch")
    torch.testing.assert_close(out.double(), reference_sdpa(*(t.double() for t in inputs))[0], atol=2e-3, rtol=2e-3)
