"""A page as tests look at it."""

from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "input"}


class Page(HTMLParser):
    """The tags, attributes and text of a page; a tag closed out of order is an error."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(self.source)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.text += data


def assert_self_contained(page: Page) -> None:
    """No script, nothing to load, no handler: the page is what stands in it.  Links lead to places
    of the page.
    """
    places = {value for name, value in page.attributes if name == "id"}
    loading = {"script", "link", "img", "iframe", "object", "embed", "base", "form", "image", "use"}
    assert not loading & set(page.tags)
    assert not [
        (name, value)
        for name, value in page.attributes
        if name in ("src", "href", "xlink:href", "style") or name.startswith("on")
        if name != "href" or value[1:] not in places or value[:1] != "#"
    ]
    assert "url(" not in page.source and "@import" not in page.source
    assert "default-src 'none'" in page.source
