"""Makes the files beside this one with the installed Driftline, from the programs in `programs/`.

    python tests/data/written_by_0_1_0/make.py OUT

They were made once, by version 0.1.0, and show that later versions still read what it wrote: do not
make them again. The tests do not run this; it says how every file came to be, and makes examples
of another version when there is something new to keep. It takes some minutes, needs torch, Paddle,
ONNX Runtime and transformers, and writes into the folder OUT, which must not exist yet.

Text files are kept as they are, except that the working folder is written `@FOLDER@` and the
Python's folder `@BIN@`. Files of tensors have wide reserved headers and are compressed (`.gz`);
`tests/old_files.py` puts both back. In two of these (the ONNX model, a Parquet file) paths
of the machine were replaced by others of equal length after the fact. The run `killed` was made
once more, by itself, after the others.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
DATA = HERE.parent
BIN = Path(sys.executable).parent
TEXT = (".json", ".jsonl", ".csv", ".toml", ".txt", ".md", ".py", ".xml")
PACKED = (".safetensors", ".pt", ".onnx", ".npz")
LARGE = 4_000

LEVELS = "modules gradients params"
COMMANDS = f"""
driftline dump -o runs/ref --step * -- python infer.py
driftline dump -o runs/bf16 --step * -- python infer.py --dtype bfloat16
driftline dump -o runs/faulty --step * -- python infer.py --fault
driftline dump -o runs/train --level {LEVELS} -- python train.py
driftline dump -o runs/train_faulty --level {LEVELS} -- python train.py --fault
driftline dump -o runs/summary --keep summary -- python infer.py
driftline dump -o runs/summary_faulty --keep summary -- python infer.py --fault
driftline dump -o runs/digest --keep digest -- python infer.py
driftline dump -o runs/sample --keep sample -- python infer.py
driftline dump -o runs/described --only-save-desc -- python infer.py
driftline dump -o runs/ops --level ops -- python infer.py
driftline dump -o runs/types --type op kernel cpu_profiling model onnx -- python infer.py
driftline dump -o runs/killed -- python infer.py --end
driftline dump -o runs/compiled --graph fx -- python compiled.py aot_eager
driftline dump -o runs/inductor --graph inductor -- python compiled.py inductor
driftline dump -o runs/ranks -- torchrun --nproc-per-node 2 ranks.py
driftline dump -o runs/onnx --engine onnxruntime --model model.onnx --inputs inputs.npz
driftline dump -o runs/paddle --level {LEVELS} -- python paddle_train.py
driftline dump -o runs/ait --layout ait --operation-name linear -- python infer.py
driftline errcheck -o errors -- python nan.py
driftline compare runs/ref runs/faulty -o tables/faulty --metric sqnr
driftline compare runs/ref runs/bf16 -o tables/clean
driftline compare runs/ref runs/bf16 --csv tables/rows.csv -q
driftline compare -gp runs/ref -mp runs/faulty -o tables/ait
driftline compare runs/ref runs/faulty --shard 1/2 -o parts
driftline compare runs/ref runs/faulty --shard 2/2 -o parts
driftline compare runs/train runs/paddle --dry-run --save-plan plans/paddle.toml
driftline compare runs/ref runs/ranks --dry-run --save-plan plans/ranks.toml
driftline compare runs/ref runs/onnx --dry-run --save-plan plans/onnx.toml
driftline compare runs/train runs/train_faulty --dry-run --save-plan plans/names.toml
driftline calibrate tables/clean -o thresholds/layers.json --metric relative_l2 --metric cosine
driftline replay runs/bf16 -o replayed -- python infer.py
driftline noise --like runs/bf16 -o noise --variant plain dither -- python infer.py
driftline bisect --reference-run runs/ref --format json -- python infer.py --fault > bisect.json
driftline diagnose runs/ref runs/faulty --repro repro
driftline diagnose runs/ref runs/faulty --format json > diagnosis.json
driftline opcheck -i runs/ops --format json > opcheck.json
python label.py
python paddle_train.py --hook hooks/first
python paddle_train.py --hook hooks/second
python hooks.py hooks/ait
python -m pytest -q -p no:cacheprovider --driftline-update=new --driftline-expectations-dir=expectations expecting.py
driftline metrics --model_path=tiny-llama --sharegpt_path=prompts.json --min_pad_length=16 --max_new_tokens=4 --logits topk -o decoder/metrics
driftline layer-metrics --mode model-forward --model_paths tiny-llama --sharegpt_path prompts.json --seq_lengths 16 --max_new_tokens 4 -o decoder/layers
driftline thresholds --models tiny-llama --metrics diff_mean ce --file_base decoder/metrics -o thresholds
driftline thresholds --models tiny-llama --metrics abs_diff cos_sim --layer_io --file_base decoder/layers -o decoder
driftline validate --model_paths=tiny-llama --sharegpt_path=prompts.json --batch_sizes=1 --seq_lengths=16 --max_new_tokens=4 --cumulative_test_tokens_per_sequence=4 --force_validation_level_1 --validation_info_dir decoder/saved --save_validation_info_outputs -o decoder/validated
"""  # noqa: E501
"""What is run, in this order; `> FILE` keeps what is printed."""


def prepare(place: Path) -> None:
    """Programs, a model for ONNX Runtime, weights for Paddle, a decoder and its prompts."""
    for program in sorted((HERE / "programs").glob("*.py")):
        shutil.copy(program, place)
    fixtures = DATA / "aiu" / "fixtures"
    shutil.copytree(fixtures / "tiny-llama", place / "tiny-llama")
    shutil.copy(fixtures / "share_gpt_tiny.json", place / "prompts.json")
    for folder in ("runs", "tables", "plans", "thresholds", "hooks", "decoder"):
        (place / folder).mkdir()
    sys.path.insert(0, str(place))
    import torch
    from network import IDS, build

    network = build().eval()
    weights = {name: value.detach().numpy() for name, value in network.named_parameters()}
    np.savez(place / "weights.npz", **weights)
    np.savez(place / "inputs.npz", ids=IDS.numpy())
    torch.onnx.export(
        network,
        (IDS,),
        str(place / "model.onnx"),
        input_names=["ids"],
        dynamo=True,
        external_data=False,
    )


def run(line: str, place: Path) -> None:
    """One of the commands, in a folder and environment that say little about this machine."""
    words, _, target = line.partition(" > ")
    environment = {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(place),
        "OMP_NUM_THREADS": "1",
        "TZ": "UTC",
        "COLUMNS": "120",
    }
    done = subprocess.run(
        words.split(), cwd=place, env=environment, capture_output=True, text=True, check=False
    )
    print(f"{line}\n  exit code {done.returncode}", flush=True)
    if done.returncode not in (0, 1, 137):
        print(done.stdout, done.stderr, sep="\n")
    if target:
        (place / target).write_text(done.stdout)


def keep(place: Path, out: Path) -> None:
    """Copy what was written, without paths of this machine and with large files compressed."""
    out.mkdir(parents=True)
    left_out = {
        "tiny-llama",
        "prompts.json",
        "__pycache__",
        "torchinductor_root",
        ".cache",
        ".config",
    }
    for path in sorted(place.rglob("*")):
        parts = path.relative_to(place).parts
        if not path.is_file() or left_out & set(parts) or parts[0].startswith("."):
            continue
        if len(parts) == 1 and path.suffix == ".py":
            continue
        target = out.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = path.read_bytes()
        if path.suffix in TEXT:
            content = content.replace(str(place).encode(), b"@FOLDER@")
            content = content.replace(str(BIN).encode(), b"@BIN@")
        elif len(content) > LARGE or path.suffix in PACKED:
            target = target.with_name(f"{target.name}.gz")
            content = gzip.compress(content, mtime=0)
        target.write_bytes(content)


def main() -> None:
    out = Path(sys.argv[1]).absolute()
    place = Path("/tmp/network")
    place.mkdir()
    try:
        prepare(place)
        for line in COMMANDS.strip().splitlines():
            run(line, place)
        keep(place, out)
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
