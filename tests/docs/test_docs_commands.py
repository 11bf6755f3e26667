"""Every command that the documents show is run, page by page and in the order of the page."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.request import urlopen

import kitchens
import pytest
from documents import PAGES, REASONS, ROOT, Block, blocks_of, name_of

from driftline.cli import app
from driftline.cli.app import COMMANDS, option_names
from driftline.cli.main import main
from support.chromium import NoChromium, launched
from support.programs import running

Kitchen = Callable[[Path], None]

PYTHON = sys.executable
"""Not the warm one: for tests of pytest, and of signals."""


def demo(place: Path) -> None:
    kitchens.programs(place, demo=True)


def labelled(place: Path) -> None:
    """A program that was run by itself has left its labels."""
    kitchens.programs(place)
    subprocess.run([sys.executable, "label.py"], cwd=place, check=True, timeout=110)


def all_of(*parts: Kitchen) -> Kitchen:
    return lambda place: [part(place) for part in parts] and None


COOKED: dict[str, Kitchen] = {
    "docs/tutorial.md": lambda place: None,
    "docs/read-a-verdict.md": lambda place: None,
    "docs/users/port.md": kitchens.examples,
    "docs/users/quantise.md": kitchens.examples,
    "docs/users/compile.md": kitchens.examples,
    "docs/users/shard.md": kitchens.examples,
    "docs/users/train.md": kitchens.examples,
    "docs/users/gate.md": kitchens.examples,
    "docs/users/revisions.md": kitchens.two_revisions,
    "docs/how-to.md": demo,
    "docs/command-line.md": all_of(
        kitchens.programs,
        kitchens.revisions,
        kitchens.ascend,
        kitchens.hooks,
        kitchens.files,
        kitchens.decoder,
        kitchens.onnx_models,
    ),
    "docs/engines.md": all_of(kitchens.programs, kitchens.onnx_models, kitchens.paddle_programs),
    "docs/served-models.md": kitchens.served,
    "docs/scale.md": kitchens.two_runs,
    "docs/alignment.md": kitchens.named_otherwise,
    "docs/decoders.md": kitchens.decoder,
    "docs/formats.md": kitchens.ascend,
    "docs/operators.md": all_of(kitchens.programs, kitchens.ascend),
    "docs/metrics.md": kitchens.two_runs,
    "docs/model-facts.md": all_of(demo, kitchens.examples),
    "docs/verdicts.md": kitchens.good_and_bad,
    "docs/coming-from/ait-llm.md": all_of(kitchens.programs, kitchens.ascend),
    "docs/coming-from/aclcmp.md": labelled,
    "docs/coming-from/paddle-saving-hook.md": all_of(kitchens.paddle_programs, kitchens.hooks),
    "docs/coming-from/msprobe.md": all_of(kitchens.programs, kitchens.msprobe),
    "docs/coming-from/aiu-fms-testing-utils.md": kitchens.decoder,
}
"""What a page's commands take."""
ELSEWHERE = ("README.md", "examples/README.md")
"""Run by tests/test_examples.py, which knows what they find."""
TOUR = ["driftline", "demo"]
"""Run there, too."""
SLOW = (
    "docs/how-to.md",
    "docs/model-facts.md",
    "docs/read-a-verdict.md",
    "docs/verdicts.md",
    "docs/users/port.md",
    "docs/users/quantise.md",
    "docs/users/compile.md",
    "docs/users/shard.md",
    "docs/users/train.md",
    "docs/users/gate.md",
    "docs/users/revisions.md",
    "docs/decoders.md",
    "docs/coming-from/ait-llm.md",
    "docs/coming-from/msprobe.md",
    "docs/coming-from/aiu-fms-testing-utils.md",
)
"""Start many programs, or a model many times."""
SMALLER = {"2048": "32", "1024": "8", "128": "4", "64": "16", "1,8": "1", "64,2048": "16"}
"""Shapes of decoders, as they are tried here."""
FEWER = {
    "FMS_TEST_SHAPES_COMMON_BATCH_SIZES": "1",
    "FMS_TEST_SHAPES_COMMON_SEQ_LENGTHS": "16",
    "FMS_TEST_SHAPES_COMMON_MAX_NEW_TOKENS": "4",
    "FMS_TEST_SHAPES_CUMULATIVE_TEST_TOKENS_PER_SEQUENCE": "8",
    "SHARE_GPT_DATASET_PATH": "share_gpt.json",
}
"""The same for the suites."""
TRANSLATED = {
    "docs/coming-from/ait-llm.zh.md": "docs/coming-from/ait-llm.md",
    "docs/coming-from/aclcmp.zh.md": "docs/coming-from/aclcmp.md",
}
SHOWN = {name_of(page): blocks_of(page) for page in PAGES}
WITH_COMMANDS = [name for name, blocks in SHOWN.items() if any(not b.reason for b in blocks)]


def run(words: list[str], place: Path) -> tuple[int, str]:
    """One command as the page has it; what it prints. Ours run in this process where they can."""
    environment = dict(os.environ)
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        key, _, value = words.pop(0).partition("=")
        environment[key] = value
    if ">" in words:  # a shell's own work, done here
        code, said = run(words[: words.index(">")], place)
        (place / words[-1]).write_text(said, encoding="utf-8")
        return code, ""
    if words[0] == "write":
        (place / words[1]).write_text(words[2], encoding="utf-8")
        return 0, ""
    if words[0] == "cp":
        shutil.copy(place / words[1], place / words[2])
        return 0, ""
    if words[:2] == ["driftline", "view"]:
        return look_and_stop(words, place)
    if words[0] != "driftline":
        program = words if words[0] in ("bash", "python") else [PYTHON, "-m", *words]
        done = subprocess.run(
            program,
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=110,
        )
        return done.returncode, done.stdout + done.stderr
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(words[1:])
    return code, out.getvalue()


def look_and_stop(words: list[str], place: Path) -> tuple[int, str]:
    """A command that ends when its reader is done: the page is read, then Ctrl-C."""
    with running(
        [PYTHON, "-m", *words],
        cwd=place,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout is not None
        with urlopen(process.stdout.readline().strip(), timeout=60) as page:
            assert b"</html>" in page.read()
        process.send_signal(signal.SIGINT)
        return process.wait(timeout=60), ""


def smaller(words: list[str]) -> list[str]:
    return [re.sub(r"(?:(?<==)|^)[\d,]+$", lambda n: SMALLER.get(n[0], n[0]), w) for w in words]


def masked(text: str) -> str:
    """Digits and bars depend on the machine, a little."""
    return re.sub(r"[▁▂▃▄▅▆▇█]+", "▆", re.sub(r"\d+(\.\d+)?(e-\d+)?", "#", text))


def missing(block: Block, said: str) -> list[str]:
    lines = {" ".join(line.split()) for line in masked(said).splitlines()}
    wanted = [" ".join(line.split()) for line in masked(block.shown).splitlines()]
    return [line for line in wanted if line and not any(line in each for each in lines)]


def cases(names: Iterable[str]) -> list[object]:
    return [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in names
        if name not in (*TRANSLATED, *ELSEWHERE)
    ]


@pytest.mark.parametrize("name", cases(WITH_COMMANDS))
def test_every_command_of_the_page_works(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warm_python: str,
    screenshots: Path,
) -> None:
    place = tmp_path / "here"
    place.mkdir()
    COOKED[name](place)
    monkeypatch.chdir(place)
    tools = kitchens.tools(tmp_path / "bin", warm_python)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tools / "python"))  # what the tour starts, too
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    for block in SHOWN[name]:
        if block.reason:
            continue
        everything = ""
        for words in block.commands:
            if words == TOUR:
                continue
            words = smaller(words) if kitchens.decoder is COOKED[name] else list(words)
            code, said = run(words, place)
            # A comparison may well find something; what could not be done is exit code 2.
            assert code in (0, 1), f"{name}:{block.line}: {' '.join(words)}\n{said}"
            if name == "docs/command-line.md":
                assert code == 0, f"{name}:{block.line}: {' '.join(words)}\n{said}"
            everything += said
        assert missing(block, everything) == [], f"{name}:{block.line}\n{everything}"
    if name.startswith("docs/users/"):
        reports = sorted(place.rglob("report.html"))
        assert reports, f"{name} leads to no picture"
        photograph(reports, screenshots, Path(name).stem)


def photograph(reports: list[Path], album: Path, name: str) -> None:
    """The first screen of every report, where there is a browser."""
    try:
        with launched() as browser:
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            for number, report in enumerate(reports):
                page.goto(report.as_uri())
                page.wait_for_selector("html[data-ready=yes]")
                page.screenshot(path=album / f"user-{name}-{number}.png")
    except NoChromium:
        pass  # the tests of pages say so


def test_every_page_with_commands_has_what_they_take() -> None:
    assert set(WITH_COMMANDS) <= {*COOKED, *TRANSLATED, *ELSEWHERE}


@pytest.mark.parametrize(("page", "original"), TRANSLATED.items())
def test_a_translated_page_shows_the_same_commands(page: str, original: str) -> None:
    here, there = ([b.commands for b in SHOWN[name]] for name in (page, original))
    assert here == there


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_not_run_has_one_of_the_known_reasons_and_is_spelt_right(page: Path) -> None:
    for block in SHOWN[name_of(page)]:
        if not block.reason:
            continue
        assert block.reason in REASONS, f"{name_of(page)}:{block.line}"
        for words in block.commands:
            if words[0] == "driftline" and block.reason != "a usage line":
                app.read(words[1], app.load(words[1]), words[2:])


def test_the_reasons_are_found_where_they_stand() -> None:
    assert any(block.reason for blocks in SHOWN.values() for block in blocks)
    text = "<!-- not run here: needs an AIU -->\n```sh\ndriftline doctor\n```\n"
    assert "needs an AIU" in REASONS and "not run here" in text


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_the_page_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)}: {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{name_of(page)}: {target}"


def anchors(page: Path) -> set[str]:
    """Headings as GitHub makes anchors of them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    cleaned = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in cleaned}


def test_every_command_has_a_page_of_its_own_in_the_reference() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text("utf-8")
    assert [name for name in COMMANDS if f"## `driftline {name}`" not in text] == []


def test_the_reference_of_the_python_api_is_what_the_docstrings_say() -> None:
    spec = importlib.util.spec_from_file_location("python_api", ROOT / "tools" / "python_api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text("utf-8") == module.page(), "run python tools/python_api.py"


def test_the_index_names_every_page() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text("utf-8")
    pages = [str(page.relative_to(docs)) for page in docs.rglob("*.md")]
    assert [page for page in pages if page != "README.md" and f"({page}" not in index] == []


def test_every_command_of_the_flow_chart_is_shown_below_it() -> None:
    text = (ROOT / "docs" / "how-to.md").read_text("utf-8")
    (chart,) = re.findall(r"```mermaid\n(.*?)```", text, re.DOTALL)
    boxes = set(re.findall(r"\[driftline ([a-z]+)", chart))
    shown = {words[1] for block in SHOWN["docs/how-to.md"] for words in block.commands}
    assert len(boxes) >= 9 and boxes - {"metrics"} <= shown
    assert boxes <= set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_running_text_have_no_option_that_is_made_up(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    for span in re.findall(r"`driftline ([a-z][a-z-]*[^`]*)`", text):
        name, *words = re.sub(r"\"[^\"]*\"|'[^']*'| -- .*", " ", span).split()
        assert name in COMMANDS, f"{name_of(page)}: driftline {span}"
        known = {*option_names(name), "--python", "--help"}
        named = [word.strip("[].,").partition("=")[0] for word in words if word.startswith("-")]
        unknown = [word for word in named if word not in known and not word[1:].isdigit()]
        assert unknown in ([], ["--"]), f"{name_of(page)}: driftline {span}"


def test_the_program_that_the_reference_shows_is_the_one_that_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (ROOT / "docs" / "command-line.md").read_text("utf-8")
    pattern = r"^    driftline ([^\n]* --python)\n\n```python\n(.*?)```"
    ((words, shown),) = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    assert main(words.split()) == 0
    assert capsys.readouterr().out == shown


def test_tests_that_a_page_names_exist() -> None:
    tests = Path(__file__).parents[1]
    for page in (tests.parent / "docs").glob("*.md"):
        for name in re.findall(r"`((?:\w+/)+test_\w+\.py)`", page.read_text()):
            inner = name.removeprefix("tests/")
            # `tests/models/test_decoders.py` and its like are files of a user's.
            if not inner.startswith("models/"):
                assert (tests / inner).exists(), f"{page.name} names {name}"
