"""What transformers' own `model_addition_debugger_context` writes, read as a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driftline import compare, open_run
from driftline.errors import BadFile


def _model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def _debugged(folder: Path, model: Any, *, use_repr: bool, prune: bool = True) -> Path:
    from transformers.model_debugging_utils import model_addition_debugger_context

    with model_addition_debugger_context(
        model, debug_path=str(folder), do_prune_layers=prune, use_repr=use_repr
    ):
        model(torch.tensor([[1, 2, 3]]))
    return folder


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _debugged(tmp_path_factory.mktemp("hf"), _model(), use_repr=False)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _debugged(tmp_path_factory.mktemp("hf"), _model(), use_repr=True)


def test_every_module_is_read_also_those_the_tree_leaves_out(tensors: Path) -> None:
    run = open_run(tensors)
    assert run.manifest["format"] == "transformers debugger"
    for layer in range(4):
        assert run.get(f"model.layers.{layer}.mlp.down_proj").shape == (1, 3, 16)
        slot = "position_embeddings.1"
        assert run.get(f"model.layers.{layer}.self_attn", "input", slot).has_values
    assert not run.losses


def test_the_values_are_those_of_the_model(tensors: Path) -> None:
    seen: dict[str, torch.Tensor] = {}
    model = _model()
    model.model.layers[2].mlp.act_fn.register_forward_hook(
        lambda module, inputs, output: seen.update(act=output.detach())
    )
    logits = model(torch.tensor([[1, 2, 3]])).logits.detach().numpy()
    run = open_run(tensors)
    assert np.array_equal(run.get("model.layers.2.mlp.act_fn").numpy(), seen["act"].numpy())
    assert np.array_equal(run.get("lm_head").numpy(), logits)


def test_layers_that_were_left_out_stand_in_their_place(tensors: Path) -> None:
    sites = [r.key.site for r in open_run(tensors).records if r.key.port == "output"]
    places = [sites.index(f"model.layers.{n}.mlp.down_proj") for n in range(4)]
    assert places == sorted(places)
    assert sites.index("model.layers.1.self_attn.q_proj") < sites.index(
        "model.layers.1.mlp.up_proj"
    )
    assert places[3] < sites.index("model.norm") < sites.index("lm_head")


def test_a_planted_error_is_named_in_a_layer_the_tree_leaves_out(
    tensors: Path, tmp_path: Path
) -> None:
    model = _model()
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight *= 1.5
    table = compare(tensors, _debugged(tmp_path, model, use_repr=False))
    failed = [row.key.site for row in table.rows if row.status == "fail"]
    assert failed[0] == "model.layers.2.self_attn.o_proj"


def test_printed_values_are_summaries_of_five_digits(tensors: Path, printed: Path) -> None:
    exact, run = open_run(tensors), open_run(printed)
    norm = run.get("model.norm").summary
    assert norm is not None
    values = exact.get("model.norm").float64()
    assert norm.max == pytest.approx(values.max(), rel=1e-3)
    assert norm.std == pytest.approx(values.std(), rel=1e-3)
    assert math.isnan(norm.l2)
    assert run.get("model.embed_tokens", "input").record.kept == "describe"


def test_the_summary_alone_is_enough(printed: Path, tmp_path: Path) -> None:
    (summary,) = printed.glob("*_SUMMARY.json")
    (tmp_path / summary.name).write_text(summary.read_text())
    run = open_run(tmp_path)
    assert {r.key for r in run.records} == {r.key for r in open_run(printed).records}


def test_an_overwritten_call_is_lost_and_says_so(tmp_path: Path) -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tied = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tied(self.tied(x))

    from transformers.model_debugging_utils import model_addition_debugger_context

    model = Twice()
    with model_addition_debugger_context(model, debug_path=str(tmp_path), use_repr=False):
        expected = model(torch.ones(1, 4))
    run = open_run(tmp_path)
    assert "wrote over it" in run.get("tied").lost
    assert np.array_equal(run.get("tied", visit=1).numpy(), expected.detach().numpy())


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000])
def test_a_damaged_tree_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "X_debug_tree_FULL_TENSORS.json").write_text(text)
    with pytest.raises(BadFile, match="cannot be read"):
        open_run(tmp_path)


def test_files_named_in_the_tree_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    entry = {"shape": "torch.Size([1])", "dtype": "torch.float32", "value": "./../up.safetensors"}
    tree = {"module_path": "X", "outputs": entry, "children": [{"module_path": 3, "inputs": 5}]}
    (tmp_path / "X_debug_tree_FULL_TENSORS.json").write_text(json.dumps(tree))
    assert open_run(tmp_path).get("(root)").lost == "the file is not there"
