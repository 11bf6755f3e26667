"""`driftline diff`: run two commands, compare their models, write a report."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import (
    AMOUNT,
    OUTPUT,
    SEVERAL,
    ProgramOptions,
    SelectionOptions,
    place,
)
from driftline.cli.output import short_path
from driftline.errors import BadInput

if TYPE_CHECKING:
    from driftline.diagnosis.experiments.two_programs import Program


@Parameter(name="*")
@dataclass(frozen=True)
class VariantOptions:
    """One command, run in two ways.

    Attributes:
        rev: Run the command at the two git revisions A and B, each in its own worktree.
        env: Environment variables, NAME=VALUE[,NAME=VALUE]. If --env is given twice, the first is
            for the reference and the second for the candidate.
    """

    rev: Annotated[str, Parameter(metavar="A..B")] = ""
    env: Annotated[list[str] | None, SEVERAL, Parameter(metavar="NAME=VALUE")] = None


@Parameter(name="*", group=AMOUNT)
@dataclass(frozen=True)
class DiffAmount:
    """How much of both runs is kept, with the options of `driftline dump`.

    Attributes:
        keep: How much of each tensor to keep: full, summary, digest, sample or sample(N). Default:
            full.
        level: What to capture; several may be given. Default: modules.
    """

    keep: Annotated[str, Parameter(metavar="full|summary|digest|sample")] = ""
    level: Annotated[list[Literal["modules", "ops", "gradients", "params"]] | None, SEVERAL] = None


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class DiffOutput:
    """Where the results are written.

    Attributes:
        output: Folder of the two runs, the comparison and the report. If a command was interrupted,
            the same command continues.
        no_replay: Do not run the reference again if the comparison fails.
        force: Discard earlier results in the folder and start again.
    """

    output: Annotated[Path, Parameter(name=("--output", "-o"), metavar="DIR")] = Path(
        "driftline-diff"
    )
    no_replay: bool = False
    force: bool = False


def diff(
    reference: Annotated[str, place("REFERENCE")],
    candidate: Annotated[str, place("CANDIDATE")] = "",
    /,
    *,
    variants: VariantOptions = VariantOptions(),
    modules: SelectionOptions = SelectionOptions(),
    amount: DiffAmount = DiffAmount(),
    output: DiffOutput = DiffOutput(),
) -> int:
    """Run two programs and say where their models begin to disagree, and why.

        driftline diff "python infer.py --dtype float32" "python infer.py --dtype bfloat16"
        driftline diff "python infer.py" --rev main..my-branch
        driftline diff "python infer.py" --env DTYPE=float32 --env DTYPE=bfloat16

    Both programs are dumped and compared. If the comparison fails, the reference runs once more,
    with its modules applied to the candidate's inputs. The report is an HTML file. The exit codes
    are those of `driftline compare`.

    Args:
        reference: The command of the trusted program.
        candidate: The command of the program to test. Without it, the reference runs in two ways
            (--rev, --env).
    """
    programs = _programs(reference, candidate, variants)
    from driftline.diagnosis.experiments.two_programs import DiffOptions, diff_programs

    asked = DiffOptions(
        dump=_dump_words(modules, amount),
        replay=not output.no_replay,
        force=output.force,
    )
    difference = script.step(
        "difference", diff_programs, *programs, output.output, asked, progress=_say
    )
    script.end(difference)
    from driftline.comparison.verdict.judge import exit_code
    from driftline.reporting.view import View
    from driftline.reporting.views import comparison, diagnosis
    from driftline.reporting.writers import write_view

    blocks = comparison.view(difference.table).blocks
    # Blocks of the comparison are not printed twice.
    more = [b for b in diagnosis.view(difference.diagnosis).blocks if b not in blocks]
    write_view(View((*blocks, *more)), "table", sys.stdout)
    for note in difference.notes:
        print(f"driftline: {note}", file=sys.stderr)
    page = short_path(str(difference.report))
    print(f"driftline: the report is in {page}; open it in a browser", file=sys.stderr)
    return exit_code(difference.table)


def _say(sentence: str) -> None:
    print(f"driftline: {sentence}", file=sys.stderr, flush=True)


def _programs(reference: str, candidate: str, variants: VariantOptions) -> tuple[Program, Program]:
    """The two programs, from two commands, or from one command and two ways to run it."""
    from driftline.diagnosis.experiments.two_programs import Program

    words = [
        tuple(ProgramOptions(text).command((), "diff")) for text in (reference, candidate) if text
    ]
    revisions = _revisions(variants.rev)
    variables = [_variables(text) for text in variants.env or ()]
    if len(variables) > 2:
        raise BadInput(
            f"--env was given {len(variables)} times",
            hint="once for the reference, once for the candidate; join several by commas",
        )
    if len(words) == 1 and revisions == ("", "") and not variables:
        raise BadInput(
            "there is only one command, and no option that makes two runs differ",
            hint='driftline diff "python a.py" "python b.py", or --rev A..B, or --env twice',
        )
    # A single --env is for the candidate: the reference runs unchanged.
    nothing: dict[str, str] = {}
    variables = [nothing] * (2 - len(variables)) + variables
    return (
        Program(words[0], variables[0], revisions[0]),
        Program(words[-1], variables[1], revisions[1]),
    )


def _revisions(text: str) -> tuple[str, str]:
    if not text:
        return "", ""
    first, dots, second = text.partition("..")
    if not dots or not first or second.startswith(".") or first.startswith("-"):
        raise BadInput(f"--rev takes A..B, not '{text}'", hint="such as --rev main..HEAD")
    return first, second or "HEAD"


def _variables(text: str) -> dict[str, str]:
    variables: dict[str, str] = {}
    for word in text.split(","):
        name, sign, value = word.partition("=")
        if not sign or not name.strip():
            from driftline.runs.redaction import redact_text

            shown = redact_text(word)  # `API_KEY:abc`
            raise BadInput(
                f"--env takes NAME=VALUE, not '{shown}'", hint="such as --env DTYPE=bf16"
            )
        variables[name.strip()] = value
    return variables


def _dump_words(modules: SelectionOptions, amount: DiffAmount) -> tuple[str, ...]:
    words: list[str] = []
    for option, values in (
        ("--site", modules.site),
        ("--class", modules.class_),
        ("--step", modules.step),
        ("--level", amount.level),
    ):
        if values:
            words += [option, *values]
    if amount.keep:
        words += ["--keep", amount.keep]
    return tuple(words)
