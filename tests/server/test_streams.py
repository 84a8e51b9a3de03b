"""Many readers at once, who leave when they like and read as slowly as they like: nothing is left, nobody waits."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import KEY, MODEL
from tests.server.served import DEADLINE_S, Served

NUM_STREAMS = 256
HEADERS = {"Authorization": f"Bearer {KEY}"}
LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True}


def wait_until_idle(http: httpx.Client) -> dict[str, Any]:
    """Until the engine has nothing to do. Each question goes through the engine's loop, and so waits for it."""
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        load: dict[str, Any] = http.get("/load").json()
        if load["server_load"] == 0 and load["microbatches_in_flight"] == 0:
            return load
        assert time.monotonic() < deadline_s, load


def test_cancelling_a_stream_ends_its_request(client: openai.OpenAI, http: httpx.Client) -> None:
    extra = {"ignore_eos": True}
    stream = client.completions.create(model=MODEL, prompt="Once", max_tokens=900, stream=True, extra_body=extra)
    next(iter(stream))
    assert http.get("/load").json()["num_requests_running"] == 1
    stream.close()
    assert wait_until_idle(http)["kv_cache_usage"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_reader_of_a_whole_answer_may_leave_as_well(api_server: Served, http: httpx.Client, path: str) -> None:
    asked = {**LONG, "messages": [{"role": "user", "content": "Hello"}]}
    with socket.create_connection(("127.0.0.1", api_server.port), DEADLINE_S) as connection:
        _post(connection, asked, path)
        deadline_s = time.monotonic() + DEADLINE_S
        while http.get("/load").json()["num_requests_running"] != 1:
            assert time.monotonic() < deadline_s
    assert wait_until_idle(http)["kv_cache_usage"] == 0


def _post(connection: socket.socket, body: dict[str, Any], path: str = "/v1/completions") -> None:
    encoded = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(encoded)}\r\n\r\n".encode() + encoded)


async def _follow(client: httpx.AsyncClient, number: int, draw: random.Random) -> str:
    """One stream, left after some events or read to its end."""
    leaves_after = draw.choice([0, 1, 2, 5, None])
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 8 if leaves_after is None else 500, "stream": True,
                            "ignore_eos": True, "n": draw.choice([1, 1, 1, 2]), "seed": number}  # fmt: skip
    if number % 2:
        path, body["prompt"] = "/v1/completions", f"Story number {number}:"
    else:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": f"Tell story {number}"}]
    num_events, last, ends = 0, "", 0
    async with client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line:
                continue
            if num_events == leaves_after:
                return "left"
            num_events, last = num_events + 1, line
            ends += '"finish_reason":"length"' in line
    assert last == "data: [DONE]"
    assert ends == body["n"]
    return "read"


async def _follow_all(base_url: str) -> list[str]:
    draw = random.Random(5)
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=base_url, headers=HEADERS, timeout=DEADLINE_S, limits=limits) as client:
        return await asyncio.gather(*(_follow(client, number, draw) for number in range(NUM_STREAMS)))


def test_256_streams_with_random_leavers_leave_nothing_behind(
    base_url: str, http: httpx.Client, api_server: Served
) -> None:
    processes = dict(api_server.pids)
    results = asyncio.run(_follow_all(base_url))
    assert set(results) == {"read", "left"}
    load = wait_until_idle(http)
    assert (load["num_requests_running"], load["num_requests_waiting"], load["kv_cache_usage"]) == (0, 0, 0)
    assert http.get("/health").status_code == 200
    api_server.note_processes()
    assert api_server.pids == processes


def test_one_who_does_not_read_keeps_nobody_waiting(api_server: Served, http: httpx.Client) -> None:
    """Its buffers are small and full: the server cannot get rid of an answer that others need not wait for."""
    asked = {**LONG, "stream": True, "n": 8, "logprobs": 20, "return_token_ids": True}
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(DEADLINE_S)
        reader.connect(("127.0.0.1", api_server.port))
        _post(reader, asked)
        assert reader.recv(16).startswith(b"HTTP/1.1 200")
        body = {"model": MODEL, "prompt": "Others", "max_tokens": 4, "stream": True}
        for _ in range(3):
            assert http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
    wait_until_idle(http)


def test_a_slow_reader_gets_everything(api_server: Served, http: httpx.Client) -> None:
    """In fewer, fuller events where its buffers could not take them one by one."""
    asked: dict[str, Any] = {**LONG, "max_tokens": 200, "temperature": 0, "stream": True, "return_token_ids": True}
    expected = http.post("/v1/completions", json={**asked, "stream": False}).json()["choices"][0]
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.settimeout(DEADLINE_S)
        reader.connect(("127.0.0.1", api_server.port))
        _post(reader, {**asked, "logprobs": 20})
        wait_until_idle(http)
        received = b""
        while not received.endswith(b"\r\n0\r\n\r\n"):
            piece = reader.recv(65536)
            assert piece
            received += piece
    lines = [line for line in _unchunked(received).decode().splitlines() if line.startswith("data: {")]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(choice["text"] for choice in choices) == expected["text"]
    assert [token for choice in choices for token in choice["token_ids"]] == expected["token_ids"]


def _unchunked(answer: bytes) -> bytes:
    """The body of an answer in HTTP's chunks."""
    rest = answer.partition(b"\r\n\r\n")[2]
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body
