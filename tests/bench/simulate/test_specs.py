"""What is typed: drafters with their acceptance, policies, and messages that name the option."""

from __future__ import annotations

import pytest

from forerun.bench.simulate.specs import Way, parse_drafters, parse_way, parse_ways
from forerun.errors import OptionError


def test_drafters_are_read():
    [one] = parse_drafters(["dspark:0.9,0.8:k=5:bias=1.5:confident=no"])
    [skill] = one.skills
    assert (skill.name, skill.acceptance, skill.most, skill.bias, skill.confident) == (
        "dspark",
        (0.9, 0.8),
        5,
        1.5,
        False,
    )
    [one] = parse_drafters(["ngram:0.8:match=0.3:run=20"])
    assert (one.skills[0].match, one.skills[0].run) == (0.3, 20)


def test_alternatives_are_drafters_of_their_own_and_a_sum_is_loaded_together():
    found = parse_drafters(["dspark:0.3/0.5", "ngram:0.8:match=0.3+small:0.6/0.7"])
    assert [one.label for one in found] == [
        "dspark:0.3", "dspark:0.5", "ngram:0.8:match=0.3+small:0.6", "ngram:0.8:match=0.3+small:0.7",
    ]  # fmt: skip


def test_policies_are_read_and_said_as_they_are_typed():
    text = "plain,fixed:4,fixed,threshold:0.5,prefix,delayed,global,delayed"
    ways = parse_ways(text)
    assert [str(way) for way in ways] == text.split(",")[:-1]
    assert parse_way("fixed:4") == Way("fixed", 4)
    assert [way.adapts for way in ways] == [False, False, False, True, True, True, True]


@pytest.mark.parametrize(
    "text",
    ["dspark", "dspark:", ":0.5", "dspark:1.5", "dspark:x", "dspark:nan", "dspark:0.5:mtach=1", "dspark:0.5:match=2",
     "dspark:0.5:k=0", "dspark:0.5:confident=maybe", "small:0.5+small:0.6"],
)  # fmt: skip
def test_what_is_no_drafter_is_refused(text):
    with pytest.raises(OptionError, match="--drafter"):
        parse_drafters([text])


@pytest.mark.parametrize("text", ["", "fixd", "fixed:0", "fixed:x", "threshold", "threshold:2", "delayed:3", "plain:1"])
def test_what_is_no_policy_is_refused(text):
    with pytest.raises(OptionError, match="--policy"):
        parse_way(text)
