"""The commands, and how cyclopts reads the words of a command line.

A command is a function: positional-only parameters are given by their place, `*program` is what
follows `--`, keyword-only parameters are options or groups of options (`cli/options.py`). To add
one, write the function in `commands/` and name it in `COMMANDS`.

cyclopts is lenient: it would silently read a misspelt word as something else. Four guards refuse
such words: `_check` refuses every word with a dash that is not the exact name of an option,
`_convert` takes whole numbers and choices literally, `read` cuts the line at `--` itself, and
options that take several words need at least one (`options.SEVERAL`).
"""

from __future__ import annotations

import functools
import importlib
import inspect
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin

from cyclopts import App, CycloptsError, Group, Parameter, Token
from cyclopts.argument import Argument
from cyclopts.exceptions import (
    CoercionError,
    ConsumeMultipleError,
    MissingArgumentError,
    RepeatArgumentError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from driftline.cli.options import OPTIONS, OTHER_TOOLS
from driftline.cli.python_script import FLAG, write_script
from driftline.errors import BadInput, did_you_mean

if TYPE_CHECKING:  # rich is loaded for help pages only
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions

CommandFunction = Callable[..., int | None]

# Panels of the overview, in the order in which people need them.
EVERYDAY = Group("Everyday", sort_key=1)
CAPTURE = Group("More: capture", sort_key=2)
COMPARE = Group("More: compare", sort_key=3)
DIAGNOSE = Group("More: diagnose", sort_key=4)
LOOK = Group("More: look, convert, set up", sort_key=5)
OPERATORS = Group("More: single operators", sort_key=6)
DECODERS = Group("More: text models", sort_key=7)

# The first panel of a command's own page.
EVERYDAY_OPTIONS = Group("Everyday options", sort_key=0.5)


@dataclass(frozen=True)
class Command:
    """One command of the command line.

    Attributes:
        address: `module:function` in `driftline.cli.commands`.
        group: Panel of the overview.
        summary: One line of the overview, no full stop.
        takes_program: The words after `--` are the command line of another program. A bare word
            before `--` is then a misspelt option and never the first word of that program.
        everyday: The options that its own page shows first, in this order.
    """

    address: str
    group: Group
    summary: str
    takes_program: bool = False
    everyday: tuple[str, ...] = ()


# In the order of the overview. Commands are named by address, so `--help` imports none of them.
COMMANDS: dict[str, Command] = {
    "diff": Command(
        "diff:diff",
        EVERYDAY,
        "run two programs, say where they begin to disagree and why, write a report",
        everyday=("--rev", "--env", "--output", "--step", "--no-replay", "--force"),
    ),
    "dump": Command(
        "dump:dump",
        EVERYDAY,
        "run an unchanged program and save what its model computes",
        takes_program=True,
        everyday=("--output", "--exec", "--step", "--site", "--level", "--keep", "--force"),
    ),
    "compare": Command(
        "compare:compare",
        EVERYDAY,
        "compare two runs or tensor files: which layers differ, and which one first",
        everyday=(
            *("--output", "--site", "--step", "--map", "--max", "--min"),
            *("--thresholds", "--format", "--all", "--dry-run"),
        ),
    ),
    "diagnose": Command(
        "diagnose:diagnose",
        EVERYDAY,
        "find where the drift starts, whether it is more than noise, and what kind of bug it is",
        everyday=("--replay", "--noise", "--format", "--repro", "--all"),
    ),
    "report": Command(
        "look:report",
        EVERYDAY,
        "write a comparison as one HTML file, for example to attach to a bug",
        everyday=("--output", "--title", "--replay", "--force"),
    ),
    "view": Command(
        "look:view",
        EVERYDAY,
        "open two runs in a browser: the report, and every tensor behind it",
        everyday=("--open", "--port", "--title"),
    ),
    "errcheck": Command(
        "errcheck:errcheck",
        CAPTURE,
        "run an unchanged program and name the operator that made the first NaN or infinity",
        takes_program=True,
        everyday=("--exec", "--exit", "--output"),
    ),
    "push": Command("push:push", CAPTURE, "send a run or a comparison to s3:// or another address"),
    "merge": Command(
        "compare:merge",
        COMPARE,
        "merge the shards of a comparison into one table",
    ),
    "calibrate": Command(
        "calibrate:calibrate", COMPARE, "make limits for every layer from clean comparisons"
    ),
    "check": Command(
        "check:check",
        COMPARE,
        "check a comparison against limits; names the first layer beyond them",
    ),
    "labels": Command(
        "dialects:labels",
        COMPARE,
        "run a program that labels tensors in pairs, and compare the pairs",
        takes_program=True,
    ),
    "check-hooks": Command(
        "dialects:check_hooks",
        COMPARE,
        "compare two folders of Paddle's saving hook: one csv of figures per rank",
    ),
    "replay": Command(
        "experiments:replay",
        DIAGNOSE,
        "run the reference program, and its modules also on the candidate's inputs",
    ),
    "noise": Command(
        "experiments:noise",
        DIAGNOSE,
        "run a trusted program in several correct ways: how much noise is normal",
        takes_program=True,
    ),
    "bisect": Command(
        "experiments:bisect",
        DIAGNOSE,
        "run the candidate with some outputs replaced: which block causes the error",
        takes_program=True,
    ),
    "repeat": Command(
        "experiments:repeat",
        DIAGNOSE,
        "run a program several times: is it deterministic, and batch-invariant",
        takes_program=True,
    ),
    "trend": Command(
        "trend:trend",
        DIAGNOSE,
        "follow a figure of every layer over steps or releases: when did it start to grow",
    ),
    "show": Command("look:show", LOOK, "show what is in a run, a comparison or a tensor file"),
    "demo": Command(
        "setup:demo", LOOK, "take a tour: two small programs, a planted fault, a report"
    ),
    "convert": Command(
        "convert:convert", LOOK, "convert a dump of another tool to a run, or a run to other files"
    ),
    "topology": Command("look:topology", LOOK, "write the structure of a model for a graph viewer"),
    "doctor": Command("setup:doctor", LOOK, "print versions and devices of this machine"),
    "completion": Command(
        "completion:completion",
        LOOK,
        "print a script that lets bash, zsh or fish complete commands",
    ),
    "compat": Command(
        "setup:compat", LOOK, "write the scripts and test modules that other tools' documents name"
    ),
    "opcheck": Command(
        "opcheck:opcheck", OPERATORS, "check single operators of a dump against their definitions"
    ),
    "metrics": Command(
        "decoders:metrics",
        DECODERS,
        "run a decoder on two targets and score every generated token",
        everyday=("--model-path", "--sharegpt-path", "--reference", "--candidate", "--output-dir"),
    ),
    "layer-metrics": Command(
        "decoders:layer_metrics",
        DECODERS,
        "run a decoder on two targets and compare every layer",
        everyday=("--mode", "--model-paths", "--reference", "--candidate", "--output-path"),
    ),
    "thresholds": Command(
        "thresholds:thresholds",
        DECODERS,
        "make limits for a model or its layers from metric files of clean runs",
    ),
    "validate": Command(
        "validate:validate",
        DECODERS,
        "check a decoder: equal tokens, or few enough tokens beyond such limits",
        everyday=("--model-paths", "--metrics-threshold", "--reference", "--candidate", "--output"),
    ),
}

PYTHON_FLAG_HELP = (
    f"{FLAG}, with any command: print the equivalent Python program and do nothing else"
)
EXIT_CODES = (
    "exit codes: 0 fine, 1 numbers differ beyond the limits, 2 the command failed or there was "
    "too little to judge (a message says why)"
)


def load(name: str) -> CommandFunction:
    """Import the function of a command."""
    module, _, attribute = _address(name).partition(":")
    return cast("CommandFunction", getattr(importlib.import_module(module), attribute))


def _address(name: str) -> str:
    return f"driftline.cli.commands.{COMMANDS[name].address}"


def run(name: str, words: Sequence[str]) -> int:
    """Read the words of a command and run it; returns its exit code."""
    function = load(name)
    # A program that is run may have options of the same name: only words before `--` are ours.
    own_words = words[: words.index("--")] if "--" in words else words
    if FLAG in own_words:
        # `--python` is no option of the functions: it changes what is done with their calls.
        kept = [word for word in own_words if word != FLAG]
        call = read(name, function, [*kept, *words[len(own_words) :]])
        print(write_script(lambda: function(*call.args, **call.kwargs)), end="")
        return 0
    call = read(name, function, words)
    return int(function(*call.args, **call.kwargs) or 0)


def command_app(name: str, function: CommandFunction) -> App:
    """The cyclopts application of one command."""
    prose, _, _ = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:")
    app = App(
        name=f"driftline {name}",
        help=_help_text(prose),
        help_format="plaintext",  # `model.*=*` is a pattern, not emphasis
        help_flags=(),  # main() handles --help at any place on the line
        version_flags=(),
        group_parameters=OPTIONS,
        default_parameter=Parameter(
            converter=_convert,
            negative=(),  # no option is invented: --no-x, --empty-x
            json_list=False,  # `--site [ab]*` is a pattern, not JSON
            json_dict=False,
            show_default=_shown_default,
        ),
    )
    app.default(function)
    return app


def print_help(name: str) -> None:
    """Print the help page of a command."""
    app = command_app(name, load(name))
    arguments = arguments_of(name)
    places = [argument for argument in arguments if _is_place(argument)]
    usage = [_usage_word(name, argument, places[0]) for argument in places]
    console = _console()
    for text in (" ".join(["Usage: driftline", name, "[OPTIONS]", *usage]), app.help):
        # No markup: a glob such as `[ab]*` is text.
        console.print(text, markup=False, highlight=False)
        console.print()
    for panel in _panels(name, arguments):
        _print_panel(console, console.options, panel)
    console.print()
    console.print(f"{PYTHON_FLAG_HELP}\n{EXIT_CODES}", markup=False, highlight=False)


def arguments_of(name: str) -> Sequence[Argument]:
    """Places and options of a command, with their descriptions."""
    return command_app(name, load(name)).assemble_argument_collection(parse_docstring=True)


def _panels(name: str, arguments: Sequence[Argument]) -> list[HelpPanel]:
    """The panels of a help page: arguments, everyday options, other options by subject, and last
    the spellings of other tools.
    """
    from cyclopts.argument import ArgumentCollection
    from cyclopts.help import HelpEntry, HelpPanel, create_parameter_help_panel
    from rich.text import Text

    everyday = COMMANDS[name].everyday
    by_group: dict[str, tuple[Group, list[Argument]]] = {}
    for argument in arguments:
        group = cast("tuple[Group, ...]", argument.parameter.group)[0]
        if not set(everyday).isdisjoint(argument.names):
            group = EVERYDAY_OPTIONS
        by_group.setdefault(group.name, (group, []))[1].append(argument)
    if EVERYDAY_OPTIONS.name in by_group:
        by_group[EVERYDAY_OPTIONS.name][1].sort(
            key=lambda argument: min(everyday.index(n) for n in argument.names if n in everyday)
        )
    # Groups of options are numbered; positional arguments have no number and come first.
    groups = sorted(by_group.values(), key=lambda group: cast("int", group[0].sort_key or -1))
    panels = [
        create_parameter_help_panel(group, ArgumentCollection(members), "plaintext")
        for group, members in groups
    ]
    underscored: list[str] = []
    for panel in panels:
        for index, entry in enumerate(panel.entries):
            dashed = tuple(word for word in entry.positive_names if "_" not in word)
            if dashed and dashed != entry.positive_names:
                # IBM's scripts write underscores: either is read, and one is shown here.
                panel.entries[index] = entry.copy(positive_names=dashed)
                underscored += [word for word in entry.positive_names if "_" in word]
    if underscored:
        words = Text(", ".join(underscored))
        if not panels or panels[-1].title != OTHER_TOOLS.name:
            panels.append(HelpPanel(title=OTHER_TOOLS.name, format="parameter"))
        # A separate entry, because a panel without entries is not shown.
        panels[-1].entries.append(
            HelpEntry(positive_names=("with underscores",), description=words)
        )
    return panels


def print_overview(version: str) -> None:
    """Print the page of `driftline --help`. No command is imported for it."""
    app = App(
        name="driftline",
        help=f"driftline {version}: finds where two executions of one model begin to disagree, "
        "and whether the difference is more than noise.",
        usage="Usage: driftline COMMAND ...",
        help_format="plaintext",
        help_formatter=_print_panel,
        help_flags=(),
        version_flags=(),
        help_epilogue="\n".join(
            [
                "driftline demo              take a tour of one minute; it needs no preparation",
                "driftline COMMAND --help    show the options of one command",
                "driftline COMMAND --python  print the same as a Python program; run nothing",
                "driftline --version         print the version",
                "",
                EXIT_CODES,
            ]
        ),
    )
    for position, (name, command) in enumerate(COMMANDS.items()):
        app.command(
            _address(name),
            name=name,
            help=command.summary,
            group=command.group,
            sort_key=position,  # the order of work, not of the alphabet
        )
    app.help_print([], console=_console())


def option_names(name: str) -> list[str]:
    """Every option spelling of a command."""
    return list(_options_of(name, load(name)))


@functools.cache
def _options_of(name: str, function: CommandFunction) -> Mapping[str, Argument]:
    """Every spelling and its option; cached for programs that call many commands, as tests do."""
    return _options(command_app(name, function).assemble_argument_collection())


def read(name: str, function: CommandFunction, words: Sequence[str]) -> inspect.BoundArguments:
    """The arguments of the command's function, as the words give them; others keep their default.

    Raises:
        BadInput: The words are not a valid command line of this command.
    """
    # Names are looked up here first, because cyclopts also accepts what is nearly one.
    options = _options_of(name, function)
    cut = words.index("--") if "--" in words else len(words)
    tokens = _check(name, words[:cut], options)
    takes_program = COMMANDS[name].takes_program
    if not takes_program:
        # Here the words after `--` are places like others: files whose names begin with a dash.
        tokens += words[cut:]
    app = command_app(name, function)
    try:
        # Errors are ours to print: cyclopts would draw a box and end the process.
        _, call, _ = app.parse_args(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise _refusal(name, app, error, _greedy_option(tokens, options)) from None
    if takes_program:
        if call.args:
            # Bare words before `--`, the value of a misspelt option say: cyclopts would run them.
            word = call.args[0]
            raise BadInput(
                f"'{word}' is no option of `driftline {name}`",
                hint=f"the program comes after two dashes: driftline {name} ... -- {word} ...",
            )
        call.arguments["program"] = tuple(words[cut + 1 :])
    return call


def _check(name: str, words: Sequence[str], options: Mapping[str, Argument]) -> list[str]:
    """The words to pass to cyclopts, checked first: cyclopts accepts abbreviations that we refuse.

    It would take `-opnam self` for `-o pnam` and `--flag=true` for `--flag`. Values that begin with
    a dash are joined to their option: `-er -1,3` becomes `-er=-1,3`.
    """
    tokens: list[str] = []
    for word in words:
        before = options.get(tokens[-1]) if tokens else None
        if before is not None and not _is_flag(before) and word.startswith("-"):
            # No option begins with a digit, so such a word is a value.
            if not _looks_like_option(word) or word[1].isdigit():
                tokens[-1] += f"={word}"
                continue
            raise BadInput(f"{tokens[-1]} needs a value", hint=_see_help(name))
        if _looks_like_option(word):
            option, equals, _ = word.partition("=")
            if option not in options:
                raise BadInput(
                    f"`driftline {name}` has no option {option}",
                    hint=_nearest_option(name, option, [*options, FLAG]),
                )
            if equals and _is_flag(options[option]):
                raise BadInput(f"{option} takes no value", hint=f"write {option}, or leave it out")
        tokens.append(word)
    return tokens


def _looks_like_option(word: str) -> bool:
    """Whether a word begins with a dash and is neither a number nor the dash alone."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


class _WrongValue(ValueError):
    """A value that an option does not take; cyclopts adds the name of the option."""

    def __init__(self, sentence: str, hint: str = "") -> None:
        super().__init__(sentence)
        self.hint = hint


def _convert(hint: Any, tokens: Sequence[Token]) -> Any:
    """Words to a value of the annotated type.

    cyclopts' own conversion rounds 1.5 to 2 and reads `none` as None.
    """
    if NoneType in get_args(hint):
        (hint,) = (member for member in get_args(hint) if member is not NoneType)
    if get_origin(hint) is not list:
        return _convert_word(hint, tokens[0].value)
    (element,) = get_args(hint)
    words = [token.value for token in tokens]
    if get_origin(element) is Literal:  # `--level ops,params`; other lists may hold commas
        words = [part for word in words for part in word.split(",")]
    return [_convert_word(element, word) for word in words]


def _convert_word(kind: Any, word: str) -> Any:
    if get_origin(kind) is Literal:
        choices = cast("tuple[str, ...]", get_args(kind))
        if word in choices:
            return word
        listed = ", ".join(choices[:-1]) + f" or {choices[-1]}"
        nearest = did_you_mean(word, choices)
        raise _WrongValue(
            f"takes {listed}, not '{word}'", nearest if nearest.startswith("did you") else ""
        )
    if kind is int or kind is float:
        try:
            return kind(word)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise _WrongValue(f"takes {wanted}, not '{word}'") from None
    if kind is Path:
        from driftline.runs.stores.addresses import UrlPath, place_of

        # `file:///x` is a path of this machine, too.
        path = place_of(word)
        if isinstance(path, UrlPath):
            raise _WrongValue("takes a path of this machine, not an address", "copy it here first")
        return path
    return kind(word)


def _greedy_option(words: Sequence[str], options: Mapping[str, Argument]) -> str:
    """The last option on the line that took several words as its values; empty if none did."""
    greedy, count, spelling = "", 0, ""
    for word in words:
        if word in options:
            spelling, count = word, 0
        else:
            count += 1
            # Only lists take a second word.
            if spelling and count > 1 and get_origin(_bare(options[spelling].hint)) is list:
                greedy = spelling
    return greedy


def _bare(hint: Any) -> Any:
    """An annotation without `| None`."""
    return next((member for member in get_args(hint) if get_origin(member) is list), hint)


def _refusal(name: str, app: App, error: CycloptsError, greedy: str) -> BadInput:
    """The message for what cyclopts refused, in the wording of our other messages."""
    argument = error.argument
    hint = _see_help(name)
    if isinstance(error, CoercionError) and argument is not None:
        # The spelling that was typed, which need not be the first of the option.
        spelt = next((token.keyword for token in argument.tokens if token.keyword), argument.name)
        if isinstance(error.__cause__, _WrongValue):
            hint = error.__cause__.hint or hint
        return BadInput(f"{spelt} {error.msg}", hint=hint)
    if isinstance(error, ConsumeMultipleError) or (
        isinstance(error, MissingArgumentError) and error.keyword
    ):
        return BadInput(f"{error.keyword} needs a value", hint=hint)
    if isinstance(error, MissingArgumentError) and argument is not None:
        hint = _example(name, app.help) or hint
        if greedy:
            hint = f"{greedy} takes every word up to the next option: put {argument.name} before it"
        return BadInput(f"`driftline {name}` needs {argument.name}", hint=hint)
    if isinstance(error, RepeatArgumentError):
        return BadInput(f"{error.token.keyword} is given more than once", hint=hint)
    if isinstance(error, UnusedCliTokensError | UnknownOptionError):
        # Options were checked before; an unknown one is a word after `--`.
        unused = error.unused_tokens or ()
        if isinstance(error, UnknownOptionError):
            unused = [error.token.keyword or error.token.value]
        extra = " ".join(unused)
        return BadInput(f"`driftline {name}` does not know what to do with '{extra}'", hint=hint)
    # No other error is known to get here. If one does, its own text is shown.
    error.verbose = False
    return BadInput(" ".join(str(error).split()), hint=hint)


def _options(arguments: Sequence[Argument]) -> dict[str, Argument]:
    return {
        spelling: argument
        for argument in arguments
        for spelling in argument.names
        if spelling.startswith("-")
    }


def _is_flag(argument: Argument) -> bool:
    return argument.hint is bool


def _is_place(argument: Argument) -> bool:
    return argument.field_info.is_positional


def _usage_word(name: str, argument: Argument, first: Argument) -> str:
    if argument.field_info.kind is not inspect.Parameter.VAR_POSITIONAL:
        # If even the first may be missing, options can give the same: `compare -gp REF -mp CAND`.
        return f"[{argument.name}]" if first.required and not argument.required else argument.name
    # A place that takes all words that are left.
    several = f"{argument.name} ..."
    return f"[-- {several}]" if COMMANDS[name].takes_program else several


def _nearest_option(name: str, option: str, spellings: Sequence[str]) -> str:
    # Dashes weigh too much in short words: compare what comes after them.
    bare = {spelling.lstrip("-"): spelling for spelling in spellings}
    hint = did_you_mean(option.lstrip("-"), bare)
    if not hint.startswith("did you mean"):
        return _see_help(name)
    for word in sorted(bare, key=len, reverse=True):
        hint = hint.replace(f"'{word}'", bare[word])
    return hint


def _example(name: str, page: str) -> str:
    """The first example of a command's page, if it is a single complete line of that command.

    >>> _example("show", "Look.\\n\\n$ driftline show run\\n$ driftline show ref cand")
    'such as: driftline show run'
    """
    first, *more = page.partition("$ ")[2].splitlines() or [""]
    continued = bool(more) and more[0].startswith(" ")
    return f"such as: {first}" if first.startswith(f"driftline {name} ") and not continued else ""


def _see_help(name: str) -> str:
    return f"see driftline {name} --help"


def _shown_default(value: object) -> str | None:
    """The default as help shows it; None if the default means that the option is not given."""
    return None if value is None or value is False or value == "" else str(value)


def _help_text(prose: str) -> str:
    """The text with each paragraph on one line, which the terminal wraps; examples keep lines."""
    paragraphs: list[str] = []
    for paragraph in prose.split("\n\n"):
        if paragraph.startswith("    "):
            lines = textwrap.dedent(paragraph).splitlines()
            # The library strips leading blanks: the prompt is what marks an example.
            paragraphs.append(
                "\n".join(f"$ {line}" if line.startswith("driftline") else line for line in lines)
            )
        else:
            paragraphs.append(" ".join(paragraph.split()))
    return "\n\n".join(paragraphs)


def _print_panel(console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
    """Print a panel whose descriptions fill the line: line breaks of the docstring are dropped."""
    from cyclopts.help import InlineText
    from cyclopts.help.formatters import DefaultFormatter
    from rich.text import Text

    for entry in panel.entries:
        if isinstance(entry.description, InlineText):
            # The description is replaced in place: choices and defaults are appended to it later.
            words = str(entry.description.primary_renderable).split()
            entry.description.primary_renderable = Text(" ".join(words))
    DefaultFormatter()(console, options, panel)


def _console() -> Console:
    """A console for help pages: at most 100 columns wide, which is comfortable to read."""
    from rich.console import Console

    # Where there is no terminal, pages go into files and bug reports: 100 columns.
    # Narrower than 40 columns, options and their descriptions no longer fit side by side.
    return Console(width=max(40, min(100, shutil.get_terminal_size((100, 24)).columns)))
