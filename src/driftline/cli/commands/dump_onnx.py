"""`driftline dump --engine onnxruntime`: a model file → `driftline.capture_onnx` → a run.

No program is launched: the model is a file and runs in this process. Options that apply only to
launched programs are refused.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from cyclopts import Parameter

from driftline.captures.launch.jobs import Layout, LogLevel
from driftline.captures.model_facts import FactOptions
from driftline.captures.options import Reduction
from driftline.captures.selection import Selection
from driftline.cli import python_script as script
from driftline.cli.options import ONNX, OUTPUT, SEVERAL
from driftline.cli.output import run_place, unsent_lines
from driftline.cli.progress import progress_bar
from driftline.errors import EXIT_COULD_NOT, EXIT_FINE, BadInput
from driftline.units import size_of, size_text

if TYPE_CHECKING:
    from driftline.captures.onnxruntime.api import OnnxCapture
    from driftline.runs.stores.upload import Sent

# What `--memory` is if it is not given, as its help says.
DEFAULT_MEMORY = 1 << 30


@Parameter(name="*", group=ONNX)
@dataclass(frozen=True)
class OnnxOptions:
    """An ONNX model and how to run it.

    Attributes:
        model: The ONNX file; its weights may be in files next to it.
        inputs: Arrays by name, or a run that provides the model inputs. Each file or run is a step.
        optimize: How much ONNX Runtime optimizes the graph; the optimized graph is captured.
            Default: all.
        providers: Execution providers, the preferred one first, such as CUDA CPU. Default: CPU.
        threads: Threads of one node. Default: ONNX Runtime chooses.
        memory: Memory for inner tensors; if they need more, the model is executed several times.
            Default: 1GB.
        at_once: How many inner tensors one execution captures. Default: as many as fit.
        custom_ops: A library with custom operators; may be repeated.
        session_config: A further entry of the session's configuration; may be repeated.
        profile: Write ONNX Runtime's profile of the session without capture to this file.
    """

    model: Annotated[str, Parameter(metavar="FILE.onnx")] = ""
    inputs: Annotated[list[str] | None, SEVERAL, Parameter(metavar="FILE.npz|RUN")] = None
    optimize: Literal["none", "basic", "extended", "all"] | None = None
    providers: Annotated[list[str] | None, SEVERAL, Parameter(metavar="NAME")] = None
    threads: Annotated[int | None, Parameter(metavar="N")] = None
    memory: Annotated[str, Parameter(metavar="SIZE")] = ""
    at_once: Annotated[int | None, Parameter(metavar="N")] = None
    custom_ops: Annotated[list[str] | None, Parameter(metavar="LIBRARY")] = None
    session_config: Annotated[list[str] | None, Parameter(metavar="NAME=VALUE")] = None
    profile: Annotated[str, Parameter(metavar="FILE.json")] = ""

    def spelt(self) -> list[str]:
        """The options that were given, as they are spelt on the command line."""
        return [
            f"--{field.name.replace('_', '-')}"
            for field in fields(self)
            if getattr(self, field.name)
        ]


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class RunOutputOptions:
    """Where a run goes.

    Attributes:
        output: Folder of the run, or an address such as s3://bucket/run; the run is sent there
            while the program runs. Default: ./driftline_{timestamp}.
        stage: With an address: the folder for parts that are not sent yet; it is deleted when
            everything is sent. Default: ./NAME.sending.
        layout: run, or ait for the tree of `ait llm dump`.
        force: Replace an existing run.
        dry_run: Print the plan and run nothing.
        log_level: How much to print.
    """

    output: Annotated[str, Parameter(name=("--output", "-o"), metavar="DIR")] = ""
    stage: Annotated[str, Parameter(metavar="DIR")] = ""
    layout: Layout = "run"
    force: bool = False
    dry_run: bool = False
    log_level: Annotated[LogLevel, Parameter(name=("--log-level", "-l"))] = "info"

    @property
    def quiet(self) -> bool:
        """Whether nothing is printed if there is no problem."""
        return self.log_level not in ("debug", "info")


@dataclass(frozen=True)
class OnnxAmount:
    """Which tensors of the model are kept, and how much of them."""

    selection: Selection
    reduction: Reduction
    levels: Sequence[str]
    max_bytes: str
    facts: FactOptions


def is_onnx(engine: str | None, model: OnnxOptions) -> bool:
    """Whether the command line asks for a model of ONNX Runtime.

    Raises:
        BadInput: Options of an ONNX model are given, and another engine is named, or no model is.
    """
    if engine == "onnxruntime" or (engine is None and model.model):
        return True
    if options := model.spelt():
        raise BadInput(
            f"{options[0]} is for ONNX Runtime",
            hint="driftline dump --engine onnxruntime --model m.onnx",
        )
    return False


def refuse_program_options(options: Mapping[str, bool]) -> None:
    """Refuse options that do not apply to a model file.

    Args:
        options: Whether each was given, by its spelling.

    Raises:
        BadInput: One was.
    """
    for option, is_given in options.items():
        if is_given:
            raise BadInput(
                f"{option} does not apply to ONNX Runtime: it runs a model, not a program",
                hint="leave it out",
            )


def dump_onnx(model: OnnxOptions, amount: OnnxAmount, output: RunOutputOptions) -> int:
    """Run the model and print what was captured."""
    from driftline.captures.onnxruntime.api import capture_onnx
    from driftline.formats.registry import open_run

    _check_model(model)
    folder, url = run_place(output.output, output.stage)
    # The path as it was typed: this process does not change its working directory.
    if not url:
        folder = output.output or Path(folder).name
    options = _capture_options(model, amount, force=output.force)
    if output.dry_run and not script.is_script():
        for line in _plan_lines(model, url or folder, options):
            print(line)
        return EXIT_FINE
    sent: Sent | None = None
    inputs = [script.part(open_run, word) if "://" in word else word for word in model.inputs or ()]
    with progress_bar("tensors", quiet=output.quiet) as progress:
        options["progress"] = progress
        if url and not script.is_script():
            captured, sent = _capture_and_send(model.model, inputs, folder, url, options)
        else:
            captured = script.step("captured", capture_onnx, model.model, inputs, folder, **options)
    if url and script.is_script():
        from driftline.runs.stores.api import push

        script.step("sent", push, folder, url, force=output.force)
    script.end(captured)
    if not output.quiet:
        for line in _summary(captured, model, sent.url if sent is not None else folder):
            print(line, file=sys.stderr)
    if sent is not None and sent.reason:
        for line in unsent_lines(sent, url):
            print(line, file=sys.stderr)
        return EXIT_COULD_NOT
    return EXIT_FINE


def _check_model(model: OnnxOptions) -> None:
    """Refuse a command line without a model, or without the inputs that the model needs."""
    from driftline.captures.onnxruntime.inputs import NOTHING_TAKEN

    if not model.model:
        raise BadInput("there is no model to run", hint="--model m.onnx")
    if not model.inputs and (declared := _declared_inputs(model.model)) != NOTHING_TAKEN:
        raise BadInput(
            "there are no inputs to run the model with",
            hint=f"--inputs x.npz, or a run that provides the inputs; {declared}",
        )


def _capture_options(model: OnnxOptions, amount: OnnxAmount, *, force: bool) -> dict[str, Any]:
    """Keyword arguments of `driftline.capture_onnx`."""
    providers = [name for word in model.providers or () for name in word.split(",") if name]
    return {
        "optimize": model.optimize or "all",
        "providers": tuple(providers),
        "threads": model.threads or 0,
        "memory": size_of(model.memory) if model.memory else DEFAULT_MEMORY,
        "values_at_once": model.at_once or 0,
        "custom_ops": tuple(model.custom_ops or ()),
        "session_config": _session_entries(model.session_config or ()),
        "selection": amount.selection if amount.selection != Selection() else None,
        "keep": str(amount.reduction),
        "levels": tuple(amount.levels) or ("modules", "ops"),
        "max_bytes": size_of(amount.max_bytes) if amount.max_bytes else None,
        "force": force,
        **({"profile": model.profile} if model.profile else {}),
        # Defaults are left out, so that a printed plan shows what was asked for.
        **({} if amount.facts.model else {"model_facts": False}),
        **({} if amount.facts.weights else {"weight_facts": False}),
    }


def _capture_and_send(
    model: str, inputs: Sequence[Any], folder: str, url: str, options: Mapping[str, Any]
) -> tuple[OnnxCapture, Sent]:
    """Capture into a folder whose shards go to an address as soon as they are complete."""
    from driftline.captures.onnxruntime.api import capture_onnx
    from driftline.runs.layout import SENT_SHARD_BYTES
    from driftline.runs.provenance import create_run
    from driftline.runs.stores.upload import Sending
    from driftline.runs.writer import RunWriter

    rest = dict(options)
    max_bytes = rest.pop("max_bytes")
    sending = Sending(Path(folder), url, force=rest.pop("force"), staged=True)
    writer = RunWriter(folder, max_bytes=max_bytes, shard_bytes=SENT_SHARD_BYTES)
    try:
        create_run(folder)
        sending.begin()
        captured = capture_onnx(model, inputs, writer, **rest)
    # Also for Ctrl-C: half a run must not look like one.
    except BaseException:
        writer.close()
        sending.abandon()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return captured, sending.finish()


def _session_entries(words: Sequence[str]) -> dict[str, str] | None:
    entries: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise BadInput(
                f"--session-config takes NAME=VALUE, not '{word}'",
                hint="such as session.intra_op.allow_spinning=0",
            )
        entries[name] = value
    return entries or None


def _declared_inputs(model: str) -> str:
    """The inputs that a model declares, read without running it."""
    from driftline.captures.onnxruntime.inputs import declared
    from driftline.captures.onnxruntime.model_file import load_graph

    return declared(load_graph(Path(model)))


def _plan_lines(model: OnnxOptions, place: str, options: Mapping[str, Any]) -> list[str]:
    shown = {name: value for name, value in options.items() if value not in ((), None, 0, False)}
    selection: Selection = shown.pop("selection", Selection())
    return [
        f"model: {model.model}",
        f"inputs: {', '.join(model.inputs or ())}",
        f"output: {place}",
        *(f"{name}: {_joined(value)}" for name, value in shown.items()),
        *(f"only {name}: {_joined(value)}" for name, value in selection.to_json().items()),
    ]


def _joined(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in cast("Sequence[object]", value))
    return str(value)


def _memory_text(model: OnnxOptions) -> str:
    size = f"{model.memory or '1GB'} of inner tensors"
    return f"{model.at_once} inner tensors, or {size}," if model.at_once else size


def _summary(captured: OnnxCapture, model: OnnxOptions, place: str) -> list[str]:
    steps = len(captured.steps)
    nodes = f"{captured.nodes} node{'s' if captured.nodes != 1 else ''}"
    if captured.nodes != captured.exported_nodes:
        nodes += f" (the file has {captured.exported_nodes})"
    lines = [
        f"driftline: {captured.tensors} tensor{'s' if captured.tensors != 1 else ''}, "
        f"{size_text(captured.bytes)}, {nodes}, "
        f"{steps} step{'s' if steps != 1 else ''} in {place}"
    ]
    if captured.executions > 1:
        lines.append(
            f"  note: each step was executed {captured.executions} times, so that no more than "
            f"{_memory_text(model)} are held at a time"
        )
    if captured.faithful:
        lines.append("  outputs are bit for bit those of the session without capture")
    lines += [f"  note: {note}" for note in captured.notes]
    from driftline.runs.stores.addresses import memory_warning

    next_command = f"next: driftline compare REFERENCE {shlex.quote(place)}"
    lines.append(f"  {memory_warning(place) or next_command}")
    return lines
