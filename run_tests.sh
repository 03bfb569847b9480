#!/usr/bin/env bash
# Runs the tests: ./run_tests.sh [pytest's arguments ...]
# With --mutants, tests/test_mutants.py tries every mutant, which takes a quarter of an hour more.
# The interpreter is run_all.sh's; where it lacks some of requirements-dev.txt, that is installed
# into .test-packages, here in the checkout, and nowhere else.

# shellcheck source=run_all.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/run_all.sh"

# Whether a line of requirements-dev.txt is not installed as it stands.
lacking_for_tests() {
    ! "$python" -c '
import sys
from importlib.metadata import PackageNotFoundError, version

lines = [line for line in open(sys.argv[1]).read().splitlines() if not line.startswith("#")]
try:
    sys.exit(any(version(name) != wanted for name, wanted in (l.split("==") for l in lines)))
except PackageNotFoundError:
    sys.exit(1)
' "$root/requirements-dev.txt"
}

trap 'exit 130' INT # pip's own exit status would pass a Ctrl-C for a failure
find_python
# Some have a compiled part: each Python version has its own folder.
packages=$root/.test-packages/$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
export PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH} PATH=$packages/bin:$PATH
if lacking_for_tests; then
    echo "Installing requirements-dev.txt into ${packages#"$root"/} (once): 40 MB to download." >&2
    rm -rf -- "$packages" "$packages.incomplete"
    # --no-deps: matplotlib needs numpy, and a second numpy here would hide the interpreter's own.
    "$python" -m pip install --disable-pip-version-check --retries 2 --no-deps \
        --target "$packages.incomplete" -r "$root/requirements-dev.txt" >&2 ||
        die "could not install requirements-dev.txt: is there a network, room for it, and does" \
            "$python have pip?"
    mv -- "$packages.incomplete" "$packages" || die "cannot make $packages"
fi
# A relative PYTHON would be another one there.
[[ $python != */* || $python == /* ]] || python=$PWD/$python
cd "$root" || die "cannot enter $root"
(($# > 0)) || set -- -n 2 --dist loadfile # all of them: two files at a time
"$python" -m pytest "$@"
