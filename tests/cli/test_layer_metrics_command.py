"""`driftline layer-metrics` as a user runs it, on the tiny models of the test data."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DATA = Path(__file__).parents[1] / "data" / "aiu"
FIXTURES = DATA / "fixtures"
PROMPTS = FIXTURES / "share_gpt_tiny.json"
PREFIX = "tiny_max-new-tokens-{}_batch-size-{}_seq-length-{}_dtype-float16"

Command = Callable[..., Any]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model `tiny` in it and nothing of ours in the environment."""
    shutil.copytree(FIXTURES / "tiny-llama", tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    for name in (
        *("MODEL_PATHS", "BATCH_SIZES", "SEQ_LENGTHS", "MAX_NEW_TOKENS", "OUTPUT_PATH"),
        "SHARE_GPT_DATASET_PATH",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def layers(driftline: Command, place: Path) -> Command:
    """The command with what every test needs; further words may come before or override nothing."""

    def call(*words: object, mode: str = "model-forward", new: int = 2, out: str = "out") -> Any:
        return driftline(
            *("layer-metrics", "--mode", mode, "--model_paths", "tiny"),
            *("--sharegpt_path", PROMPTS, "--max_new_tokens", new, "--output_path", out),
            *(() if any("seq" in str(word) for word in words) else ("--seq_lengths", 24)),
            *words,
        )

    return call


def values(path: Path) -> np.ndarray[Any, Any]:
    heading, *lines = path.read_text().splitlines()
    assert heading in ("abs_diff", "cos_sim")
    return np.array([float(line) for line in lines])


def test_every_layer_gets_two_files_under_the_documented_name(layers: Command, place: Path) -> None:
    said = layers(mode="generate", new=3, out="deep/folder/out")
    assert (said.code, said.err) == (0, "")
    out = place / "deep" / "folder" / "out"
    start = PREFIX.format(3, 1, 24)
    found = sorted(path.name for path in out.glob("*.csv"))
    assert len(found) == 2 * 32
    assert all(name.startswith(f"{start}--") for name in found)
    mlp = out / f"{start}--model.layers.1.mlp.down_proj.abs_diff.csv"
    told = json.loads((out / f"{start}.layers.json").read_text())
    prompt = sum(token != 0 for token in told["tokens"][0][:24])
    assert len(values(mlp)) == prompt + 2  # three iterations, of which the first reads the prompt
    cosines = values(out / f"{start}--model.layers.1.mlp.down_proj.cos_sim.csv")
    assert len(cosines) == len(values(mlp))
    assert 0.999 < cosines.min() <= cosines.max() <= 1.0
    rotary = values(out / f"{start}--model.rotary_emb.cos_sim.csv")
    assert len(rotary) == 2 * len(cosines)  # cosines and sines of every token
    assert told["settings"]["mode"] == "generate"
    assert set(told["files"]) == set(found)
    assert "32 layers" in said.out
    assert "--layer_io" in said.out
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_the_table_beside_the_files_can_be_shown(layers: Command, driftline: Command) -> None:
    assert layers(mode="generate").code == 0
    said = driftline("show", f"out/{PREFIX.format(2, 1, 24)}.layers")
    assert said.code == 0
    assert "tensors compared" in said.out


def test_a_run_keeps_the_averages_that_were_made_of_it(layers: Command, driftline: Command) -> None:
    """A threshold is of all outputs and iterations of a layer, and so is what is held to it."""
    assert layers(mode="generate").code == 0
    made = driftline(
        *("thresholds", "--models", "tiny", "--metrics", "abs_diff", "cos_sim"),
        *("--file_base", "out", "--layer_io"),
    )
    assert made.code == 0, made.err
    table = f"out/{PREFIX.format(2, 1, 24)}.layers"
    said = driftline("check", table, "--thresholds", "out/tiny-thresholds.json")
    assert said.code == 0, said.out
    assert "(0 of " in said.out
    stricter = driftline(
        "check", table, "--thresholds", "out/tiny-thresholds.json", "--slack", "0.5"
    )
    assert stricter.code == 1
    assert "model.embed_tokens" in stricter.out


def test_the_environment_says_what_the_options_do_not(
    driftline: Command, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL_PATHS", "tiny")
    monkeypatch.setenv("BATCH_SIZES", "1,2")
    monkeypatch.setenv("SEQ_LENGTHS", "16, 24")
    monkeypatch.setenv("MAX_NEW_TOKENS", "2")
    monkeypatch.setenv("OUTPUT_PATH", "from-environment")
    monkeypatch.setenv("SHARE_GPT_DATASET_PATH", str(PROMPTS))
    assert driftline("layer-metrics", "--mode", "model-forward").code == 0
    shapes = [(batch, length) for batch in (1, 2) for length in (16, 24)]
    for batch, length in shapes:
        start = PREFIX.format(2, batch, length)
        rows = values(place / "from-environment" / f"{start}--lm_head.abs_diff.csv")
        assert batch * length // 2 <= len(rows) <= batch * length
    said = driftline(
        *("layer-metrics", "--mode", "model-forward", "--batch_sizes", "3", "--seq_lengths", "16"),
        *("--output_path", "by-option"),
    )
    assert said.code == 0
    assert list((place / "by-option").glob("*_batch-size-3_seq-length-16_*"))
    assert not list((place / "by-option").glob("*_batch-size-2_*"))


def test_elements_are_what_the_rows_are_means_of(layers: Command, place: Path) -> None:
    assert layers(out="rows").code == 0
    assert layers("--elements", out="elements").code == 0
    for layer, width in (("model.layers.0.mlp.up_proj", 128), ("lm_head", 384)):
        name = f"{PREFIX.format(2, 1, 24)}--{layer}.abs_diff.csv"
        rows, elements = values(place / "rows" / name), values(place / "elements" / name)
        np.testing.assert_allclose(elements.reshape(-1, width).mean(1), rows, rtol=1e-5)
        same = name.replace("abs_diff", "cos_sim")
        assert (place / "rows" / same).read_bytes() == (place / "elements" / same).read_bytes()


def test_what_is_done_is_not_done_again(layers: Command, place: Path) -> None:
    assert layers().code == 0
    before = {path.name: path.stat().st_mtime_ns for path in (place / "out").iterdir()}
    said = layers()
    assert said.code == 0
    assert "already been done" in said.out
    assert {path.name: path.stat().st_mtime_ns for path in (place / "out").iterdir()} == before
    said = layers("--force")
    assert said.code == 0
    assert "32 layers" in said.out


def test_a_lost_file_is_made_again(layers: Command, place: Path) -> None:
    assert layers().code == 0
    lost = place / "out" / f"{PREFIX.format(2, 1, 24)}--lm_head.cos_sim.csv"
    content = lost.read_bytes()
    lost.unlink()
    assert layers().code == 0
    assert lost.read_bytes() == content


def test_files_of_another_mode_are_not_taken_for_these(layers: Command) -> None:
    assert layers(mode="generate").code == 0
    said = layers(mode="model-forward")
    assert said.code == 2
    assert "mode was generate, is model-forward" in said.err
    assert "--force" in said.err
    assert layers("--force", mode="model-forward").code == 0


def test_files_that_somebody_else_made_are_not_overwritten(layers: Command, place: Path) -> None:
    (place / "out").mkdir()
    foreign = place / "out" / f"{PREFIX.format(2, 1, 24)}--lm_head.abs_diff.csv"
    foreign.write_text("abs_diff\n1.0\n")
    said = layers()
    assert said.code == 2
    assert "nothing says how it was made" in said.err
    assert foreign.read_text() == "abs_diff\n1.0\n"


def test_work_that_was_killed_while_files_were_named_is_done_again(
    layers: Command, place: Path
) -> None:
    from driftline.decoding.files.workdir import begin_renaming, work_folder_path

    start = PREFIX.format(2, 1, 24)
    (place / "out").mkdir()
    desk = work_folder_path(place / "out", "layers", start)
    desk.mkdir()
    begin_renaming(desk)
    half = place / "out" / f"{start}--lm_head.abs_diff.csv"
    half.write_text("abs_diff\n0.")
    assert layers().code == 0
    assert len(values(half)) > 10
    assert not desk.exists()


def test_shapes_that_were_finished_stay_when_a_later_one_fails(
    layers: Command, place: Path
) -> None:
    said = layers("--batch_sizes", "1,5000")
    assert said.code == 2
    assert "5000 are needed" in said.err
    assert len(list((place / "out").glob("*_batch-size-1_*.csv"))) == 64
    assert not list((place / "out").glob(".driftline*"))


def test_a_full_disk_is_said_with_the_folder_and_leaves_nothing_half(
    place: Path, warm_llama: str
) -> None:
    # In a process of its own: the limit would also cut short what torch writes when imported.
    program = (
        "import resource, sys\n"
        "from driftline.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    words = ["layer-metrics", "--mode", "model-forward", "--model_paths", "tiny"]
    words += ["--sharegpt_path", str(PROMPTS), "--max_new_tokens", "2", "--output_path", "out"]
    words += ["--seq_lengths", "24", "--batch_sizes", "6"]
    said = subprocess.run(
        [warm_llama, "-c", program, *words], cwd=place, capture_output=True, text=True
    )
    assert said.returncode == 2
    assert "the results cannot be written to out: File too large" in said.stderr
    assert not list((place / "out").iterdir())


def test_a_number_that_overflows_on_the_device_is_said_and_not_hidden(
    layers: Command, place: Path
) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(place / "tiny" / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][0, 0] = 1e30  # no number of fp16
    save_file(weights, place / "tiny" / "model.safetensors", metadata={"format": "pt"})
    said = layers()
    assert said.code == 1
    assert "NaN or infinite on one side" in said.out
    assert "first model.layers.1.mlp.down_proj" in said.out
    start = PREFIX.format(2, 1, 24)
    rows = values(place / "out" / f"{start}--model.layers.1.mlp.down_proj.abs_diff.csv")
    assert np.isnan(rows).any()
    clean = values(place / "out" / f"{start}--model.layers.1.mlp.up_proj.abs_diff.csv")
    assert not np.isnan(clean).any()


def test_a_nan_on_both_sides_fails_and_is_said(layers: Command, place: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(place / "tiny" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 0] = float("nan")
    save_file(weights, place / "tiny" / "model.safetensors", metadata={"format": "pt"})
    said = layers()
    assert said.code == 1, "both sides are as bad as each other, and that is not good"
    assert "NaN on both sides: " in said.out
    assert "first model.layers.1.mlp.up_proj" in said.out
    told = json.loads((place / "out" / f"{PREFIX.format(2, 1, 24)}.layers.json").read_text())
    layer = told["layers"]["model.layers.1.mlp.up_proj"]
    assert layer["nan_on_both_sides"] == layer["rows"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "needs --mode"),
        (("--mode", "sometimes"), "generate or model-forward, not 'sometimes'"),
        (("--mode", "generate", "-o", "out"), "no model is named"),
        (("--mode", "generate", "--model_paths", "tiny"), "needs --output_path"),
        (("--mode", "generate", "--model_paths", "./gone", "-o", "out"), "no model folder ./gone"),
        (
            ("--mode", "generate", "--model_paths", "tiny", "-o", "out", "--sharegpt_path", "gone"),
            "no prompt file gone",
        ),
        (
            ("--mode", "generate", "--model_paths", "tiny", "-o", "out", "--batch_sizes", "many"),
            "--batch_sizes takes whole numbers, not 'many'",
        ),
        (
            ("--mode", "generate", "--model_paths", "tiny", "-o", "out", "--seq_lengths", "0"),
            "--seq_lengths must be at least 1",
        ),
        (
            ("--mode", "generate", "--model_paths", "tiny", "-o", "tiny/config.json"),
            "cannot be written",
        ),
        (
            ("--mode", "generate", "--model_paths", "tiny", "-o", "out", "--default_dtype", "fp7"),
            "'fp7' is no number format",
        ),
        (
            ("--mode", "generate", "--model_paths", "tiny,x", "-o", "out", "--variant", "a/b"),
            "--variant names one model",
        ),
        (
            ("--mode", "generate", "--model_paths", "tiny", "-o", "out", "--variant", "v" * 240),
            "255 is the most",
        ),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    driftline: Command, place: Path, words: tuple[str, ...], message: str
) -> None:
    if "--sharegpt_path" not in words:
        words = (*words, "--sharegpt_path", str(PROMPTS))
    said = driftline("layer-metrics", *words)
    assert said.code == 2
    assert message in said.err
    assert not said.out
    assert not list(place.glob("out/.driftline*"))


def test_a_layer_whose_file_name_would_be_too_long_is_told_before_it_is_computed(
    layers: Command, place: Path
) -> None:
    said = layers("--variant", "v" * 150)
    assert said.code == 2
    assert "255 is the most" in said.err
    assert not list((place / "out").iterdir())


def test_a_device_that_is_not_there_is_named(layers: Command) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    said = layers("--candidate", "device=cuda,dtype=fp16")
    assert said.code == 2
    assert "device=cuda was asked for" in said.err
    said = layers("--candidate", "device=aiu,dtype=fp16")
    assert said.code == 2
    assert "torch_sendnn" in said.err


def test_a_compiled_candidate_says_what_cannot_be_seen(layers: Command, place: Path) -> None:
    said = layers("--candidate", "device=cpu,dtype=fp16,compile=aot_eager")
    assert said.code == 0
    assert "the candidate is compiled block by block" in said.out
    assert "24 layers only in the reference" in said.out
    start = PREFIX.format(2, 1, 24)
    assert (place / "out" / f"{start}--model.layers.1.abs_diff.csv").exists()
    assert not (place / "out" / f"{start}--model.layers.1.mlp.abs_diff.csv").exists()


def test_fms_models_have_the_documented_layer_names(layers: Command, place: Path) -> None:
    pytest.importorskip("fms", reason="ibm-fms is not installed")
    said = layers("--library", "fms", mode="generate")
    assert said.code == 0, said.err
    start = PREFIX.format(2, 1, 24)
    for layer in (
        *("model", "model.head", "model.base_model.layers1.ln", "model.base_model.layers1.attn"),
        *("model.base_model.layers1.attn.in_proj.query", "model.base_model.layers0.attn.dense"),
    ):
        for metric in ("abs_diff", "cos_sim"):
            assert (place / "out" / f"{start}--{layer}.{metric}.csv").exists()


def test_a_model_of_nan_fails_everywhere(layers: Command, driftline: Command, place: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(place / "tiny" / "model.safetensors")
    save_file(
        {name: torch.full_like(value, torch.nan) for name, value in weights.items()},
        place / "tiny" / "model.safetensors",
        metadata={"format": "pt"},
    )
    said = layers()
    assert said.code == 1
    assert "FAIL: 31 layers of 32 without a single row of numbers" in said.out
    assert "on one side" not in said.out
    table = f"out/{PREFIX.format(2, 1, 24)}.layers"
    for words in (("check", table, "--max", "relative_l2=10"), ("check", table), ("show", table)):
        shown = driftline(*words)
        assert shown.out.startswith("FAIL: the drift starts at 'model.embed_tokens'"), words
        assert shown.code == (words[0] == "check")
    made = driftline(
        *("thresholds", "--models", "tiny", "--metrics", "abs_diff", "--file_base", "out"),
        "--layer_io",
    )
    assert made.code == 2
    assert "31 thresholds are no number" in made.err
    for judged in ("out", table):
        checked = driftline("check", judged, "--thresholds", "out/tiny-thresholds.json")
        assert checked.code == 1, "a threshold that is no number lets nothing pass"
    refused = driftline("check", "out")
    assert refused.code == 2
    assert f"driftline check {table}" in refused.err, "the files have a table with limits"


def test_check_of_sound_layers_says_what_layer_metrics_said(
    layers: Command, driftline: Command
) -> None:
    said = layers()
    checked = driftline("check", f"out/{PREFIX.format(2, 1, 24)}.layers")
    assert (said.code, checked.code) == (0, 0)
    assert checked.out.startswith("PASS: 37 tensors compared")
    assert "37 tensors compared, none outside its limit" in said.out
