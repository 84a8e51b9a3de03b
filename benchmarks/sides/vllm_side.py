"""vLLM's CPU build as a side; run by the interpreter of a virtual environment that has it.

    VLLM_CPU_OMP_THREADS_BIND='0|1' PYTHON vllm_side.py MODEL_DIR --settings '{"pipeline_parallel_size": 2}'
"""

from __future__ import annotations

import argparse
import json
import os
import time

from workload import Prompts, serve

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--settings", type=json.loads, default={})
    args = parser.parse_args()
    started_s = time.perf_counter()

    from vllm import LLM, SamplingParams

    settings = {"dtype": "bfloat16", "enable_prefix_caching": False, "max_model_len": 8192, **args.settings}
    llm = LLM(model=args.model, **settings)

    def run_once(prompts: Prompts, output_len: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    serve(run_once, started_s)


if __name__ == "__main__":
    main()
