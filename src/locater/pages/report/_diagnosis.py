"""A diagnosis: what the doctor says, and every finding with its evidence and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from locater.pages.report._find import Found
from locater.pages.report._numbers import read_facts, short

_WORDS = ("kind", "module", "evidence", "advice", "code", "cost")
_MOST = 200


def diagnosis_section(found: Found, detail: float) -> dict[str, Any]:
    content = found.content
    model = short(content.get("model")) or found.path.name
    findings = [row for row in content["findings"] if isinstance(row, dict)]
    most, notes = max(8, int(_MOST * detail)), [*found.notes, *(short(note) for note in content.get("notes") or ())]
    if len(findings) > most:
        notes.append(f"{most} of {len(findings)} findings are shown")
    facts = [["heads", f"{len(content.get('examined') or ()):,}"], ["findings", f"{len(findings):,}"]]
    facts[1:1] = read_facts(content)
    return {
        "kind": "diagnosis",
        "title": "/".join(Path(model).parts[-2:]) or model,
        "source": short(content.get("text")) or str(found.path),
        "facts": facts,
        "notes": notes,
        "healthy": not findings,
        "sentences": [str(sentence)[:2000] for sentence in content.get("sentences") or ()],
        "findings": [_row(row) for row in findings[:most]],
    }


def _row(row: dict[str, Any]) -> dict[str, Any]:
    heads = row.get("heads")
    return {
        **{name: str(row.get(name) or "")[:500] for name in _WORDS},
        "module": str(row.get("module") or row.get("place") or "")[:500],
        "heads": ", ".join(str(head) for head in heads[:64]) if isinstance(heads, list) else "",
        "sure": "sure" if row.get("sure") is True else "likely",
    }
