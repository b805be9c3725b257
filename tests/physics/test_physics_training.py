"""Orbits go through the project's own model, loader, training and checkpoints."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import cases
from safetensors.torch import load_file
from train_helpers import ROOT, losses, run_process, weights

from data.loader import validation_batches
from lssar.errors import UserError
from lssar.mechanisms import get_mechanism
from model import ModelConfig, preset
from physics import force
from physics import train as orbits
from physics.config import OrbitConfig
from physics.loader import OrbitBatches, RecordLoader, open_records
from physics.model import OrbitModel, OrbitModelConfig, labelled_mse
from physics.simulate import main as simulate
from training.batch_plan import batch_plan
from training.checkpoint import WEIGHTS, Store, load_model, read_trainer, save_model
from training.config import load_config

ENDS = {"vocab_size": 53, "vocab_rows": 53, "channels": 2, "learned_positions": 24}
TINY = (
    *("--model.layers=2", "--model.heads=2", "--model.width=32", "--model.vocab_size=53"),
    *("--model.vocab_rows=53", "--orbits.learned_positions=24"),
    *("--train.length=24", "--train.warmup=2"),
    *("--train.batch_tokens=192", "--train.micro_batch=4", "--train.steps=12", "--eval.interval=4"),
    *("--eval.batch=3", "--checkpoint.interval=4", "--log.interval=1"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    here = tmp_path_factory.mktemp("physics")
    shape = ("--points", "25", "--bins", "50")
    sizes = ("--sequences", "150", "--val-sequences", "20", "--shard-sequences", "60")
    simulate(["orbits", *shape, *sizes, "--workers", "0", "--out", str(here / "orbits")])
    sizes = ("--labelled", "20", "--probed", "6", "--held-out", "4", "--unit", "deviation")
    simulate(["forces", *shape, *sizes, "--out", str(here / "forces")])
    simulate(["planets", *shape, "--out", str(here / "planets")])
    return here


def arguments(data, runs, *more, config="nano", attention="lssar"):
    places = (f"--data.directory={data}/orbits", f"--log.directory={runs}", "--eval.tokens=480")
    names = (f"--attention.name={attention}", f"--log.name=physics-{config}-{attention}")
    return [str(ROOT / f"configs/physics-{config}.toml"), *TINY, *places, *names, *more]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    assert orbits.main([*arguments(data, runs)]) == 0
    return runs / "physics-nano-lssar"


def small(attention="softmax", **changes):
    torch.manual_seed(0)
    mechanism = get_mechanism(attention)
    shape = {"layers": 2, "heads": 2, "width": 32, "positions": "none", **ENDS, **changes}
    return OrbitModel(OrbitModelConfig(**shape, attention=mechanism))


# --- the model -----------------------------------------------------------------------------------


def test_the_109m_model_has_exactly_the_parameters_of_the_source():
    config = load_config(ROOT / "configs/physics-109m.toml", kind=OrbitConfig)
    with torch.device("meta"):
        assert OrbitModel(config.model_config()).parameter_count() == 108_530_870
    t, plan = config.train, batch_plan(config, world_size=8)
    assert (plan.sequences, t.length, t.lr, t.schedule) == (512, 999, 6e-4, "constant")
    assert (t.beta1, t.beta2, t.weight_decay, t.clip) == (0.9, 0.95, 0.1, 1.0)
    assert t.steps * 512 <= 10_000_000 < (t.steps + 1) * 512  # one epoch
    for name, outputs, lr, sequences in (("magnitude", 1, 6e-4, 64), ("vector", 2, 2e-4, 8)):
        tuned = load_config(ROOT / f"configs/physics-109m-{name}.toml", kind=OrbitConfig)
        assert (tuned.orbits.outputs, tuned.train.lr, tuned.train.steps) == (outputs, lr, 10_000)
        assert batch_plan(tuned).sequences == sequences


def test_the_loss_is_the_mean_cross_entropy_of_both_coordinates():
    """Against a model spelled out: two tables, joined, positions added, one biased head each."""
    for attention in cases(["softmax", "lssar"]):
        model = small(attention)
        torch.nn.init.normal_(model.head.bias)
        tokens = torch.randint(0, 53, (3, 11, 2))
        targets = torch.randint(0, 53, (3, 11, 2))
        first, second = model.embedding.weight.split(53)
        x = torch.cat((F.embedding(tokens[..., 0], first), F.embedding(tokens[..., 1], second)), -1)
        x = F.linear(x, model.join.weight, model.join.bias) + model.positions.weight[:11]
        for block in model.blocks:
            x = block(x)
        logits = model.head(model.norm(x)).view(3, 11, 2, 53)
        expected = F.cross_entropy(logits.flatten(0, 2), targets.flatten())
        torch.testing.assert_close(model(tokens), logits)
        torch.testing.assert_close(model(tokens, targets), expected)
        torch.testing.assert_close(model.token_losses(tokens, targets).mean(), expected)
        model(tokens, targets).backward()
        got = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        expected.backward()
        for mine, p in zip(got, model.parameters(), strict=True):
            torch.testing.assert_close(mine, p.grad, atol=1e-6, rtol=1e-4)


def test_learned_positions_replace_rope_and_end_where_the_table_ends():
    model = small()
    tokens = torch.randint(0, 53, (1, 24, 2))
    with torch.no_grad():
        model.positions.weight.zero_()
        constant = tokens[:, :1].expand(-1, 24, -1)
        hidden = model.hidden(constant)  # nothing else tells positions apart
    torch.testing.assert_close(hidden, hidden[:, :1].expand_as(hidden))
    with pytest.raises(UserError, match="25 is longer than the model's table of 24"):
        model.hidden(torch.zeros(1, 25, 2, dtype=torch.long))


def test_only_labelled_points_count_in_the_squared_error():
    predicted = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    targets = torch.tensor([[0.0, math.nan], [math.nan, 1.0]])
    loss = labelled_mse(predicted, targets)
    loss.backward()
    assert loss.item() == (1 + 9) / 2
    assert predicted.grad.tolist() == [[1.0, 0.0], [0.0, 3.0]]
    assert labelled_mse(predicted, torch.full((2, 2), math.nan)).item() == 0


def test_a_text_models_description_says_nothing_of_other_ends():
    """Identities of existing checkpoints are digests of this."""
    known = {"layers", "heads", "width", "vocab_size", "vocab_rows", "attention", "interpolation"}
    assert set(preset("nano").to_dict()) == known
    config = small(outputs=2).config
    plain = json.loads(json.dumps(config.to_dict()))
    assert OrbitModelConfig.from_dict(plain) == config
    with pytest.raises(UserError, match="'learned_positions' is no setting of ModelConfig"):
        ModelConfig.from_dict(plain)


def test_impossible_ends_are_refused():
    examples = [
        ({"channels": 0}, "channels = 0"),
        ({"learned_positions": -1}, "learned_positions = -1"),
        ({"outputs": -2}, "outputs = -2"),
        ({"positions": "rope"}, "positions = 'rope'"),
        ({"documents": True}, "documents = True"),
        ({"interpolation": 2.0}, "interpolation = 2.0"),
    ]
    for change, part in cases(examples):
        described = small().config.to_dict() | change
        with pytest.raises(UserError, match=part):
            OrbitModelConfig.from_dict(described)


def test_a_sequence_longer_than_the_table_is_refused_by_the_config(tmp_path):
    with pytest.raises(UserError, match=r"learned_positions = 24 .*train.length = 25"):
        load_config(
            ROOT / "configs/physics-nano.toml",
            ["--orbits.learned_positions=24", "--train.length=25", "--train.batch_tokens=400"],
            kind=OrbitConfig,
        )


# --- the data ------------------------------------------------------------------------------------


def test_an_epoch_visits_every_record_once_whatever_the_division(data):
    records = open_records(data / "orbits", "train", vocab_size=53, channels=2, outputs=0)
    assert records.count == 150
    whole = records.read(np.arange(150) * records.stride)
    seen = []
    for step in range(25):
        options = {"global_batch": 6, "seed": 1}
        one = next(iter(RecordLoader(records, micro_batch=6, **options).micro_batches(step)))
        two = [
            next(
                iter(
                    RecordLoader(
                        records, micro_batch=3, rank=r, world_size=2, **options
                    ).micro_batches(step)
                )
            )
            for r in range(2)
        ]
        assert torch.equal(one[0], torch.cat([x for x, _ in two]))
        assert torch.equal(one[0][:, 1:], one[1][:, :-1])
        seen.append(torch.cat((one[0], one[1][:, -1:]), dim=1))
    assert sorted(map(str, torch.cat(seen).tolist())) == sorted(map(str, whole.tolist()))


def test_labels_stay_with_their_sequences(data):
    ends = {"vocab_size": 53, "channels": 2, "outputs": 1}
    records = open_records(data / "forces", "train", **ends)
    labels = np.load(data / "forces/labels_train.npy")
    plain = open_records(data / "forces", "train", **ends)
    loader = RecordLoader(records, global_batch=5, micro_batch=5, seed=4)
    inputs, targets = next(iter(loader.micro_batches(3)))
    rows = loader.offsets(3) // plain.stride
    assert np.array_equal(targets.numpy(), labels[rows], equal_nan=True)
    assert torch.equal(inputs, plain.read(rows * plain.stride)[..., :2].long())
    assert inputs.dtype == torch.int64


def test_validation_takes_whole_records(data):
    records = open_records(data / "orbits", "val", vocab_size=53, channels=2, outputs=0)
    parts = list(validation_batches(records, total_tokens=24 * 7, batch=3))
    assert [len(x) for x, _ in parts] == [3, 3, 1]
    assert torch.equal(
        torch.cat([y for _, y in parts]), records.read(np.arange(7) * records.stride)[:, 1:]
    )
    with pytest.raises(UserError, match="too few"):
        validation_batches(records, total_tokens=24 * 21, batch=3)


@pytest.mark.parametrize(
    ("folder", "change", "part"),
    [
        ("orbits", {"channels": 3}, "2 channels"),
        ("orbits", {"outputs": 1}, "0 outputs"),
        ("forces", {}, "1 outputs"),
        ("orbits", {"vocab_size": 20}, "vocabulary of 20"),
        (".", {}, "records.json"),
    ],
)
def test_data_that_the_model_cannot_read_are_refused(data, folder, change, part):
    ends = {"vocab_size": 53, "channels": 2, "outputs": 0} | change
    with pytest.raises(UserError, match=part):
        open_records(data / folder, "train", **ends)


def test_another_length_than_the_records_is_refused(data, tmp_path):
    other = arguments(data, tmp_path, "--train.length=20", "--train.batch_tokens=160")
    config = load_config(other[0], [*other[1:], "--eval.tokens=400"], kind=OrbitConfig)
    with pytest.raises(UserError, match=r"25 points.*not 20"):
        OrbitBatches(config, batch_plan(config))


# --- training ------------------------------------------------------------------------------------


def test_training_on_orbits_lowers_the_loss(trained):
    measured = [loss for _, loss, _ in losses(trained) if loss is not None]
    assert np.mean(measured[-3:]) < np.mean(measured[:3])
    model, info = load_model(trained, OrbitModel)
    assert (model.config.channels, model.config.learned_positions, info.train_length) == (2, 24, 24)


def test_an_interrupted_run_on_orbits_resumes_bit_for_bit(data, trained, tmp_path):
    assert orbits.main([*arguments(data, tmp_path, "--checkpoint.keep=9")]) == 0
    run = tmp_path / "physics-nano-lssar"
    store = Store(run)
    for path in store.candidates():  # as if it had been killed after step 8
        if path.name != "step-00000008":
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    (store.directory / "latest").write_text("step-00000008\n")
    assert orbits.main([*arguments(data, tmp_path, "--resume")]) == 0
    assert losses(run) == losses(trained)
    whole, resumed = weights(trained), weights(run)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.fixture(scope="module")
def one_step(data, trained, tmp_path_factory):
    """Return the gradient of one step on 8 sequences with 12 or 2 labels, by how they are split."""
    config = str(ROOT / "configs/physics-nano-magnitude.toml")
    places = (f"--data.directory={data}/forces", f"--train.init_from={trained}")
    still = ("--train.lr=1e-30", "--train.weight_decay=0", "--train.clip=0", "--train.steps=1")
    once = ("--train.warmup=0", "--checkpoint.interval=1", "--eval.interval=1", "--eval.tokens=96")

    def gradient(micro_batch, processes=0):
        runs = tmp_path_factory.mktemp("split")
        split = (f"--train.micro_batch={micro_batch}", f"--log.directory={runs}")
        given = (config, *TINY, *places, *still, *once, *split, "--log.name=x", "--attention.p=15")
        given += ("--attention.name=lssar", "--train.batch_tokens=192", "--device", "cpu")
        if processes:
            ended = run_process(*given, processes=processes, script="physics/train.py")
            assert ended.returncode == 0, ended.stderr
        else:
            assert orbits.main([*given]) == 0
        (path,) = Store(runs / "x").candidates()
        state = read_trainer(path)["optimiser"]["state"]
        # After one step Adam's first moment is (1 - beta1) times the gradient.
        moments = [state[i]["exp_avg"].flatten() for i in sorted(state)]
        return torch.cat(moments) / 0.1, losses(runs / "x"), load_model(path, OrbitModel)[0]

    return gradient


def test_the_loss_of_a_step_is_the_mean_over_its_labels_however_it_is_split(data, one_step):
    whole, reported, model = one_step(8)
    records = open_records(data / "forces", "train", vocab_size=53, channels=2, outputs=1)
    loader = RecordLoader(records, global_batch=8, micro_batch=8, seed=0)
    ((inputs, targets),) = loader.micro_batches(0)
    counts = (~targets.isnan()).sum((1, 2)).tolist()
    assert set(counts) == {2, 12}
    with torch.no_grad():
        errors = (model(inputs) - targets).square()
    assert reported[0][1] == pytest.approx(errors[~targets.isnan()].mean().item(), rel=1e-5)
    for micro_batch, processes in ((2, 0), (1, 0), (1, 2)):
        split, measured, _ = one_step(micro_batch, processes)
        name = f"micro-batches of {micro_batch} on {processes or 1} processes"
        assert measured[0][1] == pytest.approx(reported[0][1], rel=1e-5), name
        assert measured[1][2] == pytest.approx(reported[1][2], rel=1e-5), name  # validation
        torch.testing.assert_close(split, whole, atol=1e-6, rtol=1e-5, msg=name)


def test_a_micro_batch_without_labels_has_no_say(data, tmp_path):
    """Records with 1, 0 and 3 labels, whose mean losses are 1, 0 and 9."""
    for file in (data / "forces").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    labels = np.full((30, 24, 1), np.nan, np.float32)
    labels[::3, 5], labels[2::3, 5:8] = 1.0, 1.0
    np.save(tmp_path / "labels_train.npy", labels)
    records = open_records(tmp_path, "train", vocab_size=53, channels=2, outputs=1)
    options = {"global_batch": 6, "seed": 0, "shuffle": False}
    for world_size in (1, 2, 3):
        found = [
            RecordLoader(records, micro_batch=1, rank=r, world_size=world_size, **options)
            for r in range(world_size)
        ]
        means = [[1.0, 0.0, 9.0, 1.0, 0.0, 9.0][r::world_size] for r in range(world_size)]
        parts = [
            sum(m / d for m, d in zip(mean, loader.divisors(0), strict=True))
            for mean, loader in zip(means, found, strict=True)
        ]
        assert np.mean(parts) == pytest.approx((1 + 3 * 9 + 1 + 3 * 9) / 8)


def test_labels_that_cannot_be_averaged_are_refused(data, tmp_path):
    for file in (data / "forces").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    labels = np.load(data / "forces/labels_val.npy")
    np.save(tmp_path / "labels_val.npy", np.where(labels > 0, np.inf, labels))
    with pytest.raises(UserError, match="infinite labels"):
        open_records(tmp_path, "val", vocab_size=53, channels=2, outputs=1)
    np.save(tmp_path / "labels_val.npy", np.full_like(labels, np.nan))
    path = str(ROOT / "configs/physics-nano-magnitude.toml")
    sizes = (f"--data.directory={tmp_path}", "--eval.tokens=48", "--train.batch_tokens=96")
    config = load_config(path, [*TINY, *sizes], kind=OrbitConfig)
    with pytest.raises(UserError, match=r"first 2 validation records .* no label"):
        OrbitBatches(config, batch_plan(config))


@pytest.fixture(scope="module")
def tuned(data, trained):
    for task, folder in (("magnitude", "forces"), ("vector", "planets")):
        places = (f"--data.directory={data}/{folder}", f"--log.directory={trained.parent}")
        config = str(ROOT / f"configs/physics-nano-{task}.toml")
        sizes = ("--eval.tokens=96", "--train.batch_tokens=96")
        code = force.main([task, str(trained), "--config", config, *TINY, *places, *sizes])
        assert code == 0
    return trained.parent


def test_fine_tuning_starts_from_the_pretrained_weights_with_a_new_head(data, trained, tmp_path):
    config = str(ROOT / "configs/physics-nano-magnitude.toml")
    places = (f"--data.directory={data}/forces", f"--log.directory={tmp_path}")
    still = ("--train.lr=1e-30", "--train.weight_decay=0", "--eval.tokens=96")
    sizes = ("--train.batch_tokens=96", "--train.steps=1", "--train.warmup=0")
    options = [*TINY, *places, *still, *sizes, "--checkpoint.interval=1", "--eval.interval=1"]
    assert force.main(["magnitude", str(trained), "--config", config, *options]) == 0
    before, after = weights(trained), weights(tmp_path / "physics-nano-lssar-magnitude")
    assert after["head.weight"].shape == (1, 32)
    for name in before.keys() - {"head.weight", "head.bias"}:
        assert torch.equal(before[name], after[name]), name


@pytest.mark.parametrize(
    ("task", "folder", "shape"),
    [("magnitude", "forces", (30, 12, 1)), ("vector", "planets", (8, 12, 2))],
)
def test_predictions_are_the_selected_checkpoints_in_physical_units(
    data, tuned, task, folder, shape
):
    run = tuned / f"physics-nano-lssar-{task}"
    best = Store(run).best()
    recorded = [(loss, step) for step, _, loss in losses(run) if loss is not None]
    assert best.name == f"step-{min(recorded)[1]:08d}"
    model, _ = load_model(best, OrbitModel)
    assert model.config.attention.name == "lssar"
    records = open_records(data / folder, "train", vocab_size=53, channels=2, outputs=shape[2])
    inputs, _ = records.split(records.read(np.arange(shape[0]) * records.stride))
    unit = np.array(json.loads((data / folder / "records.json").read_text())["unit"])
    with torch.no_grad():
        expected = model(inputs)[:, 1::2].numpy()
    found = np.load(run / "forces.npy")
    assert found.shape == shape
    np.testing.assert_allclose(found / unit.reshape(-1, 1, 1), expected, rtol=1e-4, atol=1e-6)


def test_a_finished_fine_tuning_is_not_done_again(data, trained, tuned):
    run = tuned / "physics-nano-lssar-magnitude"
    before = load_file(Store(run).best() / WEIGHTS)
    places = (f"--data.directory={data}/forces", f"--log.directory={tuned}", "--eval.tokens=96")
    config = str(ROOT / "configs/physics-nano-magnitude.toml")
    options = [*TINY, *places, "--train.batch_tokens=96"]
    assert force.main(["magnitude", str(trained), "--config", config, *options]) == 0
    after = load_file(Store(run).best() / WEIGHTS)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_fine_tuned_from_other_weights_is_not_taken_for_this_one(data, trained, tmp_path):
    run, runs = tmp_path / "mine", tmp_path / "runs"
    run.mkdir()
    before, info = load_model(trained, OrbitModel)
    save_model(run, before, info)
    config = str(ROOT / "configs/physics-nano-magnitude.toml")
    places = (f"--data.directory={data}/forces", f"--log.directory={runs}", "--eval.tokens=96")
    short = ("--train.batch_tokens=96", "--train.steps=2", "--train.warmup=0", "--eval.interval=1")
    command = ["magnitude", str(run), "--config", config, *TINY, *places, *short]
    assert force.main(command) == 0
    tuned = runs / "physics-nano-lssar-magnitude"
    first = force.origin(tuned)
    assert None not in first.values()
    assert force.main(command) == 0
    assert force.origin(tuned) == first
    with torch.no_grad():
        before.embedding.weight[0, 0] += 1
    save_model(run, before, info)
    with pytest.raises(UserError, match=r"fine-tuned from other weights than .* has now; delete"):
        force.main(command)


def test_a_task_with_the_wrong_config_is_one_line(trained):
    config = str(ROOT / "configs/physics-nano-vector.toml")
    with pytest.raises(UserError, match="outputs of the task 'magnitude'"):
        force.main(["magnitude", str(trained), "--config", config])
    with pytest.raises(UserError, match="no checkpoint at"):
        force.main(["vector", str(Path(trained) / "nowhere")])
