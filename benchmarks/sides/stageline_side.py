"""Stageline as a side: `python stageline_side.py MODEL [--settings JSON]`, settings being fields of EngineConfig."""

from __future__ import annotations

import argparse
import json
import time

from workload import Prompts, serve


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--settings", type=json.loads, default={})
    args = parser.parse_args()
    started_s = time.perf_counter()

    from stageline import LLM, SamplingParams
    from stageline.timeline.analysis import analyse

    settings = {"dtype": "bfloat16", "enable_prefix_caching": False, **args.settings}
    with LLM(args.model, **settings) as llm:
        run_start_s = 0.0

        def run_once(prompts: Prompts, output_len: int) -> int:
            nonlocal run_start_s
            run_start_s = llm.clock.now_s()
            params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return sum(len(output.outputs[0].token_ids) for output in outputs)

        def bubbles() -> dict[str, object]:
            report = analyse(llm.spans(run_start_s), llm.config.pipeline_parallel_size)
            return {"bubble_fractions": [stage.bubble_fraction for stage in report.stages]}

        serve(run_once, started_s, bubbles)


if __name__ == "__main__":
    main()
