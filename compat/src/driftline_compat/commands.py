"""Words of other tools' command lines → words of `driftline`; nothing is computed here."""

from __future__ import annotations

import sys

from driftline.cli.main import main

_LLM = ("dump", "compare", "opcheck", "errcheck")
_USAGE = """usage: ait llm dump|compare|opcheck|errcheck ...
       ait debug compare aclcmp --exec COMMAND

Answered by driftline; each takes the options of the original. More: driftline --help"""


def ait() -> int:
    """`ait llm …` and `ait debug compare aclcmp …`."""
    words = sys.argv[1:]
    asked = not words or words[0] in ("-h", "--help")
    if asked or (words[0] in ("llm", "debug") and words[1:2] in ([], ["-h"], ["--help"])):
        print(_USAGE)
        return 0
    if words[:3] == ["debug", "compare", "aclcmp"]:
        return main(["labels", *words[3:]])
    if words[0] == "llm" and words[1] in _LLM:
        command, rest = words[1], words[2:]
        return main([command, *(_dump(rest) if command == "dump" else rest)])
    print(f"ait: driftline does not answer 'ait {' '.join(words[:3])}'", file=sys.stderr)
    print(_USAGE, file=sys.stderr)
    return 2


def hook_result_checker() -> int:
    """`hook_result_checker.py --pathA A --pathB B`."""
    return main(["check-hooks", *sys.argv[1:]])


def generate_metrics() -> int:
    """`generate_metrics.py --architecture=hf_pretrained --model_path=M …`."""
    return main(["metrics", *sys.argv[1:]])


def generate_layers_metrics() -> int:
    """`generate_layers_metrics.py --mode generate`; model and shapes in the environment."""
    return main(["layer-metrics", *sys.argv[1:]])


def get_thresholds() -> int:
    """`get_thresholds.py --models M --metrics … --file_base DIR [--layer_io]`."""
    return main(["thresholds", *sys.argv[1:]])


def _dump(words: list[str]) -> list[str]:
    """The original writes its own tree, into the current folder unless told otherwise."""
    own = words[: words.index("--")] if "--" in words else words
    before: list[str] = []
    if not _given(own, "--layout"):
        before += ["--layout", "ait"]
    if not _given(own, "-o", "--output"):
        before += ["-o", "."]
    return [*before, *words]


def _given(words: list[str], *names: str) -> bool:
    return any(word == name or word.startswith(f"{name}=") for word in words for name in names)
