"""Makes small faults in the scripts, one at a time, and finds a test that notices each of them.

    python tests/mutants.py DIRECTORY < files-and-mutants

Each mutant gets a copy of the checkout in DIRECTORY and a process, forked from this one, in which
tests run until one fails. Nothing of the checkout is imported here, so that each process loads its
own copy; what they all need is imported once. Prints what caught each mutant, as JSON. Libraries
for mutation start Python anew for each mutant, which would take hours here.
"""

import ast
import gc
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
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


class Mutant(NamedTuple):
    script: str  # chapter20/01_fused_linear_gelu.py
    function: str  # the function that has the fault
    fault: str  # script:line function: the lines around the fault, in one: old -> new
    source: str  # the whole script with the fault


class Source:
    """A script's text and functions; each node of them has its start and end in the text."""

    def __init__(self, path):
        self.name, self.text = path.relative_to(ROOT).as_posix(), path.read_text()
        tree = ast.parse(self.text)
        lines = [0, *itertools.accumulate(map(len, self.text.splitlines(keepends=True)))]
        for node in ast.walk(tree):
            if hasattr(node, "lineno"):
                node.start = lines[node.lineno - 1] + node.col_offset
                node.end = lines[node.end_lineno - 1] + node.end_col_offset
        self.functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
        decorated = [f for f in self.functions if f.decorator_list]
        self.kernels = [f for f in decorated if "triton.jit" in map(ast.unparse, f.decorator_list)]

    def segment(self, node):
        return self.text[node.start : node.end]

    def mutants(self, function):
        """Every mechanical change of a function."""
        made = {}
        for start, end, new in self.edits(function):
            first, last = self.text.rfind("\n", 0, start) + 1, self.text.find("\n", end)
            source = self.text[:start] + new + self.text[end:]
            where = f"{self.name}:{self.text.count(chr(10), 0, start) + 1} {function.name}"
            change = f"{self.text[start:end]} -> {new or 'nothing'}"
            fault = " ".join(f"{where}: {self.text[first:last]}: {change}".split())
            made[source] = Mutant(self.name, function.name, fault, source)
        return list(made.values())

    def edits(self, function):
        """Changes of a function as (start, end, new text)."""
        neighbours = self.neighbours(function)
        docstring = ast.get_docstring(function) is not None
        for node in nodes(function.args.defaults + function.body[docstring:]):
            here = (node.start, node.end) if hasattr(node, "start") else None
            match node:
                case ast.Compare(left=left, comparators=[right, *_]):
                    yield self.swap(left, right)
                case ast.BinOp(left=left, right=right) | ast.AugAssign(target=left, value=right):
                    yield self.swap(left, right)
                case ast.BoolOp(values=values):
                    yield from itertools.starmap(self.swap, itertools.pairwise(values))
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
                    yield index.start, index.end, f"{self.segment(right)}, {self.segment(left)}"
                case ast.Call(func=ast.Attribute(attr="where"), args=[_, value, _]):
                    yield *here, f"({self.segment(value)})"
                case ast.Call(func=ast.Attribute(attr="to" | "contiguous" | "abs") as method):
                    yield method.end - len("." + method.attr), node.end, ""
                case ast.IfExp(body=body, orelse=orelse):
                    yield *here, self.segment(body)
                    yield *here, self.segment(orelse)
            if isinstance(node, ast.stmt):
                yield *here, "pass"
            for keyword in getattr(node, "keywords", []):
                # Without a mask Triton takes no other.
                dropped = [k for k in node.keywords if k.arg in ("mask", "other")]
                dropped = dropped if keyword.arg == "mask" else [keyword]
                comma = self.text[dropped[-1].end] == ","
                yield dropped[0].start, dropped[-1].end + comma, ""

    def swap(self, left, right):
        between = self.text[left.end : right.start]
        operator = between.strip("() \n")
        swapped = SWAPPED.get(operator) or SWAPPED[operator[:-1]] + "="  # of += too
        at = left.end + between.index(operator)
        return at, at + len(operator), swapped

    def neighbours(self, function):
        """For each name in a function the next of its kind, with which it could be confused."""
        arguments = [a.arg for a in function.args.args]
        pointers = [name for name in arguments if name.endswith("_ptr")]
        constants = [a.arg for a in function.args.args if a.annotation and a.arg not in pointers]
        numbers = [name for name in arguments if name not in pointers + constants]
        names = [n for n in nodes(function.body) if isinstance(n, ast.Name)]
        stored = [n.id for n in names if isinstance(n.ctx, ast.Store)]
        variables = [name for name in dict.fromkeys(stored) if name not in arguments]
        if function not in self.kernels:  # M is an argument of one and a variable of another
            variables, numbers = numbers + variables, []
        kernels = [k.name for k in self.kernels if "probe" not in k.name]
        kinds = (pointers, constants, numbers, variables, kernels)
        pairs = [zip(kind, kind[1:] + kind[:1], strict=True) for kind in kinds]
        return {name: other for pair in pairs for name, other in pair if name != other}


def nodes(roots):
    """The nodes below roots; not the parts of f-strings, which Python before 3.12 misplaces."""
    for root in roots:
        yield root
        if not isinstance(root, ast.JoinedStr):
            yield from nodes(ast.iter_child_nodes(root))


class Plugin:
    """pytest's: has it run what choose leaves of the tests, and records what becomes of them."""

    def __init__(self, choose):
        self.choose, self.failed = choose, []
        self.tests = {}  # each test's CPU seconds, and the kernels that it launches

    def pytest_collection_modifyitems(self, items):
        items[:] = self.choose(items)

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

    pytest_collectreport = pytest_runtest_logreport  # the script cannot even be imported


def in_a_process(directory, choose, *options):
    """Runs tests of a copy of the checkout in a process of their own.

    Returns what failed, or the signal that ended the process, and Plugin.tests.
    """
    pid = os.fork()
    if pid == 0:
        try:
            os.chdir(directory)
            with open(f"log{os.getpid()}", "w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            plugin = Plugin(choose)
            status = pytest.main([*OPTIONS, *options], plugins=[plugin])
            if plugin.failed or status == pytest.ExitCode.OK:
                Path(f"result{os.getpid()}").write_text(json.dumps([plugin.failed, plugin.tests]))
        finally:
            sys.stdout.flush()
            os._exit(0)
    ended_by = os.WTERMSIG(os.waitpid(pid, 0)[1])  # 0 where it ended by itself
    if ended_by == signal.SIGPROF or ended_by in CRASHES:
        return [signal.Signals(ended_by).name], {}
    if not (directory / f"result{pid}").exists():
        raise RuntimeError((directory / f"log{pid}").read_text())
    return json.loads((directory / f"result{pid}").read_text())


def run_part(checkout, files, part):
    return in_a_process(checkout, lambda items: items[part], *files)


def run_mutant(checkout, files, tests, mutant):
    """Returns what catches the mutant first, or None."""
    with TemporaryDirectory(dir=checkout.parent) as copy:
        shutil.copytree(checkout, copy, dirs_exist_ok=True)
        (Path(copy) / mutant.script).write_text(mutant.source)
        failed, _ = in_a_process(Path(copy), partial(choose, mutant, tests), "-x", *files)
    return failed[0] if failed else None


def choose(mutant, tests, items):
    """The tests that can see the mutant, the quickest first. They get five times their time."""
    items = [item for item in items if item.nodeid in tests]  # the others were skipped
    if any(mutant.function in launched for _, launched in tests.values()):
        items = [item for item in items if mutant.function in tests[item.nodeid][1]]
    elif mutant.function.startswith(("section_", "worked_examples")):
        items = [item for item in items if "test_sections.py" in item.nodeid]
    seconds = sum(tests[item.nodeid][0] for item in items)
    signal.setitimer(signal.ITIMER_PROF, 20 + 5 * seconds)  # of the CPU: only what hangs takes it
    return sorted(items, key=lambda item: tests[item.nodeid][0])


def sweep(mutants, files, directory):
    """Returns what catches each mutant, or None. No test may fail on the scripts as they are."""
    checkout = directory / "checkout"
    for name in ("tests", "expected_outputs", "chapter20"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", checkout)
    processes = os.cpu_count()
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        parts = [slice(i, None, processes) for i in range(processes)]
        results = pool.map(partial(run_part, checkout, files), parts)
        if failed := [test for failed, _ in results for test in failed]:
            raise RuntimeError(f"fail without a mutant: {failed}")
        tests = {name: test for _, part in results for name, test in part.items()}
        return list(pool.imap(partial(run_mutant, checkout, files, tests), mutants))


def main():
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path[:] = [path for path in sys.path if Path(path) != ROOT / "tests"]
    sys.dont_write_bytecode = False  # the mutants' copies hold the tests as compiled without one

    import hypothesis.strategies  # noqa: F401
    import numpy  # noqa: F401
    import torch
    import torch._dynamo  # noqa: F401 (torch's dispatch modes import it, for seconds)
    import triton.runtime.interpreter  # noqa: F401
    from hypothesis import Phase, settings

    torch.set_num_threads(1)  # threads do not survive a fork
    # One failure will do, as it is found.
    phases = {"phases": [Phase.explicit, Phase.generate], "report_multiple_bugs": False}
    settings.register_profile("mutants", max_examples=40, **phases)
    settings.load_profile("mutants")
    gc.freeze()  # what is imported by now need not be looked through again
    files, mutants = json.load(sys.stdin)
    print(json.dumps(sweep([Mutant(*mutant) for mutant in mutants], files, Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
