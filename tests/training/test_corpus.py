"""Extraction, filters and deduplication of training text."""

from email.message import Message
from importlib import metadata

import pytest

from training.corpus.build import CorpusWriter, SourceRecord, permissive_licence
from training.corpus.dedup import Deduplicator, drop_repeated_lines, is_readable
from training.corpus.extract import html_to_text, turns_to_text

LINES = [f"line number {i} says something long enough to count\n" for i in range(20)]


def test_a_copy_and_a_near_copy_are_dropped_and_new_text_is_kept() -> None:
    dedup = Deduplicator(max_seen=0.6)
    assert dedup.add("".join(LINES[:10]))
    assert not dedup.add("".join(LINES[:10]))
    assert not dedup.add("a short first line\n" + "".join(LINES[2:11]))
    assert dedup.add("".join(LINES[8:20]))


def test_short_lines_do_not_make_two_documents_alike() -> None:
    dedup = Deduplicator()
    assert dedup.add("import os\nimport sys\n" + LINES[0])
    assert dedup.add("import os\nimport sys\n" + LINES[1])


def test_blocked_text_never_reaches_training() -> None:
    dedup = Deduplicator()
    dedup.block(["".join(LINES[:10])])
    assert not dedup.add("".join(LINES[:9]))


def test_boilerplate_lines_are_kept_once() -> None:
    seen: set[int] = set()
    first = drop_repeated_lines(LINES[0] + "short\n" + LINES[1], seen)
    second = drop_repeated_lines(LINES[0] + "short\n" + LINES[2], seen)
    assert first == (LINES[0] + "short\n" + LINES[1]).rstrip("\n")
    assert second == "short\n" + LINES[2].rstrip("\n")


def test_tables_of_numbers_are_not_readable() -> None:
    assert is_readable("Words that people wrote, one after another.\n" * 20)
    assert not is_readable("0.123, 4.567, 8.901, 2.345,\n" * 50)
    assert not is_readable("too short")
    assert not is_readable("x" * 5000)


def test_html_keeps_the_text_and_code_and_drops_navigation() -> None:
    pytest.importorskip("lxml")
    html = (
        "<html><head><title>t</title></head><body><nav>menu</nav><h1>Title<a"
        " class='headerlink'>#</a></h1><p>Some <b>bold</b>\n "
        " text.</p><ul><li>one</li><li>two</li></ul><pre>if x:\n    y()</pre><div"
        " class='sphinxsidebar'>links</div></body></html>"
    )
    text = html_to_text(html)
    assert text.startswith("# Title\n")
    assert "Some bold text." in text
    assert "- one\n" in text
    assert "if x:\n    y()" in text
    assert "menu" not in text
    assert "links" not in text


def test_turns_end_like_the_chat_template() -> None:
    text = turns_to_text([("a", "b"), ("c", "d")])
    assert text == "User: a\nAssistant: b<|endoftext|>\nUser: c\nAssistant: d"


class _Distribution(metadata.Distribution):
    def __init__(self, **fields: str) -> None:
        self._message = Message()
        for name, value in fields.items():
            self._message[name.replace("_", "-")] = value

    @property
    def metadata(self) -> Message:  # type: ignore[override]
        return self._message

    def read_text(self, filename: str) -> str | None:
        return None

    def locate_file(self, path: object) -> object:  # type: ignore[override]
        return path


@pytest.mark.parametrize(
    ("fields", "permissive"),
    [
        ({"License_Expression": "BSD-3-Clause"}, True),
        ({"Classifier": "License :: OSI Approved :: MIT License"}, True),
        ({"License": "Apache 2.0"}, True),
        ({"License_Expression": "MPL-2.0 AND MIT"}, False),
        ({"Classifier": "License :: OSI Approved :: GNU Lesser General Public License v3"}, False),
        ({"License": "as you like it"}, False),
        ({}, False),
    ],
)
def test_only_clearly_permissive_packages_are_used(
    fields: dict[str, str], permissive: bool
) -> None:
    assert (permissive_licence(_Distribution(**fields)) is not None) == permissive


def test_a_second_build_replaces_the_first(tmp_path: object) -> None:
    from pathlib import Path

    out = Path(str(tmp_path))
    for _ in range(2):
        writer = CorpusWriter(out)
        writer.write(
            SourceRecord("s", "1", "MIT", "docs", "train"), ["".join(LINES), "".join(LINES)]
        )
        writer.write_manifest()
    assert len((out / "train" / "docs.jsonl").read_text().splitlines()) == 1
    assert '"dropped": 1' in (out / "manifest.json").read_text()
