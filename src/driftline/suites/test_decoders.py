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
from typing import Any, cast

import pytest

from driftline import settings
from driftline.decoding.option_reader import validate_options
from driftline.decoding.options import ValidateOptions
from driftline.decoding.pipeline import Session, no_report
from driftline.decoding.validate import (
    SPLIT_NOTE,
    Verdict,
    layer_lines,
    lines_of,
    validate,
    where_text,
)
from driftline.errors import DriftlineError

_NO_MODEL = (
    "no model is named: set FMS_TEST_SHAPES_COMMON_MODEL_PATHS to ids or folders, with commas "
    "between them"
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per model and shape, with the documented ids."""
    if "options" not in metafunc.fixturenames:
        return
    try:
        report = print if settings.job_place().rank == 0 else no_report
        shapes = validate_options(settings.shapes_variable, report=report)
    except DriftlineError as trouble:
        hint = f" ({trouble.hint})" if trouble.hint else ""
        raise pytest.UsageError(f"{trouble}{hint}") from None
    listed = [pytest.param(options, id=options.id) for options in shapes]
    if not listed:
        listed = [pytest.param(None, id="none", marks=pytest.mark.skip(reason=_NO_MODEL))]
    metafunc.parametrize("options", listed)


@pytest.fixture(scope="module")
def decoder_session() -> Session:
    """Loaded models, kept from one shape to the next."""
    return Session()


def test_common_shapes(
    options: ValidateOptions,
    decoder_session: Session,
    record_property: Callable[[str, object], None],
) -> None:
    """Level 0, and where that fails or is not enough, level 1."""
    try:
        verdict = validate(options, session=decoder_session)
    except DriftlineError as trouble:
        hint = f"\n  hint: {trouble.hint}" if trouble.hint else ""
        pytest.fail(f"{trouble}{hint}", pytrace=False)
    if settings.job_place().rank:
        return  # rank 0 reports, and its verdict is that of all ranks
    _print_findings(options, verdict, decoder_session)
    threshold = options.failure_threshold
    # All rates are recorded before one of them can end the test.
    for rate in verdict.rates:
        record_property(f"{rate.called.replace(' ', '_')}_failure_rate", rate.rate)
    for rate in verdict.rates:
        if not rate.skipped:
            failure_rate = rate.rate
            message = f"failure rate for {rate.called} was too high: {failure_rate}"
            assert failure_rate < threshold, message


def _where(item: pytest.Item) -> str:
    options = cast(Any, item).callspec.params.get("options")
    return where_text(options) if isinstance(options, ValidateOptions) else ""


# The plugin prints it before the first test: pytest shows no output of tests that pass.
cast(Any, test_common_shapes).driftline_where = _where


def _print_findings(options: ValidateOptions, verdict: Verdict, session: Session) -> None:
    for line in lines_of(verdict, session.tokenizer(options)):
        print(line)
    first = verdict.first
    if verdict.passed or first is None or settings.shapes_variable("EXPLAIN") != "1":
        return
    if options.splits(settings.job_place().world_size):
        print(SPLIT_NOTE)
        return
    from driftline.comparison.verdict.judge import judge
    from driftline.decoding.explain import explain

    try:
        table = judge(explain(options, first, session))
    except DriftlineError as trouble:
        # The verdict is valid without the layers.
        print(f"the layers could not be compared: {trouble}")
        return
    for line in layer_lines(table):
        print(line)
