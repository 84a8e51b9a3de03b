"""AsyncLLM over an engine's process and two stages: the tokens of LLM, for many at once; who leaves leaves nothing."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from stageline import LLM, AsyncLLM, SamplingParams
from stageline.config.engine_config import EngineConfig
from stageline.errors import EngineLost, QueueFull, RequestError
from stageline.outputs import OutputKind, RequestOutput
from tests.pipeline.failing import SETTINGS
from tests.pipeline.test_structured import TOO_MUCH_LATER
from tests.tiny_models import TinyModel

PROMPTS = ["hello", "the sea", "a", "Zürich 日本"]
MAX_NUM_SEQS, MAX_QUEUE = 8, 72
ENGINE: dict[str, Any] = {
    **SETTINGS, "pipeline_parallel_size": 2, "max_num_seqs": MAX_NUM_SEQS, "max_queue": MAX_QUEUE
}  # fmt: skip

Result = TypeVar("Result")
Run = Callable[[Coroutine[Any, Any, Result]], Result]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    # A request without an end shall still be running when it is left, however slow the one who leaves.
    return str(TinyModel(max_position_embeddings=4096).write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def run() -> Iterator[Run[Any]]:
    """Runs coroutines one after the other in one event loop."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def llm(model: str, run: Run[Any]) -> Iterator[AsyncLLM]:
    started = run(AsyncLLM.start(EngineConfig(model=model, **ENGINE)))
    yield started
    run(started.close())


@pytest.fixture(scope="module")
def reference(model: str) -> Iterator[LLM]:
    with LLM(model, **{**SETTINGS, "distributed_executor_backend": "in_process"}) as one_process:
        yield one_process


def greedy(max_tokens: int | None, **others: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **others)


async def joined(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    """Deltas to their end, put together."""
    whole: RequestOutput | None = None
    async for output in outputs:
        whole = output if whole is None else output.after(whole)
    assert whole is not None and whole.is_finished
    return whole


async def expect_nothing_left(llm: AsyncLLM) -> None:
    # Results come in order: when this one has ended, nothing of those before it is in flight.
    await joined(llm.generate([9, 9], greedy(1)))
    now = (await llm.stats()).scheduler
    assert (now.num_running, now.num_waiting, now.num_used_blocks) == (0, 0, 0)


# ---- the same tokens ----


@pytest.mark.parametrize("kind", OutputKind)
def test_every_kind_of_output_gives_the_tokens_of_one_process(
    llm: AsyncLLM, reference: LLM, run: Run[Any], kind: OutputKind
) -> None:
    params = greedy(24, n=2, logprobs=1, prompt_logprobs=0)

    async def ask(prompt: str) -> RequestOutput:
        seen = [output async for output in llm.generate(prompt, params, output_kind=kind)]
        assert (len(seen) == 1) == (kind is OutputKind.FINAL_ONLY)
        if kind is not OutputKind.DELTA:
            return seen[-1]
        whole = seen[0]
        for output in seen[1:]:
            whole = output.after(whole)
        return whole

    async def ask_all() -> list[RequestOutput]:
        return await asyncio.gather(*(ask(prompt) for prompt in PROMPTS))

    for found, expected in zip(run(ask_all()), reference.generate(PROMPTS, params, use_tqdm=False), strict=True):
        assert found.prompt_token_ids == expected.prompt_token_ids
        assert [one.token_ids for one in found.outputs] == [one.token_ids for one in expected.outputs]
        assert [one.text for one in found.outputs] == [one.text for one in expected.outputs]
        assert [one.finish_reason for one in found.outputs] == ["length", "length"]
        for one in found.outputs:
            assert one.logprobs is not None and len(one.logprobs) == 24
        assert found.prompt_logprobs is not None and len(found.prompt_logprobs) == len(found.prompt_token_ids)


def test_a_stop_string_ends_the_request_in_the_engine_too(llm: AsyncLLM, reference: LLM, run: Run[Any]) -> None:
    [whole] = reference.generate("hello", greedy(40), use_tqdm=False)
    stop = whole.outputs[0].text[4:6]
    [expected] = reference.generate("hello", greedy(400, stop=stop), use_tqdm=False)

    async def ask() -> RequestOutput:
        before = (await llm.stats()).requests.num_finished
        found = await joined(llm.generate("hello", greedy(400, stop=stop)))
        await expect_nothing_left(llm)
        after = (await llm.stats()).requests.num_finished
        assert (after["stop"] - before["stop"], after["abort"] - before["abort"]) == (1, 0)
        return found

    found = run(ask()).outputs[0]
    assert (found.text, found.finish_reason, found.stop_reason) == (expected.outputs[0].text, "stop", stop)


def test_a_grammar_that_exceeds_its_limits_fails_its_stream_alone(llm: AsyncLLM, reference: LLM, run: Run[Any]) -> None:
    [expected] = reference.generate(PROMPTS[0], greedy(60), use_tqdm=False)

    async def ask() -> None:
        before = (await llm.stats()).requests.num_finished
        other = asyncio.ensure_future(joined(llm.generate(PROMPTS[0], greedy(60))))
        for kind in OutputKind:
            with pytest.raises(RequestError, match=r"structured_outputs.json exceeded") as caught:
                params = greedy(200, structured_outputs=TOO_MUCH_LATER, n=2)
                async for output in llm.generate(PROMPTS[1], params, output_kind=kind):
                    assert all(completion.finish_reason is None for completion in output.outputs)
            assert caught.value.field == "structured_outputs.json"
        assert (await other).outputs[0].token_ids == expected.outputs[0].token_ids
        await expect_nothing_left(llm)
        after = (await llm.stats()).requests.num_finished
        assert after["stop"] == before["stop"] and after["error"] >= before["error"] + len(OutputKind)

    run(ask())


def test_a_long_prompt_is_prepared_in_a_thread_and_gives_the_same_tokens(
    llm: AsyncLLM, reference: LLM, run: Run[Any]
) -> None:
    prompt = "ab " * 150
    assert run(llm.encode(prompt * 10)) == reference.tokenizer.encode(prompt * 10)
    found = run(joined(llm.generate(prompt, greedy(8))))
    [expected] = reference.generate(prompt, greedy(8), use_tqdm=False)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


# ---- many at once, and those who leave ----


def test_of_64_streams_that_are_left_at_random_nothing_remains(llm: AsyncLLM, reference: LLM, run: Run[Any]) -> None:
    draw = random.Random(1)
    prompts = [[draw.randrange(256) for _ in range(draw.randrange(1, 40))] for _ in range(64)]
    leaves = [draw.choice([None, 0, 1, 3, 10]) for _ in prompts]
    kept = [index for index, leave in enumerate(leaves) if leave is None]
    assert 5 < len(kept) < 30

    async def follow(prompt: list[int], leave: int | None) -> list[int]:
        if leave == 0:
            task = asyncio.ensure_future(joined(llm.generate(prompt, greedy(None))))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return []
        if leave is None:
            return (await joined(llm.generate(prompt, greedy(30)))).outputs[0].token_ids
        tokens: list[int] = []
        outputs = llm.generate(prompt, greedy(None))
        async for output in outputs:
            tokens += output.outputs[0].token_ids
            if len(tokens) >= leave:
                break
        await outputs.aclose()  # type: ignore[attr-defined]  # what leaving the loop comes to, at once
        return tokens

    async def follow_all() -> list[list[int]]:
        tokens = await asyncio.gather(*(follow(p, leave) for p, leave in zip(prompts, leaves, strict=True)))
        await expect_nothing_left(llm)
        return tokens

    tokens = run(follow_all())
    expected = reference.generate([prompts[index] for index in kept], greedy(30), use_tqdm=False)
    assert [tokens[index] for index in kept] == [output.outputs[0].token_ids for output in expected]


def test_a_stream_that_is_dropped_or_cancelled_is_aborted(llm: AsyncLLM, run: Run[Any]) -> None:
    async def leave() -> None:
        before = (await llm.stats()).requests.num_finished["abort"]
        dropped = await llm.submit([1], greedy(None))
        del dropped
        gc.collect()
        cancelled = await llm.submit([2], greedy(None), output_kind=OutputKind.FINAL_ONLY)
        waiting = asyncio.ensure_future(cancelled.__anext__())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(StopAsyncIteration):
            await cancelled.__anext__()
        await expect_nothing_left(llm)
        assert (await llm.stats()).requests.num_finished["abort"] == before + 2

    run(leave())


def test_a_reader_who_is_late_gets_everything_in_one_output_and_delays_nobody(
    llm: AsyncLLM, reference: LLM, run: Run[Any]
) -> None:
    async def read_late() -> RequestOutput:
        late = await llm.submit([5, 6], greedy(40))
        # It is served after the late one, and longer.
        await joined(llm.generate([7], greedy(120)))
        outputs = [output async for output in late]
        assert len(outputs) == 1 and outputs[0].is_delta
        return outputs[0]

    [expected] = reference.generate([[5, 6]], greedy(40), use_tqdm=False)
    found = run(read_late()).outputs[0]
    assert (found.token_ids, found.text) == (expected.outputs[0].token_ids, expected.outputs[0].text)


# ---- refusals and time ----


def test_what_cannot_be_served_is_refused_before_a_stream_is_given(llm: AsyncLLM, run: Run[Any]) -> None:
    async def ask(prompt: Any, params: SamplingParams, **options: Any) -> None:
        await llm.submit(prompt, params, **options)

    for prompt, params, options, field in (
        ([1] * 5000, greedy(1), {}, "prompt_token_ids"),
        ([], greedy(1), {}, "prompt_token_ids"),
        ("a", SamplingParams(temperature=-1.0), {}, "temperature"),
        ("a", greedy(1), {"priority": 2**40}, "priority"),
    ):
        with pytest.raises(RequestError) as caught:
            run(ask(prompt, params, **options))
        assert caught.value.field == field
    run(expect_nothing_left(llm))


def test_one_request_too_many_is_refused_and_the_others_are_served(llm: AsyncLLM, run: Run[Any]) -> None:
    async def fill() -> None:
        streams = [await llm.submit([1], greedy(None)) for _ in range(MAX_NUM_SEQS + MAX_QUEUE - 1)]
        with pytest.raises(QueueFull, match="--max-queue") as caught:
            await llm.submit([1], greedy(4, n=2))
        assert caught.value.retry_after_s > 0
        last = await llm.submit([1], greedy(4))
        for stream in streams:
            await stream.aclose()
        assert len((await joined(last)).outputs[0].token_ids) == 4
        await expect_nothing_left(llm)

    run(fill())


def test_a_request_past_its_deadline_ends_wherever_it_is(llm: AsyncLLM, run: Run[Any]) -> None:
    async def ask() -> None:
        running = [await llm.submit([1], greedy(None)) for _ in range(MAX_NUM_SEQS)]
        waiting = await joined(llm.generate([1], greedy(None), timeout_s=0.0))
        assert (waiting.outputs[0].finish_reason, waiting.outputs[0].token_ids) == ("abort", [])
        for stream in running:
            await stream.aclose()
        long = await joined(llm.generate([1], greedy(None), timeout_s=0.2))
        assert long.outputs[0].finish_reason == "abort"
        assert len(long.outputs[0].token_ids) < llm.max_model_len - 1
        await expect_nothing_left(llm)

    run(ask())


def test_a_name_given_to_a_request_is_what_its_outputs_call_it(llm: AsyncLLM, run: Run[Any]) -> None:
    async def ask() -> list[RequestOutput]:
        same_name = (joined(llm.generate([index], greedy(3), request_id="mine")) for index in range(2))
        return await asyncio.gather(*same_name)

    assert [output.request_id for output in run(ask())] == ["mine", "mine"]


class _LaterClock:
    def __init__(self, now_s: float) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s


def test_an_engine_that_shows_no_sign_of_life_or_no_progress_is_unhealthy(
    llm: AsyncLLM, run: Run[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look() -> None:
        llm.check_health()
        [client] = llm._replicas.clients
        with monkeypatch.context() as patch:
            patch.setattr(client, "stalled_s", llm.config.progress_timeout_s + 1)
            with pytest.raises(EngineLost, match="--progress-timeout-s"):
                llm.check_health()
        with monkeypatch.context() as patch:
            patch.setattr(llm, "clock", _LaterClock(client.heard_s + llm.config.heartbeat_timeout_s + 1))
            with pytest.raises(EngineLost, match="no sign of life"):
                llm.check_health()
        llm.check_health()

    run(look())


def test_spans_of_all_stages_and_the_engine_can_be_asked_for(llm: AsyncLLM, run: Run[Any]) -> None:
    async def ask() -> set[int]:
        since_s = llm.clock.now_s()
        await joined(llm.generate([1, 2], greedy(4)))
        return {span.stage_index for span in await llm.spans(since_s)}

    assert run(ask()) == {-1, 0, 1}
