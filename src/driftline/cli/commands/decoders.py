"""`driftline metrics` and `layer-metrics`: a decoder on two targets, by tokens and by layers.

The options take the spellings and environment variables of IBM's scripts, which these commands
stand in for.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from driftline import settings
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
from driftline.errors import EXIT_DIFFERENT, EXIT_FINE, BadInput

if TYPE_CHECKING:
    from driftline.decoding.layers_ask import LayersAsk
    from driftline.decoding.layers_run import LayersOutcome
    from driftline.decoding.metrics_ask import MetricsAsk
    from driftline.decoding.metrics_outcome import Outcome
    from driftline.decoding.targets import Target


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True)
class MetricsModel:
    """The model.

    Attributes:
        model_path: Folder of a causal language model, or its id.
        unfuse_weights: Separate projections in models of ibm-fms; transformers' stay as they are.
        extra_get_model_kwargs: More words for the library's own loader.
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
        batch_size: Prompts of one round, 1 if not given; several values are run in turn.
        min_pad_length: Sequence length: prompts have half of it to all of it, and are padded to it.
        max_new_tokens: Tokens generated per prompt and round; 100 if not given.
        num_test_tokens_per_sequence: In all rounds together; one round if not given.
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
        default_dtype: Number format of the candidate; fp16 if not given.
        compile_dynamic: A compiled target is compiled once for all lengths.
        distributed: Under torchrun: split the candidate over the ranks; only rank 0 writes.
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
        topk_per_token: How many of the reference's largest logits the four metrics look at.
        logits: Keep the whole vocabulary, or the largest logits and their logsumexp.
        skip_computation: Only score the logits that are there.
        force: Compute again what is there.
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

    The reference generates greedily; the candidate is forced along the reference's tokens, so that
    both read the same text. Per token before the end of the text: ce, prob_mean, prob_std and
    diff_mean, one csv each, and a table (….tokens.parquet) with further scores over the whole
    vocabulary. Both sides' logits are kept in ….out folders. After an interruption the same command
    goes on where it was. Baselines become thresholds with `driftline thresholds`.

    A target is device=cpu|cuda|npu|aiu, dtype=fp32|fp16|bf16 and compile=BACKEND of torch.compile,
    with commas between them: device=cuda,dtype=fp16,compile=inductor. The candidate is CUDA if
    there is one, else the CPU, in --default_dtype, if not given. MODEL_PATH, DS_PATH, BATCH_SIZES,
    SEQ_LENS, MAX_NEW_TOKENS and DEFAULT_TYPES in the environment are taken where the option is not
    given. With --jobs or --executor, shapes are shared out; each process loads the models for
    itself.
    """
    from driftline.decoding.metrics_ask import MetricsAsk, check
    from driftline.decoding.targets import default_targets, dtype_name, parse_target

    if output.output_dir is None:
        raise BadInput("`driftline metrics` needs --output_dir", hint=_see_help("metrics"))
    # Asked for first: it is the one shape without a sensible default.
    lengths = _metrics_numbers("min_pad_length", shapes.min_pad_length, "")
    if not lengths:
        raise BadInput(
            "`driftline metrics` needs --min_pad_length, the sequence length",
            hint="64 and 2048 are usual; SEQ_LENS in the environment is taken as well",
        )
    dtypes = [
        dtype_name(word)
        for word in _words(targets.default_dtype or settings.metrics_variable("default_dtype"))
    ] or ["fp16"]
    asks: list[MetricsAsk] = []
    prompts = decoder.sharegpt_path or _path(settings.metrics_variable("sharegpt_path"))
    for dtype in dtypes:
        if decoder.candidate:
            candidate = parse_target(decoder.candidate, dtype=dtype)
        else:
            _, candidate = default_targets(dtype)
        reference = parse_target(decoder.reference)
        asks += [
            MetricsAsk(
                model_path=model.model_path
                or ("" if loading.variant else settings.metrics_variable("model_path")),
                tokenizer=decoder.tokenizer,
                prompts=prompts,
                output_dir=output.output_dir,
                batch_size=batch_size,
                length=length,
                new_tokens=new_tokens,
                tokens_per_sequence=shapes.num_test_tokens_per_sequence,
                reference=_dynamic(reference, targets.compile_dynamic),
                candidate=_dynamic(candidate, targets.compile_dynamic),
                variant=loading.variant,
                architecture=loading.architecture,
                library=decoder.library or "",
                unfuse_weights=model.unfuse_weights,
                extra=_loader_arguments(model.extra_get_model_kwargs or []),
                topk=output.topk_per_token,
                keep=output.logits,
                order=loading.order,
                skip_computation=output.skip_computation,
                distributed=targets.distributed,
                force=output.force,
            )
            for new_tokens in _metrics_numbers("max_new_tokens", shapes.max_new_tokens, "100")
            for length in lengths
            for batch_size in _metrics_numbers("batch_size", shapes.batch_size, "1")
        ]
    for ask in asks:
        check(ask)
    return _share_metrics(asks, workers) if workers.shared else _run_metrics(asks)


def _run_metrics(asks: list[MetricsAsk]) -> int:
    from driftline.decoding.metrics_run import Models, run_metrics

    models = script.step("models", Models, asks[0])
    outcomes: list[Outcome] = []
    for ask in asks:
        # Of the ranks of a job only one writes, and only one shows a bar.
        quiet = script.is_script() or not models.job.writes
        with progress_bar("tokens", quiet=quiet) as bar:
            outcome = script.step(
                "outcome", run_metrics, ask, say=_print_message, models=models, watch=bar
            )
        outcomes.append(outcome)
        if not script.is_script() and models.job.writes and not outcome.skipped:
            sys.stdout.write(_metrics_summary(outcome, ask))
    script.end(*outcomes)
    models.job.leave()
    return EXIT_FINE


def _share_metrics(asks: list[MetricsAsk], workers: WorkerOptions) -> int:
    from driftline.decoding.fanning import run_shapes

    def print_outcome(ask: MetricsAsk, outcome: Outcome) -> None:
        if not outcome.skipped:
            sys.stdout.write(_metrics_summary(outcome, ask))
            sys.stdout.flush()

    outcomes = script.step(
        "outcomes",
        run_shapes,
        asks,
        jobs=workers.jobs,
        executor=workers.executor,
        say=_print_message,
        ready=None if script.is_script() else print_outcome,
    )
    script.end(outcomes)
    return EXIT_FINE


def _print_message(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _dynamic(target: Target, wanted: bool) -> Target:
    return target._replace(dynamic=bool(target.compile) and (wanted or target.dynamic))


def _see_help(command: str) -> str:
    return f"see driftline {command} --help"


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _metrics_numbers(option: str, text: str, default: str) -> list[int]:
    """Numbers of an option of `metrics`, else of its environment variable, else the default."""
    text_or_default = text or settings.metrics_variable(option) or default
    name = f"--{option}" if text else settings.METRICS_VARIABLES[option]
    return _numbers(name, text_or_default, "metrics")


def _layer_numbers(option: str, text: str, default: str) -> list[int]:
    """The same for `layer-metrics`, whose variables are other ones."""
    text_or_default = text or settings.layer_variable(option) or default
    name = f"--{option}" if text else settings.LAYER_VARIABLES[option]
    numbers = _numbers(name, text_or_default, "layer-metrics")
    if not numbers:
        raise BadInput(f"--{option} names no number", hint=_see_help("layer-metrics"))
    return numbers


def _numbers(name: str, text: str, command: str) -> list[int]:
    words = _words(text)
    for word in words:
        if not word.isdecimal():
            raise BadInput(f"{name} takes whole numbers, not '{word}'", hint=_see_help(command))
    return list(dict.fromkeys(int(word) for word in words))


def _loader_arguments(words: list[str]) -> Mapping[str, Any]:
    import ast

    arguments: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise BadInput(
                f"--extra_get_model_kwargs takes name=value, not '{word}'",
                hint=_see_help("metrics"),
            )
        try:
            arguments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):  # a plain text, as most are
            arguments[name] = value
    return arguments


def _metrics_summary(outcome: Outcome, ask: MetricsAsk) -> str:
    from driftline.decoding.metrics_outcome import figures
    from driftline.reporting.formatting import counted, number

    rounds = counted(outcome.rounds, "round")
    lines = [
        f"{outcome.prefix}: {counted(outcome.tokens, 'token')} of {rounds}",
        "  of the logits that were saved"
        if ask.skip_computation
        else f"  reference {ask.reference}; candidate {ask.candidate}",
        f"  {'metric':<16}{'mean':>12}{'99 %':>12}{'largest':>12}",
    ]
    for name, *numbers in figures(outcome):
        lines.append(f"  {name:<16}" + "".join(f"{number(figure):>12}" for figure in numbers))
    agreed = int(outcome.columns["top1_agree"].sum())
    lines.append(f"  the largest logit agrees at {agreed} of {outcome.tokens} tokens")
    if outcome.first_other is not None:
        seed, prompt, position = outcome.first_other
        lines[-1] += f"; first not: round {seed}, prompt {prompt}, token {position}"
    if not outcome.companions:
        lines.append("  whole-vocabulary scores are left out: only the largest logits are saved")
    lines += [
        f"  in {outcome.folder}: four csv files, .tokens.parquet, both sides' .out folders",
        f"  next: driftline thresholds --models {ask.model} --metrics diff_mean ce "
        f"--file_base {outcome.folder}",
    ]
    return "\n".join(lines) + "\n"


@Parameter(name="*", group=MODEL)
@dataclass(frozen=True)
class LayersModel:
    """The models.

    Attributes:
        model_paths: Folders of causal language models, or their ids.
        fused_weights: Leave the joined projections of models of ibm-fms joined.
    """

    model_paths: Annotated[str, spelt("model_paths", "PATH[,PATH]", "--model_path")] = ""
    fused_weights: Annotated[bool, spelt("fused_weights")] = False


@Parameter(name="*", group=PROMPTS)
@dataclass(frozen=True)
class LayersShapes:
    """Which shapes are run.

    Attributes:
        batch_sizes: Prompts that are run together, 1 if not given.
        seq_lengths: Prompts have half of it to all of it in tokens, and are padded to it; 64 if not
            given.
        max_new_tokens: Iterations of generate; 128 if not given.
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
        compile_unit: What a compiled target makes one graph of; nothing inside a graph is seen.
    """

    default_dtype: Annotated[str, spelt("default_dtype", "D")] = "fp16"
    compile_unit: Annotated[Literal["block", "leaf", "model"], spelt("compile_unit")] = "block"


@Parameter(name="*", group=OUTPUT)
@dataclass(frozen=True)
class LayersOutput:
    """What is written and printed.

    Attributes:
        output_path: Folder of the results; it is made.
        elements: abs_diff files get a line per element; large.
        quiet: Print nothing but errors.
        force: Compute again what is there.
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
    """Run a decoder on two targets and compare what every layer gives.

        driftline layer-metrics --mode generate --model_paths M --batch_sizes 1
            --seq_lengths 64 --max_new_tokens 128 --sharegpt_path share_gpt.json
            --output_path out

    Both targets read the same prompts; with --mode generate they go on token by token, the
    candidate along the reference's tokens, and every iteration counts. Per layer two csv files:
    abs_diff (mean |difference|) and cos_sim (cosine), a line per token and output of the layer.
    Padding does not count. ….layers is the same as a comparison table, for `driftline show` and
    `driftline check`. Files become thresholds with `driftline thresholds --layer_io`.

    A target is device=cpu|cuda|npu|aiu, dtype=fp32|fp16|bf16 and compile=BACKEND of torch.compile,
    with commas between them: device=cuda,dtype=fp16. The candidate is CUDA if there is one, else
    the CPU, in --default_dtype, if not given. MODEL_PATHS, BATCH_SIZES, SEQ_LENGTHS,
    MAX_NEW_TOKENS, OUTPUT_PATH and SHARE_GPT_DATASET_PATH in the environment are taken where the
    option is not given; without any, prompts are in ~/share_gpt.json. All combinations of several
    values are run; what is there already is not computed again. Exit code 1 if anything is NaN, or
    infinite on one side only.

    Args:
        mode: generate: token by token, with a cache; model-forward: one call on the prompts.
    """
    if mode is None:
        raise BadInput(
            "`driftline layer-metrics` needs --mode", hint="--mode generate, or model-forward"
        )
    from driftline.decoding.layers_ask import LayersAsk, check
    from driftline.decoding.targets import default_targets, dtype_name, parse_target

    folder = output.output_path or _path(settings.layer_variable("output_path"))
    if folder is None:
        raise BadInput(
            "`driftline layer-metrics` needs --output_path",
            hint="OUTPUT_PATH in the environment is taken as well",
        )
    variant = loading.variant
    models = _words(
        model.model_paths or ("" if variant else settings.layer_variable("model_paths"))
    )
    if not models and not variant:
        raise BadInput(
            "no model is named", hint="give --model_paths, or MODEL_PATHS in the environment"
        )
    if variant and len(models) > 1:
        raise BadInput(
            f"--variant names one model, and {len(models)} are given",
            hint=_see_help("layer-metrics"),
        )
    prompts = decoder.sharegpt_path or Path(
        settings.layer_variable("sharegpt_path") or settings.home_prompts()
    )
    dtype = dtype_name(targets.default_dtype)
    reference = parse_target(decoder.reference)
    if decoder.candidate:
        candidate = parse_target(decoder.candidate, dtype=dtype)
    else:
        _, candidate = default_targets(dtype)
    asks = [
        LayersAsk(
            model_path=model_path,
            prompts=prompts,
            output_path=folder,
            mode=mode,
            tokenizer=decoder.tokenizer,
            batch_size=batch_size,
            length=length,
            new_tokens=new_tokens,
            reference=reference,
            candidate=candidate,
            variant=variant,
            architecture=loading.architecture,
            library=decoder.library or "",
            unfuse_weights=not model.fused_weights,
            order=loading.order,
            elements=output.elements,
            compiled=targets.compile_unit,
            force=output.force,
        )
        # A variant alone names the model; the loader knows what to do without a path.
        for model_path in models or [""]
        for length in _layer_numbers("seq_lengths", shapes.seq_lengths, "64")
        for batch_size in _layer_numbers("batch_sizes", shapes.batch_sizes, "1")
        for new_tokens in _layer_numbers("max_new_tokens", shapes.max_new_tokens, "128")
    ]
    for ask in asks:
        check(ask)
    return _run_layers(asks, quiet=output.quiet)


def _run_layers(asks: list[LayersAsk], *, quiet: bool) -> int:
    from driftline.comparison.verdict.judge import judge
    from driftline.decoding.layers_run import LayerModels, run_layers

    models = script.step("models", LayerModels)
    code = EXIT_FINE
    outcomes: list[LayersOutcome] = []
    for ask in asks:
        with progress_bar("module calls", quiet=quiet) as progress:
            outcome = script.step(
                "outcome",
                run_layers,
                ask,
                models=models,
                judge=judge,
                say=_print_nothing if quiet else _print_line,
                progress=progress,
            )
        outcomes.append(outcome)
        if script.is_script():
            continue
        if not quiet and not outcome.skipped:
            sys.stdout.write(_layers_summary(outcome))
            sys.stdout.flush()
        if outcome.nonfinite or any(layer.nan for layer in outcome.layers):
            code = EXIT_DIFFERENT
    script.end(*outcomes)
    return code


def _print_line(line: str) -> None:
    print(line, flush=True)


def _print_nothing(line: str) -> None:
    del line


def _layers_summary(outcome: LayersOutcome) -> str:
    from driftline.reporting.formatting import counted, number
    from driftline.reporting.terminal import printable

    ask = outcome.ask
    layers = outcome.layers
    steps = counted(ask.new_tokens, "iteration") if ask.mode == "generate" else "one call"
    farthest = max(layers, key=lambda layer: layer.abs_diff)
    most_turned = min(layers, key=lambda layer: layer.cos_sim)
    lines = [
        f"{ask.prefix}: {counted(len(layers), 'layer')}, "
        f"{counted(sum(layer.rows for layer in layers), 'row')} of {steps} ({ask.mode})",
        f"  reference {ask.reference}; candidate {ask.candidate}",
        f"  largest average abs_diff {number(farthest.abs_diff)} at {farthest.layer}",
        f"  smallest cos_sim {most_turned.cos_sim:.8g} at {most_turned.layer}",
    ]
    if outcome.table is not None and outcome.table.finding:
        lines.append(f"  {outcome.table.finding}")
    nonfinite = outcome.nonfinite
    if nonfinite:
        rows = sum(layer.nonfinite for layer in nonfinite)
        lines.append(
            f"  NaN or infinite on one side: {counted(rows, 'row')} of "
            f"{counted(len(nonfinite), 'layer')}, first {nonfinite[0].layer}"
        )
    both_nan = [layer for layer in layers if layer.nan]
    if both_nan:
        elements = sum(layer.nan for layer in both_nan)
        lines.append(
            f"  NaN on both sides, in no figure: {counted(elements, 'element')} "
            f"of {counted(len(both_nan), 'layer')}, first {both_nan[0].layer}"
        )
    lines += [f"  {note}" for note in outcome.notes]
    lines += [
        f"  in {ask.output_path}: {counted(len(outcome.files), 'csv file')}, "
        "….layers (table), ….layers.json",
        f"  next: driftline thresholds --models {ask.model} --metrics abs_diff cos_sim "
        f"--file_base {ask.output_path} --layer_io",
    ]
    return "".join(f"{printable(line)}\n" for line in lines)
