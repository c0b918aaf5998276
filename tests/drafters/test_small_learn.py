"""Distilling a small model: what is taught, to what law, in which vocabulary; and the folder that is left."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from drafters.learning import always, batch_of, plan_for, texts, view_of
from drafters.overfit import SAMPLING, taught_and_used
from forerun import Engine, Sampling
from forerun.drafters.base import LoadContext
from forerun.drafters.config import parse_config
from forerun.drafters.learned import DesignPlan
from forerun.drafters.losses import compare
from forerun.drafters.small import Small, learn
from forerun.drafters.small.config import SmallSettings
from forerun.drafters.small.learn import SmallLearner, taught_rows
from forerun.errors import DoesNotFit, ModelError, OptionError, VocabularyMismatch
from forerun.target.dtypes import dtype_named
from forerun.target.load import load_target
from forerun.target.table import history_model
from forerun.training.config import choose
from tiny import qwen3_config, save_tokenizer

V = 264
KNOWN = 259
"""Ids of the tiny tokenizer: the rest of the target's columns are padding."""


@pytest.fixture(scope="module")
def target(tiny_qwen3_dir):
    return load_target(tiny_qwen3_dir)


@pytest.fixture
def small_of(tmp_path):
    """`small_of(columns)`: the folder of a random model of two layers with the target's tokenizer."""
    from transformers import Qwen3ForCausalLM

    def make(columns: int = V, **fields) -> str:
        folder = tmp_path / f"small-{columns}"
        config = qwen3_config(2)
        config.vocab_size = columns
        for name, value in fields.items():
            setattr(config, name, value)
        torch.manual_seed(5)
        Qwen3ForCausalLM(config).save_pretrained(folder)
        save_tokenizer(folder)
        return str(folder)

    return make


def design(target, dtype="float32", **settings) -> SmallLearner:
    plan = DesignPlan(training_length=64, token_counts=torch.ones(target.vocab_size), dtype=dtype, seed=0)
    return SmallLearner.design(target, SmallSettings(**settings), plan)


def losses_of(learner, batch):
    exercise = learner.prepare(batch, torch.Generator())
    return learner.losses(batch, exercise, 0.0)


# -------------------------------------------------------------------------------------------------------------- losses


def test_a_row_is_taught_if_the_next_token_of_its_text_is_the_targets(target):
    """Rows before tokens under the mask; never the last row of a text, whose successor begins another one."""
    batch = batch_of(target, texts((4, 1, 6)), (), learned_from=2)
    # text 0: tokens 2, 3 at rows 2, 3; text 1 has one token; text 2: tokens 2 .. 5 at rows 7 .. 10
    assert taught_rows(batch).tolist() == [1, 2, 6, 7, 8, 9]
    assert design(target).prepare(batch, torch.Generator()).weight == 6
    whole = batch_of(target, texts((3, 2)), (), learned_from=0)
    assert taught_rows(whole).tolist() == [0, 1, 3]


@pytest.mark.parametrize("settings", [{}, {"ce": "hard"}, {"ce_weight": 0.3, "l1_weight": 0.7}])
def test_the_objective_is_its_formula(target, small_of, settings):
    """Against both laws over all columns, written out; the sum over the taught rows, and the metrics with it."""
    learner = design(target, model=small_of(), **settings)
    batch = batch_of(target, texts((9, 14)), (), learned_from=4)
    out, rows = losses_of(learner, batch), taught_rows(batch)
    student = learner.network
    logits = student.logits(student(batch.tokens, batch.positions, batch.lengths))[rows]
    draft = logits[:, :KNOWN].double().softmax(-1)
    teacher = target.logits(target.final_norm(batch.last[rows])).double().softmax(-1)
    soft = -(teacher[:, :KNOWN] * draft.log()).sum(-1)
    hard = -draft.log().gather(-1, batch.tokens[rows + 1][:, None])[:, 0]
    l1 = (draft - teacher[:, :KNOWN]).abs().sum(-1) + teacher[:, KNOWN:].sum(-1)
    ce = hard if settings.get("ce") == "hard" else soft
    expected = settings.get("ce_weight", 1.0) * ce + settings.get("l1_weight", 0.0) * l1
    assert out.total.item() == pytest.approx(expected.sum().item(), rel=1e-5)
    accepted = torch.minimum(draft, teacher[:, :KNOWN]).sum().item()
    for name, value in (("soft_ce", soft.sum()), ("ce", hard.sum()), ("l1", l1.sum())):
        assert out.metrics[name] == (pytest.approx(value.item(), rel=1e-5), len(rows))
    assert out.metrics["teacher_forced_acceptance@1"] == (pytest.approx(accepted, rel=1e-5), len(rows))


def test_the_normaliser_changes_nothing(target, small_of):
    """A batch that knows the log-sum-exp of the teacher's logits gives the same losses by the partial head."""
    learner = design(target, model=small_of())
    batch = batch_of(target, texts((9, 14)), (), learned_from=4)
    known = target.logits(target.final_norm(batch.last)).logsumexp(-1)
    with_it = type(batch)(batch.tokens, batch.lengths, batch.loss_mask, batch.features, batch.last, known)
    assert losses_of(learner, with_it).total.item() == pytest.approx(losses_of(learner, batch).total.item(), rel=1e-5)


def test_gradients_by_chunks_are_those_of_the_whole(target, small_of, monkeypatch):
    """Three rows of logits at a time, computed again in the backward pass, against all at once: every parameter."""
    batch, gradients = batch_of(target, texts((12, 15)), (), learned_from=3), []
    folder = small_of()
    for rows in (3, 1000):
        monkeypatch.setattr("forerun.drafters.small.learn.chunk_rows", lambda _, rows=rows: rows)
        learner = design(target, model=folder, l1_weight=0.5)
        losses_of(learner, batch).total.backward()
        gradients.append({name: parameter.grad for name, parameter in learner.network.named_parameters()})
    chunked, dense = gradients
    for name, gradient in dense.items():
        assert gradient.abs().max() > 0, name
        assert torch.allclose(chunked[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max())), name


def test_a_batch_with_nothing_to_learn_has_a_loss_of_nothing(target):
    """Weight 0 and no gradient: other micro-batches of the step may have more."""
    learner = design(target)
    batch = batch_of(target, texts((5,)), (), learned_from=5)
    assert learner.prepare(batch, torch.Generator()).weight == 0
    losses_of(learner, batch).total.backward()
    assert not any(p.grad is not None and p.grad.any() for p in learner.network.parameters())


# ---------------------------------------------------------------------------------------------------------- vocabulary


@pytest.mark.parametrize("columns", [V, KNOWN, 300, 250])
def test_the_law_that_is_taught_is_the_law_that_is_drafted(target, small_of, columns, monkeypatch):
    """Training logits over the shared ids at every row = the law the decoding copy draws from after that row (to 1e-4);
    nothing on other ids. Equal, smaller and larger tables, and one that lacks ids of the text itself.
    """
    learner = design(target, model=small_of(columns))
    shared = min(columns, KNOWN)
    assert learner.shared_ids == shared
    text = [*texts((39,))[0], 255, 254, 258, 7]
    batch = batch_of(target, [[1, 2, 3], text], (), learned_from=1)
    seen = []
    monkeypatch.setattr(learn, "compare", lambda *compared: seen.append(compared) or compare(*compared))
    with torch.no_grad():
        losses_of(learner, batch)
    [(logits, target_probs, labels)] = seen
    assert logits.shape == target_probs.shape == (2 + len(text) - 1, shared)
    assert [int(label) for label in labels[2:]] == [token if token < shared else -1 for token in text[1:]]
    drafter = learner.for_decoding(torch.float32)
    drafter.allocate(16)
    for length in (1, 5, 39, 41, 42):
        view = view_of(text[:length], 1, request_id=length, sampling=Sampling(temperature=1))
        [draft] = drafter.propose([view], always)
        law = logits[2 + length - 1].double().softmax(-1)
        assert torch.allclose(draft.probs[0, :shared].double(), law, rtol=0, atol=1e-4)
        assert float(draft.probs[0, shared:].sum()) == 0


def test_another_tokenizer_is_refused(target, small_of):
    """By the ids that stand for different strings."""
    with pytest.raises(VocabularyMismatch, match="different vocabularies: of 259 common ids"):
        design(target, model=renamed(small_of()))


def renamed(folder: str) -> str:
    """The same model with two ordinary tokens of its tokenizer in each other's places."""
    from pathlib import Path

    file = Path(folder) / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content))
    return folder


# ------------------------------------------------------------------------------------------------- what it begins with


def test_without_a_model_it_is_cut_from_the_target(target):
    """A sixth of the layers, at least one, or as many as are asked for; with all of them the law is the target's, so
    that a draft is refused only for the target's mass on padding.
    """
    assert len(design(target).network.anatomy.layers) == 1
    learner = design(target, layers=3)
    assert len(learner.network.anatomy.layers) == target.num_layers
    assert learner.notes == (f"it begins as layers 0, 1, 2 of 3 of {target.name}, those that change the most",)
    batch = batch_of(target, texts((20,)), ())
    accepted, _ = losses_of(learner, batch).metrics["teacher_forced_acceptance@1"]
    known = learner.target_probs(batch.last[taught_rows(batch)])  # [n, KNOWN]
    assert accepted == pytest.approx(float(known.sum()), rel=1e-5)
    with pytest.raises(OptionError, match=r"^layers: .* has 3"):
        design(target, layers=4)


def test_what_cannot_be_cut_needs_a_model(target):
    """A table has no layers."""
    with pytest.raises(OptionError, match=r"^model: .*name one to begin with"):
        SmallLearner.design(history_model(7, seed=3), SmallSettings(), plan_for(target))


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"model": "x", "layers": 2}, "--draft.layers"),
        ({"revision": "main"}, "--draft.revision"),
        ({"ce_weight": 0, "l1_weight": 0}, "--draft.ce-weight"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, option):
    """By the flag that is wrong: none is silently left out."""
    with pytest.raises(OptionError) as refused:
        choose("small", {"data": "d", "out": "o"}, settings)
    assert refused.value.option == option
    assert str(refused.value).startswith(f"{option}: ")


def test_a_model_that_cannot_be_used_is_not_blamed_on_the_target(target, tmp_path, small_of, monkeypatch):
    """Missing, with a shorter window than the samples, or too large to be trained here: each names its option."""
    with pytest.raises(ModelError, match=r"^--draft.model: .*nowhere"):
        design(target, model=str(tmp_path / "nowhere"))
    with pytest.raises(OptionError, match=r"^--max-length: .* up to 64 tokens, .* takes 50"):
        design(target, model=small_of(max_position_embeddings=50))
    monkeypatch.setattr("forerun.target.checkpoint.available_memory", lambda device: 100_000)
    with pytest.raises(DoesNotFit, match=r"^--draft.model: .* x 4 bytes \(float32\) x 4.4 to train"):
        design(target, model=small_of())


# ---------------------------------------------------------------------------------------------------------- the folder


def shaken(learner: SmallLearner) -> SmallLearner:
    """With weights that bfloat16 rounds."""
    with torch.no_grad():
        for parameter in learner.network.parameters():
            parameter.mul_(1.001)
    return learner


def drafts(drafter: Small) -> list[torch.Tensor]:
    drafter.allocate(16)
    views = [view_of(text, 4, request_id=i, sampling=Sampling(temperature=1)) for i, text in enumerate(texts((5, 40)))]
    return [draft.probs for draft in drafter.propose(views, always)]


@pytest.mark.parametrize(("saved", "decoding"), [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32",) * 2])
def test_the_decoding_copy_is_what_is_loaded_later(target, tmp_path, saved, decoding):
    """`for_decoding` and saving, loading: the same laws, bit by bit; training goes on untouched."""
    learner = shaken(design(target, layers=2, dtype=saved))
    before = {name: tensor.clone() for name, tensor in learner.network.state_dict().items()}
    copied = drafts(learner.for_decoding(dtype_named(decoding)))
    learner.save(tmp_path)
    loaded = Small.load({"model": str(tmp_path)}, LoadContext(target, dtype=decoding))
    assert all(torch.equal(one, other) for one, other in zip(copied, drafts(loaded), strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.network.state_dict().items())
    assert all(parameter.requires_grad for parameter in learner.network.parameters())


def test_the_folder_is_an_ordinary_models(target, tmp_path):
    """transformers loads it whole, with tokenizer and generation config, and gives the trained logits; forerun takes
    it for a target and for a `small` drafter. Saving again replaces every file and leaves nothing else behind.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    learner = design(target, layers=2)
    (tmp_path / "README.md").write_text("kept")
    learner.save(tmp_path)
    shaken(learner).save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "README.md", "chat_template.jinja", "config.json", "forerun.json", "generation_config.json",
        "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # the umask's
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == target.model.generation_config.eos_token_id
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template == target.tokenizer.chat_template
    assert tokenizer.encode("def f") == target.tokenizer.encode("def f")
    text = torch.tensor(texts((20,)))
    student = learner.network
    trained = student.logits(student(text[0], torch.arange(20), [20]))
    assert torch.allclose(model(text).logits[0], trained, atol=1e-4)
    assert load_target(tmp_path).num_layers == 2
    assert parse_config(str(tmp_path)).name == "small"


def test_it_remembers_what_it_was_distilled_from(target, tmp_path, small_of, caplog):
    """Beside the model, with its settings. For another target it says so and drafts all the same; a record that cannot
    be read is an error.
    """
    design(target, layers=2).save(tmp_path)
    record = json.loads((tmp_path / "forerun.json").read_text())
    assert (record["method"], record["target_name"]) == ("small", target.name)
    assert record["target_fingerprint"]["weights"]
    assert len(record["begun_as"]["layers"]) == 2
    assert record["settings"]["layers"] == 2
    with caplog.at_level(logging.WARNING, logger="forerun"):
        Small.load({"model": str(tmp_path)}, LoadContext(target))
        assert caplog.messages == []
        other = load_target(small_of())
        Small.load({"model": str(tmp_path)}, LoadContext(other))
    [message] = caplog.messages
    assert message == f"the drafter was distilled from {target.name}; this target differs in config, weights"
    (tmp_path / "forerun.json").write_text("{}")
    with pytest.raises(ModelError, match=r"^--drafter: .*forerun.json cannot be read"):
        Small.load({"model": str(tmp_path)}, LoadContext(target))


def test_ts_9_its_record_has_the_template_of_its_data(target, tmp_path):
    """TS-9: what rendered the samples is remembered, not what the target would have rendered.

    https://github.com/z-lab/dflash/issues/133, https://github.com/SafeAILab/EAGLE/issues/227
    """
    plan = DesignPlan(64, torch.ones(target.vocab_size), "float32", 0, chat_template="of-another")
    SmallLearner.design(target, SmallSettings(layers=1), plan).save(tmp_path)
    record = json.loads((tmp_path / "forerun.json").read_text())
    assert record["target_fingerprint"]["chat_template"] == "of-another"


def test_a_write_that_was_cut_short_leaves_the_folder_that_was(target, tmp_path, monkeypatch):
    """The disk is full in the middle of it: the model of before is whole; the next save removes what was left."""
    learner = design(target, layers=1)
    learner.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(type(learner.tokenizer.inner), "save_pretrained", no_room)
        with pytest.raises(OSError, match="no room"):
            shaken(learner).save(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    learner.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before.keys()


def no_room(*_, **__):
    raise OSError("no room")


def test_one_sample_learned_by_heart_is_accepted_whole(target, tmp_path):
    """The gate between training and decoding: one layer of three, trained on one text, saved, loaded: every round
    accepts all its drafts. Cut alone it does not.
    """
    prompt = [1, 2, 3, 4]
    [plain] = Engine(target).generate([prompt], SAMPLING)
    assert max(plain.token_ids) < KNOWN  # no padding: there it would have nothing to say
    learner = design(target, layers=1, ce="hard")
    [before] = Engine.load(target, learner.for_decoding(torch.float32)).generate([prompt], SAMPLING)
    assert before.stats.mean_accepted_length < 3
    done, k = taught_and_used(learner, prompt, plain, tmp_path)
    assert done.stats.acceptance_by_position == [1.0] * k
    assert done.stats.mean_accepted_length == k + 1
