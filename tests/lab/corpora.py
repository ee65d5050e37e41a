"""Small corpora for tests, written by the test itself, and the batches a stack takes from one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from locater.lab import Member


def write_corpus(folder: Path, words: int = 3000, types: int = 60, seed: int = 0) -> Path:
    """Three splits of a text in which each word leans on the one before it."""
    source = random.Random(seed)
    names = [f"w{i}" for i in range(types)]
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in (("train", words), ("valid", words // 4), ("test", words // 4)):
        at, lines = 0, []
        while size > 0:
            line = []
            for _ in range(source.randint(5, 15)):
                at = (at * 3 + 1 + source.choice([0, 0, 0, 1, 7])) % types
                line.append(names[at])
            lines.append(" ".join(line))
            size -= len(line)
        (folder / f"{split}.txt").write_text("\n".join(lines) + "\n")
    return folder


def blocks_at(stack, step):
    """(E, B): which blocks the members take at a step."""
    now = stack._clock.clone()
    stack._shuffle(step // stack._batches)
    stack._clock.fill_(step)
    taken = stack._blocks()
    stack._clock.copy_(now)
    return taken


def batch_at(stack, step):
    """Inputs and targets (E, N) of that step."""
    return stack.train(blocks_at(stack, step))


def three_members(rate):
    """Without LocAteR, with it, and another seed with decay."""
    return [
        Member("plain", seed=0, learning_rate=rate),
        Member("held", seed=0, learning_rate=rate, scale_strength=1e-2, mean_strength=1e-1),
        Member("other-seed", seed=3, learning_rate=0.3 * rate, decay=0.1, scale_strength=1e-1),
    ]


def assert_close_metrics(measured, expected, **tolerances):
    """Every member's metric, or its first layer's, within a relative tolerance."""
    for here, there in zip(measured, expected, strict=True):
        for name, tolerance in tolerances.items():
            a, b = (value[0] if isinstance(value, list) else value for value in (here[name], there[name]))
            assert a == pytest.approx(b, rel=tolerance), name
