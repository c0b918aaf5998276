"""The certificate passes where decoding is lossless and fails where it is not: for every part that makes a claim."""

from __future__ import annotations

import json

import pytest
import torch

from bench.lossy import Flattened
from forerun.bench import agreement, chisquare, exact
from forerun.bench.certificate import Certificate, CertificateOptions, Certifier
from forerun.bench.certificate_page import markdown
from forerun.bench.checks import Check, SampledResult, noise_check, sampled_check
from forerun.bench.provenance import provenance
from forerun.bench.sampled import Draws, Power
from forerun.cli.main import main
from forerun.drafters.fake import Oracle
from forerun.drafters.ngram import Ngram
from forerun.drafters.small import Small
from forerun.engine import DecodingStats, Engine, EngineOptions, judge
from forerun.engine.load import load_drafters
from forerun.engine.reference import decode
from forerun.engine.request import Request
from forerun.sampling import Noise, Row, Sampling, TokenLogprob
from forerun.target.table import history_model
from forerun.verify import Verdict

VOCAB = 7
PROMPTS = [[0, 5, 5, 2, 1, 6, 3, 3, 2, 1, 0, 4, 4, 5], [1, 2, 3]]
REAL_PARTS = ("greedy", "coupled", "parameters", "sampled")


def _target(seed: int = 3):
    return history_model(VOCAB, seed=seed, window=256)


def _certifier(*drafters, samples: int = 600):
    target = _target()
    options = EngineOptions(num_speculative_tokens=3)
    engine = Engine(target, load_drafters(list(drafters), target, options), options)
    return Certifier(engine, PROMPTS, CertificateOptions(max_draft=3, max_tokens=14, samples=samples))


def _small(seed: int = 3):
    """The target itself as a drafter (seed 3), or a stranger to it."""
    return Small(_target(seed), VOCAB)


def _failed(checks):
    return [check.name for check in checks if not check.passed]


def test_a_certificate_says_which_weights_drafted():
    """Of a trained drafter too: two folders may have one name."""
    engine = Engine.load("embedded", drafter="eagle", max_num_seqs=1)
    [entry] = provenance(engine)["drafters"]
    assert entry["model"]["name"] == "eagle"
    assert entry["model"]["dtype"] == "bfloat16"
    network = engine.core.loaded[0].drafter.network
    with torch.no_grad():
        next(network.parameters()).add_(1)
    [other] = provenance(engine)["drafters"]
    assert other["model"]["fingerprint"] != entry["model"]["fingerprint"]


# ------------------------------------------------------------------------------------------------------------ lossless


@pytest.mark.parametrize("part", REAL_PARTS)
@pytest.mark.parametrize("drafters", [lambda: [_small()], lambda: [_small(8), Ngram(3, 1)]], ids=["perfect", "poor"])
def test_lossless_drafters_pass_every_part(part, drafters):
    """A perfect drafter, one that is hardly ever right, and n-grams: each is exercised and nothing is found."""
    checks = _certifier(*drafters()).part(part)
    assert checks
    assert _failed(checks) == []


def test_the_oracle_passes_and_is_always_accepted():
    """Greedy with what plain decoding will say: all drafts accepted, all outputs equal."""
    target = _target()
    target.allocate(32)
    sampling = Sampling(temperature=0, max_tokens=14)
    known = {tuple(p): decode(target, p, sampling, Noise.of(0)) for p in PROMPTS}
    [check] = _certifier(Oracle(known)).part("greedy")
    assert check.passed
    stats = check.numbers["stats"]
    assert stats["accepted"] == stats["verified"] > 0


def test_what_is_claimed_on_exact_targets_holds():
    """Equal ids through batching and preemption, noise with the right law, parameters on a target without rounding."""
    certifier = _certifier(_small())
    assert _failed(certifier.part("equal ids, exact targets")) == []
    assert _failed(certifier.part("parameters, exact target")) == []


def test_eq_2_every_k_alone_and_a_batch_none_observed_to_differ(tiny_qwen3_dir, tiny_small_dir):
    """A tiny float32 transformer, greedy, each K in 1..8 separately, with the smallest margins printed.

    https://github.com/vllm-project/vllm/issues/5313, https://github.com/vllm-project/vllm/issues/10913,
    https://github.com/vllm-project/vllm/issues/41758
    """
    drafters = ["ngram", {"method": "small", "model": str(tiny_small_dir)}]
    engine = Engine.load(str(tiny_qwen3_dir), drafter=drafters, num_speculative_tokens=8)
    prompts = [engine.target.tokenizer.encode(text) for text in ("def area(r):", "a b a b a b")]
    checks = Certifier(engine, prompts, CertificateOptions(max_tokens=14)).part("greedy")
    assert [check.name for check in checks] == ["greedy: ngram", "greedy: small"]
    assert _failed(checks) == []
    assert all(check.numbers["outputs"] == 2 * 8 + 2 for check in checks)
    assert all(len(check.numbers["smallest_margins"]) == 3 for check in checks)


# --------------------------------------------------------------------------------------------------------------- lossy


def _blind(drafts, target_probs, accept_uniforms, final_uniforms):
    rows, end = [], 0
    for draft in drafts:
        end += len(draft.tokens) + 1
        rows.append(end - 1)
    accepted = torch.tensor([len(draft.tokens) for draft in drafts])
    return Verdict(accepted, target_probs[rows].argmax(-1))


def _blind_coupled(drafts, target_probs, gumbel):
    return _blind(drafts, target_probs, None, None)


def _stale(one, real=judge._Watched.places):
    return [Row(row.sampling, row.tokens, row.prompt_length, (), row.end_ids) for row in real(one)]


def _ends_late(self, run, accepted, real=Request.commit):
    """Stop rules looked at only after the whole run: what follows a stop stays visible (ST-1)."""
    kept = real(self, run, accepted)
    if kept < len(run) and self.finish_reason == "stop":
        self.tokens += run[kept:]
        self.from_draft += [True] * (len(run) - kept)
        return len(run)
    return kept


def _logprobs_of_first_row(scores, tokens, top, real=judge.logprobs):
    """Log-probabilities right for the first token of a run only (LP-1)."""
    found = real(scores, tokens, top)
    return [found[0], *(TokenLogprob(one.token_id, 0.0, one.top) for one in found[1:])]


FAULTS = {
    "everything accepted": (judge, "reject_packed", _blind, {"exact", "greedy", "sampled"}),
    "everything accepted when coupled": (judge, "couple_packed", _blind_coupled, {"coupled", "parameters"}),
    "penalties frozen over a block": (judge._Watched, "places", _stale, {"parameters", "parameters, exact target"}),
    "stop rules after the block": (Request, "commit", _ends_late, {"parameters", "parameters, exact target"}),
    "logprobs of a run's first token": (judge, "logprobs", _logprobs_of_first_row, {"parameters"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_engine_fails_the_parts_it_concerns(monkeypatch, name):
    """The engine is broken in one place; the certificate must say no, and name the part."""
    home, attribute, wrong, parts = FAULTS[name]
    monkeypatch.setattr(exact, "cases", lambda real=exact.cases: [c for c in real() if c.name == "small, K = 1"])
    certifier = _certifier(_small(8), Ngram(3, 1))
    monkeypatch.setattr(home, attribute, wrong)
    for part in parts:
        assert _failed(certifier.part(part)), f"{part} did not notice"


def test_a_drafter_that_reports_a_wrong_law_fails_the_sampled_part():
    """Drawn from one law and reported as a flatter one: chi-square finds what ids cannot show."""
    certifier = _certifier(Flattened(_target(), VOCAB))
    [check] = certifier.part("sampled")
    assert not check.passed
    assert check.numbers["token_2"]["corrected_p_value"] < 1e-6
    assert _failed(certifier.part("greedy")) == []


@pytest.mark.parametrize("part", ["greedy", "coupled", "sampled"])
def test_a_drafter_that_never_drafts_proves_nothing(part):
    """It is no evidence for the claim, nor against it: the check is void and says what to change."""
    certifier = _certifier(Ngram(12, 12), samples=100)
    [check] = certifier.part(part)
    assert (check.passed, check.void) == (False, True)
    assert check.detail.endswith("give other --prompts or more --max-tokens, or lower confidence_threshold")


@pytest.mark.parametrize(("drafting_rounds", "void"), [(49, True), (50, False)])
def test_samples_that_hardly_had_a_draft_are_no_evidence(drafting_rounds, void):
    """Rounds without a draft are plain decoding. Where a policy skips them, the policy is what to leave out."""
    tested = chisquare.Tested(5.0, 6, 0.5, 1000)
    stats = DecodingStats(
        verified=drafting_rounds, drafting_rounds=drafting_rounds, target_steps=1000, skipped_steps={"gain": 900}
    )
    check = sampled_check(SampledResult("small", (tested, tested), (1.0, 1.0), stats), Draws(1000, 1.5), Power(), 2)
    assert (check.passed, check.void) == (not void, void)
    assert ("leave out --policy" in check.detail) == void


def test_wrong_noise_is_found(monkeypatch):
    """Coupled draws with noise that is not Gumbel are draws from another law."""
    monkeypatch.setattr(Noise, "gumbel", lambda self, position, size: self.uniforms(position, 3, size))
    assert not noise_check("noise", agreement.coupled_noise(), alarm=0.01).passed


def test_a_part_that_breaks_is_a_failed_check(monkeypatch):
    """An exception out of the engine is a finding; what was found before it stays."""

    def broken(*args):
        raise RuntimeError("no verdict today")

    certifier = _certifier(_small())
    monkeypatch.setattr(judge, "reject_packed", broken)
    [check] = certifier.part("greedy")
    assert not check.passed
    assert "no verdict today" in check.detail


def test_an_empty_certificate_is_not_lossless():
    """No check, no claim, nor with one that had nothing to check; one failed check among many is enough."""
    good, bad, void = Check("a", True, ""), Check("b", False, ""), Check("c", False, "", void=True)
    cases = [[], [good], [good, void], [void, good, bad]]
    made = [Certificate(checks, {}, CertificateOptions(), 1, 0.0) for checks in cases]
    assert [one.verdict for one in made] == ["not proven", "lossless", "not proven", "NOT lossless"]
    assert [one.lossless for one in made] == [False, True, False, False]


# ------------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def quick(monkeypatch):
    """Fewer cases on tiny targets: those have tests of their own."""
    monkeypatch.setattr(exact, "cases", lambda real=exact.cases: real()[:1])
    monkeypatch.setattr(agreement, "PAIRS", (("history", "coupled"),))
    monkeypatch.setattr(agreement, "coupled_noise", lambda real=agreement.coupled_noise: real(2_000))
    monkeypatch.setattr(agreement, "uniform_noise", lambda real=agreement.uniform_noise: real(1_000))


PROMPT = ["--prompt", "def area(r):\n"]
ARGS = [*PROMPT, "--max-tokens", "8", "--num-speculative-tokens", "2", "--samples", "200", "--json"]


def test_the_command_certifies_a_pair(quick, capsys, tmp_path, tiny_qwen3_dir, tiny_small_dir):
    """Exit code 0, JSON with `lossless` and `checks` on stdout, page and report in files."""
    files = ["--output", str(tmp_path / "cert"), "--temperature", "0.7"]
    code = main(["verify", "--target", str(tiny_qwen3_dir), "--drafter", str(tiny_small_dir), *files, *ARGS])
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report["lossless"] is True
    assert report["options"]["temperature"] == 0.7
    assert all(set(check) >= {"name", "passed", "detail"} for check in report["checks"])
    assert {"sampled: small", "greedy: small", "coupled: small"} <= {check["name"] for check in report["checks"]}
    assert json.loads((tmp_path / "cert.json").read_text()) == report
    page = (tmp_path / "cert.md").read_text()
    assert page.startswith(f"# Lossless: {len(report['checks'])} of {len(report['checks'])}")
    assert report["target"]["fingerprint"]["weights"] in page


def test_the_command_says_that_nothing_was_proven(monkeypatch, capsys, tiny_qwen3_dir):
    """Exit code 3, a verdict of its own, and which checks had nothing to check."""
    parts = property(lambda self: {"greedy": self._greedy})
    monkeypatch.setattr(Certifier, "parts", parts)
    flags = ["--target", str(tiny_qwen3_dir), "--drafter", "ngram", "--speculative-config.prompt_lookup_min", "40"]
    assert main(["verify", *flags, *ARGS[:-1]]) == 3
    assert capsys.readouterr().out.splitlines()[-1] == "not proven: 1 checks had nothing to check: greedy: ngram"


def test_the_command_fails_a_lossy_engine(quick, monkeypatch, capsys, tiny_qwen3_dir):
    """Exit code 1 and lossless: false."""
    monkeypatch.setattr(judge, "reject_packed", _blind)
    code = main(["verify", "--target", str(tiny_qwen3_dir), "--drafter", "ngram", *ARGS])
    report = json.loads(capsys.readouterr().out)
    assert code == 1
    assert report["lossless"] is False
    failed = {check["name"] for check in report["checks"] if not check["passed"]}
    assert "exact: small, K = 1" in failed


@pytest.mark.slow
def test_the_command_fails_a_lossy_drafter(quick, capsys, tiny_qwen3_dir):
    """A user's own drafter that reports another law than it drew from: exit code 1, by the sampled part alone."""
    config = {"method": "bench.lossy:Flattened", "model": str(tiny_qwen3_dir)}
    code = main(
        [
            "verify",
            "--target",
            str(tiny_qwen3_dir),
            "--speculative-config",
            json.dumps(config),
            *ARGS,
            "--samples",
            "1500",
        ]
    )
    report = json.loads(capsys.readouterr().out)
    assert code == 1
    assert [c["name"] for c in report["checks"] if not c["passed"]] == ["sampled: flattened"]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--drafter", "vanilla"], "--drafter"),
        (["--verify-mode", "coupled"], "--verify-mode"),
        (["--samples", "5"], "--samples"),
        (["--max-tokens", "1"], "--max-tokens"),
        (["--limit", "0"], "--limit"),
        (["--temperature", "0"], "--temperature"),
        (["--temperature", "nan"], "--temperature"),
        (["--seed", str(2**63)], "--seed"),
        (["--num-speculative-tokens", "0"], "--num-speculative-tokens"),
        (["--output", "/no/such/folder/cert"], "--output"),
    ],
)
def test_what_cannot_be_verified_is_refused_before_loading(capsys, args, named):
    """Exit code 2 and one line that names the option."""
    assert main(["verify", "--target", "does-not-exist-anywhere", *args]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"error: {named}:")


def test_a_prompt_that_is_too_long_is_no_finding(capsys, tmp_path, tiny_qwen3_dir):
    """Exit code 2 with its line, before anything is checked: it says nothing of losslessness."""
    (tmp_path / "prompts.txt").write_text("short\n" + "x" * 300 + "\n")
    args = ["--prompts", str(tmp_path / "prompts.txt"), "--limit", "2", "--output", str(tmp_path / "cert")]
    assert main(["verify", "--target", str(tiny_qwen3_dir), "--drafter", "ngram", *args]) == 2
    ran = capsys.readouterr()
    assert ran.out == ""
    assert ran.err == "error: --prompts: line 2: has 300 tokens; the window of 256 leaves room for 255\n"
    assert not list(tmp_path.glob("cert*"))


def test_the_page_shows_failures_first():
    """A reader sees what failed without scrolling."""
    checks = [Check("fine", True, "a|b"), Check("broken", False, "c")]
    engine = _certifier(_small()).engine
    page = markdown(Certificate(checks, provenance(engine), CertificateOptions(), 2, 1.0))
    assert page.startswith("# NOT lossless: 1 of 2")
    assert page.index("**FAIL** | broken") < page.index("pass | fine")
    assert "a\\|b" in page
