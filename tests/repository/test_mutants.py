"""Small faults put into the scripts, one at a time: a check must notice each of them.

A mutant is caught by a rule on its source, by a test, or as it is compiled for GPUs. A sample of
the mutants is tried; with --mutants all of them.
"""

import collections
import json
import re
import subprocess
import sys
from functools import partial

import mutants
import pytest
from compile_check import compile_all
from helpers import ROOT, SCRIPTS, interpreted, masked_loads_without_other

SAMPLE = 100  # without --mutants one mutant of so many is tried
FILES = [f"test_{name}.py" for name in ("sections", "wrappers", "claims", "memory_safety")]
QUICK = FILES[:2]  # these catch most

# Mutants that no test can notice: function, code and change as patterns, and the reason.
MOVES = r"\.to\(DEVICE\) -> nothing|device=DEVICE -> nothing|\w+, \w+ = \w+\.(to|cpu)\(.* -> pass"
STEPS = r"1e-6 -> 1\.0009\S*e-06|1\.0 -> 1\.001|2\.0 -> 2\.002"
LOADS = r"\b(a|b|bias|gamma|beta) = tl.load"
EQUIVALENT = [
    (".*kernel.*", LOADS, r"[01]\.0 -> [\d.]+", "not stored, or times 0"),
    (".*kernel.*", "tl.sum", "axis=0 -> nothing", "a row has one axis"),
    ("check", "zip", "strict=False -> nothing", "the default"),
    (".*", r"check\(\"(bias|beta)|out = torch.empty", "x -> (weight|gamma)", "on the same GPU"),
    ("triton_layernorm", "2[*][*]20", "N -> BLOCK_N", "0, or N up to the next power of two"),
    (".*", "num_warps =", "512 -> 511", "BLOCK_N is a power of two"),
    (".*", r"M, N, x.stride\(0\)", "M -> N", "the kernel does not use M"),
    ("section_20_1", "gelu", 'approximate="none" -> nothing', "the default"),
    ("section_20_2", "var", "unbiased=True -> nothing", "the default: that is the trap"),
    ("section_20_3", "x_flat = 5.0", STEPS, "float32 rounds these values near 5 to the same"),
    ("section.*|worked_examples", "", MOVES, "only a kernel on a GPU cannot read CPU tensors"),
    (".*", "atol=", r"1e-[45] -> (0\.0001001|1\.0009\S*e-05)", "tested within a factor of 2"),
    ("worked_examples", "out.shape", "out -> out_buggy", "of the same shape"),
    ("worked_examples", "owned = ", "M -> N", "a tail of other length, of which four are read"),
]


def matches(mutant, function, code, change, _):
    return re.fullmatch(rf"\S+ ({function}): .*({code}).*: ({change})", mutant.fault)


def equivalent(mutant):
    return any(matches(mutant, *entry) for entry in EQUIVALENT)


@pytest.fixture(scope="module")
def every_mutant():
    """Each function once: test_same_code.py notices where two scripts' differ."""
    made, seen = [], set()
    for source in map(mutants.Source, SCRIPTS):
        for function in source.functions:
            own = function.name.startswith("section_") or function.name not in seen
            if own and function.name != "_run_layernorm":
                made += source.mutants(function)
            seen.add(function.name)
    return made


def run_tests(files, tried, directory):
    """What catches each mutant as mutants.py finds it; None where nothing does."""
    tests = [f"tests/chapter/{file}" for file in files]
    command = [sys.executable, ROOT / "tests/mutants.py", directory]
    given = json.dumps([tests, tried])
    result = subprocess.run(command, input=given, stdout=subprocess.PIPE, text=True, check=True)
    caught = json.loads(result.stdout)
    return [by and by.partition("::")[0].rpartition("/")[2] for by in caught]


def compile_for_gpus(tried, directory):
    """Whether gpu_compile.py refuses each mutant, for one GPU of each make."""
    paths = [directory / f"mutant{i}.py" for i in range(len(tried))]
    for path, mutant in zip(paths, tried, strict=True):
        path.write_text(mutant.source)
    found = compile_all(paths, "sm_90", "gfx942")
    return ["compiling" if found[path][1] else None for path in paths]


@interpreted
def test_every_mutant_is_caught(every_mutant, pytestconfig, tmp_path, capsys):
    every, tried = pytestconfig.getoption("mutants"), every_mutant
    checks = [partial(run_tests, FILES), compile_for_gpus]
    if not every:  # what the quick tests leave is tried with all
        tried = [mutant for mutant in every_mutant if not equivalent(mutant)][::SAMPLE]
        checks = [partial(run_tests, QUICK), *checks]
    caught = {mutant: "a rule" for mutant in tried if masked_loads_without_other(mutant.source)}
    for i, check in enumerate(checks):
        (directory := tmp_path / str(i)).mkdir()
        if left := [mutant for mutant in tried if mutant not in caught]:
            found = zip(left, check(left, directory), strict=True)
            caught |= {mutant: by for mutant, by in found if by}
    with capsys.disabled():
        counts = collections.Counter(caught.values()).most_common()
        print(f"\n{len(tried)} of {len(every_mutant)} mutants tried, these caught:", counts)
    survivors = [mutant for mutant in tried if mutant not in caught]
    missed = [f"nothing caught {mutant.fault}" for mutant in survivors if not equivalent(mutant)]
    if every:
        entries = [entry for entry in EQUIVALENT if not any(matches(m, *entry) for m in survivors)]
        missed += [f"all of these are caught, and not equivalent: {entry}" for entry in entries]
    if missed:
        pytest.fail("\n".join(missed), pytrace=False)


def test_each_entry_of_the_equivalent_is_made_and_they_are_few(every_mutant):
    assert [e for e in EQUIVALENT if not any(matches(m, *e) for m in every_mutant)] == []
    assert sum(map(equivalent, every_mutant)) <= 0.09 * len(every_mutant)
