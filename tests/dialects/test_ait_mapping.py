"""`ait llm compare -mf`: a torch tree in the order of registration against an ATB dump.

The tree is one of transformers: norms and activations are registered after the layers that they
feed. All of them pair with ATB's operators, with and without a map of classes.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import driftline
from driftline.cli.main import main
from support.atb_twins import Error, atb_twin, torch_twin
from support.toy_decoder import in_library_order, toy_decoder

AIT = Path(sys.executable).parent / "ait"
PROMPT = np.array([[3, 1, 4, 1, 5]])
MAP = {"LinearOperation_outtensor0": ["Linear_output"], "RmsNormOperation": ["RMSNorm"]}
LAYERS = 11
OPERATORS = {
    "input_layernorm": "0_RmsNormOperation",
    "self_attn.q_proj": "1_LinearOperation",
    "self_attn.o_proj": "5_LinearOperation",
    "post_attention_layernorm": "7_RmsNormOperation",
    "mlp.act_fn": "10_ActivationOperation",
    "mlp.down_proj": "12_LinearOperation",
}


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("mapping")
    model = in_library_order(toy_decoder(layers=LAYERS))
    torch_twin(base / "torch", model, PROMPT)
    torch_twin(base / "outputs", model, PROMPT)
    for path in (base / "outputs").rglob("input_*.pth"):
        path.unlink()
    atb_twin(base / "atb", model, PROMPT)
    # Large enough to be seen behind all that follows: a norm takes most of it away.
    atb_twin(base / "bad", model, PROMPT, error=Error(4, "ActivationOperation"))
    (base / "op_mapping_file.json").write_text(json.dumps(MAP))
    return base


@pytest.mark.parametrize("golden", ["torch", "outputs"])
@pytest.mark.parametrize("mapped", [False, True])
def test_every_norm_and_activation_pairs_with_its_own_operator(
    dumps: Path, golden: str, mapped: bool
) -> None:
    words = {"mapping": dumps} if mapped else {}
    plan = driftline.align(dumps / golden, dumps / "atb", **words)
    partners = {
        pair.reference.key.site: pair.candidate.key.site
        for pair in plan.pairs
        if pair.reference.key.port == "output"
    }
    for layer in range(LAYERS):
        for module, operator in OPERATORS.items():
            site = f"layers.{layer}.{module}"
            assert partners[site] == f"{layer + 1}_Decoder_layer.{operator}"
    assert not plan.missing


@pytest.mark.parametrize("words", [(), ("-mf",)])
def test_a_healthy_pair_passes_and_a_faulty_one_fails_in_its_layer(
    dumps: Path, tmp_path: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    more = [*words, *([str(dumps)] if words else []), "-o", str(tmp_path)]
    assert main(["compare", "-gp", str(dumps / "torch"), "-mp", str(dumps / "atb"), *more]) == 0
    (report,) = tmp_path.glob("ait_cmp_report_*.csv")
    with report.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["cosine_similarity"]]
    assert min(float(row["cosine_similarity"]) for row in rows) > 0.9999
    capsys.readouterr()
    assert main(["compare", "-gp", str(dumps / "torch"), "-mp", str(dumps / "bad"), *more]) == 1
    assert "layers.4.mlp.act_fn" in capsys.readouterr().out.split("relative_l2")[0]


@pytest.mark.parametrize(("mine", "code"), [("atb", 0), ("bad", 1)])
def test_the_seeds_own_spelling(dumps: Path, tmp_path: Path, mine: str, code: int) -> None:
    words = ["--golden-path", str(dumps / "torch"), "--my-path", str(dumps / mine)]
    words += ["--op-mapping-file", str(dumps), "--output", str(tmp_path)]
    done = subprocess.run([str(AIT), "llm", "compare", *words], capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert list(tmp_path.glob("ait_cmp_report_*.csv"))


@pytest.mark.parametrize("spelling", ["ours", "theirs"])
def test_an_entry_that_matches_nothing_is_said(dumps: Path, tmp_path: Path, spelling: str) -> None:
    entries = {**MAP, "SwigluOperation": ["SwiGLU"]}
    (tmp_path / "op_mapping_file.json").write_text(json.dumps(entries))
    command = [str(AIT.with_name("driftline")), "compare"]
    if spelling == "theirs":
        command = [str(AIT), "llm", "compare"]
    words = ["-gp", str(dumps / "torch"), "-mp", str(dumps / "atb"), "-mf", str(tmp_path)]
    done = subprocess.run([*command, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert "the entry 'SwigluOperation' for 'SwiGLU' changes nothing: no class of either" in text
    assert text.count("changes nothing") == 1


def test_the_order_of_a_real_model_follows_what_its_modules_read(tmp_path: Path) -> None:
    """A Llama of transformers, hooked as the original hooks it: positional inputs only."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=32,
    )
    model = LlamaForCausalLM(config).eval()
    base = tmp_path / "ait_dump" / "torch_tensors" / "cpu_1"
    names = {module: f"root.{name}" if name else "root" for name, module in model.named_modules()}
    called: list[str] = []

    def save(module: torch.nn.Module, args: tuple[object, ...], output: object) -> None:
        place = base / "0" / names[module]
        place.mkdir(parents=True, exist_ok=True)
        called.append(names[module].removeprefix("root."))
        for index, value in enumerate(args):
            if isinstance(value, torch.Tensor):
                torch.save(value.clone(), place / f"input_{index}.pth")
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor):
            torch.save(first.clone(), place / "output.pth")

    for module in names:
        module.register_forward_hook(save)
    with torch.no_grad():
        model(torch.arange(3, 9)[None])
    tree = tree_of("root", model)
    (base / "model_tree.json").write_text(json.dumps(tree))
    run = driftline.open_run(tmp_path)
    assert run.facts.order == "execution"
    found = [record.key.site for record in run.records if record.key.port == "output"]
    # What does not depend on each other may stand in either order.
    loose = ("up_proj", "act_fn", "rotary_emb")
    backbone = [site for site in found if not site.endswith(loose)]
    assert backbone == [site for site in called if site in backbone]
    for layer in range(2):
        places = [found.index(f"model.layers.{layer}.mlp.{name}_proj") for name in ("gate", "down")]
        for name in ("up_proj", "act_fn"):
            assert places[0] < found.index(f"model.layers.{layer}.mlp.{name}") < places[1]


def tree_of(name: str, module: object) -> dict[str, object]:
    children = [tree_of(f"{name}.{key}", child) for key, child in module.named_children()]
    return {"name": name, "type": type(module).__name__, "children": children}
