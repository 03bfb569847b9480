"""The numbered scripts: where they are, and how the tests import them."""

import functools
import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(ROOT.glob("chapter*/[0-9][0-9]_*.py"))


def name_of(script):
    """chapter20/01_fused_linear_gelu.py, for messages and test ids."""
    return script.relative_to(ROOT).as_posix()


def expected_file(script):
    """The book's Expected Output of a script."""
    return ROOT / "expected_outputs" / script.relative_to(ROOT).with_suffix(".txt")


@functools.cache
def load(name):
    """The script ROOT/name as a module; it chooses the GPU or the interpreter as it always does."""
    path = ROOT / name
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


linear_gelu = load("chapter20/01_fused_linear_gelu.py")
row_mean_var = load("chapter20/02_row_mean_var.py")
layernorm = load("chapter20/03_fused_layernorm.py")
complete = load("chapter20/04_standalone_complete.py")
DEVICE = complete.DEVICE
INTERPRET = complete.INTERPRET
