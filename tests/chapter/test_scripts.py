"""The scripts as programs: from anywhere, with any arguments, in a notebook, on any device."""

import ast
import os
import re
import runpy
import subprocess
import sys
import textwrap
import types

import pytest
from helpers import INTERPRET, SCRIPTS, every_script, expected_file


def run(script, *arguments, **options):
    command = [sys.executable, script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, **options)


@every_script
def test_stdout_is_the_expected_output_from_another_directory(script, tmp_path):
    # On a GPU TRITON_INTERPRET=0 is right; without one the interpreter runs all the same.
    result = run(script, cwd=tmp_path, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert (result.returncode, result.stdout) == (0, expected_file(script).read_text())
    if INTERPRET:
        assert result.stderr == "running in Triton's interpreter, on the CPU\n"
    else:
        assert result.stderr == ""


def imports(script):
    """The lines that import the packages and choose the device: the same in each script."""
    source = script.read_text()
    return source[source.index("try:\n") : source.index("\n\n\n")]


def test_the_device_is_chosen_by_the_same_lines_in_each_script():
    assert len({imports(script) for script in SCRIPTS}) == 1


@pytest.mark.parametrize("missing", ["torch", "triton", "numpy"])
def test_a_python_without_a_package_is_told_what_to_run(missing):
    # None in sys.modules makes an import fail as if the package were missing.
    hide = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_path(sys.argv[1])"
    result = run("-c", hide, SCRIPTS[0])
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(
        rf".*\b{missing}\b.*: \./run_all\.sh .*, \.venv/bin/python\n", result.stderr
    )


@pytest.mark.parametrize(
    "gpu, variable, device",
    [
        (False, None, "cpu"),
        (False, "0", "cpu"),
        (True, None, "cuda"),
        (True, "", "cuda"),
        (True, "0", "cuda"),
        (True, "off", "cuda"),
        *[(True, on, "cpu") for on in ("1", "true", "True", "YES", "on", "y", "Y")],
    ],
)
def test_the_device_for_each_spelling_of_triton_interpret(gpu, variable, device, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if variable is not None:
        monkeypatch.setenv("TRITON_INTERPRET", variable)
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=lambda: gpu))
    lines = imports(SCRIPTS[0])
    lines = lines[lines.index("    INTERPRET = ") : lines.index("    import triton\n")]
    names = {"os": os, "torch": torch}
    exec(textwrap.dedent(lines), names)
    assert names["DEVICE"] == device
    assert os.environ["TRITON_INTERPRET"] == ("1" if device == "cpu" else "0")


def test_help_says_what_a_script_shows():
    result = run(SCRIPTS[0], "--help")
    assert result.returncode == 0
    assert ast.get_docstring(ast.parse(SCRIPTS[0].read_text())) in result.stdout
    assert "--worked-examples" in result.stdout


@every_script
def test_an_unknown_argument_is_an_error(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--worked-example-s"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(script), run_name="__main__")
    captured = capsys.readouterr()
    assert captured.out == "" and caught.value.code not in (0, None)
    assert "--worked-example-s" in f"{caught.value.code}{captured.err}"


@every_script
def test_a_script_pasted_into_a_notebook_prints_its_section(script, monkeypatch, capsys):
    # A cell has no __file__, and sys.argv is that of the notebook's kernel.
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    exec(compile(script.read_text(), script, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out == expected_file(script).read_text()


@every_script
def test_scripts_are_ascii_and_stand_alone(script):
    source = script.read_bytes()
    assert source.isascii()
    imports = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import)]
    imported = {alias.name.split(".")[0] for node in imports for alias in node.names}
    assert imported <= {"argparse", "os", "sys", "numpy", "torch", "triton"}
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(ast.parse(source)))


@every_script
def test_the_first_kernel_comes_within_30_lines(script):
    assert script.read_text().split("\n").index("@triton.jit") < 30
