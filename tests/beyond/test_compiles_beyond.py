"""The kernels of beyond/ compile for each GPU without faults, as the chapter's do."""

import pytest
from compile_check import TARGETS, compile_beyond


@pytest.mark.parametrize(
    "file, target, steps",
    [
        *[("fast_layernorm", target, {"rows", "pieces", "chunks"}) for target in TARGETS],
        *[("fast_linear_gelu", t, {""}) for t in ("sm_75", "sm_80", "sm_120", "gfx942", "gfx1100")],
        ("fast_linear_gelu", "sm_90", {"", "tma", "pingpong"}),
        ("fast_linear_gelu", "sm_100", {"tma"}),
    ],
)
def test_what_lies_beyond_compiles_without_faults(file, target, steps):
    found = compile_beyond(file)[target]
    kernel = file.removeprefix("fast_")  # layernorm_rows_kernel: rows
    names = {name.removeprefix(kernel).removesuffix("kernel").strip("_") for name, *_ in found}
    assert names == steps
    assert [[*launch, fault] for *launch, faults in found for fault in faults] == []
