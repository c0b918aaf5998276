"""An EAGLE-3 drafter that begins with what least squares can say, before the first step of its training.

Its residual stream is the fused feature itself, so the fusion is the map from the taps to the target's next state as it
is before the final norm; attention begins on the row itself and adds what the token there says, by as many numbers as
there are values. The feed-forward part begins by adding nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from forerun.drafters.learned import Material, TrainingBatch
from forerun.drafters.learned.aim import disturb, look_back, pass_on
from forerun.drafters.learned.fitting import Code, Fit, constant_part, fit_states, reduced
from forerun.drafters.learned.head import head_rows

if TYPE_CHECKING:
    from forerun.drafters.eagle3.decode import Eagle3
    from forerun.drafters.eagle3.network import Eagle3Layer, Eagle3Network


@torch.no_grad()
def fit_eagle3(drafter: Eagle3, material: Material) -> bool:
    """Writes the start into the drafter, whose linear layers are random so far. False: nothing to fit it to."""
    network, layer = drafter.network, cast("Eagle3Layer", drafter.network.layers[0])

    def known(batch: TrainingBatch, rows: Tensor) -> Tensor:
        """Taps of the row before, as `fc` reads them, and the normed embedding: [n, m * H + H]."""
        embedded = drafter.target.embed(batch.tokens[rows]).to(network.dtype)
        return torch.cat([network.taps(batch.features[rows - 1]), layer.input_layernorm(embedded)], -1)

    fit = fit_states(drafter, material, known)
    if fit is None:
        return False
    slopes, wide, attention = fit.regression.slopes()[:, :1], network.fc.in_features, network.attention
    own = fit.regression.covariance[wide:, wide:]
    token = reduced(slopes[wide:], own, fit.metric, attention.kv_heads * attention.head_dim)
    _fuse(network, slopes[:wide, 0], token, fit)
    _add_token(drafter, token, fit)
    layer.mlp.down_proj.weight.zero_()
    network.norm.weight.copy_(fit.metric.weight)
    network.lm_head.weight.copy_(head_rows(drafter.target, drafter.vocabulary))
    return True


def _fuse(network: Eagle3Network, slopes: Tensor, token: Code, fit: Fit) -> None:
    """`fc`: [m * H] -> the next state before the final norm, less what the token there adds."""
    seen, weight, wide = fit.regression, fit.metric.weight, len(slopes)
    mean, base = seen.mean[:wide], seen.base[0]
    whole = torch.cat([slopes, token.read @ token.write])  # [m * H + H, H]
    varied = (whole * (seen.covariance @ whole)).sum(0).clamp(min=0)  # [H] variance of what is foreseen
    spoken = (varied + base.square()).sqrt() / weight
    fixed = (base - seen.mean @ whole) / weight + fit.metric.filling(spoken)
    network.fc.weight.copy_((slopes / weight).T + torch.outer(fixed, constant_part(mean)))


def _add_token(drafter: Eagle3, token: Code, fit: Fit) -> None:
    """Values and outputs for the embedding's half of what attention reads; queries and keys find the row itself."""
    network, attention = drafter.network, drafter.network.attention
    feature = torch.zeros(token.read.shape[1], attention.q_proj.in_features - len(token.read)).to(token.read)
    pass_on(attention, list(zip(torch.cat([token.read.T, feature], 1), token.write / fit.metric.weight, strict=True)))
    batch, rows = fit.first, fit.rows
    embedded = drafter.target.embed(batch.tokens[rows]).to(network.dtype)
    fused = network.fuse(batch.features[rows - 1])
    # Where the residual stream begins behind this norm, it is to leave it as it is.
    cast("Eagle3Layer", network.layers[0]).hidden_norm.weight.fill_(float(fused.square().mean().sqrt()))
    x = network.attention_input(embedded, fused)
    look_back(attention, network.rotary, 0, [x], [x])
    disturb(attention, torch.Generator().manual_seed(len(feature)))
