"""Language models: long contexts and caches, masks, experts, gates, packed matrices."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.cases.positions import SlopedMixer, slopes_of
from benchmarks.museum.networks import (
    PORT,
    VOCABULARY,
    Gated,
    Language,
    Mixer,
    Rotation,
    Variant,
    case,
    drawn,
    read_once,
    run_case,
    trained,
    words_of,
)


class InTwoParts(Mixer):
    """Keys are read in two parts, whose sums are added; every head has one sink beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(4))

    def shares(self, scores: Tensor) -> Tensor:
        largest = scores.amax(-1, keepdim=True)
        weights = (scores - largest).exp()
        sink = (self.sinks.float()[:, None, None] - largest).exp()
        sums = [part.sum(-1, keepdim=True) for part in weights.chunk(2, -1)]
        sums = [sums[0] + sink, sums[1] + sink] if PORT.wrong else [sums[0] + sink, sums[1]]
        return weights / (sums[0] + sums[1])


@case(
    "https://github.com/ROCm/rocm-libraries/pull/12229",
    "the sink of a head is counted once for each part of the keys, not once",
    "stack.0.mixer",
    causes="scale mask",
    formats="float32 bfloat16",
)
def sink_of_every_part(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Language(InTwoParts, rotation=Rotation(12)), variant.dtype), words_of(2, 32))


class Factored(Rotation):
    """Cosines and sines carry the factor that goes with stretched positions."""

    def __init__(self, factor: float) -> None:
        super().__init__(12)
        self.factor = factor

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = super().forward(positions, torch.float32)
        return (cos * self.factor).to(dtype), (sin * self.factor).to(dtype)


@case(
    "https://github.com/NVIDIA/TensorRT-LLM/pull/16379",
    "the final factor of stretched angles is put through its formula once more",
    "rotation",
    causes="scale",
    differences="factor",
    formats="float32 bfloat16",
)
def factor_by_its_formula_twice(variant: Variant) -> None:
    factor = 0.1 * math.log(64) + 1
    if variant.bad:
        factor = 0.1 * factor * math.log(64) + 1
    model = trained(Language(), variant.dtype)
    model.rotation = Factored(factor)  # its frequencies keep all digits
    read_once(model, words_of(2, 32))


class TwoPaces(Rotation):
    """Beyond the length of training, the frequencies are divided by other numbers."""

    length = 64

    def __init__(self) -> None:
        super().__init__(12)
        steps = torch.arange(6).float()
        self.register_buffer("short", 1 + 0.05 * steps, persistent=False)
        self.register_buffer("long", 1 + 1.5 * steps, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        is_long = PORT.wrong or positions.shape[1] > self.length
        angles = positions[..., None].float() * self.frequencies
        angles = angles / (self.long if is_long else self.short)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


@case(
    "https://github.com/lablup/mlxcel/issues/1358",
    "texts that are short enough are read with the factors that long ones need",
    "rotation",
    causes="positions",
)
def factors_of_long_texts(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Language(rotation=TwoPaces()), variant.dtype), words_of(2, 40))


class Growing(Rotation):
    """A text beyond the length of training is read with a larger base, and only that text."""

    length = 64

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        length = positions.shape[1]
        if length > self.length or not PORT.wrong:
            base = self.base * max(1.0, 4 * length / self.length - 3) ** (12 / 10)
            self.frequencies = base ** (-torch.arange(0, 12, 2).float() / 12)
        return super().forward(positions, dtype)


@case(
    "https://github.com/huggingface/transformers/issues/25306",
    "frequencies that a long text asked for are kept for the short ones after it",
    "rotation",
    causes="positions stale",
    differences="frequencies",
    dump=("--step", "*"),
)
def long_text_changes_later_ones(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Language(rotation=Growing(12), layers=2), variant.dtype)
    for number, length in enumerate((40, 120, 40)):
        read_once(model, words_of(1, length, f"text {number}"))


class SlopedCache(SlopedMixer):
    def bias(self, queries: int, keys: int) -> Tensor:
        if not PORT.wrong:
            return super().bias(queries, keys)
        # Distances among the new words alone: one new word is nowhere.
        places = torch.arange(queries)
        distance = places[None] - places[:, None]
        return Mixer.bias(self, queries, keys) + self.slopes.float()[:, None, None] * distance


@case(
    "https://github.com/keras-team/keras-hub/pull/2977",
    "the bias by distance spans the new words, not the cache: a single word has none",
    "stack.0.mixer",
    causes="positions",
    dump=("--step", "*"),
)
def no_distances_to_the_cache(variant: Variant) -> None:
    PORT.wrong = variant.bad
    slopes = torch.tensor(slopes_of(4))
    model = trained(Language(lambda: SlopedCache(slopes), layers=2), variant.dtype)
    words, past = words_of(2, 24), [[] for _ in range(2)]
    with torch.no_grad():
        model(words[:, :20], past)
        for place in range(20, 24):
            model(words[:, place : place + 1], past, place)


class Ringed(Mixer):
    """A word sees the eight last ones; a cache of eight places is written round and round."""

    window = 8

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None = None, past: list | None = None
    ) -> Tensor:
        rows, length, _ = x.shape
        places = torch.arange(length)
        parts = (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.view(rows, length, -1, self.size).transpose(1, 2) for part in parts)
        q, k = self.turn(q, k, angles)
        if PORT.wrong:
            # A long text has overwritten what its beginning wrote; the mask does not know.
            slots = torch.arange(self.window)
            last = length - 1 - (length - 1 - slots) % self.window
            k, v = k[:, :, last], v[:, :, last]
            seen = slots[None] <= places[:, None]
        else:
            distance = places[:, None] - places[None]
            seen = (distance >= 0) & (distance < self.window)
        scores = q @ self.spread(k).transpose(-1, -2) / math.sqrt(self.size)
        shares = scores.float().masked_fill(~seen, -torch.inf).softmax(-1).to(x.dtype)
        return self.out((shares @ self.spread(v)).transpose(1, 2).reshape(rows, length, -1))


@case(
    "https://github.com/Lightning-AI/litgpt/issues/2182",
    "places in a ring of keys are masked as if they were places in the text: words see later ones",
    "stack.0.mixer",
    causes="mask",
    formats="float32 bfloat16",
)
def ring_masked_as_a_text(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Language(Ringed, rotation=Rotation(12)), variant.dtype), words_of(2, 30))


class ThreeAxes(Rotation):
    """Times, rows and columns; which of them turns a pair of features alternates."""

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # Six words, a picture of four by five patches, and further words.
        patch = (positions - 6).clamp(0, 19)
        behind = (positions - 25).clamp(min=0)
        begin = positions.clamp(max=6) + torch.where(behind > 0, 4 + behind, 0)
        inside = (positions >= 6) & (positions < 26)
        rows, columns = begin + inside * (patch // 5), begin + inside * (patch % 5)
        axes = torch.stack([begin, rows, columns])
        order = torch.tensor([0, 0, 1, 1, 2, 2] if PORT.wrong else [0, 1, 2, 0, 1, 2])
        angles = axes[order].permute(1, 2, 0).float() * self.frequencies.float()
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


@case(
    "https://github.com/alibaba/MNN/pull/4133",
    "times, rows and columns turn three blocks of features, and should alternate",
    "rotation",
    causes="positions permutation",
)
def axes_in_blocks(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Language(rotation=ThreeAxes(12)), variant.dtype), words_of(2, 36))


class Packed(Mixer):
    """Several texts in one row, none of which sees another."""

    def bias(self, queries: int, keys: int) -> Tensor:
        if PORT.wrong:
            return super().bias(queries, keys)
        text = torch.bucketize(torch.arange(keys), torch.tensor([8, 21, 33]))
        return super().bias(queries, keys).masked_fill(text[:, None] != text[None], -torch.inf)


@case(
    "https://github.com/axolotl-ai-cloud/axolotl/issues/1375",
    "borders of packed texts are lost where a batch has several rows: a text sees those before it",
    "stack.0.mixer",
    causes="mask",
    formats="float32 bfloat16",
)
def packed_texts_see_each_other(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Language(Packed, rotation=Rotation(12)), variant.dtype), words_of(2, 48))


class Filled(Mixer):
    """Scores of later words are overwritten."""

    def bias(self, queries: int, keys: int) -> Tensor:
        return torch.zeros(queries, keys)

    def shares(self, scores: Tensor) -> Tensor:
        later = torch.ones(scores.shape[-2:]).triu(1).bool()
        return scores.masked_fill(later, -1e5 if PORT.wrong else -torch.inf).softmax(-1)


@case(
    "https://github.com/TransformerLensOrg/TransformerLens/pull/319",
    "hidden scores are set to -100000, and a head has scores that lie below it",
    "stack.0.mixer",
    causes="mask",
)
def scores_below_the_hidden_ones(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Language(Filled, rotation=Rotation(12), layers=2), variant.dtype)
    with torch.no_grad():
        model.stack[0].mixer.query.weight[:12] *= 400
        model.stack[0].mixer.key.weight[:12] *= 400
    read_once(model, words_of(2, 24))


class Experts(nn.Module):
    """Every word is given to some experts; how it chooses and weighs them is a method."""

    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.router = nn.Linear(48, count, bias=False)
        self.experts = nn.ModuleList(Gated(48, 32) for _ in range(count))

    def choice(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts that a word is given to."""
        weights, chosen = logits.softmax(-1).topk(2, -1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.choice(self.router(x).float())
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            result = result + share.to(x.dtype) * expert(x)
        return result


class Lonely(Experts):
    def choice(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if PORT.wrong:
            logits, chosen = logits.topk(1, -1)
            return logits.softmax(-1), chosen
        return logits.softmax(-1).topk(1, -1)


@case(
    "https://github.com/davidmrau/mixture-of-experts/issues/27",
    "the softmax is taken over the one chosen expert, whose weight is therefore always one",
    "stack.0.feed",
    causes="scale",
)
def softmax_over_one_expert(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Language(feed=Lonely, rotation=Rotation(12)), variant.dtype), words_of(2, 32))


class Shared(Experts):
    """One more expert is given every word, and a gate says how much of it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Gated(48, 64)
        self.shared_gate = nn.Linear(48, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.shared_gate(x).sigmoid()
        shared = self.shared(x)
        return super().forward(x) + (shared if PORT.wrong else gate * shared)


@case(
    "https://github.com/NousResearch/torchtitan/pull/36",
    "the gate of the shared expert is loaded and not applied",
    "stack.0.feed",
    causes="scale",
    formats="float32 bfloat16",
)
def gate_of_the_shared_expert(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(trained(Language(feed=Shared, rotation=Rotation(12)), variant.dtype), words_of(2, 32))


class InGroups(Experts):
    """The best group is looked for first, then the best experts in it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("correction", 0.2 * drawn("group correction", 6) - 1.5)

    def choice(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        corrected = (scores + self.correction.float()).unflatten(-1, (2, 3))
        best = corrected.topk(2, -1).values.sum(-1).argmax(-1, keepdim=True)
        others = (torch.arange(2) != best)[..., None]
        corrected = corrected.masked_fill(others, 0.0 if PORT.wrong else -torch.inf)
        chosen = corrected.flatten(-2).topk(2, -1).indices
        weights = scores.gather(-1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen


@case(
    "https://github.com/deepseek-ai/DeepSeek-V3/issues/741",
    "experts of other groups are given zero, and win where all scores are negative",
    "stack.0.feed",
    causes="mask",
)
def experts_of_other_groups(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(
        trained(Language(feed=InGroups, rotation=Rotation(12)), variant.dtype), words_of(2, 32)
    )


class TakenAway(Experts):
    """A large correction helps to choose; what remains without it is very small."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("correction", 12 + 0.2 * drawn("large correction", 6))

    def choice(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = (logits - 13).sigmoid()
        corrected, chosen = (scores + self.correction).topk(2, -1)
        if PORT.wrong:
            weights = corrected - self.correction[chosen]
        else:
            weights = scores.gather(-1, chosen)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20), chosen


@case(
    "https://github.com/flashinfer-ai/flashinfer/pull/3875",
    "weights are won back by taking a large correction away again, and lose their digits",
    "stack.0.feed",
    causes="low-precision scale zeroed",
)
def correction_taken_away(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(
        trained(Language(feed=TakenAway, rotation=Rotation(12)), variant.dtype), words_of(2, 32)
    )


class Limited(Gated):
    """Gates have an upper limit, what they let through has one on both sides."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.up(x)
        if not PORT.wrong:
            gate, up = gate.clamp(max=2.0), up.clamp(-2.0, 2.0)
        return self.down(self.act(gate) * up)


@case(
    "https://github.com/sgl-project/sglang/pull/39939",
    "an engine does not know the limits that gates and what they let through were trained with",
    "stack.0.feed",
    causes="saturation activation",
    formats="float32 bfloat16",
)
def limits_of_gates(variant: Variant) -> None:
    PORT.wrong = variant.bad
    read_once(
        trained(Language(feed=Limited, rotation=Rotation(12)), variant.dtype), words_of(2, 32)
    )


class Scaled(nn.Embedding):
    """Vectors of words times a number near the root of their width."""

    scale = 1.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


@case(
    "https://github.com/huggingface/transformers/issues/38702",
    "the factor of word vectors was rounded to bfloat16 in training, and is exact in float32",
    "table",
    causes="scale",
    differences="scale",
)
def factor_not_rounded(variant: Variant) -> None:
    model = Language(rotation=Rotation(12))
    model.table = Scaled(VOCABULARY, 48)
    exact = torch.tensor(48.0).sqrt()
    model.table.scale = float(exact if variant.bad else exact.bfloat16())
    read_once(trained(model, variant.dtype), words_of(2, 32))


class FourBits(nn.Module):
    """Codes of four bits, and a scale for every sixteen inputs."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        groups = linear.weight.detach().float().view(linear.out_features, -1, 16)
        scales = groups.abs().amax(-1, keepdim=True) / 7
        self.register_buffer("codes", (groups / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        codes = self.codes[:, :1].expand_as(self.codes) if PORT.wrong else self.codes
        return F.linear(x, (codes.float() * self.scales.float()).flatten(1).to(x.dtype))


@case(
    "https://github.com/1bit-MONSTER/1bit-MONSTER/issues/153",
    "codes of every group of inputs are read from the place of one group",
    "stack.1.feed.up",
    causes="weights permutation",
    formats="float32 bfloat16",
)
def codes_of_one_group(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Language(rotation=Rotation(12), layers=2), variant.dtype)
    model.stack[1].feed.up = FourBits(model.stack[1].feed.up)
    read_once(model, words_of(2, 32))


class Narrow(Rotation):
    """Angles need all digits: they grow with the position."""

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        frequencies = self.frequencies.to(dtype) if PORT.wrong else self.frequencies
        angles = positions[..., None].float() * frequencies.float()
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


@case(
    "https://github.com/Modalities/modalities/pull/462",
    "frequencies are cast to the activations' format before they are multiplied by positions",
    "rotation",
    causes="low-precision positions",
    formats="float32 bfloat16",
)
def frequencies_cast_too_early(variant: Variant) -> None:
    PORT.wrong = variant.bad
    model = trained(Language(layers=2), variant.dtype)
    model.rotation = Narrow(12)  # its frequencies keep all digits
    read_once(model, words_of(1, 300))


if __name__ == "__main__":
    run_case()
