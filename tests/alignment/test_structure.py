"""Models under other names: who belongs to whom, and what a fault is then called."""

from __future__ import annotations

import copy
import shutil
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import driftline
from driftline.alignment.plan import Plan
from driftline.runs.run import Run

sys.path.insert(0, str(Path(__file__).parent))
import twins

DATA = Path(__file__).parents[1] / "data" / "ascend"


def partners(plan: Plan) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for pair in plan.pairs:
        found.setdefault(pair.reference.key.site, set()).add(pair.candidate.key.site)
    return found


def gpt_truth(layers: int) -> dict[str, set[str]]:
    truth = {
        "transformer.wte": {"words"}, "transformer.wpe": {"places"},
        "transformer.ln_f": {"closing"}, "lm_head": {"reader"},
        "transformer.drop": {"trunk.0.mixing.scale"},  # dropouts: who made, or reads, the same
    }  # fmt: skip
    for n in range(layers):
        here, there = f"transformer.h.{n}", f"trunk.{n}"
        core = f"{there}.mixing.core"
        truth |= {
            f"{here}.ln_1": {f"{there}.mixing.scale"},
            f"{here}.attn.c_attn": {f"{core}.first", f"{core}.second", f"{core}.third"},
            f"{here}.attn.c_proj": {f"{core}.mix"},
            f"{here}.ln_2": {f"{there}.thinking.0"},
            f"{here}.mlp.c_fc": {f"{there}.thinking.1"},
            f"{here}.mlp.act": {f"{there}.thinking.2"},
            f"{here}.mlp.c_proj": {f"{there}.thinking.3"},
            f"{here}.attn.resid_dropout": {f"{core}.mix"},
            f"{here}.mlp.dropout": {f"{there}.thinking.3"},
        }
    return truth


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Run]:
    model = twins.gpt2()
    return model, twins.captured(model, tmp_path_factory.mktemp("gpt") / "ref")


def test_a_hand_written_gpt2_aligns_completely_and_passes(
    gpt: tuple[Any, Run], tmp_path: Path
) -> None:
    model, reference = gpt
    candidate = twins.captured(twins.our_gpt(model), tmp_path / "cand")
    plan = driftline.align(reference, candidate)
    found, truth = partners(plan), gpt_truth(12)
    assert {site: found.get(site) for site in truth} == truth
    leaves = [{s for s in run.sites() if _is_leaf(s, run)} for run in (reference, candidate)]
    assert leaves == [set(truth), set().union(*truth.values())]  # 100 % of the leaf sites of both
    table = driftline.compare(reference, candidate, plan=plan)
    assert table.verdict == "pass", table.finding
    assert sum(row.compared for row in table.rows) > 250


def _is_leaf(site: str, run: Run) -> bool:
    return site != "(root)" and not any(other.startswith(site + ".") for other in run.sites())


def test_dropouts_that_drop_something_stay_alone(tmp_path: Path) -> None:
    model = twins.gpt2(n_layer=2)
    ours = twins.our_gpt(model)
    reference = twins.captured(model.train(), tmp_path / "ref")
    plan = driftline.align(reference, twins.captured(ours, tmp_path / "cand"))
    assert not {site for site in partners(plan) if "drop" in site}
    reasons = [why for (_, key), why in plan.reasons.items() if key.site.endswith("dropout")]
    assert reasons and {"no site of class Dropout in the candidate"} == set(reasons)


def test_what_a_dropout_gives_on_is_told_by_bytes_where_a_dump_has_no_digests(
    gpt: tuple[Any, Run], tmp_path: Path
) -> None:
    model, reference = gpt
    driftline.convert(reference, tmp_path / "ait", to="ait")
    candidate = twins.captured(twins.our_gpt(model), tmp_path / "cand")
    for one, other in ((tmp_path / "ait", candidate), (candidate, tmp_path / "ait")):
        found = {
            (pair.reference.key.site, pair.candidate.key.site)
            for pair in driftline.align(one, other).pairs
        }
        expected = ("transformer.h.3.mlp.dropout", "trunk.3.thinking.3")
        assert (expected if one != candidate else expected[::-1]) in found


def test_the_same_holds_with_the_sides_exchanged(gpt: tuple[Any, Run], tmp_path: Path) -> None:
    model, theirs = gpt
    ours = twins.captured(twins.our_gpt(model), tmp_path / "ref")
    found = partners(driftline.align(ours, theirs))
    assert found["trunk.11.mixing.core.second"] == {"transformer.h.11.attn.c_attn"}
    assert driftline.compare(ours, theirs).verdict == "pass"


def test_a_fault_is_named_at_its_own_layer(gpt: tuple[Any, Run], tmp_path: Path) -> None:
    model, reference = gpt
    twin = twins.our_gpt(model)
    with torch.no_grad():
        twin.trunk[7].mixing["core"].second.weight[3] *= 3.0
    table = driftline.compare(reference, twins.captured(twin, tmp_path / "cand"))
    assert table.verdict == "fail"
    assert table.first is not None
    assert table.first.key.site == "transformer.h.7.attn.c_attn"
    assert table.first.candidate_site == "trunk.7.mixing.core.second"


def test_two_swapped_layers_fail(gpt: tuple[Any, Run], tmp_path: Path) -> None:
    model, reference = gpt
    twin = twins.our_gpt(model)
    layers = list(twin.trunk)
    layers[4], layers[5] = layers[5], layers[4]
    twin.trunk = torch.nn.ModuleList(layers)
    candidate = twins.captured(twin, tmp_path / "cand")
    found = partners(driftline.align(reference, candidate))
    assert found["transformer.h.4.ln_1"] == {"trunk.4.mixing.scale"}
    table = driftline.compare(reference, candidate)
    assert table.verdict == "fail"
    assert table.first.key.site.startswith("transformer.h.4.")


@pytest.mark.parametrize("named", [False, True])
def test_swapped_q_and_k_fail_and_do_not_align_crosswise(
    gpt: tuple[Any, Run], tmp_path: Path, named: bool
) -> None:
    model, reference = gpt
    twin = twins.our_gpt(model)
    core = twin.trunk[2].mixing["core"]
    weights = core.first.state_dict(), core.second.state_dict()
    first, second = copy.deepcopy(weights[0]), copy.deepcopy(weights[1])
    core.first.load_state_dict(second)
    core.second.load_state_dict(first)
    if named:
        for block in twin.trunk:
            inner = block.mixing["core"]
            inner._modules["query"] = inner._modules.pop("first")
            inner._modules["key"] = inner._modules.pop("second")
            inner.__dict__.update(first=inner.query, second=inner.key)
    table = driftline.compare(reference, twins.captured(twin, tmp_path / "cand"))
    assert table.verdict == "fail"
    assert table.first.key.site == "transformer.h.2.attn.c_attn"


def test_a_llama_of_two_layers_aligns_with_gate_and_up_fused(tmp_path: Path) -> None:
    model = twins.llama()
    reference = twins.captured(model, tmp_path / "ref")
    candidate = twins.captured(twins.OurLlama(model), tmp_path / "cand")
    found = partners(driftline.align(reference, candidate))
    for n in range(2):
        here, there = f"model.layers.{n}", f"parts.{n}"
        truth = {
            "input_layernorm": "n1", "self_attn.q_proj": "a", "self_attn.k_proj": "b",
            "self_attn.v_proj": "c", "self_attn.o_proj": "d", "post_attention_layernorm": "n2",
            "mlp.gate_proj": "wide", "mlp.up_proj": "wide", "mlp.down_proj": "back",
        }  # fmt: skip
        for ours, theirs in truth.items():
            assert found[f"{here}.{ours}"] == {f"{there}.{theirs}"}
    table = driftline.compare(reference, candidate)
    assert table.verdict == "pass", table.finding


def test_a_bert_aligns_with_its_qkv_fused(tmp_path: Path) -> None:
    model = twins.bert()
    reference = twins.captured(model, tmp_path / "ref")
    candidate = twins.captured(twins.OurBert(model), tmp_path / "cand")
    found = partners(driftline.align(reference, candidate))
    layer = "encoder.layer.2"
    assert found[f"{layer}.attention.self.key"] == {"stack.2.fused"}
    assert found[f"{layer}.attention.output.LayerNorm"] == {"stack.2.n1"}
    assert found[f"{layer}.output.dense"] == {"stack.2.narrow"}
    table = driftline.compare(reference, candidate)
    # The one gives its last hidden state first, the other nothing but what was pooled.
    assert table.verdict == "incomplete", table.finding
    assert table.finding.startswith("the model's outputs are in both runs and could not be")
    assert not table.failing


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("which", ["gpt2", "llama", "bert"])
def test_a_disguised_model_never_gets_a_wrong_pair(which: str, seed: int, tmp_path: Path) -> None:
    changes = {"gpt2": {"n_layer": 3}}.get(which, {})
    model = getattr(twins, which)(**changes)
    twin, truth = twins.disguised(model, seed)
    reference = twins.captured(model, tmp_path / "ref")
    candidate = twins.captured(twin, tmp_path / "cand")
    plan = driftline.align(reference, candidate)
    ours = dict(model.named_modules())
    theirs = dict(twin.named_modules())
    wrong = [
        str(pair)
        for pair in plan.pairs
        if (here := ours.get(pair.reference.key.site.replace("(root)", "")))
        and truth[id(theirs[pair.candidate.key.site.replace("(root)", "")])] is not here
        and not _same_bytes(pair)
    ]
    assert not wrong
    leaves = [s for s in reference.sites() if _is_leaf(s, reference) and "drop" not in s]
    found = partners(plan)
    assert sum(site in found for site in leaves) >= 0.95 * len(leaves)
    assert driftline.compare(reference, candidate, plan=plan).verdict == "pass"


def _same_bytes(pair: Any) -> bool:
    """A level that hands on what it is given has the same tensors as what is inside."""
    return pair.reference.digest == pair.candidate.digest


def test_a_missing_layer_leaves_ties_rather_than_wrong_pairs(tmp_path: Path) -> None:
    model = twins.gpt2(n_layer=4)
    twin = twins.our_gpt(model)
    twin.trunk = torch.nn.ModuleList([twin.trunk[0], twin.trunk[1], twin.trunk[3]])
    reference = twins.captured(model, tmp_path / "ref")
    candidate = twins.captured(twin, tmp_path / "cand")
    plan = driftline.align(reference, candidate)
    found = partners(plan)
    for site, partner in found.items():
        if site.startswith("transformer.h.3."):
            assert not any(p.startswith(("trunk.0", "trunk.1")) for p in partner)
    assert any("equally good" in reason for reason in plan.reasons.values())


def test_every_tensor_left_over_has_a_reason(gpt: tuple[Any, Run], tmp_path: Path) -> None:
    model, reference = gpt
    plan = driftline.align(reference, twins.captured(twins.our_gpt(model), tmp_path / "cand"))
    for side, records in (("reference", plan.missing), ("candidate", plan.extra)):
        assert all(plan.reasons[side, record.key] for record in records)
    mlp = next(r.key for r in plan.missing if r.class_name == "GPT2MLP")
    assert "holds the same part of the model" in plan.reasons["reference", mlp]
    assert "by structure, 0.90" in "\n".join(plan.lines())


def test_without_structure_names_decide_alone(gpt: tuple[Any, Run], tmp_path: Path) -> None:
    model, reference = gpt
    candidate = twins.captured(twins.our_gpt(model), tmp_path / "cand")
    plan = driftline.align(reference, candidate, structural=False)
    assert set(partners(plan)) == {"(root)"}


def test_params_and_gradients_of_fused_projections_are_compared(tmp_path: Path) -> None:
    model = twins.gpt2(n_layer=2, tie_word_embeddings=False)
    reference, candidate = (_trained(m, tmp_path) for m in (model, twins.our_gpt(model)))
    plan = driftline.align(reference, candidate)
    ports = {p.reference.key.port for p in plan.pairs if "c_attn" in p.reference.key.site}
    assert {"input", "output", "param", "grad_output", "param_grad"} <= ports
    table = driftline.compare(reference, candidate, plan=plan)
    assert table.verdict == "pass", table.finding


def _trained(model: Any, folder: Path) -> Run:
    path = folder / type(model).__name__
    with driftline.capture(model, path, levels=("modules", "gradients", "params")):
        out = model(torch.arange(8)[None])
        (out if isinstance(out, torch.Tensor) else out.logits).square().mean().backward()
    return driftline.open_run(path)


@pytest.mark.parametrize("layers", [11, 2])
def test_a_torch_dump_aligns_with_an_atb_dump_and_the_error_is_named(
    layers: int, tmp_path: Path
) -> None:
    for name in ("mini_torch", "mini_atb"):
        shutil.copytree(DATA / name, tmp_path / name)
    if layers == 2:  # layers 5 and 6, the first of which has the planted error
        for n in {*range(11)} - {5, 6}:
            for path in (tmp_path / "mini_torch").rglob(f"root.model.layers.{n}*"):
                if path.name.split(".")[3] == str(n):
                    shutil.rmtree(path)
            for path in (tmp_path / "mini_atb").rglob(f"{n + 1}_Decoder_layer"):
                shutil.rmtree(path)
    table = driftline.compare(tmp_path / "mini_torch", tmp_path / "mini_atb")
    assert sum(row.compared for row in table.rows) == 3 * layers + 4  # the model and its inside
    around = {row.key.site: row.candidate_site for row in table.rows if row.compared}
    assert around["(root)"] == around["model"] == around["model.norm"]
    assert table.first is not None
    assert table.first.key.site == "model.layers.5.proj"
    assert table.first.candidate_site == "6_Decoder_layer.1_LinearOperation"


class Shared(torch.nn.Module):
    """One layer called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.e = torch.nn.Embedding(64, 32)
        self.l = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32))
        self.h = torch.nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.e(x)
        for _ in range(3):
            x = x + self.l(x)
        return self.h(x)


class Unrolled(torch.nn.Module):
    """The same as three layers."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.table = copy.deepcopy(shared.e)
        self.all = torch.nn.ModuleList(copy.deepcopy(shared.l) for _ in range(3))
        self.head = copy.deepcopy(shared.h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for layer in self.all:
            x = x + layer(x)
        return self.head(x)


def test_the_visits_of_a_shared_layer_align_with_layers_of_their_own(tmp_path: Path) -> None:
    model = Shared().eval()
    reference = twins.captured(model, tmp_path / "ref")
    candidate = twins.captured(Unrolled(model).eval(), tmp_path / "cand")
    plan = driftline.align(reference, candidate)
    assert not plan.missing and not plan.extra
    second = [p for p in plan.pairs if p.reference.key.site == "l.1" and p.reference.key.visit == 1]
    assert {p.candidate.key.site for p in second} == {"all.1.1"}
    assert driftline.compare(reference, candidate, plan=plan).verdict == "pass"


def test_sequences_that_are_too_long_are_a_note_and_no_crash(
    gpt: tuple[Any, Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from driftline.alignment.rules import leaves as sequence

    monkeypatch.setattr(sequence, "MOST_CELLS", 50)
    model, reference = gpt
    twin = twins.our_gpt(model)
    twin.trunk = twin.trunk[:11]
    plan = driftline.align(reference, twins.captured(twin, tmp_path / "cand"))
    assert any("too many, and too different" in note for note in plan.notes)


class OneCall(torch.nn.Module):
    """A layer whose attention is one call: torch runs no module inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.n = torch.nn.LayerNorm(32)
        self.attn = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.f = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.n(x)
        return self.f(x + self.attn(y, y, y, need_weights=False)[0])


class ManyCalls(torch.nn.Module):
    def __init__(self, other: OneCall) -> None:
        super().__init__()
        self.a = copy.deepcopy(other.n)
        self.mix = twins.SplitAttention(32, 4, causal=False)
        self.z = copy.deepcopy(other.f)
        weights, biases = other.attn.in_proj_weight.chunk(3), other.attn.in_proj_bias.chunk(3)
        three = (self.mix.first, self.mix.second, self.mix.third)
        with torch.no_grad():
            for linear, weight, bias in zip(three, weights, biases, strict=True):
                linear.weight.copy_(weight)
                linear.bias.copy_(bias)
        self.mix.mix.load_state_dict(other.attn.out_proj.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.z(x + self.mix(self.a(x)))


def test_an_attention_of_one_call_aligns_with_one_of_modules(tmp_path: Path) -> None:
    layers = [OneCall().eval() for _ in range(2)]
    table = torch.nn.Embedding(64, 32)
    ours = torch.nn.Sequential(OrderedDict(e=table, one=layers[0], two=layers[1]))
    inner = torch.nn.Sequential(OrderedDict(x=ManyCalls(layers[0]), y=ManyCalls(layers[1])))
    theirs = torch.nn.Sequential(OrderedDict(words=table, stack=inner))
    reference = twins.captured(ours.eval(), tmp_path / "ref")
    candidate = twins.captured(theirs.eval(), tmp_path / "cand")
    plan = driftline.align(reference, candidate)
    assert partners(plan)["two.attn"] == {"stack.y.mix"}
    table_of = driftline.compare(reference, candidate, plan=plan)
    assert table_of.verdict == "pass", table_of.finding
    # Also under the same names, where only the class says that it is another module.
    names = torch.nn.Sequential(OrderedDict(e=table, one=inner.x, two=inner.y))
    named_alike = twins.captured(names.eval(), tmp_path / "alike")
    assert driftline.compare(reference, named_alike).verdict == "pass"


class Three(torch.nn.Module):
    """What a GPT-NeoX has as one Linear, head by head, as three."""

    def __init__(self, fused: torch.nn.Linear, heads: int) -> None:
        super().__init__()
        size, self.heads = fused.in_features, heads
        self.parts = torch.nn.ModuleList(torch.nn.Linear(size, size) for _ in range(3))
        with torch.no_grad():
            for at, part in enumerate(self.parts):
                part.weight.copy_(fused.weight.view(heads, 3, -1, size)[:, at].reshape(size, size))
                part.bias.copy_(fused.bias.view(heads, 3, -1)[:, at].reshape(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [part(x).view(*x.shape[:2], self.heads, 1, -1) for part in self.parts]
        return torch.cat(made, 3).reshape(*x.shape[:2], -1)


def test_a_qkv_that_is_fused_head_by_head_is_taken_apart_so(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        vocab_size=64, max_position_embeddings=32, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPTNeoXForCausalLM(config).eval()
    split = copy.deepcopy(model)
    for layer in split.gpt_neox.layers:
        layer.attention.query_key_value = Three(layer.attention.query_key_value, 4)
    candidate = twins.captured(twins.disguised(split, 5)[0], tmp_path / "cand")
    reference = twins.captured(model, tmp_path / "ref")
    plan = driftline.align(reference, candidate)
    fused = [p for p in plan.pairs if p.reference.key.site.endswith("query_key_value")]
    assert sum("select" in str(p.reference_recipe) for p in fused) == 6
    assert driftline.compare(reference, candidate, plan=plan).verdict == "pass"


class Gated(torch.nn.Module):
    """Two gated MLPs; the order in which gate and up are called is free."""

    def __init__(self, names: tuple[str, str, str], up_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names, self.up_first = names, up_first
        self.parts = torch.nn.ModuleList()
        for _ in range(2):
            part = torch.nn.ModuleDict({"n": torch.nn.LayerNorm(32)})
            for name, sizes in zip(names, ((32, 48), (32, 48), (48, 32)), strict=True):
                part[name] = torch.nn.Linear(*sizes)
            part["act"] = torch.nn.SiLU()
            self.parts.append(part)
        self.words = torch.nn.Embedding(64, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for part in self.parts:
            gate, up, down = (part[name] for name in self.names)
            y = part["n"](x)
            if self.up_first:
                wide = up(y)
                x = x + down(part["act"](gate(y)) * wide)
            else:
                x = x + down(part["act"](gate(y)) * up(y))
        return x


@pytest.mark.parametrize("names", [("gate", "up", "down"), ("a", "b", "c")])
def test_gate_and_up_called_in_another_order_are_told_by_the_activation(
    names: tuple[str, str, str], tmp_path: Path
) -> None:
    reference = twins.captured(Gated(names, up_first=False).eval(), tmp_path / "ref")
    twin = Gated(("w1", "w3", "w2"), up_first=True).eval()
    candidate = twins.captured(twin, tmp_path / "cand")
    found = partners(driftline.align(reference, candidate))
    assert found[f"parts.0.{names[0]}"] == {"parts.0.w1"}
    assert found[f"parts.1.{names[1]}"] == {"parts.1.w3"}
    assert driftline.compare(reference, candidate).verdict == "pass"
    first, second = twin.parts[1]["w1"], twin.parts[1]["w3"]
    weights = copy.deepcopy(first.state_dict())
    first.load_state_dict(second.state_dict())
    second.load_state_dict(weights)
    table = driftline.compare(reference, twins.captured(twin, tmp_path / "swapped"))
    assert table.verdict == "fail"
    assert table.first.key.site == f"parts.1.{names[0]}"


def test_a_numbered_holder_called_like_a_projection_says_no_role() -> None:
    from driftline.alignment.sites.kinds import role_of

    assert role_of("k0.w1") == "" and role_of("attn.q.linear") == "q" and role_of("a.k_proj") == "k"


class Convolved(torch.nn.Module):
    """A gated MLP whose gate and up are one Conv1D as wide as its input: a square weight."""

    def __init__(self, fused: bool) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        torch.manual_seed(0)
        self.fused = fused
        self.words = torch.nn.Embedding(64, 32)
        self.wide = Conv1D(32, 32)
        self.down = torch.nn.Linear(16, 32)
        torch.nn.init.normal_(self.wide.weight)
        torch.nn.init.normal_(self.wide.bias)
        if not fused:
            wide = self.wide
            del self.wide
            self.gate, self.up = Conv1D(16, 32), Conv1D(16, 32)
            with torch.no_grad():
                for at, part in enumerate((self.gate, self.up)):
                    part.weight.copy_(wide.weight[:, 16 * at : 16 * at + 16])
                    part.bias.copy_(wide.bias[16 * at : 16 * at + 16])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        gate, up = self.wide(x).chunk(2, -1) if self.fused else (self.gate(x), self.up(x))
        return self.down(torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("fused_first", [True, False])
def test_a_fused_conv1d_is_taken_apart_along_its_outputs(fused_first: bool, tmp_path: Path) -> None:
    """Its weight is (in, out); where it is square no size says along which axis the parts lie."""
    runs = [
        twins.captured(Convolved(fused).eval(), tmp_path / str(fused), levels=("modules", "params"))
        for fused in (fused_first, not fused_first)
    ]
    plan = driftline.align(*runs)
    cuts = {
        (str(pair.reference_recipe or pair.candidate_recipe), pair.reference.key.slot)
        for pair in plan.pairs
        if "wide" in (pair.reference.key.site, pair.candidate.key.site)
        and pair.reference.key.port == "param"
    }
    assert cuts == {
        ("split(axis 1, 0:16) of 32x32", "weight"),
        ("split(axis 1, 16:32) of 32x32", "weight"),
        ("split(axis 0, 0:16) of 32", "bias"),
        ("split(axis 0, 16:32) of 32", "bias"),
    }
    table = driftline.compare(*runs, plan=plan)
    assert table.verdict == "pass", table.finding


def test_the_weight_of_a_fused_conv1d_is_compared_with_each_of_its_parts(tmp_path: Path) -> None:
    model = twins.gpt2(n_layer=2)
    levels = ("modules", "params")
    reference = twins.captured(model, tmp_path / "ref", levels=levels)
    candidate = twins.captured(twins.our_gpt(model), tmp_path / "cand", levels=levels)
    table = driftline.compare(reference, candidate)
    rows = [row for row in table.rows if row.site.endswith("c_attn") and row.slot == "weight"]
    parts = ("first", "second", "third")
    assert [row.candidate_site for row in rows] == [
        f"trunk.{layer}.mixing.core.{part}" for layer in range(2) for part in parts
    ]
    for row, at in zip(rows, (0, 32, 64) * 2, strict=True):
        assert f"split(axis 1, {at}:{at + 32})" in row.reference_recipe
        assert row.metrics["different"] == 0


def test_members_of_a_family_that_nothing_tells_apart_are_no_certain_pairs(tmp_path: Path) -> None:
    """By the order of calls alone: q, k and v have one size, and these names say no role."""
    model = twins.gpt2(n_layer=2)
    twin = twins.our_gpt(model)
    reference = twins.captured(model, tmp_path / "ref")

    def confidence(path: Path) -> set[float]:
        plan = driftline.align(reference, twins.captured(twin, path))
        parts = [p for p in plan.pairs if p.reference.key.site.endswith("c_attn")]
        assert len(parts) == 2 * 3 * 2  # layers, members, input and output
        return {pair.confidence for pair in parts}

    assert confidence(tmp_path / "plain") == {0.7}
    for block in twin.trunk:
        inner = block.mixing["core"]
        for name, plain in (("query", "first"), ("key", "second"), ("value", "third")):
            inner._modules[name] = inner._modules.pop(plain)
            inner.__dict__[plain] = inner._modules[name]
    assert min(confidence(tmp_path / "named")) > 0.7


@pytest.mark.parametrize("seed", [1, 4])
@pytest.mark.parametrize("which", ["gpt2", "llama", "bert"])
def test_captured_parameters_do_not_move_a_site_in_the_order_of_execution(
    which: str, seed: int, tmp_path: Path
) -> None:
    """They are recorded before the first call, in the order of registration."""
    changes = {"gpt2": {"n_layer": 3}}.get(which, {})
    model = getattr(twins, which)(**changes)
    twin, truth = twins.disguised(model, seed)
    levels = ("modules", "params")
    reference = twins.captured(model, tmp_path / "ref", levels=levels)
    candidate = twins.captured(twin, tmp_path / "cand", levels=levels)
    plan = driftline.align(reference, candidate)
    ours, theirs = dict(model.named_modules()), dict(twin.named_modules())
    for pair in plan.pairs:
        here = ours[pair.reference.key.site.replace("(root)", "")]
        there = truth[id(theirs[pair.candidate.key.site.replace("(root)", "")])]
        assert there is here or _same_bytes(pair), str(pair)
    params = [r for r in plan.missing if r.key.port == "param"]
    assert len(params) <= 1  # a tied weight may be another's on the other side
    assert driftline.compare(reference, candidate, plan=plan).verdict == "pass"


def test_parameters_of_what_is_never_called_go_with_the_site_around_them(tmp_path: Path) -> None:
    model = OneCall()
    twin, _ = twins.disguised(model, 2)
    runs: list[Run] = []
    for each, name in ((model, "a"), (twin, "b")):
        levels = ("modules", "params")
        with torch.no_grad(), driftline.capture(each.eval(), tmp_path / name, levels=levels):
            each(torch.linspace(-1, 1, 128).reshape(1, 4, 32))
        runs.append(driftline.open_run(tmp_path / name))
    plan = driftline.align(*runs)
    assert not plan.missing
    found = [p for p in plan.pairs if p.reference.key.site == "attn.out_proj"]
    assert {p.reference.key.slot for p in found} == {"weight", "bias"}
    assert driftline.compare(*runs, plan=plan).verdict == "pass"


def test_two_models_with_little_in_common_are_asked_about(tmp_path: Path) -> None:
    reference = twins.captured(twins.llama(), tmp_path / "ref")
    candidate = twins.captured(twins.bert(), tmp_path / "cand")
    plan = driftline.align(reference, candidate)
    assert any("are these runs of one model?" in note for note in plan.notes)
    table = driftline.compare(reference, candidate, plan=plan)
    assert table.verdict == "incomparable"  # the token ids are all that agrees
    assert "only inputs could be compared" in table.finding


def test_nothing_told_apart_is_said_with_the_reason() -> None:
    import numpy as np

    from driftline.errors import BadInput
    from driftline.testing.runs import run_of

    x = np.ones((1, 4), np.float32)
    ours, theirs = ({f"{side}{n}": x for n in range(count)} for side, count in (("a", 3), ("b", 2)))
    classes = {f"{side}{n}": "Linear" for side in "ab" for n in range(3)}
    with pytest.raises(BadInput, match="cannot tell them apart either: 'b0' of the candidate"):
        driftline.align(run_of(ours, classes=classes), run_of(theirs, classes=classes))
