"""`driftline replay`, `noise`, `repeat` and `bisect`: a program is run again, a little differently.

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

# So many reasons and notes of a replay are printed; replay.json has all of them.
MOST_REASONS = 6


@Parameter(name="*", group=SELECTION)
@dataclass(frozen=True)
class ReplayMapping:
    """How modules of the two programs correspond.

    Attributes:
        reference_run: A dump of the reference program, where the two models' names differ.
        map_: With --reference-run: modules that are called differently.
        partial: Go on where the two models differ, and leave out what differs.
    """

    reference_run: Annotated[Path | None, Parameter(metavar="RUN")] = None
    map_: Annotated[list[str] | None, SEVERAL, Parameter(metavar="REF=CAND")] = None
    partial: bool = False


@Parameter(name="*")
@dataclass(frozen=True)
class ReplayMethodOptions:
    """What is replayed, and how thoroughly.

    Attributes:
        also: Another run of the same model, replayed while the program runs this once.
        check_each: Prove for every call that the module gives its own output again. Default: once
            for all calls of one class with the same shapes and parts.
        keep_all: Keep every result. Default: not the values of calls that give, in the candidate's
            number format, the candidate's own output to the bit; their noise is measured on some
            rows instead.
        max_held: Memory that may be taken in the program, such as 2GB. Default: 4GB.
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
    """Where the replay goes, and what is said of it.

    Attributes:
        output: Folder of the replay; with --also, of one folder for each run, called like it.
        force: Replace a replay that is there already.
        quiet: Print nothing at the end; the exit code says it.
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
    """Run the reference program, its modules also applied to what the candidate's were given.

        driftline replay cand --exec "python infer.py --dtype float32" -o replayed
        driftline diagnose ref cand --replay replayed
        driftline replay cand --also cand2 --exec "python infer.py --dtype float32" -o both

    Every module is applied to the candidate's captured inputs, once in float32 and once in the
    candidate's number format. So an error is seen where it is made, not in everything after it.
    The program's own results stay what they are, to the bit. A module that does not give its own
    output again from its own inputs (dropout in training, say) is left out and listed.

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
    # Hundreds of layers share a few reasons: each is said once, with an example.
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
        like: The run whose number format the variants take.
        dtype: That format, given by name. Default: bfloat16.
        variant: Only these. Default: all but threads.
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
    """Run the trusted program in other ways that are all right: how much noise is normal?

        driftline noise --like cand --exec "python infer.py --dtype float32" -o noise
        driftline diagnose ref cand --noise noise

    The program is run once for each variant, in the candidate's number format: as it is, with norms
    and activations rounded once (as fused kernels do), with eager attention, with SDPA's math
    kernel, and with inputs and embeddings moved by one unit in the last place. A variant that
    cannot be made is listed with its reason. Step 0 is captured unless --step says otherwise.

    Args:
        program: The program and its arguments, after two dashes.
        keep: How much of each tensor.
        output: Folder of the runs.
        force: Replace an experiment that is there already.
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

    Digests of all tensors are compared. --vary also asks whether the number of threads matters,
    whether a sequence gives the same bits alone as in its batch, and whether the order of the batch
    matters; the program is not changed for that. Step 0 is captured unless --step says otherwise.
    The exit code is 1 where something differs.

    Args:
        program: The program and its arguments, after two dashes.
        times: How often it is run as it is.
        vary: What else is changed: threads, batch, order; with commas.
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
    """What is the end result, and how its error is measured.

    Attributes:
        metric: How the end result is measured: any metric of `driftline compare`.
        output_site: The module whose output is the end result. Default: the model itself.
        slot: Which tensor of it. Default: the first one of floating point.
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
    """Search the block that makes the error of the end result, by replacing outputs.

        driftline dump -o ref --exec "python infer.py --dtype float32"
        driftline bisect --reference-run ref --exec "python infer.py --dtype bfloat16"

    The candidate program is run several times; each time the modules up to some point give what
    the reference's gave. Where the error of the end falls, there it was made. Halving needs few
    runs: about 10 for a model of 32 layers down to one Linear.

    Args:
        program: The candidate program and its arguments, after two dashes.
        reference_run: A dump of the reference with whole outputs.
        format: json prints everything that was tried.
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
            f"no single block: {error} is {bisection.baseline:.3g}, and replacing blocks takes it "
            f"away bit by bit{most} ({runs})"
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
