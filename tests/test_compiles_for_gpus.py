"""Faults that only a GPU would show, found without one: every kernel compiles for every target, and
what comes out has no TF32, no float64, no spills and no more shared memory than each GPU has.
"""

import functools
import json
import subprocess
import sys

import pytest
from scripts import ROOT, SCRIPTS, name_of

TARGETS = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120", "gfx942", "gfx1100"]


def compile_all(paths, *targets):
    """What gpu_compile.py says of each path: (compiled, faults)."""
    result = subprocess.run(
        [sys.executable, ROOT / "tests/gpu_compile.py", *targets],
        input="".join(f"{path}\n" for path in paths),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return dict(zip(paths, map(json.loads, result.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def results():
    return compile_all(SCRIPTS)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_every_kernel_compiles_without_faults(results, script, target):
    compiled, faults = results[script]
    kernels = script.read_text().count("@triton.jit\n")
    assert kernels > 0
    assert len({c.split()[0] for c in compiled if c.endswith(f"for {target}")}) == kernels
    assert [fault for fault in faults if f" for {target}: " in fault] == []


@functools.cache
def compile_beyond(file):
    """What compile_beyond.py finds on each target: [kernel, constants, faults], ..."""
    result = subprocess.run(
        [sys.executable, ROOT / "tests/compile_beyond.py", file, *TARGETS],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# How often each kernel of a file is compiled: layernorm_rows_kernel, ...
LAYERNORMS = {"rows": 4, "pieces": 15, "chunks": 5}
WITH_RING = LAYERNORMS | {"chunks": 4, "ring": 1}


@pytest.mark.parametrize(
    "file, target, kernels",
    [
        *[("fast_layernorm", t, LAYERNORMS) for t in ("sm_75", "sm_80", "sm_120")],
        *[("fast_layernorm", t, WITH_RING) for t in ("sm_90", "sm_100")],
        *[("fast_layernorm", t, LAYERNORMS) for t in ("gfx942", "gfx1100")],
        *[("fast_linear_gelu", t, {"": 4}) for t in ("sm_75", "sm_80", "sm_120")],
        ("fast_linear_gelu", "sm_90", {"": 2, "tma": 1, "pingpong": 2}),
        ("fast_linear_gelu", "sm_100", {"": 2, "tma": 2}),
        *[("fast_linear_gelu", t, {"": 4}) for t in ("gfx942", "gfx1100")],
    ],
)
def test_what_lies_beyond_compiles_without_faults(file, target, kernels):
    found = compile_beyond(file)[target]
    counts = {}
    for kernel, _, _ in found:
        step = kernel.removeprefix(file.removeprefix("fast_")).removesuffix("kernel").strip("_")
        counts[step] = counts.get(step, 0) + 1
    assert counts == kernels
    assert [[*launch, fault] for *launch, faults in found for fault in faults] == []


LINEAR = "chapter20/01_fused_linear_gelu.py"
LAYERNORM = "chapter20/03_fused_layernorm.py"
TILE = "BLOCK_M=16, BLOCK_N=16, BLOCK_K=16"
CHAPTERS_TILE = {TILE: "BLOCK_M=8, BLOCK_N=8, BLOCK_K=4", "side < 16": "False"}
FLOAT64 = {"tl.sum(x, axis=0)": "tl.sum(x.to(tl.float64), axis=0)"}
# What the check must find, for which target, and the edit of a script that makes it.
FAULTS = [
    ("computes in TF32", "sm_80", LINEAR, {', input_precision="ieee"': ""}),
    ("does not compile", "sm_75", LINEAR, CHAPTERS_TILE),
    ("does not compile", "sm_90", LINEAR, CHAPTERS_TILE),
    ("computes in float64", "sm_120", LAYERNORM, FLOAT64),
    ("computes in float64", "gfx942", LAYERNORM, FLOAT64),
    ("spills to local memory", "sm_90", LAYERNORM, {"min(max(BLOCK_N // 512, 1), max_warps)": "1"}),
    ("2048 threads", "gfx942", LAYERNORM, {"16 if torch.version.hip else 32": "32"}),
    ("bytes of shared memory", "sm_90", LINEAR, {TILE: "BLOCK_M=16, BLOCK_N=32, BLOCK_K=256"}),
    (
        "no wrapper launches it",
        "sm_90",
        LINEAR,
        {"    probe_bias_kernel[": "    0 and probe_bias_kernel["},
    ),
]


@pytest.mark.parametrize("fault, target, name, edits", FAULTS)
def test_the_check_finds(fault, target, name, edits, tmp_path):
    source = (ROOT / name).read_text()
    for old, new in edits.items():
        assert old in source
        source = source.replace(old, new)
    path = tmp_path / "edited.py"
    path.write_text(source)
    _, faults = compile_all([path], target)[path]
    assert any(fault in found for found in faults), faults
