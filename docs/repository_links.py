"""A hook of mkdocs: links from docs/ to files of the repository that are no pages.

In the repository they are relative (`../configs/lora.yaml`), and work wherever Markdown is shown beside the files. In the
built site they lead to `repo_url`, and where none is set they become the name of the file.

    [configs/](../configs)   ->   [configs/](REPO_URL/blob/HEAD/configs)   or   configs/
"""

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((\.\./[^)\s]*)\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    folder = posixpath.dirname(page.file.src_uri)

    def elsewhere(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, link[2]))
        if path.startswith("docs/"):
            return link[0]
        return f"[{link[1]}]({config.repo_url.rstrip('/')}/blob/HEAD/{path})" if config.repo_url else link[1]

    return LINK.sub(elsewhere, markdown)
