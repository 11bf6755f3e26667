"""`driftline metrics`: how far a decoder on one target is from the same decoder on another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from driftline.cli import script
from driftline.cli.parsing import Option

if TYPE_CHECKING:
    from driftline.decoding.metrics import MetricsResult
    from driftline.decoding.options import MetricsOptions

_MODEL = "Model"
_PROMPTS = "Prompts and shapes"
_TARGETS = "Targets"
_OUTPUT = "Output"
_SPEED = "Speed"


def _spelt(name: str) -> tuple[str, str]:
    """The documented spelling, and ours."""
    return (f"--{name}", f"--{name.replace('_', '-')}")


def metrics(
    *,
    model_path: Annotated[str, Option(_spelt("model_path"), "PATH", _MODEL)] = "",
    variant: Annotated[str, Option(metavar="ID", group=_MODEL)] = "",
    tokenizer: Annotated[str, Option(metavar="PATH", group=_MODEL)] = "",
    architecture: Annotated[str, Option(metavar="NAME", group=_MODEL)] = "hf_pretrained",
    library: Annotated[Literal["transformers", "fms"] | None, Option(group=_MODEL)] = None,
    unfuse_weights: Annotated[bool, Option(_spelt("unfuse_weights"), group=_MODEL)] = False,
    extra_get_model_kwargs: Annotated[
        list[str] | None,
        Option(_spelt("extra_get_model_kwargs"), "NAME=VALUE", _MODEL, several=True),
    ] = None,
    sharegpt_path: Annotated[
        Path | None, Option(_spelt("sharegpt_path"), metavar="FILE", group=_PROMPTS)
    ] = None,
    batch_size: Annotated[str, Option(_spelt("batch_size"), "N[,N]", _PROMPTS)] = "",
    min_pad_length: Annotated[str, Option(_spelt("min_pad_length"), "N[,N]", _PROMPTS)] = "",
    max_new_tokens: Annotated[str, Option(_spelt("max_new_tokens"), "N[,N]", _PROMPTS)] = "",
    num_test_tokens_per_sequence: Annotated[
        int | None, Option(_spelt("num_test_tokens_per_sequence"), "N", _PROMPTS)
    ] = None,
    order: Annotated[Literal["head", "doc"], Option(group=_PROMPTS)] = "head",
    reference: Annotated[str, Option(metavar="TARGET", group=_TARGETS)] = "",
    candidate: Annotated[str, Option(metavar="TARGET", group=_TARGETS)] = "",
    default_dtype: Annotated[str, Option(_spelt("default_dtype"), "D[,D]", _TARGETS)] = "",
    compile_dynamic: Annotated[bool, Option(_spelt("compile_dynamic"), group=_TARGETS)] = False,
    distributed: Annotated[bool, Option(group=_TARGETS)] = False,
    output_dir: Annotated[
        Path | None, Option((*_spelt("output_dir"), "-o"), "DIR", _OUTPUT)
    ] = None,
    topk_per_token: Annotated[int, Option(_spelt("topk_per_token"), "N", _OUTPUT)] = 20,
    logits: Annotated[Literal["full", "topk"], Option(group=_OUTPUT)] = "full",
    skip_computation: Annotated[bool, Option(_spelt("skip_computation"), group=_OUTPUT)] = False,
    force: Annotated[bool, Option(group=_OUTPUT)] = False,
    jobs: Annotated[int | None, Option(metavar="N", group=_SPEED)] = None,
    executor: Annotated[str | None, Option(metavar="ray[://HOST:PORT]", group=_SPEED)] = None,
) -> int:
    """Run a decoder on two targets and score every generated token.

        driftline metrics --model_path=M --tokenizer=M --sharegpt_path=share_gpt.json
            --batch_size=1 --min_pad_length=64 --max_new_tokens=128
            --num_test_tokens_per_sequence=1024 --default_dtype=fp16 --output_dir=out

    The reference generates greedily; the candidate is forced along the reference's tokens, so that
    both read the same text. Per token before the end of the text: ce, prob_mean, prob_std and
    diff_mean, one csv each, and a table (….tokens.parquet) with further scores over the whole
    vocabulary. Both sides' logits are kept in ….out folders. After an interruption the same command
    goes on where it was. Baselines become thresholds with `driftline thresholds`.

    A target is device=cpu|cuda|npu|aiu, dtype=fp32|fp16|bf16 and compile=BACKEND of torch.compile,
    with commas between them: device=cuda,dtype=fp16,compile=inductor. MODEL_PATH, DS_PATH,
    BATCH_SIZES, SEQ_LENS, MAX_NEW_TOKENS and DEFAULT_TYPES in the environment are taken where the
    option is not given.

    Args:
        model_path: Folder of a causal language model, or its id.
        variant: Id that names the model in file names; without --model_path it is loaded, too.
        tokenizer: Folder or id of the tokenizer; the model's own if not given.
        architecture: hf_pretrained, or the name of an architecture of ibm-fms.
        library: Who loads the model; fms needs the extra driftline[fms]. transformers, unless the
            architecture is one that only ibm-fms knows.
        unfuse_weights: Separate projections in models of ibm-fms; transformers' stay as they are.
        extra_get_model_kwargs: More words for the library's own loader.
        sharegpt_path: Prompts: ShareGPT JSON, or a text file with one prompt per line.
        batch_size: Prompts of one round, 1 if not given; several values are run in turn.
        min_pad_length: Sequence length: prompts have half of it to all of it, and are padded to it.
        max_new_tokens: Tokens generated per prompt and round; 100 if not given.
        num_test_tokens_per_sequence: In all rounds together; one round if not given.
        order: How prompts are drawn: head among those that fit, doc as older results were made.
        reference: device=cpu,dtype=fp32 if not given.
        candidate: CUDA if there is one, else the CPU, in --default_dtype if not given.
        default_dtype: Number format of the candidate; fp16 if not given.
        compile_dynamic: A compiled target is compiled once for all lengths.
        distributed: Under torchrun: split the candidate over the ranks; only rank 0 writes.
        output_dir: Folder of the results.
        topk_per_token: How many of the reference's largest logits the four metrics look at.
        logits: Keep the whole vocabulary, or the largest logits and their logsumexp.
        skip_computation: Only score the logits that are there.
        force: Compute again what is there.
        jobs: Share the shapes out among so many processes; each loads the models for itself.
        executor: Share them out on a Ray cluster: the one this machine is in, or one elsewhere.
            All machines must see the model, the prompts and --output_dir.
    """
    from driftline.decoding.option_reader import metrics_options

    shapes = metrics_options(
        {
            "model_path": model_path,
            "variant": variant,
            "tokenizer": tokenizer,
            "architecture": architecture,
            "library": library,
            "unfuse_weights": unfuse_weights,
            "extra_get_model_kwargs": extra_get_model_kwargs,
            "sharegpt_path": sharegpt_path,
            "batch_size": batch_size,
            "min_pad_length": min_pad_length,
            "max_new_tokens": max_new_tokens,
            "num_test_tokens_per_sequence": num_test_tokens_per_sequence,
            "order": order,
            "reference": reference,
            "candidate": candidate,
            "default_dtype": default_dtype,
            "compile_dynamic": compile_dynamic,
            "distributed": distributed,
            "output_dir": output_dir,
            "topk_per_token": topk_per_token,
            "logits": logits,
            "skip_computation": skip_computation,
            "force": force,
        }
    )
    for options in shapes:
        options.check()
    if jobs is not None or executor is not None:
        return _run_shared(shapes, jobs, executor)
    return _run(shapes)


def _run(shapes: list[MetricsOptions]) -> int:
    from driftline.decoding.distributed import join_job
    from driftline.decoding.metrics import run_metrics
    from driftline.decoding.pipeline import Session

    session = script.step("session", Session)
    job = join_job(shapes[0].distributed)
    results: list[MetricsResult] = []
    for options in shapes:
        progress = None if script.asked() else _watch(job.writes)
        result = script.step(
            "result", run_metrics, options, report=_say, session=session, progress=progress
        )
        results.append(result)
        if not script.asked() and job.writes and not result.skipped:
            sys.stdout.write(_summary(result, options))
    script.end(*results)
    job.leave()
    return 0


def _run_shared(shapes: list[MetricsOptions], jobs: int | None, executor: str | None) -> int:
    from driftline.decoding.metrics import run_shapes

    def ready(options: MetricsOptions, result: MetricsResult) -> None:
        if not result.skipped:
            sys.stdout.write(_summary(result, options))
            sys.stdout.flush()

    listener = None if script.asked() else ready
    results = script.step(
        "results", run_shapes, shapes, jobs=jobs, executor=executor, report=_say, ready=listener
    )
    script.end(results)
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _watch(speaks: bool) -> Callable[[int, int], None] | None:
    """A line on a terminal that says how far a generation is; a new one for each."""
    if not speaks or not sys.stderr.isatty():
        return None
    from driftline.cli.progress import Progress

    bar = Progress("tokens")

    def watch(done: int, total: int) -> None:
        nonlocal bar
        if done == 1:
            bar = Progress("tokens")
        bar(done, total)
        if done == total:
            bar.close()

    return watch


def _summary(result: MetricsResult, options: MetricsOptions) -> str:
    from driftline.decoding.metrics import summary_figures
    from driftline.reporting.formatting import counted, number

    rounds = counted(result.rounds, "round")
    lines = [
        f"{result.prefix}: {counted(result.tokens, 'token')} of {rounds}",
        "  of the logits that were saved"
        if options.skip_computation
        else f"  reference {options.reference}; candidate {options.candidate}",
        f"  {'metric':<16}{'mean':>12}{'99 %':>12}{'largest':>12}",
    ]
    for name, *numbers in summary_figures(result):
        lines.append(f"  {name:<16}" + "".join(f"{number(figure):>12}" for figure in numbers))
    agreed = int(result.columns["top1_agree"].sum())
    lines.append(f"  the largest logit agrees at {agreed} of {result.tokens} tokens")
    if result.first_other is not None:
        seed, prompt, position = result.first_other
        lines[-1] += f"; first not: round {seed}, prompt {prompt}, token {position}"
    if not result.companions:
        lines.append("  whole-vocabulary scores are left out: only the largest logits are saved")
    lines += [
        f"  in {result.folder}: four csv files, .tokens.parquet, both sides' .out folders",
        f"  next: driftline thresholds --models {options.model} --metrics diff_mean ce "
        f"--file_base {result.folder}",
    ]
    return "\n".join(lines) + "\n"
