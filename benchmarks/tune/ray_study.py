"""A study of toy trials under Ray Tune, without anything of shoestring: `python ray_study.py FOLDER`.

It is what Ray's documentation recommends for trials that may be killed: a trial saves with `tune.report` and resumes
from `tune.get_checkpoint`, failures are retried without a limit, and a study whose head has died is restored from its
folder. Started again in the same folder, it continues.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune
from toy_trial import advance  # pyrefly: ignore[missing-import]


def train(config: dict[str, Any]) -> None:
    """A trial: the recurrence of toy_trial, with Ray's checkpoints."""
    trial = tune.get_context().get_trial_id()
    folder = Path(config["folder"], f"trial-{trial}")
    folder.mkdir(exist_ok=True)
    Path(config["folder"], "pids", str(os.getpid())).touch()
    with (folder / "starts.log").open("a") as starts:
        starts.write("1\n")
    step, state = 0, 1.0
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as saved:
            step, state = json.loads(Path(saved, "state.json").read_text())
    with (folder / "steps.log").open("a") as log:
        while step < config["steps"]:
            time.sleep(config["pause"])
            step += 1
            state = advance(state, config["x"], step)
            log.write(f"{step}\n")
            log.flush()
            if step % config["every"] == 0 or step == config["steps"]:
                with tempfile.TemporaryDirectory() as saved:
                    Path(saved, "state.json").write_text(json.dumps([step, state]))
                    tune.report({"loss": state, "step": step}, checkpoint=tune.Checkpoint.from_directory(saved))


def main(folder: Path) -> None:
    setting = json.loads((folder / "setting.json").read_text())
    ray.init(
        num_cpus=setting["workers"],
        include_dashboard=False,
        object_store_memory=100_000_000,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(folder / "ray"),
        log_to_driver=False,
    )
    results = folder / "results"
    if tune.Tuner.can_restore(str(results / "toy")):
        tuner = tune.Tuner.restore(
            str(results / "toy"), train, resume_unfinished=True, resume_errored=True, restart_errored=False
        )
    else:
        space = {**setting, "folder": str(folder), "x": tune.uniform(0.0, 1.0)}
        tuner = tune.Tuner(
            train,
            param_space=space,
            tune_config=tune.TuneConfig(num_samples=setting["trials"], max_concurrent_trials=setting["workers"]),
            run_config=tune.RunConfig(
                name="toy",
                storage_path=str(results),
                failure_config=tune.FailureConfig(max_failures=-1),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=4),  # with 1 it snapshots the study each time
                verbose=0,
            ),
        )
    ended = [
        {"x": each.config["x"], "loss": each.metrics.get("loss"), "step": each.metrics.get("step"),
         "error": str(each.error or "")}
        for each in tuner.fit()
    ]  # fmt: skip
    (folder / "ended.json").write_text(json.dumps(ended))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
