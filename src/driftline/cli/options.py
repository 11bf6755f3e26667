"""Options that several commands share, grouped in dataclasses, and the panels of the help pages.

A group is a frozen dataclass marked `@Parameter(name="*")`: a command that has a parameter of that
type takes the options of its fields. The methods turn what was typed into values of the Python API,
or raise one sentence that says why not. Nothing is opened or run here.

Annotations are values, not text (no `from __future__ import annotations`): cyclopts evaluates those
of a group that another module extends in that module, where the names are unknown.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args, get_origin

from cyclopts import Group, Parameter, Token

from driftline.errors import EXIT_FINE, BadInput
from driftline.reporting.writers import formats

if TYPE_CHECKING:
    from driftline.alignment.align import AlignOptions
    from driftline.captures.launch.jobs import Engine
    from driftline.captures.selection import Selection
    from driftline.comparison.table.row import Column, Verdict
    from driftline.comparison.tolerance.tolerance import Limit

# Panels of the help pages, in the order in which they are shown.
OPTIONS = Group("Options", sort_key=1)
MODEL = Group("Model", sort_key=2)
PROMPTS = Group("Prompts and shapes", sort_key=3)
TARGETS = Group("Targets", sort_key=4)
LIMITS = Group("Limits", sort_key=5)
SELECTION = Group("Which tensors", sort_key=6)
AMOUNT = Group("How much of them", sort_key=7)
ONNX = Group("ONNX Runtime", sort_key=8)
EVIDENCE = Group("Evidence", sort_key=9)
ALIGNMENT = Group("Alignment", sort_key=10)
OUTPUT = Group("Output", sort_key=11)
SPEED = Group("Speed", sort_key=12)
# Options that exist because the tools we replace have them; our own come first on every page.
OTHER_TOOLS = Group("Spellings of other tools", sort_key=13)

# How results may be printed. The names come from the table of writers, so a type checker sees text.
if TYPE_CHECKING:
    TableFormat: TypeAlias = str
    DiagnosisFormat: TypeAlias = str
    RunFormat: TypeAlias = str
    VerdictFormat: TypeAlias = str
else:
    TableFormat = Literal[formats("view", "json", "csv", "checks")]
    DiagnosisFormat = Literal[formats("view", "json", "checks")]
    RunFormat = Literal[formats("view", "json", "csv")]
    VerdictFormat = Literal[formats("view", "checks")]

# A list that takes all words up to the next option: `--type layer tensor`. At least one: cyclopts
# would else take a forgotten value for an empty list.
SEVERAL = Parameter(consume_multiple=1)


def _path_or_url(hint: Any, tokens: Sequence[Token]) -> Any:
    from driftline.runs.stores.addresses import place_of

    paths = [place_of(token.value) for token in tokens]
    is_list = list in (get_origin(hint), *map(get_origin, get_args(hint)))  # or `list[Path] | None`
    return paths if is_list else paths[0]


# A path that may also be an address elsewhere, such as `s3://bucket/run`. Others refuse addresses,
# because what reads them could only say that there is no such file.
URLS = Parameter(converter=_path_or_url)


def place(label: str) -> Parameter:
    """An argument that is given by its place, and its label on the help page.

    A file may be called `-`. No other word with a dash in front gets here: the guard in `app` has
    taken those for options.
    """
    return Parameter(name=label, allow_leading_hyphen=True)


def spelt(name: str, metavar: str | None = None, *more: str) -> Parameter:
    """An option with underscores, as in IBM's scripts, or with dashes, and further spellings."""
    spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}", *more))
    return Parameter(name=tuple(spellings), metavar=metavar)


def as_in_ait(name: str, short: str, metavar: str | None = None) -> Parameter:
    """An option as `ait llm` spells it, for those who come from there."""
    return Parameter(name=(name, short), metavar=metavar, group=OTHER_TOOLS)


def split_names(words: Sequence[str] | None) -> tuple[str, ...]:
    """A comma list that may have come as several words; full-width commas are commas, too.

    >>> split_names(["2,", "3_1"]), split_names(["2，3_1"]), split_names(None)
    (('2', '3_1'), ('2', '3_1'), ())
    """
    return tuple(word for word in _SEPARATORS.split(",".join(words or ())) if word)


# A longer range of steps is a slip of the keyboard, and would only fill memory.
MOST_STEPS = 1_000_000
# Full-width commas, too: lines are copied from pages in Chinese.
_SEPARATORS = re.compile(r"[,，、\s]+")
# What a shell would act on, and a program without one would get as words.
_SHELL_OPERATOR = re.compile(r"[<>|;&]+")


@Parameter(name="*")
@dataclass(frozen=True)
class ProgramOptions:
    """The program that a command runs.

    Attributes:
        exec_: The program as one text, split as a shell splits quotes; no pipes, no redirection.
    """

    exec_: Annotated[str, Parameter(metavar="COMMAND")] = ""

    def command(self, program: Sequence[str], name: str) -> list[str]:
        """The words of the program, from `--exec` or from what follows `--`.

        >>> ProgramOptions("python x.py --name 'a > b'").command([], "dump")
        ['python', 'x.py', '--name', 'a > b']
        """
        if self.exec_ and program:
            raise BadInput(
                "the program is given twice, by --exec and after --", hint="give one of them"
            )
        if program:
            return list(program)
        if not self.exec_.strip():
            raise BadInput(
                "there is no program to run",
                hint=f'driftline {name} --exec "python infer.py", '
                f"or: driftline {name} -- python infer.py",
            )
        # `--exec "a | b"` would pass "|" to the program, which then fails with confusing errors.
        operator = shell_operator(self.exec_)
        if operator:
            raise BadInput(
                f"--exec starts one program without a shell, so it cannot do '{operator}'",
                hint="put the line into a script and give --exec 'bash script.sh', "
                f"or: driftline {name} -- bash -c '...'",
            )
        try:
            return shlex.split(self.exec_)
        except ValueError as error:
            raise BadInput(
                f"--exec cannot be read: {str(error).lower()}", hint="close every quotation mark"
            ) from None


def shell_operator(text: str) -> str:
    """The first unquoted redirection, pipe or separator in a command line; empty if there is none.

    A `&` inside a word (an address with a query) is no operator.

    >>> shell_operator("a 2> log"), shell_operator("a '|' b"), shell_operator("get x?a=1&b=2")
    ('>', '', '')
    """
    quote = ""
    index = 0
    while index < len(text):
        letter = text[index]
        # A backslash takes the next letter as it is, except between single quotes.
        if letter == "\\" and quote != "'":
            index += 2
            continue
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            operator = _SHELL_OPERATOR.match(text, index)
            if operator and (operator[0] != "&" or not text[index + 1 : index + 2].strip()):
                return operator[0]
        index += 1
    return ""


def numbers_from(option: str, texts: Sequence[str] | None) -> frozenset[int]:
    """The set of numbers that texts such as `3`, `3-5` and `1,3-5` name together."""
    numbers: set[int] = set()
    for word in (part.strip() for text in texts or () for part in text.split(",")):
        first, dash, last = word.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise BadInput(
                f"{option} takes numbers such as 0 or 3-5, not '{word}'",
                hint=f"several with commas: {option} 0,3-5",
            )
        # Refused rather than turned round: 5-3 may also be a mistyped 5-13.
        if dash and int(last) < int(first):
            raise BadInput(f"{option} {word} is empty", hint=f"write {last}-{first}")
        if dash and int(last) - int(first) > MOST_STEPS:
            raise BadInput(
                f"{option} {word} has more than {MOST_STEPS:,} steps", hint="write a shorter range"
            )
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def engine_or_default(engine: "Engine | None") -> "tuple[Engine, bool]":
    """The engine, and whether the user named it. The default is ATB where the library is set up."""
    from driftline import settings

    if engine is not None:
        return engine, True
    return ("atb" if settings.atb_home() else "torch"), False


@Parameter(name="*", group=SELECTION)
@dataclass(frozen=True)
class SelectionOptions:
    """Which modules of a running program are looked at.

    Attributes:
        site: Only module paths that match, such as 'model.layers.*.mlp'.
        class_: Only classes that match, such as '*Norm'.
        step: Steps as numbers, ranges (3-5, 3-) or globs; '*' is all of them.
    """

    site: Annotated[list[str] | None, SEVERAL, Parameter(metavar="GLOB")] = None
    class_: Annotated[list[str] | None, SEVERAL, Parameter(metavar="GLOB")] = None
    step: Annotated[list[str] | None, SEVERAL, Parameter(metavar="GLOB")] = None

    def selection(self, *, all_steps: bool = False) -> "Selection":
        """What to capture.

        Args:
            all_steps: Every step if `--step` is not given, rather than step 0.
        """
        from driftline.captures.selection import Selection, patterns

        return Selection(
            sites=patterns(self.site),
            classes=patterns(self.class_),
            steps=patterns(self.step) if all_steps else step_patterns("", self.step),
        )


def step_patterns(
    execute_range: str, step: Sequence[str] | None, default: str = "0"
) -> tuple[str, ...]:
    """Step patterns from `--step` or `-er`; the default when neither is given.

    >>> step_patterns("3,5,7,7", None), step_patterns("", None), step_patterns("", ["*"])
    (('3-5', '7-7'), ('0',), ())
    """
    from driftline.captures.selection import patterns

    if step is not None:
        if execute_range:
            raise BadInput(
                "the steps are given twice, by --step and by -er", hint="give one of them"
            )
        # All steps is no filter at all, so that steps need not be counted.
        chosen = patterns(step)
        return () if "*" in chosen else chosen
    if not execute_range:
        return (default,)
    words = [word for word in _SEPARATORS.split(execute_range.strip()) if word]
    # A negative step gets here, because `-1,3` is a value to the guard in `app`.
    for word in words:
        if word.startswith("-") and word[1:].isdecimal():
            raise BadInput(
                f"-er counts steps from 0 upwards, so it cannot begin at {word}",
                hint="write pairs of numbers, such as -er 0,3",
            )
        if not word.isdecimal():
            raise BadInput(
                f"-er takes pairs of step numbers, and '{word}' is no number",
                hint="-er 3,5,7,7 selects the steps 3, 4, 5 and 7",
            )
    numbers = [int(word) for word in words]
    if len(numbers) % 2 or not numbers:
        last = numbers[-1] if numbers else 0
        raise BadInput(
            f"-er takes pairs of numbers, and '{execute_range}' has an odd one left over",
            hint=f"a single step is a pair too: {last},{last}",
        )
    # Both ends are included, as in ait.
    pairs = list(zip(numbers[0::2], numbers[1::2], strict=True))
    for first, last in pairs:
        if first > last:
            raise BadInput(
                f"-er {first},{last} ends before it begins", hint=f"did you mean {last},{first}?"
            )
    return tuple(f"{first}-{last}" for first, last in pairs)


@Parameter(name="*", group=ALIGNMENT)
@dataclass(frozen=True)
class AlignmentOptions:
    """Which tensors of two runs are compared with each other.

    Attributes:
        map: Sites with different names on the two sides, such as 'model.*=*'; may be repeated.
        site: Only sites that match; may be repeated.
        plan: Compare the tensors that this saved plan pairs, and no others.
    """

    map: Annotated[list[str] | None, Parameter(metavar="REF=CAND")] = None
    site: Annotated[list[str] | None, Parameter(metavar="GLOB")] = None
    plan: Annotated[Path | None, Parameter(metavar="FILE.toml")] = None

    def keywords(self) -> dict[str, Any]:
        """The fields of `AlignOptions`."""
        return {
            "sites": tuple(self.site or ()),
            "maps": tuple(self.map or ()),
            "plan_file": self.plan,
        }

    def align_options(self) -> "AlignOptions | None":
        """The options; None if none is given, because a saved comparison needs no alignment."""
        from driftline.alignment.align import AlignOptions

        if not (self.site or self.map or self.plan is not None):
            return None
        return AlignOptions(**self.keywords())


@Parameter(name="*", group=EVIDENCE)
@dataclass(frozen=True)
class EvidenceOptions:
    """What experiments have shown about two runs.

    Attributes:
        replay: What `driftline replay CAND` wrote.
        noise: What `driftline noise` wrote, or another trusted run; may be repeated.
    """

    replay: Annotated[Path | None, Parameter(metavar="DIR")] = None
    noise: Annotated[list[Path] | None, URLS, Parameter(metavar="DIR")] = None


@Parameter(name="*", group=EVIDENCE)
@dataclass(frozen=True)
class RepeatEvidenceOptions:
    """What further executions of the candidate have shown.

    Attributes:
        repeat: Another execution of the candidate's own program; may be repeated.
        bisect: What `driftline bisect --format json` printed: measures how much a site explains.
    """

    repeat: Annotated[list[Path] | None, URLS, Parameter(metavar="RUN")] = None
    bisect: Annotated[Path | None, Parameter(metavar="FILE.json")] = None


@Parameter(name="*", group=EVIDENCE)
@dataclass(frozen=True)
class PageEvidenceOptions:
    """What a page shows besides the comparison.

    Attributes:
        thresholds: Limits of each layer, or of the tokens of a decoder.
        no_diagnosis: Do not look for the cause.
    """

    thresholds: Annotated[Path | None, Parameter(metavar="FILE.json")] = None
    no_diagnosis: bool = False


@Parameter(name="*", group=LIMITS)
@dataclass(frozen=True)
class LimitOptions:
    """How much difference is allowed.

    Attributes:
        max: The largest value of a metric that passes, for every tensor; may be repeated.
        min: The smallest value that passes, for metrics such as cosine; may be repeated.
        min_coverage: INCOMPLETE if less than this share of all tensors was judged, such as 0.9.
            Default: 90 % of the calls of leaf modules.
        thresholds: Limits of each layer, as `driftline calibrate` and `thresholds` write them.
    """

    max: Annotated[list[str] | None, Parameter(metavar="METRIC=VALUE")] = None
    min: Annotated[list[str] | None, Parameter(metavar="METRIC=VALUE")] = None
    min_coverage: Annotated[float | None, Parameter(metavar="SHARE")] = None
    thresholds: Annotated[Path | None, Parameter(metavar="FILE.json")] = None

    @property
    def words(self) -> list[str]:
        """The `METRIC=VALUE` words of `--max` and `--min` together."""
        return [*(self.max or ()), *(self.min or ())]

    def limits(self, columns: "Iterable[Column]") -> "tuple[Limit, ...]":
        """The limits on what is measured."""
        from driftline.comparison.tolerance.tolerance import limits_from

        return limits_from(None, columns, at_most=self.max or (), at_least=self.min or ())


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class ExitOptions:
    """What the exit code says of a verdict.

    Attributes:
        allow_incomplete: Exit code 0 also for INCOMPLETE, when what was compared agrees but was too
            little to judge the whole.
        bisect_exit: Exit code 125 instead of 2; `git bisect run` reads it as "skip".
    """

    allow_incomplete: bool = False
    bisect_exit: bool = False

    def exit_code(self, verdict: "Verdict") -> int:
        """The exit code of a verdict; `main` replaces 2 by 125 if `--bisect-exit` is given."""
        from driftline.comparison.verdict.decision import EXIT_CODES

        if self.allow_incomplete and verdict == "incomplete":
            return EXIT_FINE
        return EXIT_CODES[verdict]


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class OutputOptions(ExitOptions):
    """Where a comparison's table goes.

    Attributes:
        output: Also write the comparison to this folder: table.json, rows.csv, and rows.parquet if
            pyarrow is installed.
        format: table for people; json, csv and markdown for programs and reviews; github
            (annotations and a step summary) and junit for CI.
        all: Show every row, not only the worst.
        quiet: Print nothing; the exit code gives the result.
        force: Replace existing output.
    """

    output: Annotated[Path | None, URLS, Parameter(name=("--output", "-o"), metavar="DIR")] = None
    format: TableFormat = "table"
    all: bool = False
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"))] = False
    force: bool = False


@Parameter(name="*", group=SPEED)
@dataclass(frozen=True)
class ThreadOptions:
    """How many threads measure.

    Attributes:
        threads: Worker threads. Default: one per usable core.
    """

    threads: Annotated[int | None, Parameter(metavar="N")] = None

    def count(self) -> int | None:
        """The number of threads, or None for the default.

        Raises:
            BadInput: The number is below 1.
        """
        if self.threads is not None and self.threads < 1:
            raise BadInput(f"--threads takes 1 or more, not {self.threads}", hint="give 1 or more")
        return self.threads


@Parameter(name="*", group=SPEED)
@dataclass(frozen=True)
class WorkerOptions:
    """Which processes and machines do the work.

    Attributes:
        jobs: Divide the work among N processes; the result is the same, bit for bit.
        executor: Divide the work on a Ray cluster: the one that this machine belongs to, or one at
            an address. All machines must see the same files.
    """

    jobs: Annotated[int | None, Parameter(metavar="N")] = None
    executor: Annotated[str | None, Parameter(metavar="ray[://HOST:PORT]")] = None

    @property
    def shared(self) -> bool:
        """Whether more than this process works."""
        return self.jobs is not None or self.executor is not None


@Parameter(name="*")
@dataclass(frozen=True)
class DecoderOptions:
    """A decoder, what it reads, and the two targets it runs on.

    Attributes:
        tokenizer: Folder or id of the tokenizer. Default: the model's own.
        library: The library that loads the model; fms needs the package ibm-fms. Default:
            transformers, unless only ibm-fms knows the architecture.
        sharegpt_path: Prompts: ShareGPT JSON, or a text file with one prompt per line.
        reference: The trusted target. Default: device=cpu,dtype=fp32.
        candidate: The target to test; its default is described above.
    """

    tokenizer: Annotated[str, Parameter(metavar="PATH", group=MODEL)] = ""
    # None is not "transformers": an architecture may decide.
    library: Annotated[Literal["transformers", "fms"] | None, Parameter(group=MODEL)] = None
    sharegpt_path: Annotated[
        Path | None, spelt("sharegpt_path", "FILE"), Parameter(group=PROMPTS)
    ] = None
    reference: Annotated[str, Parameter(metavar="TARGET", group=TARGETS)] = ""
    candidate: Annotated[str, Parameter(metavar="TARGET", group=TARGETS)] = ""


@Parameter(name="*")
@dataclass(frozen=True)
class DecoderModelOptions:
    """How a decoder is loaded and how its prompts are drawn.

    Attributes:
        variant: Id of the model for file names; if no path is given, this model is loaded.
        architecture: hf_pretrained, or the name of an architecture of ibm-fms.
        order: How prompts are drawn: head takes those that fit; doc draws as older results did.
    """

    variant: Annotated[str, Parameter(metavar="ID", group=MODEL)] = ""
    architecture: Annotated[str, Parameter(metavar="NAME", group=MODEL)] = "hf_pretrained"
    order: Annotated[Literal["head", "doc"], Parameter(group=PROMPTS)] = "head"
