"""End of a run: evaluate, export the model, generate samples, and write the report."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from shoestring import report
from shoestring.core.feature import Feature, export_weights
from shoestring.core.job import Job, attachments_of
from shoestring.core.trace import span
from shoestring.core.world import World
from shoestring.data import baselines
from shoestring.data.chat_ends import ends_learnt
from shoestring.data.tokenizer import Tokenizer
from shoestring.decode.engine import generate
from shoestring.decode.settings.generation import Sampling
from shoestring.models import hf, slorb
from shoestring.models.beside import Beside
from shoestring.models.description import describe_model
from shoestring.models.gpt import GPT
from shoestring.models.loading import build_model, origin_of, origin_trust
from shoestring.models.saving import PRETRAINED, base_name, save_in_place_of_model, save_model
from shoestring.naming import Trust
from shoestring.planning.system import memory_or_disk
from shoestring.report import history_file, timeline
from shoestring.run import Run
from shoestring.sharded import is_sharded
from shoestring.storage.whole import write_atomic
from shoestring.training.data_loading import DataSets
from shoestring.training.evaluation import Best, Evaluations, evaluate
from shoestring.training.saved_memory import SavingsTables
from shoestring.training.start import total_steps
from shoestring.training.throughput import Meter, memory_gib
from shoestring.training.user_code import NamedModel

log = logging.getLogger("shoestring")

_ALIGNED = 64  # alignment of tensors in a `_Room`, in bytes
SAMPLE_TOKENS = 160  # number of tokens in a sample of generated text


@dataclass(frozen=True)
class Result:
    """How a run ended. `status` is "finished", or "stopped" if a signal ended the run before its last step."""

    status: str
    folder: Path
    metrics: dict[str, float]
    """The last value of each metric, on every rank; a finished run also has metrics on held-out data."""


def close(
    job: Job,
    run: Run,
    data: DataSets,
    folder: Path,
    seconds: float,
    meter: Meter,
    evaluations: Evaluations,
    save: Callable[[Path], nn.Module | None],
    savings: SavingsTables,
) -> Result:
    """Finish a run: evaluate, compute baselines, export the model, generate samples, and write the report.

    A collective. For a stopped run, which will be resumed, only the model and the report are written.

    Args:
        seconds: duration of the training loop.
        save: function that writes the model to a folder, and returns the model on the first rank; a collective.
        savings: function that returns how much memory each feature saved.
    """
    done = job.progress.done or evaluations.lost_patience
    status = "stopped" if attachments_of(job).stopping and not done else "finished"
    job.trace.steps, job.trace.training_seconds = job.progress.step, seconds
    held_out: dict[str, float] = {}
    if status == "finished":
        results = evaluate(job, run.settings, data, evaluations.own)
        held_out = results.values
        if held_out or results.findings:
            meter.write_evaluation(job.progress.step, results)
    compared = _baselines(job, data) if run.settings.baselines and status == "finished" else {}
    whole = save(folder / "model")
    rate = (job.progress.tokens - meter.tokens_before) / seconds / job.world.size if seconds else 0.0
    ranks = [json.loads(facts) for facts in job.world.gather(json.dumps(_rank(job, rate)).encode())]
    traces = job.world.gather(timeline.dumps(job.trace).encode())
    if job.world.first:
        assert whole is not None
        for rank, content in enumerate(traces):
            write_atomic(folder / f"trace-{rank}.jsonl", content)
        summary = _summary(job, seconds, meter, held_out) | {
            "name": run.name,
            "status": status,
            "baselines": compared,
            "samples": _samples(whole, run.settings.prompts, data, folder) if status == "finished" else [],
            "ranks": ranks,
            "notes": evaluations.notes(),
        }
        if status == "finished":
            saved = savings(job.trace)
            summary["report_items"] += [{"feature": "memory", "as": "table"} | asdict(table) for table in saved]
        write_atomic(folder / "summary.json", json.dumps(summary, indent=2).encode())
        history_file.add(folder, status, rank=0, step=job.progress.step)
        before = history_file.spent_before(history_file.read(folder))
        page = report.write(folder)
        for line in (*_closing(summary, before, page), *_next(folder, run, data, evaluations.best)):
            log.info(line)
    job.world.barrier()
    return Result(status, folder, dict(meter.latest))


def _baselines(job: Job, data: DataSets) -> dict[str, float]:
    """Bits per byte of two compressors (run on the last rank) and an n-gram model (run on the first) on held-out files.

    A collective.
    """
    assert data.corpus is not None
    corpus, world, results = data.corpus, job.world, {}
    with span("baselines", "compute"):
        if world.rank == world.size - 1:
            held_out = corpus.held_out_texts()
            results |= {"gzip -9": baselines.gzip_bits(held_out), "xz -9": baselines.xz_bits(held_out)}
        if world.first:
            bits = baselines.witten_bell_bits(corpus.train_texts(), corpus.held_out_texts(), order=5)
            results["5-gram (Witten-Bell)"] = bits
        of_ranks = [json.loads(data) for data in world.gather(json.dumps(results).encode())]
    return {name: bits for values in reversed(of_ranks) for name, bits in values.items()}


@dataclass(frozen=True)
class ExportedModel:
    """What an exported model's folder holds besides the weights: how to build the model, and its tokenizer."""

    origin: dict[str, Any]
    """Entries of config.json that say how to build the model again."""
    trust: Trust
    """Who vouches for the code that `origin` names."""
    base: str
    """Name under which transformers opens the model that the run started from; empty if there is no such name."""
    tokenizer: Tokenizer | None
    beside: Beside


def describe_export(model: NamedModel, data: DataSets, folder: Path) -> ExportedModel:
    """Gather what exports of a run's model hold besides the weights.

    Args:
        folder: the folder of the run.
    """
    target, tokenizer = model.target, data.corpus.tokenizer if data.corpus else None
    origin = origin_of(target, model.arguments, data.model_arguments, model.trust.project)
    learnt = ends_learnt(data.corpus.train, data.corpus.tokenizer) if data.corpus else []
    beside = Beside(pretrained if (pretrained := folder / PRETRAINED).is_dir() else None, learnt)
    return ExportedModel(origin, origin_trust(target, model.trust), base_name(target), tokenizer, beside)


def export(job: Job, about: ExportedModel, folder: Path) -> nn.Module | None:
    """Write the trained model and its tokenizer to `folder`, and return the model on the first rank. A collective.

    Adapters are written to the same folder; if they are not merged into the model, only the adapters are written.
    `folder` is replaced atomically.
    """
    whole = _whole(job, about, folder.parent)
    attachments = attachments_of(job)
    writers = [feature.write_beside(attachments, about.base) for feature in attachments.features]
    beside = [write for write in writers if write is not None]

    def write_beside(path: Path) -> None:
        for write in beside:
            write(path)

    if whole is not None and job.world.first:
        if all(feature.exports_model for feature in attachments.features):
            write = write_beside if beside else None
            save_model(whole, about.tokenizer, folder, about.origin, about.trust, write, about.beside)
        else:
            save_in_place_of_model(folder, write_beside, about.tokenizer, about.origin, about.beside)
    return whole


def _whole(job: Job, about: ExportedModel, folder: Path) -> nn.Module | None:
    """The model to export: unsharded and without features, but computing the same outputs as the job's model.

    None on ranks other than the first if the model must be gathered or converted. A collective.

    Args:
        folder: folder on disk for the gathered weights, used if they do not fit into memory.
    """
    attachments = attachments_of(job)
    state = attachments.weights()
    changing = [feature for feature in attachments.features if type(feature).export is not Feature.export]
    parted = bool(attachments.parted)
    if not changing and not parted and not any(is_sharded(value) for value in state.values()):
        return attachments.module
    if changing:
        with attachments.evaluating():  # recomputes buffers that depend on averaged weights (batch norm statistics)
            pass
    weights = {}
    gathered = [value for value in state.values() if is_sharded(value)]
    room = _Room(sum(map(_padded, gathered)) if job.world.first else 0, folder)
    for name, value in state.items():
        full = attachments.whole(name, value)  # a collective, so every rank calls it
        if is_sharded(value) and job.world.first:
            full = room.tensor(full.shape, full.dtype).copy_(full)
        if job.world.first or parted:
            weights[name] = full.cpu() if isinstance(full, Tensor) else full
    if parted:
        weights = _of_all_ranks(job.world, weights, folder)
    if not job.world.first:
        return None
    states = {name: entry.state.state_dict() for name, entry in job.kept.items()} if changing else {}
    origin = about.origin
    module = attachments.module
    known = isinstance(module, GPT) or hf.is_pretrained(module)  # others may also refer to a parameter elsewhere
    with _valueless_parameters() if known else nullcontext():
        whole = build_model(origin["model"], origin["arguments"], origin["offered"], weights=False, trust=about.trust)
    slorb.fill(whole, export_weights(changing, weights, states), assign=known)
    if hf.is_pretrained(whole):
        cast(Any, whole).tie_weights()
    return whole


class _Room:
    """Space for the gathered weights, which are larger than a rank's shards: in memory, or on disk if memory is
    short."""

    def __init__(self, nbytes: int, folder: Path) -> None:
        self._data, self._used = torch.from_numpy(memory_or_disk(nbytes, folder)), 0

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor in the room, uninitialized."""
        nbytes = math.prod(shape) * dtype.itemsize
        data = self._data[self._used : self._used + nbytes]
        self._used += -(-nbytes // _ALIGNED) * _ALIGNED
        return data.view(dtype).view(tuple(shape))


def _padded(tensor: Tensor) -> int:
    """Bytes that a tensor takes in a `_Room`, padding included; for a DTensor, those of its full tensor."""
    return -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED


def _of_all_ranks(world: World, weights: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Gather the weights of all ranks to the first rank, each tensor from the first rank that has it. A collective."""
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    own = {name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()}
    senders = dict[str, int]()
    empty = dict[str, Tensor]()
    for rank, names in enumerate(json.loads(data) for data in world.gather(json.dumps(own).encode())):
        for name, (shape, dtype) in names.items():
            if senders.setdefault(name, rank) == rank:
                empty[name] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    gathered = dict(weights)
    received = [tensor for name, tensor in empty.items() if senders[name]]
    room = _Room(sum(map(_padded, received)) if world.first else 0, folder)
    for name, rank in senders.items():
        if rank and world.rank == rank:
            dist.send(tensors[name].contiguous().to(world.device), 0)
        elif rank and world.first:
            here = room.tensor(empty[name].shape, empty[name].dtype)
            dist.recv(there := here.to(world.device), rank)
            gathered[name] = here.copy_(there) if there is not here else here
    return gathered


@contextmanager
def _valueless_parameters() -> Iterator[None]:
    """Context in which modules are built with uninitialized parameters, because checkpoints overwrite them; buffers are
    computed."""

    def valueless(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter:
        return parameter if parameter.is_meta else nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    handle = register_module_parameter_registration_hook(cast(Any, valueless))  # the hook may return a parameter
    try:
        yield
    finally:
        handle.remove()


def _samples(model: nn.Module, prompts: Sequence[str], data: DataSets, folder: Path) -> list[dict[str, str]]:
    """Generate a continuation of each prompt, with a fixed seed, by the model that was exported to `folder`."""
    if data.corpus is None or not prompts:
        return []
    tokenizer, context = data.corpus.tokenizer, data.corpus.train.sequence
    ends = describe_model(folder / "model", tokenizer, model, warn=False).ends
    samples = []
    for index, prompt in enumerate(prompts):
        tokens = tokenizer.encode_prompt(prompt)
        drawn = generate(
            model, tokens, max_new=SAMPLE_TOKENS, sampling=Sampling(temperature=0.8, top_p=0.95, seed=index),
            context=context, stop=ends,
        )  # fmt: skip
        stream = tokenizer.stream(tokens)
        samples.append({"prompt": prompt, "text": "".join(map(stream.add, drawn)) + stream.rest()})
    return samples


def _rank(job: Job, tokens_per_second: float) -> dict[str, Any]:
    world = job.world
    return {
        "rank": world.rank,
        "host": world.host,
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU",
        "dtype": str(attachments_of(job).parameters[0].dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "tokens_per_second": tokens_per_second,
        "memory_gib": memory_gib(world.device),
    }


def _summary(job: Job, seconds: float, meter: Meter, held_out: dict[str, float]) -> dict[str, Any]:
    bits: dict[str, float] = {}
    if meter.nats_to_bits and meter.recent:
        bits["training"] = sum(meter.recent) / len(meter.recent) * meter.nats_to_bits
    if "held_out_bits_per_byte" in held_out:
        bits["held out"] = held_out["held_out_bits_per_byte"]
    reductions = [(feature, feature.reduction(job.trace)) for feature in attachments_of(job).features]
    return {
        "message": "",
        "steps": job.progress.step,
        "total_steps": total_steps(job.progress),
        "tokens": job.progress.tokens,
        "unit": meter.unit,
        "seconds": seconds,
        "parameters": job.trace.parameters,
        "held_out_loss": held_out.get("held_out_loss"),
        "bits_per_byte": {name: value for name, value in bits.items() if math.isfinite(value)},
        "features": [
            {
                "name": feature.name,
                "seams": [seam.name for seam in feature.seams],
                "settings": asdict(feature),
                "why": feature.explain(attachments_of(job)),
            }
            for feature in attachments_of(job).features
        ],
        "reductions": [{"feature": feature.name} | asdict(cut) for feature, cut in reductions if cut],
        "report_items": [
            {"feature": feature.name, "as": type(item).__name__.lower()} | asdict(item)
            for feature in attachments_of(job).features
            for item in feature.report_items(job.trace)
        ],
    }


def _next(folder: Path, run: Run, data: DataSets, best: Best) -> Iterator[str]:
    """Log lines at the end of a run on text: where its models are, and how to try them."""
    if (folder / "best").is_dir():
        name, _, most = best.words
        yield f"the model of the {most} {name}: {folder / 'best'}; of the last step: {folder / 'model'}"
    if run.data.tokenizer == "model" and run.data.form != "text":
        which = "that of the last step" if (folder / "best").is_dir() else "it"
        yield f"to talk with {which}: shoestring chat {folder}"
        if getattr(data.train, "single_answers", False):
            yield "  each chat of the data has one question: type /clear before the next one"


def _closing(summary: dict[str, Any], before: float, page: Path) -> Iterator[str]:
    """Log lines at the end of a run: its results.

    Args:
        before: seconds of training in earlier starts of the run.
    """
    seconds = f"{before + summary['seconds']:.0f} s" + (" over all starts" if before else "")
    length = f"{summary['steps']} steps, {summary['tokens']:,} {summary['unit']}, {seconds}"
    yield f"{summary['status']} after {length}"
    bits = summary["bits_per_byte"]
    if bits:
        yield "bits per byte: " + ", ".join(f"{name} {value:.3f}" for name, value in bits.items())
    if summary["baselines"]:
        listed = ", ".join(f"{name} {value:.3f}" for name, value in summary["baselines"].items())
        yield f"on the same held-out files: {listed}"
    for sample in summary["samples"]:
        yield f"sample of {sample['prompt']!r}:\n{sample['prompt']}{sample['text']}\n"
    yield f"report: {page}"
