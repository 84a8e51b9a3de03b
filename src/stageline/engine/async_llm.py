"""The engine for asyncio: text in, streams of text out, the work done in processes of their own.

    llm = await AsyncLLM.start(EngineConfig(model="model.gguf", pipeline_parallel_size=2))
    async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=100)):
        print(output.outputs[0].text, end="")
    await llm.close()

One idea: this process knows text, the engine's process knows tokens. Neither waits for the other, or for a slow reader.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Collection, Sequence
from weakref import WeakValueDictionary

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.generation_defaults import generation_defaults
from stageline.checkpoint.model_spec import ModelSpec
from stageline.checkpoint.tokenizer import Tokenizer, load_tokenizer
from stageline.clock import Clock, MonotonicClock
from stageline.config.engine_config import EngineConfig
from stageline.engine.engine_process import EngineProcess
from stageline.engine.frontend import Prompt
from stageline.engine.input_processor import InputProcessor
from stageline.engine.messages import EngineLink
from stageline.engine.output_processor import OutputProcessor
from stageline.engine.replicas import ReplicaSet
from stageline.engine.request_stream import RequestStream
from stageline.engine.startup import choose_max_model_len
from stageline.engine.stats import EngineStats
from stageline.errors import RequestOverdue, StagelineError
from stageline.executor.executor import OnProgress
from stageline.outputs import OutputKind, RequestOutput
from stageline.request import EngineRequest, RequestUpdate
from stageline.sampling import SamplingParams
from stageline.timeline.recorder import DEFAULT_CAPACITY
from stageline.timeline.span import Span

logger = logging.getLogger(__name__)

_LONGEST_INLINE_PROMPT = 1000
"""Characters, or token ids, whose checking and encoding takes less time than handing them to a thread."""

_MOST_INLINE_ENTRIES = 100
"""The same for what parameters list: each bad word is turned into tokens twice."""

_GOODBYE_S = 5.0

_OVERTIME_S = 1.0
"""How long the engine, which watches the time of requests too, may take to say that one is over."""


class AsyncLLM:
    """A model on a pipeline of stages. Made by `start` or `attach`; belongs to the event loop it was made in."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        links: Sequence[EngineLink],
        on_load_progress: OnProgress | None,
        process: EngineProcess | None,
    ) -> None:
        self.config = config
        self.clock: Clock = MonotonicClock()
        self.spec: ModelSpec = checkpoint.spec
        self.tokenizer = tokenizer
        self.max_model_len = choose_max_model_len(config, checkpoint)
        self._inputs = InputProcessor(
            self.spec, tokenizer, self.max_model_len, config.seed, generation_defaults(checkpoint)
        )
        self._outputs = OutputProcessor(tokenizer, self.clock)
        self._loop = asyncio.get_running_loop()
        # A stream that nobody holds any more is garbage, and aborts its request.
        self._streams: WeakValueDictionary[str, RequestStream] = WeakValueDictionary()
        self._id_prefix = f"c{links[0].client_index}"
        self._next_request = itertools.count()
        self._process = process
        self._replicas = ReplicaSet(
            config, links, self.clock, self._take, self._fail, self._end_overdue, on_load_progress
        )
        if process is not None:
            self._loop.add_reader(process.exit_fd, self._read_process)

    @classmethod
    async def start(cls, config: EngineConfig, on_load_progress: OnProgress | None = None) -> AsyncLLM:
        """Start an engine and wait until it is ready.

        Args:
            on_load_progress: called with (stage index, bytes read, bytes in all) while the stages load.
        Raises: ConfigError for what cannot work; WorkerLost, EngineLost if it dies on the way. Nothing is left then.
        """
        config.check()
        checkpoint = await asyncio.to_thread(open_checkpoint, config.model)
        choose_max_model_len(config, checkpoint)
        process = EngineProcess(config, checkpoint.path, num_clients=1)
        llm = None
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, checkpoint, config.tokenizer, config.chat_template)
            llm = cls(config, checkpoint, tokenizer, process.links, on_load_progress, process)
            await llm.wait_until_ready()
        except BaseException:
            if llm is not None:
                llm._leave()
            process.end(0.0)
            raise
        return llm

    @classmethod
    async def attach(
        cls, config: EngineConfig, *links: EngineLink, on_load_progress: OnProgress | None = None
    ) -> AsyncLLM:
        """Use an engine, or several equal ones, that another process started with the same configuration.

        They may still be loading.

        Raises: ConfigError for what cannot work; EngineLost if its process has ended.
        """
        checkpoint = await asyncio.to_thread(open_checkpoint, config.model)
        tokenizer = await asyncio.to_thread(load_tokenizer, checkpoint, config.tokenizer, config.chat_template)
        return cls(config, checkpoint, tokenizer, links, on_load_progress, None)

    # ---- is it there? ----

    @property
    def is_ready(self) -> bool:
        """Whether an engine is."""
        return self._replicas.is_ready

    @property
    def num_replicas(self) -> int:
        return len(self._replicas.clients)

    @property
    def healthy_replicas(self) -> list[int]:
        """Those that are ready and show signs of life and progress."""
        return self._replicas.healthy(self.clock.now_s())

    async def wait_until_ready(self) -> None:
        """Wait until a token went through all stages. Raises: ConfigError, WorkerLost, EngineLost if none ever will."""
        await self._replicas.wait_until_ready()

    def startup_table(self) -> str:
        """Which stage holds what; empty until the engine is ready."""
        return self._replicas.startup_table()

    def check_health(self) -> None:
        """Whether the pipeline works, or one of several, not only this process.

        Raises: NotReady while the model loads; WorkerLost, EngineLost, InternalError with the reason if it is gone;
            EngineSilent if it shows no sign of life, or completes no microbatch while some are in flight.
        """
        self._replicas.check_health(self.clock.now_s())

    def check_takes_requests(self) -> None:
        """Whether a request would be answered, perhaps once a lost stage is back. Raises: as `check_health`."""
        self._replicas.check_takes_requests(self.clock.now_s())

    # ---- what users ask ----

    def default_sampling_params(self) -> SamplingParams:
        """What the model's authors recommend, as far as they say; otherwise the defaults of `SamplingParams`."""
        return self._inputs.default_params()

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. A long one does not keep the event loop waiting."""
        if len(text) <= _LONGEST_INLINE_PROMPT:
            return self.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        output_kind: OutputKind = OutputKind.DELTA,
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt: `submit`, as a generator that raises at its first step."""
        stream = await self.submit(
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
            output_kind=output_kind,
        )
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        output_kind: OutputKind = OutputKind.DELTA,
    ) -> RequestStream:
        """Queue a request, and return the stream of its outputs once the engine has taken it.

        Leaving the stream early (`aclose`, cancelling, dropping it) aborts the request. What a slow reader has not
        taken comes in one output.

        Args:
            prompt: a text, or token ids.
            request_id: what its outputs call it; need not be unique.
            priority: smaller is served first.
            cache_salt: cached prefixes are shared only with requests of the same salt.
            timeout_s: after this time it ends unfinished, with the finish reason "abort".
            output_kind: what its outputs hold.
        Raises: RequestError if it cannot be served; QueueFull, NotReady if not now; WorkerLost, EngineLost,
            InternalError if the engine is gone.
        """
        self._replicas.check_is_there()
        engine_id = f"{self._id_prefix}.{next(self._next_request)}"
        arrival_s = self.clock.now_s()
        deadline_s = None if timeout_s is None else arrival_s + timeout_s
        options = (engine_id, prompt, params, arrival_s, priority, cache_salt or "", deadline_s)
        if _is_quick(prompt, params):
            requests = self._inputs.process(*options)
        else:
            requests = await asyncio.to_thread(self._inputs.process, *options)
            self._replicas.check_is_there()
        return await self._queue(engine_id, request_id or engine_id, prompt, params, requests, output_kind, timeout_s)

    async def _queue(
        self,
        engine_id: str,
        label: str,
        prompt: Prompt,
        params: SamplingParams,
        requests: list[EngineRequest],
        kind: OutputKind,
        timeout_s: float | None,
    ) -> RequestStream:
        text = prompt if isinstance(prompt, str) else None
        token_ids = requests[0].prompt_token_ids
        self._outputs.add(engine_id, text, token_ids, params, requests, kind, label)
        stream = RequestStream(
            fetch=lambda: self._fetch(engine_id),
            leave=lambda: self._abort(engine_id),
            drop=lambda: self._abort_soon(engine_id),
            timeout_s=timeout_s,
            deadline_s=requests[0].deadline_s,
        )
        self._streams[engine_id] = stream
        try:
            await self._replicas.add(requests)
        except BaseException as error:
            # If it was refused, there is nothing to abort; if the wait was cancelled, there may be.
            if isinstance(error, StagelineError):
                self._forget(engine_id)
            stream.close()
            raise
        return stream

    # ---- what the engine tells ----

    def _take(self, updates: Sequence[RequestUpdate]) -> None:
        changes = self._outputs.take(updates)
        self._replicas.abort(changes.finished_early, "stop")
        for engine_id in changes.request_ids:
            stream = self._streams.get(engine_id)
            if stream is not None:
                stream.notify()
        for engine_id, failure in changes.failures.items():
            self._replicas.abort(failure.unfinished, "abort")
            stream = self._streams.pop(engine_id, None)
            if stream is not None:
                stream.fail(failure.error)

    def _fetch(self, engine_id: str) -> RequestOutput:
        output = self._outputs.output(engine_id)
        if output.is_finished:
            self._streams.pop(engine_id, None)
        return output

    def _abort_soon(self, engine_id: str) -> None:
        """From any thread: a stream that was dropped is closed by the garbage collector."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._abort, engine_id)

    def _abort(self, engine_id: str) -> None:
        self._replicas.abort(self._forget(engine_id), "abort")

    def _forget(self, engine_id: str) -> list[str]:
        self._streams.pop(engine_id, None)
        return self._outputs.abort(engine_id)

    def _fail(self, error: StagelineError, engine_requests: Collection[str]) -> None:
        """An engine has lost them. An answer that is whole can still be read."""
        for engine_id in self._outputs.requests_of(engine_requests):
            stream = self._streams.get(engine_id)
            self._replicas.abort(self._forget(engine_id), "abort")
            if stream is not None:
                stream.fail(error)

    # ---- when it tells nothing ----

    def break_off(self, error: StagelineError) -> None:
        """Fail all that is open, and all that is asked from now on, as if the engine were gone; for who leaves."""
        self._replicas.lose(error)

    def replace_replica(self, index: int, link: EngineLink) -> None:
        """One of the engines was lost, and another one takes its place; it may still be loading."""
        self._replicas.replace(index, link)

    def _end_overdue(self) -> None:
        now_s = self.clock.now_s()
        for engine_id, stream in list(self._streams.items()):
            if stream.deadline_s is not None and now_s > stream.deadline_s + _OVERTIME_S:
                words = f"the request was not finished within {stream.timeout_s:g} seconds, nor ended by the engine"
                self._give_up(engine_id, stream, RequestOverdue(words))

    def _give_up(self, engine_id: str, stream: RequestStream, error: StagelineError) -> None:
        if self._outputs.is_finished(engine_id):
            return  # its reader is slow
        running = self._forget(engine_id)
        # If the engine goes on some day, it need not go on with this.
        self._replicas.abort(running, "abort")
        self._replicas.fail_questions(error, running)
        stream.fail(error)

    # ---- what users look at ----

    async def stats(self, replica: int | None = None) -> EngineStats:
        """What the engine did since its start. Raises: NotReady while it loads; what it failed with.

        Args:
            replica: which one of several; None for the first that is there.
        """
        return await self._replicas.asked(replica).stats()

    async def spans(
        self, since_s: float = 0.0, most_per_stage: int = DEFAULT_CAPACITY, replica: int | None = None
    ) -> list[Span]:
        """What every stage and the engine did since then, on `clock`, as far as their rings remember.

        Args:
            most_per_stage: if there are more, the newest of them.
            replica: as for `stats`.
        """
        return await self._replicas.asked(replica).spans(since_s, most_per_stage)

    # ---- the end ----

    def _read_process(self) -> None:
        assert self._process is not None
        if self._process.read() is None:
            self._loop.remove_reader(self._process.exit_fd)

    def _leave(self) -> None:
        self._replicas.close()
        if self._process is not None:
            self._loop.remove_reader(self._process.exit_fd)

    async def close(self) -> None:
        """Fail what is still open; if this object started the engine, end it. May be called twice."""
        self._leave()
        if self._process is not None:
            process, self._process = self._process, None
            await asyncio.to_thread(process.end, _GOODBYE_S)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _is_quick(prompt: Prompt, params: SamplingParams) -> bool:
    """Whether preparing it takes less time than a thread's turn. A grammar has to be compiled."""
    is_short = not isinstance(prompt, str | list | tuple) or len(prompt) <= _LONGEST_INLINE_PROMPT
    lists = (params.bad_words, params.logit_bias, params.allowed_token_ids, params.stop_token_ids)
    is_plain = all(entries is None or len(entries) <= _MOST_INLINE_ENTRIES for entries in lists)
    return is_short and is_plain and params.structured_outputs is None
