"""What the linters say, and what the house style asks for beyond them."""

import shutil
import subprocess

import pytest
from helpers import ROOT, every_script, masked_loads_without_other

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


@every_script
def test_a_masked_load_says_what_its_other_lanes_hold(script):
    assert masked_loads_without_other(script.read_text()) == []
