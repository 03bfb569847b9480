"""What the linters say, and what the house style asks for beyond them."""

import ast
import shutil
import subprocess

import pytest
from scripts import ROOT, SCRIPTS, name_of

SHELL = ["run_all.sh", "run_tests.sh", ".ci/run"]


@pytest.mark.parametrize(
    "command",
    [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["shellcheck", *SHELL]],
    ids=" ".join,
)
def test_linter(command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed: ./run_tests.sh installs it")
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_scripts_are_ascii_and_stand_alone(script):
    source = script.read_bytes()
    assert source.isascii()
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported == {"argparse", "os", "sys", "torch", "triton"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(ast.parse(source)))


def masked_loads_without_other(source):
    """Where a masked load leaves its other lanes undefined; Triton's interpreter fills them."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load"
        if {"mask", "other"} & {keyword.arg for keyword in node.keywords} == {"mask"}
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_a_masked_load_says_what_its_other_lanes_hold(script):
    assert masked_loads_without_other(script.read_text()) == []
