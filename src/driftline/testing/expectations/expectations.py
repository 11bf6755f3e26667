"""Expected outputs of models: their files, and the check of an output against them.

A file holds comma-separated floats, or sorted weight keys, on one line without an end: the
documented content and names, so that files of other tools are read. The fingerprint next to it
(`{name}.json`) states where it was made and how far a later output may be from it; a file without
one is read too. How two signatures are compared is in `signature`; pytest is not known here.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np

import driftline
from driftline.errors import BadFile, BadInput, DriftlineError
from driftline.testing.expectations.signature import (
    F64,
    Allowed,
    Distance,
    Mask,
    Seen,
    by_relative_l2,
    distance,
    judged_positions,
    measured,
    quiet,
    see,
    weight_shapes,
)

FINGERPRINT = ".json"
LONGEST_NAME = 255
# Read whole, so bounded: an expectation is a line of numbers.
LARGEST_FILE = 256 << 20
# Folders of the Hugging Face cache carry the model's id in their name.
_HUB_FOLDER = re.compile(r"models--(.+)")
_UNFIT = re.compile(r"[^\w.\-\[\]=,+@]+")


class Kept(NamedTuple):
    """A stored expectation.

    Attributes:
        path: The file.
        content: Its line, split at the commas.
        fingerprint: Its fingerprint; empty if it has none.
    """

    path: Path
    content: tuple[str, ...]
    fingerprint: Mapping[str, Any]

    def numbers(self) -> F64:
        """The content as numbers.

        Raises:
            BadFile: A word is not a number.
        """
        try:
            values = np.array([float(word) for word in self.content], np.float64)
        except ValueError:
            bad = next(word for word in self.content if not _is_number(word))
            raise BadFile(
                f"{self.path} is no signature: '{bad.strip()[:40]}' is no number",
                hint="capture it anew with --driftline-update=all",
            ) from None
        if not np.isfinite(values).all():
            raise BadFile(
                f"{self.path} holds {int((~np.isfinite(values)).sum())} numbers that are not finite"
            )
        return values

    def allowed(self) -> Allowed | None:
        """The limits in the fingerprint; None if it has none."""
        entry: Any = self.fingerprint.get("allowed")
        if not isinstance(entry, dict):
            return None
        words = cast("dict[str, Any]", entry)
        figures = [words.get(name) for name in ("largest", "rms", "moved")]
        # A limit of NaN or infinity would accept everything.
        if not all(isinstance(f, (int, float)) and 0 <= f < math.inf for f in figures):
            raise BadFile(f"{self.path}{FINGERPRINT} does not say how much is allowed")
        largest, rms, moved = (float(cast(float, figure)) for figure in figures)
        return Allowed(largest, rms, moved, str(words.get("why", "")))


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def model_label(model: str) -> str:
    """The name of a model in the names of its expectations: `org--name`.

    For a path, the last two folders are used: other folders of the machine do not belong into a
    file that others will read. A folder of the hub's cache gets the id of its model.

    >>> model_label("mistralai/Mistral-7B-Instruct-v0.3")
    'mistralai--Mistral-7B-Instruct-v0.3'
    >>> model_label("/tmp/models/ibm-granite/granite-3.3-8b-instruct/")
    'ibm-granite--granite-3.3-8b-instruct'
    """
    parts = [part for part in model.strip().split("/") if part not in ("", ".", "..", "~")]
    # The hub's own folder names the model; what follows it is a snapshot's hash.
    for part in parts:
        hub = _HUB_FOLDER.fullmatch(part)
        if hub:
            return plain_name(hub[1])
    return plain_name("--".join(parts[-2:]))


def documented_label(model: str) -> str:
    """The name of a model in older files: the last part of its id or path."""
    return plain_name(model.strip().rstrip("/").rpartition("/")[2])


def plain_name(text: str) -> str:
    """A text as part of a file name: characters special to a shell or disk become dashes."""
    return _UNFIT.sub("-", text).strip(".") or "model"


def find(folder: Path, names: Sequence[str]) -> Kept | None:
    """The first of these expectations that exists.

    Raises:
        BadFile: It exists but cannot be read.
    """
    for name in names:
        path = folder / name
        _short_enough(path)
        try:
            if path.stat().st_size > LARGEST_FILE:
                raise BadFile(f"{path} is too large for an expectation")
            text = path.read_text("utf-8")
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as trouble:
            reason = trouble.strerror if isinstance(trouble, OSError) else "it is not text"
            raise BadFile(f"the expectation {path} cannot be read: {reason}") from None
        # Editors add a line end that the documented format does not have.
        line = text.strip("\n")
        return Kept(path, tuple(line.split(",")) if line else (), _fingerprint(path))
    return None


def _fingerprint(path: Path) -> Mapping[str, Any]:
    file = path.with_name(path.name + FINGERPRINT)
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise BadFile(f"{file} is too large for a fingerprint")
        document: Any = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as trouble:
        reason = trouble.strerror if isinstance(trouble, OSError) else "it is not valid JSON"
        raise BadFile(f"the fingerprint {file} cannot be read: {reason}") from None
    if not isinstance(document, dict):
        raise BadFile(f"the fingerprint {file} is no JSON object")
    return cast("Mapping[str, Any]", document)


def write(
    folder: Path, name: str, content: Iterable[float | str], fingerprint: Mapping[str, Any]
) -> Path:
    """Write an expectation. Both files are written completely or not at all.

    Raises:
        DriftlineError: The folder cannot be written to.
    """
    path = folder / name
    fingerprint_path = path.with_name(path.name + FINGERPRINT)
    _short_enough(path)
    line = ",".join(word if isinstance(word, str) else repr(float(word)) for word in content)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The line is written last: without it there is no expectation.
        _put(fingerprint_path, _json(fingerprint))
        _put(path, line)
    except OSError as trouble:
        raise DriftlineError(
            f"the expectation {path} cannot be written: {trouble.strerror or trouble}",
            hint="--driftline-expectations-dir, or driftline_expectations_dir in the ini file, "
            "names the folder",
        ) from None
    return path


def _json(fingerprint: Mapping[str, Any]) -> str:
    """JSON with one line per fact, because people read it and review its changes."""
    lines = (f"  {json.dumps(k)}: {json.dumps(v, allow_nan=False)}" for k, v in fingerprint.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _put(path: Path, text: str) -> None:
    handle, scratch = tempfile.mkstemp(prefix=".driftline-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        # The mask can only be read by setting it.
        umask = os.umask(0)
        os.umask(umask)
        Path(scratch).chmod(0o666 & ~umask)  # as any file of the user's, not private as scratch
        Path(scratch).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(scratch).unlink()
        raise


def _short_enough(path: Path) -> None:
    # The fingerprint's name is the longer one, and limits count bytes.
    size = len((path.name + FINGERPRINT).encode())
    if size > LONGEST_NAME:
        raise BadInput(
            f"an expectation cannot be called '{path.name[:40]}…': that is {size} bytes, and "
            f"file names end at {LONGEST_NAME}",
            hint="give it a name of its own: expect(model, inputs, name='short')",
        )


# Checking an output against its expectation, or writing the expectation.


Update = Literal["none", "new", "failed", "all"]
State = Literal["same", "written", "rewritten", "missing", "different"]
SEED = 42
SHOWN = 8
SAME_EXPERIMENT = ("dtype", "seed", "micro_layers")
"""Facts that must be equal: if one differs, the test fails, however close the numbers are."""
COMPARED = ("model", "library", "device", "compile", "torch", "transformers", "fms", "python")
"""Facts whose change is reported with a mismatch."""


class Result(NamedTuple):
    """The result of checking or writing one expectation.

    Attributes:
        state: Same, written, rewritten, missing or different.
        path: The file that was read or written, or that is missing.
        message: Why it is missing or different, in several lines; else empty.
    """

    state: State
    path: Path
    message: str = ""

    @property
    def passed(self) -> bool:
        return self.state in ("same", "written", "rewritten")


class Explicit(NamedTuple):
    """Given limits: a position may differ by `atol + rtol * (largest expected number)`."""

    rtol: float
    atol: float

    def allowed(self, expected: F64, seen: Seen) -> Allowed:
        del seen
        # Relative to the largest number: signatures have zeros by construction.
        limit = self.atol + self.rtol * (float(expected.max()) if expected.size else 0.0)
        why = f"atol {self.atol:g} + rtol {self.rtol:g} of the largest number, as the test says"
        return Allowed(limit, limit, math.inf, why)


class Calibrated(NamedTuple):
    """A limit on the relative L2 distance of all values, from a thresholds file."""

    relative_l2: float
    source: str

    def allowed(self, expected: F64, seen: Seen) -> Allowed:
        del expected
        why = f"a relative L2 of {self.relative_l2:g}, by {self.source}"
        return by_relative_l2(seen, self.relative_l2, why)


@dataclass(frozen=True, slots=True)
class Subject:
    """The model and inputs of an expectation.

    Attributes:
        title: Its name in messages.
        run: Calls the model once and returns its output.
        module: The model, if it is a torch module.
        judged: True at positions that are judged; see `signature.see`.
        facts: Further facts for the fingerprint: model, library, device, …
        seed: Set before every call.
        explicit: Limits that replace measured ones.
    """

    title: str
    run: Callable[[], Any]
    module: Any = None
    judged: Mask | None = None
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seed: int = SEED
    explicit: Explicit | Calibrated | None = None

    def see(self) -> Seen:
        with quiet(self.module, self.seed):
            return see(self.run(), judged=self.judged)

    def calibrated(self, seen: Seen) -> Allowed:
        return measured(self.module, seen, self.see, judged=self.judged)


@dataclass(frozen=True, slots=True)
class Expectations:
    """The expectations of one folder, with one update policy.

    Attributes:
        folder: The folder.
        update: `none` checks; `new` also writes what is missing; `failed` also what differs; `all`
            writes everything.
        command: The command that makes a missing expectation, for messages.
    """

    folder: Path
    update: Update = "none"
    command: str = "pytest --driftline-update=new"

    def output(self, subject: Subject, names: Sequence[str]) -> Result:
        """Check or write the signature of the subject's output.

        Args:
            subject: The model and its inputs.
            names: File names to look for; the first is the one to write.

        Raises:
            BadInput: The output is not finite where it was to be kept.
        """
        kept = None if self.update == "all" else find(self.folder, names)
        if kept is None and self.update == "none":
            return self._missing(subject.title, "Signature", names)
        seen = subject.see()
        problems = [] if kept is None else _signature_problems(kept, seen, subject)
        if kept is not None and (not problems or self.update != "failed"):
            return self._checked(kept, problems, subject, seen.dtype)
        if seen.not_finite:
            raise BadInput(
                f"the output of {subject.title} holds {seen.not_finite} values that are NaN or "
                "infinite; that is nothing to expect, and nothing was written",
                hint="give inputs for which the output is finite",
            )
        facts = self._fingerprint(subject, seen.dtype)
        facts["shapes"] = [list(shape) for shape in seen.shapes]
        # Limits that the test states need no measurement.
        if subject.explicit is None:
            facts["allowed"] = subject.calibrated(seen)._asdict()
        facts |= {"rms": seen.rms, "sketch": list(seen.sketch)}
        return self._written(names[0], map(float, seen.signature), facts, kept)

    def weight_keys(self, subject: Subject, names: Sequence[str]) -> Result:
        """Check or write the sorted keys of the subject's state dict; see `output`."""
        kept = None if self.update == "all" else find(self.folder, names)
        if kept is None and self.update == "none":
            return self._missing(subject.title, "Weights Key", names)
        shapes = weight_shapes(subject.module)
        problems = [] if kept is None else _key_problems(kept, shapes, subject)
        if kept is not None and (not problems or self.update != "failed"):
            return self._checked(kept, problems, subject, "")
        # Keys are separated by commas in the documented file.
        comma = next((key for key in shapes if "," in key), None)
        if comma is not None:
            raise BadInput(
                f"the weight key '{comma}' has a comma in it and cannot be kept",
                hint="expect the output alone: expect(model(inputs))",
            )
        facts = {
            **self._fingerprint(subject, ""),
            "shapes": {k: list(s) for k, s in shapes.items()},
        }
        return self._written(names[0], shapes, facts, kept)

    def _missing(self, title: str, what: str, names: Sequence[str]) -> Result:
        path = self.folder / names[0]
        older = f" (nor {', '.join(names[1:])})" if len(names) > 1 else ""
        message = (
            f"{what} file failed to load, please re-run the tests with --capture_expectation\n"
            f"  nothing has been captured for {title} yet: there is no {path}{older}\n"
            f"  this makes it: {self.command}"
        )
        return Result("missing", path, message)

    def _checked(self, kept: Kept, problems: list[str], subject: Subject, dtype: str) -> Result:
        if not problems:
            return Result("same", kept.path)
        lines = [problems[0], *(f"  {line}" for line in problems[1:])]
        lines += [f"  {line}" for line in _changed_facts(kept, subject.facts, dtype)]
        lines.append(f"  expected: {kept.path}")
        lines.append("  if the change is wanted, --driftline-update=failed takes it over")
        return Result("different", kept.path, "\n".join(lines))

    def _written(
        self, name: str, content: Iterable[float | str], facts: dict[str, Any], kept: Kept | None
    ) -> Result:
        existed = kept is not None or (self.folder / name).exists()
        path = write(self.folder, name, content, facts)
        return Result("rewritten" if existed else "written", path)

    def _fingerprint(self, subject: Subject, dtype: str) -> dict[str, Any]:
        now = datetime.datetime.now(datetime.UTC)
        return {
            "made_by": f"driftline {driftline.__version__}",
            "made_at": f"{now:%Y-%m-%dT%H:%MZ}",
            **environment(),
            **({"dtype": dtype} if dtype else {}),
            "seed": subject.seed,
            **subject.facts,
        }


def environment() -> dict[str, str]:
    """The versions that decide what a model computes, as far as they are loaded."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "fms"):
        module = sys.modules.get(name)
        version = getattr(module, "__version__", None)
        # This package has no version attribute; its distribution has another name.
        if version is None and module is not None and name == "fms":
            from importlib.metadata import PackageNotFoundError
            from importlib.metadata import version as version_of

            try:
                version = version_of("ibm-fms")
            except PackageNotFoundError:
                continue
        if version is not None:
            versions[name] = str(version)
    return versions


def device_name(device: Any) -> str:
    """A device as text for a fingerprint, with the name of the card, if any."""
    import torch

    if device is None:
        return "cpu"
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name is None else f"{device} {name(device)}"


def _signature_problems(kept: Kept, seen: Seen, subject: Subject) -> list[str]:
    expected = kept.numbers()
    title = f"the output of {subject.title} is not what was captured"
    now = {**subject.facts, "dtype": seen.dtype, "seed": subject.seed}
    other = _another_experiment(kept, now)
    if expected.size != seen.signature.size:
        shapes = " and ".join(str(list(shape)) for shape in seen.shapes)
        return [
            f"{title}: {expected.size} positions were, {seen.signature.size} are now",
            f"the output now has the shape {shapes}",
            *other,
        ]
    if seen.not_finite:
        return [f"{title}: {seen.not_finite} values are NaN or infinite", *other]
    judged = judged_positions(expected.size, subject.judged)
    sketch = _sketch_of(kept)
    gap = distance(expected, seen.signature, judged, sketches=(sketch, seen.sketch))
    # Equal bits need no limits, unless it was another experiment.
    if gap.largest == 0.0 and not gap.moved > 0.0:
        return [f"{title}: {other[0]}", *other[1:]] if other else []
    if subject.explicit is not None:
        allowed = subject.explicit.allowed(expected, seen)
    else:
        allowed = kept.allowed() or subject.calibrated(seen)
    lines = _findings(gap, allowed, expected, seen, judged)
    if not lines and not other:
        return []
    if not lines:
        return [f"{title}: {other[0]}", *other[1:]]
    return [title, *lines, f"allowed: {allowed.why}", *other]


def _findings(
    gap: Distance, allowed: Allowed, expected: Any, seen: Seen, judged: Mask
) -> list[str]:
    lines: list[str] = []
    # Negated, so that NaN counts as outside.
    outside = np.flatnonzero(~(gap.off <= allowed.largest))
    if outside.size:
        worst = int(np.argmax(gap.off))
        lines.append(
            f"{outside.size} of {int(judged.sum())} positions are off by more than "
            f"{allowed.largest:.3g}; the worst is position {worst}: "
            + _at(worst, gap, expected, seen)
            + f", {gap.largest / allowed.largest:.1f} times what is allowed"
        )
        first = int(outside[0])
        if first != worst:
            lines.append(f"the first is position {first}: {_at(first, gap, expected, seen)}")
    if not gap.rms <= allowed.rms:
        lines.append(f"over all positions the rms is {gap.rms:.3g}, allowed is {allowed.rms:.3g}")
    # Ranges do not see a permuted vocabulary; the sketch does. NaN means that there was none.
    if gap.moved > allowed.moved:
        words = f"all values together are about {gap.moved:.2g} (relative L2) from the captured"
        if not lines:
            words += " ones though their ranges agree: a permutation, or a shift of all"
        else:
            words += " ones"
        lines.append(f"{words}; allowed is {allowed.moved:.2g}")
    return lines


def _at(position: int, gap: Distance, expected: Any, seen: Seen) -> str:
    return (
        f"captured {expected[position]:.6g}, now {seen.signature[position]:.6g} "
        f"(off by {gap.off[position]:.3g})"
    )


def _sketch_of(kept: Kept) -> tuple[float, ...]:
    entry: Any = kept.fingerprint.get("sketch")
    if isinstance(entry, list) and all(isinstance(v, (int, float)) for v in entry):  # pyright: ignore[reportUnknownVariableType]
        return tuple(float(v) for v in entry)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
    return ()


def _key_problems(kept: Kept, shapes: Mapping[str, tuple[int, ...]], subject: Subject) -> list[str]:
    expected = [key.strip() for key in kept.content]
    appeared = [key for key in shapes if key not in set(expected)]
    vanished = [key for key in expected if key not in shapes]
    title = f"the weight keys of {subject.title} are not the captured ones"
    if appeared or vanished:
        same = len(shapes) - len(appeared)
        lines = [
            f"{title}: {len(appeared)} appeared, {len(vanished)} vanished, {same} are the same"
        ]
        lines += _listed("appeared", appeared) + _listed("vanished", vanished)
        # Other libraries name every weight differently.
        if not same:
            lines.append(
                "no key is shared: was it captured with another library? "
                "(--driftline-library transformers or fms)"
            )
        return lines
    old_shapes: Any = kept.fingerprint.get("shapes")
    if not isinstance(old_shapes, dict):
        return []
    changed = [
        f"{key} was {old_shapes[key]}, is {list(shape)}"  # pyright: ignore[reportUnknownArgumentType]
        for key, shape in shapes.items()
        if isinstance(old_shapes.get(key), list) and old_shapes[key] != list(shape)  # pyright: ignore[reportUnknownMemberType]
    ]
    if not changed:
        return []
    return [
        f"the weights of {subject.title} have the captured keys, but {len(changed)} "
        f"{'has another shape' if len(changed) == 1 else 'have other shapes'}",
        *_listed("shape", changed),
    ]


def _listed(word: str, names: Sequence[str]) -> list[str]:
    lines = [f"{word}: {name}" for name in names[:SHOWN]]
    if len(names) > SHOWN:
        lines.append(f"{word}: and {len(names) - SHOWN} more")
    return lines


def _another_experiment(kept: Kept, now: Mapping[str, Any]) -> list[str]:
    return [
        f"it was captured with {name} {kept.fingerprint[name]}, this is {name} {now[name]}"
        for name in SAME_EXPERIMENT
        if name in kept.fingerprint and name in now and kept.fingerprint[name] != now[name]
    ]


def _changed_facts(kept: Kept, facts: Mapping[str, Any], dtype: str) -> list[str]:
    # Files of other tools have none.
    if not kept.fingerprint:
        return ["where it was captured is not known: it has no fingerprint"]
    now: dict[str, Any] = {**environment(), **facts, **({"dtype": dtype} if dtype else {})}
    before = kept.fingerprint
    changed = [
        f"{name} {before[name]} then, {now[name]} now"
        for name in COMPARED
        if name in before and name in now and before[name] != now[name]
    ]
    when = f"captured {before.get('made_at', 'at a time it does not say')}"
    return [when + (": " + "; ".join(changed) if changed else ", in the same environment")]
