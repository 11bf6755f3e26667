"""Golden plans: what the alignments of these tests pair with what, kept in `golden/`.

Each test that aligns two runs has its plans there as `driftline compare --dry-run` prints them, one
file per test module. A test whose plans differ fails, whatever else it looks at. After a change
that is meant:

    pytest tests/alignment --record-plans

(without `-n`: each module's file is written as a whole), and read the difference before it is
committed. Tests that draw random examples have none, nor have those listed in `UNSTEADY`.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import driftline

GOLDEN = Path(__file__).parent / "golden"
LONGEST = 40
"""Lines of a plan that are kept; of a longer one the first ones and a digest of all. Where only the
digest differs: raise this, and record before and after the change."""
UNSTEADY: tuple[str, ...] = ("trees_of_the_saving_hook",)
"""Parts of names of tests whose plans are not the same each time: the saving hook names layers by
Paddle's own counter, which goes on from test to test of a process."""
SEPARATOR = "=== "


def plan_text(plan: Any) -> str:
    lines = [steady(line) for line in plan.lines()]
    if len(lines) <= LONGEST:
        return "\n".join(lines)
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
    return "\n".join([*lines[:LONGEST], f"... {len(lines)} lines, digest {digest}"])


def steady(line: str) -> str:
    """A line without what differs from one execution to the next: temporary folders."""
    return re.sub(r"(/[\w.+~-]+)*/pytest-of-\w+(/[\w.+~-]+)*/(?=[\w.+~-])", "TMP/", line)


class Watcher:
    """Collects what every alignment of a test gives, wherever it is called from."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._depth = 0

    def around(self, align: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(align)
        def watched(*words: Any, **options: Any) -> Any:
            self._depth += 1
            try:
                plan = align(*words, **options)
            except Exception as error:
                if self._depth == 1:
                    self.texts.append(steady(f"{type(error).__name__}: {error}"))
                raise
            finally:
                self._depth -= 1
            if self._depth == 0:
                self.texts.append(plan_text(plan))
            return plan

        return watched

    def text(self) -> str:
        """All plans of a test, each distinct one once: a plan may be made again and again."""
        return f"\n{'-' * 8}\n".join(dict.fromkeys(self.texts))


@functools.cache
def kept(module: str) -> dict[str, str]:
    """Test → its plans, of one test module."""
    path = GOLDEN / f"{module}.txt"
    if not path.exists():
        return {}
    parts = path.read_text("utf-8").split(f"\n{SEPARATOR}")
    return dict(part.removeprefix(SEPARATOR).rstrip("\n").split("\n", 1) for part in parts)


_recorded: dict[str, dict[str, str]] = {}


def has_golden_plans(item: pytest.Item) -> bool:
    random = hasattr(getattr(item, "obj", None), "hypothesis")
    return not random and not any(part in item.name for part in UNSTEADY)


@pytest.fixture(autouse=True)
def _golden_plans(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    if not has_golden_plans(request.node):
        yield
        return
    watcher = Watcher()
    # The function below every way to align, as the public one has it; modules and tests that
    # imported it have it under that name, too.
    align_runs = driftline.align.__globals__["align_runs"]
    watched = watcher.around(align_runs)
    for name, module in list(sys.modules.items()):
        if name.startswith(("driftline", "test_", "twins")):
            for attribute, value in list(vars(module).items()):
                # A module that was imported during an earlier test has that test's wrapper.
                if isinstance(value, FunctionType) and align_runs in (
                    value,
                    getattr(value, "__wrapped__", None),
                ):
                    monkeypatch.setattr(module, attribute, watched)
    yield
    module, name = request.node.path.stem, json.dumps(request.node.name)[1:-1]
    if request.config.getoption("--record-plans"):
        if watcher.texts:
            _recorded.setdefault(module, {})[name] = watcher.text()
        return
    golden = kept(module).get(name)
    failed = getattr(request.node, "failed_call", False)
    if golden is not None and not failed and golden != watcher.text():
        difference = difflib.unified_diff(
            golden.splitlines(), watcher.text().splitlines(), "golden", "now", lineterm="", n=1
        )
        pytest.fail("the plan is another one:\n" + "\n".join(difference), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.when == "call":
        item.failed_call = report.failed  # type: ignore[attr-defined]
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    for module, plans in _recorded.items():
        (GOLDEN / f"{module}.txt").write_text(
            "\n".join(f"{SEPARATOR}{name}\n{text}" for name, text in sorted(plans.items())) + "\n",
            "utf-8",
        )
