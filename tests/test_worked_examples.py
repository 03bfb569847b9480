"""The figures that the chapter's worked examples captured."""

import os
import platform
import re
import subprocess
import sys

import numpy
import pytest
import triton
from scripts import ROOT, load

# As the book prints them; on a GPU 20.1.1 and 20.3.2 differ from this in their last digits.
BOOK = {
    "chapter20/01_fused_linear_gelu.py": """
=== Worked Example 20.1.1 ===
shapes: x torch.Size([20, 12]) weight torch.Size([16, 12]) bias torch.Size([16]) out torch.Size([20, 16])
allclose to nn.Linear + gelu oracle? True
max abs diff: 2.384185791015625e-07

=== Worked Example 20.1.2 ===
buggy kernel allclose to oracle? False
max abs diff: 0.43509936332702637

bias of 16 values, read at 0 to 19:
[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, -1000, -1001, -1002, -1003]
""",  # noqa: E501
    "chapter20/02_row_mean_var.py": """
=== Worked Example 20.2.1 ===
mean allclose to x.mean(dim=-1)? True
var allclose to x.var(unbiased=False)? True
var allclose to x.var(unbiased=True) [WRONG comparison]? False
max abs diff vs unbiased: 0.2560422420501709

kernel's own var values:    tensor([0.8021, 0.8585, 1.0370, 0.3780, 2.3044])
biased (/N) oracle values:  tensor([0.8021, 0.8585, 1.0370, 0.3780, 2.3044])
unbiased (/(N-1)) oracle:  tensor([0.8912, 0.9539, 1.1522, 0.4200, 2.5604])
""",
    "chapter20/03_fused_layernorm.py": """
=== Worked Example 20.3.1 ===
allclose to nn.LayerNorm? True
max abs diff: 1.1920928955078125e-07

=== Worked Example 20.3.2 ===
typical row: correct allclose? True  wrong-eps allclose? True  max diff (wrong): 9.298324584960938e-06
near-constant row: correct allclose? True  wrong-eps allclose? False
near-constant row max diff (wrong-eps vs oracle): 0.1701836735010147

oracle_flat: tensor([[ 0.0003, -0.0003,  0.0006,  0.0000, -0.0006,  0.0003,  0.0000, -0.0003]])
wrong_flat:  tensor([[ 0.0854, -0.0854,  0.1708,  0.0000, -0.1708,  0.0854,  0.0000, -0.0854]])
""",  # noqa: E501
}

NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")
every_script = pytest.mark.parametrize("name", BOOK)


@every_script
def test_figures_are_the_books_up_to_rounding(name, capsys):
    load(name).worked_examples()
    printed = capsys.readouterr().out
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", BOOK[name])
    figures = [float(number) for number in NUMBER.findall(printed)]
    book = [float(number) for number in NUMBER.findall(BOOK[name])]
    for figure, expected in zip(figures, book, strict=True):
        assert figure == pytest.approx(expected, rel=1e-3, abs=1e-6)


# In which order a matrix product adds up depends on the processor; so do a figure's last digits.
# These are the kernels of the processor on which the book's figures were captured.
BOOK_PROCESSOR = {
    "OPENBLAS_CORETYPE": "Haswell",  # numpy's: the interpreter's tl.dot
    "MKL_CBWR": "AVX2",  # torch's: the oracles
    "ATEN_CPU_CAPABILITY": "avx2",
    "TRITON_INTERPRET": "1",
}


on_x86_64 = pytest.mark.skipif(
    platform.machine() != "x86_64"
    or "openblas" not in numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"],
    reason="the book's last digits are those of OpenBLAS on an x86-64",
)
can_interpret = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
    and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4),
    reason="triton before 3.7 cannot interpret a loop with numpy 2.4 and newer",
)


@on_x86_64
@can_interpret
@every_script
def test_interpreted_figures_are_the_books_to_the_last_digit(name):
    printed = subprocess.run(
        [sys.executable, ROOT / name, "--worked-examples"],
        env=os.environ | BOOK_PROCESSOR,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    assert printed.endswith(BOOK[name])
