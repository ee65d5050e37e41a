"""Where are W_Q and W_K in this model?"""

from locater.models.attention import Alibi, Attention, Norm, Projection, RelativeBias, Rope
from locater.models.registry import Site, attentions, register

__all__ = ["Alibi", "Attention", "Norm", "Projection", "RelativeBias", "Rope", "Site", "attentions", "register"]
