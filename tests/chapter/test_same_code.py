"""The scripts repeat each other by design: what they share must be the same code in each of them.

A buggy twin is its kernel but for the lines that carry the bug. Names and order are the book's.
"""

import ast
import difflib
import itertools
import json
import re
from pathlib import Path

import pytest
from helpers import ROOT, SCRIPTS, name_of

# What a script has of its own, under a name that others use too.
OWN = re.compile(r"section_\w+|worked_examples")


def functions(script):
    """The functions of a script: name, and syntax tree."""
    tree = ast.parse(script.read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def code(function, renamed=None):
    """The function's code as text, without comments and docstring, with other names for names."""
    function = ast.parse(ast.unparse(function)).body[0]
    if ast.get_docstring(function) is not None:
        del function.body[0]
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            node.id = (renamed or {}).get(node.id, node.id)
    return ast.unparse(function)


PAIRS = [
    pytest.param(one, other, name, id=f"{name}: {one.stem[:2]} and {other.stem[:2]}")
    for one, other in itertools.combinations(SCRIPTS, 2)
    if one.parent == other.parent
    for name in functions(one)
    if name in functions(other) and not OWN.fullmatch(name) and name != "fused_linear_gelu"
]


@pytest.mark.parametrize("one, other, name", PAIRS)
def test_a_function_is_the_same_in_each_script(one, other, name):
    assert code(functions(one)[name]) == code(functions(other)[name])


def test_what_section_20_4_repeats():
    repeated = {(one.stem[:2], name) for one, other, name in (p.values for p in PAIRS)}
    assert repeated == {
        ("01", "check"),
        ("02", "check"),
        ("03", "check"),
        ("01", "fused_linear_gelu_kernel"),
        ("02", "row_mean_var_kernel"),
        ("03", "layernorm_forward_kernel"),
        ("03", "layernorm_forward_kernel_wrong_eps"),
    }


CHAPTER = ROOT / "chapter20"
COMPLETE = functions(CHAPTER / "04_standalone_complete.py")


def test_fused_linear_gelu_differs_by_its_kernel_argument():
    ours = functions(CHAPTER / "01_fused_linear_gelu.py")["fused_linear_gelu"]
    position = [argument.arg for argument in ours.args.args].index("kernel")
    del ours.args.args[position]
    del ours.args.defaults[position - 3]  # x, weight and bias have no default
    ours.body = [
        node
        for node in ours.body
        if not (isinstance(node, ast.If) and ast.unparse(node.test).startswith("kernel is "))
    ]
    renamed = {"kernel": "fused_linear_gelu_kernel"}
    assert code(ours, renamed) == code(COMPLETE["fused_linear_gelu"])


def test_layernorm_wrapper_is_the_same_under_both_names():
    ours = functions(CHAPTER / "03_fused_layernorm.py")["triton_layernorm"]
    ours.args.defaults = []
    ours.name = "_run_layernorm"
    assert code(ours) == code(COMPLETE["_run_layernorm"])


def text_lines(script, name):
    node = functions(script)[name]
    return ast.get_source_segment(script.read_text(), node).splitlines()


TWINS = [
    pytest.param(script, name, twin, id=f"{name_of(script)}: {twin}")
    for script in SCRIPTS
    for name in functions(script)
    for twin in functions(script)
    if "_kernel" in name and twin.startswith(name + "_")
]


def test_there_are_buggy_twins():
    assert len(TWINS) >= 3


@pytest.mark.parametrize("script, name, twin", TWINS)
def test_a_buggy_twin_stands_below_its_kernel_and_differs_where_it_says_so(script, name, twin):
    names = list(functions(script))
    assert names.index(twin) == names.index(name) + 1
    kernel, buggy = text_lines(script, name), text_lines(script, twin)
    changed = [line[2:] for line in difflib.ndiff(kernel, buggy) if line.startswith("+ ")]
    assert changed[0].startswith(f"def {twin}(")
    assert len(changed) > 1
    assert all(re.search(r"  # BUG: \S", line) for line in changed[1:])
    assert len(buggy) == len(kernel)
    assert not any("# BUG" in line for line in kernel)


# --- The book's names ---

# By script: each function of the book, its parameters, its local names in the order of the page.
BOOK = json.loads((Path(__file__).parent / "book_names.json").read_text())


@pytest.mark.parametrize("script", BOOK)
def test_functions_parameters_and_local_names_are_the_books_in_its_order(script):
    ours = functions(CHAPTER / script)
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
    lines = (CHAPTER / "04_standalone_complete.py").read_text().split("\n")
    sections = [i for i, line in enumerate(lines) if re.match(r"# 20\.\d [A-Z]", line)]
    assert [lines[i][2:6] for i in sections] == ["20.1", "20.2", "20.3"]
    assert {lines[i + 1] for i in sections} == {"@triton.jit"}
