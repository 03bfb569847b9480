"""What the chapter claims, its five self-check questions, and what its sections print.

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

import re

import numpy as np
import pytest
import torch
import watched
from scripts import (
    DEVICE,
    INTERPRET,
    SCRIPTS,
    complete,
    layernorm,
    linear_gelu,
    load,
    name_of,
    row_mean_var,
)
from torch.nn.functional import gelu
from torch.utils._python_dispatch import TorchDispatchMode

EPS = 1e-5
NEAR_CONSTANT = 5.0 + torch.tensor([[1.0, -1.0, 2.0, 0.0, -2.0, 1.0, 0.0, -1.0]]) * 1e-6

interpreted = pytest.mark.skipif(not INTERPRET, reason="on a GPU no address can be watched")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def fused(x, weight, bias):
    return linear_gelu.fused_linear_gelu(x, weight, bias)


def naive(x, weight, bias):
    """The same as three operators: matmul, add, GELU."""
    return gelu(x @ weight.T + bias)


class Operators(TorchDispatchMode):
    """Records what torch computes within the block: operator, tensors read, tensors written."""

    # Neither computes: a view is new strides on the same memory, and empty memory is not written.
    FREE = ("aten.t.", "aten.transpose.", "aten.permute.", "aten.empty")

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not str(function).startswith(self.FREE):
            read = [a for a in args if isinstance(a, torch.Tensor)]
            self.calls.append((str(function), read, result))
        return result


def count_launches(run, *args):
    """The kernels that a call launches: on a GPU by the profiler, without one by counting."""
    if INTERPRET:
        with watched.record() as launches, Operators() as operators:
            run(*args)
        return len(launches) + len(operators.calls)
    run(*args)  # compiles, and has cuBLAS set itself up
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        run(*args)
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e.name for e in on_gpu if not e.name.startswith(("Memset", "Memcpy"))]
    # cuBLAS splits a small matmul along K and adds the parts up in a kernel of its own.
    return len([name for name in kernels if "splitKreduce" not in name])


# --- Claim 1 ---

SHAPES = [(20, 12, 16), (48, 40, 80)]


@pytest.mark.parametrize("M, K, N", SHAPES)
def test_claim_1_fused_makes_one_launch_and_naive_three(M, K, N):
    x, weight, bias = draw(M, K), draw(N, K, seed=1), draw(N, seed=2)
    assert count_launches(fused, x, weight, bias) == 1
    assert count_launches(complete.fused_linear_gelu, x, weight, bias) == 1
    assert count_launches(naive, x, weight, bias) == 3


@pytest.mark.parametrize("N", [10, 17, 1000])
def test_claim_1_row_kernels_make_one_launch(N):
    x, gamma = draw(5, N), draw(N, seed=1)
    assert count_launches(row_mean_var.row_mean_var, x) == 1
    assert count_launches(layernorm.triton_layernorm, x, gamma, gamma) == 1


def test_claim_1_rows_that_lie_apart_are_not_copied():
    x = draw(5, 20)[:, :17]
    assert count_launches(row_mean_var.row_mean_var, x) == 1
    assert count_launches(complete.row_mean_var, x) == 1
    assert count_launches(layernorm.triton_layernorm, x, None, None) == 1
    kernel = complete.layernorm_forward_kernel
    assert count_launches(complete._run_layernorm, x, None, None, EPS, kernel) == 1


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


def with_tail(bias, M, tail=0.0):
    buffer = bias.new_full((max(M, len(bias)),), tail)
    buffer[: len(bias)] = bias
    return buffer[: len(bias)]


def buggy(x, weight, bias):
    kernel = linear_gelu.fused_linear_gelu_kernel_buggy_bias_axis
    return linear_gelu.fused_linear_gelu(x, weight, with_tail(bias, len(x)), kernel=kernel)


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
    with watched.record() as launches:
        buggy(x, weight, bias)
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
    assert not torch.allclose(buggy(x, weight, bias), naive(x, weight, bias), atol=1e-4)


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


def test_claim_3_a_correct_variance_fails_against_the_default_of_var():
    x = draw(5, 10)
    _, var = row_mean_var.row_mean_var(x)
    assert not torch.allclose(var, x.var(dim=-1), atol=1e-5)
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
    for module in (layernorm, complete):
        out = torch.zeros_like(x)
        kernel = module.layernorm_forward_kernel
        kernel[(6,)](x, None, None, out, 6, N, x.stride(0), EPS, BLOCK_N=BLOCK_N)
        assert not torch.allclose(out[:, :BLOCK_N], right[:, :BLOCK_N], atol=1e-2)
        assert (out[:, BLOCK_N:] == 0).all()  # what the block does not cover is not written
        kernel[(6,)](x, None, None, out, 6, N, x.stride(0), EPS, BLOCK_N=128)
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


def wrong_over_correct(x):
    ones, zeros = torch.ones(x.shape[1], device=DEVICE), torch.zeros(x.shape[1], device=DEVICE)
    correct, wrong = (
        layernorm.triton_layernorm(x, ones, zeros, EPS, kernel)
        for kernel in (
            layernorm.layernorm_forward_kernel,
            layernorm.layernorm_forward_kernel_wrong_eps,
        )
    )
    at = correct.abs().argmax(dim=-1, keepdim=True)
    return (wrong.gather(-1, at) / correct.gather(-1, at)).flatten().double().cpu()


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
    parameters = torch.ones(x.shape[1], device=DEVICE), torch.zeros(x.shape[1], device=DEVICE)
    kernel = layernorm.layernorm_forward_kernel_wrong_eps
    wrong = layernorm.triton_layernorm(x, *parameters, EPS, kernel)
    return not torch.allclose(wrong, torch.nn.functional.layer_norm(x, x.shape[1:]), atol=1e-4)


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
    kernel = linear_gelu.fused_linear_gelu_kernel_buggy_bias_axis
    out = linear_gelu.fused_linear_gelu(x, weight, with_tail(bias, 20, tail), kernel=kernel)
    expected = gelu(x @ weight.T + tail)[16:]
    assert torch.allclose(out[16:], expected, atol=1e-3, equal_nan=True)
    assert out[:16].isfinite().all()


def test_question_3_the_keyword_is_unbiased():
    x = draw(5, 10)
    _, var = row_mean_var.row_mean_var(x)
    assert not torch.allclose(var, x.var(dim=-1, unbiased=True), atol=1e-5)
    assert torch.allclose(var, x.var(dim=-1, unbiased=False), atol=1e-5)


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


# --- What the sections print ---

PRINTS = [
    pytest.param(load(name_of(script)), name, id=f"{name_of(script)} {name}")
    for script in SCRIPTS
    for name in dir(load(name_of(script)))
    if re.fullmatch(r"section_\w+|worked_examples", name)
]
every_print = pytest.mark.parametrize("module, name", PRINTS)
# The wrappers through which the scripts call their kernels, and the tolerance of their checks.
TOLERANCE = {
    "fused_linear_gelu": 1e-4,
    "row_mean_var": 1e-5,
    "triton_layernorm": 1e-4,
    "_run_layernorm": 1e-4,
}
VERDICT = re.compile(r"([^?\n]*)\? (True|False)")
FIGURE = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")


def printed(module, name, capsys, change=lambda tolerance: 0.0, only="", calls=None):
    """What a section prints where the output of each kernel, or of those only, is off."""

    def off(wrapper, tolerance):
        def call(*args, **kwargs):
            if calls is not None:
                calls.append(args)
            kernels = [a.fn.__name__ for a in (*args, *kwargs.values()) if hasattr(a, "fn")]
            out, error = wrapper(*args, **kwargs), change(tolerance)
            if not re.search(only, " ".join(kernels)):
                return out
            return tuple(o + error for o in out) if isinstance(out, tuple) else out + error

        return call

    with pytest.MonkeyPatch.context() as patch:
        for wrapper in TOLERANCE.keys() & vars(module).keys():
            patch.setattr(module, wrapper, off(getattr(module, wrapper), TOLERANCE[wrapper]))
        getattr(module, name)()
    return capsys.readouterr().out


def verdicts(text):
    return [verdict for _, verdict in VERDICT.findall(text)]


@every_print
def test_a_verdict_turns_where_a_kernel_is_off_by_more_than_the_tolerance(module, name, capsys):
    right = printed(module, name, capsys)
    slightly_off = printed(module, name, capsys, lambda tolerance: tolerance / 2)
    assert verdicts(slightly_off) == verdicts(right)
    off = printed(module, name, capsys, lambda tolerance: tolerance * 2)
    assert verdicts(off) == ["False"] * len(verdicts(right))


@every_print
def test_a_verdict_on_a_buggy_kernel_turns_where_that_kernel_is_off(module, name, capsys):
    right = printed(module, name, capsys)
    off = printed(module, name, capsys, lambda tolerance: tolerance * 2, only="buggy|wrong")
    assert verdicts(off) == [
        "False" if re.search("buggy|wrong", label) else verdict
        for label, verdict in VERDICT.findall(right)
    ]


@every_print
def test_a_figure_is_the_kernels_or_the_oracles_as_its_line_says(module, name, capsys):
    right = printed(module, name, capsys).splitlines()
    off = printed(module, name, capsys, lambda tolerance: -1.0).splitlines()
    for line, line_off in zip(right, off, strict=True):
        of_the_kernel = re.search("diff|own|wrong_flat", line) is not None
        for figure, figure_off in zip(FIGURE.findall(line), FIGURE.findall(line_off), strict=True):
            assert (abs(float(figure) - float(figure_off)) > 1e-3) == of_the_kernel, line
        assert not re.search("diff[^:]*: -", line_off), "the difference of what is too small"


def chapters_inputs():
    """What the chapter has its wrappers called with, as its seeds give it: by the shape of x."""
    torch.manual_seed(0)
    layer, linear = torch.nn.Linear(12, 16), torch.randn(20, 12)
    torch.manual_seed(0)
    rows = torch.randn(5, 10)
    torch.manual_seed(0)
    module = torch.randn(6, 17)
    torch.manual_seed(1)
    normalized = [module, torch.randn(4, 8), NEAR_CONSTANT]
    calls = [(linear, layer.weight, layer.bias), (rows,)]
    calls += [(x, torch.ones(x.shape[1]), torch.zeros(x.shape[1]), EPS) for x in normalized]
    return {x.shape: (x, *others) for x, *others in calls}


@every_print
def test_the_sections_check_the_chapters_inputs(module, name, capsys):
    calls = []
    printed(module, name, capsys, calls=calls)
    assert calls
    for call in calls:
        for argument, chapters in zip(call, chapters_inputs()[call[0].shape], strict=False):
            assert torch.equal(torch.as_tensor(argument).cpu(), torch.as_tensor(chapters))


@pytest.mark.parametrize("module", [layernorm, complete], ids=["03", "04"])
def test_layernorm_takes_the_modules_own_parameters(module):
    norm = torch.nn.LayerNorm(17, eps=0.5).requires_grad_(False)
    norm.weight.copy_(draw(17, seed=1)), norm.bias.copy_(draw(17, seed=2))
    x = draw(6, 17).cpu()
    assert torch.allclose(module.layernorm(x, norm), norm(x), atol=1e-5)
