"""`driftline layer-metrics`: two targets, one text, the metrics of every layer in files.

A model and shape is done when its `….layers.json` is there, which is written last. What was
interrupted is computed again: a walk through the layers cannot be taken up in the middle.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import functools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Side, Table
from driftline.decoding.files.layer_files import LayerFiles, LayerSum
from driftline.decoding.files.names import (
    LAYER_CSV_METRICS,
    ROOT,
    file_layer,
    layer_csv,
    require_short,
)
from driftline.decoding.files.outputs import write_json
from driftline.decoding.files.workdir import (
    begin_renaming,
    empty_work_folder,
    require_writable,
    work_folder_path,
)
from driftline.decoding.layerwise.walk import TABLE_METRICS, Progress, Walk, walk_layers
from driftline.decoding.models.backend_graphs import GraphCount
from driftline.decoding.models.decoder import DecoderModel
from driftline.decoding.models.loading import find_model, library_for, weights_digest
from driftline.decoding.models.targets import ready, where_line
from driftline.decoding.options import LayerOptions, Report
from driftline.decoding.pipeline import Difference, Session, described, file_digest, run_unless_done
from driftline.decoding.torchrun import Job
from driftline.errors import AlreadyThere, BadFile, DriftlineError

Judge = Callable[[Table], Table]
OUTPUT_OPTION = "--output_path"
FORMAT = "driftline-layer-metrics"
_REPORTED_EVENTS = ("refused", "exception")


class LayersResult(NamedTuple):
    """The result of one model and shape.

    Attributes:
        options: The options.
        skipped: Whether the results existed already.
        layers: Per layer, in execution order.
        table: One row per output and iteration.
        notes: Layers that were not compared, with reasons, and other remarks.
        files: Names of the csv files.
        not_run: Parts of which no graph reached the backend that should compile them.
    """

    options: LayerOptions
    skipped: bool = False
    layers: tuple[LayerSum, ...] = ()
    table: Table | None = None
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    not_run: tuple[str, ...] = ()

    @property
    def nonfinite(self) -> list[LayerSum]:
        """Layers with rows that are non-finite on one side only, or that have no finite element."""
        return [layer for layer in self.layers if layer.nonfinite]


def run_layers(
    options: LayerOptions,
    *,
    session: Session | None = None,
    judge: Judge | None = None,
    report: Report = print,
    progress: Progress | None = None,
) -> LayersResult:
    """Compute the layer metrics of one model and shape.

    Args:
        options: The options.
        session: Holds models that were loaded for another shape.
        judge: Judges the rows of the table; if not given, they stay unjudged.
        report: Takes messages, line by line.
        progress: Called with (module calls done, approximate total).

    Raises:
        DriftlineError: It could not be done. Results of finished shapes are kept.
    """
    return run_unless_done(LayersTask(options, report, judge, progress), session or Session())


class LayersTask:
    """The layer metrics of one model and shape; see `pipeline.SavedTask`."""

    name = "layers"

    def __init__(
        self,
        options: LayerOptions,
        report: Report = print,
        judge: Judge | None = None,
        progress: Progress | None = None,
    ) -> None:
        options.check()
        self.options = options
        # If a model is split over ranks, no rank has complete layers.
        self.job = Job()
        self._report = report
        self._judge = judge
        self._progress = progress
        self._folder = options.output_path
        self._walked: tuple[LayerFiles, Walk] | None = None
        self._graphs: dict[str, GraphCount] = {}

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """Everything that the metrics depend on, as it is saved with them; computed once.

        File names do not include the mode, the targets, and the contents of prompts and weights.
        """
        options = self.options
        settings: dict[str, Any] = {
            "model": options.model,
            "architecture": options.architecture,
            "library": library_for(options.architecture, options.library),
            "unfuse_weights": options.unfuse_weights,
            "weights": weights_digest(options.source),
            # The name as 0.1.0 wrote it, the digest for what the file held.
            "prompts": options.prompts.name,
            "prompts_digest": file_digest(options.prompts),
            "order": options.order,
            "mode": options.mode,
            "reference": str(options.reference),
            "candidate": str(options.candidate),
            "batch_size": options.batch_size,
            "length": options.length,
            "elements": options.elements,
        }
        if options.candidate.compile or options.reference.compile:
            settings["compiled"] = options.compiled
        return settings

    def inputs(self) -> Mapping[str, Any]:
        return self.settings

    def saved_inputs(self) -> Mapping[str, Any] | None:
        options = self.options
        # The work was interrupted while files were renamed: some are old, some are new.
        if work_folder_path(options.output_path, self.name, options.prefix).is_dir():
            return None
        if not options.provenance.exists():
            self._refuse_unexplained_files()
            return None
        return cast("Mapping[str, Any]", self._saved.get("settings", {}))

    def _refuse_unexplained_files(self) -> None:
        """Refuse to overwrite files of another program without --force."""
        options = self.options
        folder = options.output_path
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name.startswith(f"{options.prefix}--"):
                raise AlreadyThere(
                    f"{path} is there, and nothing says how it was made", hint=_AGAIN
                )

    @functools.cached_property
    def _saved(self) -> dict[str, Any]:
        path = self.options.provenance
        try:
            content: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as trouble:
            raise BadFile(
                f"{path} cannot be read: {trouble}", hint="--force makes it anew"
            ) from None
        return cast("dict[str, Any]", content) if isinstance(content, dict) else {}

    def is_complete(self) -> bool:
        files = cast("list[str]", self._saved.get("files", []))
        folder = self.options.output_path
        # Names only: a listed path must not lead out of the folder.
        return bool(files) and all((folder / Path(name).name).exists() for name in files)

    def refusal(self, changes: Sequence[Difference]) -> DriftlineError:
        texts = [f"{change.name} was {change.saved}, is {change.wanted}" for change in changes]
        options = self.options
        return AlreadyThere(
            f"{options.prefix} is in {options.output_path} already, made under other settings: "
            + "; ".join(texts[:3]),
            hint=_AGAIN,
        )

    def skipped(self) -> LayersResult:
        self._report(f"{self.options.prefix}: skipped, as it has already been done")
        return LayersResult(self.options, skipped=True)

    @contextmanager
    def work_folder(self, session: Session) -> Generator[None]:
        options = self.options
        require_writable(options.output_path, OUTPUT_OPTION)
        for target in (options.reference, options.candidate):
            ready(target)  # a missing device is reported before a model is loaded
        find_model(options.source, options.architecture)
        session.prompts(options)
        self._report(where_line(options.reference, options.candidate))
        with (
            _disk_errors_as_sentences(options.output_path),
            empty_work_folder(
                options.output_path, self.name, options.prefix, OUTPUT_OPTION
            ) as folder,
        ):
            self._folder = folder
            yield

    def run_round(self, session: Session, seed: int) -> bool:
        options = self.options
        # Before anything is computed: settings describe the files as they were read.
        _ = self.settings
        batch = session.batch(options, seed)
        reference = session.model(options, "reference")
        candidate = session.model(options, "candidate")
        # Names are known once a model is loaded; walking through it takes much longer.
        self._check_names(reference)
        files = LayerFiles(self._folder, reference.library, elements=options.elements)
        walk = walk_layers(
            reference,
            candidate,
            batch,
            take=files.take,
            mode=options.mode,
            new_tokens=options.new_tokens,
            elements=options.elements,
            progress=self._progress,
        )
        self._graphs = {"reference": reference.graphs, "candidate": candidate.graphs}
        if not files.sums:
            raise DriftlineError(
                "no layer could be compared: " + (_reasons_of(walk) or "nothing was captured"),
                hint="driftline metrics compares what the models say, without their layers",
            )
        self._walked = files, walk
        return False

    def _check_names(self, model: DecoderModel) -> None:
        """Refuse layers with file names that are too long, before they are computed."""
        sites: list[str] = [name or ROOT for name, _ in model.module.named_modules()]
        for site in sites:
            layer = file_layer(site, model.library)
            require_short(layer_csv(self.options.prefix, layer, LAYER_CSV_METRICS[0]))

    def finish(self, session: Session) -> LayersResult:
        """Rename all files to their final names; the file that marks completion comes last."""
        del session
        assert self._walked is not None  # run_round leaves it, or raises
        options = self.options
        files, walk = self._walked
        notes = (*_compiler_notes(options, self._graphs), *_notes(walk))
        table = Table(
            rows=walk.rows,
            columns=tuple(metric.column for metric in TABLE_METRICS),
            reference=Side(f"{options.model} ({options.reference})"),
            candidate=Side(f"{options.model} ({options.candidate})"),
            notes=notes,
        )
        if self._judge is not None:
            table = self._judge(table)
        draft = self._folder / "table"
        # Written to the work folder first: if judging or writing fails, old results stay.
        table.write(draft)
        # From here on an interruption leaves a mixture, which the work folder marks.
        begin_renaming(self._folder)
        # The file that marks completion is deleted first and written last.
        for old in (options.provenance, options.table):
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink(missing_ok=True)
        names = files.finish(options.output_path, options.prefix)
        draft.rename(options.table)
        write_json(options.provenance, self._facts(files, walk, notes, names))
        layers = tuple(files.sums.values())
        not_run = tuple(site or ROOT for count in self._graphs.values() for site in count.missed)
        return LayersResult(options, False, layers, table, notes, tuple(names), not_run)

    def _facts(
        self, files: LayerFiles, walk: Walk, notes: Sequence[str], names: Sequence[str]
    ) -> dict[str, Any]:
        facts = described(FORMAT, self.settings)
        facts["tokens"] = walk.tokens.tolist()
        facts["layers"] = {
            layer.layer: {
                "site": layer.site,
                "outputs": layer.outputs,
                "rows": layer.rows,
                "nonfinite_rows": layer.nonfinite,
                "nan_on_both_sides": layer.nan,
            }
            for layer in files.sums.values()
        }
        facts["graphs"] = {
            side: count._asdict() for side, count in self._graphs.items() if count.units
        }
        facts["notes"] = list(notes)
        facts["files"] = list(names)
        return facts


_AGAIN = f"give another {OUTPUT_OPTION}, or --force to compute it again"


@contextmanager
def _disk_errors_as_sentences(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as trouble:
        raise DriftlineError(
            f"the results cannot be written to {folder}: {trouble.strerror or trouble}",
            hint="shapes that were finished are kept; the same command goes on with the others",
        ) from trouble


def _reasons_of(walk: Walk) -> str:
    return "; ".join(dict.fromkeys(row.reason for row in walk.rows if row.reason))[:300]


def _compiler_notes(options: LayerOptions, graphs: Mapping[str, GraphCount]) -> Iterator[str]:
    """Notes about graphs that reached the backend, and about outputs that compilation hides."""
    for side, target in (("reference", options.reference), ("candidate", options.candidate)):
        if not target.compile:
            continue
        count = graphs[side]
        yield f"{side}: {count.text}"
        if count.missed:
            sites = [site or ROOT for site in count.missed]
            yield (
                f"{side}: {target.compile} was given nothing of {_first_few(sites)}: what they "
                "give is not compared (TORCH_LOGS=+dynamo says why no graph is made)"
            )
        if count.broken:
            sites = [site or ROOT for site in count.broken]
            yield (
                f"{side}: {_first_few(sites)} came in several graphs; what lies between them "
                f"is not run by {target.compile}"
            )
        if options.compiled == "leaf":
            yield (
                f"the {side} is compiled layer by layer: nothing is fused across layers, and what "
                "lies between them (sums, products of attention) is not compiled"
            )
            continue
        unit = "as a whole" if options.compiled == "model" else "block by block"
        yield (
            f"the {side} is compiled {unit}: what lies inside cannot be seen "
            "(--compile_unit leaf shows it)"
        )


def _notes(walk: Walk) -> Iterator[str]:
    """Layers that were not compared, and what capture reported."""
    for status, description in (
        ("missing", "only in the reference"),
        ("extra", "only in the candidate"),
        ("incomparable", "not comparable"),
    ):
        rows = [row for row in walk.rows if row.status == status]
        sites = list(dict.fromkeys(row.site for row in rows))
        if sites:
            count = f"{len(sites)} layer{'' if len(sites) == 1 else 's'}"
            yield f"{count} {description}: {_first_few(sites)}{_reasons(rows, status)}"
    # Equal events of many calls are reported once.
    messages = Counter(
        f"{event.side}: {event.message}" for event in walk.events if event.kind in _REPORTED_EVENTS
    )
    for message, times in messages.items():
        yield message + (f" ({times} times)" if times > 1 else "")


def _first_few(sites: list[str]) -> str:
    return ", ".join(sites[:3]) + (", …" if len(sites) > 3 else "")


def _reasons(rows: list[Row], status: str) -> str:
    if status != "incomparable":
        return ""
    return f" ({'; '.join(dict.fromkeys(row.reason for row in rows))[:200]})"
