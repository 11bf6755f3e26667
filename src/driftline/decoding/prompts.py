"""Prompts: from a file of conversations or lines to token ids, the same for the same seed.

Prompts of half the requested length up to this length are drawn. A tokenizer is only an object that
encodes text; models are not known here.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from driftline.errors import BadFile, BadInput

if TYPE_CHECKING:
    import torch
    from _typeshed import StrPath

Order = Literal["head", "doc"]
PAD = 0
"""Fills the left of a short prompt. Masked, so any id of the vocabulary would do."""
BATCH = 1000
"""Prompts that are passed to the tokenizer at once."""


class Prompt(NamedTuple):
    """One prompt.

    Attributes:
        name: Its id in the file, or the number of its line.
        ids: Its tokens, without padding.
    """

    name: str
    ids: tuple[int, ...]


class Padded(NamedTuple):
    """Prompts of one batch, filled up on the left to one length.

    Attributes:
        ids: int64 [batch, length].
        mask: bool [batch, length], True where a token is real.
        position_ids: int64 [batch, length]: 0, 1, … on the prompt, 0 on the padding.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    position_ids: torch.Tensor


class _Text(NamedTuple):
    name: str
    text: str


class PromptPool:
    """The prompts of one file under one tokenizer; counted once, sampled many times.

    Attributes:
        path: The file.
        size: How many prompts it holds, of any length.
    """

    def __init__(self, path: StrPath, tokenizer: Any) -> None:
        self.path = Path(path)
        self._texts = read_texts(self.path)
        self._tokenizer = tokenizer
        self._sizes: list[int] = []
        self.size = len(self._texts)

    def sample(
        self, count: int, length: int, *, seed: int = 0, order: Order = "head"
    ) -> list[Prompt]:
        """`count` prompts of `length // 2` to `length` tokens.

        Args:
            count: How many.
            length: Longest that is taken.
            seed: Other seeds give other prompts, or the same in another order.
            order: `head` draws among the prompts that fit; `doc`, which older results used,
                shuffles the file first, and adds the begin-of-text token by a rule of its own.

        Raises:
            BadInput: Too few prompts fit; the message says how many do.
        """
        if length < 1 or count < 1:
            raise BadInput(
                f"{count} prompts of up to {length} tokens cannot be drawn: at least 1 of 1 is",
                hint="--batch_size and --min_pad_length (the sequence length) say how many and how "
                "long",
            )
        indices = range(len(self._texts))
        # The documented window: mostly padding would say little about a long sequence.
        least = max(1, length // 2)
        generator = random.Random(seed)
        # Kept for results of older tools: other prompts would give other numbers.
        if order == "doc":
            places = list(indices)
            generator.shuffle(places)
            chosen: list[int] = []
            for place in places:
                if least <= len(_pieces(self._tokenizer, self._texts[place].text)) <= length:
                    chosen.append(place)
                    # Tokenizing stops when there are enough: a file may hold a hundred thousand.
                    if len(chosen) == count:
                        break
            fitting = len(chosen)
        else:
            sizes = self._counted()
            fitting_places = [place for place in indices if least <= sizes[place] <= length]
            fitting_places.sort(
                key=lambda place: sizes[place]
            )  # stable: the file's order among equals
            generator.shuffle(fitting_places)
            chosen, fitting = fitting_places[:count], len(fitting_places)
        if fitting < count:
            raise BadInput(
                f"{fitting} of the {self.size} prompts in {self.path} "
                f"{'has' if fitting == 1 else 'have'} {least} to {length} tokens; "
                f"{count} {'is' if count == 1 else 'are'} needed",
                hint="give more prompts, a smaller batch size, or another sequence length",
            )
        encode = _pieces if order == "doc" else _encoded
        return [
            Prompt(self._texts[place].name, encode(self._tokenizer, self._texts[place].text))
            for place in chosen
        ]

    def _counted(self) -> list[int]:
        """How many tokens every prompt has, in batches: tokenizers work on them in parallel."""
        while len(self._sizes) < len(self._texts):
            start = len(self._sizes)
            batch = [prompt.text for prompt in self._texts[start : start + BATCH]]
            self._sizes += [len(ids) for ids in self._tokenizer(batch, verbose=False)["input_ids"]]
        return self._sizes


def _encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(int(token) for token in tokenizer.encode(text, verbose=False))


def _pieces(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The tokens without special ones, after begin-of-text unless that also is end-of-text."""
    bare = tuple(
        int(token) for token in tokenizer.encode(text, add_special_tokens=False, verbose=False)
    )
    begin = cast("int | None", getattr(tokenizer, "bos_token_id", None))
    if begin is None or begin == getattr(tokenizer, "eos_token_id", None):
        return bare
    return (begin, *bare)


def sample_prompts(
    path: StrPath,
    tokenizer: Any,
    count: int,
    length: int,
    *,
    seed: int = 0,
    order: Order = "head",
) -> list[Prompt]:
    """`count` prompts of `length // 2` to `length` tokens; see `PromptPool.sample`."""
    return PromptPool(path, tokenizer).sample(count, length, seed=seed, order=order)


def read_texts(path: Path) -> list[_Text]:
    """The texts of a file: first turns of ShareGPT conversations, or one prompt per line.

    Conversations of fewer than two turns were never answered and are left out.

    Raises:
        BadInput: There is no such file.
        BadFile: It holds no prompt, or is neither kind.
    """
    try:
        # Files from Windows begin with a byte order mark, which is part of no prompt.
        content = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise BadInput(
            f"there is no prompt file {path}",
            hint="give a ShareGPT JSON file, or a text file with one prompt per line; nothing is "
            "downloaded",
        ) from None
    except (OSError, UnicodeDecodeError) as trouble:
        reason = trouble.strerror if isinstance(trouble, OSError) else "it is not UTF-8 text"
        raise BadFile(f"the prompt file {path} cannot be read: {reason}") from None
    read = _conversations if _is_json(path, content) else _lines
    texts = read(path, content)
    if not texts:
        raise BadFile(f"{path} holds no prompt")
    return texts


def _is_json(path: Path, content: str) -> bool:
    return path.suffix.lower() == ".json" or content.lstrip()[:1] == "["


def _lines(path: Path, content: str) -> list[_Text]:
    del path
    return [
        _Text(str(number), line)
        for number, line in enumerate(content.splitlines(), 1)
        if line.strip()
    ]


def _conversations(path: Path, content: str) -> list[_Text]:
    try:
        listed: Any = json.loads(content)
    except (ValueError, RecursionError) as trouble:
        raise BadFile(f"{path} is not valid JSON: {trouble}") from None
    if not isinstance(listed, list):
        raise BadFile(
            f"{path} is no ShareGPT file: a list of conversations is expected",
            hint='[{"id": ..., "conversations": [{"from": "human", "value": "..."}, ...]}, ...]',
        )
    texts: list[_Text] = []
    for index, entry in enumerate(cast("list[Any]", listed)):
        if not isinstance(entry, dict) or not isinstance(entry.get("conversations"), list):  # pyright: ignore[reportUnknownMemberType]
            raise BadFile(f"{path}: entry {index} has no list of conversations")
        conversation = cast("dict[str, Any]", entry)
        turns = cast("list[Any]", conversation["conversations"])
        # Never answered, and left out by the documented tools as well.
        if len(turns) < 2:
            continue
        first = cast("dict[str, Any]", turns[0]) if isinstance(turns[0], dict) else {}
        if not isinstance(first.get("value"), str):
            raise BadFile(f"{path}: the first turn of entry {index} has no text")
        texts.append(_Text(str(conversation.get("id", index)), first["value"]))
    return texts


def pad_left(prompts: Sequence[Prompt], length: int = 0, *, pad: int = PAD) -> Padded:
    """One batch of all prompts, each filled up on the left to the longest or to `length`."""
    import torch

    width = max(length, *(len(prompt.ids) for prompt in prompts))
    ids = torch.full((len(prompts), width), pad, dtype=torch.int64)
    mask = torch.zeros(len(prompts), width, dtype=torch.bool)
    positions = torch.zeros(len(prompts), width, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        size = len(prompt.ids)
        # An empty prompt is padding only; a slice of it would select everything.
        if not size:
            continue
        ids[row, width - size :] = torch.tensor(prompt.ids)
        mask[row, width - size :] = True
        positions[row, width - size :] = torch.arange(size)
    return Padded(ids, mask, positions)
