"""One trial: a reference, a candidate with or without a fault, evidence, and what is said of it."""

# torch objects have no complete types
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from driftline.adapters.torch.candidate import Candidate
from driftline.adapters.torch.door import capture
from driftline.adapters.torch.replaying import Replayer
from driftline.diagnosis.artefacts import Replay, ReplayedSite
from driftline.diagnosis.door import diagnose
from driftline.diagnosis.finding import Diagnosis
from driftline.gating.door import compare
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run
from driftline.testing.faults.architectures import Specimen, specimen
from driftline.testing.faults.formats import in_format, other_attention, trusted
from driftline.testing.faults.planting import Fault


class Setting(NamedTuple):
    """What is tried.

    Attributes:
        architecture: One of `ARCHITECTURES`.
        format: One of `FORMATS`, the candidate's.
        seed: Of weights, inputs and the place of the fault.
        fault: What is planted; nothing where None.
        amount: How strong.
        length: Tokens of each sequence.
    """

    architecture: str
    format: str
    seed: int
    fault: Fault | None = None
    amount: float = 0.0
    length: int = 40


class Planted(NamedTuple):
    """Both executions and the evidence about them.

    Attributes:
        site: Where the fault is; empty without one.
        changed: Whether the fault changed any bit of the model's output.
        reference: Run of the reference in float32.
        candidate: Run of the candidate.
        replay: The reference's modules on the candidate's inputs.
        noise: Trusted runs in the candidate's format.
        error: Relative error of the model's output.
        clean_error: The same without the fault.
    """

    site: str
    changed: bool
    reference: Run
    candidate: Run
    replay: Replay
    noise: Sequence[Run]
    error: float
    clean_error: float


class Outcome(NamedTuple):
    """What one method says of a trial."""

    detected: bool
    exact: bool
    named: bool
    flagged: int
    rows: int
    first_site: str
    cause: str


def planted(setting: Setting) -> Planted:
    """Run both sides of a trial and gather all evidence; nothing touches a disk."""
    source = specimen(setting.architecture, setting.seed, length=setting.length)
    reference, _ = _captured(source.model, source.inputs, "reference")
    generator = torch.Generator().manual_seed(104729 * setting.seed + 1)
    clean = _candidate(setting, None, "", generator)
    site = _place(setting, source.model)
    faulty = clean
    if setting.fault is not None:
        faulty = _candidate(setting, setting.fault, site, generator)
    candidate, output = _captured(*faulty, "candidate")
    truth = _output(source.model, source.inputs)
    unharmed = _output(*clean) if setting.fault is not None else output
    return Planted(
        site=site,
        changed=setting.fault is None or not _same(output, unharmed),
        reference=reference,
        candidate=candidate,
        replay=_replayed(source, candidate, setting.format),
        noise=[
            _captured(model, inputs, name)[0]
            for name, model, inputs in trusted(source.model, source.inputs, setting.format)
        ],
        error=_apart(truth, output),
        clean_error=_apart(truth, unharmed),
    )


def _place(setting: Setting, model: nn.Module) -> str:
    if setting.fault is None:
        return ""
    sites = setting.fault.sites(model)
    return sites[(31 * setting.seed + 7) % len(sites)]


def _candidate(
    setting: Setting, fault: Fault | None, site: str, generator: torch.Generator
) -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = specimen(setting.architecture, setting.seed, length=setting.length)
    if fault is not None:
        fault.plant(model, site, setting.amount, generator)
    if setting.format == "fp32" and (setting.fault is None or setting.fault.role != "attention"):
        model = other_attention(model)  # without any difference the pair would be equal to the bit
    return in_format(model, inputs, setting.format)


def _captured(model: nn.Module, inputs: Mapping[str, Any], name: str) -> tuple[Run, torch.Tensor]:
    sink = MemorySink(name=name)
    torch.manual_seed(5)
    with torch.no_grad(), capture(model, sink):
        output = model(**inputs)[0]
    return sink.run(), output


def _output(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    torch.manual_seed(5)
    with torch.no_grad():
        return model(**inputs)[0]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a, b))


def _apart(truth: torch.Tensor, other: torch.Tensor) -> float:
    truth, other = truth.double(), other.double()
    value = float((other - truth).norm() / truth.norm())
    return value if math.isfinite(value) else math.inf


def _replayed(source: Specimen, candidate: Run, name: str) -> Replay:
    exact, native, report = _applied(source.model, source.inputs, candidate)
    if name == "int8":
        # The format is not the tensors' dtype: what is trusted in it are quantised modules.
        live, inputs = in_format(copy.deepcopy(source.model), source.inputs, name)
        native, _, _ = _applied(live, inputs, candidate)
    sites = {
        site: ReplayedSite(
            entry.get("status", "replayed"),
            entry.get("reason", ""),
            entry.get("reproduced", True),
        )
        for site, entry in report["sites"].items()
    }
    return Replay(exact, native, sites)


def _applied(
    model: nn.Module, inputs: Mapping[str, Any], candidate: Run
) -> tuple[Run, Run, Mapping[str, Any]]:
    exact, native = MemorySink(name="exact"), MemorySink(name="native")
    with torch.no_grad(), capture(model, MemorySink(name="own"), keep="describe") as live:
        replayer = Replayer(live.session, Candidate(candidate), _by_name, exact, native)
        live.session.stand_in = replayer
        model(**inputs)
    return exact.run(), native.run(), replayer.report.to_json()


def _by_name(ours: Any, theirs: Any) -> Mapping[str, str]:
    there = set(theirs)
    return {site: site for site in ours if site in there}


def _visible(pair: Planted) -> str:
    """The site of the fault, or the innermost one around it that the candidate's run has."""
    sites = {record.key.site for record in pair.candidate.records}
    site = pair.site
    while site and site not in sites:
        site = site.rpartition(".")[0]
    return site


def judged(setting: Setting, pair: Planted, found: Diagnosis) -> Outcome:
    """How well a diagnosis did."""
    causes = setting.fault.causes if setting.fault else ("noise",)
    flagged = [s for s in found.sites if s.status == "introduced"]
    return Outcome(
        detected=found.verdict == "fail",
        exact=found.first_site == _visible(pair),
        named=found.cause in causes,
        flagged=len(flagged),
        rows=len(found.sites),
        first_site=found.first_site or "",
        cause=found.cause or "",
    )


def by_replay(setting: Setting, pair: Planted) -> Outcome:
    """Two runs, a replay and noise runs."""
    found = diagnose(pair.reference, pair.candidate, replay=pair.replay, noise=pair.noise)
    return judged(setting, pair, found)


def by_noise(setting: Setting, pair: Planted) -> Outcome:
    """Two runs and trusted runs in the candidate's format."""
    return judged(setting, pair, diagnose(pair.reference, pair.candidate, noise=pair.noise))


def by_two_runs(setting: Setting, pair: Planted) -> Outcome:
    """Two runs and nothing else."""
    return judged(setting, pair, diagnose(pair.reference, pair.candidate))


def _rows(pair: Planted, flagged: Sequence[str], rows: int) -> Outcome:
    first = flagged[0] if flagged else ""
    return Outcome(bool(flagged), first == _visible(pair), False, len(flagged), rows, first, "")


def by_fixed_tolerance(setting: Setting, pair: Planted, allowed: float = 1e-2) -> Outcome:
    """What a fixed limit on the relative error says: rows beyond it, in order of execution."""
    table = compare(pair.reference, pair.candidate, ports=("output",))
    rows = [row for row in table.rows if "relative_l2" in row.metrics]
    return _rows(pair, [r.site for r in rows if not r.metrics["relative_l2"] <= allowed], len(rows))


def by_three_ways(setting: Setting, pair: Planted, allowed: float = 2.0) -> Outcome:
    """The candidate's error over that of one trusted run in its format."""
    table = compare(pair.reference, pair.candidate, ports=("output",))
    trust = compare(pair.reference, pair.noise[0], ports=("output",))
    usual = {(r.site, r.slot, r.visit): r.metrics.get("relative_l2", 0.0) for r in trust.rows}
    rows = [row for row in table.rows if "relative_l2" in row.metrics]
    beyond = [
        row.site
        for row in rows
        if not row.metrics["relative_l2"]
        <= allowed * max(usual.get((row.site, row.slot, row.visit), 0.0), 1e-7)
    ]
    return _rows(pair, beyond, len(rows))


METHODS = {
    "replay": by_replay,
    "noise": by_noise,
    "two runs": by_two_runs,
    "fixed tolerance": by_fixed_tolerance,
    "three-way": by_three_ways,
}
"""How a trial can be judged, by name."""
