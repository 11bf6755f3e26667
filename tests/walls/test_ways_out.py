"""A refusal says what to do: every error of ours has a hint, or a message that is one.

What is asked here is that somebody thought of the way out where the sentence is written. Whether it
is a good one, the corpus of commands shows (`tests/corpus/records`).
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from driftline import errors

SOURCE = Path(errors.__file__).parent
# "takes 1 or 0, not 'x'": whoever reads what is expected knows what to write.
EXPECTATION = re.compile(
    r"\b(takes?|must be|needs?|is expected|are expected|at least|such as|can only be|is one of)\b"
    r"|\b(is|are) (an?|the|0|1|'|named) ?[^:]*, not\b"
    r"|, not both|; begin \w+ with|; set |is 'pta' or"
)
CAUGHT = {
    "alignment/normalise/view.py": "a row's reason",
    "alignment/placements/join.py": "a row's reason",
    "alignment/recipe.py": "the line of a plan, which has its own hint",
    "alignment/recipe_steps.py": "the line of a plan, which has its own hint",
    "captures/launch/jobs.py": "between the launcher and its child",
    "comparison/measure/operands.py": "a row's reason",
    "comparison/measure/recipes.py": "a row's reason",
    "comparison/measure/summaries.py": "a row's reason",
    "comparison/metrics/catalogue.py": "a mistake of a caller inside this package",
    "dialects/aclcmp/labels.py": "a ValueError in the program that labels",
    "dialects/aclcmp/label_store.py": "a row's reason",
    "dialects/ait/hooks.py": "a ValueError in the program that asks for a hook",
    "dialects/paddle_hook/tree_checker.py": "a line of the figures",
    "execution/ray_worker.py": "why a machine of a cluster is left out",
    "formats/dump_run.py": "a row's reason",
    "numerics/kernel.py": "a mistake of a caller inside this package",
    "numerics/token_scores.py": "a mistake of a caller inside this package",
    "operators/definitions/registry.py": "a row's reason",
    "reporting/html/tensors/pair.py": "a sentence in the page",
    "reporting/viewer/server.py": "an answer to the page's own script",
    "reporting/viewer/session.py": "a sentence in the page",
    "runs/run.py": "a row's reason",
    "runs/stores/store.py": "a name inside a run, which becomes a row's reason",
}
"""Files whose refusals become something else than a sentence on a terminal, and what."""


def kinds() -> dict[str, type[errors.DriftlineError]]:
    return {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.DriftlineError)
    }


def constant_text(node: ast.expr) -> str:
    """The words of a message that stand in the source; values are a dash."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(constant_text(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return constant_text(node.left) + constant_text(node.right)
    return "-"


def without_way_out(path: Path) -> list[str]:
    """Refusals of a file, with their lines, that leave somebody alone."""
    lonely: list[str] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        kind = kinds().get(ast.unparse(node.func))
        if kind is None or kind.usual_hint or any(word.arg == "hint" for word in node.keywords):
            continue
        message = constant_text(node.args[0])
        if not EXPECTATION.search(message):
            lonely.append(f"{path.relative_to(SOURCE)}:{node.lineno}: {message}")
    return lonely


def test_every_refusal_says_what_to_do() -> None:
    files = [path for path in SOURCE.rglob("*.py") if str(path.relative_to(SOURCE)) not in CAUGHT]
    assert len(files) > 300
    lonely = [line for path in sorted(files) for line in without_way_out(path)]
    assert lonely == [], "\n" + "\n".join(lonely)


def test_a_refusal_without_a_way_out_is_noticed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    file = tmp_path / "some.py"
    file.write_text("raise BadInput(f'{path} does not fit')\nraise BadInput('x takes 1, not 2')\n")
    assert without_way_out(file) == ["some.py:1: - does not fit"]
    file.write_text("raise BadInput('no', hint='try yes')\nraise BadFile('cut short')\n")
    assert without_way_out(file) == []


@pytest.mark.parametrize("name", CAUGHT)
def test_the_exceptions_are_still_needed(name: str) -> None:
    assert without_way_out(SOURCE / name), f"{name} needs no exception any more"


def test_a_damaged_file_has_the_usual_way_out_unless_it_has_a_better_one() -> None:
    assert "copy it anew" in errors.BadFile("x.npy is cut short").hint
    assert errors.BadFile("x.npy is cut short", hint="use y.npy").hint == "use y.npy"


def test_nothing_tells_people_to_install_what_is_not_published() -> None:
    """Driftline is not on PyPI yet; the file of a wheel (`driftline-0.1.0…`) is another thing."""
    root = Path(__file__).parents[2]
    folders = ("src", "docs", "examples", "compat")
    texts = [
        p for f in folders for p in (root / f).rglob("*") if p.suffix in (".py", ".md", ".yml")
    ]
    bad = re.compile(r"pip install (-\S+ )*['\"]?driftline(?![-\w])")
    assert bad.search("pip install --upgrade driftline") and bad.search("pip install driftline[s3]")
    assert [str(p) for p in [root / "README.md", *texts] if bad.search(p.read_text("utf-8"))] == []
