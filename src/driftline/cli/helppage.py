"""The help page of one command, in plain text.

cyclopts would paint it with rich, whose import alone takes longer than everything else here
together (measured: 0.1 s); what it knows of a command (names, types, defaults, docstring) will do.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterable
from typing import Any, Literal, cast, get_args, get_origin

from cyclopts.argument import Argument

from driftline.cli.commands import EXIT_CODES
from driftline.cli.parsing import app_of, load

WIDEST = 100
INDENT = 26
_WORDS: dict[Any, str] = {int: "N", float: "X"}


def help_page(name: str) -> str:
    """The text of `driftline NAME --help`."""
    width = max(60, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))
    arguments = [
        a for a in app_of(name).assemble_argument_collection(parse_docstring=True) if _is_shown(a)
    ]
    positional = [a for a in arguments if a.index is not None]
    usage = " ".join(_usage_word(a) for a in positional)
    lines = [f"usage: driftline {name} [OPTIONS] {usage}".rstrip(), ""]
    lines += _prose(load(name).__doc__ or "", width)
    for group in dict.fromkeys(_group(a) for a in sorted(arguments, key=_group_place)):
        lines += ["", f"{group}:"]
        for argument in arguments:
            if _group(argument) == group:
                lines += _entry(argument, width)
    lines += ["", *textwrap.wrap(EXIT_CODES, width)]
    return "\n".join(lines) + "\n"


def option_names(name: str) -> list[str]:
    """Every option spelling of a command, for the tests that hold the documentation to it."""
    arguments = app_of(name).assemble_argument_collection(parse_docstring=False)
    return [n for a in arguments if _is_shown(a) for n in a.names if n.startswith("-")]


def _is_shown(argument: Argument) -> bool:
    return argument.parameter.show is not False


def _group(argument: Argument) -> str:
    groups = cast(tuple[Any, ...], argument.parameter.group or ())
    title = str(groups[0].name) if groups else "Parameters"
    return "Options" if title == "Parameters" else title


def _group_place(argument: Argument) -> tuple[bool, bool, int]:
    """Arguments, the plain options, then named groups: by their sort key, else as they come."""
    groups = cast(tuple[Any, ...], argument.parameter.group or ())
    key = groups[0].sort_key if groups else None
    title = _group(argument)
    return (title != "Arguments", title != "Options", key if isinstance(key, int) else 0)


def _usage_word(argument: Argument) -> str:
    word = _placeholder(argument)
    if argument.is_var_positional():
        return f"[-- {word} ...]"
    return word if argument.required or _group(argument) == "Arguments" else f"[{word}]"


def _placeholder(argument: Argument) -> str:
    bare = [n for n in argument.names if not n.startswith("-")]
    return (bare[0] if bare else argument.field_info.name).upper()


def _prose(doc: str, width: int) -> list[str]:
    """The docstring without its section of arguments; indented blocks keep their lines."""
    text = inspect.cleandoc(doc).partition("\nArgs:")[0].strip()
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        if lines:
            lines.append("")
        if paragraph.startswith("    "):
            lines += paragraph.splitlines()
        else:
            lines += textwrap.wrap(" ".join(paragraph.split()), width)
    return lines


def _entry(argument: Argument, width: int) -> list[str]:
    dashed = [n for n in argument.names if n.startswith("-")]
    value = _value_word(argument)
    if argument.index is not None:
        names = ", ".join([_placeholder(argument), *dashed])
    else:
        names = ", ".join(dashed) + (f" {value}" if value else "")
    said = " ".join(str(argument.parameter.help or "").split())
    default = _default(argument)
    if default and "default" not in said:
        said += f" [default: {default}]"
    body = textwrap.wrap(said.strip(), width - INDENT) or [""]
    if len(names) + 4 > INDENT:
        return [f"  {names}", *(" " * INDENT + line for line in body if line)]
    first = f"  {names}".ljust(INDENT) + body[0]
    return [first.rstrip(), *(" " * INDENT + line for line in body[1:])]


def _value_word(argument: Argument) -> str:
    hint = _without_none(argument.hint)
    if hint is bool:
        return ""
    if get_origin(hint) in (list, tuple):
        hint = next(iter(get_args(hint)), str)
    if get_origin(hint) is Literal:
        return "|".join(str(choice) for choice in get_args(hint))
    metavar = getattr(argument.parameter, "metavar", None)
    if isinstance(metavar, str) and metavar:
        return metavar
    return _WORDS.get(hint) or argument.field_info.name.strip("_").upper().replace("_", "-")


def _without_none(hint: Any) -> Any:
    options: Iterable[Any] = [a for a in get_args(hint) if a is not type(None)]
    kept = list(options)
    return kept[0] if type(None) in get_args(hint) and len(kept) == 1 else hint


def _default(argument: Argument) -> str:
    default = argument.field_info.default
    if default in (None, False, inspect.Parameter.empty, "") or default in ((), []):
        return ""
    return str(default)
