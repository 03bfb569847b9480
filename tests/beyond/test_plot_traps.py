"""The pictures of the traps: what they show, and what the script says where it cannot draw."""

import functools
import os
import runpy
import sys

import numpy as np
import pytest
from helpers import gelu, load, torch

os.environ["MPLBACKEND"] = "agg"  # with a notebook's, importing matplotlib can fail
pytest.importorskip("matplotlib", reason="matplotlib, which draws the pictures, is missing")
plots = load("beyond/plot_traps.py")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """The folder that all is drawn into, once: the tests get each picture from a cache."""
    folder = tmp_path_factory.mktemp("drawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["plot_traps.py", "--out", str(folder)])
        for name in ("eps", "bias", "variance", "traffic", "tf32"):
            patch.setattr(plots, name, functools.cache(getattr(plots, name)))
        plots.main()
        yield folder


def test_eps():
    var, correct, wrong = plots.eps()[1].values()
    exact = (8 / 3) ** 0.5 * np.sqrt(var / (var + 1e-5))  # the largest step over the deviation
    predicted = exact * np.abs(np.sqrt(var + 1e-5) / (np.sqrt(var) + 1e-5) - 1)
    assert wrong[5:] == pytest.approx(predicted[5:], rel=0.01, abs=2e-7) and max(correct) < 3e-7
    assert [wrong[0], max(wrong[1:5])] == pytest.approx([0.170184, 9.4e-6], rel=0.05)  # the book's


def test_bias_is_right_on_the_diagonal_alone():
    x, layer, differences = plots.bias()[1].values()
    x, layer = x.double(), layer.double()
    for tail, difference in differences.items():
        bias = torch.nn.functional.pad(layer.bias, (0, 4), value=tail)
        exact = gelu(x @ layer.weight.T + bias[:, None]) - gelu(layer(x))
        assert difference == pytest.approx(exact.numpy(), abs=1e-6)
        assert ((np.abs(difference) < 1e-6) == np.eye(20, 16)).all()


def test_variance():
    N, biased, unbiased = plots.variance()[1].values()
    assert N[5] == 10 and max(biased) < 1e-6
    assert unbiased == pytest.approx(1 / (N - 1), abs=1e-6)


def test_traffic_and_tf32(folder):
    fig, times = plots.traffic()
    tops = [bar.get_y() + bar.get_height() for bar in fig.axes[0].patches]
    assert tops == [passes * 8192 * 8192 * 4 / 2**20 for passes in (1, 2, 3, 4, 5, 1)]
    errors = plots.tf32()[1]
    default, ieee = plots.columns(errors, "cpu", "default", "ieee")
    assert len(ieee) == 5 and max(ieee) < 1e-6 and (default == ieee).all()
    if plots.DEVICE == "cpu":  # the record of one GPU; another may show other figures
        assert all(float(row["fused_ms"]) > float(row["naive_ms"]) for row in times)
        default, ieee = plots.columns(errors, "cuda", "default", "ieee")
        assert len(ieee) == 5 and min(default) > 1e-4 and max(ieee) < 1e-6
        for name in ("traffic.csv", "tf32.csv"):  # what the GPU measured is kept
            rows = (plots.FIGURES / name).read_text().splitlines()
            measured = {row for row in rows if row.startswith("cuda")}
            assert measured and measured <= set((folder / name).read_text().splitlines())
    assert len(list(folder.glob("*.png"))) == 5


@pytest.mark.parametrize("package", ["triton", "matplotlib"])  # the scripts import the one
def test_a_backend_is_set_and_a_missing_package_named(monkeypatch, capsys, package):
    monkeypatch.setenv("MPLBACKEND", "a notebook's")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "01_fused_linear_gelu")  # to be imported again
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(plots.__file__)
    told = capsys.readouterr().err
    assert told.startswith(f"import of {package} halted") and "pip install" in told
    assert os.environ["MPLBACKEND"] == "agg"


def test_a_folder_that_cannot_be_written_is_an_error_at_once(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [plots.__file__, "--out", "/proc"])
    monkeypatch.setattr(plots.layernorm, "triton_layernorm", None)  # for the first picture
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(plots.__file__, run_name="__main__")
    assert "cannot write into /proc" in capsys.readouterr().err
