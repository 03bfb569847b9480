"""run_all.sh never lies: whatever a script, an environment or a user does, its exit status and its
message are true; it leaves no process behind, and deletes nothing that it did not make.

Each test runs a copy of it beside a tiny chapter of its own. PATH holds what run_all.sh calls and a
python3 without packages, PYTHONPATH stubs named torch, triton and numpy, and nothing else.
"""

import _ctypes
import contextlib
import ctypes
import fcntl
import functools
import http.server
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import threading
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
VERSIONS = {"torch": "1.2", "triton": "3.4", "numpy": "5.6"}
HEADER = "Python {}.{}.{}, torch 1.2, triton 3.4, numpy 5.6, ".format(*sys.version_info)
NO_GPU = "no GPU in use: Triton interpreter on the CPU\n"
SIGNALS = {"SIGHUP": 129, "SIGINT": 130, "SIGQUIT": 131, "SIGTERM": 143}
OK = "print('ok')"
HANG = "import time; time.sleep(600)"
CHILD = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {HANG!r}])\n"
EVERY_PROGRAM = pytest.mark.parametrize("program", ["run_all.sh", "run_tests.sh"])


@pytest.fixture(scope="session")
def tools(tmp_path_factory):
    """The folders bin and python, which are PATH, and stubs, which is PYTHONPATH."""
    folder = tmp_path_factory.mktemp("tools")
    (folder / "bin").mkdir()
    for command in ("readlink", "uname"):
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
    """A checkout with a copy of the runner."""

    def __init__(self, folder, tools):
        self.folder, self.tools, self.root = folder, tools, folder / "book"
        self.python = tools / "python" / "python3"

    def make(self, scripts, expected="ok\n"):
        """Writes the checkout. scripts: {"01_a" or "chapter02/01_a": source}."""
        for file in ("run_all.sh", "run_all.py", "run_tests.sh", "run_tests.py"):
            write(self.root / file, (REPOSITORY / file).read_bytes())
        write(self.root / "requirements.txt", "torch==1.2\ntriton\nnumpy\n")
        write(self.root / "requirements-dev.txt", "# a comment\npytest==1\n")
        for name, source in scripts.items():
            name = name if "/" in name else f"chapter01/{name}"
            write(self.root / f"{name}.py", source)
            write(self.root / f"expected_outputs/{name}.txt", expected)
        return self

    def edit(self, old, new):
        """Changes run_all.py, where a test cannot change the machine."""
        source = (self.root / "run_all.py").read_text()
        assert old in source
        write(self.root / "run_all.py", source.replace(old, new))

    def start(self, *arguments, program="run_all.sh", env=None, before=None, **options):
        """Starts a program of the checkout in a new session; before() runs in it first."""
        path = f"{self.python.parent}:{self.tools / 'bin'}"
        defaults = {"PATH": path, "PYTHONPATH": self.tools / "stubs", "TRITON_INTERPRET": 1}
        env = {**defaults, "HOME": self.folder, "MARK": self.folder, **(env or {})}

        def prepare():
            for name in SIGNALS:  # the tests may run under nohup, or in the background
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            if before:
                before()

        streams = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
        env = {name: str(value) for name, value in env.items() if value is not None}
        options = {"cwd": self.folder, "start_new_session": True, **streams, **options}
        program = program if isinstance(program, list) else [self.root / program]
        return subprocess.Popen([*program, *arguments], env=env, preexec_fn=prepare, **options)

    def finish(self, process, alone=True):
        """Waits for a run, and asserts that nothing is left of it, where it runs alone."""
        out, err = process.communicate(b"not for the scripts\n", timeout=120)
        if alone:
            wait_until(lambda: not self.processes(), "no process is left")
        out, err = os.fsdecode(out or b""), (err or b"").decode()
        return SimpleNamespace(status=process.returncode, out=out, err=err)

    def run(self, *arguments, **options):
        return self.finish(self.start(*arguments, **options))

    def processes(self):
        """The ids of what any run here has started and is still there."""
        mark, found = f"MARK={self.folder}".encode(), []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append(int(process.name))
        return found


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if path.read_bytes().startswith(b"#!"):
        path.chmod(0o755)
    return path


def wait_until(condition, what):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"not in 60 s: {what}"
        time.sleep(0.01)


def assert_verdicts(result, verdicts, err=""):
    """What was printed, but for the times and line numbers. verdicts: {"01_a": what is wrong}."""
    lines = [f"FAIL  {n}: {wrong}" if wrong else f"PASS  {n}" for n, wrong in verdicts.items()]
    failed = sum(map(bool, verdicts.values()))
    out = re.sub(r"(?m)^(PASS|FAIL)  chapter01/(.*?)\.py  \d+\.\d s", r"\1  \2", result.out)
    out = re.sub(r"(?m)^@@ .* @@\n", "", out.removeprefix(HEADER + NO_GPU))
    assert out.splitlines() == [
        *"\n".join(lines).splitlines(),
        f"{len(verdicts) - failed} passed, {failed} failed",
    ]
    assert (result.status, result.err) == (int(failed > 0), err)


def assert_passes(result, *names, err=""):
    assert_verdicts(result, dict.fromkeys(names), err)


def assert_fault(result, message, program="run_all.sh"):
    """Nothing ran, and the last line of stderr says why."""
    assert (result.status, result.out) == (2, "")
    assert result.err.splitlines()[-1].startswith(f"{program}: {message}"), result.err


def cases(names, table):
    """pytest.mark.parametrize with a name for each case."""
    return pytest.mark.parametrize(names, [pytest.param(*row, id=id) for id, row in table.items()])


def waits_for(file):
    return f"import os, time\nwhile not os.path.exists({str(file)!r}): time.sleep(0.01)\n{OK}\n"


def touches(file):
    return f"open({str(file)!r}, 'w').close()\n"


def without_privileges():
    """Makes root mind file permissions, by dropping CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
    for capability in (1, 2):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)


# --- Verdicts ---

END = "\nThe end of its stderr:\n"
NO_NEWLINE = "\\ No newline at end of file"
PRINTED = {  # expected, printed, and the difference
    "01_same": (b"ok\r\n\xff\0\nok", b"ok\r\n\xff\0\nok", []),
    "02_long": (b"x" * 3_000_000, b"x" * 3_000_000, []),
    "03_digit": (b"1.0012e-05\n", b"1.0013e-05\n", ["-1.0012e-05", "+1.0013e-05"]),
    "04_no_last_newline": (b"ok\n", b"ok", ["-ok", "+ok", NO_NEWLINE]),
    "05_a_last_newline": (b"ok", b"ok\n", ["-ok", NO_NEWLINE, "+ok"]),
    "06_a_line_more": (b"ok\n", b"ok\n\n", [" ok", "+"]),
    "07_a_line_less": (b"ok\nmore\n", b"ok\n", [" ok", "-more"]),
    "08_nothing": (b"ok\n", b"", ["-ok"]),
    "09_return": (b"ok\n", b"ok\r\n", ["-ok", "+ok^M"]),
    "10_escape": (b"ok\n", b"\33[32mok\n", ["-ok", "+^[[32mok"]),
    "11_not_utf_8": (b"ok\n", b"\xff\0\n", ["-ok", "+\\xff^@"]),
    "12_lines": (b"x\n", b"x\n" * 99, [" x", *["+x"] * 36, "..."]),
    "13_long_line": (b"ok\n", b"x" * 999 + b"\n", ["-ok", "+" + "x" * 299]),
}


def difference(name, *lines):
    files = [f"--- expected_outputs/chapter01/{name}.txt", f"+++ chapter01/{name}.py"]
    return "\n".join(["stdout is not the expected output", *files, *lines])


def test_the_very_bytes_pass_and_any_other_fails(book):
    for name, (expected, printed, _) in PRINTED.items():
        book.make({name: f"import sys; sys.stdout.buffer.write({printed!r})"}, expected)
    wrong = {name: lines and difference(name, *lines) for name, (_, _, lines) in PRINTED.items()}
    assert_verdicts(book.run(), wrong)


def dies_of(name):
    return f"import os, signal; print('ok', flush=True); os.kill(os.getpid(), signal.{name})"


ENDS = {  # source, and what is wrong
    "01_stderr_and_child": (f"{CHILD}{OK}; sys.stderr.write('hm')", None),
    "02_stderr_only": ("import sys; sys.stderr.write('ok')", difference("02_stderr_only", "-ok")),
    "03_status": (f"{OK}; raise SystemExit(200)", "exit status 200"),
    "04_message": (f"{OK}; raise SystemExit('so')", f"exit status 1{END}so"),
    "05_stdin": (
        f"import sys; sys.tracebacklimit = 0\n{OK}\ninput()",
        f"exit status 1{END}EOFError: EOF when reading a line",
    ),
    "06_segv": (dies_of("SIGSEGV"), "was killed by SIGSEGV (exit status 139)"),
    "07_kill": (dies_of("SIGKILL"), "was killed by SIGKILL (exit status 137)"),
    "08_nameless": (dies_of("SIGRTMAX - 24"), "was killed by signal 40 (exit status 168)"),
    "09_child": (f"{CHILD}{OK}; raise SystemExit(3)", "exit status 3"),
    '10_a "$HOME" [x]*': (OK, None),
    "11_-\udcff\n": (OK, None),
}


def test_what_scripts_do(book):
    result = book.make({name: source for name, (source, _) in ENDS.items()}).run()
    assert_verdicts(result, {name: wrong for name, (_, wrong) in ENDS.items()})


def test_a_hanging_script_times_out(book):
    scripts = {
        "01_a": f"print('ok', flush=True)\n{HANG}",
        "02_b": f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{HANG}",
        "03_c": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "04_d": CHILD + HANG,
    }
    result = book.make(scripts).run("-j4", "--timeout", "1")
    assert_verdicts(result, dict.fromkeys(scripts, "timed out after 1 s"))


def test_endless_output_takes_neither_memory_nor_disk(book):
    source = "import os, sys\nfor _ in range(3000):\n    os.write({}, b'xxxx\\n' * 20_000)\n"
    book.make({"01_a": source.format(1), "02_b": source.format(2) + "sys.exit(1)"})
    limited = ["/bin/sh", "-c", 'ulimit -f 0; ulimit -d 250000; exec "$0"', "book/run_all.sh"]
    out = book.run(program=limited).out
    assert "(the first 100003 of 300000000 bytes)\n" in out and "\n+xxxx\n...\nFAIL" in out
    assert out.endswith("\nxxxx\n0 passed, 2 failed\n") and len(out) < 1000


def test_expected_files(book):
    """Missing, a folder, unreadable, empty, without a script: each is a failure."""
    silent = dict.fromkeys(["01_a", "02_b", "03_c", "04_d", "05_e"], "")
    expected = book.make(silent).root / "expected_outputs/chapter01"
    for name in ("01_a", "02_b"):
        (expected / f"{name}.txt").unlink()
    (expected / "02_b.txt").mkdir()
    (expected / "03_c.txt").chmod(0)
    write(expected / "04_d.txt", "")
    (book.root / "chapter01/05_e.py").unlink()
    file = "the expected file expected_outputs/chapter01/{}.txt"
    wrong = {
        "01_a": f"{file.format('01_a')} cannot be read: No such file or directory",
        "02_b": f"{file.format('02_b')} cannot be read: Is a directory",
        "03_c": f"{file.format('03_c')} cannot be read: Permission denied",
        "04_d": f"{file.format('04_d')} is empty",
        "05_e": "expected_outputs/chapter01/05_e.txt has no script: there is no chapter01/05_e.py",
    }
    assert_verdicts(book.run(before=without_privileges), wrong)


# --- Arguments ---

A1, B1, C1, A2, D2 = NAMES = [
    f"chapter0{n}" for n in ("1/01_a", "1/02_b", "1/03_c", "2/01_a", "2/03_d")
]


def test_arguments_choose_scripts(book):
    book.make(dict.fromkeys(NAMES, OK))
    (book.folder / "link").symlink_to(book.root)
    table = {"": NAMES, "03": [C1, D2], "3": [C1, D2], "01_": [A1, A2], "02_b.py": [B1]}
    table |= {"chapter02": [A2, D2], "chapter02/03": [D2], "./book/chapter02/": [A2, D2]}
    table |= {"link/chapter01/03_c.py": [C1], f"book/expected_outputs/{C1}.txt": [C1]}
    for arguments, chosen in {**table, "03_d -j 1 02 2": [B1, D2]}.items():
        result = book.run("--list", *arguments.split())
        assert (result.status, result.out) == (0, "".join(f"{name}.py\n" for name in chosen))
    result = book.run(*arguments.split())
    assert re.findall("PASS  (.*).py", result.out) == chosen and result.status == 0
    for argument in ["", "9", "a", "chapter", "chapter01/04", "*", "run_all.sh"]:
        result = book.run("01", argument, cwd=book.root / "chapter01")
        assert_fault(result, f"no script matches '{argument}': ./run_all.sh --list lists them")


def test_wrong_usage_and_help(book):
    assert_fault(book.make({}).run(), f"there is no script {book.root}/chapter*/NN_*.py")
    for arguments in [
        "--quick",
        "-j 0",
        "-j -1",
        "-jx",
        "--timeout 1.5",
        "--timeout 9999999",
        "-j",
    ]:
        result = book.make({"01_a": OK}).run(*arguments.split())
        assert (result.status, result.out) == (2, "")
        assert arguments.split()[0][:2] in result.err.splitlines()[-1]
        assert arguments.split()[-1].lstrip("-j") in result.err.splitlines()[-1]
    result = book.run("--help")
    assert result.out.startswith("usage: ./run_all.sh [-j N] [--timeout SECONDS] [--list]")
    assert (result.status, result.err) == (0, "")


# --- Places and environments ---


@pytest.mark.parametrize("name", ["a b", '-[c]*\'"$HOME"%s\\n\u00e9', "line\nbreaks\n"])
@pytest.mark.parametrize("shell", ["dash", "bash", None])
def test_called_from_anywhere_by_any_shell(book, name, shell):
    """In an odd folder, through a link, from another directory that looks like a checkout."""
    if shell and not shutil.which(shell):
        pytest.skip(f"there is no {shell}")
    book.root = book.folder / name
    (book.folder / "all").symlink_to(book.make({"01_a": OK}).root / "run_all.sh")
    (book.folder / "tests").symlink_to(book.root / "run_tests.sh")
    elsewhere = write(book.folder / "deep" / "chapter01" / "09_not_this.py", "").parents[1]
    by = functools.partial(book.run, cwd=elsewhere, env={"CDPATH": "..", "PYTHON": book.python})
    shell = [shutil.which(shell)] if shell else []
    assert_passes(by(program=[*shell, "../all"]), "01_a")
    stub = "import os, sys; print(ascii(os.getcwd()), sys.argv[1:]); sys.exit(5)"
    write(book.root / ".test-packages" / sys.implementation.cache_tag / "pytest.py", stub)
    write(book.root / "requirements-dev.txt", "")
    result = by("-k", "a b", program=[*shell, "../tests"])
    assert (result.status, result.out) == (5, f"{ascii(str(book.root))} ['-k', 'a b']\n")


def test_environments_change_nothing(book):
    names = [f"PYTHON{name}" for name in ("OPTIMIZE", "INSPECT", "SAFEPATH")]
    names += [f"{name}_VERBOSE" for name in ("MKL", "DNNL", "ONEDNN")]
    env = {"PYTHONWARNINGS": "error", "PYTHONHOME": "/nowhere", "PYTHONIOENCODING": "latin-1"}
    env |= {"LC_ALL": "C", "HOME": None, "TMPDIR": "/nowhere", **dict.fromkeys(names, 1)}
    verbose = "import os; print(*[name for name in os.environ if 'VERBOSE' in name], end='')\n"
    scripts = {
        "01_a": f"{verbose}import sys, warnings\nwarnings.warn('w')\nprint('\u00e9')\nsys.exit()",
        "02_b": "import sys\nsys.tracebacklimit = 0\nassert False, 'no'",
    }
    for path in [book.make(scripts, "\u00e9\n").root, *book.root.rglob("*")]:
        path.chmod(path.stat().st_mode & ~0o222)
    result = book.run(env=env, before=without_privileges)
    failure = f"exit status 1{END}AssertionError: no"
    assert_verdicts(result, {"01_a": None, "02_b": failure})


@EVERY_PROGRAM
def test_systems_that_it_is_not_for(book, program):
    path = f"{book.folder / 'other'}:{book.tools / 'bin'}"
    start = functools.partial(book.make({"01_a": OK}).run, program=program, env={"PATH": path})
    message = "there is no python3 of Python 3.10 or newer: install one"
    assert_fault(start(), message, program)
    write(book.folder / "other" / "python3", "#!/bin/sh\necho False\n")  # as an old one says
    assert_fault(start(), message, program)
    write(book.folder / "other" / "uname", "#!/bin/sh\necho Darwin\n")
    assert_fault(start(), "Triton is made for Linux only", program)


def test_line_ends_in_a_checkout_of_windows(book):
    if not shutil.which("git"):
        pytest.skip("there is no git")
    git = ["git", "-c", "core.autocrlf=true", "-c", "user.name=a", "-c", "user.email=a@b"]
    files = [".gitattributes", "run_all.sh", "beyond/figures/eps.png"]
    for file in files:
        write(book.root / file, (REPOSITORY / file).read_bytes())
    for command in ("init -q", "add .", "commit -qm a", "clone -q . copy"):
        subprocess.run([*git, *command.split()], cwd=book.root, check=True)
    for file in files:
        assert (book.root / "copy" / file).read_bytes() == (REPOSITORY / file).read_bytes()


# --- The interpreter ---


def python_with(book, *names):
    """An interpreter that finds these of the three packages only."""
    for name in names:
        write(book.folder / "some packages" / name / "__init__.py", "")
    run = f'PYTHONPATH="{book.folder / "some packages"}" exec "{book.python}" "$@"'
    return write(book.folder / "python", f"#!/bin/sh\n{run}\n")


@EVERY_PROGRAM
def test_python_that_lacks_packages(book, program):
    # What lies in the working directory does not count.
    write(book.folder / "triton" / "__init__.py", "raise SystemExit('the wrong triton')")
    book.make({"01_a": "import triton; " + OK})
    for has, lacks in {
        "": "torch, triton, numpy",
        "torch": "triton, numpy",
        "numpy": "triton",
    }.items():
        python = python_with(book, *has.split())
        result = book.run(program=program, env={"PYTHON": python})
        assert_fault(result, f"PYTHON={python} lacks {lacks}", program)
    result = book.run(env={"PYTHON": python_with(book, "triton")})
    assert ", torch of unknown version, triton of unknown version, " in result.out.splitlines()[0]
    assert result.out.endswith("1 passed, 0 failed\n") and result.status == 0


def test_which_python_runs_the_scripts(book):
    """PYTHON, else .venv/bin/python, else python3 on PATH: the first that has the packages."""
    book.make({"01_a": "import os; print(os.environ['WHICH'])"})

    def runs(**env):
        return re.search(r"\n-ok\n\+(\w+)\n", book.run(env={"WHICH": "path", **env}).out)[1]

    def python(folder, which):
        return write(folder / "python", f'#!/bin/sh\nWHICH={which} exec "{book.python}" "$@"\n')

    venv, other = python(book.root / ".venv" / "bin", "venv"), python(book.folder, "other")
    assert runs(PYTHON=other) == runs(PYTHON="./python") == "other"
    assert (runs(PYTHON="python3"), runs()) == ("path", "venv")
    write(venv, "#!/nowhere\n")
    assert runs() == "path"
    assert runs(PYTHON="./python", PATH=book.tools / "bin") == "other"  # there is no python3
    for path in ["/nowhere/python", "no-such-python", "/", "cat", "echo"]:
        env = {"PYTHON": path, "PATH": f"{book.python.parent}:{os.environ['PATH']}"}
        assert_fault(book.run(env=env), f"PYTHON={path} does not run as Python 3.10 or newer")


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
    "torch, device",
    {
        "a GPU": (TORCH.format(True), "Fake GPU 100\n"),
        "no GPU": (TORCH.format(False), NO_GPU),
        "raises": ("raise OSError('why')", "unknown device, exit status 1, OSError: why\n"),
        "hangs": (HANG, "unknown device, no answer in 2 s\n"),
    },
)
def test_header_where_there_is_a_driver(book, torch, device):
    env = with_driver(book, torch)
    result = book.make({"01_a": OK}).run("--timeout", "2", env=env)
    assert result.out.startswith(f"{HEADER}{device}PASS  chapter01/01_a.py  ")
    assert (result.status, result.err) == (0, "")
    assert_passes(book.run(env={**env, "TRITON_INTERPRET": "on"}), "01_a")


# --- In parallel ---


@pytest.mark.parametrize("option", ["-j 2", "-j2", ""])
def test_scripts_run_at_the_same_time_and_are_printed_in_order(book, option):
    if not option and len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is one processor")
    done = book.folder / "done"
    scripts = {"01_a": waits_for(done), "02_b": OK, "03_c": touches(done) + OK}
    assert_passes(book.make(scripts).run(*option.split()), *scripts)


def test_no_more_scripts_than_j_run_at_the_same_time(book):
    running = f"({str(book.folder / 'running')!r})\n"
    source = f"import os, time\nos.mkdir{running}time.sleep(0.2)\nos.rmdir{running}{OK}"
    scripts = dict.fromkeys(["01_a", "02_b", "03_c"], source)
    assert_passes(book.make(scripts).run("-j1"), *scripts)


# --- Interruptions ---


def start_hanging(book, **options):
    """Starts a run of two scripts that hang, each with a child, and waits until they do."""
    files = [book.folder / "started1", book.folder / "started2"]
    book.make({f"0{i}_a": CHILD + touches(file) + HANG for i, file in enumerate(files)})
    process = book.start("-j2", **options)
    wait_until(lambda: all(file.exists() for file in files), "the scripts start")
    return process


@pytest.mark.parametrize("insistent", [False, True], ids=["once", "again and again"])
@pytest.mark.parametrize("name", SIGNALS)
def test_interrupted(book, name, insistent):
    process = start_hanging(book)
    os.kill(process.pid, getattr(signal, name))
    while insistent and process.poll() is None:
        os.kill(process.pid, getattr(signal, name))
        time.sleep(0.0002)
    result = book.finish(process)
    assert (result.status, result.out, result.err) == (SIGNALS[name], HEADER + NO_GPU, "")


def test_nohup_is_respected(book):
    ignore = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    process = start_hanging(book, before=ignore)
    os.kill(process.pid, signal.SIGHUP)
    os.kill(process.pid, signal.SIGTERM)
    assert book.finish(process).status == SIGNALS["SIGTERM"]


@pytest.mark.parametrize("delay", [40 * step for step in range(1, 7)])
def test_interrupted_at_any_moment(book, delay):
    process = book.make({f"{i:02}_a": HANG for i in range(20)}).start("-j20")
    time.sleep(delay / 1000)
    os.killpg(process.pid, signal.SIGINT)
    # Before it minds signals, SIGINT ends it like any program.
    assert book.finish(process).status in (130, -signal.SIGINT)


def test_stdout_closed_early(book):
    go = book.folder / "go"
    book.make({"01_a": OK, "02_b": waits_for(go), "03_c": HANG})
    reader, writer = os.pipe()
    process = book.start("-j3", stdout=writer)
    os.close(writer)
    with open(reader) as lines:
        assert [lines.readline(), lines.readline()[:4]] == [HEADER + NO_GPU, "PASS"]
    go.touch()
    result = book.finish(process)
    assert (result.status, result.err) == (141, "")


@pytest.mark.parametrize("arguments", ["", "--list", "--help"])
def test_a_full_disk_and_a_closed_stdout_are_no_success(book, arguments):
    with open("/dev/full", "w") as full:
        result = book.make({"01_a": OK}).run(*arguments.split(), stdout=full)
    assert_fault(result, "[Errno 28] No space left on device")
    result = book.run(*arguments.split(), before=functools.partial(os.close, 1))
    assert_fault(result, "[Errno 9] Bad file descriptor")


@cases(
    "env, coloured",
    {
        "colour": ({"TERM": "xterm", "NO_COLOR": ""}, True),
        "NO_COLOR": ({"TERM": "xterm", "NO_COLOR": 1}, False),
        "dumb": ({"TERM": "dumb"}, False),
    },
)
def test_on_a_terminal(book, env, coloured):
    """There is colour there only, a script cannot reach it, and Ctrl-C ends the run."""
    main, device = os.openpty()
    book.make({"01_a": OK, "02_b": "open('/dev/tty')", "03_c": HANG})
    terminal = functools.partial(fcntl.ioctl, 1, termios.TIOCSCTTY, 0)
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), device)
    process = book.start("-j3", env=env, before=terminal, **streams)
    os.close(device)
    printed = b""
    while b"address: '/dev/tty'" not in printed:
        printed += os.read(main, 4096)
    os.write(main, b"\3")
    assert book.finish(process).status == 130
    os.close(main)
    assert (b"\033[32mPASS\033[0m  chapter01/01_a.py  " in printed) == coloured
    assert (b"\033[31mFAIL\033[0m  chapter01/02_b.py  " in printed) == coloured
    assert (b"\033" in printed) == coloured


# --- Set up ---

# The python of a venv here: it has the packages once pip install, which is $PIP, has made a file.
VENV_PYTHON = """#!/bin/sh
[ "$1" != -m ] || echo "$*" >>"$LOG"
packages=${0%/*}/packages
case "$*" in
"-m pip config"*) echo "$SETTINGS" ;;
"-m pip index"*) eval "$INDEX" ;;
"-m pip install"*) eval "$PIP" ;;
*) [ ! -e "$packages" ] || export PYTHONPATH="$STUBS"; exec "$PLAIN_PYTHON" "$@" ;;
esac
"""
VENV_MODULE = f"""
import os, sys
os.mkdir(sys.argv[1] + "/bin")
with open(sys.argv[1] + "/bin/python", "w") as file: file.write({VENV_PYTHON!r})
os.chmod(sys.argv[1] + "/bin/python", 0o755)
with open(os.environ["LOG"], "a") as log: print("-m venv", file=log)
"""
INSTALLS = "No torch, triton and numpy found: making .venv (once).\nInstalling requirements.txt "
INSTALLS += "into .venv: "
AS_SET = INSTALLS + "up to 2.8 GB to download, from where pip is set to look.\n"
ON_GPU = INSTALLS + "2.8 GB to download, torch for NVIDIA GPUs.\n"
ON_CPU = INSTALLS + "0.4 GB to download, torch's CPU build, as there is no GPU driver.\n"


@pytest.fixture
def setup(book):
    """Makes the environment of a machine without torch, from what venv and pip do there."""

    def environment(pip=': >"$packages"', settings="global.index-url='x'", index="", venv=""):
        module = write(book.folder / "setup" / "venv.py", venv or VENV_MODULE)
        env = {"PYTHONPATH": module.parent, "PATH": f"{book.python.parent}:{os.environ['PATH']}"}
        env |= {"PLAIN_PYTHON": book.python, "STUBS": book.tools / "stubs"}
        return env | {"LOG": log, "PIP": pip, "SETTINGS": settings, "INDEX": index}

    log = write(book.folder / "log", "")
    book.make({"01_a": OK})
    return environment


def installed(book):
    """What was done to set up, in order."""
    return re.findall("-m (venv|pip install)", (book.folder / "log").read_text())


def test_set_up_once(book, setup):
    assert_passes(book.run(env=setup()), "01_a", err=AS_SET)
    assert_passes(book.run(env=setup("exit 1")), "01_a")
    assert installed(book) == ["venv", "pip install"]
    assert sorted(os.listdir(book.root / ".venv")) == ["bin"]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_an_interrupted_set_up_is_made_anew(book, setup, name):
    half, killed = book.root / ".venv" / "half", name == "SIGKILL"
    process = book.start(env=setup(f': >"$packages"; : >{half}; exec sleep 600'), stderr=None)
    wait_until(half.exists, "pip starts")
    os.kill(process.pid, getattr(signal, name))
    assert process.wait(60) == SIGNALS.get(name, -signal.SIGKILL)
    assert half.exists() == killed
    result = book.finish(book.start(env=setup()), alone=not killed)
    assert_passes(result, "01_a", err=AS_SET)
    assert installed(book) == ["venv", "pip install"] * 2 and not half.exists()


@cases(
    "python, fault",
    {
        "without packages": (VENV_PYTHON, "lacks torch, triton, numpy"),
        "dangling": ("#!/nowhere\n", "does not run as Python 3.10 or newer"),
    },
)
def test_a_users_venv_is_never_deleted(book, setup, python, fault):
    venv = write(book.root / ".venv" / "bin" / "python", python)
    for _ in range(2):
        assert_fault(book.run(env=setup("exit 1")), f"{venv} {fault}. Either complete it, ")
        assert venv.exists()


def test_two_set_ups_at_once(book, setup):
    started, go, messages = (book.folder / name for name in ("started", "go", "messages"))
    pip = f': >{started}; until [ -e {go} ]; do sleep 0.1; done; : >"$packages"'
    first = book.start(env=setup(pip))
    wait_until(started.exists, "pip starts")
    with messages.open("a") as stderr:
        second, third = (book.start(env=setup("exit 1"), stderr=stderr) for _ in range(2))
    waiting = "Waiting for another run, which is installing.\n"
    wait_until(lambda: messages.read_text() == 2 * waiting, "the others wait")
    os.kill(third.pid, signal.SIGINT)
    assert book.finish(third, alone=False).status == 130
    go.touch()
    assert book.finish(second, alone=False).status == book.finish(first).status == 0
    assert installed(book) == ["venv", "pip install"] and messages.read_text() == 2 * waiting


def pip_says(text):
    return {"pip": f'while [ "$1" != --log ]; do shift; done; echo "{text}" >"$2"; exit 1'}


@cases(
    "environment, message",
    {
        "venv fails": ({"venv": "raise SystemExit('no luck')"}, "python3 -m venv failed:\nno luck"),
        "no network": (pip_says("connection broken by"), "requirements.txt: is there a network?"),
        "no room": (pip_says("No space left on device"), "requirements.txt: there is no room"),
        "no wheel": (pip_says("No matching distribution found"), "no wheel fits Python 3"),
        "another": ({"pip": "exit 1"}, "could not install requirements.txt: see above"),
        "nothing": ({"pip": ""}, ".venv lacks torch, triton, numpy, although requirements.txt"),
    },
)
def test_a_set_up_that_fails_says_why(book, setup, environment, message):
    result = book.run(env=setup(**environment))
    assert (result.status, result.out) == (2, "") and message in result.err
    assert not (book.root / ".venv").exists()


def test_a_machine_without_what_a_set_up_needs(book, setup):
    for old, new, message in [
        ('find_spec("ensurepip")', "None", "python3 has no venv module"),
        ('set to look", 2', 'set to look", 10**9', f"{book.root} has "),
        ("os.access(ROOT, os.W_OK)", "False", f"{book.root} is not writable"),
    ]:
        book.edit(old, new)
        assert_fault(book.run(env=setup("exit 1")), message)
        assert not (book.root / ".venv").exists() and "pip install" not in installed(book)
        book.edit(new, old)


def skip_with_driver():
    with contextlib.suppress(OSError):
        if os.path.exists("/dev/kfd") or ctypes.CDLL("libcuda.so.1"):
            pytest.skip("this machine has a GPU's driver")


@cases(
    "said, driver, index, settings",
    {
        "no driver": (ON_CPU, False, "echo 1.2+cpu", ""),
        "no such build": (ON_GPU, False, "echo 1.2", ""),
        "no answer": (ON_GPU, False, "exec sleep 600", ""),
        "a driver": (ON_GPU, True, "echo 1.2+cpu", ""),
        "an index set": (AS_SET, False, "echo 1.2+cpu", ":env:.extra-index-url='x'"),
        "a constraint set": (AS_SET, False, "echo 1.2+cpu", "global.constraint='x'"),
    },
)
def test_without_a_gpu_torch_is_the_cpu_build(book, setup, said, driver, index, settings):
    env = setup(index=index, settings=settings)
    if driver:
        env["LD_LIBRARY_PATH"] = with_driver(book, "")["LD_LIBRARY_PATH"]
    else:
        skip_with_driver()
    book.edit("], 15)", "], 1)")
    assert_passes(book.run(env=env), "01_a", err=said)
    chosen = "--extra-index-url https://download.pytorch.org/whl/cpu"
    assert (chosen in (book.folder / "log").read_text()) == (said == ON_CPU)


def wheel(folder, name, version):
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{name}-{version}.dist-info"
    files = {f"{name}/__init__.py": "", f"{name}/__main__.py": "print('tested')"}
    files[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files[f"{about}/WHEEL"] = "Wheel-Version: 1.0\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        for path, content in {**files, f"{about}/RECORD": ""}.items():
            file.writestr(path, content)


class Index(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


def test_set_up_with_venv_and_pip_themselves(book):
    """Where pip's settings forbid it; then without them, from an index of CPU builds; no PyPI."""
    pytest.importorskip("ensurepip")
    for name, version in {**VERSIONS, "pytest": "1"}.items():
        wheel(book.folder / "wheels", name, version)
    book.root = book.folder / "a b"
    requirements = book.make({"01_a": OK}).root / "requirements.txt"
    env = {"PYTHONPATH": None, "PYTHONHOME": "/nowhere", "PIP_CONFIG_FILE": os.devnull}
    constraint = write(book.folder / "constraint", "torch==1.1\n")
    hostile = {"PIP_FIND_LINKS": book.folder / "wheels", "PIP_NO_INDEX": 1, "PIP_USER": 1}
    hostile |= {"PIP_REQUIRE_VIRTUALENV": 1, "PIP_TARGET": book.folder / "target"}
    hostile |= {"PIP_CONSTRAINT": constraint}
    result = book.run(env=env | hostile)
    assert result.err.startswith(AS_SET) and result.out.endswith("1 passed, 0 failed\n")
    result = book.run(
        program="run_tests.sh", env=env | hostile | {"PYTHONPATH": book.tools / "stubs"}
    )
    assert (result.status, result.out.splitlines()[-1]) == (0, "tested")
    assert not (book.folder / "target").exists()

    skip_with_driver()
    shutil.rmtree(book.root / ".venv")
    wheel(book.folder / "index" / "torch", "torch", "1.2+cpu")
    write(requirements, f"--find-links {book.folder}/wheels\ntorch==1.2\ntriton\nnumpy\n")
    handler = functools.partial(Index, directory=book.folder / "index")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        book.edit("https://download.pytorch.org/whl/cpu", f"http://127.0.0.1:{server.server_port}")
        book.edit("--retries=2", "--retries=0")
        result = book.run(env=env | {"HTTPS_PROXY": "http://127.0.0.1:1"})
        server.shutdown()
    assert result.err.startswith(ON_CPU) and ", torch 1.2+cpu, triton 3.4, " in result.out
    assert result.status == 0


# --- run_tests.sh ---

# A python3 whose pip install does $PIP when it has installed all but the package itself.
TESTS_PYTHON = """#!/bin/sh
[ "$1 $2" = "-m pip" ] || exec "$PLAIN_PYTHON" "$@"
while [ "$1" != --target ]; do shift; done
mkdir -p "$2/pytest-1.dist-info"
printf 'Metadata-Version: 2.1\\nName: pytest\\nVersion: 1\\n' >"$2/pytest-1.dist-info/METADATA"
eval "$PIP"
echo "print('tested')" >"$2/pytest.py"
"""


def test_half_installed_test_packages_are_installed_anew(book):
    write(book.make({}).folder / "python", TESTS_PYTHON)
    started = book.folder / "started"
    env = {"PYTHON": "./python", "PLAIN_PYTHON": book.python, "PATH": os.environ["PATH"]}
    folder = f".test-packages/{sys.implementation.cache_tag}"
    said = f"Installing requirements-dev.txt into {folder} (once): 40 MB to download.\n"
    tests = functools.partial(book.start, program="run_tests.sh")
    result = book.finish(tests(env=env | {"PIP": "exit 1"}))
    assert_fault(result, "could not install requirements-dev.txt: see above", "run_tests.sh")
    process = tests(env=env | {"PIP": f": >{started}; exec sleep 600"})
    wait_until(started.exists, "pip starts")
    os.killpg(process.pid, signal.SIGINT)
    result = book.finish(process)
    assert (result.status, result.out, result.err) == (130, "", said)
    for pip, err in [("", said), ("exit 1", "")]:
        result = book.finish(tests(env=env | {"PIP": pip}))
        assert (result.status, result.out, result.err) == (0, "tested\n", err)


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
