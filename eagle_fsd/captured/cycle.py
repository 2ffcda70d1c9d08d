"""The host's part of a captured cycle: which cycles can be captured, what programs read, and the order of launches.

After the walk of a cycle the draft of the next one is launched, before the host waits for the walk's table. So the
device drafts while the host extends the answers and looks for copies. A request that has ended wastes one draft.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..acceptance import RULES, Rule
from ..acceptance.walk import Step, steps_of
from ..decoding.batch import ALLOCATION_ERRORS, Batch
from ..decoding.cycle import noise_weights_of, shared_processors
from ..decoding.processing import CAPTURABLE
from ..decoding.request import EXACT, Request
from ..drafting.config import TreeConfig
from ..drafting.copies import ORIGINS, Copies
from ..drafting.drafter import Drafter, weights_key
from ..drafting.tree import columns_of
from ..models.cache import TreeCache
from ..models.target import TargetModel
from .capture import Pool
from .programs import BUCKET, Buffers, Download, Settings, draft, join_copies, verify, walk_and_keep

log = logging.getLogger(__name__)
# A captured cycle takes about half as long as another, however many rows it has (14.1 and 27.3 ms on an H100). Beside
# rows that cannot be captured, MANY times as many others run WAIT captured cycles for one of those: 4 of the many and 1
# of the few in 84 ms, in which 3 of all would run. With fewer, or without waiting, there would be fewer tokens in all.
MANY, WAIT = 3, 4
SMALLEST = 64  # copies of a row in a program; others take four times as many, or 16, ...
LARGE = 4096  # capacities up to it are powers of 2, others multiples of it
Walk = tuple[list[Step], Sequence[str | None]]  # of a row: steps, and origins of the nodes, see `Request.append`


class CapturedCaches:
    """The storage of a pair of caches, with the buffers and programs that have its addresses.

    Args:
        batch: while its caches exist, the storage is theirs.
    """

    def __init__(self, batch: Batch) -> None:
        self.target, self.drafter = target, drafter = batch.target, batch.drafter
        self.owners = list(map(weakref.ref, batch.caches))
        self.storages = storages_of(batch.models, batch.caches)
        for cache, storage in zip(batch.caches, self.storages, strict=True):
            if cache.batch == 1:  # a masked slot is read too: it must be finite
                storage[..., cache.length :, :].zero_()
        self.pool = Pool(target.output_device)
        # Those that programs in the pool refer to, so that the pool bounds their number, whatever trees requests have.
        self.buffers: WeakValueDictionary[tuple, Buffers] = WeakValueDictionary()
        self.weights = weights_key(target, drafter)

    def belongs_to(self, batch: Batch) -> bool:
        return len(self.storages) == len(batch.caches) and all(
            any(storage is mine for storage in cache.allocated)
            for mine, cache in zip(self.storages, batch.caches, strict=True))

    @property
    def free(self) -> bool:
        """Whether its caches exist no more."""
        return all(owner() is None for owner in self.owners)

    def fits(self, rooms: Sequence[int], rows: int) -> bool:
        """Whether its caches are large enough."""
        return len(rooms) == len(self.storages) and all(
            storage.shape[-2] >= needed and storage.shape[2] >= rows
            for storage, needed in zip(self.storages, rooms, strict=True))

    def buffers_of(self, rows: int, tree: TreeConfig | None) -> Buffers:
        buffers = self.buffers.get((rows, tree))
        if buffers is None:
            storages = [storage[:, :, :rows] for storage in self.storages]
            buffers = self.buffers[rows, tree] = Buffers(self.target, self.drafter, storages, tree)
        return buffers

    def check_weights(self) -> None:
        """Drop the programs if a weight was replaced or changed."""
        if self.weights != (weights := weights_key(self.target, self.drafter)):
            self.weights = weights
            self.clear()

    def clear(self) -> None:
        """Drop the programs and their buffers."""
        self.pool.clear()
        self.buffers.clear()


class CapturedCycles:
    """Runs those cycles of a pair that captured programs compute with the same results: see `settings_of`.

    Threads may share it, as caches, and with them buffers and programs, belong to one decoder at a time.
    """

    def __init__(self, target: TargetModel, drafter: Drafter | None) -> None:
        self.target, self.drafter = target, drafter
        self._known: list[CapturedCaches] = []  # the most recently used last
        self._lock = threading.Lock()

    @property
    def failed(self) -> Exception | None:
        """Why programs run without graphs on CUDA; None: all were captured."""
        return next((held.pool.failed for held in self._known if held.pool.failed is not None), None)

    @staticmethod
    def support(target: TargetModel, drafter: Drafter | None) -> bool:
        """Whether forwards of both models can be captured, and are on one device."""
        models = [target] if drafter is None else [target, drafter]
        devices = set().union(*(model.devices for model in models))
        return len(devices) == 1 and all(model.capturable for model in models)

    # Caches -------------------------------------------------------------------------------------------------------

    def caches(self, rooms: Sequence[int], rows: int) -> list[TreeCache]:
        """Empty caches, if possible those of a batch that is no longer decoded, with their programs.

        Args:
            rooms: positions of each row in the target's and in the drafter's cache.
        """
        with self._lock:
            spare = (held for held in reversed(self._known) if held.free and held.fits(rooms, rows))
            held = next(spare, None) if self.support(self.target, self.drafter) else None  # a hook may be new
            models = (self.target, self.drafter)[: len(rooms)]
            if held is None:
                larger = capacity_of(rooms[0]) - rooms[0]
                return [model.new_cache(room + larger, rows) for model, room in zip(models, rooms, strict=True)]
            caches = [model.new_cache(storage.shape[-2], storage.shape[2])
                      for model, storage in zip(models, held.storages, strict=True)]
            for cache, storage in zip(caches, held.storages, strict=True):
                cache.spare = storage
            held.owners = list(map(weakref.ref, caches))
            storages_of(models, caches)  # takes the spare ones
            for cache in caches:
                cache.keep_rows(range(rows))
            return caches

    def known(self, batch: Batch) -> CapturedCaches:
        """The caches of a batch, with their buffers and programs."""
        with self._lock:
            held = next((known for known in self._known if known.belongs_to(batch)), None)
            if held is None:
                held = CapturedCaches(batch)
                apart = [known for known in self._known  # one of two caches may have been replaced
                         if not any(one is other for one in known.storages for other in held.storages)]
                free = [known for known in apart if known.free]  # their memory may be needed
                self._known = [*(known for known in apart if known not in free[:-1]), held]
            return held

    # A cycle ------------------------------------------------------------------------------------------------------

    def groups(self, batch: Batch) -> list[tuple[slice, Settings | None]]:
        """The rows that run in a cycle together now, and its settings: all; or those that can be captured, which move
        to the front, and every WAIT times the few others, in a cycle of their own."""
        count = len(batch.requests)
        settings = settings_of(batch, range(count))
        everyone = [(slice(0, count), settings)]
        if settings is not None:
            return everyone
        front = [row for row in range(count) if settings_of(batch, [row]) is not None]
        captured = len(front)
        if captured == count or captured < MANY * (count - captured) or (settings := settings_of(batch, front)) is None:
            return everyone
        for row in sorted(set(range(captured)).difference(front)):
            try:
                batch.swap_rows(row, front.pop())
            except ALLOCATION_ERRORS:
                return everyone
        batch.waited = (batch.waited + 1) % WAIT
        return [(slice(0, captured), settings), *([] if batch.waited else [(slice(captured, count), None)])]

    @torch.inference_mode()
    def step(
        self, batch: Batch, settings: Settings | None, rules: Sequence[Rule], copies: Sequence[Copies | None]
    ) -> list[Walk] | None:
        """Run a cycle, up to the new lengths of the caches. None: it cannot be captured, and nothing of the batch was
        changed."""
        if settings is None:
            return None
        if settings.tree is None and any(copies):
            return log_uncaptured("copies without a drafter")
        device = self.target.output_device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            held = self.known(batch)
            try:
                return self._step(held, settings, batch, rules, copies)
            except BaseException:  # the buffers may be ahead of the host
                held.clear()
                raise
            finally:
                held.pool.close_bar()

    def _step(
        self, held: CapturedCaches, settings: Settings, batch: Batch, rules: Sequence[Rule],
        copies: Sequence[Copies | None],
    ) -> list[Walk]:
        requests, lengths = batch.requests, batch.cache.lengths
        read = [] if batch.drafter is None else batch.draft_cache.lengths
        key = len(requests), settings.tree
        buffers = held.buffers_of(*key)
        if not buffers.holds(requests, lengths, read):
            held.check_weights()
            buffers = held.buffers_of(*key)
            self._load(buffers, batch, lengths, read)
        weights = noise_weights_of(requests, rules)
        if weights != buffers.known_noise_weights:
            buffers.upload(buffers.noise_weights, weights)
            buffers.known_noise_weights, buffers.drafted = weights, None
        if settings.tree is None:
            return self._plain(held, buffers, settings, batch)
        if buffers.drafted != settings:
            self._launch_draft(held, buffers, settings, requests, read)
        bucket = buffers.bucket(max(lengths) + settings.tree.total_tokens)
        nodes, path, joined = settings.tree.nodes, buffers.path, any(copies)
        if joined:
            nodes, path = buffers.most, self._launch_join(held, buffers, copies)
        if settings.budgeted:
            buffers.upload(buffers.left, [request.remaining_budget for request in requests])
        if settings.marked:
            buffers.upload(buffers.fuzzy, [rule != EXACT for rule in rules])
            buffers.upload(buffers.inside_marks, [request.inside_marks for request in requests])
        download = self._launch_verify(held, buffers, settings, requests, bucket, nodes, path, joined)
        buffers.fed, buffers.drafted = path, None
        self._launch_draft(held, buffers, settings, requests, [length + buffers.lead for length in lengths])
        table, *joined_origins = download.wait()  # the only wait
        origins = [[None, *[ORIGINS[0]] * (nodes - 1)]] * len(requests)
        if joined:
            origins = [[None if number < 0 else ORIGINS[number] for number in row] for row in joined_origins[0]]
        return self._finish(buffers, batch, lengths, read, table, origins)

    def _launch_verify(
        self, held: CapturedCaches, buffers: Buffers, settings: Settings, requests: Sequence[Request], bucket: int,
        nodes: int, path: int, joined: bool = False,
    ) -> Download:
        """Launch the target's forward and the walk."""
        processors = requests[0].processors
        held.pool.run(("verify", buffers.key, bucket, nodes), partial(verify, buffers, self.target, bucket, nodes))
        held.pool.run(("walk", buffers.key, settings, nodes, path, joined),
                      partial(walk_and_keep, buffers, self.target, settings, processors, nodes, path, joined))
        return buffers.download(buffers.table(path), *([buffers.origins] if joined else []))

    def _plain(
        self, held: CapturedCaches, buffers: Buffers, settings: Settings, batch: Batch
    ) -> list[Walk]:
        """A cycle without drafting. The next one needs nothing from the host and is launched first."""
        requests, lengths, tables = batch.requests, batch.cache.lengths, [buffers.launched]
        for ahead in range(2):
            bucket = buffers.bucket(max(lengths) + ahead + 1)
            if tables[ahead] is None and bucket is not None:
                tables[ahead] = self._launch_verify(held, buffers, settings, requests, bucket, 1, 1)
            tables.append(None)
        buffers.launched = tables[1]
        return self._finish(buffers, batch, lengths, [], *tables[0].wait(), [[None]] * len(requests))

    def _launch_join(self, held: CapturedCaches, buffers: Buffers, copies: Sequence[Copies | None]) -> int:
        """Add copies to the trees; returns P, the steps of the longest path."""
        size = SMALLEST
        while size < max(buffers.most - buffers.config.wide, *(len(row.tokens) if row else 0 for row in copies)):
            size *= 4
        *columns, deepest = columns_of(copies, size)
        for buffer, values in zip(buffers.copies(size), columns, strict=True):
            buffers.upload(buffer, values)
        path = buffers.path_for(min(max(deepest, buffers.config.depth) + 1, buffers.most))
        held.pool.run(("join", buffers.key, size, path), partial(join_copies, buffers, size, path))
        return path

    def _load(self, buffers: Buffers, batch: Batch, lengths: list[int], read: list[int]) -> None:
        """Copy the rows into the buffers."""
        requests = batch.requests
        if buffers.config is None:
            buffers.upload(buffers.tree.tokens, [request.tokens[-1:] for request in requests])
        else:
            self._load_unread(buffers, batch, read)
        buffers.upload(buffers.lengths, lengths)
        buffers.upload(buffers.integers, [
            (request.seed, *(request.marks or (-1, -1))) for request in requests])
        buffers.upload(buffers.numbers, [
            (request.options.temperature, request.rule.threshold) for request in requests])
        buffers.owners, buffers.known = [weakref.ref(request) for request in requests], (lengths, read)
        buffers.drafted = buffers.launched = None

    def _load_unread(self, buffers: Buffers, batch: Batch, read: list[int]) -> None:
        """Copy what the drafter has not processed."""
        unread = [batch.unread_tokens(number) for number in range(len(batch.requests))]
        buffers.fed = buffers.path_for(max(map(len, unread)))
        if buffers.reads_features:
            buffers.fed_features.zero_()  # a NaN of an earlier request would reach the cache, and no mask would hide it
            for row, tokens in enumerate(unread):
                buffers.fed_features[row, : len(tokens)].copy_(batch.feature(row))
        most = buffers.fed_tokens.shape[1]
        buffers.upload(buffers.draft_lengths, read)
        buffers.upload(buffers.counts, list(map(len, unread)))
        buffers.upload(buffers.fed_tokens, [[*tokens, *[0] * (most - len(tokens))] for tokens in unread])

    def _launch_draft(
        self, held: CapturedCaches, buffers: Buffers, settings: Settings, requests: Sequence[Request],
        read: Sequence[int],
    ) -> None:
        """Launch a draft after rows with these numbers of positions in the drafter's cache."""
        bucket, processors = buffers.draft_bucket(read), requests[0].processors
        held.pool.run(
            ("draft", buffers.key, settings, bucket, buffers.fed),
            partial(draft, buffers, self.target, self.drafter, settings, processors, bucket, buffers.fed))
        buffers.drafted = settings

    def _finish(
        self, buffers: Buffers, batch: Batch, lengths: list[int], read: list[int],
        table: Sequence[Sequence[Sequence[float]]], origins: Sequence[Sequence[str | None]],
    ) -> list[Walk]:
        """Read the table [B, P, 9], and set the lengths of the caches."""
        walks = steps_of([[step[:5] for step in row] for row in table], [[step[5:] for step in row] for row in table])
        ends = [length + len(steps) for length, steps in zip(lengths, walks, strict=True)]
        batch.cache.lengths = ends
        drafted = [length + buffers.lead for length in lengths] if read else []
        if batch.drafter is not None:
            batch.draft_cache.lengths = drafted
        if buffers.reads_features:  # the next cycle overwrites those in the buffer
            features = buffers.fed_features[:, : max(map(len, walks))].clone()
            batch.features = [[features[row, : len(steps)]] for row, steps in enumerate(walks)]
        buffers.known = ends, drafted
        return list(zip(walks, origins, strict=True))


@functools.cache
def log_uncaptured(what: str) -> None:
    log.warning("cycles are not captured as CUDA graphs, and take up to twice as long, for %s", what)


def settings_of(batch: Batch, rows: Sequence[int]) -> Settings | None:
    """The settings of the programs of a cycle of these rows. None: it cannot be captured, or its rows need different
    programs, and the log says why, once."""
    requests, plan = [batch.requests[row] for row in rows], batch.drafting.largest
    rules, drafts = [request.current_rule for request in requests], plan.drafts
    first, copying = requests[0], drafts and any(request.copying for request in requests)
    # The models and the size of the cycle.
    if not CapturedCycles.support(batch.target, batch.drafter):
        return log_uncaptured("models whose forwards cannot be captured")
    if plan.prices is not None:
        return log_uncaptured("trees whose size is chosen in each cycle")
    if drafts != (batch.drafter is not None):
        return log_uncaptured("decoding without drafts beside a drafter")
    # Each request.
    for request, rule in zip(requests, rules, strict=True):
        if request.options.top_logprobs:
            return log_uncaptured("top_logprobs")
        if drafts and not request.options.speculative:
            return log_uncaptured("speculative=False beside requests with drafts")
        for processor in request.processors:
            if type(processor) not in CAPTURABLE:
                return log_uncaptured(type(processor).__name__)
        if type(rule) not in RULES.values():
            return log_uncaptured(f"the rule {type(rule).__name__}")
    if drafts and not all(batch.has_positions(row, plan.tree.depth) for row in rows):
        return log_uncaptured("texts near the last position of the drafter")
    if drafts and any(len(batch.unread_tokens(row)) > plan.tree.total_tokens for row in rows):
        return log_uncaptured("a drafter that is far behind the text")
    # All together.
    greedy = first.options.greedy
    if shared_processors(requests) is None or any(request.options.greedy != greedy for request in requests):
        return log_uncaptured("requests of different temperature, top_k, top_p or min_p in one batch")
    own = {EXACT if rule == EXACT else with_some_threshold(rule) for rule in rules} if drafts else {EXACT}
    rule = next((rule for rule in own if rule != EXACT), EXACT)
    if own - {rule, EXACT}:
        return log_uncaptured("requests of different fuzzy rules in one batch")
    weights = noise_weights_of(requests, rules) if drafts else [0.0]
    if any(weights) and not all(weights):
        return log_uncaptured("requests with and without a share of the target's noise in one batch")
    fuzzy = [request for request in requests if rule != EXACT]
    return Settings(
        plan.tree if drafts else None, copying, rule, greedy, first.processors_key, any(weights),
        any(request.options.budget is not None for request in fuzzy),
        len(own) > 1 or any(request.marks is not None for request in fuzzy))


def with_some_threshold(rule: Rule) -> Rule:
    """The rule of a program, which reads the thresholds of the rows. See `Rule.is_lossless`."""
    return replace(rule, threshold=min(0.5, rule.threshold_limit[0] / 2))


def storages_of(
    models: Sequence[TargetModel | Drafter], caches: Sequence[TreeCache]
) -> list[Tensor]:  # [layers, 2, B, H, C, D]
    """The storage of each model's cache."""
    layers = [(model.first_layer, model.dtype, next(iter(model.devices))) for model in models]
    return [cache.storage(layer.key_heads, layer.size, torch.empty(0, dtype=dtype, device=device))
            for cache, (layer, dtype, device) in zip(caches, layers, strict=True)]


def capacity_of(room: int) -> int:
    """The capacity of new caches, so that they serve later requests too."""
    return max(BUCKET, 1 << (room - 1).bit_length()) if room <= LARGE else -(-room // LARGE) * LARGE
