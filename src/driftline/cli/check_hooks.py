"""`driftline check-hooks`: two trees of the saving hook become one csv of figures per rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.errors import EXIT_COULD_NOT, EXIT_DIFFERENT, EXIT_FINE, BadInput

if TYPE_CHECKING:
    from driftline.dialects.paddle_hook.tree_checker import Checked, Places, Progress, Survey

_SHOWN = 10
_WIDTH = 30


def check_hooks(
    *,
    path_a: Annotated[Path | None, Option(names=("--pathA",), metavar="DIR")] = None,
    path_b: Annotated[Path | None, Option(names=("--pathB",), metavar="DIR")] = None,
    all: bool = False,
) -> int:
    """Compare two trees of the saving hook, one csv per rank.

        driftline check-hooks --pathA tmp_tensors --pathB tmp_tensors_0

    Cosine similarity, mean, standard deviation and variance of every tensor that both trees have
    go to A/tensors/compare_rst/rank_N_rst.csv and A/grads/compare_rst/rank_N_rst.csv. What only one
    tree has is printed. It gives figures and no verdict: exit code 1 means that a tensor which both
    trees have could not be compared, 2 that there was nothing to compare.

    Args:
        path_a: The first tree; the results are written into it.
        path_b: The second tree.
        all: Print every tensor that only one tree has, rather than the first ten per rank.
    """
    if path_a is None or path_b is None:
        raise BadInput(
            "`driftline check-hooks` needs --pathA and --pathB",
            hint="driftline check-hooks --pathA tmp_tensors --pathB tmp_tensors_0",
        )
    from driftline.dialects.paddle_hook import tree_checker

    watch = _Watch(path_a, path_b, everything=all)
    checked = script.step("checked", tree_checker.check_trees, path_a, path_b, watch=watch)
    script.end(checked)
    rows = sum(each.rows for each in checked)
    failed = sum(len(each.troubles) for each in checked)
    if not rows:
        _say("the two trees have no tensor in common", hint="their names are listed above")
        return EXIT_COULD_NOT
    return EXIT_DIFFERENT if failed else EXIT_FINE


class _Watch:
    """Says what is compared, while it is."""

    def __init__(self, a: Path, b: Path, *, everything: bool) -> None:
        self._trees = a, b
        self._everything = everything
        self._bar: _Bar | None = None

    def found(self, survey: Survey) -> None:
        for sentence in survey.absent:
            _say(f"note: {sentence}")

    def begin(self, places: Places) -> Progress | None:
        self._bar = _Bar(f"{places.kind} rank_{places.rank}") if sys.stderr.isatty() else None
        return self._bar

    def done(self, places: Places, checked: Checked) -> None:
        if self._bar is not None:
            self._bar.close()
        _report(places, checked, *self._trees, everything=self._everything)


def _report(places: Places, checked: Checked, a: Path, b: Path, *, everything: bool) -> None:
    where = f"{places.kind} rank_{places.rank}"
    how = " by class, order and micro step, as no name agrees," if places.by_order else ""
    if 0 < places.by_order < checked.rows:
        how = (
            f", {places.by_order} of them by class, order and micro step, as no name of their "
            "class agrees,"
        )
    noun = "tensor" if checked.rows == 1 else "tensors"
    print(_clean(f"{where}: {checked.rows} {noun} compared{how} in {checked.csv}"))
    shown = None if everything else _SHOWN
    for tree, names in ((a, places.only_a), (b, places.only_b)):
        if names:
            print(_clean(f"  only in {tree}: {len(names)}"))
            _list(names, shown)
    if checked.troubles:
        print(f"  could not be compared: {len(checked.troubles)}")
        _list([f"{name}: {why}" for name, why in checked.troubles], shown)


def _list(names: Sequence[str], shown: int | None) -> None:
    for name in names[:shown]:
        print(_clean(f"    {name}"))
    if shown is not None and len(names) > shown:
        print(f"    and {len(names) - shown} more; --all lists them")


def _clean(text: str) -> str:
    from driftline.reporting.terminal import printable

    return printable(text)


def _say(sentence: str, *, hint: str = "") -> None:
    print(_clean(f"driftline: {sentence}"), file=sys.stderr)
    if hint:
        print(f"  hint: {hint}", file=sys.stderr)


class _Bar:
    """A bar on stderr that fills up; it stays when it is full, as the seed's do."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.shown = -1

    def __call__(self, done: int, total: int) -> None:
        share = done * 100 // total
        if share != self.shown:
            self.shown = share
            full = done * _WIDTH // total
            bar = "#" * full + "." * (_WIDTH - full)
            sys.stderr.write(f"\r\x1b[K{self.title} [{bar}] {share} % {done} of {total}")
            sys.stderr.flush()

    def close(self) -> None:
        if self.shown >= 0:
            sys.stderr.write("\n")
            sys.stderr.flush()
