"""LocAteR for factors that are tensors already: no model, no registry, a strength for each matrix.

Legend: K head width; leading dimensions are matrices, against which strengths, steps and targets broadcast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locater.models.attention import Norm, Rope
from locater.qk import QK

__all__ = ["RULE", "decoupled_step", "ordinary_scale", "penalty_gradient", "seen_scale", "within_limit"]

RULE = 2  # of what is ordinary, and of what a scale is: raised where either changes, for first scales are not another's
_LIMIT = 3.0  # times its ordinary scale is the most that a head may have
_UPDATES, _MOST = 250, 8.0  # an ordinary scale's root is its first times updates / 250, and at most eight times that


def penalty_gradient(qk: QK, scale_strength: Tensor, mean_strength: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """∂/∂W_Q and ∂/∂W_K of scale_strength · tr(W_QKᵀW_QK) + mean_strength · (tr W_QK − target)², for every matrix."""
    w_q, w_k = qk.w_q, qk.w_k
    scale = 2 * scale_strength[..., None, None]
    pull = (2 * mean_strength * (qk.trace() - target))[..., None, None]
    return scale * (w_k @ w_k.mT) @ w_q + pull * w_k, scale * (w_q @ w_q.mT) @ w_k + pull * w_q


def decoupled_step(
    qk: QK,
    scale_step: Tensor,
    mean_step: Tensor,
    target: Tensor,
    ordinary: Tensor | None = None,
    rope: Rope | None = None,
) -> tuple[Tensor, Tensor]:
    """W_Q and W_K after one step down the penalty, beside an optimizer's own as AdamW's decay is beside Adam's.

    Where an ordinary scale is given, a scale is pressed by how far it has grown, not at all up to that, fully from
    twice that on; and a trace is raised to its target, but not lowered.

    A step is a learning rate times a strength. Each part is divided by 1 + the step times its own largest possible
    curvature: small steps are the gradient's, and no step, however large, goes past the minimum along any direction
    (nor would an implicit step, at the cost of a K × K solve). Both factors are divided by the same, for what a
    gradient does not do is to let one of them grow at the other's expense. Where steps are not small, repeating them
    ends at the minimum for strengths that are damped so. Nor does the pull on the trace carry it past its target.

    With rotary positions it is the mean of tr(W_QKᵀW_QK), that at distance 0, and of its mean over all turns that is
    stepped down; how far it has grown is judged by the largest that turns can make it, as `ordinary` is to be. The
    trace is that at distance 0.

    A key matrix that query heads share has a dimension of 1 before its last two, where they have theirs.
    """
    w_q, w_k = qk.w_q, qk.w_k
    shared = w_k.shape[-3] < w_q.shape[-3] if w_k.ndim > 2 else False
    gram_q, gram_k, trace = w_q @ w_q.mT, w_k @ w_k.mT, qk.trace()
    squares_q, squares_k = (gram.diagonal(dim1=-2, dim2=-1).sum(-1) for gram in (gram_q, gram_k))
    if ordinary is not None:
        scale_step = scale_step * (_product(gram_q, gram_k, rope) / ordinary - 1).clamp(0, 1)
        target = torch.maximum(target, trace)
    gram_q, gram_k = _turning(gram_q, rope), _turning(gram_k, rope)

    def together(x: Tensor, dim: int) -> Tensor:
        """Summed over the query heads of a key."""
        return x.sum(dim, keepdim=True) if shared else x

    def size(gram: Tensor) -> Tensor:
        """At least gram's largest eigenvalue, half the largest curvature of the scale, and at most K^¼ of it."""
        norm: Tensor = torch.linalg.matrix_norm(gram @ gram)
        return norm.sqrt()

    largest = torch.maximum(together(scale_step * size(gram_q), -1), scale_step * size(gram_k))
    if shared:
        largest = largest.amax(-1, keepdim=True)
    shrink = (2 * scale_step / (1 + 2 * largest))[..., None, None]
    pull = _pull(trace, target, mean_step, together(squares_q, -1), squares_k)[..., None, None]
    # matrices of a weight's size are read and written as seldom as may be; 1 − shrink · gram in one product would round
    # the weights themselves where products are TF32
    new_q = w_q - torch.addcmul((shrink * gram_k) @ w_q, pull, w_k)
    down_k = together(shrink * gram_q, -3) @ w_k
    return new_q, w_k - (down_k + together(pull * w_q, -3) if shared else torch.addcmul(down_k, pull, w_q))


def _turning(gram: Tensor, rope: Rope | None) -> Tensor:
    """W Wᵀ of keys as queries meet it: as it is, or, with rotary positions, the mean of that and of its turns."""
    return gram if rope is None else (gram + rope.mean_gram(gram)) / 2


def _product(gram_q: Tensor, gram_k: Tensor, rope: Rope | None) -> Tensor:
    """The scale, from W Wᵀ of both factors: tr(W_QKᵀW_QK), or the largest that turns can make it."""
    return (gram_q * gram_k).sum((-2, -1)) if rope is None else rope.largest_product(gram_q, gram_k)


def _pull(trace: Tensor, target: Tensor, step: Tensor, squares_q: Tensor, squares_k: Tensor) -> Tensor:
    """c of the step W_Q − c W_K, W_K − c W_Q down (trace − target)², given the factors' squared norms.

    The trace becomes trace − c S + c² trace, where S is the sum of the squares. That is monotone for |c| ≤ 1, and the
    target where c = 2 off / (S + √(S² − 4 trace · off)): c goes no further than either.
    """
    off, both = trace - target, squares_q + squares_k
    c = 2 * step * off / (1 + 4 * step * torch.maximum(squares_q, squares_k))
    there = 2 * off.abs() / (both + (both.square() - 4 * trace * off).clamp(min=0).sqrt()).clamp(min=1e-30)
    most = there.clamp(max=1)
    return c.clamp(-most, most)


# ---------------------------------------------------------------------- where growth is held


def seen_scale(
    qk: QK, norm: Norm | None, biases: tuple[Tensor | None, Tensor | None], rope: Rope | None = None
) -> Tensor:
    """The variance of q·k between independent tokens whose coordinates have unit variance where the norm scales them:
    tr(W_QKᵀW_QK), but for the norm before attention and the biases (…, K).

    The norm's gain is trained too, and may grow where W_QK does not: it is folded in. What all queries have in common,
    a bias and the norm's shift, is compared with every key. What all keys have in common moves all logits of a query
    alike, which a softmax does not see, unless keys turn with their position. Then the scale is the largest that turns
    can make it.
    """
    grams = []
    for w, bias, matters in ((qk.w_q, biases[0], True), (qk.w_k, biases[1], rope is not None)):
        folded = w if norm is None else norm.fold(w)
        gram = folded @ folded.mT
        if norm is not None and norm.centred:  # D coordinates of mean 0 are D long in D − 1 dimensions
            gram = gram * (w.shape[-1] / max(1, w.shape[-1] - 1))
        shift = None if norm is None else norm.bias
        if matters and not (bias is None and shift is None):
            common = torch.zeros_like(w[..., :1]) if bias is None else bias[..., None]  # (…, K, 1)
            common = common if shift is None else common + w @ torch.atleast_2d(shift).mT.to(w.dtype)
            gram = gram + common * common.mT
        grams.append(gram)
    return _product(grams[0], grams[1], rope)


def ordinary_scale(first: Tensor, logit_scale: float, update: Tensor | int = 0) -> Tensor:
    """The scale beyond which a head has grown too fast: what it was at first, or d_head / 8 if that is more, and from
    the 250th update on that times (update / 250)², up to 64 times.

    At d_head / 8, logits between independent tokens have a standard deviation of 0.35; a customary start has 0.5 to 1.
    That is to say, their standard deviation may grow by what it was at first every 250 updates, to eight times it:
    heads of a model that learns do grow, and it is abrupt growth that is to be held.
    """
    return first.clamp(min=1 / (8 * logit_scale**2)) * torch.as_tensor(update / _UPDATES).clamp(1, _MOST).square()


def within_limit(
    growth: Tensor, hold: Tensor | float = 1.0, moves: tuple[bool, bool] = (True, True), *, shared: bool = False
) -> tuple[Tensor, Tensor]:
    """What queries and keys of every head are to be multiplied by, so that no scale is beyond three times the ordinary.

    That limit is divided by `hold`, which goes to 0 to let go. What is to be shrunk is divided between the factors that
    may move, but where heads share a key it is the queries' alone.
    """
    ratio = (_LIMIT / (hold * growth)).clamp(max=1)
    if moves == (True, True) and not shared:
        return ratio**0.25, ratio**0.25
    if moves[0]:
        return ratio.sqrt(), torch.ones_like(ratio[..., :1] if shared else ratio)
    return torch.ones_like(ratio), (ratio.amin(-1, keepdim=True) if shared else ratio).sqrt()
