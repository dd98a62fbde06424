"""Implements the objective of preference optimization: log-probabilities under policy and reference, and the loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoestring.core.attachments import Attachments
from shoestring.core.errors import ConfigError
from shoestring.core.frozen import Reference
from shoestring.core.task import IGNORED, Batch
from shoestring.core.trace import span
from shoestring.data.preferences import ANSWERS, KINDS, MISMATCHED
from shoestring.models.adapters import MAGNITUDE, A, B, adapters_off
from shoestring.models.distillation import targets_of
from shoestring.models.loading import open_model
from shoestring.models.loss_in_head import LossInHead, head_of, returns_head
from shoestring.models.sample_cache import SampleCache, must_compute, sample_keys
from shoestring.preference.divergence import DivergenceMeter
from shoestring.preference.log_probabilities import AnswerSums, sums_by_answer, target_log_probabilities
from shoestring.preference.losses import AnswerScores, Compared

if TYPE_CHECKING:
    from shoestring.preference.settings import Preference

ROWS = "rows"
"""Key of a batch's entry for the number of rows per record; a batch without this entry has one row per record."""


class LogProbabilities(NamedTuple):
    """Log-probabilities of the target tokens, (B, T), which the model returns in place of logits."""

    values: Tensor


class Pairs(NamedTuple):
    """The answers of a batch, by kind; index p belongs to the same record in all three fields.

    All tensors have the shape (P,); a record without an answer of a kind has 0 tokens there.
    """

    chosen: AnswerScores
    rejected: AnswerScores
    mismatched: AnswerScores
    """Answers to other prompts; KTO estimates the divergence from their scores."""


class Objective:
    """Replaces the loss of a job by the loss of a preference feature, both in training and in evaluation.

    A batch usually consists of rows of T tokens, (B, T), and several answers may be packed into one row. For models in
    which packed texts would attend to each other, the batch has the shape (B, R, T): R rows per record, one for each
    answer.
    """

    def __init__(self, attachments: Attachments, settings: Preference) -> None:
        self.attachments, self.settings = attachments, settings
        self.reference: Callable[[Batch], Any] | None = None
        self.reference_sums: Tensor | None = None  # for the current micro-batch, (B, N, K)
        self.cache: SampleCache | None = None
        self.frozen: nn.Module | None = None
        self.divergence = DivergenceMeter(settings.tokens)
        self.compared = settings.compared
        self.plain_forward = attachments.forward  # returns logits, as the frozen reference does
        if self.compared is not None:
            self._freeze_reference(self.compared)
        head = head_of(attachments.module)
        self.in_head = head is not None and returns_head(attachments.module, head)
        if self.in_head:
            LossInHead(attachments, self._log_probabilities, lambda _, batch: has_answers(batch), "")
        self.forward = attachments.forward
        attachments.forward = self.with_reference
        attachments.exits.callback(setattr, attachments, "forward", self.forward)

    def _freeze_reference(self, compared: Compared) -> None:
        """Load or copy a frozen reference model; if adapters are trained, the reference is the model without them."""
        attachments = self.attachments
        label = f"{self.settings.name}.reference"
        if compared.reference:
            model = open_model(compared.reference).to(next(attachments.module.parameters()).dtype)
            check_vocabulary(attachments.module, model, label)
            self.frozen = attachments.frozen(label, model, compared.reference)
        elif not any(feature.adds_parameters for feature in attachments.features):
            self.frozen = attachments.frozen(
                label, copy.deepcopy(attachments.module), "the model that the run began with"
            )

    def check_reference(self) -> None:
        """After adapters have been added, check that training will not change the reference.

        Raises:
            ConfigError: the reference is the model with adapters switched off, but other parameters are trained too.
        """
        if self.compared is None or self.frozen is not None:
            return
        trained = (name for name, parameter in self.attachments.module.named_parameters() if parameter.requires_grad)
        if others := [name for name in trained if name.rpartition(".")[2] not in (A, B, MAGNITUDE)]:
            raise ConfigError(
                f"`{self.settings.name}`: the reference is the model without adapters, and `{others[0]}` is trained",
                hint=f"name the model by `{self.settings.name}.reference`, or train the adapters alone",
            )

    def keep_cache(self) -> None:
        """Let checkpoints write the cache of the reference's log-probabilities to disk, if there is one."""
        if self.compared is not None and self.compared.cache_folder:
            self.attachments.keep(f"{self.settings.name}.cache", FlushedWithCheckpoints(self), merged=True)

    # -- forward passes ------------------------------------------------------------------------------------------------

    def with_reference(self, model: nn.Module, batch: Batch) -> Any:
        """Run the reference's forward pass without gradients, then the policy's; returns the policy's output.

        In this order the activations of policy and reference are never in memory at the same time.
        """
        batch = in_rows(batch)
        if self.compared is not None and has_answers(batch):
            measured = self.settings.measures_divergence and not self.attachments.module.training
            self.divergence.begin(_places(batch) if measured else None)
            with torch.no_grad(), span("reference", "compute"):
                self.reference_sums = _joined(self._reference(model, batch, computed=measured), batch)
        return self.forward(model, batch)

    def _reference(self, model: nn.Module, batch: Batch, *, computed: bool) -> Tensor:
        """Return the reference's log-probability of each answer, (rows, N, K), from the cache or by a forward pass.

        Args:
            computed: whether to run the forward pass even if the cache holds the values.
        """
        # The cache's identity includes the hashes of all frozen weights, so that values of another reference are never
        # read.
        if self.cache is None and self.compared is not None and self.compared.cache_folder:
            kind = self.attachments.world.device.type
            autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""
            states = {name: entry.state for name, entry in self.attachments.kept.items()}
            frozen = {name: state.digest for name, state in states.items() if isinstance(state, Reference)}
            identity = {"kinds": KINDS, "autocast": autocast, "frozen": frozen}
            self.cache = SampleCache(Path(self.compared.cache_folder), identity)
            self.attachments.exits.callback(self.cache.close)
        cache = self.cache
        keys = [] if cache is None else sample_keys(batch, also=("labels", "targets", ANSWERS))
        if not computed and cache is not None and not must_compute(cache, keys, self.attachments):
            return cache.read(keys)["sums"].to(batch[ANSWERS].device)
        if self.frozen is not None:
            values = self._values(self.plain_forward(self.frozen, batch), batch)
        else:
            with evaluating(self.attachments.module), adapters_off(self.attachments.module):
                values = self._values(self.forward(model, batch), batch)
        sums = self._sums(values, batch).log_probability
        if cache is not None:
            cache.write(keys, {"sums": sums})
        return sums

    def _log_probabilities(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Any:
        self.divergence.observe(hidden, weight, bias)
        return LogProbabilities(target_log_probabilities(hidden, weight, bias, targets, self.settings.tokens))

    def _values(self, output: Any, batch: Batch) -> Tensor:
        """Return the log-probabilities of the target tokens, (B, T), from a model's output."""
        result = output if isinstance(output, Tensor | LogProbabilities) else output.logits
        if isinstance(result, LogProbabilities):
            return result.values
        self.divergence.observe(result)
        targets = targets_of(batch)
        wide = result.to(torch.promote_types(result.dtype, torch.float32))
        chosen = wide.gather(-1, targets.clamp_min(0)[..., None])[..., 0]
        return torch.where(targets >= 0, chosen - wide.logsumexp(-1), 0)

    @staticmethod
    def _sums(values: Tensor, batch: Batch) -> AnswerSums:
        """Sum log-probabilities by answer."""
        return sums_by_answer(values, targets_of(batch), _answers_predicted(batch), KINDS)

    # -- the loss ------------------------------------------------------------------------------------------------------

    def pairs(self, output: Any, batch: Batch) -> Pairs:
        """Pair up the answers of a batch, with their log-probabilities under policy and reference."""
        if not has_answers(batch):
            hint = 'set data.form = "preference", or give batches with the entry `answers`'
            raise ConfigError(f"`{self.settings.name}` learns from preferences, but the batch has none", hint=hint)
        sums = AnswerSums(*(_joined(part, batch) for part in self._sums(self._values(output, batch), batch)))
        reference = self.reference_sums
        sides = []
        for kind in range(KINDS):
            known = None if reference is None else reference[..., kind].flatten()
            sides.append(
                AnswerScores(sums.log_probability[..., kind].flatten(), sums.tokens[..., kind].flatten(), known)
            )
        return Pairs(*sides)

    def loss(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss of a batch; returns the sum over pairs, and the number of pairs."""
        losses, counts, metrics = self.settings.losses(self.pairs(output, in_rows(batch)), self)
        count = counts.sum()
        for name, values in metrics.items():
            total = torch.where(counts, values.detach(), 0).sum()
            if self.attachments.module.training:
                self.attachments.numbers[name] = total / count.clamp_min(1)
            else:
                self.attachments.count_evaluated(name, total, count)
        if (measured := self.divergence.values) is not None:
            self.attachments.count_evaluated("kl_per_token", measured.sum(), torch.tensor(len(measured)).to(measured))
            self.divergence.begin(None)
        return torch.where(counts, losses, 0).sum(), count

    def mean_over_ranks(self, total: Tensor, count: Tensor) -> Tensor:
        """Sum `total` and `count` over the data-parallel ranks with a collective, and return their quotient without
        gradients."""
        group = self.attachments.world.group(self.attachments.data_axes)
        sums = torch.stack((total.detach(), count.to(total.dtype)))
        if group is not None:
            torch.distributed.all_reduce(sums, group=group)
        return sums[0] / sums[1].clamp_min(1)


class FlushedWithCheckpoints:
    """Writes the cache to disk whenever a checkpoint is captured, so that a resumed run reads the same values again."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def state_dict(self) -> dict[str, Any]:
        if self.objective.cache is not None:
            self.objective.cache.flush()
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore nothing: cached samples are read from disk."""


def has_answers(batch: Batch) -> bool:
    return isinstance(batch, Mapping) and ANSWERS in batch


def in_rows(batch: Batch) -> Batch:
    """Reshape texts (B, R, T) to rows (B · R, T), and store R in the entry `ROWS`; return any other batch unchanged."""
    if not has_answers(batch) or batch[ANSWERS].ndim < 3:
        return batch
    flat = {name: value.flatten(0, 1) for name, value in batch.items() if isinstance(value, Tensor) and value.ndim == 3}
    return {**batch, **flat, ROWS: batch[ANSWERS].shape[1]}


def _joined(sums: Tensor, batch: Batch) -> Tensor:
    """Sum over the R rows of each record: (B · R, N, K) -> (B, N, K); an answer has nonzero values in only one row."""
    rows = batch.get(ROWS, 1)
    return sums if rows == 1 else sums.unflatten(0, (-1, rows)).sum(1)


def _answers_predicted(batch: Batch) -> Tensor:
    """Index of the answer whose token each position predicts, (rows, T); position t predicts token t + 1."""
    return F.pad(batch[ANSWERS], (0, 1), value=-1)[:, 1:]


def _places(batch: Batch) -> Tensor:
    """Mask of the positions that predict a token of an answer to the record's own prompt, (rows, T) bool."""
    answers = _answers_predicted(batch)
    return (targets_of(batch) != IGNORED) & (answers >= 0) & (answers % KINDS != MISMATCHED)


def check_vocabulary(model: nn.Module, reference: nn.Module, label: str) -> None:
    """Raise ConfigError unless the vocabularies of the reference and of the model have the same size."""
    sizes = []
    for network in (model, reference):
        embedding: Any = head_of(network)
        sizes.append(None if embedding is None else len(embedding.weight))
    if None not in sizes and sizes[0] != sizes[1]:
        raise ConfigError(
            f"the model of `{label}` knows {sizes[1]} tokens, and the trained one {sizes[0]}",
            hint="name a model with the same tokenizer",
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which all modules are in evaluation mode, so that dropout is off; restores the mode of each module."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
