"""Plant small mistakes, one at a time, into a copy of the tree and check whether tests fail.

    python tools/mutants.py --package alignment --sample 40 --seed 1

A mistake (a mutant) is, for example, a changed comparison, a constant that is off by one, `and`
instead of `or`, a condition that always holds, or a removed statement. Tests notice it if they fail
or no longer end; how many never ended is said. A mutant with which all tests pass is a survivor. It
shows a gap in the tests, or that the code has no visible effect; in the latter case it is listed as
equivalent, with the reason, in `equivalent_mutants.txt`.

The tests that noticed something are run once more without any mutant. What they noticed does not
count if they fail then, too.

Selection of tests: `TESTS` has the folders of each package. These tests are run once, and the lines
of `src` that each test reaches are recorded. A mutant is tested by the tests that reach its
statement, the fastest first. Lines that run in subprocesses of tests are not recorded.

This tool is not part of the installed package, and it never changes the tree itself. The copy is in
`mutants-output`, with its own bytecode and the compiled libraries of the current environment.
Results are stored there and used first, so that an interrupted run continues where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import difflib
import hashlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from reached_lines import Notes, ReachedLines

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "src/driftline"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.txt")

TESTS: dict[str, tuple[str, ...]] = {
    "captures": (
        "tests/captures",
        "tests/experiments",
        "tests/launch",
        "tests/execution/test_shared_work.py",
    ),
    "alignment": ("tests/alignment", "tests/ranks"),
    "comparison": (
        "tests/evidence",
        "tests/tolerance",
        "tests/verdict",
        "tests/comparison",
        "tests/training",
        "tests/execution",
        "tests/cli/test_compare_command.py",
        "tests/diagnosis/test_choices.py",
        "tests/ranks",
    ),
    "comparison/verdict": (
        "tests/verdict",
        "tests/evidence",
        "tests/tolerance",
        "tests/comparison",
    ),
    "diagnosis": ("tests/diagnosis", "tests/experiments"),
    "execution": ("tests/execution",),
    "formats": ("tests/formats",),
    "graphs": ("tests/graphs",),
    "numerics": ("tests/numerics",),
    "operators": ("tests/operators",),
    "runs": (
        "tests/runs",
        "tests/stores",
        "tests/captures/test_capture_entry.py",
        # Facts about models, states of a training, and sinks.
        "tests/captures/test_model_facts.py",
        "tests/comparison/test_model_differences.py",
        "tests/launch/test_launch_reasons.py",
        "tests/training/test_training_order.py",
    ),
    "runs/stores": ("tests/stores",),
}
"""The tests of each package of `src/driftline`, in the order in which they are asked."""

EXAMPLES = "tests/test_doctests.py"
"""The examples in docstrings, which are tests of every package."""
PRELOADED = ("numpy", "torch", "transformers", "hypothesis", "pyarrow", "safetensors", "fsspec")
"""Packages imported before the processes that run tests are forked; never driftline itself."""
MOST_TESTS = 150
MOST_SECONDS = 25.0
"""Largest total time of one mutant's tests, measured without the mutant."""
PATIENCE = 45.0
"""Seconds that are added to three times that total; after them a mutant counts as never ending."""
MAP_SECONDS = 1500
_FIRST_FILES = 3
LONGEST_TEST = 60
"""Seconds after which a test is no longer one that is asked."""


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        path: The file, relative to the root.
        line: Its first line.
        statement: First line of the statement around it. A test that reaches a line from there to
            `line` runs the mutant. None outside of functions, where importing the file is enough.
        function: Qualified name of the function it is in; empty at the top level of a module.
        kind: The kind of mistake.
        start: Position of the first replaced byte.
        stop: Position after the last replaced byte.
        text: The replacement.
        key: A name that does not depend on line numbers: file, function, kind, both texts, and a
            number.
    """

    path: str
    line: int
    statement: int | None
    function: str
    kind: str
    start: int
    stop: int
    text: str
    key: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.stop :]

    def diff(self, source: bytes) -> str:
        """The changed lines, as a diff without context."""
        before = source.decode().splitlines()
        after = self.applied(source).decode().splitlines()
        lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[3:]
        return "\n".join(f"    {line}" for line in lines)


COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
OPPOSITE_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_TEXTS = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)


class Planter(ast.NodeVisitor):
    """Collects the mutants of one file."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path = path
        self.source = source
        self.found: list[Mutant] = []
        self._scope: list[str] = []
        self._statement: int | None = None
        self._counts: Counter[str] = Counter()
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))

    def plant(self, node: ast.expr | ast.stmt, kind: str, text: str) -> None:
        start = self._line_starts[node.lineno - 1] + node.col_offset
        stop = self._line_starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before = self.source[start:stop].decode()
        if before == text:
            return
        function = ".".join(self._scope)
        name = " ".join(f"{self.path}::{function} {kind}: {before} -> {text}".split())
        number = self._counts[name]
        self._counts[name] += 1
        key = name if not number else f"{name} #{number + 1}"
        place = (node.lineno, self._statement)
        self.found.append(Mutant(self.path, *place, function, kind, start, stop, text, key))

    # --- nodes that are visited, and nodes that are left out

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.stmt) and self._statement is not None:
            self._statement = node.lineno
        super().visit(node)

    def _scoped(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._scope.append(node.name)
        outside = self._statement
        self._statement = None
        if not isinstance(node, ast.ClassDef):
            # A call records the first line of a function, which is that of its decorators.
            self._statement = min([node.lineno, *(part.lineno for part in node.decorator_list)])
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if default is not None:
                    self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._scope.pop()
        self._statement = outside

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._scoped(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._scoped(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scoped(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skipped: before Python 3.12, positions inside an f-string are not those of the file."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skipped: an assertion is for readers and type checkers."""

    # --- kinds of mistakes

    def visit_Compare(self, node: ast.Compare) -> None:
        for at, operator in enumerate(node.ops):
            other = COMPARISONS[type(operator)]()
            ops = [other if place == at else each for place, each in enumerate(node.ops)]
            changed = ast.Compare(node.left, ops, node.comparators)
            self.plant(node, "comparison", f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.plant(node, "and/or", f"({ast.unparse(ast.BoolOp(other, node.values))})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.plant(node, "not dropped", f"({ast.unparse(node.operand)})")
        elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self.plant(node, "sign dropped", f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        sides = (node.left, node.right)
        joins = any(isinstance(side, _TEXTS) or _is_text(side) for side in sides)
        other = ARITHMETIC.get(type(node.op))
        if other is not None and not joins:
            changed = ast.BinOp(node.left, other(), node.right)
            self.plant(node, "arithmetic", f"({ast.unparse(changed)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.plant(node, "constant", str(not value))
        elif isinstance(value, int):
            self.plant(node, "constant", str(value + 1))
            if value > 0:
                self.plant(node, "constant", str(value - 1))
        elif isinstance(value, float):
            self.plant(node, "constant", repr(value * 2 if value else 1.0))

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, (ast.Constant, ast.UnaryOp)):
                self.plant(bound, "off by one", f"({ast.unparse(bound)}) + 1")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in OPPOSITE_CALLS:
            self.plant(node.func, "opposite call", OPPOSITE_CALLS[node.func.id])
        self.generic_visit(node)

    def _condition(self, test: ast.expr, *, both: bool = True) -> None:
        if not isinstance(test, ast.Constant):
            self.plant(test, "condition", "False")
            if both:
                self.plant(test, "condition", "True")

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            for statement in node.orelse:
                self.visit(statement)
            return
        self._condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._condition(node.test, both=False)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.plant(test, "condition", "True")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self.plant(node.value, "return", "None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if not isinstance(node.value, (ast.Yield, ast.YieldFrom)):
            self.plant(node, "statement", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        # Removing an assignment to a name would often only raise NameError.
        if any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self.plant(node, "statement", "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.plant(node, "statement", "pass")
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self.plant(node, "statement", "pass")
        # The message of an error is not changed; tests check whether the error is raised.

    def visit_Continue(self, node: ast.Continue) -> None:
        self.plant(node, "statement", "break")

    def visit_Break(self, node: ast.Break) -> None:
        self.plant(node, "statement", "continue")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def mutants_of(path: Path) -> list[Mutant]:
    """All mutants of a file, in the order of their positions."""
    source = path.read_bytes()
    planter = Planter(path.relative_to(ROOT).as_posix(), source)
    planter.visit(ast.parse(source))
    return sorted(planter.found, key=lambda mutant: (mutant.start, mutant.stop, mutant.text))


# --- the copy


class Copy:
    """A copy of the working tree: tracked files, new files and the compiled libraries.

    Args:
        place: Its folder.
        noting: Whether its bytecode marks the lines it reaches.
    """

    def __init__(self, place: Path, *, noting: bool = False) -> None:
        self.place = place
        self.lines: ReachedLines | None = None
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
        names = [name for name in listed.stdout.decode().split("\0") if name]
        for name in names:
            self._take(ROOT / name, place / name)
        for library in (_installed_package()).rglob("*.so"):
            self._take(library, place / SOURCE / library.relative_to(_installed_package()))
        self._forget(names)
        # Files keep their times, so this bytecode stays valid when a file is changed and restored.
        if noting:
            self.lines = ReachedLines(place, SOURCE)
        else:
            compileall.compile_dir(str(place / "src"), quiet=2)
        compileall.compile_dir(str(place / "tests"), quiet=2)

    @staticmethod
    def _take(source: Path, goal: Path) -> None:
        if not source.is_file():
            return
        if goal.exists() and goal.stat().st_mtime_ns == source.stat().st_mtime_ns:
            return
        goal.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, goal)

    def _forget(self, names: Iterable[str]) -> None:
        kept = set(names)
        for path in (self.place / "src", self.place / "tests"):
            for each in path.rglob("*.py"):
                if each.relative_to(self.place).as_posix() not in kept:
                    each.unlink()

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Have a mutant in the copy for a while. The tree may be edited meanwhile."""
        path = self.place / mutant.path
        source, times = path.read_bytes(), path.stat()
        try:
            path.write_bytes(mutant.applied(source))
            later = times.st_mtime + 60  # makes the bytecode out of date
            os.utime(path, (later, later))
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _installed_package() -> Path:
    spec = importlib.util.find_spec("driftline")
    if spec is None or spec.origin is None:
        raise SystemExit("driftline is not installed in this environment: make install")
    return Path(spec.origin).parent


# --- tests, in separate processes


def forked(
    copy: Copy, words: list[str], log: Path, limit: float, noted: Path | None = None
) -> int | None:
    """Run pytest on the copy in a fork of this process.

    Returns its exit status; None if it exceeded the time limit.
    """
    pid = os.fork()
    if pid:
        return _awaited(pid, limit)
    status = 70
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setpgid(0, 0)
        stream = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        for number in (1, 2):
            os.dup2(stream, number)
        os.chdir(copy.place)
        sources = [str(copy.place / "src"), str(copy.place / "compat" / "src")]
        sys.path[:0] = sources
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*sources, *([before] if before else [])])
        import pytest

        plugins = [] if copy.lines is None else [Notes(copy.lines)]
        status = int(pytest.main(words, plugins=plugins))
        if noted is not None:
            noted.write_text(json.dumps(plugins[0].as_json()))
    except BaseException as trouble:
        print(f"{type(trouble).__name__}: {trouble}", flush=True)
    finally:
        sys.stdout.flush()
        os._exit(status)


def _awaited(pid: int, limit: float) -> int | None:
    end = time.monotonic() + limit
    try:
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended, pid = pid, 0
                _end_group(ended)  # processes that a test left running
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
    finally:  # the limit was exceeded, or this program was interrupted
        if pid:
            _end_group(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return None


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


_NOT_FOUND = 4
# Without `--assert=plain` pytest would compile driftline itself anew, as a package with a plugin.
_QUIET = ["-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist"]
USUAL = [*_QUIET, "-x", "-m", "not slow"]


@dataclass
class Map:
    """Which tests reach a line of a file."""

    seconds: dict[str, float]
    reached_by: dict[str, dict[int, set[str]]]

    @classmethod
    def of(cls, copy: Copy, paths: Iterable[str], *, again: bool) -> Map:
        """Read the map from the work folder, or make it by running the tests once.

        Only test files that have changed are run again. If a source file has changed, its lines may
        have moved, so a test that reached any of its lines counts as reaching all of them.
        """
        sources = {
            path.relative_to(copy.place).as_posix(): path.read_bytes()
            for path in (copy.place / SOURCE).rglob("*.py")
        }
        digests = {path: hashlib.sha256(content).hexdigest() for path, content in sources.items()}
        seconds: dict[str, float] = {}
        reached: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for path in _test_files(paths):
            kept, digest = record_of(copy, path)
            noted: dict[str, Any] = {}
            if kept.is_file() and not again:
                noted = json.loads(kept.read_text())
            if noted.get("of") != digest:
                noted = {**cls._made(copy, path, kept), "of": digest, "sources": digests}
                kept.write_text(json.dumps(noted))
            good = {name: about for name, about in noted["tests"].items() if about["good"]}
            setup = noted["setups"].get(path, {})
            for name, about in good.items():
                seconds[name] = about["seconds"]
                for lines_of in (about["reaches"], setup):
                    for source, lines in lines_of.items():
                        moved = noted["sources"].get(source) != digests.get(source)
                        last = sources.get(source, b"").count(b"\n") + 1
                        for line in range(1, last + 1) if moved else lines:
                            reached[source][line].add(name)
        return cls(seconds, reached)

    @staticmethod
    def _made(copy: Copy, path: str, kept: Path) -> dict[str, Any]:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.unlink(missing_ok=True)
        print(f"noting what {path} enters", file=sys.stderr, flush=True)
        words = [word for word in USUAL if word != "-x"]
        words += ["--timeout", str(LONGEST_TEST)]
        forked(copy, [path, *words], kept.with_suffix(".log"), MAP_SECONDS, kept)
        if not kept.is_file():
            print(f"  {path} did not end; its tests are not asked", file=sys.stderr)
            return {"tests": {}, "setups": {}}
        noted = json.loads(kept.read_text())
        left = [name for name, about in noted["tests"].items() if not about["good"]]
        for name in left:
            print(f"  skipped, failed or took too long, and is not asked: {name}", file=sys.stderr)
        return noted

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Tests that reach a mutant's statement, the fastest first, within the limits."""
        lines = self.reached_by.get(mutant.path, {})
        if mutant.statement is None:
            names = {name for tests in lines.values() for name in tests}
        else:
            span = range(mutant.statement, mutant.line + 1)
            names = {name for line in span for name in lines.get(line, ())}
        chosen: list[str] = []
        total = 0.0
        for name in sorted(names, key=lambda name: (self.seconds[name], name))[:MOST_TESTS]:
            total += self.seconds[name]
            if chosen and total > MOST_SECONDS:
                break
            chosen.append(name)
        return chosen


def record_of(noting: Copy, path: str) -> tuple[Path, str]:
    """The file that records what a file of tests reaches, and the digest it must have."""
    kept = noting.place.parent / "maps" / f"{path.replace('/', '.')}.json"
    return kept, hashlib.sha256((noting.place / path).read_bytes()).hexdigest()


def is_recorded(noting: Copy, path: str) -> bool:
    kept, digest = record_of(noting, path)
    return kept.is_file() and json.loads(kept.read_text()).get("of") == digest


def _test_files(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        if path.endswith(".py"):
            yield path
            continue
        for found in sorted((ROOT / path).rglob("test_*.py")):
            if "cuda" not in found.name:
                yield found.relative_to(ROOT).as_posix()


# --- the run


class Outcome(NamedTuple):
    """What the tests say of a mutant.

    Attributes:
        word: `not reached`, `never ended`, `noticed` or `survived`.
        by: The test that failed.
    """

    word: str
    by: str = ""


class Results:
    """Outcomes of mutants, one line of JSON each; known mutants are not tried again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known: dict[str, dict[str, Any]] = {}
        if path.is_file():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self.known[entry["key"]] = entry

    def keep(self, entry: dict[str, Any]) -> None:
        self.known[entry["key"]] = entry
        with self._path.open("a") as stream:
            stream.write(json.dumps(entry) + "\n")


def equivalent() -> dict[str, str]:
    """Reasons by key of the mutants that have no visible effect."""
    found: dict[str, str] = {}
    if EQUIVALENT.is_file():
        for line in EQUIVALENT.read_text().splitlines():
            key, mark, reason = line.partition("  # ")
            if mark and not line.startswith("#"):
                found[key.strip()] = reason.strip()
    return found


def tried(copy: Copy, mutant: Mutant, tests: list[str], seconds: float, log: Path) -> Outcome:
    """What the tests say of a mutant."""
    if not tests:
        return Outcome("not reached")
    words = [*tests, *USUAL, "--timeout", "0"]  # the limit below is the only one
    for patience in (1, 4):
        limit = patience * (PATIENCE + 3 * seconds)
        with copy.planted(mutant):
            status = forked(copy, words, log, limit)
        # A busy machine is no mutant: without it, the tests must end within the same time.
        if status is not None or forked(copy, words, log, limit) is not None:
            break
    else:
        raise SystemExit(f"tests do not end in {limit:.0f} s without a mutant, either: {log}")
    if status is None:
        return Outcome("never ended")
    if status == 0:
        return Outcome("survived")
    if status == _NOT_FOUND:  # a test file cannot be imported with the mutant, or a test is gone
        if forked(copy, words, log, limit) != 0:
            raise SystemExit(f"tests are not as they were noted: --again; see {log}")
        return Outcome("noticed")
    return Outcome("noticed", failed_test(log.read_text(errors="replace"), tests))


def in_two_parts(tests: list[str]) -> Iterator[list[str]]:
    """First the tests of the few files that have the fastest ones: importing many files is slow."""
    files: list[str] = []
    for name in tests:
        file = name.partition("::")[0]
        if file not in files and len(files) < _FIRST_FILES:
            files.append(file)
    first = [name for name in tests if name.partition("::")[0] in files]
    yield first
    if len(first) < len(tests):
        yield [name for name in tests if name not in first]


def failed_test(log: str, tests: Iterable[str]) -> str:
    """The test that failed first, by what pytest printed; empty if a file was not imported."""
    for line in log.splitlines():
        told, _, rest = line.partition(" ")
        if told in ("FAILED", "ERROR"):
            names = [name for name in tests if rest == name or rest.startswith(f"{name} - ")]
            return max(names, key=len, default="")
    return ""


def failing_anyway(copy: Copy, tests: Collection[str], log: Path) -> set[str]:
    """Those of some tests that fail without a mutant."""
    failing: set[str] = set()
    words = [word for word in USUAL if word != "-x"]
    if tests and forked(copy, [*sorted(tests), *words], log, MAP_SECONDS) != 0:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                failing.add(failed_test(line, tests))
        # Without a word about single tests, nothing is known of any of them.
        failing = failing - {""} or set(tests)
    return failing


def chosen_mutants(options: argparse.Namespace, package: str) -> list[Mutant]:
    folder = ROOT / SOURCE / package
    found: list[Mutant] = []
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if not options.file:
            found += mutants_of(path)
            continue
        asked = [part.partition(":") for part in options.file]
        lines = {line for part, _, line in asked if part in name}
        if lines:
            every = mutants_of(path)
            found += [each for each in every if "" in lines or str(each.line) in lines]
    if options.sample and options.sample < len(found):
        draw = random.Random(f"{options.seed} {package}")
        found = draw.sample(found, options.sample)
        found.sort(key=lambda mutant: (mutant.path, mutant.start, mutant.text))
    return found


def summary(package: str, entries: list[dict[str, Any]], known: dict[str, str]) -> str:
    same = [entry for entry in entries if entry["key"] in known]
    rest = [entry for entry in entries if entry["key"] not in known]
    endless = sum(entry["outcome"] == "never ended" for entry in rest)
    noticed = sum(entry["outcome"] == "noticed" for entry in rest) + endless
    share = f"{noticed / len(rest):.0%}" if rest else "-"
    return (
        f"{package}: {noticed} of {len(rest)} noticed ({share}), {endless} of them because tests "
        f"never ended; {len(same)} more change nothing that could be seen"
    )


def turns_of(noting: Copy, paths: Iterable[str], *, again: bool) -> list[list[str]]:
    """Files of tests in the order in which they are asked, together or one turn after another."""
    folders = [list(_test_files([path])) for path in paths]
    recorded = [
        file for files in folders for file in files if not again and is_recorded(noting, file)
    ]
    rest = ([file for file in files if file not in recorded] for files in folders)
    return [files for files in (recorded, *rest) if files]


class Workplace(NamedTuple):
    """The two copies, and the folder they are in."""

    copy: Copy
    noting: Copy
    folder: Path


def tried_in_turn(
    place: Workplace,
    package: str,
    mutants: Sequence[Mutant],
    results: Results,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """The outcome of each mutant.

    Folders of tests are asked in turn, each only about the mutants that are still alive, so that
    most folders need not be recorded for a few mutants. What is recorded already is asked first.
    """
    same = equivalent()
    entries: dict[str, dict[str, Any]] = {}
    for mutant in mutants:
        entry = results.known.get(mutant.key)
        if mutant.key in same:
            entry = {"key": mutant.key, "outcome": "equivalent"}
        if entry and not options.again and not (options.survivors and _lives(entry)):
            entries[mutant.key] = entry
    left = [mutant for mutant in mutants if mutant.key not in entries]
    lived: dict[str, str] = {}
    turns = turns_of(
        place.noting, options.tests or (EXAMPLES, *TESTS[package]), again=options.again
    )
    for turn, files in enumerate(turns, 1):
        if not left:
            break
        asked = Map.of(place.noting, files, again=options.again)
        for number, mutant in enumerate(list(left), 1):
            tests = asked.tests_of(mutant)
            seconds = sum(asked.seconds[name] for name in tests)
            for some in in_two_parts(tests):
                outcome = tried(place.copy, mutant, some, seconds, place.folder / "last.log")
                if outcome.word != "survived":
                    break
            said = f"{package}: turn {turn} of {len(turns)}, mutant {number}; {len(left)} left"
            print(said, end="    \r", file=sys.stderr, flush=True)
            if outcome.word in ("survived", "not reached"):
                if lived.get(mutant.key) != "survived":
                    lived[mutant.key] = outcome.word
                continue
            left.remove(mutant)
            entries[mutant.key] = {
                "key": mutant.key,
                "outcome": outcome.word,
                "by": outcome.by,
            }
            results.keep(entries[mutant.key])
    for mutant in left:
        entries[mutant.key] = {"key": mutant.key, "outcome": lived[mutant.key]}
        results.keep(entries[mutant.key])
    for mutant in mutants:
        entry = entries[mutant.key]
        if _lives(entry):
            print(f"{mutant.path}:{mutant.line} {mutant.kind}: {entry['outcome']}")
            print(mutant.diff((place.copy.place / mutant.path).read_bytes()), flush=True)
    return [entries[mutant.key] for mutant in mutants]


def run(options: argparse.Namespace) -> int:
    work = (ROOT / options.work).resolve()
    work.mkdir(parents=True, exist_ok=True)
    chosen = {package: chosen_mutants(options, package) for package in options.package}
    if options.list:
        for mutant in (each for found in chosen.values() for each in found):
            print(f"{mutant.path}:{mutant.line} {mutant.kind}")
            print(mutant.diff((ROOT / mutant.path).read_bytes()))
        return 0
    os.environ.update(PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
    sys.dont_write_bytecode = True
    copy, noting = Copy(work / "tree"), Copy(work / "noting", noting=True)
    for name in PRELOADED:
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that tests are ended too
    results = Results(work / "results.jsonl")
    same = equivalent()
    for package, mutants in chosen.items():
        entries = tried_in_turn(Workplace(copy, noting, work), package, mutants, results, options)
        witnesses = {by for entry in entries if (by := entry.get("by"))}
        if false := failing_anyway(copy, witnesses, work / "control.log"):
            print("fail without a mutant, too:", *sorted(false), sep="\n    ")
            entries = [
                {**entry, "outcome": "survived"} if entry.get("by") in false else entry
                for entry in entries
            ]
        print(summary(package, entries, same), flush=True)
    return 0


def _lives(entry: dict[str, Any]) -> bool:
    return entry["outcome"] in ("survived", "not reached")


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words.add_argument("--package", nargs="+", default=sorted(TESTS), choices=sorted(TESTS))
    words.add_argument(
        "--file", nargs="+", default=[], help="only these: part of a path, or part:line"
    )
    words.add_argument("--sample", type=int, default=0, help="so many of each package, by chance")
    words.add_argument("--seed", type=int, default=0, help="which ones")
    words.add_argument("--tests", nargs="+", default=[], help="instead of those of the package")
    words.add_argument("--work", default="mutants-output", help="folder of the copy and results")
    words.add_argument("--survivors", action="store_true", help="try those that lived again")
    words.add_argument("--again", action="store_true", help="forget what is known")
    words.add_argument("--list", action="store_true", help="print the mutants and try none")
    return run(words.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
