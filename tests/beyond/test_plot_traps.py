"""The pictures of the traps: what they plot, and that it can be read at the README's width."""

import io
import itertools
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
from helpers import INTERPRET, ROOT, load

PLOT = ROOT / "beyond/plot_traps.py"
NAMES = ["eps", "bias", "variance", "traffic", "tf32"]
README_WIDTH = 8  # inches


@pytest.fixture(scope="module")
def plots():
    pytest.importorskip("matplotlib", reason="matplotlib, which draws the pictures, is missing")
    return load("beyond/plot_traps.py")


def drawn(plots, name):
    fig = plots.Figure(layout="constrained")
    return fig, plots.FIGURES[name](fig)


def check_texts(fig, Text, Axes):
    """Every text is at least 8 points in the README, whole, and clear of every other one."""
    fig.draw_without_rendering()
    # An axis keeps the labels of ticks out of its view, and all of them when it is switched off.
    hidden = set()
    for ax in fig.findobj(Axes):
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [t for t in axis.get_major_ticks() if ax.axison and low <= t.get_loc() <= high]
            shown = {axis.label, *(label for t in ticks for label in (t.label1, t.label2))}
            hidden |= set(axis.findobj(Text)) - shown
    texts = [t for t in fig.findobj(Text) if t.get_text().strip() and t.get_visible()]
    texts = [t for t in texts if t not in hidden]
    assert len(texts) > 5
    for text in texts:
        size = text.get_fontsize() * README_WIDTH / fig.get_figwidth()
        assert size >= 8, f"{text.get_text()!r} has {size} points"
    extents = [(t.get_text(), t.get_window_extent()) for t in texts]
    for text, box in extents:
        inside = fig.bbox.x0 <= box.x0 and box.x1 <= fig.bbox.x1
        assert inside and fig.bbox.y0 <= box.y0 and box.y1 <= fig.bbox.y1, f"{text!r} is clipped"
    for (text, box), (other, other_box) in itertools.combinations(extents, 2):
        assert not box.padded(-1).overlaps(other_box.padded(-1)), f"{text!r} lies on {other!r}"


def check_background(fig, plots):
    png = io.BytesIO()
    fig.savefig(png, format="png")
    png.seek(0)
    pixels = plots.matplotlib.image.imread(png)
    assert pixels.shape[1] == README_WIDTH * 150
    assert (pixels[..., 3] == 1).all()  # opaque: a dark page does not shine through
    assert (pixels[[0, 0, -1, -1], [0, -1, 0, -1]] == 1).all()


def check_readable(fig, plots):
    check_texts(fig, plots.matplotlib.text.Text, plots.matplotlib.axes.Axes)
    check_background(fig, plots)


def test_eps(plots):
    fig, data = drawn(plots, "eps")
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
    check_readable(fig, plots)


def test_bias(plots):
    fig, data = drawn(plots, "bias")
    assert data["past_the_end"].tolist() == [16, 17, 18, 19]
    assert data["right"].shape == (20, 16) and data["buggy"].shape == (2, 20, 16)
    zeros, threes = data["buggy"]
    assert np.array_equal(zeros[:16], threes[:16])
    assert np.abs(zeros - data["right"]).max() == pytest.approx(0.43509936332702637, rel=1e-5)
    assert (threes[16:] - data["right"][16:]).mean() > 2
    outlines = [
        patch.get_bbox().bounds
        for ax in fig.axes
        for patch in ax.patches
        if isinstance(patch, plots.Rectangle)
    ]
    assert outlines == [(-0.5, 15.5, 16, 4)] * 4
    check_readable(fig, plots)


def test_variance(plots):
    fig, data = drawn(plots, "variance")
    N = data["N"][:, None]
    assert 10 in N and data["to_biased"].shape == (len(N), 5)
    assert np.abs(data["to_biased"] - 1).max() < 1e-6
    assert data["to_unbiased"] == pytest.approx(np.broadcast_to(N / (N - 1), (len(N), 5)), rel=1e-6)
    check_readable(fig, plots)


def test_traffic(plots):
    try:
        fig, data = drawn(plots, "traffic")
    except plots.Skip as reason:
        pytest.skip(str(reason))
    assert data["passes"] == {"naive": {"write": 3, "read": 2}, "fused": {"write": 1, "read": 0}}
    texts = [text.get_text() for text in fig.findobj(plots.matplotlib.text.Text)]
    assert texts.count("write\n1280 B") == 4 and texts.count("read\n1280 B") == 2
    assert ("no GPU here:\ntimes not measured" in texts) == INTERPRET
    assert (data["times"] is None) == INTERPRET
    check_readable(fig, plots)


@pytest.mark.skipif(INTERPRET, reason="no GPU: TF32 is its hardware's")
def test_tf32(plots):
    fig, data = drawn(plots, "tf32")
    assert max(data["ieee"]) < 1e-5
    if plots.torch.cuda.get_device_capability() >= (8, 0) and plots.torch.version.cuda:
        assert min(data["default"]) > 1e-4
    check_readable(fig, plots)


@pytest.mark.skipif(not INTERPRET, reason="a GPU is in use: test_tf32 draws the picture")
def test_without_a_gpu_tf32_is_skipped_and_its_copied_script_computes_the_same(plots):
    with pytest.raises(plots.Skip, match="needs a GPU"):
        drawn(plots, "tf32")
    errors = plots.relative_errors(ks=[16, 100])
    assert max(errors) < 1e-6
    assert plots.relative_errors_by_default(ks=[16, 100]) == errors


@pytest.mark.parametrize("interpreted", [True, False], ids=["interpreter", "no-interpreter"])
def test_a_gpus_pictures_can_be_read(plots, monkeypatch, interpreted):
    """Their layout, from made-up measurements: it needs no GPU."""
    writes, both = {"write": 1280, "read": 0}, {"write": 1280, "read": 1280}
    counts = {"mm": writes, "add": both, "gelu": both, "fused": writes}
    counted = {"shape": [20, 16], "bytes": 1280, "counts": counts}
    times = {"K": [16, 64, 256, 1024], "naive": [0.5, 0.6, 1.2, 3.1], "fused": [0.6, 1.7, 6.5, 25]}
    errors = np.geomspace(7e-8, 3e-7, len(plots.K_OF_TF32)).tolist()
    answers = {"count_bytes": counted, "relative_errors": errors if interpreted else None}
    monkeypatch.setattr(plots, "INTERPRET", False)
    monkeypatch.setattr(plots, "in_interpreter", answers.get)
    monkeypatch.setattr(plots, "time_over_k", lambda: times)
    monkeypatch.setattr(plots, "relative_errors", lambda: errors)
    monkeypatch.setattr(plots, "relative_errors_by_default", lambda: [6e-4] * len(errors))
    monkeypatch.setattr(plots.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    for name in ("traffic", "tf32"):
        fig, _ = drawn(plots, name)
        check_readable(fig, plots)


def test_the_same_run_writes_the_same_file(plots, monkeypatch, tmp_path, capsys):
    files = []
    for out in (tmp_path / "first", tmp_path / "second"):
        monkeypatch.setattr(sys, "argv", ["plot_traps.py", "eps", "--out", str(out)])
        plots.main()
        files.append((out / "eps.png").read_bytes())
        assert [path.name for path in out.iterdir()] == ["eps.png"]
    assert files[0] == files[1]
    assert capsys.readouterr().out.startswith("eps: ")


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
    traffic, tf32 = capsys.readouterr().out.splitlines()
    assert traffic.startswith(f"traffic: skipped, {pictures[0]} has a GPU's times: --out DIR ")
    assert tf32.startswith("tf32: skipped, it needs a GPU: ")

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


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_picture_has_the_readmes_width(name):
    png = (ROOT / "beyond/figures" / f"{name}.png").read_bytes()
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">I", png[16:20]) == (README_WIDTH * 150,)
