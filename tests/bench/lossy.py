"""A drafter that lies, for `--speculative-config '{"method": "bench.lossy:Flattened", "model": ...}'`."""

from __future__ import annotations

from forerun.drafters.small import Small


class Flattened(Small):
    """A small model that draws from its law and reports a flatter one: its likely tokens are accepted too often."""

    name = "flattened"

    def propose(self, views, keep_drafting):
        drafts = super().propose(views, keep_drafting)
        for draft in drafts:
            if draft.probs is not None:
                flat = draft.probs.double() ** 0.25
                draft.probs = flat / flat.sum(-1, keepdim=True)
        return drafts
