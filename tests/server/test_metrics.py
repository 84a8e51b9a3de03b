"""/metrics and /load tell what was done through HTTP, to anybody who has the key, at any time."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import MODEL
from tests.server.served import DEADLINE_S, Served

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
IDENTITY = {"model_name", "engine", "api_process"}


def scrape(http: httpx.Client) -> Samples:
    """Every sample by name and labels, those left out that are the same for all."""
    response = http.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k not in IDENTITY))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


class Change:
    """What a block of a test adds to the metrics."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._before = scrape(http)

    def of(self, name: str, **labels: str) -> float:
        key = (name, tuple(sorted(labels.items())))
        return scrape(self._http)[key] - self._before.get(key, 0.0)


@pytest.fixture
def change(http: httpx.Client) -> Iterator[Change]:
    wait_until_idle(http)
    yield Change(http)


def wait_until_idle(http: httpx.Client) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while http.get("/load").json()["server_load"]:
        assert time.monotonic() < deadline_s, "requests of another test do not end"


def test_tokens_requests_and_finish_reasons_are_counted_exactly(client: openai.OpenAI, change: Change) -> None:
    answers = [
        client.completions.create(model=MODEL, prompt=[5, 6, 7 + i], max_tokens=4, n=2, extra_body={"ignore_eos": True})
        for i in range(3)
    ]
    assert sum(answer.usage.completion_tokens for answer in answers) == 24
    assert change.of("vllm:generation_tokens_total") == 24
    assert change.of("vllm:prompt_tokens_total") == 3 * 2 * 3
    assert change.of("vllm:request_success_total", finished_reason="length") == 6
    assert change.of("vllm:request_params_n_count") == 3 and change.of("vllm:request_params_n_sum") == 6
    for name in (
        "time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds",
        "request_prompt_tokens", "request_generation_tokens", "request_time_per_output_token_seconds",
    ):  # fmt: skip
        assert change.of(f"vllm:{name}_count") == 6, name
    assert change.of("vllm:inter_token_latency_seconds_count") == 6 * 3
    handler = {"handler": "/v1/completions", "method": "POST", "status": "200"}
    assert change.of("http_requests_total", **handler) == 3


def test_a_stop_string_counts_as_a_stop_and_a_client_that_left_as_an_abort(
    client: openai.OpenAI, http: httpx.Client, change: Change
) -> None:
    greedy = {"model": MODEL, "prompt": "Count: one, two, three,", "temperature": 0.0}
    text = client.completions.create(**greedy, max_tokens=12).choices[0].text
    answer = client.completions.create(**greedy, max_tokens=12, stop=[text[2:5]]).choices[0]
    assert answer.finish_reason == "stop" and answer.text == text[:2]
    with client.completions.create(
        **greedy, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    wait_until_idle(http)
    assert change.of("vllm:request_success_total", finished_reason="stop") == 1
    assert change.of("vllm:request_success_total", finished_reason="abort") == 1
    assert change.of("stageline:requests_aborted_total") == 1


def test_errors_are_counted_by_route_and_unknown_paths_together(http: httpx.Client, change: Change) -> None:
    assert http.post("/v1/completions", content=b"{").status_code == 400
    for path in ("/no/such/path", "/another"):
        assert http.get(path).status_code == 404
    assert http.get("/v1/models/nobody").status_code == 404
    assert httpx.get(f"{http.base_url}/load").status_code == 401
    assert change.of("http_requests_total", handler="/v1/completions", method="POST", status="400") == 1
    assert change.of("http_requests_total", handler="other", method="GET", status="404") == 2
    model = scrape(http)
    assert [key for key in model if key[0] == "http_requests_total" and ("handler", "/no/such/path") in key[1]] == []
    assert change.of("http_requests_total", handler="/load", method="GET", status="401") == 1


def test_busy_and_bubbles_of_every_stage_sum_to_its_time(client: openai.OpenAI, http: httpx.Client) -> None:
    client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=16)
    samples = scrape(http)
    for stage in ("0", "1"):
        busy_s = samples["stageline:stage_busy_seconds_total", (("stage", stage),)]
        bubbles_s = [
            value
            for (name, labels), value in samples.items()
            if name == "stageline:stage_bubble_seconds_total" and ("stage", stage) in labels
        ]
        assert len(bubbles_s) == 4 and min(bubbles_s) >= 0.0 < busy_s
        assert busy_s + sum(bubbles_s) == pytest.approx(samples["stageline:stage_seconds_total", (("stage", stage),)])
        assert samples["stageline:stage_resident_memory_bytes", (("stage", stage),)] > 2**20


def test_stages_compute_what_the_engine_launches_and_hand_it_on(client: openai.OpenAI, change: Change) -> None:
    client.completions.create(model=MODEL, prompt=[9] * 40, max_tokens=5, extra_body={"ignore_eos": True})
    launched, tokens = change.of("vllm:iteration_tokens_total_count"), change.of("vllm:iteration_tokens_total_sum")
    assert tokens == 40 + 4 and launched >= 5
    for stage in ("0", "1"):
        kinds = ("prefill", "decode", "mixed")
        steps = [change.of("stageline:stage_step_seconds_count", stage=stage, kind=kind) for kind in kinds]
        assert sum(steps) == launched
        assert sum(change.of("stageline:stage_tokens_total", stage=stage, kind=kind) for kind in kinds) == tokens
    assert change.of("stageline:link_messages_total", link="s0-s1") == launched
    # Hidden states of 576 numbers in bfloat16.
    assert change.of("stageline:link_bytes_total", link="s0-s1") == tokens * 576 * 2


def test_load_tells_what_runs_now(client: openai.OpenAI, http: httpx.Client) -> None:
    wait_until_idle(http)
    idle = http.get("/load").json()
    assert idle["server_load"] == idle["num_requests_running"] == idle["num_requests_waiting"] == 0
    assert idle["is_ready"] and idle["max_num_seqs"] > 0
    with client.completions.create(
        model=MODEL, prompt="A long story:", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        busy = http.get("/load").json()
        assert busy["server_load"] == busy["num_requests_running"] == 1
        assert busy["kv_cache_usage"] > idle["kv_cache_usage"]
        assert scrape(http)["vllm:num_requests_running", ()] == 1


@pytest.mark.parametrize(
    "accepted",
    [
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=underscores;q=0.5,text/plain;version=1.0.0;q=0.4",
        "text/html",
    ],
)
def test_names_keep_their_colons_whatever_format_is_asked_for(http: httpx.Client, accepted: str) -> None:
    """The first two are what Prometheus 2 and 3 send."""
    response = http.get("/metrics", headers={"Accept": accepted})
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "\nvllm:num_requests_running{" in response.text and "\nstageline:ready{" in response.text


def test_both_are_described(http: httpx.Client, api_server: Served) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/metrics", "/load"} <= set(paths)
