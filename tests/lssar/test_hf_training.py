"""Packed training as the fine-tuning stacks do it: collators, TRL, adapters, checkpointing."""

import warnings

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers", reason="pip install -r requirements-downstream.txt")

from eval_helpers import exported_model, tiny_model
from tiny_models import build, tokens
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

import export_hf
import lssar.hf  # noqa: F401 - registers the mechanisms
from data.tokeniser import get_tokeniser

LENGTHS = (5, 1, 8, 3)
TARGETS = {"llama": None, "exported": ["qkv"]}  # peft knows the models of transformers alone


def made(kind: str):
    return exported_model(tiny_model("lssar")) if kind == "exported" else build(kind, "lssar")


def mean_loss(model, sequences) -> torch.Tensor:
    """Return the mean over all tokens but each sequence's first, of every sequence alone."""
    logits = [model(s[None], use_cache=False).logits[0, :-1] for s in sequences]
    return F.cross_entropy(torch.cat(logits), torch.cat([s[1:] for s in sequences]))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "exported"])
@pytest.mark.parametrize("bounds", [False, True])
def test_a_flattened_batch_has_the_loss_and_gradients_of_its_sequences(kind, bounds):
    model = made(kind)
    sequences = [tokens(1, n)[0] for n in LENGTHS]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=bounds, return_seq_idx=bounds)
    batch = collate([{"input_ids": s.tolist()} for s in sequences])
    assert "attention_mask" not in batch and ("cu_seq_lens_q" in batch) == bounds
    found = []
    for loss in (lambda: model(**batch).loss, lambda: mean_loss(model, sequences)):
        model.zero_grad()
        value = loss()
        value.backward()
        found.append((value, [p.grad.clone() for p in model.parameters()]))
    (got, got_gradients), (expected, gradients) = found
    torch.testing.assert_close(got, expected)
    for one, other in zip(got_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("packing", [True, False], ids=["packing", "padding-free"])
@pytest.mark.parametrize("kind", ["llama", "exported"])
def test_trl_trains_on_what_the_sequences_are_alone(kind, packing, tmp_path):
    trl = pytest.importorskip("trl")
    peft, datasets = pytest.importorskip("peft"), pytest.importorskip("datasets")
    from transformers import AutoTokenizer

    export_hf.write_tokeniser(get_tokeniser("bytes"), tmp_path / "tokeniser")
    model = made(kind)
    sequences = [tokens(1, n)[0] for n in LENGTHS]
    expected = mean_loss(model, sequences).item()
    arguments = trl.SFTConfig(
        str(tmp_path), packing=packing, padding_free=True, max_length=32 if packing else None,
        per_device_train_batch_size=len(LENGTHS), max_steps=1, learning_rate=0.0, logging_steps=1,
        report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
        gradient_checkpointing=True, loss_type="nll",
    )  # fmt: skip
    trainer = trl.SFTTrainer(
        model,
        arguments,
        train_dataset=datasets.Dataset.from_dict({"input_ids": [s.tolist() for s in sequences]}),
        processing_class=AutoTokenizer.from_pretrained(tmp_path / "tokeniser"),
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=TARGETS[kind]),
    )
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, abs=1e-3)


def test_a_merged_adapter_is_loaded_with_the_attention_it_was_trained_with(tmp_path):
    peft = pytest.importorskip("peft")
    model, ids = build("llama", "lssar"), tokens(1, 7)
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    adapted(ids, labels=ids).loss.backward()
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "lssar"
    torch.testing.assert_close(again(ids).logits, merged(ids).logits)


def test_an_adapter_that_is_used_with_another_attention_is_noticed(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2)
    adapted = peft.get_peft_model(build("llama", "lssar"), config)
    adapted.save_pretrained(tmp_path / "peft")
    own = build("llama", "lssar")
    own.add_adapter(peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    own.save_pretrained(tmp_path / "transformers")
    for made_by in ("peft", "transformers"):
        folder = str(tmp_path / made_by)
        loaders = {
            "peft": lambda base, folder=folder: peft.PeftModel.from_pretrained(base, folder),
            "transformers": lambda base, folder=folder: base.load_adapter(folder),
        }
        for loaded_by, load in loaders.items():
            case = f"made by {made_by}, loaded by {loaded_by}"
            with warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                load(build("llama", "lssar"))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                load(build("llama", "sdpa"))
            messages = [str(w.message) for w in said if "adapter" in str(w.message)]
            expected = "an adapter was trained with attention 'lssar' and is used with 'sdpa'"
            assert len(messages) == 1 and messages[0].startswith(expected), case
