"""beyond/benchmark.py's tables and plots, and that beyond/README.md quotes what was measured.

The benchmark itself needs a GPU: a quick run is tried where there is one.
"""

import re
import subprocess
import sys

import pytest
from helpers import ROOT, interpreted, load, on_a_gpu

RESULTS = ROOT / "beyond/results"
README = (ROOT / "beyond/README.md").read_text()
PARTS = ["host", "layernorm", "linear_gelu"]
benchmark = load("beyond/benchmark.py")


@pytest.mark.parametrize("part", PARTS)
def test_the_readme_quotes_the_table_of_the_csv_and_a_plot_can_be_drawn_of_it(part, tmp_path):
    rows = benchmark.read(RESULTS / f"{part}.csv")
    table = (RESULTS / f"{part}.md").read_text()
    _, inverse, plot = benchmark.PARTS[part.replace("_", "-")]
    assert benchmark.table(rows, inverse) == table and table in README
    assert (plot is None) == (part == "host")
    if plot:
        benchmark.save(tmp_path / "plot.png", *plot(rows))
        assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


LAYERNORM = benchmark.by_case(benchmark.read(RESULTS / "layernorm.csv"))
LINEAR = benchmark.by_case(benchmark.read(RESULTS / "linear_gelu.csv"))
OTHERS = {"eager", "torch.compile", "max-autotune", "Liger", "QuACK"}


def speed(case, contender):
    return f"{benchmark.ratio(case[contender], True):.2f}"


def test_the_layernorm_ladder():
    """Each step's figures are those of the contenders that it names."""
    cell = r"([\d.]+) \(([^)]+)\)"
    steps = re.findall(rf"^\| (\d) \| .* \| (\w+), (\d+) \| {cell} \| {cell} \|$", README, re.M)
    assert [step for step, *_ in steps] == ["1", "2", "3", "4", "5", "6"]
    for _, dtype, N, before, slower, after, faster in steps:
        assert before == speed(LAYERNORM[dtype, N], slower)
        assert after == speed(LAYERNORM[dtype, N], faster)


def test_the_linear_gelu_ladder():
    times = re.findall(r"^\| \d \| .* \| (\d+\.\d\d) \|$", README, re.M)
    case = LINEAR["bfloat16", "4096 x 768 x 3072"]
    steps = ["chapter, its own tile", "chapter, best tile", "pointers, erf", "TMA, erf"]
    steps += ["TMA, polynomial", "fast_linear_gelu"]
    assert times == [f"{benchmark.ratio(case[step], False):.2f}" for step in steps]


def test_the_readme_tells_where_another_is_ahead():
    told = re.findall(r"^\| (\w+) \| (\d+) \| ([\d.]+) \| ([\w.-]+), ([\d.]+) \|$", README, re.M)
    ahead = []
    for (dtype, N), case in LAYERNORM.items():
        times = {name: benchmark.ratio(case[name], False) for name in OTHERS & case.keys()}
        best = min(times, key=times.get)
        if times[best] < 0.98 * benchmark.ratio(case["fast_layernorm"], False):
            ahead.append((dtype, N, speed(case, "fast_layernorm"), best, speed(case, best)))
    assert sorted(told) == sorted(ahead)


def test_contenders_take_turns_and_one_that_fails_is_left_out(monkeypatch, capsys):
    turns = []
    times = {"A": 2.0, "B": 1.0, "C": 0.0}
    contenders = {name: lambda name=name: turns.append(name) or 4 / times[name] for name in times}
    found = benchmark.rounds_of(contenders, 3, lambda call: call())
    assert "".join(turns) == "ABC" + "AB" + "BA" + "AB"  # once to warm up, then three rounds
    assert found == {"A": [2.0] * 3, "B": [4.0] * 3}
    assert "C failed: ZeroDivisionError" in capsys.readouterr().out


def test_rows_compare_within_a_round_only():
    times = {"copy": [1.0, 2.0, 4.0], "other": [2.0, 2.0, 8.0]}
    _, row = benchmark.rows_of({"N": 8}, times, "TB/s", lambda ms: 6 / ms)
    assert (row["ms"], row["lowest_ms"], row["highest_ms"]) == (2, 2, 8)
    assert (row["TB/s"], row["time_over_limit"]) == (3, 2)


@on_a_gpu
def test_a_quick_run_writes_every_part(tmp_path):
    command = [sys.executable, ROOT / "beyond/benchmark.py", "--quick", "--out", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert sorted(path.stem for path in tmp_path.glob("*.csv")) == PARTS


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["softmax"], "no such part: softmax; there are host, sizes, layernorm, linear-gelu"),
        (["--quick", "--out", RESULTS], "give another folder with --out"),
        pytest.param([], "benchmark.py needs a GPU: torch sees none", marks=interpreted),
    ],
)
def test_refuses(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *map(str, arguments)])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    out, told = capsys.readouterr()
    assert out == "" and message in told
