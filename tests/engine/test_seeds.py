"""What a seed promises."""

from __future__ import annotations

import pytest

from engine.conftest import drafter_of, drive, engine_of, ids, same
from forerun import Sampling
from forerun.sampling import Noise
from forerun.target.table import history_model

PROMPT = [1, 2, 3]


def test_se_1_one_seed_one_text():
    """The same seed twice alone, twice with other batch-mates and 20 times over; in `coupled` also with another
    drafter, K and with none; in `rejection` with the same drafter and K.

    https://github.com/vllm-project/vllm/issues/6038, https://github.com/vllm-project/vllm/pull/6034,
    https://github.com/vllm-project/vllm/issues/13196
    """
    sampling = Sampling(temperature=0.9, seed=77, max_tokens=15)
    texts = {"rejection": set(), "coupled": set()}
    for mode, seen in texts.items():
        for repeat in range(20):
            kind, k = ("other small", 3) if mode == "rejection" else [("ngram", 2), ("other small", 5)][repeat % 2]
            engine = engine_of(
                history_model(7, seed=3), drafter_of(kind, {}, 7), num_speculative_tokens=k, verify_mode=mode
            )
            requests = engine.submit([PROMPT], sampling)
            if repeat % 4 == 1:
                engine.submit([[4], [5, 5]], Sampling(temperature=1, max_tokens=repeat))
            if repeat % 4 == 2 and mode == "coupled":
                requests = engine.submit([PROMPT], sampling, speculative=False)
            seen.add(tuple(drive(engine, requests)[0].token_ids))
    assert len(texts["rejection"]) == len(texts["coupled"]) == 1


def test_se_2_unseeded_requests_differ():
    """Eight unseeded copies differ (two equal ones of 20 tokens over 7 ids: below 1e-8), distinct seeds differ, and a
    returned seed sent alone with n = 1 gives that sample.

    https://github.com/NVIDIA/TensorRT-LLM/pull/17599, https://github.com/NVIDIA/TensorRT-LLM/issues/19487
    """
    make = lambda: engine_of(history_model(7, seed=3), drafter_of("other small", {}, 7))  # noqa: E731
    engine = make()
    hot = {"temperature": 3.0, "max_tokens": 20}
    copies = engine.generate([PROMPT] * 8, Sampling(**hot))
    seeds = engine.generate([PROMPT] * 8, [Sampling(seed=i, **hot) for i in range(8)])
    samples = engine.generate([PROMPT], Sampling(seed=5, n=8, **hot))
    for group in (copies, seeds, samples):
        assert len({tuple(one.token_ids) for one in group}) == 8
    assert len({one.seed for one in (*copies, *samples)}) == 16
    for one in (*copies, *samples):
        assert same(make().generate([PROMPT], Sampling(seed=one.seed, **hot))[0], one)
    assert [one.seed for one in samples] == [Noise.of(5, i).seed for i in range(8)]
    assert [one.token_ids for one in seeds] == ids(
        make().generate([PROMPT] * 8, [Sampling(seed=i, **hot) for i in range(8)])
    )


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)])
def test_seeds_of_every_size(seed):
    """The whole 64-bit range is accepted, and the returned seed gives the same text."""
    engine = engine_of(history_model(7, seed=3))
    [done] = engine.generate([PROMPT], Sampling(seed=seed, max_tokens=9))
    assert same(engine.generate([PROMPT], Sampling(seed=done.seed, max_tokens=9))[0], done)


def test_coupled_noise_is_made_once_for_a_draft_and_its_verification(monkeypatch):
    """A large row of Gumbel noise takes longer than a draw: target and draft of one position share it."""
    made = []

    def counting(self, position, size, real=Noise.gumbel):
        made.append(position)
        return real(self, position, size)

    monkeypatch.setattr(Noise, "gumbel", counting)
    engine = engine_of(history_model(7, seed=3), drafter_of("small", {}, 7), verify_mode="coupled")
    [done] = engine.generate([PROMPT], Sampling(temperature=0.9, seed=77, max_tokens=16))
    assert done.stats.accepted == done.stats.verified > 0
    assert made == list(range(3, 3 + 16))
