"""What is published: the sdist, a wheel built from it, and what their pages say of installing."""

import re
import subprocess
import sys
import tarfile
import zipfile

import pytest

from support import ROOT

LINKS = "packer", "loaders", "engine", "configs"
SHORT = {f"{name}/{file}" for name in LINKS[:3] for file in ("__init__.py", "py.typed")}
SHORT |= {"packer/__main__.py", "engine/__main__.py"}
"""Files of the short names."""
ABOUT = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml"}
BY_NAME = re.compile(r"pip install [^\n]*\bisobatch(\[|\b(?!/))")


def tracked():
    """Files of the package, by the path that they are installed at."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "isobatch", *LINKS]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    links = {f"isobatch/{name}" for name in LINKS}
    return {
        name if name.startswith("isobatch/") else f"isobatch/{name}"
        for name in names.split()
        if name not in links and (ROOT / name).is_file()
    }


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "-q", "--outdir", folder, ROOT]
    subprocess.run(command, check=True)
    return folder


@pytest.mark.slow
def test_sdist_and_the_wheel_built_from_it_have_the_package_and_nothing_else(dist):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        members = sdist.getmembers()
    assert all(member.isfile() for member in members)
    names = {member.name.partition("/")[2] for member in members}
    assert names - {"PKG-INFO", ".gitignore"} == tracked() | SHORT | ABOUT
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    assert files.keys() == tracked() | SHORT
    assert all(content == (ROOT / name).read_bytes() for name, content in files.items())
    for suffix in ("py.typed", ".toml", ".css", ".j2", "tokenizer.json"):
        assert any(name.endswith(suffix) for name in files), suffix


@pytest.mark.slow
def test_the_index_would_show_their_page(dist):
    pytest.importorskip("twine")
    command = [sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_says_that_the_package_is_on_an_index():
    """Until it is: from source `pip install .` or `-e '.[hf]'`."""
    assert BY_NAME.search("pip install 'isobatch[ray]'")
    assert BY_NAME.search("python -m pip install -q isobatch")
    assert not BY_NAME.search("pip install -e '.[test]'\nisobatch plan")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    for link in ("isobatch", *LINKS[:3]):
        pages += (ROOT / link).rglob("*.py")
    named = [str(page) for page in pages if BY_NAME.search(page.read_text("utf-8"))]
    assert named == []
