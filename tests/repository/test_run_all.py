"""run_all.sh never lies: whatever a script, an environment or a user does, its exit status and its
message are true; it leaves no process behind, and deletes nothing that it did not make.

Each test runs a copy beside a tiny chapter. PATH holds a few commands and a python3 without
packages, PYTHONPATH stubs named torch, triton and numpy, and nothing else.
"""

import _ctypes
import contextlib
import fcntl
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
VERSIONS = {"torch": "1.2", "triton": "3.4", "numpy": "5.6"}
HEADER = "Python {}.{}.{}, torch 1.2, triton 3.4, numpy 5.6, ".format(*sys.version_info)
NO_GPU = "no GPU in use: Triton interpreter on the CPU\n"
SIGNALS = {"SIGHUP": 129, "SIGINT": 130, "SIGQUIT": 131, "SIGTERM": 143}
PACKAGES = f".test-packages/{sys.implementation.cache_tag}"
DEV = "# a comment\npytest==1\n"
OK = "print('ok')"
HANG = "import time; time.sleep(600)"
CHILD = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {HANG!r}])\n"
TOUCH = "open({!r}, 'w').close()\n"
WAIT = "import os, time\nwhile not os.path.exists({!r}): time.sleep(0.01)\n" + OK


class Book:
    """A checkout with a copy of the runner."""

    def __init__(self, folder):
        self.folder, self.root = folder, folder / "book"
        plain = f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n'
        self.python = write(folder / "python/python3", plain)
        self.bin = write(folder / "bin" / "README", "").parent
        for command in ("cat", "mkdir", "readlink", "sleep", "uname"):
            (self.bin / command).symlink_to(shutil.which(command))
        for name, version in VERSIONS.items():
            write(folder / "stubs" / name / "__init__.py", "")
            about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            write(folder / "stubs" / f"{name}-{version}.dist-info" / "METADATA", about)

    def make(self, scripts, expected="ok\n"):
        """Writes the checkout. scripts: {"01_a" or "chapter02/01_a": source}."""
        for file in ("run_all.sh", "run_all.py", "run_tests.sh", "run_tests.py"):
            write(self.root / file, (REPOSITORY / file).read_bytes())
        write(self.root / "requirements.txt", "torch==1.2\ntriton\nnumpy\n")
        write(self.root / "requirements-dev.txt", DEV)
        for name, source in scripts.items():
            name = name if "/" in name else f"chapter01/{name}"
            write(self.root / f"{name}.py", source)
            write(self.root / f"expected_outputs/{name}.txt", expected)
        return self

    def edit(self, old, new):
        """Changes run_all.py, where a test cannot change the machine."""
        runner = self.root / "run_all.py"
        write(runner, runner.read_text().replace(old, new))

    def start(self, *arguments, program="run_all.sh", env=None, before=int, **options):
        """Starts a program of the checkout in a new session; before() runs in it first."""

        def begin():
            for name in SIGNALS:  # a shell ignores some of them for what it runs with &
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            before()

        path, stubs = f"{self.python.parent}:{self.bin}", self.folder / "stubs"
        defaults = {"PATH": path, "PYTHONPATH": stubs, "TRITON_INTERPRET": 1, "MARK": self.folder}
        env = {k: str(v) for k, v in {**defaults, **(env or {})}.items() if v is not None}
        streams = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
        options = {"cwd": self.folder, "start_new_session": True, **streams, **options}
        program = program if isinstance(program, list) else [self.root / program]
        return subprocess.Popen([*program, *arguments], env=env, preexec_fn=begin, **options)

    def finish(self, process, alone=True):
        """Waits for a run, and asserts that nothing is left of it, where it runs alone."""
        out, err = process.communicate(b"not for the scripts\n", timeout=120)
        if alone:
            wait_until(lambda: not self.processes())
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


@pytest.fixture
def book(tmp_path):
    book = Book(tmp_path)
    yield book
    for process in book.processes():
        os.kill(process, signal.SIGKILL)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.chmod(0o755)
    return path


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def assert_verdicts(result, verdicts, err=""):
    """What was printed, but for times and line numbers. verdicts: {"01_a": what is wrong}."""
    lines = [f"FAIL  {n}: {wrong}" if wrong else f"PASS  {n}" for n, wrong in verdicts.items()]
    failed = sum(map(bool, verdicts.values()))
    count = f"{len(lines) - failed} passed, {failed} failed\n"
    out = re.sub(r"(?m)^(PASS|FAIL)  chapter01/([^.]*)\.py  \d+\.\d s", r"\1  \2", result.out)
    assert re.sub(r"(?m)^@@ .* @@\n", "", out) == HEADER + NO_GPU + "\n".join([*lines, count])
    assert (result.status, result.err) == (int(failed > 0), err)


assert_passes = functools.partial(assert_verdicts, verdicts={"01_a": None})


def assert_fault(result, message, program="run_all.sh"):
    """Nothing ran, and stderr says why."""
    assert (result.status, result.out) == (2, "")
    assert f"\n{program}: {message}" in f"\n{result.err}"


PRINTED = {  # expected, printed, and the difference
    "31_same": (b"ok\r\n\xff\0\nok", b"ok\r\n\xff\0\nok", []),
    "32_long": (b"x" * 3_000_000, b"x" * 3_000_000, []),
    "33_digit": (b"1.0012e-05\n", b"1.0013e-05\n", ["-1.0012e-05", "+1.0013e-05"]),
    "34_no_last_newline": (b"ok\n", b"ok", [" ok", "+\\ No newline at end of file"]),
    "36_nothing": (b"ok\n", b"", ["-ok"]),
    "37_controls": (b"ok\n", b"\33[32mok\r\n\xff\n", ["-ok", r"+\x1b[32mok\r", r"+\xff"]),
    "38_lines": (b"x\n", b"x\n" * 99, [" x", *["+x"] * 36, "..."]),
    "39_long_line": (b"ok\n", b"x" * 999 + b"\n", ["-ok", "+" + "x" * 299]),
}

END = "\nThe end of its stderr:\n"
DIES = "import os, signal; print('ok', flush=True); os.kill(os.getpid(), signal.{})"
FAILS = f"import sys; sys.tracebacklimit = 0\n{OK}\n"
CALM = f"""import os, sys, warnings
warnings.warn("no error, whatever PYTHONWARNINGS says")
assert sys.stdout.encoding == "utf-8" and not [name for name in os.environ if "VERBOSE" in name]
{OK}; sys.exit()"""
ENDS = {  # source, and what is wrong
    "01_stderr_and_child": (f"{CHILD}{OK}; sys.stderr.write('hm')", None),
    "03_status": (f"{CHILD}{OK}; raise SystemExit(200)", "exit status 200"),
    "04_stdin": (FAILS + "input()", f"exit status 1{END}EOFError: EOF when reading a line"),
    "05_segv": (DIES.format("SIGSEGV"), "was killed: Segmentation fault (exit status 139)"),
    '07_a "$HOME" [x]*-\n': (OK, None),
    "20_calm": (CALM, None),
    "21_assert": (FAILS + "assert False, 'no'", f"exit status 1{END}AssertionError: no"),
    "22_hang": (CHILD + HANG, "timed out after 4 s"),
    "24_stops": (DIES.format("SIGSTOP"), "timed out after 4 s"),  # SIGTERM would not end it
    "25_endless": (r"while True: print('x\n' * 9999)", "printed more than 100 MB"),
}


def test_what_scripts_do_in_any_environment(book):
    names = ["PYTHONOPTIMIZE", "PYTHONINSPECT", "MKL_VERBOSE", "DNNL_VERBOSE", "ONEDNN_VERBOSE"]
    env = {"PYTHONWARNINGS": "error", "PYTHONHOME": "/nowhere", "PYTHONIOENCODING": "latin-1"}
    env |= {"LC_ALL": "C", "TMPDIR": "/nowhere", **dict.fromkeys(names, 1)}
    book.make({name: source for name, (source, _) in ENDS.items()})
    wrong = {name: wrong for name, (_, wrong) in ENDS.items()}
    for name, (expected, printed, lines) in PRINTED.items():
        book.make({name: f"import sys; sys.stdout.buffer.write({printed!r})"}, expected)
        files = [f"--- expected_outputs/chapter01/{name}.txt", f"+++ chapter01/{name}.py"]
        said = ["stdout is not the expected output", *files, *lines]
        wrong[name] = "\n".join(said) if lines else None
    for name in ("97_missing", "98_empty"):
        book.make({name: ""}, "")
        wrong[name] = f"expected_outputs/chapter01/{name}.txt is missing, empty or not readable"
    (book.root / "expected_outputs/chapter01/97_missing.txt").unlink()
    (book.make({"99_orphan": OK}).root / "chapter01/99_orphan.py").unlink()
    wrong["99_orphan"] = f"exit status 2{END}no file"
    result = book.run("-j8", "--timeout", "4", env=env)
    result.out = re.sub(r"\S+: can't open file .*", "no file", result.out)
    result.out = re.sub(r"stderr:\n.*UserWarning.*\n.*\n", "stderr:\n", result.out)
    assert_verdicts(result, wrong)


def test_arguments_choose_scripts(book):
    names = [f"chapter0{n}" for n in "1/01_a 1/02_b 1/03_c 2/01_a 2/03_d".split()]
    a1, b1, c1, a2, d2 = names
    book.make(dict.fromkeys(names, OK))
    (book.folder / "link").symlink_to(book.root)
    table = {"": names, "03": [c1, d2], "3": [c1, d2], "01_": [a1, a2], "02_b.py": [b1]}
    table |= {"chapter02": [a2, d2], "chapter02/": [a2, d2], "./book/chapter02/": [a2, d2]}
    table |= {"link/chapter01/03_c.py": [c1], "chapter02/03 -j 1 02 2": [b1, d2]}
    for arguments, chosen in table.items():
        result = book.run("--list", *arguments.split())
        assert (result.status, result.out) == (0, "".join(f"{name}.py\n" for name in chosen))
    assert re.findall("PASS  (.*).py", book.run(*arguments.split()).out) == chosen
    for argument in ["", "9", "a", "chapter0", "chapter01/04", "*", "run_all.sh"]:
        result = book.run("01", argument, cwd=book.root / "chapter01")
        assert_fault(result, f"no script matches '{argument}': ./run_all.sh --list lists them\n")
    for arguments in ["--quick", "-j 0", "-j x", "--timeout 1.5"]:
        result = book.run(*arguments.split())
        assert (result.status, result.out) == (2, "") and "./run_all.sh: error: " in result.err
    result = book.run("--help")
    assert result.out.startswith("usage: ./run_all.sh [-h] [-j N] [--timeout SECONDS] [--list]")
    shutil.rmtree(book.root)
    assert_fault(book.make({}).run(), f"no script matches '{book.root}'")


@pytest.mark.parametrize("shell", [shutil.which("dash"), shutil.which("bash"), None])
def test_called_from_anywhere_by_any_shell(book, shell):
    """In an odd folder, through a link, from another directory that looks like a checkout."""
    shell, book.root = [shell] if shell else [], book.folder / '-[c]*\'"$HOME"%s\\n\u00e9\nb\n'
    (book.folder / "all").symlink_to(book.make({"01_a": OK}).root / "run_all.sh")
    (book.folder / "tests").symlink_to(book.root / "run_tests.sh")
    elsewhere = write(book.folder / "deep/chapter01/09_not_this.py", "").parents[1]
    by = functools.partial(book.run, cwd=elsewhere, env={"PYTHON": "../python/python3"})
    assert_passes(by(program=[*shell, "../all"]))
    stub = "import os, sys; print(ascii(os.getcwd()), sys.argv[1:]); sys.exit(5)"
    write(book.root / PACKAGES / "pytest.py", stub)
    write(book.root / PACKAGES / "requirements-dev.txt", DEV)
    result = by("-k", "a b", program=[*shell, "../tests"])
    assert (result.status, result.out) == (5, f"{ascii(str(book.root))} ['-k', 'a b']\n")


def test_systems_that_it_is_not_for(book):
    env = {"PATH": f"{book.folder / 'other'}:{book.bin}"}
    write(book.folder / "other/python3", "#!/bin/sh\necho False\n")  # as an old one says
    assert_fault(book.make({}).run(env=env), "there is no python3 of Python 3.10 or newer: install")
    write(book.folder / "other/uname", "#!/bin/sh\necho Darwin\n")
    result = book.run(program="run_tests.sh", env=env)
    assert_fault(result, "Triton is made for Linux only", "run_tests.sh")


def test_which_python_runs_the_scripts(book):
    """PYTHON, else .venv/bin/python, else python3 on PATH: the first that has the packages."""
    book.make({"01_a": "import os; print(os.environ['WHICH'])"})

    def runs(**env):
        return re.search(r"\n-ok\n\+(\w+)\n", book.run(env={"WHICH": "path", **env}).out)[1]

    source = '#!/bin/sh\nWHICH={} exec "{}" "$@"\n'
    venv = write(book.root / ".venv/bin/python", source.format("venv", book.python))
    write(book.folder / "other", source.format("other", book.python))
    assert runs(PYTHON=book.folder / "other") == runs(PYTHON="./other") == "other"
    assert (runs(PYTHON="python3"), runs()) == ("path", "venv")
    write(venv, "#!/nowhere\n")
    assert runs() == "path"
    assert runs(PYTHON="./other", PATH=book.bin) == "other"  # there is no python3
    write(book.folder / "torch/__init__.py", "")  # in the working directory: does not count
    write(book.folder / "some/triton/__init__.py", "")
    old = "does not run as Python 3.10 or newer\n"
    for path, fault in {"/nowhere/a": old, "cat": old, "python3": "lacks torch, numpy\n"}.items():
        env = {"PYTHON": path, "PYTHONPATH": book.folder / "some"}
        assert_fault(book.run(env=env), f"PYTHON={path} {fault}")


GPU = "class cuda:\n    is_available = staticmethod(lambda: {})\n"
GPU += "    get_device_name = staticmethod(lambda: 'Fake GPU 100')\nprint('hello')"


def test_header_where_there_is_a_driver(book):
    book.make({"01_a": OK}).edit("libcuda.so.1", _ctypes.__file__)  # any library that loads
    env = {"PYTHONPATH": f"{book.folder / 'gpu'}:{book.folder / 'stubs'}"}
    for torch, interpret, header, seconds in [
        (GPU.format(True), None, f"{HEADER}Fake GPU 100\n", 300),
        (GPU.format(True), "on", HEADER + NO_GPU, 300),
        (GPU.format(False), None, HEADER + NO_GPU, 300),
        (HANG, None, "unknown versions: timed out after 3 s\n", 3),
    ]:
        write(book.folder / "gpu/torch/__init__.py", torch)
        result = book.run(f"--timeout={seconds}", env=env | {"TRITON_INTERPRET": interpret})
        assert result.out.startswith(header) and (result.status, result.err) == (0, "")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="there is one processor")
@pytest.mark.parametrize("options", ["-j2", "", "-j1 --timeout 3"])
def test_scripts_run_at_the_same_time_and_are_printed_in_order(book, options):
    done = str(book.folder / "done")
    scripts = {"01_a": WAIT.format(done), "02_b": OK, "03_c": TOUCH.format(done) + OK}
    verdicts = dict.fromkeys(scripts) | {
        "01_a": "timed out after 3 s" if "-j1" in options else None
    }
    assert_verdicts(book.make(scripts).run(*options.split()), verdicts)


@pytest.mark.parametrize("name", SIGNALS)
def test_interrupted_again_and_again(book, name):
    files = [book.folder / "started1", book.folder / "started2"]
    scripts = {f"0{i}_a": CHILD + TOUCH.format(str(f)) + HANG for i, f in enumerate(files)}
    scripts |= {f"1{i}_not_begun": HANG for i in range(9)}
    process = book.make(scripts).start("-j2")
    wait_until(lambda: all(file.exists() for file in files))
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        os.kill(process.pid, getattr(signal, name))
        time.sleep(0.0002)
    result = book.finish(process)
    assert (result.status, result.err) == (SIGNALS[name], "")
    assert result.out in ("", HEADER + NO_GPU)


@pytest.mark.parametrize("arguments", [[], ["--list"]])
def test_a_full_disk_and_a_closed_stdout_are_no_success(book, arguments):
    with open("/dev/full", "w") as full:
        result = book.make({"01_a": HANG}).run(*arguments, stdout=full)
        assert book.run("--help", stdout=full).status != 0
    assert_fault(result, "[Errno 28] No space left on device\n")
    result = book.run("--timeout=9", *arguments, before=functools.partial(os.close, 1))
    assert_fault(result, "stdout is closed\n")


@pytest.mark.parametrize("no_color", ["", "1"])
def test_on_a_terminal(book, no_color):
    """There is colour there only, a script cannot reach it, and Ctrl-C ends the run."""
    main, device = os.openpty()
    book.make({"01_a": OK, "02_b": "open('/dev/tty')", "03_c": HANG})
    terminal = functools.partial(fcntl.ioctl, 1, termios.TIOCSCTTY, 0)
    options = {"env": {"NO_COLOR": no_color}, "before": terminal}
    options |= dict.fromkeys(("stdin", "stdout", "stderr"), device)
    process = book.start("-j3", "--timeout=60", **options)
    os.close(device)
    printed = b""
    while b"address: '/dev/tty'" not in printed:
        printed += os.read(main, 4096)
    os.write(main, b"\3")
    assert book.finish(process).status == 130
    os.close(main)
    words = ["PASS", "FAIL"] if no_color else ["\33[32mPASS\33[0m", "\33[31mFAIL\33[0m"]
    assert re.findall(r"\n(.*)  chapter01/0[12]_[ab].py  ", printed.decode()) == words


# The python of a venv here: it has the packages once pip install, which is $PIP, has made a file.
VENV_PYTHON = """#!/bin/sh
[ "$1" != -m ] || echo "$*" >>"$LOG"
packages=${0%/*}/packages
case "$*" in
"-m pip config"*) echo "$SETTINGS" ;;
"-m pip index"*) eval "$INDEX" ;;
"-m pip install"*) eval "$PIP" ;;
"-ES"*) exec "$PLAIN_PYTHON" "$@" ;;
*) [ ! -e "$packages" ] || export PYTHONPATH="$STUBS:$PYTHONPATH"; exec "$PLAIN_PYTHON" "$@" ;;
esac
"""
VENV_MODULE = """import os, shutil, sys
os.mkdir(sys.argv[1] + "/bin")
shutil.copy(os.environ["VENV_PYTHON"], sys.argv[1] + "/bin/python")
with open(os.environ["LOG"], "a") as log: print("-m venv", file=log)
"""
MAKES = "No torch, triton and numpy found: making .venv, or another run is.\n"
INSTALLS = f"{MAKES}Installing requirements.txt into .venv: "
AS_SET = INSTALLS + "up to 2.8 GB to download, from where pip is set to look.\n"
ON_GPU = INSTALLS + "2.8 GB to download, torch for NVIDIA GPUs.\n"
ON_CPU = INSTALLS + "0.4 GB to download, torch's CPU build, as there is no GPU driver.\n"


@pytest.fixture
def setup(book):
    """Makes the environment of a machine without torch, from what venv and pip do there."""

    def environment(pip=': >"$packages"', settings="global.index-url='x'", index="", venv=""):
        module = write(book.folder / "setup/venv.py", venv or VENV_MODULE)
        env = {"PYTHONPATH": module.parent, "PLAIN_PYTHON": book.python, "VENV_PYTHON": python}
        env |= {"STUBS": book.folder / "stubs", "LOG": log}
        return env | {"PIP": pip, "SETTINGS": settings, "INDEX": index}

    python = write(book.folder / "setup/python", VENV_PYTHON)
    log = write(book.folder / "log", "")
    book.make({"01_a": OK})
    return environment


def installed(book):
    """What was done to set up, in order."""
    return re.findall("-m (venv|pip install)", (book.folder / "log").read_text())


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_an_interrupted_set_up_is_made_anew(book, setup, name):
    half, killed = book.root / ".venv/half", name == "SIGKILL"
    in_pip, in_venv = f': >"$packages"; : >{half}; exec sleep 600', TOUCH.format(str(half)) + HANG
    process = book.start(env=setup(in_pip, venv=in_venv if killed else ""), stderr=None)
    wait_until(half.exists)
    os.kill(process.pid, getattr(signal, name))
    assert process.wait(60) == SIGNALS.get(name, -signal.SIGKILL)
    assert_passes(book.finish(book.start(env=setup()), alone=not killed), err=AS_SET)
    assert not half.exists() and sorted(os.listdir(book.root / ".venv")) == ["bin"]
    assert_passes(book.finish(book.start(env=setup("exit 1")), alone=not killed))
    assert installed(book)[-2:] == ["venv", "pip install"]


@pytest.mark.parametrize(
    "python, fault",
    [(VENV_PYTHON, "lacks torch, triton, numpy"), ("#!/nowhere\n", "does not run as Python 3.10")],
)
def test_a_users_venv_is_never_deleted(book, setup, python, fault):
    venv = write(book.root / ".venv/bin/python", python)
    for _ in range(2):
        assert_fault(book.run(env=setup("exit 1")), f"{venv} {fault}")
        assert venv.read_text() == python


def test_two_set_ups_at_once(book, setup):
    started, go, messages = (book.folder / name for name in ("started", "go", "messages"))
    pip = f': >{started}; until [ -e {go} ]; do sleep 0.1; done; : >"$packages"'
    first = book.start(env=setup(pip))
    wait_until(started.exists)
    with messages.open("a") as stderr:
        second, third = (book.start(env=setup("exit 1"), stderr=stderr) for _ in range(2))
    wait_until(lambda: messages.read_text() == 2 * MAKES)
    os.kill(third.pid, signal.SIGINT)
    assert book.finish(third, alone=False).status == 130
    go.touch()
    assert book.finish(second, alone=False).status == book.finish(first).status == 0
    assert installed(book) == ["venv", "pip install"] and messages.read_text() == 2 * MAKES


def test_a_set_up_that_fails_says_why(book, setup):
    def assert_fails(message, pip="exit 1", **environment):
        assert_fault(book.run(env=setup(pip, **environment)), message)
        assert not (book.root / ".venv").exists()

    failed = "could not install requirements.txt: "
    assert_fails(f"{failed}exit status 1, see above\n")
    for said, cause in {
        "connection broken by": "is there a network?\n",
        "No space left on device": "there is no room left",
        "No matching distribution": "wheels fit Python 3.10",
    }.items():
        assert_fails(failed + cause, f"echo {said} >&2; exit 1")
    assert_fails("python3 -m venv failed, see above: exit status 3\n", venv="raise SystemExit(3)")
    book.edit('set to look", 2', 'set to look", 10**9')
    assert_fails("no room for .venv, which needs 1000000000 GB: up to 2.8 GB to download, ")


@pytest.mark.parametrize(
    "said, driver, index, settings",
    [
        (ON_CPU, False, "echo 1.2+cpu", ""),
        (ON_GPU, False, "echo 1.2", ""),
        (ON_GPU, False, "exec sleep 600", ""),
        (ON_GPU, True, "echo 1.2+cpu", ""),
        (AS_SET, False, "echo 1.2+cpu", ":env:.extra-index-url='x'"),
    ],
    ids=["no driver", "no build", "no answer", "a driver", "an index set"],
)
def test_without_a_gpu_torch_is_the_cpu_build(book, setup, said, driver, index, settings):
    env = setup(index=index, settings=settings)
    book.edit("/dev/kfd", "/nowhere")
    book.edit("libcuda.so.1", _ctypes.__file__ if driver else "libnowhere.so")
    book.edit("], 15)", "], 1)")
    assert_passes(book.run(env=env), err=said)
    chosen = "--extra-index-url https://download.pytorch.org/whl/cpu"
    assert (chosen in (book.folder / "log").read_text()) == (said == ON_CPU)


def test_set_up_with_venv_and_pip_themselves_where_their_settings_forbid_it(book):
    pytest.importorskip("ensurepip")
    for name, version in {**VERSIONS, "pytest": "1"}.items():
        about = f"{name}-{version}.dist-info"
        files = {f"{name}/__init__.py": "", f"{name}/__main__.py": "print('tested')"}
        files[f"{about}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        files |= {f"{about}/WHEEL": "Wheel-Version: 1.0\n", f"{about}/RECORD": ""}
        with zipfile.ZipFile(book.folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
            for file, content in files.items():
                wheel.writestr(file, content)
    book.root = book.folder / "a b"
    env = {"PYTHONPATH": None, "PYTHONHOME": "/nowhere", "PIP_CONFIG_FILE": os.devnull}
    env |= {"PIP_FIND_LINKS": book.folder, "PIP_NO_INDEX": 1, "PIP_USER": 1}
    env |= {"PIP_REQUIRE_VIRTUALENV": 1, "PIP_TARGET": book.folder / "target"}
    env["PIP_CONSTRAINT"] = write(book.folder / "constraint", "torch==1.1\n")
    result = book.make({"01_a": OK}).run(env=env)
    assert result.err.startswith(AS_SET) and result.out.endswith("1 passed, 0 failed\n")
    # Outside of a virtual environment too.
    env |= {"PYTHON": os.path.realpath(sys.executable), "PYTHONPATH": book.folder / "stubs"}
    half = write(book.root / PACKAGES / "half", "")  # of an interrupted set-up
    for _ in range(2):
        result = book.run(program="run_tests.sh", env=env)
        assert (result.status, result.out.splitlines()[-1]) == (0, "tested") and not half.exists()
        env["PIP_FIND_LINKS"] = "/nowhere"  # nothing is installed twice
    assert not (book.folder / "target").exists()
