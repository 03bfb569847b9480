"""Faults that only a GPU would show, found without one: every kernel compiles for every target, and
what comes out has no TF32, no float64, no spills and no more shared memory than each GPU has.
"""

import pytest
import torch
from compile_check import TARGETS, compile_all
from helpers import (
    INTERPRET,
    ROOT,
    SCRIPTS,
    draw,
    every_script,
    exact_linear_gelu,
    expected_file,
    linear_gelu,
    load,
    triton,
)

LINEAR, LAYERNORM = "chapter20/01_fused_linear_gelu.py", "chapter20/03_fused_layernorm.py"
TILE = "BLOCK_M=16, BLOCK_N=16, BLOCK_K=16"
WARPS = "16 if torch.version.hip else 32"
# What the check must find: its name here, the edit of a script that makes it, target and message.
FAULTS = {
    "printed precision": (LINEAR, ', input_precision="ieee"', "", "sm_80", "computes in TF32"),
    "printed tile": (LINEAR, TILE, "BLOCK_M=8, BLOCK_N=8, BLOCK_K=4", "sm_90", "does not compile"),
    "float64 on NVIDIA": (LAYERNORM, "x - mean", "x - mean.to(tl.float64)", "sm_90", "in float64"),
    "float64 on AMD": (LAYERNORM, "x - mean", "x - mean.to(tl.float64)", "gfx942", "in float64"),
    "registers": (LAYERNORM, WARPS, "4", "sm_90", "spills to local memory"),
    "threads": (LAYERNORM, WARPS, "32", "gfx942", "2048 threads"),
    "shared memory": (LINEAR, "bias).cpu", "bias, BLOCK_K=512).cpu", "sm_90", "of shared memory"),
    "unlaunched": (LINEAR, "probe_bias_kernel[(", "M or probe_bias_kernel[(", "sm_90", "launches"),
}


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """The scripts with a fault each, by its name."""
    paths = {}
    for fault, (script, old, new, *_) in FAULTS.items():
        source = (ROOT / script).read_text()
        assert old in source
        paths[fault] = tmp_path_factory.mktemp("edited") / "edited.py"
        paths[fault].write_text(source.replace(old, new))
    return paths


@pytest.fixture(scope="module")
def results(edited):
    """What gpu_compile.py finds, by script or fault."""
    names = [*SCRIPTS, *FAULTS]
    paths = [*SCRIPTS, *(f"{edited[name]}:{target}" for name, (*_, target, _) in FAULTS.items())]
    return dict(zip(names, compile_all(paths).values(), strict=True))


@pytest.mark.parametrize("target", TARGETS)
@every_script
def test_every_kernel_compiles_without_faults(results, script, target):
    launched, faults = results[script]
    kernels = script.read_text().count("@triton.jit\n")
    assert kernels > 0
    assert len({c.split()[0] for c in launched if c.endswith(f"for {target}")}) == kernels
    assert [fault for fault in faults if f" for {target}: " in fault] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_finds_this_fault(results, fault):
    *_, target, message = FAULTS[fault]
    _, faults = results[fault]
    assert any(f" for {target}: " in found and message in found for found in faults), faults


# --- Two rows of ERRATA.md ---


def test_the_printed_tile_runs_in_the_interpreter_only(edited, results, capsys):
    test_the_check_finds_this_fault(results, "printed tile")
    section = load(edited["printed tile"]).section_20_1
    if INTERPRET and tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3):
        section()
        assert capsys.readouterr().out == expected_file(ROOT / LINEAR).read_text()
    else:
        with pytest.raises(Exception, match="K >= 16"):
            section()


def test_the_default_precision_is_tf32(edited, results):
    test_the_check_finds_this_fault(results, "printed precision")
    x, weight, bias = draw(20, 12), draw(16, 12, seed=1), draw(16, seed=2)
    exact = exact_linear_gelu(x, weight, bias)
    as_printed, ours = (
        (module.fused_linear_gelu(x, weight, bias).cpu() - exact).abs().max().item()
        for module in (load(edited["printed precision"]), linear_gelu)
    )
    assert ours < 5e-6
    if INTERPRET:
        assert as_printed == ours
    elif torch.version.cuda and torch.cuda.get_device_capability() >= (8, 0):
        assert 1e-3 < as_printed < 3e-2
