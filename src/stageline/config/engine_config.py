"""Everything an operator can ask of an engine, field by field, with the defaults and the words of `--help`."""

from __future__ import annotations

from dataclasses import dataclass

from stageline.config.settings import at_least, check_types, flag_of, one_of, setting
from stageline.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
ACTIVATION_DTYPES = ("auto", "int8", "fp8")
EXECUTORS = ("multi_process", "mp", "in_process", "ray")
QUANTIZATIONS = ("none", "int8")
# What `--pp-layer-partition` may say instead of counts, and what is made as small as can be then.
AUTO_CHUNK = "auto"
AUTO_PARTITIONS = {"auto": "throughput", "auto-latency": "latency"}
# The load that `--pp-layer-partition auto` and `stageline tune` balance the stages for, if they are not told another.
PLANNED_REQUESTS, PLANNED_CONTEXT_TOKENS = 64, 256
# A shorter silence is nothing unusual on a busy machine.
SHORTEST_HEARTBEAT_TIMEOUT_S = 0.1


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What was asked for. `check()` refuses what cannot work on any machine; the rest is checked where it is known."""

    model: str
    tokenizer: str | None = setting(
        None, "directory or tokenizer.json to take the tokenizer from (default: the model's own)", group="model"
    )
    chat_template: str | None = setting(
        None, "file with a Jinja chat template (default: the model's own)", group="model", metavar="FILE"
    )
    dtype: str = setting(
        "auto", "compute dtype; auto takes the checkpoint's (float16 becomes bfloat16 on a CPU)", choices=DTYPES,
        group="model",
    )
    device: str = setting("auto", "where stages run; auto takes CUDA when there is one", choices=DEVICES, group="model")
    quantization: str = setting(
        "none", "int8 keeps quantised weights (of GGUF Q4_0, Q4_1, Q4_K, Q5_0, Q6_K, Q8_0; four bits of AWQ and GPTQ; "
        "int4 and int8 of compressed-tensors; MXFP4) as they are and multiplies them in int8, on a CPU; none makes "
        "them floating-point when loading", choices=QUANTIZATIONS, group="model",
    )
    max_model_len: int | None = setting(
        None, "longest prompt plus output in tokens (default: the model's own limit)", group="model", metavar="TOKENS"
    )
    seed: int = setting(0, "seed for requests that bring none of their own", group="model")

    pipeline_parallel_size: int = setting(
        1, "number of stages the layers are cut into", flags=("-pp",), group="pipeline", metavar="STAGES"
    )
    tensor_parallel_size: str | int = setting(
        "1", "ranks, a process or GPU each, that share every layer of a stage; a list gives one number per stage, such "
        "as 2,1,1", flags=("-tp",), group="pipeline", metavar="RANKS[,RANKS...]"
    )
    enable_expert_parallel: bool = setting(
        False, "deal the experts of a layer to the ranks of its stage, equally many whole ones to each, instead of a "
        "part of every expert to each; only for models with experts, and only with -tp", group="pipeline",
    )
    pp_layer_partition: str | None = setting(
        None, "layers per stage, such as 16,14, or auto: by measured times, so that no stage is slower than it must be "
        "(auto-latency: so that all together are as quick as can be) (default: even); the environment variable "
        "VLLM_PP_LAYER_PARTITION is honoured, this flag wins",
        group="pipeline", metavar="N,N,..."
    )
    rebalance: bool = setting(
        False, "move layers between stages while serving, when their times have drifted and another cut would be "
        "faster for a while; all answers pause for it, and none is lost", group="pipeline",
    )
    rebalance_gain: float = setting(
        0.1, "how much faster another cut has to be to be told, or made with --rebalance: 0.1 is 10 %",
        group="pipeline", metavar="FRACTION",
    )
    rebalance_patience_s: float = setting(
        30.0, "for how long it has to be that; twice as long after each move", group="pipeline", metavar="SECONDS"
    )
    distributed_executor_backend: str = setting(
        "multi_process", "multi_process or mp: one process per stage; in_process: all stages in this process; ray: on "
        "the machines of a Ray cluster, with `stageline serve` only", choices=EXECUTORS, group="pipeline"
    )
    max_microbatches_in_flight: int | None = setting(
        None, "most microbatches in the pipeline at once, at least one per stage; the engine takes more than "
        "one per stage when that hides slow links (default: 4 per stage)",
        group="pipeline", metavar="M",
    )
    activation_dtype: str = setting(
        "auto", "how hidden states are sent from one machine to the next: auto as they are computed; int8 or fp8 in "
        "half as many bytes and a little less accurate, for slow links", choices=ACTIVATION_DTYPES, group="pipeline",
    )
    threads_per_stage: int = setting(
        1, "intra-op threads of each stage's process on a CPU", group="pipeline", metavar="THREADS"
    )
    bind_cores: bool = setting(
        True, "bind each stage's process to its own CPU cores when there are enough", group="pipeline"
    )
    heartbeat_timeout_s: float = setting(
        5.0, "a stage silent for this long is taken for lost", group="pipeline", metavar="SECONDS"
    )
    progress_timeout_s: float = setting(
        30.0, "a server whose stages have work but complete no microbatch for this long calls itself unhealthy",
        group="pipeline", metavar="SECONDS",
    )
    load_timeout_s: float = setting(
        600.0, "a stage that makes no progress loading for this long is taken for lost", group="pipeline",
        metavar="SECONDS",
    )

    block_size: int = setting(16, "tokens per KV cache block", group="memory", metavar="TOKENS")
    kv_cache_memory: str = setting(
        "0.3", "KV cache per stage, of all its ranks together: bytes (512MiB, 4GiB, 1000000000) or a fraction of the "
        "memory that is free after loading (0.3; stages of one host share it); a list gives one value per stage",
        group="memory",
        metavar="SIZE[,SIZE...]",
    )
    expected_request_tokens: int | None = setting(
        None, "prompt and output of a usual request together; models with sliding windows divide the KV cache between "
        "layers that keep a window and those that keep everything so that most of such requests fit (default: four "
        "windows)", group="memory", metavar="TOKENS",
    )
    enable_prefix_caching: bool = setting(True, "reuse the KV cache of prompts that begin alike", group="memory")

    max_num_seqs: int = setting(256, "most requests running at once", group="scheduling", metavar="REQUESTS")
    max_num_batched_tokens: int = setting(
        2048, "most tokens in one microbatch", group="scheduling", metavar="TOKENS"
    )
    max_queue: int | None = setting(
        1024, "most requests waiting while --max-num-seqs are running; a server refuses more, to be sent again later",
        group="scheduling", metavar="REQUESTS",
    )
    prefill_chunk: str = setting(
        AUTO_CHUNK, "most tokens of one prompt in one microbatch; auto cuts prompts so that their chunks overlap on "
        "the stages and take equally long, by measured times", flags=("--long-prefill-token-threshold",),
        group="scheduling", metavar="TOKENS",
    )
    max_decode_slowdown: float = setting(
        1.8, "how many times longer a microbatch may take because of a prompt that arrives while others are being "
        "answered: low for even streams, high for early first tokens; many prompts at once get more",
        group="scheduling", metavar="TIMES",
    )
    look_ahead: bool = setting(
        True, "while the pipeline is full, announce decodes to the stages before their tokens are known; the first "
        "stage gets these from the last; while nothing decodes, have one more chunk of prompts ready",
        group="scheduling",
    )

    @property
    def prefill_chunk_tokens(self) -> int | None:
        """The number that was asked for; None for auto."""
        return None if self.prefill_chunk == AUTO_CHUNK else int(self.prefill_chunk)

    @property
    def ranks_per_stage(self) -> tuple[int, ...]:
        """How many ranks share each stage's layers. Raises: ConfigError if that cannot be read, or is not theirs."""
        text, num_stages = str(self.tensor_parallel_size), self.pipeline_parallel_size
        sizes = [entry.strip() for entry in text.split(",")]
        if not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise ConfigError(
                f"--tensor-parallel-size is {text!r}; give a number of at least 1, or one for each stage, such as 2,1,1"
            )
        if len(sizes) not in (1, num_stages):
            raise ConfigError(
                f"--tensor-parallel-size {text!r} has {len(sizes)} numbers for {num_stages} stages; give 1 or "
                f"{num_stages}"
            )
        return tuple(map(int, sizes * num_stages if len(sizes) == 1 else sizes))

    def _check_ranks(self) -> None:
        if max(self.ranks_per_stage) > 1 and self.distributed_executor_backend == "in_process":
            raise ConfigError(
                f"--tensor-parallel-size is {self.tensor_parallel_size}, but --distributed-executor-backend in_process "
                "runs all in one process; leave one of them out"
            )

    def check(self) -> EngineConfig:
        """Return self, or raise ConfigError naming the first setting that cannot work."""
        check_types(self)
        if not self.model:
            raise ConfigError(
                "the model's name is empty; give a Hugging Face directory, a GGUF file, or a name on the hub"
            )
        if self.pp_layer_partition is not None and not self.pp_layer_partition.strip():
            raise ConfigError(
                "--pp-layer-partition is empty; give the layers of each stage, such as 16,14, or leave it out"
            )
        self._check_sizes()
        self._check_chunks()
        self._check_choices()
        self._check_times()
        return self

    def _check_sizes(self) -> None:
        at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)
        self._check_ranks()
        at_least("threads_per_stage", self.threads_per_stage, 1)
        at_least("block_size", self.block_size, 1)
        at_least("max_num_seqs", self.max_num_seqs, 1)
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        # The shortest request is one token of prompt and one of output.
        for name, lowest in (("max_model_len", 2), ("max_queue", 1), ("expected_request_tokens", 2)):
            if (value := getattr(self, name)) is not None:
                at_least(name, value, lowest)
        window = self.max_microbatches_in_flight
        if window is not None and window < self.pipeline_parallel_size:
            raise ConfigError(
                f"--max-microbatches-in-flight is {window} for {self.pipeline_parallel_size} stages; fewer than one "
                f"per stage leaves stages idle: give at least {self.pipeline_parallel_size}"
            )

    def _check_chunks(self) -> None:
        if self.prefill_chunk != AUTO_CHUNK and not (self.prefill_chunk.isdecimal() and int(self.prefill_chunk) > 0):
            raise ConfigError(
                f"--prefill-chunk is {self.prefill_chunk!r}; give auto, or a number of tokens, such as 512"
            )
        if not self.max_decode_slowdown > 1:
            raise ConfigError(
                f"--max-decode-slowdown is {self.max_decode_slowdown}; it must be above 1, or prompts would get nothing"
            )

    def _check_choices(self) -> None:
        choices_of = {
            "dtype": DTYPES,
            "device": DEVICES,
            "quantization": QUANTIZATIONS,
            "distributed_executor_backend": EXECUTORS,
            "activation_dtype": ACTIVATION_DTYPES,
        }
        for name, choices in choices_of.items():
            one_of(name, getattr(self, name), choices)
        if self.quantization != "none" and self.device == "cuda":
            raise ConfigError(
                f"--quantization {self.quantization} multiplies on a CPU only, but --device is cuda; give --device cpu "
                "or --quantization none"
            )

    def _check_times(self) -> None:
        if not self.heartbeat_timeout_s >= SHORTEST_HEARTBEAT_TIMEOUT_S:
            raise ConfigError(
                f"--heartbeat-timeout-s is {self.heartbeat_timeout_s}; it must be at least "
                f"{SHORTEST_HEARTBEAT_TIMEOUT_S} seconds"
            )
        for name in "load_timeout_s", "progress_timeout_s", "rebalance_patience_s":
            if not getattr(self, name) > 0:
                raise ConfigError(f"{flag_of(name)} is {getattr(self, name)}; it must be above 0 seconds")
        if not self.rebalance_gain > 0:
            raise ConfigError(
                f"--rebalance-gain is {self.rebalance_gain}; it must be above 0, or the layers would never rest"
            )
