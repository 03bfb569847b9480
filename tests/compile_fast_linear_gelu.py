"""Compiles fast_linear_gelu's steps for GPUs that need not be there.

    python tests/compile_fast_linear_gelu.py sm_90 gfx942

Prints, as JSON, what the wrapper launches on each target: kernel, options and what is wrong.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from unittest import mock

import gpu_compile  # before triton is imported: it switches the interpreter off
import torch
import triton
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path.append(str(Path(__file__).resolve().parent.parent / "beyond"))
import fast_linear_gelu as fast  # noqa: E402

TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
# Bytes of shared memory that a program may have.
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99}
# For each dtype its small step and its large one.
CASES = [(16, torch.float16), (4096, torch.bfloat16), (16, torch.float32), (4096, torch.float32)]


def launches_on(target):
    """The wrapper's launches where the GPU is the target: (kernel, arguments by name, options)."""
    hip = target.backend == "hip"
    capability = (0, 0) if hip else divmod(target.arch, 10)
    found = []

    def record(kernel, *args, grid, warmup, **options):
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        arguments |= {name: options.pop(name) for name in kernel.arg_names if name in options}
        found.append((kernel, arguments, options))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", record))
        stack.enter_context(mock.patch.object(fast, "DEVICE", "cpu"))
        stack.enter_context(mock.patch.object(fast, "gpu", lambda device: (capability, 132)))
        fast.plan.cache_clear()
        for M, dtype in CASES:
            x, weight, bias = (torch.empty(s, dtype=dtype) for s in [(M, 768), (3072, 768), 3072])
            fast.fast_linear_gelu(x, weight, bias)
    return found


def compile_for(target, kernel, arguments, options):
    types, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            types[name], constants[name] = "constexpr", value
        elif hasattr(value, "base"):
            types[name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
        else:
            integer = parameter.annotation_type or "i32"
            types[name] = f"*{TYPES[value.dtype]}" if torch.is_tensor(value) else integer
            attributes[(index,)] = [["tt.divisibility", 16]]  # all sizes are multiples
    source = ASTSource(kernel, types, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def check(name):
    target, done, found = gpu_compile.TARGETS[name], [], []
    gpu_compile.SHARED_LIMIT = SHARED.get(name, 64) * 1024
    for kernel, arguments, options in launches_on(target):
        shown = {k: v for k, v in (arguments | options).items() if isinstance(v, int | str)}
        tile = [shown[k] for k in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GELU")]
        if (kernel, tile) in done:
            continue
        done.append((kernel, tile))
        faults = gpu_compile.faults_of(compile_for(target, kernel, arguments, options), target)
        if arguments["PRECISION"] == "tf32x3":
            faults.remove("computes in TF32")  # as it is meant to
        found.append((kernel.__name__, shown, faults))
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope():
        triton.knobs.cache.dir = cache
        print(json.dumps({name: check(name) for name in sys.argv[1:]}))
