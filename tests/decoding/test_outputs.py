"""Names and `.out` folders: what is written is read back, what is damaged is refused in words."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from driftline.decoding.files import names, outputs
from driftline.errors import BadFile, BadInput, DriftlineError

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), min_size=1, max_size=60)
COUNTS = st.integers(0, 99_999)


@given(NAMES, COUNTS, COUNTS, COUNTS, st.sampled_from(["fp16", "bf16", "float16"]))
def test_a_name_is_taken_apart_into_what_it_was_made_of(
    model: str, new: int, batch: int, length: int, dtype: str
) -> None:
    start = names.file_prefix(model, new, batch, length, dtype)
    for rest in ("", ".ce.csv", ".cpu_validation_info.7.out", "--model.layers7.ln.abs_diff.csv"):
        named = names.parse_name(start + rest)
        if not model.rstrip("/"):
            continue
        assert named == (names.flat_name(model), new, batch, length, dtype, rest)


def test_the_older_spelling_of_the_length_is_read() -> None:
    named = names.parse_name(
        "--tmp--Mistral-7B-Instruct-v0.3_max-new-tokens-128_batch-size-8_seq-length64_dtype-fp16"
        ".cpu_validation_info.4.out"
    )
    assert named is not None
    assert (named.model, named.length) == ("--tmp--Mistral-7B-Instruct-v0.3", 64)
    assert names.parse_name("something.csv") is None


def test_a_name_that_no_file_system_takes_is_refused_by_its_bytes() -> None:
    names.require_short("x" * 255)
    with pytest.raises(BadInput, match="would have 256 bytes"):
        names.require_short("ü" * 128)


def batch(prompts: int = 3) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    tokens = torch.arange(prompts * 10).reshape(prompts, 10)
    return list(tokens), list(torch.randn(prompts, 4, 16, dtype=torch.float16))


def test_what_is_written_is_read_back_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    tokens, logits = batch(12)
    outputs.write_out(tmp_path / "a.out", tokens, logits, provenance={"settings": {"seed": 3}})
    saved = outputs.read_out(tmp_path / "a.out")
    assert torch.equal(torch.stack(saved.tokens), torch.stack(tokens))
    assert torch.equal(torch.stack(saved.logits), torch.stack(logits))
    assert saved.provenance["settings"]["seed"] == 3
    outputs.write_out(tmp_path / "a.out", tokens[:2])
    assert len(outputs.read_out(tmp_path / "a.out").tokens) == 2, "replaced as a whole"
    assert outputs.read_out(tmp_path / "a.out").logits == []
    assert [path.name for path in tmp_path.iterdir()] == ["a.out"]


def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    tokens, logits = batch()
    place = tmp_path / "a.out"
    with pytest.raises(BadFile, match="cannot be read"):
        outputs.read_out(place)
    outputs.write_out(place, tokens, logits)
    (place / "1.pt").rename(place / "7.pt")
    with pytest.raises(BadFile, match=r"not whole: its prompts are 0\.pt, 2\.pt, 7\.pt"):
        outputs.read_out(place)
    for file in place.iterdir():
        file.unlink()
    with pytest.raises(BadFile, match="holds no prompt"):
        outputs.read_out(place)


def test_a_few_bytes_that_claim_a_terabyte_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "a.out"
    place.mkdir()
    torch.save({"tokens": torch.zeros(1, dtype=torch.int64).expand(1 << 37)}, place / "0.pt")
    with pytest.raises(BadFile, match="holds no tokens"):
        outputs.read_out(place)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 20), st.integers(1, 255), st.booleans())
def test_a_damaged_prompt_is_a_sentence_or_as_it_was(at: int, flip: int, cut: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "a.out"
        tokens, logits = batch(1)
        outputs.write_out(place, tokens, logits)
        content = bytearray((place / "0.pt").read_bytes())
        at %= len(content)
        if cut:
            del content[at:]
        else:
            content[at] ^= flip
        (place / "0.pt").write_bytes(content)
        try:
            saved = outputs.read_out(place)
        except DriftlineError as refused:
            assert str(place) in str(refused)
        else:
            assert saved.tokens[0].dim() == 1
