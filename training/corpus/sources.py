"""Sources of the bundled family's text.

They are Debian documentation packages, two wheels and installed Python packages.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DebianSource:
    """Documentation from one Debian package.

    Attributes:
        package: Name of the binary package.
        licence: Licence of the text that is taken.
        root: Folder inside the package.
        include: Glob patterns below `root`; `.html` is rendered to text, other files are taken
            unchanged.
        exclude: Substrings of paths that are left out (indexes, generated name lists, other
            languages).
        heldout: Whether the whole package is reserved for evaluation.
    """

    package: str
    licence: str
    root: str
    include: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    heldout: bool = False


_INDEXES = ("genindex", "modindex", "/search.html", "_modules/", "-index", "doc-index", "/_static/")

DEBIAN_SOURCES: tuple[DebianSource, ...] = (
    DebianSource(
        "python3.11-doc", "PSF-2.0", "usr/share/doc/python3.11/html/_sources", ("**/*.txt",)
    ),
    DebianSource(
        "python-sklearn-doc",
        "BSD-3-Clause",
        "usr/share/doc/python-sklearn-doc/html/_sources",
        ("**/*.txt",),
        ("modules/generated",),
    ),
    DebianSource(
        "python-scipy-doc",
        "BSD-3-Clause",
        "usr/share/doc/python-scipy-doc/html",
        ("**/*.html",),
        _INDEXES,
    ),
    DebianSource(
        "python-django-doc",
        "BSD-3-Clause",
        "usr/share/doc/python-django-doc/html",
        ("**/*.html",),
        _INDEXES,
    ),
    DebianSource(
        "ghc-doc",
        "BSD-3-Clause",
        "usr/share/doc/ghc-doc/html",
        ("users_guide/_sources/**/*.txt", "libraries/**/*.html"),
        (*_INDEXES, "/src/", "libraries/ghc-9"),
    ),
    DebianSource(
        "rust-doc",
        "MIT OR Apache-2.0",
        "usr/share/doc/rust-doc/html",
        ("**/*.html",),
        (
            *_INDEXES,
            "/core/",
            "/alloc/",
            "/std/arch/",
            "/std/simd/",
            "/src/",
            "/test/",
            "/implementors/",
            "/proc_macro/",
            "/std/os/",
            "print.html",
            "all.html",
            "html/guide",
        ),
    ),
    DebianSource(
        "erlang-doc",
        "Apache-2.0",
        "usr/share/doc/erlang-doc",
        ("**/html/*.html",),
        (*_INDEXES, "/wx-", "notes.html"),
    ),
    DebianSource(
        "postgresql-doc-15",
        "PostgreSQL",
        "usr/share/doc/postgresql-doc-15/html",
        ("*.html",),
        ("bookindex", "release-", "features-sql"),
    ),
    DebianSource("nodejs-doc", "MIT", "usr/share/doc/nodejs/api", ("*.html",), ("all.html",)),
    DebianSource(
        "apache2-doc", "Apache-2.0", "usr/share/doc/apache2-doc/manual/en", ("**/*.html",)
    ),
    DebianSource(
        "sqlite3-doc",
        "public domain",
        "usr/share/doc/sqlite3",
        ("*.html", "c3ref/*.html"),
        ("keyword_index", "sitemap", "toc"),
        heldout=True,
    ),
    DebianSource(
        "python-pandas-doc",
        "BSD-3-Clause",
        "usr/share/doc/python-pandas-doc/html/_sources",
        ("**/*.txt",),
        ("reference/api",),
        heldout=True,
    ),
)

WORDNET = DebianSource("wordnet-base", "WordNet-3.0", "usr/share/wordnet", ("data.*",))
JARGON = DebianSource("dict-jargon", "public domain", "usr/share/dictd", ("jargon.dict.dz",))

CODE_HELDOUT = frozenset({"networkx"})
"""Installed distributions whose source is kept for evaluation, whole."""

PERMISSIVE_LICENCES = (
    "MIT",
    "BSD",
    "Apache",
    "PSF",
    "Python Software Foundation",
    "ISC",
    "HPND",
    "Unlicense",
    "0BSD",
)
"""A distribution counts as permissive when its licence metadata names one of these and no copyleft
licence.
"""

COPYLEFT_MARKS = (
    "GPL",
    "MPL",
    "General Public",
    "Mozilla",
    "EUPL",
    "CC-BY-SA",
    "Proprietary",
    "NVIDIA",
)

REASONING_TASKS = (
    "basic_arithmetic",
    "chain_sum",
    "products",
    "gsm_symbolic",
    "simple_equations",
    "number_sorting",
    "word_sorting",
    "letter_counting",
    "spell_backward",
    "word_sequence_reversal",
    "syllogism",
    "family_relationships",
    "calendar_arithmetic",
    "time_intervals",
    "leg_counting",
    "propositional_logic",
    "base_conversion",
    "number_filtering",
    "count_primes",
    "gcd",
    "lcm",
    "prime_factorization",
    "fraction_simplification",
    "self_reference",
    "aiw",
    "needle_haystack",
)
"""Generators of the `reasoning-gym` package (Apache-2.0) that give short questions with text
answers.
"""
