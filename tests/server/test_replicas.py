"""Several pipelines behind one API: all of them work, what they cached is used, and one that is lost costs its own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stageline.engine.routing import CHUNK_TOKENS
from tests.server.served import DEADLINE_S, Served, serving
from tests.tiny_models import TinyModel

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(len(psutil.Process().cpu_affinity()) < 2, reason="two replicas need two CPU cores"),
]

MANY_TOKENS = 3000
"""More than one replica computes before the other one is killed."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TinyModel(max_position_embeddings=4096).write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def replicas(model: str) -> Iterator[Served]:
    with serving(model, "-dp", "2", "--served-model-name", "tiny") as server:
        server.wait_until_ready()
        yield server


def by_engine(server: Served, name: str) -> dict[str, float]:
    text = httpx.get(f"http://127.0.0.1:{server.port}/metrics", timeout=DEADLINE_S).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {sample.labels["engine"]: sample.value for sample in samples if sample.name == name}


def test_both_replicas_work_and_a_conversation_goes_on_where_it_began(replicas: Served) -> None:
    server = replicas
    assert {kind: len(pids) for kind, pids in server.pids.items()} == {"engine": 2, "api": 1, "stage": 2}
    assert "data parallel 2 x pipeline parallel 1 x tensor parallel 1 = 2 processes" in server.log
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:

        def complete(prompt: list[int]) -> str:
            answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
            return answer.choices[0].text

        first = [complete([number, 1, 2]) for number in range(4)]
        assert set(by_engine(server, "stageline:requests_added_total").values()) == {2}
        # Each is asked of the other replica now: tokens do not depend on who computes them.
        complete([9])
        assert [complete([number, 1, 2]) for number in range(4)] == first
        story = [7] * (2 * CHUNK_TOKENS)
        for num_more in range(4):
            complete(story + [8] * num_more)
        hits = by_engine(server, "vllm:prefix_cache_hits_total")
        assert sorted(hits.values()) == [0, pytest.approx(3 * len(story), abs=3 * 16)]
        load = server.get("/load")[1]
        assert load["is_ready"] is True and load["server_load"] == 0


def test_a_debug_route_tells_of_the_engine_that_is_asked_for(replicas: Served) -> None:
    server = replicas
    added = by_engine(server, "stageline:requests_added_total")
    for engine, count in added.items():
        assert server.get(f"/debug/pipeline?engine={engine}")[1]["requests"]["num_added"] == count
        assert server.get(f"/debug/timeline?engine={engine}")[0] == 200
    status, body = server.get("/debug/pipeline?engine=2")
    assert status == 400 and body["error"]["message"] == "engine is '2'; it must be between 0 and 1"


def test_a_killed_engine_costs_its_own_requests_while_the_other_serves_and_is_started_again(replicas: Served) -> None:
    server = replicas
    server.model = "tiny"
    num_lines = len(server.lines)
    with ThreadPoolExecutor(2) as pool:
        streams = [server.stream(MANY_TOKENS) for _ in range(2)]
        os.kill(server.pids["engine"][0], signal.SIGKILL)
        *texts, status = pool.map(lambda ask: ask(), [*(stream.read for stream in streams), lambda: server.post(8)[0]])
    assert status == 200, "the other one serves"
    errors = [line for text in texts for line in text.decode().splitlines() if line.startswith('data: {"error"')]
    assert len(errors) == 1, texts
    assert json.loads(errors[0].removeprefix("data: "))["error"]["type"] == "server_error"
    assert sum(b'"finish_reason":"length"' in text for text in texts) == 1
    assert server.get("/health")[0] == 200
    lost = server.wait_for_line(r"replica (\d) of 2 is lost: .* was killed by SIGKILL; the others serve on", num_lines)
    server.wait_for_line(rf"the pipeline of replica {lost[1]} is complete again", num_lines)
    assert [server.post(8)[0] for _ in range(2)] == [200, 200]
    assert by_engine(server, "stageline:requests_added_total")[lost[1]] == 1, "a new one, which has its share"
    assert "Traceback" not in server.log
    server.note_processes()
    server.process.send_signal(signal.SIGTERM)
    assert server.finish() == 0
    assert server.leftovers() == []


def test_more_replicas_than_cores_are_refused_in_one_line(model: str) -> None:
    with serving(model, "-dp", "1000") as server:
        assert server.finish() == 2
        assert len(server.lines) == 1 and "--data-parallel-size is 1000" in server.lines[0], server.log
