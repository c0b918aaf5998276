"""What a confidence may know: the history and the tokens before its own, never the token it speaks of (SP-1).

https://github.com/NVIDIA/TensorRT-LLM/pull/17056, DSpark (arXiv 2607.05147), appendix A. The fuzz redraws x_k and what
follows in one row of a batch and holds all other rows fixed: whether slot k is asked for, drafted and verified must not
change, under any policy. Drafters that peek are planted to show that it would be seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from budget.world import profile, serial
from drafters.kinds import SETTINGS, drafting
from drafters.learning import give
from forerun import Sampling
from forerun.budget.history import Outcome
from forerun.budget.planner import SchedulerOptions
from forerun.budget.planning import Ask, Option
from forerun.budget.policy import Exposure, Policy
from forerun.budget.rounds import Drafted, Judged
from forerun.budget.scheduler import Scheduler
from forerun.drafters.base import Draft, Drafter, DraftView
from forerun.drafters.learned import LearnedDrafter
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.sampling import Noise
from forerun.target.table import TableTarget
from laws.cases import logits_of

V, K = 7, 3
SAMPLING = Sampling(temperature=0.9)
Texts = Sequence[Sequence[int]]
TEXTS: Texts = [[1, 2, 3, 4, 2], [0, 6, 6]]
KINDS = ["small", *SETTINGS, "dspark copying"]
POLICIES: list[Policy] = ["threshold", "prefix", "delayed"]


class Given(Noise):
    """Noise whose draft numbers are given, slot by slot."""

    def __init__(self, numbers: Sequence[float]):
        object.__setattr__(self, "numbers", numbers)

    def uniforms(self, anchor: int, purpose: int, count: int):
        return self.numbers[:count]


def target() -> TableTarget:
    """Logits between -1.5 and 1.5 by the whole history: laws, and so confidences, differ at every place."""
    return TableTarget(logits_of("history", "target", V), V, window=64)


def draft_model() -> TableTarget:
    """The same for a draft model, with laws between flat and sure."""
    flat = logits_of("history", "draft", V)
    return TableTarget(lambda prefix: [2.5 * x for x in flat(prefix)], V, window=64)


def make(kind: str) -> Drafter:
    return Small(draft_model(), V) if kind == "small" else drafting(kind, target(), scale=0.6)


def ready(drafter: Drafter, texts: Texts = TEXTS) -> None:
    """Everything up to the anchors is there."""
    drafter.allocate(16)
    for request, text in enumerate(texts):
        if isinstance(drafter, LearnedDrafter):
            give(drafter, text, 0, len(text) - 1, request)


Numbers = list[list[float]]
"""[R][K] draft uniforms."""


@dataclass
class Trace:
    """What was decided about every slot of every row."""

    drafts: list[Draft]
    asked: dict[int, list[tuple[int, float, bool]]] = field(default_factory=dict)
    """By row: slot, confidence and answer."""
    lengths: list[int] = field(default_factory=list)


def views(numbers: Numbers, lengths: Sequence[int] = (K, K), texts: Texts = TEXTS) -> list[DraftView]:
    """A view for each row that drafts."""
    return [
        DraftView(
            request_id=request, tokens=text, prompt_length=1, k=lengths[request], sampling=SAMPLING,
            end_ids=frozenset(), noise=Given(own), verify_mode="rejection",
        )
        for request, (text, own) in enumerate(zip(texts, numbers, strict=True))
        if lengths[request] > 0
    ]  # fmt: skip


RISING = {1: 1.0, 2: 1.05, 3: 1.15, 4: 1.3, 5: 1.5, 6: 1.75, 7: 2.05, 8: 2.4}
"""A row pays where it survives with a chance of a quarter to two thirds: there the confidences of the drafters lie."""


def scheduler_of(policy: Policy) -> Scheduler:
    """One that knows the drafter as right five times of six, so that it plans K for every row."""
    scheduler = Scheduler(
        profile(RISING, {"any": serial(0.01, 0.01)}), SchedulerOptions(policy, min_predicted_gain=-1.0)
    )
    for accepted in (0, 1, 2, 3, 3, 3, 3, 3) * 8:
        scheduler.history.record("any", -1, Outcome(K, accepted))
    return scheduler


@dataclass(frozen=True)
class Scene:
    """Two requests, and the numbers of some earlier steps, which are always the same."""

    texts: Texts
    earlier: Sequence[Numbers]
    threshold: float


def step(scheduler: Scheduler, drafter: Drafter, scene: Scene, numbers: Numbers) -> Trace:
    """One step of both requests, up to what is verified."""
    ready(drafter, scene.texts)
    options = (Option("any", K),)
    scheduler.plan([Ask(r, len(text), options, None, scene.threshold) for r, text in enumerate(scene.texts)])
    asked: dict[int, list[tuple[int, float, bool]]] = {r: [] for r in range(len(scene.texts))}

    def keep(view: DraftView, k: int, confidence: float) -> bool:
        answer = scheduler.keep_drafting(view.request_id, "any", k, confidence)
        asked[view.request_id].append((k, confidence, answer))
        return answer

    most = [plan.k for plan in scheduler._step.plans.values()]
    asking = views(numbers, most, scene.texts)
    made = iter(drafter.propose(asking, keep)) if asking else iter(())
    drafts = [next(made) if k else Draft() for k in most]
    told = [
        Drafted(r, "any" if d.tokens else None, len(d.tokens), d.confidence, Exposure()) for r, d in enumerate(drafts)
    ]
    lengths = scheduler.choose(told)
    scheduler.record([Judged(d, n, min(1, n)) for d, n in zip(told, lengths, strict=True)])
    return Trace(drafts, asked, lengths)


def run(policy: Policy, drafter: Drafter, scene: Scene, numbers: Numbers) -> Trace:
    """The step after the earlier ones."""
    scheduler = scheduler_of(policy)
    for before in scene.earlier:
        step(scheduler, drafter, scene, before)
    return step(scheduler, drafter, scene, numbers)


def differences(one: Trace, other: Trace, row: int, k: int) -> list[str]:
    """Decisions about slot k of a row that are not the same in both."""
    told = {
        "asked": [[entry for entry in trace.asked[row] if entry[0] <= k] for trace in (one, other)],
        "drafted": [len(trace.drafts[row].tokens) >= k for trace in (one, other)],
        "confidence": [trace.drafts[row].confidence[:k] for trace in (one, other)],
        "verified": [trace.lengths[row] >= k for trace in (one, other)],
    }
    if not all(told["drafted"]):
        del told["confidence"]
    return [name for name, (left, right) in told.items() if left != right]


def redraws(policy: Policy, drafter: Drafter, cases: int) -> Iterator[tuple[list[str], list[int]]]:
    """What redrawing some x_k changed of the decisions about it, and the lengths that were verified, case by case."""
    rng = random.Random(policy)
    draw = lambda: [[rng.random() for _ in range(K)] for _ in TEXTS]  # noqa: E731
    for _ in range(cases):
        texts = [[rng.randrange(V) for _ in range(rng.randrange(2, 7))] for _ in TEXTS]
        scene = Scene(texts, [draw(), draw()], 0.4 if policy == "threshold" else 0.0)
        numbers, row, k = draw(), rng.randrange(len(texts)), rng.randrange(1, K + 1)
        redrawn = [list(own) for own in numbers]
        redrawn[row][k - 1 :] = [rng.random() for _ in range(k - 1, K)]
        one, other = (run(policy, drafter, scene, given) for given in (numbers, redrawn))
        yield differences(one, other, row, k), one.lengths


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        pytest.param(kind, policy, marks=pytest.mark.slow if "-" in kind and policy != "delayed" else ())
        for kind in KINDS
        for policy in POLICIES
    ],
)
def test_sp_1_no_decision_about_a_token_depends_on_it(kind, policy):
    """Every drafter under every policy (variants of a kind under one, the others are slow), twelve redraws each; with
    the draft model, whose laws are made for it, the lengths do vary."""
    found = list(redraws(policy, make(kind), 12))
    assert all(not changed for changed, _ in found)
    assert len({length for _, lengths in found for length in lengths}) > 1 or kind != "small"


class Peeking(Small):
    """Drafts all it may and gives its own probability of each token it drew."""

    def propose(self, views, keep_drafting):
        drafts = super().propose(views, lambda view, k, c: True)
        for draft in drafts:
            draft.confidence = draft.probs[range(len(draft.tokens)), draft.tokens].tolist()
        return drafts


class AskingLate(Small):
    """Asks whether to keep a token after it has been drawn."""

    def propose(self, views, keep_drafting):
        drafts = super().propose(views, lambda view, k, c: True)
        return [self._kept(view, draft, keep_drafting) for view, draft in zip(views, drafts, strict=True)]

    def _kept(self, view, draft, keep_drafting) -> Draft:
        for k, token in enumerate(draft.tokens):
            if not keep_drafting(view, k + 1, float(draft.probs[k, token])):
                return draft.truncate(k)
        return draft


class LookingAhead(Small):
    """Drafts all it may and gives each slot the confidence of the one behind it, which knows the slot's token."""

    def propose(self, views, keep_drafting):
        drafts = super().propose(views, lambda view, k, c: True)
        for draft in drafts:
            draft.confidence = [*draft.confidence[1:], *draft.confidence[-1:]]
        return drafts


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("planted", [Peeking, AskingLate, LookingAhead])
def test_sp_1_a_drafter_that_peeks_is_caught(planted: Callable[..., Small], policy):
    """The same fuzz over the same model finds each of them, in decisions and not only in the confidences."""
    found = redraws(policy, planted(draft_model(), V), 200)
    assert any({"verified", "drafted"} & set(changed) for changed, _ in found)


@pytest.mark.parametrize("kind", KINDS)
def test_confidences_are_probabilities_one_for_each_token(kind):
    drafter = make(kind)
    ready(drafter)
    for draft in drafter.propose(views([[0.3, 0.6, 0.1], [0.9, 0.2, 0.5]]), lambda *_: True):
        assert len(draft.confidence) == len(draft.tokens) == K
        assert all(0 < c <= 1 for c in draft.confidence)


BLIND = {
    "dflash": {}, "dspark": {"markov_rank": 0}, "dspark-pruned": {"confidence_head_with_markov": False},
    "dspark-rnn": {"markov_rank": 0, "enable_confidence_head": False},
}  # fmt: skip
SEEING = {
    "small": {}, "eagle": {}, "eagle3": {}, "dspark": {}, "dspark-rnn": {"enable_confidence_head": False},
    "dflash copying": {},
}  # fmt: skip


def _spread(drafter: Drafter) -> set[tuple[float, ...]]:
    """Confidences behind the first slot, over many drafts at one place."""
    rng, found = random.Random(1), set()
    for _ in range(12):
        ready(drafter)
        numbers = [[rng.random() for _ in range(K)] for _ in TEXTS]
        [draft, _] = drafter.propose(views(numbers), lambda *_: True)
        found.add(tuple(round(c, 9) for c in draft.confidence))
    return found


@pytest.mark.parametrize("kind", BLIND)
def test_blind_confidences_know_no_drawn_token(kind):
    """What calls itself blind gives the same confidences whatever it draws: policy `global` may use them."""
    drafter = drafting(kind, target(), scale=0.6, **BLIND[kind])
    assert drafter.blind
    assert len(_spread(drafter)) == 1


@pytest.mark.parametrize("kind", SEEING)
def test_confidences_that_know_earlier_tokens_are_not_called_blind(kind):
    drafter = make("small") if kind == "small" else drafting(kind, target(), scale=0.6, **SEEING[kind])
    assert not drafter.blind
    assert len(_spread(drafter)) > 1


# ------------------------------------------------------------------------------------------------------------- n-grams


def _looked_up(tokens: Sequence[int], k: int = 4, request: int = 1, drafter: Ngram | None = None, **options) -> Draft:
    view = DraftView(
        request_id=request, tokens=tokens, prompt_length=1, k=k, sampling=SAMPLING, end_ids=frozenset(),
        noise=Noise.of(0), verify_mode="rejection", **options,
    )  # fmt: skip
    return (drafter or Ngram(3, 1)).propose([view], lambda *_: True)[0]


def test_ngram_confidence_is_how_often_it_would_have_been_right():
    """Without evidence n / (n + 1); then the rate of the request's own look-ups of that length, with a prior of 4."""
    first = _looked_up([1, 2, 3, 1, 2], k=2)
    # The places after [1] and [1, 2] were new when they came; only the second 2 was a look-up (of [1]), and right.
    assert first.tokens == [3, 1]
    assert first.confidence == pytest.approx([(0 + 4 * 2 / 3) / (0 + 4), (0 + 4 * 3 / 4) / (0 + 4)])
    again = _looked_up([1, 2, 1], k=1)
    assert again.confidence == pytest.approx([4 * 1 / 2 / 4])
    after_one = _looked_up([1, 2, 1, 2, 1], k=1)
    assert after_one.tokens == [2]
    # [1] -> 2 was right, then [1, 2] -> 1 was right as a pair of two: this one matches three.
    assert after_one.confidence == pytest.approx([4 * 3 / 4 / 4]) or after_one.confidence[0] > 0.5


def test_ngram_confidence_rises_with_repetition_and_falls_without():
    """A text that repeats itself earns trust; one whose repeats go on differently loses it."""
    loop = _looked_up([1, 2, 3, 4] * 12)
    assert min(loop.confidence) > 0.9
    rng = random.Random(3)
    noise = [rng.randrange(4) for _ in range(400)]
    assert max(_looked_up(noise).confidence) < 0.5
    assert all(0 < c < 1 for c in (*loop.confidence, *_looked_up(noise).confidence))


def test_ngram_confidence_is_a_function_of_the_tokens_alone():
    """However the tokens came, in whatever portions, with releases and cuts between: the same confidences. Where a
    match grows along the draft so does the length it is judged by."""
    rng = random.Random(5)
    tokens = [rng.randrange(3) for _ in range(60)]
    want = _looked_up(tokens).confidence
    for portions in ([1] * 60, [7] * 9, [59, 1]):
        drafter, length = Ngram(3, 1), 0
        for portion in portions:
            length = min(60, length + portion)
            draft = _looked_up(tokens[:length], drafter=drafter)
            if length == 30:
                drafter.release(1)
        assert draft.confidence == want


def test_a_prediction_is_no_evidence_but_its_use_is():
    """Repetition inside the predicted text says nothing about whether it comes true; tokens that came as said do."""
    prediction = [1, 2, 3, 4, 5, 6, 0] * 4
    fresh = _looked_up([6, 1, 2], prediction=prediction)
    followed = _looked_up([6, *prediction[7:20]], prediction=prediction)
    assert fresh.tokens[0] == 3
    assert fresh.confidence[0] < 0.85
    assert followed.confidence[0] > 0.9
    assert torch.tensor(followed.confidence).max() < 1
