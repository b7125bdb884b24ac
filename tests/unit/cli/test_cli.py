"""The command line as a whole: parsing, exit codes, lazy commands."""

import importlib.util
import json
import pathlib
import shlex

import pytest
from attn_support.fresh import execute, run

import pascal_attn_core
from pascal_attn_core import __version__, cli

COMMANDS = ("info", "bench", "demo")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ([], 2, COMMANDS),
        (["--version"], 0, [f"pascal-attn {__version__}\n"]),
        *(([command, "--help"], 0, [f"pascal-attn {command}"]) for command in COMMANDS),
    ],
)
def test_the_help_and_the_version_are_printed(arguments, status, words, capsys):
    assert cli.main(arguments) == status
    out = capsys.readouterr().out
    assert all(word in out for word in words)


def test_the_folder_of_the_package_is_a_command_where_nothing_is_installed(tmp_path):
    """As ``python -I PATH/pascal_attn_core run program.py``: its modules must not become importable by bare names."""
    program = tmp_path / "program.py"
    program.write_text("import importlib.util; print(importlib.util.find_spec('attention_map'))")
    code = """
        import runpy, sys
        sys.argv.pop(0)
        installed = sys.argv.pop(1)
        sys.path[:] = [entry for entry in sys.path if entry != installed]
        runpy.run_path(sys.argv[0], run_name="__main__")
    """
    folder = pathlib.Path(pascal_attn_core.__file__).parent
    assert run(code, str(folder), str(folder.parent), "run", str(program)).splitlines()[0] == "None"


def test_info_as_json_holds_the_facts_of_the_text(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert text.startswith(f"Pascal Attention {facts['package']}, Python {facts['python']}, {facts['system']}")
    assert facts["build"]["version"] in text
    assert len(facts["devices"]) == len(facts["free"]) >= 1
    assert set(facts["routes"]) == {f"{d}{g}" for d in ("float32", "float16", "bfloat16") for g in ("", " GQA")}
    assert set(facts["routes"]["float32"]) == {"fused-tensor", "fused", "torch", "tiled", "math"}
    assert not any(facts["routes"]["float32"]["tiled"])
    assert facts["routes"]["float32"]["math"][0] in text
    assert facts["config"]["route"] == "auto"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("selftest --seconds 0", "--seconds must be greater than 0 and finite, got 0.0"),
        ("selftest --device nothing", "Expected one of cpu"),
        ("selftest --json /no/such/folder/x.json", "the folder of"),
        ("bench --shapes sd99", "shape must be one of"),
        ("bench --candidates flash4", "candidate must be one of"),
        ("bench --rounds 0", "--rounds must be at least 1, got 0"),
        ("bench --device nonsense", "nonsense"),
        ("bench --json missing/run.json", "does not exist"),
        ("bench --shapes ''", "--shapes must name at least one shape, got ''"),
        ("bench --shapes wan --causal", "--causal applies only to shapes given by --shape"),
        ("bench --seconds nan", "--seconds must be greater than 0 and finite, got nan"),
        ("bench --plot run.png --budget-mib -1", "budget_mib must be at least"),
        ("bench --threads 1000000", "--threads must be at most 1024, got 1000000"),
        ("bench --plot run.txt", "--plot must name a .png, .svg or .pdf file, got run.txt"),
        ("bench --shape L=5,D=4", "--shape must give Hq, got 'L=5,D=4'"),
        ("bench --shape Hq=2,L=5,D=4,X=3", "--shape must name each of ['B', 'Hq', 'Hkv', 'L', 'S', 'D'] as in"),
        ("bench --shape Hq=2,L=5,D=4,L=6", "once as in L=2048, got 'L=6'"),
        ("bench --shape Hq=2,L=0,D=4", "L in --shape must be a whole number from 1 to 2147483647, got '0'"),
        ("bench --shape Hq=6,Hkv=4,L=5,D=4", "--shape must have Hq a multiple of Hkv, got 6 and 4"),
        (
            "bench --shape Hq=1024,L=2000000000,D=64",
            "--shape must fit into memory: the tensors of B1 H1024 N2000000000",
        ),
        ("bench --linear --shapes sd3", "layer must be one of [all, quick, sdxl-attn"),
        ("bench --linear --backward", "--linear does not take --backward"),
        ("bench --linear --causal --dtype float16", "--linear does not take --dtype, --causal"),
        ("bench --linear --shape B=1,Hq=1,L=8,D=8", "--linear does not take --shape"),
        ("demo --steps 0", "--steps must be at least 1, got 0"),
        ("demo --device nonsense", "nonsense"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_runs(command, words, capsys):
    assert cli.main(shlex.split(command)) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert err.startswith(f"pascal-attn {command.split()[0]}: ")
    assert err.count("\n") == 1
    assert out == ""


@pytest.mark.parametrize(
    ("command", "hidden", "words"),
    [
        ("bench --plot run.png", "matplotlib", "--plot needs matplotlib: pip install matplotlib\n"),
        ("demo", "diffusers matplotlib", "diffusers, matplotlib must be installed for the demo: pip install diffusers"),
    ],
)
def test_packages_that_are_missing_are_named_as_they_can_be_installed(command, hidden, words, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden.split() else find(name))
    assert cli.main(command.split()) == 2
    assert words in capsys.readouterr().err


def test_an_unknown_command_is_an_error_also_where_the_package_is_run_as_a_module():
    run_it = "import runpy; runpy.run_module('pascal_attn_core', run_name='__main__', alter_sys=True)"
    done = execute(run_it, "benhc")
    assert done.returncode == 2
    assert "usage: pascal-attn" in done.stderr
    assert "benhc" in done.stderr


def test_info_needs_nothing_but_torch():
    code = """
import sys
for name in ("safetensors", "matplotlib", "diffusers", "transformers", "pascal_attn", "noflash_attention"):
    sys.modules[name] = None
from pascal_attn_core.cli import main
sys.exit(main(["info"]))
"""
    assert "routes" in run(code)
