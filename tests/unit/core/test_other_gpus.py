"""The whole package on GPUs of Apple's and Intel's that are not here, which have no float64 (``attn_support.gpu``)."""

from pathlib import Path

import pytest
import torch
from attn_support.gpu import guard, others
from attn_support.oracle import assert_close, assert_gradients_close, cast, exact, gradients, plain
from attn_support.randomness import some
from attn_support.table import GRADIENT_TABLE, ROUTES, TABLE, Case

from pascal_attn_core import explain, sdpa, selftest
from pascal_attn_core.int8.measure import SAMPLE_ROWS, relative_error, sample_of
from pascal_attn_core.reference import reference_sdpa
from pascal_attn_core.reference.int8_rows import quantize_rows
from pascal_attn_core.selftest import cases
from pascal_attn_core.vae.windows import Moments

pytestmark = pytest.mark.skipif(bool(guard.why_not()), reason=guard.why_not())


def _cases(table: list[Case], every: int) -> list[Case]:
    return [case for case in table if case.dtype != torch.float64 and "float64" not in case.mask][::every]


def _calls(kind: str) -> None:
    for case in _cases(TABLE, 61):
        inputs, options = case.build()
        right, similar = exact(inputs, options)[0], plain(inputs, options, torch.float32)[0]
        for route in ("tiled", "online"):
            out = sdpa(*case.build(device=kind)[0], **options, config=ROUTES[route])
            assert out.device.type == kind
            assert_close(out.cpu(), right, similar, f"{case.name} by {route}", dtype=case.dtype)


def _gradients(kind: str) -> None:
    for case in _cases(GRADIENT_TABLE, 61):
        inputs, options = case.build(requires_grad=True, device=kind)
        answers = []
        for dtype in (torch.float64, torch.float32 if case.dtype == torch.float32 else case.dtype):
            own = [cast(t, dtype) for t in case.build(requires_grad=True)[0]]
            out, lse = reference_sdpa(*own, **options)
            answers.append(gradients(out, [t for t in own if t is not None and t.requires_grad], torch.ones_like(out)))
        leaves = [t for t in inputs if t is not None and t.requires_grad]
        found = gradients(sdpa(*inputs, **options, config=ROUTES["tiled"]).cpu(), leaves, torch.ones(out.shape))
        assert_gradients_close([grad.cpu() for grad in found], *answers, lse.detach(), case.dtype, by=case.name)


def _what_torch_has(kind: str) -> None:
    """A kernel that torch promises is used where it is right: trying that needs no float64."""
    query, mask = torch.randn(1, 2, 1024, 64, device=kind), torch.randn(1024, 1024, device=kind)
    for inputs in ([query] * 3, [query, query, query, mask], [query.clone().requires_grad_(), query, query]):
        assert explain(*inputs).startswith(f"route {'torch' if kind == 'xpu' else 'tiled'}:")
        out = sdpa(*inputs)
        torch.testing.assert_close(out.cpu(), reference_sdpa(*(t.cpu() for t in inputs))[0], atol=1e-5, rtol=1e-4)


def _group_norms_in_pieces(kind: str) -> None:
    x = torch.randn(2, 8, 40, 5)
    moments = Moments(2, 4)
    for piece in x.to(kind).split(16, dim=2):
        moments.add(piece)
    found = moments.normalised(1e-5, x.to(kind), None, None)
    assert found.device.type == kind
    torch.testing.assert_close(found.cpu(), torch.nn.functional.group_norm(x, 4))


def _errors_of_8_bit_layers(kind: str) -> None:
    x, weight = torch.randn(2, 700, 64), torch.randn(48, 64)
    here, there = (
        relative_error(sample_of(x.to(device), SAMPLE_ROWS, 3), weight.to(device), quantize_rows(weight.to(device)))
        for device in ("cpu", kind)
    )
    assert there == pytest.approx(here, rel=0.01)


def _selftest(kind: str) -> None:
    cases._why_not_compiled = lambda: "such tensors cannot be compiled"
    cases.CASES = some(cases.CASES, 4)
    found = selftest.check(torch.device(kind))
    assert found.problems == []
    assert {check.route for check in found.checks if not check.refused} >= {"math", "tiled", "auto"}


def _everything(kind: str) -> None:
    others.believe(kind)
    for check in (_calls, _gradients, _what_torch_has, _group_norms_in_pieces, _errors_of_8_bit_layers, _selftest):
        check(kind)


@pytest.mark.parametrize("kind", some(["mps", "xpu"], 2))
def test_all_is_right_without_float64(kind: str, tmp_path: Path) -> None:
    guard.call(_everything, kind, folder=tmp_path)
