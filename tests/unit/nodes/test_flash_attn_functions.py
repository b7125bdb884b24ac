"""The switch that lets other packs import flash_attn, sageattention and xformers, without ComfyUI."""

import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attn_support.comfy.stub import StubHost, node_module

NODE, RUNS = node_module("flash_attn_functions"), node_module("engine.runs")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash_attn is installed")


@pytest.fixture(autouse=True)
def _off(stub_host: StubHost) -> Iterator[None]:
    yield
    NODE._remove()
    assert importlib.util.find_spec("flash_attn") is None


def switch(enabled: bool, **options: Any) -> None:
    value = object()
    assert NODE.PascalFlashAttnFunctions().switch(value, enabled, unique_id="7", **options) == (value,)


def test_the_node_runs_again_only_where_another_run_has_changed_what_is_installed() -> None:
    asks = NODE.PascalFlashAttnFunctions.IS_CHANGED
    first = asks(enabled=True)
    switch(True)
    assert asks(enabled=True) == first
    off = asks(enabled=False)
    assert off != first
    switch(False)
    assert asks(enabled=False) == off
    assert asks(enabled=True) not in (first, off)


def test_packs_find_the_functions_while_it_is_on(stub_host: StubHost) -> None:
    switch(True)
    switch(True)
    flash_attn = importlib.import_module("flash_attn")
    query = torch.randn(1, 50, 2, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(*[query.transpose(1, 2)] * 3).transpose(1, 2)
    torch.testing.assert_close(flash_attn.flash_attn_func(query, query, query), expected)
    assert importlib.import_module("sageattention").sageattn(query, query, query, tensor_layout="NHD").equal(expected)
    assert importlib.import_module("xformers.ops").memory_efficient_attention(query, query, query).equal(expected)
    switch(False)
    for name in ("flash_attn", "sageattention", "xformers"):
        assert name not in sys.modules
        assert importlib.util.find_spec(name) is None
    switch(False)
    on, off = "imports of flash_attn, sageattention, xformers now find this pack's functions", "off"
    said = [on, on, "off; packs keep whatever they have already imported", off]
    assert stub_host.said == [f"flash_attn functions: {text}" for text in said]


def test_the_report_counts_its_calls_by_function_and_route() -> None:
    switch(True)
    flash_attn = importlib.import_module("flash_attn")
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    query = torch.randn(1, 50, 2, 8)
    for _ in range(3):
        flash_attn.flash_attn_func(query, query, query)
    interface.flash_attn_varlen_func(query[0], query[0], query[0], *[torch.tensor([0, 20, 50])] * 2, softcap=3.0)
    importlib.import_module("xformers.ops").memory_efficient_attention(query, query, query)
    importlib.import_module("sageattention").sageattn_qk_int8_pv_fp16_cuda(query, query, query)
    (run_,) = RUNS.remembered()
    assert (run_.subject, run_.prompt_id, run_.finished) == ("flash_attn functions", "", True)
    counts: Counter[str] = Counter()
    for kind, tally in run_.tallies.items():
        counts[kind.block] += tally.count
    varlen, sage = "flash_attn.flash_attn_interface.flash_attn_varlen_func", "sageattn_qk_int8_pv_fp16_cuda"
    other = {f"sageattention.{sage}": 1, "xformers.ops.memory_efficient_attention": 1}
    assert counts == {"flash_attn.flash_attn_func": 3, varlen: 2, **other}
    assert run_.line().startswith("flash_attn functions: 7 calls, 7 taken (")


def test_an_installed_package_is_left_alone_unless_told(tmp_path, monkeypatch, stub_host: StubHost) -> None:
    (tmp_path / "flash_attn.py").write_text("real = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    switch(True)
    assert importlib.import_module("flash_attn").real
    assert stub_host.said[-1].startswith(
        "flash_attn functions: imports of sageattention, xformers now find this pack's functions; "
        f"flash_attn must not be installed, got the one at {tmp_path}"
    )
    switch(False)
    switch(True, replace=True)
    assert not hasattr(importlib.import_module("flash_attn"), "real")
    switch(False)
    assert importlib.import_module("flash_attn").real
    monkeypatch.undo()
    sys.modules.pop("flash_attn", None)
