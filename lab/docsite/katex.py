"""KaTeX for the site: the npm package, fetched once into build/, so that the built pages need no network."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERSION = "0.19.1"
SHA256 = "24da5a599eb2fcede2e270b99a6ff48bca816beecc95feeb84e8cccbd1bb34fd"
WANTED = ("package/dist/katex.min.js", "package/dist/katex.min.css", "package/dist/fonts/", "package/LICENSE")


def folder() -> Path:
    """Where the files are, fetched if they are not there yet."""
    place = ROOT / "build" / f"katex-{VERSION}"
    if not place.exists():
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit("the documentation needs npm (Node.js), to fetch KaTeX; install it and try again")
        with tempfile.TemporaryDirectory() as temporary:
            subprocess.run([npm, "pack", "--silent", f"katex@{VERSION}"], cwd=temporary, check=True, stdout=subprocess.DEVNULL)
            archive = Path(temporary) / f"katex-{VERSION}.tgz"
            found = hashlib.sha256(archive.read_bytes()).hexdigest()
            if found != SHA256:
                raise SystemExit(f"katex-{VERSION}.tgz has the checksum {found}, expected {SHA256}")
            with tarfile.open(archive) as tar:
                for member in tar.getmembers():
                    if member.name.startswith(WANTED) and not member.name.endswith((".ttf", ".woff")):
                        tar.extract(member, temporary, filter="data")
            place.parent.mkdir(exist_ok=True)
            shutil.copytree(Path(temporary) / "package" / "dist", Path(temporary) / "katex")
            shutil.copy(Path(temporary) / "package" / "LICENSE", Path(temporary) / "katex")
            shutil.move(Path(temporary) / "katex", place)
    return place


def files() -> dict[str, Path]:
    """Every file: its path on the site and where it is."""
    return {f"assets/katex/{file.relative_to(folder())}": file for file in sorted(folder().rglob("*")) if file.is_file()}
