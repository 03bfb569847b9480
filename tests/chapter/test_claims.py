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
    INTERPRET,
    NEAR_CONSTANT,
    Operators,
    assert_close,
    buggy,
    count_launches,
    draw,
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

fused_linear_gelu = linear_gelu.fused_linear_gelu

# --- Claim 1 ---


@pytest.mark.parametrize("M, K, N", [(20, 12, 16), (48, 40, 80)])
def test_claim_1_fused_makes_one_launch_and_naive_three(M, K, N):
    x, weight, bias = draw(M, K), draw(N, K, seed=1), draw(N, seed=2)
    assert count_launches(fused_linear_gelu, x, weight, bias) == 1
    assert count_launches(naive, x, weight, bias) == 3


@pytest.mark.parametrize("N, apart", [(10, 10), (17, 17), (17, 20), (1000, 1000)])
def test_claim_1_row_kernels_make_one_launch(N, apart):
    x = draw(5, apart)[:, :N]  # rows that lie apart are not copied
    assert count_launches(row_mean_var.row_mean_var, x) == 1
    assert count_launches(layernorm.triton_layernorm, x, *ones_and_zeros(x)) == 1


@interpreted
def test_claim_1_a_kernel_writes_its_result_once_and_never_reads_it():
    x, weight, bias = draw(48, 40), draw(80, 40, seed=1), draw(80, seed=2)
    for wrapper, *parameters in (
        (fused_linear_gelu, weight, bias),
        (layernorm.triton_layernorm, weight[0], weight[1]),
    ):
        with watched.record() as launches:
            out = wrapper(x, *parameters)
        (launch,) = launches
        assert np.array_equal(np.sort(launch.written()), watched.addresses(out).ravel())
        assert len(launch.read(out)) == 0
    # LayerNorm reads a row once, too.
    assert np.array_equal(np.sort(launch.read(x)), watched.addresses(x).ravel())


# --- Claim 2 ---


@pytest.mark.parametrize(
    "M, N", [(20, 16), (17, 16), (33, 7), (64, 48), (16, 16), (16, 20), (3, 40)]
)
def test_claim_2_the_wrong_axis_is_wrong_and_reads_the_indices_N_to_M_past_the_end(M, N):
    x, weight, bias = draw(M, 12), draw(N, 12, seed=1), draw(N, seed=2)
    right = naive(x, weight, bias)
    assert torch.allclose(fused_linear_gelu(x, weight, bias), right, atol=1e-4)
    kernel = linear_gelu.fused_linear_gelu_kernel_buggy_bias_axis
    with watched.record() as launches:
        wrong = fused_linear_gelu(x, weight, bias, kernel=kernel)
    assert wrong.shape == right.shape and wrong.isfinite().all()
    assert not torch.allclose(wrong, right, atol=1e-4)
    if INTERPRET:
        (launch,) = launches
        bias = launch.tensors["bias_ptr"]
        indices = np.unique(launch.read(bias) - bias.data_ptr()) // 4
        assert indices.tolist() == list(range(M)) and bias.shape == (N,)


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
    visible = x @ weight.T > -1  # where GELU is flat, a wrong bias does not show
    off_diagonal = ~torch.eye(16, dtype=torch.bool, device=DEVICE)
    assert close.diagonal().all()
    assert not close[visible & off_diagonal].any()


# --- Claim 3 ---


@pytest.mark.parametrize("N", [2, 3, 10, 17, 100, 1000])
def test_claim_3_and_question_3_a_correct_variance_fails_against_the_default_of_var(N):
    x = draw(5, N)
    _, var = row_mean_var.row_mean_var(x)
    assert torch.allclose(var, x.var(dim=-1, unbiased=False), atol=1e-5)
    assert not torch.allclose(var, x.var(dim=-1), atol=1e-5)  # unbiased=True is its default
    ratio = x.double().var(dim=-1) / var.double()
    assert ratio.tolist() == pytest.approx([N / (N - 1)] * 5, rel=1e-5)


def test_claim_3_unbiased_false_is_what_layernorm_uses():
    x = draw(5, 10)
    _, var = row_mean_var.row_mean_var(x)
    normalized = (x - x.mean(dim=-1, keepdim=True)) / (var[:, None] + EPS).sqrt()
    assert torch.allclose(normalized, torch.nn.functional.layer_norm(x, (10,)), atol=1e-5)


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
    tile = dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True))
    out = fused_linear_gelu(x, weight, bias, **tile)
    assert torch.allclose(out, naive(x, weight, bias), atol=1e-4)


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
    assert not eps_bug_shows(draw(80, N))
    assert eps_bug_shows(draw(4, N) * 1e-3)


# --- The self-check questions ---


@interpreted
def test_question_1_naive_touches_the_result_five_times_as_often_and_computes_the_same():
    M, K, N = 20, 12, 16
    x, weight, bias = draw(M, K), draw(N, K, seed=1), draw(N, seed=2)
    with watched.record() as launches:
        out = fused_linear_gelu(x, weight, bias)
    assert len(launches[0].written(out)) + len(launches[0].read(out)) == M * N
    with Operators() as operators:
        right = naive(x, weight, bias)
    assert torch.allclose(out, right, atol=1e-6)
    names, inputs, outputs = zip(*operators.calls, strict=True)
    assert names == ("aten.mm.default", "aten.add.Tensor", "aten.gelu.default")
    written = sum(t.numel() for t in outputs if t.shape == (M, N))
    read = sum(t.numel() for tensors in inputs for t in tensors if t.shape == (M, N))
    assert (written, read) == (3 * M * N, 2 * M * N)


@pytest.mark.parametrize("M, N", [(20, 16), (33, 7), (5, 40)])
@pytest.mark.parametrize("tail", [3.0, -1000.0])
def test_question_2_rows_from_N_on_add_what_lies_past_the_end_without_an_error(M, N, tail):
    x, weight, bias = draw(M, 12), draw(N, 12, seed=1), draw(N, seed=2)
    rows = torch.cat([bias, torch.full((max(M - N, 0),), tail, device=DEVICE)])[:M, None]
    exact = gelu(x.double() @ weight.double().T + rows.double())
    assert_close(buggy(x, weight, bias, tail), exact, 1e-5)


def test_question_4_the_mean_of_a_part_is_not_the_mean_of_the_row():
    x = draw(6, 17)
    mean, var = torch.empty(6, device=DEVICE), torch.empty(6, device=DEVICE)
    row_mean_var.row_mean_var_kernel[(6,)](x, mean, var, 6, 17, x.stride(0), BLOCK_N=16)
    assert torch.allclose(mean, x[:, :16].sum(dim=-1) / 17, atol=1e-5)
    assert not torch.allclose(mean, x.mean(dim=-1), atol=1e-3)


def test_question_5_eps_matters_where_it_is_not_small_beside_the_variance():
    assert not eps_bug_shows(draw(4, 8, seed=1))
    assert eps_bug_shows(NEAR_CONSTANT.to(DEVICE))
