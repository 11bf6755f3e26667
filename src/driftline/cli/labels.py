"""`driftline labels`: run a program that calls `set_label`, then compare what it labelled."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from driftline.cli import script
from driftline.cli.dump_words import command_of
from driftline.cli.parsing import Option
from driftline.errors import EXIT_COULD_NOT, EXIT_DIFFERENT, EXIT_FINE, BadInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from driftline.dialects.aclcmp.report import Outcome


def labels(
    *program: str,
    exec_: Annotated[str, Option(metavar="COMMAND")] = "",
    from_: Annotated[Path | None, Option(metavar="DIR")] = None,
    all: bool = False,
    quiet: Annotated[bool, Option(names=("--quiet", "-q"))] = False,
) -> int:
    """Run a program that labels tensors in pairs, and compare the pairs.

        driftline labels --exec "bash run.sh patches/models/modeling_chatglm_model.py"
        driftline labels -- python infer.py

    The program calls driftline.set_label("pta", id, tensor) for the reference and
    set_label("acl", id, tensor) for the candidate, in any process and any order. Each round that
    set_task_id() began becomes {task_id}_cmp_result.csv in this folder. The exit code is the
    program's if it fails; else 1 if a pair differs, 2 if nothing could be compared.

    Args:
        program: The program and its arguments, after two dashes.
        exec_: The program as one text, read like a shell reads quotes; no pipes or redirection.
        from_: Compare labels that are there already, a folder cmp_dump_data; nothing is run.
        all: Show every row rather than the worst.
        quiet: Print nothing; the csv and the exit code say it.
    """
    if from_ is not None:
        if exec_ or program:
            raise BadInput("--from compares old labels, --exec makes new ones", hint="give one")
        status, store = 0, from_
        if not store.is_dir():
            raise BadInput(f"there is no folder {store}")
    else:
        argv = command_of(exec_, program, "labels")
        store = Path.cwd() / "cmp_dump_data" / f"{datetime.now():%Y%m%d_%H%M%S_%f}"
        from driftline.dialects.aclcmp.report import run_labelled

        status = script.step("status", run_labelled, argv, store)
    from driftline.dialects.aclcmp.report import report_tasks

    # The store is the program's to make: without a label there is none.
    outcomes: list[Outcome] = []
    if script.asked() or store.is_dir():
        outcomes = script.step("outcomes", report_tasks, store, Path.cwd())
    script.end(outcomes)
    if status:
        print(f"driftline: the program ended with status {status}", file=sys.stderr)
    if from_ is not None and not outcomes:
        inner = sorted(path.name for path in store.iterdir() if any(path.glob("labels-*.jsonl")))
        raise BadInput(
            f"{store} holds no labels",
            hint=f"give one of its runs: --from {store / inner[-1]}" if inner else "",
        )
    if not outcomes:
        print("driftline: no tensor was labelled", file=sys.stderr)
        print(
            '  hint: the program calls driftline.set_label("pta", data_id, tensor), and the same '
            'with "acl"',
            file=sys.stderr,
        )
        return status or EXIT_COULD_NOT
    if not quiet:
        _print(outcomes, everything=all)
    return status or _exit_code(outcomes)


def _print(outcomes: Sequence[Outcome], *, everything: bool) -> None:
    from driftline.reporting import writers
    from driftline.reporting.terminal import printable

    for at, outcome in enumerate(outcomes):
        if at:
            print()
        named = f"task {outcome.task}" if outcome.task else "labels"
        print(printable(f"{named} in {outcome.csv.name}"))
        writers.table(outcome.table, "table", sys.stdout, everything=everything)


def _exit_code(outcomes: Sequence[Outcome]) -> int:
    verdicts = {outcome.table.verdict for outcome in outcomes}
    if "fail" in verdicts:
        return EXIT_DIFFERENT
    return EXIT_FINE if "pass" in verdicts else EXIT_COULD_NOT
