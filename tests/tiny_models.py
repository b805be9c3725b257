"""Tiny models of transformers for the tests of `lssar.hf`."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 31
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "head_dim": 6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "use_cache": True,
}


def config_of(kind: str, **changes):
    """Return a small config of this model type; older types name some sizes otherwise."""
    default = AutoConfig.for_model(kind)
    known = set(default.to_dict()) | set(default.attribute_map)
    return AutoConfig.for_model(kind, **{k: v for k, v in (SIZE | changes).items() if k in known})


def build(kind: str, attention: str | None, sharp: float = 8, **changes):
    """Return a random model, sharp enough that the mechanism and the context matter."""
    torch.manual_seed(0)
    config = config_of(kind, **changes)
    options = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(config, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(sharp)
    return model.eval()


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def padded(sequences: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_side=side)
    ones = [torch.ones_like(s) for s in sequences]
    return ids, torch.nn.utils.rnn.pad_sequence(ones, batch_first=True, padding_side=side)


def pack(sequences: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one row of all sequences (1, n each), and the position of each token in its own."""
    place = [torch.arange(s.shape[1])[None] for s in sequences]
    return torch.cat(sequences, dim=1), torch.cat(place, dim=1)
