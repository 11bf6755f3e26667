"""The help page of one command, in plain text: its signature and docstring, laid out."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable
from typing import Any

from driftline.cli.commands import COMMANDS, EXIT_CODES
from driftline.cli.parsing import REQUIRED, Argument, arguments_of, load

WIDEST = 100
INDENT = 26
PYTHON = "--python, with any command: print the equivalent Python program, and do nothing else"
_WORDS: dict[Any, str] = {int: "N", float: "X"}
_DESCRIBED = re.compile(r"^    (\w+): (.*(?:\n {5,}.*)*)", re.MULTILINE)
"""A parameter in the section `Args:` of a cleaned docstring, with its continuation lines."""


def help_page(name: str) -> str:
    """The text of `driftline NAME --help`."""
    width = max(60, min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))
    function = load(name)
    arguments = arguments_of(function)
    usage = " ".join(_usage_word(a, name) for a in arguments if not a.names)
    prose, _, described = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:")
    said = {field: " ".join(text.split()) for field, text in _DESCRIBED.findall(described)}
    lines = [f"usage: driftline {name} [OPTIONS] {usage}".rstrip(), "", *_prose(prose, width)]
    for group in _groups(arguments):
        lines += ["", f"{group}:"]
        for argument in arguments:
            if _group(argument) == group:
                lines += _entry(argument, said.get(argument.field, ""), width)
    lines += ["", *textwrap.wrap(PYTHON, width), *textwrap.wrap(EXIT_CODES, width)]
    return "\n".join(lines) + "\n"


def option_names(name: str) -> list[str]:
    """Every option spelling of a command, for the tests that hold the documentation to it."""
    return [spelling for argument in arguments_of(load(name)) for spelling in argument.names]


def _group(argument: Argument) -> str:
    return (argument.group or "Options") if argument.names else "Arguments"


def _groups(arguments: Iterable[Argument]) -> list[str]:
    """Arguments and plain options, then the named groups in the order of the signature."""
    titles = list(dict.fromkeys(_group(argument) for argument in arguments))
    first = [title for title in ("Arguments", "Options") if title in titles]
    return first + [title for title in titles if title not in first]


def _usage_word(argument: Argument, command: str) -> str:
    if not argument.several:
        return argument.placeholder
    several = f"{argument.placeholder} ..."
    return f"[-- {several}]" if COMMANDS[command].takes_program else several


def _prose(text: str, width: int) -> list[str]:
    """Paragraphs filled to the width; indented blocks keep their lines."""
    lines: list[str] = []
    for paragraph in text.strip().split("\n\n"):
        if lines:
            lines.append("")
        if paragraph.startswith("    "):
            lines += paragraph.splitlines()
        else:
            lines += textwrap.wrap(" ".join(paragraph.split()), width)
    return lines


def _entry(argument: Argument, said: str, width: int) -> list[str]:
    value = _value_word(argument) if argument.names else argument.placeholder
    names = f"{', '.join(argument.names)} {value}".strip()
    default = _default(argument)
    if default and "default" not in said:
        said += f" [default: {default}]"
    body = textwrap.wrap(said.strip(), width - INDENT) or [""]
    if len(names) + 4 > INDENT:
        return [f"  {names}", *(" " * INDENT + line for line in body if line)]
    first = f"  {names}".ljust(INDENT) + body[0]
    return [first.rstrip(), *(" " * INDENT + line for line in body[1:])]


def _value_word(argument: Argument) -> str:
    if argument.kind is bool:
        return ""
    named = argument.field.strip("_").upper().replace("_", "-")
    return "|".join(argument.choices) or argument.metavar or _WORDS.get(argument.kind) or named


def _default(argument: Argument) -> str:
    if argument.default in (None, False, REQUIRED, ""):
        return ""
    return str(argument.default)
