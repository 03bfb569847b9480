"""Small faults put into the scripts, one at a time: a check must notice each of them.

A mutant is caught by a rule on its source, by a test, or as it is compiled for GPUs. A sample of
the mutants is tried; with --mutants all of them.
"""

import collections
import dataclasses
import json
import re
import subprocess
import sys

import mutants
import pytest
from compile_check import compile_all
from helpers import INTERPRET, ROOT, SCRIPTS, masked_loads_without_other

SAMPLE = 60  # without --mutants one mutant of so many is tried

# Mutants that no test can notice: function, code and change as patterns, and the reason.
NOT_STORED = "a lane past the edge is not stored"
EQUIVALENT = []


def equivalent(mutant):
    return any(
        re.fullmatch(function, mutant.function)
        and re.search(code, mutant.code)
        and re.fullmatch(change, mutant.change)
        for function, code, change, _ in EQUIVALENT
    )


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


def run_mutants(tried, directory):
    """What catches each mutant as mutants.py finds it; None where nothing does."""
    result = subprocess.run(
        [sys.executable, ROOT / "tests/mutants.py", directory],
        input="".join(json.dumps(dataclasses.asdict(mutant)) + "\n" for mutant in tried),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = dict(map(json.loads, result.stdout.splitlines()))
    return [found[i] for i in range(len(tried))]


def compile_mutants(tried, directory):
    """What gpu_compile.py says of each mutant, for one GPU of each make."""
    paths = [directory / f"mutant{i}.py" for i in range(len(tried))]
    for path, mutant in zip(paths, tried, strict=True):
        path.write_text(mutant.source)
    found = compile_all(paths, "sm_90", "gfx942")
    return [found[path][1] for path in paths]


def test_every_mutant_is_caught(every_mutant, pytestconfig, tmp_path, capsys):
    if not INTERPRET:
        pytest.skip("a GPU is in use: the mutants are interpreted, each access watched")
    every = pytestconfig.getoption("mutants")
    tried = every_mutant if every else every_mutant[::SAMPLE]
    caught = {mutant: "a rule" for mutant in tried if masked_loads_without_other(mutant.source)}
    left = [mutant for mutant in tried if mutant not in caught]
    for mutant, by in zip(left, run_mutants(left, tmp_path), strict=True):
        if by:
            caught[mutant] = by.rpartition("/")[2].partition("::")[0]
    left = [mutant for mutant in tried if mutant not in caught]
    for mutant, faults in zip(left, compile_mutants(left, tmp_path), strict=True):
        if faults:
            caught[mutant] = "compiling"
    survivors = [m for m in tried if m not in caught and not equivalent(m)]
    with capsys.disabled():
        print(f"\n{len(tried)} of {len(every_mutant)} mutants tried; caught by:")
        for by, count in collections.Counter(caught.values()).most_common():
            print(f"{count:6} {by}")
        print(f"{len(tried) - len(caught) - len(survivors):6} nothing, for they are equivalent")
    if survivors:
        pytest.fail("nothing caught\n" + "\n".join(map(str, survivors)), pytrace=False)


def test_what_is_listed_as_equivalent_is_made_and_little(every_mutant):
    for function, code, change, _ in EQUIVALENT:
        assert any(
            re.fullmatch(function, m.function)
            and re.search(code, m.code)
            and re.fullmatch(change, m.change)
            for m in every_mutant
        ), (function, code, change)
    assert sum(map(equivalent, every_mutant)) <= 0.06 * len(every_mutant)
