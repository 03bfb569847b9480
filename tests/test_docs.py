"""The documents: commands run, links lead somewhere, exercises do what they say."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from scripts import ROOT, SCRIPTS, name_of

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("beyond/*.md")])
TEXT = {document: document.read_text() for document in DOCUMENTS}
README = TEXT[ROOT / "README.md"]


def commands(text):
    """What a reader would type: fenced bash blocks, and code in a sentence that runs a script."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    inline = re.findall(
        r"`((?:TRITON_INTERPRET=1 )?(?:\./run_|python (?:-c|chapter|beyond)).*?)`", text
    )
    return list(dict.fromkeys(line for line in lines + inline if line))


COMMANDS = [
    pytest.param(command, id=f"{document.name}: {command}")
    for document, text in TEXT.items()
    for command in commands(text)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_works(command, tmp_path):
    environment = os.environ | {"PYTHON": sys.executable}
    words = shlex.split(command)
    if words[0].startswith("TRITON_INTERPRET="):
        environment["TRITON_INTERPRET"] = words.pop(0).partition("=")[2]
    if "plot_traps" in command:
        pytest.importorskip("matplotlib")
        words += ["--out", str(tmp_path)]
    if words[0] == "python":
        words[0] = sys.executable
    if words[0] == "./run_tests.sh":
        # Not the tests within the tests: that they are found, and that there are some.
        words += ["--collect-only", "-q"]
    result = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_readme_has_the_two_commands():
    assert commands(README)[:2] == ["./run_all.sh", "./run_tests.sh"]
    assert "python beyond/plot_traps.py" in commands(README)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_images_resolve(document):
    links = re.findall(r"\]\(([^)\s]+)\)", TEXT[document])
    for link in links:
        if not link.startswith(("http://", "https://", "#")):
            assert (document.parent / link.partition("#")[0]).exists(), link


def test_the_sample_run_has_todays_form():
    sample = re.search(r"^```text\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[1]
    ours = [rf"PASS  {re.escape(name_of(script))}  \d+\.\d s" for script in SCRIPTS]
    form = [r"Python [\d.]+, torch \S+, triton [\d.]+, numpy [\d.]+, .+", *ours]
    form.append(rf"{len(SCRIPTS)} passed, 0 failed")
    assert re.fullmatch("\n".join(form) + "\n", sample)
    result = subprocess.run(
        [ROOT / "run_all.sh"],
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert re.fullmatch("\n".join(form) + "\n", result.stdout)


EXERCISES = re.findall(r"^\| (\d) \| (\d\d): (.*?) \| (.*?) \|$", README, re.MULTILINE)


def test_there_is_an_exercise_for_each_self_check_question():
    assert [question for question, *_ in EXERCISES] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("question, script, edits, outcome", EXERCISES)
def test_exercise(question, script, edits, outcome, tmp_path):
    (name,) = [s for s in SCRIPTS if s.name.startswith(script)]
    source = name.read_text()
    for old, new in re.findall(r"`(.*?)` to `(.*?)`", edits):
        assert old in source
        source = source.replace(old, new, 1)
    for folder in (name.parent.name, "expected_outputs"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "run_all.sh", tmp_path)
    (tmp_path / name_of(name)).write_text(source)
    result = subprocess.run(
        ["./run_all.sh", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    if outcome.startswith("no difference"):
        assert result.returncode == 0, result.stdout
        return
    assert result.returncode == 1
    changed = [line for line in result.stdout.splitlines() if re.match(r"[+](?!\+\+ )", line)]
    assert changed == re.findall(r"`(\+.*?)`", outcome)
