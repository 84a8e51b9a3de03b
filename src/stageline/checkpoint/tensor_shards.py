"""How the ranks of a stage share a model: what a rank's own part of it looks like, and which part of a tensor that is.

One idea: a rank runs a smaller model with the same hidden size: fewer heads, narrower MLPs, narrower or fewer experts,
a part of the vocabulary. What its sublayers give is added up over the ranks. So a family is built from the smaller
model's spec, asks for the shapes that follow, and never learns of ranks; a tensor's name tells which part of it is
meant.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.model_spec import ModelSpec
from stageline.errors import ConfigError


@dataclass(frozen=True)
class Cut:
    """A rank's part of a tensor.

    Args:
        dimension: along which it is cut.
        runs: what the rank has of that, in order.
        full_size: of the whole tensor along that dimension.
    """

    dimension: int
    runs: tuple[range, ...]
    full_size: int

    @property
    def size(self) -> int:
        return sum(map(len, self.runs))


def as_shared(checkpoint: Checkpoint, deals_experts: bool) -> Checkpoint:
    """A checkpoint as ranks are to share it.

    Args: deals_experts: each rank has some of a layer's experts whole; otherwise a part of every one.
    Raises: ConfigError if there are no experts to be dealt.
    """
    if not deals_experts:
        return checkpoint
    moe = checkpoint.spec.moe
    if moe is None:
        raise ConfigError(
            f"--enable-expert-parallel deals a layer's experts to the ranks of its stage, but {checkpoint.path} is a "
            "dense model, without experts; leave it out: -tp divides the layers all the same"
        )
    return replace(checkpoint, spec=replace(checkpoint.spec, moe=replace(moe, is_dealt=True)))


def check_shards(spec: ModelSpec, size: int) -> None:
    """Raises: ConfigError if so many ranks cannot share the model's layers, with the numbers that can."""
    if size > 1 and (reason := _obstacle(spec, size)):
        able = [str(other) for other in range(1, spec.num_heads + 1) if not _obstacle(spec, other)]
        raise ConfigError(
            f"--tensor-parallel-size {size}: {reason}; possible are {', '.join(able)}{_other_way(spec, size)}"
        )


def _other_way(spec: ModelSpec, size: int) -> str:
    """Whether it is only how experts are shared that does not work."""
    if spec.moe is None or _obstacle(replace(spec, moe=replace(spec.moe, is_dealt=not spec.moe.is_dealt)), size):
        return ""
    verb = "leave out" if spec.moe.is_dealt else "give"
    return f"; or {verb} --enable-expert-parallel"


def _obstacle(spec: ModelSpec, size: int) -> str:
    if spec.num_heads % size:
        return f"{spec.num_heads} attention heads cannot be shared evenly by {size} ranks"
    if spec.mla is None and spec.num_kv_heads % size and size % spec.num_kv_heads:
        return f"{spec.num_kv_heads} KV heads can neither be shared evenly by {size} ranks nor copied evenly to them"
    sizes = {"the MLP's": spec.intermediate_size}
    if spec.moe is not None:
        if not spec.moe.is_dealt:
            sizes["an expert's"] = spec.moe.intermediate_size
        elif spec.moe.num_experts % size:
            return f"{spec.moe.num_experts} experts cannot be dealt evenly to {size} ranks"
        sizes["the shared expert's"] = spec.moe.shared_intermediate_size
        if not any(not spec.has_experts(layer) for layer in range(spec.num_layers)):
            del sizes["the MLP's"]
    for name, numbers in sizes.items():
        if numbers % size:
            return f"{name} {numbers} inner numbers cannot be shared evenly by {size} ranks"
    return ""


def rank_spec(spec: ModelSpec, size: int, rank: int = 0) -> ModelSpec:
    """The model of one of `size` ranks, which `check_shards` accepts. Its vocabulary is the whole one.

    Args: rank: which of them; all are alike but for the experts that they were dealt.
    """
    if size == 1:
        return spec
    moe = spec.moe
    if moe is not None:
        own = _share(moe.num_experts, rank, size)
        moe = replace(
            moe,
            intermediate_size=moe.intermediate_size if moe.is_dealt else moe.intermediate_size // size,
            shared_intermediate_size=moe.shared_intermediate_size // size,
            own_experts=(own.start, own.stop) if moe.is_dealt else None,
        )
    return replace(
        spec,
        num_heads=spec.num_heads // size,
        num_kv_heads=max(1, spec.num_kv_heads // size),
        intermediate_size=spec.intermediate_size // size,
        moe=moe,
    )


def vocabulary_of(vocab_size: int, rank: int, size: int) -> range:
    """The tokens whose embedding and logits a rank has: as many as any other, but for the last ranks."""
    share = -(-vocab_size // size)
    return range(min(rank * share, vocab_size), min((rank + 1) * share, vocab_size))


class RankCuts:
    """Which part of a model's tensors is one rank's, by their names."""

    def __init__(self, spec: ModelSpec, rank: int, size: int) -> None:
        self._spec = spec
        self._rank = rank
        self._size = size
        moe = spec.moe
        self._dealt = range(0)
        if moe is not None and moe.is_dealt and size > 1:
            self._dealt = self._share(moe.num_experts)

    def is_of_another(self, name: str) -> bool:
        """An expert that another rank was dealt; or a bias behind the sum over ranks: it must be added once, and the
        first rank does."""
        if self._dealt and ".experts." in name:
            index = name.partition(".experts.")[2].partition(".")[0]
            return index.isdecimal() and int(index) not in self._dealt
        return self._rank > 0 and name.endswith(
            ("o_proj.bias", "down_proj.bias", "experts.down_proj_bias", "w2.bias")
        )

    def own_bytes(self, name: str, num_bytes: int) -> int:
        """How many of a tensor's bytes are the rank's."""
        if self.is_of_another(name):
            return 0
        if self._dealt and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            return num_bytes // self._size
        cut = self.cut_of(name)
        return num_bytes if cut is None else num_bytes * cut.size // cut.full_size

    def cut_of(self, name: str) -> Cut | None:
        """None for a tensor that every rank has whole, and for experts that it was dealt.

        Args:
            name: Hugging Face's. Of all experts' matrices in one tensor (`experts.down_proj`) the cut is of one
                expert's matrix.
        """
        if self._size == 1:
            return None
        module, _, kind = name.rpartition(".")
        parent, _, part = module.rpartition(".")
        if part == "experts":
            return self._of_packed_experts(kind)
        if kind == "sinks":
            return self._evenly(0, self._spec.num_heads)
        if parent.endswith("self_attn"):
            return self._of_attention(part, kind)
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            vocab_size = self._spec.vocab_size
            return Cut(0, (vocabulary_of(vocab_size, self._rank, self._size),), vocab_size)
        return self._of_mlp(parent, part, kind)

    def _of_attention(self, part: str, kind: str) -> Cut | None:
        spec = self._spec
        head_dim = spec.head_dim
        if spec.mla is not None:
            return self._of_latent_attention(part, kind)
        if part in ("q_proj", "q_norm") and (part == "q_proj" or self._is_norm_of_all_heads):
            return self._evenly(0, spec.num_heads * head_dim)
        if part in ("k_proj", "v_proj", "k_norm") and (part != "k_norm" or self._is_norm_of_all_heads):
            return Cut(0, (self._kv_rows(0),), spec.num_kv_heads * head_dim)
        if part == "qkv_proj":
            queries, keys = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
            own = self._share(queries)
            return Cut(0, (own, self._kv_rows(queries), self._kv_rows(queries + keys)), queries + 2 * keys)
        if part == "o_proj" and kind == "weight":
            return self._evenly(1, spec.num_heads * head_dim)
        return None

    @property
    def _is_norm_of_all_heads(self) -> bool:
        return self._spec.family == "olmo2"

    def _of_latent_attention(self, part: str, kind: str) -> Cut | None:
        spec, mla = self._spec, self._spec.mla
        assert mla is not None
        numbers_per_head = {
            "q_proj": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
            "q_b_proj": mla.qk_nope_head_dim + mla.qk_rope_head_dim,
            "kv_b_proj": mla.qk_nope_head_dim + mla.v_head_dim,
            "k_b_proj": 1,
            "v_b_proj": 1,
        }
        if part in numbers_per_head:
            return self._evenly(0, spec.num_heads * numbers_per_head[part])
        return self._evenly(1, spec.num_heads * mla.v_head_dim) if part == "o_proj" and kind == "weight" else None

    def _of_mlp(self, parent: str, part: str, kind: str) -> Cut | None:
        if self._dealt and ".experts." in f"{parent}.":
            return None
        size = self._inner_size(parent)
        if part in ("gate_proj", "up_proj", "w1", "w3"):
            return self._evenly(0, size)
        if part == "gate_up_proj":
            own = self._share(size)
            return Cut(0, (own, range(size + own.start, size + own.stop)), 2 * size)
        return self._evenly(1, size) if part in ("down_proj", "w2") and kind == "weight" else None

    def _inner_size(self, parent: str) -> int:
        moe = self._spec.moe
        if moe is not None and ".experts." in f"{parent}.":
            return moe.intermediate_size
        if moe is not None and parent.endswith(("shared_expert", "shared_experts")):
            return moe.shared_intermediate_size
        return self._spec.intermediate_size

    def _of_packed_experts(self, kind: str) -> Cut | None:
        """gpt-oss': [in_features, out_features] of an expert, and [experts, out_features] of biases; gate and up in
        turn, so that a rank's are side by side."""
        moe = self._spec.moe
        if moe is None:
            return None
        if self._dealt:
            return Cut(0, (self._dealt,), moe.num_experts) if kind.endswith("_bias") else None
        if kind in ("gate_up_proj", "gate_up_proj_bias"):
            return self._evenly(1, 2 * moe.intermediate_size)
        return self._evenly(0, moe.intermediate_size) if kind == "down_proj" else None

    def _kv_rows(self, first: int) -> range:
        """Of this rank's KV heads; ranks share one where there are more ranks than heads."""
        num_heads, head_dim = self._spec.num_kv_heads, self._spec.head_dim
        own = max(1, num_heads // self._size)
        begin = first + self._rank * num_heads // self._size * head_dim
        return range(begin, begin + own * head_dim)

    def _evenly(self, dimension: int, size: int) -> Cut:
        return Cut(dimension, (self._share(size),), size)

    def _share(self, size: int) -> range:
        return _share(size, self._rank, self._size)


def _share(count: int, rank: int, size: int) -> range:
    return range(rank * count // size, (rank + 1) * count // size)
