"""The data of a run as its config describes them: both sets, training and validation batches."""

from collections.abc import Iterator

from torch import Tensor

from data.loader import TrainLoader, validation_windows
from data.records import open_data
from training.config import BatchPlan, Config


class Batches:
    def __init__(self, config: Config, plan: BatchPlan, rank: int = 0, device="cpu"):
        """Refuses sets that are too small for one step or one validation."""
        self.config, t = config, config.train
        directory, ends = config.data.directory, config.data_ends()
        self.train_set = open_data(directory, "train", **ends)
        self.val_set = open_data(directory, "val", **ends)
        self.share = {"length": t.length, "rank": rank, "world_size": plan.world_size}
        sizes = {"global_batch": plan.sequences, "micro_batch": plan.micro_batch}
        order = {"seed": t.seed, "shuffle": config.data.shuffle}
        self.loader = TrainLoader(self.train_set, **sizes, **order, **self.share, device=device)
        self.validation()

    def validation(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's share of the first eval.tokens of the validation set."""
        tokens, batch = self.config.eval.tokens, self.config.eval.batch
        batch = batch or self.config.train.micro_batch
        return validation_windows(self.val_set, total_tokens=tokens, batch=batch, **self.share)
