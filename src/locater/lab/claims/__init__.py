"""The paper's claims, put to the test with the numbers of a sweep."""

from locater.lab.claims.series import seed_spread
from locater.lab.claims.verdicts import Claim, claims, claims_markdown

__all__ = ["Claim", "claims", "claims_markdown", "seed_spread"]
