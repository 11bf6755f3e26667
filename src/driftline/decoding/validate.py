"""Validates a decoder on a device against a reference, first by tokens, then by probabilities.

Level 0 passes if both sides generate the same tokens freely. In level 1, the candidate reads the
reference's tokens round by round, and few enough tokens may differ too much. The messages are the
documented ones. Only counts and scores of a round are kept, unless its outputs are saved.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from driftline.comparison.table.table import Table
from driftline.decoding.failures import (
    CHECKS,
    Candidate,
    FirstFailure,
    PromptCount,
    Rate,
    Tally,
)
from driftline.decoding.files.names import DEVICE, REFERENCE, Side
from driftline.decoding.files.outputs import Outputs, read_out, write_out
from driftline.decoding.files.token_table import Rows
from driftline.decoding.files.workdir import require_writable
from driftline.decoding.generation import Validation, outputs_of
from driftline.decoding.models.decoder import DecoderModel, ended_by
from driftline.decoding.models.loading import end_ids, find_model, library_for, weights_digest
from driftline.decoding.models.paged_cache import attention_lines
from driftline.decoding.models.targets import Target, ready, where_line
from driftline.decoding.options import Limits, Report, ValidateOptions
from driftline.decoding.pipeline import (
    Listeners,
    Session,
    ShapeWork,
    choose_executor,
    described,
    differences,
    differences_text,
    generated,
    reports,
    run_on_workers,
    run_task,
    same_prompts,
    saved_settings,
)
from driftline.decoding.prompts import Padded
from driftline.decoding.scoring import TOPK, nonfinite_text, score_round
from driftline.decoding.torchrun import join_job
from driftline.errors import BadInput, DriftlineError

if TYPE_CHECKING:
    import torch

    from driftline.execution.jobs import Executor

WARM_UP = 2
"""Tokens of the warm-up that compiles the candidate: one call without cache, and one with it."""
FORMAT = "driftline-decoder-validation"
SHOWN = 8
"""Prompts, and layers, that are listed one by one."""
SPLIT_NOTE = (
    "layers of a candidate that is split over ranks are not compared: run it in one process, or "
    "driftline layer-metrics"
)
NEAR = 3
"""Up to this multiple of the allowed fraction, a rate may come from how the limit was made."""
_LONGEST = 24
_UNFIT = "such logits cannot be validated"
_WHERE = "driftline layer-metrics shows in which layer they begin"


def where_text(options: ValidateOptions) -> str:
    """A sentence with the targets; it says if no AIU is involved, as the suite is for the AIU."""
    line = where_line(options.reference, options.candidate)
    return line if options.candidate.is_aiu else f"{line} (no AIU is involved)"


class Verdict(NamedTuple):
    """The result of a validation.

    Attributes:
        options: The options.
        tokens_equal: Level 0: whether every token of the free runs is the same.
        first_other: Prompt and position of the first different token; None if all are equal.
        rates: Level 1, in the order in which they are judged; empty if it was not run.
        prompts: Failing tokens of every prompt of every round.
        first: The first token that fails a check.
        agreed: Tokens where both sides' largest logit is at the same place.
        variation: The greatest total variation of a token, over the whole vocabulary.
        seconds: How long it took.
        rows: The scores of every counted token of level 1, prompt by prompt.
    """

    options: ValidateOptions
    tokens_equal: bool
    first_other: tuple[int, int] | None = None
    rates: tuple[Rate, ...] = ()
    prompts: tuple[PromptCount, ...] = ()
    first: FirstFailure | None = None
    agreed: int = 0
    variation: float = 0.0
    seconds: float = 0.0
    rows: tuple[Rows, ...] = ()

    @property
    def passed(self) -> bool:
        return all(rate.passed for rate in self.rates) if self.rates else self.tokens_equal

    @property
    def complaint(self) -> str:
        """The documented message for the first failing check; empty if none fails."""
        for rate in self.rates:
            if not rate.passed:
                return f"failure rate for {rate.called} was too high: {rate.rate}"
        return ""


def validate(
    options: ValidateOptions, *, report: Report = print, session: Session | None = None
) -> Verdict:
    """Validate one model and shape.

    Args:
        options: The options.
        report: Takes messages, line by line.
        session: Holds models that were loaded for another shape.

    Raises:
        DriftlineError: It could not be done; saved outputs are kept. Different numbers are not an
            error, but a verdict.
    """
    return run_task(ValidateTask(options, report), session or Session())


class ValidateTask:
    """The validation of one model and shape; see `pipeline.DecoderTask`.

    A verdict is never taken from an earlier run; only outputs of the reference are reused.
    """

    name = "validate"

    def __init__(self, options: ValidateOptions, report: Report = print) -> None:
        self.options = options
        self.job = join_job(options.distributed)
        self._lines = reports(report, self.job)
        # In the order in which the documented tool judges them.
        self._tally = Tally({"mean_diff": options.limits.mean_diff, "ce": options.limits.ce})
        self._start = time.monotonic()
        self._ends: tuple[int, ...] = ()
        self._first_other: tuple[int, int] | None = None
        self._level_1 = False

    def inputs(self) -> Mapping[str, Any]:
        """The settings that the reference depends on."""
        options = self.options
        return {
            "target": str(options.reference),
            # How weights are joined is left out: `metrics` and `validate` load them differently.
            "library": library_for("", options.library),
            "ranks": 1,
            "max_new_tokens": options.new_tokens,
            "micro_layers": options.micro_layers,
            "random_weights": options.random_weights,
            "weights": weights_digest(options.source),
        }

    @contextmanager
    def work_folder(self, session: Session) -> Generator[None]:
        """No folder: a validation saves nothing unfinished."""
        options = self.options
        self._start = time.monotonic()
        self._say(where_text(options))
        self._say(
            f"testing model={options.model}, batch_size={options.batch_size}, "
            f"seq_length={options.length}, max_new_tokens={options.new_tokens}, "
            f"micro_model={options.micro}"
        )
        for line in attention_lines(options.candidate.attention, options.reference.attention):
            self._say(line)
        self._look_up(session)
        drawn = "randomly initialized" if options.random_weights else "trained"
        self._say(f"using {drawn} model")
        if self.job.size > 1 and not options.splits(self.job.size):
            self._say("drawn weights are not split: every rank runs the whole candidate")
        yield

    def _say(self, line: str) -> None:
        self._lines(f"[{self.job.rank:2d}/{self.job.size:2d}]: {line}")

    def _look_up(self, session: Session) -> None:
        """Check that everything needed is available, before anything is computed."""
        options = self.options
        find_model(options.source)
        for target in (options.reference, options.candidate):
            ready(target)
        folder = options.out(REFERENCE, 0)
        if options.save and folder is not None and self.job.writes:
            require_writable(folder.parent, "--validation_info_dir")
        session.prompts(options)

    def run_round(self, session: Session, seed: int) -> bool:
        batch = session.batch(self.options, seed)
        if seed == 0:
            # Compilation must not count as time of generation.
            self._warm_up(session, batch)
        reference = self._reference(session, seed, batch)
        if seed == 0:
            self._say(
                "cpu validation info extracted for validation level 0 and validation level 1 "
                "(iter=0)"
            )
            if not self._needs_level_1(session, batch, reference):
                return False
            self._ends = end_ids(self.options.source, session.tokenizer(self.options))
            self._level_1 = True
        else:
            self._say(f"cpu validation info extracted for validation level 1 - iter={seed}")
        self._score(session, seed, batch, reference)
        return True

    def _warm_up(self, session: Session, batch: Padded) -> None:
        target = self.options.candidate
        # The documented words, of an AIU only: another device must not read as one.
        self._say("AIU warmup" if target.is_aiu else f"warmup of {self._candidate}")
        start = time.monotonic()
        model = session.model(self.options, "candidate", self.job)
        generated(model, batch, min(WARM_UP, self.options.new_tokens), keep_logits=False)
        what = "PT compile complete, took" if target.compile else "warmup took"
        self._say(f"{what} {time.monotonic() - start:.3f}s")
        if target.compile:
            self._say(model.graphs.text)

    @property
    def _candidate(self) -> str:
        """The name of the candidate in messages."""
        target = self.options.candidate
        return "aiu" if target.is_aiu else f"the candidate ({target.device})"

    def _reference(self, session: Session, seed: int, batch: Padded) -> Outputs:
        """The reference of a round; ranks other than 0 only get its tokens."""
        if not self.job.writes:
            # Logits stay on rank 0, which alone scores them.
            return Outputs(self.job.share(None), [], [], {})
        reference = self._own_reference(session, seed, batch)
        self.job.share(list(reference.tokens))
        return reference

    def _own_reference(self, session: Session, seed: int, batch: Padded) -> Outputs:
        """The reference of a round, from saved outputs or computed."""
        folder = self.options.out(REFERENCE, seed)
        if folder is not None and folder.is_dir():
            self._say(f"cpu validation info found for seed={seed} -- loading it")
            saved = read_out(folder)
            self._require_fitting(saved, batch, folder)
            return saved
        model = session.model(self.options, "reference", self.job)
        reference = outputs_of(self._generated(model, batch, "cpu"))
        self._save(REFERENCE, seed, reference)
        return reference

    def _require_fitting(self, saved: Outputs, batch: Padded, folder: Path) -> None:
        """Refuse a saved reference that differs from the one that would be computed now.

        Logits that are not numbers are detected later, by the scoring.

        Raises:
            BadInput: It was made from other prompts, or with another shape, weights or settings.
        """
        if not saved.logits:
            raise BadInput(
                f"{folder} keeps no logits, or only the largest",
                hint="make it again with `driftline metrics --logits full`, or name another folder",
            )
        # Another tool's outputs do not say their shape; their length does.
        length = int(batch.ids.shape[1]) + self.options.new_tokens
        same_length = all(len(tokens) == length for tokens in saved.tokens)
        if not same_length or not same_prompts(saved, batch):
            raise BadInput(
                f"{folder} was made from other prompts, or another shape",
                hint="use the prompt file it was made from, or name another --validation_info_dir",
            )
        changes = differences(saved_settings(saved), self.inputs())
        again = "make it again with `driftline metrics`, or name another --validation_info_dir"
        # Named first: weights explain the most, and digests would tell a reader nothing.
        if any(change.name == "weights" for change in changes):
            raise BadInput(
                f"{folder} was made by a model with other weights or another config than "
                f"{self.options.source} has now",
                hint=again,
            )
        if changes:
            raise BadInput(
                f"{folder} was made under other settings: {differences_text(changes)}", hint=again
            )

    def _generated(
        self,
        model: DecoderModel,
        batch: Padded,
        label: str,
        *,
        forced: Sequence[torch.Tensor] | None = None,
        keep_logits: bool = True,
    ) -> Validation:
        """Generate, and print how long it took if `timing` is set."""
        new_tokens, start = self.options.new_tokens, time.monotonic()
        made = generated(model, batch, new_tokens, forced=forced, keep_logits=keep_logits)
        seconds = time.monotonic() - start
        if self.options.timing == "e2e":
            self._say(f"{label} generation took {seconds:.3f}s")
        elif self.options.timing:
            self._say(f"{label} generation took {seconds / new_tokens:.4f}s per token")
        return made

    def _save(self, side: Side, seed: int, saved: Outputs) -> None:
        options = self.options
        folder = options.out(side, seed)
        if not options.save or folder is None or not self.job.writes:
            return
        self._say(f"saving {side} validation for - iter={seed}")
        self._say(f"saving validation info to {folder}")
        target = options.reference if side == REFERENCE else options.candidate
        settings = {
            "model": options.model,
            **self.inputs(),
            "target": str(target),
            # The reference is computed by rank 0 alone.
            "ranks": 1 if side == REFERENCE else self.job.size,
            "seed": seed,
        }
        try:
            write_out(
                folder,
                saved.tokens,
                saved.logits or None,
                provenance=described(FORMAT, settings),
            )
        except OSError as trouble:
            raise DriftlineError(
                f"{folder} cannot be written: {trouble.strerror}",
                hint="give another folder with --validation_info_dir",
            ) from None

    def _needs_level_1(self, session: Session, batch: Padded, reference: Outputs) -> bool:
        """Level 0: whether both sides generate the same tokens; all ranks get rank 0's answer."""
        model = session.model(self.options, "candidate", self.job)
        made = self._generated(model, batch, self._candidate, keep_logits=False)
        self._save(DEVICE, 0, Outputs(list(made.tokens), [], [], {}))
        self._say(f"{self._candidate} validation info extracted for validation level 0")
        other = _first_difference(made, reference) if self.job.writes else None
        self._first_other = cast("tuple[int, int] | None", self.job.share(other))
        passed = self._first_other is None
        if passed and not self.options.force_level_1:
            self._say("passed validation level 0")
            return False
        state = "passed" if passed else "failed"
        self._say(f"{state} validation level 0, testing validation level 1")
        return True

    def _score(self, session: Session, seed: int, batch: Padded, reference: Outputs) -> None:
        """Score one round of level 1, with the candidate reading the reference's tokens."""
        options = self.options
        model = session.model(options, "candidate", self.job)
        made = self._generated(model, batch, self._candidate, forced=reference.tokens)
        candidate = outputs_of(made)
        self._save(DEVICE, seed, candidate)
        self._say(
            f"{self._candidate} validation info extracted for validation level 1 - iter={seed}"
        )
        if not self.job.writes:
            return
        scores = score_round(
            reference,
            candidate,
            seed=seed,
            names=[prompt.name for prompt in session.prompts(options, seed)],
            ends=self._ends,
            topk=TOPK,
            new_tokens=options.new_tokens,
        )
        # NaN has no score: such a run says nothing about how good the device is.
        if scores.trouble:
            raise DriftlineError(f"{scores.trouble}; {_UNFIT}", hint=_WHERE)
        for rows in scores.rows:
            self._tally.add(rows, reference, candidate, options.new_tokens)

    def finish(self, session: Session) -> Verdict:
        del session
        verdict = Verdict(self.options, self._first_other is None, self._first_other)
        if self._level_1:
            verdict = self.job.share(self._judged(verdict) if self.job.writes else None)
        return verdict._replace(seconds=time.monotonic() - self._start)

    def _judged(self, verdict: Verdict) -> Verdict:
        options, tally = self.options, self._tally
        # With no tokens at all, the rate would be 0 and pass.
        if not tally.kept:
            raise BadInput(
                f"no token was kept: all {options.batch_size * options.rounds} texts end at once "
                f"({ended_by(self._ends)})",
                hint="other prompts, or another sequence length, may give longer texts",
            )
        rates = tuple(
            Rate(
                check,
                tally.failing(check),
                tally.kept,
                tally.limits[check],
                options.failure_threshold,
                check in options.skip,
            )
            for check in CHECKS
        )
        # Reported before the verdict, also those that are skipped.
        for rate in rates:
            self._say(f"{rate.called} failure rate: {rate.rate}")
        judged = verdict._replace(
            rates=rates,
            prompts=tuple(tally.prompts),
            first=tally.first,
            agreed=tally.agreed,
            variation=tally.variation,
            rows=tuple(tally.rows),
        )
        if judged.passed:
            self._say("passed validation level 1")
        return judged


def _first_difference(made: Validation, reference: Outputs) -> tuple[int, int] | None:
    """Prompt and position of the first generated token that differs.

    Raises:
        DriftlineError: All are equal, but some logits are not numbers.
    """
    for prompt, tokens in enumerate(reference.tokens):
        # Prompt by prompt: the first differing token of the first prompt is reported.
        differ = (tokens != made.tokens[prompt]).nonzero()
        if len(differ):
            return prompt, int(differ[0]) - made.prompt_length
    # A NaN is the largest of its row on every device: such sides agree on their tokens.
    for prompt, logits in enumerate(reference.logits):
        below = logits.isneginf().sum(dim=-1)
        numbers = logits.isfinite().logical_not_().sum(dim=-1) - below
        _require_numbers(numbers, prompt, "reference")
        _require_numbers(made.nonfinite[prompt], prompt, "candidate")
        # Minus infinity excludes a token; both sides must exclude equally many.
        other = (below != made.masked[prompt]).nonzero()
        if len(other):
            token = int(other[0])
            raise DriftlineError(
                f"round 0, prompt {prompt}: at token {token}, {int(below[token])} logits of the "
                f"reference are minus infinity, and {int(made.masked[prompt][token])} of the "
                f"candidate; {_UNFIT}",
                hint=_WHERE,
            )
    return None


def _require_numbers(nonfinite: torch.Tensor, prompt: int, side: str) -> None:
    """Refuse logits that are not numbers, given how many there are at each token of round 0."""
    if bool(nonfinite.any()):
        raise DriftlineError(
            f"round 0, prompt {prompt}: {nonfinite_text(nonfinite.numpy(), side)}; {_UNFIT}",
            hint=_WHERE,
        )


WORK = ShapeWork(
    validate,
    (
        *(ValidateOptions, Limits, Target, Verdict),
        *(Rate, PromptCount, FirstFailure, Candidate, Rows),
    ),
)
"""For workers that are given shapes of this command."""


def validate_shapes(
    shapes: Sequence[ValidateOptions],
    *,
    jobs: int | None = None,
    executor: str | Executor | None = None,
    report: Report = print,
    ready: Callable[[ValidateOptions, Verdict], None] | None = None,
) -> list[Verdict]:
    """`validate` for several shapes, some at a time; as `metrics.run_shapes`.

    The lines of a shape are reported together, before `ready` is called for it.
    """
    workers = choose_executor(shapes, jobs, executor)
    # Lines of shapes that run at the same time would be mixed.
    lines: list[list[str]] = [[] for _ in shapes]

    def finished(index: int, verdict: Verdict) -> None:
        for line in lines[index]:
            report(line)
        if ready is not None:
            ready(shapes[index], verdict)

    if workers is None:
        session = Session()
        verdicts: list[Verdict] = []
        for index, options in enumerate(shapes):
            verdicts.append(validate(options, report=report, session=session))
            finished(index, verdicts[-1])
        return verdicts

    def add_line(index: int, line: str) -> None:
        lines[index].append(line)

    return run_on_workers("validate", shapes, workers, Listeners(finished, add_line))


def write_verdicts(verdicts: Sequence[Verdict], folder: Path) -> None:
    """Write the results of several shapes into one folder, as `validate -o` does."""
    from driftline.decoding.files.validation_files import write_validation

    session = Session()
    for verdict in verdicts:
        write_validation(verdict, folder, session.tokenizer(verdict.options))


def lines_of(verdict: Verdict, tokenizer: Any = None) -> Iterator[str]:
    """The findings for people, one line each: rates, prompts, the first failing token.

    Args:
        verdict: The result.
        tokenizer: Turns ids into text, where there is one.
    """
    text = _token_text(tokenizer)
    if verdict.first_other is not None:
        prompt, position = verdict.first_other
        yield f"level 0: tokens differ first at prompt {prompt}, token {position}"
    if not verdict.rates:
        return
    yield f"limits: {verdict.options.limits}"
    for rate in verdict.rates:
        yield _rate_line(rate)
    # A user should learn that the limit, not the device, may be at fault.
    if any(not rate.passed and rate.rate < NEAR * rate.allowed for rate in verdict.rates):
        yield (
            "  near the edge: where a limit is the 99th percentile of a baseline, about 1 % of the "
            "tokens of an equally good run lie at or above it; --failure_threshold 0.02, or limits "
            "of `thresholds --statistic p99.5`, leave room"
        )
    yield (
        f"over the whole vocabulary: the likeliest token agrees at {verdict.agreed} of "
        f"{verdict.rates[0].kept} tokens, total variation is at most {verdict.variation:.4g}"
    )
    yield from _prompt_lines(verdict)
    if verdict.first is not None:
        yield from _first_failure_lines(verdict.first, verdict, text)


def layer_lines(table: Table) -> Iterator[str]:
    """A judged comparison of layers, in a few lines."""
    finding = table.finding or "no layer is beyond its limits"
    yield f"layers, on the text before that token: {finding}"
    failing = [row for row in table.rows if row.status == "fail"]
    for row in failing[:SHOWN]:
        value = row.metrics.get("relative_l2")
        figure = "" if value is None else f" relative_l2 {value:.4g}"
        yield f"  {row.site} {row.key.port}{figure}"
    if len(failing) > SHOWN:
        yield f"  and {len(failing) - SHOWN} more"
    yield from (f"  note: {note}" for note in table.notes)


def _rate_line(rate: Rate) -> str:
    low, high = rate.interval
    verdict = "skipped" if rate.skipped else "passes" if rate.passed else "fails"
    return (
        f"{rate.called}: {rate.failing} of {rate.kept} tokens at or above {rate.limit:g}, a rate "
        f"of {rate.rate:.4g} (95 % interval {low:.4g} to {high:.4g}), allowed below "
        f"{rate.allowed:g}: {verdict}"
    )


def _prompt_lines(verdict: Verdict) -> Iterator[str]:
    prompts = verdict.prompts
    count = f"{len(prompts)} prompt{'' if len(prompts) == 1 else 's'}"
    # Worst first, by share: prompts end after different numbers of tokens.
    failing = sorted((p for p in prompts if p.most), key=lambda p: -p.most / p.kept)
    if not failing:
        yield f"no failing token in any of the {count}"
        return
    worst = "" if len(failing) <= SHOWN else f", the worst {SHOWN}"
    has = "has" if len(failing) == 1 else "have"
    yield f"{len(failing)} of {count} {has} failing tokens{worst}:"
    for prompt in failing[:SHOWN]:
        name = f" ({prompt.name})" if prompt.name else ""
        counts = ", ".join(f"{rate.called} {prompt.failing[rate.check]}" for rate in verdict.rates)
        yield f"  iter={prompt.seed} prompt {prompt.prompt}{name}: {counts} of {prompt.kept} tokens"


def _first_failure_lines(
    first: FirstFailure, verdict: Verdict, text: Callable[[int], str]
) -> Iterator[str]:
    name = f" ({first.name})" if first.name else ""
    scores = ", ".join(f"{r.called} {first.values[r.check]:.6g}" for r in verdict.rates)
    yield (
        f"first failing token: iter={first.seed}, prompt {first.prompt}{name}, token "
        f"{first.position}, where the reference said {text(first.token)}: {scores}"
    )
    for side, choices in (("reference", first.reference), ("candidate", first.candidate)):
        shown = ", ".join(f"{text(choice.token)} {choice.probability:.4f}" for choice in choices)
        yield f"  {side}'s likeliest: {shown}"


def _token_text(tokenizer: Any) -> Callable[[int], str]:
    """A function that shows an id, with its text where there is a tokenizer."""

    def read(token: int) -> str:
        if tokenizer is None:
            return str(token)
        shown = repr(str(tokenizer.decode([token])))
        # Some tokenizers have single tokens of hundreds of spaces.
        if len(shown) > _LONGEST:
            shown = shown[: _LONGEST - 1] + "…"
        return f"{token} {shown}"

    return read
