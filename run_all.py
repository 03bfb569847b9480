"""Runs every chapter*/NN_*.py and compares its stdout, byte for byte, with the book's Expected
Output in expected_outputs/chapter*/NN_*.txt.

The interpreter is $PYTHON where set, else .venv/bin/python, else python3, whichever has torch,
triton and numpy; where none has, .venv is made and requirements.txt installed into it.
TRITON_INTERPRET=1 runs the scripts in Triton's interpreter, on the CPU, where there is a GPU too.

Exit status: 0 all passed, 1 some failed, 2 wrong usage or no set-up, 130 interrupted.
"""

# run_all.sh finds a Python for this file; the standard library is enough.

import argparse
import ctypes
import difflib
import fcntl
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, Popen
from tempfile import TemporaryFile
from threading import RLock, Thread

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
UNFINISHED = VENV / "unfinished-set-up"  # marks a .venv that was begun here, until it is complete
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

SIGNALS = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM]

# Without what would change a script's output or exit status.
UNWANTED = "PYTHON(HOME|INSPECT|OPTIMIZE|WARNINGS)|(DNNL|MKL|ONEDNN)_VERBOSE"
ENVIRONMENT = {k: v for k, v in os.environ.items() if not re.fullmatch(UNWANTED, k)}
ENVIRONMENT["PYTHONIOENCODING"] = "utf-8"

# Who starts a process, or goes on after its end, needs the lock; leave() never gives it back.
running, running_lock = set(), RLock()


def leave(status):
    """Ends all processes, then this one. Another Ctrl-C does not cut that short."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    running_lock.acquire()
    for process in running:
        os.killpg(process.pid, signal.SIGKILL)
    os._exit(status)


def run(command, limit=86_400, **options):
    """Runs a command. Returns what went wrong, if anything, its stdout and its stderr."""
    problem, begin = "", time.monotonic()
    with TemporaryFile() as out, TemporaryFile() as err:
        options = {"stdout": out, "stderr": err, "env": ENVIRONMENT, **options}
        with running_lock:
            # In a session of its own: away from the terminal, and ended with all its children.
            process = Popen(command, stdin=DEVNULL, start_new_session=True, **options)
            running.add(process)
        # WNOWAIT: until its exit status is taken, no other process gets its number.
        waiting = Thread(target=os.waitid, args=(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT))
        waiting.start()
        while waiting.is_alive() and not problem:
            waiting.join(0.1)
            if time.monotonic() - begin >= limit:
                problem = f"timed out after {limit} s"
            if max(os.fstat(file.fileno()).st_size for file in (out, err)) > 100_000_000:
                problem = "printed more than 100 MB"
        os.killpg(process.pid, signal.SIGKILL)  # its children too, which may have outlived it
        waiting.join()
        with running_lock:
            running.remove(process)
        status = process.wait()
        if status and not problem:
            problem = f"exit status {status}"
            if status < 0:
                problem = f"was killed: {signal.strsignal(-status)} (exit status {128 - status})"
        return problem, *[os.pread(file.fileno(), 10_000_000, 0) for file in (out, err)]


def guard(work, *arguments):
    """Exits with the status that work returns, or says what is wrong. Leaves no process behind."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has set SIGHUP
            signal.signal(number, lambda number, frame: leave(128 + number))
    try:
        if sys.stdout is None:
            sys.exit("stdout is closed")
        # Signals interrupt this thread, so it is another one that starts processes.
        status = ThreadPoolExecutor(1).submit(work, *arguments).result()
        sys.stdout.flush()
    except (SystemExit, OSError) as error:
        status = 2
        print(f"{Path(sys.argv[0]).stem}.sh: {error}", file=sys.stderr)
    leave(status)


# What lies in the working directory does not count: a script does not see it either.
CHECK = """
import sys
sys.path[:] = filter(None, sys.path)
from importlib.util import find_spec
assert sys.version_info >= (3, 10)
specs = {name: find_spec(name) for name in ["torch", "triton", "numpy"]}
lacking = [name for name, spec in specs.items() if not (spec and spec.origin)]
sys.exit("lacks " + ", ".join(lacking) if lacking else 0)
"""


def check(python):
    """Returns why this Python cannot run the scripts, or an empty string."""
    with suppress(OSError):
        problem, _, err = run([python, "-c", CHECK])
        lacks = re.search(rb"(?m)^lacks .*", err)
        if lacks or not problem:
            return lacks[0].decode() if lacks else ""
    return "does not run as Python 3.10 or newer"


def find_python():
    if given := os.environ.get("PYTHON"):
        if fault := check(given):
            sys.exit(f"PYTHON={given} {fault}")
        return given
    python = str(VENV / "bin/python")
    for candidate in ["python3"] if UNFINISHED.exists() else [python, "python3"]:
        if not check(candidate):
            return candidate
    print("No torch, triton and numpy found: making .venv, or another run is.", file=sys.stderr)
    with open(ROOT / "requirements.txt", "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        make_venv(python, ROOT / "requirements.txt")
    return python


def make_venv(python, requirements):
    """Makes .venv with its packages. Removes an old one only where it is marked as begun here."""
    if UNFINISHED.exists():
        shutil.rmtree(VENV)
    elif os.path.lexists(VENV):
        if fault := check(python):
            sys.exit(f"{python} {fault}: install requirements.txt there, or move .venv away")
        return  # another run has made it in the meantime
    UNFINISHED.mkdir(parents=True)
    try:
        # The real path, as python3 may be that of an active venv, and even of this one.
        command = [os.path.realpath(sys.executable), "-m", "venv", VENV]
        if problem := run(command, stdout=sys.stderr, stderr=sys.stderr)[0]:
            sys.exit(f"python3 -m venv failed, see above: {problem}")
        choice, room, options = choose_torch(python, requirements)
        if shutil.disk_usage(ROOT).free < room * 1e9:
            sys.exit(f"no room for .venv, which needs {room} GB: {choice}")
        print(f"Installing requirements.txt into .venv: {choice}.", file=sys.stderr)
        install(python, requirements, UNFINISHED, *options)
    except SystemExit:
        shutil.rmtree(VENV)
        raise


def choose_torch(python, requirements):
    """Returns which build of torch to install, the GB of disk for it, and pip's options."""
    # A user who has set an index or a constraint for pip has chosen.
    pip = [python, "-m", "pip"]
    _, settings, _ = run([*pip, "config", "list"])
    if re.search(rb"\.(index-url|extra-index-url|no-index|find-links|constraint)=", settings):
        return "up to 2.8 GB to download, from where pip is set to look", 2, []
    if not has_gpu_driver():
        ask = ["index", "versions", "torch", "--index-url", CPU_INDEX, "--timeout=5", "--retries=0"]
        if b"+cpu" in run([*pip, *ask], 15)[1]:
            choice = "0.4 GB to download, torch's CPU build, as there is no GPU driver"
            return choice, 2, ["--extra-index-url", CPU_INDEX]
    return "2.8 GB to download, torch for NVIDIA GPUs", 5, []


def has_gpu_driver():
    with suppress(OSError):
        return os.path.exists("/dev/kfd") or bool(ctypes.CDLL("libcuda.so.1"))  # AMD's, NVIDIA's
    return False


CAUSES = {  # what pip says, and why
    "No space left": f"there is no room left in {ROOT}, or for what pip caches",
    "connection broken|ConnectTimeout|NewConnectionError|ReadTimeout": "is there a network?",
    "No matching distribution": f"wheels fit Python 3.10 to 3.14, not {sys.version.split()[0]}",
}


def install(python, requirements, temporary, *options):
    """Installs a file of requirements with pip, which leaves nothing outside a folder of ours."""
    temporary.mkdir(parents=True, exist_ok=True)
    # The user's settings for pip hold, but for those with which it does not install here.
    settings = {"PIP_CONSTRAINT": os.devnull, "PIP_REQUIRE_VIRTUALENV": "0", "PIP_USER": "0"}
    settings |= {"PIP_RETRIES": "2", "TMPDIR": str(temporary)}
    command = [python, "-m", "pip", "install", "--target=", *options, "-r", requirements]
    problem, _, err = run(command, env=ENVIRONMENT | settings, stdout=sys.stderr)
    said = err.decode(errors="replace")
    print(said, end="", file=sys.stderr)
    if problem:
        causes = [cause for signs, cause in CAUSES.items() if re.search(signs, said)]
        sys.exit(f"could not install {requirements.name}: {[*causes, f'{problem}, see above'][0]}")
    shutil.rmtree(temporary)


def choose(arguments):
    """Returns what is to be checked, in order: chapter20/01_fused_linear_gelu and so on."""
    # An expected file without a script is no less wrong than a script without an expected file.
    files = [*ROOT.glob("chapter*/[0-9][0-9]_*.py")]
    files += ROOT.glob("expected_outputs/chapter*/[0-9][0-9]_*.txt")
    names = {f"{file.parent.name}/{file.stem}" for file in files}
    chosen = set()
    for argument in arguments or [str(ROOT)]:
        # The start of a name, or of a path from here or from this folder; numbers are whole.
        start = f"0{argument}_" if re.fullmatch("[0-9]", argument) else argument.rstrip("/")
        starts = "|".join(map(re.escape, [start, str(Path(argument).resolve())]))
        forms = {n: [f"{n}.py".split("/")[1], f"{n}.py", f"{ROOT}/{n}.py"] for n in names}
        some = {n for n in names if any(re.match(rf"({starts})(?!\d)", f) for f in forms[n])}
        if not (argument and some):
            sys.exit(f"no script matches '{argument}': ./run_all.sh --list lists them")
        chosen |= some
    return sorted(chosen)


def judge(name, python, limit):
    """Runs a script. Returns the seconds that it took, what is wrong, if anything, and details."""
    expected = f"expected_outputs/{name}.txt"
    wanted = b""
    with suppress(OSError):
        wanted = (ROOT / expected).read_bytes()
    if not wanted:
        return 0, f"{expected} is missing, empty or not readable", []
    begin, lines = time.monotonic(), []
    problem, out, err = run([python, ROOT / f"{name}.py"], limit)
    took = time.monotonic() - begin
    if problem and err:
        lines = ["The end of its stderr:", *visible(err[-10_000:])[-20:]]
    elif not problem and out != wanted:
        problem = "stdout is not the expected output"
        both = visible(wanted), visible(out[:1_000_000])
        lines = list(difflib.unified_diff(*both, expected, f"{name}.py", lineterm=""))
    return took, problem, [line[:300] for line in lines[:40]] + ["..."] * (len(lines) > 40)


def visible(content):
    """The lines of some bytes, written as in Python: \\x1b is what would change a terminal."""
    *lines, last = [repr(line)[2:-1] for line in content.split(b"\n")]
    return [*lines, last, "\\ No newline at end of file"] if last else lines


def read_arguments():
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "./run_all.sh", description=__doc__, formatter_class=style, allow_abbrev=False
    )
    processors, option = len(os.sched_getaffinity(0)), parser.add_argument
    option("scripts", nargs="*", metavar="SCRIPT", help="chapter20, 03, chapter20/03, or a path")
    option("-j", type=int, metavar="N", default=processors, help="run N scripts at a time")
    option("--timeout", type=int, metavar="SECONDS", default=300, help="for a script (300)")
    option("--list", action="store_true", help="list the chosen scripts, do not run them")
    arguments = parser.parse_intermixed_args()
    if arguments.j < 1 or arguments.timeout < 1:
        parser.error("N and SECONDS must be 1 or more")
    return arguments


# torch, slow to import, is asked only where there is a driver.
HEADER = """
import sys
sys.path[:] = filter(None, sys.path)
from importlib.metadata import version
device = "no GPU in use: Triton interpreter on the CPU"
if sys.argv[1] == "GPU":
    import torch
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else device
versions = [f"{name} {version(name)}" for name in ["torch", "triton", "numpy"]]
print(f"\\nPython {sys.version.split()[0]}", *versions, device, sep=", ")
"""


def main(arguments):
    names = choose(arguments.scripts)
    if arguments.list:
        print(*[f"{name}.py" for name in names], sep="\n")
        return 0
    python = find_python()
    pool, passed = ThreadPoolExecutor(arguments.j), 0
    verdicts = [pool.submit(judge, name, python, arguments.timeout) for name in names]
    interpret = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    device = "GPU" if has_gpu_driver() and not interpret else "CPU"
    problem, out, _ = run([python, "-c", HEADER, device], arguments.timeout)
    print(f"unknown versions: {problem}" if problem else visible(out)[-1], flush=True)
    for name, verdict in zip(names, verdicts, strict=True):
        took, problem, details = verdict.result()
        word = "FAIL" if problem else "PASS"
        if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
            word = f"\033[{31 if problem else 32}m{word}\033[0m"
        line = f"{word}  {name}.py  {took:.1f} s" + (problem and f": {problem}")
        print(line, *details, sep="\n", flush=True)
        passed += not problem
    print(f"{passed} passed, {len(names) - passed} failed")
    return 0 if passed == len(names) else 1


if __name__ == "__main__":
    guard(main, read_arguments())
