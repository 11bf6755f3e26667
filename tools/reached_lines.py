"""Which lines of a source tree does each test reach?

The bytecode of the tree is written with a mark before each statement of a function. A mark sets one
byte of a file that all processes share, so lines that subprocesses of a test reach are recorded,
too. The source files stay as they are. This is faster than a trace function, which Python calls
for each call in torch and numpy as well.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import mmap
import re
from collections import defaultdict
from importlib import _bootstrap_external  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

_LINES = 2048
"""Bytes of each source file; later lines are not recorded."""
_FILES = 2048
_OPENED = """
_reached_ = __import__("sys").modules.get("_reached_")
if _reached_ is None:
    with open({path!r}, "r+b") as _reached_:
        _reached_ = __import__("mmap").mmap(_reached_.fileno(), 0)
    __import__("sys").modules["_reached_"] = _reached_
"""
_MARKED = re.compile(rb"[^\0]")


class ReachedLines:
    """The shared file of marks, and the bytecode that sets them.

    Args:
        root: The tree; names of files are relative to it.
        source: The folder with the sources, relative to the root.
    """

    def __init__(self, root: Path, source: str) -> None:
        self._root = root
        self._path = root / "reached-lines"
        if not self._path.exists():
            self._path.write_bytes(bytes(_LINES * _FILES))
        names = root / "reached-lines.json"
        # A file keeps its number, so that bytecode stays valid when other files come and go.
        self._names: list[str] = json.loads(names.read_text()) if names.exists() else []
        known = {name: number for number, name in enumerate(self._names)}
        for path in sorted((root / source).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if name not in known:
                known[name] = len(self._names)
                self._names.append(name)
            self._compile(path, known[name])
        names.write_text(json.dumps(self._names))
        with self._path.open("r+b") as stream:
            self._marks = mmap.mmap(stream.fileno(), 0)

    def _compile(self, path: Path, number: int) -> None:
        stat = path.stat()
        goal = Path(importlib.util.cache_from_source(str(path)))
        header = _bootstrap_external._code_to_timestamp_pyc(
            compile("", "", "exec"), int(stat.st_mtime), stat.st_size
        )[:16]
        if goal.exists() and goal.read_bytes()[:16] == header:
            return
        tree = marked(ast.parse(path.read_bytes()), number * _LINES, str(self._path))
        code = compile(tree, str(path), "exec", dont_inherit=True)
        data = _bootstrap_external._code_to_timestamp_pyc(code, int(stat.st_mtime), stat.st_size)
        goal.parent.mkdir(exist_ok=True)
        goal.write_bytes(data)

    def taken(self) -> dict[str, list[int]]:
        """The lines reached since the last time, by file."""
        reached: dict[str, list[int]] = defaultdict(list)
        content = self._marks[:]
        for found in _MARKED.finditer(content):
            file, line = divmod(found.start(), _LINES)
            reached[self._names[file]].append(line)
            self._marks[found.start()] = 0
        return reached


def marked(tree: ast.Module, first: int, path: str) -> ast.Module:
    """A module that sets the byte `first + line` for each statement of a function that it runs."""
    _mark(tree, first, inside=False)
    opened = ast.parse(_OPENED.format(path=path)).body
    begin = 0
    for statement in tree.body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not (is_future or (is_text and not begin)):
            break
        begin += 1
    tree.body[begin:begin] = opened
    return ast.fix_missing_locations(tree)


def _mark(node: ast.AST, first: int, *, inside: bool) -> None:
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    inside = inside or is_function
    for child in ast.iter_child_nodes(node):
        _mark(child, first, inside=inside)
    if not inside:
        return
    for name, statements in ast.iter_fields(node):
        if not (
            isinstance(statements, list) and statements and isinstance(statements[0], ast.stmt)
        ):
            continue
        body: list[ast.stmt] = []
        for at, statement in enumerate(statements):
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not (is_text and at == 0):  # a docstring must stay the first statement
                body.append(_setting(first, statement.lineno, statement))
            body.append(statement)
        if is_function and name == "body":
            begin = min([node.lineno, *(part.lineno for part in node.decorator_list)])
            has_text = body[0] is statements[0]
            body.insert(int(has_text), _setting(first, begin, statements[0]))
        setattr(node, name, body)


def _setting(first: int, line: int, beside: ast.stmt) -> ast.stmt:
    text = f"_reached_[{first + line}] = 1" if line < _LINES else "pass"
    setting = ast.parse(text).body[0]
    for node in ast.walk(setting):
        if hasattr(node, "lineno"):
            ast.copy_location(node, beside)
    return setting


class Notes:
    """A pytest plugin that records which lines each test reaches, and its time."""

    def __init__(self, lines: ReachedLines) -> None:
        self._lines = lines
        self.tests: dict[str, dict[str, Any]] = {}
        self.setups: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))

    def pytest_collection_finish(self) -> None:
        self._lines.taken()  # what imports reach says nothing about tests

    def pytest_runtest_logreport(self, report: Any) -> None:
        fresh: dict[str, Any] = {"seconds": 0.0, "reaches": {}, "good": True}
        about = self.tests.setdefault(report.nodeid, fresh)
        about["seconds"] += report.duration
        about["good"] = about["good"] and report.passed
        reached = self._lines.taken()
        if report.when == "call":
            about["reaches"] = reached
        else:  # a shared fixture is set up only once, by its first test
            for name, lines in reached.items():
                self.setups[report.nodeid.partition("::")[0]][name] |= set(lines)

    def as_json(self) -> dict[str, Any]:
        return {
            "tests": self.tests,
            "setups": {
                path: {name: sorted(lines) for name, lines in reached.items()}
                for path, reached in self.setups.items()
            },
        }
