"""What a model's items weigh, read, compute and cache, from its shape alone.

One idea: a model is a row of items (embedding, layers, head), and each is a few numbers: parameters that every token
multiplies, experts of which a token takes some, and what attention does per token and pair of tokens. Whatever is asked
of a model (parameters, bytes, FLOPs, KV cache) is a sum over these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_in

from stageline.checkpoint.encodings import PACKED_BLOCK_ELEMENTS
from stageline.checkpoint.model_spec import ModelSpec
from stageline.checkpoint.tensor_shards import check_shards
from stageline.cost.expert_load import busiest_experts, busiest_rows, num_experts_hit
from stageline.errors import ConfigError

BYTES_PER_WEIGHT = {
    "fp32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "fp8": 1.0,
    "int8": 8.5 / 8,  # eight bits, and a 16-bit scale for 32 weights
    "int4": 4.5 / 8,  # four bits, and a 16-bit scale for 32 weights
    "mxfp4": 4.25 / 8,  # four bits, and an 8-bit scale for 32 weights
}
# In what format products with such weights are computed.
COMPUTE_FORMAT = {"int4": "bf16", "mxfp4": "bf16"}
_IN_BLOCKS = ("int8", "int4", "mxfp4")
"""Kept in blocks with a scale each; a part of a matrix that is not whole blocks becomes 16 bits, as in the engine."""
ACTIVATION_ITEMSIZE_BYTES = 2


@dataclass(frozen=True)
class WeightFormat:
    """How weights are kept: routed experts may be kept smaller than the rest.

    Args:
        dense, experts: keys of BYTES_PER_WEIGHT.
    """

    dense: str = "bf16"
    experts: str = "bf16"

    def __post_init__(self) -> None:
        for name in (self.dense, self.experts):
            if name not in BYTES_PER_WEIGHT:
                raise ConfigError(f"weights in {name!r} are not known; known are {', '.join(BYTES_PER_WEIGHT)}")

    def __str__(self) -> str:
        return self.dense if self.dense == self.experts else f"{self.dense}, experts {self.experts}"


@dataclass(frozen=True)
class ItemShape:
    """One item of a model: the embedding, a layer, or the head.

    Args:
        num_dense: parameters that every token is multiplied with (attention, dense MLP, shared experts, router).
        num_looked_up, row_size: parameters of which a token reads a row, and how many of them: the embedding.
        num_kv: those of `num_dense` that make keys and values: sharded no further than the KV heads.
        num_copied: those of `num_dense` that every device has: a router, and what makes latent attention's short rows.
        num_experts, num_experts_per_token, num_per_expert: routed experts.
        expert_size: an expert's inner numbers, of which a device has a part unless it has whole experts.
        expert_block: numbers that share a scale, 1 for none.
        is_dealt: devices have whole experts, equally many each, instead of a part of every one.
        dense_bytes, expert_bytes: per parameter.
        kv_bytes_per_token: of the KV cache, all heads.
        max_kv_shards: devices that can share the KV cache; with more, some keep the same.
        window: tokens a token attends to, None for all.
        flops_per_pair: attention of one new token to one token.
        num_all_reduces: per pass, if sharded.
        dense_format, expert_format: what products are computed in.
        output_size: of the head: numbers per row that are gathered; 0 elsewhere.
        activations, sharded_activations: numbers per token alive at once: on every device, and shared by the devices.
    """

    num_dense: float = 0.0
    num_looked_up: float = 0.0
    row_size: int = 0
    num_kv: float = 0.0
    num_copied: float = 0.0
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_per_expert: float = 0.0
    expert_size: int = 0
    expert_block: int = 1
    is_dealt: bool = False
    dense_bytes: float = 2.0
    expert_bytes: float = 2.0
    kv_bytes_per_token: float = 0.0
    max_kv_shards: int = 1
    window: int | None = None
    flops_per_pair: float = 0.0
    num_all_reduces: int = 0
    dense_format: str = "bf16"
    expert_format: str = "bf16"
    output_size: int = 0
    activations: float = 0.0
    sharded_activations: float = 0.0

    @property
    def num_parameters(self) -> float:
        return self.num_dense + self.num_looked_up + self.num_experts * self.num_per_expert

    @property
    def num_active(self) -> float:
        """Parameters that one token is multiplied with."""
        return self.num_dense + self.num_experts_per_token * self.num_per_expert

    def kv_shards(self, num_devices: int) -> int:
        return min(num_devices, self.max_kv_shards)

    def own_dense(self, num_devices: int) -> float:
        """Parameters that each of the devices sharing the item multiplies every token with."""
        shared = self.num_dense - self.num_kv - self.num_copied
        return shared / num_devices + self.num_kv / self.kv_shards(num_devices) + self.num_copied

    def weight_bytes(self, num_devices: int = 1) -> float:
        """That each of the devices sharing the item keeps."""
        experts = self.num_experts * self.num_per_expert * self.own_expert_bytes(num_devices)
        return self._dense_bytes(self.num_looked_up, num_devices, experts)

    def _dense_bytes(self, num_embedded: float, num_devices: int, experts_bytes: float) -> float:
        """Of all but routed experts, of which all devices together have so many bytes."""
        shared = (num_embedded * self.dense_bytes + experts_bytes) / num_devices
        return self.own_dense(num_devices) * self.dense_bytes + shared

    def keeps_blocks(self, num_devices: int) -> bool:
        """Whether what a device has of an expert is whole blocks, so that it is kept as the checkpoint has it."""
        return self.is_dealt or num_devices == 1 or self.expert_size / num_devices % self.expert_block == 0

    def own_expert_bytes(self, num_devices: int) -> float:
        """Per parameter, as a device keeps it."""
        return self.expert_bytes if self.keeps_blocks(num_devices) else max(self.expert_bytes, 2.0)

    def kv_bytes(self, num_devices: int = 1) -> float:
        """KV cache of one token that each device keeps, while the window has not passed it."""
        return self.kv_bytes_per_token / self.kv_shards(num_devices)

    def activation_bytes(self, num_devices: int = 1) -> float:
        """Of one token, alive at once on each device."""
        return (self.activations + self.sharded_activations / num_devices) * ACTIVATION_ITEMSIZE_BYTES

    def kv_tokens(self, context_tokens: float) -> float:
        """How many of a request's tokens this item reads when decoding, and must keep."""
        return context_tokens if self.window is None else min(context_tokens, self.window)

    def num_experts_read(self, num_tokens: float) -> float:
        """Experts that at least one of so many tokens takes, if they choose evenly."""
        if not self.num_experts:
            return 0.0
        return num_experts_hit(self.num_experts, self.num_experts_per_token, num_tokens)

    def experts_worth(self, num_tokens: int, num_devices: int) -> float:
        """Whole experts' weights that the busiest device reads for so many tokens."""
        if not self._has_some_whole(num_devices):
            return self.num_experts_read(num_tokens) / num_devices
        return busiest_experts(self.num_experts, self.num_experts_per_token, num_tokens, num_devices)

    def rows_worth(self, num_tokens: int, num_devices: int) -> float:
        """Products of a row with a whole expert that the busiest device computes for so many tokens."""
        if not self._has_some_whole(num_devices):
            return num_tokens * self.num_experts_per_token / num_devices
        return busiest_rows(self.num_experts, self.num_experts_per_token, num_tokens, num_devices)

    def num_expert_products(self, num_tokens: int, num_devices: int) -> float:
        """Experts of which the busiest device computes anything."""
        if not self._has_some_whole(num_devices):
            return self.num_experts_read(num_tokens)
        return self.experts_worth(num_tokens, num_devices)

    def _has_some_whole(self, num_devices: int) -> bool:
        return self.is_dealt and num_devices > 1 and self.num_experts > 0

    def read_bytes(self, num_tokens: int, num_devices: int = 1) -> float:
        """Weights that the busiest device reads for a microbatch of so many tokens."""
        num_read = self.experts_worth(num_tokens, num_devices) * num_devices
        experts_bytes = num_read * self.num_per_expert * self.own_expert_bytes(num_devices)
        return self._dense_bytes(num_tokens * self.row_size, num_devices, experts_bytes)


@dataclass(frozen=True)
class ModelCosts:
    """A model as items.

    Args:
        layers: [layers], in order.
        shares_head: head and embedding are one matrix: kept once where one stage has both.
        hidden_bytes: one token's hidden states, as they cross a boundary in one tensor.
        num_heads, num_kv_heads: attention's, for what sharding can divide.
        spec: the model's shape, for what else sharding must divide; None for one that is only numbers.
    """

    embedding: ItemShape
    layers: tuple[ItemShape, ...]
    head: ItemShape
    shares_head: bool
    hidden_bytes: float
    num_heads: int
    num_kv_heads: int
    spec: ModelSpec | None = None

    @property
    def has_experts(self) -> bool:
        return any(layer.num_experts for layer in self.layers)

    def dealt(self) -> ModelCosts:
        """The same with a layer's experts dealt to the devices that share it: whole ones, equally many to each."""
        spec = self.spec
        if spec is not None and spec.moe is not None:
            spec = replace_in(spec, moe=replace_in(spec.moe, is_dealt=True))
        layers = tuple(replace(layer, is_dealt=True) if layer.num_experts else layer for layer in self.layers)
        return replace(self, layers=layers, spec=spec)

    def why_not_shared(self, num_devices: int) -> str | None:
        """Why the engine refuses to share layers so, with what it takes; None if it does not."""
        if self.spec is None:
            return None
        try:
            check_shards(self.spec, num_devices)
        except ConfigError as refused:
            return str(refused).partition(": ")[2]
        return None

    @property
    def num_parameters(self) -> float:
        shared = self.embedding.num_parameters if self.shares_head else 0.0
        items = (self.embedding, *self.layers, self.head)
        return sum(item.num_parameters for item in items) - shared

    @property
    def num_active(self) -> float:
        """Parameters that one token is multiplied with, the head included, the embedding's rows not."""
        return self.head.num_active + sum(layer.num_active for layer in self.layers)

    @property
    def weight_bytes(self) -> float:
        items = (self.embedding, *self.layers, self.head)
        return sum(item.weight_bytes() for item in items) - self.shared_bytes()

    def shared_bytes(self, num_devices: int = 1) -> float:
        """What each device of a stage with both ends saves because they are one matrix."""
        return self.embedding.weight_bytes(num_devices) if self.shares_head else 0.0

    @property
    def kv_bytes_per_token(self) -> float:
        """Of all layers, while no window has passed the token."""
        return sum(layer.kv_bytes_per_token for layer in self.layers)

    def kv_bytes_per_request(self, context_tokens: float) -> float:
        return sum(layer.kv_bytes_per_token * layer.kv_tokens(context_tokens) for layer in self.layers)


def model_costs(spec: ModelSpec, weights: WeightFormat | None = None, kv_itemsize_bytes: float = 2.0) -> ModelCosts:
    """Args:
    weights: None for bf16.
    kv_itemsize_bytes: of a number in the KV cache: 2 for 16-bit formats, 1 for 8-bit ones.
    """
    weights = weights or WeightFormat()
    itemsize = BYTES_PER_WEIGHT[weights.dense]
    # Embedding and head stay in 16 bits where layers are kept smaller: that is how such checkpoints are made.
    end_bytes = max(itemsize, 2.0)
    matrix = float(spec.vocab_size * spec.hidden_size)
    return ModelCosts(
        embedding=ItemShape(
            num_looked_up=matrix, row_size=spec.hidden_size, dense_bytes=end_bytes, num_all_reduces=1
        ),
        layers=tuple(_layer(spec, index, weights, kv_itemsize_bytes) for index in range(spec.num_layers)),
        head=ItemShape(num_dense=matrix + spec.hidden_size, dense_bytes=end_bytes, output_size=spec.vocab_size),
        shares_head=spec.tie_word_embeddings,
        hidden_bytes=spec.hidden_size * ACTIVATION_ITEMSIZE_BYTES,
        num_heads=spec.num_heads,
        num_kv_heads=1 if spec.mla is not None else spec.num_kv_heads,
        spec=spec,
    )


def _layer(spec: ModelSpec, index: int, weights: WeightFormat, kv_itemsize_bytes: float) -> ItemShape:
    hidden = spec.hidden_size
    num_attention, num_kv, num_copied = _mla_weights(spec) if spec.mla is not None else _attention_weights(spec)
    kv_numbers, flops_per_pair = _attention_work(spec)
    num_dense = float(num_attention + 2 * hidden)
    num_experts = num_per_token = expert_size = 0
    num_per_expert = 0.0
    attention_width, mlp_width = _attention_width(spec), 2.0 * spec.intermediate_size
    moe = spec.moe
    if moe is not None and spec.has_experts(index):
        num_experts, num_per_token = moe.num_experts, moe.num_experts_per_token
        num_per_expert = 3.0 * hidden * moe.intermediate_size
        expert_size, num_routing = moe.intermediate_size, hidden * (moe.num_experts + moe.has_shared_gate)
        num_copied += num_routing
        num_dense += num_routing + 3.0 * hidden * moe.shared_intermediate_size
        mlp_width = 2.0 * (num_per_token * moe.intermediate_size + moe.shared_intermediate_size)
    else:
        num_dense += 3.0 * hidden * spec.intermediate_size
    return ItemShape(
        num_dense=num_dense,
        num_kv=float(num_kv),
        num_experts=num_experts,
        num_experts_per_token=num_per_token,
        num_per_expert=num_per_expert,
        num_copied=float(num_copied),
        expert_size=expert_size,
        expert_block=PACKED_BLOCK_ELEMENTS if weights.experts in _IN_BLOCKS else 1,
        dense_bytes=BYTES_PER_WEIGHT[weights.dense],
        expert_bytes=BYTES_PER_WEIGHT[weights.experts],
        kv_bytes_per_token=kv_numbers * kv_itemsize_bytes,
        max_kv_shards=1 if spec.mla is not None else spec.num_kv_heads,
        window=spec.window_of(index),
        flops_per_pair=flops_per_pair,
        num_all_reduces=2,
        activations=3.0 * hidden,
        sharded_activations=max(attention_width, mlp_width),
        dense_format=COMPUTE_FORMAT.get(weights.dense, weights.dense),
        expert_format=COMPUTE_FORMAT.get(weights.experts, weights.experts),
    )


def _attention_weights(spec: ModelSpec) -> tuple[int, int, int]:
    """Parameters of ordinary attention, those of them that make keys and values, and those that all devices have."""
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    num_kv = 2 * kv * (spec.hidden_size + spec.attention_bias)
    num_query = query * (spec.hidden_size + spec.attention_bias)
    num_output = spec.hidden_size * (query + spec.attention_output_bias)
    return num_query + num_kv + num_output, num_kv, 0


def _attention_width(spec: ModelSpec) -> float:
    """Numbers per token of queries, keys, values and attention's output."""
    if spec.mla is None:
        return float((2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
    mla = spec.mla
    per_head = 2 * (mla.qk_nope_head_dim + mla.qk_rope_head_dim) + 2 * mla.v_head_dim
    return float(spec.num_heads * per_head)


def _mla_weights(spec: ModelSpec) -> tuple[int, int, int]:
    """The same of latent attention. What makes the compressed row, and the query's, has no heads that could be shared.
    """
    mla = spec.mla
    assert mla is not None, "only called for latent attention"
    query = spec.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    num_copied = spec.hidden_size * mla.row_size + mla.kv_lora_rank
    if mla.q_lora_rank is not None:
        num_copied += mla.q_lora_rank * (spec.hidden_size + 1)
    num_query = (mla.q_lora_rank or spec.hidden_size) * query
    num_expanded = mla.kv_lora_rank * spec.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    num_output = spec.num_heads * mla.v_head_dim * spec.hidden_size
    return num_copied + num_query + num_expanded + num_output, 0, num_copied


def _attention_work(spec: ModelSpec) -> tuple[float, float]:
    """Numbers in the KV cache per token, and FLOPs per pair of tokens.

    Latent attention attends to the compressed rows, in prompts too: its matrices are absorbed into the query's.
    """
    if spec.mla is None:
        return 2.0 * spec.num_kv_heads * spec.head_dim, 4.0 * spec.num_heads * spec.head_dim
    row_size = spec.mla.row_size
    return float(row_size), 2.0 * spec.num_heads * (row_size + spec.mla.kv_lora_rank)
