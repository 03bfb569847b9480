"""Runs the tests: ./run_tests.sh [pytest arguments ...]

With --mutants, tests/repository/test_mutants.py tries every mutant, a quarter of an hour more.
The interpreter is run_all.sh's. requirements-dev.txt is installed for it into .test-packages, in
the checkout, and nowhere else.
"""

import os
import shutil
import sys

from run_all import ENVIRONMENT, ROOT, find_python, guard, install, lock, run

REQUIREMENTS = ROOT / "requirements-dev.txt"


def main():
    python = os.path.abspath(shutil.which(find_python()))
    # A folder for each version of Python, as some packages have a compiled part.
    _, tag, _ = run([python, "-c", "import sys; print(sys.implementation.cache_tag)"])
    packages = ROOT / ".test-packages" / tag.decode().split()[-1]
    done = packages / REQUIREMENTS.name  # a copy of the file, made once all of it is installed
    with lock(REQUIREMENTS):
        if not done.exists() or done.read_bytes() != REQUIREMENTS.read_bytes():
            print(f"Installing {REQUIREMENTS.name} into .test-packages: 40 MB.", file=sys.stderr)
            shutil.rmtree(packages, ignore_errors=True)
            # --no-deps: matplotlib needs numpy; a second numpy would hide the interpreter's own.
            options = ["--no-deps", "--target", packages]
            install(python, REQUIREMENTS, packages / "temporary", *options)
            shutil.copyfile(REQUIREMENTS, done)
    path = filter(None, [str(packages), ENVIRONMENT.get("PYTHONPATH")])
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)}
    environment["PATH"] = f"{packages}/bin:{ENVIRONMENT.get('PATH', os.defpath)}"
    arguments = sys.argv[1:] or ["-n", "2", "--dist", "loadfile"]  # all, two files at a time
    os.chdir(ROOT)
    os.execve(python, [python, "-m", "pytest", *arguments], environment)


if __name__ == "__main__":
    guard(main)
