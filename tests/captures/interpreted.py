"""Tests that need Triton's interpreter: it has to be on before Triton is first imported.

`test_interpreted.py` runs them in a process of their own; so does
`TRITON_INTERPRET=1 python -m pytest tests/captures/test_device_path.py`.
"""

from __future__ import annotations

import importlib.util
import os

import pytest

needs_interpreter = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed"
    ),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs TRITON_INTERPRET=1; test_interpreted.py runs it so",
    ),
]
