"""Each row of ERRATA.md, shown; where a claim's own test shows it, the row names that test."""

import re

import pytest
import torch
import watched
from helpers import (
    DEVICE,
    EPS,
    INTERPRET,
    ROOT,
    buggy,
    count_launches,
    draw,
    interpreted,
    layernorm,
    linear_gelu,
    load,
    on_a_gpu,
    ones_and_zeros,
    row_mean_var,
    sparse,
    wrong_eps,
)

ROWS = ROOT / "chapter20/02_row_mean_var.py"
NORM = ROOT / "chapter20/03_fused_layernorm.py"


def printed(tmp_path, script, ours, books):
    """The path of a copy of the script with a piece of code as the chapter prints it."""
    source = script.read_text()
    assert ours in source
    path = tmp_path / "printed.py"
    path.write_text(source.replace(ours, books))
    return path


def test_every_row_names_a_test_and_every_test_here_has_a_row():
    rows = re.findall(r"\| `(test_\w+)` \|$", (ROOT / "ERRATA.md").read_text(), re.MULTILINE)
    tests = "".join(path.read_text() for path in (ROOT / "tests/chapter").glob("test_*.py"))
    assert rows and [row for row in rows if f"def {row}(" not in tests] == []
    ours = {n for n, v in globals().items() if n.startswith("test_") and v.__module__ == __name__}
    assert ours - set(rows) == {"test_every_row_names_a_test_and_every_test_here_has_a_row"}


def test_the_near_constant_row_has_eight_values():
    *_, (oracle_flat, _, _) = layernorm.section_20_3()
    assert oracle_flat.shape == (1, 8)


def test_short_random_rows_do_show_the_eps_bug():
    x = draw(500, 2)
    right = torch.nn.functional.layer_norm(x, (2,))
    shows = ~torch.isclose(wrong_eps(x), right, atol=1e-4).all(dim=-1)
    assert 0.15 < shows.double().mean().item() < 0.25


@interpreted
def test_only_M_above_N_reads_past_the_end():
    highest = {}
    for M, N in ((20, 16), (16, 20)):
        with watched.record() as launches:
            buggy(draw(M, 12), draw(N, 12, seed=1), draw(N, seed=2))
        bias = launches[0].tensors["bias_ptr"]
        highest[M, N] = (launches[0].read(bias).max() - bias.data_ptr()) // 4
    assert highest == {(20, 16): 19, (16, 20): 15}


def test_the_order_of_a_sum_decides_its_last_digits():
    # Section 20.1's own numbers in float32, added up from either end.
    torch.manual_seed(0)
    weight, bias = torch.nn.Linear(12, 16).parameters()
    products = torch.randn(20, 1, 12) * weight.detach()
    exact = products.double().sum(dim=-1) + bias.double()

    def error(order):
        total = torch.zeros(20, 16)
        for k in order:
            total += products[..., k]
        return (total + bias - exact).abs().max().item()

    upwards, downwards = error(range(12)), error(reversed(range(12)))
    assert upwards != downwards
    assert max(upwards, downwards) < 1e-6


@on_a_gpu
def test_cpu_tensors_are_refused_on_a_gpu():
    x, out = torch.randn(5, 10), torch.empty(5)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        row_mean_var.row_mean_var_kernel[(5,)](x, out, out, 5, 10, 10, BLOCK_N=16)


def test_the_printed_transpose_is_a_second_launch():
    def as_printed(x, weight, bias):
        w_t = weight.t().contiguous()
        return linear_gelu.fused_linear_gelu(x, w_t.t(), bias)

    x, weight, bias = draw(20, 12), draw(16, 12, seed=1), draw(16, seed=2)
    assert count_launches(as_printed, x, weight, bias) == 2


def test_the_printed_layernorm_writes_past_its_output(tmp_path):
    path = printed(tmp_path, NORM, "out_ptr + row * N", "out_ptr + row * stride_m")
    module = load(path)
    x = draw(6, 40)[:, :17]
    parameters = ones_and_zeros(x)
    if INTERPRET:
        with pytest.raises(Exception, match="writes .* elements that are not its own"):
            module.triton_layernorm(x, *parameters)
    else:
        # The output lies in a buffer that is ours as far as the kernel writes.
        buffer = torch.full((6 * 40,), 7.0, device=DEVICE)
        out = buffer[: 6 * 17].view(6, 17)
        kernel = module.layernorm_forward_kernel
        kernel[(6,)](x, *parameters, out, 6, 17, x.stride(0), EPS, BLOCK_N=32)
        assert (buffer[6 * 17 :] != 7.0).any()


def test_the_printed_row_mean_var_is_wrong_for_a_transposed_x():
    x = draw(10, 5).T
    mean, var = torch.empty(5, device=DEVICE), torch.empty(5, device=DEVICE)
    kernel = row_mean_var.row_mean_var_kernel
    kernel[(5,)](x, mean, var, 5, 10, x.stride(0), BLOCK_N=16)
    assert mean.isfinite().all() and not torch.allclose(mean, x.mean(dim=-1), atol=1e-2)
    assert torch.allclose(row_mean_var.row_mean_var(x)[0], x.mean(dim=-1), atol=1e-5)


@pytest.mark.skipif(not INTERPRET, reason="on a GPU the kernel would read what is not its own")
@pytest.mark.parametrize("script", [ROWS, NORM], ids=["02", "03"])
def test_a_32_bit_row_offset_wraps(script, tmp_path):
    path = printed(tmp_path, script, "tl.program_id(0).to(tl.int64)", "tl.program_id(0)")
    module = load(path)
    x = sparse().as_strided((3, 5), (2**30, 1))
    with pytest.raises(Exception, match="reads 5 elements that are not its own"):
        if script == ROWS:
            module.row_mean_var(x)
        else:
            module.triton_layernorm(x, *ones_and_zeros(x))
