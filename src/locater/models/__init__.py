"""Where are W_Q and W_K in this model?"""

from locater.models.attention import Alibi, Attention, Norm, Projection, RelativeBias, TableBias
from locater.models.covariance import covariances
from locater.models.proof import prove
from locater.models.registry import Site, attentions, register
from locater.models.rope import Rope
from locater.models.scan import Scan, Spectra, scan, spectra

__all__ = [
    "Alibi",
    "Attention",
    "Norm",
    "Projection",
    "RelativeBias",
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
