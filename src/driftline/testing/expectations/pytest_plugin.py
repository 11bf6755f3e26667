"""The pytest plugin `driftline`: options, the `expect` fixture, and a summary of written files.

Every pytest run on a machine with Driftline installed imports this file, so it imports nothing but
pytest; everything else is loaded when a test needs it (`pytest_session`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from driftline.testing.expectations.pytest_session import Expecter

CAPTURE = "--capture_expectation"
FOLDER = "tests/resources/expectations"
WRITTEN = "driftline_expectation"
"""Property of a report that names a written file: reports also come home from other processes."""

INI_FILES = ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")

COMPILER_TRACE = "torch.__trace"
"""The logger to which `torch.compile` hands its trace."""

SAVED = pytest.StashKey[str]()
"""Of a test that has captured something: the words it fails with when it is through."""

_TEXT = {
    "expectations_dir": f"folder of the expectations (default {FOLDER})",
    "decoder_models": "models of TestAIUDecoderModels: ids or folders, one per line",
    "tuple_output_models": "models of TestAIUModelsTupleOutput: ids or folders, one per line",
    "target": "where models run, like device=cuda,dtype=fp16,compile=inductor",
    "library": "who loads models: transformers (default) or fms",
    "thresholds": "file of `driftline calibrate`: its relative_l2 replaces measured limits",
    "micro_layers": "keep only so many layers, and draw their weights",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("driftline", "driftline: expectations of models")
    group.addoption(
        "--driftline-update",
        choices=("none", "new", "failed", "all"),
        default="none",
        help="write expectations that are missing (new), those that differ too (failed), or all",
    )
    group.addoption("--driftline-expectations-dir", metavar="DIR", help=_TEXT["expectations_dir"])
    for name, suite in (("decoder", "DecoderModels"), ("tuple-output", "ModelsTupleOutput")):
        group.addoption(
            f"--driftline-{name}-models",
            action="append",
            metavar="MODEL",
            help=f"id or folder for TestAIU{suite}; several with commas, or repeat the option",
        )
    group.addoption("--driftline-target", metavar="TARGET", help=_TEXT["target"])
    group.addoption("--driftline-library", metavar="NAME", help=_TEXT["library"])
    group.addoption("--driftline-thresholds", metavar="FILE", help=_TEXT["thresholds"])
    group.addoption("--driftline-micro-layers", metavar="N", help=_TEXT["micro_layers"])
    # Every option can also be set in the ini file.
    for name, text in _TEXT.items():
        listed = name.endswith("_models")
        parser.addini(f"driftline_{name}", text, type="linelist" if listed else "string")


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(parser: pytest.Parser) -> Generator[None, object, object]:
    result = yield
    # A suite that has this option already adds it in its conftest.py. Two of one name would stop
    # that suite with an error, so ours comes after theirs, and only where there is none.
    try:
        parser.addoption(
            CAPTURE,
            action="store_true",
            default=False,
            help="write every expectation, and fail so that nobody takes it for a check",
        )
    except ValueError:
        return result
    return result


def pytest_configure(config: pytest.Config) -> None:
    _refuse_a_model_as_root(config)
    config.addinivalue_line(
        "markers",
        "driftline(name=, seed=, rtol=, atol=): how `expect` captures and compares in this test",
    )


def _refuse_a_model_as_root(config: pytest.Config) -> None:
    """pytest takes any path that follows a blank for a folder of tests, and looks there for its
    ini file; the user's own would silently not be read."""
    # On use: every pytest run imports this file.
    from itertools import pairwise

    directory = config.invocation_params.dir
    # pytest's root is normally one of these; otherwise an option's value was taken for a path.
    around = (directory, *directory.parents)
    unread = config.inipath is None and any((p / n).exists() for p in around for n in INI_FILES)
    if config.rootpath in around and not unread:
        return
    words = [str(word) for word in config.invocation_params.args]
    for option, value in pairwise(words):
        if option.startswith("--driftline-") and "=" not in option and (directory / value).exists():
            raise pytest.UsageError(
                f"pytest takes {value} for a folder of tests; join it to its option with a sign: "
                f"{option}={value}"
            )


def pytest_report_collectionfinish(items: list[pytest.Item]) -> list[str]:
    """Before the first test of a suite that runs models: what runs where."""
    lines = [where(item) for item in items if (where := _suite_device(item)) is not None]
    return [f"driftline: {line}" for line in dict.fromkeys(lines) if line]


def _suite_device(item: pytest.Item) -> Callable[[pytest.Item], str] | None:
    """A function that names the device of a test of our suites; None for other tests."""
    holder = getattr(item, "cls", None) or getattr(item, "function", None)
    return getattr(holder, "driftline_where", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the compiler's trace out of the report of a suite.

    It is hundreds of lines without a text for every compiled model, and hides why a test failed.
    """
    report = yield
    if _suite_device(item) is not None:
        shown: list[tuple[str, str]] = []
        for title, text in report.sections:
            lines = [line for line in text.splitlines() if f" {COMPILER_TRACE}:" not in line]
            if lines:
                shown.append((title, "\n".join(lines)))
        report.sections = shown
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    result = yield
    # Not at the first thing it captures: a test may expect several.
    message = item.stash.get(SAVED, "")
    if message:
        pytest.fail(message, pytrace=False)
    return result


@pytest.fixture
def driftline_expectations_dir(request: pytest.FixtureRequest) -> Path:
    """The folder where the expectations of this run are."""
    from driftline.testing.expectations.pytest_session import expectations_of

    return expectations_of(request.config).folder


@pytest.fixture
def expect(request: pytest.FixtureRequest) -> Expecter:
    """`expect(model, inputs)`: the model gives what it gave when that was captured.

    `--driftline-update=new` writes what is missing: the signature of the output and the weight
    keys. Without it they are checked. `expect(output)` takes tensors computed already.
    Keyword arguments, or the marker `driftline`: `name`, `seed`, `rtol`, `atol`.
    """
    from driftline.testing.expectations.pytest_session import Expecter

    return Expecter(request)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    written: dict[str, str] = {}
    # Reports of other processes (xdist) arrive here too.
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == WRITTEN:
                    state, _, path = str(value).partition(":")
                    written[path] = state
    if written:
        terminalreporter.section("driftline expectations")
        for path, state in sorted(written.items()):
            terminalreporter.write_line(f"{state}: {path}")
