"""`driftline layer-metrics`: how far every layer of a decoder is from itself on another target."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from driftline.cli import script
from driftline.cli.parsing import Option
from driftline.cli.progress import Progress, on_terminal
from driftline.errors import EXIT_DIFFERENT, EXIT_FINE

if TYPE_CHECKING:
    from driftline.decoding.layers import LayersResult
    from driftline.decoding.options import LayerOptions

_MODEL = "Model"
_PROMPTS = "Prompts and shapes"
_TARGETS = "Targets"
_OUTPUT = "Output"
_HELP = "see driftline layer-metrics --help"


def _spelt(name: str, *more: str) -> tuple[str, ...]:
    """The documented spelling, and ours."""
    return (f"--{name}", *dict.fromkeys((f"--{name.replace('_', '-')}", *more)))


def layer_metrics(
    *,
    mode: Annotated[Literal["generate", "model-forward"] | None, Option()] = None,
    model_paths: Annotated[
        str, Option(_spelt("model_paths", "--model_path"), "PATH[,PATH]", _MODEL)
    ] = "",
    variant: Annotated[str, Option(metavar="ID", group=_MODEL)] = "",
    tokenizer: Annotated[str, Option(metavar="PATH", group=_MODEL)] = "",
    architecture: Annotated[str, Option(metavar="NAME", group=_MODEL)] = "hf_pretrained",
    library: Annotated[Literal["transformers", "fms"] | None, Option(group=_MODEL)] = None,
    fused_weights: Annotated[bool, Option(_spelt("fused_weights"), group=_MODEL)] = False,
    sharegpt_path: Annotated[
        Path | None, Option(_spelt("sharegpt_path"), metavar="FILE", group=_PROMPTS)
    ] = None,
    batch_sizes: Annotated[str, Option(_spelt("batch_sizes"), "N[,N]", _PROMPTS)] = "",
    seq_lengths: Annotated[str, Option(_spelt("seq_lengths"), "N[,N]", _PROMPTS)] = "",
    max_new_tokens: Annotated[str, Option(_spelt("max_new_tokens"), "N[,N]", _PROMPTS)] = "",
    order: Annotated[Literal["head", "doc"], Option(group=_PROMPTS)] = "head",
    reference: Annotated[str, Option(metavar="TARGET", group=_TARGETS)] = "",
    candidate: Annotated[str, Option(metavar="TARGET", group=_TARGETS)] = "",
    default_dtype: Annotated[str, Option(_spelt("default_dtype"), "D", _TARGETS)] = "fp16",
    compile_unit: Annotated[
        Literal["block", "leaf", "model"], Option(_spelt("compile_unit"), group=_TARGETS)
    ] = "block",
    output_path: Annotated[Path | None, Option(_spelt("output_path", "-o"), "DIR", _OUTPUT)] = None,
    elements: Annotated[bool, Option(group=_OUTPUT)] = False,
    quiet: Annotated[bool, Option(("--quiet", "-q"), group=_OUTPUT)] = False,
    force: Annotated[bool, Option(group=_OUTPUT)] = False,
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
    with commas between them: device=cuda,dtype=fp16. MODEL_PATHS, BATCH_SIZES, SEQ_LENGTHS,
    MAX_NEW_TOKENS, OUTPUT_PATH and SHARE_GPT_DATASET_PATH in the environment are taken where the
    option is not given. All combinations of several values are run; what is there already is not
    computed again. Exit code 1 if anything is NaN, or infinite on one side only.

    Args:
        mode: generate: token by token, with a cache; model-forward: one call on the prompts.
        model_paths: Folders of causal language models, or their ids.
        variant: Id that names the model in file names; without --model_paths it is loaded, too.
        tokenizer: Folder or id of the tokenizer; the model's own if not given.
        architecture: hf_pretrained, or the name of an architecture of ibm-fms.
        library: Who loads the model; fms needs the extra driftline[fms]. transformers, unless the
            architecture is one that only ibm-fms knows.
        fused_weights: Leave the joined projections of models of ibm-fms joined.
        sharegpt_path: Prompts: ShareGPT JSON, or a text file with one prompt per line;
            ~/share_gpt.json if not given.
        batch_sizes: Prompts that are run together, 1 if not given.
        seq_lengths: Prompts have half of it to all of it in tokens, and are padded to it; 64 if not
            given.
        max_new_tokens: Iterations of generate; 128 if not given.
        order: How prompts are drawn: head among those that fit, doc as older results were made.
        reference: device=cpu,dtype=fp32 if not given.
        candidate: CUDA if there is one, else the CPU, in --default_dtype if not given.
        default_dtype: Number format of the candidate.
        compile_unit: What a compiled target makes one graph of; nothing inside a graph is seen.
        output_path: Folder of the results; it is made.
        elements: abs_diff files get a line per element; large.
        quiet: Print nothing but errors.
        force: Compute again what is there.
    """
    from driftline.decoding.option_reader import layer_options

    shapes = layer_options(
        {
            "mode": mode,
            "model_paths": model_paths,
            "variant": variant,
            "tokenizer": tokenizer,
            "architecture": architecture,
            "library": library,
            "fused_weights": fused_weights,
            "sharegpt_path": sharegpt_path,
            "batch_sizes": batch_sizes,
            "seq_lengths": seq_lengths,
            "max_new_tokens": max_new_tokens,
            "order": order,
            "reference": reference,
            "candidate": candidate,
            "default_dtype": default_dtype,
            "compile_unit": compile_unit,
            "output_path": output_path,
            "elements": elements,
            "force": force,
        }
    )
    for options in shapes:
        options.check()
    return _run(shapes, quiet=quiet)


def _run(shapes: list[LayerOptions], *, quiet: bool) -> int:
    from driftline.comparison.verdict.judge import judge
    from driftline.decoding.layers import run_layers
    from driftline.decoding.pipeline import Session

    session = script.step("session", Session)
    code = EXIT_FINE
    results: list[LayersResult] = []
    for options in shapes:
        progress = None if quiet else _Bar()
        try:
            result = script.step(
                "result",
                run_layers,
                options,
                session=session,
                judge=judge,
                report=_nothing if quiet else _say,
                progress=progress,
            )
        finally:
            if progress is not None:
                progress.close()
        results.append(result)
        if script.asked():
            continue
        if not quiet and not result.skipped:
            sys.stdout.write(_summary(result))
            sys.stdout.flush()
        if result.nonfinite or any(layer.nan for layer in result.layers):
            code = EXIT_DIFFERENT
    script.end(*results)
    return code


class _Bar:
    """Progress from the first module call on: how long models load says nothing about the rest."""

    def __init__(self) -> None:
        self._shown: Progress | None = None
        self._begun = False

    def __call__(self, done: int, total: int) -> None:
        if not self._begun:
            self._begun = True
            self._shown = on_terminal("module calls")
        if self._shown is not None:
            self._shown(done, total)

    def close(self) -> None:
        if self._shown is not None:
            self._shown.close()


def _say(line: str) -> None:
    print(line, flush=True)


def _nothing(line: str) -> None:
    del line


def _summary(result: LayersResult) -> str:
    from driftline.reporting.formatting import counted, number
    from driftline.reporting.terminal import printable

    options = result.options
    layers = result.layers
    steps = counted(options.new_tokens, "iteration") if options.mode == "generate" else "one call"
    worst = max(layers, key=lambda layer: layer.abs_diff)
    turned = min(layers, key=lambda layer: layer.cos_sim)
    lines = [
        f"{options.prefix}: {counted(len(layers), 'layer')}, "
        f"{counted(sum(layer.rows for layer in layers), 'row')} of {steps} ({options.mode})",
        f"  reference {options.reference}; candidate {options.candidate}",
        f"  largest average abs_diff {number(worst.abs_diff)} at {worst.layer}",
        f"  smallest cos_sim {turned.cos_sim:.8g} at {turned.layer}",
    ]
    if result.table is not None and result.table.finding:
        lines.append(f"  {result.table.finding}")
    bad = result.nonfinite
    if bad:
        rows = sum(layer.nonfinite for layer in bad)
        lines.append(
            f"  NaN or infinite on one side: {counted(rows, 'row')} of "
            f"{counted(len(bad), 'layer')}, first {bad[0].layer}"
        )
    alike = [layer for layer in layers if layer.nan]
    if alike:
        lines.append(
            f"  NaN on both sides, in no figure: {counted(sum(a.nan for a in alike), 'element')} "
            f"of {counted(len(alike), 'layer')}, first {alike[0].layer}"
        )
    lines += [f"  {note}" for note in result.notes]
    lines += [
        f"  in {options.output_path}: {counted(len(result.files), 'csv file')}, "
        "….layers (table), ….layers.json",
        f"  next: driftline thresholds --models {options.model} --metrics abs_diff cos_sim "
        f"--file_base {options.output_path} --layer_io",
    ]
    return "".join(f"{printable(line)}\n" for line in lines)
