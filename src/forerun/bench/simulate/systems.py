"""Systems to simulate: costs measured here, or modelled ones of an H200 with an 8B, a 70B and a large MoE target.

| name | target | on | weights | KV of a token |
|---|---|---|---|---|
| h200-8b | Llama-3.1-8B | 1 x H200 | bfloat16, 16 GB | 131,072 bytes |
| h200-70b | Llama-3.1-70B | 4 x H200, tensor parallel | bfloat16, 141 GB | 327,680 bytes |
| h200-moe | Qwen3-235B-A22B | 4 x H200, tensor parallel | fp8, 236 GB | 192,512 bytes |

Worked out for h200-8b: 32 layers of 41.9 M (attention) and 176.2 M (MLP) parameters are 6.98 B, the head .53 B: 15.0 GB
to read at 3.84 TB/s (.8 of 4.8) are 3.9 ms, and .5 ms beside it. A row is 15.0 GFLOP, 25 us at 593 TFLOP/s (.6 of 989).
Reading and multiplying meet at 155 rows: 155 plain requests, or 19 that verify 7 drafts each.

h200-moe at one row reads 8 of 128 experts of each of 94 layers; 8 rows (one request, 7 drafts) read 52 of them, 64 rows
126. So drafts are dear for a single request and nearly free for some hundred.

Drafters beside them, on the same GPUs, reckoned like the target; sizes as their papers have them:

| name | one drafting call |
|---|---|
| dspark | a pass of 5 layers of the target's width and its head, K rows a request; K steps of a 256-wide Markov head |
| dflash | the same without those steps |
| eagle3 | K passes of one layer that reads two vectors, 3 fused features, a head of 32,000 tokens |
| small | K passes of Llama-3.2-1B, Llama-3.1-8B (70B target) or Qwen3-1.7B (MoE target) |
| ngram | a look-up on the host: 30 us, 2 us more for each request |

Keeping up with a request costs a learned drafter its fused features and the keys and values made of them, for each row;
`small` all its layers, but not before it drafts again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.bench.simulate.roofline import BANDWIDTH_SHARE, H200, PASS_OVERHEAD, RATE_SHARE, Placement, Shape
from forerun.budget.costs import ContextCost, DraftCost
from forerun.budget.profile import Profile, ProfileKey
from forerun.errors import OptionError, nearest

LLAMA_8B = Shape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256)
LLAMA_70B = Shape("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256)
LLAMA_1B = Shape("Llama-3.2-1B", 16, 2048, 32, 8, 64, 8192, 128256)
QWEN_MOE = Shape("Qwen3-235B-A22B", 94, 4096, 64, 4, 128, 1536, 151936, 128, 8, weight_bytes=1)
QWEN_2B = Shape("Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 151936)
"""From the models' config.json."""

MARKOV_RANK = 256
MARKOV_STEP = 15e-6
"""Seconds of one step of the chain beside its product (assumed)."""
LOOKUP, LOOKUP_ROW = 30e-6, 2e-6
"""Seconds of a look-up, and of each further request (assumed)."""
LENGTHS = (1, 2, 4, 8, 16)
REQUESTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096)

CallSeconds = Callable[[int, int], float]
"""`seconds(requests, k)` of a drafting call."""


@dataclass(frozen=True)
class System:
    """Costs, and the limits that go with them."""

    name: str
    profile: Profile
    modelled: bool
    kv_tokens: int | None = None
    """Tokens whose keys and values fit; None: memory is no limit."""
    max_num_batched_tokens: int = 8192


def system(name: str) -> System:
    """A modelled system by name, or the profile in a file.

    Raises:
        OptionError: no such name or file, or a file that is no profile.
    """
    if name in MODELLED:
        return MODELLED[name]()
    path = Path(name)
    if not path.is_file():
        raise OptionError("--profile", f"{name!r} is neither a file nor a modelled system; {nearest(name, MODELLED)}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError("--profile", f"cannot read {path}: {error}") from None
    return System(path.name, Profile.loads(text), modelled=False, max_num_batched_tokens=1024)


def _modelled(name: str, target: Placement, small: Shape) -> System:
    key = ProfileKey(
        target.shape.name,
        "fp8" if target.shape.weight_bytes == 1 else "bfloat16",
        f"{target.gpus} x {target.device.name} (modelled, not measured)",
        0,
    )
    profile = Profile(key, target.verify(), drafts(target, small))
    return System(name, profile, modelled=True, kv_tokens=target.kv_tokens)


def drafts(target: Placement, small: Shape) -> Mapping[str, DraftCost]:
    """Costs of every kind of drafter beside a target, on the same GPUs."""
    shape = target.shape
    keys = 2 * shape.hidden * shape.kv_heads * shape.head_dim  # K and V of one layer, of one vector
    model, one = _beside(target, small), _beside(target, _eagle_shape(shape))
    block = _beside(target, _block_shape(shape))
    taken_in = block.operations(5 * shape.hidden**2 + 5 * keys)
    return {
        "ngram": _cost(lambda requests, k: LOOKUP + LOOKUP_ROW * (requests - 1)),  # noqa: ARG005 - any K
        "small": _serial(model, model.operations(small.dense)),
        "eagle3": _serial(one, one.operations(3 * shape.hidden**2 + 2 * keys)),
        "dflash": _block(block, taken_in),
        "dspark": _block(block, taken_in, markov=True),
    }


def _beside(target: Placement, shape: Shape) -> Placement:
    return Placement(shape, target.device, target.gpus, PASS_OVERHEAD)


def _block_shape(target: Shape) -> Shape:
    """Five dense layers of the target's width; features of five of its layers are fused: 5 H x H."""
    width = target.ffn if not target.experts else 3 * target.hidden
    fused = 5 * target.hidden**2
    name = f"5 layers of {target.hidden}"
    dense = replace(target, name=name, layers=5, ffn=width, experts=0, experts_per_token=0, weight_bytes=2)
    return replace(dense, fused=fused)


def _eagle_shape(target: Shape) -> Shape:
    """One dense layer whose q, k and v read two vectors side by side, features of three layers, a head of 32,000."""
    one = replace(_block_shape(target), name="EAGLE-3", layers=1, vocab=32_000)
    second = target.hidden * target.head_dim * (target.heads + 2 * target.kv_heads)
    return replace(one, fused=3 * target.hidden**2 + second)


def _serial(model: Placement, follow: float) -> DraftCost:
    """K passes of one row for each request; each of them reads the context again."""
    read = model.context()
    per_row = tuple(map(sum, zip(read.per_request, read.per_row, strict=True)))
    context = ContextCost(read.contexts, (0.0,) * len(read.contexts), per_row)
    return _cost(lambda requests, k: k * model.seconds(requests), context, follow)


def _block(model: Placement, follow: float, markov: bool = False) -> DraftCost:
    """One pass of K rows for each request, then K steps that add W2 W1[x] to the logits of all requests."""
    table = 2 * MARKOV_RANK * model.shape.vocab
    bandwidth = model.gpus * model.device.bandwidth * BANDWIDTH_SHARE
    rate = model.gpus * model.device.rate * RATE_SHARE

    def seconds(requests: int, k: int) -> float:
        step = MARKOV_STEP + max(table / bandwidth, table * requests / rate) if markov else 0.0
        return model.seconds(requests * k) + k * step

    return _cost(seconds, model.context(), follow)


def _cost(seconds: CallSeconds, context: ContextCost | None = None, follow: float = 0.0) -> DraftCost:
    return DraftCost.measured({k: {n: seconds(n, k) for n in REQUESTS} for k in LENGTHS}, context, follow)


MODELLED: Mapping[str, Callable[[], System]] = {
    "h200-8b": lambda: _modelled("h200-8b", Placement(LLAMA_8B, H200), LLAMA_1B),
    "h200-70b": lambda: _modelled("h200-70b", Placement(LLAMA_70B, H200, gpus=4), LLAMA_8B),
    "h200-moe": lambda: _modelled("h200-moe", Placement(QWEN_MOE, H200, gpus=4), QWEN_2B),
}

__all__ = ["MODELLED", "System", "drafts", "system"]
