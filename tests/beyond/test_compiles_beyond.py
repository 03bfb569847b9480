"""The kernels of beyond/ compile for each GPU without faults, as the chapter's do."""

import json
import re

import pytest
from compile_check import TARGETS, run
from helpers import ROOT, load

# On each target the steps of fast_linear_gelu, each with its precision and GELU.
STEPS = {
    "sm_75": {"ieee erf", "ieee ptx"},
    "sm_80": {"tf32x3 erf", "ieee ptx"},
    "sm_90": {"tf32x3 erf", "ieee ptx", "tma tf32x3 erf", "tma ieee ptx", "pingpong ptx"},
    "sm_100": {"tma tf32x3 erf", "tma ieee ptx"},
    "sm_120": {"tf32x3 erf", "ieee ptx"},
    "gfx942": {"ieee erf", "ieee exp2"},
    "gfx1100": {"ieee erf", "ieee exp2"},
}


@pytest.fixture(scope="module")
def found():
    """What compile_beyond.py finds, by file and target: [kernel, constants, faults], ..."""
    if load("beyond/fast_linear_gelu.py").TensorDescriptor is None:
        pytest.skip("needs a newer Triton, with Gluon and descriptors")
    return json.loads(run(ROOT / "tests/compile_beyond.py", *TARGETS))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("file", ["fast_layernorm", "fast_linear_gelu"])
def test_what_lies_beyond_compiles_without_faults(found, file, target):
    steps = set()
    for kernel, constants, _ in found[file][target]:
        step = re.sub("layernorm|linear_gelu|kernel|_", "", kernel)
        words = [step, constants.get("PRECISION", ""), constants.get("GELU", "")]
        steps.add(" ".join(filter(None, words)))
    assert steps == (STEPS[target] if "gelu" in file else {"rows", "pieces", "chunks"})
    assert [[*launch, fault] for *launch, faults in found[file][target] for fault in faults] == []
