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

Writes for each part a CSV, with the GPU, its driver and the versions, a table of it and a plot, and
the host's time for small inputs. Needs a GPU; liger-kernel and quack-kernels take part where they
are installed.
"""

import argparse
import csv
import functools
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from unittest import mock

try:
    import numpy  # noqa: F401 - matplotlib needs it
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
from triton.testing import do_bench

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "beyond/results"
ELEMENTS = 2**28  # of x in a LayerNorm case: half a GiB or one, more than any L2 cache
LENGTHS = (64, 100, 128, 256, 384, 512, 768, 1000, 1001, 1024, 2048, 3000, 4096, 5120, 8192, 16384)
LENGTHS += (32768, 50257, 65536, 131072)
SHAPES = ((4096, 768, 3072), (8192, 1024, 4096), (8192, 4096, 16384), (8192, 8192, 8192))
SMALL = (16, 768, 3072)
CALLS = 500  # in a row, for the host's time
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def load(name):
    """The script ROOT/name as a module."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random(*shape, dtype, seed=20, scale=1.0):
    """Normal values on the GPU, drawn on the CPU from a seed; beyond 2**24 they repeat."""
    count = torch.Size(shape).numel()
    values = torch.randn(min(count, 2**24), generator=torch.Generator().manual_seed(seed)) * scale
    return values.to("cuda", dtype).repeat(-(-count // 2**24))[:count].view(shape)


def empty_cache():
    """What do_bench fills to flush the L2: 1 GiB, not 256 MiB, for the host to get ahead meanwhile.
    Else the GPU waits for a call's Python, and that is timed with it.
    """
    return torch.empty(2**30, dtype=torch.int8, device="cuda")


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
    tensors, programs = (x, weight, bias, out, M, N, N, 1e-5), triton.cdiv(M, rows)

    def step_with(**changed):
        launched = constants | options | changed
        return lambda: kernel[(programs,)](*tensors, **launched)

    if 1 < constants["ALIGN"] < 16:
        contenders["without ALIGN"] = step_with(ALIGN=1)
    if constants.get("READ_AGAIN"):
        contenders["pieces, held"] = step_with(READ_AGAIN=False)
    if constants.get("STAY_16_BIT"):
        contenders["pieces as float32"] = step_with(STAY_16_BIT=False)
    contenders |= peer("Liger", "liger-kernel", lambda: liger(x, weight, bias))
    contenders |= peer("QuACK", "quack-kernels", lambda: quack(x, weight, bias))
    return contenders


def peer(name, package, make):
    """{name: call} where the package is installed, and loads."""
    if not installed(package):
        return {}
    try:
        return {name: make()}
    except ImportError as error:
        print(f"  {name} is left out: {error}")
        return {}


def liger(x, weight, bias):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return lambda: LigerLayerNormFunction.apply(x, weight, bias, 1e-5)


def quack(x, weight, bias):
    from quack.rmsnorm import layernorm_fwd

    weight, bias = weight.float(), bias.float()  # it takes no others
    return lambda: layernorm_fwd(x, weight, bias, 1e-5)


def linear_gelu_contenders(M, K, N, dtype, thorough):
    """What computes, or bounds, GELU of a linear layer: calls by name."""
    fast, chapter = load("beyond/fast_linear_gelu.py"), load("chapter20/01_fused_linear_gelu.py")
    x, weight = random(M, K, dtype=dtype), random(N, K, dtype=dtype, seed=21, scale=K**-0.5)
    bias, out = random(N, dtype=dtype, seed=22), torch.empty(M, N, dtype=dtype, device="cuda")

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
    if thorough and dtype != torch.float32:  # in float32 it searches for minutes
        contenders["max-autotune"] = compiled(eager, mode="max-autotune-no-cudagraphs")
    if dtype != torch.float32:
        contenders["cuBLASLt, tanh (not exact)"] = lambda: torch._addmm_activation(
            bias, x, weight.T, use_gelu=True
        )
    descriptors = fast.gpu(x.device)[0][0] in (9, 10)
    if (M, K, N) in SHAPES[:2] and dtype != torch.float32 and descriptors:
        # The ladder's steps before the last.
        pointers, tma = fast.linear_gelu_kernel, fast.linear_gelu_tma_kernel
        for name, gelu_by, *choice in (
            ("pointers, erf", "erf", pointers, (128, 128, 32), 8, 4),
            ("TMA, erf", "erf", tma, (128, 128, 64), 4, 3),
            ("TMA, polynomial", "ptx", tma, (128, 128, 64), 4, 3),
        ):
            contenders[name] = linear_gelu_step(fast, gelu_by, choice, x, weight, bias, out)
    if M * K * N <= 2**34:
        contenders["chapter, its own tile"] = chapters(16, 16, 16)
    contenders[f"chapter, best tile ({tile})"] = tiles[tile]
    return contenders


def linear_gelu_step(fast, gelu_by, choice, x, weight, bias, out):
    """A launch with this choice of kernel, tile, warps and stages, in place of fast.choose's."""
    with mock.patch.object(fast, "choose", lambda *_: choice):
        kernel, programs, options = fast.plan.__wrapped__(
            len(x), len(weight), x.dtype, x.device, True
        )
    options["GELU"] = gelu_by
    tensors, numbers = fast.arguments_of(kernel, options, x, weight, bias, out)
    return lambda: kernel[(programs,)](*tensors, *numbers, **options)


def rounds_of(contenders, count, milliseconds):
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
            call = contenders[name]
            times[name].append(do_bench(call, warmup=3, rep=milliseconds, return_mode="median"))
    return times


def rows_of(case, times, over, rate):
    """A row of the CSV for each contender: case's columns, time, rate, and ratios to those over."""
    rows = []
    for name, found in times.items():
        middle = statistics.median(found)
        row = {"contender": name, "ms": middle, "lowest_ms": min(found), "highest_ms": max(found)}
        row = case | row | rate(middle)
        for other in over:
            ratios = [a / b for a, b in zip(found, times[other], strict=True)]
            row[f"time_over_{other.replace(' ', '_')}"] = statistics.median(ratios)
        rows.append(row)
    return rows


def show(title, rows):
    """The rows of one case as a table."""
    print(title)
    for row in rows:
        *_, (unit, rate), (limit, over_limit), (_, over_ours) = row.items()
        spread = f"{row['lowest_ms']:.4f} to {row['highest_ms']:.4f}"
        print(
            f"  {row['contender']:28} {row['ms']:9.4f} ms ({spread}) {rate:8.2f} {unit}, "
            f"{over_limit:.3f} {limit.replace('_', ' ')}, {over_ours:.3f} over ours"
        )
    print(flush=True)


def layernorm(quick):
    lengths = (256, 4096, 32768) if quick else LENGTHS
    for N in lengths:
        for dtype, name in NAMES.items():
            torch._dynamo.reset()
            times = rounds_of(layernorm_contenders(N, dtype, not quick), 4 if quick else 8, 12)
            size = 2 * ELEMENTS * dtype.itemsize
            case = {"dtype": name, "M": ELEMENTS // N, "N": N}
            over = "copy", "fast_layernorm"
            rows = rows_of(case, times, over, lambda ms, size=size: {"TB/s": size / ms / 1e9})
            show(f"LayerNorm, {name}, {ELEMENTS // N} x {N}", rows)
            yield rows


def linear_gelu(quick):
    cases = [(*shape, torch.bfloat16) for shape in (*SHAPES, SMALL)]
    cases += [(*shape, torch.float32) for shape in (*SHAPES[:3], SMALL)]
    for M, K, N, dtype in cases[:1] if quick else cases:
        torch._dynamo.reset()
        contenders = linear_gelu_contenders(M, K, N, dtype, not quick)
        times = rounds_of(contenders, 4 if quick else 16, 15)
        case = {"dtype": NAMES[dtype], "M": M, "K": K, "N": N}
        operations = 2 * M * K * N
        over = "linear alone", "fast_linear_gelu"
        rows = rows_of(case, times, over, lambda ms, n=operations: {"TFLOP/s": n / ms / 1e9})
        show(f"Linear + bias + GELU, {NAMES[dtype]}, {M} x {K} x {N}", rows)
        yield rows


def host(quick):
    """Microseconds that a call takes of the CPU, on inputs too small to keep the GPU busy."""
    layernorms, linears = load("beyond/fast_layernorm.py"), load("beyond/fast_linear_gelu.py")
    x, w, b = (random(*shape, dtype=torch.float32) for shape in ((16, 1024), (1024,), (1024,)))
    out = torch.empty_like(x)
    kernel = load("chapter20/03_fused_layernorm.py").layernorm_forward_kernel
    M, K, N = SMALL
    a, weight = random(M, K, dtype=torch.bfloat16), random(N, K, dtype=torch.bfloat16)
    bias = random(N, dtype=torch.bfloat16)
    groups = {
        "LayerNorm, float32, 16 x 1024": {
            "eager": lambda: layer_norm(x, (1024,), w, b, 1e-5),
            "chapter's kernel, launched bare": lambda: kernel[(16,)](
                x, w, b, out, 16, 1024, 1024, 1e-5, BLOCK_N=1024
            ),
            "fast_layernorm": lambda: layernorms.fast_layernorm(x, w, b),
        },
        "Linear + bias + GELU, bfloat16, 16 x 768 x 3072": {
            "eager": lambda: gelu(linear(a, weight, bias)),
            "fast_linear_gelu": lambda: linears.fast_linear_gelu(a, weight, bias),
        },
    }
    for group, calls in groups.items():
        times = {name: [] for name in calls}
        for i in range(3 if quick else 11):
            for name in reversed(calls) if i % 2 else calls:
                call = calls[name]
                call()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                times[name].append((time.perf_counter() - start) / CALLS * 1e6)
        found = []
        print(f"{group}: microseconds of the host's time a call")
        for name, t in times.items():
            print(f"  {name:32} {statistics.median(t):6.1f} ({min(t):.1f} to {max(t):.1f})")
            ratio = statistics.median(a / b for a, b in zip(t, times["eager"], strict=True))
            found.append(
                {"case": group, "contender": name, "us": statistics.median(t)}
                | {"lowest_us": min(t), "highest_us": max(t), "time_over_eager": ratio}
            )
        print(flush=True)
        yield found


def installed(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@functools.cache
def machine():
    """What the figures were measured with, as columns of the CSV."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split()[0]
    except (OSError, IndexError):  # no nvidia-smi, or it says nothing
        driver = "unknown"
    columns = {"gpu": torch.cuda.get_device_name(), "driver": driver}
    columns["cuda"] = torch.version.cuda
    for package in ("torch", "triton", "liger-kernel", "quack-kernels"):
        columns[package] = installed(package) or "not installed"
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


def by_case(rows, *columns):
    """The rows of each case, by contender; of a contender's name only what is before a bracket."""
    cases = {}
    for row in rows:
        case = cases.setdefault(tuple(row[c] for c in columns), {})
        case[row["contender"].split(" (")[0]] = row
    return cases


def table(header, lines):
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---"] * len(header), *lines])


def cells(contenders, names, column, invert=False):
    found = (contenders[name][column] if name in contenders else None for name in names)
    return ["-" if f is None else f"{1 / float(f) if invert else float(f):.2f}" for f in found]


def table_layernorm(rows):
    """Each contender's speed as a share of the copy's."""
    cases = by_case(rows, "dtype", "N")
    names = list(dict.fromkeys(name for case in cases.values() for name in case if name != "copy"))
    lines = [
        [dtype, N, f"{float(case['copy']['TB/s']):.2f}"]
        + cells(case, names, "time_over_copy", invert=True)
        for (dtype, N), case in cases.items()
    ]
    return table(["dtype", "N", "copy, TB/s", *names], lines)


def table_linear_gelu(rows):
    """Each contender's time in that of the linear layer alone."""
    cases = by_case(rows, "dtype", "M", "K", "N")
    names = list(dict.fromkeys(name for case in cases.values() for name in case))[1:]
    lines = [
        [dtype, f"{M} x {K} x {N}", f"{float(case['linear alone']['ms']):.4f}"]
        + cells(case, names, "time_over_linear_alone")
        for (dtype, M, K, N), case in cases.items()
    ]
    return table(["dtype", "M x K x N", "linear alone, ms", *names], lines)


def table_host(rows):
    lines = [
        [row["case"], row["contender"]]
        + [f"{float(row['us']):.1f}", f"{float(row['time_over_eager']):.2f}"]
        for row in rows
    ]
    return table(["case", "contender", "microseconds a call", "over eager"], lines)


# Told apart by the colour-blind, and in print by their markers.
STYLES = {
    "fast_layernorm": ("#D55E00", "o", "-"),
    "fast_linear_gelu": ("#D55E00", "o", "-"),
    "torch.compile": ("#0072B2", "s", "--"),
    "max-autotune": ("#56B4E9", "v", "--"),
    "eager": ("#555555", "^", ":"),
    "chapter, best": ("#009E73", "D", "-."),
    "chapter, best tile": ("#009E73", "D", "-."),
    "cuBLASLt, tanh": ("#E69F00", "*", "-."),
    "Liger": ("#CC79A7", "P", ":"),
    "QuACK": ("#000000", "X", "--"),
}


def style_of(name):
    if name in STYLES:
        return dict(zip(("color", "marker", "linestyle"), STYLES[name], strict=True))


def plot_layernorm(path, rows):
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, dtype in zip(axes, NAMES.values(), strict=True):
        cases = by_case((row for row in rows if row["dtype"] == dtype), "N")
        for name in dict.fromkeys(name for case in cases.values() for name in case):
            if style := style_of(name):
                points = [
                    (int(N), 1 / float(case[name]["time_over_copy"]))
                    for (N,), case in cases.items()
                    if name in case
                ]
                axis.plot(*zip(*points, strict=True), label=name, **style)
        axis.axhline(1, color="#555555", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set(title=dtype, xlabel="row length N", ylim=(0, 1.1))
    axes[0].set_ylabel("speed, as a share of a copy's")
    finish(figure, path, *axes[0].get_legend_handles_labels(), f"LayerNorm, {rows[0]['gpu']}")


def plot_linear_gelu(path, rows):
    cases = by_case(rows, "dtype", "M", "K", "N")
    figure = Figure(figsize=(8, 0.5 * len(cases) + 1.8), layout="constrained")
    axis = figure.subplots()
    for name in dict.fromkeys(name for case in cases.values() for name in case):
        if style := style_of(name):
            points = [
                (float(case[name]["time_over_linear_alone"]), place)
                for place, case in enumerate(cases.values())
                if name in case
            ]
            axis.plot(*zip(*points, strict=True), label=name, **style | {"linestyle": ""})
    axis.axvline(1, color="#555555", linewidth=0.8)
    axis.set_yticks(range(len(cases)), [f"{d}, {m} x {k} x {n}" for d, m, k, n in cases])
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    axis.set_xscale("log")
    ticks = (0.6, 0.8, 1, 1.2, 1.5, 2, 3, 5, 10)
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set(xlabel="time, in that of the linear layer alone (cuBLAS)")
    title = f"Linear + bias + exact GELU (M x K x N), {rows[0]['gpu']}"
    finish(figure, path, *axis.get_legend_handles_labels(), title)


def finish(figure, path, handles, labels, title):
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.suptitle(title)
    figure.savefig(path, dpi=150, facecolor="white")


# What is timed, its table, and its plot if it has one.
PARTS = {
    "host": (host, table_host, None),
    "layernorm": (layernorm, table_layernorm, plot_layernorm),
    "linear-gelu": (linear_gelu, table_linear_gelu, plot_linear_gelu),
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
        times, table_of, plot = PARTS[part]
        path, found = options.out / f"{part.replace('-', '_')}.csv", []
        for case in times(options.quick):
            found += case
            write(path, found)  # each time: what is cut short is kept
        rows = read(path)
        path.with_suffix(".md").write_text(table_of(rows) + "\n")
        if plot:
            plot(path.with_suffix(".png"), rows)
        print(f"wrote {path.with_suffix('.*')}", flush=True)


if __name__ == "__main__":
    main()
