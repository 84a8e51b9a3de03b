"""The asking side: sends requests over HTTP and takes the time of every part of their answers.

One idea: the clock is read when bytes arrive, before anything is made of them; bodies are encoded before the run.
Tokens are counted by the server, in the `usage` that ends a stream, never by its parts.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import msgspec

from stageline.errors import ConfigError
from stageline.loadgen.outcome import Outcome
from stageline.loadgen.prompts import words

Endpoint = Literal["completions", "chat"]
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_QUESTION_TIMEOUT_S = 30.0
_MOST_SHOWN = 300


@dataclass(frozen=True)
class Target:
    """Which server is asked, and how.

    Args:
        base_url: without the path of an endpoint, such as http://127.0.0.1:8000.
        model: what the server calls it.
        extra: fields of every request's body besides those that the plan gives.
        timeout_s: longest silence of the server; None waits for ever.
        ca_file: certificates that an https server's is checked against, instead of the system's.
    """

    base_url: str
    model: str
    endpoint: Endpoint
    api_key: str | None
    extra: dict[str, Any]
    timeout_s: float | None = None
    ca_file: str | None = None

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1") + _PATHS[self.endpoint]

    def body(self, prompt: str | list[int], num_output_tokens: int) -> bytes:
        """A request as it is sent."""
        fields: dict[str, Any] = {"model": self.model, "max_tokens": num_output_tokens}
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        return msgspec.json.encode(fields | {"stream": True, "stream_options": {"include_usage": True}} | self.extra)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def brings_something(self) -> bool:
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | str | None = None


class _ModelCard(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelCard] = []


class _Tokens(msgspec.Struct):
    tokens: list[int]


class LoadClient:
    """One per run; opened and closed by `async with`. As many connections as there are requests at once."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._decode = msgspec.json.Decoder(_Event).decode

    async def __aenter__(self) -> LoadClient:
        try:
            context = ssl.create_default_context(cafile=self.target.ca_file)
        except OSError as error:
            raise ConfigError(f"--ca-file {self.target.ca_file} holds no certificates: {error}") from None
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if self.target.api_key:
            headers["Authorization"] = f"Bearer {self.target.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=context),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self.target.timeout_s),
            headers=headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, body: bytes, start_s: float, planned_s: float | None) -> Outcome:
        """Send one request and follow its answer; a failure is an outcome, too.

        Args:
            start_s: of the run, on the event loop's clock.
        """
        loop = asyncio.get_running_loop()
        answer = _Answer(planned_s, loop.time() - start_s)
        try:
            async with self._session.post(self.target.url, data=body) as response:
                if response.status != 200:
                    answer.fail(f"HTTP {response.status}", await response.text(errors="replace"))
                else:
                    await self._follow(response, answer, start_s, loop)
        except TimeoutError:
            answer.fail("timeout", f"the server was silent for {self.target.timeout_s} s")
        except (aiohttp.ClientError, OSError) as error:
            answer.fail("connection", f"{type(error).__name__}: {error}")
        return answer.outcome(loop.time() - start_s)

    async def _follow(
        self, response: aiohttp.ClientResponse, answer: _Answer, start_s: float, loop: asyncio.AbstractEventLoop
    ) -> None:
        lines = _Lines()
        async for chunk in response.content.iter_any():
            now_s = loop.time() - start_s
            for line in lines.feed(chunk):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    answer.is_complete = True
                    continue
                try:
                    answer.take(self._decode(data), now_s)
                except (msgspec.DecodeError, RecursionError) as error:
                    answer.fail("not understood", f"{error}: {data[:_MOST_SHOWN]!r}")
                    return
        if not answer.is_complete:
            answer.fail("broken off", "the stream ended before its end was told")

    # ---- what has to be known before ----

    async def model(self, wanted: str | None) -> tuple[str, int | None]:
        """The model's name, and its length if the server tells. Raises: ConfigError."""
        models = (await self._question("GET", "/v1/models", _ModelList)).data
        found = [card for card in models if wanted in (None, card.id)]
        if found:
            return found[0].id, found[0].max_model_len
        names = ", ".join(card.id for card in models) or "none"
        raise ConfigError(f"--model {wanted!r} is not served by {self.target.base_url}, which has: {names}")

    async def word_tokens(self) -> list[int] | None:
        """Token ids of some common words; None if the server does not tokenise for others."""
        body = {"model": self.target.model, "prompt": " ".join(words()), "add_special_tokens": False}
        try:
            answer: _Tokens = await self._question("POST", "/tokenize", _Tokens, msgspec.json.encode(body))
            return answer.tokens
        except ConfigError:
            return None

    async def _question(self, method: str, path: str, kind: Any, body: bytes | None = None) -> Any:
        url = self.target.base_url.rstrip("/").removesuffix("/v1") + path
        try:
            async with asyncio.timeout(_QUESTION_TIMEOUT_S), self._session.request(method, url, data=body) as response:
                text = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            reason = _words(error) or f"no answer within {_QUESTION_TIMEOUT_S:g} s"
            raise ConfigError(f"{url} cannot be asked: {reason}; is the server up, and --base-url right?") from None
        try:
            if response.status == 200:
                return msgspec.json.decode(text, type=kind)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{url} did not answer as an OpenAI server does: {error}") from None
        shown = text[:_MOST_SHOWN].decode(errors="replace")
        raise ConfigError(f"{url} answered HTTP {response.status}: {shown}")


def _words(error: Exception) -> str:
    """Without what the HTTP client says of its own settings."""
    refused = isinstance(error, OSError) and error.errno == errno.ECONNREFUSED
    return "the connection is refused" if refused else str(error).replace(" ssl:default", "")


class _Lines:
    """Bytes as they come, line by line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        yield from lines


class _Answer:
    """An answer while it comes."""

    def __init__(self, planned_s: float | None, sent_s: float) -> None:
        self.is_complete = False
        self._planned_s = planned_s
        self._sent_s = sent_s
        self._arrivals_s: list[float] = []
        self._usage = _Usage()
        self._finish_reason: str | None = None
        self._error: str | None = None
        self._message = ""

    def take(self, event: _Event, now_s: float) -> None:
        if event.error is not None:
            self.fail("error event", event.error if isinstance(event.error, str) else event.error.message)
        for choice in event.choices:
            self._finish_reason = self._finish_reason or choice.finish_reason
        if any(choice.brings_something for choice in event.choices):
            self._arrivals_s.append(now_s)
        self._usage = event.usage or self._usage

    def fail(self, error: str, message: str) -> None:
        """The first failure stays: later ones follow from it."""
        if self._error is None:
            self._error, self._message = error, message[:_MOST_SHOWN]

    def outcome(self, now_s: float) -> Outcome:
        details = self._usage.prompt_tokens_details
        return Outcome(
            planned_s=self._planned_s,
            sent_s=self._sent_s,
            ended_s=now_s,
            arrivals_s=self._arrivals_s,
            num_prompt_tokens=self._usage.prompt_tokens,
            num_output_tokens=self._usage.completion_tokens,
            num_cached_tokens=(details.cached_tokens or 0) if details else 0,
            finish_reason=self._finish_reason,
            error=self._error,
            message=self._message,
        )
