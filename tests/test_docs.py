"""The documents: commands run, links lead somewhere, the map and the exercises say what is so."""

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from scripts import ROOT, SCRIPTS, expected_file, name_of
from test_worked_examples import BOOK

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


# Numbered, not named: pytest's -k looks at these too, and is in some of the commands.
COMMANDS = [
    pytest.param(command, id=f"{name_of(document)}, command {number}")
    for document, text in TEXT.items()
    for number, command in enumerate(commands(text), 1)
]


@functools.cache
def run(command):
    words = shlex.split(command)
    environment = os.environ | {"PYTHON": sys.executable}
    if words[0].startswith("TRITON_INTERPRET="):
        environment["TRITON_INTERPRET"] = words.pop(0).partition("=")[2]
    if words[0] == "python":
        words[0] = sys.executable
    return subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_command_works(command, tmp_path):
    if "plot_traps" in command:
        pytest.importorskip("matplotlib")
        command += f" --out {tmp_path}"
    if command.startswith("./run_tests.sh"):
        # Not the tests within the tests: that they are found, and that there are some.
        command += " --collect-only -q"
    if "benchmark" in command:
        command += f" --quick --out {tmp_path}"
    result = run(command)
    if "benchmark" in command and not torch.cuda.is_available():
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr == "benchmark.py needs a GPU: torch sees none\n"
        return
    assert result.returncode == 0, command + "\n" + result.stdout + result.stderr


def test_the_readme_has_the_two_commands():
    assert commands(README)[:2] == ["./run_all.sh", "./run_tests.sh"]
    assert "python beyond/plot_traps.py" in commands(README)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
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


def test_the_set_up_prints_the_readmes_sizes():
    sizes = re.findall(r"\d[\d.]* GB", README.partition("\n## ")[0])
    assert len(sizes) == 2
    assert [size for size in sizes if size not in (ROOT / "run_all.sh").read_text()] == []


ROW = r"^\| (20\.\d\.\d|question \d) \| `(.*?)` \| `(.*?)` \| `(.*?)` \| (.*?) ?\|$"
MAP = re.findall(ROW, README, re.MULTILINE)


def test_the_map_has_each_worked_example_and_self_check_question():
    examples = re.findall(r"=== Worked Example (.*?) ===", "".join(BOOK.values()))
    questions = [f"question {number}" for number in range(1, 6)]
    assert [place for place, *_ in MAP] == examples + questions


@pytest.fixture(scope="module")
def tests():
    """The names of all tests, one a line."""
    return run("./run_tests.sh --collect-only -q").stdout


@pytest.mark.parametrize("place, command, line, test, picture", MAP, ids=[row[0] for row in MAP])
def test_the_map(place, command, line, test, picture, tests):
    printed = run(command).stdout.splitlines()
    if command.startswith("python"):
        (script,) = [s for s in SCRIPTS if name_of(s) in command]
        book = expected_file(script).read_text() + BOOK[name_of(script)]
        assert line in printed and line in book.splitlines()
    else:
        assert any(line in verdict for verdict in printed)
    assert re.search(rf"::\w*{test}", tests)
    assert picture == "" or re.fullmatch(r"\[(\w+)\]\(beyond/figures/\1\.png\)", picture)


EXERCISES = re.findall(r"^\| (\d) \| (\d\d): (.*?) \| (.*?) \|$", README, re.MULTILINE)


def test_there_is_an_exercise_for_each_self_check_question():
    assert [question for question, *_ in EXERCISES] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    "question, script, edits, outcome", EXERCISES, ids=[row[0] for row in EXERCISES]
)
def test_exercise(question, script, edits, outcome, tmp_path):
    script = f"chapter20/{script}"
    (name,) = [s for s in SCRIPTS if name_of(s).startswith(script)]
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
