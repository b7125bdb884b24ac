"""``pascal-attn run``: other people's programs, unchanged."""

import json
from pathlib import Path

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


def pascal_attn(*commands: list[str], cwd: Path, **env: str) -> fresh.Done:
    """These commands one after the other in one process, which prints the status of each and ends with the last."""
    code = """
    import json, sys
    from pascal_attn_core.cli import main
    for command in json.loads(sys.argv[1]):
        print(status := main(["run", *command]))
    sys.exit(status)
    """
    return fresh.execute(code, json.dumps(commands), env={**fresh.PLAIN, **env}, cwd=cwd)


def test_a_program_runs_with_the_switch_on_and_its_calls_are_reported(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = ["3", "--flag"]
    done = pascal_attn([str(tmp_path / "program.py"), *arguments], ["-m", "program", *arguments], cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == [f"['3', '--flag'] {tmp_path}", "3"] * 2
    assert done.stderr.count("pascal-attn run: 4 attention calls: 3 torch, 1 tiled") == 2


def test_without_its_extras_nothing_is_printed_and_a_package_is_left_alone(tmp_path: Path) -> None:
    names = ["flash_attn", "sageattention", "xformers"]
    program = f"from importlib.util import find_spec\nprint(*(name for name in {names} if find_spec(name)))"
    (tmp_path / "program.py").write_text(program)
    commands = [["--no-report", f"--no-{name.replace('_', '-')}", "program.py"] for name in names]
    done = pascal_attn(*commands, cwd=tmp_path)
    found = ["sageattention xformers", "flash_attn xformers", "flash_attn sageattention"]
    assert (done.returncode, done.stdout.splitlines()[::2], done.stderr.strip()) == (0, found, "")


# What people report: the packages are installed, and raise on older cards.
RAISES = {
    "flash_attn": "def flash_attn_func(*a): raise RuntimeError('FlashAttention only supports Ampere GPUs or newer.')",
    "sageattention": "def sageattn(*args): raise ValueError('Unsupported CUDA architecture: sm75')",
    "xformers/ops": "def memory_efficient_attention(*args): raise NotImplementedError('No operator found for it')",
}
USES_ALL = """
import torch
from flash_attn import flash_attn_func
from sageattention import sageattn
from xformers.ops import memory_efficient_attention
query = torch.randn(1, 6, 2, 8)
print(*(function(query, query, query).shape == query.shape for function in (flash_attn_func, sageattn)),
      memory_efficient_attention(query, query, query).shape == query.shape)
"""


def test_installed_packages_that_cannot_run_here_make_room(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    for name, text in RAISES.items():
        (installed / name).mkdir(parents=True)
        (installed / name / "__init__.py").write_text(text)
    (tmp_path / "program.py").write_text(USES_ALL)
    code = """
    import sys, torch
    from pascal_attn_core.cli import main
    main(["run", "program.py"])
    torch.version.hip = "6.3"  # on AMD's cards Triton may run them: they stay
    try:
        main(["run", "program.py"])
    except RuntimeError as error:
        print(error)
    main(["run", "--no-report", "--replace", "program.py"])
    """
    done = fresh.execute(code, env=fresh.PLAIN, cwd=tmp_path, paths=(installed,))
    assert done.stdout.splitlines() == [
        "True True True", "FlashAttention only supports Ampere GPUs or newer.", "True True True"
    ], done.stderr  # fmt: skip
    place = installed / "flash_attn" / "__init__.py"
    told = f"flash_attn at {place} cannot run here, there is no CUDA device: Pascal Attention takes its place"
    left = (
        f"left alone: flash_attn: flash_attn must not be installed, got the one at {place}; --replace takes its place"
    )
    assert done.stderr.count(told) == done.stderr.count(f"pascal-attn run: {left}") == 1, done.stderr


def test_a_program_that_fails_fails_as_it_would(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise ValueError('mine')")
    done = pascal_attn(["program.py"], cwd=tmp_path)
    assert done.returncode == 1
    assert "ValueError: mine" in done.stderr
    assert "no attention call was seen in this process" in done.stderr


def test_a_program_that_ends_with_a_sentence_or_does_not_exist_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; sys.exit('a sentence')")
    done = pascal_attn(["program.py"], ["nothing.py"], ["-m", "nothing_of_that_name"], cwd=tmp_path)
    assert done.stdout.split() == ["1", "2", "2"]
    assert "a sentence" in done.stderr
    assert "there is no file nothing.py; to run a module, use -m nothing.py" in done.stderr
    assert "pascal-attn run: No module named nothing_of_that_name" in done.stderr.splitlines()


def test_where_it_is_disabled_the_program_runs_on_torch(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = pascal_attn(["program.py"], cwd=tmp_path, PASCAL_ATTN_DISABLE="1")
    assert done.returncode == 0
    assert "PASCAL_ATTN_DISABLE is set" in done.stderr
