"""`ait llm` torch dumps: the golden one, our own, statistics, dumps by hand, and damaged ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from driftline import compare, open_run
from driftline.dialects.ait.dump_tree import AitTree
from driftline.errors import BadFile
from driftline.runs.records import Record, TensorKey

GOLDEN = Path(__file__).parents[1] / "data" / "ascend" / "mini_torch"
TOKEN = GOLDEN / "msit_dump_20240701_121000" / "torch_tensors" / "cpu_4300" / "0"


@pytest.mark.parametrize("level", range(5))
def test_a_dump_opens_at_every_level(level: int) -> None:
    path = [TOKEN, *TOKEN.parents][level]
    run = open_run(path)
    assert run.manifest["format"] == "ait torch dump"
    assert len(run) == 37
    first = run.get("model.layers.3.proj")
    stored = torch.load(TOKEN / "root.model.layers.3.proj" / "output.pth", weights_only=True)
    assert np.array_equal(first.numpy(), stored.numpy())
    assert first.record.class_name == "Linear"
    assert run.get("(root)").record.class_name == "ToyForCausalLM"


def test_the_module_tree_becomes_the_topology_with_ids() -> None:
    tree = open_run(GOLDEN).topology()
    assert tree is not None
    (root,) = tree["roots"]
    assert (root["site"], root["class"], root["ids"]) == ("(root)", "ToyForCausalLM", "")
    (model,) = root["children"]
    layers = next(child for child in model["children"] if child["name"] == "layers")
    assert [child["name"] for child in layers["children"]] == [str(n) for n in range(11)]
    assert layers["children"][10]["ids"] == "0_1_10"
    assert layers["children"][10]["site"] == "model.layers.10"


def test_outputs_come_in_the_order_in_which_modules_end() -> None:
    sites = open_run(GOLDEN).sites()
    assert sites[0] == "model.embed_tokens"
    assert sites.index("model.layers.2") < sites.index("model.layers.10")
    assert sites.index("model.layers.2.proj") < sites.index("model.layers.2")
    assert sites[-1] == "(root)"


def test_what_our_own_tree_writes_is_read_back_key_by_key(tmp_path: Path) -> None:
    tree = AitTree(tmp_path, device="cuda:1")
    values = np.arange(6, dtype=np.float32)
    keys = [
        TensorKey.of("(root)", "input", "ids", step=2),
        TensorKey.of("layers.0.mlp", "output", "0", step=2),
        TensorKey.of("layers.0.attn", "output", "0", step=2),
        TensorKey.of("layers.0.attn", "output", "1.0", step=2),
        TensorKey.of("layers.0.attn", "output", "0", step=2, visit=3),
        TensorKey.of("layers.0.attn", "param", "q_weight", step=2),
        TensorKey.of("layers.0.attn", "param_grad", "q_weight", step=2),
        TensorKey.of("layers.0.attn", "grad_input", "0", step=2)._replace(phase="forward"),
        TensorKey.of("layers.0.attn", "input", "x", step=2)._replace(moment="after"),
    ]
    for key in keys:
        tree.put(Record(key, 0, "float32", (2, 3)), values.view(np.uint8))
    tree.topology(
        {
            "schema": 1,
            "roots": [{"site": "(root)", "class": "Toy", "ids": "", "children": []}],
            "order": [],
        }
    )
    tree.close()
    run = open_run(tmp_path)
    assert {record.key for record in run.records} == {key._replace(rank=1) for key in keys}
    assert all(np.array_equal(t.numpy().ravel(), values) for t in run.tensors())
    assert run.get("(root)", "input", "ids", 2, 1).record.class_name == "Toy"


@pytest.mark.parametrize(
    ("folder", "rank"), [("npu3_77", 3), ("cpu_77", 0), ("77_npu2", 2), ("cuda0_77.1", 0)]
)
def test_the_device_of_a_process_folder_is_its_rank(tmp_path: Path, folder: str, rank: int) -> None:
    place = tmp_path / "ait_dump_20240501" / "torch_tensors" / folder / "4" / "root.norm"
    place.mkdir(parents=True)
    torch.save(torch.ones(2), place / "output_0_1.pth")
    (record,) = open_run(tmp_path).records
    assert str(record.key) == f"rank{rank}/step4/norm/output/0.1"


def test_processes_of_one_rank_are_numbered(tmp_path: Path) -> None:
    for pid in (9, 10):
        place = tmp_path / "ait_dump" / "torch_tensors" / f"cpu_{pid}" / "0" / "root"
        place.mkdir(parents=True)
        torch.save(torch.full((1,), float(pid)), place / "output.pth")
    run = open_run(tmp_path)
    assert [(r.key.rank, r.key.process) for r in run.records] == [(0, 0), (0, 1)]
    assert run.get("(root)", process=1).numpy() == 10.0


HEADER = "NodeName,NodeType,InputOutput,Index,DataType,Shape,Max,Min,Mean,L2Norm\n"


def _statistics(folder: Path, mean: str) -> Path:
    place = folder / "msit_dump_1" / "torch_tensors" / "cpu_1" / "0" / "root.norm"
    place.mkdir(parents=True)
    (place / "statistics.csv").write_text(
        HEADER
        + 'root.norm,RMSNorm,Input,0,torch.float16,"[2, 4]",1.5,-2.5,0.25,3.0\n'
        + f'root.norm,RMSNorm,Output,0,torch.float16,"[2, 4]",1.5,-2.5,{mean},3.0\n'
    )
    return folder


def test_statistics_are_summaries_of_what_is_known(tmp_path: Path) -> None:
    run = open_run(_statistics(tmp_path, "N/A"))
    summary = run.get("norm", "input").summary
    assert summary is not None
    assert (summary.count, summary.min, summary.max, summary.mean) == (8, -2.5, 1.5, 0.25)
    assert summary.l2 == 3.0
    assert np.isnan(summary.std)
    assert not summary.sketch
    assert np.isnan(run.get("norm").summary.mean)  # type: ignore[union-attr]
    assert run.get("norm").record.class_name == "RMSNorm"


def test_statistics_that_differ_are_a_failing_row(tmp_path: Path) -> None:
    ours = _statistics(tmp_path / "a", "0.25")
    theirs = _statistics(tmp_path / "b", "0.75")
    rows = {row.key.port: row.status for row in compare(ours, theirs).rows}
    assert rows["output"] == "fail"


def test_a_dump_made_by_hand_is_read_with_its_list(tmp_path: Path) -> None:
    place = tmp_path / "ait_dump" / "4242_1" / "golden_tensor"
    (place / "3").mkdir(parents=True)
    torch.save(torch.arange(3.0), place / "3" / "logits_tensor.pth")
    pairs = {"logits": {"3": ["golden_tensor/3/logits_tensor.pth", "tensors/x.bin"]}}
    (place / "metadata.json").write_text(json.dumps(pairs))
    for path in (tmp_path, tmp_path / "ait_dump", place.parent):
        run = open_run(path)
        assert run.get("logits", step=3, rank=1).numpy().tolist() == [0, 1, 2]
        assert run.manifest["golden_tensor"] == pairs


def test_unreadable_files_are_rows_with_reasons(tmp_path: Path) -> None:
    place = tmp_path / "ait_dump" / "torch_tensors" / "cpu_1" / "0"
    for name in ("root.a", "root.b", "root.c", "root.d", "root.e"):
        (place / name).mkdir(parents=True)
    torch.save(torch.ones(3), place / "root.a" / "output.pth")
    (place / "root.b" / "output.pth").write_bytes(b"PK\x03\x04 not a zip")
    outside = tmp_path / "outside.pth"
    torch.save(torch.ones(3), outside)
    (place / "root.c" / "output.pth").symlink_to(outside)
    os.mkfifo(place / "root.d" / "output.pth")
    torch.save(torch.ones(300), place / "root.e" / "output.pth")
    whole = (place / "root.e" / "output.pth").read_bytes()
    (place / "root.e" / "output.pth").write_bytes(whole[:700])
    run = open_run(tmp_path / "ait_dump")
    assert run.get("a").has_values
    assert {loss.key.site for loss in run.losses if loss.key} == {"b", "c", "d", "e"}
    assert "leads out" in run.get("c").lost
    table = compare(run, run)
    assert {row.key.site: row.status for row in table.rows} == {
        "a": "pass",
        "b": "incomparable",
        "c": "incomparable",
        "d": "incomparable",
        "e": "incomparable",
    }


def test_a_damaged_tree_is_a_note_and_the_tensors_stay(tmp_path: Path) -> None:
    place = tmp_path / "ait_dump" / "torch_tensors" / "cpu_1"
    (place / "0" / "root").mkdir(parents=True)
    torch.save(torch.ones(3), place / "0" / "root" / "output.pth")
    (place / "model_tree.json").write_text("[" * 100_000)
    run = open_run(tmp_path)
    assert len(run) == 1
    assert "model_tree.json" in next(iter(run.events()))["message"]


def test_a_folder_laid_out_so_without_tensors_says_so(tmp_path: Path) -> None:
    (tmp_path / "ait_dump" / "torch_tensors" / "cpu_1" / "0" / "root").mkdir(parents=True)
    with pytest.raises(BadFile, match="holds no tensor"):
        open_run(tmp_path)
