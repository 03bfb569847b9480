"""Each row of ERRATA.md, shown."""

import importlib.util
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import test_chapter_claims as claims
import test_worked_examples
import torch
import triton
import watched
from scripts import DEVICE, INTERPRET, ROOT, layernorm, linear_gelu, row_mean_var
from test_chapter_claims import EPS, NEAR_CONSTANT, draw, interpreted
from test_compiles_for_gpus import CHAPTERS_TILE, compile_all
from test_memory_safety import on_a_gpu, sparse  # noqa: F401 (a fixture)


def printed(tmp_path, name, edits):
    """A script with lines as the chapter prints them: the edited copy, and the module."""
    source = (ROOT / name).read_text()
    for ours, books in edits.items():
        assert ours in source
        source = source.replace(ours, books)
    path = tmp_path / "printed.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location("printed", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return path, module


def test_every_row_has_a_test_and_every_test_a_row():
    rows = re.findall(r"\| `(test_\w+)` \|$", (ROOT / "ERRATA.md").read_text(), re.MULTILINE)
    ours = [
        name
        for name, value in globals().items()
        if name.startswith("test_") and getattr(value, "__module__", None) == __name__
    ]
    assert len(rows) == len(set(rows)) > 0
    assert set(ours) - {"test_every_row_has_a_test_and_every_test_a_row"} == set(rows)


def test_sqrt_eps_is_316_times_eps():
    assert EPS**0.5 / EPS == pytest.approx(316.2, abs=0.05)


def test_280_is_the_formula_at_the_rows_variance():
    var = NEAR_CONSTANT.double().var(dim=-1, unbiased=False).item()
    assert var == pytest.approx(1.36e-12, rel=5e-3)
    formula = (var + EPS) ** 0.5 / (var**0.5 + EPS)
    assert formula == pytest.approx(283.2, abs=0.05)
    assert claims.wrong_over_correct(NEAR_CONSTANT.to(DEVICE)).item() == pytest.approx(
        formula, 1e-3
    )


def test_the_near_constant_row_has_eight_values():
    _, _, near_constant = layernorm.module_and_rows()
    assert near_constant.shape == (1, 8)
    assert torch.equal(near_constant, NEAR_CONSTANT)


def test_short_random_rows_do_show_the_eps_bug():
    def share(N):
        x = draw(1000, N)
        kernel = layernorm.layernorm_forward_kernel_wrong_eps
        wrong = layernorm.triton_layernorm(x, None, None, EPS, kernel)
        right = torch.nn.functional.layer_norm(x, (N,))
        return 1 - torch.isclose(wrong, right, atol=1e-4).all(dim=-1).double().mean().item()

    assert 0.15 < share(2) < 0.25
    assert share(17) == 0


@interpreted
def test_only_M_above_N_reads_past_the_end():
    highest = {}
    for M, N in ((20, 16), (16, 20)):
        with watched.record() as launches:
            claims.buggy(draw(M, 12), draw(N, 12, seed=1), draw(N, seed=2))
        bias = launches[0].tensors["bias_ptr"]
        highest[M, N] = (launches[0].read(bias).max() - bias.data_ptr()) // 4
    assert highest == {(20, 16): 19, (16, 20): 15}


@interpreted
def test_the_fused_result_is_touched_once():
    with watched.record() as launches:
        out = claims.fused(draw(20, 12), draw(16, 12, seed=1), draw(16, seed=2))
    (launch,) = launches
    touches = np.concatenate([launch.read(out), launch.written(out)])
    assert np.array_equal(np.sort(touches), watched.addresses(out).ravel())


@test_worked_examples.on_x86_64
@test_worked_examples.can_interpret
def test_the_last_digits_depend_on_the_processor():
    def figure(core):
        environment = os.environ | test_worked_examples.BOOK_PROCESSOR | {"OPENBLAS_CORETYPE": core}
        script = ROOT / "chapter20/01_fused_linear_gelu.py"
        out = subprocess.run(
            [sys.executable, script, "--worked-examples"],
            env=environment,
            capture_output=True,
            text=True,
        ).stdout
        return float(re.search(r"max abs diff: (\S+)", out)[1])

    newer, older = figure("Haswell"), figure("Prescott")
    assert newer == 2.384185791015625e-07
    assert older != newer and older < 1e-6


@on_a_gpu
def test_cpu_tensors_are_refused_on_a_gpu():
    x, out = torch.randn(5, 10), torch.empty(5)
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        row_mean_var.row_mean_var_kernel[(5,)](x, out, out, 5, 10, 10, BLOCK_N=16)


def test_the_printed_tile_runs_in_the_interpreter_only(tmp_path, capsys):
    path, module = printed(tmp_path, "chapter20/01_fused_linear_gelu.py", CHAPTERS_TILE)
    for target in ("sm_80", "sm_90"):
        assert any(" does not compile" in fault for fault in compile_all([path], target)[path][1])
    if INTERPRET and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 3):
        with pytest.raises(Exception, match="M >= 16, N >= 16 and K >= 16"):
            module.section_20_1()
    elif INTERPRET:
        module.section_20_1()
        expected = ROOT / "expected_outputs/chapter20/01_fused_linear_gelu.txt"
        assert capsys.readouterr().out == expected.read_text()
    else:
        with pytest.raises(Exception, match="K >= 16"):
            module.section_20_1()


def test_the_default_precision_is_tf32(tmp_path):
    edits = {', input_precision="ieee"': ""}
    path, module = printed(tmp_path, "chapter20/01_fused_linear_gelu.py", edits)
    assert any("TF32" in fault for fault in compile_all([path], "sm_80")[path][1])
    layer, x, oracle = module.linear_and_input()
    errors = [
        (m.run_layer(layer, x, m.fused_linear_gelu_kernel) - oracle).abs().max().item()
        for m in (module, linear_gelu)
    ]
    if INTERPRET:
        assert errors[0] == errors[1] < 1e-6
    elif torch.version.cuda and torch.cuda.get_device_capability() >= (8, 0):
        assert 1e-3 < errors[0] < 1e-2 and errors[1] < 1e-6


def test_the_printed_transpose_is_a_second_launch():
    def as_printed(x, weight, bias):
        weight = weight.t().contiguous()
        return linear_gelu.fused_linear_gelu(x, weight.t(), bias)

    x, weight, bias = draw(128, 64), draw(256, 64, seed=1), draw(256, seed=2)
    assert claims.count_launches(as_printed, x, weight, bias) == 2
    assert claims.count_launches(claims.fused, x, weight, bias) == 1


def test_the_printed_layernorm_writes_past_its_output(tmp_path):
    edits = {"out_ptr + row * N + cols": "out_ptr + row * stride_m + cols"}
    _, module = printed(tmp_path, "chapter20/03_fused_layernorm.py", edits)
    x = draw(6, 40)[:, :17]
    if INTERPRET:
        with pytest.raises(Exception, match="writes .* elements that are not its own"):
            module.triton_layernorm(x, None, None)
    else:
        # The output lies in a buffer that is ours as far as the kernel writes.
        buffer = torch.full((6 * 40,), 7.0, device=DEVICE)
        out = buffer[: 6 * 17].view(6, 17)
        kernel = module.layernorm_forward_kernel
        kernel[(6,)](x, None, None, out, 6, 17, x.stride(0), EPS, BLOCK_N=32)
        assert (buffer[6 * 17 :] != 7.0).any()


def test_the_printed_row_mean_var_is_wrong_for_a_transposed_x():
    x = draw(10, 5).T
    mean, var = torch.empty(5, device=DEVICE), torch.empty(5, device=DEVICE)
    kernel = row_mean_var.row_mean_var_kernel
    kernel[(5,)](x, mean, var, 5, 10, x.stride(0), BLOCK_N=16)
    assert mean.isfinite().all() and not torch.allclose(mean, x.mean(dim=-1), atol=1e-2)
    assert torch.allclose(row_mean_var.row_mean_var(x)[0], x.mean(dim=-1), atol=1e-5)


@pytest.mark.skipif(not INTERPRET, reason="on a GPU the kernel would read what is not its own")
@pytest.mark.parametrize(
    "name", ["chapter20/02_row_mean_var.py", "chapter20/03_fused_layernorm.py"]
)
def test_a_32_bit_row_offset_wraps(name, tmp_path, sparse):  # noqa: F811
    _, module = printed(tmp_path, name, {"tl.program_id(0).to(tl.int64)": "tl.program_id(0)"})
    x = sparse.as_strided((3, 5), (2**30, 1))
    with pytest.raises(Exception, match="reads 5 elements that are not its own"):
        if "02" in name:
            module.row_mean_var(x)
        else:
            module.triton_layernorm(x, None, None)
