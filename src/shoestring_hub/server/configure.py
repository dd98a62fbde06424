"""Configures Django for a hub's folder. Settings depend only on the arguments, never on environment variables."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from shoestring.core.errors import ConfigError, ShoestringError
from shoestring.storage.guarded import private_folder, read_regular
from shoestring.storage.whole import write_atomic

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
DAYS_SIGNED_IN = 14
KEY = "secret.key"
"""File of a hub with the key that signs its links; every hub has one."""
_SERVER = "shoestring_hub.server"
_PARTS = {name: Path(str(resources.files(name))) for name in ("shoestring.report", _SERVER)}
STATIC = (_PARTS["shoestring.report"] / "web", _PARTS[_SERVER] / "static")
"""Folders of scripts and styles: those of the report package, which also draw the hub's charts, and the hub's own."""
_MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    f"{_SERVER}.policy.ContentSecurityPolicy",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    f"{_SERVER}.opening.OpeningPages",
]
_TEMPLATES = {
    "BACKEND": "django.template.backends.django.DjangoTemplates",
    "APP_DIRS": True,
    "OPTIONS": {
        "context_processors": ["django.template.context_processors.request", f"{_SERVER}.opening.page_variables"],
        "builtins": [f"{_SERVER}.pages.filters"],
    },
}
_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"console": {"class": "logging.StreamHandler"}},
    "loggers": {
        "django": {"handlers": ["console"], "level": "WARNING"},
        "django.request": {"level": "ERROR"},  # refused requests are normal, so their warnings are not logged
    },
}


@dataclass(frozen=True)
class Place:
    """Location of a hub: its folder, its database, and the host name under which browsers reach it."""

    folder: Path
    database: str = ""
    """URL of a PostgreSQL database; empty for SQLite in the folder."""
    name: str = ""
    """Host name if the hub is reached over TLS; empty if the hub is reached only from this machine."""

    @property
    def chunks(self) -> Path:
        """Folder of the chunks of all projects."""
        return self.folder / "chunks"

    @property
    def clips(self) -> Path:
        """Folder of the converted clips of all projects."""
        return self.folder / "clips"

    @property
    def work(self) -> Path:
        """Folder in which clips are converted."""
        return self.folder / "work"

    @property
    def bundles(self) -> Path:
        """Folder of scripts and styles that `serve` joins, so that browsers fetch fewer files."""
        return self.folder / "bundles"


@dataclass(frozen=True)
class Opening:
    """Measures that make pages open fast; each can be switched off alone, so that it can be measured alone."""

    keep_templates: bool = True
    """Whether browsers store the texts of templates and fetch only the data of pages."""
    send_differences: bool = True
    """Whether browsers that have an earlier state of a page get only what has changed."""
    fetch_ahead: bool = True
    """Whether browsers fetch pages that the pointer is about to open."""

    @property
    def uses_worker(self) -> bool:
        """Whether a service worker in the browser assembles pages."""
        return self.keep_templates or self.send_differences


FAST = Opening()


@dataclass(frozen=True)
class ClipService:
    """Whether and how the hub takes clips."""

    workers: int = 1
    """Number of processes that convert clips."""
    quota: float = 20.0
    """Maximum size of the clips of a project, in gigabytes."""
    accel: str = ""
    """Address below which nginx sends the folder of clips; empty if the hub sends them itself."""
    off: str = ""
    """Why the hub takes no clips; empty if it takes them."""


CLIPS = ClipService()


def require_hub(place: Place) -> None:
    """Raise ConfigError if a folder has no hub, before `configure` makes one in it."""
    if not (place.folder / KEY).is_file():
        raise ConfigError(
            f"there is no hub in `{place.folder}`", hint=f"to make one: shoestring hub serve {place.folder}"
        )


def configure(place: Place, opening: Opening = FAST, clips: ClipService = CLIPS) -> None:
    """Configure Django; call this once per process, before importing any other module of the server.

    Raises:
        ConfigError: Django is not installed, or the URL of the database is malformed.
    """
    try:
        import django
        from django.conf import settings
    except ImportError as error:
        raise ConfigError(f"the hub needs Django ({error})", hint='pip install "shoestring[hub]"') from error
    private_folder(place.folder.parent.resolve(), place.folder.name)
    place.bundles.mkdir(exist_ok=True)
    settings.configure(**django_settings(place, opening, clips))
    django.setup()


def django_settings(place: Place, opening: Opening = FAST, clips: ClipService = CLIPS) -> dict[str, Any]:
    """Django's settings. Cookies are restricted to TLS, and browsers told to insist on TLS, only with a host name."""
    tls = bool(place.name)
    return {
        "HUB": place,
        "HUB_OPENING": opening,
        "HUB_CLIPS": clips,
        "SECRET_KEY": _secret_key(place.folder / KEY),
        "DEBUG": False,
        "ALLOWED_HOSTS": [place.name] if tls else list(LOOPBACK),
        "INSTALLED_APPS": [
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.sessions",
            "django.contrib.staticfiles",
            f"{_SERVER}.apps.HubConfig",
        ],
        "MIDDLEWARE": _MIDDLEWARE,
        "ROOT_URLCONF": f"{_SERVER}.urls",
        "TEMPLATES": [_TEMPLATES],
        "DATABASES": {"default": _database(place)},
        "AUTH_USER_MODEL": "hub.Person",
        "AUTH_PASSWORD_VALIDATORS": [
            {"NAME": f"django.contrib.auth.password_validation.{rule}"}
            for rule in ("UserAttributeSimilarityValidator", "MinimumLengthValidator", "CommonPasswordValidator")
        ],
        "LOGIN_URL": "/sign-in",
        "SESSION_COOKIE_AGE": DAYS_SIGNED_IN * 24 * 3600,
        "SESSION_COOKIE_SECURE": tls,
        "CSRF_COOKIE_SECURE": tls,
        "CSRF_COOKIE_HTTPONLY": True,
        "CSRF_TRUSTED_ORIGINS": [f"https://{place.name}"] if tls else [],
        "SECURE_HSTS_SECONDS": 31_536_000 if tls else 0,
        "SECURE_HSTS_INCLUDE_SUBDOMAINS": tls,
        "SECURE_HSTS_PRELOAD": tls,
        "SECURE_SSL_REDIRECT": tls,
        "SECURE_PROXY_SSL_HEADER": ("HTTP_X_FORWARDED_PROTO", "https") if tls else None,
        "SECURE_REFERRER_POLICY": "same-origin",
        "X_FRAME_OPTIONS": "DENY",
        "STATIC_URL": "/static/",
        "STATIC_ROOT": place.folder / "static",
        "STATICFILES_DIRS": (*STATIC, ("bundles", place.bundles)),
        "STORAGES": {
            "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
            "staticfiles": {"BACKEND": "whitenoise.storage.CompressedManifestStaticFilesStorage"},
        },
        "USE_TZ": True,
        "TIME_ZONE": "UTC",
        "USE_I18N": False,
        "DATA_UPLOAD_MAX_MEMORY_SIZE": 8 << 20,
        "DATA_UPLOAD_MAX_NUMBER_FIELDS": 200,
        "LOGGING": _LOGGING,
    }


def _secret_key(path: Path) -> str:
    """The key that signs sessions; drawn at random at the first start."""
    if not path.exists():
        write_atomic(path, secrets.token_urlsafe(64).encode())
        path.chmod(0o600)
    try:
        return read_regular(path, 1000, private=True).decode()
    except (OSError, ValueError) as error:
        raise ShoestringError(f"cannot read `{path}`: {error}", hint="only its owner may write to it") from error


def _database(place: Place) -> dict[str, Any]:
    if not place.database:
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": place.folder / "hub.sqlite3",
            "OPTIONS": {
                # Transactions wait for each other at their start, instead of failing halfway.
                "transaction_mode": "IMMEDIATE",
                "timeout": 30,
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA cache_size=-65536",
            },
        }
    url = urlsplit(place.database)
    if url.scheme not in ("postgresql", "postgres") or not url.path.strip("/"):
        hint = "postgresql://USER:PASSWORD@HOST/NAME"
        raise ConfigError("`--database` is not the URL of a PostgreSQL database", hint=hint)
    query = dict(parse_qsl(url.query))
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(url.path.strip("/")),
        "USER": unquote(url.username or ""),
        "PASSWORD": unquote(url.password or ""),
        "HOST": query.pop("host", None) or url.hostname or "",
        "PORT": url.port or "",
        "CONN_MAX_AGE": 60,
        "CONN_HEALTH_CHECKS": True,
        "OPTIONS": query,
    }
