"""The saving hook of seed 004 where it comes from: Paddle layers."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.utils import mix_precision_utils, recompute

import driftline
from driftline import register_saving_hook
from driftline.dialects.paddle_hook.hook import wait_until_saved


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 2)

    def forward(self, ids):
        return self.head(self.block(self.embed(ids)))


def names(folder):
    wait_until_saved()
    return sorted((p.name for p in folder.glob("*.npy")), key=lambda name: int(name.split("_")[2]))


def test_the_tree_has_the_seed_s_names_and_paddle_s(tmp_path):
    model = Net()
    first, second = model.block[0].full_name(), model.head.full_name()
    hooked = register_saving_hook(model, str(tmp_path), ["Linear", "Sequential"])
    assert hooked is model
    outputs, gradients = [], []
    model.head.register_forward_post_hook(lambda _l, _i, out: outputs.append(out.numpy().copy()))
    for _ in range(2):
        model(paddle.to_tensor([1, 2])).square().sum().backward()
        gradients.append(model.head.weight.grad.numpy())
    assert names(tmp_path / "tensors" / "rank_0") == [
        f"tensor_idx_0_layer_class_Linear_layer_name_{first}_micro_step_0.npy",
        f"tensor_idx_1_layer_class_Linear_layer_name_{second}_micro_step_0.npy",
        f"tensor_idx_2_layer_class_Linear_layer_name_{first}_micro_step_1.npy",
        f"tensor_idx_3_layer_class_Linear_layer_name_{second}_micro_step_1.npy",
    ]  # Sequential is no leaf
    kept = tmp_path / "tensors/rank_0"
    for place, index in ((0, 1), (1, 3)):
        assert np.array_equal(np.load(kept / names(kept)[index]), outputs[place])
    grads = names(tmp_path / "grads" / "rank_0")
    assert len(grads) == 8 and f"_of_param_name_{second}.w_0_micro_step_0.npy" in grads[1]
    steps = [np.load(tmp_path / "grads/rank_0" / name) for name in grads if f"{second}.w_0" in name]
    # Of one micro batch each, while `.grad` goes on adding them up.
    assert np.array_equal(steps[0], gradients[0])
    assert np.allclose(steps[1], gradients[1] - gradients[0], rtol=1e-5)


def test_cells_that_are_never_called_do_not_count_micro_steps(tmp_path, capsys):
    recurrent, head = nn.LSTM(4, 4), nn.Linear(4, 2)
    register_saving_hook(nn.LayerList([recurrent, head]), str(tmp_path), ["LSTM", "Linear"])
    for _ in range(2):
        head(recurrent(paddle.ones([1, 3, 4]))[0]).sum().backward()
    kept = names(tmp_path / "tensors" / "rank_0")
    assert [name.rpartition("_")[2] for name in kept] == ["0.npy", "1.npy"]
    said = capsys.readouterr().err
    assert "no leaf layer is a 'LSTM': nothing to save of it" in said and "LSTMCell" not in said


def test_gradients_are_those_before_main_grad_takes_them(tmp_path):
    def trained(hook):
        paddle.seed(1)
        model = nn.Sequential(nn.Linear(3, 3))
        if hook:
            register_saving_hook(model, tmp_path, "Linear", -1, -1)
        model = mix_precision_utils.MixPrecisionLayer(model, dtype="bfloat16")
        for step in range(3):
            (model(paddle.ones([2, 3]) * (step + 1)) ** 2).sum().backward()
        return model.parameters()[0].main_grad.numpy()

    plain, hooked = trained(hook=False), trained(hook=True)
    assert plain.tobytes() == hooked.tobytes()
    kept = [n for n in names(tmp_path / "grads/rank_0") if ".w_0_" in n]
    assert len(kept) == 3
    each = [np.load(tmp_path / "grads/rank_0" / name) for name in kept]
    assert np.allclose(sum(each), hooked, rtol=1e-5)
    assert not np.allclose(each[-1], hooked)


def test_limits_count_over_all_micro_steps_and_belong_to_one_registration(tmp_path):
    model, other = Net(), Net()
    register_saving_hook(model, tmp_path / "a", "Linear", 3, 1)
    register_saving_hook(model, tmp_path / "b", ["LayerNorm"], -1, -1)
    register_saving_hook(other, tmp_path / "c", ["Linear"], 0, 100)
    for _ in range(5):
        model(paddle.to_tensor([1])).sum().backward()
    other(paddle.to_tensor([1])).sum().backward()
    assert len(names(tmp_path / "a/tensors/rank_0")) == 3
    assert len(names(tmp_path / "a/grads/rank_0")) == 1
    assert len(names(tmp_path / "b/tensors/rank_0")) == 5
    assert len(names(tmp_path / "b/grads/rank_0")) == 10
    assert not (tmp_path / "c/tensors").exists()
    assert names(tmp_path / "c/grads/rank_0")[0].startswith("grad_idx_0_")
    assert all("micro_step_0" in name for name in names(tmp_path / "c/grads/rank_0"))


def test_bfloat16_becomes_float32_and_every_tensor_of_a_tuple_is_saved(tmp_path):
    class Pair(nn.Layer):
        def forward(self, x):
            return x, (x + 1, {"more": x + 2})

    model = nn.Sequential(Pair())
    register_saving_hook(model, tmp_path, "Pair")
    model(paddle.ones([2], dtype="bfloat16"))
    kept = tmp_path / "tensors/rank_0"
    saved = [np.load(kept / name) for name in names(kept)]
    assert [s.dtype for s in saved] == [np.float32] * 3
    assert [float(s[0]) for s in saved] == [1.0, 2.0, 3.0]


def test_a_recomputed_forward_is_saved_once_and_is_no_micro_step(tmp_path):
    model = Net()
    register_saving_hook(model, tmp_path, ["Linear", "Embedding"])
    for _ in range(2):
        hidden = recompute(model.block, model.embed(paddle.to_tensor([1])))
        model.head(hidden).sum().backward()
    steps = [name.rpartition("_")[2] for name in names(tmp_path / "tensors/rank_0")]
    assert steps == ["0.npy"] * 3 + ["1.npy"] * 3


def test_hooks_change_no_result_and_a_full_disk_stops_nothing(tmp_path, capsys):
    def trained(path):
        paddle.seed(2)
        model = Net()
        if path is not None:
            register_saving_hook(model, path, ["Linear", "LayerNorm", "Embedding"], -1, -1)
        optimizer = paddle.optimizer.Adam(0.1, parameters=model.parameters())
        for _ in range(3):
            model(paddle.to_tensor([1, 2, 3])).square().sum().backward()
            optimizer.step()
            optimizer.clear_grad()
        return [p.numpy().tobytes() for p in model.parameters()]

    plain = trained(None)
    assert trained(tmp_path / "kept") == plain
    (tmp_path / "tensors").write_text("in the way")
    assert trained(tmp_path) == plain
    wait_until_saved()
    assert capsys.readouterr().err.count("saving hook stopped") == 1


def test_two_trees_are_checked_and_compared_and_a_run_on_request_too(tmp_path, capsys):
    from driftline.cli.main import main

    def saved(path, **options):
        paddle.seed(4)
        model = Net()
        register_saving_hook(model, path, ["Linear", "LayerNorm"], -1, -1, **options)
        for _ in range(2):
            model(paddle.to_tensor([1, 2])).square().sum().backward()
        wait_until_saved()
        return model

    saved(tmp_path / "a")
    saved(tmp_path / "b")  # layers have other numbers now
    assert (
        main(["check-hooks", "--pathA", str(tmp_path / "a"), "--pathB", str(tmp_path / "b")]) == 0
    )
    assert "by class, order and micro step" in capsys.readouterr().out
    assert (tmp_path / "a/tensors/compare_rst/rank_0_rst.csv").is_file()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    model = saved(tmp_path / "c", layout="run")
    run = driftline.open_run(tmp_path / "c")
    assert [each["framework"] for each in run.processes()] == ["paddle"]
    (row,) = (t for t in run.tensors() if str(t.key) == "rank0/step0/head/param_grad/bias")
    assert row.numpy().shape == tuple(model.head.bias.shape)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "c")]) == 0


def test_names_that_are_no_file_names_are_made_some(tmp_path):
    class Scoped(nn.Layer):
        def __init__(self):
            super().__init__(name_scope="enc/../" + "x" * 300)

        def forward(self, x):
            return x

    register_saving_hook(model := nn.Sequential(Scoped()), tmp_path / "kept", "Scoped")
    model(paddle.ones([1]))
    (name,) = names(tmp_path / "kept/tensors/rank_0")
    assert len(name) < 256 and [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_a_static_graph_is_not_saved_while_it_is_made(tmp_path):
    model = Net()
    model.eval()
    register_saving_hook(model, tmp_path, "Linear")
    static = paddle.jit.to_static(model, full_graph=True)
    static(paddle.to_tensor([1]))
    wait_until_saved()
    assert not (tmp_path / "tensors").exists()


def test_what_cannot_be_hooked_is_refused_in_a_sentence(tmp_path, capsys):
    with pytest.raises(ValueError, match="a torch module or a Paddle layer, not Tensor"):
        register_saving_hook(paddle.ones([1]), tmp_path, "Linear")
    model = Net()
    assert register_saving_hook(model, tmp_path) is model
    assert "nothing to save" in capsys.readouterr().err


def test_gradients_of_a_recurrent_layer_keep_their_micro_step(tmp_path, capsys):
    """All leaves of such a model are cells that nobody calls."""
    from driftline.cli.main import main

    class Recurrent(nn.Layer):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 5)

        def forward(self, x):
            return self.lstm(x)[0]

    for tree in ("a", "b"):
        paddle.seed(0)
        model = register_saving_hook(Recurrent(), str(tmp_path / tree), "LSTMCell")
        for _ in range(3):
            model(paddle.ones([1, 3, 4])).sum().backward()
    grads = names(tmp_path / "a" / "grads" / "rank_0")
    assert len(grads) == 12
    assert [name.rpartition("_")[2] for name in grads] == ["0.npy"] * 4 + ["1.npy"] * 4 + [
        "2.npy"
    ] * 4
    trees = ["--pathA", str(tmp_path / "a"), "--pathB", str(tmp_path / "b")]
    script = Path(sys.executable).parent / "hook_result_checker.py"
    done = subprocess.run(
        [sys.executable, str(script), *trees], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == main(["check-hooks", *trees]) == 0
    # Paddle numbers the second model's layers on.
    said = "grads rank_0: 12 tensors compared by class, order and micro step"
    assert said in done.stdout and said in capsys.readouterr().out
    with (tmp_path / "a" / "grads" / "compare_rst" / "rank_0_rst.csv").open(newline="") as stream:
        rows = list(csv.reader(stream))[1:]
    assert [float(row[1]) for row in rows] == [1.0] * 12
    run = driftline.open_run(tmp_path / "a")
    assert {record.key.step for record in run.records} == {0, 1, 2}
