"""METEOR by the nltk library, with WordNet's synonyms where WordNet is found."""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from filelock import FileLock

from tapfl.data.cache import root
from tapfl.errors import TapflError

DEBIAN = Path("/usr/share/wordnet")  # packages wordnet-base and wordnet-sense-index
# WordNet's lexicographer files in their order: nltk needs the list, Debian omits it.
NOUNS = ("Tops act animal artifact attribute body cognition communication event feeling food group "
         "location motive object person phenomenon plant possession process quantity relation "
         "shape state substance time")
VERBS = ("body change cognition communication competition consumption contact creation emotion "
         "motion perception possession social stative weather")
LEXNAMES = [("adj.all", 3), ("adj.pert", 3), ("adv.all", 4),
            *((f"noun.{name}", 1) for name in NOUNS.split()),
            *((f"verb.{name}", 2) for name in VERBS.split()), ("adj.ppl", 3)]
CACHED = 100_000  # texts whose tokens are remembered


class Meteor:
    """METEOR of pairs of texts. Without WordNet no synonyms match, and the name must say so."""

    def __init__(self) -> None:
        nltk = _library()
        from nltk.stem import PorterStemmer
        from nltk.tokenize import NLTKWordTokenizer

        found = find_wordnet()
        self.synonyms = found is not None
        # Words come again and again; looking them up is most of the work.
        synsets = (lambda word: []) if found is None else _reader(found).synsets
        self._wordnet = SimpleNamespace(synsets=functools.cache(synsets))
        self._stemmer = SimpleNamespace(stem=functools.cache(PorterStemmer().stem))
        # The references come again with every model that is scored.
        self._tokens = functools.lru_cache(CACHED)(NLTKWordTokenizer().tokenize)
        self.facts = {"library": f"nltk {nltk.__version__}", "wordnet": found and found.name}

    def __call__(self, written: Sequence[str], references: Sequence[str]) -> list[float]:
        """Return the library's score of every pair."""
        from nltk.translate.meteor_score import single_meteor_score

        return [single_meteor_score(self._tokens(reference), self._tokens(text),
                                    stemmer=self._stemmer, wordnet=self._wordnet)
                for text, reference in zip(written, references, strict=True)]


def find_wordnet() -> Path | None:
    """Return a folder that nltk can read: its own, Debian's made complete, or ours."""
    nltk = _library()
    ours = root() / "nltk_data" / "corpora"
    if str(ours.parent) not in nltk.data.path:  # it reads nothing outside of its folders
        nltk.data.path.append(str(ours.parent))
    with contextlib.suppress(LookupError):
        return Path(str(nltk.data.find("corpora/wordnet")))
    archive = None
    with contextlib.suppress(LookupError):  # what nltk's downloader has written
        archive = Path(str(nltk.data.find("corpora/wordnet.zip")))
    if archive is None and not (DEBIAN / "index.sense").is_file():
        return None
    with contextlib.suppress(OSError):  # a cache that cannot be written is no reason to stop
        ours.mkdir(parents=True, exist_ok=True)
        with FileLock(str(ours / "wordnet.lock")):
            if not (ours / "wordnet").is_dir():
                _copy(archive, ours)
        return ours / "wordnet"
    return None


def _copy(archive: Path | None, ours: Path) -> None:
    """Make a folder that nltk can read, from its own archive or from Debian's files."""
    with tempfile.TemporaryDirectory(dir=ours) as partial:
        made = Path(partial) / "wordnet"
        if archive is not None:
            shutil.unpack_archive(archive, partial)
        else:
            shutil.copytree(DEBIAN, made)
            (made / "lexnames").write_text("".join(
                f"{number:02d}\t{name}\t{part}\n"
                for number, (name, part) in enumerate(LEXNAMES)))
        made.rename(ours / "wordnet")


def fetch_wordnet() -> Path:
    """Return WordNet's folder, downloading it where it is missing."""
    found = find_wordnet()
    if found is None:
        _library().download("wordnet", download_dir=str(root() / "nltk_data"), quiet=True)
        found = find_wordnet()
    if found is None:
        raise TapflError("WordNet cannot be fetched here (no connection to nltk's server); install "
                         "Debian's wordnet-base and wordnet-sense-index, or put nltk's wordnet "
                         f"below {root() / 'nltk_data' / 'corpora'}")
    return found


def _reader(folder: Path) -> Any:
    from nltk.corpus.reader import WordNetCorpusReader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this WordNet is English only
        return WordNetCorpusReader(str(folder), None)


def _library() -> Any:
    try:
        import nltk
    except ImportError:
        raise TapflError("evaluation.metrics: meteor needs the nltk library: "
                         "pip install 'tapfl[metrics]'") from None
    return nltk
