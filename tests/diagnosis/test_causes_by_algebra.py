"""Families of mistakes that one hypothesis with parameters explains, and rivals that none does.

Every fault is planted in a tensor: what is right, what the candidate has, and what both were given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from planted_sides import Sides, case_of, drawn, named
from torch import Tensor

from driftline.diagnosis.causes.registry import best_clue

# Orders.


def patches() -> Sides:
    x = drawn(
        2, 3, 4, 8, 4, 8
    )  # samples, colours, rows of patches and in them, the same of columns
    right = x.permute(0, 2, 4, 1, 3, 5).reshape(2, 16, 192)
    return Sides(right, x.permute(0, 2, 4, 3, 5, 1).reshape(2, 16, 192))


def colours() -> Sides:
    x = drawn(2, 3, 12, 10)
    return Sides(x, x.flip(1))


def mirrored() -> Sides:
    x = drawn(2, 5, 12, 10)
    return Sides(x, x.flip(3))


def channels_last() -> Sides:
    x = drawn(2, 6, 8, 10)
    return Sides(x, x.permute(0, 2, 3, 1).reshape(x.shape))


def groups_of_channels() -> Sides:
    x = drawn(2, 24, 5, 7)
    return Sides(x, x.view(2, 4, 6, 5, 7).transpose(1, 2).reshape(x.shape))


def pixels() -> Sides:
    x = drawn(2, 36, 5, 6)
    wrong = x.view(2, 3, 3, 4, 5, 6).permute(0, 3, 4, 1, 5, 2).reshape(2, 4, 15, 18)
    return Sides(F.pixel_shuffle(x, 3), wrong, {"x": x})


def tokens_in_any_order() -> Sides:
    x = drawn(3, 14, 24)
    order = torch.randperm(42, generator=torch.Generator().manual_seed(1))
    return Sides(x, x.reshape(42, 24)[order].view(x.shape), {"x": x})


def rolled_without_its_padding() -> Sides:
    x = drawn(3, 14, 24)
    right, wrong = (F.pad(x.roll(before, 1), (0, 0, 0, 2)).roll(3 - before, 1) for before in (0, 3))
    return Sides(right, wrong, {"x": x})


def first_for_last() -> Sides:
    x = drawn(4, 9, 32)
    return Sides(x[:, -1], x[:, 0], parts={"body": x})


def lengths_ignored() -> Sides:
    x, ends = drawn(4, 9, 32), torch.tensor([3, 8, 5, 6])
    return Sides(x[torch.arange(4), ends], x[:, -1], parts={"body": x})


def padding_in_a_mean() -> Sides:
    x, ends = drawn(4, 9, 64), torch.tensor([3, 8, 5, 6])
    inside = (torch.arange(9) < ends[:, None]).double()[..., None]
    return Sides((x * inside).sum(1) / inside.sum(1), x.mean(1), parts={"body": x})


def mean_of_something_else() -> Sides:
    x = drawn(4, 9, 64)
    return Sides(x.mean(1), x.amax(1), parts={"body": x})


def noise_of_its_size() -> Sides:
    x = drawn(3, 14, 24)
    return Sides(x, drawn(3, 14, 24, seed=7), {"x": x})


def a_new_order_every_row() -> Sides:
    x, y = drawn(3, 14, 24), drawn(3, 14, 24, seed=3)
    order = torch.argsort(y, -1)
    # The numbers of another tensor: nothing was moved.
    return Sides(x, y.gather(-1, order), {"x": x})


# Gates and functions.


def gate_and_value_swapped() -> Sides:
    x = drawn(3, 10, 64)
    a, b = x.chunk(2, -1)
    return Sides(F.gelu(a) * b, F.gelu(b) * a, {"x": x})


def gate_of_channels_first() -> Sides:
    x = drawn(2, 16, 9, 9)
    a, b = x.chunk(2, 1)
    return Sides(a * b.sigmoid(), x[:, ::2] * x[:, 1::2].sigmoid(), {"x": x})


def another_gate() -> Sides:
    a, b = drawn(2, 12, 40), drawn(2, 12, 40, seed=1)
    return Sides(F.silu(a) * b, F.relu(a) * b, parts={"gate": a, "up": b})


def unknown_gate() -> Sides:
    a, b = drawn(2, 12, 40), drawn(2, 12, 40, seed=1)
    return Sides(F.silu(a) * b, torch.sin(3 * a) * b.cos(), parts={"gate": a, "up": b})


def shares_along_tokens() -> Sides:
    x = 2 * drawn(2, 12, 20)
    return Sides(x.softmax(-1), x.softmax(1), {"x": x})


def sigmoid_for_softmax() -> Sides:
    x = 2 * drawn(2, 12, 20)
    return Sides(x.softmax(-1), x.sigmoid(), {"x": x})


def gates_of_a_cell() -> Sides:
    x, h = drawn(6, 9, 96), drawn(6, 96, seed=2)

    def state(order: tuple[int, int, int, int]) -> Tensor:
        parts = (x[:, 0] + h).chunk(4, -1)
        take, _, new, show = (parts[number] for number in order)
        return show.sigmoid() * (take.sigmoid() * new.tanh()).tanh()

    return Sides(state((0, 1, 2, 3)), state((0, 1, 3, 2)), parts={"enter": x, "again": h})


def cap_left_out() -> Sides:
    x = 40 * drawn(2, 12, 30)
    return Sides(30 * torch.tanh(x / 30), x)


# Factors and sums.


def samples_by_themselves() -> Sides:
    x = drawn(5, 6, 8, 8)
    return Sides(x, x * torch.tensor([0.5, 0.9, 1.3, 2.0, 0.7]).double()[:, None, None, None])


def statistics_of_a_batch() -> Sides:
    x = drawn(4, 6, 8, 8) * drawn(4, 6, 1, 1, seed=5).abs() + drawn(4, 6, 1, 1, seed=6)
    return Sides(F.instance_norm(x), F.batch_norm(x, None, None, training=True))


def heads_by_themselves() -> Sides:
    x = drawn(2, 10, 64)
    factors = 1 + drawn(2, 10, 4, 1, seed=4).abs()
    return Sides(x, (x.view(2, 10, 4, 16) * factors).reshape(x.shape))


def much_larger_numbers() -> Sides:
    return Sides(
        drawn(2, 10, 64).sign() * 2 + 0.3 * drawn(2, 10, 64, seed=7), 90 * drawn(2, 10, 64)
    )


def another_step_of_loudness() -> Sides:
    x = drawn(2, 40, 30).abs() * drawn(2, 40, 30, seed=1).exp()
    loud = (x.log10().clamp(min=-1.2) + 4) / 4
    return Sides(loud, (4 * x.log10().clamp(min=-1.2)).exp2())


def every_number_by_itself() -> Sides:
    x = drawn(2, 10, 64)
    return Sides(x, x * (1 + drawn(2, 10, 64, seed=4).abs()))


def residual_of_another_place() -> Sides:
    x, y = drawn(2, 14, 32), drawn(2, 14, 32, seed=1)
    normal, made = F.layer_norm(x, (32,)), drawn(2, 14, 32, seed=2)
    return Sides(x + y + made, normal + made, parts={"a": x, "b": y, "norm": normal, "d": made})


def skip_of_another_layer() -> Sides:
    x, y = drawn(2, 14, 32), drawn(2, 14, 32, seed=1)
    return Sides(x, y, parts={"a": x, "b": y})


def norm_left_out() -> Sides:
    x = drawn(2, 14, 32) * (1 + drawn(2, 14, 1, seed=5).abs())
    normal = F.layer_norm(x, (32,)) * (1 + 0.1 * drawn(32))
    return Sides(normal, x, parts={"x": x, "norm": normal})


def scale_of_a_layer_left_out() -> Sides:
    x, made = drawn(2, 24, 32), drawn(2, 24, 32, seed=2)
    factors = 0.3 + drawn(32, seed=3).abs()
    return Sides(x + factors * made, x + made, parts={"x": x, "made": made})


def modulation_without_one() -> Sides:
    x, y = drawn(2, 24, 32), drawn(2, 24, 32, seed=2)
    return Sides(x * (1 + y), x * y, parts={"norm": x, "scale": y})


def sum_of_something_else() -> Sides:
    x, made = drawn(2, 14, 32), drawn(2, 14, 32, seed=2)
    return Sides(x + made, x + drawn(2, 14, 32, seed=8), parts={"x": x, "made": made})


def experts(weights: Callable[[Tensor, Tensor], Tensor]) -> Sides:
    gave = drawn(3, 40, 32)  # of three experts, for forty tokens
    scores = drawn(40, 3, seed=1)
    chosen = scores.topk(2, -1).indices
    mask = torch.zeros(40, 3).scatter(1, chosen, 1.0).double()
    right = (scores.softmax(-1) * mask)[..., None] * gave.permute(1, 0, 2)
    wrong = (weights(scores, mask) * mask)[..., None] * gave.permute(1, 0, 2)
    spread = {str(at): (gave[at] * mask[:, at, None]).float().double().numpy() for at in range(3)}
    return Sides(right.sum(1), wrong.sum(1), more={"spread": spread})


def experts_by_sigmoid() -> Sides:
    return experts(lambda scores, mask: scores.sigmoid())


# Norms, windows, resizes.


def norm_over_pictures() -> Sides:
    x = drawn(2, 8, 6, 10) * torch.arange(1, 9).double()[None, :, None, None]
    weight = 1 + 0.2 * drawn(8)[:, None, None]
    by_place = F.layer_norm(x.movedim(1, -1), (8,)).movedim(-1, 1)
    return Sides(by_place * weight, F.layer_norm(x, x.shape[1:]) * weight, {"x": x})


def taps_apart() -> Sides:
    x, kernel = drawn(3, 4, 40), drawn(6, 4, 3)
    return Sides(
        F.conv1d(x, kernel, padding=2, dilation=2), F.conv1d(x, kernel, padding=1), {"x": x}
    )


def future_seen() -> Sides:
    x, kernel = drawn(2, 12, 40), drawn(12, 1, 5)
    right = F.conv1d(F.pad(x, (4, 0)), kernel, groups=12)
    return Sides(right, F.conv1d(x, kernel, padding=2, groups=12), {"x": x})


def border_mirrored() -> Sides:
    x, kernel = drawn(2, 3, 14, 18), drawn(8, 3, 5, 5)
    right = F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), kernel)
    return Sides(right, F.conv2d(x, kernel, padding=2), {"x": x})


def kernel_turned() -> Sides:
    x, kernel = drawn(2, 3, 14, 18), drawn(8, 3, 3, 3)
    return Sides(F.conv2d(x, kernel), F.conv2d(x, kernel.flip(2, 3)), {"x": x})


def kernel_of_another() -> Sides:
    x, kernel = drawn(2, 3, 14, 18), drawn(8, 3, 3, 3)
    return Sides(F.conv2d(x, kernel), F.conv2d(x, drawn(8, 3, 3, 3, seed=9)), {"x": x})


def corners() -> Sides:
    x = drawn(2, 4, 7, 9)
    right, wrong = (
        F.interpolate(x, size=(16, 20), mode="bilinear", align_corners=pinned)
        for pinned in (True, False)
    )
    return Sides(right, wrong, {"x": x})


def antialias() -> Sides:
    x = drawn(2, 4, 24, 32)
    right, wrong = (
        F.interpolate(x, size=(9, 11), mode="bicubic", antialias=smooth) for smooth in (True, False)
    )
    return Sides(right, wrong, {"x": x})


def resized_by_chance() -> Sides:
    x = drawn(2, 4, 7, 9)
    right = F.interpolate(x, size=(14, 18), mode="bilinear")
    return Sides(right, right + drawn(2, 4, 14, 18, seed=4), {"x": x})


def stretched_in_parts() -> Sides:
    paces = 1000.0 ** (-torch.arange(12).double() / 12)
    slow = torch.where(torch.arange(12) > 5, paces / 8, paces)
    places = torch.arange(30).double()[None, :, None]
    return Sides((places * paces).cos().repeat(1, 1, 2), (places * slow).cos().repeat(1, 1, 2))


def places_left_out() -> Sides:
    x, table = drawn(3, 20, 24), drawn(20, 24, seed=1)
    return Sides(x + table, x)


def added_by_chance() -> Sides:
    x = drawn(3, 20, 24)
    return Sides(x, x + drawn(3, 20, 24, seed=4))


# Attention.


def attention(
    bias: Tensor, *, sinks: float = 0.0, seed: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    q, k, v = (drawn(2, 24, 64, seed=seed + number) for number in range(3))
    heads = [x.view(2, 24, 4, 16).transpose(1, 2) for x in (q, k, v)]
    scores = heads[0] @ heads[1].transpose(-1, -2) / 4 + bias
    raised = scores.exp()
    shares = raised / (raised.sum(-1, keepdim=True) + sinks)
    return (shares @ heads[2]).transpose(1, 2).reshape(2, 24, 64), {"q": q, "k": k, "v": v}


def by_distance(table: Tensor) -> Tensor:
    apart = torch.arange(24)[None] - torch.arange(24)[:, None]
    return table[:, apart + 23]


def distances_left_out() -> Sides:
    right, parts = attention(by_distance(drawn(4, 47, seed=3)))
    return Sides(right, attention(torch.zeros(1).double())[0], parts=parts)


def one_direction_for_both() -> Sides:
    table = drawn(4, 47, seed=3)
    one_sided = torch.cat([table[:, :23], table[:, 23:24].expand(4, 24)], 1)
    right, parts = attention(by_distance(table))
    return Sides(right, attention(by_distance(one_sided))[0], parts=parts)


def sinks_left_out() -> Sides:
    right, parts = attention(torch.zeros(1).double(), sinks=9.0)
    return Sides(right, attention(torch.zeros(1).double())[0], parts=parts)


def any_scores() -> Sides:
    right, parts = attention(torch.zeros(1).double())
    return Sides(right, attention(2 * drawn(2, 4, 24, 24, seed=5))[0], parts=parts)


FAULTS: Mapping[Callable[[], Sides], str] = {
    patches: "permutation transpose",
    colours: "permutation",
    mirrored: "permutation",
    channels_last: "transpose",
    groups_of_channels: "permutation",
    pixels: "permutation",
    tokens_in_any_order: "permutation",
    rolled_without_its_padding: "shift",
    skip_of_another_layer: "permutation",
    norm_left_out: "scale",
    first_for_last: "shift",
    lengths_ignored: "stale",
    padding_in_a_mean: "mask",
    mean_of_something_else: "activation",
    gate_and_value_swapped: "permutation",
    gate_of_channels_first: "permutation",
    another_gate: "activation",
    shares_along_tokens: "scale",
    sigmoid_for_softmax: "activation",
    gates_of_a_cell: "permutation",
    cap_left_out: "soft-cap",
    samples_by_themselves: "scale",
    statistics_of_a_batch: "scale",
    heads_by_themselves: "scale",
    residual_of_another_place: "scale",
    scale_of_a_layer_left_out: "scale",
    modulation_without_one: "scale",
    experts_by_sigmoid: "scale",
    norm_over_pictures: "scale",
    taps_apart: "positions",
    future_seen: "shift",
    border_mirrored: "shift",
    kernel_turned: "permutation",
    corners: "positions",
    antialias: "positions",
    stretched_in_parts: "positions",
    places_left_out: "positions",
    distances_left_out: "positions",
    one_direction_for_both: "positions",
    sinks_left_out: "scale",
}
RIVALS = (
    noise_of_its_size,
    a_new_order_every_row,
    unknown_gate,
    every_number_by_itself,
    much_larger_numbers,
    another_step_of_loudness,
    sum_of_something_else,
    kernel_of_another,
    resized_by_chance,
    added_by_chance,
    any_scores,
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


def test_a_container_that_returns_a_wrong_part_has_not_moved_its_numbers() -> None:
    # Each side holds exactly the numbers of its own part, in the order in which the part gave them.
    right, wrong = drawn(3, 14, 24), drawn(3, 14, 24, seed=5)
    case = case_of(Sides(right, wrong, parts={"down": wrong}), coarse=False)
    clue, _ = best_clue(replace(case, right_parts={"down": case.r}))
    assert clue is None or clue.cause != "permutation", clue.sentence
