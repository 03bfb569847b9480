"""Runs the tests: ./run_tests.sh [pytest's arguments ...]

With --mutants, every mutant is tried, which takes a quarter of an hour more. The
interpreter is run_all.sh's; where it lacks some of requirements-dev.txt, that is installed into
.test-packages, here in the checkout, and nowhere else.
"""

import os
import shutil
import sys

from run_all import ENVIRONMENT, ROOT, find_python, guard, install, lock, run

REQUIREMENTS = ROOT / "requirements-dev.txt"

# Prints the folder for this Python, as some packages have a compiled part, and fails if the folder
# and the interpreter lack a line of requirements-dev.txt as it stands.
LACKING = """
import sys
from importlib.metadata import PackageNotFoundError, version

print(sys.implementation.cache_tag)
sys.path.insert(0, sys.argv[2] + "/" + sys.implementation.cache_tag)
lines = [line for line in open(sys.argv[1]).read().splitlines() if not line.startswith("#")]
try:
    sys.exit(any(version(name) != wanted for name, wanted in (l.split("==") for l in lines)))
except PackageNotFoundError:
    sys.exit(1)
"""


def prepare():
    """Returns the interpreter that has all for the tests, and where it finds the packages."""
    python, _ = find_python()
    lacking = [python, "-c", LACKING, REQUIREMENTS, ROOT / ".test-packages"]
    status, out, err = run(lacking)
    packages = ROOT / ".test-packages" / out.last.decode().split()[-1]
    if status != 0:
        with lock(REQUIREMENTS):
            if run(lacking)[0] == 0:
                return python, packages  # another run has installed them in the meantime
            print(
                f"Installing {REQUIREMENTS.name} into {packages.relative_to(ROOT)} (once): "
                "40 MB to download.",
                file=sys.stderr,
            )
            incomplete = packages.with_suffix(".incomplete")
            for old in (incomplete, packages):
                shutil.rmtree(old, ignore_errors=True)
            # --no-deps: matplotlib needs numpy; a second one would hide the interpreter's own.
            options = ["--no-deps", "--target", incomplete / "packages"]
            install(python, REQUIREMENTS, incomplete / "temporary", *options)
            (incomplete / "packages").rename(packages)
            incomplete.rmdir()
    return python, packages


if __name__ == "__main__":
    python, packages = guard(prepare)
    path = [str(packages), ENVIRONMENT.get("PYTHONPATH")]
    environment = ENVIRONMENT | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PATH": f"{packages}/bin:{ENVIRONMENT.get('PATH', os.defpath)}",
    }
    # All of them: two files at a time.
    arguments = sys.argv[1:] or ["-n", "2", "--dist", "loadfile"]
    os.chdir(ROOT)
    os.execve(python, [python, "-m", "pytest", *arguments], environment)
