"""Computations that are read on both sides: masks, sinks, experts, boxes, cells, angles, updates.

Shapes, constants and places are others than those of the museum's cases, and every family has a
rival that only looks like it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planted_sides import Sides, drawn, named
from torch import Tensor, nn

import driftline
from driftline.diagnosis.api import diagnose

# Attentions: 2 sequences of 20 tokens, 3 heads of 8 channels.

TOKENS, HEADS, WIDTH = 20, 3, 8
CAUSAL = torch.ones(TOKENS, TOKENS).tril().bool()
ALL = torch.ones(TOKENS, TOKENS).bool()


def projections(tokens: int = TOKENS) -> dict[str, Tensor]:
    return {name: drawn(2, tokens, HEADS * WIDTH, seed=number) for number, name in enumerate("qkv")}


def mixed(
    given: Mapping[str, Tensor],
    seen: Tensor,
    *,
    sinks: Tensor | None = None,
    hidden: float = -torch.inf,
    bias: Tensor | None = None,
    sharp: float = 1.0,
) -> Tensor:
    q, k, v = (x.view(2, -1, HEADS, WIDTH).transpose(1, 2) for x in given.values())
    scores = sharp * (q @ k.transpose(-1, -2)) / WIDTH**0.5
    if bias is not None:
        scores = scores + bias
    raised = scores.masked_fill(~seen, hidden).exp()
    total = raised.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return ((raised / total) @ v).transpose(1, 2).reshape(2, -1, HEADS * WIDTH)


def attention(right: Mapping[str, Any], wrong: Mapping[str, Any]) -> Sides:
    given = projections()
    return Sides(mixed(given, **right), mixed(given, **wrong), parts=given)


def texts(*lengths: int) -> Tensor:
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return number[:, None] == number[None]


def packed_texts_that_see_both_ways() -> Sides:
    return attention({"seen": texts(5, 9, 6)}, {"seen": ALL})


def texts_cut_at_other_places() -> Sides:
    return attention({"seen": texts(5, 9, 6) & CAUSAL}, {"seen": texts(7, 7, 6) & CAUSAL})


def first_key_evicted() -> Sides:
    evicted = CAUSAL.clone()
    evicted[6:, 0] = False
    return attention({"seen": CAUSAL}, {"seen": evicted})


def every_third_key_left_out() -> Sides:
    places = torch.arange(TOKENS)
    thinned = CAUSAL & ((places[:, None] - places[None]) % 3 != 2)
    return attention({"seen": CAUSAL}, {"seen": thinned})


def prefix_that_should_see_itself_whole() -> Sides:
    prefix = CAUSAL.clone()
    prefix[:8, :8] = True
    return attention({"seen": prefix}, {"seen": CAUSAL})


def sinks_of_other_heads() -> Sides:
    sinks = torch.tensor([2.0, 0.5, 1.2]).double()
    return attention({"seen": CAUSAL, "sinks": sinks}, {"seen": CAUSAL, "sinks": sinks.roll(1)})


def sinks_forgotten() -> Sides:
    sinks = torch.tensor([2.0, 0.5, 1.2]).double()
    return attention({"seen": CAUSAL, "sinks": sinks}, {"seen": CAUSAL})


def hidden_by_a_product() -> Sides:
    return attention({"seen": CAUSAL}, {"seen": CAUSAL, "hidden": 0.0})


def hidden_by_too_little() -> Sides:
    return attention({"seen": texts(8, 12)}, {"seen": texts(8, 12), "hidden": -3.0})


def another_mask_in_every_head() -> Sides:
    kept = drawn(HEADS, TOKENS, TOKENS, seed=9) > 0.3
    return attention({"seen": CAUSAL}, {"seen": CAUSAL & (kept | torch.eye(TOKENS).bool())})


def scores_moved_by_chance() -> Sides:
    moved = 1.5 * drawn(2, HEADS, TOKENS, TOKENS, seed=5)
    return attention({"seen": CAUSAL}, {"seen": CAUSAL, "bias": moved})


def one_new_token(right: Callable[[], Mapping[str, Any]], wrong: Mapping[str, Any]) -> Sides:
    given = projections()

    def last(options: Mapping[str, Any]) -> Tensor:
        return mixed(given, **options)[:, -1:]

    new = {name: x[:, -1:] for name, x in given.items()}
    past = {name: x[:, :-1].float().double().numpy() for name, x in given.items()}
    return Sides(last(right()), last(wrong), parts=new, more={"past": past})


def falling() -> Tensor:
    places = torch.arange(TOKENS)
    slopes = torch.tensor([0.4, 0.15, 0.05]).double()
    return -slopes[:, None, None] * (places[:, None] - places[None]).abs()


def new_token_without_slopes() -> Sides:
    return one_new_token(lambda: {"seen": CAUSAL, "bias": falling()}, {"seen": CAUSAL})


def new_token_with_a_short_memory() -> Sides:
    return one_new_token(lambda: {"seen": CAUSAL}, {"seen": CAUSAL.triu(-5)})


# Experts that are all given all tokens: 5 of them, 3 chosen, 24 channels.


def experts(
    right: Callable[[Tensor], Tensor], wrong: Callable[[Tensor], Tensor], count: int = 5
) -> Sides:
    scores = drawn(2, 18, count, seed=3)
    gave = {f"expert {number}": drawn(2, 18, 24, seed=40 + number) for number in range(count)}

    def sum_of(weights: Tensor) -> Tensor:
        return (weights[..., None] * torch.stack([*gave.values()], -2)).sum(-2)

    return Sides(sum_of(right(scores)), sum_of(wrong(scores)), parts={"scores": scores, **gave})


def best(scores: Tensor, among: Tensor, count: int = 3) -> Tensor:
    """Shares of the best by some numbers, from the scores themselves."""
    chosen = torch.zeros_like(scores).scatter(-1, among.topk(count, -1).indices, 1.0)
    weights = scores.softmax(-1) * chosen
    return weights / weights.sum(-1, keepdim=True)


def chosen_without_their_correction() -> Sides:
    correction = torch.tensor([0.9, -0.4, 0.0, 0.7, -1.1]).double()
    return experts(lambda x: best(x, x + correction), lambda x: best(x, x))


def ruled_out_experts_come_back() -> Sides:
    barred = torch.tensor([False, True, False, False, True])
    return experts(lambda x: best(x, x.masked_fill(barred, -torch.inf), 2), lambda x: best(x, x, 2))


def shares_in_coarse_steps() -> Sides:
    return experts(lambda x: best(x, x), lambda x: (best(x, x) * 8).round() / 8)


def shares_of_everything_by_chance() -> Sides:
    sides = experts(lambda x: best(x, x), lambda x: best(x, x))
    return sides._replace(wrong=sides.right + drawn(2, 18, 24, seed=77))


def branch_of_a_gate() -> tuple[Tensor, Tensor, Tensor]:
    return drawn(3, 14, 32), drawn(3, 14, 32, seed=1), drawn(3, 14, 1, seed=2)


def gate_read_as_it_is() -> Sides:
    x, side, gate = branch_of_a_gate()
    # The rest of the sum is made by code that no part shows.
    rest = torch.sin(3 * x) * x.flip(-1)
    parts = {"side": side, "gate": gate}
    return Sides(rest + gate.tanh() * side, rest + gate * side, parts=parts)


def side_of_another_kind() -> Sides:
    x, side, gate = branch_of_a_gate()
    rest = torch.sin(3 * x) * x.flip(-1)
    other = drawn(3, 14, 32, seed=9)
    return Sides(rest + gate * side, rest + gate * other, parts={"side": side, "gate": gate})


# Boxes and windows.


def bounds(size: int, count: int, up: bool = True) -> list[tuple[int, int]]:
    ends = [(number + 1) * size for number in range(count)]
    return [
        (number * size // count, -(-end // count) if up else end // count)
        for number, end in enumerate(ends)
    ]


def largest_of_boxes(x: Tensor, boxes: list[tuple[int, int]]) -> Tensor:
    return torch.stack([x[..., a:b].amax(-1) for a, b in boxes], -1)


def largest_of_shorter_boxes() -> Sides:
    x = drawn(3, 5, 23)
    sides = [largest_of_boxes(x, bounds(23, 6, up)) for up in (True, False)]
    return Sides(*sides, {"x": x})


def means_of_boxes_that_begin_late() -> Sides:
    x = drawn(2, 7, 9, 11)
    made = [
        torch.stack([x[..., a + by : b + by].mean(-1) for a, b in bounds(10, 5)], -1)
        for by in (0, 1)
    ]
    return Sides(*made, {"x": x})


def means_of_other_numbers() -> Sides:
    x, other = drawn(3, 5, 23), drawn(3, 5, 23, seed=8)
    boxes = bounds(23, 6)
    sides = [torch.stack([y[..., a:b].mean(-1) for a, b in boxes], -1) for y in (x, other)]
    return Sides(*sides, {"x": x})


def causal_window_of_another_reach() -> Sides:
    x, kernel = drawn(2, 16, 37), drawn(20, 16, 4, seed=1)

    def made(before: int) -> Tensor:
        return F.conv1d(F.pad(x, (before, 6 - before)), kernel, stride=3, dilation=2)

    return Sides(made(5), made(3), {"x": x}, more={"params": {"weight": kernel.numpy()}})


# Norms of neighbours.


def crowd(x: Tensor, width: int, constant: float, factor: float, power: float) -> Tensor:
    reach = width // 2
    squares = F.pad(x.square(), (reach, reach)).unfold(-1, width, 1).sum(-1)
    return x * (constant + factor * squares) ** -power


def neighbours_counted_otherwise() -> Sides:
    x = 2 * drawn(3, 12, 40)
    return Sides(crowd(x, 3, 2.0, 0.1, 0.5), crowd(x, 3, 2.0, 0.3, 0.5), {"x": x})


def another_constant_beside_neighbours() -> Sides:
    x = drawn(2, 9, 6, 30)
    return Sides(crowd(x, 7, 1.0, 0.2, 0.75), crowd(x, 7, 2.0, 0.2, 0.75), {"x": x})


def neighbours_by_chance() -> Sides:
    x = 2 * drawn(3, 12, 40)
    right = crowd(x, 3, 2.0, 0.1, 0.5)
    return Sides(right, right * (1 + 0.2 * drawn(3, 12, 40, seed=6)), {"x": x})


# Angles along rows and columns: a grid of 6 by 7 places, 16 channels.


def grid_angles(axis_of: Tensor) -> Tensor:
    rows, columns = torch.arange(42) // 7, torch.arange(42) % 7
    axes = torch.stack([rows, columns]).double()
    paces = 100.0 ** (-torch.arange(8).double() / 8)
    angles = axes[axis_of].T * paces
    return torch.cat([angles, angles], -1)[None]


def rows_and_columns_in_turns() -> Sides:
    turns, blocks = torch.arange(8) % 2, torch.arange(8) // 4
    return Sides(grid_angles(turns).sin(), grid_angles(blocks).sin())


def rows_for_columns() -> Sides:
    blocks = torch.arange(8) // 4
    return Sides(grid_angles(blocks).cos(), grid_angles(1 - blocks).cos())


def tables_by_chance() -> Sides:
    blocks = torch.arange(8) // 4
    other = torch.tanh(drawn(6, 7, 16, seed=4)).view(1, 42, 16)
    return Sides(grid_angles(blocks).cos(), other)


# Vectors of times: half sines, half cosines.


def times(
    base: float = 10000.0, pace: float = 1.0, last: float = 0.0, turned: bool = False
) -> Tensor:
    moments = torch.tensor([3.5, 120.25, 671.0]).double() * pace
    angles = moments[:, None] * base ** (-torch.arange(20).double() / (20 - last))
    waves = [angles.sin(), angles.cos()]
    return torch.cat(waves[::-1] if turned else waves, -1)


MOMENTS = {"moments": torch.tensor([3.5, 120.25, 671.0]).double()}


def exponents_that_end_at_one() -> Sides:
    return Sides(times(), times(last=1.0), MOMENTS)


def times_between_zero_and_one() -> Sides:
    return Sides(times(), times(pace=0.001), MOMENTS)


def cosines_before_sines() -> Sides:
    return Sides(times(), times(turned=True), MOMENTS)


def waves_of_no_times() -> Sides:
    return Sides(times(), torch.tanh(drawn(3, 40, seed=3)), MOMENTS)


# Cells of recurrences: 3 samples, 10 steps, 12 states.


def recurrence(
    order: tuple[int, int, int, int] = (0, 1, 2, 3),
    bend: Callable[[Tensor], Tensor] = torch.sigmoid,
    before: float = 0.0,
    behind: float = 0.0,
    shows: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """States, what the input gave to the gates, and what each state gave."""
    given, back = drawn(3, 10, 48), drawn(12, 48, seed=1) / 4
    hidden = state = torch.zeros(3, 12).double()
    outputs, returned = [], []
    for step in range(10):
        returned.append(hidden @ back)
        gates = (given[:, step] + returned[-1]).chunk(4, -1)
        keeps, takes, shown, new = (gates[number] for number in order)
        kept = bend(keeps + before) + behind
        state = kept * state + bend(takes) * new.tanh()
        hidden = bend(shown + shows) * state.tanh()
        outputs.append(hidden)
    return torch.stack(outputs, 1), given, torch.stack(returned)


def cells(right: Mapping[str, Any], wrong: Mapping[str, Any]) -> Sides:
    (r, given, back_r), (c, _, back_c) = recurrence(**right), recurrence(**wrong)
    calls = {"back": tuple(x.float().double().numpy() for x in (back_r, back_c))}
    return Sides(r, c, parts={"given": given}, more={"calls": calls})


def gate_that_should_begin_open() -> Sides:
    return cells({"before": 1.0}, {})


def gate_that_shows_has_a_constant() -> Sides:
    return cells({"order": (2, 0, 3, 1)}, {"order": (2, 0, 3, 1), "shows": 0.7})


def constant_behind_a_gate() -> Sides:
    return cells({}, {"behind": -0.3})


def hard_gates() -> Sides:
    return cells({}, {"bend": lambda x: (0.2 * x + 0.5).clamp(0, 1)})


def quarters_in_another_order() -> Sides:
    return cells({"order": (1, 0, 3, 2)}, {"order": (0, 1, 3, 2)})


def mixing_cell(order: tuple[int, int, int], backwards: bool) -> Sides:
    given, back = drawn(3, 10, 36), drawn(12, 36, seed=1) / 4

    def run(order: tuple[int, int, int], backwards: bool) -> tuple[Tensor, Tensor]:
        state = torch.zeros(3, 12).double()
        outputs, returned = [], []
        for step in range(10):
            returned.append(state @ back)
            x, h = (y.chunk(3, -1) for y in (given[:, step], returned[-1]))
            reset, mix, new = order
            made = (x[new] + (x[reset] + h[reset]).sigmoid() * h[new]).tanh()
            kept = (x[mix] + h[mix]).sigmoid()
            kept = 1 - kept if backwards else kept
            state = kept * state + (1 - kept) * made
            outputs.append(state)
        return torch.stack(outputs, 1), torch.stack(returned)

    (r, back_r), (c, back_c) = run((0, 1, 2), False), run(order, backwards)
    calls = {"back": tuple(x.float().double().numpy() for x in (back_r, back_c))}
    return Sides(r, c, parts={"given": given}, more={"calls": calls})


def update_taken_for_its_rest() -> Sides:
    return mixing_cell((0, 1, 2), backwards=True)


def reset_and_update_exchanged() -> Sides:
    return mixing_cell((1, 0, 2), backwards=False)


def cell_of_another_kind() -> Sides:
    sides = cells({}, {})
    given = sides.parts["given"]
    return sides._replace(wrong=torch.tanh(given[..., :12] * given[..., 12:24].cos()))


# Sums of gradients.


def gradients(*counts: float, old: float = 0.0) -> Sides:
    passes, before = drawn(len(counts), 24, 16), drawn(1, 24, 16, seed=3)
    right = passes.mean(0)
    wrong = (torch.tensor(counts).double()[:, None, None] * passes).sum(0) + old * before[0]
    calls = {name: (x.float().double().numpy(),) * 2 for name, x in (("a", passes), ("b", before))}
    return Sides(right, wrong, more={"calls": calls, "port": "optimizer_grad"})


def one_pass_lost() -> Sides:
    return gradients(1 / 3, 0.0, 1 / 3)


def old_gradients_not_cleared() -> Sides:
    return gradients(0.25, 0.25, 0.25, 0.25, old=1.0)


def gradients_of_other_words() -> Sides:
    sides = gradients(1 / 3, 1 / 3, 1 / 3)
    return sides._replace(wrong=sides.right + drawn(24, 16, seed=12))


# Smaller families.


def constant_beside_the_root() -> Sides:
    x = 0.03 * drawn(3, 12, 40)
    size = x.square().mean(-1, keepdim=True)
    return Sides(x / (size + 1e-4).sqrt(), x / (size.sqrt() + 1e-4), {"x": x})


def first_token_in_the_mean() -> Sides:
    x = drawn(5, 13, 24)
    return Sides(x[:, 1:].mean(1), x.mean(1), {"x": x})


def inputs_packed_in_another_order() -> Sides:
    x, weight = drawn(2, 60, 32), drawn(32, 20, seed=1)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7]) + 8 * torch.arange(4)[:, None]
    return Sides(x @ weight, x @ weight[order.reshape(-1)], {"x": x})


def softmax_taken_twice() -> Sides:
    x = 3 * drawn(4, 9, 12)
    return Sides(x.softmax(1), x.softmax(1).softmax(1))


FAULTS: Mapping[Callable[[], Sides], str] = {
    packed_texts_that_see_both_ways: "mask",
    texts_cut_at_other_places: "mask",
    first_key_evicted: "mask",
    every_third_key_left_out: "mask",
    prefix_that_should_see_itself_whole: "mask",
    sinks_of_other_heads: "scale",
    sinks_forgotten: "scale",
    hidden_by_a_product: "mask",
    hidden_by_too_little: "mask",
    new_token_without_slopes: "positions",
    new_token_with_a_short_memory: "mask",
    chosen_without_their_correction: "mask",
    ruled_out_experts_come_back: "mask",
    shares_in_coarse_steps: "scale low-precision",
    gate_read_as_it_is: "scale",
    largest_of_shorter_boxes: "mask",
    means_of_boxes_that_begin_late: "shift",
    causal_window_of_another_reach: "shift",
    neighbours_counted_otherwise: "scale",
    another_constant_beside_neighbours: "scale",
    rows_and_columns_in_turns: "positions",
    rows_for_columns: "positions permutation",
    exponents_that_end_at_one: "positions",
    times_between_zero_and_one: "positions",
    cosines_before_sines: "permutation",
    gate_that_should_begin_open: "offset",
    gate_that_shows_has_a_constant: "offset",
    constant_behind_a_gate: "offset",
    hard_gates: "activation",
    quarters_in_another_order: "permutation",
    update_taken_for_its_rest: "activation",
    reset_and_update_exchanged: "permutation",
    constant_beside_the_root: "scale",
    first_token_in_the_mean: "mask",
    inputs_packed_in_another_order: "permutation",
    softmax_taken_twice: "activation",
    one_pass_lost: "scale",
    old_gradients_not_cleared: "scale",
}
RIVALS = (
    another_mask_in_every_head,
    scores_moved_by_chance,
    shares_of_everything_by_chance,
    side_of_another_kind,
    means_of_other_numbers,
    neighbours_by_chance,
    tables_by_chance,
    waves_of_no_times,
    cell_of_another_kind,
    gradients_of_other_words,
)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("coarse", [False, True], ids=["float32", "bfloat16"])
def test_a_computation_that_is_read_on_both_sides_tells_what_differs(
    plant: Callable[[], Sides], coarse: bool
) -> None:
    cause, sentence = named(plant(), coarse)
    assert cause in FAULTS[plant].split(), sentence


@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.__name__)
def test_what_only_looks_alike_stays_unknown(rival: Callable[[], Sides]) -> None:
    cause, sentence = named(rival())
    assert cause == "unknown", sentence


# Updates of an optimizer that is written out.


class Moving(torch.optim.Optimizer):
    """Adam or momentum, wrong in one way."""

    def __init__(self, weights: list[nn.Parameter], mistake: str) -> None:
        super().__init__(weights, {"lr": 0.02})
        self.mistake, self.count = mistake, 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        del closure
        self.count += 1
        for number, weight in enumerate(self.param_groups[0]["params"]):
            state = self.state[weight]
            gradient = weight.grad + (0.02 * weight if "decay" in self.mistake else 0.0)
            if "momentum" in self.mistake:
                state["sum"] = 0.8 * state.get("sum", 0.0) + gradient
                ahead = gradient + 0.8 * state["sum"] if "ahead" in self.mistake else state["sum"]
                weight.sub_(0.02 * ahead)
                continue
            keep = 0.9 if "share" in self.mistake and self.count > 1 else 0.7
            state["mean"] = keep * state.get("mean", 0.0) + (1 - keep) * gradient
            state["square"] = 0.95 * state.get("square", 0.0) + 0.05 * gradient.square()
            count = self.count + (number if "counted" in self.mistake else 0)
            mean = state["mean"] / (1 - 0.7**count)
            root = (state["square"] / (1 - 0.95**count)).sqrt()
            noise = drawn(*weight.shape, seed=5).float() if "chance" in self.mistake else 1.0
            weight.sub_(0.02 * noise * mean / (root + 1e-7))


@pytest.mark.parametrize(
    ("right", "wrong", "cause", "step"),
    [
        ("", "counted", "scale", 0),
        ("", "share", "scale", 1),
        ("momentum", "momentum ahead", "scale", 0),
        ("", "decay", "scale", 0),
        ("", "by chance", "unknown", 0),
    ],
)
def test_an_update_tells_how_it_follows_from_gradients(
    right: str, wrong: str, cause: str, step: int, tmp_path: Path
) -> None:
    for name, mistake in (("right", right), ("wrong", wrong)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20), nn.Linear(20, 7))
        optimizer = Moving([*model.parameters()], mistake)
        levels = ("modules", "gradients", "params")
        with driftline.capture(model, tmp_path / name, levels=levels, steps="*"):
            for _ in range(3):
                optimizer.zero_grad()
                (model(torch.randn(16, 20)) - 1).square().mean().backward()
                optimizer.step()
    diagnosis = diagnose(tmp_path / "right", tmp_path / "wrong")
    assert diagnosis.first_site == "(optimizer)"
    assert f"step{step}/" in diagnosis.first_key
    assert diagnosis.cause == cause, diagnosis.sentences


def test_micro_batches_of_which_one_is_cleared_are_another_sum(tmp_path: Path) -> None:
    for name, cleared in (("right", (0,)), ("wrong", (0, 2))):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 7))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        levels = ("modules", "gradients", "params")
        with driftline.capture(model, tmp_path / name, levels=levels, steps="*"):
            for _, part in itertools.product(range(2), range(4)):
                if part in cleared:
                    optimizer.zero_grad()
                (model(torch.randn(16, 20)) - 1).square().mean().backward()
                if part == 3:
                    optimizer.step()
    diagnosis = diagnose(tmp_path / "right", tmp_path / "wrong")
    assert diagnosis.first_site == "(gradients)"
    assert diagnosis.cause == "scale", diagnosis.sentences
    assert "another sum of gradients" in diagnosis.sentences[1]
