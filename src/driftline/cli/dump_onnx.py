"""`driftline dump --engine onnxruntime`: words → `driftline.capture_onnx` → what was captured.

There is no program to launch: the model is a file, and is run here. Options of launched programs
that mean nothing then are refused.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from driftline.captures.options import Reduction
from driftline.captures.selection import Selection
from driftline.cli import dump_words, script
from driftline.cli.progress import on_terminal
from driftline.errors import EXIT_COULD_NOT, EXIT_FINE, BadInput
from driftline.units import say_size, size_of

if TYPE_CHECKING:
    from driftline.captures.onnxruntime.api import OnnxCapture
    from driftline.runs.stores.upload import Sent

Optimize = Literal["none", "basic", "extended", "all"]
GROUP = "ONNX Runtime"


class OnnxWords(NamedTuple):
    """What was said of an ONNX model and how to run it.

    Attributes:
        model: The file.
        inputs: Files of inputs, or runs.
        optimize: How much of the graph is optimised.
        providers: Where it runs.
        threads: Threads of one node.
        memory: Size of inner tensors that are held at a time.
        at_once: How many of them are.
        custom_ops: Libraries of operators.
        session_config: `NAME=VALUE`, further entries of the session's configuration.
    """

    model: str
    inputs: Sequence[str]
    optimize: Optimize | None
    providers: Sequence[str]
    threads: int | None
    memory: str
    at_once: int | None
    custom_ops: Sequence[str]
    session_config: Sequence[str]

    def given(self) -> list[str]:
        """The options that were, as they are spelt."""
        return [f"--{name.replace('_', '-')}" for name in self._fields if getattr(self, name)]


def is_onnx(engine: str | None, words: OnnxWords) -> bool:
    """Whether a model of ONNX Runtime is meant.

    Raises:
        BadInput: Something was said of an ONNX model, and another engine is named, or no model is.
    """
    if engine == "onnxruntime" or (engine is None and words.model):
        return True
    if given := words.given():
        raise BadInput(
            f"{given[0]} is for ONNX Runtime",
            hint="driftline dump --engine onnxruntime --model m.onnx",
        )
    return False


def refuse(given: Mapping[str, bool]) -> None:
    """Say which option means nothing here.

    Raises:
        BadInput: One was given.
    """
    for option, was in given.items():
        if was:
            raise BadInput(
                f"{option} means nothing for ONNX Runtime, which runs a model and no program",
                hint="leave it out",
            )


def dump_onnx(
    words: OnnxWords,
    *,
    output: str,
    stage: str,
    selection: Selection,
    reduction: Reduction,
    levels: Sequence[str],
    max_bytes: str,
    force: bool,
    dry_run: bool,
    quiet: bool,
) -> int:
    """Run the model and say what was captured."""
    from driftline.captures.onnxruntime.api import capture_onnx
    from driftline.captures.onnxruntime.inputs import NOTHING_TAKEN
    from driftline.formats.registry import open_run

    if not words.model:
        raise BadInput("there is no model to run", hint="--model m.onnx")
    if not words.inputs and (takes := _takes(words.model)) != NOTHING_TAKEN:
        raise BadInput(
            "there are no inputs to run the model with",
            hint=f"--inputs x.npz, or a run whose inputs are taken; {takes}",
        )
    place, url = dump_words.place_of_run(output, stage)
    if not url:
        place = output or Path(place).name
    options: dict[str, Any] = {
        "optimize": words.optimize or "all",
        "providers": tuple(one for word in words.providers for one in word.split(",") if one),
        "threads": words.threads or 0,
        "memory": size_of(words.memory) if words.memory else 1 << 30,
        "values_at_once": words.at_once or 0,
        "custom_ops": tuple(words.custom_ops),
        "session_config": _entries(words.session_config),
        "selection": selection if selection != Selection() else None,
        "keep": str(reduction),
        "levels": tuple(levels) or ("modules", "ops"),
        "max_bytes": size_of(max_bytes) if max_bytes else None,
        "force": force,
    }
    if dry_run and not script.asked():
        for line in _plan(words, url or place, options):
            print(line)
        return EXIT_FINE
    progress = None if quiet else on_terminal("tensors")
    sent: Sent | None = None
    given = [script.part(open_run, word) if "://" in word else word for word in words.inputs]
    try:
        if url and not script.asked():
            captured, sent = _sent_meanwhile(words.model, given, place, url, options, progress)
        else:
            captured = script.step(
                "captured",
                capture_onnx,
                words.model,
                given,
                place,
                **options,
                progress=progress,
            )
    finally:
        if progress is not None:
            progress.close()
    if url and script.asked():
        from driftline.runs.stores.api import push

        script.step("sent", push, place, url, force=force)
    script.end(captured)
    unsent = sent is not None and bool(sent.reason)
    if not quiet:
        for line in _summary(captured, words, sent.url if sent is not None else place):
            print(line, file=sys.stderr)
    if unsent and sent is not None:
        for line in dump_words.said_unsent(sent, url):
            print(line, file=sys.stderr)
    return EXIT_COULD_NOT if unsent else EXIT_FINE


def _sent_meanwhile(
    model: str,
    inputs: Sequence[Any],
    place: str,
    url: str,
    options: Mapping[str, Any],
    progress: Callable[[int, int], None] | None,
) -> tuple[OnnxCapture, Sent]:
    """Capture into a folder whose shards go to an address as soon as they are complete."""
    from driftline.captures.onnxruntime.api import capture_onnx
    from driftline.runs.provenance import create_run
    from driftline.runs.stores.upload import Sending
    from driftline.runs.writer import RunWriter

    rest = dict(options)
    most = rest.pop("max_bytes")
    sending = Sending(Path(place), url, force=rest.pop("force"), staged=True)
    writer = RunWriter(place, max_bytes=most, shard_bytes=dump_words.SENT_SHARD_BYTES)
    try:
        create_run(place)
        sending.begin()
        captured = capture_onnx(model, inputs, writer, **rest, progress=progress)
    except BaseException:
        writer.close()
        sending.abandon()
        shutil.rmtree(place, ignore_errors=True)
        raise
    return captured, sending.finish()


def _entries(given: Sequence[str]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise BadInput(
                f"--session-config takes NAME=VALUE, not '{word}'",
                hint="such as session.intra_op.allow_spinning=0",
            )
        found[name] = value
    return found or None


def _takes(model: str) -> str:
    """What a model takes, where that can be read without running it."""
    from driftline.captures.onnxruntime.inputs import declared
    from driftline.captures.onnxruntime.model_file import load_graph

    return declared(load_graph(Path(model)))


def _plan(words: OnnxWords, place: str, options: Mapping[str, Any]) -> list[str]:
    shown = {name: value for name, value in options.items() if value not in ((), None, 0, False)}
    selection: Selection = shown.pop("selection", Selection())
    return [
        f"model: {words.model}",
        f"inputs: {', '.join(words.inputs)}",
        f"output: {place}",
        *(f"{name}: {_word(value)}" for name, value in shown.items()),
        *(f"only {name}: {_word(value)}" for name, value in selection.to_json().items()),
    ]


def _word(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(str(one) for one in cast("Sequence[object]", value))
    return str(value)


def _held(words: OnnxWords) -> str:
    size = f"{words.memory or '1GB'} of inner tensors"
    return f"{words.at_once} inner tensors, or {size}," if words.at_once else size


def _summary(captured: OnnxCapture, words: OnnxWords, place: str) -> list[str]:
    steps = len(captured.steps)
    nodes = f"{captured.nodes} node{'s' if captured.nodes != 1 else ''}"
    if captured.nodes != captured.exported_nodes:
        nodes += f" (the file has {captured.exported_nodes})"
    lines = [
        f"driftline: {captured.tensors} tensor{'s' if captured.tensors != 1 else ''}, "
        f"{say_size(captured.bytes)}, {nodes}, "
        f"{steps} step{'s' if steps != 1 else ''} in {place}"
    ]
    if captured.executions > 1:
        lines.append(
            f"  note: each step was executed {captured.executions} times, so that no more than "
            f"{_held(words)} are held at a time"
        )
    if captured.faithful:
        lines.append("  outputs are bit for bit those of the session without capture")
    lines += [f"  note: {note}" for note in captured.notes]
    from driftline.runs.stores.addresses import memory_warning

    again = f"next: driftline compare ANOTHER_RUN {shlex.quote(place)}"
    lines.append(f"  {memory_warning(place) or again}")
    return lines
