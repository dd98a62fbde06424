"""A preference run that is killed and resumed is bitwise the run that was not."""

import pytest
import tomli_w
from safetensors.numpy import load_file

from shoestring.cli import main
from shoestring.run import read
from tests.killed_acts import killed_before
from tests.preference.test_runs import base, pairs, rows, write  # noqa: F401

EXACT = ("loss", "reward_margin", "grad_norm", "held_out_loss", "held_out_kl_per_token")


def recipe(folder, model, objective, adapters):
    """The run file of two epochs: the reference is computed in the first, and read from its cache in the second."""
    _, document = read("preference")
    document["run"] |= {
        "model": str(model), "data": write(folder / "pairs.jsonl", pairs(16)), "epochs": 2, "batch": 2, "accumulate": 2,
        "evaluate_every": 3, "save_best": False, "resume": "auto",
    }  # fmt: skip
    document["data"] |= {"sequence": 128, "held_out": 0.2}
    document["optim"]["adamw"]["lr"] = 1e-2
    document["checkpoint"] = {"plain": {"every": 2}}
    document["preference"] = {objective: {}}
    if objective == "kto":
        document["data"]["form"] = "rated"
    if adapters:
        document["memory"]["lora"] |= {"rank": 4, "dropout": 0.1}
    else:
        del document["memory"]["lora"]
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(document))
    return str(path)


def result(folder):
    """The metrics of all steps and evaluations, and the bytes of all weights that the run leaves."""
    metrics = {
        (row["step"], "held_out_loss" in row): {name: row[name] for name in EXACT if name in row}
        for row in rows(folder)
    }
    weights = {  # not the files, for safetensors writes their metadata in any order
        path.relative_to(folder): {name: tensor.tobytes() for name, tensor in load_file(path).items()}
        for path in (folder / "model").rglob("*.safetensors")
    }
    return metrics, weights


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "adapters"), [
    ("dpo", True),
    pytest.param("kto", True, marks=pytest.mark.all_cases),
    pytest.param("dpo", False, marks=pytest.mark.all_cases),
    pytest.param("simpo", True, marks=pytest.mark.all_cases),
])  # fmt: skip
def test_a_killed_run_resumes_bitwise(base, tmp_path, objective, adapters):  # noqa: F811
    file = recipe(tmp_path, base, objective, adapters)
    assert main(["train", file, "--folder", str(tmp_path / "through")]) == 0
    metrics, weights = result(tmp_path / "through")
    assert len(metrics) >= 6 and len(weights) == 1 + adapters
    evaluations = [row for (_, held_out), row in metrics.items() if held_out]
    assert evaluations and all(("held_out_kl_per_token" in row) is (objective != "simpo") for row in evaluations)
    for number in (1, 3):  # killed before the second and the fourth checkpoint have their names: in either epoch
        folder = tmp_path / f"killed-{number}"
        assert killed_before(
            number, lambda folder=folder: main(["train", file, "--folder", str(folder)]), ("os.rename",),
            f"{folder}/checkpoints/",
        )  # fmt: skip
        cached = {path: path.read_bytes() for path in (folder / "reference").rglob("*.safetensors")}
        assert bool(cached) is (objective != "simpo")
        assert not (folder / "model").exists()
        assert main(["train", file, "--folder", str(folder)]) == 0
        assert result(folder) == (metrics, weights), number
        assert all(path.read_bytes() == content for path, content in cached.items())  # read, and not written again
