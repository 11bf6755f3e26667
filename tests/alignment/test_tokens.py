"""Tokens: pads, packed sequences, batches; which step is which; and what must not be cut."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import driftline
from driftline.alignment.align import AlignOptions, align_runs
from driftline.alignment.normalise.steps import parse_step_map
from driftline.alignment.reconcile.tokens import Batch, _unfolded_both
from driftline.comparison.table.table import Table
from driftline.errors import BadInput
from driftline.runs.records import TensorKey
from driftline.runs.run import Run
from driftline.testing.runs import run_of
from support.atb_twins import atb_twin, torch_twin, toy_decoder

PAD = 0
HIDDEN = 6
TABLE = np.random.default_rng(7).standard_normal((50, HIDDEN)).astype(np.float32)
PROMPT = np.array([[11, 12, 13, 14, 15]])


def network(ids: np.ndarray[Any, Any], mask: np.ndarray[Any, Any] | None = None, **how: Any) -> Run:
    """A model without attention: what a token gives does not depend on the others."""
    return run_of(executed(ids, mask, **how))


def executed(
    ids: np.ndarray[Any, Any],
    mask: np.ndarray[Any, Any] | None = None,
    *,
    step: int = 0,
    flat: bool = False,
    spoil: tuple[int, ...] | None = None,
    with_ids: bool = True,
) -> dict[Any, np.ndarray[Any, Any]]:
    x = TABLE[ids]
    y = np.tanh(x)
    if spoil is not None:
        y = y.copy()
        y[spoil] += 1.0
    scores = np.einsum("bqh,bkh->bqk", y, y)[:, None].repeat(2, 1)
    if flat:
        x, y = x.reshape(-1, HIDDEN), y.reshape(-1, HIDDEN)
    tensors: dict[Any, np.ndarray[Any, Any]] = {}
    if with_ids:
        tensors["model/input/input_ids"] = ids.reshape(-1) if flat else ids
    if mask is not None:
        tensors["model/input/attention_mask"] = mask
    tensors |= {"model.embed": x, "model.mlp": y}
    if not flat:
        tensors["model.attn"] = scores
    return {
        TensorKey.of(*_named(name), step=step) if step else name: values
        for name, values in tensors.items()
    }


def _named(name: str) -> Any:
    site, _, rest = name.partition("/")
    port, _, slot = rest.partition("/")
    return site, port or "output", slot or "0"


def statuses(table: Table) -> dict[str, str]:
    return {row.site: row.status for row in table.rows if row.port == "output"}


def padded(side: str, width: int = 8) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    pads = np.full((1, width - PROMPT.shape[1]), PAD)
    parts = [PROMPT, pads] if side == "right" else [pads, PROMPT]
    ids = np.concatenate(parts, axis=1)
    return ids, (ids != PAD).astype(np.int64)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("evidence", ["mask", "ids"])
def test_pads_are_cut_off_on_the_side_where_they_are(side: str, evidence: str) -> None:
    ids, mask = padded(side)
    candidate = network(ids, mask if evidence == "mask" else None)
    table = driftline.compare(network(PROMPT), candidate)
    kept = "3:8" if side == "left" else "0:5"
    for row in table.rows:
        if row.port == "output":
            assert row.metrics["different"] == 0
            assert f"trim(axis {2 if row.site == 'model.attn' else 1}, {kept})" in (
                row.candidate_recipe
            )
    attention = next(row for row in table.rows if row.site == "model.attn")
    assert attention.candidate_recipe.count("trim(") == 2
    assert f"tokens {kept} of 8 in the candidate" in table.notes[0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_fault_beside_pads_is_found_at_its_site_and_token(side: str) -> None:
    ids, mask = padded(side)
    at = 2 + (3 if side == "left" else 0)
    table = driftline.compare(network(PROMPT), network(ids, mask, spoil=(0, at, 4)))
    assert statuses(table)["model.embed"] == "pass"
    row = next(row for row in table.rows if row.site == "model.mlp")
    assert row.status == "fail"
    assert row.metrics["max_abs_error_at"] == 2 * HIDDEN + 4


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("more", [1, 2])
def test_a_mask_that_keeps_more_tokens_than_there_are_is_not_cut_to_them(
    side: str, more: int
) -> None:
    ids, mask = padded(side)
    kept = range(5, 5 + more) if side == "right" else range(3 - more, 3)
    mask[0, list(kept)] = 1
    table = driftline.compare(network(PROMPT), network(ids, mask))
    row = next(row for row in table.rows if row.site == "model.mlp")
    assert row.status == "incomparable"
    assert "its attention_mask keeps more than 5 tokens" in row.reason


@pytest.mark.parametrize("side", ["left", "right"])
def test_of_a_mask_only_the_rows_that_are_compared_say_where_the_pads_are(side: str) -> None:
    """The second sequence of the larger batch is longer: it has no pads at all."""
    ids, mask = padded(side)
    ids, mask = np.concatenate([ids, ids]), np.concatenate([mask, np.ones_like(mask)])
    table = driftline.compare(network(PROMPT), network(ids, mask))
    row = next(row for row in table.rows if row.site == "model.mlp")
    assert row.metrics["different"] == 0
    kept = "3:8" if side == "left" else "0:5"
    assert f"trim(axis 1, {kept})" in row.candidate_recipe
    assert f"tokens {kept} of 8 in the candidate, the rest is pads on the {side}" in table.notes[0]


def test_without_a_mask_and_ids_nothing_is_cut() -> None:
    ids, _ = padded("left")
    table = driftline.compare(network(PROMPT, with_ids=False), network(ids, with_ids=False))
    row = next(row for row in table.rows if row.site == "model.mlp")
    assert row.status == "incomparable"
    assert "on which side the pads are" in row.reason


def test_rows_and_tokens_that_are_swapped_are_said_to_be_so() -> None:
    x = np.random.default_rng(0).standard_normal((5, 2, 8)).astype(np.float32)
    turned = x.transpose(1, 0, 2).copy()
    table = driftline.compare(run_of({"m/input/x": x}), run_of({"m/input/x": turned}))
    assert table.rows[0].status == "incomparable"
    assert "rows and tokens look swapped" in table.rows[0].reason


def test_ids_that_are_not_the_same_text_are_not_cut() -> None:
    table = driftline.compare(network(PROMPT), network(np.arange(20, 28)[None]))
    row = next(row for row in table.rows if row.site == "model.mlp")
    assert row.status == "incomparable"
    assert "not part of each other" in row.reason


def test_a_site_that_alone_has_fewer_tokens_is_not_cut() -> None:
    good = executed(PROMPT)
    bad = {**good, "model.mlp": good["model.mlp"][:, :3]}
    table = driftline.compare(run_of(good), run_of(bad))
    row = next(row for row in table.rows if row.site == "model.mlp")
    assert row.status == "incomparable"
    assert "1x5x6 against 1x3x6" in row.reason


def test_packed_tokens_are_set_against_the_unmasked_ones() -> None:
    ids = np.array([[11, 12, 13, PAD], [21, 22, PAD, PAD]])
    mask = (ids != PAD).astype(np.int64)
    packed = ids[mask != 0]
    tensors = {"model/input/input_ids": packed, "model.embed": TABLE[packed]}
    tensors["model.mlp"] = np.tanh(TABLE[packed])
    reference = network(ids, mask)
    table = driftline.compare(reference, run_of(tensors))
    found = {row.site: row for row in table.rows if row.port == "output" and row.compared}
    assert found["model.mlp"].metrics["different"] == 0
    assert "select(axis 0, 0:3,4:6)" in found["model.mlp"].reference_recipe
    tensors["model.mlp"] = tensors["model.mlp"].copy()
    tensors["model.mlp"][3, 1] += 1
    table = driftline.compare(reference, run_of(tensors))
    assert statuses(table)["model.mlp"] == "fail"
    assert statuses(table)["model.embed"] == "pass"


@pytest.mark.parametrize("flat", [False, True])
def test_of_a_larger_batch_the_first_rows_are_compared(flat: bool) -> None:
    many = np.concatenate([PROMPT, PROMPT + 5, PROMPT + 9])
    table = driftline.compare(network(PROMPT, flat=flat), network(many, flat=flat))
    row = next(row for row in table.rows if row.site == "model.mlp")
    assert row.metrics["different"] == 0
    assert "trim(axis 0, 0:" in row.candidate_recipe
    # Two of three sequences have no partner: their elements count as not compared.
    assert table.covered is not None
    candidates = [row for row in table.rows if "trim(axis 0" in row.candidate_recipe]
    left_out = sum(2 * math.prod(row.reference_shape) for row in candidates)
    assert table.covered.elements_left_out == left_out > 0
    spoilt = network(many, spoil=(0, 4, 0))
    assert statuses(driftline.compare(network(PROMPT), spoilt))["model.mlp"] == "fail"
    elsewhere = network(many, spoil=(1, 4, 0))
    assert statuses(driftline.compare(network(PROMPT), elsewhere))["model.mlp"] == "pass"


def test_batch_and_pads_may_differ_at_once_and_lists_are_taken_apart() -> None:
    ids, mask = padded("left")
    many = np.concatenate([ids, ids + 5])
    masks = np.concatenate([mask, mask])
    reference = network(PROMPT)
    lists = executed(many, masks)
    for name in ("model.embed", "model.mlp"):
        lists[name] = lists[name].reshape(-1, HIDDEN)
    table = driftline.compare(reference, run_of(lists))
    row = next(row for row in table.rows if row.site == "model.mlp")
    assert row.metrics["different"] == 0
    assert row.candidate_recipe.startswith("reshape(2,8,6) then trim(axis 0, 0:1) then trim(axis 1")


def test_only_an_axis_of_all_tokens_is_unfolded_into_sequences() -> None:
    batch = Batch(rows=2, tokens=5)
    unfolded, step = _unfolded_both((10, HIDDEN), (14, HIDDEN), batch, Batch(2, 7))
    assert unfolded == (2, 5, HIDDEN) and step is not None
    for shape, of in (((9, 4), batch), ((10, 4), batch._replace(flat=True)), ((), batch)):
        assert _unfolded_both(shape, shape, of, None) == (shape, None)


def test_keys_of_earlier_tokens_lose_their_pads_too() -> None:
    def later(pads: int, spoil: bool = False) -> Run:
        keys = np.random.default_rng(1).standard_normal((1, 2, 5 + pads, 3)).astype(np.float32)
        keys = keys[:, :, pads:] if not pads else keys
        same = np.random.default_rng(2).standard_normal((1, 2, 5, 3)).astype(np.float32)
        keys[:, :, pads:] = same
        if spoil:
            keys[0, 1, pads + 2, 0] += 1
        mask = np.ones((1, 6 + pads), np.int64)
        mask[0, :pads] = 0
        return run_of(
            {
                "model/input/input_ids": np.array([[9]]),
                "model/input/attention_mask": mask,
                "model/input/past.0": keys,
            }
        )

    table = driftline.compare(later(0), later(3))
    row = next(row for row in table.rows if row.slot == "past.0")
    assert row.metrics["different"] == 0
    assert "trim(axis 2, 3:8)" in row.candidate_recipe
    table = driftline.compare(later(0), later(3, spoil=True))
    assert [row.slot for row in table.failing] == ["past.0"]


def cached_keys(mask: list[int], count: int, first: int = 0) -> Run:
    """A later token: keys of the tokens before it, and a mask over all of them and itself."""
    keys = np.random.default_rng(2).standard_normal((1, 2, 16, 3)).astype(np.float32)
    return run_of(
        {
            "model/input/input_ids": np.array([[9]]),
            "model/input/attention_mask": np.array([mask]),
            "model/input/past.0": keys[:, :, first : first + count],
        }
    )


def test_keys_are_cut_only_where_a_mask_without_holes_keeps_as_many() -> None:
    """Which of the eight keys the five are is not known where one in the middle is masked."""
    reference = cached_keys([1] * 6, 5, first=2)

    def row(mask: list[int]) -> Any:
        table = driftline.compare(reference, cached_keys(mask, 8))
        return next(row for row in table.rows if row.slot == "past.0")

    assert "trim(axis 2, 2:7)" in row([0, 0, 1, 1, 1, 1, 1, 0, 1]).candidate_recipe
    assert row([0, 0, 1, 1, 1, 1, 1, 0, 1]).metrics["different"] == 0
    holes = ([0, 1, 1, 1, 0, 1, 1, 0, 1], [1, 1, 1, 1, 0, 0, 0, 1, 1], [0, 1, 1, 0, 1, 0, 1, 1, 1])
    for mask in (*holes, [0, 1, 1, 1, 1, 1, 1, 0, 1], [0, 0, 0, 1, 1, 1, 1, 0, 1]):
        found = row(mask)
        assert found.status == "incomparable", mask
        assert "1x2x5x3 against 1x2x8x3" in found.reason


def timeline(*lengths: int, first: int = 0, text: int = 11) -> dict[Any, np.ndarray[Any, Any]]:
    """Steps of so many tokens: consecutive ids, so that every step has a text of its own."""
    tensors: dict[Any, np.ndarray[Any, Any]] = {}
    for at, length in enumerate(lengths):
        ids = np.arange(text, text + length)[None]
        text += length
        for name, values in executed(ids).items():
            tensors[TensorKey.of(*_named(name), step=first + at)] = values
    return tensors


def steps(table: Table) -> set[tuple[int, int]]:
    return {
        (row.step, row.step if row.candidate_step is None else row.candidate_step)
        for row in table.rows
        if row.compared
    }


def test_a_warm_up_of_another_length_is_recognised() -> None:
    warm = {
        **timeline(8, text=30),
        **timeline(5, 1, 1, first=1),
    }
    table = driftline.compare(run_of(timeline(5, 1, 1)), run_of(warm))
    assert steps(table) == {(0, 1), (1, 2), (2, 3)}
    assert all(row.metrics["different"] == 0 for row in table.rows if row.compared)
    extra = {row.reason for row in table.rows if row.status == "extra"}
    assert len(extra) == 1
    assert "warm-up" in extra.pop()
    assert any("0 (8 tokens), of another length, a warm-up" in note for note in table.notes)


def test_a_warm_up_of_the_same_length_is_recognised_where_the_decode_begins() -> None:
    warm = {**timeline(5, text=30), **timeline(5, 1, 1, first=1)}
    table = driftline.compare(run_of(timeline(5, 1, 1)), run_of(warm))
    assert steps(table) == {(0, 1), (1, 2), (2, 3)}


def test_a_whole_warm_up_is_told_from_the_run_by_its_token_ids() -> None:
    warm = {**timeline(5, 1, text=30), **timeline(5, 1, first=2)}
    table = driftline.compare(run_of(timeline(5, 1)), run_of(warm))
    assert steps(table) == {(0, 2), (1, 3)}
    assert table.verdict == "pass"


def test_what_lengths_and_ids_cannot_tell_is_taken_by_number_and_said() -> None:
    warm = {**timeline(5, 1), **timeline(5, 1, first=2)}
    table = driftline.compare(run_of(timeline(5, 1)), run_of(warm))
    assert steps(table) == {(0, 0), (1, 1)}
    assert any("--step-map" in note for note in table.notes)


def test_a_fault_after_a_warm_up_is_found_in_its_own_step() -> None:
    warm = {**timeline(8, text=30), **timeline(5, 1, 1, first=1)}
    key = TensorKey.of("model.mlp", "output", "0", step=2)
    warm[key] = warm[key] + 1
    table = driftline.compare(run_of(timeline(5, 1, 1)), run_of(warm))
    assert [(row.site, row.step, row.candidate_step) for row in table.failing] == [
        ("model.mlp", 1, 2)
    ]


def test_runs_that_count_from_one_and_from_zero_are_aligned() -> None:
    table = driftline.compare(run_of(timeline(5, 1, 1)), run_of(timeline(5, 1, 1, first=1)))
    assert steps(table) == {(0, 1), (1, 2), (2, 3)}


def test_steps_of_training_keep_their_numbers() -> None:
    table = driftline.compare(run_of(timeline(4, 4, 4)), run_of(timeline(4, 4, 4, 4, 4)))
    assert steps(table) == {(0, 0), (1, 1), (2, 2)}
    assert not table.notes
    reasons = {row.reason for row in table.rows if row.status == "extra"}
    assert reasons == {"the reference has no step 3", "the reference has no step 4"}


def graphs(warm_up: bool) -> dict[Any, np.ndarray[Any, Any]]:
    """An accelerator's dump: a prefill and a decode graph, each with a counter of its own."""
    tensors: dict[Any, np.ndarray[Any, Any]] = {}
    prefill, decode = timeline(5), timeline(1, 1, text=16)
    for at, (graph, found) in enumerate((("0_Prefill", prefill), ("1_Decode", decode))):
        for key, values in found.items():
            shift = int(warm_up and at == 0)
            site = f"{graph}.{key.site}"
            tensors[key._replace(site=site, step=key.step + shift)] = values
    if warm_up:
        for key, values in timeline(9, text=30).items():
            tensors[key._replace(site=f"0_Prefill.{key.site}")] = values
    return tensors


@pytest.mark.parametrize("warm_up", [False, True])
def test_graphs_that_count_for_themselves_get_the_numbers_of_the_whole(warm_up: bool) -> None:
    reference, candidate = run_of(timeline(5, 1, 1)), run_of(graphs(warm_up))
    from driftline.alignment.normalise.pipeline import before_matching

    seen = before_matching(reference, candidate, AlignOptions())
    found = {
        (record.key.site.partition(".")[0], record.key.step) for record in seen.candidate.records
    }
    assert found == {("0_Prefill", 0), ("1_Decode", 1), ("1_Decode", 2)}
    back = before_matching(candidate, reference, AlignOptions())
    assert {record.key for record in back.reference.records} == {
        record.key for record in seen.candidate.records
    }


@pytest.mark.parametrize("warm_up", [False, True])
def test_an_accelerators_own_dump_gets_the_numbers_of_the_torch_dump(
    warm_up: bool, tmp_path: Path
) -> None:
    model = toy_decoder(layers=2)
    prompt, then = np.array([3, 1, 4, 1, 5]), (9, 2)
    torch_twin(tmp_path / "torch", model, prompt, then=then)
    atb_twin(tmp_path / "atb", model, prompt, then=then, warm_up=warm_up)
    from driftline.alignment.normalise.pipeline import before_matching

    reference = driftline.open_run(tmp_path / "torch" / "ait_dump")
    candidate = driftline.open_run(tmp_path / "atb")
    seen = before_matching(reference, candidate, AlignOptions())
    embedded = {
        record.key.step: seen.candidate.raw(record).tolist()
        for record in seen.candidate.records
        if record.class_name == "WordEmbedding"
        and (record.key.port, record.key.slot) == ("input", "1")
    }
    assert embedded == {0: prompt.tolist(), 1: [9], 2: [2]}
    layers = {
        (record.key.step, record.shape[1])
        for record in seen.candidate.records
        if record.key.site.endswith("Decoder_layer") and record.key.port == "output"
    }
    assert layers == {(0, 5), (1, 1), (2, 1)}


def test_two_dumps_of_an_accelerator_are_told_apart_from_their_warm_up(tmp_path: Path) -> None:
    model, prompt = toy_decoder(layers=2), np.array([3, 1, 4, 1, 5])
    atb_twin(tmp_path / "cold", model, prompt, then=(9, 2))
    atb_twin(tmp_path / "warm", model, prompt, then=(9, 2), warm_up=True)
    table = driftline.compare(tmp_path / "cold", tmp_path / "warm")
    assert table.verdict == "pass"
    assert table.coverage.missing == 0
    assert all(row.metrics["different"] == 0 for row in table.rows if row.compared)
    left = {row.reason for row in table.rows if row.status == "extra"}
    assert left
    assert all("comes before the first" in reason for reason in left)


def test_a_step_map_is_obeyed_and_printed() -> None:
    reference, candidate = run_of(timeline(4, 4)), run_of(timeline(4, 4, 4))
    plan = align_runs(reference, candidate, AlignOptions(step_map=("0=1,1=2",)))
    assert {(p.reference.key.step, p.candidate.key.step) for p in plan.pairs} == {(0, 1), (1, 2)}
    assert "  note     steps as you say, reference = candidate: 0 = 1, 1 = 2" in plan.lines()
    assert {record.key.step for record in plan.extra} == {0}
    table = driftline.compare(reference, candidate, step_map={0: 1})
    assert steps(table) == {(0, 1)}


@pytest.mark.parametrize("text", ["", "0", "0=", "a=1", "0=1,0=2", "0=1,2=1"])
def test_a_text_that_is_no_step_map_is_refused(text: str) -> None:
    with pytest.raises(BadInput):
        parse_step_map(text)


def test_a_step_map_of_steps_that_are_not_there_is_refused() -> None:
    run = run_of(timeline(4, 4))
    with pytest.raises(BadInput, match="has no step 7"):
        driftline.compare(run, run, step_map={0: 7})


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU())

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.embed(input_ids))


def test_a_captured_model_with_a_warm_up_and_pads_is_aligned(tmp_path: Path) -> None:
    model = Decoder()
    with torch.no_grad():
        with driftline.capture(model, tmp_path / "plain", steps="*"):
            model(torch.tensor([[1, 2, 3]]))
            model(torch.tensor([[4]]))
        with driftline.capture(model, tmp_path / "warm", steps="*"):
            model(torch.zeros(1, 7, dtype=torch.long))
            model(torch.tensor([[1, 2, 3]]))
            model(torch.tensor([[4]]))
        with driftline.capture(model, tmp_path / "padded", steps=0):
            model(torch.tensor([[0, 0, 1, 2, 3]]))
    table = driftline.compare(tmp_path / "plain", tmp_path / "warm")
    assert table.verdict == "pass"
    assert steps(table) == {(0, 1), (1, 2)}
    table = driftline.compare(tmp_path / "plain", tmp_path / "padded")
    rows = [row for row in table.rows if row.compared]
    assert rows
    assert all(row.status == "pass" for row in rows)


def test_a_padded_generation_of_a_llama_agrees_and_a_fault_in_it_is_named(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    plain = torch.tensor([[5, 6, 7, 8, 9]])
    padded = torch.tensor([[0, 0, 0, 5, 6, 7, 8, 9]])
    how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": 63}

    def generate(name: str, ids: torch.Tensor) -> Path:
        # By default later steps are summaries, out of which pads cannot be taken.
        with driftline.capture(model, tmp_path / name, steps="*"):
            model.generate(ids, attention_mask=(ids != 0).long(), **how)
        return tmp_path / name

    reference = generate("plain", plain)
    table = driftline.compare(reference, generate("padded", padded))
    assert table.verdict == "pass"
    assert table.coverage.incomparable == table.coverage.missing == 0
    act = model.model.layers[1].mlp.act_fn
    hook = act.register_forward_hook(lambda module, args, output: output * 1.1)
    spoilt = driftline.compare(reference, generate("spoilt", padded))
    hook.remove()
    assert spoilt.first_site == "model.layers.1.mlp.act_fn"
