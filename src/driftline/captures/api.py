"""The Python entry to capture: `with driftline.capture(model, "run"):` and `driftline.step()`.

A model's framework is recognised by the model's class; only that framework's adapter is imported.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

from driftline import settings
from driftline.captures.calls import StepsBy
from driftline.captures.framework import FRAMEWORKS, adapter_of
from driftline.captures.ladder import LADDER, takes_ladder
from driftline.captures.model_facts import FactOptions
from driftline.captures.module_calls import exception_words
from driftline.captures.options import Reduction, WhenFull, budgets_from
from driftline.captures.selection import Selection, patterns, require_visible
from driftline.captures.session import LEVELS, Session, checked_levels
from driftline.errors import BadInput, did_you_mean
from driftline.runs.jobs import begin_run
from driftline.runs.sinks import Sink
from driftline.runs.writer import RunWriter

Filter = str | int | Iterable[str | int] | None


class Capture:
    """A capture that runs inside a `with` block.

    Attributes:
        path: The run's folder; None when a sink was given instead.
        session: Installs the hooks and records the tensors.
    """

    def __init__(self, session: Session, path: Path | None) -> None:
        self.session = session
        self.path = path
        self._entered = False

    def step(self) -> None:
        """End the current step. From then on only such calls count steps."""
        self.session.step_over()

    def __enter__(self) -> Self:
        if self._entered:  # its run is already sealed or is being written
            raise BadInput(
                "a capture is good for one with block", hint="call driftline.capture again"
            )
        self._entered = True
        self.session.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.session.exception = exception_words(error)
        self.session.stop()
        # If the program raised, warnings about the capture would only hide its message.
        if error is None:
            for sentence in self.session.end_warnings():
                warnings.warn(sentence, stacklevel=2)


def capture(
    model: Any,
    path: str | os.PathLike[str] | Sink,
    *,
    sites: Filter = None,
    classes: Filter = None,
    ports: Filter = None,
    steps: Filter = None,
    ranks: Filter = None,
    keep: str = "full",
    levels: str | Iterable[str] = ("modules",),
    steps_by: StepsBy = "auto",
    selection: Selection | None = None,
    max_bytes: int | None = None,
    budget: int | None = None,
    device_budget: int | None = None,
    host_budget: int | None = None,
    when_full: WhenFull = "wait",
    force: bool = False,
    graph: Literal["auto", "fx", "inductor"] | None = None,
    fusion: bool = True,
    model_facts: bool = True,
    weight_facts: bool = True,
) -> Capture:
    """Capture the tensors that a model computes inside a `with` block into a run.

    Args:
        model: The model to watch, a torch module or a Paddle layer. Capturing does not change a bit
            of its results.
        path: The run's folder, or a sink to write to.
        sites: One or more globs on module paths, such as `model.layers.*.mlp`.
        classes: One or more globs on class names.
        ports: One or more globs on ports: input, output, grad_input, grad_output, param,
            param_grad, optimizer_grad.
        steps: Numbers, `3-5`, a `range`, or `*` for all steps. By default step 0 is kept in full
            and later steps as summaries: 1 to 15, then powers of two and their successors. With
            the level ops, or with `graph`, only step 0 is captured by default.
        ranks: Ranks to capture, in the same form. All by default.
        keep: What to keep of each tensor: full, summary, digest, sample, sample(n) or describe.
        levels: One or more of modules, ops, gradients, params.
        steps_by: The event that ends a step: call, optimizer or manual; auto decides by what the
            program does.
        selection: A `Selection`, instead of the filters above.
        max_bytes: The run stores at most this many bytes of tensors.
        budget: If `steps` is not given, the steps after the first may take this many bytes of disk;
            the last ones are left out. 1 GiB by default.
        device_budget: Bytes on each GPU for copies of tensors until they are transferred; 1 GiB by
            default.
        host_budget: Bytes of pinned host memory for transferred tensors; 2 GiB by default.
        when_full: What happens if these budgets are used up: `wait` makes the program wait, `drop`
            leaves tensors out and counts them.
        force: Replace an existing run.
        graph: Also capture the graphs that `torch.compile` makes of the model: `auto` captures what
            the program's backend runs; `fx` executes the graphs node by node with torch's own
            operators, whatever the backend; `inductor` reads what inductor's kernels compute. Code
            that was compiled before the block is compiled again in it, and again after it.
        fusion: With `inductor`, False gives every node its own kernel.
        model_facts: Also describe the model: attributes, code, state, training; see
            docs/model-facts.md.
        weight_facts: If the model is described, also store digests and samples of its weights.

    Raises:
        AlreadyThere: The folder exists and `force` was not given.
        BadInput: A filter, level, reduction or graph is invalid.
    """
    engine = engine_of(model)
    filters = Selection(
        sites=patterns(sites),
        classes=patterns(classes),
        ports=patterns(ports),
        steps=patterns(steps),
        ranks=patterns(ranks),
    )
    if selection is None:
        selection = filters
    elif filters != Selection():
        raise BadInput(
            "both a selection and filters were given", hint="put the filters into the selection"
        )
    levels = checked_levels(levels)
    # With an empty list nothing would be recorded, without an error.
    if not levels:
        raise BadInput("no level was given", hint=f"levels are {', '.join(LEVELS)}")
    require_visible(selection.ports, levels)
    engine.check_levels(levels)
    if steps_by not in get_args(StepsBy):
        raise BadInput(
            f"there is no steps_by '{steps_by}'", hint=did_you_mean(steps_by, get_args(StepsBy))
        )
    if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 0):
        raise BadInput(f"max_bytes is a number of bytes, not {max_bytes!r}")
    # Only graphs compiled by torch can be captured.
    if graph is not None or not fusion:
        if not hasattr(engine, "check_graph"):
            raise BadInput("only torch has compiled graphs to be seen", hint="leave out graph")
        engine.check_graph(graph, levels, fusion=fusion)
    budgets = budgets_from(device_budget, host_budget, when_full)
    reduction = Reduction.parse(keep)
    if budget is not None and (type(budget) is not int or budget < 0):
        raise BadInput(f"budget is a number of bytes, not {budget!r}")
    if not selection.steps and steps is None and takes_ladder(levels, graph):
        selection = replace(selection, steps=(LADDER,))
        reduction = reduction.with_ladder()
    place = settings.job_place()
    if isinstance(path, str | os.PathLike):
        # The folder is claimed before anything is installed, so that a refusal does not change the
        # program.
        folder = begin_run(path, force=force)
        sink: Sink = RunWriter(
            folder, rank=place.rank, world_size=place.world_size, max_bytes=max_bytes
        )
    else:
        folder, sink = None, path
    sink.describe(**engine.facts())
    session = engine.session_for(
        sink,
        selection,
        reduction,
        levels,
        model=model,
        rank=place.rank,
        steps_by=steps_by,
        to_folder=folder is not None,
    )
    session.set_budget(budget)
    # Only frameworks with a device backend have budgets to set.
    if hasattr(session, "device_backend"):
        session.device_backend.budgets = budgets
    if graph is not None:
        engine.watch_graphs(session, sink, graph, fusion=fusion)
    session.describe_models(FactOptions(model_facts, weight_facts))
    return Capture(session, folder)


def engine_of(model: object) -> Any:
    """The adapter module of a model's framework.

    Raises:
        BadInput: The model belongs to no framework.
    """
    adapter = adapter_of(model)
    if adapter is not None:
        return adapter
    raise BadInput(
        f"{type(model).__name__} is not a torch module",
        hint="give the model itself, an nn.Module, or a Paddle nn.Layer",
    )


def step() -> None:
    """End the current step of every capture in this process."""
    for framework in FRAMEWORKS.values():
        # A framework that the program has not imported cannot have a capture.
        watch = sys.modules.get(framework.module_calls)
        if watch is not None:
            for session in watch.active():
                session.step_over()
