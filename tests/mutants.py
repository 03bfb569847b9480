"""Makes small faults in the scripts, one at a time, and tries which of the tests notices.

    python tests/mutants.py DIRECTORY < mutants

Each mutant gets a copy of the checkout in DIRECTORY and a process, forked from this one, in which
the tests run until one fails. Nothing of the checkout is imported here, so that each process loads
its own copy; what they all need is imported once.
"""

import ast
import collections
import dataclasses
import gc
import itertools
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 20  # seconds of computing for a mutant; then it hangs
# What looks at a script's own output, before all other tests.
OUTPUT = (
    "tests/test_memory_safety.py::test_a_scripts_own_run_prints_its_expected_output",
    "tests/test_worked_examples.py::test_figures_are_the_books_up_to_rounding",
)
TESTS = [
    "tests/test_wrappers.py",
    "tests/test_chapter_claims.py",
    "tests/test_memory_safety.py",
    OUTPUT[1],
]
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)

# Each operator's neighbour.
SWAPPED = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    **{"is": "is not", "is not": "is", "and": "or", "or": "and", "&": "|", "|": "&"},
    **{"+": "-", "-": "+", "*": "/", "/": "*", "//": "/", "%": "//", "**": "*"},
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    script: str  # chapter20/01_fused_linear_gelu.py
    function: str  # in which the change is; "" outside of functions
    line: int
    old: str  # the lines that change, in one, and what they change to
    new: str
    source: str  # the whole script with the change

    def __str__(self):
        return f"{self.script}:{self.line}: {self.old} -> {self.new or 'nothing'}"


class Source:
    """A script's text, its functions, and where in the text a node of them stands."""

    def __init__(self, path):
        self.name = path.relative_to(ROOT).as_posix()
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self.functions = [n for n in self.tree.body if isinstance(n, ast.FunctionDef)]
        lines = self.text.splitlines(keepends=True)
        self.starts = [0, *itertools.accumulate(map(len, lines))]

    def kernels(self):
        return [f for f in self.functions if "triton.jit" in map(ast.unparse, f.decorator_list)]

    def start(self, node):
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node):
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def segment(self, node):
        return self.text[self.start(node) : self.end(node)]

    def mutant(self, start, end, new):
        line = self.text.count("\n", 0, start) + 1
        function = [f.name for f in self.functions if f.lineno <= line <= f.end_lineno]
        first, last = self.text.rfind("\n", 0, start) + 1, self.text.find("\n", end)
        old_lines = self.text[first:last]
        new_lines = self.text[first:start] + new + self.text[end:last]
        return Mutant(
            self.name,
            *(function or [""]),
            line,
            " ".join(old_lines.split()),
            " ".join(new_lines.split()),
            self.text[:start] + new + self.text[end:],
        )


def next_of_its_kind(kernel):
    """For each name in a kernel the next of the same kind, with which it could be confused."""
    arguments = {a.arg: a.annotation is not None for a in kernel.args.args}
    pointers = [a for a in arguments if a.endswith("_ptr")]
    constants = [a for a, constant in arguments.items() if constant]
    numbers = [a for a in arguments if a not in pointers + constants]
    ranges, programs = [], []
    for node in ast.walk(kernel):
        if isinstance(node, ast.Assign):
            value = ast.unparse(node.value)
            if "tl.arange(" in value:
                ranges.append(node.targets[0].id)
            elif "tl.program_id(" in value:
                programs.append(node.targets[0].id)
    kinds = [pointers, constants, numbers, ranges, programs]
    pairs = [pair for kind in kinds for pair in zip(kind, kind[1:] + kind[:1], strict=True)]
    return {name: other for name, other in pairs if name != other}


def edits(source, kernel):
    """Every mechanical change of a kernel, as (start, end, new text)."""
    following = next_of_its_kind(kernel)

    def swap(left, right):
        between = source.text[source.end(left) : source.start(right)]
        operator = between.strip("() \n")
        assigns = operator.endswith("=") and operator[:-1] in SWAPPED and operator not in SWAPPED
        swapped = SWAPPED[operator[:-1]] + "=" if assigns else SWAPPED[operator]
        at = source.end(left) + between.index(operator)
        yield at, at + len(operator), swapped
        if assigns:
            yield at, at + len(operator), "="

    def drop(*keywords):
        start, end = source.start(keywords[0]), source.end(keywords[-1])
        end += re.match(r",?", source.text[end:]).end()
        yield start, end, "\n" * source.text.count("\n", start, end)

    for node in (n for statement in kernel.body for n in ast.walk(statement)):
        here = (source.start(node), source.end(node)) if hasattr(node, "lineno") else None
        match node:
            case ast.Compare(left=left, comparators=[right, *_]):
                yield from swap(left, right)
            case ast.BinOp(left=left, right=right) | ast.AugAssign(target=left, value=right):
                yield from swap(left, right)
            case ast.BoolOp(values=[left, right, *_]):
                yield from swap(left, right)
            case ast.Constant(value=int() as n) if not isinstance(n, bool):
                yield *here, str(n + 1)
                if n > 0:
                    yield *here, str(n - 1)
            case ast.Constant(value=float() as x):
                yield *here, str(x + 1)
                if x != 0:
                    yield *here, str(x * 1.001)
            case ast.Name(id=name, ctx=ast.Load()) if name in following:
                yield *here, following[name]
            case ast.Subscript(slice=ast.Tuple(elts=[left, right]) as index):
                swapped = f"{source.segment(right)}, {source.segment(left)}"
                yield source.start(index), source.end(index), swapped
            case ast.Call(func=ast.Attribute(attr="where"), args=[_, value, _]):
                yield *here, f"({source.segment(value)})"
            case ast.Call(func=ast.Attribute(attr="to") as cast):
                yield source.end(cast) - len(".to"), here[1], ""
        for keyword in getattr(node, "keywords", []):
            if keyword.arg == "mask":  # without a mask Triton takes no other
                yield from drop(*[k for k in node.keywords if k.arg in ("mask", "other")])
            elif keyword.arg in ("other", "input_precision"):
                yield from drop(keyword)


def mechanical(source):
    """Every mechanical change of a script's kernels."""
    made = [source.mutant(*e) for kernel in source.kernels() for e in edits(source, kernel)]
    return list({mutant.source: mutant for mutant in made}.values())


def chosen(source, old, new):
    """One change of text, at each place where it can be made."""
    places = re.finditer(re.escape(old), source.text)
    return [source.mutant(place.start(), place.end(), new) for place in places]


class Baseline:
    """pytest's plugin where there is no mutant: how long each test takes, and what it launches."""

    def __init__(self, part, parts):
        self.part, self.parts = part, parts
        self.tests, self.failed = {}, []

    def pytest_collection_modifyitems(self, items):
        items[:] = items[self.part :: self.parts]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        import watched

        start = time.monotonic()
        with watched.record() as launches:
            yield
        seconds = time.monotonic() - start
        self.tests[item.nodeid] = seconds, sorted({launch.name for launch in launches})

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)

    def result(self):
        return {"tests": self.tests, "failed": self.failed}


class FirstFailure:
    """pytest's plugin for a mutant: runs the tests that can see it until one fails."""

    def __init__(self, mutant, tests):
        self.mutant, self.tests = mutant, tests
        self.caught = None

    def pytest_collection_modifyitems(self, items):
        # [01], [04-arguments0-...] or [chapter20/02_row_mean_var.py]: of that script alone.
        number = Path(self.mutant.script).name[:2]
        numbers = {path.name[:2] for path in Path().glob("chapter*/[0-9][0-9]_*.py")}
        others = re.compile(rf"\[(?:.*/)?({'|'.join(numbers - {number})})[\]_-]")
        kernels = {kernel for _, launched in self.tests.values() for kernel in launched}

        def sees(item):
            _, launched = self.tests.get(item.nodeid, (0, []))
            function = self.mutant.function
            return not others.search(item.nodeid) and (
                function not in kernels or function in launched
            )

        def seconds(item):
            return -1 if item.nodeid.startswith(OUTPUT) else self.tests.get(item.nodeid, (0, ()))[0]

        # The quickest first; but the more of a test's examples have passed, the less one more says.
        quickest = sorted(filter(sees, items), key=seconds)
        examples = collections.Counter()
        cost = {}
        for item in quickest:
            examples[item.originalname] += 1
            cost[item] = seconds(item) * examples[item.originalname]
        items[:] = sorted(quickest, key=cost.get)

    def pytest_collectreport(self, report):
        if report.failed:  # the script cannot even be imported
            self.caught = "output", report.nodeid

    def pytest_runtest_logreport(self, report):
        if report.failed:
            # Nothing is watched where the script runs by itself: its output would not show it.
            strayed = "elements that are not its own" in report.longreprtext
            shown = report.nodeid.startswith(OUTPUT) and not strayed
            self.caught = "output" if shown else "tests", report.nodeid

    def result(self):
        return self.caught


def in_a_process(directory, plugin, *options):
    """Forks a process that runs the tests of a copy of the checkout; returns its id.

    It writes the plugin's result to the copy's file "result".
    """
    pid = os.fork()
    if pid == 0:
        try:
            signal.setitimer(signal.ITIMER_PROF, LIMIT)
            signal.alarm(10 * LIMIT)  # for one that waits and does not compute
            os.chdir(directory)
            with open("log", "w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            options = ["-q", "--tb=short", "-p", "no:cacheprovider", "--rootdir=.", *options]
            status = pytest.main([*options, *TESTS], plugins=[plugin])
            if plugin.result() is not None or status == pytest.ExitCode.OK:
                Path("result").write_text(json.dumps(plugin.result()))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)
    return pid


def result(directory):
    """What a process wrote."""
    if not (directory / "result").exists():
        raise RuntimeError((directory / "log").read_text())
    return json.loads((directory / "result").read_text())


def baseline(directory, parts):
    """Each test's duration and launches, on the scripts as they are; none may fail.

    Leaves the compiled tests in the checkout, for each mutant's copy of it.
    """
    copies = [shutil.copytree(directory, f"{directory}{part}") for part in range(parts)]
    sys.dont_write_bytecode = False
    for pid in [in_a_process(copy, Baseline(i, parts)) for i, copy in enumerate(copies)]:
        os.waitpid(pid, 0)
    sys.dont_write_bytecode = True
    shutil.copytree(f"{copies[0]}/tests/__pycache__", directory / "tests/__pycache__")
    results = [result(Path(copy)) for copy in copies]
    if failed := [test for r in results for test in r["failed"]]:
        raise RuntimeError(f"fail without a mutant: {failed}")
    return {name: test for r in results for name, test in r["tests"].items()}


def sweep(mutants, directory):
    """Yields each mutant's index and what caught it, as soon as it is known."""
    processes = os.cpu_count()
    checkout = directory / "checkout"
    for name in ("tests", "expected_outputs", *sorted({m.script.split("/")[0] for m in mutants})):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", checkout)
    tests = baseline(checkout, processes)

    waiting = list(enumerate(mutants))[::-1]
    running = {}
    while waiting or running:
        while waiting and len(running) < processes:
            index, mutant = waiting.pop()
            copy = directory / str(index)
            shutil.copytree(checkout, copy)
            (copy / mutant.script).write_text(mutant.source)
            running[in_a_process(copy, FirstFailure(mutant, tests), "-x")] = index, copy
        pid, status = os.wait()
        index, copy = running.pop(pid)
        ended_by = os.WTERMSIG(status)  # 0 where it ended by itself
        if ended_by in (signal.SIGPROF, signal.SIGALRM):
            yield index, ("hang", f"{LIMIT} s")
        elif ended_by in CRASHES:
            yield index, ("output", signal.Signals(ended_by).name)
        else:
            yield index, result(copy)
        shutil.rmtree(copy)


def main():
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:] = [path for path in sys.path if Path(path) != ROOT / "tests"]

    import hypothesis.strategies
    import numpy  # noqa: F401
    import torch
    import triton.runtime.interpreter  # noqa: F401

    torch.set_num_threads(1)  # threads do not survive a fork
    # One failure will do, as it is found.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile(
        "mutants", phases=phases, report_multiple_bugs=False, max_examples=40
    )
    hypothesis.settings.load_profile("mutants")
    gc.freeze()  # what is imported by now need not be looked through again
    mutants = [Mutant(**json.loads(line)) for line in sys.stdin]
    for result in sweep(mutants, Path(sys.argv[1])):
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
