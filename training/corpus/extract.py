"""Extracts text from files: rendered HTML, dialogues, dictionary glosses, puzzles.

The functions are pure functions of file contents.
"""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

END_OF_TEXT = "<|endoftext|>"
"""Ends a document and an assistant's turn; the tokenizer makes it one token."""

_BLOCKS = frozenset(
    [
        "p",
        "div",
        "section",
        "article",
        "table",
        "tr",
        "ul",
        "ol",
        "dl",
        "dt",
        "dd",
        "li",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "pre",
        "blockquote",
        "figure",
        "hr",
        "main",
        "body",
    ]
)
_DROPPED = frozenset(
    [
        "script",
        "style",
        "nav",
        "header",
        "footer",
        "aside",
        "button",
        "form",
        "svg",
        "noscript",
        "head",
        "title",
        "iframe",
    ]
)
_DROPPED_CLASSES = frozenset(
    [
        "sphinxsidebar",
        "related",
        "footer",
        "navheader",
        "navfooter",
        "headerlink",
        "sidebar",
        "toc",
        "sidetoc",
        "toplang",
        "bottomlang",
        "breadcrumbs",
        "srclink",
        "src-link",
        "anchor",
        "nav-wrapper",
        "page-header-links",
        "menu",
        "mainmenu",
        "submenu",
        "nosearch",
        "prev-next-bottom",
        "left-prev",
        "right-next",
        "prev-next-area",
    ]
)


def html_to_text(html: str) -> str:
    """Renders the main text of a documentation page: headings with `#`, list items with `-`, `pre`
    verbatim.
    """
    from lxml import html as lxml_html

    try:
        root = lxml_html.fromstring(html.encode(), parser=lxml_html.HTMLParser(encoding="utf-8"))
    except (ValueError, SyntaxError):
        return ""
    pieces: list[str] = []
    _render(root, pieces, verbatim=False)
    text = "".join(pieces).replace("\u00b6", "").replace("\u00a0", " ")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _render(node: Any, pieces: list[str], verbatim: bool) -> None:
    tag = node.tag if isinstance(node.tag, str) else ""
    classes = (node.get("class") or "").split() if tag else []
    if tag and tag not in _DROPPED and not _DROPPED_CLASSES.intersection(classes):
        block = tag in _BLOCKS
        if block:
            pieces.append("\n" if tag in ("li", "tr", "dt", "dd") else "\n\n")
        if tag == "li":
            pieces.append("- ")
        elif len(tag) == 2 and tag[0] == "h" and tag[1].isdigit():
            pieces.append("#" * int(tag[1]) + " ")
        elif tag == "br":
            pieces.append("\n")
        inner_verbatim = verbatim or tag == "pre"
        _append_text(node.text, pieces, inner_verbatim)
        for child in node:
            _render(child, pieces, inner_verbatim)
        if tag in ("td", "th"):
            pieces.append("  ")
        if block:
            pieces.append("\n")
    _append_text(node.tail, pieces, verbatim)


def _append_text(text: str | None, pieces: list[str], verbatim: bool) -> None:
    if not text:
        return
    if not verbatim:
        text = re.sub(r"\s+", " ", text)
        if text[0] == " " and (not pieces or pieces[-1].endswith(("\n", " "))):
            text = text[1:]
    if text:
        pieces.append(text)


def read_text(path: Path) -> str | None:
    """Reads a file's text, unpacking gzip and dictzip; returns None if it is not UTF-8."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def turns_to_text(turns: list[tuple[str, str]]) -> str:
    """Writes (user, assistant) turns the way the bundled chat template does."""
    lines = []
    for user, assistant in turns:
        lines.append(f"User: {user}\nAssistant: {assistant}{END_OF_TEXT}\n")
    return "".join(lines).removesuffix(END_OF_TEXT + "\n")


def chitchat_dialogues(dataset: Path) -> Iterator[str]:
    """Yields the dialogues of the `chitchat-dataset` package (MIT), each as one document.

    Each has at least two exchanges.
    """
    for dialogue in json.loads(dataset.read_text()).values():
        said = []
        for messages in dialogue["messages"]:
            text = " ".join(message["text"].strip() for message in messages if message["text"])
            said.append(re.sub(r"\s+", " ", text).strip())
        turns = [
            (user, assistant)
            for user, assistant in zip(said[0::2], said[1::2], strict=False)
            if user and assistant
        ]
        if len(turns) >= 2:
            yield turns_to_text(turns)


def wordnet_glosses(data_file: Path) -> Iterator[tuple[str, str]]:
    """Yields (word, gloss) pairs of one WordNet `data.*` file."""
    for line in data_file.read_text().splitlines():
        if line.startswith("  ") or "|" not in line:
            continue
        fields, gloss = line.split("|", 1)
        words = fields.split()
        count = int(words[3], 16)
        for index in range(min(count, 2)):
            word = words[4 + 2 * index].split("(")[0].replace("_", " ")
            yield word, gloss.strip()


def reasoning_questions(task: str, size: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yields (question, answer) pairs of one `reasoning-gym` generator, without long ones."""
    import reasoning_gym

    for entry in reasoning_gym.create_dataset(task, size=size, seed=seed):
        question, answer = entry["question"].strip(), str(entry["answer"]).strip()
        if len(question) < 1500 and 0 < len(answer) < 400:
            yield question, answer
