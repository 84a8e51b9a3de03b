"""Flags and arguments that users of vLLM paste: which change nothing here, and what does instead of the others.

One idea: one table for whatever runs an engine, and one for the load generator. A flag that asks for what happens
anyway, or for what cannot matter here, is taken with a note; one that would change answers or sizes is refused in one
line that names the way out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForeignFlag:
    """Args:
    words: why it changes nothing, or what to do instead.
    taken: the values that change nothing; None for any, () for a flag whose use is refused.
    has_value: whether a value follows, which may be meant for MODEL otherwise.
    """

    words: str
    taken: tuple[str, ...] | None = ()
    has_value: bool = True


def _same(words: str) -> ForeignFlag:
    """A switch that changes nothing."""
    return ForeignFlag(words, None, has_value=False)


def _any(words: str) -> ForeignFlag:
    """A value that changes nothing, whatever it is."""
    return ForeignFlag(words, None)


def _only(words: str, *taken: str) -> ForeignFlag:
    return ForeignFlag(words, taken)


def _no(words: str) -> ForeignFlag:
    return ForeignFlag(words)


def _no_switch(words: str) -> ForeignFlag:
    return ForeignFlag(words, has_value=False)


_GRAPHS = "nothing is captured or compiled when a model starts"
_LORA = "LoRA adapters are not applied; merge the adapter into the model's weights, and serve those"
_DRAFTS = "there is no speculative decoding"
_ROPE = "positions are scaled as the model's config.json says (rope_scaling, rope_theta); change it there"
_HUB = "name a local directory; `hf download` fetches any revision into one"
_TEXT_ONLY = "models take text only"
_GRAMMARS = "llguidance keeps every structured output"
_PREFILLS = "see --prefill-chunk and --max-decode-slowdown"
_PLACEMENT = "-dp N runs N equal pipelines on this machine"

FOREIGN_FLAGS: dict[str, ForeignFlag] = {
    "--model": _no("MODEL is given without a flag, behind the command"),
    "--trust-remote-code": _same("code from a model's files is never run"),
    "--load-format": _only("safetensors and GGUF are told apart by the files", "auto", "safetensors", "gguf"),
    "--generation-config": _only(
        "generation_config.json of the model is read; requests override it, or remove the file", "auto"
    ),
    "--override-generation-config": _no("change generation_config.json of the model, or send it with requests"),
    "--hf-overrides": _no("change config.json of the model"),
    "--hf-token": _no("set the environment variable HF_TOKEN"),
    "--download-dir": _no("set the environment variable HF_HOME"),
    "--revision": _no(_HUB),
    "--code-revision": _any("code from a model's files is never run"),
    "--tokenizer-revision": _no(_HUB),
    "--tokenizer-mode": _only("tokenizer.json or the GGUF file's tokenizer is read", "auto", "hf"),
    "--skip-tokenizer-init": _no_switch("leave it out; prompts may be token ids in any case"),
    "--model-impl": _only("all models are Stageline's own", "auto"),
    "--task": _only("models generate text", "auto", "generate"),
    "--runner": _only("models generate text", "auto", "generate"),
    "--convert": _only("models generate text", "auto", "none"),
    "--rope-scaling": _no(_ROPE),
    "--rope-theta": _no(_ROPE),
    "--limit-mm-per-prompt": _any(_TEXT_ONLY),
    "--mm-processor-kwargs": _any(_TEXT_ONLY),
    "--enforce-eager": _same(_GRAPHS),
    "--no-enforce-eager": _same(_GRAPHS),
    "--compilation-config": _any(_GRAPHS),
    "-O": _any(_GRAPHS),
    "--cuda-graph-sizes": _any(_GRAPHS),
    "--max-seq-len-to-capture": _any(_GRAPHS),
    "--disable-custom-all-reduce": _same("there is no such kernel"),
    "--attention-backend": _any("the device decides"),
    "--gpu-memory-utilization": _no(
        "the KV cache is sized with --kv-cache-memory: bytes, or a fraction of the memory that is free after loading"
    ),
    "--num-gpu-blocks-override": _no("the KV cache is sized with --kv-cache-memory"),
    "--kv-cache-memory-bytes": _no("write --kv-cache-memory, for each stage"),
    "--kv-cache-dtype": _only("keys and values have the compute dtype (--dtype)", "auto"),
    "--calculate-kv-scales": _no_switch("keys and values have the compute dtype (--dtype); leave it out"),
    "--swap-space": _any("nothing is swapped: a preempted request is computed again"),
    "--cpu-offload-gb": _only("weights are not offloaded; take more stages (-pp) or --quantization int8", "0"),
    "--preemption-mode": _only("a preempted request is computed again", "recompute"),
    "--disable-sliding-window": _no_switch("windows are part of the model; --max-model-len cuts its length"),
    "--kv-transfer-config": _no("keys and values stay where they are; leave it out"),
    "--enable-sleep-mode": _no_switch("memory is not given back while a server runs; leave it out"),
    "--enable-chunked-prefill": _same("prompts are always cut; see --prefill-chunk"),
    "--no-enable-chunked-prefill": _no_switch("prompts are always cut; see --prefill-chunk"),
    "--max-num-partial-prefills": _any(_PREFILLS),
    "--max-long-partial-prefills": _any(_PREFILLS),
    "--scheduling-policy": _any("requests have a priority if they name one, and come first by arrival otherwise"),
    "--async-scheduling": _same("look-ahead is on unless --no-look-ahead says otherwise"),
    "--num-scheduler-steps": _any("look-ahead does without"),
    "--stream-interval": _only("every token is sent at once", "1"),
    "--speculative-config": _no(f"{_DRAFTS}; leave it out"),
    "--speculative-model": _no(f"{_DRAFTS}; leave it out"),
    "--num-speculative-tokens": _no(f"{_DRAFTS}; leave it out"),
    "--enable-lora": _no_switch(_LORA),
    "--lora-modules": _no(_LORA),
    "--max-loras": _no(_LORA),
    "--max-lora-rank": _no(_LORA),
    "--guided-decoding-backend": _any(_GRAMMARS),
    "--structured-outputs-config": _any(_GRAMMARS),
    "--enable-auto-tool-choice": _same("tools are always served"),
    "--enable-reasoning": _same("reasoning is told apart by itself; see --reasoning-parser"),
    "--chat-template-content-format": _only("the template decides", "auto", "string", "openai"),
    "--response-role": _only("answers are the assistant's", "assistant"),
    "--disable-log-stats": _same("statistics are at /metrics; nothing of them is logged"),
    "--enable-log-requests": _same("answered requests are logged unless --disable-log-requests is given"),
    "--no-enable-log-requests": _no_switch("write --disable-log-requests"),
    "--max-log-len": _any("prompts are never logged"),
    "--disable-uvicorn-access-log": _no_switch("write --disable-log-requests"),
    "--uvicorn-log-level": _any("the environment variable STAGELINE_LOG_LEVEL sets the log's level"),
    "--enable-server-load-tracking": _same("/load is always there"),
    "--enable-prompt-tokens-details": _same("cached tokens are always told"),
    "--enable-force-include-usage": _no_switch("clients ask with stream_options.include_usage; leave it out"),
    "--allow-credentials": _no_switch("a page of --allowed-origins sends the key itself; leave it out"),
    "--allowed-methods": _any("GET and POST"),
    "--allowed-headers": _any("all of them"),
    "--middleware": _no("a server runs no code of others; put a proxy in front"),
    "--logits-processors": _no("no code of others is run; requests have logit_bias, bad_words, allowed_token_ids"),
    "--data-parallel-backend": _no(f"{_PLACEMENT}; leave it out"),
    "--data-parallel-address": _no(f"{_PLACEMENT}; leave it out"),
    "--data-parallel-size-local": _no(f"{_PLACEMENT}; leave it out"),
    "--config": _no("there are no files of flags; write them in a script"),
}  # fmt: skip

_QUANTISED = (
    "the model's files say how they are quantised, so leave it out; --quantization int8 keeps 4- and 8-bit weights so"
)

# Values of flags that are this project's, too.
FOREIGN_VALUES: dict[str, dict[str, str]] = {
    "--dtype": {"half": "write float16", "float": "write float32"},
    "--quantization": dict.fromkeys(
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "fp8", "gguf", "mxfp4"), _QUANTISED
    ),
}

_ALL_WRITTEN = "--output FILE writes all of it as JSON"
_ALL_PRINTED = "TTFT, TPOT, ITL and end-to-end times are printed as mean, p50, p90, p95 and p99; --output has them, too"
_LOOK_UP = "the server is asked for its model, its tokens and its length"

# Of `vllm bench serve`.
LOAD_GENERATOR_FLAGS: dict[str, ForeignFlag] = {
    "--backend": _only("write --endpoint chat for chats", "vllm", "openai"),
    "--endpoint-type": _only("write --endpoint chat for chats", "vllm", "openai"),
    "--host": _no("write --base-url http://HOST:PORT"),
    "--port": _no("write --base-url http://HOST:PORT"),
    "--served-model-name": _no("write --model"),
    "--tokenizer": _any(_LOOK_UP),
    "--tokenizer-mode": _any(_LOOK_UP),
    "--trust-remote-code": _same(_LOOK_UP),
    "--random-input-len": _no("write --input-len"),
    "--random-output-len": _no("write --output-len"),
    "--random-range-ratio": _no("write --range-ratio"),
    "--random-prefix-len": _no("write --dataset-name prefix --prefix-len"),
    "--sharegpt-output-len": _no("answers are as long as the data set says; leave it out"),
    "--num-warmups": _no("write --num-warmup"),
    "--ready-check-timeout-sec": _no("start the server first; it is ready when /health says so"),
    "--save-result": _no_switch(_ALL_WRITTEN),
    "--save-detailed": _no_switch(_ALL_WRITTEN),
    "--result-dir": _no(_ALL_WRITTEN),
    "--result-filename": _no(_ALL_WRITTEN),
    "--metadata": _no("--output writes all flags beside the result; leave it out"),
    "--label": _any("only the name of a file of results"),
    "--percentile-metrics": _any(_ALL_PRINTED),
    "--metric-percentiles": _any(_ALL_PRINTED),
    "--disable-tqdm": _same("no bar is drawn where standard error is no terminal"),
}  # fmt: skip
