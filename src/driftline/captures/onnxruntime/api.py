"""The Python entry for ONNX models: `driftline.capture_onnx("m.onnx", {"x": x}, "run")`.

This file checks the arguments; `capture.ModelCapture` optimises, executes and records the model.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from driftline.captures.model_facts import FactOptions
from driftline.captures.onnxruntime import model_file, sessions
from driftline.captures.onnxruntime.capture import Budget, ModelCapture
from driftline.captures.onnxruntime.graph import Graph
from driftline.captures.onnxruntime.inputs import Source, feeds_of, random_inputs
from driftline.captures.onnxruntime.model_facts import write_model_facts
from driftline.captures.onnxruntime.quantised import float_view
from driftline.captures.onnxruntime.sessions import Level
from driftline.captures.onnxruntime.tensors import look
from driftline.captures.onnxruntime.topology import facts
from driftline.captures.options import Reduction
from driftline.captures.recorder import Recorder
from driftline.captures.selection import Selection, patterns, require_visible
from driftline.errors import AlreadyThere, BadInput
from driftline.runs.memory import MemorySink
from driftline.runs.provenance import check_room, create_run, refuse_addresses
from driftline.runs.run import Run
from driftline.runs.sinks import JSON, Sink
from driftline.runs.writer import RunWriter

Filter = str | int | Iterable[str | int] | None
LEVELS = ("modules", "ops", "params")
MEMORY = 1 << 30
"""Default limit of the bytes of inner tensors that are in memory at a time."""


class OnnxCapture(NamedTuple):
    """What came of a capture.

    Attributes:
        path: The run's folder; None when a sink was given.
        tensors: How many were recorded.
        bytes: How many bytes of them were stored.
        steps: The numbers of the steps.
        nodes: How many nodes the captured graph has.
        exported_nodes: How many the file has.
        executions: How often each step was executed, to keep memory bounded.
        faithful: Whether every step gave, bit for bit, what the session without capture gives.
        notes: What else there is to say, one sentence each.
    """

    path: Path | None
    tensors: int
    bytes: int
    steps: tuple[int, ...]
    nodes: int
    exported_nodes: int
    executions: int
    faithful: bool
    notes: tuple[str, ...]


def capture_onnx(
    model: str | os.PathLike[str],
    inputs: Source | Iterable[Source],
    path: str | os.PathLike[str] | Sink,
    *,
    optimize: Level = "all",
    providers: str | Sequence[str] = (),
    threads: int = 0,
    parallel_nodes: int = 0,
    custom_ops: Sequence[str] = (),
    session_config: Mapping[str, str] | None = None,
    memory: int = MEMORY,
    values_at_once: int = 0,
    sites: Filter = None,
    classes: Filter = None,
    ports: Filter = None,
    steps: Filter = None,
    selection: Selection | None = None,
    keep: str = "full",
    levels: str | Iterable[str] = ("modules", "ops"),
    max_bytes: int | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    model_facts: bool = True,
    weight_facts: bool = True,
    profile: str | os.PathLike[str] | None = None,
) -> OnnxCapture:
    """Run an ONNX model with ONNX Runtime and keep what its nodes computed.

    The graph that is captured is the one that ONNX Runtime makes of the file at this optimisation
    level: the same nodes, the same bits.

    Args:
        model: The `.onnx` file; weights may be next to it.
        inputs: Arrays by name, an `.npz` file, or a run whose model inputs are taken. Several sets
            are steps.
        path: The run's folder, or a sink to write to.
        optimize: none, basic, extended or all.
        providers: Where it runs, the preferred one first: `CPU`, `CUDA`. Default: CPU.
        threads: Threads of one node. 0: as ONNX Runtime likes.
        parallel_nodes: Threads for nodes side by side. 0: one node after the other.
        custom_ops: Libraries with operators of your own.
        session_config: Further entries of the session's configuration.
        memory: Bytes of inner tensors held at a time; a larger model is executed several times.
        values_at_once: How many inner tensors are held at a time. 0: as many as memory allows.
        sites: Globs on sites; a text, or several.
        classes: Globs on operators and module classes.
        ports: Globs on ports: input, output, param.
        steps: Numbers, `3-5`, or a `range`.
        selection: Instead of the filters above.
        keep: full, summary, digest, sample, sample(n) or describe.
        levels: modules (by what the exporter says of them), ops (nodes), params (weights).
        max_bytes: Store no more tensor bytes than this.
        force: Replace a run that is there already.
        progress: Called with (done, in all) tensors.
        model_facts: Also describe the model: nodes and initializers; see docs/model-facts.md.
        weight_facts: With it, also digests and samples of its weights.
        profile: Where to write ONNX Runtime's own profile of the session without capture: the time
            of every node, as JSON.

    Raises:
        NotInstalled: onnxruntime or onnx is missing; the sentence has the install line.
        BadFile: The model cannot be loaded: no such operator, no model at all.
        BadInput: Inputs of other names, types or shapes than the model takes.
        AlreadyThere: The folder exists and `force` was not given.
    """
    chosen = _selection(selection, sites, classes, ports, steps)
    shown = _levels(levels)
    require_visible(chosen.ports, shown)
    reduction = Reduction.parse(keep)
    # `memory` must not be 0, because no tensor would fit; 0 means no limit for `values_at_once`.
    for name, number in (("memory", memory), ("values_at_once", values_at_once)):
        if type(number) is not int or number < 0 or (name == "memory" and not number):
            raise BadInput(f"{name} is a number above nought, not {number!r}")
    words = providers.split(",") if isinstance(providers, str) and providers else list(providers)
    plan = sessions.plan_of(
        optimize,
        words,
        threads=threads,
        parallel_nodes=parallel_nodes,
        custom_ops=custom_ops,
        config=session_config,
        profiled=profile is not None,
    )
    if profile is not None and Path(profile).exists() and not force:
        raise AlreadyThere(f"{profile} exists", hint="give another file for the profile, or force")
    file = Path(model)
    proto = model_file.load_graph(file)
    files = [file, *model_file.check_external(file, proto)]
    exported = float_view(Graph(proto))
    exported_nodes = len(proto.graph.node)
    # The protobuf of a large graph takes as much memory as the graph made from it.
    del proto
    writes = isinstance(path, str | os.PathLike)
    if writes:  # checked before minutes of work
        refuse_addresses(path)
        check_room(Path(path), force=force)
    place = Path(path) if writes else path.path if isinstance(path, RunWriter) else None
    with contextlib.ExitStack() as stack:
        # Next to the run, because an optimised model may be too large for the system's temporary
        # folder.
        folder = _scratch(stack, place.absolute().parent if place is not None else None)
        work = ModelCapture(file, plan, exported, folder)
        # The inputs are checked only now, because the session knows which inputs the model takes.
        all_feeds = feeds_of(inputs, work.wanted)
        feeds = [(step, feed) for step, feed in all_feeds if chosen.takes_step(step)]
        if not feeds:
            steps_there = ", ".join(str(step) for step, _ in all_feeds)
            raise BadInput(
                f"no step is selected; the steps are {steps_there}",
                hint="each set of inputs is a step",
            )
        selected = work.choose(chosen, shown)
        # Outputs without capture are computed first, so that their session can be freed.
        expected = [work.plain_digests(feed) for _, feed in feeds]
        if profile is not None:
            work.save_profile(Path(profile))
        work.free_plain_session()
        # The run is created only now: everything that can be refused has been checked.
        sink, written = _sink(path, max_bytes=max_bytes, force=force)
        stack.callback(sink.close)
        # The request is stored, because readers of the run need to know what it can contain.
        asked: dict[str, JSON] = {"levels": list(shown), "selection": chosen.to_json()}
        sink.describe(capture=asked, **facts(file, files, plan, work.traced))
        recorder = Recorder(sink, chosen, reduction, 0, look)
        executions, faithful = work.capture(
            recorder,
            sink,
            selected,
            feeds,
            expected,
            Budget(memory, values_at_once),
            progress,
        )
        write_model_facts(sink, file, work.traced, FactOptions(model_facts, weight_facts))
        return OnnxCapture(
            written,
            sink.tensors_written,
            sink.bytes_written,
            tuple(step for step, _ in feeds),
            len(work.traced.optimised.nodes),
            exported_nodes,
            executions,
            faithful,
            _notes(sink, work, faithful=faithful),
        )


def run_onnx(
    model: str | os.PathLike[str],
    inputs: Source | Iterable[Source] | None = None,
    *,
    seed: int = 0,
    optimize: Level = "all",
    providers: str | Sequence[str] = (),
) -> Run:
    """The run of an ONNX model, held in memory: what `capture_onnx` keeps, without a folder.

    Args:
        model: The `.onnx` file.
        inputs: As for `capture_onnx`. None: drawn by chance, as the file declares them.
        seed: Of the random numbers.
        optimize: none, basic, extended or all.
        providers: Where it runs, the preferred one first.

    Raises:
        DriftlineError: As `capture_onnx`.
    """
    sink = MemorySink(name=Path(model).name)
    source = random_inputs(model, seed) if inputs is None else inputs
    capture_onnx(model, source, sink, optimize=optimize, providers=providers)
    return sink.run()


def _notes(sink: Sink, work: ModelCapture, *, faithful: bool) -> tuple[str, ...]:
    notes = work.unseen()
    if integer_nodes := work.integer_nodes():
        # Integers must be multiplied by their scales before they can be compared.
        notes.append(
            f"{integer_nodes} nodes compute with integers: against a float model their values are "
            "taken times their scales; with optimize 'none' all of a QDQ model is floats"
        )
    if not faithful:
        notes.append(
            "the captured run is not bit for bit what the session without capture gives; "
            "its events say which output"
        )
    if isinstance(sink, RunWriter):
        if sink.failure:
            notes.append(f"not everything was stored: {sink.failure}")
        elif sink.over_limit:
            notes.append("the size limit was reached: later tensors are listed without values")
    return tuple(notes)


def _selection(
    selection: Selection | None, sites: Filter, classes: Filter, ports: Filter, steps: Filter
) -> Selection:
    filters = Selection(
        sites=patterns(sites),
        classes=patterns(classes),
        ports=patterns(ports),
        steps=patterns(steps),
    )
    if selection is None:
        return filters
    if filters != Selection():
        raise BadInput(
            "both a selection and filters were given", hint="put the filters into the selection"
        )
    return selection


def _levels(levels: str | Iterable[str]) -> tuple[str, ...]:
    chosen = patterns(levels)
    for level in chosen:
        if level not in LEVELS:
            raise BadInput(
                f"ONNX Runtime has no level '{level}'", hint=f"levels are {', '.join(LEVELS)}"
            )
    if not chosen:
        raise BadInput("no level was given", hint=f"levels are {', '.join(LEVELS)}")
    return chosen


def _scratch(stack: contextlib.ExitStack, parent: Path | None) -> Path:
    """A temporary folder for the optimised model: in `parent`, if that can be written."""
    if parent is not None:
        with contextlib.suppress(OSError):
            parent.mkdir(parents=True, exist_ok=True)
            return Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix=".driftline-", dir=parent))
            )
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="driftline-")))


def _sink(
    path: str | os.PathLike[str] | Sink, *, max_bytes: int | None, force: bool
) -> tuple[Sink, Path | None]:
    if isinstance(path, str | os.PathLike):
        folder = create_run(path, force=force)
        return RunWriter(folder, max_bytes=max_bytes), folder
    return path, None
