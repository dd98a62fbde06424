"""The clauses of the conformance suite: the requirements that every feature must meet.

A clause is a function of a `Case` that raises ViolationError if the feature violates the requirement. Runs that do the
same arithmetic in the same order are compared bitwise. Runs that differ in the order of sums are compared in fp64 with
a small tolerance, so that a fault cannot pass for rounding.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from functools import partial
from typing import Any

import numpy as np
import tomli_w

from shoestring import run
from shoestring.areas import AREAS
from shoestring.checkpoint import Plain, Tiered
from shoestring.core.errors import ConfigError
from shoestring.core.feature import Feature, Seam, area_of, splits_replicas
from shoestring.settings import help_texts, structure
from shoestring.testing import imports, refused_features, scenarios
from shoestring.testing.case import Case, NotApplicableError, ViolationError, require, weights
from shoestring.testing.pool import RankError

STEPS = 6  # number of steps of the runs that are compared bitwise
STOP = 3  # step after which runs are interrupted and resumed
ROUNDING = 1e-9  # tolerance for the effect of the order of sums in fp64
ENDINGS = ("normally", "in forward", "in backward", "while attaching")
Result = Mapping[str, Any]
Clause = Callable[[Case], None]


def neutral_is_absence(case: Case) -> None:
    """With its neutral setting, the feature does not change a single bit of a job's results."""
    neutral = type(case.feature).neutral
    if neutral is None:
        raise NotApplicableError("states no neutral setting")
    for ranks in case.ranks:
        without = case.without(ranks, steps=STEPS, dropout=0.1)
        _same_bits(case.train(ranks, neutral, steps=STEPS, dropout=0.1), without, f"neutral on {ranks} rank(s)")


def resumes_bitwise(case: Case) -> None:
    """A run that is stopped and resumed ends with the same bits as a run that is not interrupted."""
    for ranks in case.ranks:
        whole = _with_checkpoints(case, ranks, case.fresh())
        _same_weights(whole)
        for result in whole[1:]:
            for name, digest in result["same"].items():
                message = f'`{name}` is kept as "same", but differs between ranks'
                require(digest == whole[0]["same"][name], message)
        folder = case.fresh()
        _with_checkpoints(case, ranks, folder, stop=STOP)
        rest = _with_checkpoints(case, ranks, folder, resume=True)
        require(rest[0]["start"] == STOP, f"stopped after step {STOP}, resumed after step {rest[0]['start']}")
        tails = [{**result, "losses": result["losses"][STOP:]} for result in whole]
        _same_bits(rest, tails, f"resumed on {ranks} rank(s)")


def resumes_on_other_ranks(case: Case) -> None:
    """A run may be resumed on another number of ranks."""
    if not case.reshards or len(case.ranks) < 2:
        raise NotApplicableError("is not declared to resume on another number of ranks")
    few, many = case.ranks[0], case.ranks[-1]
    for before, after in ((few, many), (many, few)):
        folder = case.fresh()
        _with_checkpoints(case, before, folder, stop=STOP, precise=True)
        rest = _with_checkpoints(case, after, folder, resume=True, precise=True)
        what = f"from {before} to {after} ranks"
        require(rest[0]["start"] == STOP, f"{what}: resumed after step {rest[0]['start']}, not {STOP}")
        if case.exact_across_ranks:
            whole = case.train(before, case.feature, steps=STEPS, precise=True)
            _close(rest[0], {**whole[0], "losses": whole[0]["losses"][STOP:]}, what)


def round_trips_through_toml(case: Case) -> None:
    """Settings that are written to a run file are equal when they are read back."""
    for feature in _settings(case.feature):
        try:
            back = _round_trip(feature)
        except (TypeError, ValueError, ConfigError) as error:
            raise ViolationError(f"{feature} does not survive a run file: {error}") from error
        require(back == feature, f"{feature} comes back from a run file as {back}")


def explains_its_fields(case: Case) -> None:
    """The feature's class and each of its fields have a help text."""
    kind = type(case.feature)
    require(kind.__doc__ and not kind.__doc__.startswith(f"{kind.__name__}("), f"{kind.__name__} has no docstring")
    texts = help_texts(kind)
    for field in fields(kind):
        require(texts.get(field.name), f"the field `{field.name}` has no text under it")


def one_rank_equals_two(case: Case) -> None:
    """Training on several ranks gives the same result as on one rank, even with different numbers of targets per
    rank."""
    if not case.exact_across_ranks or len(case.ranks) < 2:
        raise NotApplicableError("is not declared exact across ranks")
    one = case.train(case.ranks[0], case.feature, steps=STEPS, precise=True, ragged=True)
    several = case.train(case.ranks[-1], case.feature, steps=STEPS, precise=True, ragged=True)
    _same_weights(several)
    _close(several[0], one[0], f"{case.ranks[-1]} ranks and {case.ranks[0]}")


def converges(case: Case) -> None:
    """The final held-out loss is at most the declared tolerance above the loss of a job without the feature."""
    ranks = case.ranks[-1]
    without = case.without(ranks, steps=case.steps)[0]["held_out"]
    try:
        with_it = case.train(ranks, case.feature, steps=case.steps)[0]["held_out"]
    except RankError as error:
        if error.kind != "NonFiniteError":
            raise
        raise ViolationError(f"diverges: {error.message}") from error
    require(
        with_it <= without + case.tolerance,
        f"held-out loss after {case.steps} steps is {with_it:.4f}, without the feature {without:.4f}: "
        f"more than the tolerance of {case.tolerance:g} above it",
    )


def refuses_before_it_takes(case: Case) -> None:
    """A conflict, or a refusal by another feature, is raised before the feature changes anything.

    A conflict arises if two features want to own the same seam.
    """
    for ranks in case.ranks:
        company = case.company(ranks, case.feature)
        unsaid = case.run(scenarios.owns, ranks, company)[0]
        require(
            not unsaid,
            f"takes {', '.join(unsaid)} without declaring it in its seams, so that no second owner is refused",
        )
        refusals: list[tuple[Feature, str]] = [
            (rival, "ConflictError")
            for rival in (refused_features.ShardOwner(), refused_features.WireOwner(), refused_features.OptimOwner())
            if rival.seams[0] in case.feature.seams
            and (rival.seams[0] is Seam.OPTIM or {*rival.over}.intersection(case.feature.over))
        ]
        for other, error in (*refusals, (refused_features.RefusesEveryJob(), "ConfigError")):
            for result in case.run(scenarios.refuse, ranks, [*company, other]):
                got = f"{result['error']}: {result['message']}" if result["error"] else "nothing"
                require(result["error"] == error, f"beside {other.name}: raised {got}, not a {error}")
                require(not result["left"], f"changed before all features were checked: {', '.join(result['left'])}")


def releases_what_it_takes(case: Case) -> None:
    """Hooks, patches, threads, files and process groups are released when the job is closed, even after an exception.

    The feature writes files only to the folder that its method `placed` has set.
    """
    for ranks in case.ranks:
        for ending in ENDINGS:
            if ending == "in backward" and splits_replicas(case.feature) and ranks > 1:
                continue  # only the last stage has a loss that can fail, and the other stages would wait for it
            company = case.company(ranks, case.feature)
            arguments = {"ending": ending, "returns_model": case.returns_model}
            for held in case.run(scenarios.release, ranks, company, **arguments):
                left = [resource for resource in held if resource not in case.stays]
                require(not left, f"ended {ending}, on {ranks} rank(s), not released: {', '.join(left[:5])}")


def attaches_to_a_foreign_loop(case: Case) -> None:
    """In a user's own training loop, `attach` gives a feature the same effect as `compose` does in a job.

    A feature at the seam LOSS cannot change the loss of such a loop, and must be refused. A feature whose ranks run
    different parts of the model must be refused too.
    """
    for ranks in case.ranks:
        shared = [*case.companions, case.feature]
        if Seam.LOSS in case.feature.seams:
            _refused(partial(case.run, scenarios.foreign, ranks, shared, steps=1), "it changes the loss")
            continue
        if case.feature.adds_parameters and ranks > 1:
            _refused(partial(case.run, scenarios.foreign, ranks, shared, steps=1), "the loop's own DDP lacks them")
            continue
        if splits_replicas(case.feature) and ranks > 1:
            _refused(partial(case.run, scenarios.foreign, ranks, shared, steps=1), "a rank has a part of the model")
            continue
        loop = case.run(scenarios.foreign, ranks, shared, steps=STEPS)
        _same_weights(loop)
        job = case.train(ranks, case.feature, steps=STEPS, open_end=True)[0]
        without = case.without(ranks, steps=STEPS, open_end=True)[0]
        before = 0.0 if case.feature.adds_parameters else weights(without)
        effect = np.abs(weights(job) - before).max()
        apart = np.abs(weights(loop[0]) - weights(job)).max()
        plain = loop[0]["names"] == without["names"] and np.allclose(
            weights(loop[0]), weights(without), rtol=1e-4, atol=1e-5
        )
        what = "does nothing there" if effect > apart * 0.9 and plain else f"is {apart:.2g} off"
        require(
            apart <= max(0.05 * effect, 1e-5),
            f"in a foreign loop on {ranks} rank(s) it {what}: in a job it changes weights by {effect:.2g}",
        )


def exports_what_it_computes(case: Case) -> None:
    """A model without the feature that loads the exported weights computes the same as the job's model."""
    if Seam.MODEL not in case.feature.seams:
        raise NotApplicableError("does not change what a module computes")
    ranks = case.ranks[0]
    trained, exported = case.run(scenarios.exported, ranks, case.company(ranks, case.feature), steps=STEPS)[0]
    require(
        abs(trained - exported) <= case.tolerance,
        f"held-out loss is {trained:.4f} in the job and {exported:.4f} with the exported weights: "
        "`export` does not return the weights that the module computes with",
    )


def imports_no_other_area(case: Case) -> None:
    """The feature's area imports no other area, and importing the feature's settings does not import torch."""
    kind = type(case.feature)
    for place, area in imports.areas_named(kind):
        raise ViolationError(f"{place} imports the area `{area}`")
    loaded = imports.loaded_with(kind)
    own = area_of(kind)
    others = sorted(area for area in AREAS if f"shoestring.{area}" in loaded and area != own)
    require(not others, f"importing {kind.__module__} loads the area `{', '.join(others)}`")
    require("torch" not in loaded, f"importing {kind.__module__} loads torch, which `--help` would wait for")


def composes(case: Case) -> None:
    """The feature trains together with the representative of every other area.

    After training, all ranks have equal weights, parameters keep their names, and a resumed run has the same bits.
    """
    if not case.representative:
        raise NotApplicableError("is not its area's representative")
    names = case.without(case.ranks[-1], steps=1)[0]["names"]
    for partner in _partners(case):
        reason = case.clashes.get(partner.name)
        try:
            if reason is None:
                _pair(case, partner, names)
            else:
                _refused(partial(case.train, case.ranks[-1], partner, case.feature, steps=1), reason)
        except AssertionError as error:
            raise ViolationError(f"with {partner.name}: {error}") from error


CLAUSES: tuple[Clause, ...] = (
    neutral_is_absence,
    resumes_bitwise,
    resumes_on_other_ranks,
    round_trips_through_toml,
    explains_its_fields,
    one_rank_equals_two,
    converges,
    refuses_before_it_takes,
    releases_what_it_takes,
    attaches_to_a_foreign_loop,
    exports_what_it_computes,
    imports_no_other_area,
    composes,
)


# -- parts ------------------------------------------------------------------------------------------------------------


def _with_checkpoints(case: Case, ranks: int, folder: str, *others: Feature, **arguments: Any) -> list[dict[str, Any]]:
    """Train with checkpoints. Unless a feature writes checkpoints, add `Plain`, or `Tiered` if no rank has the whole
    model."""
    several = [*others, case.feature]
    if not any(isinstance(feature, Plain | Tiered) for feature in several):
        several.insert(0, Tiered() if any(splits_replicas(feature) for feature in several) else Plain())
    arguments = {"steps": STEPS, "dropout": 0.0 if arguments.get("precise") else 0.1} | arguments
    return case.train(ranks, *several, folder=folder, **arguments)


def _partners(case: Case) -> Iterator[Feature]:
    """Yield the representatives of other areas to test with; a representative skips the ones before it in the list.

    Each pair of representatives is thus tested once.
    """
    kinds = [type(partner) for partner in case.partners]
    after = kinds.index(type(case.feature)) + 1 if type(case.feature) in kinds else 0
    for partner in case.partners[after:]:
        if area_of(type(partner)) != area_of(type(case.feature)):
            yield partner


def _pair(case: Case, partner: Feature, names: list[str]) -> None:
    ranks = case.ranks[-1]
    whole = _with_checkpoints(case, ranks, case.fresh(), partner)
    require(np.isfinite(weights(whole[0])).all(), "the weights are not finite")
    common = (
        [name for name in whole[0]["names"] if name in names] if case.feature.adds_parameters else whole[0]["names"]
    )
    require(common == names, "parameters have other names")
    _same_weights(whole)
    folder = case.fresh()
    _with_checkpoints(case, ranks, folder, partner, stop=STOP)
    rest = _with_checkpoints(case, ranks, folder, partner, resume=True)
    _same_bits(rest, [{**result, "losses": result["losses"][STOP:]} for result in whole], "resumed")


def _refused(attempt: Callable[[], object], reason: str) -> None:
    """Require that an attempt is refused by ConfigError or ConflictError; `reason` says why the attempt cannot work."""
    try:
        attempt()
    except RankError as error:
        require(error.kind in ("ConfigError", "ConflictError"), f"fails instead of being refused ({reason}): {error}")
        return
    raise ViolationError(f"runs, although it should be refused: {reason}")


def _settings(feature: Feature) -> Iterator[Feature]:
    """Yield the feature under test, its neutral setting if any, and its defaults if all fields have a default."""
    kind = type(feature)
    yield feature
    if kind.neutral is not None:
        yield kind.neutral
    if all(field.default is not MISSING or field.default_factory is not MISSING for field in fields(kind)):
        yield kind()


def _round_trip(feature: Feature) -> Feature:
    area = area_of(type(feature))
    if area not in AREAS and not _is_exported(feature):
        return structure(tomllib.loads(tomli_w.dumps(asdict(feature))), type(feature), feature.name, "the run file")
    settings = run.Settings(packages=() if area in AREAS else (area,))
    (back,) = run.parse(tomllib.loads(run.Run(name="suite", settings=settings, features=(feature,)).toml)).features
    return back


def _is_exported(feature: Feature) -> bool:
    """Whether a run file can name this feature of a package outside of shoestring through `run.packages`."""
    try:
        return type(feature) in run.techniques(area_of(type(feature))).values()
    except ConfigError:
        return False


def _same_bits(results: list[dict[str, Any]], expected: list[dict[str, Any]], what: str) -> None:
    for rank, (result, other) in enumerate(zip(results, expected, strict=True)):
        for key in ("losses", "names", "weights"):
            require(
                result[key] == other[key],
                f"{what}: {key} differ"
                + (f" on rank {rank}: {_first_difference(result, other)}" if rank or key else ""),
            )


def _first_difference(result: Result, other: Result) -> str:
    for index, (one, two) in enumerate(zip(result["losses"], other["losses"], strict=False)):
        if one != two:
            return f"loss {index + 1} is {one!r}, not {two!r}"
    return "the losses are equal"


def _same_weights(results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        require(result["weights"] == results[0]["weights"], f"rank {rank} ends with other weights than rank 0")


def _close(result: Result, expected: Result, what: str) -> None:
    for key, one, two in (
        ("losses", np.array(result["losses"]), np.array(expected["losses"])),
        ("weights", weights(result), weights(expected)),
    ):
        require(one.shape == two.shape, f"{what}: {len(one)} {key}, not {len(two)}")
        apart = np.abs(one - two).max(initial=0.0)
        require(apart <= ROUNDING, f"{what}: {key} differ by {apart:.2g}, more than the order of sums explains")
