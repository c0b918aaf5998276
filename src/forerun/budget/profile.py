"""A measured cost profile: of which model on which machine it is, the costs, and its file form."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from forerun.budget.costs import ContextCost, Costs, DraftCost, VerifyCost
from forerun.budget.curve import CostCurve
from forerun.errors import OptionError, nearest
from forerun.parsing import json_of

VERSION = 1


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile was measured with; any other value and it must be measured again."""

    model: str
    """Name or fingerprint of the target."""
    dtype: str
    device: str
    """Device with its name, such as the CPU's."""
    threads: int


@dataclass(frozen=True)
class Profile:
    """Costs of one target and of drafters beside it."""

    key: ProfileKey
    verify: VerifyCost
    drafts: Mapping[str, DraftCost]
    """By drafter, as the scheduler is told of them."""
    models: Mapping[str, str] = field(default_factory=dict)
    """By drafter, the model it was measured with; a drafter without one is left out."""

    def costs(self, drafter: str) -> Costs:
        """Of the target with one drafter. OptionError if that one was not measured."""
        if drafter not in self.drafts:
            hint = nearest(drafter, self.drafts)
            raise OptionError("profile", f"has no costs of the drafter {drafter!r} ({hint}); measure again with it")
        return Costs(self.verify, self.drafts[drafter])

    def dumps(self) -> str:
        """JSON text, the same for the same profile."""
        drafts = {name: _draft_json(cost) for name, cost in sorted(self.drafts.items())}
        verify = {"tokens": asdict(self.verify.tokens), "context": asdict(self.verify.context)}
        models = dict(sorted(self.models.items()))
        data = {"version": VERSION, "key": asdict(self.key), "verify": verify, "drafts": drafts, "models": models}
        return json.dumps(data, indent=1)

    @classmethod
    def loads(cls, text: str, key: ProfileKey | None = None) -> Profile:
        """From JSON text.

        Args:
            text: what `dumps` wrote, or a report of `forerun profile --json`, which has that inside.
            key: what it is to be used with, if that is to be checked.

        Raises:
            OptionError: not a profile, another version, or measured with something else; the part is named.
        """
        data = _parsed(text)
        try:
            drafts = {str(name): _draft(value) for name, value in data["drafts"].items()}
            models = {str(name): str(model) for name, model in data.get("models", {}).items()}
            profile = cls(ProfileKey(**data["key"]), _verify(data["verify"]), drafts, models)
        except OptionError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise OptionError("profile", f"is damaged ({error!r}); measure again with `forerun profile`") from None
        if key is not None and key != profile.key:
            raise OptionError("profile", f"{_difference(profile.key, key)}; measure again with `forerun profile`")
        return profile


def _parsed(text: str) -> dict[str, Any]:
    try:
        data = json_of(text)
    except ValueError as error:
        raise OptionError("profile", f"is not JSON: {error}") from None
    if isinstance(data, dict) and isinstance(data.get("profile"), dict):
        data = data["profile"]
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        found = f"has version {version!r}, this program reads {VERSION}"
        raise OptionError("profile", f"{found}; measure again with `forerun profile`")
    return dict(data)


def _difference(found: ProfileKey, expected: ProfileKey) -> str:
    pairs = zip(asdict(found).items(), asdict(expected).values(), strict=True)
    return "; ".join(f"was measured with {n} {mine!r}, not {want!r}" for (n, mine), want in pairs if mine != want)


def _draft_json(cost: DraftCost) -> dict[str, Any]:
    curves = {str(k): asdict(curve) for k, curve in zip(cost.lengths, cost.curves, strict=True)}
    return {"by_length": curves, "context": asdict(cost.context), "follow": cost.follow}


def _draft(data: Mapping[str, Any]) -> DraftCost:
    curves = {int(k): _curve(value) for k, value in data["by_length"].items()}
    lengths = tuple(sorted(curves))
    return DraftCost(lengths, tuple(curves[k] for k in lengths), _context(data["context"]), float(data["follow"]))


def _verify(data: Mapping[str, Any]) -> VerifyCost:
    return VerifyCost(_curve(data["tokens"]), _context(data["context"]))


def _curve(data: Mapping[str, Any]) -> CostCurve:
    return CostCurve(tuple(map(int, data["counts"])), tuple(map(float, data["seconds"])))


def _context(data: Mapping[str, Any]) -> ContextCost:
    rows = (tuple(map(float, data[name])) for name in ("per_request", "per_row"))
    return ContextCost(tuple(map(int, data["contexts"])), *rows)


__all__ = ["VERSION", "Profile", "ProfileKey"]
