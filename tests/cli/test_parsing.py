"""Words of a command line: a signature and words in; values, or one sentence, out."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from cyclopts import Parameter
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.cli import app
from driftline.cli.app import COMMANDS, LOOK, Command
from driftline.cli.options import SEVERAL, URLS, place
from driftline.errors import BadInput


@Parameter(name="*")
@dataclass(frozen=True)
class Grouped:
    """Some of the options, as a group.

    Attributes:
        choice: One word of two.
        globs: A list.
        type_: Several words of two.
        span: The spelling of ait.
    """

    choice: Literal["table", "json"] = "table"
    globs: list[str] | None = None
    type_: Annotated[list[Literal["layer", "tensor"]] | None, SEVERAL] = None
    span: Annotated[str, Parameter(name=("--execute-range", "-er"))] = ""


SHARE = 0.5


def everything(
    first: Annotated[Path | None, place("REF")] = None,
    second: Annotated[int | None, place("SECOND")] = None,
    /,
    *,
    text: str | None = None,
    whole: Annotated[int | None, Parameter(name=("--whole-number", "-whole"), metavar="N")] = None,
    share: float = SHARE,
    where: Annotated[Path | None, Parameter(name=("--where", "-w"))] = None,
    flag: Annotated[bool, Parameter(name=("--flag", "-f"))] = False,
    group: Grouped = Grouped(),
) -> int:
    """One parameter of every kind."""
    return 0


def program(
    *program: Annotated[str, place("PROGRAM")],
    level: Annotated[list[str] | None, SEVERAL, Parameter(name=("--level", "-l"))] = None,
    only: Annotated[bool, Parameter(name=("--only", "-sd"))] = False,
) -> int:
    """Runs somebody's command line."""
    return 0


def needy(path: Annotated[Path, place("PATH")], /) -> int:
    """Cannot do without."""
    return 0


def addressed(
    path: Annotated[Path, place("PATH")],
    url: Annotated[Path, URLS, place("URL")],
    /,
    *,
    others: Annotated[list[Path] | None, URLS] = None,
    local: list[Path] | None = None,
) -> int:
    """Some paths may be addresses, some may not."""
    return 0


FUNCTIONS = {
    "everything": everything,
    "program": program,
    "needy": needy,
    "addressed": addressed,
}


@pytest.fixture(autouse=True, scope="module")
def commands_for_tests() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for name in FUNCTIONS:
            command = Command("nowhere:nothing", LOOK, "", takes_program=name == "program")
            patch.setitem(COMMANDS, name, command)
        yield


def read(name: str, words: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Values by place and by name, those of groups among them; defaults are left out."""
    function = FUNCTIONS.get(name) or app.load(name)
    call = app.read(name, function, words)
    defaults = inspect.signature(function).parameters
    options: dict[str, Any] = {}
    for option, value in call.kwargs.items():
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                if getattr(value, field.name) != field.default:
                    options[field.name] = getattr(value, field.name)
        elif value != defaults[option].default:
            options[option] = value
    return list(call.args), options


def refusal(name: str, line: str) -> BadInput:
    return refusal_of(name, line.split())


def refusal_of(name: str, words: list[str]) -> BadInput:
    with pytest.raises(BadInput) as caught:
        read(name, words)
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


def test_addresses_are_taken_only_where_they_can_be_opened() -> None:
    words = ["run", "s3://b/run", "--others", "s3://b/x", "--others", "y", "--local", "file:///z"]
    places, options = read("addressed", words)
    assert [str(path) for path in places] == ["run", "s3://b/run"]
    assert [str(path) for path in options["others"]] == ["s3://b/x", "y"]
    assert options["local"] == [Path("/z")]
    for line in ("s3://b/run u", "run u --local s3://b/x"):
        error = refusal("addressed", line)
        assert "takes a path of this machine, not an address" in str(error)
        assert error.hint == "copy it here first"


@pytest.mark.parametrize("word", ["none", "null", "None", "", "0x10", "1.5", "1e3"])
def test_a_whole_number_is_written_in_digits(word: str) -> None:
    assert "takes a whole number" in str(refusal_of("everything", ["-whole", word]))


def test_values_that_look_like_json_or_a_file_of_words_stay_words() -> None:
    for word in ("[a]*", '["a"]', "{}", "@file", "none", "null"):
        assert read("everything", ["--globs", word, "--text", word]) == (
            [],
            {"globs": [word], "text": word},
        )


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_no_two_options_of_a_command_share_a_name_and_none_begins_with_a_digit(name: str) -> None:
    spellings = app.option_names(name)
    assert len(spellings) == len(set(spellings))
    # `-er -1,3` is a value because of this.
    assert all(not spelling.lstrip("-")[0].isdigit() for spelling in spellings)
    assert not {"--help", "-h", "-help", "--python", "--"} & set(spellings)


REAL = sorted(COMMANDS)
SPELLINGS = {
    "everything": [
        "--text",
        "--whole-number",
        "-whole",
        "--share",
        "--where",
        "-w",
        "--flag",
        "-f",
        "--choice",
        "-er",
    ],
    "program": ["--level", "-l", "--only", "-sd"],
    "needy": [],
    "addressed": ["--others", "--local"],
    **{name: app.option_names(name) for name in REAL},
}
PIECES = ["--", "-", "", "=", "-1", "-1,3", "1.5", "nan", "layer", "table", "--help", "-er=-1,3"]


@st.composite
def odd_lines(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Words of a real command's own spellings, pieces of them, and anything else."""
    name = draw(st.sampled_from([*REAL, *FUNCTIONS]))
    spelling = st.sampled_from(SPELLINGS[name] or ["--none"])
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


@settings(deadline=None)
@given(odd_lines())
def test_odd_words_are_values_that_the_function_takes_or_a_sentence(
    line: tuple[str, list[str]],
) -> None:
    name, words = line
    function = FUNCTIONS.get(name) or app.load(name)
    try:
        call = app.read(name, function, words)
    except BadInput as error:
        assert str(error) and error.hint
        return
    inspect.signature(function).bind(*call.args, **call.kwargs)


@settings(deadline=None)
@given(st.text(), st.lists(st.text(), max_size=4), st.floats(allow_nan=False), st.integers())
def test_any_text_can_be_given_after_an_equals_sign_and_any_word_after_two_dashes(
    text: str, words: list[str], share: float, whole: int
) -> None:
    given_words = [f"--text={text}", f"--share={share}", "-whole", str(whole), f"--globs={text}"]
    values = {"text": text, "share": share, "whole": whole, "globs": [text]}
    if share == SHARE:
        del values["share"]  # `read` leaves defaults out
    assert read("everything", given_words) == ([], values)
    assert read("program", ["--", *words]) == (words, {})


def test_places_that_an_option_took_for_its_own_are_missed_with_the_reason(driftline: Any) -> None:
    said = driftline("diff", "--level", "modules", "python a.py", "python b.py")
    assert said.code == 2 and "`driftline diff` needs REFERENCE" in said.err
    assert "--level takes every word up to the next option: put REFERENCE before it" in said.err
    # Nothing was taken: then an example of the command is what helps.
    assert 'such as: driftline diff "python infer.py' in driftline("diff", "--force").err
    assert "such as: driftline diff" in driftline("diff", "--level", "modules").err
