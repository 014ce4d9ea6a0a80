"""Small models run faster, and alike on every machine, on one thread."""

from pathlib import Path

import numpy as np
import pytest
import torch

from training.lm.model import LlamaShape
from training.lm.trainer import LMTrainer, LMTrainingConfig


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def toy_target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("toy")
    generator = np.random.default_rng(0)
    (folder / "train").mkdir()
    (folder / "heldout").mkdir()
    nouns = [
        "config",
        "value",
        "index",
        "result",
        "buffer",
        "token",
        "state",
        "queue",
        "item",
        "path",
    ]
    for index in range(60):
        lines = []
        for _ in range(10):
            noun, other = generator.choice(nouns, 2)
            lines.append(
                f"def get_{noun}(self, {other}):\n    if self.{noun} is None:\n        return"
                f" {other}\n    return self.{noun}[{other}]\n\n"
            )
        split = "heldout" if index % 10 == 0 else "train"
        (folder / split / f"{index}.py").write_text("".join(lines))
    shape = LlamaShape(300, 64, 2, 4, 2, 16, 128, 128)
    config = LMTrainingConfig(
        data=(folder / "train",),
        out=folder / "target",
        shape=shape,
        steps=150,
        warmup=10,
        batch=8,
        micro_batch=8,
        lr=1e-2,
        compile=False,
    )
    LMTrainer(config).run()
    return folder, folder / "target"
