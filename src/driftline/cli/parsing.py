"""Words of a command line → arguments of a function, with cyclopts; its complaints → a sentence.

How options are written in a command's signature (this is all that the seeds' spellings need):

- A single-dash long name is simply one of the names: `Parameter(name=["--range", "-er"])`. cyclopts
  tries the whole word before anything else, so `-er 3,5` and `-er=3,5` work.
- What it does next is turned off here: a word like `-opnam` that is no option would be read as
  `-o pnam` and silently become an output folder. `refuse_unknown_options` refuses it first, with
  the nearest name. So there is no clustering (`-ab`) and no glued value (`-oDIR`) in Driftline.
- An option that takes several words (`--type layer tensor`) has `consume_multiple=True`.
- A value that begins with a dash needs `allow_leading_hyphen=True` (`-er -1,3`), or `-er=-1,3`.
- A bool is a flag and takes no value. An option that is written `-child true` in a seed is a
  `Literal["true", "false"]`, not a bool.
- `--no-x` and `--empty-x` are not made up; name a negative if one is wanted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast, get_args, get_origin

from cyclopts import App, CycloptsError, Parameter
from cyclopts import exceptions as complaints
from cyclopts.argument import Argument, ArgumentCollection

from driftline.cli.commands import COMMANDS
from driftline.errors import BadInput, did_you_mean

CommandFunction = Callable[..., int | None]


def load(name: str) -> CommandFunction:
    """Import the function behind a command."""
    module, _, attribute = COMMANDS[name].address.partition(":")
    return cast(CommandFunction, getattr(importlib.import_module(module), attribute))


class _App(App):
    """Assembles its arguments once (8 ms): the words are read by us first, then by cyclopts."""

    def assemble_argument_collection(
        self, *, default_parameter: Parameter | None = None, parse_docstring: bool = False
    ) -> ArgumentCollection:
        asked = (default_parameter, parse_docstring)
        known = cast("dict[Any, ArgumentCollection]", self.__dict__.setdefault("_assembled", {}))
        if asked not in known:
            known[asked] = super().assemble_argument_collection(
                default_parameter=default_parameter, parse_docstring=parse_docstring
            )
        return known[asked]


def app_of(name: str) -> App:
    """The cyclopts app of one command; help and errors are ours, so that rich is never imported."""
    app = _App(
        name=f"driftline {name}",
        help_flags=(),
        version_flags=(),
        default_parameter=Parameter(negative=()),
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
        help_on_error=False,
    )
    app.default(load(name))
    return app


def run(name: str, words: Sequence[str]) -> int:
    """Parse the words and run the command; returns its exit code."""
    app = app_of(name)
    arguments = app.assemble_argument_collection(parse_docstring=False)
    refuse_unknown_options(name, arguments, words)
    try:
        function, bound, _ = app.parse_args(list(words), exit_on_error=False, print_error=False)
    except CycloptsError as complaint:
        raise in_a_sentence(name, complaint) from None
    result = cast(Any, function)(*bound.args, **bound.kwargs)
    return int(result or 0)


def refuse_unknown_options(name: str, arguments: ArgumentCollection, words: Sequence[str]) -> None:
    """Refuse what looks like an option and is none, before cyclopts reads it as something else."""
    skip = 0
    takes_many = False
    for word in words:
        if skip:
            skip -= 1
            continue
        if word == "--":
            return
        if not word.startswith("-") or word == "-" or _is_number(word):
            if takes_many:  # `--type layer tensor`
                continue
            if COMMANDS[name].takes_program and word != "-":
                raise BadInput(
                    f"'{word}' is no option of `driftline {name}`",
                    hint=f"the program comes after two dashes: driftline {name} ... -- {word} ...",
                )
            continue
        option, equals, _ = word.partition("=")
        argument = _argument_named(arguments, option)
        if argument is None:
            known = [n for a in arguments for n in a.names if n.startswith("-")]
            raise BadInput(
                f"`driftline {name}` has no option {option}",
                hint=_nearest_option(option, known) or f"see driftline {name} --help",
            )
        takes_many = bool(argument.parameter.consume_multiple)
        if not equals and not _is_flag(argument):
            skip = 1


def _argument_named(arguments: ArgumentCollection, option: str) -> Argument | None:
    return next((a for a in arguments if option in a.names), None)


def _is_flag(argument: Argument) -> bool:
    return argument.hint is bool or argument.hint == (bool | None)


def _nearest_option(option: str, known: list[str]) -> str:
    """Dashes weigh too much in short words: compare what comes after them."""
    bare = {n.lstrip("-"): n for n in known}
    hint = did_you_mean(option.lstrip("-"), bare)
    if not hint.startswith("did you mean"):
        return ""
    for word in sorted(bare, key=len, reverse=True):
        hint = hint.replace(f"'{word}'", bare[word])
    return hint


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def in_a_sentence(name: str, complaint: CycloptsError) -> BadInput:
    """What cyclopts complains about, as Driftline says it."""
    help_hint = f"see driftline {name} --help"
    if isinstance(complaint, complaints.MissingArgumentError) and complaint.argument is not None:
        if complaint.keyword:
            return BadInput(f"{complaint.keyword} needs a value", hint=help_hint)
        return BadInput(f"`driftline {name}` needs {_called(complaint.argument)}", hint=help_hint)
    if isinstance(complaint, complaints.CoercionError) and complaint.token is not None:
        word = complaint.token.value
        option = complaint.token.keyword or (
            _called(complaint.argument) if complaint.argument else "an argument"
        )
        target = complaint.target_type
        if get_origin(target) is Literal:
            choices = [str(choice) for choice in get_args(target)]
            listed = ", ".join(choices[:-1]) + f" or {choices[-1]}"
            hint = did_you_mean(word, choices)
            return BadInput(
                f"{option} takes {listed}, not '{word}'",
                hint=hint if hint.startswith("did you") else help_hint,
            )
        wanted = {int: "a whole number", float: "a number"}.get(cast(Any, target))
        if complaint.msg is None and wanted:
            return BadInput(f"{option} takes {wanted}, not '{word}'", hint=help_hint)
    if isinstance(complaint, complaints.RepeatArgumentError):
        return BadInput(f"{complaint.token.keyword} is given more than once", hint=help_hint)
    if isinstance(complaint, complaints.UnusedCliTokensError):
        extra = " ".join(complaint.unused_tokens or [])
        return BadInput(
            f"`driftline {name}` does not know what to do with '{extra}'", hint=help_hint
        )
    sentence = " ".join(str(complaint).split()).rstrip(".")
    return BadInput(sentence or f"`driftline {name}` could not read its arguments", hint=help_hint)


def _called(argument: Argument) -> str:
    return argument.name if argument.name.startswith("-") else argument.name.upper()
