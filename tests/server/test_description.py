"""/openapi.json describes every route as it is, and /docs shows it without anybody's help."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import httpx
import jsonschema
import pytest

from stageline.server import chat, completions, docs_page, metrics, models, openapi, tokenize
from tests.server.conftest import MAX_MODEL_LEN, MODEL


@pytest.fixture
def api(http: httpx.Client) -> dict[str, Any]:
    document: dict[str, Any] = http.get("/openapi.json").json()
    return document


def _check(api: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    jsonschema.Draft202012Validator({**schema, "components": api["components"]}).validate(value)


def _operation(api: dict[str, Any], path: str, method: str = "post") -> dict[str, Any]:
    operation: dict[str, Any] = api["paths"][path][method]
    return operation


def _answer_schema(api: dict[str, Any], path: str, method: str, status: int) -> dict[str, Any]:
    answer = _operation(api, path, method)["responses"][str(status)]
    schema: dict[str, Any] = answer["content"]["application/json"]["schema"]
    return schema


def test_every_route_is_described_and_nothing_else(api: dict[str, Any], http: httpx.Client) -> None:
    described = {(method.upper(), path) for path, methods in api["paths"].items() for method in methods}
    modules = (chat, completions, metrics, models, openapi, tokenize)
    assert {(one.method, one.path) for module in modules for one in module.OPERATIONS} <= described
    for method, path in described:
        status = http.request(method, path.replace("{model}", MODEL), json={}).status_code
        assert status in (200, 400), (method, path)
    for path in api["paths"]:
        assert http.request("DELETE", path.replace("{model}", MODEL)).status_code == 405


def test_references_lead_somewhere(api: dict[str, Any]) -> None:
    names = set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(api)))
    assert names and names <= set(api["components"]["schemas"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_examples_fit_their_schema_and_are_answered_as_described(
    api: dict[str, Any], http: httpx.Client, path: str
) -> None:
    content = _operation(api, path)["requestBody"]["content"]["application/json"]
    _check(api, content["schema"], content["example"])
    answer = http.post(path, json=content["example"])
    assert answer.status_code == 200
    _check(api, _answer_schema(api, path, "post", 200), answer.json())


def test_errors_are_as_described(api: dict[str, Any], http: httpx.Client) -> None:
    schema = _answer_schema(api, "/v1/completions", "post", 400)
    _check(api, schema, http.post("/v1/completions", json={}).json())
    _check(api, schema, http.get("/nothing").json())


def test_fuller_answers_are_as_described(api: dict[str, Any], http: httpx.Client) -> None:
    rich = {"model": MODEL, "max_tokens": 3, "n": 2, "prompt_logprobs": 1, "return_token_ids": True, "stop": ["e"]}
    chat_request = {**rich, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
    completion_request = {**rich, "prompt": ["Hi", "Ho"], "logprobs": 2, "echo": True}
    for path, body in (("/v1/chat/completions", chat_request), ("/v1/completions", completion_request)):
        _check(api, _operation(api, path)["requestBody"]["content"]["application/json"]["schema"], body)
        _check(api, _answer_schema(api, path, "post", 200), http.post(path, json=body).json())


def test_the_schema_knows_the_bounds_that_are_kept(api: dict[str, Any]) -> None:
    properties = api["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert (properties["n"]["minimum"], properties["n"]["maximum"]) == (1, 128)
    assert properties["model"]["enum"] == [MODEL, "other-name"]
    assert (properties["max_tokens"]["minimum"], properties["max_tokens"]["maximum"]) == (1, MAX_MODEL_LEN - 1)
    assert "x-token-id" not in str(api) and "x-output-tokens" not in str(api)


class _Resources(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [(tag, name, value) for name, value in attrs if name in ("src", "href", "action", "data")]


def test_the_page_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    parser = _Resources()
    parser.feed(page.text)
    assert parser.found == []
    assert "http" not in docs_page._SCRIPT and "innerHTML" not in docs_page._SCRIPT
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
