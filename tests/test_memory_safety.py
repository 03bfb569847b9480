"""No kernel touches memory that is not its own.

Interpreted, watched.py sees each address; on a GPU, guard bands and compute-sanitizer stand in.
"""

import mmap
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import watched
from scripts import (
    DEVICE,
    INTERPRET,
    SCRIPTS,
    complete,
    expected_file,
    layernorm,
    linear_gelu,
    load,
    name_of,
)
from scripts import row_mean_var as mean_var
from test_wrappers import LAYOUTS, assert_close, exact_layernorm, exact_linear_gelu, matrix, vector

interpreted = pytest.mark.skipif(not INTERPRET, reason="on a GPU no kernel can be watched")
on_a_gpu = pytest.mark.skipif(INTERPRET, reason="needs a GPU")

GUARD = 4096
BUGGY_BIAS = linear_gelu.fused_linear_gelu_kernel_buggy_bias_axis
WRONG_EPS = layernorm.layernorm_forward_kernel_wrong_eps


def run_linear_gelu(x, weight, bias):
    return [linear_gelu.fused_linear_gelu(x, weight, bias)]


def run_linear_gelu_with_unequal_tiles(x, weight, bias):
    return [
        linear_gelu.fused_linear_gelu(x, weight, bias, BLOCK_M=32, BLOCK_N=16, BLOCK_K=64),
        complete.fused_linear_gelu(x, weight, bias, BLOCK_M=16, BLOCK_N=64, BLOCK_K=32),
    ]


def run_row_mean_var(x, weight, bias):
    return [*mean_var.row_mean_var(x), *complete.row_mean_var(x, BLOCK_N=512)]


def run_layernorm(x, weight, bias):
    gamma = weight[0]
    return [
        run(x, gamma, gamma, 1e-5, kernel)
        for module, run in (
            (layernorm, layernorm.triton_layernorm),
            (complete, complete._run_layernorm),
        )
        for kernel in (module.layernorm_forward_kernel, module.layernorm_forward_kernel_wrong_eps)
    ]


every_wrapper = pytest.mark.parametrize(
    "run",
    [run_linear_gelu, run_linear_gelu_with_unequal_tiles, run_row_mean_var, run_layernorm],
    ids=lambda run: run.__name__,
)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_shape = pytest.mark.parametrize("M, K, N", [(20, 12, 16), (17, 33, 31), (3, 70, 50)])


@interpreted
@every_wrapper
@every_layout
@every_shape
def test_a_kernel_reads_all_of_its_inputs_and_writes_each_output_once(run, layout, M, K, N):
    x, weight, bias = matrix(M, K, 0, layout), matrix(N, K, 1, layout), vector(N, 2)
    with watched.record() as launches:
        outputs = run(x, weight, bias)
    assert launches
    written = np.concatenate([launch.written() for launch in launches])
    expected = np.concatenate([watched.addresses(out).ravel() for out in outputs])
    assert np.array_equal(np.sort(written), np.sort(expected))
    for launch in launches:
        inputs = [t for t in launch.values() if not any(t is out for out in outputs)]
        expected = np.unique(np.concatenate([watched.addresses(t).ravel() for t in inputs]))
        assert np.array_equal(np.unique(launch.read()), expected)


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_a_scripts_own_run_prints_its_expected_output(script, monkeypatch, capsys):
    # As test_scripts.py has it, but in this process, and so watched where it is interpreted.
    module, expected = load(name_of(script)), expected_file(script).read_text()
    monkeypatch.setattr(sys, "argv", [str(script)])
    module.main()
    assert capsys.readouterr().out == expected
    if hasattr(module, "worked_examples"):
        module.worked_examples()
        expected += capsys.readouterr().out
        monkeypatch.setattr(sys, "argv", [str(script), "--worked-examples"])
        module.main()
        assert capsys.readouterr().out == expected


class GuardedTorch:
    """torch for a wrapper, but that its outputs lie between two bands of a known value."""

    BAND = -12345.0

    def __init__(self):
        self.buffers = []

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, shape, device, dtype):
        shape = (shape,) if isinstance(shape, int) else shape
        size = int(np.prod(shape))
        buffer = torch.full((GUARD + size + GUARD,), self.BAND, device=device, dtype=dtype)
        inside = buffer[GUARD : GUARD + size]
        inside.fill_(float("nan"))
        self.buffers.append(buffer)
        return inside.view(shape)

    def empty_like(self, tensor):
        return self.empty(tuple(tensor.shape), tensor.device, tensor.dtype)

    def check(self):
        assert self.buffers
        for buffer in self.buffers:
            assert not buffer[GUARD:-GUARD].isnan().any(), "an output was not written to its end"
            assert (buffer[:GUARD] == self.BAND).all(), "written before the output"
            assert (buffer[-GUARD:] == self.BAND).all(), "written past the output"


def guarded(values):
    """values, between two bands of NaN."""
    band = values.new_full((GUARD,), float("nan"))
    buffer = torch.cat([band, values.flatten(), band])
    return buffer[GUARD:-GUARD].view(values.shape), buffer


@every_wrapper
@every_layout
@every_shape
def test_guard_bands_are_neither_read_nor_written(run, layout, M, K, N, monkeypatch):
    guard = GuardedTorch()
    for module in (linear_gelu, mean_var, layernorm, complete):
        monkeypatch.setattr(module, "torch", guard)
    plain = matrix(M, K, 0), matrix(N, K, 1), vector(N, 2)
    inputs, buffers = zip(*[guarded(t) for t in plain], strict=True)
    before = [buffer.clone() for buffer in buffers]
    x, weight, bias = inputs
    if layout != "contiguous":
        # LAYOUTS fills what lies between the rows with NaN, too.
        x, weight = LAYOUTS[layout](x), LAYOUTS[layout](weight)
    outputs = run(x, weight, bias)
    guard.check()
    assert not any(out.isnan().any() for out in outputs)
    for buffer, old in zip(buffers, before, strict=True):
        assert torch.equal(buffer.view(torch.int32), old.view(torch.int32))


@pytest.mark.parametrize("M, N", [(20, 16), (33, 1), (17, 16), (16, 16), (5, 40)])
def test_the_buggy_bias_reads_the_tail_that_it_is_given_and_nothing_else(M, N):
    x, weight = matrix(M, 12, 0), matrix(N, 12, 1)
    buffer = torch.full((M + N + GUARD,), float("nan"), device=DEVICE)
    bias = buffer[:N]
    bias.copy_(vector(N, 2))
    with watched.record() as launches:
        out = linear_gelu.fused_linear_gelu(x, weight, bias, kernel=BUGGY_BIAS)
    # With a tail of NaN exactly the rows that read past the end turn NaN.
    assert out[N:].isnan().all()
    assert not out[:N].isnan().any()
    if INTERPRET:
        (launch,) = launches
        elements = (np.unique(launch.read(buffer)) - buffer.data_ptr()) // 4
        assert elements.tolist() == list(range(M))


@interpreted
@pytest.mark.parametrize("M", [16, 20, 40])
def test_the_probe_reads_what_the_buggy_kernel_reads(M):
    buffer = torch.arange(64.0)
    with watched.record() as launches:
        linear_gelu.probe_bias(buffer[:16], M)
    (launch,) = launches
    assert (np.sort(launch.read(buffer)) - buffer.data_ptr()).tolist() == list(range(0, 4 * M, 4))


@interpreted
def test_a_kernel_that_strays_is_caught(monkeypatch):
    # The watch itself: one row too many, and rows further apart than x's.
    x = matrix(6, 17, 0, "columns of a wider tensor")
    out = torch.empty(6, 17)
    with pytest.raises(Exception, match="layernorm_forward_kernel writes .* elements that are not"):
        layernorm.layernorm_forward_kernel[(7,)](x, None, None, out, 7, 17, 0, 1e-5, BLOCK_N=32)
    with pytest.raises(Exception, match="row_mean_var_kernel reads .* elements that are not"):
        mean_var.row_mean_var_kernel[(6,)](x, out, out, 6, 17, x.stride(0) + 17, BLOCK_N=32)


# --- Past 2**31 elements ---


@pytest.fixture(scope="module")
def sparse():
    """3 * 2**30 float32 on the CPU: zeros that take no memory until they are written."""
    size = 3 * 2**30 * 4
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return torch.frombuffer(pages, dtype=torch.float32)


def far_apart(sparse, axis):
    """x, weight and bias, of which a 32-bit offset of the third row or column would be negative."""
    x, weight, bias = matrix(3, 3, 0), matrix(3, 3, 1), vector(3, 2)
    far = sparse.as_strided((3, 3), (2**30, 1))
    if axis == "rows of x":
        x = far.copy_(x)
    elif axis == "rows of weight":
        weight = far.copy_(weight)
    elif axis == "columns of x":
        x = far.T.copy_(x)
    elif axis == "both columns":
        x, weight = far.T.copy_(x), far.T
    return x, weight, bias


@interpreted
@pytest.mark.parametrize("axis", ["rows of x", "rows of weight", "columns of x", "both columns"])
def test_linear_gelu_past_2_to_the_31(sparse, axis):
    x, weight, bias = far_apart(sparse, axis)
    for run in (linear_gelu.fused_linear_gelu, complete.fused_linear_gelu):
        assert_close(run(x, weight, bias), exact_linear_gelu(x, weight, bias), 1e-5)
    buggy = linear_gelu.fused_linear_gelu(x, weight, bias, kernel=BUGGY_BIAS)
    wrong = x.double() @ weight.double().T + bias.double()[:, None]
    assert_close(buggy, torch.nn.functional.gelu(wrong), 1e-5)


@interpreted
def test_rows_past_2_to_the_31(sparse):
    x = sparse.as_strided((3, 5), (2**30, 1)).copy_(matrix(3, 5, 0))
    for module in (mean_var, complete):
        mean, var = module.row_mean_var(x)
        assert_close(mean, x.double().mean(dim=-1))
        assert_close(var, x.double().var(dim=-1, unbiased=False))
    for out in run_layernorm(x, matrix(1, 5, 1) * 0 + 1, None):
        exact = exact_layernorm(x, None, x.new_ones(5), 1e-5)
        assert_close(out, exact, 1e-3)  # the wrong eps differs by some 1e-5


@on_a_gpu
def test_tensors_of_more_than_2_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    M, N = 2**21 + 3, 1024 + 1
    x = torch.empty(M, N, device=DEVICE).normal_()
    last = slice(M - 5, M)  # past 2**31
    assert (M - 5) * N > 2**31
    for module in (mean_var, complete):
        mean, var = module.row_mean_var(x)
        assert_close(mean[last], x[last].double().cpu().mean(dim=-1))
        assert_close(var[last], x[last].double().cpu().var(dim=-1, unbiased=False), 1e-5)
        del mean, var
    gamma, beta = vector(N, 1), vector(N, 2)
    for run in (
        lambda: layernorm.triton_layernorm(x, gamma, beta),
        lambda: complete._run_layernorm(x, gamma, beta, 1e-5, complete.layernorm_forward_kernel),
        # Of ordinary rows the wrong eps is wrong by some 1e-5.
        lambda: layernorm.triton_layernorm(x, gamma, beta, 1e-5, WRONG_EPS),
        lambda: complete._run_layernorm(
            x, gamma, beta, 1e-5, complete.layernorm_forward_kernel_wrong_eps
        ),
    ):
        out = run()
        assert_close(out[last], exact_layernorm(x[last], gamma, beta, 1e-5), 1e-4)
        assert not out.isnan().any()
        del out
    weight, bias = matrix(3, N, 3), vector(3, 4)
    for run in (linear_gelu.fused_linear_gelu, complete.fused_linear_gelu):
        out = run(x, weight, bias)
        assert_close(out[last], exact_linear_gelu(x[last], weight, bias), 1e-3)
        del out
    # An output of more than 2**31 elements, and a weight.
    out = linear_gelu.fused_linear_gelu(x[:, :3], x[:N, 3:6], None)
    assert_close(out[last], exact_linear_gelu(x[last, :3], x[:N, 3:6], None), 1e-5)
    del out
    wide = linear_gelu.fused_linear_gelu(x[:5, :2], x[:, :2], None, BLOCK_N=64)
    assert_close(wide[:, last], exact_linear_gelu(x[:5, :2], x[last, :2], None), 1e-5)
    buffer = torch.zeros(M, device=DEVICE)
    buffer[:3] = bias
    out = linear_gelu.fused_linear_gelu(x, weight, buffer[:3], kernel=BUGGY_BIAS)
    assert_close(out[last], exact_linear_gelu(x[last], weight, None), 1e-3)


# --- compute-sanitizer ---


@on_a_gpu
@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on the PATH"
)
@pytest.mark.parametrize("tool", ["memcheck", "initcheck"])
@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_compute_sanitizer_finds_nothing(script, tool):
    options = [] if script.name.startswith("04") else ["--worked-examples"]
    result = subprocess.run(
        ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        + [sys.executable, script, *options],
        # Without torch's caching allocator each tensor is an allocation of its own.
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "ERROR SUMMARY: 0 errors" in result.stdout + result.stderr
