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


@pytest.fixture
def main(monkeypatch, capsys):
    """Runs a script in this process: returns what it prints, and what it exits with."""

    def run(script, *arguments):
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        with pytest.raises(SystemExit) as caught:
            runpy.run_path(str(script), run_name="__main__")
        printed = capsys.readouterr()
        return caught.value.code, printed.out, printed.err

    return run


def test_without_a_gpu_a_process_of_its_own_interprets_all_the_same(tmp_path):
    # On a GPU TRITON_INTERPRET=0 is right.
    script, environment = SCRIPTS[-1], os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, script]
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert (result.returncode, result.stdout) == (0, expected_file(script).read_text())
    assert result.stderr == ("running in Triton's interpreter, on the CPU\n" if INTERPRET else "")


def imports(script):
    """The lines that import the packages and choose the device: the same in each script."""
    source = script.read_text()
    return source[source.index("try:\n") : source.index("\n\n\n")]


def test_the_device_is_chosen_by_the_same_lines_in_each_script():
    assert len({imports(script) for script in SCRIPTS}) == 1


@pytest.mark.parametrize("missing", ["torch", "triton", "numpy"])
def test_a_python_without_a_package_is_told_what_to_run(missing, main, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)  # its import fails as if it were missing
    code, out, err = main(SCRIPTS[0])
    assert (out, err) == ("", "")
    assert re.fullmatch(rf".*\b{missing}\b.*: \./run_all\.sh .*, \.venv/bin/python", code)


ON, OFF = ("1", "true", "True", "YES", "on", "y", "Y"), (None, "", "0", "off")


@pytest.mark.parametrize(
    "gpu, variable, device",
    [(False, None, "cpu"), (False, "0", "cpu")]
    + [(True, variable, "cuda") for variable in OFF]
    + [(True, variable, "cpu") for variable in ON],
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


def test_help_says_what_a_script_shows(main):
    code, out, _ = main(SCRIPTS[0], "--help")
    assert code == 0 and "--worked-examples" in out
    assert ast.get_docstring(ast.parse(SCRIPTS[0].read_text())) in out


@every_script
def test_an_unknown_argument_is_an_error(script, main):
    code, out, err = main(script, "--worked-example-s")
    assert out == "" and code not in (0, None)
    assert "--worked-example-s" in f"{code}{err}"


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
