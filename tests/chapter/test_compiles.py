"""Faults that only a GPU would show, found without one: every kernel compiles for every target, and
what comes out has no TF32, no float64, no spills and no more shared memory than each GPU has.
"""

import pytest
from compile_check import CHAPTERS_TILE, TARGETS, TILE, compile_all
from helpers import ROOT, SCRIPTS, every_script


@pytest.fixture(scope="module")
def results():
    return compile_all(SCRIPTS)


@pytest.mark.parametrize("target", TARGETS)
@every_script
def test_every_kernel_compiles_without_faults(results, script, target):
    compiled, faults = results[script]
    kernels = script.read_text().count("@triton.jit\n")
    assert kernels > 0
    assert len({c.split()[0] for c in compiled if c.endswith(f"for {target}")}) == kernels
    assert [fault for fault in faults if f" for {target}: " in fault] == []


LINEAR, LAYERNORM = "chapter20/01_fused_linear_gelu.py", "chapter20/03_fused_layernorm.py"
FLOAT64 = "tl.sum(x, axis=0)", "tl.sum(x.to(tl.float64), axis=0)"
WARPS = "16 if torch.version.hip else 32"
# What the check must find, for which target, and the edit of a script that makes it.
FAULTS = [
    ("computes in TF32", "sm_90", LINEAR, (', input_precision="ieee"', "")),
    ("does not compile", "sm_90", LINEAR, CHAPTERS_TILE),
    ("computes in float64", "sm_90", LAYERNORM, FLOAT64),
    ("computes in float64", "gfx942", LAYERNORM, FLOAT64),
    ("spills to local memory", "sm_90", LAYERNORM, (WARPS, "4")),
    ("2048 threads", "gfx942", LAYERNORM, (WARPS, "32")),
    ("bytes of shared memory", "sm_90", LINEAR, (TILE, "BLOCK_M=16, BLOCK_N=32, BLOCK_K=256")),
    (
        "no wrapper launches it",
        "sm_90",
        LINEAR,
        ("    probe_bias_kernel[", "    M or probe_bias_kernel["),
    ),
]


def test_the_check_finds_each_of_these_faults(tmp_path):
    paths = [tmp_path / f"edited{number}.py" for number in range(len(FAULTS))]
    for path, (_, _, name, (old, new)) in zip(paths, FAULTS, strict=True):
        source = (ROOT / name).read_text()
        assert old in source
        path.write_text(source.replace(old, new))
    found = compile_all(paths, "sm_90", "gfx942")
    for path, (fault, target, *_) in zip(paths, FAULTS, strict=True):
        _, faults = found[path]
        assert any(fault in f and f"for {target}: " in f for f in faults), (fault, faults)
