"""What an operator should know before choosing a layout: rules, each with the arithmetic that decides it.

One idea: a rule is a function of the numbers it depends on, so both sides of its boundary can be tested, and its
sentence shows these numbers, so a reader can check it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stageline.config.plan_config import PlanConfig
from stageline.cost.hardware import Link
from stageline.cost.ring import Ring, pipeline_beats_sharding
from stageline.cost.speculation import accepted_tokens, pipelined_tpot, synchronous_tpot

_MATTERS_FRACTION = 0.01


@dataclass(frozen=True)
class Advice:
    """Args:
    rule: a short name.
    text: one sentence or two.
    """

    rule: str
    text: str


def advise_fit(
    needed_bytes: float, room_bytes: float, num_devices: int, num_that_hold: int, num_nodes: int, is_fast_link: bool
) -> Advice:
    """Whether weights and the planned KV cache fit one node, and what follows.

    Args:
        room_bytes: of the roomiest node.
        num_devices: of that node.
        num_that_hold: nodes with enough room.
        is_fast_link: between the devices of a node; without it sharding is not the answer.
    """
    needs = f"weights and KV cache of the planned requests take {needed_bytes / 1e9:,.1f} GB, "
    needs += f"a node has room for {'up to ' if num_nodes > 1 else ''}{room_bytes / 1e9:,.1f} GB"
    inside = "tensor parallelism inside a node" if is_fast_link else "a pipeline inside a node"
    if needed_bytes > room_bytes:
        if num_nodes == 1:
            return Advice("does not fit one node", f"{needs}: use more or larger devices, or weights of fewer bits")
        inside = f"{inside}, " if num_devices > 1 else ""
        return Advice("does not fit one node", f"{needs}: {inside}a pipeline across nodes")
    inside = "one device" if num_devices == 1 else inside
    more = f", and replicas on the {num_that_hold} nodes that hold it" if num_that_hold > 1 else ""
    if num_devices > 1 and not more:
        more = ", or replicas if fewer devices are enough"
    return Advice("fits one node", f"{needs}: {inside}{more}; nothing forces a pipeline across nodes")


def advise_heads(num_heads: int, num_devices: int, able: Sequence[int]) -> Advice | None:
    """A number of devices that cannot share the heads. Args: able: numbers that can share layers, 1 among them."""
    if num_heads % num_devices == 0:
        return None
    lower = max(size for size in able if size < num_devices)
    if lower == 1:
        return Advice(
            "heads do not divide",
            f"{num_heads} heads do not divide over {num_devices} devices, and no fewer can share a stage either: "
            f"{num_devices} stages of one, whatever the number of heads",
        )
    stages = f"; {num_devices // lower} stages of {lower}" if num_devices // lower > 1 else ""
    left = num_devices - num_devices // lower * lower
    unused = f" (leaving {left} over)" if left else ""
    return Advice(
        "heads do not divide",
        f"{num_heads} heads do not divide over {num_devices} devices: at most {lower} can share a stage"
        f"{stages}{unused}, or {num_devices} stages of one, whatever the number of heads",
    )


def advise_kv_heads(num_kv_heads: int, num_devices: int) -> Advice | None:
    """More devices in a stage than KV heads: some keep the same cache."""
    if num_devices <= num_kv_heads:
        return None
    stages = num_devices // num_kv_heads
    heads = f"{num_kv_heads} KV head{'s' * (num_kv_heads > 1)}"
    copies = num_devices / num_kv_heads
    text = f"with {heads}, {num_devices} devices in a stage keep every token's KV {copies:.3g} times"
    if stages > 1:
        fewer = f"{num_kv_heads} device{'s' * (num_kv_heads > 1)}"
        text += f"; {fewer} in each of {stages} stages hold {stages} times as many tokens"
    return Advice("more devices than KV heads", text)


def advise_link_in_node(link_name: str, link: Link, num_devices: int, reduces_s: float, hops_s: float) -> Advice | None:
    """No fast link between the devices of a node: sharding pays for every layer, a pipeline for every stage.

    Args:
        reduces_s: all-reduces of one token's way through the model, with the node as one stage.
        hops_s: its hops, with every device a stage.
    """
    if link.is_fast or num_devices < 2:
        return None
    cheaper = "the pipeline" if hops_s < reduces_s else "sharding all the same"
    return Advice(
        "no fast link inside the node",
        f"over {link_name} a microbatch spends {reduces_s * 1e3:.2f} ms in all-reduces as one stage of {num_devices}, "
        f"{hops_s * 1e3:.2f} ms in hops as {num_devices} stages: {cheaper} costs less",
    )


def advise_pipeline_or_sharding(
    num_layers: int, all_reduce_time_s: float, weights_s: float, num_devices: int
) -> Advice:
    """Which decodes one request faster on n devices: PP iff 2·L·t_AR > w·(1 - 1/n)."""
    reduces_s, saved_s = 2 * num_layers * all_reduce_time_s, weights_s * (1 - 1 / num_devices)
    wins = pipeline_beats_sharding(num_layers, all_reduce_time_s, weights_s, num_devices)
    sign, name = (">", f"{num_devices} stages") if wins else ("<=", f"{num_devices} shards")
    return Advice(
        "pipeline or shards for decode",
        f"2 x {num_layers} all-reduces of {all_reduce_time_s * 1e6:.1f} µs = {reduces_s * 1e3:.2f} ms {sign} "
        f"{weights_s * 1e3:.2f} ms of reading weights x (1 - 1/{num_devices}) = {saved_s * 1e3:.2f} ms: one request "
        f"decodes faster on {name}",
    )


@dataclass(frozen=True)
class ExpertShares:
    """What the busiest device does of a layer's experts, for one microbatch of decodes.

    Args:
        num_hit: of the `num_experts`, those that some row takes.
        worth_in_parts, worth_dealt: whole experts' weights that a device reads, with a part of every expert and with
            whole ones.
        expert_size: inner numbers of an expert.
        are_parts_blocks: whether a device's part is whole blocks that share a scale, or is kept in 16 bits.
    """

    num_rows: int
    num_devices: int
    num_experts: int
    num_hit: float
    worth_in_parts: float
    worth_dealt: float
    expert_size: int
    are_parts_blocks: bool


def advise_experts(
    layout: str, is_dealt: bool, tokens_per_s: float, other_tokens_per_s: float | None, why_not: str,
    shares: ExpertShares,
) -> Advice | None:
    """Whether whole experts or a part of each; None if it matters less than a hundredth.

    Args:
        other_tokens_per_s: the other way; None if it cannot be, and `why_not` says why.
    """
    if other_tokens_per_s is not None and abs(other_tokens_per_s / tokens_per_s - 1) < _MATTERS_FRACTION:
        return None
    chosen = "--enable-expert-parallel" if is_dealt else "parts of every expert"
    if other_tokens_per_s is None:
        return Advice("experts whole or in parts", f"{layout} has {chosen}, for the other way cannot be: {why_not}")
    each, of = shares.worth_in_parts, f"{shares.num_hit:.1f} of {shares.num_experts} experts"
    size = f"{shares.expert_size:,} / {shares.num_devices}"
    blocks = "" if shares.are_parts_blocks else f", in 16 bits, for {size} numbers are no whole blocks"
    dealt, in_parts = (tokens_per_s, other_tokens_per_s) if is_dealt else (other_tokens_per_s, tokens_per_s)
    return Advice(
        "experts whole or in parts",
        f"{shares.num_rows} rows take {of}: in parts a device reads {shares.num_hit:.1f} / {shares.num_devices} = "
        f"{each:.2f} experts' worth{blocks}; dealt the busiest reads {shares.worth_dealt:.2f}, "
        f"{shares.worth_dealt / each:.2f} times as many: {layout} makes {in_parts:,.0f} tokens/s in parts and "
        f"{dealt:,.0f} dealt, so {chosen}",
    )


def advise_concurrency(ring: Ring, num_requests: int) -> Advice | None:
    """The fewest microbatches, so requests, that keep the slowest stage busy; None for one stage."""
    if len(ring.stages_s) < 2:
        return None
    least = ring.filling_microbatches
    arithmetic = f"a ring of {ring.ring_s * 1e3:.2f} ms / {ring.slowest_s * 1e3:.2f} ms of the slowest stage"
    if num_requests >= least:
        text = f"{arithmetic}: {least} microbatches fill the pipeline, so at least {least} requests; {num_requests} do"
    else:
        idle = ring.idle_fraction(num_requests)
        text = f"{arithmetic}: {least} requests would fill the pipeline; {num_requests} leave it idle {idle:.0%} of it"
    return Advice("requests that fill the pipeline", text)


def advise_chunk(prompt_tokens: int, chunk_tokens: int, ttft_s: float, whole_ttft_s: float) -> Advice | None:
    """The best chunk of a prompt alone in the pipeline, beside the prompt in one piece."""
    if chunk_tokens >= prompt_tokens:
        return None
    return Advice(
        "chunk size",
        f"a prompt of {prompt_tokens:,} tokens alone in the pipeline is quickest in chunks of {chunk_tokens:,}: "
        f"{ttft_s * 1e3:.0f} ms to its first token instead of {whole_ttft_s * 1e3:.0f} ms in one piece",
    )


@dataclass(frozen=True)
class LinkLoad:
    """What a network between stages would cost.

    Args:
        decode_ring, decode_cycle_s: one microbatch of decodes, its hops over this network; all of them.
        free_cycle_s: the same if hops took no time.
        prompt_hop_s: a chunk's hop; `prompt_stage_s`: its time on the slowest stage.
        saturating_rows: requests in a microbatch from which on the wire takes longer than the slowest stage, or None.
    """

    decode_ring: Ring
    decode_cycle_s: float
    free_cycle_s: float
    prompt_hop_s: float
    prompt_stage_s: float
    prompt_chunk_tokens: int
    saturating_rows: int | None

    @property
    def decode_loss_fraction(self) -> float:
        return 1 - self.free_cycle_s / self.decode_cycle_s

    @property
    def prompt_loss_fraction(self) -> float:
        """Of the rate at which prompts can be taken in: a wire slower than the slowest stage sets the pace."""
        return max(0.0, 1 - self.prompt_stage_s / self.prompt_hop_s)


def advise_network(link_name: str, load: LinkLoad) -> Advice:
    """The verdict on a network between stages: what decodes and prompts lose, and where its wire is full."""
    hop = max(load.decode_ring.hops_s)
    hidden = "hidden" if hop <= load.decode_ring.slowest_s else "longer than a stage takes"
    full = (
        f"its wire is full from {load.saturating_rows:,} requests per microbatch on"
        if load.saturating_rows is not None
        else "decodes never fill its wire"
    )
    return Advice(
        f"{link_name} between stages",
        f"a decode's hop of {hop * 1e3:.2f} ms is {hidden}, decodes lose {load.decode_loss_fraction:.0%} of their "
        f"pace; a chunk of {load.prompt_chunk_tokens:,} tokens takes {load.prompt_hop_s * 1e3:.1f} ms on the wire and "
        f"{load.prompt_stage_s * 1e3:.1f} ms on a stage, prompts lose {load.prompt_loss_fraction:.0%}; {full}",
    )


def advise_speculation(ring: Ring, config: PlanConfig) -> Advice:
    """What guessing `speculate_tokens` ahead would do to a token's time; guesses themselves are taken to be free.

    Args: ring: of a microbatch of decodes without guesses.
    """
    guesses, acceptance = config.speculate_tokens, config.speculate_acceptance
    num_stages, stage_s = len(ring.stages_s), ring.slowest_s
    chain_s = synchronous_tpot(num_stages, acceptance, guesses, 0.0) * stage_s
    pipelined_s = pipelined_tpot(num_stages, acceptance, guesses) * stage_s
    return Advice(
        "guessing ahead",
        f"{guesses} tokens guessed, each right in {acceptance:.0%}, make {accepted_tokens(acceptance, guesses):.2f} "
        f"tokens a pass: {chain_s * 1e3:.2f} ms a token if a pass waits for the one before, {pipelined_s * 1e3:.2f} ms "
        f"if guesses enter at every stage time of {stage_s * 1e3:.2f} ms, {num_stages * stage_s * 1e3:.2f} ms without; "
        f"that counts while guesses cost a stage no more than the microbatch does, and this engine does not guess yet",
    )


def advise_replicas(
    pipeline_name: str,
    pipeline_tokens_per_s: float,
    replicas_name: str,
    replicas_tokens_per_s: float,
    num_replicas: int,
) -> Advice | None:
    """Whether replicas on the same devices give more than one pipeline; None if they do not."""
    if replicas_tokens_per_s <= pipeline_tokens_per_s:
        return None
    number = {2: "two", 3: "three", 4: "four"}.get(num_replicas, str(num_replicas))
    return Advice(
        "replicas",
        f"{number} replicas beat this pipeline: {replicas_name} makes {replicas_tokens_per_s:,.0f} tokens/s, "
        f"{pipeline_name} {pipeline_tokens_per_s:,.0f}",
    )
