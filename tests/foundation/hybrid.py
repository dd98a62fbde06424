"""What four ranks on two hosts of two do: hybrid sharding beside replication."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from scenarios import losses

from shoestring import parallel
from shoestring.distributed.join import join


def main(out: Path) -> None:
    torch.set_num_threads(1)
    with join() as world:
        results = {
            "hosts": [world.hosts, world.local_size],
            "ddp": losses(world, parallel.DDP(), steps=8),
            "hybrid": losses(world, parallel.FSDP(hosts="replicate"), steps=8),
            "sharded": losses(world, parallel.FSDP(hosts="shard"), steps=8),
        }
        if world.first:
            out.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
