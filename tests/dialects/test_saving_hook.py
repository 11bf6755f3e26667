"""The saving hook of seed 004 on torch models: names, caps, micro steps, and what it fixes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from driftline import register_hook, register_saving_hook


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 2)

    def forward(self, ids):
        return self.head(self.block(self.embed(ids)))


def names(folder):
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
    saved = [np.load(p) for p in sorted((tmp_path / "tensors/rank_0").iterdir())]
    assert [s.dtype for s in saved] == [np.float32] * 3
    assert [float(s[0]) for s in saved] == [1.0, 2.0, 3.0]


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
    layer = type("Layer", (), {"__module__": "paddle.nn.layer.layers"})
    with pytest.raises(RuntimeError, match="Paddle"):
        register_saving_hook(layer(), tmp_path, "Linear")


def test_a_full_disk_does_not_stop_the_training(tmp_path, capsys):
    (tmp_path / "tensors").write_text("in the way")
    model = Net()
    register_saving_hook(model, tmp_path, "Linear")
    model(torch.tensor([1])).sum().backward()
    assert capsys.readouterr().err.count("saving hook stopped") == 1
