"""Rates are counted on halves, substitution is read, and a site may disagree with itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from planted_bugs import BUGS
from small_models import array_run, llama, replayed, run_of, tokens, twin

from driftline.diagnosis.api import diagnose
from driftline.diagnosis.evidence.files import ReplayedSite
from driftline.errors import BadFile
from driftline.runs.records import TensorKey
from driftline.runs.run import Run

GUILTY = "model.layers.2.mlp.down_proj"


@pytest.fixture(scope="module")
def pair() -> tuple[Any, torch.Tensor, Run, Run]:
    reference, ids = llama(0), tokens(0)
    theirs = run_of(twin(reference, torch.float32, BUGS["scale"].plant), ids)
    return reference, ids, run_of(reference, ids), theirs


def _bisection(**changes: Any) -> dict[str, Any]:
    told = {
        "schema": 1,
        "verdict": "found",
        "site": GUILTY,
        "metric": "relative_l2",
        "baseline": 0.2,
        "before": 0.2,
        "after": 0.004,
        "explains": 0.98,
        "executions": 11,
    }
    return told | changes


def test_what_a_bisection_measured_takes_the_place_of_the_estimate(
    pair: tuple[Any, Any, Run, Run], tmp_path: Path
) -> None:
    _, _, ours, theirs = pair
    estimate = diagnose(ours, theirs)
    assert estimate.evidence["explains_by"].startswith("estimate")
    assert any("--bisect" in need for need in estimate.needs)
    file = tmp_path / "bisect.json"
    file.write_text(json.dumps(_bisection()))
    found = diagnose(ours, theirs, bisect=file)
    assert found.first_site == GUILTY
    assert found.explains == 0.98
    assert "falls from 0.2 to 0.004 (`driftline bisect`, 11 executions)" in found.sentences[2]
    assert found.evidence["explains_by"].startswith("substitution")
    assert found.evidence["bisect"]["executions"] == 11
    assert found.confidence > estimate.confidence
    assert not any("substitution" in need for need in found.needs)


@pytest.mark.parametrize(
    ("changes", "explains", "said"),
    [
        ({"site": "model.layers.2"}, 0.98, "with 'model.layers.2' corrected"),
        ({"site": "model.layers.0.mlp"}, 0.98, "with it corrected"),
        ({"verdict": "spread", "site": "", "explains": 0.2}, None, "No single block"),
        ({"verdict": "same", "site": "", "explains": 0.0}, 0.0, "has no error"),
    ],
)
def test_what_a_bisection_says_otherwise_is_said(
    pair: tuple[Any, Any, Run, Run], changes: dict[str, Any], explains: float | None, said: str
) -> None:
    _, _, ours, theirs = pair
    found = diagnose(ours, theirs, bisect=_bisection(**changes))
    assert found.explains == explains
    assert said in found.sentences[2]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"verdict": "found"}', '{"verdict": 3}'])
def test_a_file_that_is_no_bisection_is_a_sentence(
    pair: tuple[Any, Any, Run, Run], text: str, tmp_path: Path
) -> None:
    _, _, ours, theirs = pair
    file = tmp_path / "bisect.json"
    file.write_text(text)
    with pytest.raises(BadFile):
        diagnose(ours, theirs, bisect=file)


def test_a_site_that_disagrees_with_itself_is_not_guilty_by_noise_either(
    pair: tuple[Any, Any, Run, Run],
) -> None:
    """Nor is anything around it: nobody is left to blame, and yet nothing is proven clean."""
    reference, ids, ours, theirs = pair
    failed = ReplayedSite("unknown", "applied again it gives something else", False)
    replay = replayed(reference, theirs, ids)
    parents = ("model.layers.2.mlp", "model.layers.2", "model", "(root)")
    sites = {GUILTY: failed} | {name: ReplayedSite("skipped", "no", None) for name in parents}
    # What replay says nothing of may be convicted by growth: leave out what is around it, too.
    sites |= dict.fromkeys(parents, failed)
    noise = [run_of(twin(reference, torch.float32), tokens(0), name=f"noise {at}") for at in (0, 1)]
    found = diagnose(ours, theirs, replay=replay._replace(sites=sites), noise=noise)
    assert found.verdict == "incomplete"
    assert found.exit_code == 2
    assert not found.culprits and not found.first_site
    assert found.site(GUILTY).status == "unknown"
    assert GUILTY in found.evidence["suspects"]
    assert "nothing can be concluded from it" in found.sentences[1]


def _rows(seed: int, scale: float, dtype: Any = np.float32) -> dict[TensorKey, np.ndarray]:
    """Twenty tensors, off by some noise of their own each time."""
    found: dict[TensorKey, np.ndarray] = {}
    for at in range(20):
        right = np.random.default_rng(at).standard_normal((32, 16))
        noise = np.random.default_rng(1000 * seed + at).standard_normal((32, 16))
        found[TensorKey.of(f"layer.{at}", "output")] = (right + scale * noise).astype(dtype)
    return found


def test_the_rate_of_false_alarms_is_counted_on_halves_of_the_tokens() -> None:
    ours = array_run(_rows(0, 0.0))
    trusted = [array_run(_rows(seed, 1e-3), name=f"noise {seed}") for seed in (1, 2, 3)]
    found = diagnose(ours, array_run(_rows(9, 1e-3)), noise=trusted)
    assert found.verdict == "pass"
    counted = found.evidence["false_alarms"]
    assert counted == {"by": "noise runs", "tested": 60, "screened": 0, "confirmed": 0}
    assert found.false_alarm_rate == pytest.approx(1 / 61, rel=0.01)


def test_trusted_runs_that_disagree_raise_the_rate() -> None:
    """One of three trusted runs is 30 times as far off at one tensor: it would be an alarm."""
    ours = array_run(_rows(0, 0.0))
    runs = [_rows(seed, 1e-3) for seed in (1, 2, 3)]
    key = TensorKey.of("layer.7", "output")
    runs[2][key] = _rows(3, 3e-2)[key]
    trusted = [array_run(run, name=f"noise {at}") for at, run in enumerate(runs)]
    found = diagnose(ours, array_run(_rows(9, 1e-3)), noise=trusted)
    assert found.evidence["false_alarms"]["confirmed"] == 1
    assert found.false_alarm_rate == pytest.approx(2 / 61, rel=0.01)


@pytest.mark.parametrize(("units", "verdict"), [(2.0, "pass"), (40.0, "fail")])
def test_units_of_float32_are_allowed_where_no_trusted_run_tried_another_order(
    units: float, verdict: str
) -> None:
    ours = _rows(0, 0.0, np.float32)
    still = TensorKey.of("layer.7", "output")
    trusted = [_rows(seed, 1e-7, np.float32) | {still: ours[still]} for seed in (1, 2, 3)]
    theirs = _rows(9, 1e-7, np.float32)
    signs = np.where(np.arange(32 * 16).reshape(32, 16) % 2, 1.0, -1.0)
    theirs[still] = (ours[still] * (1.0 + units * 2.0**-24 * signs)).astype(np.float32)
    runs = [array_run(run, name=f"noise {at}") for at, run in enumerate(trusted)]
    found = diagnose(array_run(ours), array_run(theirs), noise=runs)
    assert found.verdict == verdict
    assert (found.first_site or "layer.7") == "layer.7"


def test_one_noise_run_cannot_carry_a_rate() -> None:
    ours = array_run(_rows(0, 0.0))
    found = diagnose(ours, array_run(_rows(9, 1e-3)), noise=[array_run(_rows(1, 1e-3))])
    assert found.false_alarm_rate is None
