"""The recipe `reply`: its inventory, clips of files good and bad, rankings, and two encoders on one and two ranks."""

import hashlib
import math
import shutil
import subprocess

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image

import shoestring as ss
from shoestring.core.errors import ConfigError, DataError
from shoestring.core.job import Job
from shoestring.core.world import World
from shoestring.testing import Pool
from shoestring_recipes.reply import __main__ as module
from shoestring_recipes.reply import clips, files, frozen, inventory, matching, page, ranking, task
from shoestring_recipes.reply.model import TwoEncoders
from shoestring_recipes.retrieval.words import TokenReader, terms
from tests.recipes.toys import MODULES, save_pretrained
from tests.rigs.hub.clips import gif, make_clip, playlist

# -- inventory ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_emoji_have_pictures_tags_and_texts_that_do_not_give_each_other_away():
    every = inventory.emoji(MODULES)
    assert 1800 < len(every) <= 1911 and len({one.character for one in every}) == len(every)
    grinning = next(one for one in every if one.character == "\U0001f600")
    assert {"grinning", "face", "smiling"} <= set(grinning.tags.split()) and grinning.texts[0] == "grinning face"
    assert any("happy" in text or "joy" in text for text in grinning.texts[1:])
    for one in every:
        stems = [set(terms(text)) for text in one.texts]
        assert all(stems) and sum(map(len, stems)) == len(set.union(*stems)), one
    assert np.mean([len(one.texts) > 1 for one in every]) > 0.8
    for art in inventory.ARTS:
        pictures = inventory.pictures(art, MODULES)
        assert pictures.shape == (len(every), 3, 32, 32) and pictures.dtype == torch.uint8
        flat = pictures.flatten(1)
        assert (flat.amin(1) < 250).all() and len(flat.unique(dim=0)) > 0.98 * len(every)
    red = inventory.pictures("twitter", MODULES)[[one.name for one in every].index("heavy black heart")]
    middle = red[:, 10:20, 12:20].float().mean((1, 2))
    assert middle[0] > 180 > 90 > middle[1]  # the place in the sheet is right
    assert inventory.texts_of(["red heart", "heart", "love", "lovely", "a_b", "c", "d"]) == (
        "red heart", "love a b c", "d",
    )  # fmt: skip


def test_missing_and_other_packages_are_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inventory, "GLOBAL", ())
    with pytest.raises(ConfigError, match=r"`emoji-datasource` is not installed.*\n?.*npm install emoji-datasource@16"):
        inventory.open_pinned(inventory.DATA)
    with pytest.raises(ConfigError, match="`emojilib` is not installed"):
        inventory.open_pinned(inventory.KEYWORDS, str(tmp_path))
    path = tmp_path / "node_modules" / inventory.DATA.package / inventory.DATA.path
    path.parent.mkdir(parents=True)
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    shutil.copy(f"{MODULES}/{inventory.DATA.package}/{inventory.DATA.path}", path)
    assert inventory.open_pinned(inventory.DATA) == path
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is not the file of the version that the recipe `reply` needs"):
        inventory.open_pinned(inventory.DATA)
    monkeypatch.setattr(inventory, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"`vaderSentiment` is not installed.*\n?.*shoestring\[reply\]"):
        inventory.open_pinned(inventory.DESCRIPTIONS)


def test_no_text_is_in_two_parts_and_untaught_emoji_in_one():
    taught, judged = task.data(MODULES, every=10, seed=3)
    parts = [set(taught.texts), set(judged.texts), set(judged.validation)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == sum(len(one.texts) for one in taught.inventory)
    untaught = set(judged.untaught)
    assert len(untaught) == round(0.1 * len(taught.inventory))
    assert not untaught & {number for number, _ in taught.texts + judged.validation}
    assert {number for number, _ in taught.texts} | untaught == set(range(len(taught.inventory)))
    validated = [number for number, _ in judged.validation]
    assert len(validated) == len(set(validated)) > 0
    assert all(text in taught.inventory[number].texts for number, text in judged.texts)
    again, other = task.data(MODULES, every=10, seed=3)[0], task.data(MODULES, every=10, seed=4)[0]
    assert again.fingerprint == taught.fingerprint != other.fingerprint
    batch = task.joined([taught[0], taught[1]])
    arts = [clips.corners(inventory.pictures(art, MODULES)[::10]) for art in inventory.ARTS]
    for row, art in enumerate(arts):
        assert torch.equal(batch["frames"][row], art[batch["number"][row]])
    assert not torch.equal(arts[0], arts[1]) and batch["text"].ndim == batch["tags"].ndim == 2
    with pytest.raises(ConfigError, match="no text is left to teach"):
        task.data(MODULES, every=10, held_out=1.0)


# -- clips -------------------------------------------------------------------------------------------------------------


def test_frames_of_an_emoji_show_what_no_other_frame_shows():
    pictures = inventory.pictures("twitter", MODULES)[::40]
    frames = clips.corners(pictures)
    assert frames.shape[1:] == (clips.QUARTERS, 3, clips.SIDE, clips.SIDE)
    whole = [clips.animated(picture) for picture in pictures[:5]]
    assert torch.equal(torch.stack([clips.quarters(one) for one in whole]), frames[:5]) and len(whole[0]) == clips.STEPS
    pairs = [(one, two) for one in range(4) for two in range(one)]
    differ = [(frames[:, one] != frames[:, two]).flatten(1).any(1).float().mean() for one, two in pairs]
    assert min(differ) > 0.9
    marks = torch.zeros(1, 3, 32, 32, dtype=torch.uint8)
    for number, (top, left) in enumerate([(0, 0), (0, 31), (31, 31), (31, 0)]):
        marks[0, :, top, left] = number + 1
    assert [frame.unique().tolist() for frame in clips.corners(marks)[0]] == [[0, 1], [0, 2], [0, 3], [0, 4]]
    assert [clips.quarters(torch.arange(count)).tolist() for count in (1, 2, 4, 16)] == [
        [0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 2, 3], [2, 6, 10, 14],
    ]  # fmt: skip


NAMES = ("red", "lime", "blue", "yellow")
COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]


def save_coloured(path, size=(40, 30), times=3, **options):
    """A clip of four plain colours, each for some frames."""
    frames = [Image.new("RGB", size, colour) for colour in COLOURS for _ in range(times)]
    for number, frame in enumerate(frames):
        frame.putpixel((0, number % size[1]), (1, 2, 3))  # or a GIF's writer merges equal frames
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=80, **options)
    return path


def save_video(path):
    """An MP4 of four plain colours, each for half a second."""
    sources = [f"color={name}:size=64x48:rate=10:duration=0.5" for name in NAMES]
    inputs = [word for source in sources for word in ("-f", "lavfi", "-i", source)]
    coding = ["-filter_complex", "concat=n=4", "-c:v", "libx264", "-preset", "ultrafast", "-pix_fmt", "yuv420p"]
    subprocess.run(["ffmpeg", "-v", "error", "-y", *inputs, *coding, str(path)], check=True, timeout=60)
    return path


def colours_of(frames):
    return frames[:, :, 8:16, 8:16].float().mean((2, 3)).round()


def test_clips_of_all_formats_are_read(tmp_path):
    wanted = torch.tensor(COLOURS).float()
    for path, options in ((tmp_path / "a.gif", {}), (tmp_path / "a.webp", {"lossless": True})):
        frames = clips.read_clip(save_coloured(path, **options))
        assert frames.shape == (4, 3, 24, 24) and frames.dtype == torch.uint8
        assert torch.equal(colours_of(frames), wanted)
    Image.new("RGBA", (30, 50), (0, 0, 255, 0)).save(tmp_path / "one.gif")
    Image.new("RGBA", (30, 50), (0, 0, 255, 0)).save(tmp_path / "one.webp")
    for name in ("one.gif", "one.webp"):  # one frame, transparent
        assert (clips.read_clip(tmp_path / name) == 255).all()
    video = clips.read_clip(save_video(tmp_path / "four.mp4"))
    assert video.shape == (4, 3, 24, 24) and (colours_of(video) - wanted).abs().max() < 40  # video loses some colour
    make_clip(tmp_path / "short.mp4", "64x48", 0.1, "-frames:v", "1", sound=True)
    still = clips.read_clip(tmp_path / "short.mp4")
    assert all(torch.equal(still[0], frame) for frame in still)
    moving = clips.animated(inventory.pictures("twitter", MODULES)[0])
    (tmp_path / "emoji.gif").write_bytes(clips.gif(moving, enlarged=1))
    again = clips.read_clip(tmp_path / "emoji.gif")
    assert (again.float() - clips.quarters(moving).float()).abs().mean() < 4  # a GIF has 256 colours


def test_bad_clips_are_refused_before_they_cost(tmp_path, monkeypatch):
    good = save_coloured(tmp_path / "good.gif").read_bytes()
    save_coloured(tmp_path / "good.webp", lossless=True)
    make_clip(tmp_path / "good.mp4")
    bad = {
        "cut.gif": (good[: len(good) // 2], "damaged"),
        "head.gif": (good[:12], "damaged"),
        "cut.webp": ((tmp_path / "good.webp").read_bytes()[:60], "damaged"),
        "cut.mp4": ((tmp_path / "good.mp4").read_bytes()[:700], "damaged or too large"),
        "bomb.gif": (gif(65535), "damaged|pixels"),
        "large.gif": (gif(9000), "81,000,000|pixels"),
        "list.mp4": (playlist(tmp_path / "good.mp4"), "no GIF, WebP or MP4"),
        "picture.gif": (b"<svg/>", "no GIF, WebP or MP4"),
        "empty.gif": (b"", "no GIF, WebP or MP4"),
    }
    for name, (content, message) in bad.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message) as refused:
            clips.read_clip(tmp_path / name)
        assert name in str(refused.value) and "\n" not in str(refused.value.args[0])
    with pytest.raises(DataError, match="cannot be read"):
        clips.read_clip(tmp_path)
    make_clip(tmp_path / "wide.mp4", "320x240")
    for limit, value, name in (("PIXELS", 4000, "wide.mp4"), ("FRAMES", 5, "good.mp4"), ("FRAMES", 5, "good.gif"),
                               ("WORK", 6000, "good.gif"), ("LARGEST", 100, "good.gif"), ("PIXELS", 1000, "good.webp"),
                               ("MEMORY", 1 << 20, "good.mp4")):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(clips, limit, value)
            with pytest.raises(DataError, match=name):
                clips.read_clip(tmp_path / name)
    monkeypatch.setattr(clips, "_ENVIRONMENT", {"PATH": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"`good.mp4` needs ffmpeg.*\n?.*apt install ffmpeg"):
        clips.read_clip(tmp_path / "good.mp4")


# -- rankings ----------------------------------------------------------------------------------------------------------


def test_measures_are_those_counted_by_hand():
    scores = np.array([[3.0, 1, 2], [0, 0, 0], [5, 9, 7]])
    assert ranking.ranks(scores, [0, 1, 2]).tolist() == [1, 3, 2]  # equal scores find nothing
    places = np.array([1, 2, 10, 11, 30, 31])
    assert ranking.recall(places).tolist() == [1, 1, 1, 0, 0, 0]
    wanted = [1, 1 / math.log2(3), 1 / math.log2(11), 1 / math.log2(12), 1 / math.log2(31), 0]
    assert ranking.gain(places) == pytest.approx(wanted)


def test_groups_and_methods_are_compared():
    tags = ["happy face", "sad face", "dog", "cat"]
    texts = [(0, "happiness"), (1, "tears"), (2, "dogs"), (3, "a cat"), (3, "")]
    ours = np.eye(4)[[0, 1, 2, 0, 3]]
    compared = ranking.compared(texts, tags, {ranking.OURS: ours}, [3], [(0, "happiness"), (2, "dog")])
    assert {name: np.flatnonzero(own).tolist() for name, own in compared.groups.items()} == {
        ranking.HELD_OUT: [0, 1, 2], ranking.SHARED: [0, 2], ranking.UNSHARED: [1], ranking.UNTAUGHT: [3, 4],
    }  # fmt: skip
    assert compared.ranks[ranking.BM25].tolist() == [1, 4, 1, 1, 4]
    assert compared.ranks[ranking.OURS].tolist() == [1, 1, 1, 4, 1]
    report = compared.report()
    assert report["ndcg_30"] == 1 and report["ndcg_30_bm25"] == pytest.approx((2 + 1 / math.log2(5)) / 3)
    assert report["recall_10_untaught"] == 1 and report[ranking.UNSHARED].rows[0][0] == ranking.BM25
    assert "2" in report[ranking.UNTAUGHT].title


# -- encoders ----------------------------------------------------------------------------------------------------------


def toy_batch(first=0, last=8):
    """Samples of six emoji; two have two texts."""
    draw = torch.Generator().manual_seed(5)
    frames = torch.randint(0, 256, (8, 4, 3, 24, 24), generator=draw, dtype=torch.uint8)
    reader, numbers = TokenReader(), torch.tensor([0, 1, 2, 3, 4, 5, 0, 1])
    words = ["happy face", "sad face", "dog", "cat", "red heart", "pizza"]
    texts = ["joy", "tears", "woof", "meow", "love", "food slice", "laugh", "cry"]
    rows = {"text": reader.rows(texts), "tags": reader.rows([words[number] for number in numbers]), "frames": frames}
    return {name: value[first:last] for name, value in (rows | {"number": numbers}).items()}


def test_texts_find_tags_before_training_and_hard_ones_have_vectors():
    torch.manual_seed(0)
    model = TwoEncoders(dimensions=64, width=8).eval()
    assert model.forward()["temperature"].item() == pytest.approx(0.07)  # not its exponential, nor its inverse
    tags = ["happy face", "dog", "красный", "", "cat " * 200]
    frames = torch.zeros(len(tags), 4, 3, 24, 24, dtype=torch.uint8)
    vectors = matching.of_clips(model, tags, frames)
    texts = matching.of_texts(model, ["dogs", "красный", "", "x", "word " * 250_000])
    assert torch.allclose(vectors.norm(dim=1), torch.ones(5), atol=1e-5)
    assert texts.norm(dim=1).round().tolist() == [1, 1, 0, 1, 1] and texts.isfinite().all()
    rows = matching.best(texts, vectors, 2)
    assert [row[0][0] for row in rows[:2]] == [1, 2] and all(len(row) == 2 for row in rows)
    alone = TwoEncoders(dimensions=16, tags=False).eval(), TwoEncoders(dimensions=16, frames=False).eval()
    other = torch.full_like(frames, 200)
    assert torch.equal(matching.of_clips(alone[0], tags, frames), matching.of_clips(alone[0], [""] * 5, frames))
    assert not torch.allclose(matching.of_clips(alone[0], tags, frames), matching.of_clips(alone[0], tags, other))
    assert torch.equal(matching.of_clips(alone[1], tags, frames), matching.of_clips(alone[1], tags, other))
    with pytest.raises(ConfigError, match="neither tags nor frames"):
        TwoEncoders(tags=False, frames=False)


def test_words_that_were_not_taught_are_left_out():
    known = matching.vocabulary(["happy faces", "red heart"])
    assert known == {"happi", "face", "red", "heart"}
    assert matching.known_words("I am happiness, your FACE!", known) == "happiness, FACE!"
    assert matching.known_words("слово", known) == "слово" and matching.known_words("", known) == ""
    assert len(matching.known_words("heart " * 200_000, known)) < 10_000
    taught, judged = task.data(MODULES, every=10, seed=3)
    stems = matching.vocabulary([*taught.words, *(one.tags for one in taught.inventory)])
    assert taught.words == [text for _, text in taught.texts]
    left = [(words, text) for words, (_, text) in zip(judged.words, judged.texts, strict=True) if words != text]
    assert len(left) > 20 and all(matching.vocabulary([words]) < matching.vocabulary([text]) for words, text in left)
    unknown = [text for words, (_, text) in zip(judged.words, judged.texts, strict=True) if words == text]
    assert all(set(terms(text)) <= stems or not set(terms(text)) & stems for text in unknown)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Folder of a tiny BERT."""
    folder = tmp_path_factory.mktemp("bert")
    save_pretrained(folder, "Bert")
    return str(folder)


def test_maps_of_a_frozen_encoder_begin_as_its_own_vectors_and_every_parameter_learns(bert):
    torch.manual_seed(0)
    model, reader = TwoEncoders(bert, width=8, dropout=0.3), frozen.FrozenReader(bert)
    texts = ["small ant", "", "large dog cow", "bee " * 500]
    rows = reader.rows(texts)
    assert rows.shape == (4, 16) and torch.allclose(rows[2], reader.each(texts[2:3])[0], atol=1e-6)
    assert torch.allclose(matching.of_texts(model.eval(), texts), rows, atol=1e-6)
    alone = TwoEncoders(bert, frames=False).eval()
    assert torch.allclose(matching.of_clips(alone, texts, toy_batch()["frames"][:4]), rows, atol=1e-6)
    assert matching.read_by(model, "an ant", frozenset({"ant"})) == "an ant"
    batch = toy_batch() | {"text": reader.rows(["ant", "bee", "cow", "dog"] * 2), "tags": rows.repeat(2, 1)}
    task.contrastive(task.forward(model.train(), batch), batch)[0].backward()
    assert all(one.grad is not None and one.grad.any() for one in model.parameters())


def test_vectors_have_the_same_bits_in_whatever_batches_samples_are_read(bert, monkeypatch):
    """A resumed run reads other batches first. The reader's numbers say which texts were read together."""

    def each(reader, texts):
        return [torch.tensor([float(len(texts)), hash(tuple(texts)) % 1e6]) for _ in texts]

    for reader in (frozen.FrozenReader.each, each):
        monkeypatch.setattr(frozen.FrozenReader, "each", reader)
        first, second = (task.data(MODULES, every=10, frozen=bert)[0] for _ in range(2))
        forwards = first.__getitems__(range(len(first)))
        backwards = [second[index] for index in reversed(range(len(second)))][::-1]
        for one, other in zip(forwards, backwards, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_frozen_encoders_that_cannot_be_used_are_one_line(bert, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="encoded by another model"):
        TwoEncoders(bert)(text=torch.zeros(2, 3, dtype=torch.int64))
    for model, rows in ((TwoEncoders(bert), torch.zeros(2, 17)), (TwoEncoders(dimensions=8), torch.zeros(2, 16))):
        with pytest.raises(ConfigError, match="encoded by another model"):
            model(text=rows)
    with pytest.raises(ConfigError, match=r"model\.frozen and model\.folder"):
        TwoEncoders(bert, folder=bert)
    with pytest.raises(ConfigError, match=r"frozen and \.tokenizer"):
        task.data(MODULES, frozen=bert, tokenizer=bert)
    for content, message in (("{", "no readable"), ('{"hidden_size": -1}', "hidden size -1")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=message):
            TwoEncoders(str(tmp_path))
    monkeypatch.setattr(frozen, "PACKAGE", "nowhere")
    frozen.folder_of.cache_clear()
    with pytest.raises(ConfigError, match="all-MiniLM-L6-v2, which"):
        TwoEncoders(frozen.MINILM)


@pytest.mark.parametrize("file", frozen.FILES)
def test_other_files_in_the_place_of_the_published_ones_are_refused(file, tmp_path, monkeypatch):
    model = tmp_path / "minilm_package" / "model"
    model.mkdir(parents=True)
    (model.parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(frozen, "PACKAGE", "minilm_package")
    contents = {name: name.encode() for name in frozen.FILES}
    monkeypatch.setattr(frozen, "FILES", {name: hashlib.sha256(value).hexdigest() for name, value in contents.items()})
    for name, content in contents.items():
        (model / name).write_bytes(content)
    frozen.folder_of.cache_clear()
    assert frozen.folder_of(frozen.MINILM) == str(model)
    (model / file).write_bytes(b"other")
    frozen.folder_of.cache_clear()
    with pytest.raises(ConfigError, match=f"{file}. is not the file of all-MiniLM"):
        frozen.folder_of(frozen.MINILM)
    (model / file).unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        frozen.folder_of(frozen.MINILM)
    frozen.folder_of.cache_clear()


def test_the_order_of_frames_matters_and_every_parameter_learns():
    torch.manual_seed(0)
    batch = toy_batch()
    model = TwoEncoders(dimensions=16, width=8, blind=0.5)
    flipped = batch | {"frames": batch["frames"].flip(1)}
    forward = [task.forward(model.eval(), one)["clip"] for one in (batch, flipped)]
    assert not torch.allclose(*forward, atol=1e-4)
    total, count = task.contrastive(task.forward(model.train(), batch), batch)
    total.backward()
    assert count == 8 and all(one.grad is not None and one.grad.any() for one in model.parameters())
    blind = TwoEncoders(dimensions=16, width=8, blind=1.0, augment=False).train()
    blind.moving[0].p = 0.0
    assert torch.equal(*(blind.clip(rows, batch["frames"]) for rows in (batch["tags"], batch["tags"].flip(0))))
    blind.augment = True
    assert not torch.equal(*(blind.clip(batch["tags"], batch["frames"]) for _ in range(2)))


def test_other_texts_of_an_emoji_are_no_negatives():
    torch.manual_seed(1)
    numbers = torch.tensor([4, 7, 4])
    texts, clip = (F.normalize(torch.randn(3, 5), dim=1) for _ in range(2))
    output = {"text": texts, "clip": clip, "number": numbers, "temperature": torch.tensor(0.5)}
    total, count = task.contrastive(output, {})
    scores = (texts @ clip.T / 0.5).tolist()
    losses = []
    for own, others in ((0, [0, 1]), (1, [0, 1, 2]), (2, [1, 2])):
        for row in (scores[own], [line[own] for line in scores]):
            losses.append(math.log(sum(math.exp(row[other]) for other in others)) - row[own])
    assert count == 3 and float(total) == pytest.approx(sum(losses) / 2, rel=1e-5)


def detached(output, batch):
    """The fault of a gather that has no gradients, as torch's own."""
    gathered = {name: [torch.empty_like(output[name]) for _ in range(2)] for name in ("text", "clip", "number")}
    for name, parts in gathered.items():
        dist.all_gather(parts, output[name].detach().contiguous())
    every = {name: torch.cat(parts) for name, parts in gathered.items()}
    own = torch.arange(4) + 4 * dist.get_rank()
    repeated = output["number"][:, None] == every["number"]
    repeated[torch.arange(4), own] = False
    losses = (
        F.cross_entropy(
            (output[one] @ every[other].T / output["temperature"]).masked_fill(repeated, -torch.inf), own,
            reduction="sum",
        )
        for one, other in (("text", "clip"), ("clip", "text"))
    )  # fmt: skip
    return sum(losses) / 2, torch.tensor(4)


def apart(output, batch):
    """The fault of ranks that see their own negatives only."""
    return task.contrastive(output, batch)


def stepped(loss, world, features, first, last):
    """The parameters after a step on some samples."""
    torch.manual_seed(0)
    model = TwoEncoders(dimensions=8, width=4, dropout=0.0, blind=0.0, augment=False)
    model.moving[0].p = 0.0
    job = ss.compose(Job(model, task.forward, loss, world=world), (ss.optim.SGD(lr=0.5), *features))
    job.step(toy_batch(first, last))
    parameters = torch.cat([value.detach().flatten() for value in job.model.parameters()])
    job.close()
    return parameters


def differences():
    """How far two ranks' step is from one process's, by loss."""
    world = World.current()
    whole = stepped(task.contrastive, World(), (), 0, 8)
    parts = 4 * world.rank, 4 * world.rank + 4
    return {
        loss.__name__: float((stepped(loss, world, (ss.parallel.DDP(),), *parts) - whole).abs().max())
        for loss in (task.contrastive, detached, apart)
    }


@pytest.mark.slow
def test_two_ranks_learn_what_one_does_and_missing_gradients_are_seen():
    with Pool(2, timeout=100) as pool:
        for result in pool.call(differences):
            assert result["contrastive"] < 1e-5 and min(result["detached"], result["apart"]) > 1e-3, result


# -- files -------------------------------------------------------------------------------------------------------------


def test_messages_and_clips_are_read_and_their_words_taken(tmp_path):
    (tmp_path / "hello.txt").write_text("I am so happy\n")
    assert files.read(tmp_path / "hello.txt") == {"message": "I am so happy"}
    sample = files.read(save_coloured(tmp_path / "Happy-dance_2.gif"))
    assert sample["words"] == "Happy dance 2" and sample["frames"].shape == (4, 3, 24, 24)
    for content, message in ((b"", "no words"), ("😀 !".encode(), "no words"), (b"GIF89a", "damaged")):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(DataError, match=message):
            files.read(tmp_path / "bad")
    with pytest.raises(DataError, match="cannot be read"):
        files.read(tmp_path / "nothing")
    text, clip = {"message": "one"}, {"frames": torch.zeros(4, 3, 24, 24), "words": "two"}
    assert task.joined([text, text]) == {"message": ["one", "one"]} and task.joined([clip])["words"] == ["two"]
    with pytest.raises(DataError, match="no common batch"):
        task.joined([text, clip])


def test_lines_and_folders_for_the_page(tmp_path, capsys):
    lines = tmp_path / "lines.txt"
    lines.write_text("one\n\n  \n😀\nслово\n" + "x" * 5000 + "\n")
    assert module.messages_of(lines) == ["one", "слово", "x" * 5000]
    for content in (b"", b"\n \n", b"\xff\xfe\x00", b"y" * ((1 << 20) + 1)):
        lines.write_bytes(content)
        with pytest.raises(DataError, match=r"has no words|cannot be read as text"):
            module.messages_of(lines)
    lines.write_text("word\n" * (module.MESSAGES + 1))
    with pytest.raises(DataError, match="501 messages"):
        module.messages_of(lines)
    assert module.main(["run", str(lines), "--count", "0"]) != 0
    assert "--count is 0" in capsys.readouterr().err
    folder = tmp_path / "gifs"
    (folder / "deep").mkdir(parents=True)
    save_coloured(folder / "deep" / "sad_cat.gif")
    (folder / "<b>.gif").write_bytes(b"GIF89a")
    errors = []
    own = module.of_folder(folder, errors)
    assert own.names == ["deep/sad_cat.gif"] and own.tags == ["sad cat"] and own.frames.shape == (1, 4, 3, 24, 24)
    assert own.shown(0) == (folder / "deep" / "sad_cat.gif").read_bytes()
    assert errors == [error for error in errors if error.startswith("left out: `<b>.gif`")] and len(errors) == 1
    with pytest.raises(DataError, match="has no clip that can be read"):
        module.of_folder(tmp_path / "nowhere", [])


def test_the_page_shows_texts_as_text_and_keeps_its_size(tmp_path, monkeypatch):
    content = clips.gif(torch.tensor([0, 200], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 3, 8, 8))
    row = [page.Reply("<i>cat</i>", content, 0.5), page.Reply("dog", b"RIFF", 0.25)]
    path = page.save_page(tmp_path / "page.html", ["<script>alert(1)</script>", "two"], [row, row[:1]], "By <somebody>")
    text = path.read_text()
    assert "<script>alert" not in text and "<i>cat" not in text and "By &lt;somebody&gt;" in text
    assert text.count("data:image/gif;base64,") == 2 and text.count("data:image/webp;base64,") == 1
    assert "img-src data:" in text and "default-src 'none'" in text
    monkeypatch.setattr(page, "_LIMIT", len(content) + 1)
    page.save_page(path, ["one"], [[row[0], row[0]]])
    assert path.read_text().count("data:image/gif") == 1 and "no room for this clip" in path.read_text()
