"""What a worker does for `metrics` and `validate`: shape after shape, models loaded once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftline.decoding.failing import Candidate, FirstFailure, PromptCount, Rate
from driftline.decoding.metrics_ask import MetricsAsk
from driftline.decoding.metrics_outcome import Outcome
from driftline.decoding.score_table import Rows
from driftline.decoding.targets import Target
from driftline.decoding.validate_ask import Limits, ValidateAsk
from driftline.decoding.validation import Subjects, Verdict
from driftline.execution.codec import decode, encode

if TYPE_CHECKING:
    from driftline.decoding.metrics_run import Models
    from driftline.execution.jobs import Say

KINDS = (
    *(MetricsAsk, Outcome, Target, ValidateAsk, Limits, Verdict),
    *(Rate, PromptCount, FirstFailure, Candidate, Rows),
)
FILES = "files"
"""The place that all shapes need: where models, prompts and results lie."""


class _Workshop:
    """Knows whether this machine sees the files that the one who asks sees."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._about = about
        self._ready = False

    def absent(self) -> list[tuple[str, str]]:
        """Files and folders that were there where the work was asked for, and are not here."""
        found: list[tuple[str, str]] = []
        for path in self._about["files"]:
            if not Path(path).exists():
                found.append((FILES, f"cannot see '{path}'"))
        return found

    def _asked(self, work: Any) -> Any:
        if not self._ready:
            import torch

            # Digits come out the same only with as many threads as one process would take.
            torch.set_num_threads(self._about["threads"])
            # Files say by what command they were made: it is not ours.
            sys.orig_argv = list(self._about["command"])
            self._ready = True
        return decode(work, KINDS)


class MetricsWorkshop(_Workshop):
    """Computes the metrics of shapes; their files are written from here."""

    def __init__(self, about: dict[str, Any]) -> None:
        super().__init__(about)
        self._models: Models | None = None

    def do(self, work: Any, say: Say) -> Any:
        """The outcome of one shape."""
        from driftline.decoding.metrics_run import Models, run_metrics

        ask: MetricsAsk = self._asked(work)
        if self._models is None:
            self._models = Models(ask)
        return encode(run_metrics(ask, say=say, models=self._models))


class ValidateWorkshop(_Workshop):
    """Validates shapes."""

    def __init__(self, about: dict[str, Any]) -> None:
        super().__init__(about)
        self._subjects = Subjects()

    def do(self, work: Any, say: Say) -> Any:
        """The verdict of one shape."""
        from driftline.decoding.validation import validate

        ask: ValidateAsk = self._asked(work)
        return encode(validate(ask, say=say, subjects=self._subjects))
