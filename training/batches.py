"""The data of a run as its config describes them: both sets, training and validation batches."""

from collections.abc import Iterator

from torch import Tensor

from data.loader import TrainLoader, validation_windows
from data.records import open_data
from training.config import BatchPlan, Config


class Batches:
    def __init__(self, config: Config, plan: BatchPlan, rank: int = 0, device="cpu"):
        """Refuses sets that are too small for one step or one validation."""
        self.config, self.plan, self.rank = config, plan, rank
        directory, ends = config.data.directory, config.data_ends()
        self.train_set = open_data(directory, "train", **ends)
        self.val_set = open_data(directory, "val", **ends)
        self.loader = TrainLoader(
            self.train_set,
            global_batch=plan.sequences,
            length=config.train.length,
            seed=config.train.seed,
            micro_batch=plan.micro_batch,
            rank=rank,
            world_size=plan.world_size,
            device=device,
            shuffle=config.data.shuffle,
        )
        self.validation()

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share of the first eval.tokens of the validation set."""
        return validation_windows(
            self.val_set,
            length=self.config.train.length,
            total_tokens=self.config.eval.tokens,
            batch=self.config.eval.batch or self.config.train.micro_batch,
            rank=self.rank,
            world_size=self.plan.world_size,
        )
