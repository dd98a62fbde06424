"""Passwords in a store's URL: no message, and no traceback under `--debug`, has one, wherever the user has put it."""

import traceback

import pytest
import tomli_w

from shoestring.core.errors import ShoestringError
from shoestring.tune.store import Store, connect, masked
from shoestring.verbs.study import join_plan, read_plan

SECRETS = ("S3CRET", "CRET", "TAIL")
URLS = (
    "postgresql+psycopg://u:S3CRET@127.0.0.1:1/db",
    "postgresql+psycopg://u:S3@CRET@127.0.0.1:1/db",
    "postgresql+psycopg://u:S3CRET@TAIL@127.0.0.1:1/db",
    "postgresql+psycopg://127.0.0.1:1/db?user=u&password=S3CRET",
    "postgresql+psycopg://127.0.0.1:1/db?user=u&PASSWORD=S3CRET",
    "postgresql+psycopg://127.0.0.1:1/db?host=127.0.0.1&options=-cS3CRET%3dx",
    "postgresql+psycopg://u:S3CRET/x@127.0.0.1:1/db",
    "postgresql+psycopg://u:S3%2FCRET@127.0.0.1:1/db",
    "postgresql+psycopg:u:S3CRET@127.0.0.1/db",
    "postgresqlx://u:S3CRET@127.0.0.1/db",
    "postgresql://u:S3:CRET@127.0.0.1:1/db",
    "postgresql+psycopg://us/er:S3CRET@127.0.0.1:1/db",
    "postgresql+psycopg://u:a/b@S3CRET/db@127.0.0.1:1/db",
    "postgresql+psycopg://u:a?S3CRET=b@127.0.0.1:1/db",
    "postgresql+psycopg://u@127.0.0.1:1/db#S3CRET",
    "postgresql+psycopg://u@127.0.0.1:1/db;password=S3CRET",
    "sqlite+pysqlcipher://:S3CRET@/f?cipher=x",
    "sqlite+pysqlcipher://:S3@CRET@/f",
    "sqlite://u:S3CRET@h/f",
    "postgresql+psycopg://u:S3CRET@127.0.0.1:1/db?sslpassword=TAIL",
    "postgresql+psycopg://u:S3CRET@127.0.0.1:notaport/db",
    "postgresql+psycopg://u:p@127.0.0.1:1/db?S3CRET=1",
    "host=127.0.0.1 password=S3CRET dbname=db",
    "S3CRET",
    "",
)


def shown(request):
    try:
        request()
    except ShoestringError as error:
        return "".join(traceback.format_exception(error))
    return ""


@pytest.mark.parametrize("url", URLS)
def test_no_message_has_a_password(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(tomli_w.dumps({"run": {"steps": 10}}))
    space = {"optim.adamw.lr": {"log": [1e-4, 1e-2]}}
    for store in (url, [url], {"url": url}):
        study = {"tune": {"run": "run.toml", "store": store}, "space": space}
        (tmp_path / "tune.toml").write_text(tomli_w.dumps(study))
        said = shown(lambda: read_plan("tune.toml").open_store(create=True))
        assert not any(secret in said for secret in SECRETS), said
    for verb in (lambda: Store(connect(url), "s").create({}), lambda: join_plan(url, "s")):
        said = shown(verb) + masked(url)
        assert said and not any(secret in said for secret in SECRETS), said


def test_what_has_no_password_is_shown():
    for url in ("sqlite:////home/me/a b@c/store.db", "postgresql+psycopg://tune@db.example-1.org:5433/tune_2"):
        assert masked(url) == url
    assert masked("postgresql+psycopg://tune@[::1]:5433/tune") == "postgresql+psycopg://tune@[::1]:5433/tune"
    assert masked("postgresql+psycopg://me:secret@db/tune?sslmode=require") == "postgresql+psycopg://me:***@db/tune"
