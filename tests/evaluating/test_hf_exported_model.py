"""The exported model as transformers' own are: losses, packing, embeddings, resizing, adapters."""

import json

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")

from eval_helpers import exported_model, tiny_model, write_checkpoint
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, StaticCache

import export_hf
from evaluating.hf_model import LssarForCausalLM, LssarModel


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 257, shape)


@pytest.fixture
def model() -> LssarForCausalLM:
    return exported_model(tiny_model("lssar"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Export a run that kept its command."""
    run = tmp_path_factory.mktemp("runs") / "my-run"
    command = ["/some/where/train.py", "configs/nano-lssar.toml"]
    command += ["--data.directory=/some/where/my-text", "--log.directory=~/some/where/runs"]
    about = {"command": command, "revision": "abc123"}
    write_checkpoint(
        run / "checkpoints/step-00000007", tiny_model("lssar"), run="my-run", tokeniser="bytes",
        val_loss=1.7345, seed=3,
    )  # fmt: skip
    (run / "run.json").write_text(json.dumps(about))
    settings = "[data]\ndirectory = '/some/where/my-text'\n[train]\nbatch_tokens = 4096\n"
    (run / "config.toml").write_text(settings)
    out = run.parent / "out"
    export_hf.main([str(run), str(out)])
    return out


def load(auto, folder, **options):
    return auto.from_pretrained(folder, trust_remote_code=True, **options).eval()


# --- losses -------------------------------------------------------------------------------------


def test_the_loss_is_divided_by_the_items_of_the_whole_step(model):
    """As gradient accumulation needs it: the parts of a step add up to the step."""
    ids = random_ids(4, 11)
    labels = ids.clone()
    labels[0, 3:], labels[2, 8:] = -100, -100
    items = (labels[:, 1:] != -100).sum()
    whole = model(ids, labels=labels).loss
    for size in (1, 2, 4):
        parts = zip(ids.split(size), labels.split(size), strict=True)
        losses = [model(i, labels=j, num_items_in_batch=items).loss for i, j in parts]
        torch.testing.assert_close(sum(losses), whole)
    logits = model(ids).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(whole, expected)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, expected)


def test_a_trainer_reports_one_loss_whatever_the_accumulation(model, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row, "labels": row} for row in random_ids(8, 9)]
    found = []
    for steps in (1, 2, 4):
        arguments = TrainingArguments(
            str(tmp_path / str(steps)), per_device_train_batch_size=8 // steps, max_steps=1,
            gradient_accumulation_steps=steps, report_to=[], use_cpu=True, learning_rate=0.0,
            logging_steps=1, save_strategy="no", disable_tqdm=True, seed=1,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        found.append(trainer.state.log_history[0]["loss"])
    expected = model.eval()(torch.stack([r["input_ids"] for r in rows]), labels=torch.stack(
        [r["labels"] for r in rows])).loss.item()  # fmt: skip
    assert found == pytest.approx([expected] * 3, abs=1e-3)


# --- packing and caches -------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", ["lssar", "softmax", "relu-shen"])
def test_positions_that_start_again_begin_another_sequence(mechanism):
    model = exported_model(tiny_model(mechanism))
    rows = [random_ids(1, n) for n in (5, 1, 8)]
    ids = torch.cat(rows, dim=1)
    place = torch.cat([torch.arange(r.shape[1]) for r in rows])[None]
    with torch.no_grad():
        alone = torch.cat([model(r).logits for r in rows], dim=1)
        bounds = {"cu_seq_lens_q": torch.tensor([0, 5, 6, 14], dtype=torch.int32)}
        given = {"position_ids": place}
        kinds = ({}, {"use_cache": True}, {"attention_mask": torch.ones_like(ids)})
        for options in (bounds, *(given | kind for kind in kinds)):
            packed = model(ids, **options).logits
            torch.testing.assert_close(packed, alone, rtol=1e-3, atol=1e-3)
        # A cache goes on with the last sequence.
        first = model(ids[:, :10], position_ids=place[:, :10], use_cache=True).past_key_values
        rest = model(ids[:, 10:], position_ids=place[:, 10:], past_key_values=first).logits
        torch.testing.assert_close(rest, alone[:, 10:], rtol=1e-3, atol=1e-3)


def test_packed_rows_may_be_padded(model):
    rows = [random_ids(1, n) for n in (4, 3)]
    ids = F.pad(torch.cat(rows, dim=1), (0, 2))
    mask = torch.tensor([[1] * 7 + [0] * 2])
    place = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 0]])
    with torch.no_grad():
        alone = torch.cat([model(r).logits for r in rows], dim=1)
        packed = model(ids, attention_mask=mask, position_ids=place).logits[:, :7]
    torch.testing.assert_close(packed, alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_a_compiled_graph_has_no_branch_on_a_mask(model, side):
    """Padding, packing, a static cache: one graph each, for several lengths."""
    graph = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for lengths in ((9, 4, 7), (6, 6, 2), (11, 1, 3)):
        rows = [random_ids(n) for n in lengths]
        pad = torch.nn.utils.rnn.pad_sequence
        ids = pad(rows, batch_first=True, padding_side=side)
        ones = [torch.ones_like(r) for r in rows]
        mask = pad(ones, batch_first=True, padding_side=side)
        with torch.no_grad():
            got = graph(ids, attention_mask=mask).logits
            expected = model(ids, attention_mask=mask).logits
        torch.testing.assert_close(got[mask == 1], expected[mask == 1], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_compiled_graph_takes_a_static_cache(model):
    graph, ids = torch.compile(model, backend="eager", fullgraph=True), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        cache = StaticCache(model.config, max_cache_len=12)
        first = graph(ids[:, :6], attention_mask=mask[:, :6], past_key_values=cache).logits
        rest = [
            graph(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache).logits
            for i in range(6, 9)
        ]
    got = torch.cat((first, *rest), dim=1)
    torch.testing.assert_close(got[mask == 1], expected[mask == 1], rtol=1e-3, atol=1e-3)


# --- what tools expect of a model ---------------------------------------------------------------


def test_embeddings_in_hidden_states_out(model):
    ids = random_ids(2, 7)
    outputs = model(ids, output_hidden_states=True)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids))
    assert torch.equal(embedded.logits, outputs.logits)
    states = outputs.hidden_states
    assert [s.shape for s in states] == [(2, 7, 24)] * 3
    assert torch.equal(states[0], model.model.gpt.embedding(ids))
    assert torch.equal(states[-1], model.model.gpt.hidden(ids))
    assert model(ids).hidden_states is None
    assert torch.equal(model(ids, return_dict=False)[0], outputs.logits)
    with pytest.raises(ValueError, match="give one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=states[0])
    with pytest.raises(ValueError, match="output_attentions: the weights are never made"):
        model(ids, output_attentions=True)


def test_checkpointing_changes_no_gradient(model):
    ids = random_ids(2, 9)

    def gradients():
        model.zero_grad()
        model(ids, labels=ids, use_cache=True).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters()}

    expected = gradients()
    model.train().gradient_checkpointing_enable()
    blocks, calls = model.model.gpt.blocks, []
    blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for name, gradient in gradients().items():
        torch.testing.assert_close(gradient, expected[name])
    assert len(calls) == 2  # forward, and again in backward
    model.gradient_checkpointing_disable()
    gradients()
    assert len(calls) == 3


@pytest.mark.parametrize("rows", [257, 320])
def test_a_resized_vocabulary_is_saved_and_loaded(tmp_path, rows):
    model, ids = exported_model(tiny_model("lssar", vocab_rows=rows)), random_ids(1, 9)
    before = model(ids).logits
    for size, multiple, table in ((259, None, 259), (300, 64, 320), (257, None, 257)):
        model.resize_token_embeddings(size, pad_to_multiple_of=multiple)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        model.save_pretrained(tmp_path / str(size))
        again = LssarForCausalLM.from_pretrained(tmp_path / str(size))
        assert again.get_input_embeddings().num_embeddings == table
        assert again.config.vocab_size == size
        logits = again(ids).logits
        assert logits.shape[-1] == size
        assert torch.equal(logits, model(ids).logits)
        torch.testing.assert_close(logits[..., :257], before)
        model(torch.tensor([[size - 1]]), labels=torch.tensor([[size - 1]]))


def test_auto_classes_find_their_model(folder):
    ids = random_ids(1, 6)
    whole, base = load(AutoModelForCausalLM, folder), load(AutoModel, folder)
    assert type(base).__name__ == LssarModel.__name__
    hidden = base(ids).last_hidden_state
    torch.testing.assert_close(whole.lm_head(hidden)[..., :257], whole(ids).logits)
    assert whole.accepts_loss_kwargs
    settings = whole.generation_config
    assert (settings.eos_token_id, settings.pad_token_id, settings.do_sample) == (256, 256, False)


def test_an_adapter_takes_the_targets_that_are_named(folder):
    """The default is peft's own table, which no model outside of transformers is in."""
    peft = pytest.importorskip("peft")
    model, ids = load(AutoModelForCausalLM, folder), random_ids(1, 6)
    with pytest.raises(ValueError, match="target_modules"):
        peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    before = model(ids).logits
    options = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["qkv"]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
    trained = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 4 and all(".attention.qkv.lora_" in n for n in trained)
    torch.testing.assert_close(adapted(ids).logits, before)
    adapted(ids, labels=ids).loss.backward()


def test_the_card_has_the_numbers_and_the_command(folder):
    card = (folder / "README.md").read_text(encoding="utf-8")
    head, body = card.removeprefix("---\n").split("---\n", 1)
    assert "library_name: transformers" in head and "license: mit" in head
    for text in ("LSSAR p=15", "1.7345", "step 7", "seed 3", "abc123", "length 16"):
        assert text in body, text
    for text in (
        "| data | my-text |",
        "| tokens | 28,672 |",
        "arXiv 2501.13428",
        "@inproceedings{",
        'LoraConfig(target_modules=["qkv"], ...)',  # peft has no default for it: see above
    ):
        assert text in body, text
    command = (
        "python train.py configs/nano-lssar.toml --data.directory=my-text --log.directory=runs"
    )
    assert command in body
    assert "hf upload" in body and "some/where" not in card


def test_the_config_has_the_names_that_other_tools_read(folder):
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert config.num_key_value_heads == config.num_attention_heads == config.heads
    assert config.max_position_embeddings == config.train_length == 16
