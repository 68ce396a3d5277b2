"""What mkdocs does to a page before it renders it (mkdocs.yml): GitHub's Markdown becomes Python-Markdown's.

The pages are written for GitHub, which shows them as they lie.
"""

from __future__ import annotations

import re
from typing import Any

FENCE = re.compile(r"^( *```python) [\w,]+$", re.M)  # an example that needs a library: ```python transformers


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with fences that superfences reads."""
    return FENCE.sub(r"\1", markdown)
