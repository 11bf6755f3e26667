"""No spelling of a secret reaches a run: reports get attached to bugs."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from driftline.errors import AlreadyThere
from driftline.runs.provenance import allowed_environment, create_run, provenance
from driftline.runs.reader import open_run
from driftline.runs.redaction import redact_argv, redact_message, redact_text, redact_value

SECRET = "Zq7-plain_value.9"

COMMAND_LINES = [
    ["-p", SECRET],
    ["-password", SECRET],
    ["-p" + SECRET],
    ["mysql", "-uroot", "-p" + SECRET],
    ["--user", "bob:" + SECRET],
    ["-u", "bob:" + SECRET],
    ["--user=bob:" + SECRET],
    ["--proxy-user", "bob", "--proxy", "bob:" + SECRET],
    ["postgres://bob:" + SECRET + "@host:5432/db"],
    ["bob:" + SECRET + "@host:5432/db"],
    ["--hf-token", SECRET],
    ["--hf_token", SECRET],
    ["--hfToken", SECRET],
    ["--HF-TOKEN", SECRET],
    ["--hftoken", SECRET],
    ["-token", SECRET],
    ["--token=" + SECRET],
    ["--api_key=" + SECRET],
    ["--api-key", SECRET],
    ["--apikey", SECRET],
    ["--apiKey=" + SECRET],
    ["--openai-api-key", SECRET],
    ["--key", SECRET],
    ["--access-key-id", SECRET],
    ["--aws_secret_access_key=" + SECRET],
    ["--password", SECRET],
    ["--db-password=" + SECRET],
    ["--dbpassword", SECRET],
    ["--passwd", SECRET],
    ["--pwd", SECRET],
    ["--pass", SECRET],
    ["--passphrase", SECRET],
    ["--secret", SECRET],
    ["--client_secret=" + SECRET],
    ["--credentials", SECRET],
    ["--auth", SECRET],
    ["--use-auth-token", SECRET],
    ["--authorization", "Bearer " + SECRET],
    ["--bearer", SECRET],
    ["--jwt", SECRET],
    ["--cookie", SECRET],
    ["--signature", SECRET],
    ["--pat=" + SECRET],
    ["API_KEY=" + SECRET],
    ["HF_TOKEN=" + SECRET],
    ["WANDB_API_KEY=" + SECRET, "python", "x.py"],
    ["+trainer.logger.api_key=" + SECRET],
    ["trainer.hf_token=" + SECRET],
    ["-e", "HF_TOKEN=" + SECRET],
    ["--set", "auth.password=" + SECRET],
    ["-H", "Authorization: Bearer " + SECRET],
    ["-H", "Authorization:" + SECRET],
    ["-H", "X-Api-Key: " + SECRET],
    ["-H", "Cookie: session=" + SECRET],
    ["--header=Authorization: Basic " + SECRET],
    ["https://user:" + SECRET + "@host/repo.git"],
    ["https://" + SECRET + "@host/repo.git"],
    ["--index-url=https://user:" + SECRET + "@host/simple"],
    ["https://host/x?token=" + SECRET + "&page=2"],
    ["https://host/x?page=2&sig=" + SECRET],
    ["bash", "-c", "HF_TOKEN=" + SECRET + " python x.py"],
    ["bash", "-c", "python x.py --hf-token " + SECRET + " --steps 3"],
    ["bash", "-c", f"python x.py --password '{SECRET} {SECRET}'"],
    ["bash", "-c", f'export API_KEY="{SECRET}"; python x.py'],
    ["--config", json.dumps({"api_key": SECRET, "layers": 3})],
    ["--config", str({"password": SECRET})],
    ["--config={'nested': {'hf_token': '" + SECRET + "'}}"],
    ["--config", "api_key: " + SECRET],
    ["--config=" + json.dumps({"password": SECRET, "layers": 3})],
    ["--config=" + json.dumps({"password": SECRET, "optimizer": {"lr": 1}})],
    ["--config=" + json.dumps({"optimizer": {"lr": 1}, "password": SECRET})],
    ["--config={'api_key': '" + SECRET + "'}"],
    ["--proxy-user", "bob:" + SECRET],
    ["--db_user=bob:" + SECRET],
    ["--otp", SECRET],
    ["--seed-phrase", SECRET],
    ["--passwort=" + SECRET],
    ["--wifi-psk=" + SECRET],
    ["-c", f"import os; os.environ['HF_TOKEN']='{SECRET}'"],
    ["-c", f'import os; os.environ["HF_TOKEN"] = "{SECRET}"'],
    ["-c", f"import os; os.environ.setdefault('HF_TOKEN', '{SECRET}')"],
    ["hf_AbCdEfGhIjKlMnOp"],
    ["hf_abcdefghijklmnopqrstuvwxyzabcdefgh"],
    ["--model", "sk-proj-abc123DEF456ghi789"],
    ["sk_live_abcdefgh12345678"],
    ["ghp_16C7e42F292c6912E7710c838347Ae178B4a"],
    ["github_pat_11ABCDEFG0abcdefghijkl"],
    ["glpat-abcdefgh12345678"],
    ["AKIAIOSFODNN7EXAMPLE"],
    ["ASIAIOSFODNN7EXAMPLE"],
    ["AIzaSyA-1234567890abcdefghijklmn"],
    ["xoxb-123456789012-abcdefABCDEF"],
    ["nvapi-abcdefghij1234567890"],
    ["gsk_abcdefghij1234567890"],
    ["npm_abcdefghij1234567890abcd"],
    ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"],
    ["-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\n-----END RSA PRIVATE KEY-----"],
]


def test_an_attached_password_is_hidden_also_where_it_reads_like_an_option() -> None:
    assert redact_argv(["x.py", "-psecret"]) == ["x.py", "-p***"]
    assert redact_argv(["x.py", "-pPassword1"]) == ["x.py", "-p***"]
    assert redact_argv(["x.py", "-private-key", "abc"]) == ["x.py", "-private-key", "***"]


@pytest.mark.parametrize("arguments", COMMAND_LINES, ids=lambda a: " ".join(a)[:50])
def test_no_spelling_of_a_secret_is_written(arguments: list[str]) -> None:
    shown = redact_argv(["python", "x.py", *arguments, "--steps", "3"])
    text = json.dumps(shown)
    assert "***" in text
    assert SECRET not in text and SECRET[:6] not in text
    for known in (
        "AbCdEfGh",
        "abc123DEF",
        "abcdefgh",
        "16C7e42F",
        "IOSFODNN",
        "abcdefghij",
        "MIIE",
        "eyJ",
    ):
        assert known not in text
    assert shown[:2] == ["python", "x.py"] and shown[-2:] == ["--steps", "3"]
    # The same as one string: an event's message, the text given to --exec.
    joined = redact_text(" ".join(arguments))
    if "'" not in joined and len(arguments) < 3:
        assert SECRET not in joined


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-tokens", "20"],
        ["--max_new_tokens=128"],
        ["--tokenizer", "gpt2"],
        ["--architecture=hf_pretrained"],
        ["--architecture", "hf_configured"],
        ["--pad-token-id", "0"],
        ["--num-key-value-heads", "8"],
        ["--num_key_value_heads=8"],
        ["--model", "meta/llama-7b", "--dtype", "bfloat16", "-er", "3,5,7,7"],
        ["--use-auth-token", "--steps", "3"],
        ["https://host/path?page=2"],
        ["--lr=1e-4", "model.layers=8"],
        ["--shapes=[1,2]", '--config={"hidden": 8, "heads": [1, 2]}'],
        ["--columns", "['key', 'value']"],
        ["bash", "-c", "python x.py --dtype float32"],
        ["C:\\data", "key"],
        ["012345" * 8],  # a pattern, not a key: six different digits
    ],
    ids=lambda a: " ".join(a),
)
def test_ordinary_arguments_stay_readable(arguments: list[str]) -> None:
    assert redact_argv(["python", "x.py", *arguments]) == ["python", "x.py", *arguments]


@pytest.mark.parametrize(
    "text",
    [
        "a=" * 100_000,
        "x-" * 100_000,
        "--a " * 50_000,
        "a:" * 9999,
        "'" * 9999,
        '{"' * 9999,
        "w" * 10**6,
        "://" * 9999,
        "eyJ" * 9999,
    ],
    ids=lambda t: t[:4],
)
def test_a_strange_argument_costs_no_time_and_no_stack(text: str) -> None:
    started = time.thread_time()
    assert len(json.dumps(redact_argv([text, "--token", text]))) < 40_000
    assert time.thread_time() - started < 2.0


@pytest.mark.parametrize(
    "message",
    [
        "past_key_values: a sparse tensor cannot be stored",
        "key: float8 is refused",
        "no site matches 'model.token_embedding'",
        "the token embedding of step 3",
        "step 3 done",
        "rank0/step0/attn.key/input/key_states could not be listed",
    ],
)
def test_sentences_about_models_stay_readable(message: str) -> None:
    assert redact_message(message) == message


@pytest.mark.parametrize(
    "message",
    [
        f"called with --hf-token {SECRET}",
        f"API_KEY={SECRET} was set",
        f"password: {SECRET}",
        f"api_key: {SECRET}",
        f"hf_token: {SECRET}",
        f"cannot reach https://me:{SECRET}@host",
        f"Authorization: Bearer {SECRET}",
        f"key={SECRET}",
    ],
)
def test_secrets_in_sentences_are_hidden(message: str) -> None:
    assert SECRET not in redact_message(message) and "***" in redact_message(message)


def test_only_variables_that_matter_are_kept_and_their_secrets_hidden() -> None:
    shown = allowed_environment(
        {
            "CUDA_VISIBLE_DEVICES": "0,1",
            "OMP_NUM_THREADS": "2",
            "NCCL_DEBUG": "INFO",
            "TORCH_API_TOKEN": SECRET,
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "TORCH_HOME": f"https://me:{SECRET}@host",
            "HF_TOKEN": SECRET,
            "HOME": "/home/somebody",
            "PATH": "/bin",
        }
    )
    assert shown == {
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_API_TOKEN": "***",
        "TORCH_HOME": "https://***@host",
    }
    assert redact_value("DB_PASSWORD", "x") == "***"


def test_a_run_of_a_command_with_secrets_holds_none_of_them(tmp_path: Path) -> None:
    code = (
        "import sys, numpy as np\n"
        "from driftline.runs.records import TensorKey\n"
        "from driftline.runs.records import Record\n"
        "from driftline.runs.writer import RunWriter\n"
        "writer = RunWriter(sys.argv[1])\n"
        "writer.event('note', 'called with ' + ' '.join(sys.argv))\n"
        "writer.put(Record(TensorKey.of('a', 'output'), 0, 'uint8', (3,)), np.zeros(3, np.uint8))\n"
    )
    arguments = ["--hf-token", SECRET, f"--password={SECRET}", f"https://u:{SECRET}@h/"]
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run"), *arguments], check=True, timeout=60
    )
    for file in (tmp_path / "run").rglob("*"):
        if file.is_file():
            assert SECRET.encode() not in file.read_bytes(), file.name
    run = open_run(tmp_path / "run")
    assert "--hf-token" in run.manifest["command"] and "***" in run.manifest["command"]


def test_provenance_says_where_a_run_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(repo)]
    monkeypatch.chdir(repo)
    subprocess.run([*git, "init", "-q"], check=True, timeout=110)
    (repo / "file").write_text("one")
    subprocess.run([*git, "add", "file"], check=True, timeout=110)
    subprocess.run([*git, "commit", "-qm", "first"], check=True, timeout=110)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True, timeout=110
    )
    commit = head.stdout.strip()
    assert provenance(["x"])["git"] == {"commit": commit, "dirty": False}
    subprocess.run([*git, "pack-refs", "--all"], check=True, timeout=110)
    hook = repo / "monitor"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    subprocess.run([*git, "config", "core.fsmonitor", str(hook)], check=True, timeout=110)
    (repo / "file").write_text("two")
    (repo / "sub").mkdir()
    monkeypatch.chdir(repo / "sub")
    found = provenance(["python", "x.py"], world_size=4)
    assert found["git"] == {"commit": commit, "dirty": True}
    assert not (tmp_path / "ran").exists(), "nothing of the repository was executed"
    assert (
        found["schema"] == 1 and found["world_size"] == 4 and found["command"] == ["python", "x.py"]
    )
    for name in ("id", "created", "driftline", "python", "platform", "environment", "versions"):
        assert name in found


def test_the_first_manifest_stays(tmp_path: Path) -> None:
    create_run(tmp_path / "run", command=["first"])
    first = (tmp_path / "run" / "run.json").read_bytes()
    with pytest.raises(AlreadyThere, match="exists and is not empty"):
        create_run(tmp_path / "run")
    assert (tmp_path / "run" / "run.json").read_bytes() == first
    (tmp_path / "run" / "rank0").mkdir()
    (tmp_path / "run" / "rank0" / "index.jsonl").write_text("")
    create_run(tmp_path / "run", command=["second"], force=True)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["run.json"]
    assert open_run(tmp_path / "run").manifest["command"] == ["second"]


def test_force_never_deletes_a_folder_that_holds_other_things(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(AlreadyThere):
        create_run(tmp_path, force=True)
    create_run(tmp_path / "run")
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    with pytest.raises(AlreadyThere, match="other things"):
        create_run(tmp_path / "run", force=True)
    with pytest.raises(AlreadyThere, match="is a file"):
        create_run(tmp_path / "thesis.tex", force=True)
    assert (tmp_path / "thesis.tex").exists()
    (tmp_path / "empty").mkdir()
    create_run(tmp_path / "empty")


KEYS = [
    "9f86d081884c7d659a2feaa0c55ad015",
    "0x9F86D081884C7D659A2FEAA0C55AD015",
    "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "Tm90QVJlYWxTZWNyZXRLZXkxMjM0NTY3ODkwQUI=",
    "q83vASNFZ4mrze8BI0VniavN7wEjRWeJq83vASNFZ4k=",
    "dapi0123456789abcdef0123456789abcdef",
    "hvs.CAESIJlU02LQZq",
    "https://hooks.slack.com/services/T0AAAAAAA/B0BBBBBBB/x1x2x3x4x5",
    "https://hooks.slack.com/workflows/T0AAAAAAA/A0BBBBBBB/123456789012345678/x1x2x3x4x5",
    "https://discord.com/api/webhooks/123456789012345678/x1x2x3x4x5",
    "xapp-1-A0B1C2D3E4F-1234567890123-0a1b2c3d4e5f",
    # Six small letters in a row are in every seventh key of 40 letters, and are no word.
    "rKq3vbdjcnwPYz81LmX0sGhT7aUe92QiVfR5oEkD",
    # `Pw` is short for a password in a name, and this is none.
    "kLFYEpsx2DitNrmJapq1usQwwro8WRC+Nm5Xz0VbT3yHqPw=",
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("form", ["{}", "--x={}", "x {} y", "--endpoint {}", "x is {}."])
def test_keys_are_known_by_their_look(key: str, form: str) -> None:
    secret = key.rpartition("/")[2]
    shown = redact_argv(["python", "x.py", *form.format(key).split()])
    assert not any(secret in word for word in shown)
    assert secret not in redact_text(form.format(key))
    assert secret not in redact_value("TORCH_LOGS", key)


HARMLESS = [
    ["-p", "8080"],
    ["-p22"],
    ["-precision", "fp16"],
    ["-path", "a/b"],
    ["-u", "1000:1000"],
    ["--user", "bob"],
    ["--revision", "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"],
    ["--commit=9f86d081884c7d659a2feaa0c55ad015a3bf4f1b"],
    ["/data/Models/Meta-Llama-3-8B-Instruct/checkpoint-0001"],
    ["meta-llama/Llama-3.2-1B-Instruct-with-a-long-name-v2"],
    ["tests/runs/test_run_secrets_of_a_very_long_name_indeed.py"],
    ["a" * 64],
    ["host:8080"],
    ["git@host.org:team/repo.git"],
    ["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b.safetensors"],
]


def test_keys_in_an_exception_of_the_program_are_hidden_and_digests_in_our_messages_stay() -> None:
    message = f"step 3: key {KEYS[0]} of rKq3vbdjcnwPYz81LmX0sGhT7aUe92QiVfR5oEkD is refused"
    assert redact_message(message) == f"step 3: key {KEYS[0]} of *** is refused"
    assert redact_message(message, digests=False) == "step 3: key *** of *** is refused"
    assert redact_message(f"[a: '{KEYS[0]}']", digests=False) == "[a: '***']"


def test_nearly_all_random_keys_are_known_by_their_look() -> None:
    dice = random.Random(1)
    for size in (24, 30, 32, 64, 132):
        keys = [base64.b64encode(dice.randbytes(size)).decode() for _ in range(1000)]
        shown = sum(key.rstrip("=") in redact_argv([key])[0] for key in keys)
        assert shown <= 10, f"{shown} of 1000 keys of {size} bytes"


@pytest.mark.parametrize("words", HARMLESS, ids=str)
def test_what_is_no_secret_stays(words: list[str]) -> None:
    assert redact_argv(words) == words
