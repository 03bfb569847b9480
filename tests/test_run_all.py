"""run_all.sh never lies: whatever a script, an environment or a user does, its exit status and its
message are true, and it leaves no process and no temporary file behind.

Each test runs a copy of it beside a tiny chapter of its own. PATH holds bash, coreutils, diffutils
and a python3 without packages, PYTHONPATH stubs named torch, triton and numpy, and nothing else.
"""

import _ctypes
import ctypes
import fcntl
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[1]
COMMANDS = """
    bash cat cmp cut date df diff dirname env head mkdir mv nproc readlink rm sort stat tail timeout
""".split()
VERSIONS = {"torch": "1.2", "triton": "3.4", "numpy": "5.6"}
HEADER = "Python {}.{}.{}, torch 1.2, triton 3.4, numpy 5.6, ".format(*sys.version_info)
ON_CPU = HEADER + "no GPU in use: Triton interpreter on the CPU\n"
SIGNALS = {"SIGHUP": 129, "SIGINT": 130, "SIGQUIT": 131, "SIGTERM": 143}
OK = "print('ok')"
HANG = "import time; time.sleep(600)"


@pytest.fixture(scope="session")
def tools(tmp_path_factory):
    """The folders bin and python, which are PATH, and stubs, which is PYTHONPATH."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "bin").mkdir()
    for command in COMMANDS:
        (folder / "bin" / command).symlink_to(shutil.which(command))
    plain = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n'
    write(folder / "python" / "python3", plain)
    for name, version in VERSIONS.items():
        write(folder / "stubs" / name / "__init__.py", "")
        about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        write(folder / "stubs" / f"{name}-{version}.dist-info" / "METADATA", about)
    return folder


@pytest.fixture
def book(tmp_path, tools):
    book = Book(tmp_path, tools)
    yield book
    for process in book.processes():
        os.kill(process, signal.SIGKILL)


class Book:
    """A checkout with a copy of run_all.sh, whose scripts are to print "ok"."""

    def __init__(self, folder, tools):
        self.folder, self.tools, self.root = folder, tools, folder / "book"
        self.python = tools / "python" / "python3"
        self.temporary = folder / "temporary files"
        self.temporary.mkdir()

    def make(self, scripts, expected="ok\n"):
        """Writes the checkout. scripts: {"01_a" or "chapter02/01_a": source}."""
        for file in ("run_all.sh", "run_tests.sh"):
            write(self.root / file, (REPOSITORY / file).read_bytes())
        for name, source in scripts.items():
            write(self.script(name), source)
            write(self.expected(name), expected)
        return self

    def script(self, name):
        return self.root / ("" if "/" in name else "chapter01") / f"{name}.py"

    def expected(self, name):
        script = self.script(name).relative_to(self.root)
        return self.root / "expected_outputs" / script.with_suffix(".txt")

    def start(self, *arguments, program=None, env=None, before=None, **options):
        """Starts run_all.sh (or program) in a new session; before() runs in it first."""
        env = {
            "PATH": f"{self.python.parent}:{self.tools / 'bin'}",
            "PYTHONPATH": self.tools / "stubs",
            "HOME": self.folder,
            "TMPDIR": self.temporary,
            "TRITON_INTERPRET": "1",
            "MARK": self.folder,
            **(env or {}),
        }

        def prepare():
            for name in SIGNALS:  # the tests may run under nohup, or in the background
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            if before:
                before()

        options = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "cwd": self.folder,
            "start_new_session": True,
            "env": {name: str(value) for name, value in env.items() if value is not None},
            "preexec_fn": prepare,
            **options,
        }
        return subprocess.Popen([program or self.root / "run_all.sh", *arguments], **options)

    def finish(self, process, alone=True):
        """Waits for a run, and asserts that nothing is left of it, where it runs alone."""
        out, err = process.communicate(b"not for the scripts\n", timeout=30)
        if alone:
            wait_until(lambda: not self.processes(), "no process is left")
            assert list(self.temporary.iterdir()) == []
        out, err = (out or b"").decode(), (err or b"").decode()
        return SimpleNamespace(status=process.returncode, out=out, err=err)

    def run(self, *arguments, **options):
        return self.finish(self.start(*arguments, **options))

    def processes(self):
        """The ids of what any run_all.sh here has started and is still there."""
        mark = f"MARK={self.folder}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
            except OSError:
                pass  # it has ended, or is another user's
        return found


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if path.read_bytes().startswith(b"#!"):
        path.chmod(0o755)
    return path


def wait_until(condition, what):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, f"not in 20 s: {what}"
        time.sleep(0.01)


def verdicts(result):
    """What was printed, without the header, the times and the line numbers."""
    out = re.sub(r"(?m)^(PASS|FAIL)(  .*?  )\d+\.\d s", r"\1\2T", result.out)
    return re.sub(r"(?m)^@@ .* @@$", "@@", out.removeprefix(ON_CPU))


def passes(*names):
    return "".join(f"PASS  chapter01/{name}.py  T\n" for name in names)


def all_pass(*names):
    return f"{passes(*names)}{len(names)} passed, 0 failed\n"


def cases(names, table):
    """pytest.mark.parametrize with a name for each case."""
    return pytest.mark.parametrize(
        names.split(), [pytest.param(*values, id=case) for case, values in table.items()]
    )


# What scripts do.


def waits_for(*files):
    names = [str(file) for file in files]
    return f"import os, time\nwhile not all(map(os.path.exists, {names})): time.sleep(0.01)\n{OK}\n"


def touches(file):
    return f"open({str(file)!r}, 'w').close()\n"


STARTS_CHILD = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {HANG!r}])\n"


# What a test does between fork and exec.


def without_privileges():
    """Makes root mind file permissions, by dropping CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)


def no_file_may_grow():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def on_terminal():
    fcntl.ioctl(1, termios.TIOCSCTTY, 0)


# --- Verdicts ---

WRONG = "stdout is not the expected output\n"
END = "The end of its stderr:\n"
NO_NEWLINE = "\\ No newline at end of file"


def difference(*lines, name="01_a"):
    files = f"--- expected_outputs/chapter01/{name}.txt\n+++ chapter01/{name}.py\n@@\n"
    return WRONG + files + "".join(f"{line}\n" for line in lines)


def prints(content):
    return f"import sys; sys.stdout.buffer.write({content!r})"


@cases(
    "printed",
    {
        "text": [b"ok\n"],
        "no last newline": [b"ok"],
        "carriage return": [b"ok\r\n"],
        "not UTF-8": [b"\xff\0\n"],
        "megabytes": [b"x" * 3_000_000],
    },
)
def test_the_very_bytes_pass(book, printed):
    result = book.make({"01_a": prints(printed)}, printed).run()
    assert result.out.startswith(ON_CPU)
    assert (result.status, verdicts(result), result.err) == (0, all_pass("01_a"), "")


@cases(
    "expected printed report",
    {
        "one digit": (b"1.0012e-05\n", b"1.0013e-05\n", ["-1.0012e-05", "+1.0013e-05"]),
        "no last newline": (b"ok\n", b"ok", ["-ok", "+ok", NO_NEWLINE]),
        "a last newline": (b"ok", b"ok\n", ["-ok", NO_NEWLINE, "+ok"]),
        "a line more": (b"ok\n", b"ok\nmore\n", [" ok", "+more"]),
        "an empty line more": (b"ok\n", b"ok\n\n", [" ok", "+"]),
        "a line less": (b"ok\nmore\n", b"ok\n", [" ok", "-more"]),
        "a space more": (b"ok\n", b"ok \n", ["-ok", "+ok "]),
        "nothing": (b"ok\n", b"", ["-ok"]),
        "carriage return": (b"ok\n", b"ok\r\n", ["-ok", "+ok^M"]),
        "escape sequence": (b"ok\n", b"\33[32mok\n", ["-ok", "+^[[32mok"]),
        "not UTF-8": (b"ok\n", b"\xff\0\n", ["-ok", "+M-^?^@"]),
        "more lines than fit": (b"x\n", b"x\n" * 99, [" x", *["+x"] * 36, "..."]),
    },
)
def test_any_other_byte_fails(book, expected, printed, report):
    result = book.make({"01_a": prints(printed)}, expected).run()
    report = difference(*report)
    assert verdicts(result) == f"FAIL  chapter01/01_a.py  T: {report}0 passed, 1 failed\n"
    assert (result.status, result.err) == (1, "")


@cases(
    "source",
    {
        "noise on stderr": [f"import sys; sys.stderr.write('hm\\n'); {OK}"],
        "sys.exit(0)": [f"{OK}; raise SystemExit(0)"],
        "a child that outlives it": [STARTS_CHILD + OK],
    },
)
def test_passes_nevertheless(book, source):
    result = book.make({"01_a": source}).run()
    assert (result.status, verdicts(result), result.err) == (0, all_pass("01_a"), "")


def dies_of(name):
    return f"import os, signal; print('ok', flush=True); os.kill(os.getpid(), signal.{name})"


@cases(
    "source report",
    {
        "stderr only": ("import sys; sys.stderr.write('ok\\n')", difference("-ok")),
        "exit 1": (f"{OK}; raise SystemExit(1)", "exit status 1\n"),
        "exit 200": (f"{OK}; raise SystemExit(200)", "exit status 200\n"),
        "exit message": (f"{OK}; raise SystemExit('so')", f"exit status 1\n{END}so\n"),
        "failed assert": (
            f"import sys; sys.tracebacklimit = 0\n{OK}\nassert False, 'no'",
            f"exit status 1\n{END}AssertionError: no\n",
        ),
        "reads stdin": (
            f"import sys; sys.tracebacklimit = 0\n{OK}\ninput()",
            f"exit status 1\n{END}EOFError: EOF when reading a line\n",
        ),
        "SIGSEGV": (dies_of("SIGSEGV"), "was killed by SIGSEGV (exit status 139)\n"),
        "SIGKILL": (dies_of("SIGKILL"), "was killed by SIGKILL (exit status 137)\n"),
        "SIGTERM": (dies_of("SIGTERM"), "was killed by SIGTERM (exit status 143)\n"),
        "SIGKILL to all of its group": (
            dies_of("SIGKILL").replace("kill(os.getpid()", "killpg(0"),
            "was killed with its process group, or there is no room in {}\n",
        ),
        "exit 3, with a child": (f"{STARTS_CHILD}{OK}; raise SystemExit(3)", "exit status 3\n"),
    },
)
def test_fails_although(book, source, report):
    result = book.make({"01_a": source}).run()
    report = report.format(book.temporary)
    assert verdicts(result) == f"FAIL  chapter01/01_a.py  T: {report}0 passed, 1 failed\n"
    assert (result.status, result.err) == (1, "")


def test_a_hanging_script_times_out(book):
    scripts = {
        "01_a": f"print('ok', flush=True)\n{HANG}",
        "02_b": f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{HANG}",
        "03_c": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "04_d": STARTS_CHILD + HANG,
    }
    result = book.make(scripts).run("-j4", "--timeout", "1")
    timed_out = [f"FAIL  chapter01/{name}.py  T: timed out after 1 s\n" for name in scripts]
    assert verdicts(result) == "".join(timed_out) + "0 passed, 4 failed\n"
    assert (result.status, result.err) == (1, "")


@cases(
    "source report",
    {
        "one line": ("stdout.write('x' * 100_000_000)", "+" + "x" * 299 + "\n"),
        "many lines": ("stdout.write('x\\n' * 50_000_000)", "\n+x\n+x\n...\n"),
        "on stderr": ("exit('x' * 100_000_000)", f": exit status 1\n{END}{'x' * 300}\n"),
    },
)
def test_100_megabytes_of_output_make_a_short_report(book, source, report):
    result = book.make({"01_a": f"import sys; sys.{source}"}).run()
    assert (result.status, result.err) == (1, "")
    assert "FAIL  chapter01/01_a.py" in result.out and report in result.out
    assert ("the first 1000000 of 100000000 bytes" in result.out) == ("stdout" in source)
    assert result.out.endswith("0 passed, 1 failed\n") and len(result.out) < 1000


# --- Expected files ---


def replace_by_directory(path):
    path.unlink()
    path.mkdir()


def replace_by_dangling_link(path):
    path.unlink()
    path.symlink_to("nowhere")


@cases(
    "change report",
    {
        "missing": (Path.unlink, "there is no expected file {}"),
        "directory": (replace_by_directory, "there is no expected file {}"),
        "dangling link": (replace_by_dangling_link, "there is no expected file {}"),
        "empty": (lambda path: path.write_text(""), "the expected file {} is empty"),
        "unreadable": (lambda path: path.chmod(0), "the expected file {} cannot be read"),
    },
)
@pytest.mark.parametrize("source", [OK, ""], ids=["ok", "silent"])
def test_no_expected_file_is_a_failure(book, change, report, source):
    book.make({"01_a": source, "02_b": OK})
    change(book.expected("01_a"))
    result = book.run(before=without_privileges)
    report = report.format("expected_outputs/chapter01/01_a.txt")
    failure = f"FAIL  chapter01/01_a.py  T: {report}\n"
    assert verdicts(result) == failure + passes("02_b") + "1 passed, 1 failed\n"
    assert (result.status, result.err) == (1, "")


@pytest.mark.parametrize("others", [[], ["02_b"]], ids=["alone", "beside a script"])
def test_an_expected_file_without_a_script_is_a_failure(book, others):
    book.make(dict.fromkeys(["01_a", *others], OK))
    book.script("01_a").unlink()
    result = book.run()
    assert verdicts(result) == (
        "FAIL  chapter01/01_a.py  T: expected_outputs/chapter01/01_a.txt has no script: "
        "there is no chapter01/01_a.py\n"
        f"{passes(*others)}{len(others)} passed, 1 failed\n"
    )
    assert (result.status, result.err) == (1, "")


def test_no_scripts_are_no_success(book):
    result = book.make({}).run()
    message = f"run_all.sh: there is no script {book.root}/chapter*/NN_*.py\n"
    assert (result.status, result.out, result.err) == (2, "", message)


# --- Arguments ---

NAMES = [f"chapter01/{name}" for name in ("01_a", "02_b", "03_c")]
NAMES += [f"chapter02/{name}" for name in ("01_a", "03_d")]


@cases(
    "arguments chosen",
    {
        "nothing": ("", NAMES),
        "number": ("03", ["chapter01/03_c", "chapter02/03_d"]),
        "digit": ("3", ["chapter01/03_c", "chapter02/03_d"]),
        "start of a name": ("01_", ["chapter01/01_a", "chapter02/01_a"]),
        "name": ("02_b.py", ["chapter01/02_b"]),
        "chapter": ("chapter02", ["chapter02/01_a", "chapter02/03_d"]),
        "number in a chapter": ("chapter02/03", ["chapter02/03_d"]),
        "path in the checkout": ("chapter01/03_c.py", ["chapter01/03_c"]),
        "path": ("book/chapter01/03_c.py", ["chapter01/03_c"]),
        "path over a link": ("link/chapter01/03_c.py", ["chapter01/03_c"]),
        "path of a chapter": ("./book/chapter02/", ["chapter02/01_a", "chapter02/03_d"]),
        "expected file": ("book/expected_outputs/chapter01/03_c.txt", ["chapter01/03_c"]),
        "two, in order, once": (
            "03_d 02 2 chapter02/03_d.py",
            ["chapter01/02_b", "chapter02/03_d"],
        ),
        "after --": ("-- 02", ["chapter01/02_b"]),
    },
)
def test_arguments_choose_scripts(book, arguments, chosen):
    book.make(dict.fromkeys(NAMES, OK))
    (book.folder / "link").symlink_to(book.root)
    result = book.run("--list", *arguments.split())
    assert result.out == "".join(f"{name}.py\n" for name in chosen)
    assert (result.status, result.err) == (0, "")
    result = book.run(*arguments.split())
    assert re.findall("PASS  (.*).py", result.out) == chosen
    assert result.out.endswith(f"\n{len(chosen)} passed, 0 failed\n") and result.status == 0


@pytest.mark.parametrize(
    "argument", ["", "9", "04", "a", "chapter", "chapter03", "chapter01/04", "*", "/", "run_all.sh"]
)
def test_an_argument_that_chooses_nothing_is_an_error(book, argument):
    book.make(dict.fromkeys(NAMES, OK))
    message = f"run_all.sh: no script matches '{argument}': ./run_all.sh --list lists them\n"
    for option in [], ["--list"]:
        result = book.run(*option, "01", argument)
        assert (result.status, result.out, result.err) == (2, "", message)


def test_names_with_odd_characters(book):
    names = ['01_a "b"', "02_it's", "03_[x]*", "04_$HOME", "05_%s\\n", "06_-a"]
    result = book.make(dict.fromkeys(names, OK)).run()
    assert (result.status, verdicts(result)) == (0, all_pass(*names))
    book.make(dict.fromkeys(names, "print('no')"))
    for name in names:
        result = book.run(name)
        report = difference("-ok", "+no", name=name)
        assert verdicts(result) == f"FAIL  chapter01/{name}.py  T: {report}0 passed, 1 failed\n"
        assert result.status == 1


@cases(
    "arguments message",
    {
        "option": (["--quick"], "unknown option --quick: "),
        "letter": (["-x", "01"], "unknown option -x: "),
        "-j without": (["-j"], "-j needs a number\n"),
        "-jx": (["-jx"], "-j needs a number of 1 or more, got 'x'\n"),
        "--timeout without": (["--timeout"], "--timeout needs a number\n"),
        "--timeout=": (["--timeout="], "--timeout needs 1 or more whole seconds, got ''\n"),
    },
)
def test_wrong_usage(book, arguments, message):
    result = book.make({"01_a": OK}).run(*arguments)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(f"run_all.sh: {message}") and result.err.count("\n") == 1


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "two", "", "9999999999999999999"])
@pytest.mark.parametrize("option", ["-j", "--timeout"])
def test_wrong_number(book, option, number):
    result = book.make({"01_a": OK}).run(option, number)
    assert (result.status, result.out) == (2, "")
    assert re.fullmatch(rf"run_all.sh: {option} needs .*, got '{number}'\n", result.err)


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help(book, option):
    result = book.make({}).run(option)
    assert result.out.startswith("Usage: ./run_all.sh [-j N] [--timeout SECONDS] [--list]")
    assert (result.status, result.err) == (0, "")


# --- Places and environments ---


@cases(
    "program folder env",
    {
        "symbolic link": ("link", ".", {}),
        "link from the checkout": ("../link", "book", {}),
        "from a chapter": ("../run_all.sh", "book/chapter01", {}),
        "CDPATH": ("./run_all.sh", "book", {"CDPATH": "/:..:/tmp"}),
        "CDPATH from elsewhere": ("../book/run_all.sh", "deep", {"CDPATH": ".."}),
        "like a checkout": ("../book/run_all.sh", "deep", {}),
    },
)
def test_called_from_anywhere(book, program, folder, env):
    book.make({"01_a": OK})
    (book.folder / "link").symlink_to(book.root / "run_all.sh")
    write(book.folder / "deep" / "chapter01" / "09_not_this.py", "")
    result = book.run(program=f"./{program}", cwd=book.folder / folder, env=env)
    assert (result.status, verdicts(result), result.err) == (0, all_pass("01_a"), "")


@pytest.mark.parametrize("name", ["a b", "[c]*?", 'it\'s "$HOME"', "%s\\n", "-\u00e9"])
def test_checkout_in_an_odd_path(book, name):
    book.root = book.folder / name
    result = book.make({"01_a": OK, "02_b": "print('no')"}).run()
    assert verdicts(result).startswith(passes("01_a") + "FAIL  chapter01/02_b.py  T: " + WRONG)
    assert result.out.endswith("\n-ok\n+no\n1 passed, 1 failed\n")
    assert (result.status, result.err) == (1, "")
    result = book.run("--list", book.script("02_b"))
    assert (result.status, result.out) == (0, "chapter01/02_b.py\n")


@pytest.mark.parametrize(
    "env",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "C.UTF-8"},
        {"PYTHONIOENCODING": "latin-1"},
        {"PYTHONOPTIMIZE": 2},
        {"PYTHONWARNINGS": "error"},
        {"PYTHONSAFEPATH": 1},
        {"PYTHONINSPECT": 1},
        {"PYTHONSTARTUP": "/nowhere"},
        {"PYTHONDEVMODE": 1},
        {"HOME": None},
        {"HOME": "/proc"},
        {"TMPDIR": None},
    ],
    ids=lambda env: "{}={}".format(*next(iter(env.items()))),
)
def test_environments_change_nothing(book, env):
    scripts = {
        "01_a": "import sys, warnings\nwarnings.warn('w')\nprint('\u00e9')\nsys.exit()",
        "02_b": "import sys\nsys.tracebacklimit = 0\nprint('\u00e9')\nassert False, 'no'",
    }
    result = book.make(scripts, "\u00e9\n").run(env=env)
    failure = f"FAIL  chapter01/02_b.py  T: exit status 1\n{END}"
    assert verdicts(result).startswith(passes("01_a") + failure)
    assert result.out.endswith("AssertionError: no\n1 passed, 1 failed\n")
    assert (result.status, result.err) == (1, "")


def test_home_and_checkout_not_writable(book):
    book.make({"01_a": OK})
    home = write(book.folder / "home" / "file", "").parent
    for path in (home, book.root, *book.root.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    result = book.run(env={"HOME": home}, before=without_privileges)
    assert (result.status, verdicts(result), result.err) == (0, all_pass("01_a"), "")


def test_two_runs_at_once(book):
    started, go = book.folder / "started", book.folder / "go"
    book.make({"01_a": touches(started) + waits_for(go), "02_b": OK})
    first = book.start("01")
    wait_until(started.exists, "the first run starts")
    result = book.finish(book.start("02"), alone=False)
    assert (result.status, verdicts(result), result.err) == (0, all_pass("02_b"), "")
    go.touch()
    result = book.finish(first)
    assert (result.status, verdicts(result), result.err) == (0, all_pass("01_a"), "")


@pytest.mark.parametrize("program", ["run_all.sh", "run_tests.sh"])
def test_another_system_than_linux(book, program):
    result = book.make({"01_a": OK}).run(program=book.root / program, env={"OSTYPE": "darwin23"})
    message = f"{program}: Triton is made for Linux only; on Windows, use WSL 2\n"
    assert (result.status, result.out, result.err) == (2, "", message)


# --- The interpreter ---


def python_with(book, *names):
    """An interpreter that finds these of the three packages only."""
    folder = book.folder / "some packages"
    for name in names:
        write(folder / name / "__init__.py", "")
    run = f'PYTHONPATH="{folder}" exec "{book.python}" "$@"'
    return write(book.folder / "python", f"#!/bin/sh\n{run}\n")


@pytest.mark.parametrize("program", ["run_all.sh", "run_tests.sh"])
@cases(
    "has lacks",
    {
        "nothing": ([], "torch, triton, numpy"),
        "no torch": (["triton", "numpy"], "torch"),
        "no triton": (["torch", "numpy"], "triton"),
    },
)
def test_python_that_lacks_packages(book, program, has, lacks):
    python = python_with(book, *has)
    result = book.make({"01_a": OK}).run(program=book.root / program, env={"PYTHON": python})
    message = f"{program}: PYTHON={python} lacks {lacks}\n"
    assert (result.status, result.out, result.err) == (2, "", message)


@pytest.mark.parametrize("python", ["/nowhere/python", "no-such-python", "/", "cat"])
def test_python_that_does_not_run(book, python):
    result = book.make({"01_a": OK}).run(env={"PYTHON": python})
    message = f"run_all.sh: PYTHON={python} does not run as Python 3\n"
    assert (result.status, result.out, result.err) == (2, "", message)


@pytest.mark.parametrize("file", ["README", "__init__.py"])
def test_a_folder_named_triton_in_the_working_directory_is_not_triton(book, file):
    write(book.folder / "triton" / file, "raise SystemExit('the wrong triton')")
    result = book.make({"01_a": f"import triton; {OK}"}).run()
    assert (result.status, verdicts(result), result.err) == (0, all_pass("01_a"), "")
    python = python_with(book, "torch", "numpy")
    result = book.run(env={"PYTHON": python})
    assert (result.status, result.err) == (2, f"run_all.sh: PYTHON={python} lacks triton\n")


def test_which_python_runs_the_scripts(book):
    """PYTHON, else .venv/bin/python, else python3 on PATH: the first that has the packages."""
    book.make({"01_a": "import os; print(os.environ['WHICH'])"})

    def python(folder, which):
        return write(folder / "python", f'#!/bin/sh\nWHICH={which} exec "{book.python}" "$@"\n')

    venv, other = python(book.root / ".venv" / "bin", "venv"), python(book.folder, "other")
    env = {"WHICH": "path"}
    assert "\n-ok\n+other\n" in book.run(env={**env, "PYTHON": other}).out
    assert "\n-ok\n+other\n" in book.run(env={**env, "PYTHON": "./python"}).out
    assert "\n-ok\n+path\n" in book.run(env={**env, "PYTHON": "python3"}).out
    assert "\n-ok\n+venv\n" in book.run(env=env).out
    write(venv, "#!/bin/sh\nexit 1\n")
    assert "\n-ok\n+path\n" in book.run(env=env).out


# --- The header ---

TORCH = """
print("a line of torch's own")
class cuda:
    is_available = staticmethod(lambda: {})
    get_device_name = staticmethod(lambda: "Fake GPU 100")
"""


def with_driver(book, torch):
    """The environment of a machine with the library of NVIDIA's driver, and with this torch."""
    packages = write(book.folder / "packages" / "torch" / "__init__.py", torch).parents[1]
    library = write(book.folder / "driver" / "README", "").parent
    (library / "libcuda.so.1").symlink_to(_ctypes.__file__)  # any that loads
    path = f"{packages}:{book.tools / 'stubs'}"
    return {"PYTHONPATH": path, "LD_LIBRARY_PATH": library, "TRITON_INTERPRET": None}


@cases(
    "torch header",
    {
        "a GPU": (TORCH.format(True), HEADER + "Fake GPU 100\n"),
        "no GPU": (TORCH.format(False), ON_CPU),
        "torch raises": ("raise OSError('why')", HEADER + "unknown device: OSError('why')\n"),
        "torch crashes": (
            "import os; os.kill(os.getpid(), 11)",
            "unknown versions and device: exit status 139\n",
        ),
        "torch hangs": (HANG, "unknown versions and device: exit status 137\n"),
    },
)
def test_header_where_there_is_a_driver(book, torch, header):
    env = with_driver(book, torch)
    result = book.make({"01_a": OK}).run("--timeout", "2", env=env)
    assert result.out.startswith(header + "PASS  chapter01/01_a.py  ")
    assert result.out.endswith("1 passed, 0 failed\n")
    assert (result.status, result.err) == (0, "")
    assert book.run(env={**env, "TRITON_INTERPRET": "on"}).out.startswith(ON_CPU)


def test_header_names_the_package_without_a_version(book):
    python = python_with(book, *VERSIONS)
    result = book.make({"01_a": OK}).run(env={"PYTHON": python})
    assert ", torch of unknown version, triton of unknown version, " in result.out.splitlines()[0]
    assert result.out.endswith("1 passed, 0 failed\n") and result.status == 0


# --- In parallel ---


def mutual(book, count):
    """Scripts each of which passes only once all have started."""
    files = [book.folder / f"runs{i}" for i in range(count)]
    return {f"{i:02}_a": touches(file) + waits_for(*files) for i, file in enumerate(files)}


@pytest.mark.parametrize("option", [["-j", "3"], ["-j3"], []], ids=["-j 3", "-j3", "default"])
def test_scripts_run_at_the_same_time(book, option):
    write(book.folder / "three" / "nproc", "#!/bin/sh\necho 3\n")
    path = f"{book.folder / 'three'}:{book.python.parent}:{book.tools / 'bin'}"
    scripts = mutual(book, 3)
    result = book.make(scripts).run(*option, env={"PATH": path})
    assert (result.status, verdicts(result), result.err) == (0, all_pass(*scripts), "")


def test_no_more_scripts_than_j_run_at_the_same_time(book):
    second, third, checked = (book.folder / name for name in ("second", "third", "checked"))
    not_yet = f"time.sleep(0.5)\nassert not os.path.exists({str(third)!r})\n"
    scripts = {
        "01_a": waits_for(second) + not_yet + touches(checked),
        "02_b": touches(second) + waits_for(checked),
        "03_c": touches(third) + OK,
    }
    result = book.make(scripts).run("-j2")
    assert (result.status, verdicts(result), result.err) == (0, all_pass(*scripts), "")


def test_printed_in_order(book):
    done = book.folder / "done"
    scripts = {"01_a": waits_for(done), "02_b": OK, "03_c": touches(done) + OK}
    result = book.make(scripts).run("-j2")
    assert (result.status, verdicts(result), result.err) == (0, all_pass(*scripts), "")


# --- Interruptions ---


def start_hanging(book, **options):
    """Starts a run of two scripts that hang, each with a child, and waits until they do."""
    started = [book.folder / "started1", book.folder / "started2"]
    book.make({f"0{i}_a": STARTS_CHILD + touches(s) + HANG for i, s in enumerate(started)})
    process = book.start("-j2", **options)
    wait_until(lambda: all(s.exists() for s in started), "the scripts start")
    return process


@pytest.mark.parametrize("insistent", [False, True], ids=["once", "again and again"])
@pytest.mark.parametrize("name", SIGNALS)
def test_interrupted(book, name, insistent):
    process = start_hanging(book)
    os.killpg(process.pid, getattr(signal, name))
    end = time.monotonic() + 20
    while insistent and process.poll() is None and time.monotonic() < end:
        os.killpg(process.pid, getattr(signal, name))
        time.sleep(0.0002)
    result = book.finish(process)
    assert (result.status, result.out, result.err) == (SIGNALS[name], "", "")


def test_interrupted_before_the_header(book):
    started = book.folder / "started"
    process = book.make({"01_a": OK}).start(env=with_driver(book, touches(started) + HANG))
    wait_until(started.exists, "torch is imported")
    os.killpg(process.pid, signal.SIGINT)
    result = book.finish(process)
    assert (result.status, result.out, result.err) == (130, "", "")


@pytest.mark.parametrize("delay", [30 * step for step in range(1, 9)])
def test_interrupted_at_any_moment(book, delay):
    process = book.make({f"{i:02}_a": HANG for i in range(20)}).start("-j20")
    time.sleep(delay / 1000)
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # bash may lose one while it starts
    # Before it has set its traps, SIGINT ends it like any program.
    assert book.finish(process).status in (130, -signal.SIGINT)


@cases("options status", {"SIGPIPE": ({}, 141), "ignored": ({"restore_signals": False}, 2)})
def test_stdout_closed_early(book, options, status):
    go = book.folder / "go"
    book.make({"01_a": OK, "02_b": waits_for(go), "03_c": HANG})
    reader, writer = os.pipe()
    process = book.start("-j3", stdout=writer, **options)
    os.close(writer)
    with open(reader) as lines:
        assert [lines.readline(), lines.readline()[:4]] == [ON_CPU, "PASS"]
    go.touch()
    assert book.finish(process).status == status


@pytest.mark.parametrize("arguments", ["", "--list", "--help"])
def test_a_full_disk_is_no_success(book, arguments):
    with open("/dev/full", "w") as full:
        result = book.make({"01_a": OK}).run(*arguments.split(), stdout=full)
    assert result.status == 2 and "write error: No space left on device" in result.err


def test_a_full_disk_for_temporary_files_is_no_success(book):
    result = book.make({"01_a": OK}).run(before=no_file_may_grow)
    failure = f"was killed with its process group, or there is no room in {book.temporary}\n"
    assert verdicts(result) == (
        f"unknown versions and device\nFAIL  chapter01/01_a.py  T: {failure}0 passed, 1 failed\n"
    )
    assert (result.status, result.err) == (1, "")


def test_no_folder_for_temporary_files(book):
    result = book.make({"01_a": OK}).run(env={"TMPDIR": "/nowhere"})
    assert (result.status, result.out) == (2, "")
    assert result.err.endswith("run_all.sh: no temporary directory can be made in /nowhere\n")


# --- On a terminal ---


class Terminal:
    def __init__(self):
        self.main, self.device = os.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.device)
        self.options = {**streams, "before": on_terminal}

    def printed(self):
        """What is on it, once no process has it open."""
        os.close(self.device)
        printed = b""
        with open(self.main, "rb", buffering=0) as terminal:
            while chunk := read_terminal(terminal):
                printed += chunk
        return printed.decode().replace("\r\n", "\n")


def read_terminal(terminal):
    try:
        return terminal.read(4096)
    except OSError:
        return b""  # this is how a terminal says that all is read


@cases(
    "env coloured",
    {
        "colour": ({"TERM": "xterm"}, True),
        "NO_COLOR": ({"TERM": "xterm", "NO_COLOR": 1}, False),
        "NO_COLOR empty": ({"TERM": "xterm", "NO_COLOR": ""}, True),
        "dumb": ({"TERM": "dumb"}, False),
    },
)
def test_colour_on_a_terminal_only(book, env, coloured):
    terminal = Terminal()
    result = book.make({"01_a": OK, "02_b": "print('no')"}).run(env=env, **terminal.options)
    printed = terminal.printed()
    assert result.status == 1 and printed.endswith("1 passed, 1 failed\n")
    assert ("\033[32mPASS\033[0m  chapter01/01_a.py  " in printed) == coloured
    assert ("\033[31mFAIL\033[0m  chapter01/02_b.py  " in printed) == coloured
    assert ("\033" in printed) == coloured
    assert "\033" not in book.run(env=env).out


def test_ctrl_c_on_a_terminal(book):
    terminal = Terminal()
    process = start_hanging(book, **terminal.options)
    os.write(terminal.main, b"\3")
    assert (book.finish(process).status, terminal.printed()) == (130, "^C")


def test_a_script_that_reads_the_terminal_does_not_stop_the_run(book):
    terminal = Terminal()
    result = book.make({"01_a": "open('/dev/tty').read()"}).run("--timeout=1", **terminal.options)
    assert terminal.printed().endswith(" s: timed out after 1 s\n0 passed, 1 failed\n")
    assert result.status == 1


# --- Set-up ---

# The python3 of these tests: a venv is a copy of it, and what pip install does is $PIP.
SETUP_PYTHON = """#!/usr/bin/env bash
[[ -z $FAILS || "$*" != *"$FAILS"* ]] || exit 1
[[ $1 != -m ]] || echo "$*" >>"$LOG"
case "$*" in
"-m venv "*) /bin/mkdir -p "$3/bin" && /bin/cp "$0" "$3/bin/python" ;;
"-m pip --version") ;;
"-m pip install "*) packages=${0%/*}/packages && eval "$PIP" ;;
*)
    [[ ! -e ${0%/*}/packages ]] || export PYTHONPATH=$STUBS
    exec "$PLAIN_PYTHON" "$@"
    ;;
esac
"""
INSTALLS = """\
No torch, triton and numpy found: installing requirements.txt into .venv (once). On x86-64 this
downloads 2.8 GB and takes 4.7 GB of disk. Without a GPU 0.4 GB and 1.7 GB are enough: Ctrl-C, then
PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu ./run_all.sh
"""


@pytest.fixture
def setup(book):
    """Makes the environment of a machine without torch, from what pip does and what fails."""

    def environment(pip=': >"$packages"', fails=""):
        return {
            "PATH": f"{python.parent}:{book.tools / 'bin'}",
            "PYTHONPATH": None,
            "PLAIN_PYTHON": book.python,
            "STUBS": book.tools / "stubs",
            "LOG": book.folder / "log",
            "PIP": pip,
            "FAILS": fails,
        }

    python = write(book.folder / "setup" / "python3", SETUP_PYTHON)
    book.make({"01_a": OK})
    return environment


def installed(book):
    """What was done to set up, in order."""
    return re.findall("-m (venv|pip install)", (book.folder / "log").read_text())


def test_set_up_once(book, setup):
    result = book.run(env=setup())
    assert (result.status, verdicts(result), result.err) == (0, all_pass("01_a"), INSTALLS)
    assert f" -r {book.root}/requirements.txt\n" in (book.folder / "log").read_text()
    result = book.run(env=setup("exit 1"))
    assert (result.status, verdicts(result), result.err) == (0, all_pass("01_a"), "")
    assert installed(book) == ["venv", "pip install"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_an_interrupted_set_up_is_made_anew(book, setup, name):
    half = book.root / ".venv" / "half"
    pip = f": >\"$packages\"; trap 'exit 1' INT TERM; exec 2>/dev/null; : >{half}\n"
    process = book.start(env=setup(pip + "while :; do /bin/sleep 0.1; done"))
    wait_until(half.exists, "pip starts")
    os.killpg(process.pid, getattr(signal, name))
    result = book.finish(process)
    assert (result.status, result.out, result.err) == (SIGNALS[name], "", INSTALLS)
    result = book.run(env=setup())
    assert (result.status, verdicts(result), result.err) == (0, all_pass("01_a"), INSTALLS)
    assert installed(book) == ["venv", "pip install"] * 2 and not half.exists()


def test_a_venv_without_torch_is_completed(book, setup):
    write(book.root / ".venv" / "bin" / "python", SETUP_PYTHON)
    result = book.run(env=setup())
    assert (result.status, verdicts(result), result.err) == (0, all_pass("01_a"), INSTALLS)
    assert installed(book) == ["pip install"]


def test_two_set_ups_at_once(book, setup):
    started, go, messages = (book.folder / name for name in ("started", "go", "messages"))
    pip = f': >{started}; until [[ -e {go} ]]; do /bin/sleep 0.1; done; : >"$packages"'
    first = book.start(env=setup(pip))
    wait_until(started.exists, "pip starts")
    with messages.open("w") as stderr:
        second = book.start(env=setup("exit 1"), stderr=stderr)
    waiting = "Waiting for another run, which is setting .venv up.\n"
    wait_until(lambda: messages.read_text() == waiting, "the second run waits")
    go.touch()
    result = book.finish(second, alone=False)
    assert (result.status, verdicts(result)) == (0, all_pass("01_a"))
    assert (book.finish(first).status, messages.read_text()) == (0, waiting)
    assert installed(book) == ["venv", "pip install"]


@cases(
    "fault message",
    {
        "too old": (
            {"fails": "version_info"},
            "python3 is not Python 3.10 or newer, but Python 3.",
        ),
        "no venv": ({"fails": "import ensurepip"}, "python3 has no venv module (on Debian"),
        "venv fails": ({"fails": "-m venv"}, "python3 -m venv failed: see above"),
        "no network": (
            {"pip": "exit 1"},
            "could not install requirements.txt into .venv: is there a network, and room",
        ),
        "wrong requirements": (
            {"pip": ":"},
            ".venv lacks torch, triton, numpy, although requirements.txt is installed",
        ),
    },
)
def test_a_set_up_that_fails_says_why(book, setup, fault, message):
    for _ in range(2):  # what the first leaves must not pass for a .venv
        result = book.run(env=setup(**fault))
        error = result.err.removeprefix(INSTALLS)
        assert error.startswith(f"run_all.sh: {message}") and error.count("\n") == 1
        assert (result.status, result.out) == (2, "")
    assert book.run(env=setup()).status == 0


def test_a_venv_made_by_hand_after_a_failed_set_up_is_used(book, setup):
    assert book.run(env=setup("exit 1")).status == 2
    assert not (book.root / ".venv").exists()
    for name, content in {"python": SETUP_PYTHON, "packages": ""}.items():
        write(book.root / ".venv" / "bin" / name, content)
    result = book.run(env=setup("exit 1"))
    assert (result.status, verdicts(result), result.err) == (0, all_pass("01_a"), "")


def test_too_little_room_for_a_set_up(book, setup):
    df = write(book.folder / "setup" / "df", "#!/bin/sh\necho Avail; echo 1999999\n")
    result = book.run(env=setup())
    message = f"run_all.sh: {book.root} has 1999 MB free, and .venv needs at least 2 GB\n"
    assert (result.status, result.out, result.err) == (2, "", message)
    assert not (book.root / ".venv").exists()
    write(df, "#!/bin/sh\necho Avail; echo 2000000\n")
    assert book.run(env=setup()).status == 0


def test_no_python3(book, setup):
    result = book.run(env={**setup(), "PATH": book.tools / "bin"})
    message = "run_all.sh: there is no python3: install Python 3.10 or newer\n"
    assert (result.status, result.out, result.err) == (2, "", message)


def test_no_set_up_in_a_checkout_that_is_not_writable(book, setup):
    book.root.chmod(0o555)
    result = book.run(env=setup(), before=without_privileges)
    message = f"{book.root} is not writable, so no .venv can be made there: set PYTHON"
    assert (result.status, result.out, result.err) == (2, "", f"run_all.sh: {message}\n")


def test_set_up_with_venv_and_pip_themselves(book):
    """First without a network, then with a wheel at hand."""
    pytest.importorskip("ensurepip")
    book.root = book.folder / "a b"
    book.make({"01_a": f"import torch, triton, numpy; {OK}"})
    requirements = write(book.root / "requirements.txt", "torch\n")
    index = {"PIP_INDEX_URL": "http://127.0.0.1:1/", "PIP_CONFIG_FILE": "/dev/null"}
    env = {"PYTHONPATH": None, **index}
    result = book.run(env=env)
    assert (result.status, result.out) == (2, "") and result.err.startswith(INSTALLS)
    assert result.err.splitlines()[-1].startswith("run_all.sh: could not install requirements.txt")

    with zipfile.ZipFile(book.folder / "stubs-1-py3-none-any.whl", "w") as wheel:
        for name in VERSIONS:
            wheel.writestr(f"{name}/__init__.py", "")
        about = "Metadata-Version: 2.1\nName: stubs\nVersion: 1\n"
        wheel.writestr("stubs-1.dist-info/METADATA", about)
        wheel.writestr("stubs-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("stubs-1.dist-info/RECORD", "")
    write(requirements, f"--no-index\n--find-links {book.folder}\nstubs\n")
    result = book.run(env=env)
    assert result.out.endswith("1 passed, 0 failed\n") and result.status == 0
    assert not (book.root / ".venv.incomplete").exists()


# --- run_tests.sh ---


@pytest.mark.parametrize("python", ["./python", None], ids=["relative PYTHON", "python3"])
def test_run_tests_passes_arguments_and_status_through(book, python):
    write(book.make({}).root / "requirements-dev.txt", "")
    write(book.folder / "python", f'#!/bin/sh\nexec "{book.python}" "$@"\n')
    stub = "import os, sys; print(os.getcwd(), sys.argv[1:]); sys.exit(5)"
    stubs = write(book.folder / "pytest" / "pytest.py", stub).parent
    env = {"PYTHONPATH": f"{stubs}:{book.tools / 'stubs'}", "PYTHON": python}
    result = book.run("-k", "a b", program=book.root / "run_tests.sh", env=env)
    assert (result.status, result.err) == (5, "")
    assert result.out == f"{book.root} ['-k', 'a b']\n"


# A python3 whose pip install does $PIP when it has installed all but the package itself.
TESTS_PYTHON = """#!/usr/bin/env bash
[[ "$1 $2" == "-m pip" ]] || exec "$PLAIN_PYTHON" "$@"
while [[ $1 != --target ]]; do shift; done
mkdir -p "$2/pytest-1.dist-info"
printf 'Metadata-Version: 2.1\\nName: pytest\\nVersion: 1\\n' >"$2/pytest-1.dist-info/METADATA"
eval "$PIP"
echo "print('tested')" >"$2/pytest.py"
"""


@pytest.fixture
def run_tests(book):
    """Starts run_tests.sh where pytest is missing, and pip does what it is told."""
    write(book.make({}).root / "requirements-dev.txt", "# a comment\npytest==1\n")
    python = write(book.folder / "python", TESTS_PYTHON)

    def start(pip=""):
        env = {"PYTHON": python, "PLAIN_PYTHON": book.python, "PIP": pip}
        return book.start(program=book.root / "run_tests.sh", env=env)

    return start


INSTALLS_FOR_TESTS = (
    f"Installing requirements-dev.txt into .test-packages/{sys.implementation.cache_tag} (once): "
    "40 MB to download.\n"
)


def test_half_installed_test_packages_are_installed_anew(book, run_tests):
    result = book.finish(run_tests("exit 1"))
    assert (result.status, result.out) == (2, "")
    message = f"{INSTALLS_FOR_TESTS}run_tests.sh: could not install requirements-dev.txt:"
    assert result.err.startswith(message)
    result = book.finish(run_tests())
    assert (result.status, result.out, result.err) == (0, "tested\n", INSTALLS_FOR_TESTS)
    result = book.finish(run_tests("exit 1"))
    assert (result.status, result.out, result.err) == (0, "tested\n", "")


def test_ctrl_c_while_test_packages_are_installed(book, run_tests):
    started = book.folder / "started"
    process = run_tests(f"trap 'exit 1' INT; : >{started}; while :; do /bin/sleep 0.1; done")
    wait_until(started.exists, "pip starts")
    os.killpg(process.pid, signal.SIGINT)
    result = book.finish(process)
    assert (result.status, result.out, result.err) == (130, "", INSTALLS_FOR_TESTS)


# Each of requirements-dev.txt is installed without its needs: matplotlib's numpy would hide the
# interpreter's own, which torch and triton use.
OF_THE_INTERPRETER = {"numpy", "typing-extensions"}
DEV = (REPOSITORY / "requirements-dev.txt").read_text()
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
