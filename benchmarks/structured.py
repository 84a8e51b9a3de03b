"""What structured output costs: throughput with none, half and all of the requests held to a JSON schema, as ratios.

    python benchmarks/structured.py MODEL [-pp 2] [--num-requests 32] [--repeats 3]

All requests generate the same number of tokens: the schema is an array without end. Rounds of the three kinds
alternate, so that a machine that grows slower is slower for all.
"""

from __future__ import annotations

import argparse
import statistics
import time

from stageline import LLM, SamplingParams, StructuredOutputs

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 1000,
}
SHARES = (0.0, 0.5, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-pp", "--pipeline-parallel-size", type=int, default=2)
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    settings = {"pipeline_parallel_size": args.pipeline_parallel_size, "max_model_len": 1024}
    with LLM(args.model, **settings) as llm:
        run(llm, 1.0, 2, 8)
        rates: dict[float, list[float]] = {share: [] for share in SHARES}
        for _ in range(args.repeats):
            for share in SHARES:
                rates[share].append(run(llm, share, args.num_requests, args.output_len))
    plain = statistics.median(rates[0.0])
    print(f"{args.num_requests} requests of {args.output_len} tokens, {args.pipeline_parallel_size} stages")
    print("with a schema   tokens/s   of none")
    for share in SHARES:
        rate = statistics.median(rates[share])
        print(f"{share:13.0%}   {rate:8.1f}   {rate / plain:7.3f}")


def run(llm: LLM, share: float, num_requests: int, output_len: int) -> float:
    """Returns: output tokens per second."""
    structure = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=output_len,
            ignore_eos=True,
            structured_outputs=structure if index < share * num_requests else None,
        )
        for index in range(num_requests)
    ]
    prompts = [f"List number {index} of people, as JSON:" for index in range(num_requests)]
    start_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - start_s
    return sum(len(output.outputs[0].token_ids) for output in outputs) / elapsed_s


if __name__ == "__main__":
    main()
