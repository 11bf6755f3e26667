"""`driftline dump`: run an unchanged program and keep what its model computed.

Only words are read and written here: options become a capture plan, `launch.run` does the rest. The
seed's spellings are names like any other; what they mean is in `adapters.selection`.
"""

from __future__ import annotations

import shlex
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Literal

from driftline.captures.launch.atb import AtbHarvest
from driftline.captures.launch.jobs import (
    FRAMEWORKS,
    CapturePlan,
    DumpType,
    Layout,
    Level,
    LogLevel,
)
from driftline.captures.launch.launcher import Outcome, run_command
from driftline.captures.launch.outcome import say_steps
from driftline.captures.options import Reduction, WhenFull
from driftline.captures.selection import Selection, patterns
from driftline.cli import dump_onnx as onnx
from driftline.cli import dump_words as words
from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.errors import EXIT_FINE, BadInput
from driftline.units import say_size, size_of

_WHICH = "Which tensors"
_HOW = "How much of them"
_WHERE = "Where to"


def dump(
    *program: str,
    exec_: Annotated[str, Option(metavar="COMMAND")] = "",
    ids: Annotated[
        list[str] | None,
        Option(names=("--save-operation-ids", "-ids"), several=True, metavar="IDS", group=_WHICH),
    ] = None,
    execute_range: Annotated[
        str, Option(names=("--execute-range", "-er"), metavar="A,B[,C,D]", group=_WHICH)
    ] = "",
    child: Annotated[
        str, Option(names=("--save-operation-child", "-child"), metavar="true|false", group=_WHICH)
    ] = "true",
    time: Annotated[
        Literal["0", "1", "2"] | None, Option(names=("--save-time", "-time"), group=_WHICH)
    ] = None,
    opname: Annotated[
        list[str] | None,
        Option(names=("--operation-name", "-opname"), several=True, metavar="NAMES", group=_WHICH),
    ] = None,
    part: Annotated[
        Literal["0", "1", "2"], Option(names=("--save-tensor-part", "-stp"), group=_WHICH)
    ] = "2",
    device: Annotated[
        int | None, Option(names=("--device-id", "-device"), metavar="N", group=_WHICH)
    ] = None,
    site: Annotated[list[str] | None, Option(several=True, metavar="GLOB", group=_WHICH)] = None,
    class_: Annotated[list[str] | None, Option(several=True, metavar="GLOB", group=_WHICH)] = None,
    port: Annotated[list[str] | None, Option(several=True, metavar="GLOB", group=_WHICH)] = None,
    step: Annotated[list[str] | None, Option(several=True, metavar="GLOB", group=_WHICH)] = None,
    rank: Annotated[list[str] | None, Option(several=True, metavar="GLOB", group=_WHICH)] = None,
    type_: Annotated[
        list[Literal["model", "layer", "op", "kernel", "tensor", "cpu_profiling", "onnx"]] | None,
        Option(several=True, group=_HOW),
    ] = None,
    only_save_desc: Annotated[bool, Option(names=("--only-save-desc", "-sd"), group=_HOW)] = False,
    keep: Annotated[str | None, Option(metavar="full|summary|digest|sample", group=_HOW)] = None,
    level: Annotated[
        list[Literal["modules", "ops", "gradients", "params"]] | None,
        Option(several=True, group=_HOW),
    ] = None,
    max_bytes: Annotated[str, Option(metavar="SIZE", group=_HOW)] = "",
    device_budget: Annotated[str, Option(metavar="SIZE", group=_HOW)] = "",
    host_budget: Annotated[str, Option(metavar="SIZE", group=_HOW)] = "",
    when_full: Annotated[WhenFull, Option(group=_HOW)] = "wait",
    save_tiling: Annotated[bool, Option(names=("--save-tiling", "-tiling"), group=_HOW)] = False,
    engine: Annotated[
        Literal["torch", "atb", "paddle", "onnxruntime"] | None, Option(group=_HOW)
    ] = None,
    graph: Annotated[Literal["fx", "inductor"] | None, Option(group=_HOW)] = None,
    no_fusion: Annotated[bool, Option(group=_HOW)] = False,
    model: Annotated[str, Option(metavar="FILE.onnx", group=onnx.GROUP)] = "",
    inputs: Annotated[
        list[str] | None, Option(several=True, metavar="FILE.npz|RUN", group=onnx.GROUP)
    ] = None,
    optimize: Annotated[onnx.Optimize | None, Option(group=onnx.GROUP)] = None,
    providers: Annotated[
        list[str] | None, Option(several=True, metavar="NAME", group=onnx.GROUP)
    ] = None,
    threads: Annotated[int | None, Option(metavar="N", group=onnx.GROUP)] = None,
    memory: Annotated[str, Option(metavar="SIZE", group=onnx.GROUP)] = "",
    at_once: Annotated[int | None, Option(metavar="N", group=onnx.GROUP)] = None,
    custom_ops: Annotated[list[str] | None, Option(metavar="LIBRARY", group=onnx.GROUP)] = None,
    session_config: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", group=onnx.GROUP)
    ] = None,
    output: Annotated[str, Option(names=("--output", "-o"), metavar="DIR", group=_WHERE)] = "",
    stage: Annotated[str, Option(metavar="DIR", group=_WHERE)] = "",
    layout: Annotated[Layout, Option(group=_WHERE)] = "run",
    force: Annotated[bool, Option(group=_WHERE)] = False,
    dry_run: Annotated[bool, Option(group=_WHERE)] = False,
    log_level: Annotated[LogLevel, Option(names=("--log-level", "-l"), group=_WHERE)] = "info",
) -> int:
    """Run an unchanged program and keep what its model computed.

        driftline dump -o ref --exec "python infer.py --dtype float32"
        driftline dump -o ref -- python infer.py --dtype float32

    Every Python process that the program starts and that imports torch is captured: scripts,
    `python -m`, shell scripts, torchrun, subprocesses. The program keeps its terminal, input and
    exit status. An ONNX model needs no program:

        driftline dump --engine onnxruntime --model m.onnx --inputs x.npz -o cand

    Args:
        program: The program and its arguments, after two dashes.
        exec_: The program as one text, read like a shell reads quotes; no pipes or redirection.
        ids: Only modules at these places of the tree: child indices joined by '_', such as 2,3_1.
            `driftline show RUN` prints them.
        execute_range: Steps, as pairs with both ends included: 3,5,7,7 is 3, 4, 5 and 7. Default:
            step 0.
        child: With -ids: also everything below those modules.
        time: Take inputs 0 before the call, 1 after it, 2 both. Not given: inputs before, outputs
            after.
        opname: Only modules whose class or own name begins like this, in any case; comma list.
        part: 0 inputs, 1 outputs, 2 both.
        device: Only tensors on the device with this index, and those on the CPU.
        site: Only module paths that match, such as 'model.layers.*.mlp'.
        class_: Only classes that match, such as '*Norm'.
        port: Only these sides: input, output, grad_input, grad_output, param, param_grad.
        step: Steps as numbers, ranges (3-5, 3-) or globs; '*' is all of them. Instead of -er.
        rank: Only these ranks.
        type_: tensor stores tensors; model and layer the module tree, and onnx with them a graph
            of it; op lists operators with parameters and shapes, kernel the kernels that ran,
            cpu_profiling times by operator. Several may be given. Default: tensor.
        only_save_desc: Descriptions only: name, type and shape of each tensor, no values.
        keep: How much of each tensor: full, summary, digest, sample or sample(N). Default: full.
        level: What is looked at; several may be given, also as ops,params. Default: modules.
        max_bytes: Stop storing values at this size, such as 2GB.
        device_budget: Memory on each GPU for copies of tensors on their way; 0 for none. Default:
            1GiB.
        host_budget: Pinned host memory where they land before they are written. Default: 2GiB.
        when_full: What happens when the run is written more slowly than that: the program waits, or
            tensors are dropped and counted.
        save_tiling: Also tiling data, which ATB programs have; torch has none, which is noted.
        engine: atb also switches on the probe of the ATB library in the program; that is the
            default where ATB_HOME_PATH is set. torch and paddle leave it off and look at nothing
            else; without any, both are captured. onnxruntime runs a model from its file.
        graph: Record what torch.compile makes: fx executes every graph node by node with torch's
            own operators, whatever the backend; inductor reads what its kernels compute.
        no_fusion: With --graph inductor: fuse nothing, every node has a kernel of its own.
        model: The ONNX file; its weights may lie beside it.
        inputs: Arrays by name, or a run whose model inputs are taken. Several are steps.
        optimize: How much ONNX Runtime changes the graph; what is captured is the changed one.
            Default: all.
        providers: Where it runs, the preferred one first, such as CUDA CPU. Default: CPU.
        threads: Threads of one node. Default: as ONNX Runtime likes.
        memory: Inner tensors held at a time; beyond it the model is executed again. Default: 1GB.
        at_once: How many inner tensors are held at a time. Default: as many as fit.
        custom_ops: A library with operators of your own; may be repeated.
        session_config: A further entry of the session's configuration; may be repeated.
        output: Folder of the run, or an address such as s3://bucket/run, to which it is sent while
            the program runs. Default: ./driftline_{timestamp}.
        stage: Where a run waits to be sent; deleted when all has arrived. Default: ./NAME.sending.
        layout: run, or ait for the tree of `ait llm dump`.
        force: Replace a run that is there already.
        dry_run: Print the plan and run nothing.
        log_level: How much is said.
    """
    said = onnx.OnnxWords(
        model,
        inputs or (),
        optimize,
        providers or (),
        threads,
        memory,
        at_once,
        custom_ops or (),
        session_config or (),
    )
    selection = Selection(
        sites=patterns(site),
        classes=patterns(class_),
        ports=patterns(port),
        steps=words.steps_of(execute_range, step),
        ranks=patterns(rank),
        ids=words.ids_of(ids),
        children=words.yes_or_no("-child", child),
        opnames=words.names_of(opname),
        time=None if time is None else int(time),
        part=int(part),
        device=words.device_of(device),
    )
    if onnx.is_onnx(engine, said):
        onnx.refuse(
            {
                "--exec": bool(exec_ or program),
                "-time": time is not None,
                "-device": device is not None,
                "--rank": bool(rank),
                "--type": bool(type_),
                "-tiling": save_tiling,
                "--layout": layout != "run",
                "--graph": bool(graph),
            }
        )
        return onnx.dump_onnx(
            said,
            output=output,
            stage=stage,
            selection=selection if execute_range or step else replace(selection, steps=()),
            reduction=_reduction(keep, only_save_desc),
            levels=level or (),
            max_bytes=max_bytes,
            force=force,
            dry_run=dry_run,
            quiet=log_level not in ("debug", "info"),
        )
    argv = words.command_of(exec_, program)
    engine_, asked_for = words.engine_of(None if engine in ("onnxruntime", "paddle") else engine)
    types: tuple[DumpType, ...] = tuple(dict.fromkeys(type_ or ["tensor"]))
    place, url = words.place_of_run(output, stage)
    if url:
        words.refuse_what_passes(url)
    plan = CapturePlan(
        output=place,
        selection=selection,
        reduction=_reduction(keep, only_save_desc),
        levels=_levels(level, types),
        types=types,
        layout=layout,
        max_bytes=size_of(max_bytes) if max_bytes else 0,
        tiling=save_tiling,
        log_level=log_level,
        command=tuple(argv),
        engine=engine_,
        frameworks=(engine,) if engine in FRAMEWORKS else FRAMEWORKS,
        graph=graph or "",
        fusion=not no_fusion,
        url=url,
        shard_bytes=words.SENT_SHARD_BYTES if url else 0,
        budgets=words.budgets_of(device_budget, host_budget, when_full),
    )
    if dry_run and not script.asked():
        print(plan.to_json())
        return EXIT_FINE
    outcome = script.step("outcome", run_command, argv, plan, force=force, need_probe=asked_for)
    script.end(outcome)
    for line in summary(outcome):
        print(line, file=sys.stderr)
    return outcome.exit_code


def summary(outcome: Outcome) -> list[str]:
    """What is said at the end, most important first; messages, not results."""
    plan, harvest = outcome.plan, outcome.harvest
    lines: list[str] = []
    if outcome.program_status and plan.says("error"):
        lines.append(f"driftline: the program {_ending(outcome.program_status)}")
    if outcome.reason:
        if plan.says("critical"):
            lines.append(f"driftline: {outcome.reason}")
        if outcome.hint and plan.says("error"):
            lines.append(f"  hint: {outcome.hint}")
    elif plan.says("info"):
        if outcome.atb is None:
            lines.append(f"driftline: {_what_was_captured(outcome)}")
        else:
            lines += _what_both_captured(outcome, outcome.atb)
    if plan.says("warning"):
        if not outcome.reason:
            lines += [f"  {sentence}" for sentence in outcome.unmatched]
        if outcome.skipped_steps and not outcome.reason and plan.wants_tensors:
            lines.append(f"  {_skipped(outcome)}")
        lines += [f"  note: {note}" for note in outcome.notes[:MOST_NOTES]]
        if len(outcome.notes) > MOST_NOTES:
            lines.append(f"  and {len(outcome.notes) - MOST_NOTES} more notes in the run")
        if outcome.messages.failed and not outcome.reason:
            lines.append(f"  capture failed in a process: {outcome.messages.failed[0]}")
        if outcome.without_probe:
            lines.append(f"  note: {outcome.without_probe}")
    if outcome.sent is not None and outcome.sent.reason and plan.says("critical"):
        lines += words.said_unsent(outcome.sent, plan.url)
    elif harvest.tensors and plan.says("info") and plan.layout == "run":
        where = plan.url or words.shown(plan.output)
        lines.append(f"  next: driftline compare {shlex.quote(where)} ANOTHER_RUN")
    if lines and lines[0].startswith("  "):  # the line these belong to was not wanted
        lines[0] = f"driftline: {lines[0].strip()}"
    return lines


MOST_NOTES = 8


def _what_was_captured(outcome: Outcome) -> str:
    harvest, plan = outcome.harvest, outcome.plan
    whole = outcome.sent is not None and not outcome.sent.reason
    where = outcome.sent.url if whole and outcome.sent else words.shown(plan.output)
    processes = len(harvest.processes)
    kinds = "1 process" if processes == 1 else f"{processes} processes"
    parts: list[str] = []
    if plan.wants_tensors and harvest.tensors:
        parts.append(
            f"{harvest.tensors} tensors, {say_size(harvest.bytes)}, {kinds}, "
            f"{say_steps(harvest.steps)}"
        )
    elif "model" in plan.types or "layer" in plan.types:
        trees = harvest.topologies
        parts.append(f"module tree of {trees} process{'es' if trees != 1 else ''}")
    return f"{', '.join([*parts, *outcome.sheets.words])} in {where}"


def _what_both_captured(outcome: Outcome, atb: AtbHarvest) -> list[str]:
    """One line for each engine: the reader must see at once which of them saw the model."""
    harvest, plan = outcome.harvest, outcome.plan
    if harvest.tensors or outcome.sheets.words or (harvest.topologies and not plan.wants_tensors):
        torch = f"driftline: torch: {_what_was_captured(outcome)}"
    else:
        torch = "driftline: torch: nothing captured"
    if not atb.roots:
        return [torch, "driftline: atb: the probe was loaded, and wrote nothing"]
    parts: list[str] = []
    if atb.tensors:
        devices = ", ".join(map(str, atb.devices))
        parts.append(
            f"{atb.tensors} tensors, {say_size(atb.bytes)}, "
            f"device{'s' if len(atb.devices) > 1 else ''} {devices}, {say_steps(atb.steps)}"
        )
    parts += atb.also_written
    where = ", ".join(words.shown(str(root)) for root in atb.roots)
    lines = [torch, f"driftline: atb: {', '.join(parts) or 'no tensor'} in {where}"]
    if atb.tensors:
        lines.append(f"  next: driftline show {shlex.quote(words.shown(str(atb.roots[0])))}")
    return lines


def _skipped(outcome: Outcome) -> str:
    steps = outcome.skipped_steps
    verb = "ran and was" if len(steps) == 1 else "ran and were"
    ran = {*steps, *outcome.harvest.steps}
    first, last = min(ran), max(ran)
    return (
        f"{say_steps(steps)} {verb} not selected ({len(steps)} in all); "
        f"select all of them with -er {first},{last}, or --step '*'"
    )


def _ending(status: int) -> str:
    """How a program ended, from its status as a shell reports it."""
    if status > 128:
        with suppress(ValueError):
            return f"was ended by signal {status - 128} ({signal.Signals(status - 128).name})"
    return f"ended with status {status}"


def _reduction(keep: str | None, only_save_desc: bool) -> Reduction:
    if only_save_desc:
        if keep is not None:
            raise BadInput(
                f"-sd keeps descriptions only, --keep {keep} asks for more", hint="give one of them"
            )
        return Reduction("describe")
    return Reduction.parse(keep or "full")


def _levels(
    given: list[Literal["modules", "ops", "gradients", "params"]] | None,
    types: tuple[DumpType, ...],
) -> tuple[Level, ...]:
    # The tensors of the operators that are listed, where both are asked for.
    both = "op" in types and "tensor" in types
    usual: list[Level] = ["modules", "ops"] if both else ["modules"]
    return tuple(dict.fromkeys(given or usual))
