"""Draws the chapter's traps with the numbered scripts' own kernels.

    python beyond/plot_traps.py [--out DIR]   # needs matplotlib; into beyond/figures/, or DIR

eps: where eps goes in LayerNorm. bias: the bias on the wrong axis. variance: over N or N - 1.
traffic: what fusing saves, in bytes and in time. tf32: what float32 loses in TF32.

Without a GPU, Triton's interpreter runs the kernels. Times and TF32's errors, which only a GPU can
measure, then come from figures/traffic.csv and tf32.csv, where a run on a GPU has recorded them.
"""

import argparse
import csv
import importlib
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

FIGURES = Path(__file__).resolve().with_name("figures")
sys.path.append(str(FIGURES.parents[1] / "chapter20"))
os.environ["MPLBACKEND"] = "agg"  # importing matplotlib fails if a notebook's is not installed
try:
    import numpy as np
    import torch

    linear_gelu = importlib.import_module("01_fused_linear_gelu")
    row_mean_var = importlib.import_module("02_row_mean_var")
    layernorm = importlib.import_module("03_fused_layernorm")
    import matplotlib
    from matplotlib.colors import CenteredNorm
    from matplotlib.figure import Figure
    from torch.nn.functional import gelu, layer_norm
except (ModuleNotFoundError, SystemExit) as error:  # without triton, the scripts exit
    install = f"{sys.executable} -m pip install -r requirements.txt matplotlib"
    print(f"{error}\nplot_traps.py needs all that this installs: {install}", file=sys.stderr)
    sys.exit(2)

DEVICE = linear_gelu.DEVICE
RUN_ON = torch.cuda.get_device_name() if DEVICE == "cuda" else "Triton's interpreter on the CPU"
RUN_ON += f", torch {torch.__version__}, triton {linear_gelu.triton.__version__}"
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"  # also for the colour-blind
LINE = {"color": "black", "lw": 1, "ls": ":"}
matplotlib.rcdefaults()  # the same picture whatever the reader's own settings
matplotlib.rcParams.update({"figure.dpi": 150, "font.size": 9, "legend.frameon": False})
matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False})


def new_figure(title, columns=1, rows=()):
    """A figure with its title and a last line that says what it, or its rows, ran on; its axes."""
    fig = Figure(figsize=(8, 4.4), layout="constrained")
    fig.suptitle(title, x=0.01, ha="left", weight="bold")
    run_on = "\n".join(sorted({row["run_on"] for row in rows})) or RUN_ON
    fig.supxlabel(f"Run on: {run_on}", x=0.01, ha="left", fontsize=8, color=GREY)
    return fig, fig.subplots(1, columns)


def log_log(ax, x_base=10, **settings):
    """Logarithmic axes; labelled 1e-04, since a raised exponent is too small to read."""
    ax.set_xscale("log", base=x_base, subs=[])
    ax.set_yscale("log", subs=[])
    ax.set(**settings)
    ax.xaxis.set_major_formatter("{x:.0e}" if x_base == 10 else "{x:.0f}")
    ax.yaxis.set_major_formatter("{x:.0e}")


def with_record(name, measured):
    """The rows measured here, and those that figures/name.csv has of the other device."""
    with (FIGURES / f"{name}.csv").open(newline="") as file:
        others = [row for row in csv.DictReader(file) if row["device"] != DEVICE]
    return others + [{"device": DEVICE, "run_on": RUN_ON, **row} for row in measured]


def columns(rows, device, *names):
    rows = [row for row in rows if row["device"] == device]
    return [np.array([float(row[name]) for row in rows]) for name in names]


def eps():
    """Where eps goes: both LayerNorm kernels' largest errors over the variance of the row."""
    steps = torch.tensor([1.0, -1.0, 2.0, 0.0, -2.0, 1.0, 0.0, -1.0])
    std = steps.std(unbiased=False).item()
    torch.manual_seed(1)
    # About 0 float32 holds the near-constant row's steps at every scale, about 5 it does not.
    scan = torch.logspace(-7, 1, 33)[:, None] * steps / std
    x = torch.cat([5.0 + 1e-6 * steps[None, :], torch.randn(4, 8), scan])
    gamma, beta, errors = torch.ones(8, device=DEVICE), torch.zeros(8, device=DEVICE), []
    for kernel in layernorm.layernorm_forward_kernel, layernorm.layernorm_forward_kernel_wrong_eps:
        out = layernorm.triton_layernorm(x.to(DEVICE), gamma, beta, 1e-5, kernel).cpu()
        errors.append((out - layer_norm(x.double(), (8,), eps=1e-5)).abs().amax(dim=-1).numpy())
    correct, wrong = errors
    var = x.double().var(dim=-1, unbiased=False).numpy()
    fig, ax = new_figure("eps outside the square root: typical rows hide it")
    log_log(ax, xlabel="variance of the row", ylabel="largest error against float64")
    v = np.logspace(-14, 2, 1601)
    ratio = np.sqrt(v + 1e-5) / (np.sqrt(v) + 1e-5)
    predicted = 2 / std * np.sqrt(v / (v + 1e-5)) * np.abs(ratio - 1)
    ax.plot(v, predicted, color=GREY, lw=1, label="wrong, as the formula predicts")
    ax.plot(var[5:], wrong[5:], "o", color=ORANGE, label="wrong: 1 / (sqrt(var) + eps)")
    ax.plot(var[5:], correct[5:], "^--", color=BLUE, label="correct: 1 / sqrt(var + eps)")
    ax.plot(var[:1], wrong[:1], "ks", mfc="none", ms=9, label="wrong: the near-constant row")
    ax.plot(var[1:5], wrong[1:5], "kD", mfc="none", ms=9, label="wrong: the typical rows")
    ax.text(var[0], 3 * wrong[0], f"{wrong[0]:.2g}", ha="center")
    ax.text(0.6, 2.5e-5, f"{wrong[1:5].max():.2g}", ha="center")
    ax.axhline(1e-4, **LINE)
    ax.text(1.5e-14, 1.6e-4, "atol = 1e-4: the check fails above, passes below")
    ax.axvline(1e-5, color="black", lw=0.8, ls="-.", label="var = eps")
    ax.text(0.08, 1.2e-6, "at var = 1/4 they agree", ha="right")
    ax.legend(loc="lower right", labelspacing=0.3)
    return fig, {"var": var, "correct": correct, "wrong": wrong}


def bias():
    """The bias axis: how far the buggy output is from the right one, for two tails."""
    torch.manual_seed(0)
    M, K, N = 20, 12, 16
    layer, x = torch.nn.Linear(K, N).requires_grad_(False).to(DEVICE), torch.randn(M, K).to(DEVICE)
    right = linear_gelu.fused_linear_gelu(x, layer.weight, layer.bias)
    fig, panels = new_figure("Bias on the row axis: rows 16 to 19 add what lies past its end", 2)
    off = {}
    for panel, tail in zip(panels, (0.0, 3.0), strict=True):
        # The bias is a view of a longer buffer, where the tail lies past its end.
        buffer = torch.cat([layer.bias, torch.full((M - N,), tail, device=DEVICE)])
        out, w_t = torch.empty(M, N, device=DEVICE), layer.weight.t()
        strides = *x.stride(), *w_t.stride(), *out.stride()
        linear_gelu.fused_linear_gelu_kernel_buggy_bias_axis[2, 1](
            x, w_t, buffer[:N], out, M, N, K, *strides, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16
        )
        off[tail] = (out - right).cpu().numpy()
        fig.colorbar(panel.imshow(off[tail], cmap="PuOr", norm=CenteredNorm()), ax=panel)
        panel.plot([-0.5, 15.5, -0.5], [-0.5, 15.5, 15.5], **LINE)  # the diagonal, and row 16
        panel.set(title=f"buggy - right, {tail:.0f} past the end", xlabel="output column")
        panel.set(ylabel="row", xticks=[0, 5, 10, 15], yticks=[0, 5, 10, 15, 19])
    return fig, {"x": x.cpu(), "layer": layer.cpu(), "off": off}


def variance():
    """How far the kernel's variance is from the biased and the unbiased oracle, over N."""
    N = np.array([2, 3, 4, 5, 7, 10, 17, 33, 100, 330, 1000, 3300, 10000, 33000, 100000])
    biased, unbiased = np.empty(len(N)), np.empty(len(N))
    torch.manual_seed(0)
    for i, n in enumerate(N.tolist()):
        x = torch.randn(5, n)
        var = row_mean_var.row_mean_var(x.to(DEVICE))[1].cpu()
        biased[i] = (var / x.double().var(dim=-1, unbiased=False) - 1).abs().max()
        unbiased[i] = (x.double().var(dim=-1) / var - 1).abs().max()
    fig, ax = new_figure("The kernel's variance is over N; x.var() is over N - 1 by default")
    log_log(ax, xlabel="N (elements in a row)", ylabel="largest |ratio - 1| of 5 rows")
    ax.plot(N, 1 / (N - 1), color=GREY, lw=1, label="N / (N - 1)")
    ax.plot(N, unbiased, "o", color=ORANGE, label="x.var() / kernel")
    ax.plot(N, biased, "^--", color=BLUE, label="kernel / x.var(unbiased=False)")
    ax.text(12, 0.14, f"the chapter's N = 10: a ratio of {1 + unbiased[5]:.4f}")
    # allclose takes atol + rtol * var; rtol is 1e-5, and the variance of these rows about 1.
    ax.axhline(2e-5, **LINE)
    ax.text(2, 1.3e-5, "atol = 1e-5: the check fails above, passes below", va="top")
    ax.legend(loc="upper right")
    return fig, {"N": N, "biased": biased, "unbiased": unbiased}


def naive(x, weight, bias):
    """The layer as three operators: matmul, add, GELU."""
    return gelu(x @ weight.T + bias)


def traffic():
    """Memory traffic: what the naive and the fused layer move of their result, and their times."""
    runs, measured = (naive, linear_gelu.fused_linear_gelu), []
    do_bench = linear_gelu.triton.testing.do_bench
    for K in (16, 64, 256, 1024) if DEVICE == "cuda" else ():
        layer = [torch.randn(shape, device=DEVICE) for shape in ((8192, K), (8192, K), (8192,))]
        times = [round(do_bench(partial(run, *layer)), 4) for run in runs]
        measured.append({"K": K, "naive_ms": times[0], "fused_ms": times[1]})
    rows = with_record("traffic", measured)
    fig, (ax, clock) = new_figure("Fusing saves 4 of 5 passes; in small tiles, no time", 2, rows)
    passes = ["matmul writes", "+ bias reads", "+ bias writes", "GELU reads", "GELU writes"]
    colours = [ORANGE, "white", ORANGE, "white", ORANGE, ORANGE]
    lower = [0, 256, 512, 768, 1024, 0]  # a pass moves 8192 * 8192 * 4 bytes, 256 MiB
    bars = ax.bar([0, 0, 0, 0, 0, 1], 256, bottom=lower, color=colours, edgecolor="black")
    ax.bar_label(bars, [*passes, "the kernel writes"], label_type="center")
    ax.set(xticks=[0, 1], xticklabels=["three operators", "fused"], yticks=range(0, 1281, 256))
    ax.set_ylabel("traffic of the (8192, 8192) float32 result (MiB)")
    K, naive_ms, fused_ms = columns(rows, "cuda", "K", "naive_ms", "fused_ms")
    log_log(clock, x_base=4, xlim=(4, 2048), ylim=(0.1, 1e3), xlabel="K", ylabel="time (ms)")
    clock.plot(K, naive_ms, "o-", color=ORANGE, label="three operators, matmul by cuBLAS")
    clock.plot(K, fused_ms, "^--", color=BLUE, label="fused, the scripts' tile of 16 x 16 x 16")
    for k, ms, ratio in zip(K, fused_ms, fused_ms / naive_ms, strict=True):
        clock.text(k, 1.3 * ms, f"{ratio:.2g} x", ha="right")
    clock.legend(loc="upper left")
    return fig, rows


def relative_error(module, K):
    """The norm of the error of fused_linear_gelu against float64 over the norm of the result."""
    torch.manual_seed(0)
    layer = torch.randn(32, K), torch.randn(32, K) / K**0.5, torch.randn(32)
    exact = naive(*(t.double() for t in layer))
    out = module.fused_linear_gelu(*(t.to(DEVICE) for t in layer), BLOCK_M=32, BLOCK_N=32).cpu()
    return f"{(out - exact).norm() / exact.norm():.1e}"


def tf32():
    """TF32: the fused kernel's error over K, with "ieee", by default, and in the interpreter."""
    source, ieee = Path(linear_gelu.__file__).read_text(), ', input_precision="ieee"'
    assert ieee in source
    measured = []
    with tempfile.TemporaryDirectory() as folder:  # Triton reads a kernel's source from its file
        Path(folder, "default_precision.py").write_text(source.replace(ieee, ""))
        sys.path.append(folder)
        default = importlib.import_module("default_precision")
        for K in (16, 64, 256, 1024, 4096):
            errors = {"default": relative_error(default, K), "ieee": relative_error(linear_gelu, K)}
            measured.append({"K": K, **errors})
    rows = with_record("tf32", measured)
    K, default, ieee = columns(rows, "cuda", "K", "default", "ieee")
    fig, ax = new_figure('TF32: what tl.dot loses without "ieee"', rows=rows)
    log_log(ax, x_base=4, ylim=(1e-8, 1e-2), xlabel="K (products summed)", ylabel="relative error")
    ax.plot(K, default, "o-", color=ORANGE, label="GPU, default precision")
    ax.plot(K, ieee, "^--", color=BLUE, label='GPU, input_precision="ieee"')
    K, error = columns(rows, "cpu", "K", "ieee")
    ax.plot(K, error, "s:", color=GREEN, label="interpreter, any precision")
    ax.axhline(2**-10, **LINE)
    ax.text(4096, 1.3 * 2**-10, "2**-10: the last bit of 1.0 in TF32", ha="right")
    ax.legend(loc="center right")
    return fig, rows


def main():
    parser = argparse.ArgumentParser(description="Draws the chapter's traps.")
    parser.add_argument("--out", type=Path, default=FIGURES, metavar="DIR")
    out = parser.parse_args().out
    try:  # before the work, not after it
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        parser.error(f"cannot write into {out}: {error.strerror}")
    for picture in eps, bias, variance, traffic, tf32:
        fig, data = picture()
        file = out / f"{picture.__name__}.png"
        fig.savefig(file, metadata={"Software": None})  # nothing that changes with the version
        print(file)
        if picture in (traffic, tf32):
            with file.with_suffix(".csv").open("w", newline="") as record:
                table = csv.DictWriter(record, data[0].keys(), lineterminator="\n")
                table.writeheader()
                table.writerows(data)


if __name__ == "__main__":
    main()
