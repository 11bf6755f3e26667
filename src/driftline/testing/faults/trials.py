# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""One trial: a reference, a candidate with or without a fault, evidence, and what each method says.

Both models follow from the setting to the bit, so that another tool, in another process, can be
tried on the same pair. Nothing is written to disk.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from driftline.captures.torch.framework import capture
from driftline.captures.torch.session import CaptureSession
from driftline.comparison.pipeline import compare
from driftline.comparison.table.row import Row
from driftline.diagnosis.api import diagnose
from driftline.diagnosis.evidence.files import Replay, ReplayedSite
from driftline.diagnosis.experiments.live.captured_calls import Candidate
from driftline.diagnosis.experiments.live.replay import Replayer
from driftline.diagnosis.experiments.replay_method import ReplayMethod
from driftline.diagnosis.result import Diagnosis
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run
from driftline.testing.faults.architectures import Specimen, specimen
from driftline.testing.faults.faults import Fault
from driftline.testing.faults.variants import (
    COMPILED,
    IMPLEMENTATIONS,
    INTEGERS,
    in_format,
    other_attention,
    trusted,
)

LONG = 4096
"""From this length on both sides use `scaled_dot_product_attention`: eager attention would need
gigabytes."""


class Setting(NamedTuple):
    """What is tried.

    Attributes:
        architecture: One of `ARCHITECTURES`.
        format: One of `FORMATS`, the candidate's.
        seed: Of weights, inputs and the place of the fault.
        fault: What is planted; nothing where None.
        amount: How strong.
        length: Tokens of each sequence.
        implementation: One of `IMPLEMENTATIONS`, the candidate's; empty: as it is, in fp32 other
            attention (without any difference the pair would be equal to the bit).
        batch: Sequences.
    """

    architecture: str
    format: str
    seed: int
    fault: Fault | None = None
    amount: float = 0.0
    length: int = 40
    implementation: str = ""
    batch: int = 4


def reference_of(setting: Setting) -> Specimen:
    """The reference: float32, and nothing wrong with it."""
    made = specimen(setting.architecture, setting.seed, length=setting.length, batch=setting.batch)
    if setting.length >= LONG:
        other_attention(made.model)
    return made


def candidate_of(setting: Setting, *, planted: bool = True) -> Specimen:
    """The candidate in its format; `planted=False` leaves the fault out."""
    source = reference_of(setting)
    fault = setting.fault if planted else None
    if fault is not None:
        # Not the generator of the weights: the fault must be independent of them.
        generator = torch.Generator().manual_seed(104729 * setting.seed + 1)
        fault.plant(source.model, place_of(setting, source.model), setting.amount, generator)
    model = IMPLEMENTATIONS[implementation_of(setting)](source.model)
    return Specimen(*in_format(model, source.inputs, setting.format))


def implementation_of(setting: Setting) -> str:
    """Which implementation the candidate is."""
    if setting.implementation:
        return setting.implementation
    # A fault in attention would vanish if attention were replaced as well.
    at_attention = setting.fault is not None and setting.fault.role == "attention"
    return "other attention" if setting.format == "fp32" and not at_attention else "as it is"


def place_of(setting: Setting, model: nn.Module) -> str:
    """Where the fault is planted; empty without one."""
    if setting.fault is None:
        return ""
    sites = setting.fault.sites(model)
    return sites[(31 * setting.seed + 7) % len(sites)]


def output_of(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The output of a model; random numbers in it are the same each time."""
    torch.manual_seed(5)
    with torch.no_grad():
        return model(**inputs)[0]


def effect_of(setting: Setting) -> float:
    """How much the fault changes its own module's output, in float32 and on the same input.

    This is the size of the fault itself, free of any format's noise and of what later layers make
    of it.
    """
    plain = setting._replace(format="fp32", implementation="as it is")
    source, faulty = reference_of(plain), candidate_of(plain)
    site = place_of(plain, source.model)
    other = faulty.model.get_submodule(site)
    change: list[float] = []

    def compare(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        # A module may be called several times; the first call sees the same input on both
        # sides.
        if not change:
            torch.manual_seed(5)
            change.append(apart(_first(result), _first(other(*args, **kwargs))))

    with torch.no_grad():
        handle = source.model.get_submodule(site).register_forward_hook(compare, with_kwargs=True)
        source.model(**source.inputs)
    handle.remove()
    return change[0] if change else 0.0


def _first(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result[0]


def apart(truth: torch.Tensor, other: torch.Tensor) -> float:
    """Relative error, by the 2-norm; infinite where there is no number."""
    truth, other = truth.double(), other.double()
    value = float((other - truth).norm() / truth.norm())
    # NaN compares false and becomes infinite, too.
    return value if value < float("inf") else float("inf")


# Executing a trial, and judging it by each method.


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

    @property
    def is_seen(self) -> bool:
        """Whether the module at fault is a site of the candidate's run, not a part of one."""
        return not self.site or _visible(self) == self.site


class Outcome(NamedTuple):
    """What one method says of a trial.

    Attributes:
        detected: It says that something is wrong.
        exact: The first thing it names is the site of the fault; without a fault, nothing is named.
        named: The cause it gives is right.
        flagged: Rows it calls guilty.
        rows: Rows it looked at.
        first_site: What it names first.
        cause: What it calls it.
        wrong: Flagged rows that are neither the site of the fault nor around it.
    """

    detected: bool
    exact: bool
    named: bool
    flagged: int
    rows: int
    first_site: str
    cause: str
    wrong: int = 0


def planted(
    setting: Setting, reference_device: str = "cpu", candidate_device: str = "cpu"
) -> Planted:
    """Run both sides of a trial and gather all evidence; nothing touches a disk.

    Args:
        setting: What is tried.
        reference_device: Device of the reference, of its replay and of noise runs.
        candidate_device: Device of the candidate.
    """
    plain = reference_of(setting)
    source = _on(reference_device, plain._replace(model=copy.deepcopy(plain.model)))
    reference, truth = _captured(*source, "reference")
    candidate, output = _captured(*_on(candidate_device, candidate_of(setting)), "candidate")
    unharmed = output
    if setting.fault is not None:
        unharmed = output_of(*_on(candidate_device, candidate_of(setting, planted=False)))
    # A clean candidate must not be among its own noise runs.
    without = implementation_of(setting) if setting.fault is None else ""
    return Planted(
        site=place_of(setting, source.model),
        changed=setting.fault is None or not torch.equal(output, unharmed),
        reference=reference,
        candidate=candidate,
        replay=replayed(source, candidate, setting.format),
        noise=[
            _captured(*_on(reference_device, Specimen(model, inputs)), name)[0]
            for name, model, inputs in trusted(plain.model, plain.inputs, setting.format, without)
        ],
        error=apart(truth.cpu(), output.cpu()),
        clean_error=apart(truth.cpu(), unharmed.cpu()),
    )


def _on(device: str, made: Specimen) -> Specimen:
    inputs = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in made.inputs.items()
    }
    return Specimen(made.model.to(device), inputs)


def _captured(model: nn.Module, inputs: Mapping[str, Any], name: str) -> tuple[Run, torch.Tensor]:
    sink = MemorySink(name=name)
    torch.manual_seed(5)
    with torch.no_grad(), capture(model, sink):
        output = model(**inputs)[0]
    return sink.run(), output


def replayed(source: Specimen, candidate: Run, name: str) -> Replay:
    """The reference's modules on the inputs of a candidate's run, in float32 and in its format."""
    integers = name in INTEGERS
    exact, native, report = _applied(source.model, source.inputs, candidate, keep_all=integers)
    if integers:
        # The format is not the tensors' dtype: what is trusted in it are quantised modules.
        live, inputs = in_format(copy.deepcopy(source.model), source.inputs, name)
        native, _, _ = _applied(live, inputs, candidate, keep_all=True)
    sites = {site: ReplayedSite.from_json(entry) for site, entry in report["sites"].items()}
    return Replay(exact, native, sites)


def _applied(
    model: nn.Module, inputs: Mapping[str, Any], candidate: Run, *, keep_all: bool
) -> tuple[Run, Run, Mapping[str, Any]]:
    exact, native = MemorySink(name="exact"), MemorySink(name="native")
    with torch.no_grad(), capture(model, MemorySink(name="own"), keep="describe") as live:
        session = cast(CaptureSession, live.session)
        method = ReplayMethod(keep_all=keep_all)
        replayer = Replayer(session, Candidate(candidate), _by_name, exact, native, method=method)
        live.session.stand_in = replayer
        model(**inputs)
    return exact.run(), native.run(), replayer.report.to_json()


def _by_name(reference: Any, candidate: Any) -> Mapping[str, str]:
    candidate_sites = set(candidate)
    return {site: site for site in reference if site in candidate_sites}


def _visible(pair: Planted) -> str:
    """The site of the fault, or the innermost one around it that the candidate's run has."""
    sites = {record.key.site for record in pair.candidate.records}
    site = pair.site
    # Modules inside a compiled block have no tensors; the block is used instead.
    while site and site not in sites:
        site = site.rpartition(".")[0]
    return site


def judged(setting: Setting, pair: Planted, diagnosis: Diagnosis) -> Outcome:
    """How well a diagnosis did."""
    causes = setting.fault.causes if setting.fault else ("noise",)
    flagged = [s for s in diagnosis.sites if s.status == "introduced"]
    return Outcome(
        detected=diagnosis.verdict == "fail",
        exact=diagnosis.first_site == _visible(pair),
        named=diagnosis.cause in causes,
        flagged=len(flagged),
        rows=len(diagnosis.sites),
        first_site=diagnosis.first_site or "",
        cause=diagnosis.cause or "",
        wrong=_wrong(pair, [s.site for s in flagged]),
    )


def _wrong(pair: Planted, flagged: Sequence[str]) -> int:
    """How many of these are neither the site of the fault nor contain it."""
    guilty = _visible(pair)
    return sum(
        not guilty or (site not in ("", "(root)", guilty) and not guilty.startswith(f"{site}."))
        for site in flagged
    )


def by_replay(setting: Setting, pair: Planted) -> Outcome:
    """Two runs, a replay and noise runs."""
    diagnosis = diagnose(pair.reference, pair.candidate, replay=pair.replay, noise=pair.noise)
    return judged(setting, pair, diagnosis)


def by_noise(setting: Setting, pair: Planted) -> Outcome:
    """Two runs and trusted runs in the candidate's format."""
    return judged(setting, pair, diagnose(pair.reference, pair.candidate, noise=pair.noise))


def by_two_runs(setting: Setting, pair: Planted) -> Outcome:
    """Two runs and nothing else."""
    return judged(setting, pair, diagnose(pair.reference, pair.candidate))


def _rows(pair: Planted, rows: Sequence[Row], beyond: Sequence[Row]) -> Outcome:
    """Rows of a table are in order of execution, so the first beyond the limit is the first."""
    flagged = [row.site for row in beyond]
    first = flagged[0] if flagged else ""
    wrong = _wrong(pair, flagged)
    exact = first == _visible(pair)
    return Outcome(bool(flagged), exact, False, len(flagged), len(rows), first, "", wrong)


def _measured(reference: Run, candidate: Run) -> list[Row]:
    table = compare(reference, candidate, ports=("output",))
    # Integer outputs are compared exactly and have no relative error.
    return [row for row in table.rows if "relative_l2" in row.metrics]


def by_fixed_tolerance(setting: Setting, pair: Planted, allowed: float | None = None) -> Outcome:
    """What a fixed limit on the relative error of outputs says: rows beyond it.

    The limit is that of the candidate's format, as a careful user would set it: 1e-5 where all is
    float32, 1e-2 otherwise.
    """
    if allowed is None:
        allowed = 1e-5 if setting.format in ("fp32", *COMPILED) else 1e-2
    rows = _measured(pair.reference, pair.candidate)
    return _rows(pair, rows, [r for r in rows if not r.metrics["relative_l2"] <= allowed])


def by_three_ways(setting: Setting, pair: Planted, allowed: float = 2.0) -> Outcome:
    """The candidate's error over that of one trusted run in its format: rows above twice that.

    The trusted run is the one by the candidate's own implementation, which is the best this rule
    can be given; else the first that is not the reference to the bit.
    """
    rows = _measured(pair.reference, pair.candidate)
    wanted = implementation_of(setting)
    trust = _measured(pair.reference, pair.noise[0])
    for run in sorted(pair.noise, key=lambda run: run.name != wanted):
        trust = _measured(pair.reference, run)
        if any(row.metrics["relative_l2"] for row in trust):
            break
    usual = {(r.site, r.slot, r.visit): r.metrics["relative_l2"] for r in trust}
    # What the trusted run does not have (fused attention gives no weights) cannot be judged.
    rows = [row for row in rows if (row.site, row.slot, row.visit) in usual]

    def limit(row: Row) -> float:
        return allowed * max(usual[row.site, row.slot, row.visit], 1e-7)

    return _rows(pair, rows, [r for r in rows if not r.metrics["relative_l2"] <= limit(r)])


METHODS = {
    "replay": by_replay,
    "noise": by_noise,
    "two runs": by_two_runs,
    "fixed tolerance": by_fixed_tolerance,
    "three-way": by_three_ways,
}
"""How a trial can be judged, by name."""
