"""Expectations inside pytest: settings from its command line and ini file, and the `expect` call.

Turns the result of a check into what pytest shows: a pass, a failure with its message and without a
traceback through our own files, or a written file. Does not know how models are loaded.
"""

# pytest leaves nodes and options without types.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from driftline.errors import BadInput, DriftlineError
from driftline.testing.expectations.expectations import (
    SEED,
    Expectations,
    Explicit,
    Result,
    Subject,
    Update,
    device_name,
    plain_name,
)
from driftline.testing.expectations.layers import SUFFIX, keep_layers, layer_text
from driftline.testing.expectations.pytest_plugin import CAPTURE, FOLDER, SAVED, WRITTEN
from driftline.testing.expectations.signature import call

_owners = pytest.StashKey[dict[Path, str]]()
_NAMED = ("name", "seed", "rtol", "atol")


def setting(config: pytest.Config, name: str) -> str:
    """The value of `--driftline-{name}`, else of `driftline_{name}` in the ini file."""
    # The command line overrides the ini file.
    option = config.getoption(f"driftline_{name}", default=None)
    value = option if option is not None else config.getini(f"driftline_{name}")
    return str(value or "").strip()


def path_setting(config: pytest.Config, name: str, default: str) -> Path:
    """A setting that is a path: an option is relative to the working directory, a value of the ini
    file to its folder.

    Without an ini file, the working directory is used too, because pytest's root then depends on
    the named tests.
    """
    base = config.invocation_params.dir
    if config.getoption(f"driftline_{name}", default=None) is None and config.inipath:
        base = config.rootpath
    return base / (setting(config, name) or default)


def model_list(config: pytest.Config, name: str) -> list[str]:
    """The models of a list, `decoder_models` or `tuple_output_models`: options, else the ini."""
    options = cast("list[str]", config.getoption(f"driftline_{name}", default=None) or [])
    lines = options or cast("list[str]", config.getini(f"driftline_{name}") or [])
    words = [word.strip() for line in lines for word in line.split(",")]
    return list(dict.fromkeys(filter(None, words)))


def captures(config: pytest.Config) -> bool:
    """Whether everything is written, and every test that writes fails on purpose."""
    return bool(config.getoption("capture_expectation", default=False))


def expectations_of(config: pytest.Config) -> Expectations:
    """The expectations with the folder and policy of the command line and the ini file."""
    folder = path_setting(config, "expectations_dir", FOLDER)
    update = "all" if captures(config) else cast("Update", config.getoption("driftline_update"))
    # The same command with one more option, ready to be copied.
    words = [str(word) for word in config.invocation_params.args]
    return Expectations(folder, update, shlex.join(["pytest", *words, CAPTURE]))


def fail(trouble: DriftlineError) -> NoReturn:
    """End the test with a sentence and a hint."""
    hint = f"\n  hint: {trouble.hint}" if trouble.hint else ""
    pytest.fail(f"{trouble}{hint}", pytrace=False)


def settle(request: pytest.FixtureRequest, check: Callable[[], Result]) -> str:
    """Run a check and record what was written.

    Returns:
        The message to show; empty if the check passed.
    """
    try:
        result = check()
    except DriftlineError as trouble:
        fail(trouble)
    if result.state in ("written", "rewritten"):
        request.node.user_properties.append((WRITTEN, f"{result.state}:{result.path}"))
    return result.message


def saved(request: pytest.FixtureRequest, what: str) -> str:
    """The documented message after a capture; empty if nothing was captured."""
    if not captures(request.config):
        return ""
    return f"{what} file has been saved, please re-run the tests without {CAPTURE}"


def say(message: str) -> None:
    """Fail the test with a message, unless it is empty."""
    if message:
        pytest.fail(message, pytrace=False)


class Expecter:
    """The value of the fixture `expect`: call it with a model and its inputs."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self._calls = 0

    def __call__(self, subject: Any, inputs: Any = None, **words: Any) -> None:
        """Check that the subject's output is what was captured, or capture it.

        Args:
            subject: A model (its weight keys count too), any callable, or an output: a tensor, an
                array, or several.
            inputs: A tensor; a mapping is passed by name, a tuple or list by place. Without any a
                model reads the tokens 0 … 15.
            **words: `name` for the files, where one test expects several things (they are numbered
                otherwise); `seed`, set before every call (42); `rtol` and `atol`, instead of
                measured limits: a position may be off by `atol + rtol * (largest number)`.
        """
        self._calls += 1
        try:
            asked = self._asked(words)
            stem = self._stem(str(asked["name"] or ""))
            about = _subject(stem, subject, inputs, asked)
            expectations = expectations_of(self._request.config)
            self._claim(expectations.folder / stem)
        except DriftlineError as trouble:
            fail(trouble)
        layers = expectations.folder / f"{stem}{SUFFIX}"
        output: list[Result] = []

        def check_output() -> Result:
            output.append(expectations.output(about, [f"{stem}.output"]))
            return output[0]

        wrong = [settle(self._request, check_output)]
        if about.module is not None and output[0].state in ("written", "rewritten"):
            keep_layers(about, layers)
        elif output[0].state == "different":
            wrong.append(layer_text(about, layers))
        what = "Signature"
        if about.module is not None:
            what = "Signature and Weights Key"
            names = [f"{stem}.weight_keys"]
            wrong.append(settle(self._request, lambda: expectations.weight_keys(about, names)))
        say("\n".join(filter(None, wrong)))
        message = saved(self._request, what)
        if message:
            self._request.node.stash[SAVED] = message

    def _asked(self, words: dict[str, Any]) -> dict[str, Any]:
        asked: dict[str, Any] = {}
        # The nearest marker wins: a test's over its class's over its module's.
        for marker in reversed(list(self._request.node.iter_markers("driftline"))):
            if marker.args:
                raise BadInput("the marker driftline takes named values only", hint=_words())
            asked.update(marker.kwargs)
        asked.update(words)
        unknown = [name for name in asked if name not in _NAMED]
        if unknown:
            raise BadInput(f"an expectation has no '{unknown[0]}'", hint=_words())
        return {name: asked.get(name) for name in _NAMED}

    def _stem(self, name: str) -> str:
        node = self._request.node
        module = str(node.nodeid).partition("::")[0].removesuffix(".py").replace("/", ".")
        inside = str(node.nodeid).split("::")[1:]
        parts = [module, *inside]
        if name:
            parts.append(name)
        # The first call keeps the plain name, so that adding a second does not rename its
        # file.
        elif self._calls > 1:
            parts.append(str(self._calls))
        return ".".join(plain_name(part) for part in parts if part)

    def _claim(self, path: Path) -> None:
        owners = self._request.config.stash.setdefault(_owners, {})
        claim = f"{self._request.node.nodeid} (call {self._calls})"
        # Two tests that share a file would overwrite each other's expectation.
        owner = owners.setdefault(path, claim)
        if owner != claim:
            raise BadInput(
                f"{path.name} is expected by {owner} already", hint="give each a name of its own"
            )


def _words() -> str:
    return "it has " + ", ".join(_NAMED)


def _subject(title: str, subject: Any, inputs: Any, asked: dict[str, Any]) -> Subject:
    import torch

    module = subject if isinstance(subject, torch.nn.Module) else None
    facts: dict[str, Any] = {}
    if module is not None:
        weight = next(module.parameters(), None)
        facts["model"] = type(module).__name__
        facts["device"] = device_name(weight.device if weight is not None else None)
    seed = SEED if asked["seed"] is None else int(asked["seed"])
    run = (lambda: call(subject, inputs)) if callable(subject) else lambda: subject
    return Subject(title, run, module, facts=facts, seed=seed, explicit=_explicit(asked))


def _explicit(asked: dict[str, Any]) -> Explicit | None:
    if asked["rtol"] is None and asked["atol"] is None:
        return None
    limits = Explicit(float(asked["rtol"] or 0.0), float(asked["atol"] or 0.0))
    for name, value in limits._asdict().items():
        if not 0.0 <= value < math.inf:
            raise BadInput(f"{name} is {value}; it must be 0 or more")
    return limits
