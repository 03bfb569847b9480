"""What the chapter claims, and its five self-check questions.

The tests of a claim have its number in their names (./run_tests.sh -k claim_3), and those of a
self-check question the question's (-k question_2):

1. The fused layer is one launch, and writes its (M, N) result once and never reads it back; as
   three operators it is three launches, three writes and two reads. A row kernel is one launch too.
2. The bias on the wrong axis runs, has the right shape and is wrong; where M > N it also reads past
   the end of the bias, at exactly the indices N to M - 1, without a crash.
3. A correct variance fails against x.var(dim=-1); unbiased=False is what LayerNorm uses.
4. BLOCK_N smaller than the row gives a wrong LayerNorm; a matmul's tile sizes are free.
5. wrong / correct = sqrt(var + eps) / (sqrt(var) + eps): about 1 for var ~ 1, about 280 on the
   near-constant row, at most sqrt(eps) / eps = 316.2 as var goes to 0.
6. Ordinary random rows never show the eps bug at atol 1e-4.
"""

import numpy as np
import pytest
import torch
import watched
from helpers import (
    DEVICE,
    EPS,
    NEAR_CONSTANT,
    Operators,
    buggy,
    count_launches,
    draw,
    fused,
    interpreted,
    layernorm,
    linear_gelu,
    naive,
    ones_and_zeros,
    row_mean_var,
    wrong_eps,
    wrong_over_correct,
)
from torch.nn.functional import gelu

# --- Claim 1 ---

SHAPES = [(20, 12, 16), (48, 40, 80)]


@pytest.mark.parametrize("M, K, N", SHAPES)
def test_claim_1_fused_makes_one_launch_and_naive_three(M, K, N):
    x, weight, bias = draw(M, K), draw(N, K, seed=1), draw(N, seed=2)
    assert count_launches(fused, x, weight, bias) == 1
    assert count_launches(naive, x, weight, bias) == 3


@pytest.mark.parametrize("N", [10, 17, 1000])
def test_claim_1_row_kernels_make_one_launch(N):
    x, gamma = draw(5, N), draw(N, seed=1)
    assert count_launches(row_mean_var.row_mean_var, x) == 1
    assert count_launches(layernorm.triton_layernorm, x, gamma, gamma) == 1


def test_claim_1_rows_that_lie_apart_are_not_copied():
    x = draw(5, 20)[:, :17]
    assert count_launches(row_mean_var.row_mean_var, x) == 1
    assert count_launches(layernorm.triton_layernorm, x, *ones_and_zeros(x)) == 1


@interpreted
@pytest.mark.parametrize("M, K, N", SHAPES)
def test_claim_1_fused_writes_the_result_once_and_never_reads_it(M, K, N):
    x, weight, bias = draw(M, K), draw(N, K, seed=1), draw(N, seed=2)
    with watched.record() as launches:
        out = fused(x, weight, bias)
    (launch,) = launches
    assert np.array_equal(np.sort(launch.written()), watched.addresses(out).ravel())
    assert len(launch.read(out)) == 0


@pytest.mark.parametrize("M, K, N", SHAPES)
def test_claim_1_naive_writes_the_result_three_times_and_reads_it_twice(M, K, N):
    x, weight, bias = draw(M, K), draw(N, K, seed=1), draw(N, seed=2)
    with Operators() as operators:
        naive(x, weight, bias)
    names = [name for name, _, _ in operators.calls]
    assert names == ["aten.mm.default", "aten.add.Tensor", "aten.gelu.default"]
    written = sum(out.numel() for _, _, out in operators.calls if out.shape == (M, N))
    read = sum(t.numel() for _, inputs, _ in operators.calls for t in inputs if t.shape == (M, N))
    assert (written, read) == (3 * M * N, 2 * M * N)


@interpreted
def test_claim_1_layernorm_reads_a_row_once_and_writes_it_once():
    x = draw(6, 17)
    with watched.record() as launches:
        out = layernorm.triton_layernorm(x, draw(17, seed=1), draw(17, seed=2))
    (launch,) = launches
    assert np.array_equal(np.sort(launch.read(x)), watched.addresses(x).ravel())
    assert np.array_equal(np.sort(launch.written()), watched.addresses(out).ravel())


# --- Claim 2 ---


@pytest.mark.parametrize("M, N", [(20, 16), (16, 20), (16, 16), (33, 7), (64, 48)])
def test_claim_2_the_wrong_axis_runs_has_the_right_shape_and_is_wrong(M, N):
    x, weight, bias = draw(M, 12), draw(N, 12, seed=1), draw(N, seed=2)
    right, wrong = naive(x, weight, bias), buggy(x, weight, bias)
    assert wrong.shape == right.shape and wrong.isfinite().all()
    assert not torch.allclose(wrong, right, atol=1e-4)
    assert torch.allclose(fused(x, weight, bias), right, atol=1e-4)


@interpreted
@pytest.mark.parametrize(
    "M, N", [(20, 16), (17, 16), (33, 7), (64, 48), (16, 16), (16, 20), (3, 40)]
)
def test_claim_2_the_reads_past_the_end_are_the_indices_N_to_M(M, N):
    x, weight, bias = draw(M, 12), draw(N, 12, seed=1), draw(N, seed=2)
    kernel = linear_gelu.fused_linear_gelu_kernel_buggy_bias_axis
    with watched.record() as launches:
        linear_gelu.fused_linear_gelu(x, weight, bias, kernel=kernel)
    (launch,) = launches
    bias = launch.tensors["bias_ptr"]
    indices = np.unique(launch.read(bias) - bias.data_ptr()) // 4
    assert [i for i in indices if i >= N] == list(range(N, M))
    if M == N:  # then the wrong axis is the only fault, and still one
        assert not torch.allclose(buggy(x, weight, bias), naive(x, weight, bias), atol=1e-4)


def test_claim_2_a_constant_bias_hides_the_wrong_axis():
    x, weight = draw(16, 12), draw(16, 12, seed=1)
    bias = torch.full((16,), 0.7, device=DEVICE)
    assert torch.allclose(buggy(x, weight, bias), naive(x, weight, bias), atol=1e-4)
    # It does so for M <= N only: past the end lies something else.
    x = draw(20, 12)
    out = buggy(x, weight, bias)
    assert out.isfinite().all() and not torch.allclose(out, naive(x, weight, bias), atol=1e-4)


def test_claim_2_a_square_result_is_right_on_its_diagonal_alone():
    x, weight, bias = draw(16, 12), draw(16, 12, seed=1), draw(16, seed=2)
    close = torch.isclose(buggy(x, weight, bias), naive(x, weight, bias), atol=1e-6)
    before_gelu = x @ weight.T
    # Where GELU is flat, a wrong bias does not show.
    visible = before_gelu > -1
    off_diagonal = ~torch.eye(16, dtype=torch.bool, device=DEVICE)
    assert close.diagonal().all()
    assert not close[visible & off_diagonal].any()


# --- Claim 3 ---


def test_claim_3_and_question_3_a_correct_variance_fails_against_the_default_of_var():
    x = draw(5, 10)
    _, var = row_mean_var.row_mean_var(x)
    assert not torch.allclose(var, x.var(dim=-1), atol=1e-5)  # unbiased=True is its default
    assert torch.allclose(var, x.var(dim=-1, unbiased=False), atol=1e-5)


def test_claim_3_unbiased_false_is_what_layernorm_uses():
    x = draw(5, 10)
    _, var = row_mean_var.row_mean_var(x)
    normalized = (x - x.mean(dim=-1, keepdim=True)) / (var[:, None] + EPS).sqrt()
    assert torch.allclose(normalized, torch.nn.LayerNorm(10).to(DEVICE)(x), atol=1e-5)


@pytest.mark.parametrize("N", [2, 3, 10, 17, 100, 1000])
def test_claim_3_the_two_differ_by_N_over_N_minus_1(N):
    x = draw(5, N)
    _, var = row_mean_var.row_mean_var(x)
    ratio = x.double().var(dim=-1) / var.double()
    assert ratio.tolist() == pytest.approx([N / (N - 1)] * 5, rel=1e-5)


# --- Claim 4 ---


@pytest.mark.parametrize("N, BLOCK_N", [(17, 16), (100, 64), (8, 1)])
def test_claim_4_a_block_shorter_than_the_row_gives_a_wrong_layernorm(N, BLOCK_N):
    x = draw(6, N)
    right = torch.nn.functional.layer_norm(x, (N,))
    out, kernel = torch.zeros_like(x), layernorm.layernorm_forward_kernel
    arguments = x, *ones_and_zeros(x), out, 6, N, x.stride(0), EPS
    kernel[(6,)](*arguments, BLOCK_N=BLOCK_N)
    assert out.isfinite().all()
    assert not torch.allclose(out[:, :BLOCK_N], right[:, :BLOCK_N], atol=1e-2)
    assert (out[:, BLOCK_N:] == 0).all()  # what the block does not cover is not written
    kernel[(6,)](*arguments, BLOCK_N=128)
    assert torch.allclose(out, right, atol=1e-4)


@pytest.mark.parametrize("tile", [(16, 16, 16), (32, 16, 16), (16, 64, 32), (64, 32, 64)])
def test_claim_4_a_matmuls_tile_sizes_are_free(tile):
    x, weight, bias = draw(50, 70), draw(40, 70, seed=1), draw(40, seed=2)
    BLOCK_M, BLOCK_N, BLOCK_K = tile
    out = linear_gelu.fused_linear_gelu(
        x, weight, bias, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K
    )
    exact = gelu(x.double() @ weight.double().T + bias)
    assert torch.allclose(out.double(), exact, atol=1e-4)


# --- Claim 5 ---


def formula(var):
    return (var + EPS).sqrt() / (var.sqrt() + EPS)


def test_claim_5_wrong_over_correct_follows_the_formula_over_all_variances():
    row = torch.tensor([1.0, -1.0, 2.0, 0.0, -2.0, 1.0, 0.0, -1.0])  # mean 0: no cancellation
    row /= row.std(unbiased=False)
    x = (torch.logspace(-7, 2, 73)[:, None] * row).to(DEVICE)
    var = x.double().cpu().var(dim=-1, unbiased=False)
    assert var[[0, -1]].tolist() == pytest.approx([1e-14, 1e4], rel=1e-5)
    ratio = wrong_over_correct(x)
    assert ratio.tolist() == pytest.approx(formula(var).tolist(), rel=1e-3)
    assert ratio[-1] == pytest.approx(1, rel=1e-3)
    assert ratio.max() < EPS**0.5 / EPS


def test_claim_5_its_limit_is_sqrt_eps_over_eps():
    limit = EPS**0.5 / EPS
    assert limit == pytest.approx(316.2, abs=0.05)
    x = torch.tensor([[1.0, -1.0, 1.0, -1.0]], device=DEVICE) * 1e-12
    assert wrong_over_correct(x).item() == pytest.approx(limit, rel=1e-3)


def test_claim_5_about_280_on_the_near_constant_row():
    var = NEAR_CONSTANT.double().var(dim=-1, unbiased=False)
    assert var.item() == pytest.approx(1.3642420526593924e-12, rel=1e-12)
    assert formula(var).item() == pytest.approx(283.155, abs=5e-4)
    assert wrong_over_correct(NEAR_CONSTANT.to(DEVICE)).item() == pytest.approx(283.155, rel=1e-3)


# --- Claim 6 ---


def eps_bug_shows(x):
    right, wrong = torch.nn.functional.layer_norm(x, x.shape[1:]), wrong_eps(x)
    assert wrong.isfinite().all()
    return not torch.allclose(wrong, right, atol=1e-4)


@pytest.mark.parametrize("N", [8, 17, 64, 1000])
def test_claim_6_ordinary_rows_never_show_the_eps_bug(N):
    assert not any(eps_bug_shows(draw(4, N, seed=seed)) for seed in range(20))
    assert eps_bug_shows(draw(4, N) * 1e-3)


# --- The self-check questions ---


@interpreted
def test_question_1_naive_touches_the_result_five_times_as_often_and_computes_the_same():
    M, K, N = 20, 12, 16
    x, weight, bias = draw(M, K), draw(N, K, seed=1), draw(N, seed=2)
    with watched.record() as launches:
        out = fused(x, weight, bias)
    fused_touches = len(launches[0].written(out)) + len(launches[0].read(out))
    with Operators() as operators:
        naive(x, weight, bias)
    tensors = [t for _, inputs, result in operators.calls for t in (*inputs, result)]
    naive_touches = sum(t.numel() for t in tensors if t.shape == (M, N))
    assert naive_touches == 5 * fused_touches
    assert torch.allclose(out, naive(x, weight, bias), atol=1e-6)


@pytest.mark.parametrize("tail", [1000.0, -3.0, float("nan")])
def test_question_2_rows_under_rows_below_M_read_past_the_end_without_an_error(tail):
    x, weight, bias = draw(20, 12), draw(16, 12, seed=1), draw(16, seed=2)
    out = buggy(x, weight, bias, tail)
    expected = gelu(x @ weight.T + tail)[16:]
    assert torch.allclose(out[16:], expected, atol=1e-3, equal_nan=True)
    assert out[:16].isfinite().all()


def test_question_4_the_mean_of_a_part_is_not_the_mean_of_the_row():
    x = draw(6, 17)
    with pytest.raises(ValueError, match="BLOCK_N=16"):
        row_mean_var.row_mean_var(x, BLOCK_N=16)
    mean, var = torch.empty(6, device=DEVICE), torch.empty(6, device=DEVICE)
    row_mean_var.row_mean_var_kernel[(6,)](x, mean, var, 6, 17, x.stride(0), BLOCK_N=16)
    assert torch.allclose(mean, x[:, :16].sum(dim=-1) / 17, atol=1e-5)
    assert not torch.allclose(mean, x.mean(dim=-1), atol=1e-3)


def test_question_5_eps_matters_where_it_is_not_small_beside_the_variance():
    assert not eps_bug_shows(draw(4, 8, seed=1))
    assert eps_bug_shows(NEAR_CONSTANT.to(DEVICE))
