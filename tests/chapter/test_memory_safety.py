"""No kernel touches memory that is not its own.

Interpreted, watched.py sees each address; on a GPU, guard bands and compute-sanitizer stand in.
"""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import watched
from helpers import (
    DEVICE,
    EPS,
    INTERPRET,
    LAYOUTS,
    assert_close,
    buggy,
    every_script,
    exact_layernorm,
    exact_linear_gelu,
    far_apart,
    interpreted,
    layernorm,
    linear_gelu,
    matrix,
    on_a_gpu,
    row_mean_var,
    sparse,
    vector,
    wrong_eps,
)

GUARD = 4096
BUGGY_BIAS = linear_gelu.fused_linear_gelu_kernel_buggy_bias_axis


def run_linear_gelu(x, weight, bias):
    tile = {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 64}
    return [
        linear_gelu.fused_linear_gelu(x, weight, bias),
        linear_gelu.fused_linear_gelu(x, weight, bias, **tile),
    ]


def run_buggy_bias(x, weight, bias):
    return [linear_gelu.fused_linear_gelu(x, weight, bias, kernel=BUGGY_BIAS)]


def run_row_mean_var(x, weight, bias):
    return [*row_mean_var.row_mean_var(x), *row_mean_var.row_mean_var(x, BLOCK_N=512)]


def run_layernorm(x, weight, bias):
    return [layernorm.triton_layernorm(x, weight[0], weight[0]), wrong_eps(x, weight[0], weight[0])]


every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_shape = pytest.mark.parametrize("M, K, N", [(20, 12, 16), (17, 33, 31), (3, 70, 50)])


@interpreted
@pytest.mark.parametrize("run", [run_linear_gelu, run_row_mean_var, run_layernorm])
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


@pytest.mark.parametrize("run", [run_linear_gelu, run_buggy_bias, run_row_mean_var, run_layernorm])
@every_layout
@every_shape
def test_guard_bands_are_neither_read_nor_written(run, layout, M, K, N, monkeypatch):
    guard = GuardedTorch()
    for module in (linear_gelu, row_mean_var, layernorm):
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
def test_the_buggy_kernel_reads_the_tail_that_it_is_given_and_nothing_else(M, N):
    x, weight, bias = matrix(M, 12, 0), matrix(N, 12, 1), vector(N, 2)
    with watched.record() as launches:
        out = buggy(x, weight, bias, float("nan"))
    # With a tail of NaN exactly the rows that read past the end turn NaN.
    assert out[N:].isnan().all()
    assert not out[:N].isnan().any()
    if INTERPRET:
        (launch,) = launches
        bias = launch.tensors["bias_ptr"]
        elements = (np.unique(launch.read(bias)) - bias.data_ptr()) // 4
        assert elements.tolist() == list(range(M))


@interpreted
@pytest.mark.parametrize("M", [16, 20, 40])
def test_the_probe_reads_what_the_buggy_kernel_reads(M):
    buffer, out = torch.arange(64.0), torch.empty(M)
    with watched.record() as launches:
        linear_gelu.probe_bias_kernel[(1,)](buffer[:16], out, M, BLOCK_M=64)
    (launch,) = launches
    assert (np.sort(launch.read(buffer)) - buffer.data_ptr()).tolist() == list(range(0, 4 * M, 4))
    assert torch.equal(out, buffer[:M])


@interpreted
def test_a_kernel_that_strays_is_caught():
    # The watch itself: one row too many, and rows further apart than x's.
    x = matrix(6, 17, 0, "columns of a wider tensor")
    out, gamma = torch.empty(6, 17), torch.empty(17)
    with pytest.raises(Exception, match="layernorm_forward_kernel writes .* elements that are not"):
        kernel = layernorm.layernorm_forward_kernel
        kernel[(7,)](x, gamma, gamma, out, 7, 17, 0, EPS, BLOCK_N=32)
    with pytest.raises(Exception, match="row_mean_var_kernel reads .* elements that are not"):
        kernel = row_mean_var.row_mean_var_kernel
        kernel[(6,)](x, out, out, 6, 17, x.stride(0) + 17, BLOCK_N=32)


# --- Past 2**31 elements ---


@interpreted
@pytest.mark.parametrize("axis", ["rows of x", "rows of weight", "columns of x", "both columns"])
def test_linear_gelu_past_2_to_the_31(axis):
    x, weight, bias = far_apart(axis)
    out = linear_gelu.fused_linear_gelu(x, weight, bias)
    assert_close(out, exact_linear_gelu(x, weight, bias), 1e-5)
    wrong = x.double() @ weight.double().T + bias.double()[:, None]
    assert_close(buggy(x, weight, bias), torch.nn.functional.gelu(wrong), 1e-5)


@interpreted
def test_rows_past_2_to_the_31():
    x, gamma, beta = matrix(3, 5, 0), vector(5, 1), vector(5, 2)
    x = sparse().as_strided((3, 5), (2**30, 1)).copy_(x)
    mean, var = row_mean_var.row_mean_var(x)
    assert_close(mean, x.double().mean(dim=-1))
    assert_close(var, x.double().var(dim=-1, unbiased=False))
    exact = exact_layernorm(x, gamma, beta, EPS)
    assert_close(layernorm.triton_layernorm(x, gamma, beta), exact, 1e-5)
    assert_close(wrong_eps(x, gamma, beta), exact, 1e-3)  # the wrong eps differs by some 1e-5


@on_a_gpu
def test_tensors_of_more_than_2_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    M, N = 2**21 + 3, 1024 + 1
    x = torch.empty(M, N, device=DEVICE).normal_()
    last = slice(M - 5, M)  # past 2**31
    assert (M - 5) * N > 2**31
    mean, var = row_mean_var.row_mean_var(x)
    assert_close(mean[last], x[last].double().cpu().mean(dim=-1))
    assert_close(var[last], x[last].double().cpu().var(dim=-1, unbiased=False), 1e-5)
    del mean, var
    gamma, beta = vector(N, 1), vector(N, 2)
    for run in (layernorm.triton_layernorm, wrong_eps):
        out = run(x, gamma, beta)
        # Of ordinary rows the wrong eps is wrong by some 1e-5.
        assert_close(out[last], exact_layernorm(x[last], gamma, beta, EPS), 1e-4)
        assert not out.isnan().any()
        del out
    weight, bias = matrix(3, N, 3), vector(3, 4)
    out = linear_gelu.fused_linear_gelu(x, weight, bias)
    assert_close(out[last], exact_linear_gelu(x[last], weight, bias), 1e-3)
    out = linear_gelu.fused_linear_gelu(x, weight, bias, kernel=BUGGY_BIAS)
    assert_close(out[last], exact_linear_gelu(x[last], weight, None), 1e-3)
    # An output of more than 2**31 elements, and a weight.
    zeros = torch.zeros(M, device=DEVICE)
    out = linear_gelu.fused_linear_gelu(x[:, :3], x[:N, 3:6], zeros[:N])
    assert_close(out[last], exact_linear_gelu(x[last, :3], x[:N, 3:6], None), 1e-5)
    del out
    wide = linear_gelu.fused_linear_gelu(x[:5, :2], x[:, :2], zeros, BLOCK_N=64)
    assert_close(wide[:, last], exact_linear_gelu(x[:5, :2], x[last, :2], None), 1e-5)


# --- compute-sanitizer ---


@on_a_gpu
@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="compute-sanitizer is not on the PATH"
)
@pytest.mark.parametrize("tool", ["memcheck", "initcheck"])
@every_script
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
