"""Checks that everything pages name exists: links, files, modules, flags and metrics."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("[dfv]*/README.md")),
]
IN_CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
PACKAGES = "foredraft|gateway|verify_service|draft_service|training|benchmarks|tests"
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
FILE = re.compile(r"(?<![\w/.<$=-])[\w.][\w./-]*\.(?:py|pyi|c|proto|sh|toml|yml)\b(?![\w=-])")
MODULE = re.compile(rf"python3? -m ([\w.]+)|`((?:{PACKAGES})(?:\.[a-z_]\w*)+)`")
FLAG = re.compile(r"`(--[a-z][a-z-]+)")
METRIC = re.compile(r"`(foredraft_\w+)")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture(scope="module")
def files() -> list[str]:
    """All files that git knows or would take, with a slash in front."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a git checkout")
    return ["/" + name for name in found.stdout.splitlines() if (ROOT / name).exists()]


@pages
def test_links_lead_somewhere(page: Path) -> None:
    gone = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not gone


@pages
def test_files_exist(page: Path, files: list[str]) -> None:
    """A path may begin at any package, as in the parts of the architecture."""
    named = {name for code in IN_CODE.findall(page.read_text()) for name in FILE.findall(code)}
    gone = {name for name in named if not any(one.endswith("/" + name) for one in files)}
    assert not gone


@pages
def test_modules_exist(page: Path) -> None:
    named = {one or other for one, other in MODULE.findall(page.read_text())}
    gone = set()
    for name in named:
        path = ROOT.joinpath(*name.split("."))
        # The last part may be something in a module.
        is_there = path.is_dir() or any(p.with_suffix(".py").is_file() for p in (path, path.parent))
        if not is_there and importlib.util.find_spec(name.partition(".")[0]) is None:
            gone.add(name)
    assert not gone


@pages
def test_flags_exist(page: Path) -> None:
    known = set(re.findall(r"--[a-z][a-z-]+", (ROOT / "docs/flags.md").read_text()))
    for folder in ("foredraft", "benchmarks", "training"):
        for path in (ROOT / folder).rglob("*.py"):
            known.update(re.findall(r"--[a-z][a-z-]+", path.read_text()))
    known |= {"--no-" + flag[2:] for flag in known}
    assert not {flag for flag in FLAG.findall(page.read_text()) if flag not in known}


@pages
def test_metrics_exist(page: Path) -> None:
    known = set(METRIC.findall((ROOT / "docs/metrics.md").read_text()))
    named = {re.sub("_(bucket|sum|count)$", "", name) for name in METRIC.findall(page.read_text())}
    assert named <= known


def test_every_benchmark_is_listed() -> None:
    text = (ROOT / "docs/measurements/index.md").read_text()
    folder = ROOT / "benchmarks"
    for path in (*folder.glob("*.py"), *folder.glob("gpu/*.py")):
        name = ".".join(path.relative_to(folder).with_suffix("").parts)
        usage = rf"^ *python -m benchmarks\.{re.escape(name)}\b"
        if re.search(usage, path.read_text(), re.MULTILINE):
            assert f"`{name}`" in text, name


def test_words_of_the_glossary_are_used() -> None:
    """Code, flags and pages use each: as `tree size`, `tree_size` or `TreeSize`."""
    page = ROOT / "docs/glossary.md"
    words = re.findall(r"^\| `?([\w -]+)", page.read_text(), re.MULTILINE)[1:]
    folders = ("foredraft", "verify_service", "draft_service", "gateway", "docs")
    texts = [
        path.read_text()
        for folder in folders
        for kind in ("*.py", "*.md")
        for path in (ROOT / folder).rglob(kind)
        if path != page
    ]
    used = _plain(" ".join(texts))
    assert len(words) > 40
    assert not {word.strip() for word in words if _plain(word) not in used}


def _plain(text: str) -> str:
    """Splits names into words, in lower case."""
    return re.sub(r"[\W_]+", " ", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)).lower().strip()


def test_manual_stays_short() -> None:
    """The manual has at most 15,000 words; code, generated pages, the lab book and the decisions do
    not count.
    """
    pages = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
    manual = "\n".join(page for page in pages if "<!-- Written by" not in page)
    prose = re.sub(r"^```.*?^```", "", manual, flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"\S*\w\S*", prose)) <= 15_000
