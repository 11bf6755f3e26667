"""Validation by two processes that torchrun started: one voice, one verdict."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
from tiny_decoders import LLAMA, PROMPTS

from driftline.decoding.torchrun import choose_backend
from driftline.errors import BadInput
from driftline.settings import JobPlace

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python")
Job = Callable[..., subprocess.CompletedProcess[str]]
WORDS = (
    *("-m", "driftline", "validate", f"--model_paths={LLAMA}", f"--sharegpt_path={PROMPTS}"),
    *("--batch_sizes=2", "--seq_lengths=32", "--max_new_tokens=4", "--candidate=dtype=fp16"),
    *("--cumulative_test_tokens_per_sequence=8", "--force_validation_level_1"),
)


@pytest.fixture
def job(warm_llama: str) -> Job:
    """Two processes do what one is told; torch and transformers are there before they begin."""

    def job(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [warm_llama, *TORCHRUN, warm_llama, *words],
            capture_output=True,
            text=True,
            # On the CPU everywhere: a machine may have fewer GPUs than the job has processes.
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **more},
            timeout=500,
        )

    return job


class Cuda:
    """What torch says of a machine with some GPUs."""

    def __init__(self, gpus: int) -> None:
        self.is_available = lambda: gpus > 0
        self.device_count = lambda: gpus


@pytest.mark.parametrize(
    ("gpus", "rank", "processes", "chosen"),
    [(0, 1, 2, ("gloo", None)), (8, 5, 6, ("cpu:gloo,cuda:nccl", 5))],
)
def test_each_process_takes_a_gpu_of_its_own_where_there_are_any(gpus, rank, processes, chosen):
    assert choose_backend(JobPlace(rank, processes), Cuda(gpus)) == chosen


def test_fewer_gpus_than_processes_are_refused_with_the_way_to_the_cpu():
    with pytest.raises(BadInput, match="2 processes share this machine, which has 1 GPU") as said:
        choose_backend(JobPlace(1, 2), Cuda(1))
    assert "CUDA_VISIBLE_DEVICES=" in said.value.hint


@pytest.fixture(autouse=True)
def needs_accelerate() -> None:
    pytest.importorskip("accelerate")


def test_a_job_that_passes_says_so_once_and_saves_once(tmp_path, job):
    done = job(
        *(*WORDS, "--distributed", "--metrics_threshold=4.0,0.01"),
        *("--validation_info_dir", str(tmp_path), "--save_validation_info_outputs"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PASSED ") == 1
    assert done.stdout.count("[ 0/ 2]: passed validation level 1") == 1
    assert "[ 1/ 2]" not in done.stdout
    assert sorted(path.name.split(".", 1)[1] for path in tmp_path.iterdir()) == [
        *("aiu_validation_info.0.out", "aiu_validation_info.1.out"),
        *("cpu_validation_info.0.out", "cpu_validation_info.1.out"),
    ]


def test_a_job_that_fails_is_told_whole_before_it_ends(job):
    """Of ibm-fms, with keys and values in fp8 and in blocks: each rank has some of the heads."""
    pytest.importorskip("fms")
    words = ("--explain", "--metrics_threshold=4.0,1e-9", "--attn_type=paged_fp8")
    done = job(*WORDS, "--distributed", *words)
    assert done.returncode == 1, done.stderr
    assert "attention: paged_fp8, of the reference: paged_fp8" in done.stdout
    assert done.stdout.count("FAILED ") == 1
    assert "layers of a candidate that is split over ranks are not compared" in done.stdout


@pytest.mark.slow
def test_a_job_uses_what_was_saved(tmp_path, job):
    words = (*WORDS, "--distributed", "--metrics_threshold=4.0,0.01")
    place = ("--validation_info_dir", str(tmp_path))
    assert job(*words, *place, "--save_validation_info_outputs").returncode == 0
    again = job(*words, *place)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("cpu validation info found for seed=0 -- loading it") == 1


@pytest.mark.slow
def test_drawn_weights_are_not_split_and_that_is_said(job):
    done = job(*WORDS, "--distributed", "--micro_layers=1", "--metrics_threshold=4.0,0.01")
    assert done.returncode == 0, done.stderr
    assert "drawn weights are not split: every rank runs the whole candidate" in done.stdout


@pytest.mark.slow
def test_the_suite_runs_in_a_job_too(tmp_path, job):
    said = {
        "COMMON_MODEL_PATHS": str(LLAMA),
        "COMMON_BATCH_SIZES": "2",
        "COMMON_SEQ_LENGTHS": "32",
        "COMMON_MAX_NEW_TOKENS": "4",
        "USE_MICRO_MODELS": "0",
        "DISTRIBUTED": "1",
        "CANDIDATE": "dtype=fp16",
        "FORCE_VALIDATION_LEVEL_1": "1",
        "CUMULATIVE_TEST_TOKENS_PER_SEQUENCE": "8",
        "METRICS_THRESHOLD": "4.0,1e-9",
    }
    done = job(
        *("-m", "pytest", "--pyargs", "driftline.suites.test_decoders", "-vv", "-p"),
        *("no:cacheprovider", "--rootdir", str(tmp_path)),
        SHARE_GPT_DATASET_PATH=str(PROMPTS),
        **{f"FMS_TEST_SHAPES_{name}": value for name, value in said.items()},
    )
    assert done.returncode == 1
    assert "failure rate for mean diff was too high: 1.0" in done.stdout
