"""Names the layer of a difference: `assert_no_drift`, and the layers of an expectation.

A signature shows that an output has changed, and at which positions, but not in which layer. So
`expect` also stores a sample of every layer next to the signature, and a failure compares it with
the layers of today.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driftline.errors import BadFile, DriftlineError
from driftline.testing.expectations.signature import quiet

if TYPE_CHECKING:
    from driftline.comparison.table.table import Table
    from driftline.runs.run import Run
    from driftline.testing.expectations.expectations import Subject

SCHEMA = "driftline.layers/1"
SUFFIX = ".layers"
# Numbers of each tensor: enough to see an error of a percent, and a kilobyte a layer.
KEEP = "sample(64)"
_WIDTH = 100


def assert_no_drift(
    reference: Any,
    candidate: Any,
    inputs: Any,
    *,
    allow_incomplete: bool = False,
    **options: Any,
) -> Table:
    """Fail if two models differ by more than their number formats explain.

    Args:
        reference: The trusted torch module.
        candidate: The module to test.
        inputs: One tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
        allow_incomplete: Whether to accept a verdict of incomplete: the tensors that could be
            compared agree, but they are too few for a pass.
        **options: As for `compare_models`: `limits`, `rtol`, `thresholds`, `sites` and others.

    Returns:
        The comparison, for further inspection.

    Raises:
        AssertionError: The models differ, or too little was compared. The message names the layer
            and its place.
    """
    __tracebackhide__ = True  # pytest shows the line of the test, not ours
    from driftline.comparison.live_models import compare_models

    table = compare_models(reference, candidate, inputs, **options)
    if table.verdict == "pass" or (allow_incomplete and table.verdict == "incomplete"):
        return table
    raise AssertionError(place_text(table))


def place_text(table: Table) -> str:
    """The text of a comparison for a failing test: the finding, the tree, the worst rows."""
    from driftline.reporting.terminal import paint
    from driftline.reporting.view import Grid, View
    from driftline.reporting.views import comparison

    kept = [
        block._replace(how_to_see="") if isinstance(block, Grid) else block
        for block in comparison.view(table).blocks
    ]
    return paint(View(tuple(kept)), width=_WIDTH).rstrip("\n")


def keep_layers(subject: Subject, file: Path) -> None:
    """Write a sample of every layer of a subject that has layers; replaces an earlier one."""
    layers = [
        {
            "site": record.key.site,
            "class": record.class_name,
            "port": record.key.port,
            "slot": record.key.slot,
            "visit": record.key.visit,
            "dtype": record.dtype,
            "shape": list(record.shape),
            "stride": record.sample_stride,
            "values": base64.b64encode(run.raw(record).tobytes()).decode(),
        }
        for run in (_sampled(subject),)
        for record in run.records
        if record.kept == "sample"
    ]
    # A line for each tensor: a change of one is a change of one line in git.
    lines = ",\n".join(json.dumps(layer) for layer in layers)
    text = f'{{"schema": "{SCHEMA}", "layers": [\n{lines}\n]}}\n'
    file.write_text(text, encoding="utf-8")


def layer_text(subject: Subject, file: Path) -> str:
    """A text that names the layer that changed; empty if it is not known."""
    if subject.module is None or not file.is_file():
        return ""
    from driftline.comparison.pipeline import compare

    try:
        table = compare(_kept(file), _sampled(subject))
    except DriftlineError as trouble:
        return f"its layers cannot be compared with what was kept of them: {trouble}"
    if table.verdict == "pass":
        return "no layer differs by more than its number format explains: see the positions above"
    return place_text(table)


def _sampled(subject: Subject) -> Run:
    """A sample of the output of every layer of the subject."""
    from driftline.captures.torch.framework import capture
    from driftline.runs.memory import MemorySink

    sink = MemorySink(name="now")
    module = subject.module
    with quiet(module, subject.seed), capture(module, sink, keep=KEEP, model_facts=False):
        subject.run()
    return sink.run()


def _kept(file: Path) -> Run:
    """What `keep_layers` wrote, as a run.

    Raises:
        BadFile: It is something else.
    """
    from driftline.runs.memory import MemorySink
    from driftline.runs.records import Record, TensorKey

    sink = MemorySink(name="expected")
    try:
        shown = json.loads(file.read_text(encoding="utf-8"))
        if shown["schema"] != SCHEMA:
            raise BadFile(f"{file} has schema {shown['schema']!r}, not {SCHEMA!r}")
        for layer in shown["layers"]:
            key = TensorKey.of(layer["site"], layer["port"], layer["slot"], visit=layer["visit"])
            record = Record(
                key,
                0,
                str(layer["dtype"]),
                tuple(map(int, layer["shape"])),
                class_name=str(layer["class"]),
                kept="sample",
                sample_stride=int(layer["stride"]),
            )
            values = np.frombuffer(base64.b64decode(layer["values"], validate=True), np.uint8)
            sink.put(record, values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as trouble:
        raise BadFile(f"{file} is no file of layers: {trouble}") from trouble
    return sink.run()
