"""The parser: a signature and words in; values, or one sentence, out. Never a traceback."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from driftline.cli import parsing
from driftline.cli.commands import COMMANDS, Command
from driftline.cli.parsing import Option, arguments_of
from driftline.errors import BadInput


def everything(
    first: Annotated[Path | None, Option(metavar="REF")] = None,
    second: int | None = None,
    /,
    *,
    text: str | None = None,
    whole: Annotated[int | None, Option(names=("--whole-number", "-whole"), metavar="N")] = None,
    share: float = 0.5,
    where: Annotated[Path | None, Option(names=("--where", "-w"))] = None,
    flag: Annotated[bool, Option(names=("--flag", "-f"), group="Flags")] = False,
    choice: Literal["table", "json"] = "table",
    globs: list[str] | None = None,
    type_: Annotated[list[Literal["layer", "tensor"]] | None, Option(several=True)] = None,
    span: Annotated[str, Option(names=("--execute-range", "-er"))] = "",
) -> int:
    """One parameter of every kind."""
    return 0


def program(
    *program: str,
    level: Annotated[list[str] | None, Option(names=("--level", "-l"), several=True)] = None,
    only: Annotated[bool, Option(names=("--only", "-sd"))] = False,
) -> int:
    """Runs somebody's command line."""
    return 0


def needy(path: Path, /) -> int:
    """Cannot do without."""
    return 0


FUNCTIONS = {"everything": everything, "program": program, "needy": needy}


@pytest.fixture(autouse=True, scope="module")
def commands_for_tests() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name in FUNCTIONS:
            command = Command("nowhere:nothing", "Test", "", takes_program=name == "program")
            patch.setitem(COMMANDS, name, command)
        yield


def read(name: str, words: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    function = FUNCTIONS.get(name) or parsing.load(name)
    return parsing.read(name, arguments_of(function), words)


def refusal(name: str, line: str) -> BadInput:
    with pytest.raises(BadInput) as caught:
        read(name, line.split())
    return caught.value


@pytest.mark.parametrize(
    ("line", "places", "options"),
    [
        ("", [], {}),
        ("a 3", [Path("a"), 3], {}),
        ("a --flag 3", [Path("a"), 3], {"flag": True}),
        ("-1 -2", [Path("-1"), -2], {}),
        ("- 2", [Path("-"), 2], {}),
        ("-- --flag", [Path("--flag")], {}),
        ("--text x", [], {"text": "x"}),
        ("--text=x=y", [], {"text": "x=y"}),
        ("--text=", [], {"text": ""}),
        ("--text=--flag", [], {"text": "--flag"}),
        ("--text -", [], {"text": "-"}),
        ("-whole -3", [], {"whole": -3}),
        ("--share -1e-3", [], {"share": -1e-3}),
        ("--share=inf", [], {"share": float("inf")}),
        ("-w x/y", [], {"where": Path("x/y")}),
        ("--choice json", [], {"choice": "json"}),
        ("--globs a --globs=b", [], {"globs": ["a", "b"]}),
        ("--globs a b", [Path("b")], {"globs": ["a"]}),
        ("--type layer tensor", [], {"type_": ["layer", "tensor"]}),
        ("--type=layer tensor -f x", [Path("x")], {"type_": ["layer", "tensor"], "flag": True}),
        ("--type layer --type tensor", [], {"type_": ["layer", "tensor"]}),
        ("--type layer,tensor", [], {"type_": ["layer", "tensor"]}),
        ("--type=tensor,layer -- x", [Path("x")], {"type_": ["tensor", "layer"]}),
        ("--globs a,b", [], {"globs": ["a,b"]}),
        ("--type layer -- x", [Path("x")], {"type_": ["layer"]}),
        ("-er 3,5", [], {"span": "3,5"}),
        ("-er=3,5", [], {"span": "3,5"}),
        ("-er -1,3", [], {"span": "-1,3"}),
    ],
)
def test_words_become_values(line: str, places: list[Any], options: dict[str, Any]) -> None:
    assert read("everything", line.split()) == (places, options)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--flagg", "`driftline everything` has no option --flagg"),
        ("-flag", "has no option -flag"),
        ("--fla", "has no option --fla"),
        ("-wDIR", "has no option -wDIR"),
        ("-fw DIR", "has no option -fw"),
        ("--no-flag", "has no option --no-flag"),
        ("-1x", "has no option -1x"),
        ("--first x", "has no option --first"),
        ("--=x", "has no option --"),
        ("--text", "--text needs a value"),
        ("--text --flag", "--text needs a value"),
        ("--text -x", "--text needs a value"),
        ("--text -- x", "--text needs a value"),
        ("--type", "--type needs a value"),
        ("--type -f", "--type needs a value"),
        ("-er -f", "-er needs a value"),
        ("--flag=true", "--flag takes no value"),
        ("-f --flag", "--flag is given more than once"),
        ("-w a --where b", "--where is given more than once"),
        ("-whole 1.5", "-whole takes a whole number, not '1.5'"),
        ("-whole=", "-whole takes a whole number, not ''"),
        ("--share half", "--share takes a number, not 'half'"),
        ("--choice Json", "--choice takes table or json, not 'Json'"),
        ("--type layer tensro", "--type takes layer or tensor, not 'tensro'"),
        ("a b", "SECOND takes a whole number, not 'b'"),
        ("a 1 c d", "`driftline everything` does not know what to do with 'c d'"),
    ],
)
def test_what_cannot_be_meant_is_refused(line: str, says: str) -> None:
    error = refusal("everything", line)
    assert says in str(error)
    assert error.hint


def test_the_hint_names_what_is_near_and_else_the_help_page() -> None:
    assert refusal("everything", "--flagg").hint == "did you mean --flag?"
    assert refusal("everything", "-wole 3").hint.startswith("did you mean -whole")
    assert refusal("everything", "--choice jsn").hint == "did you mean 'json'?"
    assert refusal("everything", "--zzz").hint == "see driftline everything --help"


def test_an_argument_without_a_default_is_needed() -> None:
    assert str(refusal("needy", "")) == "`driftline needy` needs PATH"
    assert read("needy", ["x"]) == ([Path("x")], {})


def test_the_words_of_a_program_come_after_two_dashes_and_are_left_alone() -> None:
    words = ["python", "x.py", "--level", "-sd", "--", "--help", "-"]
    assert read("program", ["-sd", "--", *words]) == (words, {"only": True})
    assert read("program", ["--level", "a", "b", "--", "c"]) == (["c"], {"level": ["a", "b"]})
    for line in ("python x.py", "-sd python -- x", "- -- x", "--level a -sd b -- x"):
        assert "is no option of `driftline program`" in str(refusal("program", line))


def test_what_a_signature_does_not_say_follows_from_the_parameter() -> None:
    arguments = {argument.field: argument for argument in arguments_of(everything)}
    assert arguments["type_"].names == ("--type",)
    assert arguments["share"].names == ("--share",)
    assert arguments["first"].names == () and arguments["first"].placeholder == "REF"
    assert arguments["second"].placeholder == "SECOND"
    assert arguments["flag"].group == "Flags" and arguments["text"].group == ""


KINDS = (str, int, float, bool, Path)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_signatures_of_the_commands_use_only_what_is_read_here(name: str) -> None:
    arguments = arguments_of(parsing.load(name))
    spellings = [spelling for argument in arguments for spelling in argument.names]
    assert len(spellings) == len(set(spellings)), "two options share a name"
    for argument in arguments:
        assert argument.kind in KINDS, argument.field
        assert not argument.several or argument.many or not argument.names
        assert all(spelling.startswith("-") for spelling in argument.names)
        # `-1,3` is a value because of this.
        assert all(not spelling.lstrip("-")[0].isdigit() for spelling in argument.names)
        assert argument.kind is not bool or argument.default is False


REAL = sorted(COMMANDS)
PIECES = ["--", "-", "", "=", "-1", "-1,3", "1.5", "nan", "layer", "table", "--help", "-er=-1,3"]


@st.composite
def odd_lines(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Words of a real command's own spellings, pieces of them, and anything else."""
    name = draw(st.sampled_from([*REAL, *FUNCTIONS]))
    function = FUNCTIONS.get(name) or parsing.load(name)
    own = [spelling for argument in arguments_of(function) for spelling in argument.names]
    spelling = st.sampled_from(own or ["--none"])
    anything = st.text(max_size=8)
    word = st.one_of(
        spelling,
        st.sampled_from(PIECES),
        st.builds("{}={}".format, spelling, anything),
        st.builds("{}{}".format, spelling, anything),
        st.builds("-{}".format, anything),
        st.integers().map(str),
        anything,
    )
    return name, draw(st.lists(word, max_size=8))


@given(odd_lines())
def test_odd_words_are_values_that_the_function_takes_or_a_sentence(
    line: tuple[str, list[str]],
) -> None:
    name, words = line
    function = FUNCTIONS.get(name) or parsing.load(name)
    try:
        places, options = read(name, words)
    except BadInput as error:
        assert str(error) and error.hint
        return
    inspect.signature(function).bind(*places, **options)
    arguments = {argument.field: argument for argument in arguments_of(function)}
    for field, value in options.items():
        argument = arguments[field]
        for one in value if argument.many else [value]:
            assert isinstance(one, argument.kind)  # pyright: ignore
            assert not argument.choices or one in argument.choices


@given(st.text(), st.lists(st.text(), max_size=4), st.floats(allow_nan=False), st.integers())
def test_any_text_can_be_given_after_an_equals_sign_and_any_word_after_two_dashes(
    text: str, words: list[str], share: float, whole: int
) -> None:
    given_words = [f"--text={text}", f"--share={share}", "-whole", str(whole), f"--globs={text}"]
    assert read("everything", given_words) == (
        [],
        {"text": text, "share": share, "whole": whole, "globs": [text]},
    )
    assert read("program", ["--", *words]) == (words, {})
