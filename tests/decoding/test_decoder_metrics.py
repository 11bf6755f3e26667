"""`driftline metrics` on the tiny decoders: figures, files, going on, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tiny_decoders import DATA, GOLDEN, LLAMA, PREFIX, PROMPTS, golden_metric

from driftline.cli.main import main
from driftline.decoding.files import outputs
from driftline.decoding.metrics import run_metrics
from driftline.decoding.options import MetricsOptions
from driftline.errors import AlreadyThere, BadFile, BadInput, DriftlineError

METRICS = ("ce", "diff_mean", "prob_mean", "prob_std")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with the models under the names that the golden files carry."""
    (tmp_path / "models").symlink_to(DATA / "fixtures")
    monkeypatch.chdir(tmp_path)
    for name in ("MODEL_PATH", "MAX_NEW_TOKENS", "BATCH_SIZES", "SEQ_LENS", "DEFAULT_TYPES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("DS_PATH", raising=False)
    return tmp_path


def asked(**words: Any) -> MetricsOptions:
    usual = {
        "model_path": "models/tiny-llama",
        "tokenizer": "models/tiny-llama",
        "prompts": PROMPTS,
        "output_dir": Path("out"),
        "length": 16,
        "new_tokens": 8,
    }
    return MetricsOptions(**(usual | words))


def run(**words: Any) -> tuple[Any, list[str]]:
    lines: list[str] = []
    return run_metrics(asked(**words), report=lines.append), lines


def column(folder: Path, start: str, metric: str) -> list[float]:
    lines = (folder / f"{start}.{metric}.csv").read_text().splitlines()
    assert lines[0] == metric
    return [float(line) for line in lines[1:]]


def visible(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


class TestFigures:
    def test_the_documented_command_gives_the_original_files_and_figures_but_for_fp16_rounding(
        self, desk: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code = main(
            [
                *("metrics", "--architecture=hf_pretrained", "--model_path=models/tiny-llama"),
                *("--tokenizer=models/tiny-llama", "--unfuse_weights", "--output_dir=out/"),
                *("--compile_dynamic", "--max_new_tokens=8", "--min_pad_length=16,32"),
                *("--batch_size=1", "--default_dtype=fp16", f"--sharegpt_path={PROMPTS}"),
                *("--num_test_tokens_per_sequence=16", "--candidate=device=cpu"),
            ]
        )
        said = capsys.readouterr()
        assert code == 0, said.err
        for length, near in ((16, 5e-4), (32, 4e-3)):
            start = PREFIX.format(length)
            for metric in METRICS:
                ours, theirs = column(desk / "out", start, metric), golden_metric(metric, length)
                assert len(ours) == len(theirs) == 16
            ce = np.subtract(column(desk / "out", start, "ce"), golden_metric("ce", length))
            assert np.abs(ce).max() < near
            ours, theirs = (
                np.mean(column(desk / "out", start, "diff_mean")),
                np.mean(golden_metric("diff_mean", length)),
            )
            assert 0.8 < ours / theirs < 1.25
            wanted = {f"{start}.{metric}.csv" for metric in METRICS}
            wanted |= {f"{start}.{name}" for name in ("tokens.parquet", "provenance.json")}
            wanted |= {
                f"{start}.{side}_validation_info.{seed}.out"
                for side in ("cpu", "cuda")
                for seed in (0, 1)
            }
            assert wanted <= visible(desk / "out")
        assert len(visible(desk / "out")) == 2 * 10, "nothing else is left"
        assert "16 tokens of 2 rounds" in said.out
        assert "driftline thresholds --models models/tiny-llama" in said.out

    def test_saved_logits_of_the_original_are_scored_to_its_own_figures(self, desk: Path) -> None:
        (desk / "out").mkdir()
        for folder in GOLDEN.glob("*.out"):
            shutil.copytree(folder, desk / "out" / folder.name)
        outcome, _ = run(tokens_per_sequence=16, prompts=None, skip_computation=True)
        assert outcome.tokens == 16
        for metric in METRICS:
            ours = column(desk / "out", PREFIX.format(16), metric)
            np.testing.assert_allclose(ours, golden_metric(metric, 16), rtol=0, atol=2e-6)

    def test_the_original_logits_are_used_again_for_the_same_prompts(self, desk: Path) -> None:
        (desk / "out").mkdir()
        for folder in GOLDEN.glob("*.out"):
            shutil.copytree(folder, desk / "out" / folder.name)
        _, lines = run(tokens_per_sequence=16)
        assert sum("reusing" in line for line in lines) == 4
        np.testing.assert_allclose(
            column(desk / "out", PREFIX.format(16), "ce"), golden_metric("ce", 16), atol=2e-6
        )

    def test_the_table_knows_seed_prompt_and_position_of_every_csv_line(self, desk: Path) -> None:
        run(batch_size=3, length=32, tokens_per_sequence=16)
        start = asked(batch_size=3, length=32).prefix
        table = pq.read_table(desk / "out" / f"{start}.tokens.parquet")
        assert table["ce"].to_pylist() == column(desk / "out", start, "ce")
        assert table["seed"].to_pylist() == [0] * 24 + [1] * 24
        assert table["prompt"].to_pylist() == sorted([0, 1, 2] * 8) * 2
        assert table["position"].to_pylist() == [*range(8)] * 6
        assert table["prompt_name"].to_pylist()[::8] == ["c34", "c59", "c24", "c10", "c116", "c57"]
        saved = outputs.read_out(asked(batch_size=3, length=32).out("cpu", 1))
        assert table["token"].to_pylist()[24:32] == saved.tokens[0][-8:].tolist()
        assert set(table["top1_agree"].to_pylist()) <= {True, False}
        agree = np.array(table["top1_agree"].to_pylist())
        assert (np.array(table["rank_of_reference"].to_pylist())[agree] == 1).all()
        assert max(table["total_variation"].to_pylist()) < 0.01

    def test_tokens_after_any_of_several_ends_do_not_count(self, desk: Path) -> None:
        model = shutil.copytree(LLAMA, desk / "several")
        run()
        saved = outputs.read_out(asked().out("cpu", 0)).tokens[0][-8:].tolist()
        config = json.loads((model / "generation_config.json").read_text())
        config["eos_token_id"] = [377, saved[3], saved[7]]
        (model / "generation_config.json").write_text(json.dumps(config))
        outcome, _ = run(model_path="several")
        assert outcome.tokens == 3
        assert outputs.read_out(asked(model_path="several").out("cpu", 0)).logits[0].shape[0] == 8

    @pytest.mark.slow
    def test_a_compiled_candidate_is_scored(self, desk: Path) -> None:
        from driftline.decoding.models.targets import Target

        outcome, _ = run(candidate=Target("cpu", "fp16", "inductor", True), new_tokens=2)
        assert outcome.tokens == 2
        assert np.abs(outcome.columns["diff_mean"]).max() < 1e-3
        torch._dynamo.reset()

    def test_the_aiu_is_a_candidate_wherever_its_backend_is_registered(
        self, desk: Path, stand_in: list[Any]
    ) -> None:
        from driftline.decoding.models.targets import parse_target

        outcome, _ = run(candidate=parse_target("device=aiu,dtype=fp16"), new_tokens=2)
        assert stand_in, "the backend was given no graph"
        assert outcome.tokens == 2
        assert "cuda_validation_info" in "".join(visible(desk / "out")), "the documented label"


class TestFiles:
    def test_provenance_is_in_every_output(self, desk: Path) -> None:
        run()
        beside = json.loads((desk / "out" / f"{PREFIX.format(16)}.provenance.json").read_text())
        table = pq.read_schema(desk / "out" / f"{PREFIX.format(16)}.tokens.parquet").metadata
        inside = json.loads(table[b"driftline"])
        folder = desk / "out" / f"{PREFIX.format(16)}.cuda_validation_info.0.out"
        out = json.loads((folder / "provenance.json").read_text())
        for told in (beside, inside, out):
            assert told["versions"]["torch"] == torch.__version__
            assert told["settings"]["model"] == "models/tiny-llama"
            assert told["driftline"]
        assert out["settings"]["target"] == "device=cpu,dtype=fp16"
        assert out["settings"]["seed"] == 0
        assert beside["eos_ids"] == [2]
        assert all((desk / "out" / name).exists() for name in beside["files"])

    def test_a_prompts_file_is_what_the_original_reads(self, desk: Path) -> None:
        run(batch_size=2, length=32)
        folder = asked(batch_size=2, length=32).out("cuda", 0)
        assert {name for name in visible(folder) if name.endswith(".pt")} == {"0.pt", "1.pt"}
        kept = torch.load(folder / "1.pt", map_location="cpu", weights_only=True)
        assert list(kept) == ["tokens", "logits"]
        assert kept["tokens"].dtype == torch.int64
        assert kept["tokens"].shape == (40,)
        assert kept["logits"].dtype == torch.float16
        assert kept["logits"].shape == (8, 384)
        assert (folder / "1.pt").stat().st_size < 12_000, "one prompt's logits, not the batch's"

    def test_the_largest_logits_are_enough_for_the_four_metrics(self, desk: Path) -> None:
        full, _ = run()
        short, _ = run(keep="topk", output_dir=Path("short"))
        for metric in METRICS:
            assert np.array_equal(full.columns[metric], short.columns[metric])
        assert short.companions
        kept = torch.load(asked(output_dir=Path("short")).out("cuda", 0) / "0.pt")
        assert "logits" not in kept
        assert kept["topk_logits"].shape == kept["reference_logits"].shape == (8, 20)
        whole = torch.load(asked().out("cuda", 0) / "0.pt")["logits"]
        torch.testing.assert_close(kept["logsumexp"], whole.float().logsumexp(-1))
        again, _ = run(output_dir=Path("short"), skip_computation=True, force=True)
        assert not again.companions
        for metric in METRICS:
            np.testing.assert_allclose(again.columns[metric], full.columns[metric], atol=1e-7)
        with pytest.raises(BadInput, match=r"20 logits per token are saved, 30 are asked for"):
            run(output_dir=Path("short"), skip_computation=True, force=True, topk=30)

    def test_the_variables_of_the_document_stand_for_options(
        self, desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name, value in {
            "MODEL_PATH": "models/tiny-llama/",
            "MAX_NEW_TOKENS": "2",
            "BATCH_SIZES": "1,2",
            "SEQ_LENS": "16",
            "DEFAULT_TYPES": "fp16,bf16",
            "DS_PATH": str(PROMPTS),
        }.items():
            monkeypatch.setenv(name, value)
        assert main(["metrics", "-o", "out", "--candidate", "device=cpu"]) == 0
        done = {name for name in visible(desk / "out") if name.endswith(".ce.csv")}
        start = "models--tiny-llama_max-new-tokens-2_batch-size-{}_seq-length-16_dtype-{}.ce.csv"
        assert done == {start.format(batch, kind) for batch in (1, 2) for kind in ("fp16", "bf16")}
        monkeypatch.setenv("BATCH_SIZES", "one")
        capsys.readouterr()
        assert main(["metrics", "-o", "out"]) == 2
        assert "BATCH_SIZES takes whole numbers, not 'one'" in capsys.readouterr().err


class TestGoingOn:
    def test_what_is_done_is_not_done_again(self, desk: Path) -> None:
        run()
        before = {name: (desk / "out" / name).stat().st_mtime_ns for name in visible(desk / "out")}
        outcome, lines = run()
        assert outcome.skipped
        assert lines[0].startswith("skipping metric generation as it has already been done")
        after = {name: (desk / "out" / name).stat().st_mtime_ns for name in visible(desk / "out")}
        assert before == after

    def test_more_rounds_use_those_that_are_there(self, desk: Path) -> None:
        run()
        outcome, lines = run(tokens_per_sequence=24)
        assert outcome.rounds == 3
        assert sum("reusing" in line for line in lines) == 2
        assert len(column(desk / "out", PREFIX.format(16), "ce")) == 24

    def test_a_killed_run_goes_on_and_gives_the_same_files(
        self, desk: Path, warm_llama: str
    ) -> None:
        words = [
            *("metrics", "--model_path=models/tiny-llama", "--sharegpt_path", str(PROMPTS)),
            *("--batch_size=2", "--min_pad_length=32", "--max_new_tokens=20"),
            *("--num_test_tokens_per_sequence=160", "--candidate=device=cpu", "-o"),
        ]
        command = [sys.executable, "-m", "driftline", *words, "cut"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        for _ in range(5):
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("round 2: candidate"):
                    time.sleep(0.01)
                    process.send_signal(signal.SIGKILL)
                    break
            process.communicate()
            if process.returncode == -signal.SIGKILL:
                break
            # This process had no turn until the command had ended.
            shutil.rmtree(desk / "cut")
        assert process.returncode == -signal.SIGKILL
        assert not any(name.endswith(".csv") for name in visible(desk / "cut"))
        for place in (desk / "cut").glob("*.out"):
            assert len(outputs.read_out(place).logits) == 2, "a folder that is there is whole"
        again = [warm_llama, *command[1:]]
        done = subprocess.run(again, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "round 0: scored before" in done.stderr
        assert not any(name.startswith(".") for name in visible(desk / "cut"))
        assert main([*words, "whole"]) == 0
        for metric in METRICS:
            (left,), (right,) = (
                list((desk / folder).glob(f"*.{metric}.csv")) for folder in ("cut", "whole")
            )
            assert left.read_bytes() == right.read_bytes()

    def test_a_half_written_result_is_not_taken_for_a_whole_one(self, desk: Path) -> None:
        run()
        (desk / "out" / f"{PREFIX.format(16)}.prob_mean.csv").unlink()
        (desk / "out" / f"{PREFIX.format(16)}.ce.csv").write_text("ce\n")
        outcome, lines = run()
        assert not outcome.skipped
        assert sum("reusing" in line for line in lines) == 2
        assert len(column(desk / "out", PREFIX.format(16), "ce")) == 8

    def test_only_one_process_at_a_time_works_on_a_result(self, desk: Path) -> None:
        from driftline.decoding.files.workdir import resumable_work_folder

        (desk / "out").mkdir()
        with (
            resumable_work_folder(Path("out"), "metrics", asked().prefix, "--output_dir"),
            pytest.raises(AlreadyThere, match="another driftline is at work"),
        ):
            run()

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"topk": 5}, "topk was 20, is 5"),
            ({"order": "doc"}, "order was 'head', is 'doc'"),
            ({"tokenizer": "models/tiny-granite", "architecture": "llama"}, "architecture was"),
        ],
    )
    def test_a_result_of_other_settings_is_not_taken_for_this_one(
        self, desk: Path, change: dict[str, Any], said: str
    ) -> None:
        run()
        with pytest.raises(AlreadyThere, match=said):
            run(**change)

    def test_logits_of_other_prompts_or_weights_are_not_used_again(self, desk: Path) -> None:
        shutil.copytree(LLAMA, desk / "mine")
        run(model_path="mine")
        done = asked(model_path="mine").csv("prob_mean")
        done.unlink()
        lines = desk / "lines.txt"
        lines.write_text("alpha beta gamma delta river stone\n" * 9)
        with pytest.raises(AlreadyThere, match="its prompts are others"):
            run(model_path="mine", prompts=lines)
        config = desk / "mine" / "config.json"
        said = config.read_text()
        config.write_text(said.replace('"silu"', '"relu"'))
        with pytest.raises(AlreadyThere, match="weights was"):
            run(model_path="mine")
        config.write_text(said)
        weights = desk / "mine" / "model.safetensors"
        good = weights.read_bytes()
        for place in (len(good) // 10, len(good) // 2, len(good) - 2):
            content = bytearray(good)
            content[place] ^= 1
            weights.write_bytes(content)
            with pytest.raises(AlreadyThere, match="weights was"):
                run(model_path="mine")
        outcome, _ = run(model_path="mine", force=True)
        assert outcome.tokens == 8


Spoil = Callable[[dict[str, Any]], Any]


def spoilt(path: Path, change: Spoil) -> None:
    kept = torch.load(path, weights_only=True)
    torch.save(change(kept) or kept, path)


class TestRefusals:
    def test_a_full_disk_is_a_sentence_and_leaves_nothing_half_written(
        self, desk: Path, warm_llama: str
    ) -> None:
        code = (
            "import resource, signal, sys\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))\n"
            "from driftline.cli.main import main\n"
            "sys.exit(main(sys.argv[1:]))\n"
        )
        words = [
            *("metrics", "--model_path=models/tiny-llama", f"--sharegpt_path={PROMPTS}"),
            *("--min_pad_length=16", "--max_new_tokens=8", "-o", "out", "--candidate=device=cpu"),
        ]
        done = subprocess.run([warm_llama, "-c", code, *words], capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        assert "File too large" in done.stderr
        assert "bug in driftline" not in done.stderr
        for place in (desk / "out").glob("*.out"):
            outputs.read_out(place)
        assert run()[0].tokens == 8

    def test_no_logit_that_is_not_a_number_is_hidden(self, desk: Path) -> None:
        run()
        asked().csv("prob_mean").unlink()
        smallest = torch.load(asked().out("cuda", 0) / "0.pt")["logits"][5].argmin()

        def plant(kept: dict[str, Any]) -> None:
            kept["logits"][5, smallest] = float("nan")

        spoilt(asked().out("cuda", 0) / "0.pt", plant)
        said = "round 0, prompt 0: 1 logit of the candidate is NaN or infinite, at token 5"
        for _ in range(2):  # the second time the round is already scored
            with pytest.raises(DriftlineError, match=said):
                run()
        assert not asked().csv("prob_mean").exists()
        assert asked().out("cpu", 0).is_dir(), "what was finished is kept"

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda kept: {"tokens": kept["tokens"]}, "holds tokens only|tokens only"),
            (lambda kept: {"logits": kept["logits"]}, "holds no tokens of a prompt"),
            (lambda kept: [1, 2], "holds no tokens"),
            (lambda kept: kept | {"logits": kept["logits"][:, :300]}, "vocabulary has 384"),
            (lambda kept: kept | {"logits": kept["logits"][:5]}, "rows of logits for 8 tokens"),
            (lambda kept: kept | {"logits": kept["logits"][0]}, "a row per generated token"),
            (
                lambda kept: kept | {"tokens": kept["tokens"].roll(-1)},
                "its prompts are others|was not forced",
            ),
        ],
    )
    def test_a_saved_side_that_does_not_fit_is_refused(
        self, desk: Path, change: Spoil, said: str
    ) -> None:
        run()
        asked().csv("prob_mean").unlink()
        spoilt(asked().out("cuda", 0) / "0.pt", change)
        with pytest.raises(DriftlineError, match=said):
            run(skip_computation=True)
        with pytest.raises(DriftlineError, match=said):
            run()

    def test_a_corrupt_out_is_named_and_can_be_made_again(self, desk: Path) -> None:
        run()
        asked().csv("prob_mean").unlink()
        file = asked().out("cpu", 0) / "0.pt"
        file.write_bytes(file.read_bytes()[:500])
        with pytest.raises(BadFile, match=r"0\.pt cannot be loaded") as found:
            run()
        assert "delete the folder" in found.value.hint
        shutil.rmtree(file.parent)
        assert run()[0].tokens == 8

    def test_a_pickle_that_would_run_code_is_not_loaded(self, desk: Path) -> None:
        run()
        asked().csv("prob_mean").unlink()
        torch.save({"tokens": Path("x")}, asked().out("cpu", 0) / "0.pt")
        with pytest.raises(BadFile, match="cannot be loaded"):
            run()

    def test_texts_that_end_at_once_leave_nothing_to_score(self, desk: Path) -> None:
        run()
        first = outputs.read_out(asked().out("cpu", 0)).tokens[0][-8].item()
        model = shutil.copytree(LLAMA, desk / "mute")
        config = json.loads((model / "generation_config.json").read_text())
        (model / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": first}))
        with pytest.raises(BadInput, match=f"no token was kept: .*ids 2, {first}"):
            run(model_path="mute")
        assert not asked(model_path="mute").csv("ce").exists()

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            (["--model_path=models/none/at/all"], "there is no model folder models/none/at/all"),
            (["--tokenizer=./none"], "there is no tokenizer folder ./none"),
            (["--sharegpt_path=none.json"], "there is no prompt file none.json"),
            (["--default_dtype=fp8"], "'fp8' is no number format"),
            (["--candidate=device=aiu"], "device=aiu needs the package torch_sendnn"),
            (["--candidate=device=npu"], "device=npu needs the package torch_npu"),
            (["--batch_size=50"], "prompts in"),
            (["--max_new_tokens=0"], "--max_new_tokens must be at least 1"),
            (["--num_test_tokens_per_sequence=3"], "is less than one round"),
            (["--skip_computation"], "there is nothing to score"),
            (["--variant=" + "x" * 200], "bytes; 255 is the most"),
            (["--extra_get_model_kwargs", "=3"], "takes name=value"),
            (["--output_dir=models/share_gpt_tiny.json"], "cannot be written"),
            (["--output_dir=/proc/none"], "cannot be written"),
        ],
    )
    def test_bad_input_is_a_sentence_and_exit_code_2(
        self, desk: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
    ) -> None:
        usual = {
            "--model_path": "models/tiny-llama",
            "--sharegpt_path": str(PROMPTS),
            "--min_pad_length": "16",
            "--max_new_tokens": "8",
            "--output_dir": "out",
        }
        given = {word.partition("=")[0] for word in words}
        left = [f"{name}={value}" for name, value in usual.items() if name not in given]
        assert main(["metrics", *left, *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("driftline: ")
        assert said in error
        assert "Traceback" not in error

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_a_read_only_output_folder_is_told_before_anything_is_loaded(self, desk: Path) -> None:
        (desk / "out").mkdir(mode=0o500)
        with pytest.raises(BadInput, match="the output folder out cannot be written"):
            run()


def test_a_job_of_two_splits_the_candidate_and_only_the_first_writes(
    desk: Path, warm_llama: str
) -> None:
    pytest.importorskip("accelerate")
    words = [
        *("metrics", "--model_path=models/tiny-llama", "--sharegpt_path", str(PROMPTS)),
        *("--batch_size=2", "--min_pad_length=32", "--max_new_tokens=4", "-o", "out"),
        "--candidate=device=cpu,dtype=fp32",
    ]
    torchrun = [warm_llama, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    torchrun += ["--no-python", warm_llama, "-m"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "driftline", *words, "--distributed"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("8 tokens of 1 round") == 1, "one rank speaks"
    (out,) = (desk / "out").glob("*.cuda_validation_info.0.out")
    assert json.loads((out / "provenance.json").read_text())["settings"]["ranks"] == 2
    split = outputs.read_out(out).logits[0]
    (whole,) = (desk / "out").glob("*.cpu_validation_info.0.out")
    alone = outputs.read_out(whole).logits[0]
    assert not torch.equal(split, alone), "sums in another order: it was really split"
    torch.testing.assert_close(split, alone, rtol=0, atol=5e-5)
    refused = subprocess.run(
        [*torchrun, "driftline", *words], capture_output=True, text=True, env=environment
    )
    assert refused.returncode != 0
    assert "all would write the same files" in refused.stderr
