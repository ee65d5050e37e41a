"""Ways to do the same thing, each in processes of its own, taking turns: so that a busy machine is unfair to none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence


def taking_turns(script: str, ways: Sequence[str], rounds: int) -> dict[str, list[dict[str, float]]]:
    """What the script, given the name of a way, prints in its last line as JSON; of each way, round by round."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, results in found.items():
            done = subprocess.run([sys.executable, script, way], capture_output=True, text=True, check=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    return found
