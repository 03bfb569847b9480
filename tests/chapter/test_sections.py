"""What the sections print: the Expected Output, the worked examples' figures, honest verdicts."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
import watched
from helpers import (
    EPS,
    INTERPRET,
    NEAR_CONSTANT,
    SCRIPTS,
    complete,
    draw,
    every_script,
    expected_file,
    interpreted,
    layernorm,
    linear_gelu,
    load,
    name_of,
    replace_kernels,
)

# The worked examples as the book prints them. Last digits differ between processors.
TEXT = (Path(__file__).parent / "book_worked_examples.txt").read_text()
BOOK = re.split(r"(?=\n=== Worked Example 20\.[123]\.1 ===\n)", TEXT)[1:]
NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")
ROUNDINGS = 1e-6  # a few float32 roundings of values around 1


def run_main(script, monkeypatch, capsys, *arguments):
    """What the script prints in this process, where each access is watched if interpreted."""
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")
    out, err = capsys.readouterr()
    assert err == ("running in Triton's interpreter, on the CPU\n" if INTERPRET else "")
    return out


@every_script
def test_a_script_prints_its_expected_output_and_the_worked_examples(
    script, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)  # a script runs from anywhere
    expected = expected_file(script).read_text()
    assert run_main(script, monkeypatch, capsys) == expected
    if script == SCRIPTS[-1]:
        return
    printed = run_main(script, monkeypatch, capsys, "--worked-examples")
    assert printed.startswith(expected)
    printed, book = printed[len(expected) :], BOOK[SCRIPTS.index(script)]
    assert NUMBER.sub("#", printed) == NUMBER.sub("#", book)
    for line, book_line in zip(printed.splitlines(), book.splitlines(), strict=True):
        for figure, books in zip(NUMBER.findall(line), NUMBER.findall(book_line), strict=True):
            # Four decimals of a tensor may round to either side.
            rounding = 1.1e-4 if "tensor(" in line else ROUNDINGS
            assert float(figure) == pytest.approx(float(books), rel=0, abs=rounding), line


# --- Each line compares what it says: tried with a known error in the kernels' outputs ---

OUTPUTS = ("c_ptr", "out_ptr", "mean_ptr", "var_ptr")
INPUTS = ("a_ptr", "b_ptr", "bias_ptr", "x_ptr", "gamma_ptr", "beta_ptr", "eps")
VERDICT = re.compile(r"([^?\n]*)\? (True|False)")


class Off:
    """In a kernel's place: launches it, scales its variance, adds an error to all its outputs."""

    def __init__(self, kernel, error, calls, scale=1.0):
        self.kernel, self.error, self.calls, self.scale = kernel, error, calls, scale

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            named = dict(zip(self.kernel.arg_names, arguments, strict=False))
            self.calls.append([named[name] for name in INPUTS if name in named])
            self.kernel[grid](*arguments, **options)
            for name in OUTPUTS:
                if name in named:
                    named[name].mul_(self.scale if name == "var_ptr" else 1.0).add_(self.error)

        return launch


def run_sections(module, capsys, error=0.0, only="", calls=None, stand_ins=None):
    """What sections and worked examples print where the kernels (or only some) are off.

    The error is in units of the tolerance of the section's check. stand_ins: by name, what takes a
    kernel's place, if not one that is off by this error.
    """

    def stand_in(name, kernel):
        if "probe" in name:
            return kernel
        tolerance = 1e-5 if "mean_var" in name else 1e-4
        shift = error * tolerance if re.search(only, name) else 0.0
        off = Off(kernel, shift, [] if calls is None else calls)
        return (stand_ins or {}).get(name, off)

    with pytest.MonkeyPatch.context() as patch:
        replace_kernels(patch, module, stand_in)
        for name in dir(module):
            if name.startswith("section_"):
                results = getattr(module, name)()
                if hasattr(module, "worked_examples"):
                    module.worked_examples(*results)
    return capsys.readouterr().out


every_module = pytest.mark.parametrize(
    "module", [load(name_of(script)) for script in SCRIPTS], ids=map(name_of, SCRIPTS)
)


@every_module
def test_a_verdict_turns_where_its_kernel_is_off_by_more_than_the_tolerance(module, capsys):
    right = VERDICT.findall(run_sections(module, capsys))
    assert right
    assert VERDICT.findall(run_sections(module, capsys, error=0.5)) == right
    off = VERDICT.findall(run_sections(module, capsys, error=2))
    assert off == [(label, "False") for label, _ in right]
    off = VERDICT.findall(run_sections(module, capsys, error=2, only="buggy|wrong"))
    assert off == [
        (label, "False" if re.search("buggy|wrong", label) else verdict) for label, verdict in right
    ]


@every_module
def test_a_false_verdict_is_true_where_the_kernel_computes_what_it_is_compared_with(module, capsys):
    stand_ins = {}
    for name, kernel in vars(module).items():
        if re.search("kernel_(buggy|wrong)", name):  # the correct kernel in its place
            stand_ins[name] = Off(getattr(module, re.sub("_(buggy|wrong).*", "", name)), 0.5e-4, [])
        elif name == "row_mean_var_kernel":  # the unbiased variance of rows of 10
            stand_ins[name] = Off(kernel, 0.5e-5, [], scale=10 / 9)
    # All within the tolerance. The correct kernels are off: their output is not what is compared.
    printed = run_sections(module, capsys, error=1e4, stand_ins=stand_ins)
    verdicts = VERDICT.findall(printed)
    assert {v for label, v in verdicts if re.search("(?i)buggy|wrong", label)} == {"True"}


@every_module
def test_a_figure_is_the_kernels_or_the_oracles_as_its_line_says(module, capsys):
    right = run_sections(module, capsys).splitlines()
    off = run_sections(module, capsys, error=-1e4).splitlines()
    for line, line_off in zip(right, off, strict=True):
        of_the_kernel = re.search("diff|own|wrong_flat", line) is not None
        for figure, figure_off in zip(NUMBER.findall(line), NUMBER.findall(line_off), strict=True):
            assert (abs(float(figure) - float(figure_off)) > 1e-3) == of_the_kernel, line
        assert not re.search("diff[^:]*: -", line_off), "the difference of what is too small"


def chapters_inputs():
    """What the chapter has its kernels called with, as its seeds give it: by the shape of x."""
    torch.manual_seed(0)
    layer, linear = torch.nn.Linear(12, 16), torch.randn(20, 12)
    torch.manual_seed(0)
    rows = torch.randn(5, 10)
    torch.manual_seed(0)
    module = torch.randn(6, 17)
    torch.manual_seed(1)
    normalized = [module, torch.randn(4, 8), NEAR_CONSTANT]
    calls = [(linear, layer.weight.t(), layer.bias), (rows,)]
    calls += [(x, torch.ones(x.shape[1]), torch.zeros(x.shape[1]), EPS) for x in normalized]
    return {x.shape: (x, *others) for x, *others in calls}


@every_module
def test_the_sections_check_the_chapters_inputs(module, capsys):
    calls = []
    run_sections(module, capsys, calls=calls)
    assert calls
    for call in calls:
        expected = chapters_inputs()[call[0].shape]
        for argument, chapters in zip(call, expected, strict=True):
            assert torch.equal(torch.as_tensor(argument).cpu(), torch.as_tensor(chapters))


@pytest.mark.parametrize("module", [layernorm, complete], ids=["03", "04"])
def test_layernorm_gets_the_modules_own_parameters(module, monkeypatch, capsys):
    class LayerNorm(torch.nn.LayerNorm):
        def __init__(self, N):
            super().__init__(N, eps=0.5)
            with torch.no_grad():
                self.weight.copy_(draw(N, seed=1)), self.bias.copy_(draw(N, seed=2))

    monkeypatch.setattr(torch.nn, "LayerNorm", LayerNorm)
    calls = []
    printed = run_sections(module, capsys, calls=calls)
    calls = [call for call in calls if len(call) == 4]
    assert len(calls) == 5
    for x, gamma, beta, eps in calls:
        N = x.shape[1]
        assert torch.equal(gamma, draw(N, seed=1)) and torch.equal(beta, draw(N, seed=2))
        assert eps == 0.5
    assert "allclose to nn.LayerNorm? True" in printed


@interpreted
def test_the_probe_reads_past_the_end_of_its_bias(capsys):
    with watched.record() as launches:
        linear_gelu.worked_examples(*linear_gelu.section_20_1())
    probe = launches[-1].tensors["bias_ptr"]
    assert probe.shape == (16,)
    elements = (launches[-1].read(probe) - probe.data_ptr()) // 4
    assert sorted(elements) == list(range(20))
