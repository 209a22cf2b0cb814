"""What the site has beyond the pages: links out of the folder `docs`, and ``llms.txt``. A hook of MkDocs.

In a clone, every page links to files by relative paths. The site has no examples and no code, so such a link leads to the
repository there. CONTRIBUTING.md, CHANGELOG.md and SECURITY.md are pages of the site, too: it reads them from the top folder.

``llms.txt`` lists the pages with their first sentences, for programs that read before they write code. The pages themselves are
there as Markdown, at the address of the page with ``index.md`` behind it.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path
from typing import Any, Final

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


_texts: Final[dict[str, str]] = {}
"""The Markdown of each page, by its path in `docs`, as it was rendered last."""
_SENTENCE: Final = re.compile(r"(?s).+?[.:](?=\s|$)")
_LINKED: Final = re.compile(r"\[([^\]]+)\]\([^)]*\)")


def first_sentence(markdown: str) -> str:
    """Return the first sentence below the title, as text without links; empty if a table or a block comes first."""
    for paragraph in markdown.split("\n\n"):
        text = " ".join(paragraph.split())
        if text and text[0] not in "#|`<:-!{":
            found = _SENTENCE.match(text)
            return _LINKED.sub(r"\1", found[0] if found else text)
    return ""


def llms_txt(name: str, about: str, address: str, sections: dict[str, list[str]], texts: dict[str, str]) -> str:
    """Return the list of pages, by the form of llmstxt.org.

    Args:
        name: the name of the site.
        about: what it is about.
        address: of the site, with a slash at its end.
        sections: by their titles, the path in `docs` of each page.
        texts: the Markdown of each page.
    """
    lines = [f"# {name}", "", f"> {about}"]
    for section, pages in sections.items():
        lines += ["", f"## {section}", ""]
        for path in pages:
            text = texts.get(path, "")
            heading = re.search(r"^# (.+?)$", text, re.MULTILINE)
            title = heading[1].strip() if heading else path
            lines.append(f"- [{title}]({address}{_place_of(path)}): {first_sentence(text)}")
    return "\n".join(lines) + "\n"


def _place_of(path: str) -> str:
    """Return where the Markdown of a page is in the site."""
    page = path.removesuffix(".md").removesuffix("index").rstrip("/")
    return f"{page}/index.md" if page else "index.md"


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Keep the Markdown of a page."""
    _texts[page.file.src_uri] = page.markdown
    return html


def on_post_build(*, config: Any) -> None:
    """Write ``llms.txt``, and the Markdown of each page."""
    site, sections = Path(config.site_dir), dict[str, list[str]]()
    for item in config.nav:
        ((title, inside),) = item.items()
        sections[title] = _paths(inside)
    listed = llms_txt(config.site_name, config.site_description, config.site_url, sections, _texts)
    (site / "llms.txt").write_text(listed, "utf-8")
    for path, text in _texts.items():
        (site / _place_of(path)).write_text(text, "utf-8")


def _paths(inside: Any) -> list[str]:
    """Return the paths of all pages in a part of the navigation."""
    if isinstance(inside, str):
        return [inside]
    if isinstance(inside, dict):
        inside = list(inside.values())
    return [path for each in inside for path in _paths(each)]
