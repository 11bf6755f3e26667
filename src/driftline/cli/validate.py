"""`driftline validate`: is a decoder on a device still the decoder it was?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.errors import EXIT_DIFFERENT, EXIT_FINE, BadInput

if TYPE_CHECKING:
    from driftline.decoding.options import ValidateOptions
    from driftline.decoding.pipeline import Session
    from driftline.decoding.validate import Verdict

_MODEL = "Model"
_SHAPES = "Prompts and shapes"
_TARGETS = "Targets"
_LIMITS = "Limits"
_OUTPUT = "Output"
_SPEED = "Speed"
Format = Literal["table", "markdown", "github", "junit"]


def _spelt(name: str) -> tuple[str, ...]:
    """The documented spelling, and ours."""
    return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


def validate(
    *,
    model_paths: Annotated[str, Option(_spelt("model_paths"), "M[,M]", _MODEL)] = "",
    tokenizer: Annotated[str, Option(metavar="PATH", group=_MODEL)] = "",
    library: Annotated[Literal["transformers", "fms"] | None, Option(group=_MODEL)] = None,
    from_model_configuration: Annotated[
        Path | None, Option(_spelt("from_model_configuration"), "FILE", _MODEL)
    ] = None,
    from_model_configuration_frequency: Annotated[
        str, Option(_spelt("from_model_configuration_frequency"), "N", _MODEL)
    ] = "",
    micro_layers: Annotated[str, Option(_spelt("micro_layers"), "N", _MODEL)] = "",
    micro_weights: Annotated[
        Literal["random", "local"] | None, Option(_spelt("micro_weights"), group=_MODEL)
    ] = None,
    micro_models_home: Annotated[
        Path | None, Option(_spelt("micro_models_home"), "DIR", _MODEL)
    ] = None,
    sharegpt_path: Annotated[Path | None, Option(_spelt("sharegpt_path"), "FILE", _SHAPES)] = None,
    batch_sizes: Annotated[str, Option(_spelt("batch_sizes"), "N[,N]", _SHAPES)] = "",
    seq_lengths: Annotated[str, Option(_spelt("seq_lengths"), "N[,N]", _SHAPES)] = "",
    max_new_tokens: Annotated[str, Option(_spelt("max_new_tokens"), "N[,N]", _SHAPES)] = "",
    cumulative_test_tokens_per_sequence: Annotated[
        str, Option(_spelt("cumulative_test_tokens_per_sequence"), "N", _SHAPES)
    ] = "",
    reference: Annotated[str, Option(metavar="TARGET", group=_TARGETS)] = "",
    candidate: Annotated[str, Option(metavar="TARGET", group=_TARGETS)] = "",
    attn_type: Annotated[str, Option(_spelt("attn_type"), "NAME", _TARGETS)] = "",
    distributed: Annotated[bool, Option(group=_TARGETS)] = False,
    metrics_threshold: Annotated[str, Option(_spelt("metrics_threshold"), "CE,DIFF", _LIMITS)] = "",
    thresholds: Annotated[Path | None, Option(metavar="FILE", group=_LIMITS)] = None,
    threshold_table: Annotated[
        Path | None, Option(_spelt("threshold_table"), "FILE", _LIMITS)
    ] = None,
    failure_threshold: Annotated[str, Option(_spelt("failure_threshold"), "SHARE", _LIMITS)] = "",
    skip_assertions: Annotated[str, Option(_spelt("skip_assertions"), "NAME[,NAME]", _LIMITS)] = "",
    force_validation_level_1: Annotated[
        bool, Option(_spelt("force_validation_level_1"), group=_LIMITS)
    ] = False,
    validation_info_dir: Annotated[
        Path | None, Option(_spelt("validation_info_dir"), "DIR", _OUTPUT)
    ] = None,
    save_validation_info_outputs: Annotated[
        bool, Option(_spelt("save_validation_info_outputs"), group=_OUTPUT)
    ] = False,
    output: Annotated[
        Path | None, Option(names=("--output", "-o"), metavar="DIR", group=_OUTPUT)
    ] = None,
    explain: Annotated[bool, Option(group=_OUTPUT)] = False,
    timing: Annotated[Literal["e2e", "per-token"] | None, Option(group=_OUTPUT)] = None,
    format: Annotated[Format, Option(group=_OUTPUT)] = "table",
    jobs: Annotated[int | None, Option(metavar="N", group=_SPEED)] = None,
    executor: Annotated[str | None, Option(metavar="ray[://HOST:PORT]", group=_SPEED)] = None,
) -> int:
    """Check that a decoder on a device says what it says on a trusted one, or nearly.

        driftline validate --model_paths=M --sharegpt_path=share_gpt.json --batch_sizes=1
            --seq_lengths=64 --max_new_tokens=128 --thresholds=out/M-thresholds.json

    Level 0: both generate freely, and all tokens are equal. If they are not, level 1: the candidate
    is forced along the reference's tokens, and a token fails whose ce or mean difference reaches
    its limit; the share of failing tokens must stay below --failure_threshold. Exit code 0: passed,
    1: failed. The same check is a pytest suite: pytest --pyargs driftline.suites.test_decoders.

    Every option that is not given is taken from the environment: FMS_TEST_SHAPES_COMMON_BATCH_SIZES
    for --batch_sizes, FMS_TEST_SHAPES_METRICS_THRESHOLD for --metrics_threshold, and so on, also
    spelt DRIFTLINE_TEST_SHAPES_…; prompts from SHARE_GPT_DATASET_PATH.

    Args:
        model_paths: Folders or ids of causal language models.
        tokenizer: Folder or id of the tokenizer; the model's own if not given.
        library: Who loads the models; transformers if not given.
        from_model_configuration: File with a JSON object per line that names a model and its
            limits; replaces --model_paths.
        from_model_configuration_frequency: Of that file, lines of at most this frequency; 0 if not
            given.
        micro_layers: Test a micro model: only so many layers of each model.
        micro_weights: Draw the micro model's weights (random), or keep those of its layers (local).
        micro_models_home: Folder with trained micro models, under the names of the whole ones.
        sharegpt_path: Prompts: ShareGPT JSON, or a text file with one prompt per line.
        batch_sizes: Prompts of one round; 1,2,4,8 if not given.
        seq_lengths: Sequence lengths; 64,2048 if not given.
        max_new_tokens: Tokens generated per prompt and round; 128 if not given.
        cumulative_test_tokens_per_sequence: In all rounds of level 1; 1024 if not given.
        reference: device=cpu,dtype=fp32 if not given.
        candidate: The AIU if its package is there, else CUDA, else the CPU, in fp16, if not given.
        attn_type: sdpa (default) or math; of ibm-fms, which then loads the models, paged, math_fp8
            or paged_fp8.
        distributed: Under torchrun: split the candidate over the ranks.
        metrics_threshold: Limits of ce and mean difference; win over all others.
        thresholds: File of `driftline thresholds` with the limits.
        threshold_table: Your own JSON table of limits by model; made, with the documented values,
            where there is none.
        failure_threshold: Share of failing tokens that is too much; 0.01 if not given.
        skip_assertions: ce or mean_diff: told, not judged.
        force_validation_level_1: Run level 1 even if all tokens are equal.
        validation_info_dir: Folder with saved outputs, such as `driftline metrics` writes: those of
            the reference are used, not computed.
        save_validation_info_outputs: Save both sides' outputs there.
        output: Also write what was found there: verdict, rates and scores of every token, and with
            --explain the layers; for `driftline report DIR`.
        explain: On failure compare all layers on the text before the first failing token.
        timing: Tell how long generating takes.
        format: table for people, line by line; markdown for reviews, github (annotations and a step
            summary) and junit for CI print the result at the end, and the lines go to stderr.
        jobs: Share the shapes out among so many processes; each loads the models for itself.
        executor: Share them out on a Ray cluster: the one this machine is in, or one elsewhere.
            All machines must see the models and the prompts.
    """
    from driftline import settings
    from driftline.decoding.option_reader import validate_options, validate_words

    read = validate_words(
        {
            "model_paths": model_paths,
            "tokenizer": tokenizer,
            "library": library,
            "from_model_configuration": from_model_configuration,
            "from_model_configuration_frequency": from_model_configuration_frequency,
            "micro_layers": micro_layers,
            "micro_weights": micro_weights,
            "micro_models_home": micro_models_home,
            "sharegpt_path": sharegpt_path,
            "batch_sizes": batch_sizes,
            "seq_lengths": seq_lengths,
            "max_new_tokens": max_new_tokens,
            "cumulative_test_tokens_per_sequence": cumulative_test_tokens_per_sequence,
            "reference": reference,
            "candidate": candidate,
            "attn_type": attn_type,
            "distributed": distributed,
            "metrics_threshold": metrics_threshold,
            "thresholds": thresholds,
            "threshold_table": threshold_table,
            "failure_threshold": failure_threshold,
            "skip_assertions": skip_assertions,
            "force_validation_level_1": force_validation_level_1,
            "validation_info_dir": validation_info_dir,
            "save_validation_info_outputs": save_validation_info_outputs,
            "timing": timing,
        }
    )
    shapes = validate_options(read, report=_say if settings.job_place().rank == 0 else _nothing)
    if not shapes:
        raise BadInput(
            "no model is named",
            hint="give --model_paths, or set FMS_TEST_SHAPES_COMMON_MODEL_PATHS",
        )
    wanted = explain or read("EXPLAIN") == "1"
    return _run(shapes, (jobs, executor), explain=wanted, format=format, output=output)


def _run(
    shapes: list[ValidateOptions],
    who: tuple[int | None, str | None],
    *,
    explain: bool,
    format: Format,
    output: Path | None,
) -> int:
    from driftline.decoding.distributed import join_job
    from driftline.decoding.pipeline import Session
    from driftline.decoding.validate import SPLIT_NOTE, lines_of
    from driftline.decoding.validate import validate as check

    shared = who != (None, None)
    if script.asked():
        _write_down(shapes, who, output)
    session = Session()
    failed: list[str] = []
    verdicts: list[Verdict] = []
    job = join_job(shapes[0].distributed)
    speak = _say if format == "table" else _aside
    say = speak if job.writes else _nothing

    def tell(options: ValidateOptions, verdict: Verdict) -> None:
        verdicts.append(verdict)
        for line in lines_of(verdict, session.tokenizer(options)):
            say(line)
        if output is not None and job.writes:
            from driftline.decoding.files.validation_files import write_validation

            write_validation(verdict, output, session.tokenizer(options))
        if verdict.passed:
            say(f"PASSED {options.id} in {verdict.seconds:.1f} s")
            return
        say(f"FAILED {options.id} - {verdict.complaint}")
        failed.append(options.id)
        if explain and options.splits(job.size):
            say(SPLIT_NOTE)
        elif explain and job.writes:
            stream = sys.stdout if format == "table" else sys.stderr
            _explain(options, verdict, session, stream, output)

    if shared:
        from driftline.decoding.validate import validate_shapes

        validate_shapes(shapes, jobs=who[0], executor=who[1], report=speak, ready=tell)
    else:
        for options in shapes:
            tell(options, check(options, report=speak, session=session))
    if output is not None and job.writes:
        say(f"written to {output}; driftline report {output} -o report.html shows it")
    if len(shapes) > 1:
        say(f"{len(shapes) - len(failed)} of {len(shapes)} passed")
    if job.writes and format != "table":
        _print(verdicts, format)
    job.leave()
    script.end(*([verdicts] if shared else verdicts))
    # Rank 0 speaks for all: when another one fails first, torchrun stops it in mid-sentence.
    return EXIT_DIFFERENT if failed and job.writes else EXIT_FINE


def _write_down(
    shapes: list[ValidateOptions], who: tuple[int | None, str | None], output: Path | None
) -> None:
    """The same calls, for `--python`."""
    from driftline.decoding.pipeline import Session
    from driftline.decoding.validate import validate, validate_shapes, write_verdicts

    if who != (None, None):
        found = script.step("verdicts", validate_shapes, shapes, jobs=who[0], executor=who[1])
        if output is not None:
            script.act(write_verdicts, found, output)
        script.end(found)
    session = script.step("session", Session)
    verdicts: list[Verdict] = []
    for options in shapes:
        verdicts.append(script.step("verdict", validate, options, session=session))
        if output is not None:
            from driftline.decoding.files.validation_files import write_validation

            tokenizer = script.part(Session.tokenizer, session, options)
            script.act(write_validation, verdicts[-1], output, tokenizer)
    script.end(*verdicts)


def _print(verdicts: list[Verdict], format: Literal["markdown", "github", "junit"]) -> None:
    from driftline.decoding.validate import lines_of
    from driftline.reporting import markdown, writers
    from driftline.reporting.ci import of_verdicts

    found = of_verdicts(verdicts, lines_of)
    if format == "markdown":
        sys.stdout.write(markdown.paint(found.summary))
    else:
        writers.checks(found, format, sys.stdout)


def _explain(
    options: ValidateOptions,
    verdict: Verdict,
    session: Session,
    stream: TextIO,
    output: Path | None,
) -> None:
    from driftline.comparison.verdict.judge import judge
    from driftline.decoding.explain import explain
    from driftline.reporting import writers

    if verdict.first is not None:
        print("layers, on the text before the first failing token:", file=stream, flush=True)
        if output is None:
            writers.table(judge(explain(options, verdict.first, session)), "table", stream)
            return
        from driftline.decoding.explain import write_layers
        from driftline.decoding.files.names import LAYER_TABLE

        table = judge(write_layers(options, verdict.first, session, output))
        table.write(output / f"{options.prefix}{LAYER_TABLE}", force=True)
        writers.table(table, "table", stream)


def _say(line: str) -> None:
    print(line, flush=True)


def _aside(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _nothing(line: str) -> None:
    del line
