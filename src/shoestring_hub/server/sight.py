"""What a person may see in all projects together; every listing across projects takes its rows from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db.models import Q, QuerySet

from shoestring_hub.server.models import ClipJob, Comment, Follow, HubClip, HubRun, Member, Person, Project, Role


def clips_of(project: Project, person: Any, role: Role) -> QuerySet[HubClip]:
    """Clips of a project that a person with this role may see.

    Hidden clips are visible only to owners and to whoever sent them; deleted clips and clips of deleted runs only to
    writers.
    """
    clips = HubClip.objects.filter(project=project)
    if role < Role.OWNER:
        clips = clips.filter(Q(hidden=None) | Q(person=person))
    if role < Role.WRITER:
        clips = clips.filter(deleted=None, run__deleted=None)
    return clips.select_related("project", "run", "person", "job")


@dataclass(frozen=True)
class Sight:
    """The projects in which a person has a role, and what lies in them; read from the database at each request."""

    person: Any

    @property
    def _shared(self) -> QuerySet[Any]:
        return Member.objects.filter(person=self.person).values("project")

    def projects(self) -> QuerySet[Project]:
        """The person's projects."""
        return Project.objects.filter(pk__in=self._shared)

    def runs(self) -> QuerySet[HubRun]:
        """Runs of the person's projects, without deleted ones."""
        return HubRun.objects.filter(project__in=self._shared, deleted=None)

    @property
    def _owned(self) -> QuerySet[Any]:
        return Member.objects.filter(person=self.person, role=Role.OWNER).values("project")

    def clips(self) -> QuerySet[HubClip]:
        """Converted clips of the person's projects; hidden ones only for whoever sent them and for owners."""
        visible = Q(hidden=None) | Q(person=self.person) | Q(project__in=self._owned)
        clips = HubClip.objects.filter(visible, project__in=self._shared, deleted=None, run__deleted=None)
        return clips.filter(job__state=ClipJob.DONE)

    def comments(self) -> QuerySet[Comment]:
        """Comments on these runs and clips; hidden ones only for their author and for owners of the project."""
        owned = Q(run__project__in=self._owned) | Q(clip__project__in=self._owned)
        visible = Q(hidden=None) | Q(person=self.person) | owned
        there = Q(run__in=self.runs().values("pk")) | Q(clip__in=self.clips().values("pk"))
        return Comment.objects.filter(visible, there, deleted=None)

    def people(self) -> QuerySet[Person]:
        """People with a role in one of the person's projects, the person included."""
        return Person.objects.filter(pk__in=Member.objects.filter(project__in=self._shared).values("person"))

    def projects_with(self, other: Person) -> QuerySet[Project]:
        """Those of the person's projects in which `other` has a role as well."""
        theirs = Member.objects.filter(person=other).values("project")
        return self.projects().filter(pk__in=theirs)

    def followers_of(self, other: Person) -> QuerySet[Person]:
        """Active people who follow `other`, if both have a role in the same one of the person's projects.

        A follow reveals that two people share a project, so it is shown only if they share one of these projects.
        """
        together = Member.objects.filter(project__in=self.projects_with(other)).values("person")
        followers = Follow.objects.filter(person=other).values("follower")
        return Person.objects.filter(pk__in=together, is_active=True).filter(pk__in=followers)

    def followed_people(self) -> QuerySet[Person]:
        """People whom the person follows and with whom the person still shares a project."""
        followed = Follow.objects.filter(follower=self.person, project=None).values("person")
        return self.people().filter(pk__in=followed)

    def followed_projects(self) -> QuerySet[Project]:
        """Projects that the person follows and in which the person still has a role."""
        return self.projects().filter(pk__in=Follow.objects.filter(follower=self.person, person=None).values("project"))
