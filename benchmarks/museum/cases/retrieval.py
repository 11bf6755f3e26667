"""Retrieval: how the vectors of words become those of sentences, and how these are scored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.museum.networks import PORT, Variant, case, read_once, run_case, trained, words_of


class Reader(nn.Module):
    """One layer of attention in both directions, over the words that are real."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(101, 32)
        self.mixer = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm = nn.LayerNorm(32)

    def forward(self, words: Tensor, real: Tensor) -> Tensor:
        x = self.table(words)
        y, _ = self.mixer(x, x, x, key_padding_mask=~real, need_weights=False)
        return self.norm(x + y)


class Mean(nn.Module):
    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        if PORT.wrong:
            return x.mean(1)
        return (x * real[..., None]).sum(1) / real.sum(1, keepdim=True)


class First(nn.Module):
    """The first real word speaks for the sentence."""

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        place = torch.zeros(len(x), dtype=torch.long) if PORT.wrong else real.int().argmax(1)
        return x[torch.arange(len(x)), place]


class Sentences(nn.Module):
    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.reader, self.pool = Reader(), pool
        self.head = nn.Linear(32, 16)

    def forward(self, words: Tensor, real: Tensor) -> Tensor:
        return F.normalize(self.head(self.pool(self.reader(words, real), real)), dim=-1)


def real_words(lengths: list[int], longest: int, pads_first: bool = False) -> Tensor:
    real = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    return real.flip(1) if pads_first else real


@case(
    "https://github.com/huggingface/candle/pull/3085",
    "the mean of a sentence's words counts the pads behind it",
    "pool",
    causes="mask scale",
    formats="float32 bfloat16",
)
def pads_in_the_mean(variant: Variant) -> None:
    PORT.wrong = variant.bad
    real = real_words([20, 12, 6], 20)
    read_once(trained(Sentences(Mean()), variant.dtype), words_of(3, 20) * real, real)


@case(
    "https://github.com/StarlightSearch/EmbedAnything/issues/213",
    "the word in the first place speaks for a sentence that begins with pads",
    "pool",
    causes="stale shift permutation",
    formats="float32 bfloat16",
)
def first_place_is_a_pad(variant: Variant) -> None:
    PORT.wrong = variant.bad
    real = real_words([20, 12, 6], 20, pads_first=True)
    read_once(trained(Sentences(First()), variant.dtype), words_of(3, 20) * real, real)


class Late(nn.Module):
    """Every word of a question takes its best word of a text; the mean of them is the score."""

    def forward(self, asked: Tensor, texts: Tensor, real: Tensor, real_text: Tensor) -> Tensor:
        scores = torch.einsum("qid,tjd->qtij", asked.float(), texts.float())
        best = scores.masked_fill(~real_text[None, :, None], -torch.inf).amax(-1)
        if not PORT.wrong:
            best = best * real[:, None]
        return (best.sum(-1) / real.sum(1)[:, None]).to(asked.dtype)


class Search(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reader = Reader()
        self.narrow = nn.Linear(32, 12, bias=False)
        self.score = Late()

    def forward(self, asked: Tensor, texts: Tensor, real: Tensor, real_text: Tensor) -> Tensor:
        first = F.normalize(self.narrow(self.reader(asked, real)), dim=-1)
        second = F.normalize(self.narrow(self.reader(texts, real_text)), dim=-1)
        return self.score(first, second, real, real_text)


@case(
    "https://github.com/AnswerDotAI/rerankers/pull/76",
    "pads of a question are scored like its words, and the sum is divided by the words alone",
    "score",
    causes="mask scale",
    formats="float32 bfloat16",
)
def pads_of_a_question_scored(variant: Variant) -> None:
    PORT.wrong = variant.bad
    real, real_text = real_words([9, 6, 4], 9), real_words([24, 17, 11, 20], 24)
    asked, texts = words_of(3, 9, "asked") * real, words_of(4, 24, "texts") * real_text
    read_once(trained(Search(), variant.dtype), asked, texts, real, real_text)


if __name__ == "__main__":
    run_case()
