"""`driftline metrics`: generate on both targets, score every token, keep what can be used again.

Round by round (a seed each): what a round has saved is used again after an interruption, a round
never needs the memory of another, and nothing half-written has a name that counts.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driftline.decoding import metrics_ask, out_files, score_table, top_logits
from driftline.decoding.decoder import DecoderModel, ended_by
from driftline.decoding.desk import kept_desk, require_writable
from driftline.decoding.generation import generate
from driftline.decoding.job import Job, join_job
from driftline.decoding.metrics_ask import MetricsAsk
from driftline.decoding.metrics_outcome import Outcome
from driftline.decoding.models import (
    end_ids,
    find_folder,
    find_library,
    find_model,
    load_model,
    load_tokenizer,
)
from driftline.decoding.out_files import CANDIDATE, METRICS, REFERENCE, Saved
from driftline.decoding.prompts import Prompt, PromptPool, pad_left
from driftline.decoding.round_scores import Scored, score_round
from driftline.decoding.targets import ready
from driftline.errors import AlreadyThere, BadFile, BadInput, DriftlineError

if TYPE_CHECKING:
    import torch

Watch = Callable[[int, int], None]
"""Takes how many tokens of how many are generated."""
OPTION = "--output_dir"
Say = Callable[[str], None]
"""Takes one line for the user."""


def run_metrics(
    ask: MetricsAsk, *, say: Say = print, models: Models | None = None, watch: Watch | None = None
) -> Outcome:
    """Compute the metrics of one model and shape, or what is missing of them.

    Args:
        ask: What is wanted.
        say: Where messages go, line by line.
        models: Loaded already for another shape.
        watch: Told how far a generation is.

    Raises:
        DriftlineError: It could not be done. What was finished before is kept, and used next time.
    """
    metrics_ask.check(ask)
    if not ask.skip_computation:
        find_folder(ask.source)
    own = models or Models(ask)
    job = own.job
    quiet = say if job.writes else _nothing
    if job.share(metrics_ask.is_done(ask) if job.writes else None):
        quiet(f"skipping metric generation as it has already been done: {ask.prefix}")
        return Outcome(ask.prefix, ask.output_dir, skipped=True)
    if not ask.skip_computation:
        find_model(ask.source, ask.architecture)
    if not job.writes:
        _help(ask, own, job)
        return Outcome(ask.prefix, ask.output_dir)
    require_writable(ask.output_dir, OPTION)
    with kept_desk(ask.output_dir, "metrics", ask.prefix, OPTION, fresh=ask.force) as desk:
        metrics_ask.forget(ask)
        work = _Work(ask, own, job, desk, quiet, watch)
        for seed in range(ask.rounds):
            work.round(seed)
        job.share(_NO_MORE)
        return work.finish()


class Models:
    """Tokenizer, prompts and models, each loaded when first needed and kept for further shapes."""

    def __init__(self, ask: MetricsAsk) -> None:
        self.ask = ask
        self.job = join_job(ask.distributed)
        self._tokenizer: Any = None
        self._pool: PromptPool | None = None
        self._models: dict[str, DecoderModel] = {}

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.ask.tokenizer or self.ask.source)
        return self._tokenizer

    @property
    def pool(self) -> PromptPool:
        if self._pool is None:
            if self.ask.prompts is None:
                raise BadInput(
                    "no prompt file is named",
                    hint="give --sharegpt_path: ShareGPT JSON, or a text file with a prompt a line",
                )
            self._pool = PromptPool(self.ask.prompts, self.tokenizer)
        return self._pool

    def model(self, ask: MetricsAsk, side: out_files.Side) -> DecoderModel:
        """The side's model; models of both sides are kept, of older targets they are not."""
        target = ask.reference if side == REFERENCE else ask.candidate
        known = self._models.get(side)
        if known is None or known.target != target:
            self._models.pop(side, None)
            known = self._models[side] = load_model(
                ask.model_path,
                target,
                architecture=ask.architecture,
                variant=ask.variant,
                unfuse_weights=ask.unfuse_weights,
                library=ask.library,
                distributed=self.job.size > 1 and side == CANDIDATE,
                extra=ask.extra,
            )
        return known


_NO_MORE: dict[str, Any] = {}
"""Told to the other ranks instead of a batch, when there is none left."""


def _help(ask: MetricsAsk, models: Models, job: Job) -> None:
    """What ranks other than 0 do: their share of the candidate, as often as they are asked."""
    while batch := job.share(_NO_MORE if job.writes else None):
        generate(
            models.model(ask, CANDIDATE),
            batch["prompts"],
            ask.new_tokens,
            forced=batch["tokens"],
            keep_logits=False,
        )


def _nothing(line: str) -> None:
    del line


class _Work:
    """The rounds of one model and shape, on the rank that writes."""

    def __init__(
        self,
        ask: MetricsAsk,
        models: Models,
        job: Job,
        desk: Path,
        say: Say,
        watch: Watch | None,
    ) -> None:
        self.ask = ask
        self.models = models
        self.job = job
        self.desk = desk
        self.say = say
        self.watch = watch
        self.settings = metrics_ask.settings(ask)
        self.ends = end_ids(ask.source, models.tokenizer)
        self.parts: list[Path] = []
        self.outs: list[str] = []
        if not ask.skip_computation:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Find out what is missing before hours are spent on what is there."""
        ask = self.ask
        self._prompts(0)
        outs = [
            ask.out(side, seed) for side in (REFERENCE, CANDIDATE) for seed in range(ask.rounds)
        ]
        if not all(out.is_dir() for out in outs):
            for target in (ask.reference, ask.candidate):
                ready(target)
            find_library(ask.architecture, ask.library, ask.reference, ask.candidate)

    def round(self, seed: int) -> None:
        """One round: its part is there afterwards."""
        ask, part = self.ask, self.desk / f"round-{seed}.parquet"
        self.parts.append(part)
        outs = [ask.out(REFERENCE, seed), ask.out(CANDIDATE, seed)]
        self.outs += [out.name for out in outs]
        kept = score_table.part_settings(part)
        if (
            kept
            and not metrics_ask.differences(kept, self.settings)
            and all(out.is_dir() for out in outs)
        ):
            self.say(f"round {seed}: scored before it was interrupted")
            return
        reference, candidate = self._both(seed)
        scored = self._score(seed, reference, candidate)
        if scored.trouble:  # not scored, then: or the next run would take the round as done
            raise DriftlineError(
                f"{scored.trouble}; no baseline can be made of such logits",
                hint=f"the logits of this round are in {outs[0].parent}",
            )
        score_table.write_part(part, scored.rows, self.settings)

    def _score(self, seed: int, reference: Saved, candidate: Saved) -> Scored:
        names = [] if self.ask.skip_computation else [p.name for p in self._prompts(seed)]
        return score_round(
            reference,
            candidate,
            seed=seed,
            names=names,
            ends=self.ends,
            topk=self.ask.topk,
            new_tokens=self.ask.new_tokens,
        )

    def _prompts(self, seed: int) -> list[Prompt]:
        ask = self.ask
        return self.models.pool.sample(ask.batch_size, ask.length, seed=seed, order=ask.order)

    def _both(self, seed: int) -> tuple[Saved, Saved]:
        """Both sides of a round, saved before or computed now."""
        ask = self.ask
        places = {side: ask.out(side, seed) for side in (REFERENCE, CANDIDATE)}
        if ask.skip_computation:
            missing = [str(place) for place in places.values() if not place.is_dir()]
            if missing:
                raise BadInput(
                    f"there is nothing to score: {missing[0]} is missing",
                    hint="run it without --skip_computation first",
                )
            return self._read(places[REFERENCE]), self._read(places[CANDIDATE])
        batch = pad_left(self._prompts(seed), ask.length)
        reference = self._saved(REFERENCE, seed, batch.ids)
        candidate = self._saved(CANDIDATE, seed, batch.ids)
        if reference is not None and reference.logits and candidate is not None:
            return reference, candidate
        if reference is None or not reference.logits:
            self.say(f"round {seed}: reference ({ask.reference})")
            model = self.models.model(ask, REFERENCE)
            made = generate(model, batch, ask.new_tokens, progress=self.watch)
            assert made.logits is not None
            reference = Saved(list(made.tokens), list(made.logits), [], {})
            if ask.keep == "full":
                self._save(REFERENCE, seed, reference)
        self.say(f"round {seed}: candidate ({ask.candidate}), along the reference's tokens")
        tokens = _stacked(reference.tokens)
        self.job.share({"prompts": batch, "tokens": tokens})  # all ranks load it at once
        model = self.models.model(ask, CANDIDATE)
        forced = generate(model, batch, ask.new_tokens, forced=tokens, progress=self.watch)
        assert forced.logits is not None
        candidate = Saved(list(forced.tokens), list(forced.logits), [], {})
        if ask.keep == "topk":
            self._save_top(seed, reference, candidate)
        else:
            self._save(CANDIDATE, seed, candidate)
        return reference, candidate

    def _saved(self, side: out_files.Side, seed: int, ids: torch.Tensor) -> Saved | None:
        """A side that an earlier run saved; None if there is none.

        Raises:
            AlreadyThere: It is of other prompts or settings.
        """
        place = self.ask.out(side, seed)
        if not place.is_dir():
            return None
        saved = self._read(place)
        wanted = metrics_ask.side_settings(self.ask, side, seed)
        changed = metrics_ask.differences(saved.provenance.get("settings", {}), wanted)
        prompts = [tokens[: ids.shape[1]] for tokens in saved.tokens]
        if len(prompts) != len(ids) or any(
            len(mine) != len(theirs) or not bool((mine == theirs).all())
            for mine, theirs in zip(prompts, ids, strict=False)
        ):
            changed.append("its prompts are others")
        if changed:
            raise AlreadyThere(
                f"{place} is there, but {'; '.join(changed[:3])}",
                hint="give another --output_dir, or --force to compute it again",
            )
        self.say(f"found the logits at {place}, reusing")
        return saved

    def _read(self, place: Path) -> Saved:
        saved = out_files.read_out(place)
        if not saved.logits and not saved.top:
            raise BadFile(f"{place} holds tokens only, no logits")
        return saved

    def _save(self, side: out_files.Side, seed: int, saved: Saved) -> None:
        place = self.ask.out(side, seed)
        content = metrics_ask.side_settings(self.ask, side, seed)
        out_files.write_out(
            place,
            saved.tokens,
            saved.logits if not saved.top else None,
            top=saved.top,
            provenance=metrics_ask.described(self.ask, content),
            desk=self.desk,
        )

    def _save_top(self, seed: int, reference: Saved, candidate: Saved) -> None:
        count = self.ask.topk
        tops = [top_logits.shorten(logits, count) for logits in reference.logits]
        theirs = [
            top_logits.shorten(logits, count, reference=top)
            for logits, top in zip(candidate.logits, tops, strict=True)
        ]
        self._save(REFERENCE, seed, reference._replace(top=tops))
        self._save(CANDIDATE, seed, candidate._replace(top=theirs))

    def finish(self) -> Outcome:
        """The documented files, from the parts; the one that says that all is done comes last."""
        ask = self.ask
        told = metrics_ask.described(ask, self.settings)
        score_table.join_parts(ask.table, self.parts, told)
        names = [*METRICS, "total_variation", "top1_agree", "seed", "prompt", "position"]
        columns = score_table.read_columns(ask.table, names)
        tokens = len(columns["seed"])
        if not tokens:
            ask.table.unlink()
            raise BadInput(
                f"no token was kept: all {ask.batch_size * ask.rounds} texts end at once "
                f"({ended_by(self.ends)})",
                hint="other prompts, or another sequence length, may give longer texts",
            )
        files = [out_files.csv_name(ask.prefix, metric) for metric in METRICS]
        told |= {"tokens": tokens, "eos_ids": list(self.ends)}
        told["files"] = [*files, ask.table.name, *self.outs]
        out_files.write_json(ask.sidecar, told)
        for metric in sorted(METRICS, key=lambda name: name == metrics_ask.DONE):
            out_files.write_csv(ask.csv(metric), metric, columns[metric].tolist())
        others = np.flatnonzero(columns["top1_agree"] == 0)
        first: tuple[int, int, int] | None = None
        if len(others):
            seed, prompt, position = (
                int(columns[name][others[0]]) for name in ("seed", "prompt", "position")
            )
            first = (seed, prompt, position)
        return Outcome(
            ask.prefix,
            ask.output_dir,
            tokens=tokens,
            rounds=ask.rounds,
            columns=columns,
            first_other=first,
            companions=not bool(np.isnan(columns["total_variation"]).any()),
        )


def _stacked(tokens: list[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.stack(tokens)
