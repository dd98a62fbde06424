"""What surrounds the loop: the first lines, the sinks, and the results, the model and the report at the end."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoestring import report
from shoestring.core.errors import DataError
from shoestring.core.feature import Feature, export_weights
from shoestring.core.job import Job
from shoestring.core.trace import span
from shoestring.data import baselines
from shoestring.decode.engine import generate
from shoestring.decode.settings import Sampling
from shoestring.memory import LoRA
from shoestring.memory.adapters.leaving import save_adapters
from shoestring.models import adapter_folder, slorb
from shoestring.models.gpt import GPT
from shoestring.models.loading import build_model, origin_of
from shoestring.models.saving import base_name, save_model
from shoestring.naming import resolve
from shoestring.report import history_file, timeline
from shoestring.report.console import Console
from shoestring.report.sinks import JsonLines, Sink
from shoestring.report.trackers import TRACKERS, Opener, Tracker
from shoestring.run import Run
from shoestring.storage.whole import write_atomic
from shoestring.training.data_loading import DataSets
from shoestring.training.evaluation import Evaluations, evaluate
from shoestring.training.newest_rows import NewestRows
from shoestring.training.saved_memory import savings_tables
from shoestring.training.throughput import Meter, memory_gib

log = logging.getLogger("shoestring")

SAMPLE_TOKENS = 160  # length of the samples of generated text


@dataclass(frozen=True)
class Result:
    """How a run ended: "finished", or "stopped" by a signal after a whole step."""

    status: str
    folder: Path
    metrics: dict[str, float]
    """The last value of each metric, on every rank; those of the held-out data where the run is finished."""


def open_meter(
    job: Job, run: Run, data: DataSets, folder: Path, newest: NewestRows, more: Sequence[Sink] = ()
) -> Meter:
    """The meter with the run's sinks on the first rank, without sinks on the others; a collective."""
    sinks = job.world.agree(lambda: _sinks(job, run, folder, newest, more) if job.world.first else [])
    wrapped = job.loss is not job.task_loss  # by a feature at LOSS: its value is not that of the text
    meter = Meter(
        job, sinks, _flops_per_token(job, run), 0.0 if wrapped else data.bits(held_out=False), run.settings.batch
    )
    newest.unwritten = meter.unwritten
    return meter


def _sinks(job: Job, run: Run, folder: Path, newest: NewestRows, more: Sequence[Sink]) -> list[Sink]:
    """The console, metrics.jsonl, what `run.sinks` names and `more`; what they hold of later steps is dropped."""
    step = job.progress.step
    file = folder / "metrics.jsonl"
    continues = file.exists()  # else this is a new run, which began with the checkpoint of another
    rows = JsonLines(file)
    rows.truncate_after(step)
    if continues:
        newest.write_missing(rows)
    sinks: list[Sink] = [Console(lambda: _total_steps(job)), rows]
    openers = {name: TRACKERS.get(name) or resolve(name, "run.sinks") for name in run.settings.sinks}
    openers |= {f"{type(sink).__name__} ({number})": _opened(sink) for number, sink in enumerate(more)}
    for name, opener in openers.items():
        sinks.append(Tracker(name, opener, folder, folder.resolve().name, run.document, step))
    return sinks


def _opened(sink: Sink) -> Opener:
    return lambda folder, title, settings: sink


def _total_steps(job: Job) -> int:
    """Steps of the whole run, at the pace that schedules go at now; 0 where that is open."""
    progress = job.progress
    left = max(progress.total - progress.position, 0.0) / progress.gain
    return progress.step + math.ceil(left - 1e-6) if progress.total else 0


def _flops_per_token(job: Job, run: Run) -> float:
    if isinstance(job.module, GPT):
        return job.module.flops_per_token(run.data.sequence)
    return 6 * job.trace.parameters


# -- the first lines --------------------------------------------------------------------------------------------------


def opening(job: Job, run: Run, data: DataSets, folder: Path) -> Iterator[str]:
    """What was found and what was chosen, with reasons."""
    world, settings = job.world, run.settings
    yield f"{run.name} in {folder}"
    yield f"{world.size} rank{'s' * (world.size > 1)} on {world.hosts} host{'s' * (world.hosts > 1)}, {_device(job)}"
    if data.corpus is not None:
        corpus = data.corpus
        yield (
            f"data: {' + '.join(run.sources)}, {corpus.documents:,} documents, {corpus.bytes / 1e6:.1f} MB, "
            f"{corpus.train.tokens / 1e6:.2f} M tokens to train on, vocabulary {corpus.vocab_size}"
        )
        yield from (f"  {note}" for note in corpus.train.notes)
    length = f"{settings.minutes:g} minutes" if settings.minutes else f"{settings.steps} steps"
    total = sum(parameter.numel() for parameter in job.named().values())
    trained = f", {_count(job.trace.parameters)} of them trained" if job.trace.parameters < total else ""
    yield f"model: {settings.model}, {_count(total)} parameters{trained}; {length} of {settings.batch} samples"
    for feature in job.features:
        why = feature.explain(job)
        yield f"  {feature.name}{': ' + why if why else ''}"


def _count(number: int) -> str:
    return f"{number / 1e6:.2f} M" if number >= 1e6 else f"{number:,}"


def repeated(resumed: int | None, reached: int) -> Iterator[str]:
    """From which step the run continues, and how many of the steps that it had `reached` are repeated."""
    begun = resumed or 0
    lost = max(reached - begun, 0)
    again = f"{lost} step{'s are' if lost > 1 else ' is'} repeated, up to {reached}" if lost else ""
    if resumed is not None:
        yield f"resumed from step {begun}" + (f"; {again}" if again else "")
    elif again:
        yield f"there was no checkpoint: {again}"


def _device(job: Job) -> str:
    device = job.world.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)} a rank (no GPU found)"


# -- the end ----------------------------------------------------------------------------------------------------------


def close(
    job: Job, run: Run, data: DataSets, folder: Path, seconds: float, meter: Meter, evaluations: Evaluations
) -> Result:
    """Evaluate, compare, sample, export and report; a collective. A stopped run is to be resumed and not evaluated."""
    done = job.progress.done or evaluations.lost_patience
    status = "stopped" if job.stopping and not done else "finished"
    job.trace.steps, job.trace.training_seconds = job.progress.step, seconds
    held_out = evaluate(job, run, data) if status == "finished" else {}
    if held_out:
        meter.write(job.progress.step, held_out)
    compared = _baselines(job, data) if run.settings.baselines and status == "finished" else {}
    whole = export(job, run, data, folder / "model")
    rate = (job.progress.tokens - meter.tokens_before) / seconds / job.world.size if seconds else 0.0
    ranks = [json.loads(one) for one in job.world.gather(json.dumps(_rank(job, rate)).encode())]
    traces = job.world.gather(timeline.dumps(job.trace).encode())
    if job.world.first:
        assert whole is not None
        for rank, content in enumerate(traces):
            write_atomic(folder / f"trace-{rank}.jsonl", content)
        summary = _summary(job, run, data, seconds, meter, held_out) | {
            "name": run.name,
            "status": status,
            "baselines": compared,
            "samples": _samples(whole, run, data) if status == "finished" else [],
            "ranks": ranks,
            "notes": evaluations.notes(),
        }
        if status == "finished":
            saved = savings_tables(job.features, folder, job.world, job.trace)
            summary["report_items"] += [{"feature": "memory", "as": "table"} | asdict(table) for table in saved]
        write_atomic(folder / "summary.json", json.dumps(summary, indent=2).encode())
        history_file.add(folder, status, rank=0, step=job.progress.step)
        before = history_file.spent_before(history_file.read(folder))
        for line in _closing(summary, before, report.write(folder)):
            log.info(line)
    job.world.barrier()
    return Result(status, folder, dict(meter.latest))


def _baselines(job: Job, data: DataSets) -> dict[str, float]:
    """Bits per byte of compressors and an n-gram model on the held-out files; the ranks share the work."""
    if data.corpus is None:
        raise DataError("`run.baselines` compares text, and this data set is none", hint="remove run.baselines")
    corpus, world, mine = data.corpus, job.world, {}
    with span("baselines", "compute"):
        if world.rank == world.size - 1:
            held_out = corpus.held_out_texts()
            mine |= {"gzip -9": baselines.gzip_bits(held_out), "xz -9": baselines.xz_bits(held_out)}
        if world.first:
            bits = baselines.witten_bell_bits(corpus.train_texts(), corpus.held_out_texts(), order=5)
            mine["5-gram (Witten-Bell)"] = bits
        shares = [json.loads(one) for one in world.gather(json.dumps(mine).encode())]
    return {name: bits for share in reversed(shares) for name, bits in share.items()}


def export(job: Job, run: Run, data: DataSets, folder: Path) -> nn.Module | None:
    """Write the model that leaves the run and its tokenizer to `folder`; the model on the first rank. A collective.

    Adapters are written beside it, or alone where they are not to be merged.
    """
    origin = origin_of(run.settings.model, run.model, data.model_arguments)
    whole = _whole(job, origin)
    adapted = next((feature for feature in job.features if isinstance(feature, LoRA)), None)
    if whole is not None and job.world.first and (adapted is None or adapted.merge):
        save_model(whole, data.corpus.tokenizer if data.corpus else None, folder, origin)
    if adapted is not None:
        beside = folder / adapter_folder.FOLDER
        save_adapters(job, adapted.name, beside, base_name(run.settings.model), adapted.dropout)
    return whole


def _whole(job: Job, origin: dict[str, Any]) -> nn.Module | None:
    """The model that leaves the run, whole on the first rank: what the job's model computes with."""
    state = job.weights()
    changing = [feature for feature in job.features if type(feature).export is not Feature.export]
    if not changing and not any(isinstance(value, DTensor) for value in state.values()):
        return job.module
    weights = {}
    for name, value in state.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if job.world.first:
            weights[name] = full.cpu() if isinstance(full, Tensor) else full
    if not job.world.first:
        return None
    kept = {name: kept.state.state_dict() for name, kept in job.kept.items()} if changing else {}
    whole = build_model(origin["model"], origin["arguments"], origin["offered"], weights=False)
    slorb.fill(whole, export_weights(changing, weights, kept))
    return whole


def _samples(model: nn.Module, run: Run, data: DataSets) -> list[dict[str, str]]:
    """A continuation of each prompt, drawn with a fixed seed."""
    if data.corpus is None:
        return []
    tokenizer, context = data.corpus.tokenizer, data.corpus.train.sequence
    samples = []
    for index, prompt in enumerate(run.settings.prompts):
        tokens = tokenizer.encode_prompt(prompt)
        drawn = generate(
            model, tokens, max_new=SAMPLE_TOKENS, sampling=Sampling(temperature=0.8, top_p=0.95, seed=index),
            context=context, stop=[tokenizer.end_of_text],
        )  # fmt: skip
        samples.append({"prompt": prompt, "text": tokenizer.decode(list(drawn))})
    return samples


def _rank(job: Job, tokens_per_second: float) -> dict[str, Any]:
    world = job.world
    return {
        "rank": world.rank,
        "host": world.host,
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU",
        "dtype": str(job.parameters[0].dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "tokens_per_second": tokens_per_second,
        "memory_gib": memory_gib(world.device),
    }


def _summary(
    job: Job, run: Run, data: DataSets, seconds: float, meter: Meter, held_out: dict[str, float]
) -> dict[str, Any]:
    bits: dict[str, float] = {}
    if meter.nats_to_bits and meter.recent:
        bits["training"] = sum(meter.recent) / len(meter.recent) * meter.nats_to_bits
    if "held_out_bits_per_byte" in held_out:
        bits["held out"] = held_out["held_out_bits_per_byte"]
    reductions = [(feature, feature.reduction(job.trace)) for feature in job.features]
    return {
        "message": "",
        "steps": job.progress.step,
        "total_steps": _total_steps(job),
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
                "why": feature.explain(job),
            }
            for feature in job.features
        ],
        "reductions": [{"feature": feature.name} | asdict(cut) for feature, cut in reductions if cut],
        "report_items": [
            {"feature": feature.name, "as": type(each).__name__.lower()} | asdict(each)
            for feature in job.features
            for each in feature.report_items(job.trace)
        ],
    }


def _closing(summary: dict[str, Any], before: float, page: Path) -> Iterator[str]:
    """The results as a few lines for the terminal.

    Args:
        before: seconds of the starts that this one continues.
    """
    seconds = f"{before + summary['seconds']:.0f} s" + (", all starts together" if before else "")
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
