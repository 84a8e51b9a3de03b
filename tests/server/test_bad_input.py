"""What cannot be served is answered with one clear error in OpenAI's form, naming the field; and nothing is lost."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import KEY, MAX_BODY_BYTES, MAX_MODEL_LEN, MODEL, events
from tests.server.served import DEADLINE_S, Served

MESSAGES: list[Any] = [{"role": "user", "content": "Hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}



def optional_properties(number: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(number)}}


def json_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


# No first token can tell that this is too much.
TOO_MUCH_LATER = {"type": "object", "properties": {"inner": optional_properties(600)}, "required": ["inner"]}

# fields of a chat request, the field that the error names
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"content": "Hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "wizard", "content": "Hello"}]}, "messages[0].role"),
    ({"messages": [*MESSAGES, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "word " * MAX_MODEL_LEN}]}, "messages"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": "two"}, "n"),
    ({"n": 2.5}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 10**30}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -7}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 10**40}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -(10**30)}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": MAX_MODEL_LEN}, "max_tokens"),
    ({"max_completion_tokens": 10**30}, "max_completion_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"stop": ["a"] * 1000}, "stop"),
    ({"stop": "a" * 5000}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"logit_bias": {"Paris": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 1000}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["a"] * 2000}, "bad_words"),
    ({"bad_words": ["a" * 20000]}, "bad_words"),
    ({"cache_salt": "a" * 2000}, "cache_salt"),
    ({"priority": 10**20}, "priority"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_regex": "(a?){200}a{200}"}, "guided_regex"),
    ({"structured_outputs": {"regex": "(a{1000}){1000}"}}, "structured_outputs.regex"),
    ({"response_format": json_format(optional_properties(1000))}, "response_format.json_schema.schema"),
    ({"response_format": json_format({"type": "objekt"})}, "response_format.json_schema.schema"),
    ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
]

BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", [1]]}, "prompt[1]"),
    ({"prompt": [[1], "a"]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[0]"),
    ({"prompt": [[1], [True]]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 100}, "prompt"),
    ({"prompt": [1] * MAX_MODEL_LEN}, "prompt"),
    ({"suffix": "end"}, "suffix"),
    ({"n": 129}, "n"),
    ({"n": 10**12}, "n"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"prompt": [1] * (MAX_MODEL_LEN - 3), "max_tokens": 4}, "max_tokens"),
    ({"echo": "yes"}, "echo"),
]


@pytest.fixture(autouse=True)
def nothing_is_lost(http: httpx.Client) -> Iterator[None]:
    """The server still answers, and nothing is left running."""
    yield
    assert http.get("/health").status_code == 200
    assert http.get("/load").json()["server_load"] == 0


def check_error(answer: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """The answer is OpenAI's error. Returns: its message."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    [(key, error)] = answer.json().items()
    assert key == "error" and set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert code is None or error["code"] == code
    assert len(error["message"]) < 600
    assert "Traceback" not in answer.text and ".py" not in answer.text
    return str(error["message"])


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_chat_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str, stream: bool) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, **fields}
    body = {**body, "stream": True} if stream and "stream_options" not in fields else body
    message = check_error(http.post("/v1/chat/completions", json=body), 400, param)
    assert message


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_a_bad_completion_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "prompt": "Hello", **fields}
    check_error(http.post("/v1/completions", json=body), 400, param)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"model": "smol", "messages": [], "temperature": NaN}',
        b'{"model": "smol", "messages": [], "temperature": 1e999}',
        b'{"model": "smol", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"model": "smol", "ignored": "\xff", "messages": [{"role": "user", "content": "a"}]}',
        b'{"model": "smol", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "smol", "ignored": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model": "smol", "guided_json": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}",
        b'{"model": "smol", "messages": [{"role": "user", "content": "a"}]} and more',
    ],
    ids=lambda body: repr(body[:60]),
)
def test_a_body_that_is_no_request_is_refused(http: httpx.Client, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = http.post("/v1/chat/completions", content=body, headers=headers)
    check_error(answer, 400, answer.json()["error"]["param"])


@pytest.mark.parametrize("schema", [TOO_MUCH_LATER, {"type": "objekt"}], ids=["later", "at once"])
def test_an_error_about_a_form_says_what_the_client_called_it(http: httpx.Client, schema: dict[str, Any]) -> None:
    chat = {"messages": MESSAGES, "temperature": 0, "max_tokens": 200}
    completion = {"prompt": ["a", "b"], "max_tokens": 200, "guided_json": schema}
    form = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    for path, fields, param in (
        ("chat/completions", {**chat, "response_format": json_format(schema)}, "response_format.json_schema.schema"),
        ("chat/completions", {**chat, "guided_json": schema}, "guided_json"),
        ("completions", completion, "guided_json"),
        ("responses", {"input": "Hello", "text": form}, "text.format.schema"),
    ):
        message = check_error(http.post(f"/v1/{path}", json={"model": MODEL, **fields}), 400, param)
        assert message.startswith(param) and "structured_outputs" not in message
        assert ("exceeded the limits of a grammar after" in message) == (schema is TOO_MUCH_LATER)


def test_a_grammar_that_exceeds_its_limits_in_a_stream_ends_it_with_an_error(http: httpx.Client) -> None:
    chat = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "stream": True}
    fields = {**chat, "response_format": json_format(TOO_MUCH_LATER)}
    *chunks, last = events(http.post("/v1/chat/completions", json=fields).text)
    assert chunks and all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    assert last["error"]["param"] == "response_format.json_schema.schema"
    assert last["error"]["message"].startswith("response_format.json_schema.schema exceeded the limits of a grammar")
    form = {"format": {"type": "json_schema", "name": "a", "schema": TOO_MUCH_LATER}}
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "Hello", "stream": True, "text": form}).text
    kinds = [line.removeprefix("event: ") for line in answer.splitlines() if line.startswith("event: ")]
    assert kinds[-2:] == ["error", "response.failed"] and "response.completed" not in kinds
    assert "text.format.schema exceeded the limits of a grammar" in answer


def test_an_impossible_number_of_streamed_answers_takes_no_memory(http: httpx.Client, api_server: Served) -> None:
    [api] = api_server.pids["api"]

    def peak_kib() -> int:
        [line] = [line for line in Path(f"/proc/{api}/status").read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1])

    before_kib = peak_kib()
    body = {"model": MODEL, "messages": MESSAGES, "n": 1_000_000, "stream": True}
    check_error(http.post("/v1/chat/completions", json=body), 400, "n")
    assert peak_kib() < before_kib + 100_000


def test_a_wrong_choice_is_told_with_the_right_ones(http: httpx.Client) -> None:
    roles = "a role is developer, system, user, assistant or tool"
    for fields, words in (
        ({"messages": [{"role": "wizard", "content": "Hello"}]}, roles),
        ({"messages": [{"content": "Hello"}]}, roles),
        ({"response_format": {"type": "xml"}}, "give text, json_object or json_schema"),
        ({"tools": [{"type": "web_search", "function": {"name": "a"}}]}, "tools are functions: give function"),
    ):
        answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, **fields})
        assert answer.status_code == 400 and answer.json()["error"]["message"].endswith(f"; {words}")


def test_a_missing_field_is_named(http: httpx.Client) -> None:
    check_error(http.post("/v1/chat/completions", json={"model": MODEL}), 400, "messages")
    told = check_error(http.post("/v1/chat/completions", json={"messages": MESSAGES}), 400, "model")
    assert "/v1/models" in told


def test_openais_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, n=129)
    assert refused.value.param == "n"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_a_prompt_that_is_far_too_long_is_refused_before_it_is_tokenised(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": "x" * (MAX_BODY_BYTES - 1000)}
    check_error(http.post("/v1/completions", json=body), 400, "prompt", "context_length_exceeded")


def test_a_prompt_that_is_a_little_too_long_is_told_by_how_much(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": [1] * MAX_MODEL_LEN}
    message = check_error(http.post("/v1/completions", json=body), 400, "prompt", "context_length_exceeded")
    assert f"{MAX_MODEL_LEN} tokens" in message


def test_a_body_over_the_limit_is_refused_by_its_length_alone(api_server: Served) -> None:
    """Nothing of the body is ever sent: whoever reads it first would wait for ever."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Length: {MAX_BODY_BYTES + 1}"
    with socket.create_connection(("127.0.0.1", api_server.port), DEADLINE_S) as connection:
        connection.sendall(head.encode() + b"\r\nContent-Type: application/json\r\n\r\n")
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_tell_its_length_is_read_up_to_the_limit(http: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 65536 + 2):
            yield b" " * 65536

    try:
        answer = http.post("/v1/completions", content=endless(), headers={"Content-Type": "application/json"})
    except httpx.WriteError:
        return  # the answer was there, and the connection closed, before all was sent
    check_error(answer, 413)


def test_a_body_in_pieces_is_as_good_as_a_whole(http: httpx.Client) -> None:
    body = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 1}).encode()
    pieces = (body[place : place + 3] for place in range(0, len(body), 3))
    answer = http.post("/v1/completions", content=pieces, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "headers", [{"Content-Encoding": "gzip"}, {"Content-Type": "text/plain"}, {"Content-Type": "multipart/form-data"}]
)
def test_a_body_of_another_kind_is_refused(http: httpx.Client, headers: dict[str, str]) -> None:
    headers = {"Content-Type": "application/json", **headers}
    check_error(http.post("/v1/completions", content=b"{}", headers=headers), 415)


@pytest.mark.parametrize("headers", ["".join(f"x-{n}: y\r\n" for n in range(10_000)), f"x: {'y' * 100_000}\r\n"])
def test_too_much_in_headers_is_refused(api_server: Served, headers: str) -> None:
    head = f"GET /v1/models HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\n{headers}\r\n"
    with socket.create_connection(("127.0.0.1", api_server.port), DEADLINE_S) as connection:
        connection.sendall(head.encode())
        answer = connection.recv(4096)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))


def test_paths_and_methods_that_do_not_exist_have_errors_of_the_same_form(http: httpx.Client) -> None:
    check_error(http.get("/v1/nothing"), 404)
    check_error(http.get("/v1/models/"), 404, "model", "model_not_found")
    refused = http.put("/v1/chat/completions", json={})
    check_error(refused, 405)
    assert refused.headers["allow"] == "POST"
    assert http.head("/v1/models").status_code == 200


def test_tokens_that_do_not_exist_have_no_text(http: httpx.Client) -> None:
    check_error(http.post("/detokenize", json={"tokens": [-1]}), 400, "tokens")
    check_error(http.post("/detokenize", json={"tokens": [10**9]}), 400, "tokens")
    check_error(http.post("/detokenize", content=b'{"tokens":[' + b"1," * 600_000 + b"1]}"), 400, "tokens")
    check_error(http.post("/tokenize", json={}), 400, "prompt")
    check_error(http.post("/tokenize", json={"prompt": "a", "messages": MESSAGES}), 400, "messages")
