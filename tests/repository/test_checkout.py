"""What a checkout must hold for other machines: line ends that shells take, pins that install."""

import shutil
import subprocess
from importlib import metadata

import pytest
from helpers import ROOT
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name


@pytest.mark.skipif(not shutil.which("git"), reason="there is no git")
def test_line_ends_in_a_checkout_of_windows(tmp_path):
    files = [".gitattributes", "run_all.sh", "beyond/figures/eps.png"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    git = ["git", "-c", "core.autocrlf=true", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in ("init -q", "add .", "commit -qm a", "clone -q . copy"):
        subprocess.run([*git, *command.split()], cwd=tmp_path, check=True)
    for file in files:
        assert (tmp_path / "copy" / file).read_bytes() == (ROOT / file).read_bytes()


LINES = (ROOT / "requirements-dev.txt").read_text().splitlines()
PINS = dict(line.split("==") for line in LINES if not line.startswith("#"))
# A package is installed without its needs, as matplotlib's numpy would hide the interpreter's own.
OF_THE_INTERPRETER = {"numpy", "typing-extensions"}


@pytest.mark.parametrize("name", PINS)
@pytest.mark.parametrize("python", ["3.10.13", "3.13.0"])
def test_requirements_dev_has_every_need_and_suits_every_python(name, python):
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed: ./run_tests.sh installs it")
    assert python in SpecifierSet(package.metadata["Requires-Python"] or "")
    environment = {"python_version": python[:4], "python_full_version": python, "extra": ""}
    for need in map(Requirement, package.requires or []):
        if need.marker is None or need.marker.evaluate(environment):
            needed = canonicalize_name(need.name)
            assert needed in OF_THE_INTERPRETER or PINS[needed] in need.specifier
    assert not OF_THE_INTERPRETER & PINS.keys()
