"""The server's processes: readiness, orderly ends, and that whatever breaks is told in one line and leaves nothing."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import trustme

from tests.pipeline.failing import stop
from tests.server.served import DEADLINE_S, Served, serving, wait_until
from tests.tiny_models import TinyModel

pytestmark = pytest.mark.timeout(240)

MANY_TOKENS = 1200
"""Still on their way when something is done to a process, however late that is."""
ENDLESS_TOKENS = 8000
"""The same, for who does not want to see the last."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TinyModel(max_position_embeddings=8192).write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def two_stages(model: str) -> Iterator[Served]:
    with serving(model, "-pp", "2") as server:
        server.wait_until_ready()
        yield server


def _rest_of(stream: http.client.HTTPResponse) -> tuple[str, bool]:
    """Returns: what still came, and whether that was all that was asked for."""
    text = b""
    try:
        while line := stream.readline():
            text += line
    except (http.client.HTTPException, OSError):
        return text.decode(), False
    return text.decode(), b'"finish_reason":"length"' in text


def _token_ids(text: str) -> list[int]:
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    return [id_ for event in events for choice in event.get("choices", []) for id_ in choice.get("token_ids") or []]


def _num_tokens(text: str) -> int:
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    return sum(len(choice.get("token_ids") or []) for event in events for choice in event.get("choices", []))


def test_requests_are_refused_until_the_model_is_loaded_and_systemd_is_told_when(model: str, tmp_path: Path) -> None:
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
        serving(model, "--served-model-name", "tiny", environ={"NOTIFY_SOCKET": str(tmp_path / "notify")}) as server,
    ):
        manager.settimeout(DEADLINE_S)
        manager.bind(str(tmp_path / "notify"))
        server.wait_until_listening()
        # Connections wait until there is somebody to answer them: this is the earliest answer there can be.
        status, body = server.get("/health")
        assert (status, body["error"]["type"]) == (503, "server_error")
        assert manager.recv(100) == b"READY=1"
        server.wait_until_ready()
        assert server.get("/health")[0] == 200
        assert [entry["id"] for entry in server.get("/v1/models")[1]["data"]] == ["tiny"]
        assert {kind: len(pids) for kind, pids in server.pids.items()} == {"engine": 1, "api": 1, "stage": 1}
        server.process.send_signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
        assert server.finish() == 0


def test_a_stream_finishes_while_the_server_is_told_to_stop_and_new_requests_are_refused(two_stages: Served) -> None:
    server = two_stages
    stream = server.stream(MANY_TOKENS)
    # Nothing can finish while a stage stands still.
    stop(server.pids["stage"][1])
    server.process.send_signal(signal.SIGTERM)
    server.wait_until_refusing()
    assert server.process.poll() is None
    os.kill(server.pids["stage"][1], signal.SIGCONT)
    text, is_complete = _rest_of(stream)
    assert is_complete
    assert MANY_TOKENS / 2 < _num_tokens(text) < MANY_TOKENS  # without those of the first event
    assert server.finish() == 0
    assert server.leftovers() == []
    assert server.lines[-1].endswith("stopped")


def test_a_second_signal_stops_at_once(two_stages: Served) -> None:
    server = two_stages
    stream = server.stream(ENDLESS_TOKENS)
    stop(server.pids["stage"][0])
    server.process.send_signal(signal.SIGINT)
    server.wait_until_refusing()
    assert server.process.poll() is None
    server.process.send_signal(signal.SIGTERM)
    assert server.finish() == 0
    _check_broken_off(stream)
    assert "1 request was cut off" in server.lines[-1]
    assert "Traceback" not in server.log
    assert server.leftovers() == []


def _check_broken_off(stream: http.client.HTTPResponse) -> None:
    """It ended as a whole answer does, with an error as its last event."""
    events = stream.read().decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "not_ready"


def test_what_takes_longer_than_the_drain_is_cut_off(model: str) -> None:
    with serving(model, "--drain-timeout-s", "0.2") as server:
        server.wait_until_ready()
        stream = server.stream(ENDLESS_TOKENS)
        stop(server.pids["stage"][0])
        whole = server.begin_post(8)
        assert server.get("/health")[0] == 200  # connections are taken in their order
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == 0
        _check_broken_off(stream)
        assert whole.getresponse().status == 503
        whole.close()
        assert "Traceback" not in server.log
        assert "2 requests were cut off" in server.lines[-1]
        assert server.leftovers() == []


def test_a_signal_while_the_model_loads_stops_at_once(model: str) -> None:
    with serving(model, "-pp", "2") as server:
        server.wait_until_listening()
        server.note_processes()
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == 0
        assert server.leftovers() == []


def test_a_killed_engine_ends_the_server_in_one_line_and_open_requests_with_an_error(two_stages: Served) -> None:
    server = two_stages
    stream = server.stream(ENDLESS_TOKENS)
    num_lines = len(server.lines)
    os.kill(server.pids["engine"][0], signal.SIGKILL)
    text, is_complete = _rest_of(stream)
    assert not is_complete
    [error] = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {") and "error" in line]
    assert error["error"]["type"] == "server_error"
    assert server.finish() == 1
    said = [line for line in server.lines[num_lines:] if " POST " not in line]
    assert len(said) == 1, said
    assert re.fullmatch(r"stageline: error: the engine was lost: its process \d+ was killed by SIGKILL", said[0])
    assert server.leftovers() == []


def test_a_killed_stage_costs_open_requests_and_the_server_goes_on(two_stages: Served) -> None:
    server = two_stages
    stream = server.stream(ENDLESS_TOKENS)
    num_lines = len(server.lines)
    os.kill(server.pids["stage"][0], signal.SIGKILL)
    text, is_complete = _rest_of(stream)
    assert not is_complete and '"code":"not_ready"' in text
    status, headers, body = server.post(8)
    assert status == 503 and int(headers["Retry-After"]) >= 1 and "was lost" in body["error"]["message"]
    assert server.get("/health")[0] == 503
    server.wait_for_line("the pipeline is complete again", num_lines)
    wait_until(lambda: server.get("/health")[0] == 200)
    assert server.post(8)[0] == 200
    told = [line for line in server.lines[num_lines:] if "was lost" in line]
    assert len(told) == 1 and re.search(r"stage \d \(s\d\) was lost: its process \d+ was killed by SIGKILL", told[0])
    server.note_processes()
    server.process.send_signal(signal.SIGTERM)
    assert server.finish() == 0
    assert server.leftovers() == []


def test_with_wait_a_lost_stage_is_a_pause_that_loses_and_repeats_nothing(model: str, tmp_path: Path) -> None:
    """Also if it cannot be started again at first: there, for want of its files."""
    own = Path(shutil.copytree(model, tmp_path / "model"))
    with serving(str(own), "-pp", "2", "--on-worker-lost", "wait") as server, ThreadPoolExecutor(1) as pool:
        server.wait_until_ready()
        whole = _rest_of(server.stream(MANY_TOKENS))[0]
        stream = server.stream(MANY_TOKENS)
        own.rename(tmp_path / "gone")
        os.kill(server.pids["stage"][1], signal.SIGKILL)
        server.wait_for_line("killed by SIGKILL; the pipeline is started again")
        server.wait_for_line(r"was lost: .* does not exist.*; the pipeline is started again")
        (tmp_path / "gone").rename(own)
        later = pool.submit(server.post, 8)
        text, is_complete = _rest_of(stream)
        assert is_complete and _token_ids(text) == _token_ids(whole)
        assert later.result()[0] == 200


def test_everything_leaves_with_a_killed_supervisor(two_stages: Served) -> None:
    server = two_stages
    stream = server.stream(ENDLESS_TOKENS)
    server.process.kill()
    assert server.finish() == -signal.SIGKILL
    assert not _rest_of(stream)[1]
    assert server.leftovers() == []


def test_an_engine_that_stands_still_keeps_nobody_waiting_and_may_go_on_later(model: str) -> None:
    with (
        serving(model, "-pp", "2", "--heartbeat-timeout-s", "3") as server,
        ThreadPoolExecutor(1) as pool,
    ):
        server.wait_until_ready()
        stream = server.stream(ENDLESS_TOKENS)
        [engine] = server.pids["engine"]
        stop(engine)
        whole = pool.submit(server.post, 8)
        *_, error, done = stream.read().decode().strip().split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "engine_silent"
        status, headers, body = whole.result()
        assert (status, body["error"]["code"]) == (503, "engine_silent")
        status, headers, body = server.post(8)
        assert status == 503 and int(headers["Retry-After"]) >= 1
        assert "no sign of life" in body["error"]["message"] and "stopped" not in body["error"]["message"]
        assert server.get("/load")[1]["is_ready"] is False
        os.kill(engine, signal.SIGCONT)
        wait_until(lambda: server.get("/health")[0] == 200)
        assert server.post(8)[0] == 200
        assert "Traceback" not in server.log


def test_the_time_of_a_request_is_over_also_when_the_engine_does_not_say_so(model: str) -> None:
    with serving(model, "--request-timeout-s", "1", "--heartbeat-timeout-s", "60") as server:
        server.wait_until_ready()
        stop(server.pids["engine"][0])
        status, _, body = server.post(8)
        assert (status, body["error"]["code"]) == (504, "timeout")
        os.kill(server.pids["engine"][0], signal.SIGCONT)
        assert server.post(8)[0] == 200


def test_several_api_processes_answer_on_one_port_and_end_together(model: str) -> None:
    with serving(model, "--api-server-count", "2") as server:
        server.wait_until_ready()
        assert len(server.pids["api"]) == 2
        with ThreadPoolExecutor(8) as pool:
            assert [status for status, _ in pool.map(lambda _: server.get("/v1/models"), range(64))] == [200] * 64
        stream = server.stream(ENDLESS_TOKENS)
        holder = next(pid for pid in server.pids["api"] if _has_connection(pid, stream))
        [other] = set(server.pids["api"]) - {holder}
        stop(server.pids["stage"][0])
        os.kill(other, signal.SIGKILL)
        text, is_complete = _rest_of(stream)
        assert not is_complete and '"error"' in text
        assert server.finish() == 1
        last = r"stageline: error: API process \d was lost: its process \d+ was killed by SIGKILL$"
        assert re.fullmatch(last, server.lines[-1])
        assert server.leftovers() == []


def _has_connection(pid: int, stream: http.client.HTTPResponse) -> bool:
    client = socket.socket(fileno=os.dup(stream.fileno()))
    with client:
        return any(found.raddr == client.getsockname() for found in psutil.Process(pid).net_connections("tcp"))


def test_tls_keys_and_a_proxys_path(model: str, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    (tmp_path / "keys").write_text("# ours\nfrom-file\n")
    client = ssl.create_default_context()
    authority.configure_trust(client)
    flags = ["--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem")]
    flags += ["--api-key-file", str(tmp_path / "keys"), "--root-path", "/llm"]
    with serving(model, *flags, environ={"STAGELINE_API_KEY": "from-environment"}) as server:
        server.wait_until_ready()
        assert server.get("/health", client)[0] == 200
        assert server.get("/v1/models", client)[0] == 401
        for key in ("from-file", "from-environment"):
            assert server.get("/v1/models", client, Authorization=f"Bearer {key}")[0] == 200
        with pytest.raises((http.client.HTTPException, OSError)):
            server.get("/health")
        assert "from-file" not in server.log and "from-environment" not in server.log
        server.process.send_signal(signal.SIGTERM)
        assert server.finish() == 0
        assert "/v1/models: 200" in server.log and "/health: 200" not in server.log, "what machines ask is not logged"


def test_a_model_that_does_not_fit_is_refused_in_one_line(model: str) -> None:
    with serving(model, "--kv-cache-memory", "1") as server:
        assert server.finish() == 2
        assert server.lines[-1].startswith("stageline: error: ")
        server.wait_until_listening()
        assert server.leftovers() == []


def test_processes_of_a_server_cannot_be_started_by_hand() -> None:
    command = [sys.executable, "-m", "stageline.server.api_process"]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (run.returncode, run.stderr) == (1, "an API process is started by the server's supervisor, not by hand\n")
