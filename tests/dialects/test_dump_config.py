"""`DumpConfig` and `register_hook` write the seed's tree: its defaults, without its traps."""

from __future__ import annotations

import gc
import json
import os
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import driftline
from driftline.dialects.ait.hooks import DumpConfig, register_hook


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, *, scale=None):
        x = self.fc(x)
        return (x if scale is None else x * scale), [x + 1, x + 2]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y, (a, _b) = self.inner(x, scale=torch.tensor(2.0))
        return {"logits": self.act(y), "extra": self.act(a)}


def one_folder(path: Path) -> Path:
    [folder] = (path / "ait_dump" / "torch_tensors").iterdir()
    return folder


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*.pth")}


def load(path: Path) -> torch.Tensor:
    return torch.load(path, weights_only=True)


def test_the_tree_has_the_seeds_names_and_is_there_after_the_call(tmp_path):
    model = Outer()
    assert register_hook(model, DumpConfig(dump_path=str(tmp_path))) is model
    x = torch.randn(3, 4)
    for _ in range(3):
        model(x)
    folder = one_folder(tmp_path)
    assert folder.name == f"cpu_{os.getpid()}"
    assert files(folder) == {
        "0/root/input_0.pth",
        "0/root/output_0.pth",
        "0/root/output_1.pth",
        "0/root.inner/input_0.pth",
        "0/root.inner/input_scale.pth",
        "0/root.inner/output_0.pth",
        "0/root.inner/output_1_0.pth",
        "0/root.inner/output_1_1.pth",
        "0/root.inner.fc/input_0.pth",
        "0/root.inner.fc/output.pth",
        "0/root.act/input_0.pth",
        "0/root.act/input_0.visit1.pth",
        "0/root.act/output.pth",
        "0/root.act/output.visit1.pth",
    }
    assert torch.equal(load(folder / "0/root.inner.fc/input_0.pth"), x)
    before = load(folder / "0/root.act/input_0.pth")  # ReLU works in place
    assert (before < 0).any() and not (load(folder / "0/root.act/output.pth") < 0).any()
    assert json.loads((folder / "model_tree.json").read_text()) == {
        "name": "root",
        "type": "Outer",
        "children": [
            {
                "name": "root.inner",
                "type": "Inner",
                "children": [{"name": "root.inner.fc", "type": "Linear", "children": []}],
            },
            {"name": "root.act", "type": "ReLU", "children": []},
        ],
    }


def test_tokens_classes_and_parts_are_chosen(tmp_path):
    model = Outer()
    config = DumpConfig(str(tmp_path), [1, 2], [nn.Linear], tensor_part=1)
    register_hook(model, config, hook_type="dump_data")
    for _ in range(4):
        model(torch.ones(1, 4))
    assert files(one_folder(tmp_path)) == {
        "1/root.inner.fc/output.pth",
        "2/root.inner.fc/output.pth",
    }


def test_every_element_type_and_a_view_cost_only_their_own_bytes(tmp_path):
    class Cast(nn.Module):
        def forward(self, x):
            big = torch.zeros(1000, 1000)
            return x.to(torch.bfloat16), x.to(torch.float8_e4m3fn), x > 0, x.cfloat(), big[0, :3]

    model = nn.Sequential(Cast())
    driftline.register_hook(model, config=driftline.DumpConfig(tmp_path, tensor_part=1))
    results = model(torch.tensor([-1.5, 0.0, 2.0]))
    folder = one_folder(tmp_path) / "0" / "root.0"
    for index, result in enumerate(results):
        saved = load(folder / f"output_{index}.pth")
        assert saved.dtype == result.dtype and saved.shape == result.shape
        assert torch.equal(saved.view(torch.uint8), result.contiguous().view(torch.uint8))
        assert (folder / f"output_{index}.pth").stat().st_size < 4000


def test_two_configurations_are_two_and_a_repeated_call_only_warns(tmp_path):
    first, second = DumpConfig(str(tmp_path / "a")), DumpConfig(str(tmp_path / "b"), [0, 1])
    assert (first.token_range, second.token_range) == ([0], [0, 1])
    model = nn.Sequential(nn.Linear(2, 2))
    register_hook(model, first)
    with pytest.warns(UserWarning, match="ignored"):
        register_hook(model, first)
    register_hook(model, second, hook_name="dump_data")
    other = nn.Sequential(nn.Linear(2, 2))
    register_hook(other, DumpConfig(str(tmp_path / "a")))
    for _ in range(2):
        model(torch.ones(1, 2))
    other(torch.ones(1, 2))
    assert {p.split("/")[0] for p in files(one_folder(tmp_path / "b"))} == {"0", "1"}
    shared = sorted(p.name for p in (tmp_path / "a/ait_dump/torch_tensors").iterdir())
    assert shared == [f"cpu_{os.getpid()}", f"cpu_{os.getpid()}.1"]


def test_a_model_that_is_gone_is_watched_no_more(tmp_path):
    from driftline.captures.torch.module_calls import active

    before = len(active())
    model = nn.Sequential(nn.Linear(2, 2))
    register_hook(model, DumpConfig(str(tmp_path)))
    assert len(active()) == before + 1
    del model
    gc.collect()
    assert len(active()) == before


def test_defaults_are_the_seeds():
    config = DumpConfig()
    assert vars(config) == {
        "dump_path": "./",
        "token_range": [0],
        "module_list": [],
        "tensor_part": 2,
        "device_id": None,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        {"dump_path": 3},
        {"token_range": 0},
        {"token_range": ["0"]},
        {"token_range": [-1]},
        {"token_range": [True]},
        {"module_list": nn.Linear},
        {"module_list": ["Linear"]},
        {"tensor_part": 3},
        {"tensor_part": "2"},
        {"tensor_part": True},
        {"device_id": "0"},
        {"device_id": -1},
    ],
    ids=str,
)
def test_a_wrong_argument_is_a_value_error_in_one_sentence(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DumpConfig(**wrong)


def test_a_wrong_call_of_register_hook_is_refused(tmp_path):
    model = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="dump_data"):
        register_hook(model, DumpConfig(), hook_type="dump_everything")
    with pytest.raises(ValueError, match="DumpConfig"):
        register_hook(model, {"dump_path": "x"})
    with pytest.raises(ValueError, match="DumpConfig"):
        register_hook(model)
    with pytest.raises(ValueError, match=r"torch\.nn\.Module"):
        register_hook("model", DumpConfig(str(tmp_path)))


def test_outputs_are_bitwise_the_same_with_and_without(tmp_path):
    torch.manual_seed(0)
    model = Outer().train()
    x = torch.randn(5, 4, requires_grad=True)

    def gradients():
        model.zero_grad()
        x.grad = None
        model(x)["logits"].sum().backward()
        return [x.grad.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    plain = gradients()
    register_hook(model, DumpConfig(str(tmp_path)))
    dumped = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, dumped, strict=True))


def test_a_folder_that_cannot_be_written_does_not_stop_the_model(tmp_path, capsys):
    (tmp_path / "ait_dump").write_text("in the way")
    model = nn.Sequential(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_hook(model, DumpConfig(str(tmp_path)))
        model(torch.ones(1, 2))
        model(torch.ones(1, 2))
    assert capsys.readouterr().err.count("incomplete") == 1
