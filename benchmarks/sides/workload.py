"""The workload both sides get, made from a seed so that it is the same to the token. Imports nothing but the stdlib."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable

Prompts = list[list[int]]
RunOnce = Callable[[Prompts, int], int]
"""Takes prompts and output tokens per prompt, generates greedily past end-of-sequence, returns tokens generated."""


def make_prompts(num_prompts: int, input_len: int, seed: int) -> Prompts:
    numbers = random.Random(seed)
    return [[numbers.randrange(1000, 40000) for _ in range(input_len)] for _ in range(num_prompts)]


def serve(run_once: RunOnce, started_s: float, extra: Callable[[], dict[str, object]] = dict) -> None:
    """Warm up, say READY, then answer workloads until standard input ends.

    Args:
        extra: more to say of the run that has just ended.
    """
    run_once(make_prompts(4, 16, seed=0), 8)
    _say({"ready_s": time.perf_counter() - started_s})
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        prompts = make_prompts(asked["num_prompts"], asked["input_len"], seed=1 + number)
        begin_s = time.perf_counter()
        num_tokens = run_once(prompts, asked["output_len"])
        elapsed_s = time.perf_counter() - begin_s
        rate = num_tokens / elapsed_s
        _say({"elapsed_s": elapsed_s, "num_tokens": num_tokens, "output_tokens_per_s": rate, **extra()})


def _say(answer: dict[str, object]) -> None:
    print("SIDE " + json.dumps(answer), flush=True)
