# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Two live models compared in one process: layer by layer as they run, or after capturing both.

`lockstep` compares tensors in place and keeps none. If the two models have different structures, or
a metric needs all values at once, both are captured in memory and compared by the pipeline, like
two runs on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack, cast

from driftline.alignment.plan import Pair
from driftline.comparison.measure.operands import measure_moments
from driftline.comparison.measure.pair_rows import incompatibility, paired
from driftline.comparison.measure.scheduler import FAR_OFF
from driftline.comparison.metrics.catalogue import Metric
from driftline.comparison.metrics.from_moments import needs_definition
from driftline.comparison.options import CompareOptions, JudgeKeywords, refuse_unknown
from driftline.comparison.pipeline import (
    MeasureRequest,
    Progress,
    prepare,
    run_comparison,
    with_placed_differences,
)
from driftline.comparison.table.row import Row
from driftline.comparison.table.table import Table
from driftline.comparison.verdict.judge import judge
from driftline.errors import BadInput, DriftlineError
from driftline.numerics.fields import PairMoments
from driftline.registry import require
from driftline.runs.views import only

if TYPE_CHECKING:
    from torch import nn

    from driftline.runs.records import TensorKey


Call = Callable[[], Any]


def lockstep(
    reference: nn.Module,
    candidate: nn.Module,
    inputs: Any,
    **options: Unpack[JudgeKeywords],
) -> Table:
    """Run two models side by side and compare the inputs and outputs of every module as they run.

    Each tensor is compared where it is, on the device if both are there, and is released
    afterwards; nothing is stored. The table is that of `compare_models`. Models of different
    structure are captured and aligned instead, as by `compare_models`.

    Args:
        reference: The trusted model.
        candidate: The model to test.
        inputs: One tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
        options: Keywords of `compare`: `metrics`, `limits`, `rtol`, `atol`, `min_coverage`,
            `thresholds`, `sites`, `ports`.

    Raises:
        NotInstalled: torch is missing.
        DriftlineError: As `compare`.
    """
    require("torch", install="torch")
    return compare_models(reference, candidate, inputs, **options)


def compared_in_step(
    reference: tuple[nn.Module, Call], candidate: tuple[nn.Module, Call], options: CompareOptions
) -> Table | None:
    """Return the judged table of two models and their calls; None if they are not in step."""
    from driftline.alignment.reconcile.tokens import is_mask
    from driftline.captures.torch.lockstep import can_be_in_step, in_step

    if not can_be_in_step(reference[0], candidate[0]):
        return None
    # Such a metric needs all values at once, but no tensor is kept.
    if any(metric.derive is None for metric in options.metrics):
        return None
    steps = in_step(reference, candidate, options.elementwise)
    if steps.apart:
        return None
    reference_run, candidate_run = steps.reference.run(), steps.candidate.run()
    try:
        comparison = prepare(reference_run, candidate_run, options)
    except DriftlineError:
        # A glob that matches nothing is the caller's error.
        if options.align.sites or options.align.ports:
            raise
        return None
    # Models with the same structure have the same calls; otherwise aligning needs tensors.
    if comparison.plan.missing or comparison.plan.extra:
        return None
    try:
        measured = comparison.measure(by=_KnownMoments(steps.moments))
    except _NeedsValues:
        return None
    table = judge(comparison.table(measured), options.tolerance)
    # Only tensors show whether a failure is at pads or in one half of the tokens, and none were
    # kept.
    if table.verdict == "fail" and any(map(is_mask, reference_run.records)):
        return None
    if table.judgement is not None and table.judgement.needs_second_look:
        return None
    return with_placed_differences(table)


class _NeedsValues(Exception):
    """A pair needs more than the moments that were measured while the models ran."""


class _KnownMoments:
    """A measurer that has the moments of all pairs already, and no tensors."""

    def __init__(self, moments: Mapping[TensorKey, PairMoments]) -> None:
        self._moments = moments

    def rows(self, pairs: Sequence[Pair], request: MeasureRequest) -> list[Row]:
        """Return a row for each pair.

        Raises:
            _NeedsValues: A pair needs more than its moments.
        """
        return [self._row(pair, request.metrics) for pair in pairs]

    def _row(self, pair: Pair, metrics: Sequence[Metric]) -> Row:
        moments = self._moments.get(pair.reference.key)
        if moments is None or not _is_simple(pair) or needs_definition(moments):
            raise _NeedsValues
        measured = measure_moments([moments], metrics)
        shape = pair.reference.shape
        if len(shape) == 2 and shape[0] == shape[1]:
            error = measured.get("relative_l2", 0.0)
            if isinstance(error, float) and error > FAR_OFF:  # it may be transposed
                raise _NeedsValues
        return paired(pair, "values", measured)


def _is_simple(pair: Pair) -> bool:
    return (
        pair.reference.key == pair.candidate.key
        and pair.reference_recipe is None
        and pair.candidate_recipe is None
        and not pair.trouble
        and not incompatibility(pair)
    )


# Two live models in one process: capture both in memory, compare and judge, without a disk.


def compare_models(
    reference: nn.Module,
    candidate: nn.Module,
    inputs: Any,
    *,
    keep: str = "full",
    threads: int | None = None,
    isolate: bool = False,
    progress: Progress | None = None,
    **options: Unpack[JudgeKeywords],
) -> Table:
    """Run two models on the same inputs and compare the inputs and outputs of every module.

    Both run without gradients, in their current mode, from the same random state. Models of the
    same structure run side by side and are compared as they run (see `lockstep`); others run one
    after the other, are captured in memory and aligned. Floating-point inputs are moved to the
    device of each model's parameters and cast to their dtype.

    Args:
        reference: The trusted model.
        candidate: The model to test.
        inputs: One tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
        keep: full, or summary when two copies of every activation do not fit into memory.
        threads: Number of worker threads. Default: one per usable core.
        isolate: Compare the output of each module of the candidate with that of the reference's
            module *on the candidate's own inputs*, in float32. A failing output is then an error
            that the module makes itself, not one that it inherits. A failing input is an error of
            the module around it, which computed that input. Modules that cannot be applied again
            are `extra` rows.
        progress: Called with (pairs done, pairs in total). By default, a notebook shows a line.
        options: Keywords of `compare`: `metrics`, `limits`, `rtol`, `atol`, `min_coverage`,
            `thresholds`, `sites`, `ports`.

    Raises:
        NotInstalled: torch is missing.
        DriftlineError: As `compare`.
    """
    require("torch", install="torch")
    for model in (reference, candidate):
        if not hasattr(model, "named_modules"):
            raise BadInput(
                f"{type(model).__name__} is not a torch module", hint="give two torch.nn.Module"
            )
    refuse_unknown("compare_models", options, JudgeKeywords)
    asked = CompareOptions.of(threads=threads, **options)
    if isolate and keep != "full":
        raise BadInput(
            f"isolate needs the candidate's whole tensors, not keep='{keep}'",
            hint="leave keep out",
        )
    models = _Models(reference, candidate, inputs)
    if progress is not None:
        return _compared(models, asked, keep, isolate, progress)
    from driftline.reporting.notebook import notebook_line  # imported on use, with its dependencies

    with notebook_line() as line:
        line.say("running both models")
        return _compared(models, asked, keep, isolate, line)


class _Models(NamedTuple):
    """Two models and their inputs."""

    reference: nn.Module
    candidate: nn.Module
    inputs: Any


def _compared(
    models: _Models, options: CompareOptions, keep: str, isolate: bool, progress: Progress
) -> Table:
    """Return the judged table of two models; see `compare_models`."""
    reference, candidate, inputs = models
    if isolate:
        candidate_run = _run(candidate, inputs, keep, "candidate")
        reference_run = _replayed(reference, inputs, candidate_run)
        # A tensor that a module's own code passes to a part is an input row of that part.
        replayed = {record.key for record in reference_run.records}
        candidate_run = only(
            candidate_run, lambda record: record.key.port == "output" or record.key in replayed
        )
        return run_comparison(reference_run, candidate_run, options, progress=progress)
    if keep == "full":
        # In lockstep, each tensor is compared as soon as it exists, and none is kept.
        table = compared_in_step(
            (reference, _caller(reference, inputs)),
            (candidate, _caller(candidate, inputs)),
            options,
        )
        if table is not None:
            return table
    reference_run = _run(reference, inputs, keep, "reference")
    candidate_run = _run(candidate, inputs, keep, "candidate")
    return run_comparison(reference_run, candidate_run, options, progress=progress)


def _caller(model: nn.Module, inputs: Any) -> Callable[[], Any]:
    args, kwargs = _call(inputs)

    def call() -> None:
        move = _mover(model)
        model(*_mapped(args, move), **_mapped(kwargs, move))

    return call


def _run(model: nn.Module, inputs: Any, keep: str, name: str) -> Any:
    import torch

    from driftline.captures.torch.framework import capture
    from driftline.runs.memory import MemorySink

    args, kwargs = _call(inputs)
    move = _mover(model)
    sink = MemorySink(name=name)
    with torch.no_grad(), torch.random.fork_rng(), capture(model, sink, keep=keep):
        # The same random state for both models, so that dropout draws the same numbers.
        torch.manual_seed(0)
        model(*_mapped(args, move), **_mapped(kwargs, move))
    return sink.run()


def _replayed(reference: nn.Module, inputs: Any, captured: Any) -> Any:
    """Return the outputs of the reference's modules on the candidate's inputs."""
    import torch

    from driftline.alignment.rules.names import link_names
    from driftline.captures.model_facts import FactOptions
    from driftline.captures.torch.session import CaptureSession
    from driftline.diagnosis.experiments.live.captured_calls import Candidate
    from driftline.diagnosis.experiments.live.replay import Replayer
    from driftline.diagnosis.experiments.replay_method import ReplayMethod
    from driftline.runs.memory import MemorySink
    from driftline.runs.sidecars.model_facts import MODEL, WEIGHTS

    def match(reference_sites: Iterable[str], candidate_sites: Iterable[str]) -> Mapping[str, str]:
        sites, candidates = list(reference_sites), set(candidate_sites)
        same_names = {site: site for site in sites if site in candidates}
        # Equal names are certain; only the others are linked by rules.
        rest = [site for site in sites if site not in same_names]
        return same_names | link_names(
            rest, [site for site in candidates if site not in same_names]
        )

    args, kwargs = _call(inputs)
    move = _mover(reference)
    exact = MemorySink(name="reference on the candidate's inputs")
    described = MemorySink()
    session = CaptureSession(described, levels=(), model=reference)
    session.describe_models(FactOptions())
    everything = ReplayMethod(keep_all=True)
    replayer = Replayer(session, Candidate(captured), match, exact, None, method=everything)
    session.stand_in = replayer
    session.start()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            reference(*_mapped(args, move), **_mapped(kwargs, move))
    finally:
        session.stop()
    report = replayer.report
    if report.clash:
        raise BadInput(
            f"the two models are not the same: {report.clash}",
            hint="compare_models without isolate aligns models that differ",
        )
    if not report.calls:
        reasons = [str(e["reason"]) for e in report.to_json()["sites"].values() if e["reason"]]
        raise BadInput(
            f"no module could be applied again: {(reasons or ['none was called'])[0]}",
            hint="compare_models without isolate compares the two models as they are",
        )
    for sheet in (MODEL, WEIGHTS):
        exact.sheet(sheet, described.run().sheet(sheet))
    return exact.run()


def _call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(cast("Mapping[str, Any]", inputs))
    if isinstance(inputs, (tuple, list)):
        return tuple(cast("Sequence[Any]", inputs)), {}
    if inputs is None:
        raise BadInput(
            "there are no inputs to run the models on",
            hint="give a tensor, a tuple of tensors, or a mapping of them by name",
        )
    return (inputs,), {}


def _mover(model: nn.Module) -> Callable[[Any], Any]:
    """Return a function that moves a tensor to the model's device and dtype, if it has just one."""
    import torch

    parameters = list(model.parameters())
    devices = {parameter.device for parameter in parameters}
    dtypes = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        # A clone, because a model that works in place must not change the other model's input.
        value = value.clone()
        # A model on several devices moves its inputs itself.
        if len(devices) == 1:
            value = value.to(next(iter(devices)))
        if value.is_floating_point() and len(dtypes) == 1:
            value = value.to(next(iter(dtypes)))
        return value

    return move


def _mapped(value: Any, move: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(item, move) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, (tuple, list)):
        items = [_mapped(item, move) for item in cast("list[Any]", value)]
        return items if isinstance(value, list) else tuple(items)
    return move(value)
