#!/bin/sh
# Runs the tests: ./run_tests.sh [pytest arguments ...]; see run_tests.py, which does the work.

if [ "$(uname)" != Linux ]; then
    echo "run_tests.sh: Triton is made for Linux only; on Windows, use WSL 2" >&2
    exit 2
fi
root=$(readlink -f -- "$0") # this file may be called through a link
root=${root%/*}
for candidate in "$PYTHON" "$root/.venv/bin/python" python3; do
    # -E: the user's PYTHONHOME and the like are not for it; -S: nor are packages.
    new=$("$candidate" -ESc 'import sys; print(sys.version_info >= (3, 10))' 2>/dev/null </dev/null)
    if [ "$new" = True ]; then
        exec "$candidate" -ES "$root/run_tests.py" "$@"
    fi
done
echo "run_tests.sh: there is no python3 of Python 3.10 or newer: install one" >&2
exit 2
