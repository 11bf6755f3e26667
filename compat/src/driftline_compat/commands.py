"""Commands of other tools, answered by `driftline`: only words are translated."""

from __future__ import annotations

import sys

from driftline.cli.commands.setup import run_script
from driftline.cli.main import main

_LLM = ("dump", "compare", "opcheck", "errcheck")
_USAGE = """usage: ait llm dump|compare|opcheck|errcheck ...
       ait debug compare aclcmp --exec COMMAND

Answered by driftline; each takes the options of the original. More: driftline --help"""


def ait() -> int:
    """`ait llm …` and `ait debug compare aclcmp …`."""
    words = sys.argv[1:]
    # Help of a group of commands is asked for by its name alone, or with -h.
    asked = words[1:2] if words[:1] in (["llm"], ["debug"]) else words[:1]
    if asked in ([], ["-h"], ["--help"]):
        print(_USAGE)
        return 0
    if words[:3] == ["debug", "compare", "aclcmp"]:
        return main(["labels", *words[3:]])
    if words[0] == "llm" and words[1] in _LLM:
        command, rest = words[1], words[2:]
        return main([command, *(_dump_words(rest) if command == "dump" else rest)])
    print(f"ait: driftline does not answer 'ait {' '.join(words[:3])}'", file=sys.stderr)
    print(_USAGE, file=sys.stderr)
    return 2


def hook_result_checker() -> int:
    """`hook_result_checker.py --pathA A --pathB B`."""
    return run_script("hook_result_checker", sys.argv[1:])


def generate_metrics() -> int:
    """`generate_metrics.py --architecture=hf_pretrained --model_path=M …`."""
    return run_script("generate_metrics", sys.argv[1:])


def generate_layers_metrics() -> int:
    """`generate_layers_metrics.py --mode generate`; model and shapes in the environment."""
    return run_script("generate_layers_metrics", sys.argv[1:])


def get_thresholds() -> int:
    """`get_thresholds.py --models M --metrics … --file_base DIR [--layer_io]`."""
    return run_script("get_thresholds", sys.argv[1:])


def _dump_words(words: list[str]) -> list[str]:
    """With the defaults of the original: its own tree, in the current folder."""
    own_words = words[: words.index("--")] if "--" in words else words
    defaults: list[str] = []
    if not _has_option(own_words, "--layout"):
        defaults += ["--layout", "ait"]
    if not _has_option(own_words, "-o", "--output"):
        defaults += ["-o", "."]
    return [*defaults, *words]


def _has_option(words: list[str], *names: str) -> bool:
    return any(word == name or word.startswith(f"{name}=") for word in words for name in names)
