"""Adapters of a server: chosen by name, loaded and removed by administrators, and never from where they may not be."""

import json
import logging
import os
import threading
from contextlib import contextmanager

import httpx2 as httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from shoestring.core.errors import CheckpointError, ConfigError
from shoestring.decode.engine import generate
from shoestring.decode.serve.server import serving
from shoestring.decode.settings.generation import Sampling
from shoestring.decode.settings.serving import Serving
from shoestring.models import adapter_folder
from shoestring.models.adapters import row_norms
from shoestring.models.loading import load_model
from shoestring.verbs.serve import build_app
from tests.decode.small_adapters import save_adapter, save_base
from tests.decode.small_server import KEYS, model, tokenizer

ADMIN = "an-administrators-key"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A base, adapters `one` and `two` that may be loaded, and one that may not."""
    home = tmp_path_factory.mktemp("home")
    built = model()
    save_base(built, tokenizer(), home / "chats" / "base")  # with a template, which starts a process
    base = save_base(built, tokenizer(None), home / "base")
    for number, name in enumerate(("allowed/one", "allowed/two", "elsewhere/three")):
        save_adapter(built, home / name, base, number)
    return home


@contextmanager
def running(home, *, base="base", slots=4, keys=(), **settings):
    options = {"port": 0, "grace": 5.0, "slots": slots, "adapters_folder": home / "allowed", "admin_keys": (ADMIN,)}
    app = build_app(str(home / base), Serving(**options | {"api_keys": keys} | settings))
    with serving(app) as url, httpx.Client(base_url=url, timeout=30) as http:
        http.app = app
        yield http
    assert app.worker.unfinished == 0
    assert app.worker.engine.cache.adapters == [None] * slots


@pytest.fixture(scope="module")
def server(home):
    entries = (f"one={home / 'allowed/one'}", f"team/two={home / 'allowed/two'}")
    with running(home, base="chats/base", adapter=entries) as http:
        yield http


def administrate(http, what, key=ADMIN, **fields):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return http.post(f"/v1/{what}_lora_adapter", json=fields, headers=headers)


def wanted(path, prompt, count, seed):
    """The text of a model or of a merged adapter."""
    merged, tokens = load_model(path)[0], tokenizer()
    start = tokens.encode(prompt)
    stream = tokens.stream(start)
    drawn_tokens = generate(merged, start, max_new=count, sampling=Sampling(seed=seed), stop=[tokens.end_of_text])
    return "".join(map(stream.add, drawn_tokens)) + stream.rest()


def completed(http, name, prompt="def f(x):", count=24, seed=3, **fields):
    body = {"prompt": prompt, "max_tokens": count, "seed": seed, "model": name} | fields
    return http.post("/v1/completions", json={key: value for key, value in body.items() if value is not None})


def names(http):
    return [card["id"] for card in http.get("/v1/models").json()["data"]]


@pytest.mark.slow
def test_each_text_comes_from_the_adapter_that_the_request_names(home, server):
    paths = {None: "base", "base": "base", "one": "allowed/one", "team/two": "allowed/two"}
    answers: dict = {}
    threads = [
        threading.Thread(target=lambda name=name: answers.update({name: completed(server, name)})) for name in paths
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, path in paths.items():
        answer = answers[name].json()
        assert answer["choices"][0]["text"] == wanted(home / path, "def f(x):", 24, 3), name
        assert answer["model"] == (name or "base")
    assert len({answer.json()["choices"][0]["text"] for answer in answers.values()}) == 3
    assert names(server) == ["base", "one", "team/two"]
    assert server.get("/v1/models/team/two").json()["parent"] == "base"
    assert "shoestring_adapters 2" in server.get("/metrics").text
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="-", max_retries=0) as client:
        asked = {"messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 8}
        chats = [client.chat.completions.create(model=name, **asked) for name in ("base", "one", "team/two")]
        pieces = list(client.chat.completions.create(model="one", stream=True, **asked))
        with pytest.raises(openai.NotFoundError, match="no model `three`"):
            client.chat.completions.create(model="three", **asked)
    assert [chat.model for chat in chats] == ["base", "one", "team/two"]
    assert len({chat.choices[0].message.content for chat in chats}) == 3
    assert {piece.model for piece in pieces} == {"one"}
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == chats[1].choices[0].message.content
    assert server.get("/v1/models/three").status_code == 404


@pytest.mark.slow
def test_prompts_are_cached_for_each_adapter_apart(server):
    def cached(name):
        answer = completed(server, name, prompt="a prompt that is long enough to be worth copying", count=1)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(name) for name in ("base", "one", "base", "one", "team/two")] == [0, 0, 47, 47, 0]


def test_a_running_text_ends_with_the_adapter_that_was_removed_and_new_requests_get_404(home):
    with running(home) as http:
        engine, removed = http.app.worker.engine, threading.Event()
        step = engine.step
        engine.step = lambda: step() if engine.counts.passes < 3 or removed.wait(60) else []
        assert names(http) == ["base"]
        assert completed(http, "late").status_code == 404
        assert administrate(http, "load", lora_name="late", lora_path="one").status_code == 200
        body = {"prompt": "abc", "max_tokens": 60, "seed": 1, "model": "late", "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            first = next(line for line in lines if line.startswith("data: {"))
            assert administrate(http, "unload", lora_name="late").text.startswith("Success")
            assert names(http) == ["base"]
            refused = completed(http, "late")
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
            # Another adapter under the same name does not change the running text either.
            assert administrate(http, "load", lora_name="late", lora_path="two").status_code == 200
            assert http.app.worker.unfinished == 1
            removed.set()
            rest = [line for line in lines if line.startswith("data: {")]
        pieces = [json.loads(line[6:])["choices"][0]["text"] for line in (first, *rest)]
        assert "".join(pieces) == wanted(home / "allowed/one", "abc", 60, 1)
        assert completed(http, "late").json()["choices"][0]["text"] == wanted(home / "allowed/two", "def f(x):", 24, 3)


def test_loading_and_removing_in_every_order(home):
    with running(home, max_adapters=2) as http:
        steps = [
            ("unload", {"lora_name": "a"}, 404, "no such adapter"),
            ("load", {"lora_name": "a", "lora_path": str(home / "allowed/one")}, 200, "'a' added successfully"),
            ("load", {"lora_name": "a", "lora_path": "one"}, 400, "is taken"),
            ("load", {"lora_name": "a", "lora_path": "two", "load_inplace": True}, 200, "added"),
            ("load", {"lora_name": "base", "lora_path": "one"}, 400, "not the name"),
            ("load", {"lora_name": "b/c:d", "lora_path": "./one/"}, 200, "added"),
            ("load", {"lora_name": "third", "lora_path": "one"}, 400, "which is the limit"),
            ("unload", {"lora_name": "base"}, 404, "no such adapter"),
            ("unload", {"lora_name": "a", "lora_int_id": 1}, 200, "'a' removed successfully"),
            ("unload", {"lora_name": "a"}, 404, "no such adapter"),
            ("load", {"lora_name": "b", "lora_path": "one", "other": 1}, 400, "`other` is not known"),
            ("load", {"lora_name": "new\nline", "lora_path": "one"}, 400, "not the name"),
            ("load", {"lora_name": "b"}, 400, "lora_path"),
            ("load", {"lora_name": "b", "lora_path": "none"}, 400, "holds no adapter"),
            ("load", {"lora_name": "b", "lora_path": 5}, 400, "lora_path"),
            ("load", {"lora_name": "b", "lora_path": "one\0"}, 400, "not the path"),
        ]
        for what, fields, status, text in steps:
            answer = administrate(http, what, **fields)
            assert (answer.status_code, text in answer.text) == (status, True), (fields, answer.text)
        assert names(http) == ["base", "b/c:d"]
        headers = {"Authorization": f"Bearer {ADMIN}", "Content-Type": "application/json"}
        for content, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400), (b" " * (5 << 20), 413)):
            answer = http.post("/v1/load_lora_adapter", content=content, headers=headers)
            assert answer.status_code == status
        assert http.app.held == 0


def test_only_administrators_load_and_remove(home):
    with running(home, keys=KEYS, adapter=(f"one={home / 'allowed/one'}",)) as http:
        for key in ("", "wrong", KEYS[0], ADMIN + "x"):
            for what in ("load", "unload"):
                answer = administrate(http, what, key, lora_name="one", lora_path="one")
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert completed(http, "one").status_code == 401
        headers = {"Authorization": f"Bearer {ADMIN}"}  # not an API key
        assert http.get("/v1/models", headers=headers).status_code == 401
        assert administrate(http, "unload", lora_name="one").status_code == 200
    with running(home, adapters_folder=None, adapter=(f"one={home / 'allowed/one'}",)) as http:
        for end in ("%0a", "/", "%0A?x", "#"):  # Starlette's patterns ignore a line feed at the end
            body = {"lora_name": "one"}
            answer = http.post(f"/v1/unload_lora_adapter{end}", json=body, follow_redirects=True)
            assert answer.status_code in (401, 404), end
        assert names(http) == ["base", "one"]
        answer = administrate(http, "load", lora_name="two", lora_path="two")
        assert (answer.status_code, "--adapters-folder" in answer.text) == (403, True)
        assert administrate(http, "unload", lora_name="one").status_code == 200
    with running(home, adapters_folder=None, admin_keys=(), adapter=(f"one={home / 'allowed/one'}",)) as http:
        answer = administrate(http, "unload", lora_name="one")
        assert (answer.status_code, "--admin-key-file" in answer.text) == (403, True)
        assert completed(http, "one").status_code == 200


def test_nothing_outside_of_the_permitted_folder_is_read(home, tmp_path):
    allowed, outside = tmp_path / "allowed", home / "elsewhere/three"
    allowed.mkdir()
    (allowed / "link").symlink_to(outside)
    for name, file in (("weights", adapter_folder.WEIGHTS), ("config", adapter_folder.CONFIG)):
        (allowed / name).mkdir()
        for other in (adapter_folder.WEIGHTS, adapter_folder.CONFIG):
            if other == file:
                (allowed / name / other).symlink_to(outside / other)
            else:
                (allowed / name / other).write_bytes((outside / other).read_bytes())
    (allowed / "nested").mkdir()
    (allowed / "nested" / "adapter").symlink_to(outside)
    with running(home, adapters_folder=allowed) as http:
        for path in ("link", "weights", "config", "nested", str(outside), "../allowed/../x", "..", "/", "/etc/passwd"):
            answer = administrate(http, "load", lora_name="x", lora_path=path)
            assert answer.status_code == 403, (path, answer.text)
        assert names(http) == ["base"]
        (allowed / "inner").mkdir()
        (allowed / "real").symlink_to(allowed / "inner")
        for file in (adapter_folder.WEIGHTS, adapter_folder.CONFIG):
            (allowed / "inner" / file).write_bytes((outside / file).read_bytes())
        assert administrate(http, "load", lora_name="x", lora_path="real").status_code == 200  # stays inside


def damaged(home, folder, change):
    """A copy of adapter `one` with a changed configuration and changed tensors."""
    folder.mkdir(parents=True)
    config = json.loads((home / "allowed/one" / adapter_folder.CONFIG).read_text())
    tensors = load_file(home / "allowed/one" / adapter_folder.WEIGHTS)
    tensors = change(config, tensors) or tensors
    (folder / adapter_folder.CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / adapter_folder.WEIGHTS)


def test_adapters_that_do_not_fit_are_refused_by_what_is_wrong_and_the_server_goes_on(home, tmp_path, caplog):
    def doubled(config, tensors):
        return {name: torch.cat([value, value], -1) if "lora_A" in name else value for name, value in tensors.items()}

    def saved(config, tensors):
        config["modules_to_save"] = ["lm_head"]

    def dora(config, tensors):
        config["use_dora"] = True
        return tensors | {
            name.replace("lora_B.weight", "lora_magnitude_vector"): row_norms(value, torch.float32)
            for name, value in tensors.items()
            if "lora_B" in name
        }

    def infinite(config, tensors):
        return {name: value / 0 for name, value in tensors.items()}

    def embedding(config, tensors):
        return tensors | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 259)}

    def unknown(config, tensors):
        return {name.replace("layers.0", "layers.7"): value for name, value in tensors.items()}

    cases = {
        "doubled": (doubled, "for a weight of shape"),
        "saved": (saved, "modules_to_save: lm_head"),
        "dora": (dora, "use_dora"),
        "infinite": (infinite, "not finite"),
        "embedding": (embedding, "adapters of embeddings"),
        "unknown": (unknown, "does not have"),
        "prompt": (lambda config, _: config.update(peft_type="PROMPT_TUNING"), "peft_type"),
        "bias": (lambda config, _: config.update(bias="all"), "bias"),
    }
    for name, (change, _) in cases.items():
        damaged(home, tmp_path / name, change)
    (tmp_path / "pickle").mkdir()
    for file in (adapter_folder.CONFIG, "adapter_model.bin"):
        (tmp_path / "pickle" / file).write_bytes((home / "allowed/one" / adapter_folder.CONFIG).read_bytes())
    damaged(home, tmp_path / "cut", lambda *_: None)
    os.truncate(tmp_path / "cut" / adapter_folder.WEIGHTS, 100)
    damaged(home, tmp_path / "vocabulary", lambda *_: None)
    words = {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}
    content = {"version": "1.0", "added_tokens": [], "model": words}
    (tmp_path / "vocabulary" / "tokenizer.json").write_text(json.dumps(content))
    damaged(home, tmp_path / "large", lambda *_: None)
    os.truncate(tmp_path / "large" / adapter_folder.WEIGHTS, 65 << 20)
    messages = {name: text for name, (_, text) in cases.items()} | {
        "pickle": "cannot load", "cut": "cannot load", "vocabulary": "vocabulary of 2 tokens", "large": "more than the",
    }  # fmt: skip
    with running(home, adapters_folder=tmp_path) as http:
        for name, text in messages.items():
            answer = administrate(http, "load", lora_name=name, lora_path=name)
            assert (answer.status_code, text in answer.text) == (400, True), (name, answer.text)
        assert names(http) == ["base"]
        assert completed(http, "base").json()["choices"][0]["text"] == wanted(home / "base", "def f(x):", 24, 3)
        damaged(home, tmp_path / "other", lambda config, _: config.update(base_model_name_or_path="org/else"))
        with caplog.at_level(logging.WARNING):
            assert administrate(http, "load", lora_name="other", lora_path="other").status_code == 200
        assert "the adapter other was trained on `org/else`" in caplog.text


def test_settings_that_do_not_go_together(home, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"{ADMIN}\n")
    assert Serving(admin_key_file=keys).is_administrator(ADMIN)
    assert not Serving().is_administrator("")
    for options, message in (
        ({"adapter": ("one",)}, "NAME=FOLDER"),
        ({"adapter": ("=x",)}, "NAME=FOLDER"),
        ({"adapter": ("a b=x",)}, "NAME=FOLDER"),
        ({"adapter": ("a=x", "a=y")}, "taken"),
        ({"adapter": ("a=x",), "name": "a"}, "taken"),
        ({"adapter": ("a=x", "b=y"), "max_adapters": 1}, "exceed"),
        ({"adapters_folder": tmp_path}, "--admin-key-file"),
        ({"adapters_folder": tmp_path / "none", "admin_keys": (ADMIN,)}, "is no folder"),
        ({"api_keys": (ADMIN,), "admin_keys": (ADMIN,)}, "both"),
        ({"max_adapters": 0}, "max_adapters"),
    ):
        with pytest.raises(ConfigError, match=message):
            Serving(**options)
    with pytest.raises(CheckpointError, match="holds no adapter"):
        build_app(str(home / "base"), Serving(adapter=(f"x={tmp_path}",)))
    with pytest.raises(ConfigError, match="own name"):
        build_app(str(home / "base"), Serving(adapter=(f"base={home / 'allowed/one'}",)))
