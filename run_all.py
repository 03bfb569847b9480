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
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
UNFINISHED = VENV / "unfinished-set-up"  # marks a .venv that was begun here, until it is complete
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
MB = 1_000_000

# Without what would change a script's output or exit status.
UNWANTED = ["PYTHONHOME", "PYTHONINSPECT", "PYTHONOPTIMIZE", "PYTHONWARNINGS"]
UNWANTED += ["DNNL_VERBOSE", "MKL_VERBOSE", "ONEDNN_VERBOSE"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in UNWANTED}
ENVIRONMENT["PYTHONIOENCODING"] = "utf-8"

# Who starts a process, or goes on after its end, needs the lock; leave() never gives it back.
running, running_lock = set(), threading.RLock()


def kill(process):
    """Ends a process and its children, those too that have outlived it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def leave(status):
    """Ends all processes, then this one. A signal may call it again in the meantime."""
    running_lock.acquire()
    for process in running:
        kill(process)
    os._exit(status)


def run(command, limit=86_400, **options):
    """Runs a command. Returns what went wrong, if anything, its stdout and its stderr."""
    problem, begin = "", time.monotonic()
    with TemporaryFile() as out, TemporaryFile() as err:
        options = {"stdout": out, "stderr": err, "env": ENVIRONMENT, **options}
        with running_lock:
            # In a session of its own: away from the terminal, and ended with all its children.
            options |= {"stdin": subprocess.DEVNULL, "start_new_session": True}
            process = subprocess.Popen(command, **options)
            running.add(process)
        # WNOWAIT: until its exit status is taken, no other process gets its number.
        ended = (os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        waiting = threading.Thread(target=os.waitid, args=ended)
        waiting.start()
        while waiting.is_alive() and not problem:
            waiting.join(0.1)
            if time.monotonic() - begin >= limit:
                problem = f"timed out after {limit} s"
            if any(os.fstat(file.fileno()).st_size > 100 * MB for file in (out, err)):
                problem = "printed more than 100 MB"
        kill(process)
        with running_lock:
            running.remove(process)
        status = process.wait()
        if status < 0 and not problem:
            problem = f"was killed: {signal.strsignal(-status)} (exit status {128 - status})"
        elif status > 0:
            problem = f"exit status {status}"
        out.seek(0)
        err.seek(0)
        return problem, out.read(10 * MB), err.read(10 * MB)


def guard(work, *arguments):
    """Exits with the status that work returns, or says what is wrong. Leaves no process behind."""
    for number in [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM]:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has set SIGHUP
            signal.signal(number, lambda number, frame: leave(128 + number))
    status = 2
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
names = ["torch", "triton", "numpy"]
lacking = [name for name in names if not getattr(find_spec(name), "origin", None)]
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
    """Returns the interpreter for the scripts."""
    if given := os.environ.get("PYTHON"):
        if fault := check(given):
            sys.exit(f"PYTHON={given} {fault}")
        return given
    python = str(VENV / "bin/python")
    for candidate in ["python3"] if UNFINISHED.exists() else [python, "python3"]:
        if not check(candidate):
            return candidate
    make_venv(python, ROOT / "requirements.txt")
    return python


def make_venv(python, requirements):
    """Makes .venv with its packages. Removes an old one only where it is marked as begun here."""
    with lock(requirements):
        if UNFINISHED.exists():
            shutil.rmtree(VENV)
        elif os.path.lexists(VENV):
            if fault := check(python):
                sys.exit(f"{python} {fault}: install requirements.txt there, or move .venv away")
            return  # another run has made it in the meantime
        print("No torch, triton and numpy found: making .venv (once).", file=sys.stderr)
        UNFINISHED.mkdir(parents=True)
        try:
            # The real path, as python3 may be that of an active venv, and even of this one.
            command = [os.path.realpath(sys.executable), "-m", "venv", VENV]
            if problem := run(command, stdout=sys.stderr, stderr=sys.stderr)[0]:
                sys.exit(f"python3 -m venv failed, see above: {problem}")
            choice, room, options = choose_torch(python, requirements)
            free = shutil.disk_usage(ROOT).free / 1e9
            if free < room:
                sys.exit(f"{ROOT} has {free:.1f} GB free, and .venv needs {room} GB: {choice}")
            print(f"Installing requirements.txt into .venv: {choice}.", file=sys.stderr)
            install(python, requirements, UNFINISHED, *options)
        except SystemExit:
            shutil.rmtree(VENV)
            raise


def choose_torch(python, requirements):
    """Returns what to say of the build of torch, the GB of disk that it needs, and pip's options.

    Without a GPU's driver it is the CPU build of PyTorch's own index, where this answers and has
    one for this Python. A user who has set an index or a constraint for pip has chosen.
    """
    pip = [python, "-m", "pip"]
    _, settings, _ = run([*pip, "config", "list"])
    if re.search(rb"\.(index-url|extra-index-url|no-index|find-links|constraint)=", settings):
        return "up to 2.8 GB to download, from where pip is set to look", 2, []
    if not has_gpu_driver():
        pin = re.search("torch==(.*)", requirements.read_text())[1]
        ask = ["index", "versions", "torch", "--index-url", CPU_INDEX, "--timeout=5", "--retries=0"]
        if f"{pin}+cpu".encode() in run([*pip, *ask], 15)[1]:
            choice = "0.4 GB to download, torch's CPU build, as there is no GPU driver"
            return choice, 2, ["--extra-index-url", CPU_INDEX]
    return "2.8 GB to download, torch for NVIDIA GPUs", 5, []


def has_gpu_driver():
    import ctypes  # here, as difflib below: at the top, it would delay every run

    with suppress(OSError):
        return os.path.exists("/dev/kfd") or bool(ctypes.CDLL("libcuda.so.1"))  # AMD's, NVIDIA's
    return False


CAUSES = {  # what pip says, and why
    "No space left": f"there is no room left in {ROOT}, or for what pip caches",
    "connection broken|ConnectTimeout|NewConnectionError|ReadTimeout": "is there a network?",
    "No matching distribution": "no wheel fits Python {}.{}.{}; there are some for Python 3.10 to "
    "3.14: set PYTHON to one of these, or put it first on PATH".format(*sys.version_info),
}


def install(python, requirements, temporary, *options):
    """Installs a file of requirements with pip, which leaves nothing outside a folder of ours."""
    temporary.mkdir(parents=True, exist_ok=True)
    # The user's settings for pip hold, but for those with which it does not install here.
    settings = {"PIP_CONSTRAINT": os.devnull, "PIP_REQUIRE_VIRTUALENV": "0", "PIP_USER": "0"}
    settings |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "TMPDIR": str(temporary)}
    command = [python, "-m", "pip", "install", "--no-input", "--retries=2", "--target=", *options]
    command += ["-r", requirements]
    problem, _, err = run(command, env=ENVIRONMENT | settings, stdout=sys.stderr)
    said = err.decode(errors="replace")
    print(said, end="", file=sys.stderr)
    if problem:
        causes = [cause for signs, cause in CAUSES.items() if re.search(signs, said)]
        sys.exit(f"could not install {requirements.name}: {[*causes, f'{problem}, see above'][0]}")
    shutil.rmtree(temporary)


def lock(path):
    """Returns a file that is locked until it is closed, once no other run has it locked."""
    file = open(path, "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("Waiting for another run, which is installing.", file=sys.stderr)
        fcntl.flock(file, fcntl.LOCK_EX)
    return file


def choose(arguments):
    """Returns what is to be checked, in order: chapter20/01_fused_linear_gelu and so on."""
    # An expected file without a script is no less wrong than a script without an expected file.
    files = [*ROOT.glob("chapter*/[0-9][0-9]_*.py")]
    files += ROOT.glob("expected_outputs/chapter*/[0-9][0-9]_*.txt")
    names = {f"{file.parent.name}/{file.stem}" for file in files}
    if not names:
        sys.exit(f"there is no script {ROOT}/chapter*/NN_*.py")
    chosen = set() if arguments else names
    for argument in arguments:
        # The start of a name, of a path here, or of a path from the working directory.
        start = f"0{argument}_" if re.fullmatch("[0-9]", argument) else argument
        starts = start, f"{Path(argument).resolve()}"
        forms = [(n, (n.split("/")[1] + ".py", f"{n}.py", f"{ROOT}/{n}.py")) for n in names]
        some = {n for n, form in forms if any(f.startswith(starts) for f in form)}
        if not some:
            sys.exit(f"no script matches '{argument}': ./run_all.sh --list lists them")
        chosen |= some
    return sorted(chosen)


def judge(name, python, limit):
    """Runs a script. Returns the seconds that it took, what is wrong, if anything, and details."""
    expected = f"expected_outputs/{name}.txt"
    try:
        wanted = (ROOT / expected).read_bytes()
    except OSError as error:
        return 0, f"{expected} cannot be read: {error.strerror}", []
    if not wanted:
        return 0, f"{expected} is empty", []
    begin, lines = time.monotonic(), []
    problem, out, err = run([python, ROOT / f"{name}.py"], limit)
    took = time.monotonic() - begin
    if problem and err:
        lines = ["The end of its stderr:", *visible(err)[-20:]]
    elif not problem and out != wanted:
        import difflib

        problem, both = "stdout is not the expected output", (visible(wanted), visible(out[:MB]))
        lines = list(difflib.unified_diff(*both, expected, f"{name}.py", lineterm=""))
    return took, problem, [line[:300] for line in lines[:40]] + ["..."] * (len(lines) > 40)


def visible(content):
    """The lines of some bytes, written as in Python: \\x1b is what would change a terminal."""
    *lines, last = [repr(line)[2:-1] for line in content.split(b"\n")]
    return [*lines, last, "\\ No newline at end of file"] if last else lines


# torch, slow to import, is asked only where there is a driver.
HEADER = """
import sys
sys.path[:] = filter(None, sys.path)
import platform
from importlib.metadata import version
device = ""
if sys.argv[1] == "GPU":
    import torch
    device = torch.cuda.is_available() and torch.cuda.get_device_name()
device = device or "no GPU in use: Triton interpreter on the CPU"
versions = [f"{name} {version(name)}" for name in ["torch", "triton", "numpy"]]
print(f"\\nPython {platform.python_version()}", *versions, device, sep=", ")
"""


def header(python, limit):
    """Returns the first line of the report."""
    interpret = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
    device = "GPU" if has_gpu_driver() and not interpret else "CPU"
    problem, out, err = run([python, "-c", HEADER, device], limit)
    if problem:
        return ": ".join(["unknown versions and device", problem, *visible(err)[-1:]])
    return visible(out)[-1]


def read_arguments():
    parser = argparse.ArgumentParser(
        prog="./run_all.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    processors = len(os.sched_getaffinity(0))
    script = "a chapter (chapter20), a number or the start of a name (03, chapter20/03), or a path"
    option = parser.add_argument
    option("scripts", nargs="*", metavar="SCRIPT", help=script)
    option("-j", type=int, metavar="N", default=processors, help="run N scripts at a time")
    option("--timeout", type=int, metavar="SECONDS", default=300, help="for a script (300)")
    option("--list", action="store_true", help="list the chosen scripts, do not run them")
    arguments = parser.parse_intermixed_args()
    if arguments.j < 1 or arguments.timeout < 1:
        parser.error("N and SECONDS must be 1 or more")
    return arguments


def main(arguments):
    names = choose(arguments.scripts)
    if arguments.list:
        print(*[f"{name}.py" for name in names], sep="\n")
        return 0
    python = find_python()
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    pool, passed = ThreadPoolExecutor(arguments.j), 0
    verdicts = [pool.submit(judge, name, python, arguments.timeout) for name in names]
    print(header(python, arguments.timeout), flush=True)
    for name, verdict in zip(names, verdicts, strict=True):
        took, problem, details = verdict.result()
        word = "FAIL" if problem else "PASS"
        if colour:
            word = f"\033[{31 if problem else 32}m{word}\033[0m"
        line = f"{word}  {name}.py  {took:.1f} s" + (problem and f": {problem}")
        print("\n".join([line, *details]), flush=True)
        passed += not problem
    print(f"{passed} passed, {len(names) - passed} failed")
    return 0 if passed == len(names) else 1


if __name__ == "__main__":
    guard(main, read_arguments())
