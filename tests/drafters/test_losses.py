"""Losses by the row: what they are, that chunks change nothing, and that acceptance is what verification accepts."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.drafters.losses import chunk_rows, compare, confidence_loss, decay_weights, in_chunks
from forerun.verify import reject
from training.test_plan_memory import peak_of


def _rows(n, vocab, seed=0, kept=None):
    generator = torch.Generator().manual_seed(seed)
    draft = torch.randn(n, vocab if kept is None else len(kept), generator=generator, dtype=torch.float64)
    target = torch.softmax(2 * torch.randn(n, vocab, generator=generator, dtype=torch.float64), -1)
    return (
        draft,
        target if kept is None else target[:, kept],
        torch.randint(0, draft.shape[1], (n,), generator=generator),
    )


def test_row_losses_are_their_formulas():
    """Against numbers written out: a draft law (1/2, 1/4, 1/4), a target law (0.7, 0.2, 0.1), the label 1."""
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    out = compare(logits, torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([1]))
    assert out.ce.item() == pytest.approx(math.log(4))
    assert out.soft_ce.item() == pytest.approx(0.7 * math.log(2) + 0.3 * math.log(4))
    assert out.l1.item() == pytest.approx(0.2 + 0.05 + 0.15)
    assert out.acceptance.item() == pytest.approx(0.5 + 0.2 + 0.1)


def test_ids_that_are_not_kept_are_lost_mass_not_renormalised():
    """The drafter has ids 0 and 2 of three: acceptance is at most what the target leaves them, l1 is 2 TV over all
    three, and a label that is not kept costs nothing.
    """
    logits = torch.log(torch.tensor([[0.5, 0.5]]))
    out = compare(logits, torch.tensor([[0.6, 0.1]]), torch.tensor([-1]))
    assert out.acceptance.item() == pytest.approx(0.6)
    assert out.l1.item() == pytest.approx(0.1 + 0.4 + 0.3)
    assert out.l1.item() == pytest.approx(2 * (1 - out.acceptance.item()))
    assert out.ce.item() == 0


@pytest.mark.parametrize("kept", [None, [0, 2, 3, 7]])
def test_acceptance_is_what_verification_accepts(kept):
    """c* = 1 - TV equals the share of drafts that `verify.reject` accepts, drawn from the draft law.

    40,000 rounds, four standard deviations: a false alarm once in 16,000 runs, and the seed is fixed.
    """
    draft, target, labels = _rows(1, 9, seed=3, kept=kept)
    expected = compare(draft, target, labels).acceptance.item()
    ids = torch.arange(9) if kept is None else torch.tensor(kept)
    full = torch.zeros(9, dtype=torch.float64)
    full[ids] = torch.softmax(draft[0], -1)
    rest = (1 - target.sum()) / max(1, 9 - len(ids))  # of the target's mass, on the ids that are not kept
    whole = torch.full((1, 9), rest.item(), dtype=torch.float64).index_copy(1, ids, target)
    n, generator = 40_000, torch.Generator().manual_seed(0)
    tokens = torch.multinomial(full, n, replacement=True, generator=generator)[:, None]
    uniforms = torch.rand(n, 2, generator=generator, dtype=torch.float64)
    verdict = reject(tokens, full.expand(n, 1, 9), torch.ones(n, dtype=torch.long), whole.expand(n, 2, 9), uniforms)
    assert abs(verdict.accepted.float().mean().item() - expected) < 4 * math.sqrt(expected * (1 - expected) / n)


@pytest.mark.parametrize("weighed", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0.3, -0.5, 2)])
@pytest.mark.parametrize("kept", [None, [0, 2, 3, 7]])
def test_gradients_are_those_of_the_formulas(weighed, kept):
    """Against autograd's own, from the formulas as they are written, in float64: every loss alone and all together, a
    label that is not kept, an id that the head rules out, and a gradient of its own for every row.
    """
    draft, target, labels = _rows(6, 9, seed=5, kept=kept)
    labels[2] = -1
    draft[:, 3], target[:, 3] = -math.inf, 0
    labels = labels.where(labels != 3, 0)
    ours, theirs = draft.clone().requires_grad_(), draft.clone().requires_grad_()
    out = compare(ours, target, labels)
    log = torch.log_softmax(theirs, -1)
    finite = log.isfinite()
    ce = -log.gather(-1, labels.clamp(min=0)[:, None])[:, 0] * (labels >= 0)
    soft_ce = -(target * log.where(finite, 0)).sum(-1)
    l1 = (log.exp() - target).abs().where(finite, 0).sum(-1)
    rows = torch.arange(1, 7)
    for found, losses in ((ours, (out.ce, out.soft_ce, out.l1)), (theirs, (ce, soft_ce, l1))):
        sum((weight * rows * loss).sum() for weight, loss in zip(weighed, losses, strict=True) if weight).backward()
        assert found.grad.isfinite().all()
    assert torch.allclose(ours.grad, theirs.grad, atol=3e-6)
    assert ours.grad.abs().max() > 0.1


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.sampled_from([None, 3, 100]), st.booleans())
def test_chunks_give_the_dense_values_and_gradients(n, size, top, missing):
    """Any chunk size: the same losses and the same gradients of what is cut, of what is shared and of weights."""
    _, target, labels = _rows(n, 12, seed=n)
    labels = labels.where(labels > 2, -1) if missing else labels
    hidden = torch.randn(n, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weight = torch.randn(5, 12, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads = []
    for chunked in (False, True):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()

        def taught(x, target, labels, mix, scale, w=w):
            out = compare(scale * x @ w, target, labels, top)
            return (mix * (out.ce + 2 * out.soft_ce + 3 * out.l1)).sum(), out

        scale = 1 + w[0].mean() / 9  # has a graph of its own, and reaches every chunk
        tensors = (x.sin(), target, labels, torch.arange(1, n + 1) / n)
        if chunked:
            total, columns = in_chunks(taught, size, tensors, [scale], [w])
        else:
            total, columns = taught(*tensors, scale)
        (5 * total).backward()
        grads.append((total.detach(), torch.stack([*columns]).detach(), x.grad, w.grad))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top", [None, 2, 3])
def test_ids_that_both_laws_rule_out_cost_nothing(top):
    """A head that sets its padded ids to -inf: the losses are those without these ids, and so are the gradients."""
    draft, target, labels = _rows(6, 4, seed=2)
    out = []
    for padding in (0, 3):
        logits = torch.cat([draft, torch.full((6, padding), -torch.inf)], 1).requires_grad_()
        losses = compare(logits, torch.cat([target, torch.zeros(6, padding)], 1), labels, top)
        (losses.ce + losses.soft_ce + losses.l1).sum().backward()
        assert logits.grad.isfinite().all()
        out.append((torch.stack(losses).detach(), logits.grad[:, :4]))
    torch.testing.assert_close(out[0], out[1])


def test_no_rows_lose_nothing():
    """A micro-batch that teaches nothing: a sum of 0 with a graph, and losses of no rows."""
    rows = torch.zeros(0, 3, requires_grad=True)

    def taught(x):
        losses = compare(x, x.detach(), x.detach()[:, 0].long())
        return losses.soft_ce.sum(), losses

    total, columns = in_chunks(taught, 4, [rows])
    total.backward()
    assert total == 0
    assert rows.grad.shape == rows.shape
    assert all(column.shape == (0,) for column in columns)


def test_one_chunk_at_a_time_and_each_once():
    """The graph of a chunk is gone before the next one is made, and the backward pass makes none."""
    x, alive, most = torch.randn(10, 3, requires_grad=True), [], []

    def taught(x):
        losses = compare(x, x.detach().softmax(-1), torch.zeros(len(x), dtype=torch.long))
        alive[:] = [ref for ref in alive if ref() is not None]
        alive.append(weakref.ref(losses.soft_ce))
        most.append(len(alive))
        return losses.soft_ce.sum(), losses

    in_chunks(taught, 3, [x])[0].backward()
    assert most == [1, 1, 1, 1]


def test_gradients_are_let_go_once_they_were_handed_on():
    """As of any graph: while the sum is still held, its gradients are not; and it can be gone back through once."""
    weight = torch.randn(3, 4, requires_grad=True)

    def taught(x):
        return (x @ weight).square().sum(), (x,)

    total, _ = in_chunks(taught, 2, [torch.randn(5, 3)], parameters=[weight])
    total.backward()
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


def test_a_gradient_that_is_known_has_none_itself():
    x = torch.randn(5, 3, requires_grad=True)
    total, _ = in_chunks(lambda x: (x.pow(3).sum(), (x,)), 2, [x])
    (slope,) = torch.autograd.grad(total * x.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_keep_the_precision_of_the_forward_pass(dtype):
    """Under autocast as without chunks: what was computed in float32 has its gradient in float32."""
    weight, x = torch.randn(4, 5).requires_grad_(), torch.randn(6, 4)

    def taught(x):
        with torch.autocast("cpu", enabled=False):
            out = x @ weight
        return out.square().sum(), (out,)

    grads = []
    for run in (taught, lambda x: in_chunks(taught, 6, [x], parameters=[weight])):
        with torch.autocast("cpu", dtype):
            total = run(x)[0]
        grads += torch.autograd.grad(total, weight)
    assert torch.equal(*grads)


@pytest.mark.parametrize(("size", "scale"), [(1e-8, 2.0**16), (60.0, 2.0**-10)], ids=["vanish", "overflow"])
def test_the_scale_of_float16_losses_reaches_the_chunks(size, scale):
    """Gradients too small or too large for float16 are in its range once the loss is scaled."""
    weight, x = torch.ones(4, 5).requires_grad_(), torch.full((3000, 4), 3.0)

    def taught(x):
        out = x @ weight
        return size * out.float().sum(), (out,)

    with torch.autocast("cpu", torch.float16):
        total, columns = in_chunks(taught, 1500, [x], parameters=[weight])
    (scale * total).backward()
    torch.testing.assert_close(weight.grad / scale, torch.full_like(weight, 9000 * size), rtol=1e-2, atol=0)
    assert columns[0].shape == (3000, 5)
    assert not columns[0].requires_grad


def test_gradients_of_chunks_are_added_up_in_place_of_each_other():
    """However many chunks: what is known so far, and what one chunk adds to it, part by part."""
    weights = [torch.randn(64, 512, requires_grad=True) for _ in range(8)]
    size = sum(weight.nbytes for weight in weights)

    def taught(x):
        return torch.stack([(x @ weight).sum() for weight in weights]).sum(), (x,)

    x = torch.randn(10, 64)
    for count in (2, 5):
        assert peak_of(lambda n=count: in_chunks(taught, 10 // n, [x], parameters=weights)) < 2.4 * size


def test_without_gradients_there_are_the_same_sums():
    x = torch.randn(10, 3)

    def taught(x):
        losses = compare(x, (x + 1).softmax(-1), torch.zeros(len(x), dtype=torch.long))
        return losses.soft_ce.sum(), losses

    with torch.no_grad():
        total, columns = in_chunks(taught, 3, [x])
    dense, whole = taught(x)
    torch.testing.assert_close(total, dense)
    torch.testing.assert_close(columns, list(whole))


@pytest.mark.parametrize("top", [1, 3, 11, 12])
def test_the_lumped_teacher_never_sees_more_than_the_whole_law(top):
    """Lumping ids can only hide a difference: l1 and cross entropy are at most the full ones, equal where all are kept;
    acceptance is computed on the whole law always.
    """
    draft, target, labels = _rows(30, 12, seed=4)
    full, lumped = compare(draft, target, labels), compare(draft, target, labels, top)
    assert (lumped.l1 <= full.l1 + 1e-6).all()
    assert (lumped.soft_ce <= full.soft_ce + 1e-5).all()
    assert torch.equal(lumped.acceptance, full.acceptance)
    if top >= 11:  # a lump of one id is that id
        torch.testing.assert_close(lumped.l1, full.l1)
    else:
        assert (lumped.l1 < full.l1 - 1e-4).any()


def test_the_lump_is_stable_where_the_best_ids_hold_everything():
    """A nearly certain draft law: finite losses and gradients."""
    draft = torch.tensor([[60.0, 0.0, -60.0, -90.0]], requires_grad=True)
    out = compare(draft, torch.tensor([[0.9, 0.05, 0.03, 0.02]]), torch.tensor([0]), top=2)
    (out.soft_ce + out.l1).sum().backward()
    assert out.soft_ce.isfinite().all()
    assert draft.grad.isfinite().all()


def test_decay_weights_of_the_papers():
    """g = 4: 1, .78, .61, .47, .37, .29, .22 (DSpark, K = 7)."""
    assert [round(w, 2) for w in decay_weights(7, 4.0).tolist()] == [1, 0.78, 0.61, 0.47, 0.37, 0.29, 0.22]


def test_the_confidence_label_has_no_gradient():
    """The label is a constant: only the prediction moves."""
    logits = torch.zeros(3, requires_grad=True)
    acceptance = torch.tensor([0.2, 0.5, 0.9], requires_grad=True)
    confidence_loss(logits, acceptance).sum().backward()
    torch.testing.assert_close(logits.grad, 0.5 - acceptance.detach())
    assert acceptance.grad is None


def test_chunks_shrink_as_the_vocabulary_grows():
    """Four float32 copies of a chunk stay within the budget, down to a floor of 16 rows."""
    assert chunk_rows(151_936) * 151_936 * 16 <= 256 << 20
    assert chunk_rows(10**9) == 16
