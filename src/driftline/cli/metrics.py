"""`driftline metrics`: how far a decoder on one target is from the same decoder on another."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.errors import BadInput

if TYPE_CHECKING:
    from driftline.decoding.metrics_ask import MetricsAsk
    from driftline.decoding.metrics_outcome import Outcome
    from driftline.decoding.targets import Target

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
    from driftline import settings
    from driftline.decoding.metrics_ask import MetricsAsk
    from driftline.decoding.targets import default_targets, dtype_name, parse_target

    if output_dir is None:
        raise BadInput("`driftline metrics` needs --output_dir", hint=_HELP)
    lengths = _numbers("min_pad_length", min_pad_length, "")
    if not lengths:
        raise BadInput(
            "`driftline metrics` needs --min_pad_length, the sequence length",
            hint="64 and 2048 are usual; SEQ_LENS in the environment is taken as well",
        )
    dtypes = [
        dtype_name(word)
        for word in _words(default_dtype or settings.metrics_variable("default_dtype"))
    ] or ["fp16"]
    asks: list[MetricsAsk] = []
    prompts = sharegpt_path or _path(settings.metrics_variable("sharegpt_path"))
    for dtype in dtypes:
        if candidate:
            right = parse_target(candidate, dtype=dtype)
        else:
            _, right = default_targets(dtype)
        left = parse_target(reference)
        asks += [
            MetricsAsk(
                model_path=model_path
                or ("" if variant else settings.metrics_variable("model_path")),
                tokenizer=tokenizer,
                prompts=prompts,
                output_dir=output_dir,
                batch_size=batch,
                length=length,
                new_tokens=new,
                tokens_per_sequence=num_test_tokens_per_sequence,
                reference=_dynamic(left, compile_dynamic),
                candidate=_dynamic(right, compile_dynamic),
                variant=variant,
                architecture=architecture,
                library=library or "",
                unfuse_weights=unfuse_weights,
                extra=_kwargs(extra_get_model_kwargs or []),
                topk=topk_per_token,
                keep=logits,
                order=order,
                skip_computation=skip_computation,
                distributed=distributed,
                force=force,
            )
            for new in _numbers("max_new_tokens", max_new_tokens, "100")
            for length in lengths
            for batch in _numbers("batch_size", batch_size, "1")
        ]
    if jobs is not None or executor is not None:
        return _run_shared(asks, jobs, executor)
    return _run(asks)


_HELP = "see driftline metrics --help"


def _run(asks: list[MetricsAsk]) -> int:
    from driftline.decoding.metrics_ask import check
    from driftline.decoding.metrics_run import Models, run_metrics

    for ask in asks:
        check(ask)
    models = script.step("models", Models, asks[0])
    outcomes: list[Outcome] = []
    for ask in asks:
        watch = None if script.asked() else _watch(models.job.writes)
        outcome = script.step("outcome", run_metrics, ask, say=_say, models=models, watch=watch)
        outcomes.append(outcome)
        if not script.asked() and models.job.writes and not outcome.skipped:
            sys.stdout.write(_summary(outcome, ask))
    script.end(*outcomes)
    models.job.leave()
    return 0


def _run_shared(asks: list[MetricsAsk], jobs: int | None, executor: str | None) -> int:
    from driftline.decoding.fanning import run_shapes
    from driftline.decoding.metrics_ask import check

    def ready(ask: MetricsAsk, outcome: Outcome) -> None:
        if not outcome.skipped:
            sys.stdout.write(_summary(outcome, ask))
            sys.stdout.flush()

    for ask in asks:
        check(ask)
    told = None if script.asked() else ready
    outcomes = script.step(
        "outcomes", run_shapes, asks, jobs=jobs, executor=executor, say=_say, ready=told
    )
    script.end(outcomes)
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


def _dynamic(target: Target, wanted: bool) -> Target:
    return target._replace(dynamic=bool(target.compile) and (wanted or target.dynamic))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _numbers(option: str, text: str, default: str) -> list[int]:
    from driftline import settings

    said = text or settings.metrics_variable(option) or default
    numbers: list[int] = []
    for word in _words(said):
        if not word.isdigit():
            named = f"--{option}" if text else settings.METRICS_VARIABLES[option]
            raise BadInput(f"{named} takes whole numbers, not '{word}'", hint=_HELP)
        numbers.append(int(word))
    return list(dict.fromkeys(numbers))


def _kwargs(words: list[str]) -> dict[str, Any]:
    import ast

    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.isidentifier():
            raise BadInput(f"--extra_get_model_kwargs takes name=value, not '{word}'", hint=_HELP)
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def _summary(outcome: Outcome, ask: MetricsAsk) -> str:
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
