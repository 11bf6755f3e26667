"""Equal names that mean nothing: numbers of nn.Sequential against another nesting."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from torch import nn

import driftline
from driftline.alignment.plan import Plan
from driftline.runs.run import Run

sys.path.insert(0, str(Path(__file__).parent))
import twins


def captured(model: nn.Module, path: Path, x: torch.Tensor) -> Run:
    with torch.no_grad(), driftline.capture(model.eval(), path):
        model(x)
    return driftline.open_run(path)


def flat() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = (nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return nn.Sequential(*sizes)


def nested(model: nn.Sequential) -> nn.Sequential:
    a, b, c, d, e = copy.deepcopy(model)
    return nn.Sequential(nn.Sequential(a, b), nn.Sequential(c, d), e)


def sites(plan: Plan) -> dict[str, str]:
    return {pair.reference.key.site: pair.candidate.key.site for pair in plan.pairs}


X = torch.linspace(-1, 1, 24).reshape(3, 8)
NESTED = {"(root)": "(root)", "0": "0.0", "1": "0.1", "2": "1.0", "3": "1.1", "4": "2"}


def test_numbers_of_another_nesting_are_no_names(tmp_path: Path) -> None:
    model = flat()
    reference = captured(model, tmp_path / "a", X)
    candidate = captured(nested(model), tmp_path / "b", X)
    plan = driftline.align(reference, candidate)
    assert sites(plan) == NESTED
    assert any("agree by accident" in note for note in plan.notes)
    assert driftline.compare(reference, candidate).verdict == "pass"
    back = driftline.align(candidate, reference)
    assert sites(back) == {theirs: ours for ours, theirs in NESTED.items()}


def test_a_fault_behind_such_numbers_is_named_at_its_own_site(tmp_path: Path) -> None:
    model = flat()
    twin = nested(model)
    with torch.no_grad():
        twin[1][0].weight[0] += 1  # type: ignore[index]
    reference = captured(model, tmp_path / "a", X)
    table = driftline.compare(reference, captured(twin, tmp_path / "b", X))
    assert table.verdict == "fail"
    assert table.first is not None and table.first.key.site == "2"
    assert table.first.candidate_site == "1.0"


def test_one_more_module_moves_the_numbers_after_it_and_no_pair(tmp_path: Path) -> None:
    model = flat()
    a, b, c, d, e = copy.deepcopy(model)
    twin = nn.Sequential(a, b, nn.Dropout(), c, d, e)
    reference = captured(model, tmp_path / "a", X)
    candidate = captured(twin, tmp_path / "b", X)
    assert sites(driftline.align(reference, candidate))["4"] == "5"
    table = driftline.compare(reference, candidate)
    assert table.verdict == "pass" and not table.coverage.missing


def test_other_work_under_the_same_numbers_stays_a_pair_and_fails(tmp_path: Path) -> None:
    model = flat()
    twin = copy.deepcopy(model)
    twin[1] = nn.Dropout()
    reference = captured(model, tmp_path / "a", X)
    table = driftline.compare(reference, captured(twin, tmp_path / "b", X))
    assert table.verdict == "fail"
    assert table.first is not None and table.first.key.site == "1"


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 1.01


def test_a_wrapper_that_changes_the_result_is_found_under_its_name(tmp_path: Path) -> None:
    model = flat()
    twin = copy.deepcopy(model)
    twin[2] = Scaled(twin[2])
    reference = captured(model, tmp_path / "a", X)
    table = driftline.compare(reference, captured(twin, tmp_path / "b", X))
    assert table.first is not None and table.first.key.site == "2"


def test_convolutions_in_another_nesting_align_and_no_container_is_taken_for_another(
    tmp_path: Path,
) -> None:
    torch.manual_seed(1)

    def part(into: int) -> list[nn.Module]:
        return [nn.Conv2d(into, 4, 3), nn.BatchNorm2d(4), nn.ReLU()]

    first, second = part(3), part(4)
    tail = [nn.Flatten(), nn.Linear(64, 5)]
    model = nn.Sequential(nn.Sequential(*first), nn.Sequential(*second), *tail)
    inner = nn.Sequential(
        nn.Sequential(*first[:2]), first[2], nn.Sequential(*second[:2]), second[2]
    )
    x = torch.randn(2, 3, 8, 8)
    reference = captured(model, tmp_path / "a", x)
    candidate = captured(copy.deepcopy(nn.Sequential(inner, *tail)), tmp_path / "b", x)
    found = sites(driftline.align(reference, candidate))
    assert found == {
        "(root)": "(root)", "0.0": "0.0.0", "0.1": "0.0.1", "0.2": "0.1", "1.0": "0.2.0",
        "1.1": "0.2.1", "1.2": "0.3", "2": "1", "3": "2",
    }  # fmt: skip
    table = driftline.compare(reference, candidate)
    assert table.verdict == "pass" and not table.coverage.incomparable


def test_a_map_overrides_what_structure_makes_of_numbers(tmp_path: Path) -> None:
    model = flat()
    reference = captured(model, tmp_path / "a", X)
    candidate = captured(nested(model), tmp_path / "b", X)
    plan = driftline.align(reference, candidate, maps=["1=0"])
    assert sites(plan)["1"] == "0"


def test_a_t5_whose_dense_layers_hold_others_aligns_leaf_by_leaf(tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4,
            vocab_size=64, decoder_start_token_id=0, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    twin, _ = twins.disguised(model, 1)
    ids = torch.arange(8)[None]
    runs: list[Run] = []
    for each, name in ((model, "a"), (twin, "b")):
        with torch.no_grad(), driftline.capture(each, tmp_path / name):
            each(input_ids=ids, decoder_input_ids=ids[:, :5])
        runs.append(driftline.open_run(tmp_path / name))
    found = sites(driftline.align(*runs))
    dense = [s for s in runs[0].sites() if "DenseReluDense." in s and "dropout" not in s]
    assert dense and all(site in found for site in dense)
    assert driftline.compare(*runs).verdict == "pass"


class PreNorm(nn.Module):
    """Called like a norm, and holds the whole half of a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fn = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(self.norm(x))


def test_a_class_called_norm_that_holds_linears_is_a_container(tmp_path: Path) -> None:
    torch.manual_seed(0)
    norms = [
        PreNorm(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))) for _ in range(2)
    ]
    model = nn.Sequential(*norms)
    twin = nn.Sequential()
    for at, each in enumerate(copy.deepcopy(norms)):
        for name, part in (
            ("a", each.norm),
            ("b", each.fn[0]),
            ("c", each.fn[1]),
            ("d", each.fn[2]),
        ):
            twin.add_module(f"{name}{at}", part)
    reference = captured(model, tmp_path / "a", X)
    found = sites(driftline.align(reference, captured(twin, tmp_path / "b", X)))
    assert found["0.fn.0"] == "b0" and found["1.fn.2"] == "d1" and found["1.norm"] == "a1"
