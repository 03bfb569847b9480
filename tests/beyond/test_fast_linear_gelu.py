"""beyond/fast_linear_gelu.py: each step's values against float64, and when it is taken."""

import math

import helpers
import numpy as np
import pytest
import torch
import watched
from helpers import DEVICE, INTERPRET, LAYOUTS, interpreted, load, matrix, on_a_gpu, vector
from torch.nn.functional import gelu, linear, pad

fast = load("beyond/fast_linear_gelu.py")
fast_linear_gelu, choose = fast.fast_linear_gelu, fast.choose
NUMBERS = [torch.float32, torch.float16, torch.bfloat16]
# bfloat16 is interpreted as float32.
every_dtype = pytest.mark.parametrize("dtype", NUMBERS[: 2 if INTERPRET else 3], ids=str)
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def assert_right(out, x, weight, bias=None, factor=1.0):
    wanted = linear(x.double().cpu(), weight.double().cpu())
    wanted = gelu(wanted if bias is None else wanted + bias.double().cpu())
    assert out.shape == wanted.shape and out.dtype == x.dtype and out.device == x.device
    assert out.is_contiguous() and not out.requires_grad
    tolerance = ROUNDING[x.dtype] * factor
    torch.testing.assert_close(out.double().cpu(), wanted, rtol=tolerance, atol=tolerance)


def inputs(M, K, N, dtype=torch.float32):
    weight = matrix(N, K, 1) / math.sqrt(max(K, 1))
    return [t.to(dtype) for t in (matrix(M, K, 0), weight, vector(N, 2))]


# --- The steps ---


@pytest.fixture(autouse=True)
def pointers(monkeypatch):
    """The step of small matrices; more than one group of tiles even in those interpreted."""
    if INTERPRET:
        monkeypatch.setattr(fast, "GROUP_M", 2)
    monkeypatch.setattr(fast, "_launches", {})
    choose.cache_clear()  # what was chosen for another GPU
    yield
    choose.cache_clear()


CAPABILITY = (0, 0)
if not INTERPRET and not torch.version.hip:
    CAPABILITY = torch.cuda.get_device_capability()
needs_hopper = pytest.mark.skipif(CAPABILITY[0] != 9, reason="needs an NVIDIA GPU of capability 9")


@pytest.fixture
def descriptors(monkeypatch):
    """Has linear_gelu_tma_kernel taken for small matrices, too, and interpreted."""
    if fast.TensorDescriptor is None or not (INTERPRET or CAPABILITY[0] in (9, 10)):
        pytest.skip("needs a newer Triton, or an NVIDIA GPU of capability 9 or 10")
    monkeypatch.setattr(fast, "gpu", lambda device: ((10, 0), 1))  # one SM: many tiles for each


@pytest.fixture
def pingpong(monkeypatch):
    """Has linear_gelu_pingpong_kernel taken for all that has descriptors, as for large matrices."""
    monkeypatch.setattr(fast, "choose", lambda M, N, *rest: choose(2**20, 2**20, *rest))


every_step = pytest.mark.parametrize(
    "step", ["pointers", "descriptors", pytest.param("pingpong", marks=needs_hopper)]
)


def assert_right_by(kernel, x, weight, bias):
    """With and without bias; interpreted, by this kernel, which reads the inputs and writes the
    output, each value of it, and nothing else.
    """
    for b in (bias, None):
        with watched.record() as made:
            out = fast_linear_gelu(x, weight, b)
        assert_right(out, x, weight, b)
        if INTERPRET:
            (launch,) = made
            assert launch.name == kernel
            read = [watched.addresses(t).ravel() for t in (x, weight, b) if t is not None]
            written = watched.addresses(out).ravel()
            assert np.array_equal(np.unique(launch.read()), np.unique(np.concatenate(read)))
            assert np.array_equal(np.unique(launch.written()), np.sort(written))


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values(dtype, layout):
    x, weight, bias = inputs(70, 40, 33, dtype)
    assert_right_by("linear_gelu_kernel", LAYOUTS[layout](x), LAYOUTS[layout](weight), bias)


@every_dtype
def test_values_with_descriptors(descriptors, dtype):
    x, weight, bias = inputs(150, 100, 264, dtype)
    # Rows in a wider tensor of NaN, with a step of 16 bytes.
    x, weight = (pad(t, (8, 12), value=math.nan)[:, 8:-12] for t in (x, weight))
    assert_right_by("linear_gelu_tma_kernel", x, weight, bias)


def test_a_triton_that_was_not_tried_takes_no_gluon(descriptors, monkeypatch):
    monkeypatch.setattr(fast, "gpu", lambda device: ((9, 0), 1))
    monkeypatch.setattr(fast, "TRIED", False)
    assert_right_by("linear_gelu_tma_kernel", *inputs(130, 64, 128, torch.float16))


@pytest.mark.parametrize("which", ["x", "weight", "output", "triton"])
def test_what_takes_no_descriptor_takes_pointers(descriptors, monkeypatch, which):
    x, weight, bias = inputs(130, 64, 130 if which == "output" else 128)
    wider = LAYOUTS["columns of a wider tensor"]
    x, weight = wider(x) if which == "x" else x, wider(weight) if which == "weight" else weight
    if which == "triton":
        monkeypatch.setattr(fast, "TensorDescriptor", None)
    assert_right_by("linear_gelu_kernel", x, weight, bias)


@pytest.mark.parametrize(
    "shape, strides, offset, takes",
    [
        ((64, 64), (64, 1), 0, True),
        ((64, 61), (64, 1), 4, True),
        ((64, 64), (64, 1), 1, False),
        ((64, 62), (62, 1), 0, False),
        ((64, 32), (64, 2), 0, False),
        ((64, 64), (1, 64), 0, False),
        ((64, 64), (0, 1), 0, False),
        ((64, 0), (64, 1), 0, False),
        ((64, 64), (4, 1), 0, False),
        ((2**31, 4), (4, 1), 0, False),
    ],
)
def test_what_takes_descriptors(shape, strides, offset, takes):
    buffer = torch.empty(2**33 + 8, device="meta")
    assert fast.takes_tma(buffer.as_strided(shape, strides, offset)) == takes


# Tiles: 1, 2, an odd number, as many as programs, more; blocks of K: 1, up to the ring's 6, more.
SIZES = [(1, 8, 8), (128, 64, 128), (129, 72, 128), (300, 320, 264), (384, 384, 128)]
SIZES += [(500, 392, 904), (640, 448, 640), (2000, 1000, 1000), (304, 4096, 528)]


@needs_hopper
@pytest.mark.parametrize("dtype", NUMBERS[1:], ids=str)
@pytest.mark.parametrize("sms", [1, 2, 3, 132])
@pytest.mark.parametrize("M, K, N", SIZES)
def test_values_of_the_pingpong_kernel(pingpong, monkeypatch, M, K, N, sms, dtype):
    monkeypatch.setattr(fast, "gpu", lambda device: ((9, 0), sms))
    x, weight, bias = inputs(M, K, N, dtype)
    for b in (bias, None):
        out = fast_linear_gelu(x, weight, b)
        assert_right(out, x, weight, b)
        # A race between producer and consumers would show as values that come and go.
        assert all(torch.equal(out, fast_linear_gelu(x, weight, b)) for _ in range(20))


@needs_hopper
@pytest.mark.parametrize("K", [1, 200])
def test_the_pingpong_kernel_reads_no_further_than_its_tensors(pingpong, K):
    x, weight, bias = inputs(500, K, 264, torch.float16)
    right = 16 + -K % 8  # rows in steps of 16 bytes
    wide = [pad(t, (8, right, 3, 3), value=math.nan) for t in (x, weight)]
    x, weight = (t[3:-3, 8:-right] for t in wide)
    assert_right(fast_linear_gelu(x, weight, bias), x, weight, bias)


# --- Shapes ---


@pytest.mark.parametrize("shape", [(), (5,), (1, 1), (2, 3, 4), (2, 1, 3, 2)], ids=str)
def test_leading_dimensions(shape):
    x = matrix(math.prod(shape), 24, 0).view(*shape, 24)[..., ::2]  # one stride apart: not copied
    weight, bias = matrix(7, 12, 1), vector(7, 2)
    assert_right_by("linear_gelu_kernel", x, weight, bias)
    assert_right_by("linear_gelu_kernel", x, weight[0], bias[0])


@pytest.mark.parametrize(
    "x, weight",
    [((0, 5), (3, 5)), ((4, 0, 5), (3, 5)), ((5, 0), (3, 0)), ((5, 3), (0, 3)), ((0,), (3, 0))],
    ids=str,
)
def test_empty(x, weight):
    x, weight, bias = (torch.full(shape, 0.7, device=DEVICE) for shape in (x, weight, weight[:1]))
    assert_right(fast_linear_gelu(x, weight, bias), x, weight, bias)
    assert_right(fast_linear_gelu(x, weight), x, weight)


# --- Extreme values ---


@every_step
def test_nan_and_infinity_stay_in_their_rows_and_columns(step, request):
    request.getfixturevalue(step)
    for dtype in NUMBERS[step == "pingpong" :]:
        x, weight, bias = (t.abs() for t in inputs(140, 32, 136, dtype))
        x[3, 5], x[7, 1], x[9, 1] = math.nan, math.inf, -math.inf
        weight[4, 2] = math.nan
        bias[6], bias[8] = math.inf, math.nan
        out = fast_linear_gelu(x, weight, bias)
        wanted = gelu(linear(x.double(), weight.double(), bias.double()))
        # torch's own GELU of -inf is NaN on a GPU and on the CPU -0: -inf * 0 is NaN, and so ours.
        assert out[9].isnan().all()
        rows = torch.arange(140) != 9
        assert torch.equal(out.isnan()[rows], wanted.isnan()[rows])
        assert torch.equal(out.isposinf()[rows], wanted.isposinf()[rows])
        assert out[rows].isfinite().sum() == (140 - 3) * (136 - 3)


@every_step
@pytest.mark.parametrize("dtype", NUMBERS[1:], ids=str)
def test_gelu_of_every_number(step, dtype, request):
    """Within one unit in the last place, plus 1e-6, of the exact value."""
    request.getfixturevalue(step)
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = x[x.isfinite()].view(-1, 64)
    out = fast_linear_gelu(x.to(DEVICE), torch.eye(64, dtype=dtype, device=DEVICE)).double().cpu()
    x = x.double()
    wanted = x * 0.5 * torch.erfc(-x / math.sqrt(2))
    digits, smallest = (7, -126) if dtype == torch.bfloat16 else (10, -14)
    exponent = wanted.abs().clamp_min(2.0**smallest).log2().floor()
    assert ((out - wanted).abs() <= (exponent - digits).exp2() + 1e-6).all()


@every_step
def test_a_sum_past_float16(step, request):
    request.getfixturevalue(step)
    x, weight = (matrix(200, 64, 0) / 6e4).half(), torch.full((136, 64), 6e4, device=DEVICE).half()
    x[0], x[1] = 6e4, -6e4
    out = fast_linear_gelu(x, weight)
    assert out[0].isposinf().all() and not out[1].any() and out[2:].isfinite().all()


@interpreted
@pytest.mark.parametrize("axis", ["rows of x", "rows of weight", "columns of x", "steps"])
def test_past_2_to_the_31(axis):
    x, weight, bias = helpers.far_apart(axis)
    if axis == "steps":  # a whole BLOCK_K of columns, 2**26 apart
        x = helpers.sparse().as_strided((3, 40), (1, 2**26)).copy_(matrix(3, 40, 0))
        weight = x
    assert_right(fast_linear_gelu(x, weight, bias), x, weight, bias, factor=5)


@on_a_gpu
@pytest.mark.parametrize("K", [16, 17], ids=["descriptors", "pointers"])
def test_tensors_of_more_than_2_to_the_31_elements(K):
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of GPU memory")
    M = 2**31 // K + 130
    x = torch.empty(M, K, device=DEVICE, dtype=torch.float16).normal_()
    last = slice(M - 140, M)  # past 2**31
    few = x[:40].clone()  # enough rows for descriptors
    assert_right(fast_linear_gelu(x, few)[last], x[last], few)
    wide = fast_linear_gelu(few, x)
    assert_right(wide[:, last].contiguous(), few, x[last])
    del wide
    many = x[: 2**31 // 2**15 + 130].clone()
    out = fast_linear_gelu(many, x[: 2**15])
    assert out.numel() > 2**31
    assert_right(out[-140:], many[-140:], x[: 2**15])


@on_a_gpu
@pytest.mark.parametrize("M", [16, 256, 4096])
@pytest.mark.parametrize("K", [64, 1024, 8192])
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_error_is_at_most_a_twentieth_above_torchs(M, K, dtype):
    assert not torch.backends.cuda.matmul.allow_tf32  # eager is to compute in float32
    x, weight, bias = inputs(M, K, 1024, dtype)
    wanted = gelu(linear(x.double(), weight.double(), bias.double()))
    eager, ours = (
        ((out.double() - wanted).norm() / wanted.norm()).item()
        for out in (gelu(linear(x, weight, bias)), fast_linear_gelu(x, weight, bias))
    )
    assert ours <= (max(3e-7, eager) if dtype == torch.float32 else 1.05 * eager)
