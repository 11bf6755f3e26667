"""Named models still give what they gave when they were captured, and have the same weight keys.

    pytest --pyargs driftline.suites.test_model_expectations::TestAIUDecoderModels

Models are named by `--driftline-decoder-models` and `--driftline-tuple-output-models`, by the ini
file, or by the lists `decoder_models` and `tuple_output_models` of a test file of your own that
imports the two classes. `--capture_expectation` writes the files.
"""

# pytest leaves what a hook is given without types.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, cast

import pytest

from driftline.errors import DriftlineError
from driftline.gating.expectations import Expectations, Result
from driftline.gating.expecting import (
    captures,
    expectations_of,
    fail,
    model_list,
    saved,
    setting,
    settle,
)
from driftline.suites.subjects import Ask, Loaded, load

UNFUSED = "All AIU models are already unfused"


class ModelExpectations:
    """What both suites share; the subclasses say which models, and how they are called."""

    models: ClassVar[str]
    tuple_output: ClassVar[bool]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        module = cast(Any, metafunc.module)
        listed: list[Any] = model_list(metafunc.config, self.models)
        listed = listed or list(getattr(module, self.models, ()))
        if not listed:
            option = f"--driftline-{self.models.replace('_', '-')}"
            reason = f"no model is named: give {option} MODEL, or driftline_{self.models} (ini)"
            listed = [pytest.param("", id="none", marks=pytest.mark.skip(reason=reason))]
        metafunc.parametrize("model_id", listed, scope="class")
        if "capture_expectation" in metafunc.fixturenames:
            metafunc.parametrize("capture_expectation", [captures(metafunc.config)])

    @pytest.fixture(scope="class")
    def loaded(self, request: pytest.FixtureRequest, model_id: str) -> Loaded:
        words = {name: setting(request.config, name) for name in Ask._fields}
        try:
            return load(model_id, Ask(**words), tuple_output=self.tuple_output)
        except DriftlineError as trouble:
            fail(trouble)

    def check(
        self,
        request: pytest.FixtureRequest,
        what: str,
        check: Callable[[Expectations, list[str]], Result],
        names: list[str],
    ) -> None:
        __tracebackhide__ = True
        expectations = expectations_of(request.config)
        message = settle(request, lambda: check(expectations, names)) or saved(request, what)
        if message:
            pytest.fail(message, pytrace=False)

    def test_model_output(
        self, request: pytest.FixtureRequest, loaded: Loaded, capture_expectation: bool
    ) -> None:
        """The signature of the output is the captured one, within what the model's own rounding
        explains."""
        __tracebackhide__ = True
        names = loaded.names(type(self).__name__, "test_model_output")
        self.check(request, "Signature", lambda e, n: e.output(loaded.subject, n), names)

    def test_model_weight_keys(
        self, request: pytest.FixtureRequest, loaded: Loaded, capture_expectation: bool
    ) -> None:
        """The keys of the state dict are the captured ones."""
        __tracebackhide__ = True
        names = loaded.names(type(self).__name__, "test_model_weight_keys")
        self.check(request, "Weights Key", lambda e, n: e.weight_keys(loaded.subject, n), names)

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
