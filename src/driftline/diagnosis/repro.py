"""A stand-alone script for the guilty module, with its weights, its input and both results.

They are written as text and .npy files. The script needs numpy, and torch only to rebuild the
module.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from driftline.comparison.evidence.error_stats import F64, read_whole
from driftline.diagnosis.evidence.files import Replay, open_replay
from driftline.diagnosis.result import Diagnosis
from driftline.errors import AlreadyThere, BadInput
from driftline.runs.records import Record
from driftline.runs.run import Run

if TYPE_CHECKING:
    from _typeshed import StrPath

# A larger tensor could fill the disk: one of this many elements takes one gigabyte as float32.
_MOST = 1 << 28
"""Largest number of elements of one tensor that is written."""


def write_repro(
    diagnosis: Diagnosis,
    reference: Run,
    candidate: Run,
    folder: StrPath,
    *,
    replay: Replay | StrPath | None = None,
    force: bool = False,
) -> str:
    """Write the folder and return one sentence about it.

    Raises:
        AlreadyThere: The folder exists and `force` was not given.
        BadInput: No site is guilty, or none of its values were kept.
    """
    target = Path(folder)
    if target.exists() and not force:
        raise AlreadyThere(f"{target} exists", hint="give another folder, or force")
    # Without a culprit the script would show an arbitrary module.
    if not diagnosis.first_site:
        raise BadInput(
            "no site is guilty, so there is nothing to reproduce",
            hint="leave --repro out, or give more evidence: --replay",
        )
    site = diagnosis.first_site
    # The step and visit of the first wrong tensor select one call; if they are unknown, the first
    # call is used.
    first = next((r for r in candidate.records if str(r.key) == diagnosis.first_key), None)
    step, visit = (first.key.step, first.key.visit) if first is not None else (0, 0)
    call = (site, step, visit)
    tensors = [
        *_tensors_of(candidate, call, "candidate", ("input", "output")),
        # The reference's weights are used, because the candidate's may be the fault.
        *_tensors_of(reference, call, "reference", ("input", "output", "param")),
    ]
    if replay is not None:
        tensors += _tensors_of(open_replay(replay).exact, call, "exact", ())
    arrays = {name: (read_whole(run, r, _MOST), r) for name, run, r in tensors}
    kept = {name: (a, r) for name, (a, r) in arrays.items() if a is not None}
    # The script shows the error of the candidate's output, so that output is required.
    if not any(name.startswith("candidate.output") for name in kept):
        raise BadInput(
            f"no values of '{site}' were kept", hint="dump both runs with --keep full first"
        )
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    listed = _saved(kept, target)
    has_params = any(name.startswith("param.") for name in kept)
    about = {
        "site": site,
        "class": next((s.class_name for s in diagnosis.sites if s.site == site), ""),
        "cause": diagnosis.cause,
        "finding": list(diagnosis.sentences),
        "tensors": listed,
        "weights": "captured"
        if has_params
        else "not captured; dump them with: driftline dump --level params -o RUN --exec ...",
    }
    (target / "repro.json").write_text(json.dumps(about, indent=1), "utf-8")
    (target / "repro.py").write_text(_SCRIPT, "utf-8")
    what = "with its weights" if has_params else "without weights, which were not captured"
    return f"{target}/repro.py shows '{site}' by itself, {what}"


def _tensors_of(
    run: Run, call: tuple[str, int, int], side: str, ports: Sequence[str]
) -> list[tuple[str, Run, Record]]:
    """Tensors of one call (site, step, visit) by the names that the script uses.

    If `ports` is empty, all ports are included.
    """
    site, step, visit = call
    tensors: list[tuple[str, Run, Record]] = []
    for record in run.records:
        key = record.key
        if key.site != site or (ports and key.port not in ports):
            continue
        # Weights belong to all calls of a site.
        if key.port == "param" and ports:
            tensors.append((f"param.{key.slot}", run, record))
        elif (key.step, key.visit) == (step, visit):
            tensors.append((f"{side}.{key.port}.{key.slot}", run, record))
    return tensors


def _saved(arrays: Mapping[str, tuple[F64, Record]], target: Path) -> dict[str, dict[str, object]]:
    """Save each array in its own file; returns file, dtype and shape by name."""
    listed: dict[str, dict[str, object]] = {}
    for number, (name, (array, record)) in enumerate(arrays.items()):
        file = f"tensor-{number:03d}.npy"
        # float32 holds every 16-bit and 8-bit float exactly.
        wide = np.float64 if record.dtype == "float64" else np.float32
        np.save(target / file, array.astype(wide))
        listed[name] = {"file": file, "dtype": record.dtype, "shape": list(record.shape)}
    return listed


_SCRIPT = '''"""One guilty module by itself: what it was given, what it made, what it should make.

Run it as it is to see the error. To try a fix, make `module` return yours: it is called with the
captured inputs, and its result is measured against the right one.
"""

import json
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
ABOUT = json.loads((HERE / "repro.json").read_text("utf-8"))


def tensors(begin):
    """Tensors whose name begins so, by the rest of their name."""
    return {
        name[len(begin):]: np.load(HERE / about["file"], allow_pickle=False)
        for name, about in ABOUT["tensors"].items()
        if name.startswith(begin)
    }


def module(inputs, params):
    """Put the module here: a dict of outputs by slot; None to look at the captured ones only."""
    return None


def show(title, right, made):
    for slot in right.keys() & made.keys():
        r, c = right[slot].astype(np.float64), made[slot].astype(np.float64)
        both = np.isfinite(r) & np.isfinite(c)
        e, r = np.where(both, c - r, 0.0), np.where(both, r, 0.0)
        size = max(float(np.sum(r * r)), 1e-300)
        print(
            f"{title} {slot}: relative error {np.sqrt(np.sum(e * e) / size):.4g}, "
            f"lean {np.sum(e * r) / size:+.4g}, not finite {int(np.sum(~both))}"
        )


def main():
    print("\\n".join(ABOUT["finding"]))
    print(f"{ABOUT['site']} ({ABOUT['class']}), weights {ABOUT['weights']}")
    right = tensors("exact.output.")
    which = "reference's module on the candidate's input"
    if not right:
        right, which = tensors("reference.output."), "reference run"
    print(f"right is: the {which}")
    show("candidate", right, tensors("candidate.output."))
    made = module(tensors("candidate.input."), tensors("param."))
    if made is not None:
        show("yours", right, made)


if __name__ == "__main__":
    main()
'''
