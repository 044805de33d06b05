"""What mkdocs is told about links: some documents of the repository are pages too, and its other files have none.

`CHANGELOG.md`, `CONTRIBUTING.md` and `DESIGN.md` lie where people look for them in a repository, and become pages of the
site; so do what `README.md` says to be supported, and pictures of measurements, which lie beside the results. Any other link to
`README.md` leads to the first page. A link to any other file of the repository, such as an example, becomes plain text,
unless mkdocs.yml has a `repo_url`: then it leads there. Links that lead nowhere stay as they are, and mkdocs reports them.

Tables of result files get a class of their own, by which `style.css` keeps their rows in one line.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "DESIGN.md": "design.md",
    "README.md": "supported.md",
}
LOADED_FROM_ELSEWHERE = "https://unpkg.com/iframe-worker/shim"  # what Material's search needs in pages opened as files
PLOTS = ROOT / "benchmarks" / "results"
CODE = re.compile(r"`[^`\n]+`")
FIGURES = re.compile(r"<!-- results: [^\n]* -->\n(.*?)<!-- end -->", re.DOTALL)
IMAGE = re.compile(r"(!\[[^]]*\])\(([^)\s]+\.png)\)")
LINK = re.compile(r"(?<!!)\[([^]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and pictures that lie outside of `docs`."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if source == "README.md":
            text = "# " + re.findall(r"^## (What is supported\n.*?)^## ", text, re.DOTALL | re.MULTILINE)[0]
        files.append(File.generated(config, page, content=text))
    for plot in sorted(PLOTS.glob("*.png")):
        files.append(File.generated(config, f"plots/{plot.name}", abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return a page whose links lead to pages of the site."""
    sources = {name: ROOT / source for source, name in PAGES.items()}
    own = sources.get(page.file.src_uri, ROOT / "docs" / page.file.src_uri)

    def led(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        place = Path(os.path.normpath(own.parent / target))
        if ":" in target or not place.exists() or not place.is_relative_to(ROOT):
            return link[0]
        name = place.relative_to(ROOT).as_posix()
        if name == "README.md" and anchor != "#what-is-supported":
            site = "index.md"
        elif name in PAGES:
            site = PAGES[name]
        elif name.startswith("docs/") and place.is_file():
            site = name.removeprefix("docs/")
        elif config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{name}{anchor})"
        else:
            return text
        from_page = os.path.relpath(site, os.path.dirname(page.file.src_uri) or ".")
        return f"[{text}]({Path(from_page).as_posix()}{anchor})"

    def shown(image: re.Match[str]) -> str:
        place = Path(os.path.normpath(own.parent / image[2]))
        if place.parent != PLOTS:
            return image[0]
        from_page = os.path.relpath(f"plots/{place.name}", os.path.dirname(page.file.src_uri) or ".")
        return f"{image[1]}({Path(from_page).as_posix()})"

    # Code in a table needs a backslash before each | on GitHub; mkdocs would show it.
    markdown = CODE.sub(lambda code: code[0].replace(r"\|", "|"), markdown)
    with_figures = FIGURES.sub(r'<div class="figures" markdown>\n\n\1\n</div>', markdown)
    return LINK.sub(led, IMAGE.sub(shown, with_figures))


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Return the page with the script of this folder in place of the one that Material loads from another host."""
    from_page = os.path.relpath("worker.js", os.path.dirname(page.file.dest_uri) or ".")
    return output.replace(LOADED_FROM_ELSEWHERE, Path(from_page).as_posix())


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """Do the same for the page that says that there is none."""
    return output.replace(LOADED_FROM_ELSEWHERE, "worker.js")
