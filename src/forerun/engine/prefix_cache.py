"""KV blocks that outlive their requests, so that a text which begins alike need not be computed again.

Only complete blocks of committed tokens are kept. What the drafters hold of the same rows is kept by them, under the
same keys: features of the target cannot be had without computing the rows. EAGLE keeps fused features and keys, DFlash
and DSpark the keys and values they made of them, `small` the rows of its own model. That is what they draft from
anyway, in storage that is counted with every block, so a hit costs no memory and no pass; the raw features would take
m * H numbers a row more.

A block made while a drafter had lost the text's state has none of it. A request that wants this drafter then takes the
blocks before it and computes the rest: that is at worst the prefill of a cold run, once, after which the state is
there; to leave the drafter out would cost every round of the answer. Requests that do not want it take the block. A
drafter that makes up for missing rows by itself (`small`) shortens no hit.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b

from forerun.engine.drafting import Drafters
from forerun.engine.propose import LoadedDrafter, logger
from forerun.engine.request import Request
from forerun.target.base import BLOCK_SIZE
from forerun.target.blocks import BlockKey, BlockPool, KeptBlocks

KEY_BYTES = 32
"""Of a hash that nobody can find two texts for: a request must never read the rows of another text."""


class PrefixCache:
    """Finds blocks by the tokens up to their end, the tokens behind that a drafter's rows depend on, and the salt.

    The pool decides how long a block that nobody uses stays; it goes when another request needs the memory.

    Args:
        pool: of the target's blocks; evictions are told here.
        drafters: they keep what is theirs.
        enabled: False: nothing is kept and nothing found.
    """

    def __init__(self, pool: BlockPool, drafters: Drafters, enabled: bool = True):
        self.enabled = enabled
        self.queries = 0
        """Tokens of admitted requests, looked up; those of a preempted one are not counted again."""
        self.hits = 0
        """Of these, tokens whose rows were found."""
        self._lookahead = max((entry.drafter.lookahead for entry in drafters.loaded), default=0)
        self._drafters = drafters
        self._kept = KeptBlocks(pool, self._evicted)

    @property
    def blocks(self) -> Iterable[int]:
        """Kept blocks, in use or not."""
        return self._kept.blocks.values()

    # --------------------------------------------------------------------------------------- when a request is admitted

    def found(self, request: Request) -> int:
        """How many blocks a request without rows could begin with. At least one row is left for it to compute."""
        most = self._whole(request, request.prefill - 1) if self.enabled else 0
        keys = self._keys_of(request, most)
        count = self._kept.leading(keys)
        for entry in self._drafters.loaded:
            if count and not entry.rebuilds and _wants(entry, request):
                count = _kept(entry, keys[:count])
        return count

    def attach(self, request: Request) -> None:
        """Gives a request without rows the blocks that are found; nobody writes to them."""
        request.published = self.found(request)
        self._kept.hold(request.blocks, request.block_keys[: request.published])
        request.rows = request.published * BLOCK_SIZE

    def begin(self, request: Request) -> None:
        """A request is admitted with what was attached: its drafters go on from what they keep of it."""
        if self.enabled and request.stats.preemptions == 0:
            self.queries += len(request.tokens)
            self.hits += request.rows
        keys = request.block_keys[: request.published]
        if not keys:
            return
        for entry in self._drafters.loaded:
            own = keys[: _kept(entry, keys)]
            adopted = not own or _done(entry, partial(entry.drafter.adopt, request.id, own))
            if not adopted or (len(own) < len(keys) and not entry.rebuilds):
                self._drafters.release(request.id, [entry.name])  # it does not follow a text whose beginning it lacks

    # ------------------------------------------------------------------------------------------- when rows become final

    def publish(self, request: Request) -> None:
        """Lets others find the complete blocks of a request. Between two steps all its rows are of committed tokens."""
        if not self.enabled:
            return
        count = self._whole(request, request.rows)
        keys = self._keys_of(request, count)
        for index in range(request.published, count):
            self._kept.keep(keys[index], request.blocks[index])
        request.published = max(count, request.published)
        lost = self._drafters.lost(request.id)
        following = [entry for entry in self._drafters.loaded if keys and entry.name not in lost]
        for entry in following:
            if not _done(entry, partial(entry.drafter.keep, request.id, request.tokens, keys)):
                self._drafters.release(request.id, [entry.name])

    def intact(self, published: int, rows: int, equal: int) -> int:
        """How many rows a text may go on from that has so many rows and published blocks, and is equal to what comes
        next in so many tokens. In published blocks nothing is written again."""
        whole = max(0, min(rows, equal - self._lookahead)) // BLOCK_SIZE
        return rows if whole >= published else whole * BLOCK_SIZE

    def clear(self) -> None:
        """Forgets all blocks: for whoever has written to the target's storage behind an idle engine."""
        self._kept.clear()

    # ----------------------------------------------------------------------------------------------------------- inside

    def _whole(self, request: Request, rows: int) -> int:
        """Complete blocks in so many rows, as far as the tokens are known that their keys are made of."""
        return max(0, min(rows, len(request.tokens) - self._lookahead)) // BLOCK_SIZE

    def _keys_of(self, request: Request, count: int) -> list[BlockKey]:
        """Keys of the first blocks, each made once: tokens that are committed stay what they are."""
        keys = request.block_keys
        while len(keys) < count:
            start = len(keys) * BLOCK_SIZE
            parent = keys[-1] if keys else _root(request.cache_salt)
            keys.append(_chained(parent, request.tokens[start : start + BLOCK_SIZE + self._lookahead]))
        return keys[:count]

    def _evicted(self, key: BlockKey) -> None:
        for entry in self._drafters.loaded:
            _done(entry, partial(entry.drafter.drop, key))

    def audit(self) -> None:
        """Asserts that every key has its block, and every kept block one key."""
        self._kept.audit()


def _root(salt: str | None) -> BlockKey:
    """What the first block's key goes on from: texts under different salts share nothing."""
    given = b"" if salt is None else b"salt " + salt.encode(errors="surrogatepass")
    return blake2b(given, digest_size=KEY_BYTES, person=b"text").digest()


def _chained(parent: BlockKey, tokens: Sequence[int]) -> BlockKey:
    # `person` keeps the two apart: no salt, whatever is in it, has the key of a block.
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=KEY_BYTES, person=b"block").digest()


def _wants(entry: LoadedDrafter, request: Request) -> bool:
    return entry.serves(request) and 0 not in (entry.drafter.max_draft, request.speculative.max_draft)


def _kept(entry: LoadedDrafter, keys: Sequence[BlockKey]) -> int:
    try:
        return min(len(keys), entry.drafter.kept(keys))
    except Exception:  # a drafter is a plug-in
        logger.warning("drafter %r cannot tell what it keeps", entry.name, exc_info=True)
        return 0


def _done(entry: LoadedDrafter, call: Callable[[], None]) -> bool:
    """Whether a drafter did what it was told. One that could not costs speed only."""
    try:
        call()
    except Exception:  # a drafter is a plug-in
        logger.warning("drafter %r failed to share what it holds", entry.name, exc_info=True)
        return False
    return True


__all__ = ["PrefixCache"]
