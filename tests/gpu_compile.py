"""Compiles a script's kernels for GPUs that need not be there, as its own wrappers launch them.

    python tests/gpu_compile.py chapter20/01_fused_linear_gelu.py:sm_90,gfx942 chapter20/02_*.py

Without targets, for all of TARGETS. The script runs with its launches recorded instead of made:
the arguments of each launch give the types and constants that Triton compiles with. Prints a line
of JSON for each script: the list of what it launches, and the list of faults.

Triton's interpreter has to be off before triton is imported, so this is a process of its own.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_75": GPUTarget("cuda", 75, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
SHARED_LIMIT = 64 * 1024  # bytes: every one of them has as much
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
# Beside what the sections launch: the longest rows that the registers hold. (LayerNorm's rows of
# 32768 spill 16 bytes on NVIDIA GPUs: gamma and beta take registers, too.)
LONG = torch.empty(2, 16384)
ALSO = {"row_mean_var": (torch.empty(2, 32768),), "triton_layernorm": (LONG, LONG[0], LONG[0])}


def recorder(launches):
    """In JITFunction.run's place: appends each launch to launches, and makes none.

    A launch is the kernel, its arguments by name, and Triton's options (num_warps).
    """

    def record(kernel, *args, grid, warmup, **options):
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        arguments |= {name: options.pop(name) for name in kernel.arg_names if name in options}
        launches.append((kernel, arguments, options))

    return record


def launches_of(path, backend):
    """The kernels of a script by name, and the launches that its sections and wrappers make where
    torch is built for the backend, "cuda" or "hip".
    """
    path = Path(path).resolve()
    launches = []
    names = {"__name__": path.stem, "__file__": str(path)}
    with (
        mock.patch.object(JITFunction, "run", recorder(launches)),
        # So that the script leaves the interpreter off.
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.version, "hip", "7.0" if backend == "hip" else None),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        exec(compile(path.read_text(), path, "exec"), names)
        names["DEVICE"] = "cpu"
        for name in sorted(n for n in names if n.startswith("section_")):
            results = names[name]()
            if "worked_examples" in names:
                names["worked_examples"](*results)
        for name in ALSO.keys() & names.keys():
            names[name](*ALSO[name])
    kernels = {name: k for name, k in names.items() if isinstance(k, JITFunction)}
    return kernels, launches


def compile_for(target, kernel, arguments, options, source=ASTSource):
    """Compiles one launch; types and constants are those of Triton's own just-in-time compiler.

    source is GluonASTSource for a kernel in Gluon.
    """
    types, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        special = not parameter.do_not_specialize
        one = special and isinstance(value, int) and value == 1
        if parameter.is_constexpr or value is None or one:
            types[name], constants[name] = "constexpr", value
        elif hasattr(value, "base"):  # a descriptor
            layout = "" if source is ASTSource else f",{value.layout!r}"
            types[name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}{layout}>"
        elif isinstance(value, float):
            types[name] = "fp32"
        else:
            tensor = isinstance(value, torch.Tensor)
            integer = parameter.annotation_type or ("i32" if tensor or value < 2**31 else "i64")
            types[name] = f"*{TYPES[value.dtype]}" if tensor else integer
            if tensor or (special and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
    made = source(kernel, types, constexprs=constants, attrs=attributes)
    return triton.compile(made, target=target, options=options)


def cuobjdump(compiled, option):
    """What cuobjdump prints of a kernel compiled for an NVIDIA GPU."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [CUOBJDUMP, option, cubin.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def faults_of(compiled, target):
    """What a compiled kernel has that no kernel of the book may have."""
    found = []
    if target.backend == "cuda":
        assembly = compiled.asm["ptx"]
        usage = cuobjdump(compiled, "--dump-resource-usage")
        local = re.findall(r"\b(?:STACK|LOCAL):(\d+)", usage)
    else:
        assembly = compiled.asm["amdgcn"]
        local = re.findall(r"\.private_segment_fixed_size: +(\d+)", assembly)
    if re.search(r"tf32|xf32", assembly):
        found.append("computes in TF32")
    if re.search(r"\.f64|_f64", assembly):
        found.append("computes in float64")
    if not local or any(int(size) for size in local):
        found.append(f"spills to local memory: {local}")
    if compiled.metadata.shared > SHARED_LIMIT:
        found.append(f"takes {compiled.metadata.shared} bytes of shared memory")
    threads = compiled.metadata.num_warps * target.warp_size
    if threads > 1024:
        found.append(f"has {threads} threads a program")
    return found


found = {}  # the faults of a launch: scripts repeat each other's kernels, and compile them once


def check(path, targets):
    """Compiles every launch of a script for the targets.

    Returns what it launches and what is wrong with it, both as lists of text.
    """
    labels, faults = [], []
    for name in targets:
        target = TARGETS[name]
        kernels, launches = launches_of(path, target.backend)
        for kernel in kernels.keys() - {kernel.__name__ for kernel, *_ in launches}:
            faults.append(f"{kernel} for {name}: no section and no wrapper launches it")
        for kernel, arguments, options in launches:
            shown = {k: v.dtype if torch.is_tensor(v) else v for k, v in arguments.items()}
            shown = ", ".join(f"{k}={v}" for k, v in (shown | options).items())
            label = f"{kernel.__name__} ({shown}) for {name}"
            if (label, kernel.src) not in found:
                try:
                    compiled = compile_for(target, kernel, arguments, options)
                except Exception as error:
                    found[label, kernel.src] = [f"does not compile: {error}"]
                else:
                    found[label, kernel.src] = faults_of(compiled, target)
            if label not in labels:
                labels.append(label)
                faults += [f"{label}: {fault}" for fault in found[label, kernel.src]]
    return labels, faults


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for argument in sys.argv[1:]:
            path, _, targets = argument.partition(":")
            print(json.dumps(check(path, targets.split(",") if targets else TARGETS)), flush=True)
