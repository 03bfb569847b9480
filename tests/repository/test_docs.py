"""The documents: commands work, links lead somewhere, the map and the exercises say what is so."""

import ast
import os
import re
import runpy
import subprocess
import sys

import pytest
from helpers import ROOT, SCRIPTS, expected_file, name_of

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("beyond/*.md")])
TEXT = {document: document.read_text() for document in DOCUMENTS}
README, EXERCISES = TEXT[ROOT / "README.md"], TEXT[ROOT / "EXERCISES.md"]
every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


def commands(text):
    """What a reader would type: fenced bash blocks, and code in a sentence that runs a script."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return lines + re.findall(r"`((?:\w+=\S+ )?(?:\./run_|python (?:-c|chapter|beyond)).*?)`", text)


TESTS = [
    node.name
    for path in (ROOT / "tests").rglob("test_*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@every_document
def test_commands_name_what_there_is(document):
    for command in commands(TEXT[document]):
        paths = re.findall(r"(?:\./run_|\b(?:chapter20|beyond|tests)/)[\w./]+", command)
        assert [path for path in paths if not (ROOT / path).exists()] == []
        known = {"./run_tests.sh": "tests/conftest.py", "./run_all.sh": "run_all.py"}
        source = (ROOT / known.get(paths[0], paths[0])).read_text() if paths else ""
        assert [o for o in re.findall(r" (--[\w-]+)", command) if f'"{o}"' not in source] == []
        for word in re.findall(r"-k (\w+)", command):
            assert any(word in name for name in TESTS), command


def test_the_readme_has_the_two_commands():
    assert commands(README)[:2] == ["./run_all.sh", "./run_tests.sh"]


def test_the_set_up_prints_the_readmes_sizes():
    sizes = re.findall(r"\d[\d.]* GB", README)
    assert len(sizes) == 2
    assert [size for size in sizes if size not in (ROOT / "run_all.py").read_text()] == []


@every_document
def test_links_and_images_resolve(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXT[document]):
        if not link.startswith(("http://", "https://", "#")):
            assert (document.parent / link.partition("#")[0]).exists(), link


def test_the_readme_shows_04s_output_and_a_run_of_todays_form():
    def form(scripts):
        passed = [rf"PASS  {re.escape(name_of(script))}  \d+\.\d s" for script in scripts]
        versions = r"Python [\d.]+, torch \S+, triton [\d.]+, numpy [\d.]+, .+"
        return "\n".join([versions, *passed, f"{len(scripts)} passed, 0 failed", ""])

    complete, sample = re.findall(r"^```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert complete == expected_file(SCRIPTS[-1]).read_text()
    assert re.fullmatch(form(SCRIPTS), sample)
    command, env = [ROOT / "run_all.sh", "04"], os.environ | {"PYTHON": sys.executable}
    result = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
    assert re.fullmatch(form(SCRIPTS[-1:]), result.stdout)


def test_the_map_names_each_script_kernel_worked_example_and_question():
    rows = re.findall(r"^\| (20\.\d .*) \|$", README, re.MULTILINE)
    for row, script in zip(rows, SCRIPTS, strict=True):
        source = script.read_text()
        assert f"({name_of(script)})" in row
        assert re.findall(r"20\.\d\.\d", row) == re.findall(r"Example (20\.\d\.\d)", source)
        if script.name[:2] != "04":
            kernels = re.findall(r"^@triton.jit\ndef (\w+)", source, re.MULTILINE)
            assert [k for k in kernels if f"`{k}`" not in row and "probe" not in k] == []
    questions = "".join(row.rpartition("|")[2] for row in rows)
    assert re.findall(r"\d", questions) == ["1", "2", "3", "4", "5"]
    for number in range(1, 6):
        assert any(f"question_{number}" in name for name in TESTS)


EXERCISE = re.findall(
    r"^## Question (\d):.*?\b(0\d):\n\n```diff\n(.*?)```\n(.*?)(?=^## |\Z)",
    EXERCISES,
    re.MULTILINE | re.DOTALL,
)


def test_there_is_an_exercise_for_each_self_check_question():
    assert [number for number, *_ in EXERCISE] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("number, script, diff, outcome", EXERCISE, ids=[e[0] for e in EXERCISE])
def test_exercise(number, script, diff, outcome, tmp_path, monkeypatch, capsys):
    (path,) = [s for s in SCRIPTS if s.name.startswith(script)]
    source = path.read_text()
    for removed, added in re.findall(r"^((?:-.*\n)+)((?:\+.*\n)+)", diff, re.MULTILINE):
        old, new = (re.sub("^.", "", lines, flags=re.MULTILINE) for lines in (removed, added))
        assert old in source
        source = source.replace(old, new, 1)
    (changed := tmp_path / path.name).write_text(source)
    monkeypatch.setattr(sys, "argv", [str(changed)])
    runpy.run_path(str(changed), run_name="__main__")
    promised = re.findall(r"^```diff\n(.*?)\n```", outcome, re.MULTILINE | re.DOTALL)
    printed, expected = capsys.readouterr().out, expected_file(path).read_text()
    new_lines = [f"+{line}" for line in printed.splitlines() if line not in expected.splitlines()]
    assert new_lines == promised
    assert promised or printed == expected
