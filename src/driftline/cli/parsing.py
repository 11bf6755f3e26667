"""Words of a command line → arguments of a function, or one sentence that says why not.

A command is a function and its signature is the command line: positional-only parameters are read
by their place, `*program` is what follows `--`, keyword-only parameters are options. An annotation
says what a word becomes (str, int, float, Path, a `Literal` of texts, a list of these, or bool for
a flag), `Annotated[..., Option(...)]` how it is spelt and shown.

The rules, which are few so that a misspelt word is refused and never becomes something else:

- Names are written in full, with one dash or two: `-er 3,5`, `-er=3,5`, `--execute-range 3,5`.
  Nothing is abbreviated, clustered (`-ab`) or glued to its value (`-oDIR`); no `--no-x` is made up.
- A list may be given repeatedly; with `several=True` also as `--type layer tensor`. Anything else
  is given once.
- A word that begins with a dash is an option, unless it is a number; so such a value is written
  `--site=-x`. As no option begins with a digit, `-er -1,3` is understood.
- After `--` every word is taken as it is.
- Every command has `--python`, which prints its calls of the Python API instead (`cli/script.py`).

Ours because each library for this costs more at every start than the rest of a small comparison.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

from driftline.cli.commands import COMMANDS
from driftline.cli.script import FLAG, written_down
from driftline.errors import BadInput, did_you_mean

CommandFunction = Callable[..., int | None]
_NUMBERS: dict[Any, str] = {int: "a whole number", float: "a number"}
_TAKES_THE_REST = 0x04
"""What `inspect` calls CO_VARARGS."""
REQUIRED: Any = object()
"""Stands for the default of what must be given."""


class Option(NamedTuple):
    """How a parameter is spelt and shown; everything left out follows from the parameter.

    Attributes:
        names: Spellings with their dashes. Default: `--` and the parameter's name.
        metavar: What stands for its value on the help page.
        group: Heading on the help page.
        several: A list that takes words up to the next option.
        urls: A path that may also be an address elsewhere, such as `s3://bucket/run`.
    """

    names: tuple[str, ...] = ()
    metavar: str = ""
    group: str = ""
    several: bool = False
    urls: bool = False


class Argument(NamedTuple):
    """One parameter of a command, as read from its signature.

    Attributes:
        field: Name of the parameter.
        names: Spellings of an option; empty for what is given by its place.
        metavar: As the signature says it; empty if it does not.
        group: Heading on the help page; empty for the one of plain options.
        kind: What becomes of a word: bool (a flag, which takes none), int, float, str or Path.
        choices: The only words it takes; empty if any will do.
        many: The value is a list.
        several: One mention takes several words; in a place, all that are left.
        default: Value if it is not given; `REQUIRED` if it must be.
        urls: A path that may also be an address elsewhere.
    """

    field: str
    names: tuple[str, ...]
    metavar: str
    group: str
    kind: Callable[[str], Any]
    choices: tuple[str, ...]
    many: bool
    several: bool
    default: Any
    urls: bool = False

    @property
    def placeholder(self) -> str:
        """What stands for an argument that is given by its place."""
        return self.metavar or self.field.upper()


def load(name: str) -> CommandFunction:
    """Import the function behind a command."""
    module, _, attribute = COMMANDS[name].address.partition(":")
    return cast(CommandFunction, getattr(importlib.import_module(module), attribute))


def run(name: str, words: Sequence[str]) -> int:
    """Parse the words and run the command; returns its exit code."""
    function = load(name)
    own = words[: words.index("--")] if "--" in words else words
    if FLAG in own:
        rest = [word for word in own if word != FLAG]
        places, options = read(name, arguments_of(function), [*rest, *words[len(own) :]])
        print(written_down(lambda: function(*places, **options)), end="")
        return 0
    places, options = read(name, arguments_of(function), words)
    return int(function(*places, **options) or 0)


def arguments_of(function: CommandFunction) -> list[Argument]:
    """What a command's signature says, in its order."""
    hints = get_type_hints(function, include_extras=True)
    return [_argument(parameter, hints[parameter.name]) for parameter in _parameters(function)]


class _Parameter(NamedTuple):
    """One parameter of a function: `inspect` would know it, and take 6 ms to load."""

    name: str
    by_name: bool
    rest: bool = False
    default: Any = REQUIRED


def _parameters(function: CommandFunction) -> list[_Parameter]:
    code = function.__code__
    places, named = code.co_argcount, code.co_kwonlyargcount
    names = code.co_varnames
    defaults = function.__defaults__ or ()
    known = dict(zip(names[places - len(defaults) : places], defaults, strict=True))
    known |= function.__kwdefaults__ or {}
    found = [_Parameter(name, False, False, known.get(name, REQUIRED)) for name in names[:places]]
    if code.co_flags & _TAKES_THE_REST:
        found.append(_Parameter(names[places + named], False, True))
    options = names[places : places + named]
    return found + [_Parameter(name, True, False, known.get(name, REQUIRED)) for name in options]


def _argument(parameter: _Parameter, hint: Any) -> Argument:
    said = Option()
    if get_origin(hint) is Annotated:
        hint, said = get_args(hint)
    if NoneType in get_args(hint):
        (hint,) = (each for each in get_args(hint) if each is not NoneType)
    many = get_origin(hint) is list
    if many:
        (hint,) = get_args(hint)
    choices = cast(tuple[str, ...], get_args(hint) if get_origin(hint) is Literal else ())
    own_name = "--" + parameter.name.rstrip("_").replace("_", "-")
    return Argument(
        field=parameter.name,
        names=(said.names or (own_name,)) if parameter.by_name else (),
        metavar=said.metavar,
        group=said.group,
        kind=str if choices else hint,
        choices=choices,
        many=many,
        several=said.several or parameter.rest,
        default=parameter.default,
        urls=said.urls,
    )


def read(
    name: str, arguments: Sequence[Argument], words: Sequence[str]
) -> tuple[list[Any], dict[str, Any]]:
    """The values that a command's words give, by place and by name; what is not given is left out.

    Raises:
        BadInput: The words are no command line of this command.
    """
    spelt = {spelling: argument for argument in arguments for spelling in argument.names}
    options: dict[str, Any] = {}
    bare: list[str] = []
    listing: tuple[str, Argument] | None = None  # bare words still belong to this option
    ahead = list(reversed(words))
    while ahead:
        word = ahead.pop()
        if word == "--":
            bare += reversed(ahead)
            break
        if not _looks_like_an_option(word):
            if listing is not None:
                option, argument = listing
                options[argument.field] += _values(name, option, argument, word)
            elif COMMANDS[name].takes_program:
                raise BadInput(
                    f"'{word}' is no option of `driftline {name}`",
                    hint=f"the program comes after two dashes: driftline {name} ... -- {word} ...",
                )
            else:
                bare.append(word)
            continue
        option, equals, text = word.partition("=")
        argument = _known(name, option, spelt)
        if argument.field in options and not argument.many:
            raise BadInput(f"{option} is given more than once", hint=_help(name))
        listing = (option, argument) if argument.several else None
        if argument.kind is bool:
            if equals:
                raise BadInput(f"{option} takes no value", hint=f"write {option}, or leave it out")
            options[argument.field] = True
            continue
        if not equals:
            if not ahead or not _may_be_a_value(ahead[-1]):
                raise BadInput(f"{option} needs a value", hint=_help(name))
            text = ahead.pop()
        if argument.many:
            options.setdefault(argument.field, []).extend(_values(name, option, argument, text))
        else:
            options[argument.field] = _value(name, option, argument, text)
    return _by_place(name, [a for a in arguments if not a.names], bare), options


def _by_place(name: str, arguments: Sequence[Argument], words: Sequence[str]) -> list[Any]:
    values: list[Any] = []
    for argument in arguments:
        mine, words = (words, ()) if argument.several else (words[:1], words[1:])
        if not mine and argument.default is REQUIRED and not argument.several:
            raise BadInput(f"`driftline {name}` needs {argument.placeholder}", hint=_help(name))
        values += [_value(name, argument.placeholder, argument, word) for word in mine]
    if words:
        extra = " ".join(words)
        raise BadInput(
            f"`driftline {name}` does not know what to do with '{extra}'", hint=_help(name)
        )
    return values


def _values(name: str, called: str, argument: Argument, word: str) -> list[Any]:
    """The values of an option that may be repeated; a choice of words may be a comma list."""
    words = word.split(",") if argument.choices else [word]
    return [_value(name, called, argument, one) for one in words]


def _value(name: str, called: str, argument: Argument, word: str) -> Any:
    if argument.choices and word not in argument.choices:
        listed = ", ".join(argument.choices[:-1]) + f" or {argument.choices[-1]}"
        near = did_you_mean(word, argument.choices)
        raise BadInput(
            f"{called} takes {listed}, not '{word}'",
            hint=near if near.startswith("did you") else _help(name),
        )
    if "://" in word and argument.kind is not str and argument.kind not in _NUMBERS:
        return _address(name, called, argument, word)
    try:
        return argument.kind(word)
    except ValueError:
        wanted = _NUMBERS.get(argument.kind, "something else")
        raise BadInput(f"{called} takes {wanted}, not '{word}'", hint=_help(name)) from None


def _address(name: str, called: str, argument: Argument, word: str) -> Any:
    from driftline.runs.stores.addresses import UrlPath, place_of

    place = place_of(word)
    if isinstance(place, UrlPath) and not argument.urls:
        raise BadInput(
            f"{called} takes a path of this machine, not an address", hint="copy it here first"
        )
    return place


def _known(name: str, option: str, spelt: Mapping[str, Argument]) -> Argument:
    if option in spelt:
        return spelt[option]
    # Dashes weigh too much in short words: compare what comes after them.
    bare = {spelling.lstrip("-"): spelling for spelling in (*spelt, FLAG)}
    hint = did_you_mean(option.lstrip("-"), bare)
    for word in sorted(bare, key=len, reverse=True):
        hint = hint.replace(f"'{word}'", bare[word])
    raise BadInput(
        f"`driftline {name}` has no option {option}",
        hint=hint if hint.startswith("did you mean") else _help(name),
    )


def _looks_like_an_option(word: str) -> bool:
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


def _may_be_a_value(word: str) -> bool:
    return not _looks_like_an_option(word) or word[1].isdigit()


def _help(name: str) -> str:
    return f"see driftline {name} --help"
