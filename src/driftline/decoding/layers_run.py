"""`driftline layer-metrics`: two targets, one text, the figures of every layer in files.

A model and shape is done when its `….layers.json` is there, which is written last; what was
interrupted is computed again. Models stay loaded for further shapes.
"""

# torch's own annotations are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Side, Table
from driftline.decoding import layers_ask, out_files
from driftline.decoding.compiled_parts import compile_parts
from driftline.decoding.decoder import DecoderModel
from driftline.decoding.desk import empty_desk, naming_begins, require_writable
from driftline.decoding.layer_files import LayerFiles, LayerSum
from driftline.decoding.layer_names import ROOT
from driftline.decoding.layer_walk import METRICS, Progress, Walk, walk_layers
from driftline.decoding.layers_ask import OPTION, WHAT, LayersAsk
from driftline.decoding.models import find_model, load_model, load_tokenizer
from driftline.decoding.prompts import Prompt, PromptPool, pad_left
from driftline.decoding.targets import Target, ready
from driftline.errors import DriftlineError

Say = Callable[[str], None]
Judge = Callable[[Table], Table]
_TELLING = ("refused", "exception")


class LayersOutcome(NamedTuple):
    """What one model and shape gave.

    Attributes:
        ask: What was asked.
        skipped: Everything was there already.
        layers: Per layer, in the order in which they ran.
        table: One row per output and iteration.
        notes: What a reader should know: layers that were not compared, and why.
        files: Names of the csv files.
    """

    ask: LayersAsk
    skipped: bool = False
    layers: tuple[LayerSum, ...] = ()
    table: Table | None = None
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def nonfinite(self) -> list[LayerSum]:
        """Layers with rows that are non-finite on one side only, or altogether."""
        return [layer for layer in self.layers if layer.nonfinite]


class LayerModels:
    """Tokenizer, prompts and the two models, loaded when first needed, kept for further shapes."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Any, Any]] = {}

    def prompts(self, ask: LayersAsk) -> list[Prompt]:
        tokenizer = ask.tokenizer or ask.source
        pool = self._kept(
            "prompts",
            (ask.prompts, tokenizer),
            lambda: PromptPool(ask.prompts, load_tokenizer(tokenizer)),
        )
        return pool.sample(ask.batch_size, ask.length, order=ask.order)

    def model(self, ask: LayersAsk, side: str) -> DecoderModel:
        target: Target = ask.reference if side == "reference" else ask.candidate
        how = (ask.model_path, target, ask.architecture, ask.variant, ask.library)

        def load() -> DecoderModel:
            model = load_model(
                ask.model_path,
                target,
                architecture=ask.architecture,
                variant=ask.variant,
                unfuse_weights=ask.unfuse_weights,
                library=ask.library,
            )
            compile_parts(model, ask.compiled)
            return model

        return self._kept(side, (*how, ask.unfuse_weights, ask.compiled), load)

    def _kept(self, name: str, how: Any, make: Callable[[], Any]) -> Any:
        """One thing of each name at a time: an older model goes before a new one comes."""
        if name not in self._known or self._known[name][0] != how:
            self._known.pop(name, None)
            self._known[name] = how, make()
        return self._known[name][1]


def run_layers(
    ask: LayersAsk,
    *,
    models: LayerModels | None = None,
    judge: Judge | None = None,
    say: Say = print,
    progress: Progress | None = None,
) -> LayersOutcome:
    """Compute the layer metrics of one model and shape.

    Args:
        ask: What is wanted.
        models: Loaded already for another shape.
        judge: Decides the rows of the table; they stay unjudged without.
        say: Where messages go, line by line.
        progress: Called with (module calls done, about how many there are).

    Raises:
        DriftlineError: It could not be done. Shapes that were finished before stay.
    """
    layers_ask.check(ask)
    if layers_ask.is_done(ask):
        say(f"{ask.prefix}: skipped, as it has already been done")
        return LayersOutcome(ask, skipped=True)
    require_writable(ask.output_path, OPTION)
    for target in (ask.reference, ask.candidate):
        ready(target)  # a device that is not there is told before a model is loaded
    find_model(ask.source, ask.architecture)
    own = models or LayerModels()
    batch = pad_left(own.prompts(ask), ask.length)
    with (
        _told(ask.output_path),
        empty_desk(ask.output_path, WHAT, ask.prefix, OPTION) as desk,
    ):
        reference, candidate = own.model(ask, "reference"), own.model(ask, "candidate")
        layers_ask.check_names(ask, _sites(reference), reference.library)
        files = LayerFiles(desk, reference.library, elements=ask.elements)
        walk = walk_layers(
            reference,
            candidate,
            batch,
            take=files.take,
            mode=ask.mode,
            new_tokens=ask.new_tokens,
            elements=ask.elements,
            progress=progress,
        )
        if not files.sums:
            raise DriftlineError(
                "no layer could be compared: " + (_why(walk) or "nothing was captured")
            )
        return _finish(ask, files, walk, desk, judge)


@contextmanager
def _told(folder: Path) -> Generator[None]:
    """What a disk refuses, as a sentence."""
    try:
        yield
    except OSError as trouble:
        raise DriftlineError(
            f"the results cannot be written to {folder}: {trouble.strerror or trouble}",
            hint="shapes that were finished are kept; the same command goes on with the others",
        ) from trouble


def _sites(model: DecoderModel) -> Iterator[str]:
    return (name or ROOT for name, _ in model.module.named_modules())


def _why(walk: Walk) -> str:
    return "; ".join(dict.fromkeys(row.reason for row in walk.rows if row.reason))[:300]


def _finish(
    ask: LayersAsk, files: LayerFiles, walk: Walk, desk: Path, judge: Judge | None
) -> LayersOutcome:
    """Everything under its name; what says that all is there comes last."""
    notes = (*_compiled(ask), *_notes(walk))
    table = Table(
        rows=walk.rows,
        columns=tuple(metric.column for metric in METRICS),
        reference=Side(f"{ask.model} ({ask.reference})"),
        candidate=Side(f"{ask.model} ({ask.candidate})"),
        notes=notes,
    )
    if judge is not None:
        table = judge(table)
    table.write(desk / "table")
    naming_begins(desk)
    for old in (ask.sidecar, ask.table):
        if old.is_dir():
            shutil.rmtree(old)
        else:
            old.unlink(missing_ok=True)
    names = files.finish(ask.output_path, ask.prefix)
    (desk / "table").rename(ask.table)
    told = layers_ask.described(ask)
    told["tokens"] = walk.tokens.tolist()
    told["layers"] = {
        layer.layer: {
            "site": layer.site,
            "outputs": layer.outputs,
            "rows": layer.rows,
            "nonfinite_rows": layer.nonfinite,
            "nan_on_both_sides": layer.nan,
        }
        for layer in files.sums.values()
    }
    told["notes"] = list(notes)
    told["files"] = names
    out_files.write_json(ask.sidecar, told)
    return LayersOutcome(ask, False, tuple(files.sums.values()), table, notes, tuple(names))


def _compiled(ask: LayersAsk) -> Iterator[str]:
    """What a compiled side cannot show."""
    for side, target in (("reference", ask.reference), ("candidate", ask.candidate)):
        if not target.compile:
            continue
        if ask.compiled == "leaf":
            yield f"the {side} is compiled layer by layer: nothing is fused across layers"
            continue
        unit = "as a whole" if ask.compiled == "model" else "block by block"
        yield (
            f"the {side} is compiled {unit}: what lies inside cannot be seen "
            "(--compile_unit leaf shows it)"
        )


def _notes(walk: Walk) -> Iterator[str]:
    for status, said in (
        ("missing", "only in the reference"),
        ("extra", "only in the candidate"),
        ("incomparable", "not comparable"),
    ):
        rows = [row for row in walk.rows if row.status == status]
        sites = list(dict.fromkeys(row.site for row in rows))
        if sites:
            yield f"{_layers(len(sites))} {said}: {_some(sites)}{_reasons(rows, status)}"
    told = Counter(
        f"{event.side}: {event.message}" for event in walk.events if event.kind in _TELLING
    )
    for message, times in told.items():
        yield message + (f" ({times} times)" if times > 1 else "")


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"


def _some(sites: list[str]) -> str:
    return ", ".join(sites[:3]) + (", …" if len(sites) > 3 else "")


def _reasons(rows: list[Row], status: str) -> str:
    if status != "incomparable":
        return ""
    return f" ({'; '.join(dict.fromkeys(row.reason for row in rows))[:200]})"
