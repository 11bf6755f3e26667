"""The saving hook of seed 004 on torch models: names, caps, micro steps, and what it fixes."""

from __future__ import annotations

import subprocess
import threading
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import driftline
from driftline import register_hook, register_saving_hook
from driftline.dialects.paddle_hook import files as saved_files
from driftline.dialects.paddle_hook import hook
from driftline.dialects.paddle_hook.hook import wait_until_saved
from driftline.errors import AlreadyThere


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 2)

    def forward(self, ids):
        return self.head(self.block(self.embed(ids)))


def names(folder):
    wait_until_saved()
    return sorted(p.name for p in folder.glob("*.npy"))


def test_tensors_and_gradients_of_chosen_leaf_layers_are_saved_under_the_seeds_names(tmp_path):
    model = Net()
    path = tmp_path / "kept"
    hooked = register_saving_hook(model, path, target_class_names=["Linear", "Sequential"])
    assert hooked is model
    outputs = []
    model.head.register_forward_hook(lambda _m, _i, out: outputs.append(out.detach().clone()))
    for _ in range(2):
        model(torch.tensor([1, 2])).sum().backward()
    assert names(path / "tensors" / "rank_0") == [
        "tensor_idx_0_layer_class_Linear_layer_name_block.0_micro_step_0.npy",
        "tensor_idx_1_layer_class_Linear_layer_name_head_micro_step_0.npy",
        "tensor_idx_2_layer_class_Linear_layer_name_block.0_micro_step_1.npy",
        "tensor_idx_3_layer_class_Linear_layer_name_head_micro_step_1.npy",
    ]  # Sequential is no leaf
    saved = np.load(
        path / "tensors/rank_0/tensor_idx_1_layer_class_Linear_layer_name_head_micro_step_0.npy"
    )
    assert np.array_equal(saved, outputs[0].numpy())
    grads = names(path / "grads" / "rank_0")
    assert len(grads) == 8
    assert all("_of_param_name_" in name and name.startswith("grad_idx_") for name in grads)
    per_step = [n for n in grads if "head.bias" in n]
    first, second = (np.load(path / "grads" / "rank_0" / n) for n in per_step)
    assert np.array_equal(first, second)  # of one micro step each, not accumulated


def test_caps_count_over_all_micro_steps_and_negative_means_all(tmp_path):
    model = Net()
    register_hook(
        model,
        path=tmp_path / "a",
        target_class_names="Linear",
        max_saved_tensors=3,
        max_saved_grads=1,
    )
    register_hook(model, tmp_path / "b", "Linear", -1, -1)
    for _ in range(5):
        model(torch.tensor([1])).sum().backward()
    assert len(names(tmp_path / "a/tensors/rank_0")) == 3
    assert len(names(tmp_path / "a/grads/rank_0")) == 1
    assert len(names(tmp_path / "b/tensors/rank_0")) == 10
    assert len(names(tmp_path / "b/grads/rank_0")) == 20


def test_bfloat16_becomes_float32_and_a_tuple_does_not_raise(tmp_path):
    class Pair(nn.Module):
        def forward(self, x):
            return x, (x + 1, {"more": x + 2})

    model = nn.Sequential(Pair())
    register_saving_hook(model, tmp_path, "Pair")
    model(torch.ones(2, dtype=torch.bfloat16))
    wait_until_saved()
    saved = [np.load(p) for p in sorted((tmp_path / "tensors/rank_0").iterdir())]
    assert [s.dtype for s in saved] == [np.float32] * 3
    assert [float(s[0]) for s in saved] == [1.0, 2.0, 3.0]


def test_a_first_leaf_whose_weights_only_are_read_does_not_count_micro_steps(tmp_path):
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(4, 2), "head": nn.Linear(4, 2)})
    register_saving_hook(model, tmp_path / "kept", target_class_names="Linear")
    for _ in range(2):
        model["head"](model["attention"](*[torch.ones(3, 1, 4)] * 3)[0]).sum().backward()
    assert names(tmp_path / "kept" / "tensors" / "rank_0") == [
        f"tensor_idx_{n}_layer_class_Linear_layer_name_head_micro_step_{n}.npy" for n in (0, 1)
    ]


def test_recomputation_is_not_a_micro_step(tmp_path):
    model = Net()
    register_saving_hook(model, tmp_path, ["Linear", "Embedding"])
    for _ in range(2):
        hidden = checkpoint(
            lambda ids: model.block(model.embed(ids)), torch.tensor([1]), use_reentrant=False
        )
        model.head(hidden).sum().backward()
    steps = [n.rpartition("_")[2] for n in names(tmp_path / "tensors/rank_0")]
    assert sorted(steps) == ["0.npy"] * 3 + ["1.npy"] * 3


def test_without_classes_there_is_nothing_to_do_and_the_model_is_not_lost(tmp_path, capsys):
    model = Net()
    assert register_saving_hook(model, tmp_path / "none") is model
    assert "nothing to save" in capsys.readouterr().err
    model(torch.tensor([1]))
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_hooked_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(ValueError, match="target_class_names"):
        register_saving_hook(Net(), tmp_path, 3)
    with pytest.raises(ValueError, match="max_saved_tensors"):
        register_saving_hook(Net(), tmp_path, "Linear", max_saved_tensors="all")
    with pytest.raises(ValueError, match="torch module"):
        register_saving_hook(object(), tmp_path, "Linear")
    with pytest.raises(ValueError, match="path is a str"):
        register_saving_hook(Net(), 3, "Linear")
    with pytest.raises(ValueError, match="there is no layout 'nyp'"):
        register_saving_hook(Net(), tmp_path, "Linear", layout="nyp")


def test_a_full_disk_does_not_stop_the_training(tmp_path, capsys):
    (tmp_path / "tensors").write_text("in the way")
    model = Net()
    register_saving_hook(model, tmp_path, "Linear")
    model(torch.tensor([1])).sum().backward()
    wait_until_saved()
    assert capsys.readouterr().err.count("saving hook stopped") == 1


def test_a_class_that_no_leaf_layer_has_is_said_at_once(tmp_path, capsys):
    register_saving_hook(Net(), tmp_path, ["Linear", "LayerNom"])
    said = capsys.readouterr().err
    assert "no leaf layer is a 'LayerNom'" in said and "LayerNorm" in said


def test_a_run_on_request_has_the_paths_of_the_model_and_the_micro_steps(tmp_path):
    model = Net()
    register_saving_hook(model, tmp_path / "run", "Linear", layout="run")
    for _ in range(2):
        model(torch.tensor([1])).sum().backward()
    wait_until_saved()
    run = driftline.open_run(tmp_path / "run")
    keys = {(r.key.site, r.key.port, r.key.slot, r.key.step) for r in run.records}
    assert ("block.0", "output", "0", 1) in keys and ("head", "param_grad", "bias", 0) in keys
    assert [each["framework"] for each in run.processes()] == ["torch"]
    with pytest.raises(AlreadyThere):
        register_saving_hook(model, tmp_path / "run", "Linear", layout="run")


def test_a_slow_disk_does_not_hold_up_a_step(tmp_path, monkeypatch):
    written, step_over = [], threading.Event()

    def slow(path, dtype, shape, data):
        step_over.wait(60)
        written.append(path.name)

    monkeypatch.setattr(saved_files, "write_npy", slow)
    model = Net()
    register_saving_hook(model, tmp_path, "Linear", -1, -1)
    for _ in range(5):
        model(torch.tensor([1])).sum().backward()
    assert not written, "a step waited for the disk"
    step_over.set()
    wait_until_saved()
    assert len(written) == 30


def test_what_is_changed_in_place_after_the_hook_is_saved_as_it_was(tmp_path, monkeypatch):
    gate = threading.Event()
    plain = saved_files.write_npy
    monkeypatch.setattr(saved_files, "write_npy", lambda *a: (gate.wait(60), plain(*a)))
    model = nn.Sequential(nn.Linear(3, 3))
    register_saving_hook(model, tmp_path, "Linear")
    with torch.no_grad():
        out = model(torch.ones(1, 3))
        before = out.clone()
        out.zero_()
    gate.set()
    (saved,) = (tmp_path / "tensors/rank_0" / name for name in names(tmp_path / "tensors/rank_0"))
    assert np.array_equal(np.load(saved), before.numpy())


def test_memory_has_an_end_and_then_the_program_waits(tmp_path, monkeypatch):
    most = 0
    plain = saved_files.write_npy

    def slow(*call):
        time.sleep(0.005)
        plain(*call)

    monkeypatch.setattr(saved_files, "write_npy", slow)
    monkeypatch.setattr(saved_files, "MOST_WAITING", 1000)
    model = nn.Sequential(nn.Linear(8, 8))
    register_saving_hook(model, tmp_path, "Linear", -1, -1)
    (files,) = (s.files for s in hook._STORES if s.path == tmp_path)
    for _ in range(20):
        model(torch.ones(2, 8)).sum().backward()
        most = max(most, files._waiting)
    assert most <= 1000
    assert len(names(tmp_path / "grads/rank_0")) == 40


def test_when_both_limits_are_reached_the_writing_thread_ends(tmp_path):
    model = Net()
    register_saving_hook(model, tmp_path, "Linear", 2, 1)
    for _ in range(3):
        model(torch.tensor([1])).sum().backward()
    (files,) = (s.files for s in hook._STORES if s.path == tmp_path)
    thread = files._staging._thread
    thread.join(60)
    assert not thread.is_alive()
    assert len(names(tmp_path / "tensors/rank_0")) == 2
    assert len(names(tmp_path / "grads/rank_0")) == 1


ENDINGS = {
    "raise": "raise SystemError",
    "exit": "import sys; sys.exit(0)",
    "end": "",
    "kill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}
PROGRAM = """
import time, torch
from torch import nn
from driftline import register_saving_hook
from driftline.dialects.paddle_hook import files as saved_files
plain = saved_files.write_npy
def slow(*call):
    time.sleep(0.01)
    plain(*call)
saved_files.write_npy = slow
model = nn.Sequential(nn.Linear(64, 64))
register_saving_hook(model, "kept", "Linear", -1, -1)
for _ in range(8):
    model(torch.ones(2, 64)).sum().backward()
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_everything_is_on_disk_at_exit_and_a_kill_leaves_whole_files_only(
    tmp_path, warm_python, ending
):
    words = [warm_python, "-c", PROGRAM + ENDINGS[ending]]
    subprocess.run(words, cwd=tmp_path, capture_output=True, check=ending in ("end", "exit"))
    files = [*tmp_path.glob("kept/*/rank_0/*.npy")]
    assert len(files) < 24 if ending == "kill" else len(files) == 24
    for file in files:
        np.load(file)


def test_a_model_that_is_one_layer_has_a_name_that_can_be_read(tmp_path):
    model = register_saving_hook(nn.Linear(2, 2), tmp_path, "Linear")
    model(torch.ones(1, 2)).sum().backward()
    wait_until_saved()
    keys = {(r.key.site, r.key.port, r.key.slot) for r in driftline.open_run(tmp_path).records}
    assert keys == {
        ("(root)", "output", "0"),
        ("(root)", "param_grad", "weight"),
        ("(root)", "param_grad", "bias"),
    }


def test_tensors_of_another_run_or_registration_in_the_same_folder_are_said(tmp_path, capsys):
    def saved(folder):
        model = register_saving_hook(nn.Linear(2, 2), folder, "Linear")
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        wait_until_saved()
        return capsys.readouterr().err

    earlier = tmp_path / "tree/tensors/rank_0"
    earlier.mkdir(parents=True)
    np.save(earlier / "tensor_idx_9_layer_class_Linear_layer_name_x_micro_step_9.npy", np.ones(1))
    said = saved(tmp_path / "tree")
    assert said.count("driftline:") == 1 and "holds tensors of an earlier run" in said
    assert saved(tmp_path / "other") == ""
    assert "another registration saves into" in saved(tmp_path / "other")


def test_a_disk_that_is_full_when_a_run_is_closed_is_said_too(tmp_path, warm_python):
    program = """
import resource, signal, torch
from torch import nn
from driftline import register_saving_hook
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
model = nn.Sequential(nn.Linear(64, 64))
register_saving_hook(model, "kept", "Linear", -1, -1, layout="run")
for _ in range(8):
    model(torch.ones(64, 64)).sum().backward()
print("trained")
"""
    done = subprocess.run(
        [warm_python, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "trained\n"
    assert done.stderr.count("saving hook stopped") == 1
