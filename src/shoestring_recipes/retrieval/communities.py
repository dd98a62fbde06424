"""Predicts to which communities a post belongs, with calibrated probabilities.

FOLDER has a subfolder for each community, with pages below it, such as the sections of the Linux kernel's documentation
in Debian's package `linux-doc`. A post is a paragraph of a page. Pages, not posts, are divided into those that are
searched, those for training, and those for evaluation.

python -m shoestring_recipes.retrieval.communities FOLDER [POST ...]

prints how well the communities of posts in FOLDER are predicted, and the likeliest communities of each POST, a file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shoestring.core.errors import ConfigError, DataError, ShoestringError
from shoestring_recipes.retrieval.lexical import Bm25, Index, Values
from shoestring_recipes.retrieval.pages import paragraphs

try:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
except ImportError as error:
    raise ConfigError(
        "the recipe `retrieval` needs scikit-learn", hint='pip install "shoestring[retrieval]"'
    ) from error

LINUX = "/usr/share/doc/linux-doc-*/html"
"""Folders in which Debian's packages `linux-doc-…` install the kernel's documentation."""
CANDIDATES = 10
"""Number of communities that are considered for a post: those that BM25 ranks first."""
NEIGHBOURS = 30
"""Number of similar posts from whose communities the community of a post is predicted."""
PRECISE = 0.9
"""Minimum precision of the predictions that count as sure."""
_SHORTEST, _LONGEST = 120, 1200
"""Minimum and maximum number of characters of a post."""
LEFT_OUT = ("translations",)
"""Folders that are not communities: translations are easy to predict, because no other page is in their languages."""
_POSTS, _PAGES = 6, 12
"""Maximum number of posts of a page, and minimum number of pages of a community."""


class Post(NamedTuple):
    """A paragraph of a page."""

    text: str
    community: int
    page: int


class Posts(NamedTuple):
    """The posts of a folder."""

    communities: list[str]
    """Names of the communities."""
    posts: list[Post]
    unread: list[str]
    """Names of files that could not be read."""


def linux_documentation() -> Path:
    """Return the folder with the sections of the kernel's documentation.

    Raises:
        ConfigError: the documentation is not installed.
    """
    folders = sorted(path for path in Path("/").glob(LINUX[1:]) if path.is_dir())
    if not folders:
        raise ConfigError(f"`linux-doc` is not installed: `{LINUX}` is missing", hint="apt install linux-doc")
    return folders[-1]


def read(folder: Path, most: int = 16) -> Posts:
    """Read the posts of the communities in a folder.

    Args:
        most: number of communities, those with most pages.

    Raises:
        DataError: fewer than two communities have enough pages.
    """
    kinds = (".html", ".htm", ".txt", ".rst", ".md", ".html.gz", ".txt.gz", ".rst.gz")
    generated = ("index", "genindex", "search")
    named = (path for path in sorted(folder.iterdir()) if path.name[0] not in "._" and path.name not in LEFT_OUT)
    sections: dict[Path, list[Path]] = {}
    for section in filter(Path.is_dir, named):
        files = (path for path in section.rglob("*") if path.name.endswith(kinds) and path.is_file())
        pages = sorted(path for path in files if path.name.partition(".")[0] not in generated)
        if len(pages) >= _PAGES:
            sections[section] = pages
    chosen = sorted(sections, key=lambda section: (-len(sections[section]), section.name))[:most]
    if len(chosen) < 2:
        raise DataError(f"`{folder}` has fewer than two folders with at least {_PAGES} pages")
    posts, unread, page = list[Post](), list[str](), 0
    for number, section in enumerate(chosen):
        for path in sections[section]:
            try:
                texts = [text[:_LONGEST] for text in paragraphs(path) if len(text) >= _SHORTEST]
            except DataError:
                unread.append(str(path.relative_to(folder)))
                continue
            posts += [Post(text, number, page) for text in dict.fromkeys(texts[:_POSTS])]
            page += 1
    return Posts([section.name for section in chosen], posts, unread)


def divided(posts: Sequence[Post], seed: int) -> tuple[list[Post], list[Post], list[Post]]:
    """Divide posts by page: three fifths of the pages are searched, one fifth is for training, one for evaluation."""
    pages = max(post.page for post in posts) + 1
    part = np.random.default_rng(seed).permutation(pages) % 5
    searched, taught, judging = (
        [post for post in posts if part[post.page] in parts] for parts in ((0, 1, 2), (3,), (4,))
    )
    return searched, taught, judging


class Belonging:
    """Predicts the communities of posts from those of similar posts.

    Args:
        searched: posts whose communities are known. taught: posts from which the probabilities are learned.
        communities: number of communities. settings: settings of BM25.
    """

    def __init__(
        self, searched: Sequence[Post], taught: Sequence[Post], communities: int, settings: Bm25 | None = None
    ) -> None:
        self._index = Index([post.text for post in searched], settings or Bm25())
        self._own = np.array([post.community for post in searched])
        self.communities = communities
        self._model: Any = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
        rows, candidates = self._described([post.text for post in taught])
        right = candidates == np.array([post.community for post in taught])[:, None]
        self._model.fit(rows.reshape(-1, rows.shape[-1]), right.ravel())

    def _described(self, texts: Sequence[str]) -> tuple[Values, Values]:
        """Return the features of each text's candidates, (N, candidates, features), and the candidates' numbers."""
        scores = self._index.scores(texts)
        near = np.argpartition(-scores, min(NEIGHBOURS, scores.shape[1]) - 1, 1)[:, :NEIGHBOURS]
        values = np.take_along_axis(scores, near, 1)
        votes, best = (np.zeros((len(texts), self.communities)) for _ in range(2))
        rows = np.repeat(np.arange(len(texts)), near.shape[1])
        np.add.at(votes, (rows, self._own[near].ravel()), values.ravel())
        np.maximum.at(best, (rows, self._own[near].ravel()), values.ravel())
        candidates = np.argsort(-(best + 1e-6 * votes), 1, kind="stable")[:, :CANDIDATES]
        votes, best = (np.take_along_axis(part, candidates, 1) for part in (votes, best))
        shares = votes / np.maximum(votes.sum(1, keepdims=True), 1e-9)
        other = np.where(np.arange(best.shape[1]) == 0, best[:, 1:2], best[:, :1])
        relative = best / np.maximum(other, 1e-9)
        places = 1 / (1 + np.arange(best.shape[1]))
        of_post = [np.broadcast_to(row, best.shape) for row in (places, np.log1p(best[:, :1]))]
        features = [shares, np.log(shares + 0.01), np.minimum(relative, 3), np.log1p(best), *of_post]
        return np.stack(features, -1), candidates

    def predict(self, texts: Sequence[str]) -> tuple[Values, Values]:
        """Return for each text the numbers of its candidates, (N, candidates), and the probability that it belongs to
        each; both in the order in which BM25 ranks them."""
        rows, candidates = self._described(texts)
        return candidates, self._model.predict_proba(rows.reshape(-1, rows.shape[-1]))[:, 1].reshape(candidates.shape)


@dataclass(frozen=True)
class JudgedPosts:
    """Predictions for posts whose communities are known, one for each pair of a post and a candidate."""

    probabilities: Values
    """Predicted probability that the post belongs to the candidate, (pairs,)."""
    right: Values
    """Whether the post belongs to the candidate, bool (pairs,)."""
    posts: int
    """Number of posts; the community of some may not be among the candidates."""

    @property
    def base_rate(self) -> float:
        """Share of pairs in which the post belongs to the candidate."""
        return float(self.right.mean())

    def calibration_error(self, bins: int = 10) -> float:
        """Return the expected calibration error: the absolute difference of mean predicted probability and observed
        share, averaged over equally wide intervals of probability, each weighted by its number of pairs."""
        places = np.minimum((self.probabilities * bins).astype(int), bins - 1)
        surplus = np.bincount(places, self.probabilities - self.right, bins)
        return float(np.abs(surplus).sum() / len(self.right))

    def threshold(self, precision: float = PRECISE) -> float:
        """Return the smallest threshold at which the precision of predictions is at least `precision` by the lower
        bound of Wilson's 95% interval; infinity if there is none."""
        order = np.argsort(-self.probabilities, kind="stable")
        count = np.arange(1, len(order) + 1)
        share, spread = np.cumsum(self.right[order]) / count, 1.96**2 / count
        lowest = (share + spread / 2 - np.sqrt(spread * (share * (1 - share) + spread / 4))) / (1 + spread)
        sorted_down = self.probabilities[order]
        last = np.append(sorted_down[1:] < sorted_down[:-1], True)  # the last of equal probabilities
        reached = np.flatnonzero((lowest >= precision) & last)
        return float(sorted_down[reached[-1]]) if len(reached) else np.inf

    def counts(self, threshold: float) -> tuple[int, int, int]:
        """Return the numbers of right predictions and of all predictions from a threshold on, and of posts."""
        sure = self.probabilities >= threshold
        return int((sure & self.right).sum()), int(sure.sum()), self.posts


def judged(belonging: Belonging, posts: Sequence[Post]) -> JudgedPosts:
    """Predict the communities of posts whose communities are known, and compare."""
    candidates, probabilities = belonging.predict([post.text for post in posts])
    right = candidates == np.array([post.community for post in posts])[:, None]
    return JudgedPosts(probabilities.ravel(), right.ravel(), len(posts))


def studied(collection: Posts, seed: int = 0) -> tuple[Belonging, JudgedPosts, float]:
    """Train and evaluate a model on the posts of a folder.

    Returns:
        The model, its predictions for posts of pages that it has not seen, and the threshold of sure predictions. The
        threshold is chosen on half of the training pages, with a model that was trained on the other half.
    """
    searched, taught, judging = divided(collection.posts, seed)
    halves = [[post for post in taught if post.page % 2 == half] for half in range(2)]
    count = len(collection.communities)
    threshold = judged(Belonging(searched, halves[0], count), halves[1]).threshold()
    belonging = Belonging(searched, taught, count)
    return belonging, judged(belonging, judging), threshold


def main(argv: Sequence[str]) -> int:
    """Print how well communities are predicted, and the likeliest communities of some files."""
    try:
        collection = read(Path(argv[0]) if argv else linux_documentation())
        belonging, result, threshold = studied(collection)
        right, sure, posts = result.counts(threshold)
        sizes = f"{len(collection.communities)} communities, {len(collection.posts):,} posts"
        print(f"{sizes}, {len(collection.unread)} unreadable files")
        print(f"calibration error {result.calibration_error():.3f} at a base rate of {result.base_rate:.3f}")
        print(f"from {threshold:.2f} on: {right} of {sure} right, {right} of {posts} posts found")
        for path in map(Path, argv[1:]):
            candidates, probabilities = belonging.predict(["\n".join(paragraphs(path))])
            best = np.argsort(-probabilities[0])[:3]
            likely = [f"{collection.communities[candidates[0, at]]} {probabilities[0, at]:.2f}" for at in best]
            print(f"{path.name}: {', '.join(likely)}")
    except ShoestringError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
