"""Times the fast kernels beside what a reader would use instead, all in one run on one GPU.

    pip install matplotlib
    python beyond/benchmark.py                      # everything, into beyond/results/
    python beyond/benchmark.py layernorm --quick    # one half, few sizes: under a minute
    python beyond/benchmark.py --out DIR            # leaves beyond/results/ as it is

The contenders of a case take turns, round after round (A B C, A B C, ...), the L2 cache flushed
before each call (triton.testing.do_bench): a GPU's clocks and its power limit change from moment to
moment, so only what was measured within one round is compared. A time is the median of the rounds,
and so is a ratio; the lowest and the highest round stand beside the time. Inputs are random, drawn
on the CPU from a seed.

Writes layernorm.csv, linear_gelu.csv and host.csv, with the GPU, its driver and the versions, and a
plot of each half. Needs a GPU; liger-kernel and quack-kernels take part where they are installed.
"""

import argparse
import csv
import importlib.util
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    import matplotlib
    import torch
    import triton
    from matplotlib.figure import Figure
    from torch.nn.functional import gelu, layer_norm, linear
    from triton.testing import do_bench
except ModuleNotFoundError as error:
    print(f"benchmark.py needs {error.name}: pip install {error.name}", file=sys.stderr)
    sys.exit(2)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "beyond/results"
HALVES = ("layernorm", "linear-gelu", "host")
ELEMENTS = 2**28  # of x in a LayerNorm case: half a GiB or one, more than any L2 cache
LENGTHS = (64, 128, 256, 512, 768, 1024, 2048, 4096, 5120, 8192, 16384, 32768, 65536)
SHAPES = ((4096, 768, 3072), (8192, 1024, 4096), (8192, 4096, 16384), (8192, 8192, 8192))
SMALL = (16, 768, 3072)
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def load(name):
    """The script ROOT/name as a module."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random(*shape, dtype, scale=1.0):
    """Normal values on the GPU, drawn on the CPU from a seed; beyond 2**24 they repeat."""
    count = torch.Size(shape).numel()
    values = torch.randn(min(count, 2**24), generator=torch.Generator().manual_seed(20)) * scale
    return values.to("cuda", dtype).repeat(-(-count // 2**24))[:count].view(shape)


def compiled(function, **options):
    return torch.compile(function, dynamic=False, **options)


def best(calls):
    """Of calls by name, the name of the fastest."""
    times = {}
    for name, call in calls.items():
        try:
            times[name] = do_bench(call, warmup=2, rep=5, return_mode="median")
        except triton.runtime.errors.OutOfResources:
            pass
    return min(times, key=times.get)


def layernorm_contenders(N, dtype, thorough):
    """What computes, or bounds, LayerNorm of 2**28 elements in rows of N: calls by name."""
    fast, chapter = load("beyond/fast_layernorm.py"), load("chapter20/03_fused_layernorm.py")
    M = ELEMENTS // N
    x, weight, bias = (random(*shape, dtype=dtype) for shape in ((M, N), (N,), (N,)))
    out = torch.empty_like(x)

    def eager():
        return layer_norm(x, (N,), weight, bias, 1e-5)

    def chapters(warps):
        kernel, block = chapter.layernorm_forward_kernel, triton.next_power_of_2(N)
        return lambda: kernel[(M,)](
            x, weight, bias, out, M, N, N, 1e-5, BLOCK_N=block, num_warps=warps
        )

    warps = best({w: chapters(w) for w in (1, 2, 4, 8, 16, 32)})
    contenders = {
        "copy": lambda: out.copy_(x),
        "fast_layernorm": lambda: fast.fast_layernorm(x, weight, bias),
        "eager": eager,
        "torch.compile": compiled(eager),
    }
    if thorough:
        contenders["max-autotune"] = compiled(eager, mode="max-autotune-no-cudagraphs")
    contenders["chapter, 4 warps"] = chapters(4)
    contenders[f"chapter, best ({warps} warps)"] = chapters(warps)
    if installed("liger-kernel"):
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        contenders["Liger"] = lambda: LigerLayerNormFunction.apply(x, weight, bias, 1e-5)
    if installed("quack-kernels"):
        from quack.rmsnorm import layernorm_fwd

        float_weight, float_bias = weight.float(), bias.float()  # it takes no others
        contenders["QuACK"] = lambda: layernorm_fwd(x, float_weight, float_bias, 1e-5)
    return contenders


def linear_gelu_contenders(M, K, N, dtype, thorough):
    """What computes, or bounds, GELU of a linear layer: calls by name."""
    fast, chapter = load("beyond/fast_linear_gelu.py"), load("chapter20/01_fused_linear_gelu.py")
    x = random(M, K, dtype=dtype)
    weight, bias = random(N, K, dtype=dtype, scale=K**-0.5), random(N, dtype=dtype)
    out = torch.empty(M, N, dtype=dtype, device="cuda")

    def eager():
        return gelu(linear(x, weight, bias))

    def chapters(side_m, side_n, side_k, **options):
        grid = triton.cdiv(M, side_m), triton.cdiv(N, side_n)
        strides = *x.stride(), *weight.stride()[::-1], *out.stride()
        kernel, tile = chapter.fused_linear_gelu_kernel, (side_m, side_n, side_k)
        return lambda: kernel[grid](x, weight, bias, out, M, N, K, *strides, *tile, **options)

    tiles = [(64, 64, 32), (128, 64, 32), (128, 128, 32), (128, 128, 64), (128, 256, 64)]
    tiles = {f"{m}x{n}x{k}": chapters(m, n, k, num_warps=8) for m, n, k in tiles}
    tile = best(tiles)
    contenders = {
        "linear alone": lambda: linear(x, weight, bias),
        "fast_linear_gelu": lambda: fast.fast_linear_gelu(x, weight, bias),
        "eager": eager,
        "torch.compile": compiled(eager),
    }
    if thorough:
        contenders["max-autotune"] = compiled(eager, mode="max-autotune-no-cudagraphs")
    if dtype != torch.float32:
        contenders["cuBLASLt, tanh (not exact)"] = lambda: torch._addmm_activation(
            bias, x, weight.T, use_gelu=True
        )
    if M * K * N <= 2**34:
        contenders["chapter, its own tile"] = chapters(16, 16, 16)
    contenders[f"chapter, best tile ({tile})"] = tiles[tile]
    return contenders


def rounds_of(contenders, count, milliseconds):
    """Milliseconds of each contender in each round; one that fails says so, and is left out."""
    times = {}
    for name, call in list(contenders.items()):
        try:
            call()
            times[name] = []
        except Exception as error:  # whatever a peer may raise, the others are still measured
            print(f"  {name} failed: {type(error).__name__}: {str(error).splitlines()[0]}")
    for _ in range(count):
        for name in times:
            call = contenders[name]
            times[name].append(do_bench(call, warmup=3, rep=milliseconds, return_mode="median"))
    return times


def rows_of(case, times, limit, rate):
    """A row of the CSV for each contender: case's columns, time, rate and ratio to the limit."""
    rows = []
    for name, found in times.items():
        middle = statistics.median(found)
        ratio = statistics.median(a / b for a, b in zip(found, times[limit], strict=True))
        rows.append(
            case
            | {"contender": name, "ms": middle, "lowest_ms": min(found), "highest_ms": max(found)}
            | rate(middle)
            | {f"time_over_{limit.replace(' ', '_')}": ratio}
        )
    return rows


def show(title, rows):
    """The rows of one case as a table."""
    print(title)
    for row in rows:
        *_, (unit, rate), (limit, ratio) = row.items()
        spread = f"{row['lowest_ms']:.4f} to {row['highest_ms']:.4f}"
        print(
            f"  {row['contender']:28} {row['ms']:9.4f} ms ({spread}) {rate:8.2f} {unit}, "
            f"{ratio:.3f} {limit.replace('_', ' ')}"
        )
    print(flush=True)


def layernorm(quick):
    lengths = (256, 4096, 32768) if quick else LENGTHS
    found = []
    for N in lengths:
        for dtype, name in NAMES.items():
            torch._dynamo.reset()
            times = rounds_of(layernorm_contenders(N, dtype, not quick), 3 if quick else 7, 12)
            size = 2 * ELEMENTS * dtype.itemsize
            case = {"dtype": name, "M": ELEMENTS // N, "N": N}
            rows = rows_of(case, times, "copy", lambda ms, size=size: {"TB/s": size / ms / 1e9})
            show(f"LayerNorm, {name}, {ELEMENTS // N} x {N}", rows)
            found += rows
    return found


def linear_gelu(quick):
    cases = [(*shape, torch.bfloat16) for shape in (*SHAPES, SMALL)]
    cases += [(*shape, torch.float32) for shape in (*SHAPES[:3], SMALL)]
    found = []
    for M, K, N, dtype in cases[:1] if quick else cases:
        torch._dynamo.reset()
        contenders = linear_gelu_contenders(M, K, N, dtype, not quick)
        times = rounds_of(contenders, 3 if quick else 9, 15)
        case = {"dtype": NAMES[dtype], "M": M, "K": K, "N": N}
        operations = 2 * M * K * N
        rows = rows_of(
            case, times, "linear alone", lambda ms, n=operations: {"TFLOP/s": n / ms / 1e9}
        )
        show(f"Linear + bias + GELU, {NAMES[dtype]}, {M} x {K} x {N}", rows)
        found += rows
    return found


def host(quick):
    """Microseconds that a call takes of the CPU, on inputs too small to keep the GPU busy."""
    del quick
    layernorms = load("beyond/fast_layernorm.py"), load("chapter20/03_fused_layernorm.py")
    x, w, b = (random(*shape, dtype=torch.float32) for shape in ((16, 1024), (1024,), (1024,)))
    out = torch.empty_like(x)
    kernel = layernorms[1].layernorm_forward_kernel
    linears = load("beyond/fast_linear_gelu.py")
    M, K, N = SMALL
    a, weight = random(M, K, dtype=torch.bfloat16), random(N, K, dtype=torch.bfloat16)
    bias = random(N, dtype=torch.bfloat16)
    groups = {
        "LayerNorm, float32, 16 x 1024": {
            "eager": lambda: layer_norm(x, (1024,), w, b, 1e-5),
            "chapter's kernel, launched bare": lambda: kernel[(16,)](
                x, w, b, out, 16, 1024, 1024, 1e-5, BLOCK_N=1024
            ),
            "fast_layernorm": lambda: layernorms[0].fast_layernorm(x, w, b),
        },
        "Linear + bias + GELU, bfloat16, 16 x 768 x 3072": {
            "eager": lambda: gelu(linear(a, weight, bias)),
            "fast_linear_gelu": lambda: linears.fast_linear_gelu(a, weight, bias),
        },
    }
    found = []
    for group, calls in groups.items():
        times = {name: [] for name in calls}
        for _ in range(11):
            for name, call in calls.items():
                call()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(500):
                    call()
                times[name].append((time.perf_counter() - start) / 500 * 1e6)
        print(f"{group}: microseconds of the host's time a call")
        for name, t in times.items():
            print(f"  {name:32} {statistics.median(t):6.1f} ({min(t):.1f} to {max(t):.1f})")
            ratio = statistics.median(a / b for a, b in zip(t, times["eager"], strict=True))
            found.append(
                {"case": group, "contender": name, "us": statistics.median(t)}
                | {"lowest_us": min(t), "highest_us": max(t), "time_over_eager": ratio}
            )
        print(flush=True)
    return found


def installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine():
    """What the figures were measured with, as columns of the CSV."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True).stdout.split()
    columns = {"gpu": torch.cuda.get_device_name(), "driver": driver[0] if driver else "unknown"}
    columns["cuda"] = torch.version.cuda
    for package in ("torch", "triton", "liger-kernel", "quack-kernels"):
        columns[package] = installed(package) or "not installed"
    return columns


def write(path, rows):
    rows = [
        {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} | machine()
        for row in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {path}")


STYLES = {  # by how a contender's name begins
    "fast_": ("#D55E00", "o", "-"),
    "torch.compile": ("#0072B2", "s", "--"),
    "max-autotune": ("#56B4E9", "v", "--"),
    "eager": ("#555555", "^", ":"),
    "chapter, best": ("#009E73", "D", "-."),
    "Liger": ("#CC79A7", "P", ":"),
    "QuACK": ("#000000", "X", "--"),
}


def style_of(name):
    return next((style for start, style in STYLES.items() if name.startswith(start)), None)


def plot_layernorm(path, rows):
    figure = Figure(figsize=(8, 3.8), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, dtype in zip(axes, NAMES.values(), strict=True):
        lines = {}
        for row in rows:
            name = row["contender"].split(" (")[0]
            if row["dtype"] == dtype and style_of(name):
                lines.setdefault(name, {})[row["N"]] = 1 / row["time_over_copy"]
        for name, points in lines.items():
            color, marker, line = style_of(name)
            style = {"color": color, "marker": marker, "linestyle": line}
            axis.plot(*zip(*points.items(), strict=True), label=name, **style, markersize=5)
        axis.axhline(1, color="#555555", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set(title=dtype, xlabel="row length N", ylim=(0, 1.1))
    axes[0].set_ylabel("speed, as a share of a copy's")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.suptitle(f"LayerNorm of 2**28 elements, {torch.cuda.get_device_name()}")
    figure.savefig(path, dpi=150, facecolor="white")
    print(f"wrote {path}")


def plot_linear_gelu(path, rows):
    cases = list(dict.fromkeys((r["dtype"], r["M"], r["K"], r["N"]) for r in rows))
    names = [n for n in dict.fromkeys(r["contender"].split(" (")[0] for r in rows)]
    names = [n for n in names if n != "linear alone" and "own tile" not in n]
    figure = Figure(figsize=(8, 0.55 * len(cases) + 1.5), layout="constrained")
    axis = figure.subplots()
    for offset, name in enumerate(names):
        color, marker, _ = style_of(name) or ("#E69F00", "*", "")
        points = [
            (row["time_over_linear_alone"], cases.index(case) + (offset - len(names) / 2) * 0.11)
            for row in rows
            if row["contender"].split(" (")[0] == name
            for case in [(row["dtype"], row["M"], row["K"], row["N"])]
        ]
        axis.scatter(*zip(*points, strict=True), color=color, marker=marker, label=name, s=28)
    axis.axvline(1, color="#555555", linewidth=0.8)
    axis.set_yticks(range(len(cases)), [f"{d}, {m} x {k} x {n}" for d, m, k, n in cases])
    axis.invert_yaxis()
    axis.set(xlabel="time, in that of cuBLAS's linear layer alone", xlim=(0.4, 2.2))
    axis.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3)
    figure.suptitle(f"Linear + bias + exact GELU, {torch.cuda.get_device_name()}")
    figure.savefig(path, dpi=150, facecolor="white")
    print(f"wrote {path}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("halves", nargs="*", metavar="half", help=f"of {', '.join(HALVES)}: all")
    parser.add_argument("--quick", action="store_true", help="few sizes: under a minute")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder that is written")
    options = parser.parse_args()
    if wrong := set(options.halves) - set(HALVES):
        parser.error(f"no such half: {', '.join(sorted(wrong))}; there are {', '.join(HALVES)}")
    if not torch.cuda.is_available():
        print("benchmark.py needs a GPU: torch sees none", file=sys.stderr)
        sys.exit(2)
    if options.quick and options.out == RESULTS:
        options.out = Path("results-quick")  # a quick look is not what README.md quotes
    matplotlib.rcdefaults()
    torch.set_grad_enabled(False)
    print(", ".join(f"{k} {v}" for k, v in machine().items()), flush=True)
    for half in options.halves or HALVES:
        name = half.replace("-", "_")
        rows = globals()[name](options.quick)
        write(options.out / f"{name}.csv", rows)
        if plot := globals().get(f"plot_{name}"):
            plot(options.out / f"{name}.png", rows)


if __name__ == "__main__":
    main()
