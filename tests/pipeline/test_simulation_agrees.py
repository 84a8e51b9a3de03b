"""A simulation with a real run's stage times is that run with nothing in between: the same microbatches, sooner."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stageline import LLM, SamplingParams
from stageline.engine.startup import scheduler_limits
from stageline.executor.simulated_stages import SimulatedLink, SimulatedPipeline
from stageline.loadgen.workload import draw_random, uniform
from stageline.planner.simulate import SimulatedMemory, simulate
from stageline.timeline.analysis import analyse
from stageline.timeline.journeys import Journey, journeys
from tests.pipeline.failing import SETTINGS
from tests.tiny_models import TinyModel

# As many requests as stages: how they are grouped does not depend on what the scheduler measured. And so few tokens
# that the window has not been chosen anew.
NUM_STAGES, NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 2, 2, 12, 14


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel().write(tmp_path_factory.mktemp("tiny"))


def shapes(found: list[Journey]) -> list[tuple[int, int, int]]:
    return [(one.microbatch, one.num_tokens, one.num_rows) for one in found]


def test_the_same_microbatches_of_the_same_times_and_never_later_than_in_the_real_run(model: Path) -> None:
    settings = {**SETTINGS, "pipeline_parallel_size": NUM_STAGES, "enable_prefix_caching": False}
    words = random.Random(0)
    prompts = [words.choices(range(100), k=PROMPT_TOKENS) for _ in range(NUM_REQUESTS)]
    with LLM(str(model), **settings) as llm:
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True), use_tqdm=False
        )
        real_spans, partition = llm.spans(), llm.partition
        limits = scheduler_limits(llm.config, llm.max_model_len)
        memory = SimulatedMemory(llm.kv_plan.num_blocks, llm.kv_plan.block_size, False)
    real = journeys(real_spans, NUM_STAGES)
    times_s = {one.microbatch: [end_s - start_s for start_s, end_s in one.computed] for one in real}
    pipeline = SimulatedPipeline(
        NUM_STAGES, lambda microbatch: times_s[microbatch.number], (SimulatedLink(),) * (NUM_STAGES - 1)
    )
    requests = draw_random(NUM_REQUESTS, uniform(PROMPT_TOKENS, 0), uniform(OUTPUT_TOKENS, 0), words)
    run = simulate(requests, pipeline, partition, limits, memory)

    simulated = journeys(run.spans, NUM_STAGES)
    assert shapes(simulated) == shapes(real)
    assert [len(one.token_times_s) for one in run.requests] == [len(output.outputs[0].token_ids) for output in outputs]
    real_report, report = analyse(real_spans, NUM_STAGES), run.report()
    for stage, its_real in zip(report.stages, real_report.stages, strict=True):
        assert stage.num_tokens == its_real.num_tokens
        assert stage.busy_s == pytest.approx(its_real.busy_s)
    assert max(stage.busy_s for stage in report.stages) <= report.window_s <= real_report.window_s * (1 + 1e-9)
    # Each microbatch, too: nothing that takes no time here took less than none there.
    for one, its_real in zip(simulated, real, strict=True):
        assert one.end_s - run.requests[0].arrival_s <= its_real.end_s - real[0].start_s + 1e-9
