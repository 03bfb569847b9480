"""Runs the tests: ./run_tests.sh [pytest arguments ...]

With --mutants, tests/repository/test_mutants.py tries every mutant, a quarter of an hour more.
The interpreter is run_all.sh's. requirements-dev.txt is installed into .test-packages only.
"""

import fcntl
import os
import shutil
import sys

from run_all import ENVIRONMENT, ROOT, find_python, guard, install

REQUIREMENTS = ROOT / "requirements-dev.txt"
# A folder for each version of Python, as some packages have a compiled part.
PACKAGES = ROOT / ".test-packages" / sys.implementation.cache_tag


def main():
    python = os.path.abspath(shutil.which(find_python()))
    done = PACKAGES / REQUIREMENTS.name  # a copy of the file, made once all of it is installed
    with open(REQUIREMENTS, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another run may be installing
        if not done.exists() or done.read_bytes() != file.read():
            print(f"Installing {REQUIREMENTS.name} into .test-packages: 40 MB.", file=sys.stderr)
            shutil.rmtree(PACKAGES, ignore_errors=True)
            # --no-deps: matplotlib needs numpy; a second numpy would hide the interpreter's own.
            install(python, REQUIREMENTS, PACKAGES / "temporary", "--no-deps", "--target", PACKAGES)
            shutil.copyfile(REQUIREMENTS, done)
    path = filter(None, [str(PACKAGES), ENVIRONMENT.get("PYTHONPATH")])
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)}
    environment["PATH"] = f"{PACKAGES}/bin:{ENVIRONMENT.get('PATH', os.defpath)}"
    arguments = sys.argv[1:] or ["-n", "2", "--dist", "loadfile"]  # all, two files at a time
    os.chdir(ROOT)
    os.execve(python, [python, "-m", "pytest", *arguments], environment)


if __name__ == "__main__":
    guard(main)
