"""One real server for all tests of the API: a small chat model on two stages, asked with OpenAI's own client."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.served import DEADLINE_S, Served, serving

KEY = "key-of-the-tests"
MODEL = "smol"
MAX_MODEL_LEN = 1024
MAX_BODY_BYTES = 2**21

PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of plain HTTP: without it each reads the certificates of all authorities, longer than most tests take."""


@pytest.fixture(scope="session")
def api_server(smollm2_gguf: Path) -> Iterator[Served]:
    """`stageline serve` on two stages, with a key, that is ready."""
    flags = ["-pp", "2", "--served-model-name", f"{MODEL},other-name", "--max-model-len", str(MAX_MODEL_LEN)]
    flags += ["--dtype", "bfloat16"]
    flags += ["--max-body-bytes", str(MAX_BODY_BYTES), "--kv-cache-memory", "256MiB", "--api-key", f"another-key,{KEY}"]
    flags += ["--reasoning-parser", "think"]  # the model has no reasoning of its own; a prompt can put it into some
    with serving(str(smollm2_gguf), *flags) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="session")
def base_url(api_server: Served) -> str:
    return f"http://127.0.0.1:{api_server.port}"


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    """OpenAI's client. It never tries again: an error is what a test wants to see."""
    with openai.OpenAI(
        base_url=f"{base_url}/v1",
        api_key=KEY,
        max_retries=0,
        timeout=DEADLINE_S,
        http_client=openai.DefaultHttpxClient(verify=PLAIN),
    ) as client:
        yield client


@pytest.fixture
def http(base_url: str) -> Iterator[httpx.Client]:
    """Plain HTTP, with the key."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=base_url, headers=headers, timeout=DEADLINE_S, verify=PLAIN) as client:
        yield client


def events(text: str) -> list[dict[str, Any]]:
    """A stream's events; it must end as OpenAI's do."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
