"""Makes small faults in the scripts, one at a time, and finds a test that notices each of them.

    python tests/mutants.py DIRECTORY < mutants

Each mutant gets a copy of the checkout in DIRECTORY and a process, forked from this one, in which
tests run until one fails. Nothing of the checkout is imported here, so that each process loads its
own copy; what they all need is imported once. Prints each mutant's index and what caught it, as
JSON. Libraries for mutation start Python anew for each mutant, which would take hours here.
"""

import ast
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
FILES = ("test_sections.py", "test_wrappers.py", "test_claims.py", "test_memory_safety.py")
TESTS = [f"tests/chapter/{file}" for file in FILES]
# Without plugins that take longer than most mutants do.
UNUSED = ("cacheprovider", "hypothesispytest", "unraisableexception", "xdist")
OPTIONS = ["-q", "--tb=line", "--rootdir=.", *[f"-pno:{plugin}" for plugin in UNUSED]]
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)

# Each operator's neighbour.
SWAPPED = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    **{"is": "is not", "is not": "is", "in": "not in", "and": "or", "or": "and"},
    **{"+": "-", "-": "+", "*": "/", "/": "*", "//": "/", "&": "|", "|": "&", "**": "*"},
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    script: str  # chapter20/01_fused_linear_gelu.py
    function: str  # the function that has the fault
    line: int
    code: str  # the lines around the fault, in one
    change: str  # old -> new
    source: str  # the whole script with the fault

    def __str__(self):
        return f"{self.script}:{self.line} {self.function}: {self.code}: {self.change}"


class Source:
    """A script's text and functions, and where in the text a node of them stands."""

    def __init__(self, path):
        self.name = path.relative_to(ROOT).as_posix()
        self.text = path.read_text()
        tree = ast.parse(self.text)
        self.functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
        self.kernels = [
            f for f in self.functions if "triton.jit" in map(ast.unparse, f.decorator_list)
        ]
        lines = self.text.splitlines(keepends=True)
        self.starts = [0, *itertools.accumulate(map(len, lines))]

    def start(self, node):
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node):
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def segment(self, node):
        return self.text[self.start(node) : self.end(node)]

    def mutants(self, function):
        """Every mechanical change of a function."""
        made = {}
        for start, end, new in self.edits(function):
            first, last = self.text.rfind("\n", 0, start) + 1, self.text.find("\n", end)
            source = self.text[:start] + new + self.text[end:]
            made[source] = Mutant(
                self.name,
                function.name,
                self.text.count("\n", 0, start) + 1,
                " ".join(self.text[first:last].split()),
                " ".join(f"{self.text[start:end]} -> {new or 'nothing'}".split()),
                source,
            )
        return list(made.values())

    def edits(self, function):
        """Changes of a function as (start, end, new text)."""
        neighbours = self.neighbours(function)
        docstring = ast.get_docstring(function) is not None
        for node in nodes(function.args.defaults + function.body[docstring:]):
            here = (self.start(node), self.end(node)) if hasattr(node, "lineno") else None
            match node:
                case ast.Compare(left=left, comparators=[right, *_]):
                    yield from self.swap(left, right)
                case ast.BinOp(left=left, right=right) | ast.AugAssign(target=left, value=right):
                    yield from self.swap(left, right)
                case ast.BoolOp(values=values):
                    for left, right in itertools.pairwise(values):
                        yield from self.swap(left, right)
                case ast.UnaryOp(op=ast.Not(), operand=operand):
                    yield *here, self.segment(operand)
                case ast.Constant(value=int() as n) if not isinstance(n, bool):
                    yield *here, str(n + 1)
                    if n > 0:
                        yield *here, str(n - 1)
                case ast.Constant(value=float() as x):
                    yield *here, str(x + 1)
                    if x != 0:
                        yield *here, str(x * 1.001)
                case ast.Name(id=name, ctx=ast.Load()) if name in neighbours:
                    yield *here, neighbours[name]
                case ast.Subscript(slice=ast.Tuple(elts=[left, right]) as index):
                    swapped = f"{self.segment(right)}, {self.segment(left)}"
                    yield self.start(index), self.end(index), swapped
                case ast.Call(func=ast.Attribute(attr="where"), args=[_, value, _]):
                    yield *here, f"({self.segment(value)})"
                case ast.Call(func=ast.Attribute(attr="to" | "contiguous" | "abs") as method):
                    yield self.end(method) - len(f".{method.attr}"), here[1], ""
                case ast.IfExp(body=body, orelse=orelse):
                    yield *here, self.segment(body)
                    yield *here, self.segment(orelse)
            if isinstance(node, ast.stmt):
                yield *here, "pass"
            for keyword in getattr(node, "keywords", []):
                # Without a mask Triton takes no other.
                dropped = [k for k in node.keywords if k.arg in ("mask", "other")]
                dropped = dropped if keyword.arg == "mask" else [keyword]
                start, end = self.start(dropped[0]), self.end(dropped[-1])
                yield start, end + re.match(r",?", self.text[end:]).end(), ""

    def swap(self, left, right):
        between = self.text[self.end(left) : self.start(right)]
        operator = between.strip("() \n")
        assigns = operator.endswith("=") and operator[:-1] in SWAPPED and operator not in SWAPPED
        swapped = SWAPPED[operator[:-1]] + "=" if assigns else SWAPPED[operator]
        at = self.end(left) + between.index(operator)
        yield at, at + len(operator), swapped

    def neighbours(self, function):
        """For each name in a function the next of its kind, with which it could be confused."""
        names = [a.arg for a in function.args.args]
        kinds = {"pointer": [], "constant": [], "number": [], "local": [], "kernel": []}
        for argument in function.args.args:
            pointer = argument.arg.endswith("_ptr")
            constant = argument.annotation is not None
            kinds["pointer" if pointer else "constant" if constant else "number"].append(
                argument.arg
            )
        for node in nodes(function.body):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                if node.id not in names:
                    names.append(node.id)
                    kinds["local"].append(node.id)
        if function not in self.kernels:  # M is an argument of one and a local of another
            kinds["local"] = kinds["number"] + kinds["local"]
            kinds["number"] = []
        kinds["kernel"] = [k.name for k in self.kernels if "probe" not in k.name]
        pairs = [zip(kind, kind[1:] + kind[:1], strict=True) for kind in kinds.values()]
        return {name: other for pair in pairs for name, other in pair if name != other}


def nodes(roots):
    """The nodes below roots; not the parts of f-strings, which Python before 3.12 misplaces."""
    for root in roots:
        yield root
        if not isinstance(root, ast.JoinedStr):
            yield from nodes(ast.iter_child_nodes(root))


class Baseline:
    """pytest's plugin where there is no mutant: each test's CPU seconds, and what it launches."""

    def __init__(self, part, parts):
        self.part, self.parts = part, parts
        self.tests, self.failed = {}, []

    def pytest_collection_modifyitems(self, items):
        items[:] = items[self.part :: self.parts]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        import watched

        start = time.process_time()
        with watched.record() as launches:
            yield
        launched = sorted({launch.name for launch in launches})
        self.tests[item.nodeid] = time.process_time() - start, launched

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)

    def result(self):
        return {"tests": self.tests, "failed": self.failed}


class FirstFailure:
    """pytest's plugin for a mutant: runs the tests that can see it until one fails."""

    def __init__(self, mutant, tests):
        self.mutant, self.tests, self.caught = mutant, tests, None

    def pytest_collection_modifyitems(self, items):
        tests, function = self.tests, self.mutant.function
        items[:] = [item for item in items if item.nodeid in tests]  # the others were skipped
        if any(function in launched for _, launched in tests.values()):
            items[:] = [item for item in items if function in tests[item.nodeid][1]]
        elif function.startswith(("section_", "worked_examples")):
            items[:] = [item for item in items if "test_sections.py" in item.nodeid]
        items.sort(key=lambda item: tests[item.nodeid][0])  # the quickest first
        seconds = sum(tests[item.nodeid][0] for item in items)
        signal.setitimer(signal.ITIMER_PROF, 20 + 5 * seconds)  # only what hangs takes as long

    def pytest_collectreport(self, report):
        if report.failed:  # the script cannot even be imported
            self.caught = report.nodeid

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.caught = report.nodeid

    def result(self):
        return self.caught


def in_a_process(directory, plugin, *options):
    """Forks a process that runs the tests of a copy of the checkout; returns its id.

    It writes the plugin's result to the copy's file "result".
    """
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(directory)
            with open("log", "w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            status = pytest.main([*OPTIONS, *options, *TESTS], plugins=[plugin])
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
    """Each test's seconds and launches on the scripts as they are; none may fail.

    Leaves the compiled tests in the checkout, for each mutant's copy of it.
    """
    copies = [shutil.copytree(directory, f"{directory}{part}") for part in range(parts)]
    sys.dont_write_bytecode = False
    for pid in [in_a_process(copy, Baseline(i, parts)) for i, copy in enumerate(copies)]:
        os.waitpid(pid, 0)
    sys.dont_write_bytecode = True
    shutil.copytree(f"{copies[0]}/tests", directory / "tests", dirs_exist_ok=True)
    results = [result(Path(copy)) for copy in copies]
    if failed := [test for r in results for test in r["failed"]]:
        raise RuntimeError(f"fail without a mutant: {failed}")
    return {name: test for r in results for name, test in r["tests"].items()}


def sweep(mutants, directory):
    """Yields each mutant's index and what caught it, as soon as it is known."""
    processes = os.cpu_count()
    checkout = directory / "checkout"
    for name in ("tests", "expected_outputs", "chapter20"):
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
        if ended_by == signal.SIGPROF or ended_by in CRASHES:
            yield index, signal.Signals(ended_by).name
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
    from torch.utils._python_dispatch import _disable_current_modes

    torch.set_num_threads(1)  # threads do not survive a fork
    with _disable_current_modes():  # watched.py enters it; the first time it imports for seconds
        torch.testing.assert_close(torch.ones(1), torch.ones(1))
    # One failure will do, as it is found.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile(
        "mutants", phases=phases, report_multiple_bugs=False, max_examples=40
    )
    hypothesis.settings.load_profile("mutants")
    gc.freeze()  # what is imported by now need not be looked through again
    mutants = [Mutant(**json.loads(line)) for line in sys.stdin]
    for found in sweep(mutants, Path(sys.argv[1])):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
