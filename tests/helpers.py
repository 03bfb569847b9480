"""What several test files need: the scripts as modules, inputs, exact results, comparisons."""

import ast
import functools
import importlib.util
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
import watched
from torch.nn.functional import gelu
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(ROOT.glob("chapter*/[0-9][0-9]_*.py"))


def name_of(script):
    """chapter20/01_fused_linear_gelu.py, for messages and test ids."""
    return script.relative_to(ROOT).as_posix()


def expected_file(script):
    """The book's Expected Output of a script."""
    return ROOT / "expected_outputs" / script.relative_to(ROOT).with_suffix(".txt")


@functools.cache
def load(name):
    """The file ROOT/name as a module; it chooses the GPU or the interpreter as it always does."""
    path = ROOT / name
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


linear_gelu = load("chapter20/01_fused_linear_gelu.py")
row_mean_var = load("chapter20/02_row_mean_var.py")
layernorm = load("chapter20/03_fused_layernorm.py")
complete = load("chapter20/04_standalone_complete.py")
triton = complete.triton  # imported once the script had chosen the interpreter or the GPU
DEVICE = complete.DEVICE
INTERPRET = complete.INTERPRET

every_script = pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
interpreted = pytest.mark.skipif(not INTERPRET, reason="on a GPU no address can be watched")
on_a_gpu = pytest.mark.skipif(INTERPRET, reason="needs a GPU")

# --- A rule on the source of kernels ---


def masked_loads_without_other(source):
    """Where a masked load leaves its other lanes undefined; Triton's interpreter fills them."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load"
        if {"mask", "other"} & {keyword.arg for keyword in node.keywords} == {"mask"}
    ]


# --- Inputs, drawn on the CPU from a seed ---


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": lambda x: x.T.contiguous().T,
    "columns of a wider tensor": lambda x: part(x, len(x), x.shape[1] + 5, np.s_[:, 2:-3]),
    "rows of a longer tensor": lambda x: part(x, len(x) + 3, x.shape[1], np.s_[1:-2]),
    "every second column": lambda x: part(x, len(x), 2 * x.shape[1], np.s_[:, ::2]),
    "every second row": lambda x: part(x, 2 * len(x), x.shape[1], np.s_[::2]),
    "one row, expanded": lambda x: x[:1].expand(x.shape) if len(x) else x,
    "one column, expanded": lambda x: x[:, :1].expand(x.shape) if x.shape[1] else x,
}


def part(x, rows, columns, index):
    """x as a part of a larger tensor of NaN: reading beside it shows."""
    return x.new_full((rows, columns), float("nan"))[index].copy_(x)


def matrix(m, n, seed, layout="contiguous", shift=0.0):
    """An (m, n) float32 tensor on the device, laid out as LAYOUTS says."""
    return LAYOUTS[layout](draw(m, n, seed=seed) + shift)


def vector(n, seed, strided=False):
    return matrix(1, n, seed, "every second column" if strided else "contiguous")[0]


def sparse():
    """3 * 2**30 float32 on the CPU: zeros that take no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, 3 * 2**30 * 4, flags=flags), dtype=torch.float32)


def far_apart(axis):
    """x, weight and bias, with an axis so long that 32-bit offsets in it would be negative."""
    x, weight, bias = matrix(3, 3, 0), matrix(3, 3, 1), vector(3, 2)
    far = sparse().as_strided((3, 3), (2**30, 1))
    if axis == "rows of x":
        x = far.copy_(x)
    elif axis == "rows of weight":
        weight = far.copy_(weight)
    elif axis == "columns of x":
        x = far.T.copy_(x)
    elif axis == "both columns":
        x, weight = far.T.copy_(x), far.T
    return x, weight, bias


# --- Exact results, in float64 on the CPU ---


def exact_linear_gelu(x, weight, bias):
    x, weight, bias = (t if t is None else t.double().cpu() for t in (x, weight, bias))
    return gelu(torch.nn.functional.linear(x, weight, bias))


def exact_layernorm(x, gamma, beta, eps):
    x, gamma, beta = (t if t is None else t.double().cpu() for t in (x, gamma, beta))
    return torch.nn.functional.layer_norm(x, (x.shape[1],), gamma, beta, eps)


def assert_close(result, exact, tolerance=2e-6):
    """result (float32) is exact (float64) within tolerance, relative or absolute; NaN never is."""
    assert result.dtype == torch.float32
    result, exact = result.double().cpu(), exact.cpu()
    torch.testing.assert_close(result, exact, rtol=tolerance, atol=tolerance, equal_nan=False)


# --- Launches and operators ---


def naive(x, weight, bias):
    """The same as three operators: matmul, add, GELU."""
    return gelu(x @ weight.T + bias)


class Operators(TorchDispatchMode):
    """Records what torch computes within the block: operator, tensors read, tensors written."""

    # Neither computes: a view is new strides on the same memory, and empty memory is not written.
    FREE = ("aten.t.", "aten.transpose.", "aten.permute.", "aten.empty")

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not str(function).startswith(self.FREE):
            read = [a for a in args if isinstance(a, torch.Tensor)]
            self.calls.append((str(function), read, result))
        return result


def replace_kernels(monkeypatch, module, stand_in):
    """Has stand_in(name, kernel) launched in the place of each of a script's kernels."""
    kernels = {name: k for name, k in vars(module).items() if hasattr(k, "arg_names")}
    stand_ins = {kernel: stand_in(name, kernel) for name, kernel in kernels.items()}
    for name, kernel in kernels.items():
        monkeypatch.setattr(module, name, stand_ins[kernel])
    # A keyword's default is the kernel itself, whatever its name stands for now.
    for function in vars(module).values():
        if getattr(function, "__defaults__", None) and function not in kernels.values():
            defaults = tuple(stand_ins.get(default, default) for default in function.__defaults__)
            monkeypatch.setattr(function, "__defaults__", defaults)


def count_launches(run, *args):
    """The kernels that a call launches: on a GPU by the profiler, without one by counting."""
    if INTERPRET:
        with watched.record() as launches, Operators() as operators:
            run(*args)
        return len(launches) + len(operators.calls)
    run(*args)  # compiles, and has cuBLAS set itself up
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        run(*args)
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e.name for e in on_gpu if not e.name.startswith(("Memset", "Memcpy"))]
    # cuBLAS splits a small matmul along K and adds the parts up in a kernel of its own.
    return len([name for name in kernels if "splitKreduce" not in name])


# --- The traps ---

EPS = 1e-5
NEAR_CONSTANT = 5.0 + torch.tensor([[1.0, -1.0, 2.0, 0.0, -2.0, 1.0, 0.0, -1.0]]) * 1e-6


def buggy(x, weight, bias, tail=0.0):
    """The buggy kernel's output where the bias lies in a buffer that goes on with the tail."""
    (M, K), N = x.shape, len(weight)
    buffer = torch.full((max(M, N),), tail, device=DEVICE)
    buffer[:N] = bias
    out, w_t = torch.empty(M, N, device=DEVICE), weight.t()
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 16))
    strides = *x.stride(), *w_t.stride(), *out.stride()
    linear_gelu.fused_linear_gelu_kernel_buggy_bias_axis[grid](
        x, w_t, buffer[:N], out, M, N, K, *strides, BLOCK_M=16, BLOCK_N=16, BLOCK_K=16
    )
    return out


def ones_and_zeros(x):
    """gamma and beta that change nothing."""
    return torch.ones(x.shape[1], device=DEVICE), torch.zeros(x.shape[1], device=DEVICE)


def wrong_eps(x, *arguments):
    """The buggy kernel's output, with gamma, beta and eps if they are given."""
    arguments = arguments or ones_and_zeros(x)
    kernel = layernorm.layernorm_forward_kernel_wrong_eps
    return layernorm.triton_layernorm(x, *arguments, kernel=kernel)


def wrong_over_correct(x):
    correct, wrong = layernorm.triton_layernorm(x, *ones_and_zeros(x)), wrong_eps(x)
    at = correct.abs().argmax(dim=-1, keepdim=True)
    return (wrong.gather(-1, at) / correct.gather(-1, at)).flatten().double().cpu()
