"""What an operator should hear of is heard: preemptions, aborts, refusals; and questions for spans stop nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stageline import AsyncLLM, SamplingParams
from stageline.config.engine_config import EngineConfig
from stageline.errors import QueueFull
from stageline.outputs import OutputKind
from tests.pipeline.failing import SETTINGS
from tests.tiny_models import TinyModel

KV_OF_ELEVEN_BLOCKS = "90112"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TinyModel().write(tmp_path_factory.mktemp("tiny")))


async def complete(llm: AsyncLLM, prompt: list[int], num_tokens: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    [output] = [output async for output in llm.generate(prompt, params, output_kind=OutputKind.FINAL_ONLY)]
    return output.outputs[0].token_ids


def start(model: str, **settings: Any) -> Any:
    return AsyncLLM.start(EngineConfig(model=model, **{**SETTINGS, "pipeline_parallel_size": 2, **settings}))


async def events(llm: AsyncLLM) -> dict[str, int]:
    """How often each kind happened."""
    return {event.kind: event.num_times for event in (await llm.stats()).events}


def test_a_request_that_was_left_and_one_that_found_no_room_are_events(model: str) -> None:
    async def main() -> None:
        async with await start(model, max_num_seqs=1, max_queue=1) as llm:
            assert await events(llm) == {}
            params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
            streams = [await llm.submit([3, 1, 4], params) for _ in range(2)]
            with pytest.raises(QueueFull):
                await llm.submit([3, 1, 4], params)
            for stream in streams:
                stream.close()
            await complete(llm, [2, 7], 2)
            assert await events(llm) == {"refusal": 1, "abort": 2}
            [newest, oldest] = (await llm.stats()).events
            assert newest.time_s >= oldest.time_s and newest.number > oldest.number

    asyncio.run(main())


def test_a_request_that_had_to_make_room_is_an_event(model: str) -> None:
    async def main() -> None:
        async with await start(model, kv_cache_memory=KV_OF_ELEVEN_BLOCKS, enable_prefix_caching=False) as llm:
            await asyncio.gather(*(complete(llm, [number + 1] * 40, 50) for number in range(4)))
            stats = await llm.stats()
            assert stats.scheduler.num_preemptions > 0
            assert await events(llm) == {"preemption": stats.scheduler.num_preemptions}

    asyncio.run(main())


@pytest.mark.parametrize("executor", ["multi_process", "in_process"])
def test_questions_for_spans_are_answered_while_all_work_and_while_none_does(model: str, executor: str) -> None:
    async def main() -> None:
        async with await start(model, distributed_executor_backend=executor) as llm:
            alone = await complete(llm, [5, 6, 7], 60)
            start_s = llm.clock.now_s()
            answer = asyncio.ensure_future(complete(llm, [5, 6, 7], 60))
            while not answer.done():
                for spans in await asyncio.gather(*(llm.spans(start_s, most) for most in (1, 3, 1000))):
                    assert all(span.end_s > start_s for span in spans)
            assert await answer == alone
            idle = await llm.spans(start_s)
            assert {span.stage_index for span in idle} == {-1, 0, 1}
            assert len([span for span in idle if (span.stage_index, span.kind) == (1, "forward")]) >= 59
            few = await llm.spans(start_s, 2)
            assert max(sum(span.stage_index == stage for span in few) for stage in (-1, 0, 1)) <= 4

    asyncio.run(main())
