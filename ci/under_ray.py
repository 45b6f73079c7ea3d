"""Runs a script on a group of Ray Train's workers, on a cluster of this machine alone. Prints what
rank 0 has printed.

    python ci/under_ray.py train.py --backend fastcomm

backend: of the process group that Ray makes before the script starts; by default torch's own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import runpy

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script")
    parser.add_argument("--backend")
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    trainer = TorchTrainer(
        run_script,
        train_loop_config={"script": os.path.abspath(options.script)},
        torch_config=TorchConfig(backend=options.backend),
        scaling_config=ScalingConfig(num_workers=2),
    )
    print(trainer.fit().return_value, end="")  # rank 0's


def run_script(config: dict[str, str]) -> str:
    """In a worker: what the script prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(config["script"], run_name="__main__")
    return printed.getvalue()


if __name__ == "__main__":
    main()
