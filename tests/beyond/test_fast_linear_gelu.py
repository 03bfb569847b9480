"""beyond/fast_linear_gelu.py: its values against float64, what it refuses, what it launches."""

import math
import types

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import watched
from helpers import (
    DEVICE,
    INTERPRET,
    LAYOUTS,
    far_apart,
    interpreted,
    load,
    matrix,
    on_a_gpu,
    sparse,
    vector,
)
from torch.nn.functional import gelu, linear

NAME = "beyond/fast_linear_gelu.py"
fast = load(NAME)
fast_linear_gelu, choose = fast.fast_linear_gelu, fast.choose
TMA = fast.linear_gelu_tma_kernel
PLAIN = fast.linear_gelu_kernel
PINGPONG = fast.linear_gelu_pingpong_kernel
NUMBERS = [torch.float32, torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", NUMBERS, ids=str)
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}


def exact(x, weight, bias=None):
    x, weight, bias = (t if t is None else t.double().cpu() for t in (x, weight, bias))
    out = gelu(linear(x, weight))
    return out if bias is None else gelu(linear(x, weight) + bias)


def assert_right(out, x, weight, bias=None, factor=1.0):
    wanted = exact(x, weight, bias)
    assert out.shape == wanted.shape and out.dtype == x.dtype and out.device == x.device
    assert out.is_contiguous() and not out.requires_grad
    tolerance = ROUNDING[x.dtype] * factor
    torch.testing.assert_close(out.double().cpu(), wanted, rtol=tolerance, atol=tolerance)


def inputs(M, K, N, dtype=torch.float32):
    weight = matrix(N, K, 1) / math.sqrt(max(K, 1))
    return [t.to(dtype) for t in (matrix(M, K, 0), weight, vector(N, 2))]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """More than one group of tiles even in the small matrices that are interpreted."""
    if INTERPRET:
        monkeypatch.setattr(fast, "GROUP_M", 2)
    monkeypatch.setattr(fast, "_launches", {})
    choose.cache_clear()
    yield
    choose.cache_clear()


def capability_of_this_gpu():
    return (0, 0) if INTERPRET or torch.version.hip else torch.cuda.get_device_capability()


@pytest.fixture
def descriptors(monkeypatch):
    """Has the wrapper take linear_gelu_tma_kernel for small matrices, too, and interpreted."""
    if not INTERPRET and capability_of_this_gpu()[0] not in (9, 10):
        pytest.skip("needs an NVIDIA GPU of capability 9 or 10")
    monkeypatch.setattr(fast, "gpu", lambda device: ((10, 0), 1))  # one SM: many tiles for each


needs_hopper = pytest.mark.skipif(
    capability_of_this_gpu()[0] != 9, reason="needs an NVIDIA GPU of capability 9"
)


@pytest.fixture
def pingpong(monkeypatch):
    """Has the wrapper take linear_gelu_pingpong_kernel for all that has descriptors."""

    def as_for_many_rows(M, N, *rest):
        kernel, most, options = choose(2**20, N, *rest)
        return kernel, min(most, triton.cdiv(M, 128) * triton.cdiv(N, 128)), options

    monkeypatch.setattr(fast, "choose", as_for_many_rows)


@pytest.fixture
def launches(monkeypatch):
    """What the wrapper would launch: (kernel, programs, arguments, options)."""
    made = []
    monkeypatch.setattr(fast, "launch", lambda device, *launch: made.append(launch))
    return made


# --- Values ---


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
            if x.dtype != torch.bfloat16:  # which is interpreted as float32, in copies
                inputs = [watched.addresses(t).ravel() for t in (x, weight, b) if t is not None]
                assert np.array_equal(np.unique(launch.read()), np.unique(np.concatenate(inputs)))
                written = np.unique(launch.written())
                assert np.array_equal(written, np.sort(watched.addresses(out).ravel()))


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values(dtype, layout):
    x, weight, bias = inputs(70, 40, 33, dtype)
    assert_right_by("linear_gelu_kernel", LAYOUTS[layout](x), LAYOUTS[layout](weight), bias)


@every_dtype
def test_values_with_descriptors(descriptors, dtype):
    x, weight, bias = inputs(150, 100, 264, dtype)
    # Rows in a wider tensor of NaN, with a step of 16 bytes.
    x, weight = (torch.nn.functional.pad(t, (8, 12), value=math.nan)[:, 8:-12] for t in (x, weight))
    assert_right_by("linear_gelu_tma_kernel", x, weight, bias)


@pytest.mark.parametrize("which", ["x", "weight", "output"])
def test_what_takes_no_descriptor_takes_pointers(descriptors, which):
    x, weight, bias = inputs(130, 64, 130 if which == "output" else 128)
    wider = LAYOUTS["columns of a wider tensor"]
    x, weight = wider(x) if which == "x" else x, wider(weight) if which == "weight" else weight
    assert_right_by("linear_gelu_kernel", x, weight, bias)


# Tiles: 1, 2, an odd number, as many as programs, more; blocks of K: 1, up to the ring's 6, more.
@needs_hopper
@pytest.mark.parametrize("dtype", NUMBERS[1:], ids=str)
@pytest.mark.parametrize("sms", [1, 2, 3, 132])
@pytest.mark.parametrize(
    "M, K, N",
    [
        (1, 8, 8),
        (128, 64, 128),
        (129, 72, 128),
        (300, 320, 264),
        (384, 384, 128),
        (500, 392, 904),
        (640, 448, 640),
        (2000, 1000, 1000),
        (304, 4096, 528),
    ],
)
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
    wide = [torch.nn.functional.pad(t, (8, right, 3, 3), value=math.nan) for t in (x, weight)]
    x, weight = (t[3:-3, 8:-right] for t in wide)
    assert_right(fast_linear_gelu(x, weight, bias), x, weight, bias)


@needs_hopper
def test_a_sum_past_float16(pingpong):
    x, weight = matrix(200, 64, 0).half(), torch.ones(136, 64, device=DEVICE).half()
    x[0], x[1] = 60000, -60000
    out = fast_linear_gelu(x, weight)
    assert out[0].isposinf().all() and not out[1].any() and out[2:].isfinite().all()


@pytest.mark.parametrize("shape", [(), (5,), (1, 1), (2, 3, 4), (2, 1, 3, 2)], ids=str)
def test_leading_dimensions(shape):
    x, weight, bias = (
        matrix(math.prod(shape), 12, 0).view(*shape, 12),
        matrix(7, 12, 1),
        vector(7, 2),
    )
    assert_right(fast_linear_gelu(x, weight, bias), x, weight, bias)
    assert_right(fast_linear_gelu(x, weight[0], bias[0]), x, weight[0], bias[0])
    assert_right(fast_linear_gelu(x, weight[0]), x, weight[0])


@pytest.mark.parametrize(
    "x, weight, bias",
    [
        ((0, 5), (3, 5), 3),
        ((4, 0, 5), (3, 5), 3),
        ((5, 0), (3, 0), 3),
        ((5, 3), (0, 3), 0),
        ((0,), (3, 0), 3),
        ((0, 0), (0, 0), 0),
    ],
    ids=str,
)
def test_empty(x, weight, bias):
    x, weight, bias = (torch.ones(shape, device=DEVICE) * 0.7 for shape in (x, weight, (bias,)))
    assert_right(fast_linear_gelu(x, weight, bias), x, weight, bias)
    assert_right(fast_linear_gelu(x, weight), x, weight)


def test_only_what_the_kernel_cannot_take_is_copied(launches):
    x, weight, bias = matrix(24, 12, 0).view(2, 3, 4, 12), matrix(16, 12, 1), vector(16, 2, True)
    fast_linear_gelu(x[:, :, :, ::2], weight.T.contiguous().T[:, ::2], bias)  # leads are 1 stride
    fast_linear_gelu(x.transpose(0, 1), weight, vector(16, 2))
    taken, copied = (arguments for _, _, arguments, _ in launches)
    assert taken[0].data_ptr() == x.data_ptr() and taken[0].stride() == (12, 2)
    assert taken[1].stride() == (1, 32)
    assert taken[2].is_contiguous() and torch.equal(taken[2], bias)
    assert copied[0].stride() == (12, 1) and copied[1].data_ptr() == weight.data_ptr()


STEPS = [
    "small_groups",
    "descriptors",
    pytest.param("pingpong", marks=needs_hopper),
]


@pytest.mark.parametrize("step", STEPS)
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
        assert torch.equal(out[9].isnan(), torch.ones(136, dtype=torch.bool, device=DEVICE))
        rows = torch.arange(140) != 9
        assert torch.equal(out.isnan()[rows], wanted.isnan()[rows])
        assert torch.equal(out.isposinf()[rows], wanted.isposinf()[rows])
        assert out[rows].isfinite().sum() == (140 - 3) * (136 - 3)


# --- The GELU alone ---


@triton.jit
def half_gelu_kernel(x_ptr, out_ptr, n, GELU: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < n, other=0.0)
    tl.store(out_ptr + index, fast.half_gelu(x * 0.5, GELU), mask=index < n)


def half_gelu(x):
    """float32 in and out, as the kernels apply it to their sums."""
    out = torch.empty_like(x)
    GELU = "exp2" if INTERPRET or torch.version.hip else "ptx"
    half_gelu_kernel[(triton.cdiv(len(x), 4096),)](x, out, len(x), GELU=GELU, BLOCK=4096)
    return out


def every_number_up_to_10(dtype):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    x = x[x.isfinite() & (x.abs() <= 10)]
    assert len(x) > 30000
    return x.to(DEVICE)


def assert_gelu_right(out, x):
    """Within one unit in the last place, plus 1e-6, of the exact value."""
    digits, smallest = (7, -126) if x.dtype == torch.bfloat16 else (10, -14)
    out, x = out.double().cpu(), x.double().cpu()
    wanted = x * 0.5 * torch.erfc(-x / math.sqrt(2))
    exponent = wanted.abs().clamp_min(2.0**smallest).log2().floor()
    assert ((out - wanted).abs() <= (exponent - digits).exp2() + 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_gelu_of_every_number_up_to_10(dtype):
    x = every_number_up_to_10(dtype)
    assert_gelu_right(half_gelu(x.float()).cpu().to(dtype), x)


@needs_hopper
@pytest.mark.parametrize("dtype", NUMBERS[1:], ids=str)
def test_the_pingpong_kernel_of_every_number_up_to_10(pingpong, dtype):
    x = every_number_up_to_10(dtype)
    first = torch.nn.functional.pad(x[:, None], (0, 7))  # all but the first column is 0
    out = fast_linear_gelu(first, torch.ones(8, 8, device=DEVICE, dtype=dtype))
    assert torch.equal(out, out[:, :1].expand_as(out))
    assert_gelu_right(out[:, 0], x)


def test_half_gelu_far_out():
    x = torch.tensor([math.nan, -math.inf, math.inf, 3e38, 50.0, 0.0, -0.0, -50.0, -1e30, -3e38])
    out = half_gelu(x.to(DEVICE)).cpu()
    assert out[:2].isnan().all()
    assert torch.equal(out[2:], x[2:].clamp_min(0))


# --- Memory ---


@interpreted
@pytest.mark.parametrize("axis", ["rows of x", "rows of weight", "columns of x", "steps"])
def test_past_2_to_the_31(axis):
    x, weight, bias = far_apart(axis)
    if axis == "steps":  # a whole BLOCK_K of columns, 2**26 apart
        x = sparse().as_strided((3, 40), (1, 2**26)).copy_(matrix(3, 40, 0))
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


# --- Accuracy on a GPU ---


def error(out, wanted):
    return ((out.double() - wanted).norm() / wanted.norm()).item()


@on_a_gpu
@pytest.mark.parametrize("M", [16, 256, 4096])
@pytest.mark.parametrize("K", [64, 1024, 8192])
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_error(M, K, dtype):
    assert not torch.backends.cuda.matmul.allow_tf32  # eager is to compute in float32
    x, weight, bias = inputs(M, K, 1024, dtype)
    wanted = gelu(linear(x.double(), weight.double(), bias.double()))
    eager = error(gelu(linear(x, weight, bias)), wanted)
    ours = error(fast_linear_gelu(x, weight, bias), wanted)
    assert ours <= (max(3e-7, eager) if dtype == torch.float32 else 1.05 * eager)


# --- Which step is taken ---


@pytest.mark.parametrize(
    "dtype, changed, step",
    [
        (torch.float16, {"TRIED": True}, PINGPONG),
        (torch.float16, {"TRIED": False}, TMA),  # a Triton on which Gluon was not tried
        (torch.float32, {"TRIED": True}, TMA),
        (torch.float16, {"TensorDescriptor": None}, PLAIN),  # an older one
    ],
)
def test_the_step_of_a_large_matrix_on_hopper(launches, monkeypatch, dtype, changed, step):
    monkeypatch.setattr(fast, "gpu", lambda device: ((9, 0), 3))
    for name, value in changed.items():
        monkeypatch.setattr(fast, name, value)
    fast_linear_gelu(*inputs(1280, 64, 128, dtype))
    assert [kernel for kernel, *_ in launches] == [step]


@pytest.mark.parametrize(
    "capability, dtype, precision, gelus",
    [
        ((9, 0), torch.float32, "tf32x3", "erf"),
        ((8, 0), torch.float32, "tf32x3", "erf"),
        ((7, 5), torch.float32, "ieee", "erf"),
        ((0, 0), torch.float32, "ieee", "erf"),
        ((9, 0), torch.float16, "ieee", "exp2" if INTERPRET else "ptx"),
        ((0, 0), torch.float16, "ieee", "exp2"),
    ],
)
def test_precision_and_gelu(launches, monkeypatch, capability, dtype, precision, gelus):
    monkeypatch.setattr(fast, "gpu", lambda device: (capability, 132))
    fast_linear_gelu(*inputs(20, 12, 16, dtype))
    ((_, _, _, options),) = launches
    assert (options["PRECISION"], options["GELU"]) == (precision, gelus)


@pytest.mark.parametrize("hip, capability", [(None, (9, 0)), ("7.0", (0, 0))])
def test_what_it_knows_of_a_gpu(monkeypatch, hip, capability):
    properties = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(fast, "INTERPRET", False)
    assert fast.gpu.__wrapped__(torch.device("cuda:0")) == (capability, 132)


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
    view = buffer.as_strided(shape, strides, offset)
    assert fast.takes_tma(view) == takes
