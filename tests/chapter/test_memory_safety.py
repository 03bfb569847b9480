"""No kernel touches memory that is not its own.

Interpreted, watched.py sees each address; on a GPU, guard bands and compute-sanitizer stand in.
"""

import os
import shutil
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
import watched
from helpers import (
    DEVICE,
    EPS,
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

GUARD, NAN = 4096, float("nan")
BUGGY_BIAS = linear_gelu.fused_linear_gelu_kernel_buggy_bias_axis


def run_linear_gelu(x, weight, bias):
    tile = {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 64}
    run = linear_gelu.fused_linear_gelu
    return [run(x, weight, bias), run(x, weight, bias, **tile)]


def run_buggy_bias(x, weight, bias):
    return [linear_gelu.fused_linear_gelu(x, weight, bias, kernel=BUGGY_BIAS)]


def run_row_mean_var(x, weight, bias):
    return [*row_mean_var.row_mean_var(x), *row_mean_var.row_mean_var(x, BLOCK_N=512)]


def run_layernorm(x, weight, bias):
    return [layernorm.triton_layernorm(x, weight[0], weight[0]), wrong_eps(x, weight[0], weight[0])]


every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@interpreted
@pytest.mark.parametrize("run", [run_linear_gelu, run_row_mean_var, run_layernorm])
@every_layout
@pytest.mark.parametrize("M, K, N", [(20, 12, 16), (17, 70, 31)])
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


def guarded(values, band):
    """values between two bands of a number, and the buffer of all that."""
    band = values.new_full((GUARD,), band)
    buffer = torch.cat([band, values.flatten(), band])
    return buffer[GUARD:-GUARD].view(values.shape), buffer


@pytest.mark.parametrize("run", [run_linear_gelu, run_buggy_bias, run_row_mean_var, run_layernorm])
@every_layout
def test_guard_bands_are_neither_read_nor_written(run, layout, monkeypatch):
    made = []

    def empty(shape, device, dtype):  # without either, torch's defaults would decide
        assert (device.type, dtype) == (DEVICE, torch.float32)
        inside = torch.full(np.atleast_1d(shape).tolist(), NAN, device=device, dtype=dtype)
        out, buffer = guarded(inside, -12345.0)
        made.append(buffer)
        return out

    guarded_torch = types.SimpleNamespace(**vars(torch) | {"empty": empty})
    for module in (linear_gelu, row_mean_var, layernorm):
        monkeypatch.setattr(module, "torch", guarded_torch)
    plain = matrix(33, 21, 0), matrix(17, 21, 1), vector(17, 2)
    (x, weight, bias), buffers = zip(*[guarded(t, NAN) for t in plain], strict=True)
    before = [buffer.clone() for buffer in buffers]
    if layout != "contiguous":
        # LAYOUTS fills what lies between the rows with NaN, too.
        x, weight = LAYOUTS[layout](x), LAYOUTS[layout](weight)
    outputs = run(x, weight, bias)
    assert made and not any(out.isnan().any() for out in outputs)
    for buffer in made:
        assert (buffer[:GUARD] == -12345.0).all(), "written before the output"
        assert (buffer[-GUARD:] == -12345.0).all(), "written past the output"
    for buffer, old in zip(buffers, before, strict=True):
        assert torch.equal(buffer.view(torch.int32), old.view(torch.int32))


@interpreted
def test_a_read_between_the_rows_is_caught():
    # The watch itself: what lies between a view's rows is not the view's.
    x, out = matrix(6, 17, 0, "columns of a wider tensor"), torch.empty(6)
    with pytest.raises(Exception, match="reads 1 elements that are not its own"):
        row_mean_var.row_mean_var_kernel[(6,)](x, out, out, 6, 18, x.stride(0), BLOCK_N=32)


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
    gamma, beta = vector(N, 1), vector(N, 2)
    for run in (layernorm.triton_layernorm, wrong_eps):  # they differ by some 1e-5
        out = run(x, gamma, beta)
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
