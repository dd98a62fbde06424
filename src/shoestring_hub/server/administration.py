"""Commands for administrators on the hub's machine: people, cleaning and checks. No web page offers these actions."""

from __future__ import annotations

from typing import Any

from shoestring.core.errors import ConfigError
from shoestring_hub.server.configure import Place, configure, require_hub
from shoestring_hub.server.serve import prepare


def add_person(place: Place, name: str) -> list[str]:
    """Create the person unless there is one with this name, and a link for setting the person's password.

    Raises:
        ConfigError: the name is malformed.
    """
    configure(place)
    prepare()
    from django.contrib.auth.tokens import default_token_generator
    from django.core.exceptions import ValidationError
    from django.urls import reverse
    from django.utils.encoding import force_bytes
    from django.utils.http import urlsafe_base64_encode

    from shoestring_hub.server.models import Person

    person = Person.objects.filter(username=name).first()
    if person is None:
        person = Person(username=name)
        person.set_unusable_password()
        try:
            person.full_clean(exclude=["password"])
        except ValidationError as error:
            raise ConfigError(f"`{name}` cannot be a name: {' '.join(error.messages)}") from error
    person.is_active = True
    person.save()
    names = {
        "uidb64": urlsafe_base64_encode(force_bytes(person.pk)),
        "token": default_token_generator.make_token(person),
    }
    start = f"https://{place.name}" if place.name else "http://127.0.0.1:8000"
    return [f"{name} sets a password here, once:", f"{start}{reverse('reset_password', kwargs=names)}"]


def deactivate(place: Place, name: str) -> str:
    """End all access of a person at once: sessions, tokens and pages. The person's runs remain.

    Raises:
        ConfigError: there is no hub, or no such person.
    """
    require_hub(place)
    configure(place)
    from shoestring_hub.server.models import Person, Token

    person = Person.objects.filter(username=name).first()
    if person is None:
        raise ConfigError(f"there is no person `{name}`")
    Person.objects.filter(pk=person.pk).update(is_active=False)
    removed, _ = Token.objects.filter(person=person).delete()
    return f"{name} is deactivated; {removed} tokens and what they had deposited were removed"


def clean(place: Place) -> str:
    """Remove runs and clips that were deleted longer ago than the grace period, bytes that nothing refers to, and
    sessions that have expired.

    Raises:
        ConfigError: there is no hub, or a backup of it is being made.
    """
    require_hub(place)
    configure(place)
    from django.core.management import call_command
    from django.utils import timezone

    from shoestring_hub.server import chunks, clip_files
    from shoestring_hub.server.backup import files_stay
    from shoestring_hub.server.models import GRACE, HubClip, HubRun

    counts = []
    with files_stay(place, removing=True):
        for model in (HubRun, HubClip):
            old: Any = model.objects.filter(deleted__lt=timezone.now() - GRACE)
            counts.append(old.count())
            old.delete()
        removed = chunks.remove_unused() + clip_files.remove_unused()
    call_command("clearsessions")
    return f"removed {counts[0]} deleted runs, {counts[1]} deleted clips, and {removed} files that nothing refers to"


def figures(place: Place) -> list[str]:
    """Metrics of the hub in Prometheus' text format, for the folder from which a collector reads such files.

    Raises:
        ConfigError: there is no hub.
    """
    require_hub(place)
    configure(place)
    from shoestring_hub.server import clip_queue

    lines = []
    for name, value in clip_queue.figures().items():
        lines += [f"# TYPE shoestring_hub_{name} gauge", f"shoestring_hub_{name} {value:g}"]
    return lines


def check(place: Place) -> list[str]:
    """Problems that Django's `check --deploy` reports for the hub's settings; empty if there are none."""
    configure(place)
    from django.core.checks import run_checks

    return [f"{message.id}: {message.msg}" for message in run_checks(include_deployment_checks=True)]
