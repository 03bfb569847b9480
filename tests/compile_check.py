"""What gpu_compile.py, which runs in a process of its own, finds; and how to run such a process."""

import json
import subprocess
import sys

from helpers import ROOT

TARGETS = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100"]


def run(*command):
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def compile_all(paths, *targets):
    """What gpu_compile.py says of each path (or path:target): (launched, faults)."""
    arguments = [f"{path}:{','.join(targets)}" if targets else path for path in paths]
    lines = run(ROOT / "tests/gpu_compile.py", *arguments).splitlines()
    return dict(zip(paths, map(json.loads, lines), strict=True))
