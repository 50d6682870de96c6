"""docs/recoverable.md as the tests read it: its code, by the name in the comment before each block."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "recoverable.md"


def blocks() -> dict[str, str]:
    """Map each name, as in `<!-- code: name -->`, to the block that follows it."""
    found = re.findall(r"<!-- code: (\S+) -->\n```\w+\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return dict(found)


def quotes() -> list[str]:
    """What the guide says that Everstep says: its lines that begin with `> `, each joined to one."""
    paragraphs = re.findall(r"(?:^> .*\n)+", GUIDE.read_text(), re.MULTILINE)
    return [" ".join(line.removeprefix("> ") for line in paragraph.splitlines()) for paragraph in paragraphs]
