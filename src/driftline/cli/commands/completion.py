"""`driftline completion`: a script that lets a shell complete commands, options and their values.

The script contains all words, so completing a line starts no Python. cyclopts can write such
scripts too, but they have three faults: a folder named like a command
(`driftline compare reference dump --fo`) ends the completion of options, options such as `-er` are
missing for fish, and `--help` and `--python` are missing.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple, TypeAlias

from driftline.cli import python_script as script
from driftline.cli.options import place
from driftline.errors import EXIT_FINE

Shell: TypeAlias = Literal["bash", "zsh", "fish"]


class _Option(NamedTuple):
    """An option as a shell sees it: spellings, whether a value follows, which values."""

    spellings: tuple[str, ...]
    takes_value: bool
    choices: tuple[str, ...]
    description: str


class _Command(NamedTuple):
    summary: str
    options: tuple[_Option, ...]
    choices: tuple[str, ...]
    """Words that its first argument takes, if these are known."""


def completion(shell: Annotated[Shell, place("SHELL")], /) -> int:
    """Print a script that lets a shell complete Driftline's commands and options.

        driftline completion bash >> ~/.bashrc
        driftline completion zsh > ~/.zfunc/_driftline
        driftline completion fish > ~/.config/fish/completions/driftline.fish

    For zsh, the folder must be in `fpath` before `compinit` runs.

    Args:
        shell: The shell that will read the script.
    """
    text = script.step("text", completion_script, shell)
    script.end(text)
    print(text)
    return EXIT_FINE


def completion_script(shell: Shell) -> str:
    """The script of one shell."""
    writers = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    return "\n".join(writers[shell](_commands()))


@functools.cache
def _commands() -> dict[str, _Command]:
    """Every command; cached for programs that write the scripts of several shells, as tests do."""
    # Late: `app` imports this module's function by its address.
    from driftline.cli.app import COMMANDS, arguments_of

    commands: dict[str, _Command] = {}
    for name, command in COMMANDS.items():
        options: list[_Option] = []
        choices: tuple[str, ...] = ()
        for argument in arguments_of(name):
            spellings = tuple(word for word in argument.names if word.startswith("-"))
            words = argument.get_choices() or ()
            if not spellings:
                choices = choices or tuple(words)
                continue
            help = " ".join((argument.parameter.help or "").split())
            options.append(_Option(spellings, argument.hint is not bool, tuple(words), help))
        options.append(_Option(("--help",), False, (), "Show the page of this command."))
        options.append(_Option(("--python",), False, (), "Print the equivalent Python program."))
        commands[name] = _Command(command.summary, tuple(options), choices)
    return commands


def _bash(commands: dict[str, _Command]) -> Iterator[str]:
    yield "# Completion of driftline for bash; made by `driftline completion bash`."
    yield "_driftline() {"
    yield '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"'
    yield '    local command="${COMP_WORDS[1]}" index'
    yield "    COMPREPLY=()"
    yield '    if [ "$COMP_CWORD" -eq 1 ]; then'
    names = " ".join(["help", *commands])
    yield f'        COMPREPLY=($(compgen -W "{names} --help --version" -- "$word")); return'
    yield "    fi"
    yield "    # What comes after two dashes is another program's line."
    yield "    for ((index = 2; index < COMP_CWORD; index++)); do"
    yield '        if [ "${COMP_WORDS[index]}" = -- ]; then'
    yield '            COMPREPLY=($(compgen -f -- "$word")); return'
    yield "        fi"
    yield "    done"
    yield '    case "$command $before" in'
    for name, command in commands.items():
        for option in command.options:
            if option.takes_value:
                patterns = "|".join(f'"{name} {spelling}"' for spelling in option.spellings)
                reply = f'-W "{" ".join(option.choices)}"' if option.choices else "-f"
                yield f'        {patterns}) COMPREPLY=($(compgen {reply} -- "$word")); return ;;'
    yield "    esac"
    yield '    case "$command" in'
    yield f'        help) COMPREPLY=($(compgen -W "{" ".join(commands)}" -- "$word")); return ;;'
    for name, command in commands.items():
        words = " ".join(spelling for option in command.options for spelling in option.spellings)
        yield f"        {name})"
        yield '            if [[ "$word" == -* ]]; then'
        yield f'                COMPREPLY=($(compgen -W "{words}" -- "$word"))'
        reply = f'-W "{" ".join(command.choices)}"' if command.choices else "-f"
        yield f'            else COMPREPLY=($(compgen {reply} -- "$word")); fi ;;'
    yield "    esac"
    yield "}"
    yield "complete -o filenames -F _driftline driftline"


def _zsh(commands: dict[str, _Command]) -> Iterator[str]:
    yield "#compdef driftline"
    yield "# Completion of driftline for zsh; made by `driftline completion zsh`."
    yield "_driftline() {"
    yield "    local -a commands"
    yield "    commands=("
    for name, command in commands.items():
        yield f"        {shlex.quote(f'{name}:{command.summary}')}"
    yield "    )"
    yield "    if (( CURRENT == 2 )); then _describe command commands; return; fi"
    yield "    # What comes after two dashes is another program's line."
    yield "    if (( ${words[(I)--]} > 0 && ${words[(I)--]} < CURRENT )); then _files; return; fi"
    yield '    case "$words[2] $words[CURRENT-1]" in'
    for name, command in commands.items():
        for option in command.options:
            if option.takes_value:
                patterns = "|".join(f'"{name} {spelling}"' for spelling in option.spellings)
                action = f"compadd -- {' '.join(option.choices)}" if option.choices else "_files"
                yield f"        {patterns}) {action}; return ;;"
    yield "    esac"
    yield "    local -a options"
    yield '    case "$words[2]" in'
    yield "        help) _describe command commands; return ;;"
    for name, command in commands.items():
        yield f"        {name}) options=("
        for option in command.options:
            for spelling in option.spellings:
                yield f"            {shlex.quote(f'{spelling}:{option.description}')}"
        yield "        )"
        if command.choices:
            yield f"        compadd -- {' '.join(command.choices)}"
        yield "        ;;"
    yield "    esac"
    yield '    if [[ "$words[CURRENT]" == -* ]]; then _describe -o option options; else _files; fi'
    yield "}"
    yield "# Sourced, it registers itself; from a folder of fpath, zsh calls it."
    yield 'if [ "$funcstack[1]" = _driftline ]; then _driftline "$@"'
    yield "else compdef _driftline driftline; fi"


def _fish(commands: dict[str, _Command]) -> Iterator[str]:
    yield "# Completion of driftline for fish; made by `driftline completion fish`."
    first = "__fish_use_subcommand"
    for name, command in commands.items():
        summary = shlex.quote(command.summary)
        yield f"complete -c driftline -f -n {first} -a {name} -d {summary}"
    for name, command in commands.items():
        condition = f"'__fish_seen_subcommand_from {name}'"
        for option in command.options:
            words = ["complete -c driftline", f"-n {condition}"]
            for spelling in option.spellings:
                bare = spelling.lstrip("-")
                # fish distinguishes -o, -old and --new, and our options have all three forms.
                kind = "-l" if spelling.startswith("--") else "-s" if len(bare) == 1 else "-o"
                words.append(f"{kind} {bare}")
            if option.takes_value:
                words.append("-r")
            if option.choices:
                words.append(f"-f -a {shlex.quote(' '.join(option.choices))}")
            words.append(f"-d {shlex.quote(option.description)}")
            yield " ".join(words)
        if command.choices:
            words = shlex.quote(" ".join(command.choices))
            yield f"complete -c driftline -f -n {condition} -a {words}"
