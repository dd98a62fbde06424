"""Tables for clips, their conversion and links to them, comments on clips, and the index of the full-text search."""

from importlib import import_module
from typing import Any

import django.db.models.deletion
import django.utils.timezone
from django.conf import settings
from django.db import migrations, models

_people = import_module("shoestring_hub.server.migrations.0002_people")
INDEXED = {"hub_hubclip": ("name", "notes")}


def create_indexes(apps: Any, schema_editor: Any) -> None:
    """Index clips; also index comments again in SQLite, which dropped the index's triggers when it remade the table."""
    tables = dict(INDEXED)
    if schema_editor.connection.vendor == "sqlite":
        tables["hub_comment"] = _people.INDEXED["hub_comment"]
    _people.index_tables(schema_editor, tables)


class Migration(migrations.Migration):
    dependencies = [
        ("hub", "0002_people"),
    ]

    operations = [
        migrations.CreateModel(
            name="HubClip",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("number", models.PositiveIntegerField()),
                ("key", models.CharField(max_length=64)),
                ("name", models.CharField(max_length=200)),
                ("notes", models.TextField(blank=True, max_length=50000)),
                ("created", models.DateTimeField(db_index=True, default=django.utils.timezone.now)),
                ("chunks", models.JSONField(default=list)),
                ("size", models.BigIntegerField()),
                ("video", models.CharField(blank=True, max_length=64)),
                ("poster", models.CharField(blank=True, max_length=64)),
                ("width", models.PositiveIntegerField(default=0)),
                ("height", models.PositiveIntegerField(default=0)),
                ("seconds", models.FloatField(default=0)),
                ("hidden", models.DateTimeField(null=True)),
                ("deleted", models.DateTimeField(null=True)),
                (
                    "person",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT, related_name="clips", to=settings.AUTH_USER_MODEL
                    ),
                ),
                (
                    "project",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="clips", to="hub.project"
                    ),
                ),
                (
                    "run",
                    models.ForeignKey(
                        null=True, on_delete=django.db.models.deletion.CASCADE, related_name="clips", to="hub.hubrun"
                    ),
                ),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(fields=("project", "key"), name="one_clip_per_key"),
                    models.UniqueConstraint(fields=("project", "number"), name="one_clip_per_number"),
                ],
            },
        ),
        migrations.CreateModel(
            name="ClipJob",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("state", models.CharField(db_index=True, default="waiting", max_length=7)),
                ("epoch", models.PositiveIntegerField(default=0)),
                ("tries", models.PositiveIntegerField(default=0)),
                ("due", models.DateTimeField(default=django.utils.timezone.now)),
                ("progress", models.FloatField(default=0)),
                ("reason", models.CharField(blank=True, max_length=500)),
                (
                    "clip",
                    models.OneToOneField(
                        on_delete=django.db.models.deletion.CASCADE, related_name="job", to="hub.hubclip"
                    ),
                ),
            ],
        ),
        migrations.CreateModel(
            name="ClipShare",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("digest", models.CharField(max_length=64, unique=True)),
                ("days", models.PositiveSmallIntegerField()),
                ("created", models.DateTimeField(default=django.utils.timezone.now)),
                (
                    "clip",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="shares", to="hub.hubclip"
                    ),
                ),
                (
                    "made_by",
                    models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to=settings.AUTH_USER_MODEL),
                ),
            ],
        ),
        migrations.AddField(
            model_name="comment",
            name="clip",
            field=models.ForeignKey(
                null=True, on_delete=django.db.models.deletion.CASCADE, related_name="comments", to="hub.hubclip"
            ),
        ),
        migrations.AlterField(
            model_name="comment",
            name="run",
            field=models.ForeignKey(
                null=True, on_delete=django.db.models.deletion.CASCADE, related_name="comments", to="hub.hubrun"
            ),
        ),
        migrations.AddConstraint(
            model_name="comment",
            constraint=models.UniqueConstraint(fields=("clip", "number"), name="one_clip_comment_per_number"),
        ),
        migrations.AddConstraint(
            model_name="comment",
            constraint=models.CheckConstraint(
                condition=models.Q(
                    models.Q(("clip__isnull", False), ("run", None)),
                    models.Q(("clip", None), ("run__isnull", False)),
                    _connector="OR",
                ),
                name="comment_on_one_thing",
            ),
        ),
        migrations.RunPython(create_indexes, migrations.RunPython.noop),
    ]
