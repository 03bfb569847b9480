"""Draws the chapter's traps, each picture from a live run of the numbered scripts' own kernels.

    pip install matplotlib
    python beyond/plot_traps.py                        # all that it can, into beyond/figures/
    python beyond/plot_traps.py eps bias --out DIR     # some of them, into DIR

eps: where eps goes in LayerNorm. bias: the bias on the wrong axis. variance: over N or N - 1.
traffic: what fusing saves, in bytes and, on a GPU, in time. tf32: what float32 loses in TF32.

Without a GPU the kernels run in Triton's interpreter, as the scripts do. tf32 is then skipped, and
so is traffic, whose picture has a GPU's times, unless --out says where to draw it without them.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    # Before matplotlib: a Python without these is not worth completing.
    import torch  # noqa: I001
    import numpy as np
except ModuleNotFoundError as error:
    sys.exit(f"{error}: ./run_all.sh finds a Python that has it, or makes one, .venv/bin/python")
try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrow, Rectangle
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import NullLocator
    from torch.nn.functional import gelu, layer_norm
    from torch.utils._python_dispatch import TorchDispatchMode
except ModuleNotFoundError as error:
    sys.exit(f"plot_traps.py needs {error.name}: {sys.executable} -m pip install {error.name}")

ROOT = Path(__file__).resolve().parent.parent


def load(path):
    """The script at path as a module; it chooses the GPU or the interpreter as it always does."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LINEAR_GELU = ROOT / "chapter20/01_fused_linear_gelu.py"
linear_gelu = load(LINEAR_GELU)
row_mean_var = load(ROOT / "chapter20/02_row_mean_var.py")
layernorm = load(ROOT / "chapter20/03_fused_layernorm.py")
DEVICE, INTERPRET, triton = linear_gelu.DEVICE, linear_gelu.INTERPRET, linear_gelu.triton
CANNOT_INTERPRET = f"triton {triton.__version__} does not interpret with numpy {np.__version__}"

# The colour-blind tell these apart; in print, each line's own marker and dashes do.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"
WIDTH = 8  # inches: a README's column, so that 8 points here are 8 points there
matplotlib.rcdefaults()  # the same picture whatever the reader's own settings
matplotlib.rcParams.update(
    {
        "figure.dpi": 150,
        "font.size": 9,
        "axes.titlesize": 9.5,
        "figure.titlesize": 10.5,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "lines.linewidth": 1.6,
        "lines.markersize": 5,
    }
)


class Skip(Exception):
    """Why a picture is not drawn here."""


def in_interpreter(name):
    """What this file's function of that name returns in Triton's interpreter; None if it fails."""
    if INTERPRET:
        return globals()[name]()
    # Triton chose between GPU and interpreter as it was imported: the other takes a new process.
    run = subprocess.run(
        [sys.executable, __file__, "--interpret", name],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    if run.returncode:
        print(f"interpreting {name}:", *run.stderr.splitlines()[-1:], file=sys.stderr)
        return None
    return json.loads(run.stdout)


def draw(*shape, seed):
    """Numbers drawn on the CPU, so that a seed gives the same ones everywhere."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def frame(fig, height, title):
    """Give the figure its size, its title, and a last line that says what it ran on."""
    fig.set_size_inches(WIDTH, height)
    fig.suptitle(title, x=0.01, ha="left", weight="bold")
    where = "Triton's interpreter on the CPU" if INTERPRET else torch.cuda.get_device_name()
    ran_on = f"Run on: {where}, torch {torch.__version__}, triton {triton.__version__}"
    fig.supxlabel(ran_on, x=0.01, ha="left", fontsize=8, color=GREY)


def powers_of_ten(axis, step=1):
    """Label a logarithmic axis 1e-4, as the chapter writes it: a raised exponent is too small."""
    low, high = (round(np.log10(limit)) for limit in axis.get_view_interval())
    axis.set_ticks([10.0**e for e in range(low, high + 1, step)])
    axis.set_major_formatter(lambda value, _: f"1e{round(np.log10(value))}")
    axis.set_minor_locator(NullLocator())


def label_each(axis, values):
    """Label a logarithmic axis at these values alone."""
    axis.set_ticks(values, labels=values)
    axis.set_minor_locator(NullLocator())


def eps(fig):
    """Where eps goes: both LayerNorm kernels' largest errors over the variance of the row."""
    typical = draw(4, 8, seed=1)
    steps = torch.tensor([1.0, -1.0, 2.0, 0.0, -2.0, 1.0, 0.0, -1.0])
    near_constant = 5.0 + 1e-6 * steps[None, :]
    epsilon = torch.nn.LayerNorm(8).eps
    kernels = {
        "correct": layernorm.layernorm_forward_kernel,
        "wrong": layernorm.layernorm_forward_kernel_wrong_eps,
    }

    def variance_and_errors(x):
        x = x.to(DEVICE)
        gamma, beta = torch.ones(8, device=DEVICE), torch.zeros(8, device=DEVICE)
        result = {"var": x.double().var(dim=-1, unbiased=False).cpu().numpy()}
        oracle = layer_norm(x.double(), x.shape[1:], eps=epsilon)
        for name, kernel in kernels.items():
            out = layernorm.triton_layernorm(x, gamma, beta, epsilon, kernel)
            result[name] = (out - oracle).abs().amax(dim=-1).cpu().numpy()
        return result

    # The near-constant row's own steps, but about 0, where float32 holds them at every scale.
    std = steps.std(unbiased=False)
    scan = variance_and_errors(torch.logspace(-7, 1, 33)[:, None] * steps / std)

    def formula(var):  # wrong = correct * ratio, so the error is the largest correct * |ratio - 1|
        correct = steps.max().item() / std.item() * np.sqrt(var / (var + epsilon))
        ratio = np.sqrt(var + epsilon) / (np.sqrt(var) + epsilon)
        return correct * np.abs(ratio - 1)

    frame(fig, 4.2, "eps outside the square root: typical rows hide it, near-constant ones do not")
    ax = fig.subplots()
    ax.set(xscale="log", yscale="log", xlim=(1e-14, 1e2), ylim=(1e-13, 1e1))
    ax.set_xlabel("variance of the row (squared units of x)")
    ax.set_ylabel("largest absolute error against float64\n(the output has no unit)")
    var = np.logspace(-14, 2, 1601)
    label = "what sqrt(var + eps) / (sqrt(var) + eps)\npredicts of wrong / correct"
    ax.plot(var, formula(var), color=GREY, lw=1, label=label)
    ax.plot(scan["var"], scan["wrong"], "o", color=ORANGE, label="wrong: 1 / (sqrt(var) + eps)")
    ax.plot(scan["var"], scan["correct"], "^--", color=BLUE, label="correct: 1 / sqrt(var + eps)")
    rows = {
        "near-constant row": variance_and_errors(near_constant),
        "typical rows": variance_and_errors(typical),
    }
    for (name, row), marker, above in zip(rows.items(), "sD", (-14, 8), strict=True):
        style = {"marker": marker, "s": 70, "facecolor": "none", "edgecolor": "black", "zorder": 3}
        ax.scatter(row["var"], row["correct"], **style)
        ax.scatter(row["var"], row["wrong"], **style, label=f"the chapter's {name}")
        worst = row["wrong"].argmax()
        at = row["var"][worst], row["wrong"][worst]
        ax.annotate(f"{at[1]:.2g}", at, (6, above), textcoords="offset points")
    ax.axhline(1e-4, color="black", ls=":", lw=1.2)
    ax.text(1.5e-14, 1.6e-4, "atol = 1e-4: the check fails above, passes below", fontsize=8.5)
    ax.axvline(epsilon, color="black", ls="-.", lw=0.8)
    ax.text(epsilon * 1.4, 3, "var = eps", fontsize=8.5)
    ax.text(0.08, 1.2e-6, "at var = 1/4 they agree", ha="right", fontsize=8.5)
    powers_of_ten(ax.xaxis, 2)
    powers_of_ten(ax.yaxis, 2)
    ax.legend(loc="lower right", labelspacing=0.3)
    return {"scan": scan, "formula": formula(scan["var"]), **rows}


def bias(fig):
    """The bias axis: right and buggy output and their difference, for two tails of the bias."""
    torch.manual_seed(0)
    M, K, N = 20, 12, 16
    layer, x = torch.nn.Linear(K, N).requires_grad_(False).to(DEVICE), torch.randn(M, K).to(DEVICE)
    right = linear_gelu.fused_linear_gelu(x, layer.weight, layer.bias).cpu().numpy()

    def run_buggy(tail):  # the bias is a view of a buffer of ours, with tail where it ends
        buffer = torch.cat([layer.bias, torch.full((M - N,), tail, device=DEVICE)])
        out, w_t = torch.empty(M, N, device=DEVICE), layer.weight.t()
        strides = *x.stride(), *w_t.stride(), *out.stride()
        linear_gelu.fused_linear_gelu_kernel_buggy_bias_axis[2, 1](
            x, w_t, buffer[:N], out, M, N, K, *strides, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16
        )
        return out.cpu().numpy()

    tails = np.array([0.0, 3.0])
    buggy = np.stack([run_buggy(tail) for tail in tails])
    # What lies past the end shows in the rows that read it, and in no others.
    past_the_end = np.flatnonzero((buggy[0] != buggy[1]).any(axis=-1))

    first, last = past_the_end[[0, -1]]
    frame(
        fig,
        6,
        f"Bias on the row axis: wrong, and rows {first} to {last} add what lies past its end",
    )
    for panels, tail, out in zip(fig.subplots(2, 3), tails, buggy, strict=True):
        difference = out - right
        limits = {"vmin": min(out.min(), right.min()), "vmax": max(out.max(), right.max())}
        largest = np.abs(difference).max()
        images = [
            panels[0].imshow(right, cmap="cividis", **limits),
            panels[1].imshow(out, cmap="cividis", **limits),
            panels[2].imshow(difference, cmap="PuOr", vmin=-largest, vmax=largest),
        ]
        # In print both ends of the colours are dark: a dash marks what is too low.
        low_rows, low_cols = np.nonzero(difference < -1e-6)
        panels[2].plot(low_cols, low_rows, "_", color="black", ms=4, mew=0.6)
        labels = "output (no unit)", "difference (no unit); dash: below 0"
        for panel, image, label in zip(panels[1:], images[1:], labels, strict=True):
            fig.colorbar(image, cax=panel.inset_axes([1.05, 0, 0.07, 1]), label=label)
            outline = Rectangle((-0.5, first - 0.5), N, len(past_the_end), fill=False, lw=1.5)
            outline.set(clip_on=False, path_effects=[withStroke(linewidth=3.5, foreground="white")])
            panel.add_patch(outline)
        titles = "right", f"buggy, {tail:.0f} past the end", "buggy - right"
        for panel, title in zip(panels, titles, strict=True):
            panel.spines[:].set_visible(True)
            panel.set(title=title, xlabel="output column (index)", xticks=[0, 5, 10, 15])
            panel.set(yticks=[0, 5, 10, 15, 19])
        panels[0].set_ylabel("row (index)")
    return {"right": right, "tails": tails, "buggy": buggy, "past_the_end": past_the_end}


def variance(fig):
    """Two variances: the kernel's against the biased and the unbiased oracle, over N."""
    N = np.array([2, 3, 4, 5, 7, 10, 17, 33, 100, 330, 1000, 3300, 10000, 33000, 100000])
    to_biased, to_unbiased = [], []
    for n in N.tolist():
        x = draw(5, n, seed=0)
        var = row_mean_var.row_mean_var(x)[1].double()
        to_biased.append((var / x.double().var(dim=-1, unbiased=False)).tolist())
        to_unbiased.append((x.double().var(dim=-1) / var).tolist())
    to_biased, to_unbiased = np.array(to_biased), np.array(to_unbiased)

    frame(
        fig, 4, "The kernel's variance is over N, as LayerNorm's; x.var() is over N - 1 by default"
    )
    near, far = fig.subplots(1, 2)
    dense = np.geomspace(2, N[-1], 500)
    near.plot(dense, dense / (dense - 1), color=GREY, lw=1, label="N / (N - 1)")
    near.plot(N, to_unbiased.max(axis=-1), "o", color=ORANGE, label="x.var() / kernel")
    label = "kernel / x.var(unbiased=False)"
    near.plot(N, to_biased.max(axis=-1), "^--", color=BLUE, label=label)
    near.set(xscale="log", xlim=(1.8, 120), ylim=(0.95, 2.05))
    near.set(xlabel="N (elements in a row)", ylabel="ratio of two variances (no unit)")
    label_each(near.xaxis, N[N <= 100])
    ten = to_unbiased[N == 10].max()
    arrow = {"arrowstyle": "->"}
    near.annotate(f"the chapter's N = 10: {ten:.4f}", (10, ten), (9, 1.35), arrowprops=arrow)
    near.legend(loc="upper right")

    far.plot(dense, 1 / (dense - 1), color=GREY, lw=1)
    far.plot(N, np.abs(to_unbiased - 1).max(axis=-1), "o", color=ORANGE)
    far.plot(N, np.abs(to_biased - 1).max(axis=-1), "^--", color=BLUE)
    far.set(xscale="log", yscale="log", xlim=(1, 2e5), ylim=(1e-9, 1e1))
    far.set(xlabel="N (elements in a row)", ylabel="largest |ratio - 1| of 5 rows (no unit)")
    # allclose takes atol + rtol * var; rtol is 1e-5, and the variance of these rows about 1.
    far.axhline(2e-5, color="black", ls=":", lw=1.2)
    far.text(1.2, 1.3e-5, "atol = 1e-5: the check\npasses below", fontsize=8.5, va="top")
    powers_of_ten(far.xaxis)
    powers_of_ten(far.yaxis, 2)
    return {"N": N, "to_biased": to_biased, "to_unbiased": to_unbiased}


def naive(x, weight, bias):
    """The layer as three operators: matmul, add, GELU."""
    return gelu(x @ weight.T + bias)


class Operators(TorchDispatchMode):
    """Records each operator that computes: its name, the tensors that it reads, the result."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in ("t", "transpose", "permute"):  # a view is no traffic
            self.calls.append((name, [a for a in args if isinstance(a, torch.Tensor)], result))
        return result


@contextlib.contextmanager
def interpreted_accesses():
    """What interpreted kernels read and write in the block: two lists of arrays of addresses."""
    from triton.runtime.interpreter import interpreter_builder as builder

    load, store = builder.create_masked_load, builder.create_masked_store
    reads, writes = [], []

    def recorded_load(pointers, mask, *rest):
        reads.append(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)])
        return load(pointers, mask, *rest)

    def recorded_store(pointers, value, mask, *rest):
        writes.append(pointers.data[np.broadcast_to(mask.data, pointers.data.shape)])
        return store(pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = recorded_load, recorded_store
    try:
        yield reads, writes
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store


def count_bytes():
    """The bytes of the (M, N) result that each operator and the fused kernel write and read."""
    M, K, N = 20, 12, 16
    x, weight, bias = draw(M, K, seed=0), draw(N, K, seed=1), draw(N, seed=2)
    with Operators() as operators:
        naive(x, weight, bias)
    counts = {}
    for name, tensors, result in operators.calls:
        read = sum(tensor.nbytes for tensor in tensors if tensor.shape == (M, N))
        counts[name] = {"write": result.nbytes, "read": read}
    with interpreted_accesses() as (reads, writes):
        out = linear_gelu.fused_linear_gelu(x, weight, bias)

    def bytes_of_out(addresses):
        offsets = np.concatenate(addresses).astype(np.int64) - out.data_ptr()
        return int(((offsets >= 0) & (offsets < out.nbytes)).sum()) * out.element_size()

    counts["fused"] = {"write": bytes_of_out(writes), "read": bytes_of_out(reads)}
    return {"shape": [M, N], "bytes": M * N * x.element_size(), "counts": counts}


def time_over_k():
    """Median milliseconds of both layers on this GPU, over K, for an (8192, 8192) result."""
    times = {"K": [16, 64, 256, 1024], "naive": [], "fused": []}
    for K in times["K"]:
        layer = draw(8192, K, seed=0), draw(8192, K, seed=1), draw(8192, seed=2)
        for name, run in (("naive", naive), ("fused", linear_gelu.fused_linear_gelu)):
            call = functools.partial(run, *layer)
            times[name].append(triton.testing.do_bench(call, return_mode="median"))
    return times


def traffic(fig):
    """Memory traffic: what the naive and the fused layer move of their result, and their times."""
    counted = in_interpreter("count_bytes")
    if counted is None:
        raise Skip(f"its bytes are counted in Triton's interpreter, and {CANNOT_INTERPRET}")
    counts, whole = counted["counts"], counted["bytes"]
    times = None if INTERPRET else time_over_k()

    passes = {"naive": {"write": 0, "read": 0}, "fused": {"write": 0, "read": 0}}
    for name, count in counts.items():
        for kind, number in count.items():
            passes["fused" if name == "fused" else "naive"][kind] += number / whole
    before, after = (round(sum(passes[name].values())) for name in ("naive", "fused"))
    title = f"Fusing saves {before - after} of {before} passes"
    if times:
        ratios = np.divide(times["fused"], times["naive"])
        small = f"with the scripts' small tile it takes {ratios.min():.2g} to {ratios.max():.2g} x"
        title += f"; {small} the time"
    frame(fig, 4, title)
    ax, clock = fig.subplots(1, 2, width_ratios=[5, 3])
    ax.set(xlim=(-0.02, 4.42), ylim=(0.1, 3.4))
    ax.axis("off")
    titles = {"mm": "matmul", "add": "+ bias", "gelu": "GELU", "fused": "matmul\n+ bias\n+ GELU"}
    for i, (name, count) in enumerate(counts.items()):
        left = 3.4 if name == "fused" else i * 1.05
        box = Rectangle((left, 2.1), 1, 0.75, facecolor="#DDDDDD", edgecolor="black")
        ax.add_patch(box)
        ax.text(left + 0.5, 2.475, titles[name], ha="center", va="center", weight="bold")
        moved = [(kind, count[kind]) for kind in ("read", "write") if count[kind]]
        for j, (kind, number) in enumerate(moved):
            x, down = left + (j + 0.5) / len(moved), kind == "write"
            start, length = (2.07, -1.1) if down else (0.97, 1.1)
            shape = {"width": 0.2 * number / whole, "head_width": 0.38, "head_length": 0.25}
            colours = {"facecolor": ORANGE if down else "white", "edgecolor": "black"}
            hatch = None if down else "////"
            arrow = FancyArrow(
                x, start, 0, length, **shape, length_includes_head=True, **colours, hatch=hatch
            )
            ax.add_patch(arrow)
            ax.text(x, 0.68, f"{kind}\n{number} B", ha="center", va="center", fontsize=8)
    ax.add_patch(Rectangle((0, 0.45), 4.4, 0.48, fill=False, edgecolor="black"))
    memory = f"memory: the {tuple(counted['shape'])} result in float32, {whole} B a pass"
    ax.text(2.2, 0.25, memory, ha="center", va="center")
    for name, x, operators in (("naive", 1.55, "three operators"), ("fused", 3.9, "one kernel")):
        write, read = (round(passes[name][kind]) for kind in ("write", "read"))
        text = f"{name}: {operators}\nwritten {write}x, read {read}x"
        ax.text(x, 3.15, text, ha="center", va="center")

    if times is None:
        clock.axis("off")
        clock.text(0.5, 0.5, "no GPU here:\ntimes not measured", ha="center", va="center")
        return {"passes": passes, "times": None}
    clock.plot(times["K"], times["naive"], "o-", color=ORANGE, label="naive, matmul by cuBLAS")
    label = "fused, the scripts' small\ntile of 16 x 16 x 16"
    clock.plot(times["K"], times["fused"], "^--", color=BLUE, label=label)
    for at, ratio in zip(zip(times["K"], times["fused"], strict=True), ratios, strict=True):
        clock.annotate(f"{ratio:.2g} x", at, (-4, 4), textcoords="offset points", ha="right")
    clock.set(xscale="log", yscale="log", xlabel="K, for an (8192, 8192) result in float32")
    clock.set(ylabel="median time (ms)", title="times, and fused / naive")
    clock.set(xlim=(5, 1500), ylim=(min(times["naive"]) / 3, 10 * max(times["fused"])))
    label_each(clock.xaxis, times["K"])
    powers_of_ten(clock.yaxis)
    clock.legend(loc="upper left")
    return {"passes": passes, "times": times}


K_OF_TF32 = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]


def relative_errors(module=linear_gelu, ks=K_OF_TF32):
    """For each K, the norm of the error of fused_linear_gelu against float64 over the result's."""
    errors = []
    for K in ks:
        x, weight, bias = draw(32, K, seed=0), draw(32, K, seed=1) / K**0.5, draw(32, seed=2)
        exact = gelu(x.double() @ weight.double().T + bias.double())
        out = module.fused_linear_gelu(x, weight, bias)
        errors.append(((out - exact).norm() / exact.norm()).item())
    return errors


def relative_errors_by_default(ks=K_OF_TF32):
    """The same for a copy of the script that leaves tl.dot at its default precision."""
    source, ieee = LINEAR_GELU.read_text(), ', input_precision="ieee"'
    assert ieee in source
    with tempfile.TemporaryDirectory() as folder:  # Triton reads a kernel's source from its file
        copy = Path(folder, LINEAR_GELU.name)
        copy.write_text(source.replace(ieee, ""))
        return relative_errors(load(copy), ks)


def tf32(fig):
    """TF32: the fused kernel's error over K, with "ieee", by default, and in the interpreter."""
    if INTERPRET:
        raise Skip("it needs a GPU: the interpreter computes in float32 whatever the precision")
    by_default, ieee = relative_errors_by_default(), relative_errors()
    interpreted = in_interpreter("relative_errors")

    ratios = np.divide(by_default, ieee)
    least, most = (f"{float(f'{ratio:.2g}'):.0f}" for ratio in (ratios.min(), ratios.max()))
    frame(fig, 4.2, f'By default tl.dot errs {least} to {most} times as much as with "ieee"')
    ax = fig.subplots()
    ax.plot(K_OF_TF32, by_default, "o-", color=ORANGE, label="GPU, default precision")
    ax.plot(K_OF_TF32, ieee, "^--", color=BLUE, label='GPU, input_precision="ieee"')
    if interpreted is None:
        ax.plot([], [], " ", label=f"no interpreter: {CANNOT_INTERPRET}")
    else:
        ax.plot(K_OF_TF32, interpreted, "s:", color=GREEN, label="interpreter, any precision")
    for bits, name, factor in ((10, "TF32", 1.3), (23, "float32", 0.5)):
        ax.axhline(2.0**-bits, color="black", ls="-.", lw=0.8)
        text = f"2**-{bits}: the last bit of 1.0 in {name}"
        ax.text(K_OF_TF32[-1], factor * 2.0**-bits, text, ha="right", fontsize=8.5)
    ax.set(xscale="log", yscale="log", ylim=(1e-8, 1e-2))
    label_each(ax.xaxis, K_OF_TF32)
    powers_of_ten(ax.yaxis)
    ax.set_xlabel("K (products summed in each output)")
    ax.set_ylabel("norm of the error against float64\n/ norm of the result (no unit)")
    ax.legend(loc="center right", bbox_to_anchor=(1, 0.55))
    return {"K": K_OF_TF32, "default": by_default, "ieee": ieee, "interpreted": interpreted}


FIGURES = {figure.__name__: figure for figure in (eps, bias, variance, traffic, tf32)}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figures", nargs="*", help=f"of {' '.join(FIGURES)}; all if none is named")
    parser.add_argument("--out", type=Path, metavar="DIR", help="instead of beyond/figures")
    parser.add_argument("--interpret", help=argparse.SUPPRESS)  # see in_interpreter
    args = parser.parse_args()
    if args.interpret:
        print(json.dumps(globals()[args.interpret]()))
        return
    for name in args.figures:
        if name not in FIGURES:
            parser.error(f"no figure {name}: there are {' '.join(FIGURES)}")
    if INTERPRET:
        print("running in Triton's interpreter, on the CPU", file=sys.stderr)
    folder = args.out or ROOT / "beyond/figures"
    folder.mkdir(parents=True, exist_ok=True)
    for name in args.figures or FIGURES:
        fig, file = Figure(layout="constrained"), folder / f"{name}.png"
        try:
            if name == "traffic" and INTERPRET and args.out is None:
                raise Skip(f"{file} has a GPU's times: --out DIR draws it without times, into DIR")
            FIGURES[name](fig)
        except Skip as reason:
            print(f"{name}: skipped, {reason}")
            continue
        fig.savefig(file, metadata={"Software": None})  # nothing that changes with the version
        print(f"{name}: {file}")


if __name__ == "__main__":
    main()
