"""Memory: a comparison holds little beside the files it maps, however large the tensors are."""

import os
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest

from driftline.runs.records import Record, TensorKey
from driftline.runs.writer import RunWriter

WATCHED = textwrap.dedent(
    """
    import sys, threading
    from pathlib import Path

    def beside_files():
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(dict(line.split(":", 1) for line in lines)["RssAnon"].split()[0]) // 1024

    import driftline
    peak, done = 0, threading.Event()

    def watch():
        global peak
        while not done.wait(0.002):
            peak = max(peak, beside_files())

    watcher = threading.Thread(target=watch)
    watcher.start()
    table = driftline.compare(sys.argv[1], sys.argv[2])
    done.set()
    watcher.join()
    print(table.verdict, peak)
    """
)


def write(path, values):
    writer = RunWriter(path, seal_at_exit=False)
    record = Record(TensorKey.of("large", "output"), 0, values.dtype.name, values.shape)
    writer.put(record, values.view(np.uint8))
    writer.close()


def peak_megabytes(tmp_path, elements, **environment):
    block = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    values = np.tile(block, elements >> 20)
    write(tmp_path / "ref", values)
    write(tmp_path / "cand", values.astype(ml_dtypes.bfloat16))
    del values
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, str(tmp_path / "ref"), str(tmp_path / "cand")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    verdict, peak = done.stdout.split()
    assert verdict == "pass"
    return int(peak)


def test_tensors_of_256_megabytes_take_less_than_100_beside_their_files(tmp_path):
    assert peak_megabytes(tmp_path, 64 << 20) < 100


def test_without_the_c_kernel_memory_is_bounded_too(tmp_path):
    assert peak_megabytes(tmp_path, 4 << 20, DRIFTLINE_KERNEL="numpy") < 300


@pytest.mark.slow
def test_tensors_of_a_gibibyte_take_less_than_300_megabytes_beside_their_files(tmp_path):
    assert peak_megabytes(tmp_path, 256 << 20) < 300


def test_large_recipes_are_carried_out_one_at_a_time(tmp_path):
    """Six transposed weights of 64 megabytes, on four threads: one copy at a time."""
    weight = np.random.default_rng(0).standard_normal((2048, 8192), dtype=np.float32)
    for name, values in (("ref", weight), ("cand", np.ascontiguousarray(weight.T))):
        writer = RunWriter(tmp_path / name, seal_at_exit=False)
        for layer in range(6):
            key = TensorKey.of(f"fc{layer}", "param", "weight")
            writer.put(
                Record(key, 0, "float32", values.shape), (values + layer).reshape(-1).view(np.uint8)
            )
        writer.close()
    words = WATCHED.replace("sys.argv[2])", "sys.argv[2], threads=4)")
    done = subprocess.run(
        [sys.executable, "-c", words, str(tmp_path / "ref"), str(tmp_path / "cand")],
        capture_output=True,
        text=True,
        check=True,
    )
    verdict, peak = done.stdout.split()
    assert verdict == "pass"
    assert int(peak) < 64 + 100
