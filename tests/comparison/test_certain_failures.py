"""Failures with a sentence of their own: inputs, codes, NaN, gradients of the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import driftline
from driftline.comparison.evidence.rules import BEYOND_OUTPUTS
from driftline.comparison.table.table import Table
from driftline.comparison.verdict.certain_failures import CertainFailure, certain_failure
from driftline.runs.memory import MemorySink
from driftline.runs.run import Run
from driftline.testing.runs import run_of as run_of_arrays


class Words(nn.Module):
    """Token and position embeddings, a layer, logits; positions may come from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(50, 32)
        self.wpe = nn.Embedding(64, 32)
        self.hidden = nn.Linear(32, 32)
        self.head = nn.Linear(32, 50)
        self.shift = 0

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, positions: Any = None
    ) -> torch.Tensor:
        if positions is None:
            positions = torch.arange(ids.shape[1])[None].expand_as(ids) + self.shift
        x = self.wte(ids) + self.wpe(positions)
        if mask is not None:
            x = x * mask[..., None]
        return self.head(torch.tanh(self.hidden(x)))


def words(dtype: torch.dtype = torch.float32, gain: float = 1.0) -> Words:
    torch.manual_seed(0)
    model = Words()
    with torch.no_grad():
        model.head.weight.mul_(gain)
    return model.to(dtype)


def run_of(model: nn.Module, *steps: dict[str, Any], loss: Callable[..., Any] | None = None) -> Run:
    sink = MemorySink(name="run")
    levels = ("modules",) if loss is None else ("modules", "gradients")
    with driftline.capture(model, sink, levels=levels, steps="*") as session:
        for number, given in enumerate(steps):
            if loss is None:
                with torch.no_grad():
                    model(**given)
            else:
                loss(model(**given)).backward()
            if number + 1 < len(steps):
                session.step()
    return sink.run()


def failure_of(reference: Run, candidate: Run) -> tuple[CertainFailure | None, Table]:
    table = driftline.compare(reference, candidate)
    return certain_failure(table.rows), table


IDS = torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(0))


# --- inputs


def test_other_token_ids() -> None:
    other = IDS.clone()
    other[1, 3:9] = (other[1, 3:9] + 1) % 50
    failure, _ = failure_of(run_of(words(), {"ids": IDS}), run_of(words(), {"ids": other}))
    assert failure is not None and failure.kind == "inputs"
    assert failure.sentence.startswith("the inputs differ already: 'ids' of the model itself")
    assert "6 of 60 elements differ" in failure.sentence


def test_other_positions_are_inputs_where_the_program_gives_them() -> None:
    positions = torch.arange(20)[None].expand(3, 20)
    given = [{"ids": IDS, "positions": positions + shift} for shift in (0, 1)]
    failure, _ = failure_of(run_of(words(), given[0]), run_of(words(torch.bfloat16), given[1]))
    assert failure is not None and failure.kind == "inputs"
    assert "'positions'" in failure.sentence and "60 of 60" in failure.sentence


def test_other_positions_are_the_models_own_code_where_it_makes_them() -> None:
    model = words(torch.bfloat16)
    model.shift = 1
    failure, _ = failure_of(run_of(words(), {"ids": IDS}), run_of(model, {"ids": IDS}))
    assert failure is not None and failure.kind == "codes"
    assert "inside the model itself, in its own code before it calls 'wpe'" in failure.sentence


def test_another_mask_and_all_inputs_that_differ_are_named() -> None:
    masks = [torch.ones(3, 20), torch.ones(3, 20)]
    masks[1][0, :5] = 0.0
    failure, _ = failure_of(
        run_of(words(), {"ids": IDS, "mask": masks[0]}),
        run_of(words(), {"ids": (IDS + 1) % 50, "mask": masks[1]}),
    )
    assert failure is not None and failure.kind == "inputs"
    assert "'ids' of the model itself" in failure.sentence and "so do 'mask'" in failure.sentence


def test_inputs_of_another_shape() -> None:
    """Longer ones are trimmed, and are a matter of coverage; these have nothing in common."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    given = torch.randn(6, 8), torch.randn(2, 3, 4, 8)
    failure, _ = failure_of(*(run_of(model, {"input": value}) for value in given))
    assert failure is not None and failure.kind == "inputs"
    assert "has shape [6, 8], in the candidate [2, 3, 4, 8]" in failure.sentence


def image(scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(2, 40, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("reference", "candidate", "differs"),
    [
        (image(), image(), False),
        (image(), image().bfloat16(), False),
        (image(), image().half(), False),
        (image(), image() * (1 + 1e-7), False),
        (image(), image(1.01), True),
        (image(), image(1.02).bfloat16(), True),
        (image().bfloat16(), image(1.02).bfloat16(), True),
    ],
    ids=["same", "bfloat16", "float16", "order", "one percent", "two in bf16", "both bf16"],
)
def test_floats_may_be_cast_and_nothing_else(
    reference: torch.Tensor, candidate: torch.Tensor, differs: bool
) -> None:
    runs = []
    for value in (reference, candidate):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 30), nn.ReLU()).to(value.dtype)
        runs.append(run_of(model, {"input": value}))
    failure, _ = failure_of(*runs)
    assert (failure is not None) == differs
    assert failure is None or (failure.kind == "inputs" and "relative_l2 0.0" in failure.sentence)


def test_what_a_decoder_feeds_to_itself_is_no_input_from_outside() -> None:
    steps = [{"ids": IDS}, {"ids": IDS[:, :1]}], [{"ids": IDS}, {"ids": (IDS[:, :1] + 1) % 50}]
    failure, _ = failure_of(run_of(words(), *steps[0]), run_of(words(), *steps[1]))
    assert failure is None


def test_other_data_in_a_later_step_of_training_are_inputs() -> None:
    steps = [{"ids": IDS}, {"ids": IDS}], [{"ids": IDS}, {"ids": (IDS + 1) % 50}]
    failure, _ = failure_of(
        *(run_of(words(), *given, loss=lambda made: made.square().mean()) for given in steps)
    )
    assert failure is not None and failure.kind == "inputs"
    assert failure.sentence.startswith("the inputs differ already in step 1: 'ids'")


class Router(nn.Module):
    """Chooses rows of a table by what it computed: a near tie may fall either way."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 8)
        self.table = nn.Embedding(8, 16)
        self.others = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.gate(x).argmax(-1)
        chosen[: self.others] = (chosen[: self.others] + 1) % 8
        return self.table(chosen)


def test_a_choice_at_a_near_tie_is_no_wrong_code() -> None:
    torch.manual_seed(0)
    model = Router()
    x = torch.randn(4000, 16)
    other = Router().to(torch.bfloat16)
    other.load_state_dict(model.state_dict())
    reference, candidate = run_of(model, {"x": x}), run_of(other, {"x": x.bfloat16()})
    failure, table = failure_of(reference, candidate)
    chosen = next(r for r in table.rows if r.key.site == "table" and r.key.port == "input")
    assert chosen.metrics["different"] > 0
    assert failure is None


def test_another_choice_of_the_same_scores_is_no_near_tie() -> None:
    torch.manual_seed(0)
    model = Router()
    x = torch.randn(100, 16)
    reference = run_of(model, {"x": x})
    model.others = 3
    failure, _ = failure_of(reference, run_of(model, {"x": x}))
    assert failure is not None and failure.kind == "codes"
    assert "before it calls 'table'" in failure.sentence
    assert "3 of 100 elements differ" in failure.sentence


# --- NaN and Inf


def test_nan_on_one_side_only() -> None:
    model = words()
    with torch.no_grad():
        model.hidden.bias[3] = torch.nan
    failure, _ = failure_of(run_of(words(), {"ids": IDS}), run_of(model, {"ids": IDS}))
    assert failure is not None and failure.kind == "nonfinite" and failure.site == "hidden"
    assert failure.sentence.startswith("NaN or Inf begins at 'hidden', output")


def test_nothing_finite_on_either_side() -> None:
    runs = []
    for _ in range(2):
        model = words()
        with torch.no_grad():
            model.hidden.bias.fill_(torch.nan)
        runs.append(run_of(model, {"ids": IDS}))
    failure, _ = failure_of(*runs)
    assert failure is not None and failure.kind == "nonfinite" and failure.site == "hidden"
    assert "neither side has a finite number in 'hidden'" in failure.sentence


@pytest.mark.parametrize(
    ("name", "value", "fails"),
    [
        ("mask/input", -np.inf, False),
        ("mask/output", -np.inf, True),
        ("mask/input", np.nan, True),
        ("mask/output", 0.0, False),
    ],
)
def test_masks_may_be_infinite_results_may_not(name: str, value: float, fails: bool) -> None:
    values = np.full((2, 3), value, np.float32)
    good = np.ones((2, 3), np.float32)
    runs = [run_of_arrays({name: values, "end": good}) for _ in range(2)]
    failure, _ = failure_of(*runs)
    assert (failure is not None) == fails


# --- gradients of the loss


LABELS = torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(5))


def entropy(**options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    labels = options.pop("labels", LABELS)
    return lambda made: functional.cross_entropy(
        made.float().reshape(-1, 50), labels.reshape(-1), **options
    )


IGNORED = LABELS.clone()
IGNORED[:, :6] = -100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "loss",
    [
        entropy(label_smoothing=0.1),
        entropy(labels=IGNORED),
        entropy(reduction="sum"),
        lambda made: 0.9 * entropy()(made),
        lambda made: functional.mse_loss(made.float(), torch.zeros(3, 20, 50)),
    ],
    ids=["smoothing", "ignored", "sum", "factor", "another"],
)
def test_another_loss_is_a_wrong_gradient_that_arrives(
    loss: Callable[..., Any], dtype: torch.dtype
) -> None:
    failure, table = failure_of(
        run_of(words(gain=6.0), {"ids": IDS}, loss=entropy()),
        run_of(words(dtype, gain=6.0), {"ids": IDS}, loss=loss),
    )
    assert failure is not None and failure.kind == "gradient", table.finding
    assert failure.sentence.startswith("a wrong gradient arrives at the model's output")


@pytest.mark.parametrize("gain", [1.0, 6.0, 30.0])
@pytest.mark.parametrize(
    "loss",
    [
        entropy(),
        entropy(label_smoothing=0.1),
        entropy(labels=IGNORED),
        lambda made: functional.mse_loss(made.float(), torch.zeros(3, 20, 50)),
    ],
    ids=["entropy", "smoothing", "ignored", "squares"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_rounding_of_the_output_is_no_wrong_gradient(
    dtype: torch.dtype, loss: Callable[..., Any], gain: float
) -> None:
    failure, _ = failure_of(
        run_of(words(gain=gain), {"ids": IDS}, loss=loss),
        run_of(words(dtype, gain=gain), {"ids": IDS}, loss=loss),
    )
    assert failure is None, failure


def test_a_gradient_that_grows_because_the_model_is_nearly_right_is_explained() -> None:
    """Targets near the output: the same error is a large share of what is left to learn."""
    near = words()(IDS).detach() * 1.01
    loss = lambda made: functional.mse_loss(made.float(), near)  # noqa: E731
    failure, table = failure_of(
        run_of(words(), {"ids": IDS}, loss=loss),
        run_of(words(torch.bfloat16), {"ids": IDS}, loss=loss),
    )
    row = next(r for r in table.rows if r.key.port == "grad_output" and r.key.site == "(root)")
    assert row.metrics["relative_l2"] > 0.1 > 0.05 > row.metrics[BEYOND_OUTPUTS]
    assert failure is None
