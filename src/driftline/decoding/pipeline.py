"""One pipeline for `metrics`, `layer-metrics` and `validate`: what they share from start to end.

A `DecoderTask` says what its result depends on, runs rounds and finishes; `run_task` opens its work
folder and runs the rounds, `run_unless_done` only where the result does not exist already. One rule
(`differences`) decides what may be used again. A `Session` keeps loaded models from one shape to
the next; `run_on_workers` distributes shapes over processes. What a round computes and which files
it writes is known to the tasks alone.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, cast

from driftline.decoding.files.outputs import Outputs
from driftline.decoding.generation import Validation, generate
from driftline.decoding.models.compilation import compile_parts, suitable_threads
from driftline.decoding.models.decoder import DecoderModel
from driftline.decoding.models.loading import (
    load_model,
    load_tokenizer,
    model_layers,
    weight_files,
)
from driftline.decoding.models.targets import Target
from driftline.decoding.options import DecoderOptions, Report
from driftline.decoding.prompts import Padded, Prompt, PromptPool, pad_left
from driftline.decoding.torchrun import Job
from driftline.errors import BadInput, DriftlineError
from driftline.execution.codec import decode, encode
from driftline.execution.jobs import Executor, Task, chosen, folder_for
from driftline.execution.jobs import Job as WorkerJob
from driftline.registry import Address, require
from driftline.runs.provenance import own_command, plain_json, provenance
from driftline.runs.redaction import redact_argv

if TYPE_CHECKING:
    import torch

    from driftline.execution.jobs import Say

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
ModelSide = Literal["reference", "candidate"]
Progress = Callable[[int, int], None]
"""Called with (tokens or calls done, total)."""


class Session:
    """Tokenizer, prompts and both models, loaded when first needed, kept for further shapes.

    Only one of each is kept: two large models may not fit into memory. A model or prompt file that
    has changed on disk since is loaded again, because results say which weights they were made
    with.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[Any, Any]] = {}

    def tokenizer(self, options: DecoderOptions) -> Any:
        """The named tokenizer, or that of the model."""
        location = options.tokenizer or options.source
        return self._once("tokenizer", location, lambda: load_tokenizer(location))

    def prompts(self, options: DecoderOptions, seed: int = 0) -> list[Prompt]:
        """The prompts of one round.

        Raises:
            BadInput: No prompt file is named, or too few prompts fit.
        """
        path = options.prompts
        if path is None:
            raise BadInput(
                "no prompt file is named",
                hint="give --sharegpt_path: ShareGPT JSON, or a text file with a prompt a line",
            )
        location = options.tokenizer or options.source
        pool = self._once(
            "prompts",
            (path, _file_state(path), location),
            lambda: PromptPool(path, self.tokenizer(options)),
        )
        return pool.sample(options.batch_size, options.length, seed=seed, order=options.order)

    def batch(self, options: DecoderOptions, seed: int = 0) -> Padded:
        """The prompts of one round as one padded batch."""
        return pad_left(self.prompts(options, seed), options.length)

    def model(
        self, options: DecoderOptions, side: ModelSide, job: Job | None = None
    ) -> DecoderModel:
        """One side's model.

        Args:
            options: Which model, and its targets.
            side: Which of the two.
            job: Ranks that a candidate may be split over; None: this process alone.
        """
        ranks = 1 if job is None else job.size
        split = options.splits(ranks)
        target = options.reference if side == "reference" else options.candidate
        # Weights that are split over ranks cannot be copied into one model.
        copies = side == "reference" and options.same_weights and not split
        key = (
            *(options.model_source, weight_files(options.source), target, options.compiled),
            # Only the candidate is ever split; the reference is trusted.
            *(split and side == "candidate", options.candidate if copies else None),
        )

        def load() -> DecoderModel:
            model = load_side(options, target, split=split and side == "candidate")
            if copies:
                # The weights as the candidate has rounded them: see `same_weights`.
                rounded = self.model(options, "candidate", job).module.state_dict()
                model.module.load_state_dict(rounded)
            return model

        return self._once(side, key, load)

    def _once(self, name: str, key: Any, load: Callable[[], Any]) -> Any:
        if name not in self._loaded or self._loaded[name][0] != key:
            self._loaded.pop(name, None)  # before the next one is loaded: both may not fit
            self._loaded[name] = key, load()
        return self._loaded[name][1]


def _file_state(path: Path) -> tuple[int, int]:
    try:
        state = path.stat()
    except OSError:  # reading it will say what is wrong
        return 0, 0
    return state.st_size, state.st_mtime_ns


def load_side(options: DecoderOptions, target: Target, *, split: bool = False) -> DecoderModel:
    """A model on one target, newly loaded and compiled as the options say."""
    source = options.model_source
    if source.micro_layers is not None:
        # A model that has fewer layers than a micro model is used as it is.
        layers = min(source.micro_layers, model_layers(options.source))
        source = source._replace(micro_layers=layers)
    model = load_model(source, target, distributed=split)
    _require_room(model, options)
    compile_parts(model, options.compiled)
    return model


def _require_room(model: DecoderModel, options: DecoderOptions) -> None:
    """Refuse texts that are longer than the positions a model was made for.

    Raises:
        BadInput: A text would be longer. Results after the last position would be meaningless.
    """
    needed = options.length + options.new_tokens
    if model.context and needed > model.context:
        raise BadInput(
            f"{options.length} tokens of a prompt and {options.new_tokens} new ones are {needed}; "
            f"{model.name} has {model.context} positions",
            hint="give a smaller sequence length, or fewer new tokens",
        )


def generated(
    model: DecoderModel,
    batch: Padded,
    new_tokens: int,
    *,
    forced: torch.Tensor | Sequence[torch.Tensor] | None = None,
    keep_logits: bool = True,
    progress: Progress | None = None,
) -> Validation:
    """Generate with the number of threads that suits the model; see `generation.generate`.

    Every command generates through this function: sums depend on the number of threads, so a
    threshold only fits logits that were computed with as many as those it was made from.

    Raises:
        DriftlineError: The model is compiled, and no graph of it reached its backend.
    """
    with suitable_threads(model):
        made = generate(
            model,
            batch,
            new_tokens,
            forced=forced,
            keep_logits=keep_logits,
            progress=progress,
        )
    model.require_compiled()
    return made


class Difference(NamedTuple):
    """A setting in which a saved result differs from the requested one."""

    name: str
    saved: Any
    wanted: Any


def differences(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Difference]:
    """Settings that prevent the reuse of a saved result: those that both name and that differ.

    Settings that a saved result does not name are ignored: older versions and other tools record
    fewer. Weights that could not be identified, then or now, count as not named.

    >>> differences({"target": "cpu", "weights": None}, {"target": "cuda", "weights": "a"})
    [Difference(name='target', saved='cpu', wanted='cuda')]
    """
    plain = cast("dict[str, Any]", plain_json(wanted))
    return [
        Difference(name, saved[name], value)
        for name, value in plain.items()
        if name in saved
        and saved[name] != value
        and not (name == "weights" and not (saved[name] and value))
    ]


def differences_text(changes: Iterable[Difference]) -> str:
    """The first few differences as part of a sentence."""
    texts = [f"{change.name} was {change.saved!r}, is {change.wanted!r}" for change in changes]
    return "; ".join(texts[:3])


def saved_settings(outputs: Outputs) -> Mapping[str, Any]:
    """The settings that saved outputs were made under; empty if they do not say."""
    settings = outputs.provenance.get("settings", {})
    return cast("dict[str, Any]", settings) if isinstance(settings, dict) else {}


def same_prompts(outputs: Outputs, batch: Padded) -> bool:
    """Whether saved outputs begin with the prompts of a batch."""
    width = int(batch.ids.shape[1])
    return len(outputs.tokens) == len(batch.ids) and all(
        len(tokens) >= width and bool((tokens[:width] == ids).all())
        for tokens, ids in zip(outputs.tokens, batch.ids, strict=True)
    )


def file_digest(path: Path | None) -> str | None:
    """The digest of a file's content, so that a change in place is noticed."""
    if path is None or not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def described(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Provenance of one output: where and how it was made, and under which settings."""
    facts = provenance()
    facts.pop("id", None)  # of a run; files have names
    return {**facts, "format": kind, "settings": plain_json(settings)}


class DecoderTask(Protocol[R_co]):
    """One model and shape of one command; `run_task` calls the methods in this order.

    Attributes:
        name: Of the command; part of the name of the work folder.
        options: What is asked for.
        job: The ranks that work on it together.
    """

    name: str
    job: Job

    @property
    def options(self) -> DecoderOptions: ...

    def inputs(self) -> Mapping[str, Any]:
        """All settings that the result depends on, to compare with those of a saved result."""
        ...

    def work_folder(self, session: Session) -> contextlib.AbstractContextManager[object]:
        """Check that everything needed is available; open the folder of unfinished work."""
        ...

    def run_round(self, session: Session, seed: int) -> bool:
        """Compute one round; whether further rounds are needed."""
        ...

    def finish(self, session: Session) -> R_co:
        """Write what is written at the end, and return the result."""
        ...


class SavedTask(DecoderTask[R_co], Protocol[R_co]):
    """A task whose result stays on disk, and is not computed again if it exists."""

    def saved_inputs(self) -> Mapping[str, Any] | None:
        """The settings of a saved result; None if there is none, or it is unfinished.

        Raises:
            DriftlineError: There are files that must not be overwritten.
        """
        ...

    def is_complete(self) -> bool:
        """Whether nothing is missing of a saved result that was made under the same settings."""
        ...

    def refusal(self, changes: Sequence[Difference]) -> DriftlineError:
        """The error for a saved result that was made under other settings."""
        ...

    def skipped(self) -> R_co:
        """The result if all files exist already."""
        ...


def already_done(task: SavedTask[Any]) -> bool:
    """Whether the requested result exists already.

    Raises:
        DriftlineError: It exists, but was made under other settings.
    """
    if task.options.force:
        return False
    saved = task.saved_inputs()
    if saved is None:
        return False
    changes = differences(saved, task.inputs())
    if changes:
        raise task.refusal(changes)
    return task.is_complete()


def run_unless_done(task: SavedTask[R], session: Session) -> R:
    """`run_task`, unless its result is on disk already.

    Raises:
        DriftlineError: It could not be done, or a result of other settings is in the way.
    """
    # Rank 0 alone looks: its decision is every rank's, even if they saw other files.
    if task.job.share(already_done(task) if task.job.writes else None):
        return task.skipped()
    return run_task(task, session)


def run_task(task: DecoderTask[R], session: Session) -> R:
    """Run one model and shape, or the missing part of it.

    Raises:
        DriftlineError: It could not be done. Finished parts are kept.
    """
    with task.work_folder(session):
        for seed in range(task.options.rounds):
            if not task.run_round(session, seed):
                break
        return task.finish(session)


FILES = "files"
"""The place that all shapes need: where models, prompts and results are."""


class ShapeWork(NamedTuple):
    """How workers run the shapes of one command.

    Attributes:
        run: Runs one shape.
        types: Named tuples and dataclasses that options and results consist of.
    """

    run: Callable[..., Any]
    types: tuple[type, ...]


WORK = {
    "metrics": Address("driftline.decoding.metrics:WORK"),
    "validate": Address("driftline.decoding.validate:WORK"),
}
"""The commands whose shapes can be divided among workers, by the name of their work."""


class _ShapeWorker:
    """Runs shapes in a worker, one after the other; models stay loaded between them."""

    work = ""

    def __init__(self, about: dict[str, Any]) -> None:
        self._about = about
        self._ready = False
        self._session = Session()

    def absent(self) -> list[tuple[str, str]]:
        """Files that exist on the first machine, but not on this one."""
        return [
            (FILES, f"cannot see '{path}'")
            for path in self._about["files"]
            if not Path(path).exists()
        ]

    def do(self, work: Any, say: Say) -> Any:
        """The result of one shape."""
        kind: ShapeWork = WORK[self.work].load()
        self._set_up()
        return encode(kind.run(decode(work, kind.types), report=say, session=self._session))

    def _set_up(self) -> None:
        """Once, and not before the first shape: a machine without torch may be asked for files."""
        if self._ready:
            return
        import torch

        # The last digits are the same only with as many threads as one process would use.
        torch.set_num_threads(self._about["threads"])
        # Files say by which command they were made: it is the user's, not the worker's.
        sys.orig_argv = list(self._about["command"])
        self._ready = True


class MetricsWorker(_ShapeWorker):
    """Computes the metrics of shapes; their files are written by the worker."""

    work = "metrics"


class ValidateWorker(_ShapeWorker):
    """Validates shapes."""

    work = "validate"


def choose_executor(
    shapes: Sequence[DecoderOptions], jobs: int | None, executor: str | Executor | None
) -> Executor | None:
    """The executor that runs the shapes; None: this process.

    Raises:
        BadInput: There is no shape, or the work would be divided in two ways at once.
    """
    if not shapes:
        raise BadInput(
            "no shape is asked for", hint="give --batch_sizes, --seq_lengths and --max_new_tokens"
        )
    workers = chosen(jobs, executor)
    if workers is not None and any(options.distributed for options in shapes):
        raise BadInput(
            "--distributed splits one model over processes, --jobs and --executor give each "
            "process a shape of its own",
            hint="give one or the other",
        )
    return workers


class Listeners(NamedTuple):
    """What is called while workers run shapes, each time with the index of the shape.

    Attributes:
        finished: Takes a result, in the order of the shapes.
        line: Takes a line that a worker prints, in any order.
    """

    finished: Callable[[int, Any], None]
    line: Callable[[int, str], None]


def run_on_workers(
    work: str,
    shapes: Sequence[DecoderOptions],
    workers: Executor,
    listeners: Listeners,
    *,
    folders: Sequence[str] = (),
) -> list[Any]:
    """Run every shape once, some at a time; results come in the order of the shapes.

    A shape is one task: its model is loaded by the worker that takes it, and kept for its next
    one. Files are written by workers, so all machines must see the folder of the results.

    Args:
        work: A name of `WORK`.
        shapes: Options of each shape.
        workers: The executor that runs them.
        listeners: Callbacks for results and lines.
        folders: Paths that all machines must see, besides models and prompts.
    """
    torch_module = require("torch", install="torch")
    kind: ShapeWork = WORK[work].load()
    results: list[Any] = [None] * len(shapes)
    waiting = iter(range(len(shapes)))
    next_index = next(waiting, None)

    def take(index: int, answer: Any) -> None:
        nonlocal next_index
        results[index] = decode(answer, kind.types)
        # A result is passed on when all before it have been, so that output has one order.
        while next_index is not None and results[next_index] is not None:
            listeners.finished(next_index, results[next_index])
            next_index = next(waiting, None)

    files = [*folders, *_existing_files(shapes)]
    about = {
        "threads": torch_module.get_num_threads(),
        "files": files,
        "command": redact_argv(own_command()),
    }
    # A worker needs a GPU for itself: two models may not fit on one.
    devices = {target.device for o in shapes for target in (o.reference, o.candidate)}
    job = WorkerJob(work, about, folder_for(*files), gpus=int("cuda" in devices))
    tasks = [
        Task(encode(options), near=str(options.model), needs=(FILES,), called=options.shape)
        for options in shapes
    ]
    workers.run(job, tasks, take, listeners.line)
    return results


def _existing_files(shapes: Sequence[DecoderOptions]) -> list[str]:
    """Paths of models, tokenizers and prompts that are files here; ids are looked up anywhere."""
    paths = dict.fromkeys(path for options in shapes for path in options.input_paths())
    return [path for path in paths if path and Path(path).exists()]


@contextlib.contextmanager
def marked(folder: Path) -> Generator[str]:
    """A file that lets another machine check that it sees the same folder of results."""
    mark = folder / f".driftline-shared-{os.getpid()}"
    mark.touch()
    try:
        yield str(mark)
    finally:
        mark.unlink(missing_ok=True)


def no_report(line: str) -> None:
    """Print nothing; for ranks other than 0."""
    del line


def reports(report: Report, job: Job) -> Report:
    """The report function of this rank: only rank 0 prints."""
    return report if job.writes else no_report
