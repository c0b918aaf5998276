"""An EAGLE drafter that begins with what least squares can say, before the first step of its training.

Its fusion of embedding and feature is a linear map already, and what the layer puts out is the next feature: the fusion
begins as the regression of one on the other, and the layer by adding nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from forerun.drafters.learned import Material, TrainingBatch
from forerun.drafters.learned.fitting import constant_part, fit_states

if TYPE_CHECKING:
    from forerun.drafters.eagle.decode import Eagle
    from forerun.drafters.eagle.network import EagleLayer


@torch.no_grad()
def fit_eagle(drafter: Eagle, material: Material) -> bool:
    """Writes the start into the drafter, whose linear layers are random so far. False: nothing to fit it to."""
    network, layer = drafter.network, cast("EagleLayer", drafter.network.layers[0])

    def known(batch: TrainingBatch, rows: Tensor) -> Tensor:
        """Embedding and the feature of the row before: [n, 2 * H]."""
        embedded = drafter.target.embed(batch.tokens[rows]).to(network.dtype)
        return torch.cat([embedded, drafter.fuse(batch.features[rows - 1])], -1)

    fit = fit_states(drafter, material, known)
    if fit is None:
        return False
    seen = fit.regression
    slopes = seen.slopes()[:, 0]  # [2 * H, H]
    fixed = seen.base[0] - seen.mean @ slopes
    network.fc.weight.copy_(slopes.T)
    if network.fc.bias is not None:
        network.fc.bias.copy_(fixed)
    else:
        mean = seen.mean.clone()
        mean[: drafter.target.hidden_size] = 0  # features have more of a mean than embeddings
        network.fc.weight.add_(torch.outer(fixed, constant_part(mean)))
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    return True
