"""One trial: both sides captured in memory, compared and diagnosed, and what was said of them."""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import driftline
from benchmarks.clean_pairs.pairs import Pair, sides
from driftline.comparison.table.table import Table
from driftline.comparison.tolerance.defaults import LIMITS
from driftline.diagnosis.result import Diagnosis
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run
from driftline.testing.faults import Specimen
from driftline.testing.faults.trials import apart

LOUD = 0.05
"""Relative error of an arriving tensor beside which a fault of 20 % is no longer plain."""
RATE = 1e-3
_MASKED = 1e30
"""Numbers of this size mask something."""


def clean_trial(pair: Pair) -> dict[str, Any]:
    """Capture, compare and diagnose one clean pair."""
    begin = time.perf_counter()
    result: dict[str, Any] = {"set": "clean", "name": pair.name, "pair": pair._asdict()}
    result |= {"family": pair.family, "kind": pair.kind}
    try:
        prepare(pair.candidate)
        reference, candidate = sides(pair)
        first, truth = execute(reference, pair, is_candidate=False)
        second, output = execute(candidate, pair, is_candidate=True)
        table = driftline.compare(first, second, threads=1)
        result |= {"compare": said_by_compare(table), **figures(table, truth, output)}
        result["unfit"] = _does_not_fit(first, table)
        result["diagnose"] = said_by_diagnose(driftline.diagnose(first, second, threads=1))
        result["reason_is_true"] = _is_true(pair, result)
    except Exception as problem:  # a trial that breaks is a finding of its own
        result["broken"] = f"{type(problem).__name__}: {problem}"[:500]
    result["seconds"] = round(time.perf_counter() - begin, 2)
    return result


def prepare(candidate: str) -> None:
    """One thread, nothing compiled for earlier trials, no advice on configurations this small."""
    for package in ("transformers", "diffusers"):
        logging.getLogger(package).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if candidate.startswith("compiled"):
        torch._dynamo.reset()
        torch._dynamo.config.recompile_limit = 64


def execute(side: Specimen, pair: Pair, *, is_candidate: bool) -> tuple[Run, torch.Tensor]:
    """Run one side under capture; the run and the model's first output of the last step."""
    sink = MemorySink(name="candidate" if is_candidate else "reference")
    levels = ["modules"]
    if pair.steps:
        levels.append("gradients")
    if pair.params:
        levels.append("params")
    torch.set_num_threads(2 if is_candidate and pair.candidate == "two threads" else 1)
    autocast = is_candidate and pair.candidate == "bf16 autocast"
    torch.manual_seed(5)  # for what is drawn inside a model
    with contextlib.ExitStack() as stack:
        if not pair.steps:
            stack.enter_context(torch.no_grad())
        if autocast and not pair.steps:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        stack.enter_context(driftline.capture(side.model, sink, levels=levels))
        if pair.steps:
            output = _train(side, pair, autocast)
        else:
            output = first_tensor(side.model(**side.inputs))
    torch.set_num_threads(1)
    return sink.run(), output.detach().float()


def _train(side: Specimen, pair: Pair, autocast: bool) -> torch.Tensor:
    """Some steps; dropout stays off, because its draws depend on the number format."""
    for module in side.model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train()
    optimizer = getattr(torch.optim, pair.optimizer)(side.model.parameters(), lr=RATE)
    output = torch.empty(0)
    for _ in range(pair.steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = first_tensor(side.model(**side.inputs))
        _loss(output.float(), pair).backward()
        optimizer.step()
        optimizer.zero_grad()
    return output


def _loss(output: torch.Tensor, pair: Pair) -> torch.Tensor:
    """Cross entropy with classes, or squares of differences from a picture, drawn once."""
    generator = torch.Generator().manual_seed(pair.seed + 3)
    if output.dim() == 4:
        return (output - torch.randn(output.shape, generator=generator)).square().mean()
    rows = output.flatten(0, -2)
    classes = torch.randint(0, rows.shape[1], (len(rows),), generator=generator)
    return nn.functional.cross_entropy(rows, classes)


def first_tensor(value: Any) -> torch.Tensor:
    """The model's result: the first tensor; of a list of refinements, the last."""
    while not isinstance(value, torch.Tensor):
        if isinstance(value, Mapping):
            value = next(v for v in value.values() if v is not None)
        else:
            value = value[-1] if isinstance(value, list) else value[0]
    return value


# What was said.


def said_by_compare(table: Table) -> dict[str, Any]:
    """Verdict, first site and sentence of a table."""
    failing = sum(row.status == "fail" for row in table.rows)
    return {
        "verdict": table.verdict,
        "first_site": table.first_site,
        "reason": table.finding[:600],
        "failing_rows": failing,
    }


def said_by_diagnose(diagnosis: Diagnosis) -> dict[str, Any]:
    """The same of a diagnosis."""
    return {
        "verdict": diagnosis.verdict,
        "first_site": diagnosis.first_site,
        "reason": " ".join(diagnosis.sentences)[:600],
        "cause": diagnosis.cause,
    }


def figures(table: Table, truth: torch.Tensor, output: torch.Tensor) -> dict[str, Any]:
    """What the verdicts can be held against: measured without any rule of judging."""
    errors = [
        row.metrics["relative_l2"]
        for row in table.rows
        if row.key.port == "output" and "relative_l2" in row.metrics
    ]
    overflown = any(
        row.metrics.get("one_sided", 0) for row in table.rows if row.key.port == "output"
    )
    return {
        "output_error": apart(truth, output),
        "loud_share": sum(e > LOUD for e in errors) / max(1, len(errors)),
        "rows": len(table.rows),
        "coverage": table.coverage.share,
        "equal_to_the_bit": bool(errors) and not any(errors),
        "one_sided": overflown,
        "vanished": bool(truth.any()) and not bool(output.any()),
    }


def _does_not_fit(reference: Run, table: Table) -> bool:
    """Whether a format cannot hold what the reference computed: one rounding of it is too much.

    Looks at the reference's tensors alone, each rounded once to the candidate's format.
    """
    records = {record.key: record for record in reference.records}
    for row in table.rows:
        if row.key.port != "output" or not row.compared:
            continue
        if row.candidate_dtype not in ("float16", "bfloat16") or row.key not in records:
            continue
        record = records[row.key]
        if record.dtype != "float32" or row.reference_recipe or row.candidate_recipe:
            continue
        if record.kept != "full":  # a later step of a training
            continue
        values = torch.from_numpy(reference.raw(record).copy()).view(torch.float32)
        # Masks are filled with numbers that become infinite; infinities are counted elsewhere.
        values = values[values.abs() < _MASKED]
        rounded = values.to(getattr(torch, row.candidate_dtype)).float()
        limit = LIMITS[row.candidate_dtype]
        if (rounded - values)[rounded.isfinite()].norm() > limit * values.norm():
            return True
    return False


def _is_true(pair: Pair, result: Mapping[str, Any]) -> bool:
    """Whether there is a reason for "could not tell", by what was measured and how it was made.

    Much noise (more than a tenth of the outputs beyond `LOUD`), a program of which the compiler has
    left little to see, tensors that did not meet.
    """
    return (
        result["loud_share"] > 0.1
        or pair.candidate.startswith("compiled")
        or result["coverage"] < 0.75
    )
