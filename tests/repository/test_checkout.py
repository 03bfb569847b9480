"""What a checkout must hold for other machines: line ends that shells take, pins that install."""

import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def test_line_ends_in_a_checkout_of_windows(tmp_path):
    if not shutil.which("git"):
        pytest.skip("there is no git")
    git = ["git", "-c", "core.autocrlf=true", "-c", "user.name=a", "-c", "user.email=a@b"]
    files = [".gitattributes", "run_all.sh", "beyond/figures/eps.png"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    for command in ("init -q", "add .", "commit -qm a", "clone -q . copy"):
        subprocess.run([*git, *command.split()], cwd=tmp_path, check=True)
    for file in files:
        assert (tmp_path / "copy" / file).read_bytes() == (ROOT / file).read_bytes()


# Each of requirements-dev.txt is installed without its needs: matplotlib's numpy would hide the
# interpreter's own, which torch and triton use.
OF_THE_INTERPRETER = {"numpy", "typing-extensions"}
DEV = (ROOT / "requirements-dev.txt").read_text()
DEV_PINS = dict(line.split("==") for line in DEV.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("name", DEV_PINS)
@pytest.mark.parametrize("python", ["3.10.13", "3.13.0"])
def test_requirements_dev_has_every_need_and_suits_every_python(name, python):
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{name} is not installed: ./run_tests.sh installs it")
    assert python in SpecifierSet(package.metadata["Requires-Python"] or "")
    environment = {"python_version": python.rpartition(".")[0], "python_full_version": python}
    for need in map(Requirement, package.requires or []):
        if need.marker is None or need.marker.evaluate({**environment, "extra": ""}):
            of_the_interpreter = canonicalize_name(need.name) in OF_THE_INTERPRETER
            assert of_the_interpreter or DEV_PINS[canonicalize_name(need.name)] in need.specifier
    assert not OF_THE_INTERPRETER & DEV_PINS.keys()
