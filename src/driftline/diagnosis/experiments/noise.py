"""`driftline noise`: several correct executions of an unchanged program, to measure noise.

Each variant is an ordinary run. A variant that could not be made is listed with the reason. A
variant that equals another one bit for bit is marked.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from driftline.captures.launch.jobs import CapturePlan
from driftline.captures.options import Reduction
from driftline.captures.selection import Selection
from driftline.diagnosis.experiments.experiment_folders import NOISE, make_room, write_json
from driftline.diagnosis.experiments.run_program import Ended, run_with
from driftline.errors import BadInput, did_you_mean
from driftline.formats.registry import open_run
from driftline.numerics.dtypes import DTYPES
from driftline.runs.run import Run

FORMATS = ("float32", "bfloat16", "float16")
# All of these are correct: they differ in the order of sums, in roundings between operations, or by
# one unit in the last place of the inputs.
WAYS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "fused": {"fused": True},
    "eager": {"attention": "eager"},
    "math": {"attention": "math"},
    "dither": {"dither": 1},
    "dither2": {"dither": 2},
    "threads": {"threads": 0},
}
"""Options of each variant in addition to the number format."""
USUAL = ("plain", "fused", "eager", "math", "dither", "dither2")


class Variant(NamedTuple):
    """One execution of the program.

    Attributes:
        name: Number format and variant, such as `bfloat16-fused`.
        folder: Name of its run in the experiment's folder; empty if there is none.
        command: The command of the program, with secrets redacted.
        status: made, same (bit for bit equal to another one) or failed.
        reason: Why it is not `made`.
    """

    name: str
    folder: str
    command: tuple[str, ...]
    status: str
    reason: str = ""


def noise(
    argv: Sequence[str],
    output: Path,
    *,
    dtype: str = "",
    like: Path | None = None,
    ways: Sequence[str] = (),
    selection: Selection | None = None,
    keep: str = "full",
    force: bool = False,
) -> list[Variant]:
    """Run a program once for each variant.

    Args:
        argv: The trusted program.
        output: Folder for `noise.json` and the runs.
        dtype: Number format of the variants.
        like: A run whose number format is used instead of `dtype`.
        ways: Names of `WAYS`; the usual ones by default.
        selection: What to capture.
        keep: How much of each tensor to keep.
        force: Replace an earlier experiment.

    Raises:
        DriftlineError: A name is unknown, the program cannot be started, or no variant could be
            made.
    """
    if like is not None:
        if dtype:
            raise BadInput("--like takes the number format of a run", hint="leave --dtype out")
        dtype = format_of(open_run(like))
    dtype = dtype or "bfloat16"
    # Names are checked before the program runs: a typing error should not cost an hour.
    if dtype not in FORMATS:
        raise BadInput(f"there is no format '{dtype}'", hint=did_you_mean(dtype, FORMATS))
    for way in ways:
        if way not in WAYS:
            raise BadInput(f"there is no variant '{way}'", hint=did_you_mean(way, WAYS))
    make_room(output, force=force)
    made: list[Variant] = []
    seen: dict[str, str] = {}
    for way in dict.fromkeys(ways or USUAL):
        if way == "fused" and dtype == "float32":
            continue  # intermediate results are not rounded
        variant = _made(argv, output, dtype, way, selection, keep)
        if variant.status == "made":
            variant = _unless_seen(variant, output, seen)
        made.append(variant)
    # The JSON file is written even if all variants failed, because it contains the reasons.
    write_json(
        output,
        NOISE,
        {"dtype": dtype, "variants": [variant._asdict() for variant in made]},
    )
    if not any(variant.status == "made" for variant in made):
        raise BadInput(f"no variant could be made: {made[0].reason}", hint=f"see {output / NOISE}")
    return made


def format_of(run: Run) -> str:
    """The most frequent number format of a run's outputs, among those that variants may have.

    Raises:
        BadInput: It holds no output in such a format.
    """
    counts = Counter(
        record.dtype
        for record in run.records
        if record.key.port == "output" and DTYPES[record.dtype].is_floating
    )
    for dtype, _ in counts.most_common():
        if dtype in FORMATS:
            return dtype
    raise BadInput(
        f"run '{run.name}' has no outputs in a format that variants can be made in",
        hint="say the format: --dtype bfloat16, or float16",
    )


def _made(
    argv: Sequence[str],
    output: Path,
    dtype: str,
    way: str,
    selection: Selection | None,
    keep: str,
) -> Variant:
    name = dtype if way == "plain" else f"{dtype}-{way}"
    folder = output / name
    how = dict(WAYS[way])
    if way == "threads":
        # Another number of threads changes the order of sums. A machine with one core has only one.
        how["threads"] = 1 if (os.cpu_count() or 1) == 1 else 2
    plan = CapturePlan(
        output=str(folder.absolute()),
        selection=selection or Selection(),
        reduction=Reduction.parse(keep),
        command=tuple(argv),
        experiment={"kind": "variant", "dtype": dtype, **how},
    )
    ended = run_with(argv, plan)
    if ended.messages.apart and not ended.messages.started:
        # All other variants would fail too, and each would run the program once more.
        raise BadInput(
            f"no variant can be made: {ended.why_not}",
            hint="dump another trusted execution in its place, and give it: diagnose --noise RUN",
        )
    reason = _why_not(ended, folder)
    if reason:
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete run must not be used as noise
    status = "failed" if reason else "made"
    return Variant(name, "" if reason else name, plan.command, status, reason)


def _why_not(ended: Ended, folder: Path) -> str:
    if ended.status:
        return f"the program ended with status {ended.status}"
    called = [report for report in ended.reports if report.get("called")]
    if not called:
        return ended.why_not or "no module was called"
    for report in called:
        if report["problem"]:
            return str(report["problem"])
        if report["missing"]:
            return f"nothing in the model could be executed so ({', '.join(report['missing'])})"
    if not (folder / "run.json").is_file():
        return "nothing was captured"
    return ""


def _unless_seen(variant: Variant, output: Path, seen: dict[str, str]) -> Variant:
    """Mark a variant whose outputs equal an earlier one's, because it is no further evidence."""
    digest = hashlib.sha256()
    for record in open_run(output / variant.folder).records:
        if record.key.port == "output":
            digest.update(f"{record.key}\0{record.digest}\n".encode())
    twin = seen.setdefault(digest.hexdigest(), variant.name)
    # For a new digest, `setdefault` returns this variant's own name.
    if twin == variant.name:
        return variant
    return variant._replace(status="same", reason=f"bit for bit the outputs of {twin}")
