"""What an index page shows: the project's addresses, and README.md with links that lead to the repository."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: There is no public address yet; this is the only place that names it.
REPOSITORY = "https://github.com/rlx-optim/rlx-optim"
PLACES = {"": f"{REPOSITORY}/blob/main/", "!": f"{REPOSITORY}/raw/main/"}  # of a page, of a picture


def absolute(text: str) -> str:
    """Markdown whose links into the repository have its address."""
    link = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#)([^)]+)\)")
    return link.sub(lambda match: f"{match[1]}{match[2]}({PLACES[match[1]]}{match[3]})", text)


class IndexPage(MetadataHookInterface):
    def update(self, metadata):
        metadata["urls"] = {
            "Repository": REPOSITORY,
            "Changelog": f"{PLACES['']}CHANGELOG.md",
            "Issues": f"{REPOSITORY}/issues",
        }
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text)}
