"""Times the fast kernels beside what a reader would use instead, all in one run on one GPU.

    pip install matplotlib
    python beyond/benchmark.py                              # everything, into beyond/results/
    python beyond/benchmark.py --out DIR                    # leaves beyond/results/ as it is
    python beyond/benchmark.py layernorm --quick --out DIR  # one part, few sizes: under a minute

The contenders of a case take turns, round after round (A B C, C B A, A B C, ...), the L2 cache
flushed before each call (triton.testing.do_bench): a GPU's clocks and its power limit change from
moment to moment, so only what was measured within one round is compared. A time is the median of
the rounds, and so is a ratio; the lowest and the highest round stand beside the time. Inputs are
random, drawn on the CPU from a seed.

Writes for each part a CSV, with the GPU, its driver and the versions, a table and a plot of it;
host is the host's time for small inputs. Needs a GPU; liger-kernel and quack-kernels take part
where they are installed.
"""

import argparse
import contextlib
import csv
import functools
import importlib.util
import math
import os
import statistics
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from itertools import product, takewhile
from pathlib import Path
from unittest import mock

try:
    import numpy as np
    import torch
    import triton
except ModuleNotFoundError as error:
    sys.exit(f"{error}: ./run_all.sh finds a Python that has it, or makes one, .venv/bin/python")
try:
    os.environ["MPLBACKEND"] = "agg"  # a notebook sets one of its own, which is not here
    import matplotlib
    from matplotlib.figure import Figure
except ModuleNotFoundError as error:
    sys.exit(f"benchmark.py needs {error.name}: {sys.executable} -m pip install {error.name}")

from torch.nn.functional import gelu, layer_norm, linear
from torch.utils.benchmark import Timer
from triton.testing import do_bench

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "beyond/results"
ELEMENTS = 2**28  # of x in a LayerNorm case: half a GiB or one, more than any L2 cache
LENGTHS = (64, 100, 128, 256, 384, 512, 768, 1000, 1001, 1024, 2048, 3000, 4096, 5120, 8192, 16384)
LENGTHS += (32768, 50257, 65536, 131072)
SHAPES = ((4096, 768, 3072), (8192, 1024, 4096), (8192, 4096, 16384), (8192, 8192, 8192))
SMALL = (16, 768, 3072)
# The rows of a served model: a token or a few, a sentence, a picture, a batch of them.
ROWS = (1, 2, 8, 16, 17, 32, 33, 64, 96, 128, 197, 256, 384, 512, 768, 1024, 2048, 4096)
WIDTHS = ((768, 3072), (1024, 4096), (1600, 6400), (4096, 14336))
LAYERNORM_ROWS = (1, 16, 64, 197, 512, 2048, 4096, 8192)
LAYERNORM_WIDTHS = (768, 1024, 4096, 8192, 16384)
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def load(name):
    """The script ROOT/name as a module."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random(*shape, dtype, seed=20, scale=1.0):
    """Normal values on the GPU, drawn on the CPU from a seed; beyond 2**24 they repeat."""
    count = math.prod(shape)
    values = torch.randn(min(count, 2**24), generator=torch.Generator().manual_seed(seed)) * scale
    return values.to("cuda", dtype).repeat(-(-count // 2**24))[:count].view(shape)


# --- What is timed ---


def compiled(function, **options):
    return torch.compile(function, dynamic=False, **options)


def best(calls):
    """Of calls by name, the name of the fastest."""
    times = {}
    for name, call in calls.items():
        with contextlib.suppress(triton.runtime.errors.OutOfResources):
            times[name] = do_bench(call, warmup=2, rep=5, return_mode="median")
    return min(times, key=times.get)


def layernorm_contenders(N, dtype, thorough):
    """What computes, or bounds, LayerNorm of 2**28 elements in rows of N: calls by name."""
    fast, chapter = load("beyond/fast_layernorm.py"), load("chapter20/03_fused_layernorm.py")
    M = ELEMENTS // N
    x, weight = random(M, N, dtype=dtype), random(N, dtype=dtype, seed=21)
    bias, out = random(N, dtype=dtype, seed=22), torch.empty_like(x)

    def eager():
        return layer_norm(x, (N,), weight, bias, 1e-5)

    def chapters(warps):
        kernel, block = chapter.layernorm_forward_kernel, triton.next_power_of_2(N)
        return lambda: kernel[(M,)](
            x, weight, bias, out, M, N, N, 1e-5, BLOCK_N=block, num_warps=warps
        )

    fits = [w for w in (1, 2, 4, 8, 16, 32) if N <= 4096 * w]  # fewer take minutes to compile
    warps = best({w: chapters(w) for w in fits})
    contenders = {
        "copy": lambda: out.copy_(x),
        "fast_layernorm": lambda: fast.fast_layernorm(x, weight, bias),
        "eager": eager,
        "torch.compile": compiled(eager),
    }
    if thorough:
        contenders["max-autotune"] = compiled(eager, mode="max-autotune-no-cudagraphs")
    if 4 in fits:
        contenders["chapter, 4 warps"] = chapters(4)
    contenders[f"chapter, best ({warps} warps)"] = chapters(warps)
    # The ladder's steps before the last, where they are not the chapter's.
    kernel, rows, constants, options = fast.choose(M, N, math.gcd(N, 16), dtype, fast.gpu(x.device))
    steps = {
        "without ALIGN": {"ALIGN": 1} if 1 < constants["ALIGN"] < 16 else None,
        "pieces, held": {"READ_AGAIN": False} if constants.get("READ_AGAIN") else None,
        "pieces as float32": {"STAY_16_BIT": False} if constants.get("STAY_16_BIT") else None,
    }
    for name, changed in steps.items():
        if changed:
            launch = functools.partial(kernel[(triton.cdiv(M, rows),)], **options)
            launch = functools.partial(launch, **constants | changed)
            contenders[name] = functools.partial(launch, x, weight, bias, out, M, N, N, 1e-5)
    contenders["Liger"] = functools.partial(liger, x, weight, bias)
    contenders["QuACK"] = functools.partial(quack, x, weight.float(), bias.float())
    return contenders


def liger(x, weight, bias):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, 1e-5)


def quack(x, weight, bias):
    """Takes weight and bias in float32 only."""
    from quack.rmsnorm import layernorm_fwd

    return layernorm_fwd(x, weight, bias, 1e-5)


def linear_gelu_contenders(M, K, N, dtype, thorough):
    """What computes, or bounds, GELU of a linear layer: calls by name."""
    fast, chapter = load("beyond/fast_linear_gelu.py"), load("chapter20/01_fused_linear_gelu.py")
    x, weight = random(M, K, dtype=dtype), random(N, K, dtype=dtype, seed=21, scale=K**-0.5)
    bias, out = random(N, dtype=dtype, seed=22), torch.empty(M, N, dtype=dtype, device="cuda")
    half = dtype != torch.float32

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
    if thorough and half:  # in float32 it searches for minutes
        contenders["max-autotune"] = compiled(eager, mode="max-autotune-no-cudagraphs")
    if half:
        contenders["cuBLASLt, tanh (not exact)"] = lambda: torch._addmm_activation(
            bias, x, weight.T, use_gelu=True
        )
    if (M, K, N) in SHAPES[:2] and half and fast.gpu(x.device)[0][0] in (9, 10):
        # The ladder's steps before the last: what is chosen where the next one cannot be.
        choose = functools.partial(fast.choose.__wrapped__, M, N, dtype, x.device)
        with mock.patch.object(fast, "TRIED", False):
            pointers, tma = choose(tma=False), choose(tma=True)
        steps = {"pointers, erf": (pointers, "erf"), "TMA, erf": (tma, "erf")}
        for name, (step, by) in (steps | {"TMA, polynomial": (tma, "ptx")}).items():
            kernel, programs, options = step
            tensors, numbers = fast.arguments_of(kernel, options, x, weight, bias, out)
            launch = functools.partial(kernel[(programs,)], **options | {"GELU": by})
            contenders[name] = functools.partial(launch, *tensors, *numbers)
    if M * K * N <= 2**34:
        contenders["chapter, its own tile"] = chapters(16, 16, 16)
    contenders[f"chapter, best tile ({tile})"] = tiles[tile]
    return contenders


def host_contenders():
    """Calls by name, by case: inputs so small that the GPU waits for the CPU."""
    layernorms, linears = load("beyond/fast_layernorm.py"), load("beyond/fast_linear_gelu.py")
    chapters = load("chapter20/03_fused_layernorm.py").layernorm_forward_kernel[(16,)]
    x, w, b = (random(*shape, dtype=torch.float32) for shape in ((16, 1024), (1024,), (1024,)))
    (M, K, N), out = SMALL, torch.empty_like(x)
    tensors = [random(*shape, dtype=torch.bfloat16) for shape in ((M, K), (N, K), (N,))]
    return {
        "LayerNorm, float32, 16 x 1024": {
            "eager": lambda: layer_norm(x, (1024,), w, b, 1e-5),
            "bare launch": lambda: chapters(x, w, b, out, 16, 1024, 1024, 1e-5, BLOCK_N=1024),
            "fast_layernorm": lambda: layernorms.fast_layernorm(x, w, b),
        },
        "Linear + bias + GELU, bfloat16, 16 x 768 x 3072": {
            "eager": lambda: gelu(linear(*tensors)),
            "fast_linear_gelu": lambda: linears.fast_linear_gelu(*tensors),
        },
    }


# --- How it is timed ---


def empty_cache():
    """What do_bench fills to flush the L2: 1 GiB, not 256 MiB, for the host to get ahead meanwhile.
    Else the GPU waits for a call's Python, and that is timed with it.
    """
    return torch.empty(2**30, dtype=torch.int8, device="cuda")


def gpu_time(call, milliseconds):
    """Milliseconds of the GPU's time, by calls that take so many in all."""
    return do_bench(call, warmup=3, rep=milliseconds, return_mode="median")


def mean_time(call, count):
    """Milliseconds that one of so many calls in a row takes, of the CPU or the GPU."""
    return Timer("call()", globals={"call": call}).timeit(count).mean * 1e3


def in_graph(call, count):
    """What replays so many calls, captured in a CUDA graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return graph.replay


def rounds_of(contenders, count, timer):
    """Milliseconds of each contender in each round; one that fails says so, and is left out."""
    times = {}
    for name, call in contenders.items():
        try:
            call()
            times[name] = []
        except Exception as error:  # whatever a peer may raise, the others are still measured
            print(f"  {name} failed: {repr(error).splitlines()[0]}")
    for i in range(count):
        # Turned round each time: else one would always be first, on a cooler GPU.
        for name in reversed(times) if i % 2 else times:
            times[name].append(timer(contenders[name]))
    return times


def rows_of(case, times, unit, figure):
    """A row of the CSV for each contender: the case's columns, the times in milliseconds, figure of
    the time in the unit, and the ratio to the time of the first contender, the limit.
    """
    rows, limit = [], next(iter(times.values()))
    for name, found in times.items():
        ms = statistics.median(found)
        ratio = statistics.median(a / b for a, b in zip(found, limit, strict=True))
        row = {"contender": name, "ms": ms, "lowest_ms": min(found), "highest_ms": max(found)}
        rows.append(case | row | {unit: figure(ms), "time_over_limit": ratio})
        print(f"  {name:32} {ms:9.4f} ms ({min(found):.4f} to {max(found):.4f}), {ratio:.3f}")
    return rows


def layernorm(quick):
    lengths = (256, 4096, 32768) if quick else LENGTHS
    for N, (dtype, name) in product(lengths, NAMES.items()):
        print(f"LayerNorm, {name}, {ELEMENTS // N} x {N}: time, rounds, time over a copy's")
        torch._dynamo.reset()
        contenders = layernorm_contenders(N, dtype, not quick)
        times = rounds_of(contenders, 4 if quick else 8, lambda call: gpu_time(call, 12))
        size = 2 * ELEMENTS * dtype.itemsize
        yield rows_of({"dtype": name, "N": N}, times, "TB/s", lambda ms, size=size: size / ms / 1e9)


def linear_gelu(quick):
    cases = [(*shape, torch.bfloat16) for shape in (*SHAPES, SMALL)]
    cases += [(*shape, torch.float32) for shape in (*SHAPES[:3], SMALL)]
    for M, K, N, dtype in cases[:1] if quick else cases:
        print(f"Linear + bias + GELU, {NAMES[dtype]}, {M} x {K} x {N}: ..., over linear alone")
        torch._dynamo.reset()
        contenders = linear_gelu_contenders(M, K, N, dtype, not quick)
        times = rounds_of(contenders, 4 if quick else 16, lambda call: gpu_time(call, 15))
        case = {"dtype": NAMES[dtype], "M x K x N": f"{M} x {K} x {N}"}
        operations = 2 * M * K * N
        yield rows_of(case, times, "TFLOP/s", lambda ms, n=operations: n / ms / 1e9)


def sizes(quick):
    """Both functions over the number of rows, in a CUDA graph, with nothing flushed."""
    norms, linears = load("beyond/fast_layernorm.py"), load("beyond/fast_linear_gelu.py")
    of_linear = {
        "limit": linear,
        "ours": linears.fast_linear_gelu,
        "eager": lambda x, weight, bias: gelu(linear(x, weight, bias)),
    }
    of_layernorm = {
        "limit": lambda x, weight, bias: x.clone(),
        "ours": norms.fast_layernorm,
        "eager": lambda x, weight, bias: layer_norm(x, weight.shape, weight, bias),
    }
    if importlib.util.find_spec("liger_kernel"):
        of_layernorm["Liger"] = liger
    cases = [("linear + GELU", of_linear, width, ROWS) for width in WIDTHS]
    cases += [("LayerNorm", of_layernorm, (width,), LAYERNORM_ROWS) for width in LAYERNORM_WIDTHS]
    for case, (dtype, name) in product(cases[::4] if quick else cases, NAMES.items()):
        layer, calls, width, rows = case
        calls["torch.compile"] = torch.compile(calls["eager"])
        torch._dynamo.reset()
        weight = random(*width[::-1], dtype=dtype, seed=21, scale=width[0] ** -0.5)
        bias = random(width[-1], dtype=dtype, seed=22)
        for M in rows[::8] if quick else rows:
            x = random(M, width[0], dtype=dtype)
            yield sizes_of_one(layer, name, calls, x, weight, bias)


def sizes_of_one(layer, dtype, calls, x, weight, bias):
    count = 20 if len(x) < 1024 else 3
    calls = {n: in_graph(lambda f=f: f(x, weight, bias), count) for n, f in calls.items()}
    times = rounds_of(calls, 5, lambda call: mean_time(call, 10) / count)
    width = " x ".join(map(str, weight.shape[::-1]))
    case = {"layer": layer, "dtype": dtype, "width": width, "M": len(x)}
    print(*case.values())
    return rows_of(case, times, "microseconds", lambda ms: ms * 1e3)


def host(quick):
    for case, contenders in host_contenders().items():
        print(f"{case}: the host's time, rounds, over eager's")
        times = rounds_of(contenders, 3 if quick else 11, lambda call: mean_time(call, 500))
        yield rows_of({"case": case}, times, "microseconds", lambda ms: ms * 1e3)


# --- What is written ---


@functools.cache
def machine():
    """What the figures were measured with, as columns of the CSV."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    columns = {"gpu": torch.cuda.get_device_name(), "driver": "unknown"}
    with contextlib.suppress(OSError, IndexError):  # no nvidia-smi, or it says nothing
        columns["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.split()[0]
    columns["cuda"] = torch.version.cuda
    for package in ("torch", "triton", "liger-kernel", "quack-kernels"):
        columns[package] = "not installed"
        with contextlib.suppress(PackageNotFoundError):
            columns[package] = version(package)
    return columns


def write(path, rows):
    """Writes rows, with the machine's columns, as CSV."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *machine()], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            short = {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()}
            writer.writerow(short | machine())


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def by_case(rows):
    """Rows by contender, by case: what stands before the contender. Of a contender's name only what
    is before a bracket.
    """
    cases = {}
    for row in rows:
        case = tuple(row[column] for column in takewhile("contender".__ne__, row))
        cases.setdefault(case, {})[row["contender"].split(" (")[0]] = row
    return cases


def ratio(row, inverse):
    over = float(row["time_over_limit"])
    return 1 / over if inverse else over


def table(rows, inverse):
    """A line of Markdown for each case: the limit's figure, and how the others compare with it: in
    time, or inverse, in speed.
    """
    cases, columns = by_case(rows), list(rows[0])
    limit, *names = dict.fromkeys(name for case in cases.values() for name in case)
    unit = columns[columns.index("highest_ms") + 1]
    lines = [[*takewhile("contender".__ne__, columns), f"{limit}, {unit}", *names]]
    lines.append(["---"] * len(lines[0]))
    for case, found in cases.items():
        cells = [f"{ratio(found[n], inverse):.2f}" if n in found else "-" for n in names]
        lines.append([*case, f"{float(found[limit][unit]):.3g}", *cells])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# Told apart by the colour-blind, and in print by their markers.
STYLES = {
    "fast_layernorm": ("o-", "#D55E00"),
    "fast_linear_gelu": ("o-", "#D55E00"),
    "torch.compile": ("s--", "#0072B2"),
    "max-autotune": ("v--", "#56B4E9"),
    "eager": ("^:", "#555555"),
    "chapter, best": ("D-.", "#009E73"),
    "chapter, best tile": ("D-.", "#009E73"),
    "cuBLASLt, tanh": ("*-.", "#E69F00"),
    "Liger": ("P:", "#CC79A7"),
    "QuACK": ("X--", "#000000"),
}


def plot_layernorm(rows):
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, dtype in zip(axes, NAMES.values(), strict=True):
        cases = by_case(row for row in rows if row["dtype"] == dtype)
        for name, (style, color) in STYLES.items():
            found = [(int(N), ratio(c[name], True)) for (_, N), c in cases.items() if name in c]
            if found:
                N, speed = np.transpose(found)
                line = N % 16 == 0
                axis.plot(N[line], speed[line], style, color=color, label=name)
                axis.plot(N[~line], speed[~line], style[0], color=color, mfc="none")
        axis.axhline(1, color="#555555", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set(title=dtype, xlabel="row length N", ylim=(0, 1.1))
    axes[0].plot([], [], "o", color="#555555", mfc="none", label="16 does not divide N")
    axes[0].set_ylabel("speed, as a share of a copy's")
    return figure, axes[0], "LayerNorm"


def plot_linear_gelu(rows):
    cases = by_case(rows)
    figure = Figure(figsize=(8, 0.5 * len(cases) + 1.8), layout="constrained")
    axis = figure.subplots()
    for name, (style, color) in STYLES.items():
        found = [(ratio(c[name], False), i) for i, c in enumerate(cases.values()) if name in c]
        if found:
            axis.plot(*np.transpose(found), style[0], color=color, label=name)
    axis.axvline(1, color="#555555", linewidth=0.8)
    axis.set_yticks(range(len(cases)), map(", ".join, cases))
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    axis.set_xscale("log")
    ticks = (0.6, 0.8, 1, 1.2, 1.5, 2, 3, 5, 10)
    axis.set_xticks(ticks, map(str, ticks))
    axis.minorticks_off()
    axis.set(xlabel="time, in that of the linear layer alone (cuBLAS)")
    return figure, axis, "Linear + bias + exact GELU (M x K x N)"


def save(path, figure, axis, title):
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.suptitle(title)
    figure.savefig(path, dpi=150, facecolor="white")


# What is timed, whether its table has speeds, not times, and its plot if it has one.
PARTS = {
    "host": (host, False, None),
    "sizes": (sizes, False, None),
    "layernorm": (layernorm, True, plot_layernorm),
    "linear-gelu": (linear_gelu, False, plot_linear_gelu),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}: all")
    parser.add_argument("--quick", action="store_true", help="few sizes: under a minute")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder that is written")
    options = parser.parse_args()
    if wrong := set(options.parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(wrong))}; there are {', '.join(PARTS)}")
    if options.quick and options.out.resolve() == RESULTS:
        parser.error("--quick is not what README.md quotes: give another folder with --out")
    if not torch.cuda.is_available():
        print("benchmark.py needs a GPU: torch sees none", file=sys.stderr)
        sys.exit(2)
    matplotlib.rcdefaults()
    torch.set_grad_enabled(False)
    triton.runtime.driver.active.get_empty_cache_for_benchmark = empty_cache
    print(", ".join(f"{k} {v}" for k, v in machine().items()), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.parts or PARTS:
        measure, inverse, plot = PARTS[part]
        path, found = options.out / f"{part.replace('-', '_')}.csv", []
        for case in measure(options.quick):
            found += case
            write(path, found)  # each time: what is cut short is kept
        rows = read(path)
        path.with_suffix(".md").write_text(table(rows, inverse))
        if plot:
            figure, axis, title = plot(rows)
            save(path.with_suffix(".png"), figure, axis, f"{title}, {rows[0]['gpu']}")
        print(f"wrote {path.with_suffix('.*')}", flush=True)


if __name__ == "__main__":
    main()
