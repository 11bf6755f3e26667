"""Real small models with one planted bug each, judged by replay: site, cause and rows flagged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted_bugs import BUGS, attention, fused, site_of
from small_models import gpt2, llama, replayed, run_of, tokens, twin

from driftline.diagnosis.api import diagnose
from driftline.diagnosis.evidence.files import ReplayedSite
from driftline.testing.faults.variants import in_format

MODELS = {"llama": llama, "gpt2": gpt2}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make in MODELS.items():
        model, ids = make(0), tokens(0)
        found[name] = model, ids, run_of(model, ids)
    return found


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("llama", "float32"),
        ("gpt2", "bfloat16"),
        pytest.param("llama", "bfloat16", marks=pytest.mark.slow),
        pytest.param("gpt2", "float32", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_at_its_module_with_its_cause(
    bug: str, model: str, dtype: str, references: dict[str, Any]
) -> None:
    reference, ids, ours = references[model]
    planted = BUGS[bug]
    torch.manual_seed(0)
    candidate = twin(reference, DTYPES[dtype], planted.plant)
    site = site_of(candidate, planted.where(candidate))
    theirs = run_of(candidate, ids)
    found = diagnose(ours, theirs, replay=replayed(reference, theirs, ids))
    assert found.verdict == "fail"
    assert found.first_site == site, str(found)
    assert found.cause == planted.cause, found.evidence["cause"]
    assert found.site(site).status == "introduced"
    # The culprit and what contains it; nothing that only inherits.
    guilty = [s for s in found.sites if s.status == "introduced"]
    assert len(guilty) <= 5
    assert all(s.site == site or s.inside == site for s in guilty)
    assert len(found.sentences) == 3
    assert 0.5 < found.confidence <= 1.0
    assert found.false_alarm_rate is not None
    assert found.false_alarm_rate < 1e-3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "way",
    [
        "eager and fused",
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("same", "eager", "fused")),
    ],
)
def test_no_clean_pair_raises_an_alarm(model: str, dtype: str, way: str) -> None:
    make = MODELS[model]
    for seed, shape in ((0, (4, 48)), (1, (1, 512)), (2, (2, 8))):
        reference, ids = make(seed), tokens(seed, shape)
        candidate = make(seed, attention="eager" if "eager" in way else "sdpa")
        candidate = candidate.to(DTYPES[dtype])
        if "fused" in way:
            fused(candidate)
        theirs = run_of(candidate, ids)
        found = diagnose(run_of(reference, ids), theirs, replay=replayed(reference, theirs, ids))
        assert found.verdict == "pass", str(found)
        assert found.cause == "noise"
        assert {s.status for s in found.sites} == {"clean"}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_alarms_do_not_grow_with_the_number_of_tokens(model: str) -> None:
    make = MODELS[model]
    worst = []
    for shape in ((1, 256), (2, 1000), (16, 1000)):
        reference, ids = make(3), tokens(3, shape)
        # As loaders do it: frequencies of rotary positions stay in float32. In bfloat16 they are
        # too coarse for a thousand positions, which is a fault.
        candidate = fused(in_format(make(3, attention="eager"), {}, "bf16")[0])
        theirs = run_of(candidate, ids)
        found = diagnose(run_of(reference, ids), theirs, replay=replayed(reference, theirs, ids))
        assert found.verdict == "pass", str(found)
        worst.append(max(s.ratio for s in found.sites))
    assert max(worst) < 0.95


def _sharper(model: Any) -> None:
    attention(model).scaling *= 1.3


def _unmasked(model: Any) -> None:
    def see_all(module: Any, args: Any, kwargs: Any) -> Any:
        mask = torch.zeros(1, 1, 48, 48, dtype=next(module.parameters()).dtype)
        return args, {**kwargs, "attention_mask": mask}

    attention(model).is_causal = False
    attention(model).register_forward_pre_hook(see_all, with_kwargs=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("plant", "cause"), [(_sharper, "scale"), (_unmasked, "mask")])
def test_a_bug_of_an_attentions_own_code_is_not_blamed_on_its_parts(
    plant: Any, cause: str, dtype: str, references: dict[str, Any]
) -> None:
    reference, ids, ours = references["llama"]
    candidate = twin(reference, DTYPES[dtype], plant)
    theirs = run_of(candidate, ids)
    found = diagnose(ours, theirs, replay=replayed(reference, theirs, ids))
    assert found.first_site == "model.layers.2.self_attn"
    assert found.cause == cause, found.evidence["cause"]
    assert "it is the attention" in found.sentences[1]


def test_a_replay_that_keeps_what_own_code_hands_to_parts_judges_that_code(
    references: dict[str, Any],
) -> None:
    """As `driftline replay` does it: parts are answered, so the output itself says nothing."""
    reference, ids, ours = references["llama"]
    candidate = twin(reference, torch.float32, _sharper)
    theirs = run_of(candidate, ids)
    whole = replayed(reference, theirs, ids)
    site = "model.layers.2.self_attn"
    own = {site: ReplayedSite(applied="own code")}
    # Without it: the answered output is the candidate's own, and growth speaks instead.
    blind = whole._replace(
        exact=_with(whole.exact, theirs, site, "output"),
        native=_with(whole.native, theirs, site, "output"),
        sites=own,
    )
    silent = {
        f"model.layers.{n}{rest}": ReplayedSite("skipped") for n in range(4) for rest in ("",)
    }
    silent |= {"model": ReplayedSite("skipped"), "(root)": ReplayedSite("skipped")}
    blind = blind._replace(sites={**own, **silent})
    assert diagnose(ours, theirs, replay=blind).first_site == site
    handed = f"{site}.o_proj"
    seeing = blind._replace(
        exact=_with(blind.exact, ours, handed, "input"),
        native=_with(blind.native, ours, handed, "input"),
    )
    found = diagnose(ours, theirs, replay=seeing)
    assert found.first_site == site
    assert found.evidence["by"] == "replay"


def _with(run: Any, source: Any, site: str, port: str) -> Any:
    """A run with the tensors of another at one place."""
    from driftline.runs.memory import MemorySink

    sink = MemorySink()
    for record in run.records:
        if (record.key.site, record.key.port) != (site, port):
            sink.put(record, run.raw(record).view("uint8"))
    for record in source.records:
        if (record.key.site, record.key.port) == (site, port):
            sink.put(record, source.raw(record).view("uint8"))
    return sink.run()


def test_a_site_whose_replay_does_not_reproduce_is_unknown_not_guilty(
    references: dict[str, Any],
) -> None:
    reference, ids, ours = references["llama"]
    candidate = twin(reference, torch.float32, BUGS["scale"].plant)
    theirs = run_of(candidate, ids)
    replay = replayed(reference, theirs, ids)
    site = "model.layers.2.mlp.down_proj"
    replay = replay._replace(sites={site: ReplayedSite("replayed", "a cache", reproduced=False)})
    found = diagnose(ours, theirs, replay=replay)
    assert found.site(site).status == "unknown"
    assert found.first_site == "model.layers.2.mlp"
    assert any("say nothing" in need for need in found.needs)
    skipped = replay._replace(sites={site: ReplayedSite("skipped", "not selected")})
    assert diagnose(ours, theirs, replay=skipped).site(site).status == "unknown"


def test_a_replay_without_native_runs_still_finds_the_gross_bug(
    references: dict[str, Any],
) -> None:
    reference, ids, ours = references["llama"]
    candidate = twin(reference, torch.bfloat16, BUGS["relu"].plant)
    theirs = run_of(candidate, ids)
    replay = replayed(reference, theirs, ids)._replace(native=None)
    found = diagnose(ours, theirs, replay=replay)
    assert found.first_site == "model.layers.2.mlp.act_fn"
    clean = twin(reference, torch.bfloat16)
    theirs = run_of(clean, ids)
    replay = replayed(reference, theirs, ids)._replace(native=None)
    assert diagnose(ours, theirs, replay=replay).verdict == "pass"


def test_bits_that_change_below_noise_are_seen_by_their_lean(references: dict[str, Any]) -> None:
    """A weight scaled by 0.4 %: half a unit of roundoff of bfloat16."""
    reference, ids, ours = references["llama"]

    def scaled(model: Any) -> None:
        query = model.model.layers[2].self_attn.q_proj
        old = query.weight.data.clone()
        query.weight.data = (old.float() * 1.004).to(old.dtype)
        assert not torch.equal(query.weight.data, old)

    candidate = twin(reference, torch.bfloat16, scaled)
    theirs = run_of(candidate, ids)
    found = diagnose(ours, theirs, replay=replayed(reference, theirs, ids))
    assert found.first_site == "model.layers.2.self_attn.q_proj"
    assert found.cause == "scale"
    assert [s.site for s in found.sites if s.status == "introduced"] == [found.first_site]
