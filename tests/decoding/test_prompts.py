"""Prompts: which are drawn for a seed, and how a batch is padded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_decoders import DATA, PROMPTS, tokenizer

from driftline.decoding.prompts import Prompt, PromptPool, pad_left, sample_prompts
from driftline.errors import BadFile, BadInput, DriftlineError


@pytest.fixture(scope="module")
def pool() -> PromptPool:
    return PromptPool(PROMPTS, tokenizer())


@pytest.mark.parametrize(("order", "file"), [("head", "head"), ("doc", "docera")])
def test_the_documented_tools_prompts_are_drawn_for_every_window_and_seed(
    pool: PromptPool, order: str, file: str
) -> None:
    wanted = json.loads((DATA / "sampling" / f"sampling_{file}.json").read_text())
    assert len(wanted) == 16
    for asked, drawn in wanted.items():
        words = dict(word.split("=") for word in asked.split(","))
        prompts = pool.sample(
            int(words["n"]), int(words["max"]), seed=int(words["seed"]), order=order
        )
        assert [[prompt.name, len(prompt.ids)] for prompt in prompts] == drawn, asked


def test_too_few_prompts_say_how_many_there_are(pool: PromptPool) -> None:
    with pytest.raises(BadInput, match=r"5 of the 109 prompts in .* have 8 to 16 tokens; 9 are"):
        pool.sample(9, 16)
    with pytest.raises(BadInput, match="5 of the 109 prompts"):
        pool.sample(9, 16, order="doc")
    with pytest.raises(BadInput, match="cannot be drawn"):
        pool.sample(1, 0)


def test_a_text_file_holds_a_prompt_per_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("river stone copper window\n\nalpha beta gamma delta\n", encoding="utf-8")
    drawn = sample_prompts(file, tokenizer(), 2, 16)
    assert {prompt.name for prompt in drawn} == {"1", "3"}
    assert drawn[0].ids[0] == tokenizer().bos_token_id


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b"{", "not valid JSON"),
        ("a.json", b'{"a": 1}', "a list of conversations is expected"),
        ("a.json", b"[1]", "entry 0 has no list of conversations"),
        ("a.json", b'[{"conversations": [{"value": 3}, {}]}]', "entry 0 has no text"),
        ("a.json", b'[{"conversations": [{"value": "x"}]}]', "holds no prompt"),
        ("a.txt", b" \n\n", "holds no prompt"),
        ("a.txt", b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadFile, match=said):
        sample_prompts(tmp_path / name, tokenizer(), 1, 16)


def test_a_missing_prompt_file_is_told_and_nothing_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no prompt file"):
        sample_prompts(tmp_path / "share_gpt.json", tokenizer(), 1, 16)
    with pytest.raises(DriftlineError, match="cannot be read"):
        sample_prompts(tmp_path, tokenizer(), 1, 16)


def test_padding_is_on_the_left_and_positions_begin_at_the_prompt() -> None:
    batch = pad_left([Prompt("a", (7, 8, 9)), Prompt("b", (5,))], 4)
    assert batch.ids.tolist() == [[0, 7, 8, 9], [0, 0, 0, 5]]
    assert batch.mask.int().tolist() == [[0, 1, 1, 1], [0, 0, 0, 1]]
    assert batch.position_ids.tolist() == [[0, 0, 1, 2], [0, 0, 0, 0]]
    assert pad_left([Prompt("a", (7, 8, 9))], 2).ids.shape == (1, 3)
