"""What each of two processes runs for `test_throughput.py`; rank 0 prints one line of JSON."""

from __future__ import annotations

import json
import os

from tests.callbacks.test_throughput import same_load
from tests.distributed.launch import leave


def main() -> None:
    """Prints the metrics of rank 0, by microbatches per step."""
    metrics = {accumulate: same_load(accumulate, int(os.environ["WORLD_SIZE"])) for accumulate in (1, 4)}
    if os.environ["RANK"] == "0":
        print("RESULTS " + json.dumps(metrics), flush=True)
    leave()


if __name__ == "__main__":
    main()
