"""More than the server will take: refused at once with a time to come back, and ended when its time is over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.served import DEADLINE_S, Served, serving

MODEL = "smol"
MAX_QUEUE = 32
TIMEOUT_S = 6


@pytest.fixture(scope="module")
def narrow_server(smollm2_gguf: Path) -> Iterator[Served]:
    """One request runs at a time, few may wait, and none for long."""
    flags = ["--served-model-name", MODEL, "--max-model-len", "1024", "--kv-cache-memory", "64MiB"]
    flags += ["--max-num-seqs", "1", "--max-queue", str(MAX_QUEUE), "--request-timeout-s", str(TIMEOUT_S)]
    with serving(str(smollm2_gguf), *flags) as server:
        server.wait_until_ready()
        yield server


def test_a_full_queue_refuses_and_what_takes_too_long_is_ended(narrow_server: Served) -> None:
    """Many long choices, one after the other: all of them together take longer than any request may."""
    body: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 900, "ignore_eos": True}
    url = f"http://127.0.0.1:{narrow_server.port}"
    with httpx.Client(base_url=url, timeout=DEADLINE_S) as client, ThreadPoolExecutor(1) as threads:
        with client.stream("POST", "/v1/completions", json={**body, "n": 20, "stream": True}) as long:
            lines = long.iter_lines()
            assert long.status_code == 200 and next(lines).startswith("data: {")
            whole = threads.submit(client.post, "/v1/completions", json={**body, "n": 8})

            refused = client.post("/v1/completions", json={**body, "n": MAX_QUEUE})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "queue_full"
            assert client.get("/health").status_code == 200

            *_, error, done = [line for line in lines if line]
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "timeout"
            assert done == "data: [DONE]"
        answer = whole.result(DEADLINE_S)
        assert answer.status_code == 504
        assert str(TIMEOUT_S) in answer.json()["error"]["message"]
        assert client.post("/v1/completions", json={**body, "max_tokens": 1}).status_code == 200
        assert client.get("/load").json()["server_load"] == 0
