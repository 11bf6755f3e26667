"""Fixtures of a preloaded Python, seeds and time limits of all tests, and a list of skipped parts.

There are two time limits. First pytest-timeout raises an exception in the test. That is not enough
if the process waits in C, or waits for a thread or a child while the exception is propagated, or
hangs between tests or after the last one. Then the process itself ends, with a traceback of each
thread, and xdist reports the test and continues with another worker.
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
"""Time limit of a test that is marked as slow and has no limit of its own."""
SEED = 20240229
GRACE_SECONDS = 180
"""Seconds until a process ends that hangs after a test's limit, between tests or at its end."""

# The time of an example depends more on the load of the machine than on driftline.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


IMPORTED = (
    # An optimizer's first step imports dynamo, which takes a second in each program that trains.
    *("torch", "torch._dynamo"),
    *(f"driftline.cli.commands.{name}" for name in ("compare", "diagnose", "dump", "experiments")),
    *("driftline.cli.app", "driftline.comparison.pipeline", "driftline.diagnosis.api"),
    *("driftline.captures.launch.process", "driftline.captures.torch.framework"),
)
"""torch, and the modules of driftline that most commands and captured programs import."""


@pytest.fixture(scope="session")
def warm_python() -> Iterator[str]:
    """Path of a `python` that has imported torch and driftline, for tests that do not test that."""
    with warm(*IMPORTED) as python:
        yield python


@pytest.fixture(scope="session")
def warm_llama(warm_python: str) -> Iterator[str]:
    """Path of a `python` that has also imported the Llama of transformers."""
    with warm("transformers.models.llama.modeling_llama", start=warm_python) as python:
        yield python


@pytest.fixture(scope="session")
def warm_compiler(warm_python: str) -> Iterator[str]:
    """Path of a `python` that has also imported torch.compile with its own backends."""
    with warm("torch._inductor.compile_fx", start=warm_python) as python:
        yield python


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for screenshots of pages: $DRIFTLINE_SCREENSHOTS, or a temporary one."""
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
    """Seed all random generators before any fixture, so that tests draw the same numbers each time.

    torch starts with a different seed in each process, so a test that imports it first must seed
    it.
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
    # During a test, descriptor 2 is a capture file, whose content is lost if the process ends.
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
    gc.disable()  # objects made during collection stay alive, so garbage collection is wasted


def pytest_collection_finish() -> None:
    """Freeze the objects of the suite, so that captures and garbage collection do not visit them.

    The modules and tests are two million objects that stay alive; visiting them takes most of a
    second.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Unfreeze all objects: extensions would report objects that are never freed as leaks."""
    gc.unfreeze()
    if session.config.stash.get(_TERMINAL, None) is not None:
        _end_process_after(session.config, 0)  # threads or exit handlers may hang


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Limit the time of the process for each test, and freeze the objects that a file leaves."""
    _end_process_after(item.config, _limit_of(item))
    result = yield
    _end_process_after(item.config, 0)  # until the next test begins
    if nextitem is None or nextitem.path != item.path:
        pytest_collection_finish()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Set the limit again, because pytest removes that of the process when a test fails."""
    _end_process_after(item.config, _limit_of(item))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report tests that were skipped without a browser or Node; the run must not look complete."""
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
