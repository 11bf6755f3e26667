"""Time to align two runs of ten thousand sites with different names.

The candidate is the same decoder with other names, other nesting, q, k and v in one projection and
no dropouts. A harder candidate also lacks a norm in each layer, so that only the full alignment of
the two sequences can pair the sites. Only records are needed; no tensor is read.
"""

from __future__ import annotations

import time
from typing import Any

from driftline.alignment.align import align_runs
from driftline.runs.records import Record, TensorKey
from driftline.runs.run import Run, Storage, no_values

SITES = 10_000
SIZE = 64

Leaf = tuple[str, str, int, int]
REFERENCE: list[Leaf] = [
    ("norm1", "LayerNorm", 1, 1), ("attn.q_proj", "Linear", 1, 1), ("attn.k_proj", "Linear", 1, 1),
    ("attn.v_proj", "Linear", 1, 1), ("attn.o_proj", "Linear", 1, 1),
    ("attn.drop", "Dropout", 1, 1), ("norm2", "LayerNorm", 1, 1), ("mlp.up", "Linear", 1, 4),
    ("mlp.act", "GELU", 4, 4),
    ("mlp.down", "Linear", 4, 1), ("mlp.drop", "Dropout", 1, 1),
]  # fmt: skip
CANDIDATE: list[Leaf] = [
    ("a", "LayerNorm", 1, 1), ("b.fused", "Linear", 1, 3), ("b.out", "Linear", 1, 1),
    ("c", "LayerNorm", 1, 1), ("d.0", "Linear", 1, 4), ("d.1", "GELU", 4, 4),
    ("d.2", "Linear", 4, 1),
]  # fmt: skip


class Described(Run):
    """Records without values."""

    def __init__(self, records: list[Record]) -> None:
        self._records = records

    @property
    def records(self) -> list[Record]:
        return self._records

    def raw(self, record: Record) -> Storage:
        return no_values(record)


def decoder(layer: list[Leaf], layers: int, stack: str) -> Described:
    """Records of the inputs and outputs of a decoder's leaves and containers, with digests."""
    records: list[Record] = []

    def put(site: str, class_name: str, port: Any, width: int, digest: str) -> None:
        key = TensorKey.of(site, port)
        shape = (1, 16, SIZE * width)
        records.append(
            Record(key, len(records), "float32", shape, class_name=class_name, kept="describe",
                   digest=f"{layer[0][0]}:{digest}")
        )  # fmt: skip

    put("embed", "Embedding", "output", 1, "embed")
    for n in range(layers):
        put(f"{stack}.{n}", "Block", "input", 1, f"{n}in")
        opened = ""
        for name, class_name, width, wide in layer:
            holder = name.rpartition(".")[0]
            if holder != opened:
                if opened:
                    put(f"{stack}.{n}.{opened}", "Part", "output", 1, f"{n}{opened}out")
                opened = holder
                if opened:
                    put(f"{stack}.{n}.{opened}", "Part", "input", 1, f"{n}{opened}in")
            fed = (
                f"{n}{holder}in" if name.endswith(("q_proj", "k_proj", "v_proj")) else f"{n}{name}i"
            )
            put(f"{stack}.{n}.{name}", class_name, "input", width, fed)
            put(f"{stack}.{n}.{name}", class_name, "output", wide, f"{n}{name}o")
        put(f"{stack}.{n}.{opened}", "Part", "output", 1, f"{n}{opened}out")
        put(f"{stack}.{n}", "Block", "output", 1, f"{n}out")
    put("head", "Linear", "output", 2, "head")
    return Described(records)


def run() -> list[dict[str, object]]:
    layers = SITES // (len(REFERENCE) + 3)
    reference = decoder(REFERENCE, layers, "model.layers")
    figures: list[dict[str, object]] = []
    for what, layer in (
        ("renamed, nested otherwise, qkv fused", CANDIDATE),
        ("the same, and a norm of each layer missing", [e for e in CANDIDATE if e[0] != "c"]),
    ):
        candidate = decoder(layer, SITES // (len(REFERENCE) + 3), "trunk")
        begin = time.perf_counter()
        plan = align_runs(reference, candidate)
        taken = time.perf_counter() - begin
        sites = {pair.candidate.key.site for pair in plan.pairs}
        share = len(sites) / len(candidate.sites())
        figures.append(
            {
                "what": f"align {len(reference.sites())} sites: {what}",
                "value": taken,
                "goal": 10.0,
                "better": "lower",
                "unit": "s",
                "note": f"{len(plan.pairs)} pairs, {share:.1%} of the candidate's sites",
            }
        )
    return figures
