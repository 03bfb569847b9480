"""Runs every chapter*/NN_*.py and compares its stdout, byte for byte, with the book's Expected
Output in expected_outputs/chapter*/NN_*.txt.

The interpreter is $PYTHON where set, else .venv/bin/python, else python3, whichever has torch,
triton and numpy; where none has, .venv is made and requirements.txt installed into it.
TRITON_INTERPRET=1 runs the scripts in Triton's interpreter, on the CPU, where there is a GPU too.

Exit status: 0 all passed, 1 some failed, 2 wrong usage or no set-up, 130 interrupted.
"""

# run_all.sh finds a Python for this file; the standard library is enough. From top to bottom:
# processes, set up, choose, run and judge, report. run_tests.py uses the first two.

import argparse
import ctypes
import difflib
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
UNFINISHED = VENV / "unfinished-set-up"  # marks a .venv that was begun here, until it is complete
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SIGNALS = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM]

# Without what would change a script's output or exit status.
ENVIRONMENT = {**os.environ, "PYTHONIOENCODING": "utf-8"}
for name in ["PYTHONHOME", "PYTHONINSPECT", "PYTHONOPTIMIZE", "PYTHONWARNINGS"]:
    ENVIRONMENT.pop(name, None)
for name in ["DNNL_VERBOSE", "MKL_VERBOSE", "ONEDNN_VERBOSE"]:
    ENVIRONMENT.pop(name, None)


class Fault(Exception):
    """What the user is told, with exit status 2."""


# --- Processes ---

started, starting, stopped = set(), threading.Lock(), threading.Event()


def start(command, **options):
    """Starts a process in a session of its own: away from the terminal, and ended as a whole."""
    with starting:
        if stopped.is_set():
            raise SystemExit
        options = {"stdin": subprocess.DEVNULL, "env": ENVIRONMENT, **options}
        process = subprocess.Popen(command, start_new_session=True, **options)
        started.add(process)
    return process


def end(process):
    """Ends a process and its children, those too that have outlived it."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    started.discard(process)


def stop():
    """Ends all processes, and lets no other start."""
    with starting:
        stopped.set()
    for process in list(started):
        end(process)


class Reader(threading.Thread):
    """Reads a pipe to its end, and keeps of it the size, the first bytes and the last ones."""

    def __init__(self, pipe, most):
        super().__init__(target=self.read, args=(pipe, most), daemon=True)
        self.size, self.first, self.last = 0, b"", b""
        self.start()

    def read(self, pipe, most):
        while chunk := os.read(pipe.fileno(), 65536):
            self.size += len(chunk)
            self.first += chunk[: most - len(self.first)]
            self.last = (self.last + chunk)[-10_000:]


def run(command, limit=None, most=100_000):
    """Runs a command. Returns its exit status, None if it took too long, its stdout and stderr."""
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    readers = Reader(process.stdout, most), Reader(process.stderr, most)
    try:
        status = process.wait(limit)
    except subprocess.TimeoutExpired:
        status = None
    end(process)
    for reader in readers:
        reader.join(10)  # not for ever: a child in another session may keep the pipe open
    return status, *readers


def guard(work):
    """Returns what work() does, or exits with what is wrong; no process is left in either case."""

    def interrupt(number, frame):
        for each in SIGNALS:  # another Ctrl-C does not cut the end short
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for each in SIGNALS:
        if signal.getsignal(each) != signal.SIG_IGN:  # as nohup has set SIGHUP
            signal.signal(each, interrupt)
    try:
        os.fstat(1)  # fails where stdout is closed
        sys.stdout.reconfigure(errors="surrogateescape")  # the name of a file may be any bytes
        try:
            # A signal interrupts this thread; the other one knows of each process that it starts.
            with ThreadPoolExecutor(1) as thread:
                try:
                    return thread.submit(work).result()
                finally:
                    stop()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        status = 128 + signal.SIGPIPE
    except (Fault, OSError) as error:
        print(f"{Path(sys.argv[0]).stem}.sh: {error}", file=sys.stderr)
        status = 2
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what could not be written is not tried again
    sys.exit(status)


# --- Set up ---

# What lies in the working directory does not count: a script does not see it either.
EXAMINE = """
import json, platform, sys
assert sys.version_info >= (3, 10)
from importlib.metadata import distributions
from importlib.util import find_spec
sys.path[:] = filter(None, sys.path)
names, versions = ["torch", "triton", "numpy"], [f"Python {platform.python_version()}"]
lacks = ", ".join(name for name in names if not getattr(find_spec(name), "origin", None))
for name in [] if lacks else names:
    found = [package.version for package in distributions(name=name)]
    versions.append(f"{name} {found[0] if found else 'of unknown version'}")
print()
print(json.dumps([lacks and f"lacks {lacks}", ", ".join(versions)]))
"""


def examine(python):
    """Returns why this Python cannot run the scripts, if so, and what versions it has."""
    with suppress(OSError, IndexError, ValueError):  # it need not be a Python
        status, out, _ = run([python, "-c", EXAMINE], 300)
        if status == 0:
            return json.loads(out.last.splitlines()[-1])
    return "does not run as Python 3.10 or newer", ""


def find_python():
    """Returns the interpreter for the scripts, and what versions it has."""
    given = os.environ.get("PYTHON")
    for python in [given] if given else [str(VENV / "bin/python"), "python3"]:
        path = os.path.abspath(shutil.which(python) or os.devnull)
        fault, versions = examine(path)
        if given and fault:
            raise Fault(f"PYTHON={python} {fault}")
        if not fault and not (path.startswith(f"{VENV}/") and UNFINISHED.exists()):
            return path, versions
    make_venv()
    return find_python()


def make_venv():
    """Makes .venv with requirements.txt installed. Removes one only where it is marked as ours."""
    if not find_spec("ensurepip"):
        raise Fault("python3 has no venv module (on Debian and Ubuntu: apt install python3-venv)")
    if not os.access(ROOT, os.W_OK):
        raise Fault(f"{ROOT} is not writable, so no .venv can be made there: set PYTHON")
    python = VENV / "bin/python"
    with lock(ROOT / "requirements.txt"):
        if UNFINISHED.exists():
            shutil.rmtree(VENV)
        elif os.path.lexists(VENV):
            if fault := examine(python)[0]:
                raise Fault(
                    f"{python} {fault}. Either complete it, .venv/bin/python -m pip install -r "
                    "requirements.txt, or move .venv away, for a new one to be made"
                )
            return  # another run has made it in the meantime
        print("No torch, triton and numpy found: making .venv (once).", file=sys.stderr)
        VENV.mkdir()
        try:
            UNFINISHED.touch()
            # Its real path: python3 may be that of an active venv, and even of this one.
            status, out, err = run([os.path.realpath(sys.executable), "-m", "venv", VENV])
            if status != 0:
                raise Fault("\n".join(["python3 -m venv failed:", *visible(out.last + err.last)]))
            choice, room, options = choose_torch(python)
            free = shutil.disk_usage(ROOT).free / 1e9
            if free < room:
                raise Fault(f"{ROOT} has {free:.1f} GB free, and .venv needs {room} GB: {choice}")
            print(f"Installing requirements.txt into .venv: {choice}.", file=sys.stderr)
            install(python, ROOT / "requirements.txt", VENV / "temporary", *options)
            if fault := examine(python)[0]:
                raise Fault(f".venv {fault}, although requirements.txt is installed")
            UNFINISHED.unlink()
        except BaseException:
            shutil.rmtree(VENV)
            raise


def choose_torch(python):
    """Returns which build of torch is installed, the GB of disk for it, and pip's options.

    Without a GPU's driver that is the CPU build of PyTorch's own index, if this can be reached and
    has one for this Python. A user who has set an index or a constraint for pip has chosen.
    """
    _, settings, _ = run([python, "-m", "pip", "config", "list"])
    if re.search(rb"\.(index-url|extra-index-url|no-index|find-links|constraint)=", settings.first):
        return "up to 2.8 GB to download, from where pip is set to look", 2, []
    if not has_gpu_driver():
        pins = re.findall("(?m)^torch==(.*)", (ROOT / "requirements.txt").read_text())
        ask = [python, "-m", "pip", "index", "versions", "torch", "--index-url", CPU_INDEX]
        _, answer, _ = run([*ask, "--timeout=5", "--retries=0"], 15)
        if any(f"{pin}+cpu".encode() in answer.first for pin in pins):
            choice = "0.4 GB to download, torch's CPU build, as there is no GPU driver"
            return choice, 2, ["--extra-index-url", CPU_INDEX]
    return "2.8 GB to download, torch for NVIDIA GPUs", 5, []


def has_gpu_driver():
    with suppress(OSError):
        return os.path.exists("/dev/kfd") or bool(ctypes.CDLL("libcuda.so.1"))  # AMD's, NVIDIA's
    return False


def install(python, requirements, temporary, *options):
    """Installs a file of requirements with pip, which leaves nothing outside a folder of ours."""
    temporary.mkdir(parents=True)
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    command += ["--retries=2", "--log", temporary / "log"]
    # The user's settings for pip hold, but for those with which it does not install here.
    command += ["--target=", *options, "-r", requirements]
    environment = {"PIP_CONSTRAINT": os.devnull, "PIP_REQUIRE_VIRTUALENV": "0", "PIP_USER": "0"}
    environment = {**ENVIRONMENT, **environment, "TMPDIR": str(temporary)}
    process = start(command, env=environment, stdout=sys.stderr)
    status = process.wait()
    end(process)
    if status != 0:
        log = temporary / "log"
        said = log.read_text(errors="replace") if log.exists() else ""
        cause = "see above"
        if "No space left" in said:
            cause = f"there is no room left in {ROOT}, or for what pip caches"
        elif re.search("connection broken|ConnectTimeout|NewConnectionError|ReadTimeout", said):
            cause = "is there a network?"
        elif "No matching distribution" in said:
            cause = f"no wheel fits Python {platform.python_version()} on {platform.machine()}; "
            cause += "there are some for Python 3.10 to 3.14: make .venv with one of these"
        raise Fault(f"could not install {requirements.name}: {cause}")
    shutil.rmtree(temporary)


def lock(path):
    """Returns a file that is locked until it is closed, once no other run has it locked."""
    file, told = open(path, "r+"), False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if not told:
                print("Waiting for another run, which is installing.", file=sys.stderr)
            told = True
        if stopped.wait(0.2):
            raise SystemExit


# --- Choose ---


def chooses(argument, name):
    """Whether an argument of the command line chooses a name."""
    chapter, script = os.path.split(f"{name}.py")
    files = [chapter, f"{name}.py", f"expected_outputs/{name}.txt"]
    if argument == chapter or argument and Path(argument).resolve() in [ROOT / f for f in files]:
        return True
    if re.fullmatch("[0-9]", argument):
        argument = f"0{argument}_"
    return bool(argument) and (f"{name}.py" if "/" in argument else script).startswith(argument)


def choose(arguments):
    """Returns what is to be checked, in order: chapter20/01_fused_linear_gelu and so on.

    From the scripts and from the expected files, so that neither goes unnoticed without the other.
    """
    expected = ROOT / "expected_outputs"
    files = [file.relative_to(ROOT) for file in ROOT.glob("chapter*/[0-9][0-9]_*.py")]
    files += [file.relative_to(expected) for file in expected.glob("chapter*/[0-9][0-9]_*.txt")]
    names = sorted({str(file.with_suffix("")) for file in files})
    if not names:
        raise Fault(f"there is no script {ROOT}/chapter*/NN_*.py")
    for argument in arguments:
        if not any(chooses(argument, name) for name in names):
            raise Fault(f"no script matches '{argument}': ./run_all.sh --list lists them")
    return [n for n in names if not arguments or any(chooses(a, n) for a in arguments)]


# --- Run and judge ---


def judge(name, python, limit):
    """Runs a script. Returns the seconds that it took, what is wrong, if anything, and details."""
    script, expected = f"{name}.py", f"expected_outputs/{name}.txt"
    if not (ROOT / script).exists():
        return 0, f"{expected} has no script: there is no {script}", []
    try:
        wanted = (ROOT / expected).read_bytes()
    except OSError as error:
        return 0, f"the expected file {expected} cannot be read: {error.strerror}", []
    if not wanted:
        return 0, f"the expected file {expected} is empty", []
    begin = time.monotonic()
    status, out, err = run([python, ROOT / script], limit, len(wanted) + 100_000)
    took = time.monotonic() - begin
    if status == 0:
        if out.size == len(wanted) and out.first == wanted:
            return took, "", []
        some = f" (the first {len(out.first)} of {out.size} bytes)"
        label = script + (some if len(out.first) < out.size else "")
        lines = [visible(wanted), visible(out.first)]
        lines = "\n".join(difflib.unified_diff(*lines, expected, label, lineterm="")).split("\n")
        return took, "stdout is not the expected output", excerpt(lines)
    problem = f"exit status {status}"
    if status is None:
        problem = f"timed out after {limit} s"
    elif status < 0:
        names = {number.value: number.name for number in signal.Signals}
        killer = names.get(-status, f"signal {-status}")
        problem = f"was killed by {killer} (exit status {128 - status})"
    details = ["The end of its stderr:", *visible(err.last.rstrip(b"\n") + b"\n")[-20:]]
    return took, problem, excerpt(details) if err.size else []


def visible(content):
    """The lines of some bytes, where all that is not ASCII can be seen, and does nothing."""
    controls = {code: f"^{chr(code ^ 64)}" for code in [*range(9), *range(11, 32), 127]}
    text = content.decode("ascii", "backslashreplace").translate(controls)
    *lines, last = text.split("\n")
    return [*lines, f"{last}\n\\ No newline at end of file"] if last else lines


def excerpt(lines):
    """As much as floods no terminal."""
    return [line[:300] for line in lines[:40]] + ["..."] * (len(lines) > 40)


def find_device(python, limit):
    """What the scripts run on. torch, slow to import, is asked only where there is a driver."""
    no_gpu = "no GPU in use: Triton interpreter on the CPU"
    interpret = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    if interpret or not has_gpu_driver():
        return no_gpu
    ask = "import sys; sys.path[:] = filter(None, sys.path); import torch; print()\n"
    ask += "print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    status, out, err = run([python, "-c", ask], limit)
    if status == 0:
        return visible(out.last)[-1] or no_gpu
    why = f"no answer in {limit} s" if status is None else f"exit status {status}"
    return ", ".join(["unknown device", why, *visible(err.last)[-1:]])


# --- Report ---


def say(text):
    if stopped.is_set():
        raise SystemExit  # what has just been ended has no result
    print(text, flush=True)


def number(text):
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise argparse.ArgumentTypeError(f"needs a whole number of 1 or more, got '{text}'")
    return int(text)


def read_arguments():
    parser = argparse.ArgumentParser(
        prog="./run_all.sh",
        usage="./run_all.sh [-j N] [--timeout SECONDS] [--list] [SCRIPT ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    processors = len(os.sched_getaffinity(0))
    script = "a chapter (chapter20), a number or the start of a name (03, chapter20/03), or a path"
    option = parser.add_argument
    option("scripts", nargs="*", metavar="SCRIPT", help=script)
    option("-j", type=number, metavar="N", default=processors, help="run N scripts at a time")
    option("--timeout", type=number, metavar="SECONDS", default=300, help="for a script (300)")
    option("--list", action="store_true", help="list the chosen scripts, do not run them")
    return parser.parse_intermixed_args()


def main():
    arguments = read_arguments()
    names = choose(arguments.scripts)
    if arguments.list:
        say("\n".join(f"{name}.py" for name in names))
        return 0
    python, versions = find_python()
    plain, green, red = "\033[0m", "\033[32m", "\033[31m"
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        plain = green = red = ""
    passed = 0
    with ThreadPoolExecutor(arguments.j) as pool:
        device = pool.submit(find_device, python, arguments.timeout)
        verdicts = [pool.submit(judge, name, python, arguments.timeout) for name in names]
        try:
            say(f"{versions}, {device.result()}")
            for name, verdict in zip(names, verdicts, strict=True):
                took, problem, details = verdict.result()
                word = f"{red}FAIL{plain}" if problem else f"{green}PASS{plain}"
                line = f"{word}  {name}.py  {took:.1f} s" + (problem and f": {problem}")
                say("\n".join([line, *details]))
                passed += not problem
        except BaseException:
            stop()  # do not wait for what nobody reads
            raise
    say(f"{passed} passed, {len(names) - passed} failed")
    return 0 if passed == len(names) else 1


if __name__ == "__main__":
    sys.exit(guard(main))
