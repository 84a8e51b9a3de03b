"""`make conformance`: a real server judged by tools that others wrote.

llm-comply compares answers with OpenAI's own schema; schemathesis asks everything that /openapi.json allows and much
that it does not, and looks for server errors and answers that are not as described. Takes some minutes.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demo import find_model

MODEL_NAME = "demo"
# All of llm-comply's tests for chats but the one that sends an image.
TEXT_TESTS = (
    "chat-basic-response,chat-system-prompt,chat-multi-turn,chat-tool-calling,chat-streaming-response,"
    "chat-streaming-usage,chat-error-handling"
)
DEADLINE_S = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tools", type=Path, required=True, help="where llm-comply and schemathesis are installed")
    parser.add_argument("--max-examples", type=int, default=50, help="of schemathesis, for each operation")
    args = parser.parse_args()
    # Whoever ends this ends the server, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    with serving("--max-model-len", "1024") as url:
        command = [args.tools / "llm-comply", "--format", "openai-chat", "--base-url", f"{url}/v1", "--api-key", "none"]
        comply = subprocess.run([*command, "--model", MODEL_NAME, "--filter", TEXT_TESTS], check=False).returncode
    # Most requests say nothing of an answer's length: a short model keeps it short.
    with serving("--max-model-len", "64", "--quantization", "int8") as url:
        command = [args.tools / "schemathesis", "run", f"{url}/openapi.json", "--continue-on-failure", "--no-shrink"]
        # What fits the schema may still be refused: for its length, or for a grammar that no schema describes.
        command += ["--exclude-checks", "positive_data_acceptance", "--max-examples", str(args.max_examples)]
        # Some ask for 128 choices.
        command += ["--request-timeout", str(DEADLINE_S)]
        schema = subprocess.run(command, check=False).returncode
    return comply or schema


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """The demo model on two stages. Gives the server's address."""
    command = [Path(sys.executable).parent / "stageline", "serve", find_model(), "-pp", "2", "--port", "0", *flags]
    command += ["--served-model-name", MODEL_NAME, "--disable-log-requests"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            for line in server.stderr:
                sys.stderr.write(line)
                if found := re.search(r"ready after .*: (http://\S+)/v1", line):
                    break
            else:
                sys.exit("the server ended before it was ready")
            threading.Thread(target=sys.stderr.writelines, args=[server.stderr], daemon=True).start()
            yield found[1]
        finally:
            server.terminate()
            server.wait(DEADLINE_S)


if __name__ == "__main__":
    sys.exit(main())
