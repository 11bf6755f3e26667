"""hf://: the hub's own client against a hub on loopback."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec.config
import pytest
from hub_server import REPOSITORY, Hub, serving

import driftline as api

ADDRESS = f"hf://datasets/{REPOSITORY}"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub")
    found = Hub()
    with serving(found.handler) as address:
        how = {"endpoint": address, "token": "hf_of_a_test", "skip_instance_cache": True}
        monkeypatch.setitem(fsspec.config.conf, "hf", how)
        yield found


def test_runs_on_a_hub_compare_as_those_in_folders_and_are_read_in_ranges(
    hub, pair_of_runs, driftline
):
    ref, cand = pair_of_runs
    assert driftline("push", ref, f"{ADDRESS}/ref").code == 0
    assert driftline("push", cand, f"{ADDRESS}/cand").code == 0
    shard = "ref/rank0/tensors-00000.safetensors"
    assert hub.files[shard] == (ref / "rank0/tensors-00000.safetensors").read_bytes()

    here, there = api.compare(ref, cand), api.compare(f"{ADDRESS}/ref", f"{ADDRESS}/cand")
    assert list(there.rows) == list(here.rows) and there.verdict == here.verdict
    assert {name for name, *_ in hub.ranges} >= {shard, "ref/run.json", "cand/run.json"}

    there.write(f"{ADDRESS}/table")
    assert api.open_table(f"{ADDRESS}/table").as_json()["rows"] == here.as_json()["rows"]


def test_one_layer_of_a_run_on_a_hub_is_fetched_without_the_others(hub, pair_of_runs, driftline):
    api.push(pair_of_runs[0], f"{ADDRESS}/ref")
    run = api.open_run(f"{ADDRESS}/ref")
    first = next(iter(run.tensors()))
    hub.ranges.clear()
    values = first.numpy()
    assert values.tobytes() == next(iter(api.open_run(pair_of_runs[0]).tensors())).numpy().tobytes()
    assert [name for name, *_ in hub.ranges] == ["ref/rank0/tensors-00000.safetensors"]


def test_what_is_on_a_hub_is_not_overwritten_and_what_is_not_is_said(hub, pair_of_runs, driftline):
    api.push(pair_of_runs[0], f"{ADDRESS}/ref")
    said = driftline("push", pair_of_runs[1], f"{ADDRESS}/ref")
    assert said.code == 2 and "exists and is not empty" in said.err
    said = driftline("show", f"{ADDRESS}/nothing")
    assert said.code == 2 and f"there is nothing at {ADDRESS}/nothing" in said.err
