"""Sharded against whole: two captured halves of an MLP against the MLP itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import driftline
from driftline.alignment.align import AlignOptions, align_runs
from driftline.alignment.normalise.view import Replicas
from driftline.alignment.placements.declared import _joined_shards, parse_placement
from driftline.comparison.table.table import Table
from driftline.errors import BadInput
from driftline.runs.records import Record, TensorKey
from driftline.runs.writer import RunWriter
from driftline.testing.runs import record_into, run_of
from support.atb import AtbDump, Operation, Value

# A power of two in every value keeps sums exact, so that halves add up to the whole bit for bit.
RULES = (
    "up=shard(-1)",
    "up/param=shard(0)",
    "act=shard(2)",
    "down/input=shard(2)",
    "down/param/weight=shard(1)",
    "down/output=partial(sum)",
)


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.Identity()
        self.up = nn.Linear(hidden, inner)
        self.act = nn.ReLU()
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.act(self.up(self.norm(x))))


def whole() -> tuple[Mlp, torch.Tensor]:
    torch.manual_seed(0)
    model = Mlp(8, 16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-4, 5, parameter.shape).float() / 4)
    return model, torch.randint(-4, 5, (2, 3, 8)).float() / 4


def half(model: Mlp, rank: int) -> Mlp:
    part = Mlp(8, 8)
    cut = slice(8 * rank, 8 * rank + 8)
    with torch.no_grad():
        part.up.weight.copy_(model.up.weight[cut])
        part.up.bias.copy_(model.up.bias[cut])
        part.down.weight.copy_(model.down.weight[:, cut])
    return part


def captured(model: nn.Module, x: torch.Tensor, sink: RunWriter) -> None:
    with driftline.capture(model, sink, levels=("modules", "params")), torch.no_grad():
        model(x)
    sink.close()


def runs(tmp_path: Path, spoil: str = "") -> tuple[Path, Path]:
    model, x = whole()
    captured(model, x, RunWriter(tmp_path / "whole", seal_at_exit=False))
    for rank in (0, 1):
        part = half(model, rank)
        given = x.clone()
        with torch.no_grad():
            if spoil == "up" and rank == 1:
                part.up.weight[3] += 1.0
            if spoil == "replica" and rank == 1:
                given[0, 0, 0] += 1.0
        writer = RunWriter(tmp_path / "halves", rank=rank, world_size=2, seal_at_exit=False)
        captured(part, given, writer)
    return tmp_path / "whole", tmp_path / "halves"


def inner(table: Table) -> list[str]:
    """Failing sites, in order; the root's own output is unreduced on each rank, so left out."""
    return [f"{row.site}/{row.port}/{row.slot}" for row in table.failing]


def test_halves_joined_and_summed_are_the_whole_bit_for_bit(tmp_path: Path) -> None:
    reference, candidate = runs(tmp_path)
    rules = (*RULES, "(root)/output=partial(sum)")
    table = driftline.compare(reference, candidate, placements=rules)
    assert table.verdict == "pass"
    assert all(row.metrics["relative_l2"] == 0.0 for row in table.rows)
    assert table.coverage.share == 1.0
    recipes = {f"{row.site}/{row.port}/{row.slot}": row.candidate_recipe for row in table.rows}
    assert recipes["up/output/0"] == "concat(axis 2) of 2 ranks"
    assert recipes["up/param/weight"] == "concat(axis 0) of 2 ranks"
    assert recipes["down/param/weight"] == "concat(axis 1) of 2 ranks"
    assert recipes["down/output/0"] == "sum of 2 ranks"
    assert any("2 ranks" in note for note in table.notes)


def test_a_site_rule_takes_what_has_the_whole_shape_for_replicas(tmp_path: Path) -> None:
    reference, candidate = runs(tmp_path)
    table = driftline.compare(reference, candidate, placements=RULES)
    inputs = [row for row in table.rows if (row.site, row.port) == ("up", "input")]
    assert [row.candidate_rank for row in inputs] == [None, 1]
    assert all(row.candidate_recipe == "" for row in inputs)


def test_a_fault_inside_one_shard_is_found_at_its_site(tmp_path: Path) -> None:
    reference, candidate = runs(tmp_path, spoil="up")
    rules = (*RULES, "(root)/output=partial(sum)")
    table = driftline.compare(reference, candidate, placements=rules)
    assert table.first_site == "up"
    assert inner(table)[0] == "up/param/weight"
    output = next(row for row in table.rows if (row.site, row.port) == ("up", "output"))
    assert int(output.metrics["max_abs_error_at"]) % 16 == 8 + 3


def test_a_replica_that_differs_is_a_row_of_its_own(tmp_path: Path) -> None:
    reference, candidate = runs(tmp_path, spoil="replica")
    table = driftline.compare(reference, candidate, placements=RULES, sites=["norm"])
    statuses = {(row.port, row.candidate_rank): row.status for row in table.rows}
    assert statuses["output", None] == "pass"
    assert statuses["output", 1] == "fail"


def test_the_wrong_axis_does_not_pass(tmp_path: Path) -> None:
    reference, candidate = runs(tmp_path)
    table = driftline.compare(reference, candidate, placements=["up=shard(0)"], sites=["up"])
    output = next(row for row in table.rows if row.port == "output")
    assert output.status == "incomparable"
    assert "the shapes differ: 2x3x16 against 4x3x8" in output.reason


def test_a_sharded_reference_works_as_well(tmp_path: Path) -> None:
    reference, candidate = runs(tmp_path)
    rules = (*RULES, "(root)/output=partial(sum)")
    table = driftline.compare(candidate, reference, placements=rules)
    assert table.verdict == "pass"
    assert table.coverage.share == 1.0
    assert any(row.reference_recipe == "sum of 2 ranks" for row in table.rows)


def test_without_a_placement_the_plan_says_what_shapes_say(tmp_path: Path) -> None:
    reference, candidate = runs(tmp_path)
    plan = align_runs(driftline.open_run(reference), driftline.open_run(candidate))
    assert any("joined along axis 0 over ranks (by shape)" in note for note in plan.notes)
    assert not plan.extra
    assert not plan.missing


def test_a_rank_that_lacks_its_shard_is_said() -> None:
    x = np.ones((2, 4), np.float32)
    whole_run = run_of({"a": x, "b": x})
    sharded = _two_ranks({"a": x[:, :2], "b": x[:, :2]}, {"a": x[:, 2:]})
    plan = align_runs(whole_run, sharded, AlignOptions(placements=("a=shard(1)", "b=shard(1)")))
    trouble = {pair.reference.key.site: pair.trouble for pair in plan.pairs}
    assert trouble["a"] == ""
    assert "only rank 0 of 2 has it" in trouble["b"]


def test_a_vector_and_a_scalar_are_no_shards_of_one_tensor() -> None:
    x = np.ones(4, np.float32)
    sharded = _two_ranks({"a": x[:2]}, {"a": np.float32(1.0).reshape(())})
    plan = align_runs(run_of({"a": x}), sharded, AlignOptions(placements=("a=shard(0)",)))
    (pair,) = plan.pairs
    assert "the ranks' shapes do not fit" in pair.trouble


def test_uneven_shards_are_joined() -> None:
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    table = driftline.compare(
        run_of({"a": x}), _two_ranks({"a": x[:, :3]}, {"a": x[:, 3:]}), placements=["a=shard(1)"]
    )
    assert table.rows[0].metrics["different"] == 0


def test_ranks_that_only_have_other_numbers_pair_in_order(tmp_path: Path) -> None:
    x = np.arange(4, dtype=np.float32)
    writer = RunWriter(tmp_path / "run", rank=5, world_size=8, seal_at_exit=False)
    record_into(writer, "a", x)
    writer.close()
    table = driftline.compare(run_of({"a": x}), tmp_path / "run")
    assert table.verdict == "pass"
    assert table.rows[0].candidate_rank == 5
    assert table.notes == ("ranks of the candidate, in order: 5 is 0",)


@pytest.mark.parametrize(
    "text", ["a", "a=", "=shard(1)", "a=shard", "a=shard(x)", "a=split(1)", "a=partial(mean)"]
)
def test_a_text_that_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_placement(text)


def test_a_placement_that_covers_nothing_is_refused(tmp_path: Path) -> None:
    reference, candidate = runs(tmp_path)
    with pytest.raises(BadInput, match="covers no tensor"):
        driftline.compare(reference, candidate, placements=["upp=shard(1)"])


def test_a_placement_for_two_single_ranks_is_refused() -> None:
    run = run_of({"a": np.ones(2)})
    with pytest.raises(BadInput, match="one rank only"):
        driftline.compare(run, run, placements=["a=shard(0)"])


def _two_ranks(*ranks: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]):
    from driftline.alignment.normalise.view import AlignedView

    whole_run = run_of(
        {
            f"{name}.{rank}": values
            for rank, held in enumerate(ranks)
            for name, values in held.items()
        }
    )
    records = [
        record._replace(
            key=record.key._replace(site=record.key.site[:-2], rank=int(record.key.site[-1]))
        )
        for record in whole_run.records
    ]
    return AlignedView(whole_run, records, {})


class Projections(nn.Module):
    def __init__(self, parts: dict[str, int]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        for name, width in parts.items():
            setattr(self, name, nn.Linear(8, width))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        given = self.norm(x)
        return [layer(given) for name, layer in self.named_children() if name != "norm"]


@pytest.mark.parametrize("turned", [False, True])
def test_a_fused_projection_is_set_against_split_and_sharded_ones(
    tmp_path: Path, turned: bool
) -> None:
    torch.manual_seed(0)
    fused = Projections({"qkv_proj": 24})
    x = torch.randn(1, 4, 8)
    captured(fused, x, RunWriter(tmp_path / "fused", seal_at_exit=False))
    for rank in (0, 1):
        part = Projections({"q_proj": 4, "k_proj": 4, "v_proj": 4})
        for at, name in enumerate(("q_proj", "k_proj", "v_proj")):
            rows = slice(8 * at + 4 * rank, 8 * at + 4 * rank + 4)
            with torch.no_grad():
                getattr(part, name).weight.copy_(fused.qkv_proj.weight[rows])
                getattr(part, name).bias.copy_(fused.qkv_proj.bias[rows])
        writer = RunWriter(tmp_path / "split", rank=rank, world_size=2, seal_at_exit=False)
        captured(part, x, writer)
    sides = [tmp_path / "fused", tmp_path / "split"]
    rules = ["?_proj=shard(-1)", "?_proj/param=shard(0)"]
    table = driftline.compare(*(sides[::-1] if turned else sides), placements=rules)
    made = [row for row in table.rows if row.port == "output" and "_proj" in row.site]
    assert len(made) == 3
    for row in made:
        assert row.metrics["relative_l2"] < 1e-6
        recipes = {row.reference_recipe, row.candidate_recipe}
        assert "concat(axis 2) of 2 ranks" in recipes
        assert any(recipe.startswith("split(axis 2") for recipe in recipes)


def test_a_fused_replica_that_differs_is_found_on_its_rank(tmp_path: Path) -> None:
    torch.manual_seed(0)
    fused = Projections({"qkv_proj": 24})
    split = Projections({"q_proj": 8, "k_proj": 8, "v_proj": 8})
    with torch.no_grad():
        for at, name in enumerate(("q_proj", "k_proj", "v_proj")):
            getattr(split, name).weight.copy_(fused.qkv_proj.weight[8 * at : 8 * at + 8])
            getattr(split, name).bias.copy_(fused.qkv_proj.bias[8 * at : 8 * at + 8])
        split.norm.load_state_dict(fused.norm.state_dict())
    x = torch.randn(1, 4, 8)
    captured(split, x, RunWriter(tmp_path / "split", seal_at_exit=False))
    for rank in (0, 1):
        if rank:
            with torch.no_grad():
                fused.qkv_proj.weight[9] *= 3  # in the second rank's k only
        writer = RunWriter(tmp_path / "fused", rank=rank, world_size=2, seal_at_exit=False)
        captured(fused, x, writer)
    table = driftline.compare(tmp_path / "split", tmp_path / "fused", placements=["*=replicate"])
    assert table.verdict == "fail"
    wrong = {(row.site, row.candidate_rank) for row in table.failing if row.port == "output"}
    assert ("k_proj", 1) in wrong
    assert not any(site in ("q_proj", "v_proj") for site, _ in wrong)


def test_devices_of_an_accelerators_dump_are_ranks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 8)).astype(np.float16)
    out = rng.standard_normal((3, 6)).astype(np.float16)

    def dump(folder: str, device: int, values: np.ndarray[Any, Any], pid: int) -> None:
        operation = Operation("LinearOperation", [Value("x", x)], [Value("y", values)], {})
        AtbDump(tmp_path / folder, device=device, pid=pid).execute([operation])

    dump("whole", 0, out, 7)
    dump("parts", 2, np.ascontiguousarray(out[:, :3]), 70)
    dump("parts", 3, np.ascontiguousarray(out[:, 3:]), 71)
    rules = ["*LinearOperation/output=shard(-1)"]
    table = driftline.compare(tmp_path / "whole", tmp_path / "parts", placements=rules)
    assert table.verdict == "pass"
    output = next(row for row in table.rows if row.port == "output")
    assert output.candidate_recipe == "concat(axis 1) of 2 ranks"
    assert [row.candidate_rank for row in table.rows if row.port == "input"] == [2, 3]


PARTS = {part: np.random.default_rng(at).standard_normal((16, 16)) for at, part in enumerate("qkv")}
SEEN = np.random.default_rng(9).standard_normal((2, 3, 16)).astype(np.float32)


def attention(folder: Path, ranks: int, fused: bool, wrong: float = 1.0) -> Path:
    """q, k and v, as one matrix or three, each rank with its rows of every one."""
    size = 16 // ranks
    for rank in range(ranks):
        own = slice(rank * size, rank * size + size)
        weights = {f"attn.{part}": matrix[own] for part, matrix in PARTS.items()}
        if fused:
            weights = {"attn.qkv_proj": np.concatenate(list(weights.values()))}
        writer = RunWriter(folder, rank=rank, world_size=ranks, seal_at_exit=False)
        for site, matrix in weights.items():
            weight = matrix.astype(np.float32) * np.float32(wrong if rank else 1.0)
            key = TensorKey.of(site, "input", "0", rank=rank)
            for port, slot, values in (
                ("input", "0", SEEN), ("param", "weight", weight), ("output", "0", SEEN @ weight.T),
            ):  # fmt: skip
                record_into(writer, key._replace(port=port, slot=slot), values, class_name="Linear")
        writer.close()
    return folder


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("theirs", [False, True])
def test_shards_of_fused_projections_combine_with_a_placement(
    tmp_path: Path, ours: bool, theirs: bool
) -> None:
    whole = attention(tmp_path / "whole", 1, fused=ours)
    rules = ["attn.*/output=shard(-1)", "attn.*/param=shard(0)"]
    for name, wrong, verdict in (("good", 1.0, "pass"), ("bad", 1.5, "fail")):
        shards = attention(tmp_path / name, 2, fused=theirs, wrong=wrong)
        table = driftline.compare(whole, shards, placements=rules)
        assert table.verdict == verdict, table.finding
        assert all(row.compared for row in table.rows)
    if ours and theirs:
        told = ["attn.*/output=shard(-1, 1:1:1)", "attn.*/param=shard(0, 1:1:1)"]
        table = driftline.compare(whole, tmp_path / "good", placements=told)
        assert table.verdict == "pass"
        assert driftline.compare(whole, tmp_path / "bad", placements=told).verdict == "fail"
        odd = ["attn.*/output=shard(-1, 5:1:1)"]
        table = driftline.compare(whole, tmp_path / "good", placements=odd)
        assert any("have no such parts" in row.reason for row in table.rows)


@pytest.mark.parametrize(
    "text", ["a=shard(0, 0:1)", "a=shard(0, 3)", "a=shard(0, )", "a=shard(0,x)"]
)
def test_parts_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="what the parts are"):
        parse_placement(text)
    assert str(parse_placement("a=shard(-1, 4:1:1)")) == "a=shard(-1, 4:1:1)"


def test_a_tensor_without_the_declared_axis_is_held_in_full_by_every_rank() -> None:
    """`shard(1)` for a whole site covers its weight; its bias has one axis, number 0."""
    bias = [
        Record(TensorKey.of("up", "param", "bias", rank=rank), 16, "float32", (4,))
        for rank in range(2)
    ]
    for axis in ("1", "2", "-2"):
        origin, shape = _joined_shards(bias, parse_placement(f"up=shard({axis})"))
        assert isinstance(origin, Replicas)
        assert shape == (4,)
