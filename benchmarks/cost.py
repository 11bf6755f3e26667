"""Cost of a dump of a 70B model on 512 ranks: bytes, seconds and money, from measured rates.

    python -m benchmarks.cost                         measure the rates, then print the table
    python -m benchmarks.cost --write 1.5 --compare 9 with rates of another machine, GB/s
    python -m benchmarks.cost --markdown              the table in the form of docs/scale.md

The model is a Llama of 70B parameters (80 layers, hidden 8192, inner 28672, 64 heads, 8 of keys and
values) in bfloat16, with one step of 4096 tokens per rank, on 512 ranks: tensor parallel 8,
pipeline parallel 4, data parallel 16. Inputs and outputs of all modules are captured, as by
`driftline dump`. The run format determines which bytes are stored only once and the size of an
index line. Rates are measured on this machine. Prices are list prices, which may be replaced.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, TOKENS = 80, 8192, 28672, 64, 8, 4096
TENSOR_PARALLEL, PIPELINE, DATA = 8, 4, 16
RANKS = TENSOR_PARALLEL * PIPELINE * DATA
PER_NODE = 8
WIDTH = 2
STORE_MONTH = 0.023
"""Dollars per GB and month (list price of S3, us-east-1)."""
PUT_THOUSAND = 0.005
"""Dollars per 1000 written files (list price of S3, us-east-1)."""
NODE_HOUR = 40.0
"""Dollars per hour of a node of 8 GPUs."""
COMPARER_HOUR = 1.5
"""Dollars per hour of a machine of 32 cores that compares dumps."""
COMPARER_CORES = 32
NETWORK = 1.25
"""GB/s from a node to the store: 10 Gbit/s."""


class Rates(NamedTuple):
    """Rates of one core of a machine.

    Attributes:
        write: GB/s of captured bytes that are copied, digested and written to disk.
        digest: GB/s that are only digested.
        summary: GB/s of bfloat16 that are summarised, including sketch and digest.
        compare: GB/s that are compared, counting both sides.
        line: Seconds to list a tensor in the index.
        pair: Seconds that a pair takes independent of its bytes.
        summary_line: Bytes of the index line of a tensor with a summary.
        plain_line: Bytes of the index line of a tensor without a summary.
    """

    write: float
    digest: float
    summary: float
    compare: float
    line: float
    pair: float
    summary_line: float
    plain_line: float


class Dump(NamedTuple):
    """One step of all ranks.

    Attributes:
        tensors: Number of listed tensors.
        listed: Bytes of all listed tensors.
        stored: Bytes of the tensors that differ from each other.
    """

    tensors: int
    listed: int
    stored: int


def one_rank() -> Dump:
    """What one rank of one pipeline stage captures in a step."""
    wide = TOKENS * HIDDEN * WIDTH
    query = wide // TENSOR_PARALLEL
    keys = TOKENS * (HIDDEN // HEADS * KV_HEADS // TENSOR_PARALLEL) * WIDTH
    inner = TOKENS * INNER // TENSOR_PARALLEL * WIDTH
    size = {"wide": wide, "query": query, "keys": keys, "inner": inner}
    # Input and output of each module; tensors of the same name have the same bytes.
    layer = (
        (("x", "wide"), ("normed", "wide")),  # input norm
        (("normed", "wide"), ("q", "query")),
        (("normed", "wide"), ("k", "keys")),
        (("normed", "wide"), ("v", "keys")),
        (("mixed", "query"), ("attended", "wide")),  # output projection
        (("normed", "wide"), ("attended", "wide")),  # attention
        (("added", "wide"), ("normed2", "wide")),  # second norm
        (("normed2", "wide"), ("gate", "inner")),
        (("normed2", "wide"), ("up", "inner")),
        (("gate", "inner"), ("act", "inner")),
        (("product", "inner"), ("down", "wide")),
        (("normed2", "wide"), ("down", "wide")),  # mlp
        (("x", "wide"), ("y", "wide")),  # the layer; its y is the x of the next layer
    )
    listed = [each for pair in layer for each in pair]
    different = {name: kind for name, kind in listed if name != "x"}
    layers = LAYERS // PIPELINE
    return Dump(
        tensors=layers * len(listed),
        listed=layers * sum(size[kind] for _, kind in listed),
        stored=layers * sum(size[kind] for kind in different.values()) + wide,
    )


def all_ranks() -> Dump:
    """What all ranks capture in a step; embeddings and logits, a hundredth of it, are left out."""
    one = one_rank()
    return Dump(one.tensors * RANKS, one.listed * RANKS, one.stored * RANKS)


# ---- rates


def measured_rates() -> Rates:
    """Rates of one core of this machine; all but `line` are the best of a few rounds."""
    from driftline import compare
    from driftline.numerics import kernel
    from driftline.numerics.dtypes import DTYPES
    from driftline.runs.records import Record, TensorKey
    from driftline.runs.writer import RunWriter

    bf16 = DTYPES["bfloat16"]
    draw = np.random.default_rng(0)
    floats = draw.standard_normal(16 << 20, np.float32)
    words = (floats.view(np.uint32) >> 16).astype(np.uint16)
    data = words.view(np.uint8)
    digest = data.nbytes / _best(lambda: kernel.digest(data)) / 1e9

    def summarised() -> None:
        kernel.summarize(words, bf16, count=words.size)
        kernel.digest(data)

    summary = data.nbytes / _best(summarised) / 1e9
    place = Path(tempfile.mkdtemp(prefix="driftline-cost-"))
    try:
        writes: list[float] = []
        for number in range(3):
            begin = time.perf_counter()
            writer = RunWriter(place / f"run{number}", seal_at_exit=False)
            for at in range(16):
                words[at] ^= 1 + number  # changes the bytes, because equal ones are stored once
                key = TensorKey.of(f"layer{at}", "output")
                writer.put(Record(key, 0, "bfloat16", (words.size,)), data)
            writer.close()
            writes.append(16 * data.nbytes / (time.perf_counter() - begin) / 1e9)
        both = 2 * 16 * data.nbytes
        took = _best(lambda: compare(place / "run0", place / "run1", threads=1))
        few = place / "few"
        small = np.zeros(8, np.uint8)
        known = kernel.summarize(words[:4096], bf16, count=4096)
        begin = time.perf_counter()
        for name, summarized in (("plain", None), ("summaries", known)):
            writer = RunWriter(few / name, seal_at_exit=False)
            for at in range(5000):
                small[:4] = np.frombuffer(at.to_bytes(4, "little"), np.uint8)
                key = TensorKey.of(f"model.layers.{at}.self_attn.q_proj", "output")
                kept: Any = "summary" if summarized else "full"
                record = Record(key, 0, "bfloat16", (4,), "", "Linear", "cuda:0", kept)
                writer.put(record._replace(summary=summarized), small)
            writer.close()
        line = (time.perf_counter() - begin) / 10_000
        indexes = [(few / name / "rank0" / "index.jsonl") for name in ("plain", "summaries")]
        plain_line, summary_line = (path.stat().st_size / 5000 for path in indexes)
        pair = _best(lambda: compare(few / "plain", few / "plain", threads=1)) / 5000
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return Rates(
        max(writes), digest, summary, both / took / 1e9, line, pair, summary_line, plain_line
    )


def _best(act: Any, rounds: int = 3) -> float:
    times: list[float] = []
    for _ in range(rounds):
        begin = time.perf_counter()
        act()
        times.append(time.perf_counter() - begin)
    return min(times)


# ---- the table


class Cost(NamedTuple):
    """The cost of one way to dump, and of comparing two such dumps.

    Attributes:
        way: The way, in words.
        lying: GB of one dump in the store, including the index.
        capture: Seconds by which a rank's step takes longer, on one core next to the GPU.
        sending: Seconds until a node's part of the dump is in the store.
        comparing: Hours of one core to compare two dumps.
        month: Dollars per month that one dump costs in the store.
        once: Dollars for one dump and one comparison: waiting nodes, files, cores.
    """

    way: str
    lying: float
    capture: float
    sending: float
    comparing: float
    month: float
    once: float


def costs(rates: Rates) -> list[Cost]:
    dump, rank = all_ranks(), one_rank()
    share = dump.stored / dump.listed
    found: list[Cost] = []
    for way, full, once in (
        ("whole tensors, each as often as it is seen", True, False),
        ("whole tensors, equal bytes once (what dump does)", True, True),
        ("summaries and digests (--keep summary)", False, False),
    ):
        per_line = rates.plain_line if full else rates.summary_line
        values = (dump.stored if once else dump.listed) if full else 0
        lying = (values + dump.tensors * per_line) / 1e9
        seconds = rank.tensors * rates.line
        if full:
            seconds += (rank.stored if once else rank.listed) / rates.write / 1e9
            if once:  # repeated bytes are only digested
                seconds += rank.listed * (1 - share) / rates.digest / 1e9
        else:
            seconds += rank.listed / rates.summary / 1e9
        sending = lying / (RANKS / PER_NODE) / NETWORK
        comparing = dump.tensors * rates.pair + 2 * values / rates.compare / 1e9
        nodes = RANKS / PER_NODE * NODE_HOUR * seconds / 3600
        files = lying / 0.064 / 1000 * PUT_THOUSAND
        cores = comparing / 3600 / COMPARER_CORES * COMPARER_HOUR
        month = lying * STORE_MONTH
        found.append(
            Cost(way, lying, seconds, sending, comparing / 3600, month, nodes + files + cores)
        )
    return found


def markdown(rates: Rates) -> str:
    dump = all_ranks()
    head = (
        "| one step of 512 ranks | in the store | a rank's step takes longer by | sent after |"
        " compare two, one core | 32 cores | a month in the store | once |\n"
        "|---|---|---|---|---|---|---|---|\n"
    )
    rows = [
        f"| {cost.way} | {_size(cost.lying)} | {cost.capture:.1f} s | {_time(cost.sending)} | "
        f"{_time(cost.comparing * 3600)} | {_time(cost.comparing * 3600 / 32)} | "
        f"${_money(cost.month)} | ${_money(cost.once)} |"
        for cost in costs(rates)
    ]
    said = (
        f"{dump.tensors:,} tensors of {_size(dump.listed / 1e9)}, "
        f"{_size(dump.stored / 1e9)} of them different "
        f"({1 - dump.stored / dump.listed:.0%} are repeats)."
    )
    return f"{said}\n\n{head}" + "\n".join(rows) + "\n"


def _size(gigabytes: float) -> str:
    return f"{gigabytes / 1000:.1f} TB" if gigabytes >= 1000 else f"{gigabytes:.2g} GB"


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s" if seconds >= 1 else "< 1 s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _money(dollars: float) -> str:
    return f"{dollars:,.0f}" if dollars >= 10 else f"{dollars:.2f}"


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in Rates._fields:
        options.add_argument(f"--{name.replace('_', '-')}", type=float)
    options.add_argument("--markdown", action="store_true", help="the table only")
    chosen = options.parse_args()
    given = {name: value for name in Rates._fields if (value := getattr(chosen, name)) is not None}
    rates = (
        Rates(**given) if len(given) == len(Rates._fields) else measured_rates()._replace(**given)
    )
    if not chosen.markdown:
        for name, value in rates._asdict().items():
            print(f"  {name:<13} {value:.4g}")
        print()
    print(markdown(rates))


if __name__ == "__main__":
    main()
