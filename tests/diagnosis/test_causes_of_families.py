"""Mistakes of counting, places, elements and maps, and rivals that only look like them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from planted_sides import Sides, drawn, named
from torch import Tensor

LENGTHS = torch.tensor([18, 11, 7, 18])
REAL = torch.arange(18) < LENGTHS[:, None]
FLAGS = {"flags": {"real": REAL.numpy().astype("int64")}}


# Which elements a reduction counts.


def spread_counts_pads() -> Sides:
    x = drawn(4, 18, 6) * REAL[..., None]
    count = LENGTHS[:, None, None]
    middle = x - x.sum(1, keepdim=True) / count
    right = (middle.square() * REAL[..., None]).sum(1) / count[:, 0]
    return Sides(right, x.var(1, correction=0), {"x": x}, more=FLAGS)


def mean_divided_by_all() -> Sides:
    x = drawn(4, 18, 6) * REAL[..., None]
    return Sides(x.sum(1) / LENGTHS[:, None], x.mean(1), {"x": x}, more=FLAGS)


def largest_among_pads() -> Sides:
    x = drawn(4, 18, 6) - 3
    right = x.masked_fill(~REAL[..., None], -torch.inf).amax(1)
    return Sides(right, (x * REAL[..., None]).amax(1), {"x": x}, more=FLAGS)


def mean_of_another_axis() -> Sides:
    x = drawn(12, 12, 5)
    return Sides(x.mean(0), x.mean(1), {"x": x})


def one_element_less() -> Sides:
    x = drawn(6, 7, 20)
    return Sides(x.var(-1, correction=0), x.var(-1, correction=1), {"x": x})


def spread_for_variance() -> Sides:
    x = drawn(6, 7, 20) * drawn(6, 7, 1, seed=2).abs()
    return Sides(x.var(-1, correction=0), x.std(-1, correction=0), {"x": x})


def sum_for_mean_of_lengths() -> Sides:
    x = drawn(4, 18, 6)
    some = x * REAL[..., None]
    return Sides(some.sum(1) / LENGTHS[:, None], some.sum(1), {"x": x}, more=FLAGS)


def level_of_padded_samples() -> Sides:
    x = drawn(4, 18, 6)
    power = (x.square() * REAL[..., None]).sum((1, 2)) / LENGTHS
    right = torch.tanh(x.cumsum(1)) / power.sqrt()[:, None, None]
    return Sides(
        right,
        torch.tanh(x.cumsum(1)) / x.square().mean((1, 2)).sqrt()[:, None, None],
        {"x": x},
        more=FLAGS,
    )


def samples_off_at_random() -> Sides:
    x = drawn(4, 18, 6)
    return Sides(
        x,
        x + drawn(4, 18, 6, seed=3) * torch.tensor([1, 0, 1, 0])[:, None, None],
        {"y": drawn(4, 18, 6, seed=9)},
        more=FLAGS,
    )


def sum_of_a_function() -> Sides:
    x = drawn(6, 7, 20)
    return Sides(x.mean(-1), x.sin().mean(-1), {"x": x})


def length_over_all_axes() -> Sides:
    x = drawn(3, 12, 10)
    return Sides(F.normalize(x, dim=-1), F.normalize(x, dim=(1, 2)), {"x": x})


def shares_not_made_one() -> Sides:
    best = drawn(40, 8).softmax(-1).topk(2, -1).values
    return Sides(best / best.sum(-1, keepdim=True), best)


# What goes on from token to token.


def running_mean(keep: float, x: Tensor, state: Tensor) -> Tensor:
    states: list[Tensor] = []
    for step in range(x.shape[1]):
        state = keep * state + (1 - keep) * x[:, step]
        states.append(state)
    return torch.stack(states, 1)


def another_decay() -> Sides:
    x, none = drawn(2, 40, 12), torch.zeros(2, 12).double()
    return Sides(running_mean(0.9, x, none), running_mean(0.8, x, none), {"x": x})


def another_beginning() -> Sides:
    x, none = drawn(2, 40, 12), torch.zeros(2, 12).double()
    return Sides(running_mean(0.9, x, x[:, 0]), running_mean(0.9, x, none), {"x": x})


def sum_from_the_end() -> Sides:
    x = drawn(2, 40, 12)
    return Sides(x.cumsum(1), x.flip(1).cumsum(1).flip(1), {"x": x})


def decay_of_every_token() -> Sides:
    x, none = drawn(2, 40, 12), torch.zeros(2, 12).double()
    other = running_mean(0.9, x * (1 + drawn(2, 40, 12, seed=5).abs()), none)
    return Sides(running_mean(0.9, x, none), other, {"x": x})


def filter_with_another_number() -> Sides:
    x = drawn(2, 400)
    before = F.pad(x, (1, -1))
    return Sides(x - 0.97 * before, x - 0.9 * before, {"x": x})


# Borders and places.


def ends_of_a_filter() -> Sides:
    x = drawn(2, 5, 60)
    kernel = torch.ones(5, 1, 3).double() / 3

    def smooth(mode: str) -> Tensor:
        power = F.conv1d(F.pad(x, (1, 1), mode=mode), kernel, groups=5).square()
        return (power + 0.1).log()

    return Sides(smooth("reflect"), smooth("circular"))


def pool_of_a_border() -> Sides:
    x = drawn(2, 4, 15, 19) - 4
    right = F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=-torch.inf), 3, 2)
    return Sides(right, F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2), {"x": x})


def cut_at_another_corner() -> Sides:
    x = drawn(2, 4, 20, 24)
    return Sides(x[..., 2:18, 3:21], x[..., 0:16, 1:19])


def half_a_place_on() -> Sides:
    x = drawn(1, 12, 14, 15)
    y, z = 1 + 9 * torch.rand(2, 3, 5, 4, generator=torch.Generator().manual_seed(1)).double()

    def taken(by: float) -> Tensor:
        grid = torch.stack([(2 * (z + by) + 1) / 15 - 1, (2 * (y + by) + 1) / 14 - 1], -1)
        return F.grid_sample(x.expand(3, -1, -1, -1), grid, align_corners=False)

    return Sides(taken(0.0), taken(0.5), {"x": x})


def points_of_ends_that_meet() -> Sides:
    x = drawn(2, 12, 14, 15)
    grid = 1.6 * torch.rand(2, 6, 6, 2, generator=torch.Generator().manual_seed(1)).double() - 0.8
    right, wrong = (F.grid_sample(x, grid, align_corners=pinned) for pinned in (True, False))
    return Sides(right, wrong, {"x": x})


def points_at_random() -> Sides:
    x = drawn(1, 12, 14, 15)
    return Sides(drawn(3, 12, 5, 4), drawn(3, 12, 5, 4, seed=2), {"x": x})


def state_of_a_filter_lost() -> Sides:
    past, now = drawn(2, 7, 20, seed=1), drawn(2, 7, 16)
    right = torch.cat([past[..., -3:], now], -1)
    before = (past.numpy(), past.numpy())
    return Sides(right, torch.cat([0 * past[..., -3:], now], -1), more={"earlier": before})


def state_of_a_sum_lost() -> Sides:
    x, decay = drawn(2, 40, 12), 0.8
    before, state, right, wrong = drawn(2, 12, seed=4), drawn(2, 12, seed=4), [], []
    other = 0 * before
    for step in range(40):
        state, other = decay * state + x[:, step], decay * other + x[:, step]
        right.append(state)
        wrong.append(other)
    past = drawn(2, 30, 12, seed=6).float().double().numpy()
    return Sides(torch.stack(right, 1), torch.stack(wrong, 1), more={"earlier": (past, past)})


def off_in_the_middle() -> Sides:
    x = drawn(2, 5, 60)
    e = torch.zeros(60).double()
    e[25:31] = 1
    return Sides(x, x + e * drawn(2, 5, 60, seed=3))


# Single elements.


def less_likely_when_said() -> Sides:
    x = drawn(3, 200)
    said = torch.rand(3, 200, generator=torch.Generator().manual_seed(2)) < 0.2
    right = torch.where(said & (x > 0), x / 1.5, torch.where(said, x * 1.5, x))
    return Sides(right, torch.where(said, x / 1.5, x))


def constant_for_some() -> Sides:
    x = drawn(3, 200)
    said = torch.rand(3, 200, generator=torch.Generator().manual_seed(2)) < 0.2
    return Sides(x - 0.7 * said, x)


def logarithm_left_out() -> Sides:
    x = drawn(3, 20, 8).exp()
    return Sides(x.log(), x)


def exponential_of_half() -> Sides:
    x = drawn(3, 20, 8)
    return Sides(x.exp(), (x / 2).exp(), {"x": x})


def spread_from_a_logarithm() -> Sides:
    mean, spread, noise = drawn(6, 16), drawn(6, 16, seed=1), drawn(6, 16, seed=2)
    right = mean + (spread / 2).exp() * noise
    return Sides(
        right, mean + spread.exp() * noise, {"mean": mean, "spread": spread, "noise": noise}
    )


def slope_of_a_leak() -> Sides:
    x = drawn(3, 30, 16)
    return Sides(F.leaky_relu(x, 0.3), F.leaky_relu(x, 0.05), {"x": x})


def bend_of_an_elu() -> Sides:
    x = drawn(3, 30, 16)
    return Sides(F.elu(x, 1.0), F.elu(x, 0.4), {"x": x})


def beta_of_a_softplus() -> Sides:
    x = drawn(3, 30, 16)
    return Sides(F.softplus(x), F.softplus(x, beta=3.0), {"x": x})


def bound_of_a_clamp() -> Sides:
    x = 4 * drawn(3, 30, 16)
    return Sides(x.clamp(-7, 7).tanh(), x.clamp(-1, 1).tanh(), {"x": x})


def hotter_shares() -> Sides:
    x = drawn(3, 30, 16)
    return Sides(x.softmax(-1), (x / 1.6).softmax(-1))


def divided_for_multiplied() -> Sides:
    x, y = drawn(3, 30, 16), 1 + drawn(3, 1, 1, seed=1).abs()
    return Sides(x * y, x / y, {"x": x}, {"y": y})


def weight_of_another_axis() -> Sides:
    x, weight = drawn(3, 12, 12), 1 + 0.5 * drawn(12)
    return Sides(x * weight, x * weight[:, None], {"x": x})


def bias_of_another_axis() -> Sides:
    x, bias = drawn(3, 12, 12), drawn(12)
    return Sides(x + bias, x + bias[:, None], {"x": x})


def mean_not_taken_away() -> Sides:
    x = drawn(3, 30, 16) + 2 * drawn(3, 1, 16, seed=3)
    return Sides(x - x.mean(1, keepdim=True), x, {"x": x})


def time_added_twice() -> Sides:
    x, time = drawn(3, 16, 8, 8), drawn(3, 16, seed=5)
    return Sides(x + time[:, :, None, None], x + 2 * time[:, :, None, None], parts={"time": time})


def gate_left_out() -> Sides:
    x, gate = drawn(3, 30, 16), drawn(3, 1, 16, seed=4).sigmoid()
    return Sides(x * gate, x, parts={"gate": gate})


def mask_of_other_blocks() -> Sides:
    x, places = drawn(2, 4, 24, 24).exp(), torch.arange(24)
    right, wrong = (places[:, None] // size == places // size for size in (8, 6))
    return Sides(x * right, x * wrong)


def shares_of_one_more() -> Sides:
    x = drawn(2, 4, 20, 20)
    right, wrong = (torch.ones(20, 20).tril(last).bool() for last in (0, 1))
    hidden = (x.masked_fill(~seen, -torch.inf).softmax(-1) for seen in (right, wrong))
    return Sides(*hidden)


def curve_of_brightness() -> Sides:
    x = drawn(2, 3, 12, 12).sigmoid()
    return Sides(x ** (1 / 2.2), x ** (1 / 1.8))


def guided_the_other_way() -> Sides:
    x, y = drawn(2, 4, 12, 12), drawn(2, 4, 12, 12, seed=1)
    return Sides(x + 7.5 * (y - x), y + 7.5 * (x - y), parts={"x": x, "y": y})


def halves_of_a_batch() -> Sides:
    x = drawn(4, 6, 8, 8)
    first, second = x.chunk(2)
    return Sides(first + 3 * (second - first), second + 3 * (first - second), {"x": x})


def gate_with_one_more() -> Sides:
    x, y = drawn(3, 20, 16), drawn(3, 20, 16, seed=1)
    return Sides(F.silu(x) * (y + 1), F.silu(x) * y, parts={"x": x, "y": y})


def function_of_two() -> Sides:
    x, y = drawn(3, 30, 16), drawn(3, 30, 16, seed=1)
    return Sides((x + y).tanh(), (x - y).sin(), {"x": x, "y": y})


def some_at_random() -> Sides:
    x = drawn(3, 200)
    said = torch.rand(3, 200, generator=torch.Generator().manual_seed(2)) < 0.2
    return Sides(x, torch.where(said, drawn(3, 200, seed=8), x))


def steps_at_random() -> Sides:
    x = drawn(3, 30, 16)
    return Sides(x, drawn(3, 30, 16, seed=2) * x.abs(), {"x": x})


# Maps and graphs.


def scales_of_groups() -> Sides:
    x, weight = drawn(2, 40, 32), drawn(32, 48)
    factors = drawn(4, 48, seed=2).abs() + 0.2
    wrong = (weight.view(4, 8, 48) * factors[:, None]).reshape(32, 48)
    return Sides(x @ weight, x @ wrong, {"x": x})


def scales_of_inputs() -> Sides:
    x, weight = drawn(2, 80, 32), drawn(32, 48)
    return Sides(x @ (weight * (0.3 + drawn(32, 1).abs())), x @ weight, {"x": x})


def adapter_left_out() -> Sides:
    x, weight = drawn(2, 80, 32), drawn(32, 48)
    adapter = drawn(32, 3) @ drawn(3, 48) / 4
    return Sides(x @ (weight + adapter), x @ weight, {"x": x})


def other_map() -> Sides:
    x, weight = drawn(2, 40, 32), drawn(32, 48)
    return Sides(x @ weight, x @ (weight + 0.5 * drawn(32, 48, seed=3)), {"x": x})


def graph() -> tuple[Tensor, dict[str, object]]:
    links = torch.rand(20, 20, generator=torch.Generator().manual_seed(3)) < 0.2
    links.fill_diagonal_(False)
    links |= torch.eye(20).roll(1, 0).bool()
    ends = links.nonzero().T
    codes = {"edges": ends.numpy()}
    return links.double(), {"codes": codes}


def edges_the_other_way() -> Sides:
    links, more = graph()
    x = drawn(20, 14)
    return Sides(links.T @ x, links @ x, {"x": x}, more=more)


def sum_for_mean_of_neighbours() -> Sides:
    links, more = graph()
    x = drawn(20, 14)
    return Sides(links.T @ x / links.sum(0)[:, None], links.T @ x, {"x": x}, more=more)


def itself_counted() -> Sides:
    links, more = graph()
    x = drawn(20, 14)
    return Sides(links.T @ x, links.T @ x + x, {"x": x}, more=more)


def shares_of_givers() -> Sides:
    links, more = graph()
    x = drawn(20, 14)
    raised = links * drawn(20, 20, seed=2).exp()
    right, wrong = raised / raised.sum(0), raised / raised.sum(1, keepdim=True)
    return Sides(right.T @ x, wrong.T @ x, {"x": x}, more=more)


def other_neighbours() -> Sides:
    links, more = graph()
    x = drawn(20, 14)
    return Sides(links.T @ x, links.T[torch.randperm(20)] @ x, {"x": x}, more=more)


FAULTS: Mapping[Callable[[], Sides], str] = {
    spread_counts_pads: "mask",
    mean_divided_by_all: "mask scale",
    largest_among_pads: "mask",
    mean_of_another_axis: "scale",
    one_element_less: "scale",
    spread_for_variance: "activation",
    sum_for_mean_of_lengths: "scale",
    level_of_padded_samples: "mask scale",
    length_over_all_axes: "scale",
    shares_not_made_one: "scale",
    another_decay: "scale",
    another_beginning: "stale",
    sum_from_the_end: "permutation",
    filter_with_another_number: "scale",
    mask_of_other_blocks: "mask",
    shares_of_one_more: "mask",
    curve_of_brightness: "activation",
    guided_the_other_way: "permutation",
    halves_of_a_batch: "permutation",
    gate_with_one_more: "scale",
    ends_of_a_filter: "mask",
    pool_of_a_border: "mask",
    cut_at_another_corner: "shift",
    half_a_place_on: "shift",
    points_of_ends_that_meet: "positions",
    state_of_a_filter_lost: "stale",
    state_of_a_sum_lost: "stale",
    less_likely_when_said: "scale",
    constant_for_some: "offset",
    logarithm_left_out: "activation",
    exponential_of_half: "activation",
    spread_from_a_logarithm: "activation scale",
    slope_of_a_leak: "activation scale",
    bend_of_an_elu: "activation scale",
    beta_of_a_softplus: "activation",
    bound_of_a_clamp: "activation saturation",
    hotter_shares: "scale",
    divided_for_multiplied: "scale",
    weight_of_another_axis: "scale",
    bias_of_another_axis: "offset positions",
    mean_not_taken_away: "scale offset",
    time_added_twice: "scale offset",
    gate_left_out: "scale",
    scales_of_groups: "scale",
    scales_of_inputs: "scale",
    adapter_left_out: "weights",
    edges_the_other_way: "transpose",
    sum_for_mean_of_neighbours: "scale",
    itself_counted: "mask scale",
    shares_of_givers: "scale",
}
RIVALS = (
    samples_off_at_random,
    sum_of_a_function,
    points_at_random,
    off_in_the_middle,
    function_of_two,
    decay_of_every_token,
    some_at_random,
    steps_at_random,
    other_map,
    other_neighbours,
)


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("coarse", [False, True], ids=["float32", "bfloat16"])
def test_a_family_of_mistakes_is_called_by_its_name(
    plant: Callable[[], Sides], coarse: bool
) -> None:
    cause, sentence = named(plant(), coarse)
    assert cause in FAULTS[plant].split(), sentence


@pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.__name__)
def test_what_only_looks_alike_stays_unknown(rival: Callable[[], Sides]) -> None:
    cause, sentence = named(rival())
    assert cause == "unknown", sentence
