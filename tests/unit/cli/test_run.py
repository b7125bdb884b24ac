"""``pascal-attn run``: other people's programs, unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
from attn_support import fresh

PROGRAM = """
import sys
import torch
import flash_attn, sageattention, xformers.ops
from torch.nn.functional import scaled_dot_product_attention

assert __name__ == "__main__"
query = torch.randn(1, 2, 600, 16)
scaled_dot_product_attention(query, query, query)
flash_attn.flash_attn_func(*[query.transpose(1, 2)] * 3, softcap=3.0)
sageattention.sageattn(query, query, query)
xformers.ops.memory_efficient_attention(*[query.transpose(1, 2)] * 3)
print(sys.argv[1:], sys.path[0])
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""


def pascal_attn(*arguments: str, cwd: Path, **env: str) -> fresh.Done:
    code = "import sys; from pascal_attn_core.cli import main; sys.exit(main(sys.argv[1:]))"
    return fresh.execute(code, *arguments, env={**fresh.PLAIN, **env}, cwd=cwd)


@pytest.mark.parametrize("as_module", [False, True])
def test_a_program_runs_with_the_switch_on_and_its_calls_are_reported(tmp_path: Path, as_module: bool) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    what = ["-m", "program"] if as_module else [str(tmp_path / "program.py")]
    done = pascal_attn("run", *what, "3", "--flag", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() == f"['3', '--flag'] {tmp_path}"
    assert "pascal-attn run: 4 attention calls: 3 torch, 1 tiled" in done.stderr


@pytest.mark.parametrize("name", ["flash_attn", "sageattention", "xformers"])
def test_without_its_extras_nothing_is_printed_and_a_package_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "program.py").write_text(
        "from importlib.util import find_spec\n"
        "print(*(name for name in ('flash_attn', 'sageattention', 'xformers') if find_spec(name)))"
    )
    done = pascal_attn("run", "--no-report", f"--no-{name.replace('_', '-')}", "program.py", cwd=tmp_path)
    others = [other for other in ("flash_attn", "sageattention", "xformers") if other != name]
    assert (done.returncode, done.stdout.split(), done.stderr.strip()) == (0, others, "")


def test_a_program_that_fails_fails_as_it_would(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise ValueError('mine')")
    done = pascal_attn("run", "program.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "ValueError: mine" in done.stderr
    assert "no attention call was seen in this process" in done.stderr
    (tmp_path / "program.py").write_text("import sys; sys.exit('a sentence')")
    done = pascal_attn("run", "program.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "a sentence" in done.stderr


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = pascal_attn("run", "nothing.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no file nothing.py; to run a module, use -m nothing.py" in done.stderr
    done = pascal_attn("run", "-m", "nothing_of_that_name", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == "pascal-attn run: No module named nothing_of_that_name"


def test_where_it_is_disabled_the_program_runs_on_torch(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = pascal_attn("run", "program.py", cwd=tmp_path, PASCAL_ATTN_DISABLE="1")
    assert done.returncode == 0
    assert "PASCAL_ATTN_DISABLE is set" in done.stderr
