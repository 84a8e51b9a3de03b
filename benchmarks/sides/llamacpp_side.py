"""llama.cpp as a side: its server alone, or with the layers on RPC servers, one thread each, as our stages are.

    python llamacpp_side.py MODEL.gguf --llama-server PATH [--rpc-server PATH --layers 17,14] [--settings JSON_LIST]

Prompts go as token ids over its HTTP API, all at once. The last number of layers counts the output layer too, as
llama.cpp's `--tensor-split` does.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from workload import Prompts, serve

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 120.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def process(command: list[str], ready: str) -> Iterator[None]:
    """Run a command until the block ends; it is ready once a line of its output has these words."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)
    seen = threading.Event()
    lines: list[str] = []

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            if ready in line:
                seen.set()
        seen.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        if not seen.wait(_START_TIMEOUT_S) or child.poll() is not None:
            raise SystemExit(f"{' '.join(command)} did not start:\n{''.join(lines[-20:])}")
        yield
    finally:
        child.terminate()
        child.wait()


def complete(port: int, prompt: list[int], output_len: int) -> int:
    """One request; returns the tokens it generated."""
    connection = http.client.HTTPConnection(_HOST, port)
    body = {
        "prompt": prompt,
        "n_predict": output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    connection.close()
    if response.status != 200:
        raise SystemExit(f"llama-server answered {response.status}: {answer}")
    return len(answer["tokens"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--llama-server", required=True)
    parser.add_argument("--rpc-server")
    parser.add_argument("--layers", help="layers per RPC server, the output layer with the last")
    parser.add_argument("--settings", type=json.loads, default=[])
    args = parser.parse_args()
    started_s = time.perf_counter()
    with contextlib.ExitStack() as stack:
        remote: list[str] = []
        if args.rpc_server:
            ports = [free_port() for _ in args.layers.split(",")]
            for rpc_port in ports:
                command = [args.rpc_server, "--host", _HOST, "--port", str(rpc_port), "--threads", "1"]
                # The last line before it listens; llama-server connects when it has been loaded, which is later.
                stack.enter_context(process(["stdbuf", "-oL", *command], "transport"))
            names = ",".join(f"RPC{index}" for index in range(len(ports)))
            servers = ",".join(f"{_HOST}:{rpc_port}" for rpc_port in ports)
            remote = ["--rpc", servers, "--device", names, "--tensor-split", args.layers, "-ngl", "999"]
        port = free_port()
        command = [args.llama_server, "-m", args.model, "--host", _HOST, "--port", str(port), *remote, *args.settings]
        stack.enter_context(process(command, "listening on"))

        def run_once(prompts: Prompts, output_len: int) -> int:
            with ThreadPoolExecutor(len(prompts)) as pool:
                return sum(pool.map(lambda prompt: complete(port, prompt, output_len), prompts))

        serve(run_once, started_s)


if __name__ == "__main__":
    main()
