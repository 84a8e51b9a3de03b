"""What `stageline bench serve` itself costs: CPU time per streamed token, and how late it sends when it is busy.

    python benchmarks/load_generator.py [--streams 256] [--tokens 128]

A server that computes nothing, in a process of its own, streams answers in the form of /v1/completions: each token as
an event, to every stream in turn. The load generator's CPU time over its events is its cost; a core's worth of events
per second is what it could follow, the rate at which it would be the bottleneck.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
from multiprocessing.connection import Connection

from stageline.loadgen.client import LoadClient, Target
from stageline.loadgen.run import LoadRun, PreparedRequest

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
_EVENT = {
    "id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1_700_000_000, "model": "m",
    "choices": [{"index": 0, "text": " token", "logprobs": None, "finish_reason": None}],
}  # fmt: skip


def _serve(num_tokens: int, told: Connection) -> None:
    event = b"data: " + json.dumps(_EVENT).encode() + b"\n\n"
    usage = {"prompt_tokens": 128, "completion_tokens": num_tokens}
    end = b"data: " + json.dumps(_EVENT | {"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(_HEAD)
        for _ in range(num_tokens):
            writer.write(event)
            await writer.drain()
            # Let every other stream have its token first.
            await asyncio.sleep(0)
        writer.write(end)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        told.send_bytes(str(server.sockets[0].getsockname()[1]).encode())
        await server.serve_forever()

    asyncio.run(main())


async def _load(port: int, num_streams: int) -> tuple[int, float, float, float]:
    """Events received, CPU seconds, wall seconds, latest start in seconds."""
    target = Target(f"http://127.0.0.1:{port}", "m", "completions", None, {})
    async with LoadClient(target) as client:
        body = target.body(list(range(128)), 128)
        result = await LoadRun(client, [PreparedRequest(body, 0.0)] * num_streams, None).run()
    assert all(outcome.is_answered for outcome in result.outcomes), result.outcomes[0].message
    num_events = sum(len(outcome.arrivals_s) for outcome in result.outcomes)
    return num_events, result.cpu_s, result.duration_s, max(outcome.late_s for outcome in result.outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    told, tell = multiprocessing.Pipe(duplex=False)
    server = multiprocessing.Process(target=_serve, args=(args.tokens, tell), daemon=True)
    server.start()
    try:
        num_events, cpu_s, wall_s, late_s = asyncio.run(_load(int(told.recv_bytes()), args.streams))
    finally:
        server.terminate()
        server.join()
    print(
        f"{args.streams} streams, {num_events} tokens in {wall_s:.2f} s: {cpu_s / num_events * 1e6:.1f} µs of CPU per "
        f"token, {num_events / cpu_s:,.0f} tokens/s per core; all requests left within {late_s * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
