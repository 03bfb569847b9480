#!/bin/sh
# Runs the numbered scripts and compares what each prints with the book: ./run_all.sh --help
# The work is done by run_all.py. This finds a Python for it: any of 3.10 or newer will do.
# run_tests.sh sources this file, which runs run_tests.py then.

self=$(readlink -f -- "$0") # it may be called through a link
name=${self##*/}
if [ "$(uname)" != Linux ]; then
    echo "$name: Triton is made for Linux only; on Windows, use WSL 2" >&2
    exit 2
fi
for candidate in "$PYTHON" "${self%/*}/.venv/bin/python" python3; do
    # -E: without the user's PYTHONHOME and the like; -S: without packages.
    new=$("$candidate" -ESc 'import sys; print(sys.version_info >= (3, 10))' 2>/dev/null </dev/null)
    if [ "$new" = True ]; then
        exec "$candidate" -ES "${self%.sh}.py" "$@"
    fi
done
echo "$name: there is no python3 of Python 3.10 or newer: install one" >&2
exit 2
