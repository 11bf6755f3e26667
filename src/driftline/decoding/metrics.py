"""`driftline metrics`: generate on both targets, score every token, save the outputs for reuse.

Each round has its own seed. Saved outputs of a round are reused after an interruption. Rounds do
not share memory, and incomplete files never have a final name.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import functools
import glob
import json
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from driftline.decoding.files import outputs, token_table
from driftline.decoding.files.names import (
    CANDIDATE,
    REFERENCE,
    TOKEN_CSV_METRICS,
    Side,
    csv_name,
)
from driftline.decoding.files.outputs import Outputs
from driftline.decoding.files.workdir import require_writable, resumable_work_folder
from driftline.decoding.generation import outputs_of
from driftline.decoding.models.decoder import ended_by
from driftline.decoding.models.loading import (
    end_ids,
    find_folder,
    find_library,
    find_model,
    library_for,
    weights_digest,
)
from driftline.decoding.models.targets import Target, ready, where_line
from driftline.decoding.options import MetricsOptions, Report
from driftline.decoding.pipeline import (
    Difference,
    Listeners,
    Progress,
    Session,
    ShapeWork,
    choose_executor,
    described,
    differences,
    differences_text,
    file_digest,
    generated,
    marked,
    reports,
    run_on_workers,
    run_unless_done,
    same_prompts,
    saved_settings,
)
from driftline.decoding.prompts import Padded
from driftline.decoding.scoring import RoundScores, score_round
from driftline.decoding.torchrun import join_job
from driftline.errors import AlreadyThere, BadFile, BadInput, DriftlineError
from driftline.runs.provenance import plain_json

if TYPE_CHECKING:
    from driftline.execution.jobs import Executor

OUTPUT_OPTION = "--output_dir"
FORMAT = "driftline-decoder-metrics"
LAST_METRIC = "prob_mean"
"""The metric whose file is written last: if it exists, all results exist."""
_OF_MODEL = ("model", "architecture", "library", "unfuse_weights", "extra", "weights")
"""Settings that identify the model, on any target."""


class MetricsResult(NamedTuple):
    """The result of one model and shape.

    Attributes:
        prefix: Prefix of its file names.
        folder: Folder of its files.
        skipped: Whether the results existed already.
        tokens: Number of counted tokens.
        rounds: Number of rounds.
        columns: The documented metrics and companions of all counted tokens, by name.
        first_other: Seed, prompt and position of the first token for which the candidate's choice
            differs; None if there is none, or it is not known.
        companions: Whether there are scores over the whole vocabulary.
    """

    prefix: str
    folder: Path
    skipped: bool = False
    tokens: int = 0
    rounds: int = 0
    columns: Mapping[str, np.ndarray[Any, np.dtype[Any]]] = MappingProxyType({})
    first_other: tuple[int, int, int] | None = None
    companions: bool = True


class SummaryFigure(NamedTuple):
    """One metric over all counted tokens."""

    name: str
    mean: float
    p99: float
    largest: float


def summary_figures(result: MetricsResult) -> list[SummaryFigure]:
    """The documented metrics, and total variation if it is known, in short."""
    names = [*TOKEN_CSV_METRICS, *(["total_variation"] if result.companions else [])]
    columns = [(name, result.columns[name]) for name in names]
    return [
        SummaryFigure(
            name, float(values.mean()), float(np.percentile(values, 99.0)), float(values.max())
        )
        for name, values in columns
    ]


def run_metrics(
    options: MetricsOptions,
    *,
    report: Report = print,
    session: Session | None = None,
    progress: Progress | None = None,
) -> MetricsResult:
    """Compute the metrics of one model and shape, or the missing part of them.

    Args:
        options: The options.
        report: Takes messages, line by line.
        session: Holds models that were loaded for another shape.
        progress: Called with (tokens done, tokens in total) of each generation.

    Raises:
        DriftlineError: It could not be done. Finished parts are kept and used next time.
    """
    return run_unless_done(MetricsTask(options, report, progress), session or Session())


class MetricsTask:
    """The metrics of one model and shape; see `pipeline.SavedTask`."""

    name = "metrics"

    def __init__(
        self, options: MetricsOptions, report: Report = print, progress: Progress | None = None
    ) -> None:
        options.check()
        if not options.skip_computation:
            find_folder(options.source)
        self.options = options
        self.job = join_job(options.distributed)
        self._report = reports(report, self.job)
        self._progress = progress
        self._folder = options.output_dir
        self._ends: tuple[int, ...] = ()
        self._parts: list[Path] = []

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that the scores depend on, as it is saved with them; computed once."""
        options = self.options
        settings = {
            "model": options.model,
            "architecture": options.architecture,
            "library": library_for(options.architecture, options.library),
            "unfuse_weights": options.unfuse_weights,
            "extra": plain_json(options.extra),
            "weights": weights_digest(options.source),
            "reference": str(options.reference),
            "candidate": str(options.candidate),
            # Partial sums of split matrices are added in another order.
            "ranks": self.job.size,
            "topk": options.topk,
            "batch_size": options.batch_size,
            "length": options.length,
            "max_new_tokens": options.new_tokens,
            "rounds": options.rounds,
        }
        if not options.skip_computation:  # else the saved logits name their prompts
            settings |= {"prompts": file_digest(options.prompts), "order": options.order}
        return settings

    def inputs(self) -> Mapping[str, Any]:
        # The number of rounds is left out: existing rounds are used if more are requested.
        return {name: value for name, value in self.settings.items() if name != "rounds"}

    def saved_inputs(self) -> Mapping[str, Any] | None:
        if not self.options.csv(LAST_METRIC).exists():
            return None
        return self._saved_settings or {}

    def is_complete(self) -> bool:
        saved = self._saved_settings
        # Without provenance, the metrics are from another program.
        return saved is None or saved.get("rounds") == self.options.rounds

    @functools.cached_property
    def _saved_settings(self) -> Mapping[str, Any] | None:
        path = self.options.provenance
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8")).get("settings", {})
        except (OSError, ValueError, AttributeError) as trouble:
            raise BadFile(f"{path} cannot be read: {trouble}") from None

    def refusal(self, changes: Sequence[Difference]) -> DriftlineError:
        return AlreadyThere(
            f"{self.options.csv(LAST_METRIC)} is there, made under other settings: "
            f"{differences_text(changes)}",
            hint="give another --output_dir, or --force to compute it again; with "
            "--skip_computation --force the saved logits are scored again",
        )

    def skipped(self) -> MetricsResult:
        prefix = self.options.prefix
        self._report(f"skipping metric generation as it has already been done: {prefix}")
        return MetricsResult(prefix, self.options.output_dir, skipped=True)

    @contextmanager
    def work_folder(self, session: Session) -> Generator[None]:
        options = self.options
        if not options.skip_computation:
            find_model(options.source, options.architecture)
        if not self.job.writes:
            yield
            return
        require_writable(options.output_dir, OUTPUT_OPTION)
        with resumable_work_folder(
            options.output_dir, self.name, options.prefix, OUTPUT_OPTION, fresh=options.force
        ) as folder:
            self._folder = folder
            self._delete_old_results()
            self._ends = end_ids(options.source, session.tokenizer(options))
            if options.skip_computation:
                self._require_saved()
            else:
                self._look_up(session)
            self._say_where()
            yield

    def _say_where(self) -> None:
        """Print the first line: which side runs on which target."""
        options = self.options
        if options.skip_computation:
            self._report("nothing is run: saved logits are scored")
            return
        self._report(where_line(options.reference, options.candidate))
        if options.compile_dynamic and not (options.reference.compile or options.candidate.compile):
            self._report("--compile_dynamic changes nothing: neither side is compiled")

    def _delete_old_results(self) -> None:
        """Delete the file that marks completion; with `force` also the saved logits."""
        options = self.options
        options.csv(LAST_METRIC).unlink(missing_ok=True)
        if options.force and not options.skip_computation:
            prefix = glob.escape(options.prefix)
            for side in (REFERENCE, CANDIDATE):
                for path in options.output_dir.glob(f"{prefix}.{side}_validation_info.*"):
                    if path.is_dir():
                        shutil.rmtree(path)

    def _look_up(self, session: Session) -> None:
        """Check that everything needed is available, before hours are spent."""
        options = self.options
        session.prompts(options)
        folders = [
            options.out(side, seed)
            for side in (REFERENCE, CANDIDATE)
            for seed in range(options.rounds)
        ]
        if not all(folder.is_dir() for folder in folders):
            for target in (options.reference, options.candidate):
                ready(target)
            find_library(
                options.architecture, options.library, options.reference, options.candidate
            )

    def _require_saved(self) -> None:
        """Refuse to score saved logits unless those of every round are there."""
        for seed in range(self.options.rounds):
            for side in (REFERENCE, CANDIDATE):
                folder = self.options.out(side, seed)
                if not folder.is_dir():
                    raise BadInput(
                        f"there is nothing to score: {folder} is missing",
                        hint="run it without --skip_computation first",
                    )

    def run_round(self, session: Session, seed: int) -> bool:
        if not self.job.writes:
            self._assist(session)
            return True
        options, part = self.options, self._folder / f"round-{seed}.parquet"
        # In the order of the rounds, whichever of them were scored before.
        self._parts.append(part)
        saved = token_table.part_settings(part)
        folders = [options.out(side, seed) for side in (REFERENCE, CANDIDATE)]
        reusable = saved and not differences(saved, self.settings)
        if reusable and all(folder.is_dir() for folder in folders):
            self._report(f"round {seed}: scored before it was interrupted")
            self._announce(None)
            return True
        reference, candidate = self._sides(session, seed)
        scores = self._score(session, seed, reference, candidate)
        if scores.trouble:
            # No part is written: the next run would take the round as done.
            raise DriftlineError(
                f"{scores.trouble}; no baseline can be made of such logits",
                hint=f"the logits of this round are in {folders[0].parent}",
            )
        token_table.write_part(part, scores.rows, self.settings)
        return True

    def _announce(self, batch: dict[str, Any] | None) -> None:
        """Send the candidate's batch of this round to the other ranks; None: nothing to compute."""
        self.job.share(batch or {})

    def _assist(self, session: Session) -> None:
        """The round of ranks other than 0: compute their part of the candidate, if needed."""
        batch: dict[str, Any] = self.job.share(None)
        if batch:
            model = session.model(self.options, "candidate", self.job)
            generated(
                model,
                batch["prompts"],
                self.options.new_tokens,
                forced=batch["tokens"],
                keep_logits=False,
            )

    def _score(
        self, session: Session, seed: int, reference: Outputs, candidate: Outputs
    ) -> RoundScores:
        options = self.options
        names: list[str] = []
        if not options.skip_computation:
            names = [prompt.name for prompt in session.prompts(options, seed)]
        return score_round(
            reference,
            candidate,
            seed=seed,
            names=names,
            ends=self._ends,
            topk=options.topk,
            new_tokens=options.new_tokens,
        )

    def _sides(self, session: Session, seed: int) -> tuple[Outputs, Outputs]:
        """Both sides of a round, from saved outputs or computed."""
        options = self.options
        if options.skip_computation:
            self._announce(None)
            return self._read(REFERENCE, seed), self._read(CANDIDATE, seed)
        batch = session.batch(options, seed)
        reference = self._reused(REFERENCE, seed, batch)
        candidate = self._reused(CANDIDATE, seed, batch)
        if reference is not None and reference.logits and candidate is not None:
            self._announce(None)
            return reference, candidate
        if reference is None or not reference.logits:
            reference = self._reference(session, seed, batch)
        return reference, self._candidate(session, seed, batch, reference)

    def _reference(self, session: Session, seed: int, batch: Padded) -> Outputs:
        options = self.options
        self._report(f"round {seed}: reference ({options.reference})")
        model = session.model(options, "reference", self.job)
        reference = outputs_of(generated(model, batch, options.new_tokens, progress=self._progress))
        if options.keep == "full":  # the largest are chosen when both sides are there
            self._save(REFERENCE, seed, reference)
        return reference

    def _candidate(self, session: Session, seed: int, batch: Padded, reference: Outputs) -> Outputs:
        import torch

        options = self.options
        self._report(f"round {seed}: candidate ({options.candidate}), along the reference's tokens")
        tokens = torch.stack(reference.tokens)
        # Before the model is loaded: all ranks must load their part of it at the same time.
        self._announce({"prompts": batch, "tokens": tokens})
        model = session.model(options, "candidate", self.job)
        candidate = outputs_of(
            generated(model, batch, options.new_tokens, forced=tokens, progress=self._progress)
        )
        if options.keep == "topk":
            self._save_largest(seed, reference, candidate)
        else:
            self._save(CANDIDATE, seed, candidate)
        return candidate

    def _reused(self, side: Side, seed: int, batch: Padded) -> Outputs | None:
        """The outputs of a side that an earlier run saved; None if there are none.

        Raises:
            AlreadyThere: They belong to other prompts or settings.
        """
        folder = self.options.out(side, seed)
        if not folder.is_dir():
            return None
        saved = self._read(side, seed)
        changes = differences(saved_settings(saved), self._side_settings(side, seed))
        texts = [differences_text([change]) for change in changes]
        if not same_prompts(saved, batch):
            texts.append("its prompts are others")
        if texts:
            raise AlreadyThere(
                f"{folder} is there, but {'; '.join(texts[:3])}",
                hint="give another --output_dir, or --force to compute it again",
            )
        self._report(f"found the logits at {folder}, reusing")
        return saved

    def _read(self, side: Side, seed: int) -> Outputs:
        folder = self.options.out(side, seed)
        saved = outputs.read_out(folder)
        # A validation saves the tokens of its free run in the same form.
        if not saved.logits and not saved.top:
            raise BadFile(
                f"{folder} holds tokens only, no logits",
                hint="compute them again: --force",
            )
        return saved

    def _side_settings(self, side: Side, seed: int) -> dict[str, Any]:
        """What the logits of one side and round depend on, next to the prompts themselves."""
        # The reference is never split over ranks.
        trusted = side == REFERENCE
        target = self.options.reference if trusted else self.options.candidate
        return {name: self.settings[name] for name in _OF_MODEL} | {
            "target": str(target),
            "ranks": 1 if trusted else self.settings["ranks"],
            "seed": seed,
            "max_new_tokens": self.options.new_tokens,
        }

    def _save(self, side: Side, seed: int, saved: Outputs) -> None:
        outputs.write_out(
            self.options.out(side, seed),
            saved.tokens,
            saved.logits if not saved.top else None,
            top=saved.top,
            provenance=described(FORMAT, self._side_settings(side, seed)),
            work_folder=self._folder,
        )

    def _save_largest(self, seed: int, reference: Outputs, candidate: Outputs) -> None:
        count = self.options.topk
        trusted = [outputs.shorten(logits, count) for logits in reference.logits]
        compared = [
            outputs.shorten(logits, count, reference=top)
            for logits, top in zip(candidate.logits, trusted, strict=True)
        ]
        self._save(REFERENCE, seed, reference._replace(top=trusted))
        self._save(CANDIDATE, seed, candidate._replace(top=compared))

    def finish(self, session: Session) -> MetricsResult:
        """Write the documented files from the parts; the one that marks completion comes last."""
        del session
        options = self.options
        if not self.job.writes:
            return MetricsResult(options.prefix, options.output_dir)
        facts = described(FORMAT, self.settings)
        token_table.join_parts(options.table, self._parts, facts)
        places = ("seed", "prompt", "position")
        # Read back from the table, so that csv files and table cannot differ.
        columns = token_table.read_columns(
            options.table, [*TOKEN_CSV_METRICS, "total_variation", "top1_agree", *places]
        )
        tokens = len(columns["seed"])
        # An empty table would become thresholds of nothing.
        if not tokens:
            options.table.unlink()
            raise BadInput(
                f"no token was kept: all {options.batch_size * options.rounds} texts end at once "
                f"({ended_by(self._ends)})",
                hint="other prompts, or another sequence length, may give longer texts",
            )
        facts |= {"tokens": tokens, "eos_ids": list(self._ends), "files": self._file_names()}
        outputs.write_json(options.provenance, facts)
        for metric in sorted(TOKEN_CSV_METRICS, key=lambda name: name == LAST_METRIC):
            outputs.write_csv(options.csv(metric), metric, columns[metric].tolist())
        # NaN is not 0: a token whose largest logit is unknown is no disagreement.
        other_tokens = np.flatnonzero(columns["top1_agree"] == 0)
        first: tuple[int, int, int] | None = None
        if len(other_tokens):
            seed, prompt, position = (int(columns[name][other_tokens[0]]) for name in places)
            first = (seed, prompt, position)
        return MetricsResult(
            options.prefix,
            options.output_dir,
            tokens=tokens,
            rounds=options.rounds,
            columns=columns,
            first_other=first,
            companions=not bool(np.isnan(columns["total_variation"]).any()),
        )

    def _file_names(self) -> list[str]:
        options = self.options
        return [
            *(csv_name(options.prefix, metric) for metric in TOKEN_CSV_METRICS),
            options.table.name,
            *(
                options.out(side, seed).name
                for seed in range(options.rounds)
                for side in (REFERENCE, CANDIDATE)
            ),
        ]


WORK = ShapeWork(run_metrics, (MetricsOptions, MetricsResult, Target))
"""For workers that are given shapes of this command."""


def run_shapes(
    shapes: Sequence[MetricsOptions],
    *,
    jobs: int | None = None,
    executor: str | Executor | None = None,
    report: Report = print,
    ready: Callable[[MetricsOptions, MetricsResult], None] | None = None,
) -> list[MetricsResult]:
    """`run_metrics` for several shapes, some at a time.

    Args:
        shapes: Options of each shape.
        jobs: Worker processes.
        executor: `ray` or `ray://HOST:PORT`: workers are those of a Ray cluster.
        report: Takes messages, line by line, each with the shape it is about.
        ready: Takes each result in the order of the shapes, as soon as those before it are there.

    Raises:
        DriftlineError: One could not be done. What was finished before is kept.
    """
    workers = choose_executor(shapes, jobs, executor)

    def finished(index: int, result: MetricsResult) -> None:
        if ready is not None:
            ready(shapes[index], result)

    if workers is None:
        session = Session()
        results: list[MetricsResult] = []
        for index, options in enumerate(shapes):
            results.append(run_metrics(options, report=report, session=session))
            finished(index, results[-1])
        return results
    # Asked once here, so that not every worker reports the same folder.
    for folder in dict.fromkeys(options.output_dir for options in shapes):
        require_writable(folder, OUTPUT_OPTION)

    def say(index: int, line: str) -> None:
        report(f"{shapes[index].prefix}: {line}")

    listeners = Listeners(finished, say)
    with marked(shapes[0].output_dir) as mark:
        return run_on_workers("metrics", shapes, workers, listeners, folders=[mark])
