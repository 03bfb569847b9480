"""The wrappers against float64, over shapes, layouts and tile sizes; and what they refuse."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts import DEVICE, INTERPRET, complete, layernorm, linear_gelu, row_mean_var

# Examples are compiled on a GPU and interpreted elsewhere: either may take long, none may be flaky.
# test_mutants.py has a profile with fewer.
EXAMPLES = settings.default.max_examples * 3 // 2 if INTERPRET else 40
quick = settings(max_examples=EXAMPLES, deadline=None, derandomize=True)

LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.T.contiguous().T,
    "columns of a wider tensor": lambda x: embed(x, (0, 5), 1)[:, 2 : 2 + x.shape[1]],
    "rows of a longer tensor": lambda x: embed(x, (3, 0), 1)[1 : 1 + x.shape[0]],
    "every second column": lambda x: embed(x, (0, 0), 2)[:, ::2],
    "every second row": lambda x: embed(x, (0, 0), 2, dim=0)[::2],
    "one row, expanded": lambda x: x[:1].expand(x.shape) if len(x) else x,
    "one column, expanded": lambda x: x[:, :1].expand(x.shape) if x.shape[1] else x,
}


def embed(x, extra, step, dim=1):
    """A larger tensor of NaN that holds x where LAYOUTS slices it: reading beside it shows."""
    offset = (1, 2) if extra != (0, 0) else (0, 0)
    offset = [min(o, e) for o, e in zip(offset, extra, strict=True)]
    shape = [size + e for size, e in zip(x.shape, extra, strict=True)]
    shape[dim] *= step
    large = x.new_full(shape, float("nan"))
    index = [slice(o, o + size) for o, size in zip(offset, x.shape, strict=True)]
    index[dim] = slice(offset[dim], offset[dim] + x.shape[dim] * step, step)
    large[tuple(index)] = x
    return large


def matrix(m, n, seed, layout="contiguous", shift=0.0):
    """An (m, n) float32 tensor on the device, drawn on the CPU and laid out as LAYOUTS says."""
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(seed)) + shift
    return LAYOUTS[layout](x.to(DEVICE))


def vector(n, seed, strided=False):
    return matrix(1, n, seed, "every second column" if strided else "contiguous")[0]


def assert_close(result, exact, tolerance=2e-6):
    """result (float32) is exact (float64) within tolerance, relative or absolute; NaN never is."""
    assert result.dtype == torch.float32
    result, exact = result.double().cpu(), exact.cpu()
    torch.testing.assert_close(result, exact, rtol=tolerance, atol=tolerance, equal_nan=False)


def exact_linear_gelu(x, weight, bias):
    x, weight, bias = (t if t is None else t.double().cpu() for t in (x, weight, bias))
    return torch.nn.functional.gelu(torch.nn.functional.linear(x, weight, bias))


def exact_layernorm(x, gamma, beta, eps):
    x, gamma, beta = (t if t is None else t.double().cpu() for t in (x, gamma, beta))
    return torch.nn.functional.layer_norm(x, (x.shape[1],), gamma, beta, eps)


both_linear_gelu = pytest.mark.parametrize(
    "fused_linear_gelu",
    [linear_gelu.fused_linear_gelu, complete.fused_linear_gelu],
    ids=["01", "04"],
)
both_row_mean_var = pytest.mark.parametrize(
    "row_mean_var", [row_mean_var.row_mean_var, complete.row_mean_var], ids=["02", "04"]
)


def layernorm_03(x, gamma, beta, eps=1e-5):
    return layernorm.triton_layernorm(x, gamma, beta, eps)


def layernorm_04(x, gamma, beta, eps=1e-5):
    return complete._run_layernorm(x, gamma, beta, eps, complete.layernorm_forward_kernel)


both_layernorm = pytest.mark.parametrize(
    "triton_layernorm", [layernorm_03, layernorm_04], ids=["03", "04"]
)

layouts = st.sampled_from(list(LAYOUTS))
seeds = st.integers(0, 2**16)
# Tiles must not all be equal, or a kernel that takes one side for another would pass.
tiles = st.sampled_from([(16, 16, 16), (16, 32, 16), (32, 16, 64), (64, 32, 16), (16, 64, 32)])


@both_linear_gelu
@quick
@given(
    shape=st.tuples(st.integers(0, 50), st.integers(0, 70), st.integers(0, 50)),
    layout=layouts,
    weight_layout=layouts,
    bias=st.sampled_from(["none", "contiguous", "strided"]),
    tile=tiles,
    seed=seeds,
)
def test_linear_gelu(fused_linear_gelu, shape, layout, weight_layout, bias, tile, seed):
    M, K, N = shape
    x = matrix(M, K, seed, layout)
    weight = matrix(N, K, seed + 1, weight_layout)
    bias = None if bias == "none" else vector(N, seed + 2, bias == "strided")
    BLOCK_M, BLOCK_N, BLOCK_K = tile
    out = fused_linear_gelu(x, weight, bias, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K)
    assert out.device == x.device
    # A float32 sum of K products is off by some K roundings of its largest terms.
    assert_close(out, exact_linear_gelu(x, weight, bias), 2e-6 + 4e-7 * K)


@both_linear_gelu
@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 0), (1, 1, 1)])
def test_linear_gelu_of_next_to_nothing(fused_linear_gelu, shape):
    M, K, N = shape
    x, weight, bias = matrix(M, K, 0), matrix(N, K, 1), vector(N, 2)
    assert_close(fused_linear_gelu(x, weight, bias), exact_linear_gelu(x, weight, bias))


@both_linear_gelu
def test_linear_gelu_is_the_exact_gelu_not_the_tanh_form(fused_linear_gelu):
    x = torch.linspace(-6, 6, 1201, device=DEVICE)[:, None]
    one = torch.ones(1, 1, device=DEVICE)
    out = fused_linear_gelu(x, one, None)
    assert_close(out, exact_linear_gelu(x, one, None), 1e-6)
    tanh = torch.nn.functional.gelu(x.double().cpu(), approximate="tanh")
    assert (exact_linear_gelu(x, one, None) - tanh).abs().max() > 1e-4


@both_row_mean_var
@quick
@given(
    shape=st.tuples(st.integers(0, 20), st.integers(0, 300)),
    layout=layouts,
    longer=st.sampled_from([None, 512, 2048]),
    seed=seeds,
)
def test_row_mean_var(row_mean_var, shape, layout, longer, seed):
    # Far from 0, a lane of zeros that is counted in changes the mean and the variance.
    x = matrix(*shape, seed, layout, shift=3.0)
    mean, var = row_mean_var(x, BLOCK_N=longer)
    assert mean.device == var.device == x.device
    if shape[1] == 0:
        assert mean.isnan().all() and var.isnan().all() and len(mean) == len(var) == shape[0]
    else:
        exact = x.double().cpu()
        assert_close(mean, exact.mean(dim=-1))
        assert_close(var, exact.var(dim=-1, unbiased=False), 5e-6)


@both_layernorm
@quick
@given(
    shape=st.tuples(st.integers(0, 20), st.integers(0, 300)),
    layout=layouts,
    gamma=st.sampled_from(["none", "contiguous", "strided"]),
    beta=st.sampled_from(["none", "contiguous", "strided"]),
    eps=st.sampled_from([1e-5, 1e-12, 1e-2, 3.0]),
    seed=seeds,
)
def test_layernorm(triton_layernorm, shape, layout, gamma, beta, eps, seed):
    x = matrix(*shape, seed, layout, shift=3.0)
    gamma = None if gamma == "none" else vector(shape[1], seed + 1, gamma == "strided")
    beta = None if beta == "none" else vector(shape[1], seed + 2, beta == "strided")
    out = triton_layernorm(x, gamma, beta, eps)
    assert out.device == x.device and out.dtype == torch.float32
    # What x - mean loses to cancellation is divided by the row's deviation.
    exact = x.double().cpu()
    deviation = (exact.var(dim=-1, correction=0, keepdim=True) + eps).sqrt()
    tolerance = 2e-6 + 2e-7 * exact.abs().amax(dim=-1, keepdim=True) / deviation if x.numel() else 0
    scale = 1.0 if gamma is None else 1.0 + gamma.abs().cpu()
    exact = exact_layernorm(x, gamma, beta, eps)
    assert ((out.cpu() - exact).abs() <= tolerance * scale + 2e-6 * exact.abs()).all()


buggy = settings(quick, max_examples=EXAMPLES * 2 // 5 if INTERPRET else 20)


@buggy
@given(
    shape=st.tuples(st.integers(1, 50), st.integers(1, 40), st.integers(1, 50)),
    layout=layouts,
    weight_layout=layouts,
    tail=st.sampled_from([0.0, 3.0, -2.0]),
    tile=tiles,
    seed=seeds,
)
def test_the_buggy_bias_is_wrong_exactly_as_documented(
    shape, layout, weight_layout, tail, tile, seed
):
    M, K, N = shape
    x, weight = matrix(M, K, seed, layout), matrix(N, K, seed + 1, weight_layout)
    buffer = torch.full((max(M, N),), tail, device=DEVICE)
    buffer[:N] = vector(N, seed + 2)
    BLOCK_M, BLOCK_N, BLOCK_K = tile
    out = linear_gelu.fused_linear_gelu(
        x,
        weight,
        buffer[:N],
        kernel=linear_gelu.fused_linear_gelu_kernel_buggy_bias_axis,
        BLOCK_M=BLOCK_M,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
    )
    # Row i gets bias[i]; from N on, that is the tail.
    wrong = x.double() @ weight.double().T + buffer.double()[:M, None]
    assert_close(out, torch.nn.functional.gelu(wrong), 2e-6 + 4e-7 * K)


def test_the_buggy_bias_without_a_bias_is_right():
    x, weight = matrix(20, 12, 0), matrix(16, 12, 1)
    kernel = linear_gelu.fused_linear_gelu_kernel_buggy_bias_axis
    out = linear_gelu.fused_linear_gelu(x, weight, None, kernel=kernel)
    assert_close(out, exact_linear_gelu(x, weight, None), 1e-5)


def wrong_eps_03(x, gamma, beta, eps):
    kernel = layernorm.layernorm_forward_kernel_wrong_eps
    return layernorm.triton_layernorm(x, gamma, beta, eps, kernel)


def wrong_eps_04(x, gamma, beta, eps):
    kernel = complete.layernorm_forward_kernel_wrong_eps
    return complete._run_layernorm(x, gamma, beta, eps, kernel)


@pytest.mark.parametrize("wrong_eps", [wrong_eps_03, wrong_eps_04], ids=["03", "04"])
@buggy
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 300)),
    layout=layouts,
    has_gamma=st.booleans(),
    has_beta=st.booleans(),
    eps=st.sampled_from([1e-2, 0.5, 3.0]),
    seed=seeds,
)
def test_the_wrong_eps_is_wrong_exactly_as_documented(
    wrong_eps, shape, layout, has_gamma, has_beta, eps, seed
):
    x = matrix(*shape, seed, layout, shift=3.0)
    gamma = vector(shape[1], seed + 1) if has_gamma else None
    beta = vector(shape[1], seed + 2) if has_beta else None
    out = wrong_eps(x, gamma, beta, eps)
    exact = x.double().cpu()
    deviation = exact.var(dim=-1, correction=0, keepdim=True).sqrt()
    wrong = (exact - exact.mean(dim=-1, keepdim=True)) / (deviation + eps)
    if has_gamma:
        wrong = wrong * gamma.double().cpu()
    if has_beta:
        wrong = wrong + beta.double().cpu()
    assert_close(out, wrong, 1e-4)


@both_row_mean_var
def test_the_variance_of_a_row_far_from_zero(row_mean_var):
    # Where the mean of the squares less the square of the mean has no digit left.
    x = matrix(6, 100, 0, shift=1000.0)
    _, var = row_mean_var(x)
    assert_close(var, x.double().cpu().var(dim=-1, unbiased=False), 1e-5)


@pytest.mark.parametrize("N", [1000, 5000, 20000])
def test_long_rows(N):
    x, gamma, beta = matrix(3, N, 0, shift=3.0), vector(N, 1), vector(N, 2)
    mean, var = row_mean_var.row_mean_var(x)
    assert_close(mean, x.double().cpu().mean(dim=-1))
    assert_close(var, x.double().cpu().var(dim=-1, unbiased=False), 5e-6)
    assert_close(layernorm_03(x, gamma, beta), exact_layernorm(x, gamma, beta, 1e-5), 1e-5)


def test_layernorm_keeps_nan_and_infinity_in_their_rows():
    x = matrix(4, 9, 0)
    x[1, 3], x[2, 8] = float("nan"), float("inf")
    out = layernorm_03(x, None, None)
    assert out[1:3].isnan().all()
    assert_close(out[[0, 3]], exact_layernorm(x[[0, 3]], None, None, 1e-5), 1e-5)


def test_inputs_are_left_as_they_were():
    x, weight, bias = matrix(20, 12, 0), matrix(12, 12, 1), vector(12, 2)
    before = [t.clone() for t in (x, weight, bias)]
    linear_gelu.fused_linear_gelu(x, weight, bias)
    row_mean_var.row_mean_var(x)
    layernorm_03(x, bias, bias)
    assert all(torch.equal(*pair) for pair in zip(before, (x, weight, bias), strict=True))


def tensor(*shape, dtype=torch.float32, device=DEVICE):
    return torch.ones(*shape, dtype=dtype, device=device)


class Launches(list):
    """Stands for a kernel: notes the grid and the keywords of each launch."""

    def __getitem__(self, grid):
        return lambda *arguments, **keywords: self.append((grid, keywords))


@pytest.fixture
def launches(monkeypatch):
    """The launches that the wrappers make, none of which takes place."""
    launches = Launches()
    for module in (linear_gelu, row_mean_var, layernorm, complete):
        for name in dir(module):
            if "_kernel" in name:
                monkeypatch.setattr(module, name, launches)
    # A keyword's default is the kernel itself, whatever its name stands for now.
    for wrapper in (linear_gelu.fused_linear_gelu, layernorm.triton_layernorm):
        defaults = [launches if hasattr(d, "fn") else d for d in wrapper.__defaults__]
        monkeypatch.setattr(wrapper, "__defaults__", tuple(defaults))
    return launches


@pytest.fixture
def refused(launches):
    """Fails the test where a wrapper launches a kernel in spite of its input."""
    yield
    assert launches == []


def test_the_default_eps_is_torchs():
    x = matrix(4, 9, 0) * 1e-3  # rows on which eps decides
    assert_close(layernorm.triton_layernorm(x, None, None), exact_layernorm(x, None, None, 1e-5))


@both_linear_gelu
def test_linear_gelu_launches_the_tiles_that_it_is_asked_for(launches, fused_linear_gelu):
    tiles = {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 64}
    fused_linear_gelu(tensor(70, 3), tensor(100, 3), None, **tiles)
    assert launches == [((3, 7), tiles)]


@both_linear_gelu
def test_linear_gelu_takes_as_many_columns_as_a_grid_does(launches, fused_linear_gelu):
    fused_linear_gelu(tensor(1, 1), tensor(1, 1).expand(65535 * 16, 1), None)
    assert [grid for grid, _ in launches] == [(1, 65535)]


@pytest.mark.parametrize(
    "N, BLOCK_N, num_warps",
    [
        (0, 1, 1),
        (1, 1, 1),
        (17, 32, 1),
        (512, 512, 1),
        (513, 1024, 2),
        (8192, 8192, 16),
        (2**20, 2**20, 32),
    ],
)
@pytest.mark.parametrize("hip, max_warps", [(None, 32), ("7.0", 16)], ids=["nvidia", "amd"])
def test_a_row_is_one_program_and_a_long_one_gets_more_warps(
    launches, N, BLOCK_N, num_warps, hip, max_warps, monkeypatch
):
    monkeypatch.setattr(torch.version, "hip", hip)
    num_warps = min(num_warps, max_warps)
    x = tensor(5, 1).expand(5, N)
    row_mean_var.row_mean_var(x)
    complete.row_mean_var(x)
    layernorm_03(x, None, None)
    layernorm_04(x, None, None)
    assert launches == [((5,), {"BLOCK_N": BLOCK_N, "num_warps": num_warps})] * 4


@both_row_mean_var
def test_row_mean_var_takes_the_block_that_it_is_given(launches, row_mean_var):
    row_mean_var(tensor(5, 17), BLOCK_N=64)
    assert launches == [((5,), {"BLOCK_N": 64, "num_warps": 1})]


OTHER_DEVICE = "meta" if INTERPRET else "cpu"
X, W, B = tensor(20, 12), tensor(16, 12), tensor(16)
HALF = torch.float16


@both_linear_gelu
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((X.half(), W, B), TypeError, "x torch.float16, weight torch.float32, bias torch.float32"),
        ((X, W.double(), B), TypeError, "weight torch.float64"),
        ((X, W, B.bfloat16()), TypeError, "bias torch.bfloat16"),
        ((X, W.int(), None), TypeError, "x torch.float32, weight torch.int32"),
        ((X[0], W, B), ValueError, "x (12,), weight (16, 12)"),
        ((X[None], W, B), ValueError, "x (1, 20, 12), weight (16, 12)"),
        ((X, W[0], B), ValueError, "weight (12,)"),
        ((X, W.T, B), ValueError, "x (20, 12), weight (12, 16)"),
        ((X, W.T, None), ValueError, "x (20, 12), weight (12, 16)"),
        ((X, W, B[:15]), ValueError, "x (20, 12), weight (16, 12), bias (15,)"),
        ((X, W, tensor(20)), ValueError, "bias (20,)"),
        ((X, W, tensor(16, 1)), ValueError, "bias (16, 1)"),
        ((X, W, tensor(1)), ValueError, "bias (1,)"),
        ((X, W.to(OTHER_DEVICE), B), ValueError, f"weight on {OTHER_DEVICE}"),
        ((X, W, B.to(OTHER_DEVICE)), ValueError, f"bias on {OTHER_DEVICE}"),
        ((X.to(OTHER_DEVICE), W.to(OTHER_DEVICE), None), ValueError, f"x on {OTHER_DEVICE}"),
        ((tensor(1, 1), tensor(1, 1).expand(65535 * 16 + 1, 1), None), ValueError, "N=1048561"),
    ],
)
def test_linear_gelu_refuses(refused, fused_linear_gelu, arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        fused_linear_gelu(*arguments)


@both_linear_gelu
@pytest.mark.parametrize("tile", [(8, 8, 4), (16, 16, 8), (48, 16, 16), (16, 0, 16), (16, 16, 24)])
def test_linear_gelu_refuses_tiles_that_a_gpu_does_not_take(refused, fused_linear_gelu, tile):
    BLOCK_M, BLOCK_N, BLOCK_K = tile
    message = f"BLOCK_M={BLOCK_M}, BLOCK_N={BLOCK_N}, BLOCK_K={BLOCK_K}"
    with pytest.raises(ValueError, match=message):
        fused_linear_gelu(X, W, B, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K)


def test_the_buggy_kernel_is_refused_a_bias_that_ends_before_it_stops_reading(refused):
    buggy = linear_gelu.fused_linear_gelu_kernel_buggy_bias_axis
    for bias in (tensor(16), tensor(19)[:16], tensor(20)[1:17], tensor(40)[:32:2]):
        with pytest.raises(ValueError, match=r"bias\[0\] to bias\[19\].* a buffer of at least 20"):
            linear_gelu.fused_linear_gelu(X, W, bias, kernel=buggy)


every_module = pytest.mark.parametrize("module", [linear_gelu, row_mean_var, layernorm, complete])


@every_module
def test_check_float32_takes_none_for_a_tensor_that_may_be_left_out(module):
    module.check_float32(x=X, weight=W, bias=None, beta=B)
    with pytest.raises(TypeError, match="got x torch.float32, beta torch.float16$"):
        module.check_float32(x=X, bias=None, beta=B.half())
    for name in ("x", "weight"):
        with pytest.raises(TypeError, match=f"got {name} <class 'NoneType'>"):
            module.check_float32(**{name: None})


@every_module
@pytest.mark.parametrize(
    "bias, found",
    [
        ([0.0] * 16, "<class 'list'>"),
        (B.to_sparse(), "torch.float32 (torch.sparse_coo)"),
        (torch._neg_view(B), "torch.float32 (a view that negates)"),
    ],
    ids=["list", "sparse", "negated"],
)
def test_check_float32_refuses_what_is_no_dense_tensor(module, bias, found):
    with pytest.raises(TypeError, match=re.escape(f"x torch.float32, bias {found}")):
        module.check_float32(x=X, bias=bias)


@every_module
def test_check_float32_refuses_another_device_and_two_devices(module, monkeypatch):
    other = X.to(OTHER_DEVICE)
    with pytest.raises(ValueError, match=f"one {DEVICE} device, got a on {OTHER_DEVICE}"):
        module.check_float32(a=other)
    for device in (DEVICE, OTHER_DEVICE):  # whichever of the two is the kernels' own
        monkeypatch.setattr(module, "DEVICE", device)
        with pytest.raises(ValueError, match=f"a on {DEVICE}.*, b on {OTHER_DEVICE}"):
            module.check_float32(a=X, b=other)


@both_row_mean_var
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((X.half(),), TypeError, "x torch.float16"),
        ((X.long(),), TypeError, "x torch.int64"),
        ((X[0],), ValueError, "x (12,)"),
        ((X[None],), ValueError, "x (1, 20, 12)"),
        ((X.to(OTHER_DEVICE),), ValueError, f"x on {OTHER_DEVICE}"),
        ((X, 8), ValueError, "x (20, 12), BLOCK_N=8"),
        ((X, 12), ValueError, "BLOCK_N=12"),
        ((X, 24), ValueError, "BLOCK_N=24"),
        ((X, 0), ValueError, "BLOCK_N=0"),
        ((tensor(3, 0), 0), ValueError, "BLOCK_N=0"),
        ((X, 2**21), ValueError, "BLOCK_N=2097152"),
        ((tensor(1, 1).expand(1, 2**20 + 1),), ValueError, "x (1, 1048577)"),
    ],
)
def test_row_mean_var_refuses(refused, row_mean_var, arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        row_mean_var(*arguments)


@both_layernorm
@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((X.half(), None, None), TypeError, "x torch.float16"),
        ((X, tensor(12).half(), None), TypeError, "x torch.float32, gamma torch.float16"),
        ((X, None, tensor(12).double()), TypeError, "x torch.float32, beta torch.float64"),
        ((X[0], None, None), ValueError, "x (12,)"),
        ((X, tensor(20), None), ValueError, "gamma (12,), got x (20, 12), gamma (20,)"),
        ((X, None, tensor(1)), ValueError, "beta (12,), got x (20, 12), beta (1,)"),
        ((X, tensor(1, 12), None), ValueError, "gamma (1, 12)"),
        ((X, tensor(12, device=OTHER_DEVICE), None), ValueError, f"gamma on {OTHER_DEVICE}"),
        ((X, None, tensor(12, device=OTHER_DEVICE)), ValueError, f"beta on {OTHER_DEVICE}"),
        ((tensor(1, 1).expand(1, 2**20 + 1), None, None), ValueError, "x (1, 1048577)"),
    ],
)
def test_layernorm_refuses(refused, triton_layernorm, arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        triton_layernorm(*arguments)


@pytest.mark.skipif(torch.cuda.device_count() < 2 or INTERPRET, reason="needs two GPUs")
def test_on_a_gpu_that_is_not_the_current_one():
    x, weight, bias = (
        t.to("cuda:1") for t in (matrix(20, 12, 0), matrix(12, 12, 1), vector(12, 2))
    )
    assert torch.cuda.current_device() == 0
    out = linear_gelu.fused_linear_gelu(x, weight, bias)
    assert out.device == x.device
    assert_close(out, exact_linear_gelu(x, weight, bias), 1e-5)
    assert_close(row_mean_var.row_mean_var(x)[0], x.double().cpu().mean(dim=-1))
    assert_close(layernorm_03(x, bias, bias), exact_layernorm(x, bias, bias, 1e-5), 1e-5)
    with pytest.raises(ValueError, match="weight on cuda:0"):
        linear_gelu.fused_linear_gelu(x, weight.to("cuda:0"), bias)
