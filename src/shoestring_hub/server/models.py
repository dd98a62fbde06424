"""The hub's tables. Chunks of files and converted clips lie in folders: see `chunks.py` and `clip_files.py`."""

from __future__ import annotations

import hashlib
import secrets
from datetime import timedelta

from django.contrib.auth.models import AbstractUser
from django.db import models
from django.utils import timezone

from shoestring_hub.protocol import PATH_LIMIT

NAME = 200
"""Maximum length of names, in characters; longer names of runs are truncated."""
TEXT = 500
"""Maximum length of a value in the table of runs, in characters; longer values are truncated."""
COMMENT = 5000
"""Maximum length of a comment, in characters."""
INVITED_FOR = timedelta(days=7)
GRACE = timedelta(days=30)
"""Period during which a deleted run or clip can be restored."""


class Role(models.IntegerChoices):
    """What a person may do in a project; each role includes the rights of the roles before it."""

    READER = 1, "reader"
    WRITER = 2, "writer"
    OWNER = 3, "owner"


class Person(AbstractUser):
    """Somebody who can sign in. Deactivating a person ends all access at once; the person's runs remain."""


class Project(models.Model):
    """A set of runs and the people who may see them; other people cannot learn that the project exists."""

    slug = models.SlugField(max_length=60, unique=True)
    notes = models.TextField(blank=True, max_length=50_000)
    created = models.DateTimeField(default=timezone.now)
    people = models.ManyToManyField(Person, through="Member", related_name="projects")


class Member(models.Model):
    """The role of a person in a project."""

    project = models.ForeignKey(Project, models.CASCADE, related_name="memberships")
    person = models.ForeignKey(Person, models.CASCADE, related_name="memberships")
    role = models.PositiveSmallIntegerField(choices=Role)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "person"], name="one_role_per_project")]


def digest_of(secret: str) -> str:
    """The digest of a secret, which is stored in its place; secrets have 256 random bits, so one SHA-256 is enough."""
    return hashlib.sha256(secret.encode()).hexdigest()


def draw_secret(prefix: str) -> str:
    """Draw a new secret at random; the hub shows it only once."""
    return f"{prefix}_{secrets.token_urlsafe(32)}"


class Invitation(models.Model):
    """A link by which one person joins a project; the link works once and expires."""

    project = models.ForeignKey(Project, models.CASCADE, related_name="invitations")
    role = models.PositiveSmallIntegerField(choices=Role)
    digest = models.CharField(max_length=64, unique=True)
    made_by = models.ForeignKey(Person, models.CASCADE)
    created = models.DateTimeField(default=timezone.now)
    used = models.DateTimeField(null=True)


class Token(models.Model):
    """A secret with which a person's program acts in one project, with at most the person's present role."""

    project = models.ForeignKey(Project, models.CASCADE, related_name="tokens")
    person = models.ForeignKey(Person, models.CASCADE, related_name="tokens")
    machine = models.CharField(max_length=NAME)
    digest = models.CharField(max_length=64, unique=True)
    write_only = models.BooleanField(default=False)
    created = models.DateTimeField(default=timezone.now)
    used = models.DateTimeField(null=True)


class Deposit(models.Model):
    """Records that a write-only token has sent a chunk; the hub tells such a token only about chunks it has sent."""

    token = models.ForeignKey(Token, models.CASCADE, related_name="deposits")
    digest = models.CharField(max_length=64)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["token", "digest"], name="one_deposit_per_chunk")]


class HubRun(models.Model):
    """A run; `size` and `attempt` describe its log: every write to the log compares and updates both."""

    project = models.ForeignKey(Project, models.CASCADE, related_name="runs")
    number = models.PositiveIntegerField()
    """Number of the run within its project; counted per project, so that it reveals nothing about other projects."""
    key = models.CharField(max_length=32)
    name = models.CharField(max_length=NAME)
    person = models.ForeignKey(Person, models.PROTECT, related_name="runs")
    token = models.ForeignKey(Token, models.SET_NULL, null=True)
    created = models.DateTimeField(default=timezone.now)
    updated = models.DateTimeField(default=timezone.now, db_index=True)
    status = models.CharField(max_length=20, default="unfinished")
    attempt = models.PositiveIntegerField(default=0)
    size = models.BigIntegerField(default=0)
    rewrites = models.PositiveIntegerField(default=0)
    """Number of times that existing bytes of the log were replaced; open pages must reload after each replacement."""
    notes = models.TextField(blank=True, max_length=50_000)
    archived = models.BooleanField(default=False)
    deleted = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["project", "key"], name="one_run_per_key"),
            models.UniqueConstraint(fields=["project", "number"], name="one_run_per_number"),
        ]

    @property
    def address(self) -> str:
        """Path of the run's page."""
        return f"/{self.project.slug}/runs/{self.number}"


class Tag(models.Model):
    """A keyword for finding runs."""

    run = models.ForeignKey(HubRun, models.CASCADE, related_name="tags")
    name = models.CharField(max_length=50)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "name"], name="one_tag_per_name")]


class File(models.Model):
    """A file of a run: its path, and the chunks that make up its bytes."""

    run = models.ForeignKey(HubRun, models.CASCADE, related_name="files")
    path = models.CharField(max_length=PATH_LIMIT)
    size = models.BigIntegerField()
    chunks = models.JSONField(default=list)
    changed = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "path"], name="one_file_per_path")]


class Segment(models.Model):
    """A compressed section of a run's log; `Points` holds the values in it."""

    run = models.ForeignKey(HubRun, models.CASCADE, related_name="segments")
    offset = models.BigIntegerField()
    size = models.IntegerField()
    digest = models.CharField(max_length=64)
    data = models.BinaryField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "offset"], name="one_segment_per_offset")]


class ValueKey(models.Model):
    """The name of a setting or of a metric in a project."""

    SETTING, METRIC = "setting", "metric"

    project = models.ForeignKey(Project, models.CASCADE, related_name="keys")
    kind = models.CharField(max_length=7)
    name = models.CharField(max_length=NAME)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "kind", "name"], name="one_key_per_name")]


class Points(models.Model):
    """Steps and values of one metric in one segment: first the steps as int64, then the values as float64."""

    segment = models.ForeignKey(Segment, models.CASCADE, related_name="points")
    run = models.ForeignKey(HubRun, models.CASCADE, related_name="points")
    key = models.ForeignKey(ValueKey, models.CASCADE)
    offset = models.BigIntegerField()
    data = models.BinaryField()

    class Meta:
        indexes = [models.Index(fields=["run", "key", "offset"], name="points_in_order")]


class RunValue(models.Model):
    """A setting, or the last value of a metric: as text to show, and as a finite number to sort and filter by."""

    run = models.ForeignKey(HubRun, models.CASCADE, related_name="values")
    key = models.ForeignKey(ValueKey, models.CASCADE)
    text = models.CharField(max_length=TEXT)
    number = models.FloatField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["run", "key"], name="one_value_per_key")]


class HubClip(models.Model):
    """A video that belongs to a project, or to one of its runs; its `ClipJob` says how far the conversion is."""

    project = models.ForeignKey(Project, models.CASCADE, related_name="clips")
    run = models.ForeignKey(HubRun, models.CASCADE, null=True, related_name="clips")
    number = models.PositiveIntegerField()
    """Number of the clip within its project; counted per project, so that it reveals nothing about other projects."""
    key = models.CharField(max_length=64)
    """Digest of what was uploaded and of what it belongs to, so that a repeated upload finds the clip."""
    name = models.CharField(max_length=NAME)
    notes = models.TextField(blank=True, max_length=50_000)
    person = models.ForeignKey(Person, models.PROTECT, related_name="clips")
    created = models.DateTimeField(default=timezone.now, db_index=True)
    chunks = models.JSONField(default=list)
    """Chunks of the uploaded file; empty once the clip is converted."""
    size = models.BigIntegerField()
    """Bytes that the clip takes: those of the uploaded file, then those of the video and its poster."""
    video = models.CharField(max_length=64, blank=True)
    """Digest of the converted video; empty until there is one. Digests are the names of files (see `clip_files.py`)."""
    poster = models.CharField(max_length=64, blank=True)
    """Digest of the picture that is shown before the video plays."""
    width = models.PositiveIntegerField(default=0)
    height = models.PositiveIntegerField(default=0)
    seconds = models.FloatField(default=0)
    hidden = models.DateTimeField(null=True)
    """When an owner hid the clip; owners and the person who sent it still see it."""
    deleted = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["project", "key"], name="one_clip_per_key"),
            models.UniqueConstraint(fields=["project", "number"], name="one_clip_per_number"),
        ]

    @property
    def address(self) -> str:
        """Path of the clip's page."""
        return f"/{self.project.slug}/clips/{self.number}"


class ClipJob(models.Model):
    """The conversion of a clip. A worker that holds the job has a lease: each new holder gets the next epoch, and what
    a holder of an earlier epoch writes is refused."""

    WAITING, HELD, DONE, FAILED = "waiting", "held", "done", "failed"

    clip = models.OneToOneField(HubClip, models.CASCADE, related_name="job")
    state = models.CharField(max_length=7, default=WAITING, db_index=True)
    epoch = models.PositiveIntegerField(default=0)
    tries = models.PositiveIntegerField(default=0)
    due = models.DateTimeField(default=timezone.now)
    """When a worker may take the job; for a held job, the end of the lease."""
    progress = models.FloatField(default=0)
    """Fraction of the clip that has been converted."""
    reason = models.CharField(max_length=TEXT, blank=True)
    """Why the last attempt failed, in words for the person who sent the clip."""


class ClipShare(models.Model):
    """A link by which whoever has it sees one clip, without signing in, until the link expires or is revoked."""

    clip = models.ForeignKey(HubClip, models.CASCADE, related_name="shares")
    digest = models.CharField(max_length=64, unique=True)
    days = models.PositiveSmallIntegerField()
    made_by = models.ForeignKey(Person, models.CASCADE)
    """An owner of the project; the link ends when this person is no longer an owner, or is deactivated."""
    created = models.DateTimeField(default=timezone.now)


class Comment(models.Model):
    """A comment on a run or a clip. A comment that its author has deleted keeps its number, but not its text."""

    run = models.ForeignKey(HubRun, models.CASCADE, null=True, related_name="comments")
    clip = models.ForeignKey(HubClip, models.CASCADE, null=True, related_name="comments")
    number = models.PositiveIntegerField()
    """Number of the comment on its run or clip; counted for each, so that it reveals nothing about other projects."""
    person = models.ForeignKey(Person, models.PROTECT, related_name="comments")
    text = models.TextField(max_length=COMMENT)
    created = models.DateTimeField(default=timezone.now, db_index=True)
    edited = models.DateTimeField(null=True)
    hidden = models.DateTimeField(null=True)
    """When an owner hid the comment; owners and its author still see it."""
    deleted = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["run", "number"], name="one_comment_per_number"),
            models.UniqueConstraint(fields=["clip", "number"], name="one_clip_comment_per_number"),
            models.CheckConstraint(
                condition=models.Q(run=None, clip__isnull=False) | models.Q(run__isnull=False, clip=None),
                name="comment_on_one_thing",
            ),
        ]

    @property
    def target(self) -> HubRun | HubClip:
        """What the comment is on."""
        target = self.run or self.clip
        assert target is not None
        return target


class Mention(models.Model):
    """Records that a comment names a member of its project, as in `@ada`."""

    comment = models.ForeignKey(Comment, models.CASCADE, related_name="mentions")
    person = models.ForeignKey(Person, models.CASCADE, related_name="mentions")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["comment", "person"], name="one_mention_per_person")]


class Follow(models.Model):
    """Records that a person follows another person or a project; without effect while the two share no project."""

    follower = models.ForeignKey(Person, models.CASCADE, related_name="follows")
    person = models.ForeignKey(Person, models.CASCADE, null=True, related_name="followed_by")
    project = models.ForeignKey(Project, models.CASCADE, null=True, related_name="followed_by")
    created = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["follower", "person"], name="one_follow_per_person"),
            models.UniqueConstraint(fields=["follower", "project"], name="one_follow_per_project"),
        ]


class AuditEvent(models.Model):
    """An action on a web page, or an attempt at one; `act` is the name of the page's route."""

    SIGNED_IN, REFUSED = "sign_in", "sign_in_failed"

    time = models.DateTimeField(default=timezone.now, db_index=True)
    project = models.ForeignKey(Project, models.SET_NULL, null=True, related_name="events")
    person = models.CharField(max_length=150)
    """Name of the person, which stays after the person is gone; for a failed sign-in, the name that was typed."""
    act = models.CharField(max_length=40)
    path = models.CharField(max_length=NAME)

    class Meta:
        indexes = [models.Index(fields=["act", "person", "time"], name="acts_of_a_person")]
