"""DSpark's network: a DFlash backbone, a Markov head that chains the block, a confidence head (arXiv 2607.05147, 3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from forerun.drafters.dflash.drafter import backbone_of
from forerun.drafters.dspark.config import DSparkConfig
from forerun.drafters.layers import Head


class MarkovHead(nn.Module):
    """What the token before says about the next one: a low-rank bias W2 latent on the logits (eq. 4 to 6).

    The latent vector is W1[previous] (vanilla), a gated W1[previous], or the output of a small recurrence over the
    block (rnn).

    Args:
        vocab_size: V, ids of previous tokens.
        draft_size: D, columns of the logits.
        hidden_size: d.
        rank: r.
        kind: vanilla, gated or rnn.
    """

    def __init__(self, vocab_size: int, draft_size: int, hidden_size: int, rank: int, kind: str):
        super().__init__()
        self.kind, self.rank, self.hidden_size = kind, rank, hidden_size
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = Head(rank, draft_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def start(self, count: int, like: Tensor) -> Tensor:
        """[n, r] state before the first slot."""
        return like.new_zeros(count, self.rank)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Latent [n, r] of one slot and the state after it.

        Args:
            previous: [n] target ids of the tokens before.
            hidden: [n, d] of this slot.
            state: [n, r]; only rnn has one.
        """
        before: Tensor = self.markov_w1(previous)
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, before], -1))) * before, state
        if self.kind == "rnn":
            gate, candidate, out = self.joint_proj(torch.cat([state, before, hidden], -1)).chunk(3, -1)
            kept = torch.sigmoid(gate)
            return torch.tanh(out), kept * state + (1 - kept) * torch.tanh(candidate)
        return before, state

    def along(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Latents [B, K, r] of whole blocks, given the tokens before each slot [B, K] (teacher forcing)."""
        blocks, length = previous.shape
        if self.kind != "rnn":
            latent, _ = self.step(previous.flatten(), hidden.flatten(0, 1), self.start(blocks * length, hidden))
            return latent.reshape(blocks, length, self.rank)
        state, out = self.start(blocks, hidden), []
        for k in range(length):
            latent, state = self.step(previous[:, k], hidden[:, k], state)
            out.append(latent)
        return torch.stack(out, 1)

    def bias(self, latent: Tensor) -> Tensor:
        """[..., r] -> [..., D], added to the logits."""
        out: Tensor = self.markov_w2(latent)
        return out


class ConfidenceHead(nn.Module):
    """c_k = sigmoid(w [h_k ; W1[x_{k-1}]] + b): the chance that x_k is accepted if all before it were (eq. 7).

    It sees the token before, never x_k itself, so a decision by it is lossless.
    """

    def __init__(self, size: int):
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, seen: Tensor) -> Tensor:
        """[..., size] -> logits [...]."""
        logits: Tensor = self.proj(seen)[..., 0]
        return logits


class DSparkNetwork(nn.Module):
    """Backbone and heads."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.backbone = backbone_of(config)
        size, rank = config.transformer_layer_config.hidden_size, config.markov_rank
        self.markov_head: MarkovHead | None = None
        self.confidence_head: ConfidenceHead | None = None
        self._with_markov = config.confidence_head_with_markov and rank > 0
        if rank > 0:
            self.markov_head = MarkovHead(
                config.vocab_size, config.draft_vocab_size, size, rank, config.markov_head_type
            )
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(size + rank * self._with_markov)

    def confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [...] of c_k from hidden states [..., d] and the target ids before them [...]."""
        assert self.confidence_head is not None
        if self._with_markov:
            assert self.markov_head is not None
            hidden = torch.cat([hidden, self.markov_head.markov_w1(previous)], -1)
        logits: Tensor = self.confidence_head(hidden)
        return logits


def initialise_heads(network: DSparkNetwork, seed: int) -> None:
    """normal(0, 0.02), biases 0: at the start the heads change next to nothing."""
    generator = torch.Generator().manual_seed(seed + 1)
    for head in (network.markov_head, network.confidence_head):
        for name, parameter in head.named_parameters() if head is not None else ():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, 0.0, 0.02, generator=generator)
