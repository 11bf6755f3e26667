"""Decoders on a device against a trusted one: equal tokens, or probabilities that hardly differ.

    FMS_TEST_SHAPES_COMMON_MODEL_PATHS=M pytest --pyargs driftline.suites.test_decoders -vv

Models, shapes, limits and outputs are named by the documented variables `FMS_TEST_SHAPES_…`, each
also as `DRIFTLINE_TEST_SHAPES_…`; docs/decoders.md lists them. Nothing is downloaded unasked: with
no model named, the test is skipped.
"""

# pytest leaves what a hook is given without types.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Callable

import pytest

from driftline import settings
from driftline.decoding.telling import SPLIT_UP, layer_lines, lines_of
from driftline.decoding.validate_ask import ValidateAsk, asks_from
from driftline.decoding.validation import Subjects, Verdict, validate
from driftline.errors import DriftlineError

_NO_MODEL = (
    "no model is named: set FMS_TEST_SHAPES_COMMON_MODEL_PATHS to ids or folders, with commas "
    "between them"
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per model and shape, with the documented ids."""
    if "ask" not in metafunc.fixturenames:
        return
    try:
        say = print if settings.job_place().rank == 0 else _nothing
        asks = asks_from(settings.shapes_variable, say=say)
    except DriftlineError as trouble:
        hint = f" ({trouble.hint})" if trouble.hint else ""
        raise pytest.UsageError(f"{trouble}{hint}") from None
    listed = [pytest.param(ask, id=ask.id) for ask in asks]
    if not listed:
        listed = [pytest.param(None, id="none", marks=pytest.mark.skip(reason=_NO_MODEL))]
    metafunc.parametrize("ask", listed)


def _nothing(line: str) -> None:
    del line


@pytest.fixture(scope="module")
def subjects() -> Subjects:
    """Loaded models, kept from one shape to the next."""
    return Subjects()


def test_common_shapes(
    ask: ValidateAsk, subjects: Subjects, record_property: Callable[[str, object], None]
) -> None:
    """Level 0, and where that fails or is not enough, level 1."""
    try:
        verdict = validate(ask, subjects=subjects)
    except DriftlineError as trouble:
        hint = f"\n  hint: {trouble.hint}" if trouble.hint else ""
        pytest.fail(f"{trouble}{hint}", pytrace=False)
    if settings.job_place().rank:
        return  # rank 0 tells, and its verdict is all ranks'
    _tell(ask, verdict, subjects)
    threshold = ask.failure_threshold
    for rate in verdict.rates:
        record_property(f"{rate.called.replace(' ', '_')}_failure_rate", rate.rate)
    for rate in verdict.rates:
        if not rate.skipped:
            failure_rate = rate.rate
            said = f"failure rate for {rate.called} was too high: {failure_rate}"
            assert failure_rate < threshold, said


def _tell(ask: ValidateAsk, verdict: Verdict, subjects: Subjects) -> None:
    for line in lines_of(verdict, subjects.tokenizer(ask)):
        print(line)
    first = verdict.first
    if verdict.passed or first is None or settings.shapes_variable("EXPLAIN") != "1":
        return
    if ask.split(settings.job_place().world_size):
        print(SPLIT_UP)
        return
    from driftline.comparison.verdict.judge import judge
    from driftline.decoding.explaining import explain

    try:
        table = judge(explain(ask, first, subjects))
    except DriftlineError as trouble:
        print(f"the layers could not be compared: {trouble}")
        return
    for line in layer_lines(table):
        print(line)
