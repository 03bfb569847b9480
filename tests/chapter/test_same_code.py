"""The scripts repeat each other by design: what they share must be the same code in each of them.

A buggy twin is its kernel but for the lines that carry the bug. Names and order are the book's.
"""

import ast
import difflib
import json
import re
from pathlib import Path

import pytest
from helpers import ROOT

CHAPTER = ROOT / "chapter20"
LINEAR, ROWS, NORM, COMPLETE = (
    "01_fused_linear_gelu.py",
    "02_row_mean_var.py",
    "03_fused_layernorm.py",
    "04_standalone_complete.py",
)


def functions(script):
    """The functions of a script: name, and syntax tree."""
    tree = ast.parse((CHAPTER / script).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def code(script, name):
    """A function without its name, comments and docstring, and without the case of a buggy kernel.

    What 01 launches by the name "kernel", 04 launches by the kernel's own.
    """
    function = functions(script)[name]
    body = function.body[ast.get_docstring(function) is not None :]
    statements = [ast.unparse(node) for node in (function.args, *body)]
    text = "\n".join(s for s in statements if not s.startswith("if kernel is "))
    text = text.replace("kernel=fused_linear_gelu_kernel, ", "")
    text = text.replace(" kernel[grid]", " fused_linear_gelu_kernel[grid]")
    return text.replace("eps=1e-05, kernel=layernorm_forward_kernel", "eps, kernel")


@pytest.mark.parametrize(
    "script, name",
    [
        *[(script, "check") for script in (LINEAR, ROWS, NORM)],
        (LINEAR, "fused_linear_gelu_kernel"),
        (LINEAR, "fused_linear_gelu"),
        (ROWS, "row_mean_var_kernel"),
        (NORM, "layernorm_forward_kernel"),
        (NORM, "layernorm_forward_kernel_wrong_eps"),
        (NORM, "triton_layernorm"),
    ],
)
def test_section_20_4_repeats_a_function(script, name):
    other = "_run_layernorm" if name == "triton_layernorm" else name
    assert code(script, name) == code(COMPLETE, other)


def text_lines(script, name):
    node = functions(script)[name]
    return ast.get_source_segment((CHAPTER / script).read_text(), node).splitlines()


@pytest.mark.parametrize(
    "script, name, suffix",
    [
        (LINEAR, "fused_linear_gelu_kernel", "_buggy_bias_axis"),
        (NORM, "layernorm_forward_kernel", "_wrong_eps"),
        (COMPLETE, "layernorm_forward_kernel", "_wrong_eps"),
    ],
)
def test_a_buggy_twin_stands_below_its_kernel_and_differs_where_it_says_so(script, name, suffix):
    names = list(functions(script))
    assert names.index(name + suffix) == names.index(name) + 1
    kernel, buggy = (text_lines(script, n) for n in (name, name + suffix))
    changed = [line[2:] for line in difflib.ndiff(kernel, buggy) if line.startswith("+ ")]
    assert changed[0].startswith(f"def {name}{suffix}(")
    assert len(changed) > 1
    assert all(re.search(r"  # BUG: \S", line) for line in changed[1:])
    assert len(buggy) == len(kernel)
    assert not any("# BUG" in line for line in kernel)


# --- The book's names ---

# By script: each function of the book, its parameters, its local names in the order of the page.
BOOK = json.loads((Path(__file__).parent / "book_names.json").read_text())


@pytest.mark.parametrize("script", BOOK)
def test_functions_parameters_and_local_names_are_the_books_in_its_order(script):
    ours = functions(script)
    assert [name for name in ours if name in [n for n, *_ in BOOK[script]]] == [
        name for name, *_ in BOOK[script]
    ]
    for name, parameters, local in BOOK[script]:
        assert [argument.arg for argument in ours[name].args.args] == parameters
        nodes = [n for n in ast.walk(ours[name]) if isinstance(n, ast.Name)]
        stored = [n for n in nodes if isinstance(n.ctx, ast.Store)]
        stored.sort(key=lambda node: (node.lineno, node.col_offset))
        first = list(dict.fromkeys(node.id for node in stored))
        assert [n for n in first if n in local] == local, name


def test_section_20_4_names_each_section_above_its_kernel():
    lines = (CHAPTER / COMPLETE).read_text().split("\n")
    sections = [i for i, line in enumerate(lines) if re.match(r"# 20\.\d [A-Z]", line)]
    assert [lines[i][2:6] for i in sections] == ["20.1", "20.2", "20.3"]
    assert {lines[i + 1] for i in sections} == {"@triton.jit"}
