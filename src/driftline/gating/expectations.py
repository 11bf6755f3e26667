"""Expectations: what a model gave once, and whether it still does.

An expectation is the signature of an output, or the list of a model's weight keys. It is written
when somebody asks for it and checked ever after; a mismatch says how many positions, how much,
where, and which keys. Limits come from the model itself (`last_bits`), measured when it is
captured. Knows neither pytest nor how models are loaded.
"""

from __future__ import annotations

import datetime
import math
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

import driftline
from driftline.errors import BadInput
from driftline.gating.expectation_files import Kept, find, write
from driftline.gating.last_bits import Allowed, by_relative_l2, measured
from driftline.gating.signature import (
    F64,
    Distance,
    Mask,
    Seen,
    distance,
    judged_positions,
    quiet,
    see,
    weight_shapes,
)

Update = Literal["none", "new", "failed", "all"]
State = Literal["same", "written", "rewritten", "missing", "different"]
SEED = 42
SHOWN = 8
SAME_EXPERIMENT = ("dtype", "seed", "micro_layers")
"""Facts that make it another experiment when they differ, however near the numbers are."""
COMPARED = ("model", "library", "device", "compile", "torch", "transformers", "fms", "python")
"""Facts whose change is worth a line in a mismatch."""


class Result(NamedTuple):
    """What became of one expectation.

    Attributes:
        state: Same, written, rewritten, missing or different.
        path: The file that was read or written, or that is missing.
        message: Why it is missing or different, over several lines; else empty.
    """

    state: State
    path: Path
    message: str = ""

    @property
    def passed(self) -> bool:
        return self.state in ("same", "written", "rewritten")


class Explicit(NamedTuple):
    """Limits somebody gives: a position may be off by `atol + rtol * (largest expected number)`."""

    rtol: float
    atol: float

    def allowed(self, expected: F64, seen: Seen) -> Allowed:
        del seen
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
    """What an expectation is about.

    Attributes:
        title: What messages call it.
        run: Calls the model once and gives its output.
        module: The model, if it is a torch module.
        judged: True at positions that mean something; see `signature.see`.
        facts: More of the fingerprint: model, library, device, …
        seed: Set before every call.
        explicit: Limits that take the place of measured ones.
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
    """The expectations of one folder, under one policy.

    Attributes:
        folder: Where they lie.
        update: `none` checks; `new` also writes what is missing; `failed` also what differs; `all`
            writes everything.
        command: The command that makes a missing expectation, for messages.
    """

    folder: Path
    update: Update = "none"
    command: str = "pytest --driftline-update=new"

    def output(self, subject: Subject, names: Sequence[str]) -> Result:
        """Check or keep the signature of the subject's output.

        Args:
            subject: What is called.
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
                "infinite; that is nothing to expect, and nothing was written"
            )
        facts = self._fingerprint(subject, seen.dtype)
        facts["shapes"] = [list(shape) for shape in seen.shapes]
        if subject.explicit is None:
            facts["allowed"] = subject.calibrated(seen)._asdict()
        facts |= {"rms": seen.rms, "sketch": list(seen.sketch)}
        return self._written(names[0], map(float, seen.signature), facts, kept)

    def weight_keys(self, subject: Subject, names: Sequence[str]) -> Result:
        """Check or keep the sorted keys of the subject's state dict; see `output`."""
        kept = None if self.update == "all" else find(self.folder, names)
        if kept is None and self.update == "none":
            return self._missing(subject.title, "Weights Key", names)
        shapes = weight_shapes(subject.module)
        problems = [] if kept is None else _key_problems(kept, shapes, subject)
        if kept is not None and (not problems or self.update != "failed"):
            return self._checked(kept, problems, subject, "")
        comma = next((key for key in shapes if "," in key), None)
        if comma is not None:
            raise BadInput(f"the weight key '{comma}' has a comma in it and cannot be kept")
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
        there = kept is not None or (self.folder / name).exists()
        path = write(self.folder, name, content, facts)
        return Result("rewritten" if there else "written", path)

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
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "fms"):
        module = sys.modules.get(name)
        version = getattr(module, "__version__", None)
        if version is None and module is not None and name == "fms":
            from importlib.metadata import PackageNotFoundError
            from importlib.metadata import version as version_of

            try:
                version = version_of("ibm-fms")
            except PackageNotFoundError:
                continue
        if version is not None:
            found[name] = str(version)
    return found


def device_name(device: Any) -> str:
    """A device as a fingerprint says it: with the name of the card, where there is one."""
    import torch

    if device is None:
        return "cpu"
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return str(device)


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
    found = distance(expected, seen.signature, judged, sketches=(sketch, seen.sketch))
    if found.largest == 0.0 and not found.moved > 0.0:
        return [f"{title}: {other[0]}", *other[1:]] if other else []
    if subject.explicit is not None:
        allowed = subject.explicit.allowed(expected, seen)
    else:
        allowed = kept.allowed() or subject.calibrated(seen)
    lines = _findings(found, allowed, expected, seen, judged)
    if not lines and not other:
        return []
    if not lines:
        return [f"{title}: {other[0]}", *other[1:]]
    return [title, *lines, f"allowed: {allowed.why}", *other]


def _findings(
    found: Distance, allowed: Allowed, expected: Any, seen: Seen, judged: Mask
) -> list[str]:
    lines: list[str] = []
    outside = np.flatnonzero(~(found.off <= allowed.largest))
    if outside.size:
        worst = int(np.argmax(found.off))
        lines.append(
            f"{outside.size} of {int(judged.sum())} positions are off by more than "
            f"{allowed.largest:.3g}; the worst is position {worst}: "
            + _at(worst, found, expected, seen)
            + f", {found.largest / allowed.largest:.1f} times what is allowed"
        )
        first = int(outside[0])
        if first != worst:
            lines.append(f"the first is position {first}: {_at(first, found, expected, seen)}")
    if not found.rms <= allowed.rms:
        lines.append(f"over all positions the rms is {found.rms:.3g}, allowed is {allowed.rms:.3g}")
    if found.moved > allowed.moved:
        words = f"all values together are about {found.moved:.2g} (relative L2) from the captured"
        if not lines:
            words += " ones though their ranges agree: a permutation, or a shift of all"
        else:
            words += " ones"
        lines.append(f"{words}; allowed is {allowed.moved:.2g}")
    return lines


def _at(position: int, found: Distance, expected: Any, seen: Seen) -> str:
    return (
        f"captured {expected[position]:.6g}, now {seen.signature[position]:.6g} "
        f"(off by {found.off[position]:.3g})"
    )


def _sketch_of(kept: Kept) -> tuple[float, ...]:
    said: Any = kept.fingerprint.get("sketch")
    if isinstance(said, list) and all(isinstance(v, (int, float)) for v in said):  # pyright: ignore[reportUnknownVariableType]
        return tuple(float(v) for v in said)  # pyright: ignore[reportUnknownArgumentType,reportUnknownVariableType]
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
        if not same:
            lines.append(
                "no key is shared: was it captured with another library? "
                "(--driftline-library transformers or fms)"
            )
        return lines
    known: Any = kept.fingerprint.get("shapes")
    if not isinstance(known, dict):
        return []
    changed = [
        f"{key} was {known[key]}, is {list(shape)}"  # pyright: ignore[reportUnknownArgumentType]
        for key, shape in shapes.items()
        if isinstance(known.get(key), list) and known[key] != list(shape)  # pyright: ignore[reportUnknownMemberType]
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
    if not kept.fingerprint:
        return ["nothing is known of where it was captured: it has no fingerprint"]
    now: dict[str, Any] = {**environment(), **facts, **({"dtype": dtype} if dtype else {})}
    before = kept.fingerprint
    changed = [
        f"{name} {before[name]} then, {now[name]} now"
        for name in COMPARED
        if name in before and name in now and before[name] != now[name]
    ]
    when = f"captured {before.get('made_at', 'at a time it does not say')}"
    return [when + (": " + "; ".join(changed) if changed else ", in the same environment")]
