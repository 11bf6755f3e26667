"""A Python for programs of tests; each test draws the same numbers and has an end of its own.

What was left out of a run is said at its end.

A test that never ends is ended twice. pytest-timeout raises an exception in it. That is not enough
where the process waits in C, or for a thread or a child while the exception passes through, or
between tests and at the end of all: then the process itself ends, with a traceback of every thread,
and xdist reports the test and goes on with another worker.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from warm_python import warm

if TYPE_CHECKING:
    from support.commands import Said

SLOW_SECONDS = 1800
"""How long a test may take that is marked as slow and does not say for itself."""
SEED = 20240229
GRACE_SECONDS = 180
"""What a test may take beyond its own limit, and a process to end after its last test."""

# How long an example takes says more of a busy machine than of us.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


IMPORTED = (
    # An optimizer's first step imports dynamo: a second of each program that trains.
    *("torch", "torch._dynamo"),
    *(f"driftline.cli.commands.{name}" for name in ("compare", "diagnose", "dump", "experiments")),
    *("driftline.cli.app", "driftline.comparison.pipeline", "driftline.diagnosis.api"),
    *("driftline.captures.launch.process", "driftline.captures.torch.framework"),
)
"""torch, and what most commands and captured programs import of us."""


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """Written for `python`: programs whose start is not the point find torch and us imported."""
    with warm(*IMPORTED) as python:
        yield python


@pytest.fixture(scope="session")
def warm_llama() -> Iterator[str]:
    """The same, and a Llama of transformers is imported too."""
    with warm(*IMPORTED, "transformers.models.llama.modeling_llama") as python:
        yield python


@pytest.fixture(scope="session")
def warm_compiler() -> Iterator[str]:
    """The same, and torch.compile with its own backends is imported too."""
    with warm(*IMPORTED, "torch._inductor.compile_fx") as python:
        yield python


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures of pages go: $DRIFTLINE_SCREENSHOTS, to look at them, or nowhere for long."""
    wanted = os.environ.get("DRIFTLINE_SCREENSHOTS")
    return Path(wanted) if wanted else tmp_path_factory.mktemp("screenshots")


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Said]:
    """Run a command line in this process."""
    from support.commands import caller  # only tests of commands load the command line

    return caller(capsys, monkeypatch)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: what a test draws depends neither on others nor on chance.

    torch starts with another seed in each process; who imports it in a test seeds it there.
    """
    del item
    random.seed(SEED)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(SEED)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(SEED)
    if paddle := sys.modules.get("paddle"):
        paddle.seed(SEED)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-plans",
        action="store_true",
        help="write the plans of tests/alignment into its golden files",
    )
    parser.addoption(
        "--record-commands",
        action="store_true",
        help="write what the commands of tests/corpus print and write into its records",
    )


def pytest_configure(config: pytest.Config) -> None:
    # While a test runs, descriptor 2 is a file that nobody sees if the process ends.
    config.stash[_TERMINAL] = os.dup(2)


_TERMINAL = pytest.StashKey[int]()


def _end_process_after(config: pytest.Config, seconds: float) -> None:
    faulthandler.dump_traceback_later(
        seconds + GRACE_SECONDS, exit=True, file=config.stash[_TERMINAL]
    )


def _limit_of(item: pytest.Item) -> float:
    """Seconds that pytest-timeout allows a test."""
    marker = item.get_closest_marker("timeout")
    if marker is None:
        return float(item.config.getini("timeout") or 0)
    return float(marker.args[0] if marker.args else marker.kwargs["timeout"])


def pytest_collection() -> None:
    gc.disable()  # all that is made stays: each search for what does not is in vain


def pytest_collection_finish() -> None:
    """Captures search the living objects, and so does every collection: not those of the suite.

    Its modules and tests are two million, and stay; a search of them takes most of a second.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What is never collected would be reported as lost by the extensions that made it."""
    gc.unfreeze()
    if session.config.stash.get(_TERMINAL, None) is not None:
        _end_process_after(session.config, 0)  # threads and handlers of the interpreter's end


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """The same after each file for what it has imported and left."""
    _end_process_after(item.config, _limit_of(item))
    result = yield
    _end_process_after(item.config, 0)  # until the next test begins
    if nextitem is None or nextitem.path != item.path:
        pytest_collection_finish()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Once more: pytest stops the clock of the process when a test fails."""
    _end_process_after(item.config, _limit_of(item))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tests of pages need a browser; a run without one must not look complete."""
    left_out = [
        report
        for report in terminalreporter.getreports("skipped")
        if "no Chromium here" in str(report.longrepr)
    ]
    if left_out:
        terminalreporter.write_sep(
            "!", "NO CHROMIUM: the pages were not opened", red=True, bold=True
        )
        terminalreporter.write_line(
            f"{len(left_out)} tests of the report and the viewer were skipped. Install Chromium "
            "(Debian: apt-get install chromium) and playwright (pip install playwright), or name "
            "a Chromium with CHROMIUM=/path/to/it.",
            red=True,
        )
    unbuilt = [
        report
        for report in terminalreporter.getreports("skipped")
        if "NO NODE" in str(report.longrepr)
    ]
    if unbuilt:
        said = str(unbuilt[0].longrepr).partition("NO NODE")[2].rstrip("')")
        terminalreporter.write_sep("!", f"NO NODE{said}", red=True, bold=True)
