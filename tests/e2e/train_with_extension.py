"""`s2rl train` with another worker extension: python train_with_extension.py EXTENSION CONFIG [KEY=VALUE ...]"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from s2rl import Trainer, load_config
from s2rl.cli.output import print_problem
from s2rl.errors import S2rlError
from s2rl.trainer.placement import RayPlacement


class Placement(RayPlacement):
    worker_options: ClassVar[dict[str, Any]] = {"extension_cls": f"e2e_extensions.{sys.argv[1]}"}


if __name__ == "__main__":
    try:
        Trainer(load_config(sys.argv[2], sys.argv[3:]), placement=Placement).fit()
    except S2rlError as error:
        print_problem(error)
        sys.exit(error.exit_code)
