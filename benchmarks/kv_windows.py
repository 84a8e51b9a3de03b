"""How many tokens a KV cache holds when layers with a window keep only their window, and when they keep everything.

And how many requests of some lengths fit at once, as the memory is divided between the two kinds of layers without
--expected-request-tokens and with it. Arithmetic, the same that a start does; nothing runs.

    python benchmarks/kv_windows.py gemma-3-270m-q4_k_m.gguf -pp 2 --kv-cache-memory 256MiB --max-model-len 4096
"""

from __future__ import annotations

import argparse
import dataclasses

from msgspec.structs import replace

from stageline.checkpoint import Checkpoint, open_checkpoint, stage_weight_bytes
from stageline.config.engine_config import EngineConfig
from stageline.engine.layout import Layout, LayoutRules
from stageline.executor.messages import StageLoaded
from stageline.kv.kv_plan import KVPlan
from stageline.pipeline.partition import StageLayers, partition_layers

ITEMSIZE = 2
FREE_BYTES = 2**50
LENGTHS = (256, 512, 1024, 2048, 4096)


def report(checkpoint: Checkpoint, part: StageLayers) -> StageLoaded:
    """A stage in bfloat16, with more memory than can be asked for."""
    weights = stage_weight_bytes(checkpoint, part.layers, part.is_first, part.is_last, ITEMSIZE)
    return StageLoaded(
        stage_index=part.stage_index,
        weight_bytes=weights,
        free_bytes=FREE_BYTES,
        memory_pool=str(part.stage_index),
        dtype="bfloat16",
    )


def layout(checkpoint: Checkpoint, config: EngineConfig, max_model_len: int) -> Layout:
    parts = partition_layers(checkpoint.spec.num_layers, config.pipeline_parallel_size, config.pp_layer_partition)
    rules = LayoutRules(config, checkpoint, max_model_len)
    return rules.laid_out(parts, [report(checkpoint, part) for part in parts])


def num_fitting(plan: KVPlan, num_tokens: int) -> int:
    """How many requests that are so long by now have their blocks at once."""
    assert plan.window is not None
    blocks = -(-num_tokens // plan.block_size)
    in_window = min(blocks, -(-plan.window.num_tokens // plan.block_size) + 1)
    return min(plan.num_blocks // blocks, plan.window.num_blocks // in_window)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-pp", "--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--kv-cache-memory", default="256MiB")
    parser.add_argument("--max-model-len", type=int, default=4096)
    arguments = parser.parse_args()
    config = EngineConfig(
        model=arguments.model,
        pipeline_parallel_size=arguments.pipeline_parallel_size,
        kv_cache_memory=arguments.kv_cache_memory,
    )
    checkpoint = open_checkpoint(arguments.model)
    everything = replace(checkpoint, spec=replace(checkpoint.spec, sliding_window=None, layer_windows=()))
    kept = layout(checkpoint, config, arguments.max_model_len)
    whole = layout(everything, config, arguments.max_model_len)
    print(kept.table)
    in_windows, in_all = kept.kv_plan.num_tokens, whole.kv_plan.num_tokens
    print(f"{in_windows:,} tokens instead of {in_all:,}: {in_windows / in_all:.2f} times as many")
    print("requests at once, of so many tokens: as divided without being told, told, and of the latter")
    for num_tokens in LENGTHS:
        told_so = dataclasses.replace(config, expected_request_tokens=num_tokens)
        told = num_fitting(layout(checkpoint, told_so, arguments.max_model_len).kv_plan, num_tokens)
        untold = num_fitting(kept.kv_plan, num_tokens)
        print(f"{num_tokens:6,} {untold:6,} {told:6,}  {untold / told:.2f}")


if __name__ == "__main__":
    main()
