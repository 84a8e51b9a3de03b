"""From prompts to outputs: starts requests in the engine, all or none, and counts what they cost.

One idea: whoever reads the outputs holds the requests. They are aborted when reading ends early, however it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from stageline.outputs import OutputKind, RequestOutput
from stageline.sampling import SamplingParams
from stageline.server.errors import timed_out
from stageline.server.protocol import PromptTokensDetails, Usage
from stageline.server.protocol_sampling import GenerationRequest
from stageline.server.request_record import RequestRecord
from stageline.server.state import ServerState

Outputs = AsyncIterator[RequestOutput]


@dataclass
class TokenCount:
    """Tokens of one HTTP request, kept up to date in its record.

    Args:
        counts_output: false where what is generated is thrown away.
    """

    record: RequestRecord
    num_prompt_tokens: int
    counts_output: bool = True
    num_output_tokens: int = 0
    _cached_tokens: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.record.num_prompt_tokens = self.num_prompt_tokens

    def add(self, output: RequestOutput, prompt_index: int = 0) -> None:
        """Take one output. Further choices of a prompt find what the first one computed; only the first is counted."""
        for completion in output.outputs:
            if self.counts_output:
                self.num_output_tokens += len(completion.token_ids)
            if completion.index == 0:
                self._cached_tokens[prompt_index] = completion.timings.num_cached_tokens
        self.record.num_output_tokens = self.num_output_tokens

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=self.num_output_tokens,
            total_tokens=self.num_prompt_tokens + self.num_output_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached_tokens.values())),
        )


@asynccontextmanager
async def opened(
    state: ServerState,
    request_id: str,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    request: GenerationRequest,
    kind: OutputKind,
) -> AsyncGenerator[list[Outputs], None]:
    """The outputs of each prompt; what is unfinished is aborted at the end.

    Raises: RequestError, QueueFull, NotReady, WorkerLost or EngineLost, with nothing left running.
    """
    if state.advice_log is not None:
        state.advice_log.request_came()
    async with AsyncExitStack() as stack:
        streams: list[Outputs] = []
        for index, prompt in enumerate(prompts):
            stream = await state.llm.submit(
                prompt,
                params,
                request_id=request_id if len(prompts) == 1 else f"{request_id}-p{index}",
                priority=request.priority or 0,
                cache_salt=request.cache_salt,
                timeout_s=state.config.request_timeout_s,
                output_kind=kind,
            )
            stack.push_async_callback(_close, stream)
            streams.append(stream)
        yield streams


async def _close(stream: Any) -> None:
    await stream.aclose()


async def last_output(state: ServerState, outputs: Outputs) -> RequestOutput:
    """The whole of it. Raises: ApiError 504 if the engine ended it because its time was over."""
    last: RequestOutput | None = None
    async for output in outputs:
        last = output
    assert last is not None and last.is_finished, "the engine gave no last output"
    check_in_time(state, last)
    return last


def check_in_time(state: ServerState, output: RequestOutput) -> None:
    """Raises: ApiError 504 if the engine ended the request because its time was over."""
    if any(completion.finish_reason == "abort" for completion in output.outputs):
        raise timed_out(state.config.request_timeout_s)


async def interleaved(streams: Sequence[Outputs]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Outputs of all streams as they come, each with its stream's place."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    waiting: dict[asyncio.Task[RequestOutput], int] = {
        asyncio.ensure_future(_next(stream)): place for place, stream in enumerate(streams)
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = waiting.pop(task)
                try:
                    output = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(_next(streams[place]))] = place
                yield place, output
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: Outputs) -> RequestOutput:
    return await anext(stream)
