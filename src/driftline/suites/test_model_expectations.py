"""Named models still give what they gave when they were captured, and have the same weight keys.

    pytest --pyargs driftline.suites.test_model_expectations::TestAIUDecoderModels

Models are named by `--driftline-decoder-models` and `--driftline-tuple-output-models`, by the ini
file, or by the lists `decoder_models` and `tuple_output_models` of a test file of your own that
imports the two classes. `--capture_expectation` writes the files.
"""

# pytest leaves what a hook is given without types.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest

from driftline.errors import DriftlineError
from driftline.suites.subjects import Loaded, SuiteOptions, load
from driftline.testing.expectations.pytest_session import (
    captures,
    expectations_of,
    fail,
    model_list,
    path_setting,
    saved,
    say,
    setting,
    settle,
)

_loaded: dict[tuple[str, SuiteOptions, bool], Loaded] = {}
"""The model that is being tested, and no other; both tests of a model use it."""
UNFUSED = "All AIU models are already unfused"


def _options(config: pytest.Config) -> SuiteOptions:
    options = SuiteOptions(*(setting(config, word) for word in SuiteOptions._fields))
    if options.thresholds:
        options = options._replace(thresholds=str(path_setting(config, "thresholds", "")))
    return options


class ModelExpectations:
    """What both suites share; the subclasses say which models, and how they are called."""

    models: ClassVar[str]
    tuple_output: ClassVar[bool]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        module = cast(Any, metafunc.module)
        listed: list[Any] = model_list(metafunc.config, self.models)
        # Options win over the lists of a test file, which are its defaults.
        listed = listed or list(getattr(module, self.models, ()))
        if not listed:
            option = f"--driftline-{self.models.replace('_', '-')}"
            reason = f"no model is named: give {option} MODEL, or driftline_{self.models} (ini)"
            listed = [pytest.param("", id="none", marks=pytest.mark.skip(reason=reason))]
        metafunc.parametrize("model_id", listed, scope="class")
        if "capture_expectation" in metafunc.fixturenames:
            metafunc.parametrize("capture_expectation", [captures(metafunc.config)])

    @staticmethod
    def driftline_where(item: pytest.Item) -> str:
        """What runs where; the plugin prints it before the first test."""
        if not item.get_closest_marker("skip"):
            try:
                target = _options(item.config).where
            except DriftlineError:  # the tests say what is wrong with it
                return ""
            line = f"models on {target.words}"
            return line if target.is_aiu else f"{line} (no AIU is involved)"
        return ""

    @classmethod
    def teardown_class(cls) -> None:
        _loaded.clear()

    def _model(self, request: pytest.FixtureRequest, name: str) -> Loaded:
        options = _options(request.config)
        key = (name, options, self.tuple_output)
        if key not in _loaded:
            _loaded.clear()  # before the next is loaded: two large models may not fit
            try:
                _loaded[key] = load(name, options, tuple_output=self.tuple_output)
            except DriftlineError as trouble:
                fail(trouble)
        return _loaded[key]

    def test_model_output(
        self, request: pytest.FixtureRequest, model_id: str, capture_expectation: bool
    ) -> None:
        """The signature of the output is the captured one, but for what rounding explains."""
        model = self._model(request, model_id)
        names = model.names(type(self).__name__, "test_model_output")
        expectations = expectations_of(request.config)
        wrong = settle(request, lambda: expectations.output(model.subject, names))
        say(wrong or saved(request, "Signature"))

    def test_model_weight_keys(
        self, request: pytest.FixtureRequest, model_id: str, capture_expectation: bool
    ) -> None:
        """The keys of the state dict are the captured ones."""
        model = self._model(request, model_id)
        names = model.names(type(self).__name__, "test_model_weight_keys")
        expectations = expectations_of(request.config)
        wrong = settle(request, lambda: expectations.weight_keys(model.subject, names))
        say(wrong or saved(request, "Weights Key"))

    @pytest.mark.skip(reason=UNFUSED)
    def test_model_unfused(self, model_id: str) -> None:
        """Models are loaded unfused, so there is nothing to compare them with."""


class TestAIUDecoderModels(ModelExpectations):
    """Decoders: one tensor of logits."""

    models = "decoder_models"
    tuple_output = False


class TestAIUModelsTupleOutput(ModelExpectations):
    """Models that give more than one tensor, such as start and end logits."""

    models = "tuple_output_models"
    tuple_output = True
