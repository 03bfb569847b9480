"""beyond/benchmark.py's tables and plots, and that beyond/README.md quotes what was measured.

The benchmark itself needs a GPU: test_docs.py runs it where there is one.
"""

import re
import subprocess
import sys

import pytest
from scripts import ROOT, load

RESULTS = ROOT / "beyond/results"
README = (ROOT / "beyond/README.md").read_text()
HALVES = ["host", "layernorm", "linear_gelu"]
benchmark = load("beyond/benchmark.py")


@pytest.mark.parametrize("half", HALVES)
def test_the_readme_quotes_the_table_of_the_csv(half):
    rows = benchmark.read(RESULTS / f"{half}.csv")
    table = (RESULTS / f"{half}.md").read_text()
    assert getattr(benchmark, f"table_{half}")(rows) + "\n" == table
    assert table in README


def test_every_figure_in_the_readmes_text_is_in_a_table():
    tables = "".join((RESULTS / f"{half}.md").read_text() for half in HALVES)
    text = README
    for half in HALVES:
        text = text.replace((RESULTS / f"{half}.md").read_text(), "")
    figures = re.findall(r"(?<![\d.])\d+\.\d\d(?![\d.])", text)
    assert len(figures) > 10
    assert [figure for figure in figures if figure not in re.findall(r"[\d.]+", tables)] == []
    section = (ROOT / "README.md").read_text().partition("\n## How fast")[2].partition("\n## ")[0]
    quoted = re.findall(r"\d\.\d\d", section)
    assert quoted
    assert [figure for figure in quoted if f"| {figure} |" not in tables] == []


@pytest.mark.parametrize("half", HALVES)
def test_each_row_names_its_machine(half):
    for row in benchmark.read(RESULTS / f"{half}.csv"):
        for column in ("gpu", "driver", "cuda", "torch", "triton", "liger-kernel", "quack-kernels"):
            assert row[column]
        assert float(row.get("lowest_ms") or row["lowest_us"]) > 0


@pytest.mark.parametrize("half", ["layernorm", "linear_gelu"])
def test_the_plot_is_drawn_from_the_csv(half, tmp_path):
    rows = benchmark.read(RESULTS / f"{half}.csv")
    getattr(benchmark, f"plot_{half}")(tmp_path / "plot.png", rows)
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_rows_compare_within_a_round_only():
    times = {"copy": [1.0, 2.0, 4.0], "other": [2.0, 2.0, 8.0]}
    rows = benchmark.rows_of({"N": 8}, times, "copy", lambda ms: {"TB/s": 6 / ms})
    assert rows[1] == {
        "N": 8,
        "contender": "other",
        "ms": 2.0,
        "lowest_ms": 2.0,
        "highest_ms": 8.0,
        "TB/s": 3.0,
        "time_over_copy": 2.0,
    }


def test_a_contender_that_fails_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "do_bench", lambda call, **_: call())
    contenders = {"sound": lambda: 1.0, "broken": lambda: 1 / 0}
    assert benchmark.rounds_of(contenders, 3, 1) == {"sound": [1.0, 1.0, 1.0]}
    assert "broken failed: ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_it_refuses_a_half_that_is_not_there():
    command = [sys.executable, ROOT / "beyond/benchmark.py", "softmax"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "no such half: softmax; there are host, layernorm, linear-gelu" in result.stderr
