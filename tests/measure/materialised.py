"""The T × T that a measurement must agree with, in float64, and problems to compare on."""

from __future__ import annotations

import math

import torch
from hypothesis import assume
from hypothesis import strategies as st

# of the entropy, relative to 1 + H, for logits up to ±50 and inputs as they are
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}


def materialised(
    q, k, *, causal=True, scale=None, key_mask=None, window=None, softcap=None, alibi_slopes=None, bias=None,
    sinks=None,
):  # fmt: skip
    """Logits (B, H, Tq, Tk) in float64, −∞ where masked: what no model wants to keep. Sinks are one more, the last."""
    (_, h, tq, width), (_, g, tk, _) = q.shape, k.shape
    s = q.double() @ k.double().repeat_interleave(h // g, 1).mT
    s = s / math.sqrt(width) if scale is None else s * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(tq, device=q.device)[:, None] + (tk - tq) - torch.arange(tk, device=q.device)
    if alibi_slopes is not None:
        s = s - alibi_slopes.double()[:, None, None] * distance.abs()
    if bias is not None:
        s = s + bias.double()
    seen = torch.ones_like(s, dtype=torch.bool)
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance.abs() < window
    if key_mask is not None:
        seen &= key_mask[:, None, None]
    s = s.masked_fill(~seen, -math.inf)
    return s if sinks is None else torch.cat([s, sinks.double()[:, None, None].expand(*s.shape[:3], 1)], -1)


def entropy_of(s):
    return torch.special.entr(s.softmax(-1)).nan_to_num(0).sum(-1)


def check(found, s, tolerance):
    """Entropy, largest logit and logsumexp against those of the logits."""
    blind = (s == -math.inf).all(-1)
    entropy, top, lse = entropy_of(s), s.amax(-1), s.logsumexp(-1)
    for name, value in (("entropy", found.entropy), ("max_logit", found.max_logit), ("logsumexp", found.logsumexp)):
        assert value.shape == entropy.shape, name
        assert not value.isnan().any(), name
    assert (found.entropy[blind] == 0).all()
    assert (found.max_logit[blind] == -math.inf).all()
    assert (found.logsumexp[blind] == -math.inf).all()
    assert ((found.entropy - entropy).abs() <= tolerance * (1 + entropy)).all()
    for value, expected in ((found.max_logit, top), (found.logsumexp, lse)):
        assert ((value - expected)[~blind].abs() <= tolerance * (1 + expected[~blind].abs())).all()


def check_rho(rho, s, rows, tolerance):
    """ρ of one query of each sequence, None where it does not count; a z near 0 or 1 may fall on either side."""
    least, most, count = (torch.zeros(rho.shape, dtype=torch.float64, device=rho.device) for _ in range(3))
    for logits, row in zip(s, rows, strict=True):
        if row is None:
            continue
        line = logits[:, row]
        seen = line != -math.inf
        tokens = seen.sum(-1, keepdim=True)
        mean = line.masked_fill(~seen, 0).sum(-1, keepdim=True) / tokens
        z = 1 / tokens + (line - mean) / tokens
        near = tolerance * (1 + line.masked_fill(~seen, 0).abs().amax(-1, keepdim=True)) / tokens
        z, seen = (x[:, : rho.shape[1]] for x in (z, seen))  # a sink has no ρ
        least += seen & (z >= near) & (z <= 1 - near)
        most += seen & (z >= -near) & (z <= 1 + near)
        count += seen
    assert torch.equal(rho.isnan(), count == 0)
    some = count > 0
    rounding = 1e-6
    assert (rho[some] >= (least / count)[some] - rounding).all()
    assert (rho[some] <= (most / count)[some] + rounding).all()


def last_rows(tq, key_mask, own_keys, batch):
    if key_mask is None or not own_keys:
        return [tq - 1] * batch
    unmasked = [row.nonzero().flatten().tolist() for row in key_mask[:, -tq:]]
    return [rows[-1] if rows else None for rows in unmasked]


@st.composite
def problems(draw, dtypes=tuple(TOLERANCE), longest=40, widest=20, biased=True, sunk=True, device="cpu"):
    """q, k and any options, with logits up to ±50 before cap and bias."""
    batch, groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    tk, width = draw(st.integers(1, longest)), draw(st.integers(1, widest))
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(1, 50))
    slopes = draw(st.booleans())
    tq = draw(st.integers(1, tk if causal or window or slopes else longest))
    generator = torch.Generator(device).manual_seed(draw(st.integers(0, 2**32)))
    kind = {"generator": generator, "device": device}
    dtype = draw(st.sampled_from(dtypes))
    q = torch.randn(batch, groups * per_group, tq, width, **kind, dtype=torch.float64)
    k = torch.randn(batch, groups, tk, width, **kind, dtype=torch.float64)
    options = {"causal": causal, "scale": draw(st.sampled_from([None, 0.3, 1.0]))}
    largest = (materialised(q, k, causal=False, scale=options["scale"])).abs().amax().item()
    q *= draw(st.sampled_from([0.0, 1.0, 10.0, 50.0])) / largest
    if window is not None:
        options["window"] = window
    if slopes:
        options["alibi_slopes"] = torch.rand(groups * per_group, **kind)
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([1.0, 30.0, 500.0]))
    if draw(st.booleans()):
        mask = torch.rand(batch, tk, **kind) < 0.6
        mask[torch.arange(batch, device=device), torch.randint(tk, (batch,), **kind)] = True
        options["key_mask"] = mask
    if biased and draw(st.booleans()):
        repeated = [n if draw(st.booleans()) else 1 for n in (batch, groups * per_group, tq)]
        options["bias"] = 3 * torch.randn(*repeated, tk, **kind)
    if sunk and draw(st.booleans()):
        options["sinks"] = 10 * torch.randn(groups * per_group, **kind)
    q, k = q.to(dtype), k.to(dtype)
    assume((materialised(q, k, **options) > -math.inf).flatten(1).any(1).all())  # else it is refused
    return q, k, options
