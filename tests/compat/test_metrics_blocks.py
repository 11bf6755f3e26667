"""The documents' block that makes a baseline: variables, then `generate_metrics.py`.

Only the model, prompts, numbers and folders are replaced, and a GPU by the CPU, which is
the default where there is none; names, options and their order are the document's own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(sys.executable).parent / "generate_metrics.py"
FIXTURES = Path(__file__).parents[1] / "data" / "aiu" / "fixtures"

BLOCK = """
export MODEL_PATH={model}/
export MAX_NEW_TOKENS=8
export BATCH_SIZES=1
export SEQ_LENS=16
export DEFAULT_TYPES="fp16"
export DS_PATH={prompts}
{python} generate_metrics.py --architecture=hf_pretrained --model_path=$MODEL_PATH \
--tokenizer=$MODEL_PATH --unfuse_weights --output_dir={out}/ --compile_dynamic \
--max_new_tokens=$MAX_NEW_TOKENS --min_pad_length=$SEQ_LENS --batch_size=$BATCH_SIZES \
--default_dtype=$DEFAULT_TYPES --sharegpt_path=$DS_PATH --num_test_tokens_per_sequence=16
"""


def test_the_baseline_of_the_document_comes_out_under_its_names(
    tmp_path: Path, warm_llama: str
) -> None:
    assert SCRIPT.exists(), "driftline-compat is not installed: make install"
    (tmp_path / "generate_metrics.py").symlink_to(SCRIPT)
    model = tmp_path / "models" / "Mistral-7B-Instruct-v0.3"
    model.parent.mkdir()
    model.symlink_to(FIXTURES / "tiny-llama")
    out = tmp_path / "output"
    line = BLOCK.format(
        model=model, prompts=FIXTURES / "share_gpt_tiny.json", python=warm_llama, out=out
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    start = str(model).replace("/", "--")
    start += "_max-new-tokens-8_batch-size-1_seq-length-16_dtype-fp16"
    names = {path.name for path in out.iterdir()}
    documented = {
        f"{start}.{metric}.csv" for metric in ("ce", "diff_mean", "prob_mean", "prob_std")
    }
    documented |= {
        f"{start}.{side}_validation_info.{seed}.out" for side in ("cpu", "cuda") for seed in (0, 1)
    }
    assert documented <= names
    lines = (out / f"{start}.ce.csv").read_text().splitlines()
    assert lines[0] == "ce"
    assert len(lines) == 17
