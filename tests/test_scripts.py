"""Every script prints its Expected Output, from anywhere, and takes the arguments it documents."""

import os
import re
import subprocess
import sys
import types

import pytest
from scripts import INTERPRET, ROOT, SCRIPTS, expected_file, load, name_of

every_script = pytest.mark.parametrize("script", SCRIPTS, ids=name_of)


def run(script, *arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, script, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        timeout=120,
    )


def call_main(script, monkeypatch, *arguments):
    """The script's main() in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    with pytest.raises(SystemExit) as caught:
        load(name_of(script)).main()
    return caught.value.code


def test_there_are_scripts():
    assert len(SCRIPTS) >= 4


@every_script
def test_stdout_is_the_expected_output_from_another_directory(script, tmp_path):
    result = run(script, cwd=tmp_path)
    assert result.stdout == expected_file(script).read_bytes()
    assert result.returncode == 0
    stderr = result.stderr.decode()
    if INTERPRET:
        assert re.fullmatch(r"running in Triton's interpreter.*\n", stderr)
    else:
        assert stderr == ""


@pytest.mark.skipif(not INTERPRET, reason="a GPU is in use: TRITON_INTERPRET=0 is then right")
def test_without_a_gpu_the_interpreter_runs_whatever_triton_interpret_said(tmp_path):
    result = run(SCRIPTS[0], cwd=tmp_path, TRITON_INTERPRET="0")
    assert (result.returncode, result.stdout) == (0, expected_file(SCRIPTS[0]).read_bytes())


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / "beyond/plot_traps.py"], ids=name_of)
def test_a_python_without_torch_is_told_what_to_run(script):
    # -S leaves site-packages out, and torch with them.
    result = subprocess.run([sys.executable, "-S", "-E", script], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(
        r"No module named 'torch': \./run_all\.sh .*, \.venv/bin/python\n", result.stderr
    )


def device_lines(script):
    source = script.read_text()
    return source[source.index("INTERPRET = ") : source.index("import triton\n")]


def test_the_device_is_chosen_by_the_same_lines_everywhere():
    (lines,) = {device_lines(script) for script in SCRIPTS}
    assert lines.count("\n") <= 12


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
    names = {"os": os, "torch": torch}
    exec(device_lines(SCRIPTS[0]), names)
    assert names["DEVICE"] == device
    assert os.environ["TRITON_INTERPRET"] == ("1" if device == "cpu" else "0")


@every_script
def test_help_says_what_the_script_shows(script, monkeypatch, capsys):
    assert call_main(script, monkeypatch, "--help") == 0
    printed = capsys.readouterr().out
    assert load(name_of(script)).__doc__.strip() in printed
    # Section 20.4 is the listing without worked examples of its own.
    assert ("--worked-examples" in printed) == hasattr(load(name_of(script)), "worked_examples")


@every_script
def test_an_unknown_argument_is_an_error(script, monkeypatch, capsys):
    assert call_main(script, monkeypatch, "--worked-example-s") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "unrecognized arguments: --worked-example-s" in captured.err
