"""What a pass would cost on hardware that is not here: bytes it must read, operations it must make, rows of padding.

    seconds(rows) = max(bytes / bandwidth, 2 * parameters * rows / rate)     dense layers and head
                  + max(bytes of covered experts / bandwidth, ...)          mixture of experts
                  + 2 all-reduces per layer, if split over GPUs
                  + a fixed overhead

Everything here is modelled, nothing measured. What a GPU reaches of its data sheet, and the overheads, are assumptions;
each is a named constant, so that it can be argued with.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from forerun.budget.costs import ContextCost, VerifyCost
from forerun.budget.curve import CostCurve

BANDWIDTH_SHARE = 0.8
"""Of the data sheet's bandwidth that reading weights reaches (assumed; large copies reach some .9)."""
RATE_SHARE = 0.6
"""Of the data sheet's dense matrix rate that a layer's products reach (assumed)."""
ATTENTION_SHARE = 0.35
"""The same of the products inside attention (assumed)."""
LINK_SHARE = 0.7
"""Of one direction of NVLink (assumed)."""
REDUCE_LATENCY = 8e-6
"""Seconds of an all-reduce of nothing (assumed: a one-shot kernel over NVLink)."""
STEP_OVERHEAD = 0.5e-3
"""Seconds of a step beside its pass: scheduling, launching, sampling (assumed)."""
PASS_OVERHEAD = 0.05e-3
"""Seconds of one pass of a drafter beside its products (assumed: one captured graph)."""

CAPTURED = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Rows a step is padded to: vLLM captures its graphs at 1, 2, 4 and multiples of 8 (config/compilation.py); beyond 256
every 16. A row too many costs a whole step of this stair."""
BEYOND = (640, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 32768)
FAR = 1 << 17
"""Context at which the cost of a context, linear from 0, is written down."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, by its data sheet."""

    name: str
    bandwidth: float
    """Bytes a second."""
    rate: float
    """Operations a second in bfloat16, dense; twice that with 1-byte weights."""
    memory: float
    """Bytes."""
    link: float
    """Bytes a second to its neighbours, one direction."""


H200 = Device("NVIDIA H200", bandwidth=4.8e12, rate=989e12, memory=141e9, link=450e9)
"""NVIDIA's data sheet of the H200 SXM: 4.8 TB/s, 1,979 TFLOP/s in bfloat16 with sparsity, so half of it dense, 141 GB,
NVLink with 900 GB/s in both directions together."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's sizes, as its config.json names them."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of the gated MLP, or of one expert."""
    vocab: int
    experts: int = 0
    """0: a dense MLP."""
    experts_per_token: int = 0
    weight_bytes: int = 2
    """2 is bfloat16, 1 is fp8. The head stays in bfloat16, and so do keys and values."""
    fused: int = 0
    """Extra parameters read in a pass: what fuses the target's features in a learned drafter."""

    @property
    def attention(self) -> int:
        """Parameters of one layer's projections: q and o, k and v."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def mlp(self) -> int:
        """Parameters of one gated MLP, or of one expert: three matrices."""
        return 3 * self.hidden * self.ffn

    @property
    def head(self) -> int:
        return self.hidden * self.vocab

    @property
    def dense(self) -> int:
        """Parameters that every row meets, the head excluded."""
        return self.layers * (self.attention + (0 if self.experts else self.mlp)) + self.fused

    @property
    def parameters(self) -> int:
        """All, with an embedding as large as the head."""
        return self.dense + 2 * self.head + self.layers * self.experts * self.mlp

    @property
    def active(self) -> int:
        """Parameters that one row multiplies."""
        return self.dense + self.head + self.layers * self.experts_per_token * self.mlp

    @property
    def kv_bytes(self) -> int:
        """Of one token: K and V in bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def covered(self, rows: int) -> float:
        """Experts of a layer that some row chooses: E (1 - (1 - k / E)^rows).

        Rows choose independently and evenly (arXiv 2505.19645). Neighbouring tokens of one text choose more alike than
        that, so a verify block really reads somewhat fewer.
        """
        if not self.experts:
            return 0.0
        return self.experts * (1 - (1 - self.experts_per_token / self.experts) ** rows)


@dataclass(frozen=True)
class Placement:
    """A model on so many GPUs, every matrix split evenly between them (tensor parallel)."""

    shape: Shape
    device: Device = H200
    gpus: int = 1
    overhead: float = STEP_OVERHEAD

    @cached_property
    def _bandwidth(self) -> float:
        return self.gpus * self.device.bandwidth * BANDWIDTH_SHARE

    @cached_property
    def _rate(self) -> float:
        """Operations a second; products with 1-byte weights run at twice the rate."""
        return self.gpus * self.device.rate * RATE_SHARE * (2 / self.shape.weight_bytes)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights, a tenth of the memory kept for everything else."""
        shape = self.shape
        weights = shape.weight_bytes * (shape.parameters - 2 * shape.head) + 2 * 2 * shape.head
        return int((0.9 * self.gpus * self.device.memory - weights) // shape.kv_bytes)

    def seconds(self, rows: int) -> float:
        """Of one pass over so many rows, padded to a captured size."""
        rows = padded(rows)
        return self.overhead + self._dense(rows) + self._experts(rows) + self._reduces(rows)

    def _dense(self, rows: int) -> float:
        """Layers at their own width of weights, then the head in bfloat16."""
        shape = self.shape
        layers = max(shape.dense * shape.weight_bytes / self._bandwidth, 2 * shape.dense * rows / self._rate)
        rate = self._rate * shape.weight_bytes / 2
        return layers + max(2 * shape.head / self._bandwidth, 2 * shape.head * rows / rate)

    def _experts(self, rows: int) -> float:
        shape = self.shape
        if not shape.experts:
            return 0.0
        read = shape.layers * shape.covered(rows) * shape.mlp * shape.weight_bytes
        made = 2 * rows * shape.layers * shape.experts_per_token * shape.mlp
        return max(read / self._bandwidth, made / self._rate)

    def _reduces(self, rows: int) -> float:
        """Two all-reduces a layer over [rows, hidden] in bfloat16; a ring moves 2 (g - 1) / g of it."""
        if self.gpus == 1:
            return 0.0
        moved = 2 * rows * self.shape.hidden * 2 * (self.gpus - 1) / self.gpus
        return 2 * self.shape.layers * (REDUCE_LATENCY + moved / (self.device.link * LINK_SHARE))

    def context(self) -> ContextCost:
        """Keys and values are read once per request; each row multiplies all of them: 4 * heads * head_dim a layer."""
        shape = self.shape
        request = FAR * shape.kv_bytes / self._bandwidth
        made = 4 * shape.heads * shape.head_dim * shape.layers * FAR
        row = made / (self.gpus * self.device.rate * ATTENTION_SHARE)
        return ContextCost((0, FAR), (0.0, request), (0.0, row))

    def verify(self) -> VerifyCost:
        """Of a step by its rows, with both edges of every stair."""
        counts = sorted({*CAPTURED, *(n + 1 for n in CAPTURED), *BEYOND})
        return VerifyCost(CostCurve.measured({n: self.seconds(n) for n in counts}), self.context())

    def operations(self, parameters: int) -> float:
        """Seconds that a row takes for so many of the parameters where nothing has to be read for it."""
        return 2 * parameters / self._rate


def padded(rows: int) -> int:
    """The captured size a pass runs at; beyond the largest one its own."""
    if rows > CAPTURED[-1]:
        return rows
    captured: int = CAPTURED[bisect_left(CAPTURED, rows)]
    return captured


def ridge(placement: Placement) -> int:
    """Rows from which operations cost more than reading the weights: where verifying stops being free."""
    rows = placement.shape.weight_bytes * placement._rate / (2 * placement._bandwidth)
    return math.ceil(rows)


__all__ = ["CAPTURED", "H200", "Device", "Placement", "Shape", "padded", "ridge"]
