"""What gpu_compile.py and compile_beyond.py find, for the tests: each runs in its own process."""

import functools
import json
import subprocess
import sys

from helpers import ROOT

TARGETS = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100"]
TILE = "BLOCK_M=16, BLOCK_N=16, BLOCK_K=16"
CHAPTERS_TILE = TILE, "BLOCK_M=8, BLOCK_N=8, BLOCK_K=4"


def run(*command, **options):
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def compile_all(paths, *targets):
    """What gpu_compile.py says of each path: (compiled, faults)."""
    paths_in = "".join(f"{path}\n" for path in paths)
    lines = run(ROOT / "tests/gpu_compile.py", *targets, input=paths_in).splitlines()
    return dict(zip(paths, map(json.loads, lines), strict=True))


@functools.cache
def compile_beyond(file):
    """What compile_beyond.py finds on each target: [kernel, constants, faults], ..."""
    return json.loads(run(ROOT / "tests/compile_beyond.py", file, *TARGETS))
