"""The kinds of hostile cases, each with the module that generates them; `frame` describes such a module."""

from __future__ import annotations

KINDS: dict[str, str] = {
    "adapters": "tests.hostile.adapters",
    "checkpoints": "tests.hostile.checkpoints",
    "data": "tests.hostile.data_files",
    "gguf": "tests.hostile.gguf_files",
    "models": "tests.hostile.model_folders",
    "records": "tests.hostile.records",
    "runs": "tests.hostile.run_folders",
    "studies": "tests.hostile.studies",
}
