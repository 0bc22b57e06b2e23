"""Makes the base pack of a run, once, for explorers that are to hold no full-precision base."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from actors.cluster.progress_notes import noted
from actors.cluster.rpc import Callee
from solrl_ray import models
from solrl_ray.common.doing import doing
from solrl_ray.common.files import replace_file
from solrl_ray.config.schema import Config
from solrl_ray.weight_sync import base_pack
from solrl_ray.weight_sync.container import Unusable

FILE = "base/base.safetensors"


class BasePacker(Callee):
    """Lives until its one answer is in the object store, where every node's explorers read it in one copy."""

    @noted
    def pack(self, config: Config, folder: Path) -> np.ndarray:
        """The pack in the run folder, if it is whole and of this configuration; else it is made and written there."""
        file = folder / FILE
        if file.is_file():
            content = np.fromfile(file, np.uint8)
            try:
                base_pack.read(content, config)
                return content
            except Unusable:  # cut off or of an earlier attempt: made again
                pass
        # All explorers wait for it; other workers only load meanwhile.
        threads = os.cpu_count() or 1
        torch.set_num_threads(1)  # of each of these
        transformer = models.load(config.model, "cpu", components={"transformer"}).transformer
        with doing("making the base pack"):
            made = base_pack.write(transformer, config, threads=threads)
        with doing("writing the base pack"):
            replace_file(file, made, synced=False)  # each reader verifies it
        return np.frombuffer(made, np.uint8)
