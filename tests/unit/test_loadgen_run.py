"""The load generator against a scripted server on a real socket: loops, times, and every way an answer can fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from stageline.loadgen.client import LoadClient, Target
from stageline.loadgen.outcome import Outcome
from stageline.loadgen.report import Distribution, Objective, Report, format_rates, format_report
from stageline.loadgen.run import LoadRun, PreparedRequest, RunResult

DEADLINE_S = 30.0
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def event(**fields: object) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def token(text: str) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": None}])


DONE = event(choices=[{"text": "", "finish_reason": "stop"}]) + event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"
ANSWER = HEAD + token("a") + token("") + token("b") + token("c") + DONE

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


def answering(body: bytes) -> Script:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(body)

    return answer


class Scripted:
    """Answers every request as the script says; knows how many were open at once."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.bodies: list[bytes] = []
        self.num_open = self.most_open = 0

    async def __aenter__(self) -> Scripted:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            self.bodies.append(await reader.readexactly(length))
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
            await self._script(writer)
            await writer.drain()
            self.num_open -= 1
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def run(script: Script, timeout_s: float | None = None) -> tuple[Outcome, Scripted]:
    """What becomes of one request."""

    async def main() -> tuple[Outcome, Scripted]:
        async with Scripted(script) as server, asyncio.timeout(DEADLINE_S):
            target = Target(f"http://127.0.0.1:{server.port}", "m", "completions", None, {}, timeout_s)
            async with LoadClient(target) as client:
                result = await LoadRun(client, [PreparedRequest(target.body([1, 2], 3), None)], None).run()
                [outcome] = result.outcomes
                return outcome, server

    return asyncio.run(main())


def test_an_answer_is_timed_by_its_parts_and_counted_by_the_server() -> None:
    outcome, server = run(answering(ANSWER))
    assert outcome.error is None and outcome.finish_reason == "stop"
    assert len(outcome.arrivals_s) == 3, "an empty part brings nothing"
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens, outcome.num_cached_tokens) == (7, 3, 2)
    assert 0 <= outcome.sent_s <= outcome.arrivals_s[0] <= outcome.arrivals_s[-1] <= outcome.ended_s
    sent = json.loads(server.bodies[0])
    assert sent["stream"] and sent["stream_options"] == {"include_usage": True} and sent["max_tokens"] == 3


def test_an_event_may_come_in_pieces_and_events_together() -> None:
    async def in_pieces(writer: asyncio.StreamWriter) -> None:
        for byte in ANSWER:
            writer.write(bytes([byte]))
            await writer.drain()

    assert run(in_pieces)[0].num_output_tokens == 3
    crlf = ANSWER[len(HEAD) :].replace(b"\n", b"\r\n")
    assert len(run(answering(HEAD + b": a comment\r\n\r\n" + crlf))[0].arrivals_s) == 3


@pytest.mark.parametrize(
    ("body", "error", "told"),
    [
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull", "HTTP 429", "full"),
        (HEAD + token("a") + event(error={"message": "stage 1 was lost"}) + DONE, "error event", "stage 1 was lost"),
        (HEAD + token("a"), "broken off", "ended before"),
        (HEAD + b"data: {nonsense\n\n", "not understood", "nonsense"),
        (HEAD + b'data: {"x":' + b"[" * 9000 + b"]" * 9000 + b"}\n\n", "not understood", "depth"),
        (b"", "connection", "Disconnected"),
        (b"junk\r\n\r\n", "connection", ""),
    ],
)
def test_a_failure_has_a_kind_and_the_servers_words(body: bytes, error: str, told: str) -> None:
    outcome = run(answering(body))[0]
    assert outcome.error == error and told in outcome.message and not outcome.is_answered


def test_a_silent_server_is_given_up() -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token("a"))
        await writer.drain()
        await asyncio.Event().wait()

    assert run(silent, timeout_s=0.2)[0].error == "timeout"


def test_a_closed_loop_keeps_as_many_requests_under_way_as_asked() -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def when_all_came(writer: asyncio.StreamWriter) -> None:
            if server.num_open == 4:
                gate.set()
            await gate.wait()
            writer.write(ANSWER)

        async with Scripted(when_all_came) as server, asyncio.timeout(DEADLINE_S):
            target = Target(f"http://127.0.0.1:{server.port}", "m", "completions", None, {})
            async with LoadClient(target) as client:
                requests = [PreparedRequest(target.body([1], 1), None) for _ in range(20)]
                result = await LoadRun(client, requests, 4).run()
        assert [outcome.error for outcome in result.outcomes] == [None] * 20
        assert server.most_open == 4

    asyncio.run(main())


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Every request comes though none is answered before the last has come."""

    async def main() -> None:
        all_came = asyncio.Event()

        async def after_the_last(writer: asyncio.StreamWriter) -> None:
            if server.num_open == 5:
                all_came.set()
            await all_came.wait()
            writer.write(ANSWER)

        async with Scripted(after_the_last) as server, asyncio.timeout(DEADLINE_S):
            target = Target(f"http://127.0.0.1:{server.port}", "m", "completions", None, {})
            async with LoadClient(target) as client:
                requests = [PreparedRequest(target.body([1], 1), 0.02 * index) for index in range(5)]
                result = await LoadRun(client, requests, None).run()
        assert len(result.outcomes) == 5
        assert all(one.sent_s >= one.planned_s for one in result.outcomes)

    asyncio.run(main())


def test_a_stopped_run_has_the_outcomes_so_far() -> None:
    async def main() -> RunResult:
        async with Scripted(answering(ANSWER)) as server, asyncio.timeout(DEADLINE_S):
            target = Target(f"http://127.0.0.1:{server.port}", "m", "completions", None, {})
            async with LoadClient(target) as client:
                body, is_first_done = target.body([1], 1), asyncio.Event()
                requests = [PreparedRequest(body, 0.0), PreparedRequest(body, 3600.0)]
                load = LoadRun(client, requests, None, is_first_done.set)
                running = asyncio.create_task(load.run())
                await is_first_done.wait()
                load.stop()
                return await running

    result = asyncio.run(main())
    assert len(result.outcomes) == 1 and result.num_planned == 2


def test_an_error_of_the_program_itself_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        client = LoadClient(Target("http://127.0.0.1:1", "m", "completions", None, {}))

        async def ask(body: bytes, *_: object) -> Outcome:
            if body:
                raise KeyError("a fault")
            return await asyncio.Future()

        monkeypatch.setattr(client, "ask", ask)
        requests = [PreparedRequest(b"", None), PreparedRequest(b"fails", None), PreparedRequest(b"", 3600.0)]
        async with asyncio.timeout(DEADLINE_S):
            await LoadRun(client, requests, None).run()

    with pytest.raises(KeyError):
        asyncio.run(main())


def outcome(ttft_s: float, tpot_s: float, num_tokens: int = 11, error: str | None = None) -> Outcome:
    arrivals_s = [1.0 + ttft_s + tpot_s * index for index in range(num_tokens)]
    return Outcome(
        planned_s=1.0, sent_s=1.0, ended_s=arrivals_s[-1], arrivals_s=arrivals_s, num_prompt_tokens=5,
        num_output_tokens=num_tokens, error=error, message="words",
    )  # fmt: skip


def report(*outcomes: Outcome, objective: Objective | None = None) -> Report:
    return Report(RunResult(outcomes, 10.0, len(outcomes), 0.5), objective, 2.0, None)


def test_goodput_counts_answers_that_keep_to_every_limit() -> None:
    objective = Objective.parse(["ttft:500", "tpot:50"])
    outcomes = [outcome(0.4, 0.04), outcome(0.6, 0.04), outcome(0.4, 0.06), outcome(0.5, 0.9, num_tokens=1)]
    found = report(*outcomes, outcome(0.1, 0.01, error="HTTP 500"), objective=objective)
    assert found.num_good == 2 and found.as_json()["request_goodput"] == pytest.approx(0.2)


def test_a_report_says_what_was_measured() -> None:
    found = report(outcome(0.1, 0.02), outcome(0.3, 0.04), outcome(9.0, 9.0, error="HTTP 429"))
    fields = found.as_json()
    assert fields["mean_ttft_ms"] == pytest.approx(200) and fields["median_tpot_ms"] == pytest.approx(30)
    assert fields["p99_itl_ms"] == pytest.approx(40) and fields["mean_e2el_ms"] == pytest.approx(500)
    assert (fields["completed"], fields["failed"], fields["errors"]) == (2, 1, {"HTTP 429": 1})
    assert fields["output_throughput"] == pytest.approx(2.2) and fields["client_cpu_fraction"] == pytest.approx(0.05)
    text = format_report(found)
    assert "2 of 3 requests answered" in text and "1 failed: HTTP 429 (words)" in text
    assert "2" in format_rates([found, found]).splitlines()[1]


def test_nothing_answered_is_reported_too() -> None:
    found = report(outcome(1, 1, error="timeout"))
    assert found.as_json()["mean_ttft_ms"] is None and "0 of 1 requests" in format_report(found)
    assert Distribution.of([]) is None
