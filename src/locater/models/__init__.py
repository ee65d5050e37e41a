"""Where are W_Q and W_K in this model?"""

from locater.models.attention import Attention
from locater.models.covariance import covariances
from locater.models.parts import Norm, Projection
from locater.models.positions import Alibi, GridKeys, QueryGain, RelativeBias, RelativeKeys, TableBias
from locater.models.proof_table import prove
from locater.models.registry import Site, attentions, register
from locater.models.rope import Rope
from locater.models.scan import Scan, Spectra, scan, spectra

__all__ = [
    "Alibi",
    "Attention",
    "GridKeys",
    "Norm",
    "Projection",
    "QueryGain",
    "RelativeBias",
    "RelativeKeys",
    "Rope",
    "Scan",
    "Site",
    "Spectra",
    "TableBias",
    "attentions",
    "covariances",
    "prove",
    "register",
    "scan",
    "spectra",
]
