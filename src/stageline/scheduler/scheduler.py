"""The scheduler: emits microbatches, takes their results, decides everything about order, memory and preemption.

No phases: a request has computed tokens chasing known ones. A gap of 0 waits for its token, 1 is a decode, more is a
prefill or a recomputation. A decode is not in flight twice, because its next token is not known; chunks of one prompt
follow each other into the pipeline without waiting. With look-ahead there is one exception: once the window is full,
the decodes that follow the oldest microbatch are announced, as one microbatch more; the first stage gets their tokens
from the last one. A new prompt then waits for one microbatch more than without; if the window is not full, for none.
"""

from __future__ import annotations

import math
from itertools import islice

from stageline.errors import InternalError, RequestError
from stageline.grammar.mask_pool import MaskPool
from stageline.grammar.step import Step
from stageline.kv.kv_cache_manager import BlockTable, KVCacheManager
from stageline.outputs import FinishReason
from stageline.pipeline.microbatch import NO_TOKEN, Microbatch, MicrobatchResult, TokenMasks
from stageline.request import EngineRequest, RequestFailure, RequestUpdate
from stageline.sampling import TokenLogprobs
from stageline.scheduler.admission import check_can_be_served, has_blocks_for, prompt_work, why_not_again
from stageline.scheduler.budget import MIN_CHUNK_TOKENS, PrefillRoom, chunk_length, decode_slowdown
from stageline.scheduler.decode_group import DecodeGroup
from stageline.scheduler.guides import Guides
from stageline.scheduler.launched import LaunchedMicrobatches, Successor
from stageline.scheduler.limits import SchedulerLimits
from stageline.scheduler.microbatch_builder import MicrobatchBuilder
from stageline.scheduler.news import News
from stageline.scheduler.pace import Pace
from stageline.scheduler.running_requests import RunningRequests
from stageline.scheduler.scheduled_request import Rank, ScheduledRequest
from stageline.scheduler.waiting_queue import WaitingQueue
from stageline.timeline.request_journeys import RequestTrace


class Scheduler:
    """One per pipeline. Not thread-safe: the engine's loop is its only caller."""

    def __init__(self, kv: KVCacheManager, limits: SchedulerLimits, masks: MaskPool | None = None) -> None:
        self.limits = limits
        self._kv = kv
        self._guides = Guides(masks)
        self._epoch = 0
        self._next_microbatch = 0
        self._next_request_number = 1
        self._next_arrival = 0
        self._by_id: dict[str, ScheduledRequest] = {}
        self._by_number: dict[int, ScheduledRequest] = {}
        self._waiting = WaitingQueue()
        self._running = RunningRequests()
        self._is_turn_of_shortest = False
        self._num_preemptions = 0
        self._num_prefix_queries_tokens = 0
        self._num_prefix_hits_tokens = 0
        self._removed: list[int] = []
        self._launched = LaunchedMicrobatches()
        self._pace = Pace(limits.window, limits.widest_window or limits.window)

    # ---- requests come and go ----

    @property
    def window(self) -> int:
        """Microbatches that should be in flight."""
        return self._pace.window

    @property
    def most_in_flight(self) -> int:
        """Microbatches that may be in flight."""
        return self._pace.window + self.limits.look_ahead

    @property
    def num_unfinished(self) -> int:
        return len(self._by_id)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_grammars(self) -> bool:
        """Some request keeps to one."""
        return len(self._guides) > 0

    @property
    def is_waiting_for_masks(self) -> bool:
        """Requests are running that cannot be scheduled before their masks are known."""
        return self._guides.num_waiting > 0

    @property
    def num_missed_masks(self) -> int:
        """Rows whose mask came too late, since the start."""
        return self._guides.num_missed_masks

    @property
    def num_waiting_tokens(self) -> int:
        """Known tokens that no microbatch covers yet, of prompts that wait or are partly computed."""
        return self._waiting.num_tokens + sum(request.gap for request in self._running.prefilling)

    @property
    def num_preemptions(self) -> int:
        """Since the start, as are the next two."""
        return self._num_preemptions

    @property
    def num_prefix_queries_tokens(self) -> int:
        """Prompt tokens that were looked up in the prefix cache."""
        return self._num_prefix_queries_tokens

    @property
    def num_prefix_hits_tokens(self) -> int:
        """Prompt tokens that were found there."""
        return self._num_prefix_hits_tokens

    @property
    def num_blocks(self) -> int:
        """KV cache blocks that every stage has."""
        return self._kv.num_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some request refers to, of the kind that is used most; cached ones that nobody uses are free."""
        return self._kv.num_used_blocks

    def traces(self, most: int) -> list[RequestTrace]:
        """Of some requests that are running."""
        return [request.trace for request in islice(self._running, most)]

    def add(self, asked: EngineRequest) -> None:
        """Queue a request. Raises: RequestError if it can never fit, with the numbers."""
        check_can_be_served(asked, self.limits.max_model_len, self._kv)
        if asked.request_id in self._by_id:
            raise RequestError(f"request id {asked.request_id!r} is in use; choose another", "request_id")
        table = BlockTable(asked.cache_salt)
        request = ScheduledRequest(asked, self._next_arrival, list(asked.prompt_token_ids), table)
        self._next_arrival += 1
        self._by_id[asked.request_id] = request
        self._waiting.add(request)
        self._guides.start(request)

    def abort(self, request_id: str, now_s: float) -> RequestUpdate | None:
        """End a request wherever it is. Its blocks are free once no microbatch in flight refers to it.

        Returns: its last update, or None if it is not there any more.
        """
        request = self._by_id.get(request_id)
        if request is None:
            return None
        return self._end_early(request, "abort", now_s)

    def _end_early(
        self, request: ScheduledRequest, reason: FinishReason, now_s: float, failure: RequestFailure | None = None
    ) -> RequestUpdate:
        if request in self._waiting:
            self._waiting.remove(request)
        self._retire(request)
        return News(request, finish_reason=reason, failure=failure).update(now_s)

    def close(self) -> None:
        """Stop computing masks."""
        self._guides.close()

    # ---- microbatches go out ----

    def schedule(self, now_s: float) -> Microbatch | None:
        """The next microbatch, or None if nothing can be scheduled now. The caller launches it at once."""
        builder, successors = MicrobatchBuilder(), []
        if self.limits.look_ahead and len(self._launched) >= self._pace.window:
            successors = self._launched.successors(self._running)
            # Where no token is waited for, one more chunk of prompts lies ready, for chunks do not take equally long.
            if not successors and self._running.num_decoding > 0:
                return None
        self._schedule_decodes(builder, successors)
        if self._running.prefilling or (self._waiting and len(self._running) < self.limits.max_num_seqs):
            self._schedule_prompts(builder, now_s)
        if not builder.requests:
            return None
        number, oldest = self._next_microbatch, self._launched.oldest
        microbatch = builder.build(self._epoch, number, self._removed, number if oldest is None else oldest)
        self._guides.launched(microbatch, builder.requests)
        self._launched.add(microbatch, builder.requests, now_s)
        self._next_microbatch += 1
        self._removed = []
        return microbatch

    def _schedule_decodes(self, builder: MicrobatchBuilder, successors: list[Successor]) -> None:
        """Those whose tokens are known come first, for they have waited longer."""
        others = self._launched.groups_beside(successors)
        group = DecodeGroup(self._running, others, self._pace.window, self._pace.decode_weight)
        while builder.num_tokens < self.limits.max_num_batched_tokens:
            request = group.next_ready()
            if request is None:
                break
            if self._place(builder, request, 1):
                group.take(request)
                continue
            if len(self._running) == 1:
                break
            self._preempt(request)
        for successor in successors:
            if group.is_full or builder.num_tokens >= self.limits.max_num_batched_tokens:
                break
            if self._announce(builder, successor):
                group.take(successor.request)

    def _announce(self, builder: MicrobatchBuilder, successor: Successor) -> bool:
        """Add a row whose token is in flight. Nobody is preempted for it, for the request may have ended."""
        request = successor.request
        if request not in self._running:
            return False
        block_ids = self._kv.extend(request.table, request.num_computed_tokens + 1)
        if block_ids is None:
            return False
        builder.extend_table(request, block_ids)
        builder.add_pending_row(request, successor.place)
        self._count_row(request, 1)
        return True

    def _prefill_room(self, builder: MicrobatchBuilder) -> PrefillRoom:
        num_tokens = self.limits.max_num_batched_tokens - builder.num_tokens
        work = prompt_work(self._pace.prompt_costs, self._waiting, self._running.prefilling)
        num_decoding = self._running.num_decoding
        if num_decoding == 0 or self.limits.max_decode_slowdown == math.inf:
            return self._pace.room_for_prompts(num_tokens, work, self.limits.max_chunk_tokens or MIN_CHUNK_TOKENS)
        num_prompts = min(len(self._running.prefilling) + len(self._waiting), self.limits.max_num_seqs - num_decoding)
        slowdown = decode_slowdown(self.limits.max_decode_slowdown, num_prompts, num_decoding)
        return self._pace.room_beside_decodes(num_tokens, work, builder.shape, num_decoding, slowdown)

    def _schedule_prompts(self, builder: MicrobatchBuilder, now_s: float) -> None:
        """Continue prompts that are partly computed and start waiting ones, while there is room.

        Microbatches take turns: in one the most important goes first, in the next the shortest. So a short prompt does
        not wait for a long one before it, and the long one still gets every other microbatch.
        """
        room = self._prefill_room(builder)
        opened = sorted(self._running.prefilling, key=self._turn_rank, reverse=True)
        num_rows_before, can_admit = len(builder.requests), True
        while True:
            waiting = self._next_waiting() if can_admit else None
            if opened and (waiting is None or self._turn_rank(opened[-1]) < self._turn_rank(waiting)):
                request = opened.pop()
                if request not in self._running.prefilling:
                    continue
                num_tokens = self._chunk(request, room)
                if not self._is_worth_a_row(request, num_tokens, builder) or (
                    not self._place(builder, request, num_tokens)
                ):
                    break
                room.take(request.num_computed_tokens - num_tokens, num_tokens)
            elif waiting is not None:
                can_admit = self._admit(builder, waiting, room, now_s)
            else:
                break
        if len(builder.requests) > num_rows_before:
            self._is_turn_of_shortest = not self._is_turn_of_shortest

    def _turn_rank(self, request: ScheduledRequest) -> Rank:
        return request.rank_by_length if self._is_turn_of_shortest else request.rank

    def _next_waiting(self) -> ScheduledRequest | None:
        """The waiting request to start next, if one may be started.

        While the most important one waits for memory no other comes before it, or it might wait forever.
        """
        first = self._waiting.most_important()
        if first is None or len(self._running) >= self.limits.max_num_seqs:
            return None
        if not self._is_turn_of_shortest or not has_blocks_for(first, self._running, self._kv):
            return first
        return self._waiting.shortest()

    def _is_worth_a_row(self, request: ScheduledRequest, num_tokens: int, builder: MicrobatchBuilder) -> bool:
        """Crumbs of another prompt are not, unless they are its last."""
        if num_tokens < 1:
            return False
        is_first_prompt = len(builder.requests) == builder.num_tokens
        return is_first_prompt or num_tokens == request.gap or num_tokens >= self._kv.block_size

    def _admit(self, builder: MicrobatchBuilder, request: ScheduledRequest, room: PrefillRoom, now_s: float) -> bool:
        """Start a waiting request. False, with nothing changed, if there is no room in microbatch or KV cache."""
        if room.tokens_after(0) < 1:
            return False
        if not request.has_undescribed_tokens:
            request.num_computed_tokens = self._kv.reuse_prefix(request.table, request.token_ids)
        num_tokens = self._chunk(request, room)
        if (
            not self._is_worth_a_row(request, num_tokens, builder)
            or not has_blocks_for(request, self._running, self._kv)
            or self._kv.extend(request.table, request.num_computed_tokens + num_tokens) is None
        ):
            self._kv.close(request.table)
            request.num_computed_tokens = 0
            return False
        self._waiting.remove(request)
        self._start(request, now_s)
        builder.introduce(request)
        room.take(request.num_computed_tokens, num_tokens)
        self._add_row(builder, request, num_tokens)
        return True

    def _start(self, request: ScheduledRequest, now_s: float) -> None:
        request.request_number = self._next_request_number
        self._next_request_number += 1
        self._by_number[request.request_number] = request
        self._running.add(request)
        request.num_reused_tokens = request.num_computed_tokens
        if request.first_scheduled_s is None:
            request.first_scheduled_s = now_s
            request.num_cached_tokens = request.num_computed_tokens
            if self._kv.enable_prefix_caching and not request.has_undescribed_tokens:
                self._num_prefix_queries_tokens += request.num_prompt_tokens
                self._num_prefix_hits_tokens += request.num_cached_tokens

    def _chunk(self, request: ScheduledRequest, room: PrefillRoom) -> int:
        most = min(room.num_tokens, self.limits.max_chunk_tokens or room.num_tokens)
        wanted = room.tokens_after(request.num_computed_tokens)
        return chunk_length(request.gap, request.num_computed_tokens, wanted, self._kv.block_size, most)

    def _place(self, builder: MicrobatchBuilder, request: ScheduledRequest, num_tokens: int) -> bool:
        """Add a row of a running request, preempting less important ones for its blocks. False if that did not help."""
        while True:
            block_ids = self._kv.extend(request.table, request.num_computed_tokens + num_tokens)
            if block_ids is not None:
                break
            victim = self._running.least_important({request, *builder.requests})
            if victim is None or victim.rank < request.rank:
                return False
            self._preempt(victim)
        builder.extend_table(request, block_ids)
        self._add_row(builder, request, num_tokens)
        return True

    def _add_row(self, builder: MicrobatchBuilder, request: ScheduledRequest, num_tokens: int) -> None:
        builder.add_row(request, num_tokens)
        self._count_row(request, num_tokens)
        self._publish_blocks(request)

    def _count_row(self, request: ScheduledRequest, num_tokens: int) -> None:
        request.num_computed_tokens += num_tokens
        request.num_in_flight += 1
        request.carriers.add(self._next_microbatch)
        self._running.sort_in(request)

    def _publish_blocks(self, request: ScheduledRequest) -> None:
        """What is launched can be shared, as far as it is known which tokens it is of."""
        num_tokens = min(request.num_computed_tokens, len(request.token_ids))
        self._kv.launched(request.table, request.token_ids, num_tokens)

    # ---- memory runs out ----

    def _preempt(self, request: ScheduledRequest) -> None:
        self._queue_again(request)
        request.num_preemptions += 1
        self._num_preemptions += 1

    def _queue_again(self, request: ScheduledRequest) -> None:
        """Free a request's blocks and queue it again, to be recomputed from all its known tokens.

        Its blocks may be handed out at once, even if a microbatch in flight still uses them: every stage runs that one
        before any later microbatch that writes them. What it answers is dropped, for its number is forgotten.
        """
        self._forget(request)
        self._kv.close(request.table)
        request.num_computed_tokens = 0
        request.num_in_flight = 0
        del self._by_number[request.request_number]
        request.request_number = 0
        self._waiting.add(request)

    def start_over(self, kv: KVCacheManager) -> tuple[int, int]:
        """The stages have a new KV cache: an epoch begins, in which all that runs is computed again. Nothing is lost.

        What is still in flight, if anything is, is void. Returns: the epoch, and the number of its first microbatch.
        """
        for request in list(self._running):
            self._queue_again(request)
        # The stages know no request any more, and those that ended have no blocks left to give back.
        self._removed, self._by_number = [], {}
        self._launched = LaunchedMicrobatches()
        self._kv = kv
        self._epoch += 1
        return self._epoch, self._next_microbatch

    def end_misfits(self, now_s: float) -> list[RequestUpdate]:
        """After a loss and `start_over`: end what needs more KV cache than there is now, or may be why it came."""
        found = [(request, why_not_again(request.asked, self._kv, request.lost())) for request in self._by_id.values()]
        return [self._end_early(request, "error", now_s, why) for request, why in found if why is not None]

    def _forget(self, request: ScheduledRequest) -> None:
        """Take a running request out of the queues and let the stages drop it with the next microbatch."""
        self._running.remove(request)
        self._guides.recall(request)
        self._removed.append(request.request_number)

    def _retire(self, request: ScheduledRequest) -> None:
        """The request is over: nothing more is scheduled; its blocks are freed once nothing in flight uses them."""
        del self._by_id[request.asked.request_id]
        self._guides.end(request)
        if request in self._running:
            self._forget(request)
            if request.num_in_flight == 0:
                self._release(request)

    def _release(self, request: ScheduledRequest) -> None:
        self._kv.close(request.table)
        del self._by_number[request.request_number]

    # ---- results come back ----

    def completed(self, microbatch: Microbatch, result: MicrobatchResult, now_s: float) -> list[News]:
        """Apply a result. Returns: what it says of each request, in row order; to be told when the stages have work."""
        if len(result.token_ids) != len(microbatch.sampling_rows):
            raise InternalError(
                f"{microbatch}: {len(result.token_ids)} tokens for {len(microbatch.sampling_rows)} sampling rows"
            )
        self._learn(microbatch, result, now_s)
        news: dict[ScheduledRequest, News] = {}
        for described in result.prompt_logprobs:
            request = self._live(described.request_number)
            if request is not None and (new := request.take_description(described)):
                news.setdefault(request, News(request)).prompt_logprobs.extend(new)
        for index, row in enumerate(microbatch.sampling_rows):
            request = self._live(microbatch.request_numbers[row])
            if request is not None and result.token_ids[index] == NO_TOKEN:
                if self._guides.missed(request):
                    self._schedule_again(request)
            elif request is not None:
                logprobs = result.logprobs[index] if result.logprobs else None
                self._take_token(result.token_ids[index], logprobs, news.setdefault(request, News(request)), now_s)
        self._land(microbatch)
        for request, its_news in news.items():
            if its_news.finish_reason is not None:
                self._retire(request)
        return list(news.values())

    def _learn(self, microbatch: Microbatch, result: MicrobatchResult, now_s: float) -> None:
        self._pace.observe(microbatch, result, self._launched.answered(microbatch, now_s))
        if self._pace.is_due:
            self._pace.choose_window([request.num_computed_tokens for request in self._running.decoding()])

    def _live(self, request_number: int) -> ScheduledRequest | None:
        """The request of that number, if it was neither preempted nor ended since."""
        request = self._by_number.get(request_number)
        return request if request is not None and request in self._running else None

    def _take_token(self, token_id: int, logprobs: TokenLogprobs | None, news: News, now_s: float) -> None:
        request = news.request
        request.token_ids.append(token_id)
        if request.first_token_s is None:
            request.first_token_s = now_s
        news.token_ids.append(token_id)
        if logprobs is not None:
            news.logprobs.append(logprobs)
        cause = request.stop_cause(token_id)
        if cause is None or cause[0] == "length":
            step = self._guides.take(request, token_id)
            if step is Step.FAILED:
                # Whoever wanted no more tokens than these has them all.
                if cause is None:
                    cause, news.failure = ("error", None), self._guides.failure(request)
            elif step is not Step.GOES_ON:
                cause, news.is_last_token_text = ("stop", None), step is Step.COMPLETE
        if cause is not None:
            news.finish_reason, news.stop_reason = cause
        else:
            self._running.sort_in(request)
            if request.gap < 1:
                self._publish_blocks(request)

    def take_masks(self, now_s: float) -> tuple[list[TokenMasks], list[RequestUpdate]]:
        """What came of the masks since this was asked before; requests that waited for theirs may be scheduled again.

        Returns: masks for the last stage, each after its microbatch, and the ends of requests for which none will come.
        """
        for request in self._guides.collect():
            self._schedule_again(request)
        ends = [self._end_early(request, "error", now_s, why) for request, why in self._guides.take_failed()]
        return self._guides.take_outgoing(), ends

    def _schedule_again(self, request: ScheduledRequest) -> None:
        """Its latest token went through the stages, but nothing was sampled for want of a mask."""
        request.num_computed_tokens -= 1
        self._running.sort_in(request)

    def _land(self, microbatch: Microbatch) -> None:
        for request_number in microbatch.request_numbers:
            request = self._by_number.get(request_number)
            if request is None:
                continue
            request.num_in_flight -= 1
            if request.num_in_flight == 0 and request not in self._running:
                self._release(request)
