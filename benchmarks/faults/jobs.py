"""What is tried, and one trial of it.

Rules were tuned on seeds below 100, and without the kinds and architectures in `HELD_OUT`; what is
reported by default is seeds from 100 on.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from driftline.testing.faults.rates import Job

HELD_OUT = {
    "kinds": (
        *("halves interleaved", "sums in bf16", "window", "tile stale", "experts swapped"),
        *("bias doubled", "attention scale", "partial sum", "dropout in the mlp"),
    ),
    "architectures": ("t5", "vit"),
}
REPORTED = 100
"""The first seed that was not used for tuning."""
FORMATS = ("fp32", "bf16", "fp16", "int8", "torch-int8", "compiled", "compiled-modules")
SAMPLED = {
    "compiled": {
        "architectures": ("llama",),
        "kinds": ("scaled weight", "norm epsilon", "channels zeroed", "activation", "window"),
    },
    "compiled-modules": {
        "architectures": ("gpt2",),
        "kinds": ("scaled weight", "norm epsilon", "channels zeroed", "activation", "bias missing"),
    },
    "torch-int8": {
        "architectures": ("llama", "bert"),
        "kinds": ("scaled weight", "bias missing", "channels zeroed", "activation", "offset"),
    },
}
"""Formats that cost much, or say little that another does not: a sample, unless asked for alone."""
LARGE = 10_000
"""Tokens from which on a trial is a large one."""
IMPLEMENTATIONS = ("", "other attention", "other norms")
"""Fault-free candidates are each of these in turn, so that they are no copies of a noise run."""


def fault_jobs(seeds: range, formats: Sequence[str], tuning: bool) -> Iterator[Job]:
    """Every kind, where it can be planted, in every format and severity."""
    from driftline.testing.faults import ARCHITECTURES, FAULTS, specimen

    for architecture in ARCHITECTURES:
        if tuning and architecture in HELD_OUT["architectures"]:
            continue
        model = specimen(architecture, 0).model
        for fault in FAULTS.values():
            if (tuning and fault.name in HELD_OUT["kinds"]) or not fault.sites(model):
                continue
            for name in formats:
                if fault.formats and name not in fault.formats:
                    continue
                if not _sampled(name, architecture, fault.name, len(formats) == 1):
                    continue
                for seed in seeds:
                    for amount in fault.amounts:
                        yield Job(architecture, name, seed, fault.name, amount, 40)


def _sampled(name: str, architecture: str, kind: str, alone: bool) -> bool:
    some = SAMPLED.get(name)
    if some is None or alone:
        return True
    return architecture in some["architectures"] and kind in some["kinds"]


def clean_jobs(first: int, count: int, formats: Sequence[str], tuning: bool) -> Iterator[Job]:
    """Fault-free pairs of each format; every twentieth is longer."""
    from driftline.testing.faults import ARCHITECTURES

    kept = [a for a in ARCHITECTURES if not (tuning and a in HELD_OUT["architectures"])]
    for name in formats:
        for at in range(count):
            architecture = kept[at % len(kept)]
            how = IMPLEMENTATIONS[at // len(kept) % len(IMPLEMENTATIONS)]
            length = 40 if at % 20 else 512
            yield Job(architecture, name, 1000 + first + at, "", 0.0, length, how)


def set_jobs(first: int, pairs: int) -> Iterator[Job]:
    """Fault-free pairs by number of tokens, and by implementation: alarms must not grow."""
    for architecture in ("llama", "gpt2") if pairs else ():
        for name in ("bf16", "fp16", "fp32"):
            for batch, length in ((4, 64), (8, 256), (16, 1000), (1, 16_000)):
                group = f"{batch * length} tokens" + (", one sequence" if batch == 1 else "")
                for at in range(pairs if batch * length < LARGE else max(1, pairs // 4)):
                    seed = 3000 + first + at
                    yield Job(architecture, name, seed, "", 0.0, length, "", batch, group)
            for how in ("as it is", "other norms", "other attention", "inductor"):
                if how == "as it is" and name == "fp32":
                    continue  # equal to the bit
                for at in range(pairs if how != "inductor" else max(1, pairs // 2)):
                    seed = 4000 + first + at
                    yield Job(architecture, name, seed, "", 0.0, 40, how, 4, how)


def trial(job: Job, ours: str = "cpu", theirs: str = "cpu") -> dict[str, Any]:
    """Plant, run, judge by every method; on which devices reference and candidate run is said."""
    import torch

    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # on CUDA that is a fault of its own
    from driftline.testing.faults import FAULTS
    from driftline.testing.faults.trials import METHODS, Setting, effect_of, planted
    from driftline.testing.faults.variants import COMPILED, unit_roundoff

    if job.format in COMPILED or job.implementation == "inductor":
        # Code compiled for earlier trials would count against this one's limit, and beyond that
        # limit nothing is compiled any more: better a broken trial than one in name only.
        torch._dynamo.reset()
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        torch._dynamo.config.recompile_limit = 64
    fault = FAULTS[job.kind] if job.kind else None
    setting = Setting(
        *(job.architecture, job.format, job.seed, fault, job.amount),
        *(job.length, job.implementation, job.batch),
    )
    result: dict[str, Any] = {"job": job, "sub_noise": bool(fault and fault.sub_noise)}
    try:
        pair = planted(setting, ours, theirs)
        result |= {
            "site": pair.site,
            "seen": pair.is_seen,
            "changed": pair.changed,
            "error": pair.error,
            "clean_error": pair.clean_error,
            "unit": unit_roundoff(job.format),
        }
        if pair.changed:
            for method, judge in METHODS.items():
                result[method] = judge(setting, pair)._asdict()
        if fault is not None and fault.sub_noise:
            result["effect"] = effect_of(setting)
    except Exception as problem:  # a trial that breaks is a finding of its own
        result["broken"] = f"{type(problem).__name__}: {problem}"
    return result


def run(
    jobs: Sequence[Job],
    workers: int,
    keep: Callable[[dict[str, Any]], None],
    ours: str = "cpu",
    theirs: str = "cpu",
) -> list[dict[str, Any]]:
    """All trials, in processes of their own; those with many tokens by fewer, which need 7 GB.

    Each result is handed to `keep` as it comes: a run that is cut short has not been for nothing.
    """
    done: list[dict[str, Any]] = []
    start = time.monotonic()
    large = [job for job in jobs if job.batch * job.length >= LARGE]
    small = [job for job in jobs if job.batch * job.length < LARGE]
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fewer = max(1, min(workers, memory // (10 << 30)))
    context = multiprocessing.get_context("spawn")
    for some, hands in ((small, workers), (large, fewer)):
        if not some:
            continue
        with context.Pool(hands) as pool:
            tried = functools.partial(trial, ours=ours, theirs=theirs)
            for result in pool.imap_unordered(tried, some, chunksize=4 if len(some) > 200 else 1):
                done.append(result)
                keep(result)
                if len(done) % 50 == 0:
                    spent = time.monotonic() - start
                    print(f"  {len(done)} of {len(jobs)} trials, {spent:.0f} s", flush=True)
    return done
