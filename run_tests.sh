#!/usr/bin/env bash
# Runs the tests: ./run_tests.sh [pytest's arguments ...]
# With --mutants, tests/test_mutants.py tries every mutant, which takes ten minutes more.
# The interpreter is run_all.sh's; what it lacks of requirements-dev.txt is installed into
# .test-packages, here in the checkout, and nowhere else.

# shellcheck source=run_all.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/run_all.sh"

# Which lines of requirements-dev.txt are not installed as they stand.
lacking_for_tests() {
    "$python" -c '
import sys
from importlib.metadata import PackageNotFoundError, version

for line in open(sys.argv[1]).read().split():
    name, _, wanted = line.partition("==")
    try:
        if version(name) != wanted:
            print(line)
    except PackageNotFoundError:
        print(line)
' "$root/requirements-dev.txt"
}

find_python
# hypothesis has a compiled part: each Python version has its own folder.
packages=$root/.test-packages/$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
export PYTHONPATH=$packages${PYTHONPATH:+:$PYTHONPATH} PATH=$packages/bin:$PATH
mapfile -t lacks < <(lacking_for_tests)
if ((${#lacks[@]} > 0)); then
    printf '%s\n' "Installing ${lacks[*]} into ${packages#"$root"/} (once)." >&2
    "$python" -m pip install --disable-pip-version-check --retries 2 --quiet --upgrade \
        --target "$packages" "${lacks[@]}" >&2 ||
        die "could not install ${lacks[*]}: is there a network, and does $python have pip?"
fi
# A relative PYTHON would be another one there.
[[ $python != */* || $python == /* ]] || python=$PWD/$python
cd "$root" || die "cannot enter $root"
"$python" -m pytest "$@"
