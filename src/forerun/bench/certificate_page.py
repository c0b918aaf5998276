"""A certificate as one page of Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forerun.bench.certificate import Certificate
from forerun.bench.checks import Check

MEANING = """\
- **exact**: on targets of two or three tokens the whole engine is run through every possible outcome; its law must be
  the target's own to 1e-12. **control**: the same comparison on engines that cheat; each must be found out.
- **equal ids**, **greedy**, **coupled**: the ids must be those of plain decoding. In bfloat16 and float16 a
  difference is accepted only where plain decoding's choice was nearer than the noise between passes of one row and of
  several (margin < noise), and the comparison goes on behind it. In float32 none is accepted.
- **sampled**: tokens 2 and 3 of many samples against the target's probabilities (chi-square); what a fault would have
  to amount to for the tests to find it is stated with each.
- **parameter**: each option once against plain decoding, greedy and coupled.
- a check is **void** where there was nothing to check, such as a drafter that drafted nothing: its claim stays open.

What it cannot show: prompts and options that were not tried, faults smaller than the stated power, another machine,
dtype or version. Equality is claimed with plain decoding of this same engine."""


def markdown(certificate: Certificate) -> str:
    """The page: verdict, what it was made with, every check."""
    return "\n".join(_lines(certificate)) + "\n"


def _lines(certificate: Certificate) -> Iterator[str]:
    checks = certificate.checks
    passed = sum(check.passed for check in checks)
    verdict = certificate.verdict
    yield f"# {verdict[0].upper()}{verdict[1:]}: {passed} of {len(checks)} checks passed"
    yield ""
    yield from _made_with(certificate)
    yield ""
    yield "| | check | result |"
    yield "|---|---|---|"
    yield from (_row(check) for check in sorted(checks, key=lambda check: (check.passed, check.void)))
    yield ""
    yield MEANING


def _made_with(certificate: Certificate) -> Iterator[str]:
    made, options = certificate.provenance, certificate.options
    hardware = made["hardware"]
    yield f"- target: {_model(made['target'])}"
    for drafter in made["drafters"]:
        own = f" with {_model(drafter['model'])}" if "model" in drafter else ""
        yield f"- drafter: {drafter['name']}{own}"
    yield (
        f"- hardware: {hardware['name']} ({hardware['device']}), {hardware['cores']} cores, "
        f"{hardware['threads']} threads"
    )
    yield f"- versions: {', '.join(f'{name} {version}' for name, version in made['versions'].items())}"
    yield f"- code: {made['code']}"
    yield (
        f"- tried: {certificate.prompts} prompts, up to {options.max_tokens} tokens, K up to {options.max_draft}, "
        f"seed {options.seed}; {made['created']}, {certificate.seconds:.0f} s"
    )


def _model(model: dict[str, Any]) -> str:
    hashes = model["fingerprint"]
    return f"`{model['name']}`, {model['dtype']}" + (f", weights {hashes['weights']}" if hashes else "")


def _row(check: Check) -> str:
    detail = check.detail.replace("|", "\\|")
    result = "pass" if check.passed else "**void**" if check.void else "**FAIL**"
    return f"| {result} | {check.name} | {detail} |"
