"""`driftline replay`, `noise`, `repeat` and `bisect`: run a program again with small changes.

The experiments are in `driftline.diagnosis.experiments`, imported when one runs.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import (
    OUTPUT,
    SELECTION,
    SEVERAL,
    ProgramOptions,
    SelectionOptions,
    place,
)
from driftline.errors import EXIT_DIFFERENT, EXIT_FINE

if TYPE_CHECKING:
    from driftline.diagnosis.experiments.bisect import Bisection, Try
    from driftline.diagnosis.experiments.noise import Variant
    from driftline.diagnosis.experiments.replay import Replayed
    from driftline.diagnosis.experiments.replay_method import ReplayMethod

# At most this many reasons and notes of a replay are printed; replay.json has all of them.
MOST_REASONS = 6


@Parameter(name="*", group=SELECTION)
@dataclass(frozen=True)
class ReplayMapping:
    """How modules of the two programs correspond.

    Attributes:
        reference_run: A dump of the reference program, needed if the two models' names differ.
        map_: With --reference-run: modules with different names in the two models.
        partial: If the two models differ, replay the modules that are the same, and skip the rest.
    """

    reference_run: Annotated[Path | None, Parameter(metavar="RUN")] = None
    map_: Annotated[list[str] | None, SEVERAL, Parameter(metavar="REF=CAND")] = None
    partial: bool = False


@Parameter(name="*")
@dataclass(frozen=True)
class ReplayMethodOptions:
    """What is replayed, and how thoroughly.

    Attributes:
        also: Another run of the same model, to be replayed in the same execution of the program.
        check_each: Check for every call that the module reproduces its own output. Default: once
            for all calls of one class with the same shapes and parts.
        keep_all: Keep the values of every result. Default: drop the values of a call that, in the
            candidate's number format, gives the candidate's output bit for bit; their noise is
            measured on some rows instead.
        max_held: Memory that the replay may use in the program, such as 2GB. Default: 4GB.
    """

    also: Annotated[list[Path] | None, SEVERAL, Parameter(metavar="RUN")] = None
    check_each: bool = False
    keep_all: bool = False
    max_held: Annotated[str, Parameter(metavar="SIZE")] = ""

    def of(self, *, partial: bool) -> ReplayMethod:
        """These options, for the Python API."""
        from driftline.diagnosis.experiments.replay_method import ReplayMethod
        from driftline.units import size_of

        method = ReplayMethod(partial=partial, check_each=self.check_each, keep_all=self.keep_all)
        return replace(method, most_held=size_of(self.max_held)) if self.max_held else method


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class ReplayOutput:
    """Where the replay is written, and whether a summary is printed.

    Attributes:
        output: Folder of the replay. With --also it holds one folder for each run, with its name.
        force: Replace an existing replay.
        quiet: Print nothing at the end; the exit code gives the result.
    """

    output: Annotated[Path, Parameter(name=("--output", "-o"), metavar="DIR")] = Path("replay")
    force: bool = False
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"))] = False


def replay(
    candidate: Annotated[Path, place("CANDIDATE")],
    /,
    *program: Annotated[str, place("PROGRAM")],
    start: ProgramOptions = ProgramOptions(),
    modules: SelectionOptions = SelectionOptions(),
    mapping: ReplayMapping = ReplayMapping(),
    method: ReplayMethodOptions = ReplayMethodOptions(),
    output: ReplayOutput = ReplayOutput(),
) -> int:
    """Run the reference program, and apply its modules to the candidate's inputs as well.

        driftline replay cand --exec "python infer.py --dtype float32" -o replayed
        driftline diagnose ref cand --replay replayed
        driftline replay cand --also cand2 --exec "python infer.py --dtype float32" -o both

    Every module is applied to the candidate's captured inputs, once in float32 and once in the
    candidate's number format. So an error shows only at the module that makes it, not at all
    modules after it. The program's own results do not change, not by one bit. A module that does
    not reproduce its own output from its own inputs (such as dropout in training) is skipped and
    listed.

    Args:
        candidate: A run with inputs and outputs in full, as `driftline dump` makes it.
        program: The reference program and its arguments, after two dashes.
    """
    from driftline.diagnosis.experiments.replay import replay as run_replay
    from driftline.diagnosis.experiments.replay import replay_several

    argv = start.command(program, "replay")
    same_for_all: dict[str, Any] = {
        "selection": modules.selection(all_steps=True),
        "reference_run": mapping.reference_run,
        "maps": tuple(mapping.map_ or ()),
        "method": method.of(partial=mapping.partial),
        "force": output.force,
    }
    candidates = [candidate, *(method.also or ())]
    if method.also:
        outcomes: list[Replayed] = script.step(
            "outcomes", replay_several, candidates, argv, output.output, **same_for_all
        )
        script.end(outcomes)
    else:
        outcome = script.step("outcome", run_replay, candidate, argv, output.output, **same_for_all)
        script.end(outcome)
        outcomes = [outcome]
    if not output.quiet:
        for outcome, path in zip(outcomes, candidates, strict=True):
            for line in _replay_summary(outcome, path):
                print(line, file=sys.stderr)
    return outcomes[0].status or EXIT_FINE


def _replay_summary(outcome: Replayed, candidate: Path) -> list[str]:
    lines: list[str] = []
    if outcome.status:
        lines.append(f"driftline: the program ended with status {outcome.status}")
    counts = outcome.counts()
    rest = [f", {counts[word]} {word}" for word in ("unknown", "skipped") if counts[word]]
    lines.append(
        f"driftline: {counts['replayed']} of {len(outcome.sites)} modules replayed, "
        f"{outcome.calls} calls{''.join(rest)} in {outcome.folder}"
    )
    unknown = [
        (site, str(entry["reason"]))
        for site, entry in outcome.sites.items()
        if entry["status"] == "unknown"
    ]
    # Hundreds of layers share a few reasons: each reason is printed once, with an example.
    reasons = Counter(reason for _, reason in unknown)
    for reason, count in reasons.most_common(MOST_REASONS):
        first = next(site for site, own_reason in unknown if own_reason == reason)
        more = f" and {count - 1} more" if count > 1 else ""
        lines.append(f"  unknown: {first}{more}: {reason}")
    if len(reasons) > MOST_REASONS:
        lines.append(f"  and {len(reasons) - MOST_REASONS} more reasons in replay.json")
    lines += [f"  note: {note}" for note in outcome.notes[:MOST_REASONS]]
    if counts["replayed"]:
        lines.append(
            f"  next: driftline diagnose REFERENCE_RUN {shlex.quote(str(candidate))} "
            f"--replay {shlex.quote(str(outcome.folder))}"
        )
    return lines


@Parameter(name="*")
@dataclass(frozen=True)
class VariantOptions:
    """In which ways the program is run.

    Attributes:
        like: The run whose number format the variants use.
        dtype: The number format, if --like is not given. Default: bfloat16.
        variant: Run only these variants. Default: all except threads.
    """

    like: Annotated[Path | None, Parameter(metavar="RUN")] = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    variant: Annotated[
        list[Literal["plain", "fused", "eager", "math", "dither", "dither2", "threads"]] | None,
        SEVERAL,
    ] = None


def noise(
    *program: Annotated[str, place("PROGRAM")],
    start: ProgramOptions = ProgramOptions(),
    variants: VariantOptions = VariantOptions(),
    modules: SelectionOptions = SelectionOptions(),
    keep: Annotated[str, Parameter(metavar="full|summary|digest|sample", group=SELECTION)] = "full",
    output: Annotated[Path, Parameter(name=("--output", "-o"), metavar="DIR", group=OUTPUT)] = Path(
        "noise"
    ),
    force: Annotated[bool, Parameter(group=OUTPUT)] = False,
) -> int:
    """Run the trusted program in several correct ways, to measure how much noise is normal.

        driftline noise --like cand --exec "python infer.py --dtype float32" -o noise
        driftline diagnose ref cand --noise noise

    The program runs once for each variant, in the candidate's number format: without other changes,
    with norms and activations rounded only once (as fused kernels do), with eager attention, with
    the math kernel of SDPA, and with inputs and embeddings changed by one unit in the last place.
    Variants that cannot be run are listed with the reason. Only step 0 is captured unless --step is
    given.

    Args:
        program: The program and its arguments, after two dashes.
        keep: How much of each tensor to keep.
        output: Folder of the runs.
        force: Replace an existing experiment.
    """
    from driftline.diagnosis.experiments.noise import noise as run_noise

    made = script.step(
        "variants",
        run_noise,
        start.command(program, "noise"),
        output,
        dtype=variants.dtype or "",
        like=variants.like,
        ways=tuple(variants.variant or ()),
        selection=modules.selection(),
        keep=keep,
        force=force,
    )
    script.end(made)
    for line in _noise_summary(made, output):
        print(line, file=sys.stderr)
    return EXIT_FINE


def _noise_summary(variants: list[Variant], output: Path) -> list[str]:
    made = [variant for variant in variants if variant.status == "made"]
    return [
        f"driftline: {len(made)} of {len(variants)} variants in {output}",
        *(
            f"  {variant.name}"
            + (f": {variant.status}, {variant.reason}" if variant.reason else "")
            for variant in variants
        ),
        f"  next: driftline diagnose REF CAND --noise {shlex.quote(str(output))}",
    ]


def repeat(
    *program: Annotated[str, place("PROGRAM")],
    start: ProgramOptions = ProgramOptions(),
    times: Annotated[int, Parameter(name=("--times", "-k"), metavar="N")] = 5,
    vary: Annotated[list[str] | None, SEVERAL, Parameter(metavar="threads,batch,order")] = None,
    modules: SelectionOptions = SelectionOptions(),
    format: Annotated[Literal["table", "json"], Parameter(group=OUTPUT)] = "table",
) -> int:
    """Run a program several times: which site differs first between the repeats?

        driftline repeat --exec "python infer.py" -k 5 --vary threads,batch,order

    Digests of all tensors are compared. --vary runs the program again with another number of
    threads, with a sequence alone instead of in its batch, or with another order of the batch; you
    need not change the program for this. Only step 0 is captured unless --step is given. Exit code
    1 if something differs.

    Args:
        program: The program and its arguments, after two dashes.
        times: How often the unchanged program is run.
        vary: What else to vary: threads, batch, order; separated by commas.
        format: json prints one object.
    """
    from driftline.diagnosis.experiments.repeat import lines
    from driftline.diagnosis.experiments.repeat import repeat as run_repeat

    repetition = script.step(
        "found",
        run_repeat,
        start.command(program, "repeat"),
        times=times,
        # Commas, blanks and repeated options, in any mixture.
        vary=[word for text in vary or () for word in text.replace(",", " ").split()],
        selection=modules.selection(),
        tell=lambda sentence: print(f"driftline: {sentence}", file=sys.stderr),
    )
    script.end(repetition)
    if format == "json":
        print(json.dumps(repetition.to_json(), indent=1))
    else:
        for line in lines(repetition):
            print(line)
    return EXIT_FINE if repetition.same else EXIT_DIFFERENT


@Parameter(name="*")
@dataclass(frozen=True)
class EndResultOptions:
    """What the end result is, and how its error is measured.

    Attributes:
        metric: Metric of the error of the end result: any metric of `driftline compare`.
        output_site: The module whose output is the end result. Default: the model itself.
        slot: Which tensor of that output. Default: the first floating-point tensor.
    """

    metric: Annotated[str, Parameter(metavar="NAME")] = "relative_l2"
    output_site: Annotated[str, Parameter(metavar="SITE")] = ""
    slot: Annotated[str, Parameter(metavar="SLOT")] = ""


def bisect(
    *program: Annotated[str, place("PROGRAM")],
    start: ProgramOptions = ProgramOptions(),
    reference_run: Annotated[Path, Parameter(metavar="RUN")] = Path("ref"),
    end: EndResultOptions = EndResultOptions(),
    format: Annotated[Literal["table", "json"], Parameter(group=OUTPUT)] = "table",
) -> int:
    """Find the block that causes the error of the end result, by replacing outputs.

        driftline dump -o ref --exec "python infer.py --dtype float32"
        driftline bisect --reference-run ref --exec "python infer.py --dtype bfloat16"

    The candidate program runs several times. In each run, the outputs of all modules up to some
    point are replaced by those of the reference. The block whose replacement reduces the error of
    the end result has caused it. The search halves the model each time, so it needs few runs: about
    10 from a model of 32 layers down to one Linear.

    Args:
        program: The candidate program and its arguments, after two dashes.
        reference_run: A dump of the reference with full outputs.
        format: json prints every run that was tried.
    """
    from driftline.diagnosis.experiments.bisect import bisect as search

    quiet = format == "json"
    bisection = script.step(
        "found",
        search,
        start.command(program, "bisect"),
        reference_run,
        metric=end.metric,
        output_site=end.output_site,
        slot=end.slot,
        # A program that reads JSON may read stderr, too.
        tell=None if quiet else _print_try,
    )
    script.end(bisection)
    if quiet:
        print(json.dumps(bisection.to_json(), indent=1))
    else:
        for line in _bisect_report(bisection):
            print(line)
    return EXIT_FINE if bisection.verdict == "same" else EXIT_DIFFERENT


def _print_try(attempt: Try) -> None:
    change = "as it is"
    if attempt.upto:
        change = f"{attempt.replaced} replaced, up to {attempt.upto}"
    print(f"driftline: {change}: {attempt.value:.3g}", file=sys.stderr)


def _bisect_report(bisection: Bisection) -> list[str]:
    """The answer in a few sentences."""
    runs = f"{len(bisection.tries)} executions"
    error = f"{bisection.metric} of '{bisection.slot}'"
    if bisection.verdict == "same":
        return [f"no error: {error} is {bisection.baseline:.3g} as the program is ({runs})"]
    if bisection.verdict == "spread":
        most = f", {bisection.path[-1]} the most" if bisection.path else ""
        return [
            f"no single block: {error} is {bisection.baseline:.3g}, and replacing blocks reduces "
            f"it little by little{most} ({runs})"
        ]
    culprit = "this module"
    if bisection.own_code:
        culprit = "the code of the module itself, not its parts"
    return [
        f"{bisection.site}: {culprit}",
        f"  {error}: {bisection.baseline:.3g} as the program is; {bisection.before:.3g} with "
        f"everything before it replaced, {bisection.after:.3g} with it as well",
        f"  explains {bisection.explains:.0%} of the end's error ({runs})",
    ]
