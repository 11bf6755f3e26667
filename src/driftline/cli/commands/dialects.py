"""`driftline labels` and `check-hooks`, for users of aclcmp and of Paddle's saving hook."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import ProgramOptions, place
from driftline.cli.progress import Bar
from driftline.errors import EXIT_COULD_NOT, EXIT_DIFFERENT, EXIT_FINE, BadInput

if TYPE_CHECKING:
    from driftline.dialects.aclcmp.report import Outcome
    from driftline.dialects.paddle_hook.tree_checker import Checked, Places, Progress, Survey

# Trees of two different models have thousands of names that are in only one of them.
MOST_NAMES = 10


def labels(
    *program: Annotated[str, place("PROGRAM")],
    start: ProgramOptions = ProgramOptions(),
    from_: Annotated[Path | None, Parameter(metavar="DIR")] = None,
    all: bool = False,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"))] = False,
) -> int:
    """Run a program that labels tensors in pairs, and compare the pairs.

        driftline labels --exec "bash run.sh patches/models/modeling_chatglm_model.py"
        driftline labels -- python infer.py

    The program calls driftline.set_label("pta", id, tensor) for the reference and
    set_label("acl", id, tensor) for the candidate, in any process and in any order. Every call of
    set_task_id() begins a round, and each round becomes {task_id}_cmp_result.csv in the current
    folder. The exit code is the program's if it fails; else 1 if a pair differs, 2 if nothing could
    be compared.

    Args:
        program: The program and its arguments, after two dashes.
        from_: Compare the labels of an earlier run, in its folder cmp_dump_data; run no program.
        all: Show every row, not only the worst.
        quiet: Print nothing; the csv and the exit code give the result.
    """
    if from_ is not None:
        if start.exec_ or program:
            raise BadInput(
                "--from compares existing labels, and --exec makes new ones",
                hint="give one of them",
            )
        status, store = 0, from_
        if not store.is_dir():
            raise BadInput(f"there is no folder {store}", hint="run the program that labels first")
    else:
        argv = start.command(program, "labels")
        # A new folder for each run, so that labels of an earlier one are not compared again.
        store = Path.cwd() / "cmp_dump_data" / f"{datetime.now():%Y%m%d_%H%M%S_%f}"
        from driftline.dialects.aclcmp.report import run_labelled

        status = script.step("status", run_labelled, argv, store)
    from driftline.dialects.aclcmp.report import report_tasks

    outcomes: list[Outcome] = []
    # The program creates the folder with its first label.
    if script.is_script() or store.is_dir():
        outcomes = script.step("outcomes", report_tasks, store, Path.cwd())
    script.end(outcomes)
    if status:
        print(f"driftline: the program ended with status {status}", file=sys.stderr)
    if from_ is not None and not outcomes:
        _refuse_empty_store(store)
    if not outcomes:
        _print_message(
            "no tensor was labelled",
            hint='the program calls driftline.set_label("pta", data_id, tensor), and the same '
            'with "acl"',
        )
        return status or EXIT_COULD_NOT
    if not quiet:
        _print_labels(outcomes, everything=all)
    return status or _labels_exit_code(outcomes)


def _refuse_empty_store(store: Path) -> None:
    inner = sorted(path.name for path in store.iterdir() if any(path.glob("labels-*.jsonl")))
    raise BadInput(
        f"{store} holds no labels",
        hint=f"give one of its runs: --from {store / inner[-1]}" if inner else "",
    )


def _print_labels(outcomes: Sequence[Outcome], *, everything: bool) -> None:
    from driftline.reporting import writers

    for index, outcome in enumerate(outcomes):
        if index:
            print()
        title = f"task {outcome.task}" if outcome.task else "labels"
        print(_printable(f"{title} in {outcome.csv.name}"))
        writers.table(outcome.table, "table", sys.stdout, everything=everything)


def _labels_exit_code(outcomes: Sequence[Outcome]) -> int:
    # One failing round decides. Rounds without a verdict count only if there is no other.
    verdicts = {outcome.table.verdict for outcome in outcomes}
    # For users of this command, a label whose file is missing is a failed comparison.
    if verdicts & {"fail", "incomplete"}:
        return EXIT_DIFFERENT
    return EXIT_FINE if "pass" in verdicts else EXIT_COULD_NOT


def check_hooks(
    *,
    path_a: Annotated[Path | None, Parameter(name="--pathA", metavar="DIR")] = None,
    path_b: Annotated[Path | None, Parameter(name="--pathB", metavar="DIR")] = None,
    all: bool = False,
) -> int:
    """Compare two folders of Paddle's saving hook; write one csv per rank.

        driftline check-hooks --pathA tmp_tensors --pathB tmp_tensors_0

    Writes cosine similarity, mean, standard deviation and variance of every tensor that is in both
    folders to A/tensors/compare_rst/rank_N_rst.csv and A/grads/compare_rst/rank_N_rst.csv. Tensors
    that are in only one folder are printed. There is no verdict. Exit code 1 means that a tensor of
    both folders could not be compared, 2 that there was nothing to compare.

    Args:
        path_a: The first folder; the results are written into it.
        path_b: The second folder.
        all: Print every tensor that is in only one folder, not only the first ten per rank.
    """
    if path_a is None or path_b is None:
        raise BadInput(
            "`driftline check-hooks` needs --pathA and --pathB",
            hint="driftline check-hooks --pathA tmp_tensors --pathB tmp_tensors_0",
        )
    from driftline.dialects.paddle_hook import tree_checker

    reporter = _HookReporter(path_a, path_b, everything=all)
    checked = script.step("checked", tree_checker.check_trees, path_a, path_b, watch=reporter)
    script.end(checked)
    rows = sum(rank.rows for rank in checked)
    failed = sum(len(rank.troubles) for rank in checked)
    if not rows:
        _print_message(
            "the two trees have no tensor in common", hint="their names are listed above"
        )
        return EXIT_COULD_NOT
    return EXIT_DIFFERENT if failed else EXIT_FINE


class _HookReporter:
    """Prints what is compared, rank by rank."""

    def __init__(self, tree_a: Path, tree_b: Path, *, everything: bool) -> None:
        self._trees = tree_a, tree_b
        self._shown = None if everything else MOST_NAMES
        self._bar: Bar | None = None

    def found(self, survey: Survey) -> None:
        """The trees were listed."""
        for sentence in survey.absent:
            _print_message(f"note: {sentence}")

    def begin(self, places: Places) -> Progress | None:
        """A rank is about to be compared."""
        noun = f"tensors of {places.kind} rank_{places.rank}"
        self._bar = Bar(noun) if sys.stderr.isatty() else None
        return self._bar

    def done(self, places: Places, checked: Checked) -> None:
        """A rank was compared."""
        if self._bar is not None:
            self._bar.close()
        pairing = " by class, order and micro step, as no name agrees," if places.by_order else ""
        if 0 < places.by_order < checked.rows:
            pairing = (
                f", {places.by_order} of them by class, order and micro step, as no name of their "
                "class agrees,"
            )
        noun = "tensor" if checked.rows == 1 else "tensors"
        rank = f"{places.kind} rank_{places.rank}"
        print(_printable(f"{rank}: {checked.rows} {noun} compared{pairing} in {checked.csv}"))
        for tree, names in zip(self._trees, (places.only_a, places.only_b), strict=True):
            if names:
                print(_printable(f"  only in {tree}: {len(names)}"))
                self._print_names(names)
        if checked.troubles:
            print(f"  could not be compared: {len(checked.troubles)}")
            self._print_names([f"{name}: {reason}" for name, reason in checked.troubles])

    def _print_names(self, names: Sequence[str]) -> None:
        for name in names[: self._shown]:
            print(_printable(f"    {name}"))
        if self._shown is not None and len(names) > self._shown:
            print(f"    and {len(names) - self._shown} more; --all lists them")


def _printable(text: str) -> str:
    from driftline.reporting.terminal import printable

    return printable(text)


def _print_message(sentence: str, *, hint: str = "") -> None:
    print(_printable(f"driftline: {sentence}"), file=sys.stderr)
    if hint:
        print(f"  hint: {hint}", file=sys.stderr)
