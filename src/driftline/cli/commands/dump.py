"""`driftline dump`: run an unchanged program and save what its model computes.

This module only turns options into a capture plan and prints the outcome; `captures.launch` does
the work. `captures.selection` defines what the options of `ait llm dump` mean.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from driftline.captures.ladder import LADDER, takes_ladder
from driftline.captures.launch.jobs import FRAMEWORKS, CapturePlan, DumpType, Level
from driftline.captures.launch.outcome import say_steps
from driftline.captures.model_facts import FactOptions
from driftline.captures.options import Budgets, Reduction, WhenFull, budgets_from
from driftline.captures.selection import Selection, patterns
from driftline.cli import python_script as script
from driftline.cli.commands.dump_onnx import (
    OnnxAmount,
    OnnxOptions,
    RunOutputOptions,
    dump_onnx,
    is_onnx,
    refuse_program_options,
)
from driftline.cli.options import (
    AMOUNT,
    SELECTION,
    SEVERAL,
    ProgramOptions,
    SelectionOptions,
    as_in_ait,
    engine_or_default,
    place,
    split_names,
    step_patterns,
)
from driftline.cli.output import refuse_memory, run_place, short_path, unsent_lines
from driftline.errors import EXIT_FINE, BadInput
from driftline.runs.layout import SENT_SHARD_BYTES
from driftline.runs.scope import ending_words
from driftline.units import size_of, size_text

if TYPE_CHECKING:
    from driftline.captures.launch.atb import AtbHarvest
    from driftline.captures.launch.launcher import Outcome

# More notes would push the important line off the screen; the run holds all of them.
MOST_NOTES = 8
# Spellings of a truth value that people type.
_YES = frozenset({"true", "yes", "y", "t", "1", "on"})
_NO = frozenset({"false", "no", "n", "f", "0", "off"})


@Parameter(name="*", group=SELECTION)
@dataclass(frozen=True)
class FilterOptions:
    """Which tensors of those modules are kept; most are options of `ait llm dump`.

    Attributes:
        ids: Only modules with these ids: child indices in the module tree, joined by '_', such as
            2,3_1. `driftline show RUN` prints them.
        execute_range: Steps, as pairs with both ends included: 3,5,7,7 is 3, 4, 5 and 7. Default:
            step 0 in full, later steps as summaries.
        child: With -ids: also everything below those modules.
        time: When to take tensors: 0 before the call, 1 after it, 2 both, 3 inputs before and
            outputs after. Default: 3.
        opname: Only modules whose class or last part of the name begins with this, in any case;
            several are separated by commas.
        part: 0 inputs, 1 outputs, 2 both.
        device: Only tensors on the device with this index, and tensors on the CPU.
        port: Only these ports: input, output, grad_input, grad_output, param, param_grad.
        rank: Only these ranks.
    """

    ids: Annotated[list[str] | None, SEVERAL, as_in_ait("--save-operation-ids", "-ids", "IDS")] = (
        None
    )
    execute_range: Annotated[str, as_in_ait("--execute-range", "-er", "A,B[,C,D]")] = ""
    child: Annotated[str, as_in_ait("--save-operation-child", "-child", "true|false")] = "true"
    time: Annotated[Literal["0", "1", "2", "3"] | None, as_in_ait("--save-time", "-time")] = None
    opname: Annotated[
        list[str] | None, SEVERAL, as_in_ait("--operation-name", "-opname", "NAMES")
    ] = None
    part: Annotated[Literal["0", "1", "2"], as_in_ait("--save-tensor-part", "-stp")] = "2"
    device: Annotated[int | None, as_in_ait("--device-id", "-device", "N")] = None
    port: Annotated[list[str] | None, SEVERAL, Parameter(metavar="GLOB")] = None
    rank: Annotated[list[str] | None, SEVERAL, Parameter(metavar="GLOB")] = None

    def selection(self, modules: SelectionOptions) -> Selection:
        """What to capture."""
        if self.device is not None and self.device < 0:
            raise BadInput(
                f"-device takes the index of a device, from 0 upwards, not {self.device}",
                hint="leave it out for all devices",
            )
        return Selection(
            sites=patterns(modules.site),
            classes=patterns(modules.class_),
            ports=patterns(self.port),
            steps=step_patterns(self.execute_range, modules.step, LADDER),
            ranks=patterns(self.rank),
            ids=split_names(self.ids),
            children=yes_or_no("-child", self.child),
            opnames=split_names(self.opname),
            time=None if self.time in (None, "3") else int(self.time),
            part=int(self.part),
            device=self.device,
        )


def yes_or_no(option: str, word: str) -> bool:
    """A truth value as ait takes it.

    >>> yes_or_no("-child", "True"), yes_or_no("-child", "n")
    (True, False)
    """
    if word.lower() in _YES:
        return True
    if word.lower() in _NO:
        return False
    raise BadInput(f"{option} takes true or false, not '{word}'", hint=f"such as {option} true")


@Parameter(name="*", group=AMOUNT)
@dataclass(frozen=True)
class AmountOptions:
    """How much of the tensors is kept.

    Attributes:
        type_: What to store: tensor stores tensors; model and layer the module tree; onnx, with one
            of them, a graph of it; op the operators with parameters and shapes; kernel the kernels
            that ran; cpu_profiling times by operator. Several may be given. Default: tensor.
        only_save_desc: Store only name, type and shape of each tensor, no values.
        keep: How much of each tensor to keep: full, summary, digest, sample or sample(N). Default:
            full.
        level: What to capture; several may be given, also as ops,params. Default: modules.
        max_bytes: Stop storing values at this size, such as 2GB.
        budget: Disk space for the steps after the first, if no steps are given; the last steps are
            left out. Default: 1GiB.
        device_budget: Memory on each GPU for copies of tensors that wait for transfer; 0 for none.
            Default: 1GiB.
        host_budget: Pinned host memory for copies that wait to be written. Default: 2GiB.
        when_full: What to do if these buffers are full: the program waits, or tensors are dropped
            and counted.
        save_tiling: Also save tiling data of ATB programs; torch has none.
        no_model_facts: Do not describe the models: attributes, code, state, training.
        no_weights: Describe the models without digests and samples of their weights.
    """

    type_: Annotated[
        list[Literal["model", "layer", "op", "kernel", "tensor", "cpu_profiling", "onnx"]] | None,
        SEVERAL,
    ] = None
    only_save_desc: Annotated[bool, as_in_ait("--only-save-desc", "-sd")] = False
    keep: Annotated[str | None, Parameter(metavar="full|summary|digest|sample")] = None
    level: Annotated[list[Literal["modules", "ops", "gradients", "params"]] | None, SEVERAL] = None
    max_bytes: Annotated[str, Parameter(metavar="SIZE")] = ""
    budget: Annotated[str, Parameter(metavar="SIZE")] = ""
    device_budget: Annotated[str, Parameter(metavar="SIZE")] = ""
    host_budget: Annotated[str, Parameter(metavar="SIZE")] = ""
    when_full: WhenFull = "wait"
    save_tiling: Annotated[bool, as_in_ait("--save-tiling", "-tiling")] = False
    no_model_facts: bool = False
    no_weights: bool = False

    def reduction(self) -> Reduction:
        """How much of each tensor."""
        if not self.only_save_desc:
            return Reduction.parse(self.keep or "full")
        if self.keep is not None:
            raise BadInput(
                f"-sd keeps descriptions only, --keep {self.keep} asks for more",
                hint="give one of them",
            )
        return Reduction("describe")

    def types(self) -> tuple[DumpType, ...]:
        """What is written, without repetitions."""
        # `dict.fromkeys` keeps the order.
        return tuple(dict.fromkeys(self.type_ or ["tensor"]))

    def levels(self) -> tuple[Level, ...]:
        """What is captured."""
        usual: list[Level] = ["modules"]
        if {"op", "tensor"} <= set(self.types()):
            # If operators are listed and tensors stored, the operators' tensors are stored too.
            usual.append("ops")
        return tuple(dict.fromkeys(self.level or usual))

    def facts(self) -> FactOptions:
        """What is recorded about the models besides their tensors."""
        return FactOptions(not self.no_model_facts, not self.no_weights)

    def budgets(self) -> Budgets:
        """The memory budgets, from sizes such as `500MB`."""
        return budgets_from(
            _budget("--device-budget", self.device_budget),
            _budget("--host-budget", self.host_budget),
            self.when_full,
        )


def _budget(option: str, text: str) -> int | None:
    if not text:
        return None
    try:
        # `size_of` refuses 0, which is a mistake anywhere else.
        return 0 if text.strip() == "0" else size_of(text)
    except BadInput as error:
        raise BadInput(
            f"{option} is a size such as 500MB or 2GiB, or 0, not '{text}'",
            hint="leave it out for the usual size",
        ) from error


@Parameter(name="*")
@dataclass(frozen=True)
class EngineOptions:
    """Which library computes.

    Attributes:
        engine: torch and paddle capture only that framework. atb also enables the probe of the ATB
            library; it is the default if ATB_HOME_PATH is set. onnxruntime runs a model from its
            file. Default otherwise: torch and paddle.
        graph: Also record the graphs of torch.compile: auto reads what the kernels of inductor
            compute, and runs the graphs of other backends node by node; fx runs every graph node by
            node with torch's own operators; inductor reads what the kernels of inductor compute.
        no_fusion: With --graph inductor: do not fuse operators; every node gets its own kernel.
    """

    engine: Literal["torch", "atb", "paddle", "onnxruntime"] | None = None
    graph: Literal["auto", "fx", "inductor"] | None = None
    no_fusion: bool = False


def dump(
    *program: Annotated[str, place("PROGRAM")],
    start: ProgramOptions = ProgramOptions(),
    engine: EngineOptions = EngineOptions(),
    modules: SelectionOptions = SelectionOptions(),
    filters: FilterOptions = FilterOptions(),
    amount: AmountOptions = AmountOptions(),
    model: OnnxOptions = OnnxOptions(),
    output: RunOutputOptions = RunOutputOptions(),
) -> int:
    """Run an unchanged program and save what its model computes.

        driftline dump -o ref --exec "python infer.py --dtype float32"
        driftline dump -o ref -- python infer.py --dtype float32

    Every Python process that the program starts and that imports torch is captured: scripts,
    `python -m`, shell scripts, torchrun, subprocesses. The program keeps its terminal, input and
    exit status. Unless --step (or -er) is given, step 0 is captured in full, and later steps as
    summaries: 1 to 15, then powers of two and the steps after them. An ONNX model needs no
    program:

        driftline dump --engine onnxruntime --model m.onnx --inputs x.npz -o cand

    Args:
        program: The program and its arguments, after two dashes.
    """
    selection = filters.selection(modules)
    if is_onnx(engine.engine, model):
        refuse_program_options(
            {
                "--exec": bool(start.exec_ or program),
                "-time": filters.time is not None,
                "-device": filters.device is not None,
                "--rank": bool(filters.rank),
                "--type": bool(amount.type_),
                "-tiling": amount.save_tiling,
                "--layout": output.layout != "run",
                "--graph": bool(engine.graph),
            }
        )
        # Every input file is a step: all of them, unless some were chosen.
        if not filters.execute_range and not modules.step:
            selection = replace(selection, steps=())
        kept = OnnxAmount(
            selection, amount.reduction(), amount.level or (), amount.max_bytes, amount.facts()
        )
        return dump_onnx(model, kept, output)
    argv = start.command(program, "dump")
    plan, need_probe = _capture_plan(argv, selection, engine, amount, output)
    if output.dry_run and not script.is_script():
        print(plan.to_json())
        return EXIT_FINE
    # Loaded late: with it comes numpy, which `dump --help` should not wait for.
    from driftline.captures.launch.launcher import run_command

    outcome = script.step(
        "outcome", run_command, argv, plan, force=output.force, need_probe=need_probe
    )
    script.end(outcome)
    for line in summary(outcome):
        print(line, file=sys.stderr)
    return outcome.exit_code


def _capture_plan(
    argv: list[str],
    selection: Selection,
    engine: EngineOptions,
    amount: AmountOptions,
    output: RunOutputOptions,
) -> tuple[CapturePlan, bool]:
    """The plan, and whether the user asked for the ATB probe by name."""
    # Only torch and ATB have a probe to switch on.
    named_engine = None if engine.engine in ("onnxruntime", "paddle") else engine.engine
    probe_engine, need_probe = engine_or_default(named_engine)
    folder, url = run_place(output.output, output.stage)
    if url:
        refuse_memory(url)
    reduction = amount.reduction()
    # The probe of ATB and the trees of other tools can select steps only by number.
    plain = output.layout == "run" and "tensor" in amount.types() and probe_engine != "atb"
    if selection.steps == (LADDER,):
        if plain and takes_ladder(amount.levels(), engine.graph):
            reduction = reduction.with_ladder()
        else:
            selection = replace(selection, steps=("0",))
    step_budget = _budget("--budget", amount.budget)
    plan = CapturePlan(
        output=folder,
        selection=selection,
        reduction=reduction,
        levels=amount.levels(),
        types=amount.types(),
        layout=output.layout,
        max_bytes=size_of(amount.max_bytes) if amount.max_bytes else 0,
        tiling=amount.save_tiling,
        log_level=output.log_level,
        command=tuple(argv),
        engine=probe_engine,
        frameworks=(engine.engine,) if engine.engine in FRAMEWORKS else FRAMEWORKS,
        graph=engine.graph or "",
        fusion=not engine.no_fusion,
        url=url,
        shard_bytes=SENT_SHARD_BYTES if url else 0,
        budgets=amount.budgets(),
        facts=amount.facts(),
        step_budget=-1 if step_budget is None else step_budget,
    )
    return plan, need_probe


def summary(outcome: Outcome) -> list[str]:
    """What is printed to stderr at the end, most important first."""
    plan, harvest = outcome.plan, outcome.harvest
    lines: list[str] = []
    if outcome.program_status and plan.says("error"):
        lines.append(f"driftline: the program {ending_words(outcome.program_status)}")
    if outcome.reason:
        if plan.says("critical"):
            lines.append(f"driftline: {outcome.reason}")
        if outcome.hint and plan.says("error"):
            lines.append(f"  hint: {outcome.hint}")
    elif plan.says("info"):
        if outcome.atb is None:
            lines.append(f"driftline: {_captured_text(outcome)}")
        else:
            lines += _captured_lines_of_both(outcome, outcome.atb)
    if plan.says("debug"):
        lines += _details(outcome)
    if plan.says("warning"):
        lines += _warnings(outcome)
    if outcome.sent is not None and outcome.sent.reason and plan.says("critical"):
        lines += unsent_lines(outcome.sent, plan.url)
    elif harvest.tensors and plan.says("info") and plan.layout == "run":
        run = plan.url or short_path(plan.output)
        word = shlex.quote(run)
        lines.append(
            f"  next: driftline compare {word} CANDIDATE (if this is the candidate: driftline "
            f"compare REFERENCE {word})"
        )
    if lines and lines[0].startswith("  "):  # the line these belong to was not wanted
        lines[0] = f"driftline: {lines[0].strip()}"
    return lines


def _details(outcome: Outcome) -> list[str]:
    """What `-l debug` adds: the plan, and every process by itself."""
    plan = outcome.plan
    lines = [
        f"  debug: command: {shlex.join(plan.command)}",
        f"  debug: engine {plan.engine}, frameworks {', '.join(plan.frameworks)}, "
        f"levels {', '.join(plan.levels)}, types {', '.join(plan.types)}, kept {plan.reduction}",
        f"  debug: selected: {plan.selection.in_words()}",
        f"  debug: processes that began to capture: {outcome.messages.started}",
    ]
    lines += [
        f"  debug: rank {report.rank}: {report.calls} module calls, {report.tensors} tensors, "
        f"{say_steps(sorted(report.steps_seen))} ran"
        for report in outcome.messages.reports
    ]
    lines += [f"  debug: folder {name}" for name in outcome.harvest.processes]
    return lines


def _warnings(outcome: Outcome) -> list[str]:
    """What was requested but not captured, and notes of the capture."""
    lines: list[str] = []
    if not outcome.reason:
        lines += [f"  {sentence}" for sentence in outcome.unmatched]
    if outcome.skipped_steps and not outcome.reason and outcome.plan.wants_tensors:
        lines.append(f"  {_skipped_steps(outcome)}")
    lines += [f"  note: {note}" for note in outcome.notes[:MOST_NOTES]]
    if len(outcome.notes) > MOST_NOTES:
        lines.append(f"  and {len(outcome.notes) - MOST_NOTES} more notes in the run")
    if outcome.messages.failed and not outcome.reason:
        lines.append(f"  capture failed in a process: {outcome.messages.failed[0]}")
    if outcome.without_probe:
        lines.append(f"  note: {outcome.without_probe}")
    return lines


def _captured_text(outcome: Outcome) -> str:
    harvest, plan = outcome.harvest, outcome.plan
    run = short_path(plan.output)
    if outcome.sent is not None and not outcome.sent.reason:
        # The folder here is deleted when all has arrived.
        run = outcome.sent.url
    processes = len(harvest.processes)
    process_text = "1 process" if processes == 1 else f"{processes} processes"
    parts: list[str] = []
    if plan.wants_tensors and harvest.tensors:
        parts.append(
            f"{harvest.tensors} tensors, {size_text(harvest.bytes)}, {process_text}, "
            f"{say_steps(harvest.steps)}{_in_full(outcome)}"
        )
    elif "model" in plan.types or "layer" in plan.types:
        trees = harvest.topologies
        parts.append(f"module tree of {trees} process{'es' if trees != 1 else ''}")
    return f"{', '.join([*parts, *outcome.sheets.words])} in {run}"


def _in_full(outcome: Outcome) -> str:
    """Which steps were kept in full, if not all of them were."""
    several = len(outcome.harvest.steps) > 1
    return " (step 0 in full)" if several and outcome.plan.reduction.later is not None else ""


def _captured_lines_of_both(outcome: Outcome, atb: AtbHarvest) -> list[str]:
    """One line for each engine, so that readers see at once which of them captured the model."""
    harvest, plan = outcome.harvest, outcome.plan
    if harvest.tensors or outcome.sheets.words or (harvest.topologies and not plan.wants_tensors):
        torch = f"driftline: torch: {_captured_text(outcome)}"
    else:
        torch = "driftline: torch: nothing captured"
    if not atb.roots:
        return [torch, "driftline: atb: the probe was loaded, and wrote nothing"]
    parts: list[str] = []
    if atb.tensors:
        devices = ", ".join(map(str, atb.devices))
        parts.append(
            f"{atb.tensors} tensors, {size_text(atb.bytes)}, "
            f"device{'s' if len(atb.devices) > 1 else ''} {devices}, {say_steps(atb.steps)}"
        )
    parts += atb.also_written
    folders = ", ".join(short_path(str(root)) for root in atb.roots)
    lines = [torch, f"driftline: atb: {', '.join(parts) or 'no tensor'} in {folders}"]
    if atb.tensors:
        lines.append(f"  next: driftline show {shlex.quote(short_path(str(atb.roots[0])))}")
    return lines


def _skipped_steps(outcome: Outcome) -> str:
    steps = outcome.skipped_steps
    if outcome.plan.selection.steps == (LADDER,):
        # A budget may leave out the last of the selected steps.
        ran = {step for report in outcome.messages.reports for step in report.steps_seen}
        return (
            f"{len(outcome.harvest.steps)} of {len(ran)} steps are kept, all but the first as "
            "summaries; --step '*' keeps all of them in full"
        )
    verb = "ran and was" if len(steps) == 1 else "ran and were"
    return (
        f"{say_steps(steps)} {verb} not selected ({len(steps)} in all); "
        f"{outcome.plan.advised_steps(min(steps), max(steps))}"
    )
