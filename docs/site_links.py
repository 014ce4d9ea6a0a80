"""Makes links of the pages that leave docs/ lead to the repository.

MkDocs runs it; see mkdocs.yml.
"""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([^\]\n]+)\]\(((?:\.\./)+[^)\s]*)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replaces links to files outside docs/ by links to the repository, or by their text where it
    has no address.
    """
    folder = posixpath.dirname(page.file.src_uri)

    def to_repository(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if path.startswith("docs/"):
            return match.group(0)
        return f"[{text}]({config.repo_url}/blob/HEAD/{path})" if config.repo_url else text

    return LINK.sub(to_repository, markdown)
