"""The documents' step 3: the table of variables, and the command that is run with them.

Only the model, its shapes and the prompts are replaced; the test file holds our suite.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

FIXTURES = Path(__file__).parents[1] / "data" / "aiu" / "fixtures"
ROOT = Path(__file__).parents[2]


def test_the_documented_variables_and_command(tmp_path: Path, warm_llama: str) -> None:
    model = FIXTURES / "tiny-llama"
    tests = tmp_path / "tests" / "models"
    tests.mkdir(parents=True)
    (tests / "test_decoders.py").write_text("from driftline.suites.test_decoders import *\n")
    said = {
        "FMS_TEST_SHAPES_COMMON_MODEL_PATHS": str(model),
        "FMS_TEST_SHAPES_FORCE_VALIDATION_LEVEL_1": "1",
        "FMS_TEST_SHAPES_COMMON_BATCH_SIZES": "1",
        "FMS_TEST_SHAPES_COMMON_SEQ_LENGTHS": "32",
        "FMS_TEST_SHAPES_COMMON_MAX_NEW_TOKENS": "16",
        "FMS_TEST_SHAPES_USE_MICRO_MODELS": "0",
        "FMS_TEST_SHAPES_METRICS_THRESHOLD": "2.8364005851745624,0.0007839603102183846",
        "FMS_TEST_SHAPES_CUMULATIVE_TEST_TOKENS_PER_SEQUENCE": "32",
        "SHARE_GPT_DATASET_PATH": str(FIXTURES / "share_gpt_tiny.json"),
    }
    env = os.environ | said | {"OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    if env.get("PYTHONPATH"):  # relative to where the tests were started
        env["PYTHONPATH"] = os.pathsep.join(
            str(ROOT / part) for part in env["PYTHONPATH"].split(os.pathsep)
        )
    done = subprocess.run(
        [warm_llama, "-m", "pytest", "tests/models/test_decoders.py", "-vv"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    # The tiny model's flat distributions have a greater entropy than the documented model's.
    name = f"tests/models/test_decoders.py::test_common_shapes[{model}-1-32-16]"
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"FAILED {name} - AssertionError: failure rate for cross entropy loss" in done.stdout
    assert "[ 0/ 1]: mean diff failure rate: 0.0" in done.stdout
    line = "the candidate (cpu) validation info extracted for validation level 1 - iter=1"
    assert f"[ 0/ 1]: {line}" in done.stdout
    assert "no AIU is involved" in done.stdout
