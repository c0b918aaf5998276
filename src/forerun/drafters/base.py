"""What a drafter is: it sees committed tokens (and target features if it asks for them) and proposes the next ones."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from forerun.sampling import DRAFT, NOTHING, Noise, Row, Sampling, VerifyMode, draw, draw_coupled, try_distribution
from forerun.verify import Draft, Proposal

if TYPE_CHECKING:
    from torch import Tensor

    from forerun.drafters.learned import Learner
    from forerun.target.base import Target
    from forerun.target.blocks import BlockKey
    from forerun.target.load import Device, Dtype

logger = logging.getLogger("forerun")

KeepDrafting = Callable[["DraftView", int, float], bool]
"""`keep_drafting(view, k, c_k)`: whether slot k (from 1) is worth drafting; asked before x_k is drawn."""


@dataclass(frozen=True, slots=True)
class DraftView:
    """What a drafter may see of one request in one round."""

    request_id: int
    tokens: Sequence[int]
    """Prompt and committed output; the last one is the anchor, at position len(tokens) - 1. Read only."""
    prompt_length: int
    k: int
    """Draft at most this many tokens; at least 1."""
    sampling: Sampling
    end_ids: frozenset[int]
    noise: Noise
    verify_mode: VerifyMode
    draft_greedily: bool = False
    """Draft the most probable token as a point mass at any temperature (`draft_sample_method: greedy`)."""
    prediction: Sequence[int] = ()
    """Tokens the user expects in the answer (OpenAI's `prediction`)."""

    @property
    def anchor(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Accepted:
    """Rows of one request that became final in a step."""

    request_id: int
    start: int
    """Position of the first row."""
    end: int
    """Position after the last row. Rows from here on, if a drafter holds any, belong to rejected tokens."""
    features: Tensor | None
    """[end - start, m * H] target features of these rows, if the drafter has taps."""


@dataclass(frozen=True, slots=True)
class LoadContext:
    """What a drafter is loaded for."""

    target: Target
    dtype: Dtype = "auto"
    device: Device = "auto"
    trust_remote_code: bool = False


class Drafter(ABC):
    """Proposes tokens. State is kept per request id, made on first sight and dropped by `release`.

    The engine calls, in this order: `propose` with the views of the requests that draft in this step, then, after the
    verdict, `commit` with the rows that became final for *every* request (also those that did not draft, and every
    prefill chunk). A drafter may fail: an exception or a non-finite law costs speed, never the request.
    """

    name: ClassVar[str]
    config_keys: ClassVar[frozenset[str]] = frozenset()
    """Keys of `--speculative-config` that `load` reads, beyond those every drafter shares."""
    uses_prediction: bool = False
    """Whether it drafts from `DraftView.prediction`; where no drafter does, giving one is an error."""
    default_draft: int = 4
    """K where none is configured."""
    taps: tuple[int, ...] = ()
    """Target hidden states that `commit` needs, h convention, ascending."""
    max_draft: int | None = None
    """Longest draft it can make (the trained block); None: no limit."""
    window: int | None = None
    """Positions it has; None: no limit of its own."""
    deterministic: bool = False
    """Whether every draft is a point mass (no law is reported, at any temperature): then its length may be chosen in
    any way without changing the output."""
    blind: bool = False
    """Whether its confidences depend on no token drawn in the same round. The same holds then."""
    lookahead: int = 0
    """How many of the tokens behind a row have a part in what it keeps of that row: 0 or 1."""

    @classmethod
    def load(cls, options: Mapping[str, Any], context: LoadContext) -> Self:  # noqa: ARG003 - most need no context
        """Builds the drafter from its own keys of the speculative config."""
        return cls(**options)

    @classmethod
    def learner(cls) -> type[Learner] | None:
        """What `forerun train` trains to make one; None: it is not trained."""
        return None

    @property
    def block_bytes(self) -> int:
        """Bytes of its own KV storage per block of the target's; 0 without one."""
        return 0

    def allocate(self, num_blocks: int) -> None:  # noqa: B027 - most drafters have no storage
        """Makes KV storage for as many blocks as the target has."""

    @abstractmethod
    def propose(self, views: Sequence[DraftView], keep_drafting: KeepDrafting) -> Proposal:
        """One draft per view, of at most `view.k` tokens; an empty draft is plain decoding.

        A draft may come with a confidence for each token: c_k in [0, 1], an estimate of P(x_k accepted | x_<k
        accepted). It may know the history and x_<k, and nothing of x_k: what is verified is decided by it, and a
        decision about a token that looks at the token changes the law of the output (methods, 8.3). Point masses are
        functions of the history, so theirs may know anything. Without confidences the history of acceptance stands in.

        Tokens are handed over as Python ints: what a GPU was asked to do for them is done when this returns.
        """

    def commit(self, accepted: Sequence[Accepted]) -> None:  # noqa: B027
        """Rows that became final. Whatever the drafter holds beyond `end` is void."""

    def release(self, request_id: int) -> None:  # noqa: B027
        """Forgets a request: finished, cancelled or preempted."""

    # A prefix cache keeps KV blocks of the target for requests that begin alike. What a drafter holds of these rows it
    # keeps itself, under the same keys, in its own storage.

    def keep(self, request_id: int, tokens: Sequence[int], keys: Sequence[BlockKey]) -> None:  # noqa: B027
        """Keeps what it holds of a request's first complete blocks, `keys[i]` naming block i, for others to `adopt`.

        Called again when there are more of them. `tokens` are those of the request, also behind the blocks.
        """

    def kept(self, keys: Sequence[BlockKey]) -> int:
        """How many of the first of these blocks it can `adopt`. All, if it reads nothing but the tokens of a view."""
        return 0 if self.taps or self.block_bytes else len(keys)

    def adopt(self, request_id: int, keys: Sequence[BlockKey]) -> None:  # noqa: B027
        """A request begins with these blocks, no more than are `kept`: as if their rows had been committed to it."""

    def drop(self, key: BlockKey) -> None:  # noqa: B027
        """The target's block is gone: nobody will ask for this key any more."""

    def audit(self) -> None:  # noqa: B027
        """Asserts that its own books balance; called when the engine is idle."""


def draw_drafts(
    logits: Tensor, views: Sequence[DraftView], drafted: Sequence[Sequence[int]]
) -> tuple[list[int], Tensor]:
    """The next draft token of each view from the drafter's logits [R, V] over the target's ids.

    Returns the tokens and the law [R, V] each was drawn from: to be passed on as it is, in rejection mode at T > 0.
    A token is `NOTHING` where there is no law: masks leave nothing that the drafter knows, the logits are NaN, or the
    request's own logits processor raised. That looks at the tokens before, so a draft that ends there is exact.
    """
    import torch

    rows = [
        Row(view.sampling, view.tokens, view.prompt_length, prefix, view.end_ids)
        for view, prefix in zip(views, drafted, strict=True)
    ]
    probs, errors = try_distribution(logits, rows)
    for r, error in errors.items():
        logger.warning("request %d has no law to draft from; its draft ends there", views[r].request_id, exc_info=error)
    top = probs.max(-1)
    tokens = top.indices.where(top.values > 0, NOTHING)
    sampled = [r for r, view in enumerate(views) if not is_deterministic(view)]
    for mode in ("rejection", "coupled"):
        mine = [r for r in sampled if views[r].verify_mode == mode]
        if mine:
            drawn = _draw(probs[mine], [views[r] for r in mine], [len(drafted[r]) for r in mine], mode)
            tokens[torch.tensor(mine, device=tokens.device)] = drawn
    return tokens.tolist(), probs


def _draw(probs: Tensor, views: Sequence[DraftView], slots: Sequence[int], mode: str) -> Tensor:
    """Slot k of the round at an anchor (rejection) or position anchor + 1 + k (coupled)."""
    import numpy as np
    import torch

    if mode == "rejection":
        numbers = [v.noise.uniforms(v.anchor, DRAFT, k + 1)[k] for v, k in zip(views, slots, strict=True)]
        return draw(probs, torch.tensor(numbers, dtype=torch.float64, device=probs.device))
    noise = [v.noise.gumbel_for_draft(v.anchor + 1 + k, probs.shape[-1]) for v, k in zip(views, slots, strict=True)]
    return draw_coupled(probs, torch.from_numpy(np.stack(noise)).to(probs.device))


def is_deterministic(view: DraftView) -> bool:
    """Whether the drafts of this view are point masses: greedy requests, and greedy drafting of sampled ones."""
    return view.sampling.greedy or view.draft_greedily


Advance = Callable[[Sequence[int], Sequence[Draft]], tuple["Tensor", list[float]]]
"""`advance(requests, drafts)`: logits [R, V] over the target's ids of the next slot of these requests, whose drafts so
far are given, and c_k of each: what is known before that slot's token is drawn, NaN if its law is not finite."""


def draft_serially(views: Sequence[DraftView], keep_drafting: KeepDrafting, advance: Advance) -> list[Draft]:
    """Drafts slot by slot, all requests together, each until it has `k` tokens or is told to stop.

    Whether slot k is drafted depends on c_k, hence on x_<k, never on x_k. The law reported is the tensor drawn from.
    """
    drafts = [Draft() for _ in views]
    laws: list[list[Tensor]] = [[] for _ in views]
    active = list(range(len(views)))
    while active:
        logits, confidences = advance(active, [drafts[i] for i in active])
        going = []
        for row, i in enumerate(active):
            if not math.isfinite(confidences[row]):
                drafts[i].invalid = True
            elif keep_drafting(views[i], len(drafts[i].tokens) + 1, confidences[row]):
                going.append(row)
        if not going:
            break
        mine = [active[row] for row in going]
        tokens, probs = draw_drafts(logits[going], [views[i] for i in mine], [drafts[i].tokens for i in mine])
        for row, i in enumerate(mine):
            if tokens[row] == NOTHING:
                drafts[i].invalid = True
                continue
            drafts[i].tokens.append(tokens[row])
            drafts[i].confidence.append(confidences[going[row]])
            laws[i].append(probs[row])
        active = [i for i in mine if len(drafts[i].tokens) < views[i].k and not drafts[i].invalid]
    for draft, view, law in zip(drafts, views, laws, strict=True):
        draft.probs = law_of(view, law)
    return drafts


def top_probability(logits: Tensor) -> list[float]:
    """[R] largest probability of each row of logits [R, V], before any sampling option; NaN where one is not finite."""
    wide = logits.float()
    return (wide.amax(-1) - wide.logsumexp(-1)).exp().tolist()


def law_of(view: DraftView, laws: Sequence[Tensor]) -> Tensor | None:
    """[K, V] law to report for drafts made one by one: None for point masses and in coupled mode, which needs none."""
    import torch

    if is_deterministic(view) or view.verify_mode == "coupled" or not laws:
        return None
    return torch.stack(list(laws))


__all__ = [
    "Accepted",
    "Draft",
    "DraftView",
    "Drafter",
    "KeepDrafting",
    "Proposal",
    "draft_serially",
    "draw_drafts",
    "is_deterministic",
    "law_of",
    "top_probability",
]
