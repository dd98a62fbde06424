"""The recipe `retrieval`: dictionaries, BM25, encoders, the fused ranking, the embedded engine, and communities."""

import gzip
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoestring.core.errors import ConfigError, DataError
from shoestring.naming import resolve
from shoestring_recipes.retrieval import communities, dictionaries, engines, fusion, lexical, mining, pages, task
from shoestring_recipes.retrieval.dictionaries import Pair
from shoestring_recipes.retrieval.lexical import Bm25
from shoestring_recipes.retrieval.model import Encoder
from shoestring_recipes.retrieval.words import BUCKETS, PADDING, TokenReader, padded, terms

HARD = [
    "",
    "   ",
    "word",
    "слово и дело",
    "東京都は日本の首都である",
    "a\x01b \U0001f600 café",
    "x" * 500,
    "the cat sat " * 90_000,
]
"""Texts that are hard to handle: empty ones, one word, other scripts, control characters, one long word, a megabyte."""
BEASTS = ["ant", "bee", "cow", "dog", "elk", "fox", "gnu", "hen"]
ANIMALS = ["the cat sat on the mat", "a dog barked at the cats", "horses run in fields", "fish swim in the sea", ""]


def vectors_of(texts, dimensions=32, seed=0):
    torch.manual_seed(seed)
    model = Encoder(dimensions).eval()
    return model, mining.vectors(model, texts)


# -- dictionaries ------------------------------------------------------------------------------------------------------


def save_dictionary(folder, name, definitions):
    """A dictionary in dictd's format."""
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"

    def number(value):
        return (number(value // 64) if value >= 64 else "") + digits[value % 64]

    text, lines = b"", []
    for word, definition in definitions:
        part = f"{word}\n  {definition}\n".encode()
        lines.append(f"{word}\t{number(len(text))}\t{number(len(part))}")
        text += part
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.dict.dz").write_bytes(gzip.compress(text))
    (folder / f"{name}.index").write_text("\n".join(lines) + "\n")


def test_entries_of_one_word_make_a_pair_without_the_word(tmp_path):
    long = "a large animal with four legs, a mane and hoofs, which pulls carts"
    first = [("00-database-info", "x"), ("horse", f"n 1: {long} [syn: {{horse}}, {{Equus}}]"), ("two words", long)]
    first += [("ox", long), ("sail", long)]
    second = [
        ("Horse", f"Horse \\Horse\\, n. [AS. hors.] {long}; horses and Horseman, not seahorse."),
        ("Sail", "short"),
    ]
    second += [("Horse", f"[WordNet 1.5] taken {long}")]
    save_dictionary(tmp_path, "wn", first)
    save_dictionary(tmp_path, "gcide", second)
    by_word = dictionaries.entries("gcide", tmp_path)
    assert by_word.keys() == {"horse", "sail"} and len(by_word["horse"]) == 2
    pairs = dictionaries.paired(dictionaries.entries("wn", tmp_path), by_word, ["horse", "sail"])
    assert [pair.headword for pair in pairs] == ["horse"]
    assert pairs[0].query.endswith(long) and "syn" not in pairs[0].query
    assert "AS. hors" not in pairs[0].document and "taken" not in pairs[0].document
    words = {word.lower().strip(".,;") for word in pairs[0].document.split()}
    assert "seahorse" in words and not any(word.startswith("hors") for word in words)
    with pytest.raises(ConfigError, match=r"`dict-gcide` is not installed.*apt install dict-gcide"):
        dictionaries.entries("gcide", tmp_path / "nowhere")
    (tmp_path / "wn.index").write_text("horse\t!\tB\n")
    with pytest.raises(DataError, match="damaged at `horse`"):
        dictionaries.entries("wn", tmp_path)
    (tmp_path / "gcide.dict.dz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be read"):
        dictionaries.entries("gcide", tmp_path)


def test_inflections_are_blanked_and_texts_are_bounded():
    text = dictionaries.blanked("running", "To run, runs; a runner, running fast. " * 100)
    assert "running" not in text and "runner" in text and len(text) <= dictionaries.LONGEST
    assert dictionaries.blanked("cat", "cats catch a concatenation") == "a concatenation"


# -- BM25 --------------------------------------------------------------------------------------------------------------

words = st.lists(st.sampled_from(BEASTS), max_size=12).map(" ".join)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(words, min_size=2, max_size=8), words, st.sampled_from(lexical.GRID[:20]))
def test_scores_are_those_of_bm25s(documents, query, chosen):
    import bm25s

    ours = lexical.Index(documents, chosen).scores([query])[0]
    if any(documents) and any(word in " ".join(documents) for word in query.split()):
        other = bm25s.BM25(k1=chosen.k1, b=chosen.b, method="lucene")
        other.index([terms(text, chosen.stem) for text in documents], show_progress=False)
        known = [term for term in terms(query, chosen.stem) if term in other.vocab_dict]
        assert np.allclose(ours, other.get_scores(known), atol=1e-4)
    else:
        assert not ours.any()


def test_settings_and_shares_are_chosen_by_what_finds_most():
    documents = ["he runs daily", "she walked daily", "walk " * 30 + "home daily", "walk home daily"]
    queries = ["running daily", "she walks", "walk walk", "home"]
    best = lexical.chosen(tuple(queries), tuple(documents))
    assert best.stem and best in lexical.GRID
    first = (1 / lexical.ranks(lexical.Index(documents, best).scores(queries))).mean()
    rest = [(1 / lexical.ranks(lexical.Index(documents, other).scores(queries))).mean() for other in lexical.GRID]
    assert first == pytest.approx(max(rest)) and min(rest) < first
    right, wrong = np.eye(4), np.ones((4, 4)) - np.eye(4)
    assert fusion.best_share(right, wrong) > 0.5 and fusion.best_share(wrong, right) < 0.5
    assert np.array_equal(fusion.fused(2 * right, wrong, 1.0), right)
    assert np.array_equal(fusion.fused(np.zeros((4, 4)), right, 0.5), right / 2)


def test_equal_scores_find_nothing_and_hard_negatives_are_others():
    assert lexical.ranks(np.zeros((2, 5))).tolist() == [5, 5]
    assert lexical.ranks(np.array([[3.0, 1, 2], [9, 4, 5]])).tolist() == [1, 3]
    scores = np.array([[9.0, 1, 5, 3], [8, 9, 2, 4], [0, 7, 9, 6], [1, 2, 3, 9]])
    assert lexical.hardest([scores, scores], 2).tolist() == [
        [2, 3], [0, 3], [1, 3], [2, 1], [6, 7], [4, 7], [5, 7], [6, 5]
    ]  # fmt: skip


# -- encoders ----------------------------------------------------------------------------------------------------------


def test_hard_texts_have_vectors_and_scores():
    reader = TokenReader()
    rows = [reader.tokens(text) for text in HARD]
    assert [len(row) for row in rows[:3]] == [0, 0, 1] and len(rows[6]) == 0 and len(rows[7]) == reader.length
    assert len(rows[3]) == 3 and all(row.min() >= 0 and row.max() < BUCKETS for row in rows if len(row))
    assert padded(rows[:2]).tolist() == [[PADDING], [PADDING]]
    torch.manual_seed(0)
    for model in (Encoder(16), Encoder(16, layers=1)):
        norms = np.linalg.norm(mining.vectors(model.eval(), HARD), axis=1)
        assert np.allclose(norms, [len(row) > 0 for row in rows], atol=1e-5)
        alone = model.embed(rows[3][None])
        assert torch.allclose(alone, model.embed(padded([rows[3], rows[7]]))[:1], atol=1e-5)  # padding has no influence
    scores = lexical.Index(HARD, Bm25()).scores(["cat", "слово", "unknown", ""])
    assert scores.shape == (4, len(HARD)) and scores[0].argmax() == 7 and scores[1].argmax() == 3
    assert not scores[2:].any()


def test_training_leaves_tokens_out_and_every_parameter_learns():
    torch.manual_seed(0)
    pairs = [Pair(word, f"{word} {word} small", f"large {word}") for word in BEASTS]
    samples = task.TextPairs(pairs, TokenReader(), np.roll(np.arange(8), 1)[:, None])
    batch = task.joined([samples[number] for number in range(8)])
    assert batch["negatives"].shape[:2] == (8, 1) and torch.equal(batch["negatives"][1, 0], batch["document"][0])
    model = Encoder(16, dropout=0.5)
    assert not torch.equal(model.train().embed(batch["query"]), model.embed(batch["query"]))
    assert torch.equal(model.eval().embed(batch["query"]), model.embed(batch["query"]))
    model = Encoder(16, layers=1, dropout=0.0)
    for layer in model.layers:
        layer.eval()
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(8):
        total, count = task.contrastive(task.forward(model, batch), batch)
        optimizer.zero_grad()
        (total / count).backward()
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
        optimizer.step()
        losses.append(total.item())
    assert losses[-1] < 0.7 * losses[0] and count == 8
    output = task.forward(model, batch)
    without = {name: rows for name, rows in output.items() if name != "negatives"} | {
        "numbers": torch.arange(8)[:, None]
    }
    assert task.contrastive(without, batch)[0] < task.contrastive(output, batch)[0]
    same = torch.nn.functional.normalize(torch.ones(2, 4), dim=-1)
    alike = {"query": same, "document": same, "negatives": same[:, None], "temperature": torch.tensor(1.0)}
    numbers = torch.tensor([[0, 1], [1, 0]])  # the negative of each is the other's document: three candidates each
    assert task.contrastive(alike | {"numbers": numbers}, batch)[0].item() == pytest.approx(np.log(3) + np.log(2))
    samples = task.TextPairs(pairs, TokenReader(), np.roll(np.arange(8), 2)[:, None])
    assert samples.fingerprint != task.TextPairs(pairs, TokenReader(), np.roll(np.arange(8), 1)[:, None]).fingerprint


# -- the embedded engine -----------------------------------------------------------------------------------------------


def test_an_index_finds_by_words_and_by_vectors(tmp_path):
    model, vectors = vectors_of([*ANIMALS, *HARD])
    engine = engines.Tantivy(tmp_path / "index")
    engine.build([*ANIMALS, *HARD], vectors)
    assert len(engine) == len(ANIMALS) + len(HARD)
    by_words = engine.by_words(["cat", "swimming seas", "", "СЛОВО", "(+cat: OR"], 3)
    assert by_words[0].numbers[:2].tolist() != [] and by_words[1].numbers[0] == 3 and len(by_words[2].numbers) == 0
    assert by_words[3].numbers.tolist() == [len(ANIMALS) + 3] and by_words[4].numbers[0] in (0, 1, len(ANIMALS) + 7)
    exact = lexical.Index([*ANIMALS, *HARD], Bm25()).scores(["horses in the sea"])[0]
    (hits,) = engine.by_words(["horses in the sea"], 3)
    assert set(hits.numbers) == set(np.argsort(-exact)[:3]) and (np.diff(hits.scores) <= 0).all()
    asked = mining.vectors(model, ["horses run in fields", ""])
    nearest = engine.by_vectors(asked, 2)
    assert nearest[0].numbers[0] == 2 and nearest[0].scores[0] == pytest.approx(1, abs=1e-5)
    for share in (0.0, 0.5, 1.0):
        (first, none) = engines.search(engine, ["horses run in fields", ""], asked, share, 3)
        assert first.numbers[0] == 2 and len(first.numbers) == 3 and np.isfinite(none.scores).all()
    assert len(engine.by_words(["cat " * 50_000], 1)[0].numbers) == 1  # a query of a megabyte


def test_an_index_is_replaced_as_a_whole(tmp_path):
    _, vectors = vectors_of(ANIMALS)
    engine = engines.Tantivy(tmp_path / "index", stem=False)
    with pytest.raises(ConfigError, match=r"holds no such index.*build it first"):
        engine.by_words(["cat"], 1)
    engine.build(ANIMALS, vectors)
    assert engine.by_words(["cats"], 5)[0].numbers.tolist() == [1]  # without stems

    def broken():
        yield from ANIMALS[:2]
        raise RuntimeError("the source failed")

    with pytest.raises(RuntimeError, match="the source failed"):
        engine.build(broken(), vectors[:1])
    with pytest.raises(DataError, match="5 documents and 2 vectors"):
        engine.build(ANIMALS, vectors[:2])
    assert len(engines.Tantivy(tmp_path / "index", stem=False)) == 5
    with pytest.raises(ConfigError, match="with the same `stem`"):
        engines.Tantivy(tmp_path / "index").by_words(["cat"], 1)
    engine.build(ANIMALS[:2], vectors[:2])
    assert len(engine) == 2 and [path.name for path in tmp_path.iterdir()] == ["index"]
    (tmp_path / "index" / "vectors.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="holds no such index"):
        engines.Tantivy(tmp_path / "index", stem=False).by_vectors(vectors, 1)


# -- communities -------------------------------------------------------------------------------------------------------


def save_pages(folder, count=60):
    """Communities of which each has words of its own, among common ones."""
    draws = np.random.default_rng(0)
    for number, name in enumerate(("sound", "network", "disks")):
        (folder / name / "deep").mkdir(parents=True)
        for page in range(count):
            special = [f"w{number}x{draws.integers(30)}" for _ in range(10)]
            common = [f"c{draws.integers(40)}" for _ in range(30)]
            posts = "".join(f"<p>{' '.join(draws.permutation([*special, *common]))}</p>" for _ in range(3))
            text = f"<html><head><title>no</title></head><nav><p>{'menu ' * 40}</p></nav><main>{posts}</main></html>"
            (folder / name / ("deep" if page % 2 else "") / f"{page}.html").write_text(text)
    (folder / "sound" / "binary.html").write_bytes(b"\0\1\2")
    (folder / "small").mkdir()


def test_posts_are_assigned_to_their_communities(tmp_path):
    save_pages(tmp_path)
    collection = communities.read(tmp_path)
    assert sorted(collection.communities) == ["disks", "network", "sound"] and collection.unread == [
        "sound/binary.html"
    ]
    assert len(collection.posts) == 3 * 60 * 3 and not any("menu" in post.text for post in collection.posts)
    parts = communities.divided(collection.posts, 1)
    pages_of = [{post.page for post in part} for part in parts]
    assert sum(map(len, pages_of)) == 180 == len(set.union(*pages_of)) and len(pages_of[0]) == 108
    belonging, judged, threshold = communities.studied(collection, 1)
    right, sure, posts = judged.counts(threshold)
    assert right / max(sure, 1) >= 0.9 and right / posts > 0.6 and judged.base_rate == pytest.approx(1 / 3)
    assert judged.calibration_error() < 0.1
    candidates, probabilities = belonging.predict(HARD)
    assert candidates.shape == probabilities.shape == (len(HARD), 3) and np.isfinite(probabilities).all()
    with pytest.raises(DataError, match="fewer than two folders"):
        communities.read(tmp_path / "small")


def test_calibration_and_thresholds_are_those_counted_by_hand():
    judged = communities.JudgedPosts(np.array([0.95, 0.95, 0.92, 0.6, 0.05]), np.array([1, 1, 0, 1, 0], bool), 4)
    assert judged.calibration_error() == pytest.approx((abs(2.82 - 2) + abs(0.6 - 1) + 0.05) / 5)
    assert judged.base_rate == 0.6 and judged.counts(0.6) == (3, 4, 4)
    assert (
        judged.threshold(0.3) == 0.6 and judged.threshold() == np.inf
    )  # Wilson's bounds of 3 of 4: 0.301; of 2 of 2: 0.34
    many = communities.JudgedPosts(np.repeat([0.9, 0.5, 0.1], 100), np.repeat([True, True, False], 100), 200)
    assert many.threshold() == 0.5 and many.counts(np.inf) == (0, 0, 200)


def test_texts_of_all_forms_are_read(tmp_path):
    (tmp_path / "plain.txt").write_bytes("one\ntwo\n\n\nthree \xff".encode("latin-1"))
    assert pages.paragraphs(tmp_path / "plain.txt") == ["one two", "three \ufffd"]
    (tmp_path / "page.html.gz").write_bytes(gzip.compress(b"<p>a<b>b</b></p><script>no</script><li>c<li>d & e"))
    assert pages.paragraphs(tmp_path / "page.html.gz") == ["ab", "c", "d & e"]
    (tmp_path / "large.txt").write_bytes(b"word " * 210_000)
    assert len(pages.paragraphs(tmp_path / "large.txt")[0]) > 1_000_000
    for name, content, reason in (("a.txt", b"\0", "not a text"), ("b.txt.gz", b"no", "cannot be read")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=reason):
            pages.paragraphs(tmp_path / name)
    with pytest.raises(DataError, match="cannot be read"):
        pages.paragraphs(tmp_path)


@pytest.mark.parametrize(
    ("package", "module", "name"),
    [
        ("tantivy", "words", "tantivy"),
        ("scipy", "lexical", "scipy"),
        ("sklearn.linear_model", "communities", "scikit-learn"),
    ],
)
def test_a_missing_package_is_one_line_of_error(monkeypatch, package, module, name):
    for loaded in [loaded for loaded in sys.modules if loaded.startswith("shoestring_recipes.retrieval.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs {name}.*pip install \"shoestring\[retrieval\]\""):
        resolve(
            f"shoestring_recipes.retrieval.{module}:np"
            if module != "words"
            else f"shoestring_recipes.retrieval.{module}:torch",
            "run.data",
        )
