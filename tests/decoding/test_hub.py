"""Ids of models: what nobody has is said at once, what lies here needs no hub."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_decoders import LLAMA, PROMPTS

from driftline.decoding.models.loading import weights_digest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CLOSED = "http://127.0.0.1:9"
"""An address where nobody listens: the hub cannot be reached, whatever this machine is on."""
Run = Callable[..., subprocess.CompletedProcess[str]]
SHAPE = ("--sharegpt_path", str(PROMPTS), "--batch_sizes=1", "--seq_lengths=32")


@pytest.fixture
def run(warm_python: str) -> Run:
    """A command of ours; torch is there before, the hub's library is not: it reads variables."""

    def run(words: tuple[str, ...], home: Path, **more: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"HF_HOME": str(home), "HF_ENDPOINT": CLOSED, **more}
        environment |= {"OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [warm_python, "-m", "driftline", *words],
            capture_output=True,
            text=True,
            env=environment,
            timeout=200,
        )

    return run


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder of downloaded models, as the hub's own library lays it out, with one in it."""
    place = tmp_path / "hub" / "models--acme--tiny"
    shutil.copytree(LLAMA, place / "snapshots" / COMMIT)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ("validate", "--model_paths=acme/none", "--max_new_tokens=2", *SHAPE),
        ("layer-metrics", "--mode=generate", "--model_paths=acme/none", *SHAPE, "-o", "out"),
        (
            *("metrics", "--model_path=acme/none", "--tokenizer=acme/none"),
            *("--sharegpt_path", str(PROMPTS), "--min_pad_length=32", "-o", "out"),
        ),
    ],
    ids=lambda words: words[0],
)
def test_a_model_that_nobody_has_is_said_at_once(words, home, run, monkeypatch):
    monkeypatch.chdir(home)
    start = time.monotonic()
    done = run(words, home)
    took = time.monotonic() - start
    if took >= 20:  # a busy machine? The same without any try says what the rest takes here.
        start = time.monotonic()
        run(words, home, HF_HUB_OFFLINE="1")
        took -= time.monotonic() - start
    assert done.returncode == 2
    assert "there is no model 'acme/none'" in done.stderr
    assert "the hub cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr
    assert took < 20, "a library's own tries take 25 s and more"


def test_a_model_that_was_downloaded_needs_no_hub(home, run):
    words = ("validate", "--model_paths=acme/tiny", "--max_new_tokens=2", *SHAPE)
    done = run((*words, "--candidate=dtype=fp32"), home)
    assert done.returncode == 0, done.stderr
    assert "PASSED acme/tiny-1-32-2" in done.stdout
    assert done.stderr == ""


def test_a_hub_that_is_switched_off_is_named(home, run):
    done = run(
        ("validate", "--model_paths=acme/none", "--max_new_tokens=2", *SHAPE),
        home,
        HF_HUB_OFFLINE="1",
    )
    assert done.returncode == 2
    assert "the hub is switched off (HF_HUB_OFFLINE)" in done.stderr


def test_a_missing_tokenizer_is_called_a_tokenizer(home, run):
    words = ("validate", f"--model_paths={LLAMA}", "--tokenizer=acme/none", *SHAPE)
    done = run(words, home)
    assert done.returncode == 2
    assert "there is no tokenizer 'acme/none'" in done.stderr


def test_one_changed_byte_anywhere_is_another_model(tmp_path):
    big = tmp_path / "model.safetensors"
    with big.open("wb") as file:
        file.truncate(150 << 20)
    (tmp_path / "config.json").write_text("{}")
    before = weights_digest(str(tmp_path))
    assert weights_digest(str(tmp_path)) == before
    for place in (1, (150 << 20) - 1, 77_777_777):
        with big.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        after = weights_digest(str(tmp_path))
        assert after != before, f"byte {place}"
        before = after


def test_an_id_is_known_by_the_commit_that_lies_here(home):
    code = (
        "from driftline.decoding.models.loading import weights_digest\n"
        "print(weights_digest('acme/tiny'), weights_digest('acme/none'))"
    )
    environment = os.environ | {"HF_HOME": str(home), "HF_ENDPOINT": CLOSED}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.split("\n")[0] == f"commit {COMMIT} None", done.stderr
