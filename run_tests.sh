#!/bin/sh
# Runs the tests: ./run_tests.sh [pytest arguments ...]; see run_tests.py, which does the work.
self=$(readlink -f -- "$0") # it may be called through a link
# shellcheck source=run_all.sh
. "${self%/*}/run_all.sh"
