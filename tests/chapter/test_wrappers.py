"""The wrappers of 01 to 03 against float64, over shapes, layouts and tile sizes; what they refuse.

04 has the same code under test_same_code.py.
"""

import re

import pytest
import torch
from helpers import (
    DEVICE,
    EPS,
    INTERPRET,
    LAYOUTS,
    assert_close,
    exact_layernorm,
    exact_linear_gelu,
    layernorm,
    linear_gelu,
    matrix,
    ones_and_zeros,
    replace_kernels,
    row_mean_var,
    vector,
    wrong_eps,
)
from hypothesis import given, settings
from hypothesis import strategies as st

# Examples are compiled on a GPU and interpreted elsewhere: either may take long, none may be flaky.
quick = settings(max_examples=40, deadline=None, derandomize=True)

layouts = st.sampled_from(list(LAYOUTS))
seeds = st.integers(0, 2**16)
# Tiles must not all be equal, or a kernel that takes one side for another would pass.
tiles = st.sampled_from([(16, 16, 16), (16, 32, 16), (32, 16, 64), (64, 32, 16), (16, 64, 32)])


@quick
@given(
    shape=st.tuples(st.integers(0, 50), st.integers(0, 70), st.integers(0, 50)),
    layout=layouts,
    weight_layout=layouts,
    strided=st.booleans(),
    tile=tiles,
    is_buggy=st.booleans(),
    seed=seeds,
)
def test_linear_gelu(shape, layout, weight_layout, strided, tile, is_buggy, seed):
    M, K, N = shape
    x = matrix(M, K, seed, layout)
    weight = matrix(N, K, seed + 1, weight_layout)
    bias = vector(N, seed + 2, strided)
    options = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True))
    if is_buggy:  # row i gets bias[i], and zeros from N on
        options["kernel"] = linear_gelu.fused_linear_gelu_kernel_buggy_bias_axis
        rows = torch.nn.functional.pad(bias, (0, M))[:M, None]
        exact = x.double() @ weight.double().T + rows.double()
        exact = torch.nn.functional.gelu(exact)
    else:
        exact = exact_linear_gelu(x, weight, bias)
    out = linear_gelu.fused_linear_gelu(x, weight, bias, **options)
    assert out.device == x.device
    # A float32 sum of K products is off by some K roundings of its largest terms.
    assert_close(out, exact, 2e-6 + 4e-7 * K)


@pytest.mark.parametrize("shape", [(0, 5, 3), (5, 0, 3), (5, 3, 0), (0, 0, 0), (1, 1, 1)])
def test_linear_gelu_of_next_to_nothing(shape):
    M, K, N = shape
    x, weight, bias = matrix(M, K, 0), matrix(N, K, 1), vector(N, 2)
    out = linear_gelu.fused_linear_gelu(x, weight, bias)
    assert_close(out, exact_linear_gelu(x, weight, bias))


def test_linear_gelu_is_the_exact_gelu_not_the_tanh_form():
    x = torch.linspace(-6, 6, 201, device=DEVICE)[:, None]
    one, zero = torch.ones(1, 1, device=DEVICE), torch.zeros(1, device=DEVICE)
    exact = exact_linear_gelu(x, one, None)
    assert_close(linear_gelu.fused_linear_gelu(x, one, zero), exact, 1e-6)
    tanh = torch.nn.functional.gelu(x.double().cpu(), approximate="tanh")
    assert (exact - tanh).abs().max() > 1e-4


@quick
@given(
    shape=st.tuples(st.integers(0, 20), st.integers(1, 300)),
    layout=layouts,
    longer=st.sampled_from([None, 512, 2048]),
    seed=seeds,
)
def test_row_mean_var(shape, layout, longer, seed):
    # Far from 0, a lane of zeros that is counted in changes the mean and the variance.
    x = matrix(*shape, seed, layout, shift=3.0)
    mean, var = row_mean_var.row_mean_var(x, BLOCK_N=longer)
    assert mean.device == var.device == x.device
    exact = x.double().cpu()
    assert_close(mean, exact.mean(dim=-1))
    assert_close(var, exact.var(dim=-1, unbiased=False), 5e-6)


@settings(quick, max_examples=60)
@given(
    shape=st.tuples(st.integers(0, 20), st.integers(1, 300)),
    layout=layouts,
    strided=st.tuples(st.booleans(), st.booleans()),
    eps=st.sampled_from([1e-5, 1e-12, 1e-2, 0.5, 3.0, 1]),
    is_wrong=st.booleans(),
    seed=seeds,
)
def test_layernorm_and_its_buggy_twin(shape, layout, strided, eps, is_wrong, seed):
    M, N = shape
    x = matrix(M, N, seed, layout, shift=3.0)
    gamma, beta = vector(N, seed + 1, strided[0]), vector(N, seed + 2, strided[1])
    out = (wrong_eps if is_wrong else layernorm.triton_layernorm)(x, gamma, beta, eps)
    assert out.device == x.device and out.dtype == torch.float32
    out, x, gamma, beta = (t.double().cpu() for t in (out, x, gamma, beta))
    centred = x - x.mean(dim=-1, keepdim=True)
    var = centred.square().mean(dim=-1, keepdim=True)
    deviation = var.sqrt() + eps if is_wrong else (var + eps).sqrt()
    exact = centred / deviation * gamma + beta
    # What x - mean loses to cancellation is divided by the row's deviation, and scaled.
    lost = 2e-7 * x.abs().amax(dim=-1, keepdim=True) / deviation
    tolerance = (2e-6 + lost) * (1.0 + gamma.abs()) + 2e-6 * exact.abs()
    assert ((out - exact).abs() <= tolerance).all()


@pytest.mark.parametrize("N, shift", [(100, 1000.0), (5000, 3.0), (20000, 3.0)])
def test_rows_far_from_zero_and_long_ones(N, shift):
    # At 1000 the mean of the squares less the square of the mean has no digit left.
    x, gamma, beta = matrix(3, N, 0, shift=shift), vector(N, 1), vector(N, 2)
    mean, var = row_mean_var.row_mean_var(x)
    assert_close(mean, x.double().cpu().mean(dim=-1))
    assert_close(var, x.double().cpu().var(dim=-1, unbiased=False), 1e-5)
    out = layernorm.triton_layernorm(x, gamma, beta)
    assert_close(out, exact_layernorm(x, gamma, beta, EPS), 1e-5 + 4e-7 * shift)


def test_layernorm_keeps_nan_and_infinity_in_their_rows_and_its_default_eps_is_torchs():
    x = matrix(4, 9, 0) * 1e-3  # rows on which eps decides
    x[1, 3], x[2, 8] = float("nan"), float("inf")
    out = layernorm.triton_layernorm(x, *ones_and_zeros(x))
    assert out[1:3].isnan().all()
    assert_close(out[[0, 3]], exact_layernorm(x[[0, 3]], None, None, 1e-5))


# --- Launches ---


class Launches(list):
    """Stands for a kernel: notes the grid and the keywords of each launch, and makes none."""

    def __getitem__(self, grid):
        return lambda *arguments, **keywords: self.append((grid, keywords))


@pytest.fixture
def launches(monkeypatch):
    """The launches that the wrappers make."""
    launches = Launches()
    for module in (linear_gelu, row_mean_var, layernorm):
        replace_kernels(monkeypatch, module, lambda *_: launches)
    return launches


def tensor(*shape, dtype=torch.float32, device=DEVICE):
    return torch.ones(*shape, dtype=dtype, device=device)


def test_linear_gelu_launches_the_tiles_that_it_is_asked_for_up_to_a_grids_limit(launches):
    tiles = {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 64}
    linear_gelu.fused_linear_gelu(tensor(70, 3), tensor(100, 3), tensor(100), **tiles)
    N = 65535 * 16
    linear_gelu.fused_linear_gelu(tensor(1, 1), tensor(1, 1).expand(N, 1), tensor(1).expand(N))
    first, (grid, _) = launches
    assert first == ((3, 7), tiles) and grid == (1, 65535)


@pytest.mark.parametrize(
    "N, BLOCK_N, num_warps",
    [(1, 1, 1), (17, 32, 1), (512, 512, 1), (513, 1024, 2), (8192, 8192, 16), (2**20, 2**20, 32)],
)
@pytest.mark.parametrize("hip, max_warps", [(None, 32), ("7.0", 16)], ids=["nvidia", "amd"])
def test_a_row_is_one_program_and_a_long_one_gets_more_warps(
    launches, N, BLOCK_N, num_warps, hip, max_warps, monkeypatch
):
    monkeypatch.setattr(torch.version, "hip", hip)
    num_warps = min(num_warps, max_warps)
    x, gamma = tensor(5, 1).expand(5, N), tensor(1).expand(N)
    row_mean_var.row_mean_var(x)
    layernorm.triton_layernorm(x, gamma, gamma)
    assert launches == [((5,), {"BLOCK_N": BLOCK_N, "num_warps": num_warps})] * 2
    assert all(type(keywords["num_warps"]) is int for _, keywords in launches)


def test_row_mean_var_takes_the_block_that_it_is_given(launches):
    row_mean_var.row_mean_var(tensor(5, 17), BLOCK_N=64)
    assert launches == [((5,), {"BLOCK_N": 64, "num_warps": 1})]


# --- What they refuse ---

OTHER = "meta" if INTERPRET else "cpu"
X, W, B, LONG = tensor(20, 12), tensor(16, 12), tensor(16), tensor(1, 1).expand(1, 2**20 + 1)
LINEAR, ROWS, NORM = "fused_linear_gelu", "row_mean_var", "triton_layernorm"
WRAPPERS = {
    LINEAR: linear_gelu.fused_linear_gelu,
    ROWS: row_mean_var.row_mean_var,
    NORM: layernorm.triton_layernorm,
}
G = tensor(12)
D = f" on {DEVICE}, not"
REFUSED = [
    # Each argument, and each thing that check() looks at: it is the same in all three.
    (LINEAR, (X.half(), W, B), f"x must be dense float32 ('M', 'K'){D} torch.float16 (20, 12)"),
    (LINEAR, (X, W.double(), B), "weight must be dense float32 ('N', 12) ... torch.float64"),
    (LINEAR, (X, W, B.bfloat16()), "bias must be dense float32 (16,) ... torch.bfloat16 (16,)"),
    (LINEAR, (X[0], W, B), "x ... not torch.float32 (12,)"),
    (LINEAR, (X[None], W, B), "x ... not torch.float32 (1, 20, 12)"),
    (LINEAR, (X, W.T, B), "weight ... not torch.float32 (12, 16)"),
    (LINEAR, (X, W, B[:15]), "bias ... not torch.float32 (15,)"),
    (LINEAR, (X.to(OTHER), W, B), f"x ...{D} torch.float32 (20, 12) on {OTHER}"),
    (LINEAR, (X, W.to(OTHER), B), f"weight ... not torch.float32 (16, 12) on {OTHER}"),
    (LINEAR, (X, W, None), "bias ... not <class 'NoneType'>"),
    (LINEAR, ([[0.0]], W, B), "x ... not <class 'list'>"),
    (LINEAR, (X, W.to_sparse(), B), "weight ... torch.sparse_coo"),
    (LINEAR, (X, W, torch._neg_view(B)), "bias ... a negated view"),
    (ROWS, (X.half(),), "x ... not torch.float16"),
    (ROWS, (X, 8), "expected 0 < N <= BLOCK_N <= 2**20, got N=12, BLOCK_N=8"),
    (ROWS, (X, 2**21), "got N=12, BLOCK_N=2097152"),
    (ROWS, (tensor(3, 0), 16), "got N=0, BLOCK_N=16"),
    (ROWS, (LONG,), "got N=1048577, BLOCK_N=2097152"),
    (NORM, (X.double(), G, G), "x ... not torch.float64"),
    (NORM, (X, G.half(), G), "gamma must be dense float32 (12,) ... torch.float16"),
    (NORM, (X, G, G.half()), "beta must be dense float32 (12,) ... torch.float16"),
    (NORM, (X, G.to(OTHER), G), f"gamma ... not torch.float32 (12,) on {OTHER}"),
    (NORM, (LONG, LONG[0], LONG[0]), "expected rows of 1 to 2**20 values, got x (1, 1048577)"),
    (NORM, (tensor(3, 0), G[:0], G[:0]), "expected rows of 1 to 2**20 values, got x (3, 0)"),
]


@pytest.mark.parametrize(
    "wrapper, arguments, message", REFUSED, ids=[f"{w}: {m}" for w, _, m in REFUSED]
)
def test_a_wrapper_refuses(launches, wrapper, arguments, message):
    with pytest.raises(ValueError, match=".*".join(map(re.escape, message.split("...")))):
        WRAPPERS[wrapper](*arguments)
    assert launches == []


def test_linear_gelu_refuses_more_tiles_than_a_grid_has_and_negative_ones(launches):
    N = 65535 * 16 + 1
    with pytest.raises(ValueError, match=rf"N={N} has no grid of tiles \(16, 16, 16\)"):
        linear_gelu.fused_linear_gelu(X[:1], W[:1].expand(N, 12), tensor(1).expand(N))
    for side, size in (("BLOCK_M", -16), ("BLOCK_N", -16), ("BLOCK_K", -16), ("BLOCK_K", 0)):
        with pytest.raises(ValueError, match=rf"N=16 has no grid of tiles .*{size}"):
            linear_gelu.fused_linear_gelu(X, W, B, **{side: size})
    assert launches == []
    linear_gelu.fused_linear_gelu(X, W, B, BLOCK_M=1)  # the interpreter, and newer GPUs, take it
    assert [grid for grid, _ in launches] == [(20, 1)]


def test_eps_may_be_any_number():
    for eps in (1, True, "1", torch.tensor(1.0)):
        out = layernorm.triton_layernorm(X, G, G, eps)
        assert_close(out, exact_layernorm(X, G, G, 1.0))
    with pytest.raises(TypeError, match="NoneType"):
        layernorm.triton_layernorm(X, G, G, None)


@pytest.mark.parametrize(
    "module, wrapper, arguments",
    [(linear_gelu, LINEAR, (X, W, B)), (row_mean_var, ROWS, (X,)), (layernorm, NORM, (X, G, G))],
)
def test_all_arguments_are_on_the_gpu_of_x_and_so_is_the_launch(
    module, wrapper, arguments, launches, monkeypatch
):
    checked, entered = [], []
    monkeypatch.setattr(module, "check", lambda *arguments: checked.append(arguments))
    device_of = torch.cuda.device_of
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: entered.append(x) or device_of(x))
    WRAPPERS[wrapper](*arguments)
    assert [device for *_, device in checked] == [DEVICE] + [X.device] * (len(arguments) - 1)
    assert all(isinstance(device, torch.device) for *_, device in checked[1:])
    assert len(launches) == 1 and entered == [X]


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
    out = layernorm.triton_layernorm(x, bias, bias)
    assert_close(out, exact_layernorm(x, bias, bias, EPS), 1e-5)
    with pytest.raises(ValueError, match="weight .* on cuda:1, not .* on cuda:0"):
        linear_gelu.fused_linear_gelu(x, weight.to("cuda:0"), bias)
