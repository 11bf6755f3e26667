"""`driftline noise`: several right executions of an unchanged program, to measure noise with.

Each variant is an ordinary run. A variant that could not be made is listed with its reason; one
that equals another to the bit is marked so.
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
# All of these are right: they differ in the order of sums, in roundings between operations, or by
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
"""What each variant does besides the number format."""
USUAL = ("plain", "fused", "eager", "math", "dither", "dither2")


class Variant(NamedTuple):
    """One execution of the program.

    Attributes:
        name: Number format and what was done besides, such as `bfloat16-fused`.
        folder: Its run, below the experiment's folder; empty if there is none.
        command: The program, secrets hidden.
        status: made, same (as another, bit for bit) or failed.
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
        argv: The program; the one that is trusted.
        output: Folder for `noise.json` and the runs.
        dtype: Number format of the variants.
        like: A run in whose format they are to be made, instead.
        ways: Names of `WAYS`; the usual ones by default.
        selection: What to capture.
        keep: How much of each tensor.
        force: Replace an earlier experiment.

    Raises:
        DriftlineError: A name that means nothing, a program that cannot be started, or not one
            variant that could be made.
    """
    if like is not None:
        if dtype:
            raise BadInput("--like takes the number format of a run", hint="leave --dtype out")
        dtype = format_of(open_run(like))
    dtype = dtype or "bfloat16"
    # Names are checked before anything is run: a typing error should not cost an hour.
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
            continue  # nothing is rounded in between
        variant = _made(argv, output, dtype, way, selection, keep)
        if variant.status == "made":
            variant = _unless_seen(variant, output, seen)
        made.append(variant)
    # The JSON file is written even if every variant failed: it holds the reasons.
    write_json(
        output,
        NOISE,
        {"dtype": dtype, "variants": [variant._asdict() for variant in made]},
    )
    if not any(variant.status == "made" for variant in made):
        raise BadInput(f"no variant could be made: {made[0].reason}", hint=f"see {output / NOISE}")
    return made


def format_of(run: Run) -> str:
    """The number format of most outputs of a run.

    Raises:
        BadInput: It holds no floating-point output.
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
        # Any other number of threads changes the order of sums; one is enough to differ from many.
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
        # No other variant would fare better, and each would run the program once more.
        raise BadInput(
            f"no variant can be made: {ended.why_not}",
            hint="dump another trusted execution in its place, and give it: diagnose --noise RUN",
        )
    reason = _why_not(ended, folder)
    if reason:
        shutil.rmtree(folder, ignore_errors=True)  # half a run is no yardstick
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
    """Mark a variant whose outputs equal an earlier one's: it is no second witness."""
    digest = hashlib.sha256()
    for record in open_run(output / variant.folder).records:
        if record.key.port == "output":
            digest.update(f"{record.key}\0{record.digest}\n".encode())
    twin = seen.setdefault(digest.hexdigest(), variant.name)
    # A digest that is new returns its own name: then this variant is the first of its kind.
    if twin == variant.name:
        return variant
    return variant._replace(status="same", reason=f"bit for bit the outputs of {twin}")
