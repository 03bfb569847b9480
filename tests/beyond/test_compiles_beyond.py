"""The kernels of beyond/ compile for each GPU without faults, as the chapter's do."""

import pytest
from compile_check import compile_beyond

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
