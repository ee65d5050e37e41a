"""The paper's claims, put to the test with the numbers of a sweep; and comparisons that were planned for one."""

from locater.lab.claims.comparisons import Effect, Effects, effects, effects_markdown, has_comparisons
from locater.lab.claims.series import seed_spread
from locater.lab.claims.verdicts import Claim, claims, claims_markdown

__all__ = [
    "Claim",
    "Effect",
    "Effects",
    "claims",
    "claims_markdown",
    "effects",
    "effects_markdown",
    "has_comparisons",
    "seed_spread",
]
