"""The command line as a whole: parsing, exit codes, lazy commands."""

import subprocess
import sys

import pytest

from pascal_attn_core import cli


def test_no_command_prints_the_help(capsys):
    assert cli.main([]) == 2
    out = capsys.readouterr().out
    for command in ("info", "bench", "replay", "demo"):
        assert command in out


def test_an_unknown_command_is_an_error(capsys):
    assert cli.main(["benhc"]) == 2
    assert "benhc" in capsys.readouterr().err


def test_help_of_one_command_ends_well(capsys):
    assert cli.main(["bench", "--help"]) == 0
    assert "--shapes" in capsys.readouterr().out


def test_info_prints_one_block(capsys):
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Pascal Attention ")
    assert "routes" in out


@pytest.mark.parametrize("command", ["info", "bench", "replay", "demo"])
def test_every_command_explains_itself(command, capsys):
    assert cli.main([command, "--help"]) == 0
    assert f"pascal-attn {command}" in capsys.readouterr().out


def test_an_interrupt_has_its_own_exit_code(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("pascal_attn_core.cli.info.run", interrupted)
    assert cli.main(["info"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_info_needs_nothing_but_torch():
    code = """
import sys
for name in ("safetensors", "matplotlib", "rich", "diffusers", "transformers", "pascal_attn", "noflash_attention"):
    sys.modules[name] = None
from pascal_attn_core.cli import main
sys.exit(main(["info"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "tiles" in done.stdout


def test_the_package_can_be_run_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "pascal_attn_core", "nonsense"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "usage: pascal-attn" in done.stderr
