#!/bin/sh
# Runs the numbered scripts and compares what each prints with the book: ./run_all.sh --help
# The work is done by run_all.py. This finds a Python for it: any of 3.10 or newer will do.

if [ "$(uname)" != Linux ]; then
    echo "run_all.sh: Triton is made for Linux only; on Windows, use WSL 2" >&2
    exit 2
fi
root=$(readlink -f -- "$0") # this file may be called through a link
root=${root%/*}
for candidate in "$PYTHON" "$root/.venv/bin/python" python3; do
    # -E: the user's PYTHONHOME and the like are not for it; -S: nor are packages.
    new=$("$candidate" -ESc 'import sys; print(sys.version_info >= (3, 10))' 2>/dev/null </dev/null)
    if [ "$new" = True ]; then
        exec "$candidate" -ES "$root/run_all.py" "$@"
    fi
done
echo "run_all.sh: there is no python3 of Python 3.10 or newer: install one" >&2
exit 2
