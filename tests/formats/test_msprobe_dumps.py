"""Dumps that MindStudio Probe really wrote (tests/data/msprobe/make.py), and damaged copies."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from driftline import compare, open_run
from driftline.errors import BadFile

DATA = Path(__file__).parents[1] / "data" / "msprobe"


def _reference() -> dict[str, np.ndarray]:
    """The same model, computed here."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("msprobe_make", DATA / "make.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    torch.manual_seed(0)
    model = made.Tiny()
    ids = torch.tensor([[1, 2, 3]])
    logits = model(ids)
    logits.retain_grad()
    loss = torch.nn.functional.cross_entropy(logits.reshape(3, 11), ids.reshape(3))
    loss.backward()
    return {
        "logits": logits.detach().numpy(),
        "logits_grad": logits.grad.numpy(),
        "head_grad": model.head.weight.grad.numpy(),
        "head": model.head.weight.detach().numpy(),
        "down_grad": model.block.down.weight.grad.numpy(),
    }


def test_a_module_dump_holds_what_the_model_computed() -> None:
    run = open_run(DATA / "L0_tensor")
    expected = _reference()
    assert run.manifest["level"] == "L0"
    close = {"rtol": 1e-4, "atol": 1e-6}
    assert np.allclose(run.get("head").numpy(), expected["logits"], **close)
    assert np.allclose(run.get("head", "grad_output").numpy(), expected["logits_grad"], **close)
    assert np.allclose(run.get("head", "param", "weight").numpy(), expected["head"], **close)
    grad = run.get("head", "param_grad", "weight").numpy()
    assert np.allclose(grad, expected["head_grad"], **close)
    grad = run.get("block.down", "param_grad", "weight").numpy()
    assert np.allclose(grad, expected["down_grad"], **close)


def test_calls_are_visits_and_classes_are_known() -> None:
    run = open_run(DATA / "L0_tensor")
    second = run.get("block.up", visit=1)
    assert second.record.class_name == "Linear"
    assert not np.array_equal(second.numpy(), run.get("block.up").numpy())
    assert run.get("block", "grad_input", visit=1).key.phase == "backward"


def test_the_construct_gives_the_module_tree() -> None:
    tree = open_run(DATA / "L0_tensor").topology()
    assert tree is not None
    roots = {root["site"]: root for root in tree["roots"]}
    assert set(roots) == {"embed", "block", "head"}
    assert [child["name"] for child in roots["block"]["children"]] == ["norm", "up", "down"]
    assert open_run(DATA / "L1_tensor").topology() is None


def test_functions_are_sites_with_their_call_as_visit() -> None:
    run = open_run(DATA / "L1_tensor")
    assert len(run) == 76
    logits = run.get("Functional.linear", visit=4)
    modules = open_run(DATA / "L0_tensor")
    assert np.array_equal(logits.numpy(), modules.get("head").numpy())
    assert logits.record.class_name == "linear"
    upstream = run.get("Functional.linear", "grad_output", visit=4).numpy()
    assert np.array_equal(upstream, modules.get("head", "grad_output").numpy())


@pytest.mark.parametrize("level", ["L0", "L1"])
def test_statistics_agree_with_the_tensors_they_were_made_of(level: int) -> None:
    tensors = open_run(DATA / f"{level}_tensor")
    statistics = open_run(DATA / f"{level}_statistics")
    assert {r.key for r in tensors.records} == {r.key for r in statistics.records}
    for record in statistics.records:
        assert record.kept == "summary"
        known = record.summary
        assert known is not None
        values = tensors.raw(next(r for r in tensors.records if r.key == record.key))
        assert known.max == pytest.approx(values.max(), abs=1e-6)
        assert math.isnan(known.std)
        assert not known.sketch
        if record.dtype == "float32":
            assert known.l2 == pytest.approx(np.linalg.norm(values), rel=1e-5)
    table = compare(tensors, statistics)
    assert not [row for row in table.rows if row.status == "fail"]


def test_mix_tensors_are_those_of_the_modules_and_their_statistics() -> None:
    whole = open_run(DATA / "mix_tensor")
    assert len(whole) == 139
    assert not [record for record in whole.records if whole.lost(record)]
    for other in ("L0_tensor", "mix_statistics"):
        table = compare(DATA / "mix_tensor", DATA / other)
        assert table.verdict == "pass", table.finding
        assert sum(row.compared for row in table.rows) > 50


def test_mix_holds_modules_and_functions() -> None:
    sites = open_run(DATA / "mix_statistics").sites()
    assert "block.up" in sites
    assert "Functional.linear" in sites


def test_it_opens_at_the_step_and_at_the_rank_too() -> None:
    whole = open_run(DATA / "L0_tensor")
    step = DATA / "L0_tensor" / "step0"
    for path in (step, step / "proc0"):
        assert {r.key for r in open_run(path).records} == {r.key for r in whole.records}


def test_steps_and_ranks_come_from_the_folders(tmp_path: Path) -> None:
    for step in (0, 10):
        for rank in ("rank0", "rank1"):
            shutil.copytree(
                DATA / "L0_statistics" / "step0" / "proc0", tmp_path / f"step{step}" / rank
            )
    keys = [record.key for record in open_run(tmp_path).records]
    assert {(key.step, key.rank) for key in keys} == {(0, 0), (10, 0), (0, 1), (10, 1)}


def test_a_missing_and_a_damaged_file_are_losses(tmp_path: Path) -> None:
    shutil.copytree(DATA / "L0_tensor", tmp_path / "dump")
    data = tmp_path / "dump" / "step0" / "proc0" / "dump_tensor_data"
    (data / "Module.head.Linear.forward.0.output.0.pt").unlink()
    (data / "Module.head.Linear.forward.0.input.0.pt").write_bytes(b"nothing")
    run = open_run(tmp_path / "dump")
    assert len(run) == 63
    assert "is not there" in run.get("head").lost
    assert run.get("head", "input").lost
    assert len(run.losses) == 2


@pytest.mark.parametrize("name", ["../../../secret.pt", "/etc/passwd", "a/../../../secret.pt"])
def test_a_name_that_leads_out_of_the_dump_is_not_followed(tmp_path: Path, name: str) -> None:
    shutil.copytree(DATA / "L0_tensor", tmp_path / "dump")
    torch.save(torch.ones(3), tmp_path / "secret.pt")
    place = tmp_path / "dump" / "step0" / "proc0" / "dump.json"
    dump = json.loads(place.read_text())
    dump["data"]["Module.head.Linear.forward.0"]["output"][0]["data_name"] = name
    place.write_text(json.dumps(dump))
    assert "is not there" in open_run(tmp_path / "dump").get("head").lost


@pytest.mark.parametrize(
    "text", ["", "[]", '{"data": 3}', "{" * 100_000, '{"data": {"Module.a.B.forward.0"']
)
def test_a_dump_that_is_no_json_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    place = tmp_path / "step0" / "rank0"
    place.mkdir(parents=True)
    (place / "dump.json").write_text(text)
    with pytest.raises(BadFile, match="cannot be read"):
        open_run(tmp_path)


def test_odd_entries_are_no_traceback(tmp_path: Path) -> None:
    place = tmp_path / "step0" / "rank0"
    place.mkdir(parents=True)
    odd = {"type": "torch.Tensor", "dtype": "torch.qint8", "shape": ["x", -1], "Max": "nan"}
    fine = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "md5": "abcd1234"}
    (place / "dump.json").write_text(
        json.dumps(
            {
                "data": {
                    "nonsense": {},
                    "Functional.relu.0.forward": {"input_args": [odd, None], "output": [fine]},
                    "Functional.add.0.forward": [],
                }
            }
        )
    )
    run = open_run(tmp_path)
    assert "not known" in run.get("Functional.relu", "input").lost
    assert run.get("Functional.relu").record.kept == "digest"
    assert len(list(run.events())) == 2
