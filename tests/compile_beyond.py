"""Compiles what the files of beyond/ launch, for GPUs that need not be there.

    python tests/compile_beyond.py sm_90 gfx942

Prints, as JSON, what each file's wrapper launches on each target: kernel, constants and options,
and what is wrong.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gpu_compile  # before triton is imported: it switches the interpreter off
import torch
import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

BEYOND = Path(__file__).resolve().parent.parent / "beyond"
SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "sm_120": 99}  # KiB that a program may have


def linear_gelu_arguments(target):
    """The large step of each dtype; for some targets the small one, too, and no bias."""
    made = [(4096, torch.bfloat16, True), (4096, torch.float32, True)]
    if target in ("sm_90", "sm_120", "gfx942"):
        made += [(16, torch.float16, False), (16, torch.float32, True)]
    if target == "sm_90":
        made += [(4096, torch.float16, False)]
        made += [(M, dtype, True) for M in (1, 200, 500) for _, dtype, _ in made[:2]]
    for M, dtype, has_bias in made:
        x, weight, bias = (torch.empty(s, dtype=dtype) for s in [(M, 768), (3072, 768), 3072])
        yield x, weight, bias if has_bias else None


def layernorm_arguments(target):
    """Rows of each kernel, masked and not, and those that fill the registers."""
    for N in (64, 32768, 50257):
        yield torch.empty(1024, N, dtype=torch.bfloat16), torch.empty(N), torch.empty(N)
    if target in ("sm_90", "gfx942"):
        for N in (300, 1000, 10001, 32768):
            yield torch.empty(1024, N), torch.empty(N), torch.empty(N)


ARGUMENTS = {"fast_linear_gelu": linear_gelu_arguments, "fast_layernorm": layernorm_arguments}


def launches_on(file, name):
    """The wrapper's launches where the GPU is the target: (kernel, arguments by name, options)."""
    target, path = gpu_compile.TARGETS[name], BEYOND / f"{file}.py"
    hip = target.backend == "hip"
    major, minor = (9, 0) if hip else divmod(target.arch, 10)
    properties = SimpleNamespace(major=major, minor=minor, multi_processor_count=132)
    found, names = [], {"__name__": file}
    with (
        # The file must not switch the interpreter on.
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        mock.patch.object(torch.version, "hip", "7.0" if hip else None),
        mock.patch.object(JITFunction, "run", gpu_compile.recorder(found)),
    ):
        exec(compile(path.read_text(), path, "exec"), names)
        names["DEVICE"] = "cpu"  # where the tensors are
        for arguments in ARGUMENTS[file](name):
            names[file](*arguments)
    return found


def late(compiled):
    """Whether linear_gelu_pingpong_kernel's consumers compute GELU before they hand back the last
    slot of the ring, as the assembler likes to have it: the other then waits for it.
    """
    marks = {"HGMMA": "m", "SYNCS.PHASECHK": "w", "SYNCS.ARRIVE": "a", "MUFU.EX2": "g"}
    code = gpu_compile.cuobjdump(compiled, "--dump-sass")
    order = "".join(marks[found] for found in re.findall("|".join(marks), code))
    return len(re.findall("ma+g", order)) != 2 or "ga" in order


def narrow(compiled, arguments):
    """Whether a row's values are stored one by one, although each row begins at 8 bytes or more.

    They are loaded as they are stored.
    """
    wide = arguments["ALIGN"] * arguments["out_ptr"].element_size() >= 8
    return wide and re.search(r"st\.global\.b(16|32)\b", compiled.asm["ptx"])


def check(file, name):
    target, found = gpu_compile.TARGETS[name], []
    gpu_compile.SHARED_LIMIT = SHARED.get(name, 64) * 1024
    for kernel, arguments, options in launches_on(file, name):
        constants = {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr}
        source = GluonASTSource if kernel.is_gluon() else ASTSource
        compiled = gpu_compile.compile_for(target, kernel, arguments, options, source)
        faults = gpu_compile.faults_of(compiled, target)
        if arguments.get("PRECISION") == "tf32x3" and arguments["BLOCK_M"] > 1:  # three products
            faults.remove("computes in TF32")
        if kernel.__name__ == "linear_gelu_pingpong_kernel" and late(compiled):
            faults.append("computes GELU before the last slot is handed back")
        if file == "fast_layernorm" and target.backend == "cuda" and narrow(compiled, arguments):
            faults.append("stores one value at a time")
        found.append((kernel.__name__, constants | options, faults))
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        triton.knobs.compilation.disable_line_info = True  # it takes time
        targets = sys.argv[1:]
        print(json.dumps({f: {name: check(f, name) for name in targets} for f in ARGUMENTS}))
