"""One of several processes that load a checkpoint onto one mesh; prints one JSON.

python loading_worker.py DIRECTORY HOST:PORT PROCESSES PROCESS_ID
"""

import json
import sys
from pathlib import Path

import jax
from flax import nnx

from eagle3.config import MeshConfig
from eagle3.processes import join
from eagle3.sharding import on_mesh
from gdn import load_pretrained


def memory(field: str) -> int:
    """Return a size in bytes that Linux knows of this process: VmRSS, or its peak, VmHWM."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def main(directory: str, coordinator: str, processes: int, process_id: int) -> None:
    join(coordinator, processes, process_id)
    with on_mesh(MeshConfig(fsdp=processes)):
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        params = jax.tree.leaves(nnx.state(load_pretrained(directory)))
        jax.block_until_ready(params)
        peak = memory("VmHWM") - before
    found = {
        "peak": peak,
        "own": sum(shard.data.nbytes for x in params for shard in x.addressable_shards),
        "whole": sum(x.nbytes for x in params),
        "largest": max(x.nbytes for x in params),
    }
    print(json.dumps(found))
    jax.distributed.shutdown()  # waits for the others


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
