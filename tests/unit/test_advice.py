"""Advice names what is wrong, with the number and the flag that helps, and is silent where nothing is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from stageline.engine.advice import Advice, NewAdvice, RunFacts, advise
from stageline.kv.kv_plan import KVCacheMemory, plan_kv_cache
from stageline.timeline.analysis import analyse
from stageline.timeline.journeys import journeys
from stageline.timeline.span import Span


def _run(
    stage_s: list[float], head_s: float = 0.0, hop_s: float = 0.0, num_groups: int = 2, prompt_every: int = 0
) -> list[Span]:
    """Decodes in `num_groups` groups of 4 requests, ideal but for the times given; some microbatches with a prompt."""
    spans, free_s = [], [0.0] * len(stage_s)
    token_s = [0.0] * num_groups
    for number in range(40):
        has_prompt = prompt_every and number % prompt_every == 0
        tokens, slower = (68, 10.0) if has_prompt else (4, 1.0)
        at_s = token_s[number % num_groups]
        spans.append(Span(-1, number, "schedule", at_s, at_s, tokens, 4))
        for stage, taken_s in enumerate(stage_s):
            start_s = max(at_s, free_s[stage])
            spans.append(Span(stage, number, "receive_wait", min(at_s, start_s), start_s, tokens, 4))
            at_s = start_s + taken_s * slower
            spans.append(Span(stage, number, "forward", start_s, at_s, tokens, 4))
            if stage == len(stage_s) - 1 and head_s:
                spans.append(Span(stage, number, "sample", at_s, at_s + head_s, tokens, 4))
                at_s += head_s
            free_s[stage] = at_s
            at_s += hop_s * (stage < len(stage_s) - 1)
        token_s[number % num_groups] = at_s
    return spans


def _facts(spans: list[Span], counts: list[int], num_requests: int | None = None) -> RunFacts:
    num_stages = len(counts)
    return RunFacts(analyse(spans, num_stages), journeys(spans, num_stages), counts, num_requests)


def sentences(facts: RunFacts) -> list[str]:
    return [advice.text for advice in advise(facts)]


def test_a_balanced_full_pipeline_needs_no_advice() -> None:
    assert sentences(_facts(_run([0.010, 0.010]), [12, 12], 8)) == []


def test_the_slowest_stage_is_named_with_the_reason_and_a_better_partition() -> None:
    [line] = sentences(_facts(_run([0.012, 0.012], head_s=0.009), [12, 12], 8))
    assert line == (
        "slowest stage: s1 (+75%): LM head 43% of its time; try --pp-layer-partition 16,8 or auto"
    )


def test_a_slow_stage_without_a_head_is_named_without_one() -> None:
    [line] = sentences(_facts(_run([0.010, 0.005]), [20, 10], 8))
    assert line == "slowest stage: s0 (+100%); try --pp-layer-partition 15,15 or auto"


def test_no_partition_is_proposed_that_would_gain_nothing() -> None:
    [line] = sentences(_facts(_run([0.001, 0.001], head_s=0.050), [1, 1], 8))
    assert line == "slowest stage: s1 (+5000%): LM head 98% of its time"


def test_a_few_microbatches_and_one_that_was_held_up_tell_nothing() -> None:
    slow_stage = _run([0.010, 0.005])
    assert sentences(_facts([span for span in slow_stage if span.microbatch < 8], [20, 10], 8)) == []
    held_up = [_longer(span, 2.0) if (span.microbatch, span.stage_index) == (3, 1) else span for span in _even()]
    assert not any("slowest" in line for line in sentences(_facts(held_up, [12, 12], 8)))


def test_no_partition_is_proposed_that_only_a_part_of_the_microbatches_asks_for() -> None:
    spans = [_longer(span, 0.020) if span.microbatch < 18 and span.stage_index == 0 else span for span in _even()]
    spans = [_longer(span, 0.004) if span.microbatch >= 18 and span.stage_index == 1 else span for span in spans]
    [line] = [line for line in sentences(_facts(spans, [12, 12], 8)) if "slowest" in line]
    assert "try --pp-layer-partition" not in line


def _even() -> list[Span]:
    return _run([0.010, 0.010])


def _longer(span: Span, by_s: float) -> Span:
    return replace(span, end_s=span.end_s + by_s * (span.kind == "forward"))


def test_too_few_requests_are_told_how_many_would_do() -> None:
    lines = sentences(_facts(_run([0.010] * 4, num_groups=1), [6] * 4, 1))
    assert [line for line in lines if line.startswith("too few requests")] == [
        "too few requests to fill the pipeline: 1 at once leave the stages idle 75% of the time; "
        "4 or more would fill it"
    ]
    assert not any("too few" in line for line in sentences(_facts(_run([0.010] * 4, num_groups=4), [6] * 4, 4)))


def test_a_slow_link_is_named() -> None:
    [line] = sentences(_facts(_run([0.010, 0.010], hop_s=0.020, num_groups=1), [12, 12]))
    assert "links take 50%" in line and "s0 -> s1 with 20.0 ms" in line


def test_prompts_that_starve_decodes_are_named() -> None:
    [line] = [line for line in sentences(_facts(_run([0.010, 0.010], prompt_every=3), [12, 12])) if "prompts" in line]
    assert "35% of the microbatches" in line and "10.0 times" in line and "--max-decode-slowdown" in line
    assert not any("prompts" in line for line in sentences(_facts(_run([0.010, 0.010], prompt_every=10), [12, 12])))


def test_a_stage_that_limits_the_kv_cache_of_all_is_named() -> None:
    plan = plan_kv_cache([KVCacheMemory(num_bytes=2**30)] * 2, [2**31] * 2, [30_000, 10_000], 16, 10**9)
    facts = _facts(_run([0.010, 0.010]), [18, 6], 8)
    [line] = sentences(RunFacts(facts.report, facts.journeys, facts.layer_counts, 8, plan))
    assert "KV cache of s0 limits the rest" in line and "(33%) unused" in line


@pytest.mark.parametrize("spans", [[], _run([0.01, 0.01])[:3]])
def test_nothing_is_said_of_nothing(spans: list[Span]) -> None:
    assert sentences(_facts(spans, [12, 12], 1)) == []


def test_advice_is_new_once_however_its_numbers_vary() -> None:
    new = NewAdvice()
    told = []
    for number in range(10):
        told += new.among([Advice("slowest_stage", "s1", f"slowest stage: s1 (+{number}%)")])
    assert [advice.text for advice in told] == ["slowest stage: s1 (+1%)"]


def test_another_stage_is_other_advice_and_what_was_gone_for_long_is_new_again() -> None:
    new, first, other = NewAdvice(), Advice("slowest_stage", "s0", "s0"), Advice("slowest_stage", "s1", "s1")
    assert new.among([first]) == [] and new.among([first]) == [first]
    assert new.among([other]) == [] and new.among([other]) == [other]
    assert not any(new.among([other, *([first] if number % 2 else [])]) for number in range(6))
    for _ in range(4):
        assert new.among([]) == []
    assert new.among([first]) == [] and new.among([first]) == [first]
