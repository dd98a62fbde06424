"""Registers the hub's tables with Django."""

from django.apps import AppConfig


class HubConfig(AppConfig):
    """The only Django application of the project; `label` is the prefix of its table names."""

    name = "shoestring_hub.server"
    label = "hub"
    default_auto_field = "django.db.models.BigAutoField"
