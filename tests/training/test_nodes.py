"""Two machines, which are two torchrun agents over loopback: one is killed and comes back."""

from train_helpers import arguments, losses, on_two_nodes, train_here, weights

from training.run_log import read_metrics


def test_a_killed_node_comes_back_and_the_run_continues_to_the_same_bits(corpus, tmp_path):
    """The node that stayed waits for it; both continue from the last checkpoint."""
    more = ("--train.micro_batch=4", "--train.steps=60", "--device=cpu", "--resume")
    both, one = tmp_path / "both/nano-lssar", tmp_path / "one/nano-lssar"

    def well_under_way():
        return both.exists() and any(m["step"] == 12 for m in read_metrics(both))

    command = ("train.py", *arguments(corpus, tmp_path / "both", *more))
    shown = on_two_nodes(tmp_path / "log", *command, kill=1, when=well_under_way)
    assert "lost contact with another rank" in shown
    # Two halves of a batch, on two nodes or one after the other, have the same sum; the validation
    # set is summed in another order.
    assert train_here(*arguments(corpus, tmp_path / "one", *more)) == 0
    assert [m[:2] for m in losses(both)] == [m[:2] for m in losses(one)]
    assert all(weights(one)[name].equal(w) for name, w in weights(both).items())
