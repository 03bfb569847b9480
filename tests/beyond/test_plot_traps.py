"""The pictures of the traps: what they plot, and what happens where one cannot be drawn."""

import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import INTERPRET, ROOT, load

PLOT = ROOT / "beyond/plot_traps.py"


@pytest.fixture(scope="module")
def plots():
    pytest.importorskip("matplotlib", reason="matplotlib, which draws the pictures, is missing")
    return load("beyond/plot_traps.py")


def drawn(plots, name):
    return plots.FIGURES[name](plots.Figure(layout="constrained"))


def test_eps(plots):
    data = drawn(plots, "eps")
    scan, formula = data["scan"], data["formula"]
    assert scan["var"][[0, -1]] == pytest.approx([1e-14, 1e2], rel=1e-5)
    # Within 1 %, and the float32 rounding of an output of at most 2.
    assert scan["wrong"] == pytest.approx(formula, rel=0.01, abs=2e-7)
    assert (scan["correct"] < 3e-7).all()
    (wrong,), (var,) = (data["near-constant row"][key] for key in ("wrong", "var"))
    assert wrong == pytest.approx(0.1701836735010147, rel=1e-4)
    assert var == pytest.approx(1.3642420526593924e-12)
    assert data["typical rows"]["wrong"].shape == (4,)
    assert data["typical rows"]["wrong"].max() == pytest.approx(9.4e-6, rel=0.05)


def test_bias(plots):
    data = drawn(plots, "bias")
    assert data["past_the_end"].tolist() == [16, 17, 18, 19]
    zeros, threes = data["buggy"]
    assert np.array_equal(zeros[:16], threes[:16])
    assert np.abs(zeros - data["right"]).max() == pytest.approx(0.43509936332702637, rel=1e-5)
    assert (threes[16:] - data["right"][16:]).mean() > 2


def test_variance(plots):
    data = drawn(plots, "variance")
    N = data["N"][:, None]
    assert 10 in N and data["to_biased"].shape == (len(N), 5)
    assert np.abs(data["to_biased"] - 1).max() < 1e-6
    assert data["to_unbiased"] == pytest.approx(np.broadcast_to(N / (N - 1), (len(N), 5)), rel=1e-6)


def test_traffic(plots):
    try:
        data = drawn(plots, "traffic")
    except plots.Skip as reason:
        pytest.skip(str(reason))
    assert data["passes"] == {"naive": {"write": 3, "read": 2}, "fused": {"write": 1, "read": 0}}
    assert (data["times"] is None) == INTERPRET


def test_tf32(plots):
    if INTERPRET:
        with pytest.raises(plots.Skip, match="needs a GPU"):
            drawn(plots, "tf32")
        # Its copy of the script, without "ieee", is made all the same.
        errors = plots.relative_errors(ks=[16, 100])
        assert max(errors) < 1e-6
        assert plots.relative_errors_by_default(ks=[16, 100]) == errors
    else:
        data = drawn(plots, "tf32")
        assert max(data["ieee"]) < 1e-5
        if plots.torch.cuda.get_device_capability() >= (8, 0) and plots.torch.version.cuda:
            assert min(data["default"]) > 1e-4


@pytest.mark.skipif(not INTERPRET, reason="a GPU is in use: its times replace the picture's")
def test_without_a_gpu_the_pictures_with_a_gpus_figures_are_left_alone(
    plots, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(plots, "ROOT", tmp_path)
    pictures = [tmp_path / "beyond/figures" / f"{name}.png" for name in ("traffic", "tf32")]
    pictures[0].parent.mkdir(parents=True)
    for picture in pictures:
        picture.write_text("a GPU's")
    monkeypatch.setattr(sys, "argv", ["plot_traps.py", "traffic", "tf32"])
    plots.main()
    assert [picture.read_text() for picture in pictures] == ["a GPU's", "a GPU's"]
    assert capsys.readouterr().out.count("skipped") == 2

    monkeypatch.setattr(sys, "argv", ["plot_traps.py", "traffic", "--out", str(tmp_path)])
    plots.main()
    assert capsys.readouterr().out == f"traffic: {tmp_path / 'traffic.png'}\n"
    assert (tmp_path / "traffic.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_figure_is_an_error(plots, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["plot_traps.py", "epsilon", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        plots.main()
    assert "no figure epsilon: there are eps bias" in capsys.readouterr().err


def test_without_matplotlib_one_line_says_what_to_install(tmp_path):
    missing = "raise ModuleNotFoundError('No module', name='matplotlib')\n"
    (tmp_path / "matplotlib.py").write_text(missing)
    run = subprocess.run(
        [sys.executable, PLOT],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout) == (1, "")
    install = f"{sys.executable} -m pip install matplotlib"
    assert run.stderr == f"plot_traps.py needs matplotlib: {install}\n"
