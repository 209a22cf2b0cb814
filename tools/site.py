"""Make the links of pages that leave the folder `docs` right for the site. A hook of MkDocs.

In a clone, every page links to files by relative paths. The site has no examples and no code, so such a link leads to the
repository there. CONTRIBUTING.md, CHANGELOG.md and SECURITY.md are pages of the site, too: it reads them from the top folder.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from typing import Any

from tools.pages import ROOT

SOURCE: str = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["urls"]["Source"]
AT_TOP = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security-policy.md"}
"""Pages of the top folder, and their places in the site."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(?=[)#])")


def link_of_site(link: str, page: str) -> str:
    """Return a relative link of `page`, a path from the top folder, as the site needs it in the folder of `page`."""
    folder = posixpath.dirname(page)
    target = posixpath.normpath(posixpath.join(folder, link))
    if target.startswith("docs/"):
        shown = target
    elif target in AT_TOP:
        shown = f"docs/{AT_TOP[target]}"
    else:
        return f"{SOURCE}/blob/main/{target}"
    return posixpath.relpath(shown, folder or "docs")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of a page with links that work in the site."""
    at_top = {place: name for name, place in AT_TOP.items()}.get(page.file.src_uri)
    source = at_top or f"docs/{page.file.src_uri}"
    text = (ROOT / source).read_text("utf-8") if at_top else markdown
    return LINK.sub(lambda match: link_of_site(match[1], source), text)
