"""Who may ask, and what the server tells about itself."""

from __future__ import annotations

import re

import httpx
import openai
import pytest

import stageline
from tests.server.conftest import KEY, MAX_MODEL_LEN, MODEL, PLAIN

POSTS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
GETS = ["/v1/models", f"/v1/models/{MODEL}", "/version", "/openapi.json", "/docs", "/metrics", "/load", "/nothing"]


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer no"}, {"Authorization": KEY}, {"Authorization": ""}])
@pytest.mark.parametrize("path", [*POSTS, *GETS])
def test_every_route_needs_a_key(base_url: str, path: str, headers: dict[str, str]) -> None:
    answer = httpx.request("POST" if path in POSTS else "GET", base_url + path, headers=headers, verify=PLAIN)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_but_not_what_load_balancers_ask(base_url: str, path: str) -> None:
    assert httpx.get(base_url + path, verify=PLAIN).json() == {"status": "ok"}
    assert httpx.head(base_url + path, verify=PLAIN).status_code == 200


def test_the_bare_address_says_what_there_is(base_url: str) -> None:
    text, page = httpx.get(base_url).text, httpx.get(base_url, headers={"Accept": "text/html,*/*"})
    assert "/v1" in text and page.headers["content-type"].startswith("text/html")
    for path in ("dashboard", "docs", "openapi.json", "v1/models", "metrics", "health"):
        assert f"/{path} " in text and f'href="{path}"' in page.text
        assert httpx.get(f"{base_url}/{path}", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
@pytest.mark.parametrize("key", [KEY, "another-key"])
def test_any_of_several_keys_opens(base_url: str, scheme: str, key: str) -> None:
    answer = httpx.get(f"{base_url}/v1/models", headers={"Authorization": f"{scheme} {key}"})
    assert answer.status_code == 200


def test_the_model_is_listed_by_all_its_names(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "other-name"]
    card = client.models.retrieve("other-name")
    assert (card.id, card.object, card.model_extra) == ("other-name", "model", {"max_model_len": MAX_MODEL_LEN})
    answer = client.completions.create(model="other-name", prompt="Hello", max_tokens=1)
    assert answer.model == "other-name"
    assert http.get("/version").json() == {"version": stageline.__version__}


@pytest.mark.parametrize("sent", ["req-1", "a/b+c=d@e:f._-9", "x" * 128])
def test_a_request_id_is_taken_and_returned(http: httpx.Client, sent: str) -> None:
    answer = http.get("/version", headers={"X-Request-Id": sent})
    assert answer.headers["x-request-id"] == sent
    assert http.get("/nothing", headers={"X-Request-Id": sent}).headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", [None, "", "two words", "x" * 129, "é", "a\tb"])
def test_another_is_given_where_none_can_be_taken(http: httpx.Client, sent: str | None) -> None:
    headers = [] if sent is None else [("X-Request-Id", sent.encode())]
    ids = [http.get("/version", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ids)
    assert ids[0] != ids[1]


def test_no_web_page_may_call_unless_the_operator_says_so(http: httpx.Client) -> None:
    asked = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    assert http.options("/v1/chat/completions", headers=asked).status_code == 405
    answer = http.get("/version", headers=asked)
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_answers_do_not_tell_what_the_server_runs_on(http: httpx.Client) -> None:
    assert not re.search(r"\d", http.get("/version").headers.get("server", ""))
