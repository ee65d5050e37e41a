"""The seam where a model's attention is computed: found, listened to, and left as it was.

    undo = ExitStack()
    listen(places(model), Listener(wants, tell), undo)      # tell(heard, result) → result, for every attention call
    undo.close()

`measure` listens to see, `control` to act. What they hear of is a `Call`: queries, keys, and which of them see which,
whatever the family, the backend, the mask or the cache.
"""

from locater.hooks._calls import Call, of_multihead, of_stack, visible
from locater.hooks._compiling import HOW, has_compiled, plain_name, untraced
from locater.hooks._patching import Tap, tap
from locater.hooks._recorder import Heard, Listener, hidden_states, in_backward, listen
from locater.hooks._sites import Place, Stacked, Tell, implementation_of, interface_place, places, reads_attribute

__all__ = [
    "HOW",
    "Call",
    "Heard",
    "Listener",
    "Place",
    "Stacked",
    "Tap",
    "Tell",
    "has_compiled",
    "hidden_states",
    "implementation_of",
    "in_backward",
    "interface_place",
    "listen",
    "of_multihead",
    "of_stack",
    "places",
    "plain_name",
    "reads_attribute",
    "tap",
    "untraced",
    "visible",
]
