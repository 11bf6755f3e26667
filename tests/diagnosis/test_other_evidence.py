"""Where replay says nothing, noise runs and the growth of the error are asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from planted_bugs import BUGS
from small_models import llama, replayed, run_of, tokens, twin

import driftline
from driftline.diagnosis.api import diagnose
from driftline.diagnosis.evidence.files import ReplayedSite, open_noise
from driftline.testing.faults import FAULTS, Setting
from driftline.testing.faults.trials import METHODS, planted


@pytest.mark.parametrize("amount", [1.0, 0.25])
def test_a_block_given_another_kind_of_mask_is_judged_by_the_noise_runs(amount: float) -> None:
    """SDPA wants booleans, eager attention floats: such a replay is another computation.

    Unless the masks say the same, and the replay was given its own.
    """
    setting = Setting("bert", "fp32", 0, FAULTS["residual lost"], amount)
    pair = planted(setting)
    told = diagnose(pair.reference, pair.candidate, replay=pair.replay, noise=pair.noise)
    assert (told.evidence["by"], told.first_site) == ("replay", pair.site)
    sites = {name: each._replace(masks=frozenset()) for name, each in pair.replay.sites.items()}
    pair = pair._replace(replay=pair.replay._replace(sites=sites))
    found = METHODS["replay"](setting, pair)
    assert found.detected
    assert found.exact, found
    assert found.cause != "activation"  # a block is no function of single values
    told = diagnose(pair.reference, pair.candidate, replay=pair.replay, noise=pair.noise)
    assert told.evidence["by"] == "noise"
    assert "replay says nothing of it" in told.site(pair.site).reason
    assert "other attention" in told.evidence["noise_runs"]["used"]


def test_without_noise_runs_growth_is_asked() -> None:
    reference, ids = llama(0), tokens(0)
    theirs = run_of(twin(reference, torch.float32, BUGS["scale"].plant), ids)
    replay = replayed(reference, theirs, ids)
    said = {each.key.site for each in theirs.records}
    nothing = {site: ReplayedSite("unknown", "it was compiled", None) for site in said}
    found = diagnose(run_of(reference, ids), theirs, replay=replay._replace(sites=nothing))
    assert found.first_site == "model.layers.2.mlp.down_proj"
    assert found.evidence["by"] == "growth"


@pytest.mark.parametrize(
    ("trouble", "reproduced", "status"),
    [
        ("it was compiled", None, "introduced"),
        ("it draws random numbers", None, "introduced"),
        ("it draws random numbers", False, "unknown"),
        ("its own output is not reproduced", False, "unknown"),
    ],
)
def test_growth_convicts_where_replay_is_silent_and_suspects_where_it_contradicts_itself(
    trouble: str, reproduced: bool | None, status: str
) -> None:
    """Two runs alone convict it: a replay that says nothing of it makes no PASS of that."""
    reference, ids = llama(0), tokens(0)
    theirs = run_of(twin(reference, torch.float32, BUGS["scale"].plant), ids)
    replay = replayed(reference, theirs, ids)
    sites = {each.key.site: ReplayedSite("unknown", trouble, reproduced) for each in theirs.records}
    found = diagnose(run_of(reference, ids), theirs, replay=replay._replace(sites=sites))
    guilty = "model.layers.2.mlp.down_proj"
    assert found.site(guilty).status == status
    convicted = {each.site for each in found.sites if each.status == "introduced"}
    around = {"(root)", *(guilty.rsplit(".", up)[0] for up in range(5))}  # and what contains it
    assert convicted <= around if status == "introduced" else not convicted
    told = "\n".join(found.sentences)
    assert guilty in told
    assert found.verdict == ("fail" if status == "introduced" else "incomplete")


def test_an_unknown_site_that_nothing_convicts_stays_unknown() -> None:
    reference, ids = llama(0), tokens(0)
    theirs = run_of(twin(reference, torch.bfloat16), ids)
    replay = replayed(reference, theirs, ids)
    site = "model.layers.2.mlp.down_proj"
    replay = replay._replace(sites={site: ReplayedSite("unknown", "it was compiled", None)})
    found = diagnose(run_of(reference, ids), theirs, replay=replay)
    assert found.verdict == "pass"
    assert found.site(site).status == "unknown"
    judged = sum(each.status != "unknown" for each in found.sites)
    assert found.sentences[0] == (
        f"No site of {judged} introduces error beyond noise (1 more could not be judged)."
    )


def test_a_variant_that_is_bit_for_bit_another_one_is_no_second_witness(tmp_path: Path) -> None:
    model, ids = llama(0), tokens(0)
    for name in ("plain", "fused"):
        with torch.no_grad(), driftline.capture(model, tmp_path / name):
            model(input_ids=ids)
    told = [
        {"name": "plain", "folder": "plain", "status": "made"},
        {"name": "fused", "folder": "fused", "status": "same", "reason": "the outputs of plain"},
    ]
    (tmp_path / "noise.json").write_text(json.dumps({"schema": 1, "variants": told}))
    assert [run.name for run in open_noise([tmp_path])] == ["plain"]
