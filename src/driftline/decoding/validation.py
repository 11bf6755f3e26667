"""Is a decoder on the device the decoder it was? First by its tokens, then by its probabilities.

Level 0: both sides generate freely, and every token is the same. Level 1: round by round the
candidate is forced along the reference's tokens, and too few tokens differ too much. The messages
are the documented ones. Of a round only counts and scores are kept, unless it is to be saved.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from driftline.decoding import out_files
from driftline.decoding.decoder import DecoderModel, ended_by
from driftline.decoding.desk import require_writable
from driftline.decoding.failing import METRICS, FirstFailure, PromptCount, Rate, Tally
from driftline.decoding.few_threads import few_threads
from driftline.decoding.generation import Validation, generate
from driftline.decoding.job import Job, join_job
from driftline.decoding.models import end_ids, find_model, load_model, load_tokenizer, model_layers
from driftline.decoding.out_files import REFERENCE, Saved
from driftline.decoding.paged import told_of
from driftline.decoding.prompts import Padded, Prompt, PromptPool, pad_left
from driftline.decoding.round_scores import no_numbers, score_round
from driftline.decoding.saved_reference import require_fitting
from driftline.decoding.score_table import Rows
from driftline.decoding.targets import ready
from driftline.decoding.validate_ask import ValidateAsk
from driftline.decoding.weights import weights_of
from driftline.errors import BadInput, DriftlineError

if TYPE_CHECKING:
    import torch

DEVICE: out_files.Side = "aiu"
"""The documented label of the device's outputs, whatever the device is."""
TOPK = 20
WARM_UP = 2
"""Tokens that have the candidate compiled: the first call, and one with a cache."""
Say = Callable[[str], None]
_UNFIT = "such logits cannot be validated"
_WHERE = "driftline layer-metrics shows in which layer they begin"


class Verdict(NamedTuple):
    """What a validation found.

    Attributes:
        ask: What was asked.
        tokens_equal: Level 0: every token of the free runs is the same.
        first_other: Prompt and position of the first token that is not; None if all are.
        rates: Level 1, in the order in which they are judged; empty if it was not run.
        prompts: Failing tokens of every prompt of every round.
        first: The first token that fails a check.
        agreed: Tokens where both sides' largest logit is at the same place.
        variation: The greatest total variation of a token, over the whole vocabulary.
        seconds: How long it took.
        rows: The scores of every kept token of level 1, prompt by prompt.
    """

    ask: ValidateAsk
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
        """The documented words for the first check that fails; empty if none does."""
        for rate in self.rates:
            if not rate.passed:
                return f"failure rate for {rate.called} was too high: {rate.rate}"
        return ""


class Subjects:
    """Tokenizer, prompts and both models of an ask, loaded when first needed, kept for others."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, Any]] = {}

    def tokenizer(self, ask: ValidateAsk) -> Any:
        where = ask.tokenizer or ask.source
        return self._once("tokenizer", where, lambda: load_tokenizer(where))

    def pool(self, ask: ValidateAsk) -> PromptPool:
        how = (ask.prompts, ask.tokenizer or ask.source)
        return self._once("prompts", how, lambda: PromptPool(ask.prompts, self.tokenizer(ask)))

    def candidate(self, ask: ValidateAsk, job: Job) -> DecoderModel:
        how = (ask.source, ask.candidate, ask.micro_layers, ask.random_weights, ask.library)
        return self._once(
            "candidate",
            how,
            lambda: load_side(ask, candidate=True, distributed=ask.split(job.size)),
        )

    def reference(self, ask: ValidateAsk, job: Job) -> DecoderModel:
        how = (ask.source, ask.reference, ask.micro_layers, ask.random_weights, ask.library)
        weights = (*how, ask.candidate) if ask.micro else how

        def load() -> DecoderModel:
            model = load_side(ask, candidate=False, distributed=False)
            if ask.micro and not ask.split(job.size):
                # The same weights, as the candidate has rounded them: its arithmetic is in
                # question, not what was lost when a random number was stored.
                theirs = self.candidate(ask, job).module.state_dict()
                model.module.load_state_dict(theirs)
            return model

        return self._once("reference", weights, load)

    def _once(self, name: str, how: Any, make: Callable[[], Any]) -> Any:
        if name not in self._kept or self._kept[name][0] != how:
            self._kept.pop(name, None)  # before the next is loaded: both may not fit
            self._kept[name] = how, make()
        return self._kept[name][1]


def load_side(ask: ValidateAsk, *, candidate: bool, distributed: bool = False) -> DecoderModel:
    """One of the two models, newly loaded."""
    layers = None
    if ask.micro and not ask.trained:
        layers = min(ask.micro_layers, model_layers(ask.source))
    return load_model(
        ask.source,
        ask.candidate if candidate else ask.reference,
        unfuse_weights=True,
        micro_layers=layers,
        random_weights=ask.random_weights,
        library=ask.library,
        distributed=distributed,
    )


def validate(ask: ValidateAsk, *, say: Say = print, subjects: Subjects | None = None) -> Verdict:
    """Validate one model and shape.

    Args:
        ask: What is wanted.
        say: Where messages go, line by line.
        subjects: Models loaded already for another shape.

    Raises:
        DriftlineError: It could not be done; saved outputs stay. Numbers that differ are no
            exception: they are a verdict.
    """
    job = join_job(ask.distributed)

    def told(line: str) -> None:
        if job.writes:
            say(f"[{job.rank:2d}/{job.size:2d}]: {line}")

    return _Work(ask, subjects or Subjects(), job, told).run()


class _Work:
    def __init__(self, ask: ValidateAsk, subjects: Subjects, job: Job, say: Say) -> None:
        self.ask = ask
        self.subjects = subjects
        self.job = job
        self.say = say
        self.tally = Tally({"mean_diff": ask.limits.mean_diff, "ce": ask.limits.ce})

    def run(self) -> Verdict:
        ask, start = self.ask, time.monotonic()
        self.say(
            f"testing model={ask.model}, batch_size={ask.batch_size}, seq_length={ask.length}, "
            f"max_new_tokens={ask.new_tokens}, micro_model={ask.micro}"
        )
        for line in told_of(ask.candidate.attention, ask.reference.attention):
            self.say(line)
        self._look_ahead()
        drawn = "randomly initialized" if ask.random_weights else "trained"
        self.say(f"using {drawn} model")
        if self.job.size > 1 and not ask.split(self.job.size):
            self.say("drawn weights are not split: every rank runs the whole candidate")
        batch = self._batch(0)
        self._warm_up(batch)
        reference = self._reference(0, batch)
        self.say(
            "cpu validation info extracted for validation level 0 and validation level 1 (iter=0)"
        )
        other = self._level_0(batch, reference)
        verdict = Verdict(ask, other is None, other)
        if other is None and not ask.force_level_1:
            self.say("passed validation level 0")
            return verdict._replace(seconds=time.monotonic() - start)
        state = "passed" if other is None else "failed"
        self.say(f"{state} validation level 0, testing validation level 1")
        verdict = self._level_1(verdict, batch, reference)
        return verdict._replace(seconds=time.monotonic() - start)

    def _look_ahead(self) -> None:
        """Find out what is missing before anything is computed."""
        ask = self.ask
        find_model(ask.source)
        for target in (ask.reference, ask.candidate):
            ready(target)
        place = ask.out(REFERENCE, 0)
        if ask.save and place is not None and self.job.writes:
            require_writable(place.parent, "--validation_info_dir")
        self._prompts(0)

    def _prompts(self, seed: int) -> list[Prompt]:
        ask = self.ask
        return self.subjects.pool(ask).sample(ask.batch_size, ask.length, seed=seed)

    def _batch(self, seed: int) -> Padded:
        return pad_left(self._prompts(seed), self.ask.length)

    def _warm_up(self, batch: Padded) -> None:
        self.say("AIU warmup")
        start = time.monotonic()
        model = self.subjects.candidate(self.ask, self.job)
        with few_threads(model):
            generate(model, batch, min(WARM_UP, self.ask.new_tokens), keep_logits=False)
        self.say(f"PT compile complete, took {time.monotonic() - start:.3f}s")

    def _reference(self, seed: int, batch: Padded) -> Saved:
        """The reference of a round; ranks other than 0 are told its tokens."""
        if not self.job.writes:
            return Saved(self.job.share(None), [], [], {})
        saved = self._own_reference(seed, batch)
        self.job.share(list(saved.tokens))
        return saved

    def _own_reference(self, seed: int, batch: Padded) -> Saved:
        """What was saved before, or is computed now."""
        place = self.ask.out(REFERENCE, seed)
        if place is not None and place.is_dir():
            self.say(f"cpu validation info found for seed={seed} -- loading it")
            saved = out_files.read_out(place)
            require_fitting(saved, batch, self.ask.new_tokens, self.ask.source, str(place))
            return saved
        saved = _saved(self._generated(self.subjects.reference(self.ask, self.job), batch, "cpu"))
        self._save(REFERENCE, seed, saved)
        return saved

    def _generated(self, model: DecoderModel, batch: Padded, what: str, **words: Any) -> Validation:
        start = time.monotonic()
        with few_threads(model):
            made = generate(model, batch, self.ask.new_tokens, **words)
        took = time.monotonic() - start
        if self.ask.timing == "e2e":
            self.say(f"{what} generation took {took:.3f}s")
        elif self.ask.timing:
            self.say(f"{what} generation took {took / self.ask.new_tokens:.4f}s per token")
        return made

    def _save(self, side: out_files.Side, seed: int, saved: Saved) -> None:
        place = self.ask.out(side, seed)
        if not self.ask.save or place is None or not self.job.writes:
            return
        self.say(f"saving {side} validation for - iter={seed}")
        self.say(f"saving validation info to {place}")
        target = self.ask.reference if side == REFERENCE else self.ask.candidate
        told = {
            "format": "driftline-decoder-validation",
            "settings": {
                "model": self.ask.model,
                "target": str(target),
                "seed": seed,
                "max_new_tokens": self.ask.new_tokens,
                "micro_layers": self.ask.micro_layers,
                "random_weights": self.ask.random_weights,
                "weights": weights_of(self.ask.source),
            },
        }
        try:
            out_files.write_out(place, saved.tokens, saved.logits or None, provenance=told)
        except OSError as trouble:
            raise DriftlineError(
                f"{place} cannot be written: {trouble.strerror}",
                hint="give another folder with --validation_info_dir",
            ) from None

    def _level_0(self, batch: Padded, reference: Saved) -> tuple[int, int] | None:
        """Prompt and position of the first generated token that differs."""
        model = self.subjects.candidate(self.ask, self.job)
        made = self._generated(model, batch, "aiu", keep_logits=False)
        self._save(DEVICE, 0, Saved(list(made.tokens), [], [], {}))
        self.say("aiu validation info extracted for validation level 0")
        return self.job.share(self._first_other(made, reference) if self.job.writes else None)

    def _first_other(self, made: Validation, reference: Saved) -> tuple[int, int] | None:
        width = made.prompt_length
        for prompt, tokens in enumerate(reference.tokens):
            differ = (tokens != made.tokens[prompt]).nonzero()
            if len(differ):
                return prompt, int(differ[0]) - width
        # A NaN is the largest of its row on every device: such sides agree on their tokens.
        for prompt, logits in enumerate(reference.logits):
            _require_numbers(logits.isfinite().logical_not_().sum(dim=-1), prompt, "reference")
            _require_numbers(made.nonfinite[prompt], prompt, "candidate")
        return None

    def _level_1(self, verdict: Verdict, batch: Padded, reference: Saved) -> Verdict:
        ask = self.ask
        ends = end_ids(ask.source, self.subjects.tokenizer(ask))
        for seed in range(ask.rounds):
            if seed:
                batch = self._batch(seed)
                reference = self._reference(seed, batch)
                self.say(f"cpu validation info extracted for validation level 1 - iter={seed}")
            self._round(seed, batch, reference, ends)
        return self.job.share(self._judged(verdict, ends) if self.job.writes else None)

    def _judged(self, verdict: Verdict, ends: tuple[int, ...]) -> Verdict:
        ask = self.ask
        tally, kept = self.tally, self.tally.kept
        if not kept:
            raise BadInput(
                f"no token was kept: all {ask.batch_size * ask.rounds} texts end at once "
                f"({ended_by(ends)})",
                hint="other prompts, or another sequence length, may give longer texts",
            )
        rates = tuple(
            Rate(
                check,
                tally.failing(check),
                kept,
                tally.limits[check],
                ask.failure_threshold,
                check in ask.skip,
            )
            for check in METRICS
        )
        for rate in rates:
            self.say(f"{rate.called} failure rate: {rate.rate}")
        found = verdict._replace(
            rates=rates,
            prompts=tuple(tally.prompts),
            first=tally.first,
            agreed=tally.agreed,
            variation=tally.variation,
            rows=tuple(tally.rows),
        )
        if found.passed:
            self.say("passed validation level 1")
        return found

    def _round(self, seed: int, batch: Padded, reference: Saved, ends: tuple[int, ...]) -> None:
        ask = self.ask
        model = self.subjects.candidate(ask, self.job)
        made = self._generated(model, batch, "aiu", forced=reference.tokens)
        candidate = _saved(made)
        self._save(DEVICE, seed, candidate)
        self.say(f"aiu validation info extracted for validation level 1 - iter={seed}")
        if not self.job.writes:
            return
        scored = score_round(
            reference,
            candidate,
            seed=seed,
            names=[prompt.name for prompt in self._prompts(seed)],
            ends=ends,
            topk=TOPK,
            new_tokens=ask.new_tokens,
        )
        if scored.trouble:
            raise DriftlineError(f"{scored.trouble}; {_UNFIT}", hint=_WHERE)
        for rows in scored.rows:
            self.tally.add(rows, reference, candidate, ask.new_tokens)


def _saved(made: Validation) -> Saved:
    assert made.logits is not None
    return Saved(list(made.tokens), list(made.logits), [], {})


def _require_numbers(nonfinite: torch.Tensor, prompt: int, side: str) -> None:
    """Refuse logits that are no numbers, given how many there are at each token of round 0.

    Raises:
        DriftlineError: There are some.
    """
    if bool(nonfinite.any()):
        raise DriftlineError(
            f"round 0, prompt {prompt}: {no_numbers(nonfinite.numpy(), side)}; {_UNFIT}",
            hint=_WHERE,
        )
