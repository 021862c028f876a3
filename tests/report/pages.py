"""Reading a report's page: whether it is well-formed, and what it would load."""

from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br", "hr", "img"}


class Page(HTMLParser):
    """A page's elements and text; ``faults`` are tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.faults, self.open, self.elements, self.words = [], [], [], []
        self.feed(text)
        self.close()
        self.faults += [f"<{name}> stays open" for name in self.open]

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        if not self.open or self.open.pop() != name:
            self.faults.append(f"</{name}> at {self.getpos()}")

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self):
        return "".join(self.words)

    def count(self, name):
        return sum(element == name for element, _ in self.elements)

    def attributes(self, *keys):
        return [attributes[key] for _, attributes in self.elements for key in keys
                if key in attributes]

    def check(self):
        """It is well-formed, ids are unique, and it refers to nothing outside."""
        assert not self.faults
        ids = self.attributes("id")
        assert len(ids) == len(set(ids))
        outside = self.attributes("href", "action", "xlink:href", "style", "data", "srcset")
        assert all(each.startswith("#") for each in outside), outside
        pictures = [attributes for name, attributes in self.elements if "src" in attributes]
        assert all(each["src"].startswith("data:image/webp;base64,") for each in pictures)
        assert all(each["alt"] for each in pictures)
        assert self.count("script") == 1
        assert self.count("link") == self.count("iframe") == 0
        assert self.count("img") == len(pictures)
        assert not [key for _, attributes in self.elements for key in attributes
                    if key.startswith("on")]
        named = {name for name, attributes in self.elements if name == "svg"
                 and attributes.get("role") == "img" and "aria-labelledby" not in attributes}
        assert not named
        for each in self.attributes("aria-labelledby"):
            assert set(each.split()) <= set(ids)
