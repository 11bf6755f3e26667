"""`driftline metrics` and `layer-metrics`: compare a decoder on two targets, by token or by layer.

These commands replace IBM's scripts, so the options accept the spellings and environment variables
of those scripts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from driftline.cli import python_script as script
from driftline.cli.options import (
    MODEL,
    OUTPUT,
    PROMPTS,
    SEVERAL,
    TARGETS,
    DecoderModelOptions,
    DecoderOptions,
    WorkerOptions,
    spelt,
)
from driftline.cli.progress import progress_bar
from driftline.errors import EXIT_COULD_NOT, EXIT_DIFFERENT, EXIT_FINE

if TYPE_CHECKING:
    from driftline.decoding.layers import LayersResult
    from driftline.decoding.metrics import MetricsResult
    from driftline.decoding.options import LayerOptions, MetricsOptions


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True)
class MetricsModel:
    """The model.

    Attributes:
        model_path: Folder of a causal language model, or its id.
        unfuse_weights: Separate fused projections in models of ibm-fms; has no effect on
            transformers.
        extra_get_model_kwargs: Further arguments for the loader of the library.
    """

    model_path: Annotated[str, spelt("model_path", "PATH")] = ""
    unfuse_weights: Annotated[bool, spelt("unfuse_weights")] = False
    extra_get_model_kwargs: Annotated[
        list[str] | None,
        SEVERAL,
        spelt("extra_get_model_kwargs", "NAME=VALUE"),
    ] = None


@Parameter(name="*", group=PROMPTS)
@dataclass(frozen=True)
class MetricsShapes:
    """Which shapes are run.

    Attributes:
        batch_size: Prompts per round; several values are run one after another. Default: 1.
        min_pad_length: Sequence length. Prompts of half this length up to this length are drawn,
            and are padded to it.
        max_new_tokens: Tokens generated per prompt and round. Default: 100.
        num_test_tokens_per_sequence: Tokens per prompt in all rounds together. Default: one round.
    """

    batch_size: Annotated[str, spelt("batch_size", "N[,N]")] = ""
    min_pad_length: Annotated[str, spelt("min_pad_length", "N[,N]")] = ""
    max_new_tokens: Annotated[str, spelt("max_new_tokens", "N[,N]")] = ""
    num_test_tokens_per_sequence: Annotated[
        int | None, spelt("num_test_tokens_per_sequence", "N")
    ] = None


@Parameter(name="*", group=TARGETS)
@dataclass(frozen=True)
class MetricsTargets:
    """How the candidate computes.

    Attributes:
        default_dtype: Number format of the candidate. Default: fp16.
        compile_dynamic: Compile a compiled target once for all lengths.
        distributed: Under torchrun, split the candidate over the ranks; only rank 0 writes.
    """

    default_dtype: Annotated[str, spelt("default_dtype", "D[,D]")] = ""
    compile_dynamic: Annotated[bool, spelt("compile_dynamic")] = False
    distributed: bool = False


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class MetricsOutput:
    """What is written.

    Attributes:
        output_dir: Folder of the results.
        topk_per_token: How many of the reference's largest logits the four metrics use.
        logits: Save the logits of the whole vocabulary, or the largest ones and their logsumexp.
        skip_computation: Run no model; score the logits that were saved before.
        force: Compute results again that exist already.
    """

    output_dir: Annotated[Path | None, spelt("output_dir", "DIR", "-o")] = None
    topk_per_token: Annotated[int, spelt("topk_per_token", "N")] = 20
    logits: Literal["full", "topk"] = "full"
    skip_computation: Annotated[bool, spelt("skip_computation")] = False
    force: bool = False


def metrics(
    *,
    model: MetricsModel = MetricsModel(),
    decoder: DecoderOptions = DecoderOptions(),
    loading: DecoderModelOptions = DecoderModelOptions(),
    shapes: MetricsShapes = MetricsShapes(),
    targets: MetricsTargets = MetricsTargets(),
    output: MetricsOutput = MetricsOutput(),
    workers: WorkerOptions = WorkerOptions(),
) -> int:
    """Run a decoder on two targets and score every generated token.

        driftline metrics --model_path=M --tokenizer=M --sharegpt_path=share_gpt.json
            --batch_size=1 --min_pad_length=64 --max_new_tokens=128
            --num_test_tokens_per_sequence=1024 --default_dtype=fp16 --output_dir=out

    The reference generates greedily. The candidate reads the reference's tokens instead of its
    own, so both read the same text. Every token up to the end of the text gets four scores: ce,
    prob_mean, prob_std and diff_mean, one csv each. A table (….tokens.parquet) has further scores
    over the whole vocabulary. The logits of both sides are saved in ….out folders. After an
    interruption, the same command continues. `driftline thresholds` makes limits of the scores.

    A target is device=cpu|cuda|npu|aiu, dtype=fp32|fp16|bf16 and compile=BACKEND of torch.compile,
    joined by commas: device=cuda,dtype=fp16,compile=inductor. The default candidate is CUDA if
    there is a device, else the CPU, in --default_dtype. If an option is not given, its value comes
    from the environment: MODEL_PATH, DS_PATH, BATCH_SIZES, SEQ_LENS, MAX_NEW_TOKENS and
    DEFAULT_TYPES. With --jobs or --executor, the shapes are divided among processes, and each
    process loads its own models.
    """
    from driftline.decoding.option_reader import metrics_options

    tasks = metrics_options(_flags(model, decoder, loading, shapes, targets, output))
    for options in tasks:
        options.check()
    return _share_metrics(tasks, workers) if workers.shared else _run_metrics(tasks)


def _run_metrics(tasks: list[MetricsOptions]) -> int:
    from driftline.decoding.metrics import run_metrics
    from driftline.decoding.pipeline import Session
    from driftline.decoding.torchrun import join_job

    session = script.step("session", Session)
    job = join_job(tasks[0].distributed)
    results: list[MetricsResult] = []
    for options in tasks:
        # Only one rank of a job writes, and only that rank shows a bar.
        quiet = script.is_script() or not job.writes
        with progress_bar("tokens", quiet=quiet) as bar:
            result = script.step(
                "result",
                run_metrics,
                options,
                report=_print_message,
                session=session,
                progress=bar,
            )
        results.append(result)
        if not script.is_script() and job.writes and not result.skipped:
            sys.stdout.write(_metrics_summary(result, options))
    script.end(*results)
    job.leave()
    return EXIT_FINE


def _share_metrics(tasks: list[MetricsOptions], workers: WorkerOptions) -> int:
    from driftline.decoding.metrics import run_shapes

    def print_result(options: MetricsOptions, result: MetricsResult) -> None:
        if not result.skipped:
            sys.stdout.write(_metrics_summary(result, options))
            sys.stdout.flush()

    results = script.step(
        "results",
        run_shapes,
        tasks,
        jobs=workers.jobs,
        executor=workers.executor,
        report=_print_message,
        ready=None if script.is_script() else print_result,
    )
    script.end(results)
    return EXIT_FINE


def _flags(*groups: object) -> dict[str, Any]:
    """All options of a command by name, as `decoding.option_reader` takes them."""
    return {name: value for group in groups for name, value in vars(group).items()}


def _print_message(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _metrics_summary(result: MetricsResult, options: MetricsOptions) -> str:
    from driftline.decoding.metrics import summary_figures
    from driftline.reporting.formatting import counted, number

    rounds = counted(result.rounds, "round")
    lines = [
        f"{result.prefix}: {counted(result.tokens, 'token')} of {rounds}",
        "  from the logits that were saved"
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
        lines[-1] += f"; first difference: round {seed}, prompt {prompt}, token {position}"
    if not result.companions:
        lines.append("  no scores over the whole vocabulary: only the largest logits are saved")
    lines += [
        f"  in {result.folder}: four csv files, .tokens.parquet, both sides' .out folders",
        f"  next: driftline thresholds --models {options.model} --metrics diff_mean ce "
        f"--file_base {result.folder}",
    ]
    return "\n".join(lines) + "\n"


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True)
class LayersModel:
    """The models.

    Attributes:
        model_paths: Folders of causal language models, or their ids.
        fused_weights: Do not separate the fused projections of models of ibm-fms.
    """

    model_paths: Annotated[str, spelt("model_paths", "PATH[,PATH]", "--model_path")] = ""
    fused_weights: Annotated[bool, spelt("fused_weights")] = False


@Parameter(name="*", group=PROMPTS)
@dataclass(frozen=True)
class LayersShapes:
    """Which shapes are run.

    Attributes:
        batch_sizes: Prompts that are run together. Default: 1.
        seq_lengths: Sequence length. Prompts of half this length up to this length are drawn, and
            are padded to it. Default: 64.
        max_new_tokens: Iterations of generate. Default: 128.
    """

    batch_sizes: Annotated[str, spelt("batch_sizes", "N[,N]")] = ""
    seq_lengths: Annotated[str, spelt("seq_lengths", "N[,N]")] = ""
    max_new_tokens: Annotated[str, spelt("max_new_tokens", "N[,N]")] = ""


@Parameter(name="*", group=TARGETS)
@dataclass(frozen=True)
class LayersTargets:
    """How the candidate computes.

    Attributes:
        default_dtype: Number format of the candidate.
        compile_unit: The part of a compiled target that becomes one graph; layers inside a graph
            are not compared.
    """

    default_dtype: Annotated[str, spelt("default_dtype", "D")] = "fp16"
    compile_unit: Annotated[Literal["block", "leaf", "model"], spelt("compile_unit")] = "block"


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class LayersOutput:
    """What is written and printed.

    Attributes:
        output_path: Folder of the results; it is created.
        elements: Write a line per element to abs_diff files; these files are large.
        quiet: Print only errors.
        force: Compute results again that exist already.
    """

    output_path: Annotated[Path | None, spelt("output_path", "DIR", "-o")] = None
    elements: bool = False
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"))] = False
    force: bool = False


def layer_metrics(
    *,
    mode: Literal["generate", "model-forward"] | None = None,
    model: LayersModel = LayersModel(),
    decoder: DecoderOptions = DecoderOptions(),
    loading: DecoderModelOptions = DecoderModelOptions(),
    shapes: LayersShapes = LayersShapes(),
    targets: LayersTargets = LayersTargets(),
    output: LayersOutput = LayersOutput(),
) -> int:
    """Run a decoder on two targets and compare the output of every layer.

        driftline layer-metrics --mode generate --model_paths M --batch_sizes 1
            --seq_lengths 64 --max_new_tokens 128 --sharegpt_path share_gpt.json
            --output_path out

    Both targets read the same prompts. With --mode generate they continue token by token, the
    candidate with the reference's tokens, and every iteration is compared. Each layer gets two csv
    files, abs_diff (mean |difference|) and cos_sim (cosine), with a line per token and output of
    the layer. Padding does not count. ….layers holds the same figures as a comparison table, for
    `driftline show` and `driftline check`. `driftline thresholds --layer_io` makes limits of the
    files.

    A target is device=cpu|cuda|npu|aiu, dtype=fp32|fp16|bf16 and compile=BACKEND of torch.compile,
    joined by commas: device=cuda,dtype=fp16. The default candidate is CUDA if there is a device,
    else the CPU, in --default_dtype. If an option is not given, its value comes from the
    environment: MODEL_PATHS, BATCH_SIZES, SEQ_LENGTHS, MAX_NEW_TOKENS, OUTPUT_PATH and
    SHARE_GPT_DATASET_PATH. The default prompts are in ~/share_gpt.json. If options have several
    values, all combinations are run. Results that exist already are not computed again. Exit code 1
    if a value is NaN, or infinite on one side only; 2 if a part did not reach the backend that
    should compile it.

    Args:
        mode: generate runs token by token, with a cache; model-forward makes one call on the
            prompts.
    """
    from driftline.decoding.option_reader import layer_options

    groups = (model, decoder, loading, shapes, targets, output)
    tasks = layer_options({"mode": mode, **_flags(*groups)})
    for options in tasks:
        options.check()
    return _run_layers(tasks, quiet=output.quiet)


def _run_layers(tasks: list[LayerOptions], *, quiet: bool) -> int:
    from driftline.comparison.verdict.judge import judge
    from driftline.decoding.layers import run_layers
    from driftline.decoding.pipeline import Session

    session = script.step("session", Session)
    code = EXIT_FINE
    results: list[LayersResult] = []
    for options in tasks:
        with progress_bar("module calls", quiet=quiet) as progress:
            result = script.step(
                "result",
                run_layers,
                options,
                session=session,
                judge=judge,
                report=_print_nothing if quiet else _print_line,
                progress=progress,
            )
        results.append(result)
        if script.is_script():
            continue
        if not quiet and not result.skipped:
            sys.stdout.write(_layers_summary(result))
            sys.stdout.flush()
        if result.nonfinite or any(layer.nan for layer in result.layers):
            code = EXIT_DIFFERENT
        # A difference that was found says more than a part that could not be judged.
        elif result.not_run and code != EXIT_DIFFERENT:
            code = EXIT_COULD_NOT
    script.end(*results)
    return code


def _print_line(line: str) -> None:
    print(line, flush=True)


def _print_nothing(line: str) -> None:
    del line


def _layers_summary(result: LayersResult) -> str:
    from driftline.reporting.formatting import counted, number
    from driftline.reporting.terminal import printable

    options = result.options
    layers = result.layers
    steps = counted(options.new_tokens, "iteration") if options.mode == "generate" else "one call"
    # A layer whose rows are all non-finite has no figure to rank.
    numbers = [layer for layer in layers if layer.rows > layer.nonfinite]
    lines = [
        f"{options.prefix}: {counted(len(layers), 'layer')}, "
        f"{counted(sum(layer.rows for layer in layers), 'row')} of {steps} ({options.mode})",
        f"  reference {options.reference}; candidate {options.candidate}",
    ]
    if numbers:
        farthest = max(numbers, key=lambda layer: layer.abs_diff)
        most_turned = min(numbers, key=lambda layer: layer.cos_sim)
        lines += [
            f"  largest average abs_diff {number(farthest.abs_diff)} at {farthest.layer}",
            f"  smallest cos_sim {most_turned.cos_sim:.8g} at {most_turned.layer}",
        ]
    if len(numbers) < len(layers):
        without = next(layer for layer in layers if layer.rows <= layer.nonfinite)
        lines.append(
            f"  FAIL: {counted(len(layers) - len(numbers), 'layer')} of {len(layers)} without a "
            f"single row of numbers, first {without.layer}"
        )
    if result.not_run:
        lines.append(
            f"  INCOMPLETE: {counted(len(result.not_run), 'part')} never reached the backend, "
            f"first {result.not_run[0]}"
        )
    if result.table is not None and result.table.finding:
        lines.append(f"  {result.table.finding}")
    one_sided = [layer for layer in layers if layer.one_sided]
    if one_sided:
        elements = sum(layer.one_sided for layer in one_sided)
        lines.append(
            f"  NaN or infinite on one side: {counted(elements, 'element')} of "
            f"{counted(len(one_sided), 'layer')}, first {one_sided[0].layer}"
        )
    both_nan = [layer for layer in layers if layer.nan]
    if both_nan:
        elements = sum(layer.nan for layer in both_nan)
        lines.append(
            f"  NaN on both sides: {counted(elements, 'element')} "
            f"of {counted(len(both_nan), 'layer')}, first {both_nan[0].layer}"
        )
    lines += [f"  {note}" for note in result.notes]
    lines += [
        f"  in {options.output_path}: {counted(len(result.files), 'csv file')}, "
        "….layers (table), ….layers.json",
        f"  next: driftline thresholds --models {options.model} --metrics abs_diff cos_sim "
        f"--file_base {options.output_path} --layer_io",
    ]
    return "".join(f"{printable(line)}\n" for line in lines)
