"""Hooks on the attention of a model: its sites found, their calls intercepted, everything restored afterwards.

    undo = ExitStack()
    intercept(attention_sites(model), Interceptor(wants, handle), undo)   # handle(intercepted, result) → result
    undo.close()

An intercepted `Call` is queries, keys, and which keys are masked, whatever the family, the backend or the cache.
"""

from locater.hooks._calls import Call, of_multihead, of_stack
from locater.hooks._compiling import HOW, has_compiled, make_hooks_noticed, untraced
from locater.hooks._interceptor import Intercepted, Interceptor, hidden_states, in_backward, intercept, of_queries
from locater.hooks._parallel import first_head
from locater.hooks._patching import Patch, patch
from locater.hooks._sites import (
    AttentionSite,
    RecordLayer,
    Stacked,
    attention_sites,
    implementation_of,
    interface_site,
    reads_attribute,
)
from locater.hooks._visibility import Bias, Visibility, cut_from, visible

__all__ = [
    "HOW",
    "AttentionSite",
    "Bias",
    "Call",
    "Intercepted",
    "Interceptor",
    "Patch",
    "RecordLayer",
    "Stacked",
    "Visibility",
    "attention_sites",
    "cut_from",
    "first_head",
    "has_compiled",
    "hidden_states",
    "implementation_of",
    "in_backward",
    "intercept",
    "interface_site",
    "make_hooks_noticed",
    "of_multihead",
    "of_queries",
    "of_stack",
    "patch",
    "reads_attribute",
    "untraced",
    "visible",
]
